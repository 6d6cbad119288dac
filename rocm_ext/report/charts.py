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
from typing import Any

import numpy as np
from markupsafe import Markup

from rocm_ext.base.errors import UserError
from rocm_ext.base.types import Json

Table = list[list[str]]  # cells, by row
_COLOURS, _DASHES = 5, ("solid", "dash", "dot")
_POINTS = 1000  # most points of a curve, about as many as a chart has columns of pixels
_BARS = 40  # most bars of a chart
# invisible characters that stay: many scripts, and emoji, need the joiners
_KEPT = "\n\t\u200c\u200d"
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_PREFIXES = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k"}
_HUGE = 1e100  # larger values count as this, so that no arithmetic overflows


@cache
def library() -> str:
    """plotly.js, from the package ``plotly``.

    Raises:
        UserError: the package is missing.
    """
    spec = find_spec("plotly")
    if spec is not None and spec.origin is not None:
        script = Path(spec.origin).parent / "package_data" / "plotly.min.js"
        if script.exists():
            return script.read_text()
    raise UserError(
        "pages draw their charts with plotly, which is missing: pip install 'plotly>=6'"
    )


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
        text = json.dumps(self.figure, separators=(",", ":"))
        return Markup(text.replace("<", "\\u003c"))


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
        ends: [2, n] ends of the values' intervals. None draws no intervals.
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


def colour_and_dash(run: int, line: int, several: bool) -> tuple[int, int]:
    """The indices of a line's colour and dashes.

    Args:
        run: index of the run.
        line: index among the run's lines.
        several: whether the chart has several runs. Then each run has a colour, otherwise each line.
    """
    if several:
        return run, line
    return line, 0


def line_chart(
    title: str,
    unit: str,
    lines: Sequence[Line],
    *,
    x_title: str,
    zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    legend: bool = False,
) -> Chart:
    """Curves over a common axis.

    Args:
        title, unit: title, and unit of the values; ``bytes`` becomes MiB or GiB.
        lines: at least one.
        x_title: title of the x axis.
        zero: begin the y axis at 0, if no value is below.
        marks: (x, text) of vertical lines.
        legend: name the lines.
    """
    if unit == "bytes":
        most = max(np.nanmax(line.y) for line in lines)
        size, unit = memory_unit(most)
        lines = [replace(line, y=line.y / size) for line in lines]
    x = np.concatenate([line.x for line in lines])
    y = np.concatenate([line.y for line in lines])
    y_axis = _y_axis(y, zero)
    if "range" in y_axis:
        unit += ", without spikes: double-click shows all"
    layout = {
        "xaxis": _x_axis(x_title, x),
        "yaxis": y_axis,
        "showlegend": legend,
        "shapes": [_mark(x, text) for x, text in marks],
    }
    traces = []
    words = []
    all_zero = True
    for line in sorted(lines, key=lambda line: not line.faint):
        finite = np.isfinite(line.y)
        traces.append(_trace(line, finite))
        if line.lost and not finite.all():
            traces.append(_crosses(line, finite))
        if finite.any() and not line.faint:
            words.append(_in_words(line, finite, x_title))
        if line.y.any() or line.ends is not None:
            all_zero = False
    return Chart(
        title=title,
        unit=unit.lstrip(", "),
        words="; ".join(words) or "no values",
        figure={"data": traces, "layout": layout},
        all_zero=all_zero,
    )


def _trace(line: Line, finite: np.ndarray) -> Json:
    """A line as a trace of plotly."""
    kept = _thin(line.y)
    y = line.y[kept]
    few = finite.sum() <= 24 and not line.faint
    trace: Json = {
        "x": _values(line.x[kept]),
        "y": _values(y),
        "name": _name(line.label),
        "mode": "lines+markers" if few else "lines",
        "line": style(line.colour, line.dash),
    }
    if line.faint:
        trace |= {"opacity": 0.3, "hoverinfo": "skip", "showlegend": False}
        trace["line"] |= {"width": 1, "dash": "solid"}
    if line.ends is not None:
        low, high = line.ends[:, kept]
        trace["error_y"] = {
            "type": "data",
            "array": _values(np.abs(high - y)),
            "arrayminus": _values(np.abs(y - low)),
            "thickness": 1.2,
        }
    return trace


