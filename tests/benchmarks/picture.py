"""Charts of :mod:`rocm_ext.report.charts` as one SVG file, with light and dark colours, for Markdown pages."""

import re
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

import rocm_ext.report
from rocm_ext.report.charts import HEIGHT, WIDTH, tag

HEAD, GAP, KEY, LINE = 24.0, 16.0, 26.0, 20.0  # heights of a title and of a row of keys; widths of gap and key
LETTER = 6.4  # width of a letter, about


def write_picture(
    path: Path, charts: Sequence[tuple[str, Markup]], legend: Sequence[tuple[str, str]], columns: int = 1
) -> None:
    """Write charts in a grid, with one legend below.

    Args:
        path: of the SVG file.
        charts: title and figure, from :mod:`rocm_ext.report.charts`.
        legend: label and CSS classes of each line, from :func:`rocm_ext.report.charts.line_style`.
        columns: of the grid.
    """
    parts = []
    for number, (title, figure) in enumerate(charts):
        x, y = GAP + number % columns * (WIDTH + GAP), number // columns * (HEIGHT + HEAD + GAP)
        body = re.search(r"<svg[^>]*>(.*)</svg>", figure, re.DOTALL)
        if body is None:
            raise ValueError(f"the chart {title!r} has no svg element")
        head = tag("text", title, class_="head", x=0.0, y=16.0)
        drawn = tag("g", Markup(body[1]), transform=f"translate(0 {HEAD:.0f})")
        parts.append(tag("g", head, drawn, transform=f"translate({x:.0f} {y:.0f})"))
    width = GAP + min(columns, len(charts)) * (WIDTH + GAP)
    top = -(-len(charts) // columns) * (HEIGHT + HEAD + GAP)
    keys, bottom = _legend(legend, width, top)
    paper = tag("rect", class_="paper", x=0, y=0, width=width, height=bottom + GAP)
    said = "; ".join(title for title, _ in charts)
    svg = tag(
        "svg", Markup(f"<style>{_style()}</style>"), paper, *parts, keys, xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:.0f} {bottom + GAP:.0f}", width=width, role="img", aria_label=said,
    )  # fmt: skip
    path.write_text(svg + "\n")


def _legend(legend: Sequence[tuple[str, str]], width: float, top: float) -> tuple[Markup, float]:
    """Draw the keys in rows; return them and the place of the last row's end."""
    parts, x, y = [], GAP, top + LINE / 2
    for label, style in legend:
        needed = KEY + LETTER * len(label) + GAP
        if x > GAP and x + needed > width:
            x, y = GAP, y + LINE
        parts.append(tag("path", d=f"M{x:.1f} {y:.1f}h{KEY - 8:.1f}", class_=f"line {style}"))
        parts.append(tag("text", label, class_="tick", x=x + KEY, y=y + 4))
        x += needed
    return Markup("").join(parts), y + LINE / 2


def _style() -> str:
    """The report's style sheet with the classes of this module. The rules for the page's elements have no effect."""
    sheet = (Path(rocm_ext.report.__file__).parent / "style.css").read_text().partition("@media print")[0]
    own = ".paper { fill: var(--paper); }\n.head { font-size: 13px; font-weight: 600; fill: var(--ink); }\n"
    return sheet + own
