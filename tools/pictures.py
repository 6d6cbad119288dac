"""Make the pictures in docs/pictures: ``python tools/pictures.py RUN …`` (or `make pictures`).

``rooms.svg`` shows the rooms of rocm_ext in the order that [tool.importlinter] of pyproject.toml
gives them, as wide as their code is long. ``report.png`` and ``live.png`` show the pages of the runs
RUN, photographed by Chromium. Where there is no Chromium, only the rooms are drawn.
"""

import argparse
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomllib

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
VIEW = {"width": 1280, "height": 860}
ROW, GAP, LETTER = 34, 6, 7.4  # px: height of a room, space between two, width of a letter
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1c2024 }
rect { fill: #e8eef4; stroke: #9fb3c8 } .lines { fill: #5c6570 }
@media (prefers-color-scheme: dark) {
  rect { fill: #223041; stroke: #4a6078 } text { fill: #e8eaed } .lines { fill: #a3acb5 }
}
"""


def main() -> int:
    """Write the pictures that can be made here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="output folders of runs")
    runs = parser.parse_args().runs
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "rooms.svg").write_text(rooms())
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if runs and browser:
        photograph(runs, browser)
    elif runs:
        print("report.png and live.png stay as they are: there is no Chromium on PATH", file=sys.stderr)
    for picture in sorted(PICTURES.iterdir()):
        print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size / 1000:.0f} kB")
    return 0


def rooms() -> str:
    """An SVG of the rooms: one row for each layer, the widest as wide as the picture."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["name"].startswith("rooms stand"))
    named = [layer.split(" | ") for layer in layers]
    rows = [[(name.removeprefix("rocm_ext."), lines(name)) for name in names] for names in named]
    scale = 760 / max(sum(count for _, count in row) for row in rows)
    boxes, width = [], 0.0
    for number, row in enumerate(rows):
        left, top = 1.0, 1 + number * (ROW + GAP)
        for name, count in row:
            label = f"{name} {count:,}"
            wide = max(count * scale, LETTER * len(label) + 16)
            boxes.append(
                f'<rect x="{left:.0f}" y="{top}" width="{wide:.0f}" height="{ROW}" rx="4"/>'
                f'<text x="{left + 8:.0f}" y="{top + 22}">{name} <tspan class="lines">{count:,}</tspan></text>'
            )
            left += wide + GAP
        width = max(width, left)
    height = len(rows) * (ROW + GAP)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" role="img" aria-label="rooms">'
    )
    return "\n".join([head, f"<style>{STYLE}</style>", *boxes, "</svg>\n"])


def lines(name: str) -> int:
    """Lines of Python in a room."""
    path = ROOT / name.replace(".", "/")
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    return sum(len(file.read_text().splitlines()) for file in files)


def photograph(runs: list[Path], browser: str) -> None:
    """Take ``report.png`` of the report on ``runs`` and ``live.png`` of the live page on the last of them."""
    from playwright.sync_api import sync_playwright

    command = str(Path(sys.executable).with_name("rocm-ext"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = Path(folder, "report.html")
        subprocess.run([command, "report", *runs, "--output", report], check=True, stdout=subprocess.DEVNULL)
        monitor = subprocess.Popen(
            [command, "monitor", "--web", "--port", port, "--run", runs[-1]], stdout=subprocess.DEVNULL
        )
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        try:
            wait_for(int(port))
            for name, address in (("report", report.as_uri()), ("live", f"http://127.0.0.1:{port}/")):
                page = chromium.new_page(viewport=VIEW)
                page.goto(address)
                page.wait_for_timeout(8000)  # ms; charts are drawn, and some readings are there
                page.screenshot(path=PICTURES / f"{name}.png")
        finally:
            chromium.close()
            monitor.terminate()
            monitor.wait()


def wait_for(port: int) -> None:
    """Return once a server listens at ``port``."""
    for _ in range(300):
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit(f"nothing listens at port {port} after 30 s")


if __name__ == "__main__":
    sys.exit(main())