def _crosses(line: Line, finite: np.ndarray) -> Json:
    """Marks of a line's values that are not finite, as a trace of plotly; of many, only some."""
    lost = line.x[~finite]
    count = min(len(lost), 40)
    some = np.linspace(0, len(lost) - 1, count)
    x = lost[some.astype(int)]
    bottom = line.y[finite].min() if finite.any() else 0.0
    return {
        "x": _values(x),
        "y": _values(np.full(len(x), bottom)),
        "mode": "markers",
        "marker": {"symbol": "x-thin-open", "color": "var(--v4)", "size": 8},
        "name": f"{_name(line.label)}: not finite",
        "hoverinfo": "x+name",
        "showlegend": False,
    }


def _mark(x: float, text: str) -> Json:
    """A vertical line with a text."""
    return {
        "type": "line",
        "x0": x,
        "x1": x,
        "yref": "paper",
        "y0": 0,
        "y1": 1,
        "line": {"color": "var(--rule)"},
        "label": {
            "text": _name(text),
            "textposition": "end",
            "textangle": 0,
            "font": {"size": 10},
        },
    }


def bar_chart(
    title: str,
    unit: str,
    steps: np.ndarray,
    parts: Mapping[str, np.ndarray],
    colours: Mapping[str, str],
    x_title: str,
) -> Chart | None:
    """Bars of steps or cycles, or of the means of stretches of many. None if all are empty.

    Args:
        title, unit: title, and unit of the sizes; a unit that begins with % shows shares.
        steps: [n] steps or cycles.
        parts: name -> [n] sizes.
        colours: name -> name of its colour, in the order of the parts from the bottom up; other parts are grey.
        x_title: what a step is called.
    """
    filled = np.sum(list(parts.values()), axis=0) > 0
    if not filled.any():
        return None
    steps = steps[filled]
    width = math.ceil((np.ptp(steps) + 1) / _BARS)
    stretches = (steps - steps.min()) // width
    bars = np.unique(stretches)
    names = [name for name in colours if name in parts]
    names += sorted(parts.keys() - colours.keys())
    heights = {}
    for name in names:
        sizes = parts[name][filled]
        means = [sizes[stretches == bar].mean() for bar in bars]
        heights[name] = np.array(means)
    total = np.sum(list(heights.values()), axis=0)
    x = steps.min() + bars * width + (width - 1) / 2
    traces = []
    words = []
    for name, height in heights.items():
        if not height.any():
            continue
        if unit.startswith("%"):
            height = 100 * height / np.maximum(total, 1e-300)
        trace = {
            "type": "bar",
            "x": _values(x),
            "y": _values(height),
            "name": _name(name),
            "marker": {"color": f"var(--{colours.get(name, 'v2')})"},
            "hovertemplate": "%{y:.3~g}",
        }
        traces.append(trace)
        words.append(
            f"{name} {short_number(height[0])} at first, {short_number(height[-1])} at last"
        )
    layout = {
        "xaxis": _x_axis(x_title, x),
        "yaxis": _y_axis(total, zero=True),
        "barmode": "stack",
        "showlegend": True,
    }
    if width > 1:
        unit += f", means of {width} {x_title}s"
    figure = {"data": traces, "layout": layout}
    return Chart(title, unit, "; ".join(words), figure)


def _x_axis(title: str, x: np.ndarray) -> Json:
    axis: Json = {"title": {"text": title}}
    whole = (x == np.round(x)).all()
    if whole and len(x) and np.ptp(x) <= 8:
        axis["dtick"] = 1  # no tick between two cycles
    return axis


