"""Charts as figures of plotly, which ``page.js`` draws in the browser with the colours of ``style.css``.

A colour is the name of a variable of the style sheet, such as ``var(--c0)``: so one page has light, dark and printed
colours. See https://plotly.com/javascript/reference for the names in a figure.
"""

import html
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
from markupsafe import Markup

from rocm_ext.base.errors import UserError
from rocm_ext.base.types import Json

_COLOURS, _DASHES = 5, ("solid", "dash", "dot")
_POINTS = 1000  # most points of a curve, about as many as a chart has columns of pixels
_BARS = 40  # most bars of a chart
_KEPT = "\n\t\u200c\u200d"  # invisible characters that stay: many scripts, and emoji, need the joiners
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_HUGE = 1e100  # larger values count as this, so that no arithmetic overflows


@cache
def library() -> str:
    """plotly.js, from the package ``plotly``.

    Raises:
        UserError: the package is missing.
    """
    spec = find_spec("plotly")
    script = Path(spec.origin or "").parent / "package_data" / "plotly.min.js" if spec else None
    if script is None or not script.exists():
        raise UserError("pages draw their charts with plotly, which is missing: pip install 'plotly>=6'")
    return script.read_text()


@dataclass(frozen=True)
class Chart:
    """A chart of the page.

    Attributes:
        title, unit: title, and unit of the values.
        words: a description for screen readers.
        figure: plotly's ``data`` and ``layout``.
        all_zero: whether no value is drawn but 0; the page then names the chart instead of drawing it.
    """

    title: str
    unit: str
    words: str
    figure: Json
    all_zero: bool = False

    @property
    def json(self) -> Markup:
        """The figure, safe inside an element of HTML."""
        return Markup(json.dumps(self.figure, separators=(",", ":")).replace("<", "\\u003c"))


