"""Make the pictures in docs/pictures: ``python tools/pictures.py RUN …`` (or `make pictures`).

``rooms.svg`` shows the rooms of rocm_ext in the order that [tool.importlinter] of pyproject.toml
gives them, as wide as their code is long. ``report.png`` and ``live.png`` show the pages of the runs
RUN, photographed by Chromium. Where there is no Chromium, only the rooms are drawn.
"""

import argparse
import ast
import html
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # import-linter and mypy bring it

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
VIEW = {"width": 1280, "height": 1100}
WIDTH, ROW, GAP, LETTER = (
    1000,
    34,
    6,
    7.4,
)  # px: of the picture, height of a room, space between two, a letter
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1c2024 }
rect { fill: #e8eef4; stroke: #9fb3c8 } .more { fill: #5c6570 }
@media (prefers-color-scheme: dark) {
  rect { fill: #223041; stroke: #4a6078 } text { fill: #e8eaed } .more { fill: #a3acb5 }
}
"""


def main() -> int:
    """Write the pictures that can be made here."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="output folders of runs")
    runs = parser.parse_args().runs
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "rooms.svg").write_text(rooms())
    if runs and (program := chromium()):
        photograph(runs, program)
    elif runs:
        print(
            "report.png and live.png stay as they are: there is no Chromium on PATH",
            file=sys.stderr,
        )
    for picture in sorted(PICTURES.iterdir()):
        print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size / 1000:.0f} kB")
    return 0


def rooms() -> str:
    """An SVG of the rooms: a row for each layer, with what a room says of itself where it is alone in its row."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(
        contract["layers"] for contract in contracts if contract["name"].startswith("rooms stand")
    )
    rows = [[(name, *measured(name)) for name in layer.split(" | ")] for layer in layers]
    scale = 520 / max(sum(lines for _, lines, _ in row) for row in rows)
    parts = []
    for number, row in enumerate(rows):
        left, top = 1.0, 1 + number * (ROW + GAP)
        for name, lines, said in row:
            label = name.removeprefix("rocm_ext.")
            wide = max(lines * scale, LETTER * len(f"{label} {lines:,}") + 16)
            parts.append(
                f'<g><title>{said}</title><rect x="{left:.0f}" y="{top}" width="{wide:.0f}" height="{ROW}" rx="4"/>'
                f'<text x="{left + 8:.0f}" y="{top + 22}">{label} <tspan class="more">{lines:,}</tspan></text></g>'
            )
            left += wide + GAP
        if len(row) == 1:
            parts.append(f'<text class="more" x="{left + 4:.0f}" y="{top + 22}">{row[0][2]}</text>')
    size = f'width="{WIDTH}" height="{len(rows) * (ROW + GAP)}" viewBox="0 0 {WIDTH} {len(rows) * (ROW + GAP)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="The rooms of rocm_ext">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>\n"])


def measured(name: str) -> tuple[int, str]:
    """Lines of Python in a room, and the first sentence of its docstring."""
    path = ROOT / name.replace(".", "/")
    first, *others = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    text = (path / "__init__.py" if path.is_dir() else first).read_text()
    said = re.split(r"\.\s|[.:]$", ast.get_docstring(ast.parse(text)) or "", maxsplit=1)[0]
    said = " ".join(re.sub(r":\w+:|`", "", said).split())  # no roles, one line
    return sum(len(file.read_text().splitlines()) for file in (first, *others)), html.escape(said)


def chromium() -> str | None:
    """The path of Chromium, if it is here."""
    return next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )


def photograph(runs: list[Path], program: str) -> None:
    """Take ``report.png`` of the report on ``runs`` and ``live.png`` of the live page on the last of them."""
    from playwright.sync_api import sync_playwright

    command = str(Path(sys.executable).with_name("rocm-ext"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = Path(folder, "report.html")
        subprocess.run(
            [command, "report", *runs, "--output", report], check=True, stdout=subprocess.DEVNULL
        )
        monitor = subprocess.Popen(
            [command, "monitor", "--web", "--port", port, "--run", runs[-1]],
            stdout=subprocess.DEVNULL,
        )
        browser = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            wait_for(int(port))
            for name, address in (
                ("report", report.as_uri()),
                ("live", f"http://127.0.0.1:{port}/"),
            ):
                page = browser.new_page(viewport=VIEW)
                page.goto(address)
                page.wait_for_timeout(8000)  # ms; charts are drawn, and some readings are there
                page.screenshot(path=PICTURES / f"{name}.png")
        finally:
            browser.close()
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