def _y_axis(values: np.ndarray, zero: bool) -> Json:
    """The y axis: all values, except spikes that would flatten everything else."""
    known = values[np.isfinite(values)].clip(-_HUGE, _HUGE)
    if not len(known):
        return {}
    low, high = known.min(), known.max()
    axis: Json = {"exponentformat": "SI" if high >= 1 else "e"}
    bottom, top = np.quantile(known, [0.05, 0.95])
    ceiling = float(top + 6 * (top - bottom))
    if len(known) >= 50 and high > ceiling > low:
        floor = low - 0.04 * (ceiling - low)
        if zero and low >= 0:
            floor = 0.0
        axis["range"] = [float(floor), ceiling]
    elif zero:
        axis["rangemode"] = "tozero"
    return axis


def _name(label: str) -> str:
    return html.escape(visible(label, limit=60), quote=False)  # plotly reads some HTML in names


def _values(numbers: np.ndarray) -> list[float | None]:
    """Numbers for JSON with five digits, None where they are not finite."""
    values: list[float | None] = []
    for number in np.asarray(numbers, dtype=np.float64):
        known = abs(number) < _HUGE  # and not NaN
        values.append(float(f"{number:.5g}") if known else None)
    return values


def _in_words(line: Line, finite: np.ndarray, x_title: str) -> str:
    points = []
    for i in np.flatnonzero(finite)[[0, -1]]:
        points.append(f"{short_number(line.y[i])} at {x_title} {short_number(line.x[i])}")
    return f"{line.label} goes from {points[0]} to {points[1]}"


# ---- numbers


def _thin(y: np.ndarray) -> np.ndarray:
    """Indices of about :data:`_POINTS` points of y, [n]: the lowest, the highest and the first NaN of every stretch."""
    if len(y) <= _POINTS:
        return np.arange(len(y))
    kept: list[Any] = [0, len(y) - 1]
    bounds = np.linspace(0, len(y), _POINTS // 3 + 1)
    for start, end in pairwise(bounds.astype(int)):
        stretch = y[start:end]
        missing = np.isnan(stretch)
        if missing.any():
            kept.append(start + missing.argmax())
        if not missing.all():
            kept.append(start + np.nanargmin(stretch))
            kept.append(start + np.nanargmax(stretch))
    return np.unique(kept)


def smooth(y: np.ndarray) -> tuple[np.ndarray, int]:
    """The running mean of y, [n], over its finite values, and its width: a twenty-fifth of the points."""
    width = 2 * (len(y) // 50) + 1
    window = np.ones(width)
    finite = np.isfinite(y)
    known = y.clip(-_HUGE, _HUGE)
    known[~finite] = 0.0
    total = np.convolve(known, window, "same")
    count = np.convolve(finite, window, "same").round()
    mean = total / np.maximum(count, 1)
    mean[count == 0] = np.nan
    return mean, width


def short_number(value: float) -> str:
    """``value`` with four digits and a prefix: 12.35k, 0.01234, 2e-05."""
    if not math.isfinite(value):
        return "not finite"
    for unit, prefix in _PREFIXES.items():
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:.4g}{prefix}"
    return f"{value:.4g}"


def memory_unit(most: float) -> tuple[float, str]:
    """The unit for up to ``most`` bytes: its size in bytes, and its name."""
    if most >= 2**30:
        return 2.0**30, "GiB"
    return 2.0**20, "MiB"


def time_unit(longest: float) -> tuple[float, str]:
    """The unit for times up to ``longest`` seconds: its seconds, and its name."""
    if longest > 7200:
        return 3600.0, "hours"
    if longest > 180:
        return 60.0, "minutes"
    return 1.0, "seconds"


# ---- text


def visible(text: str, limit: int) -> str:
    """``text`` with a visible escape for every invisible character, and without its middle beyond ``limit``."""
    if text.isascii() and text.isprintable() and len(text) <= limit:
        return text
    if len(text) > limit:
        tail = limit // 4
        text = (
            f"{text[: limit - tail]}\n[ {len(text) - limit:,} characters left out ]\n{text[-tail:]}"
        )
    return "".join(map(_visible, text.replace("\r\n", "\n")))


def _visible(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)  # pictures of control characters
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"
