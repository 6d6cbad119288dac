"""Gather the repository's pages for the site that `make docs` builds, as Markdown in ``build/docs``.

On a site, a link to a file that is no page leads nowhere. So each file that a page links to becomes a page with its
text, and each folder one that lists its files. Pages keep their paths; a README becomes its folder's index.
"""

import ast
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STAGED = ROOT / "build" / "docs"
PICTURES = (".svg", ".png")
LINK = re.compile(r"(?<=\]\()(?!https?:)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCED = re.compile(r"^(```.*?^```)", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".jsonl": "json"}


def main() -> int:
    """Write ``build/docs`` anew; 1 where a link leads nowhere."""
    shutil.rmtree(STAGED, ignore_errors=True)
    waiting = [
        path for pattern in ("*.md", "docs/*.md", "examples/*/*.md") for path in ROOT.glob(pattern)
    ]
    done: set[Path] = set()
    while waiting:
        if (path := waiting.pop()) in done:
            continue
        done.add(path)
        target = STAGED / staged(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in PICTURES:
            shutil.copy(path, target)
            continue
        text = page(path)
        links = linked(path, text) if path.is_dir() or path.suffix in (".md", ".ipynb") else {}
        if missing := [link for link, file in links.items() if not file.exists()]:
            print(
                f"{path.relative_to(ROOT)}: no file for the links {', '.join(missing)}",
                file=sys.stderr,
            )
            return 1
        waiting += links.values()
        target.write_text(rewritten(path, text, links))
    print(f"{len(done)} pages and pictures in {STAGED.relative_to(ROOT)}")
    return 0


def staged(path: Path) -> Path:
    """Where ``path`` is in ``build/docs``. Names begin without a dot, because zensical skips hidden files."""
    is_folder = path.is_dir()
    path = Path(*(part.removeprefix(".") for part in path.relative_to(ROOT).parts))
    if is_folder:
        return path / "index.md"
    if path.name == "README.md":
        return path.with_name("index.md")
    return path if path.suffix in (".md", *PICTURES) else path.with_name(f"{path.name}.md")


def page(path: Path) -> str:
    """The Markdown of a page, a notebook, a folder or any other file."""
    if path.is_dir():
        readme = path / "README.md"
        return readme.read_text() if readme.is_file() else listing(path)
    text = path.read_text()
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        return "\n\n".join(map(cell, json.loads(text)["cells"]))
    return f"# {path.name}\n\n`````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n`````\n"


def cell(content: dict[str, Any]) -> str:
    """The Markdown of a notebook's cell, without its output."""
    text = "".join(content["source"])
    if content["cell_type"] == "markdown":
        return text
    language = "sh" if text.startswith("%%bash\n") else "python"
    return f"```{language}\n{text.removeprefix('%%bash' + chr(10))}\n```"


def listing(folder: Path) -> str:
    """A table of the files in ``folder`` with the first line that each says of itself."""
    lines = [f"# {folder.relative_to(ROOT)}", "", "| | |", "|---|---|"]
    for file in sorted(folder.glob("*.*")):
        if file.suffix in (".py", ".yaml") and file.name != "__init__.py":
            text = file.read_text()
            comment = text.lstrip("# ") if text.startswith("#") else ""
            said = ast.get_docstring(ast.parse(text)) or "" if file.suffix == ".py" else comment
            lines.append(f"| [{file.name}]({file.name}) | {said.partition(chr(10))[0].strip()} |")
    return "\n".join(lines) + "\n"


def linked(path: Path, text: str) -> dict[str, Path]:
    """The files that the links of a page lead to, by what the link says."""
    folder = path if path.is_dir() else path.parent
    prose = FENCED.sub("", text)
    return {link[1]: Path(os.path.normpath(folder / link[1])) for link in LINK.finditer(prose)}


def rewritten(path: Path, text: str, links: dict[str, Path]) -> str:
    """``text`` with its links as ``build/docs`` has the files. What stands in fences stays as it is."""
    folder = staged(path).parent

    def replaced(link: re.Match[str]) -> str:
        return os.path.relpath(staged(links[link[1]]), folder) + (link[2] or "")

    parts = FENCED.split(text)
    return (
        "".join(part if part.startswith("```") else LINK.sub(replaced, part) for part in parts)
        if links
        else text
    )


if __name__ == "__main__":
    sys.exit(main())