@dataclass(frozen=True)
class Line:
    """A curve.

    Attributes:
        label: the name in the legend.
        x, y: [n] points; a NaN breaks the line.
        colour: index of the run, or of the line if there is one run.
        dash: index among the lines of one colour.
        faint: draw it in the background, without values for a pointer.
        lost: mark values that are not finite.
        ends: [2, n] ends of the values' intervals; None without intervals.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    colour: int = 0
    dash: int = 0
    faint: bool = False
    lost: bool = False
    ends: np.ndarray | None = None


def style(colour: int, dash: int = 0) -> dict[str, str]:
    """Colour and dashes of a line: first the colours, then the same colours with dashes."""
    dash = (colour // _COLOURS + dash) % len(_DASHES)
    return {"color": f"var(--c{colour % _COLOURS})", "dash": _DASHES[dash]}


def line_chart(
    title: str,
    unit: str,
    lines: Sequence[Line],
    *,
    x_title: str = "step",
    zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    legend: bool = False,
) -> Chart:
    """Curves over a common axis.

    Args:
        title, unit: title, and unit of the values; ``bytes`` becomes MiB or GiB.
        lines: at least one.
        zero: begin the y axis at 0, if no value is below.
        marks: (x, text) of vertical lines.
        legend: name the lines.
    """
    if unit == "bytes":
        size, unit = memory_unit([line.y for line in lines])
        lines = [replace(line, y=line.y / size) for line in lines]
    axis = _axis([line.y for line in lines], zero)
    if "range" in axis:
        unit += ", without spikes: double-click shows all"
    data = [trace for line in sorted(lines, key=lambda line: not line.faint) for trace in _traces(line)]
    across = _x_axis(x_title, np.concatenate([line.x for line in lines]))
    layout: Json = {"xaxis": across, "yaxis": axis, "showlegend": legend}
    layout["shapes"] = [
        {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": {"color": "var(--rule)"}}
        | {"label": {"text": _name(text), "textposition": "end", "textangle": 0, "font": {"size": 10}}}
        for x, text in marks
    ]
    words = [_ends(line, x_title) for line in lines if not line.faint and np.isfinite(line.y).any()]
    figure = {"data": data, "layout": layout}
    all_zero = all(line.ends is None and (line.y == 0).all() for line in lines)
    return Chart(title, unit.lstrip(", "), "; ".join(words) or "no values", figure, all_zero)


def _traces(line: Line) -> list[Json]:
    """A line, and the marks of its values that are not finite, as traces of plotly."""
    kept = _thin(line.y)
    finite = np.isfinite(line.y)
    drawn = line.y[kept]
    trace: Json = {"x": _values(line.x[kept]), "y": _values(drawn), "name": _name(line.label)}
    trace["mode"] = "lines+markers" if finite.sum() <= 24 and not line.faint else "lines"
    trace["line"] = style(line.colour, line.dash)
    if line.faint:
        trace |= {"opacity": 0.3, "hoverinfo": "skip", "showlegend": False}
        trace["line"] |= {"width": 1, "dash": "solid"}
    if line.ends is not None:
        above, below = np.abs(line.ends[1][kept] - drawn), np.abs(drawn - line.ends[0][kept])
        trace["error_y"] = {"type": "data", "array": _values(above), "arrayminus": _values(below), "thickness": 1.2}
    if not line.lost or finite.all():
        return [trace]
    lost = np.flatnonzero(~finite)
    lost = lost[np.linspace(0, len(lost) - 1, min(len(lost), 40)).astype(int)]
    bottom = float(line.y[finite].min()) if finite.any() else 0.0
    cross = {"symbol": "x-thin-open", "color": "var(--v4)", "size": 8}
    said = f"{_name(line.label)}: not finite"
    where = {"x": _values(line.x[lost]), "y": _values(np.full(len(lost), bottom))}
    return [
        trace,
        {**where, "mode": "markers", "marker": cross, "name": said, "hoverinfo": "x+name", "showlegend": False},
    ]


def bar_chart(
    title: str, unit: str, at: np.ndarray, parts: Mapping[str, np.ndarray], colours: Mapping[str, str], x_title: str
) -> Chart | None:
    """Bars of steps or cycles, or of the means of stretches of many; None if all are empty.

    Args:
        title, unit: title, and unit of the sizes; a unit that begins with % shows shares.
        at: [n] steps or cycles.
        parts: name -> [n] sizes.
        colours: name -> name of its colour, in the order of the parts from the bottom up; other parts are grey.
    """
    names = [*(name for name in colours if name in parts), *sorted(parts.keys() - colours.keys())]
    filled = sum((parts[name] for name in names), np.zeros(len(at))) > 0
    if not filled.any():
        return None
    first = at[filled].min()
    width = math.ceil((at[filled].max() - first + 1) / _BARS)
    stretch = ((at[filled] - first) // width).astype(int)
    known = np.unique(stretch)
    sizes = {name: np.array([parts[name][filled][stretch == i].mean() for i in known]) for name in names}
    x, total = first + known * width + (width - 1) / 2, np.sum(list(sizes.values()), axis=0)
    share = unit.startswith("%")
    unit += f", means of {width} {x_title}s" if width > 1 else ""
    data, words = [], []
    for name in (name for name in names if sizes[name].any()):
        heights = 100 * sizes[name] / np.maximum(total, 1e-300) if share else sizes[name]
        trace = {"type": "bar", "x": _values(x), "y": _values(heights), "name": _name(name)}
        colour = {"color": f"var(--{colours.get(name, 'v2')})"}
        data.append(trace | {"marker": colour, "hovertemplate": "%{y:.3~g}"})
        words.append(f"{name} {short_number(float(heights[0]))} at first, {short_number(float(heights[-1]))} at last")
    layout = {"xaxis": _x_axis(x_title, x), "yaxis": _axis([total], zero=True), "barmode": "stack"}
    return Chart(title, unit, "; ".join(words), {"data": data, "layout": layout | {"showlegend": True}})


def _x_axis(title: str, x: np.ndarray) -> Json:
    few = len(x) and np.ptp(x) <= 8 and (x == np.round(x)).all()
    return {"title": {"text": title}} | ({"dtick": 1} if few else {})  # no tick between two cycles


def _axis(values: Sequence[np.ndarray], zero: bool) -> Json:
    """The y axis: all values, except spikes that would flatten everything else."""
    known = np.concatenate([of_line[np.isfinite(of_line)] for of_line in values]).clip(-_HUGE, _HUGE)
    if not len(known):
        return {}
    low, high = float(known.min()), float(known.max())
    axis: Json = {"exponentformat": "SI" if high >= 1 else "e"}
    bottom, top = np.quantile(known, [0.05, 0.95])
    ceiling = float(top + 6 * (top - bottom))
    if len(known) >= 50 and high > ceiling > low:
        return axis | {"range": [0.0 if zero and low >= 0 else low - 0.04 * (ceiling - low), ceiling]}
    return axis | ({"rangemode": "tozero"} if zero else {})


def _name(label: str) -> str:
    return html.escape(visible(label, limit=60), quote=False)  # plotly reads some HTML in names


def _values(numbers: np.ndarray) -> list[float | None]:
    """Numbers for JSON with five digits, None where they are not finite."""
    clipped = np.asarray(numbers, dtype=np.float64).clip(-_HUGE, _HUGE)
    return [float(f"{value:.5g}") if math.isfinite(value) and abs(value) < _HUGE else None for value in clipped]


def _ends(line: Line, x_title: str) -> str:
    first, last = np.flatnonzero(np.isfinite(line.y))[[0, -1]]
    (x0, y0), (x1, y1) = [[short_number(float(v[i])) for v in (line.x, line.y)] for i in (first, last)]
    return f"{line.label} goes from {y0} at {x_title} {x0} to {y1} at {x_title} {x1}"


# ---- numbers


def _thin(y: np.ndarray) -> np.ndarray:
    """Indices of about :data:`_POINTS` points of y, [n]: the lowest, the highest and the first NaN of every stretch."""
    if len(y) <= _POINTS:
        return np.arange(len(y))
    kept = {0, len(y) - 1}
    for start, end in pairwise(np.linspace(0, len(y), _POINTS // 3 + 1).astype(int).tolist()):
        missing = np.isnan(y[start:end])
        kept |= {start + int(missing.argmax())} if missing.any() else set()
        if not missing.all():
            kept |= {start + int(np.nanargmin(y[start:end])), start + int(np.nanargmax(y[start:end]))}
    return np.array(sorted(kept))


def smooth(y: np.ndarray) -> tuple[np.ndarray, int]:
    """The running mean of y, [n], over its finite values, and its width: a twenty-fifth of the points."""
    width = 2 * (len(y) // 50) + 1
    finite, ones = np.isfinite(y), np.ones(width)
    total = np.convolve(np.where(finite, y.clip(-_HUGE, _HUGE), 0.0), ones, "same")
    count = np.convolve(finite, ones, "same").round()
    return np.where(count > 0, total / np.maximum(count, 1), np.nan), width


def short_number(value: float) -> str:
    """``value`` with four digits and a prefix: 12.35k, 0.01234, 2e-05."""
    if not math.isfinite(value):
        return "not finite"
    prefixes = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"))
    size, prefix = next(((s, p) for s, p in prefixes if abs(value) >= s), (1.0, ""))
    return f"{value / min(size, 1e3 if prefix == 'k' else size):.4g}{prefix}"


def memory_unit(values: Sequence[np.ndarray]) -> tuple[float, str]:
    """The unit for numbers of bytes, which may be NaN: its size in bytes, and its name."""
    top = max((float(np.nanmax(v)) for v in values if np.isfinite(v).any()), default=0.0)
    return (2.0**30, "GiB") if top >= 2**30 else (2.0**20, "MiB")


def time_unit(longest: float) -> tuple[float, str]:
    """The unit for times up to ``longest`` seconds: its seconds, and its name."""
    return (3600.0, "hours") if longest > 7200 else (60.0, "minutes") if longest > 180 else (1.0, "seconds")


# ---- text


def visible(text: str, limit: int) -> str:
    """``text`` with a visible escape for every invisible character, and without its middle beyond ``limit``."""
    if text.isascii() and text.isprintable() and len(text) <= limit:
        return text
    if len(text) > limit:
        tail = limit // 4
        text = f"{text[: limit - tail]}\n[ {len(text) - limit:,} characters left out ]\n{text[-tail:]}"
    return "".join(map(_visible, text.replace("\r\n", "\n")))


def _visible(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)  # pictures of control characters
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
