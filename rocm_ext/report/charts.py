"""Charts as inline SVG: small, of one size, readable at the width of a phone, coloured by the page's style sheet.

Colours are classes (``c0`` … ``c4``; from the sixth on, lines are dashed), so that the style sheet alone makes the
light, dark and printed versions. A pointer shows the SVG ``title`` of invisible columns, which needs no script.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from markupsafe import Markup, escape

from rocm_ext.report.curves import short_number, thin, tick_labels, ticks, value_range
from rocm_ext.report.text import visible

WIDTH, HEIGHT = 380.0, 216.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, WIDTH - 10.0, 14.0, HEIGHT - 36.0
COLOURS, DASHES = 5, 3
_COLUMNS = 48  # columns that show their values to a pointer
_MARKS = 40  # most marks for values that are not finite or off the scale


@dataclass(frozen=True)
class Line:
    """A curve.

    Attributes:
        label: name of the curve.
        x, y: [n]; a NaN breaks the line.
        colour: index of the run, or of the line if there is one run.
        dash: index among the lines of one colour.
        faint: draw it in the background, without values for a pointer.
        lost: mark values that are not finite.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    colour: int = 0
    dash: int = 0
    faint: bool = False
    lost: bool = False


@dataclass(frozen=True)
class Spans:
    """A value with its interval for each cycle.

    Attributes:
        label, colour, dash: as of :class:`Line`.
        at: cycle -> (value, low, high), or (median, 5 %, 25 %, 75 %, 95 %) for a box.
    """

    label: str
    at: Mapping[int, Sequence[float]]
    colour: int = 0
    dash: int = 0


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An SVG or HTML element.

    Args:
        name: name of the element.
        children: its content; all but Markup is escaped.
        attributes: ``class_`` stands for ``class``, ``aria_label`` for ``aria-label``; None leaves one out.
    """
    written = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _attribute(value))
        for key, value in attributes.items()
        if value is not None
    )
    inside = Markup("").join(c if isinstance(c, Markup) else escape(visible(str(c), limit=2000)) for c in children)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), written, inside)


def _attribute(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}".removesuffix(".0")
    return str(value)


class Axis:
    """Maps values to positions.

    Args:
        low, high: values at the ends.
        start, end: their positions.
        most: the largest number of ticks.
        whole: ticks are whole numbers.
    """

    def __init__(self, low: float, high: float, start: float, end: float, most: int = 5, whole: bool = False) -> None:
        self.low, self.high, self._start = low, high, start
        self._scale = (end - start) / ((high - low) or 1.0)
        self.ticks = ticks(low, high, most, whole)

    def __call__(self, value: float) -> float:
        return self._start + (value - self.low) * self._scale


def _frame(x: Axis, y: Axis, x_title: str) -> Markup:
    """Grid, ticks and their labels."""
    parts = []
    for value, label in zip(y.ticks, tick_labels(y.ticks), strict=True):
        parts.append(tag("line", class_="grid", x1=LEFT, x2=RIGHT, y1=y(value), y2=y(value)))
        parts.append(tag("text", label, class_="tick", x=LEFT - 6, y=y(value) + 4, text_anchor="end"))
    for value, label in zip(x.ticks, tick_labels(x.ticks), strict=True):
        place = min(x(value), RIGHT - 3.2 * len(label))
        parts.append(tag("text", label, class_="tick", x=place, y=BOTTOM + 16, text_anchor="middle"))
    parts.append(tag("line", class_="axis", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM))
    parts.append(tag("text", x_title, class_="title", x=RIGHT, y=HEIGHT - 4, text_anchor="end"))
    return Markup("").join(parts)


def _figure(title: str, unit: str, body: Markup, said: str, legend: Sequence[tuple[str, str]] = ()) -> Markup:
    keys = [tag("li", tag("i", class_=f"key {style}"), label) for label, style in legend]
    caption = tag("figcaption", tag("b", title), tag("span", unit, class_="unit") if unit else "")
    view = f"0 0 {WIDTH:.0f} {HEIGHT:.0f}"
    drawing = tag("svg", body, viewBox=view, role="img", aria_label=visible(f"{title}, {unit}: {said}", limit=4000))
    return tag(
        "figure", caption, tag("ul", *keys, class_="legend") if keys else "", drawing, class_="chart", data_key=title
    )


def line_style(colour: int, dash: int = 0) -> str:
    """CSS classes of a line: first the colours, then the same colours with dashes."""
    return f"c{colour % COLOURS} d{(colour // COLOURS + dash) % DASHES}"


def line_chart(
    title: str,
    unit: str,
    lines: Sequence[Line],
    *,
    x_title: str = "step",
    zero: bool = False,
    whole: bool = True,
    marks: Sequence[tuple[float, str]] = (),
    legend: bool = False,
) -> Markup:
    """Curves over a common axis.

    Args:
        title, unit: title and unit of the values.
        lines: at least one.
        x_title: title of the x axis.
        zero: begin the y axis at 0, if no value is below.
        whole: ticks of the x axis are whole numbers.
        marks: (x, text) of vertical lines.
        legend: name the lines.
    """
    xs = np.concatenate([line.x for line in lines])
    first, last = float(xs.min()), float(xs.max())
    x = Axis(*((first, last) if last > first else (first - 0.5, first + 0.5)), LEFT, RIGHT, whole=whole)
    y = Axis(*value_range([line.y for line in lines], zero), BOTTOM, TOP)
    front = [line for line in lines if not line.faint]
    parts = [_frame(x, y, x_title), _marks(x, marks)]
    parts += [_path(line, x, y) for line in (*(line for line in lines if line.faint), *front)]
    parts.append(_columns(front, x, x_title))
    parts += [_outside(line, x, y) for line in lines]
    keys = [(line.label, line_style(line.colour, line.dash)) for line in front] if legend else []
    return _figure(title, unit, Markup("").join(parts), _said(front, x_title), keys)


def _path(line: Line, x: Axis, y: Axis) -> Markup:
    kept = thin(line.y)
    runs: list[list[tuple[float, float]]] = [[]]
    for a, b in zip(line.x[kept], line.y[kept], strict=True):
        if np.isfinite(b):
            runs[-1].append((x(a), max(TOP, min(BOTTOM, y(b)))))
        elif runs[-1]:
            runs.append([])
    style = f"{'faint ' if line.faint else ''}{line_style(line.colour, line.dash)}"
    drawn = "".join("M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in run) for run in runs if len(run) > 1)
    parts = [tag("path", d=drawn, class_=f"line {style}")] if drawn else []
    few = sum(map(len, runs)) <= 24 and not line.faint
    dots = [point for run in runs if len(run) == 1 or few for point in run]
    parts += [tag("circle", cx=a, cy=b, r=2.4, class_=f"dot {style}") for a, b in dots]
    return Markup("").join(parts)


def _outside(line: Line, x: Axis, y: Axis) -> Markup:
    """A cross at the bottom for values that are not finite, a triangle at the top for those off the scale."""
    parts = []
    lost = np.flatnonzero(~np.isfinite(line.y)) if line.lost else np.array([], dtype=int)
    for at in lost[thin(line.y[lost], _MARKS)]:
        a, b = x(line.x[at]), BOTTOM - 4
        cross = f"M{a - 3:.1f} {b - 3:.1f}l6 6m0 -6l-6 6"
        told = tag("title", f"{line.label}: not finite at {short_number(float(line.x[at]))}")
        parts.append(tag("path", told, d=cross, class_="lost"))
    high = np.flatnonzero(np.isfinite(line.y) & (line.y > y.high))
    for at in high[thin(line.y[high], _MARKS)]:
        told = tag("title", f"{line.label}: {short_number(float(line.y[at]))} at {short_number(float(line.x[at]))}")
        parts.append(tag("path", told, d=f"M{x(line.x[at]):.1f} {TOP:.1f}l4 6h-8z", class_="lost full"))
    return Markup("").join(parts)


def _marks(x: Axis, marks: Sequence[tuple[float, str]]) -> Markup:
    parts, free = [], LEFT
    for at, text in marks:
        place = x(at)
        parts.append(tag("line", class_="mark", x1=place, x2=place, y1=TOP, y2=BOTTOM))
        if place >= free and place + 5 * len(text) < RIGHT:
            parts.append(tag("text", text, class_="tick", x=place + 3, y=TOP - 4))
            free = place + 6 * len(text) + 6
    return Markup("").join(parts)


def _columns(lines: Sequence[Line], x: Axis, x_title: str) -> Markup:
    """Invisible columns that show the values under a pointer."""
    places = np.unique(np.concatenate([line.x for line in lines]))
    if len(places) > _COLUMNS:
        places = places[np.linspace(0, len(places) - 1, _COLUMNS).astype(int)]
    edges = [LEFT, *(x(float(a + b) / 2) for a, b in pairwise(places)), RIGHT]
    parts = []
    for place, (left, right) in zip(places, pairwise(edges), strict=True):
        told = [f"{x_title} {short_number(float(place))}"]
        for line in lines:
            at = int(np.argmin(np.abs(line.x - place)))
            if left - 1 <= x(line.x[at]) <= right + 1:
                told.append(f"{line.label}: {short_number(float(line.y[at]))}")
        shape = tag("title", "\n".join(told))
        parts.append(tag("rect", shape, class_="over", x=left, y=TOP, width=right - left, height=BOTTOM - TOP))
    return Markup("").join(parts)


def _said(lines: Sequence[Line], x_title: str) -> str:
    """The text for screen readers."""
    parts = []
    for line in lines:
        finite = np.flatnonzero(np.isfinite(line.y))
        if len(finite):
            (x0, y0), (x1, y1) = [[short_number(float(v[i])) for v in (line.x, line.y)] for i in finite[[0, -1]]]
            parts.append(f"{line.label} goes from {y0} at {x_title} {x0} to {y1} at {x_title} {x1}")
    return "; ".join(parts) or "no values"


# ---- by cycle or stretch of steps


def _place_axis(places: Sequence[float], width: float) -> Axis:
    """An axis of places that are ``width`` wide."""
    most = 10 if max(places) < 1000 else 5
    axis = Axis(min(places) - width / 2, max(places) + width / 2, LEFT, RIGHT, most=most, whole=True)
    axis.ticks = [tick for tick in axis.ticks if min(places) <= tick <= max(places)]
    return axis


def span_chart(
    title: str,
    unit: str,
    spans: Sequence[Spans],
    *,
    x_title: str = "cycle",
    width: float = 1.0,
    legend: bool = False,
    zero: bool = False,
) -> Markup:
    """Values by cycle with their intervals, joined by a line; or boxes, if a cycle has five numbers.

    Args:
        title, unit: title and unit of the values.
        spans: at least one, with at least one cycle.
        x_title: name of a cycle, or of what stands in its place.
        width: distance between two cycles.
        legend: name the spans.
        zero: begin the y axis at 0.
    """
    cycles = sorted({cycle for each in spans for cycle in each.at})
    x = _place_axis(cycles, width)
    values = [np.array(numbers, dtype=np.float64) for each in spans for numbers in each.at.values()]
    y = Axis(*value_range(values, zero), BOTTOM, TOP)
    apart = min(12.0, (x(width) - x(0)) / (len(spans) + 1))
    parts = [_frame(x, y, x_title)]
    for i, each in enumerate(spans):
        style, shift = line_style(each.colour, each.dash), (i - (len(spans) - 1) / 2) * apart
        places = [(x(cycle) + shift, [y(float(v)) for v in each.at[cycle]]) for cycle in sorted(each.at)]
        boxes = any(len(ys) == 5 for _, ys in places)
        if len(places) > 1 and not boxes:
            drawn = "M" + "L".join(f"{a:.1f} {ys[0]:.1f}" for a, ys in places)
            parts.append(tag("path", d=drawn, class_=f"line thin {style}"))
        parts += [_box(a, ys, apart, style) if boxes else _point(a, ys, style) for a, ys in places]
    told: dict[str, dict[float, str]] = {
        each.label: {cycle: _span_text(values) for cycle, values in each.at.items()} for each in spans
    }
    parts.append(_place_columns({cycle: f"{x_title} {cycle}" for cycle in cycles}, width, x, told))
    said = "; ".join(
        f"{each.label}: " + ", ".join(f"{x_title} {cycle} {_span_text(each.at[cycle])}" for cycle in sorted(each.at))
        for each in spans
    )
    keys = [(each.label, line_style(each.colour, each.dash)) for each in spans] if legend else []
    return _figure(title, unit, Markup("").join(parts), said, keys)


def _point(place: float, ys: Sequence[float], style: str) -> Markup:
    dot = tag("circle", cx=place, cy=ys[0], r=3, class_=f"dot {style}")
    if len(ys) == 1:
        return dot
    low, high = ys[1], ys[2]
    bar = f"M{place:.1f} {low:.1f}V{high:.1f}m-3 0h6M{place - 3:.1f} {low:.1f}h6"
    return tag("path", d=bar, class_=f"line solid {style}") + dot


def _box(place: float, ys: Sequence[float], width: float, style: str) -> Markup:
    middle, lowest, low, high, highest = ys
    half = width * 0.4
    whiskers = f"M{place:.1f} {lowest:.1f}V{low:.1f}M{place:.1f} {high:.1f}V{highest:.1f}"
    line = f"M{place - half:.1f} {middle:.1f}h{2 * half:.1f}"
    box = tag("rect", x=place - half, y=high, width=2 * half, height=max(low - high, 0.5), class_=f"box {style}")
    return (
        tag("path", d=whiskers, class_=f"line solid {style}") + box + tag("path", d=line, class_=f"line solid {style}")
    )


def _span_text(values: Sequence[float]) -> str:
    first, *rest = (short_number(float(value)) for value in values)
    if len(rest) == 4:
        return f"median {first}, half of them {rest[1]} to {rest[2]}, 90 % {rest[0]} to {rest[3]}"
    return f"{first} ({rest[0]} to {rest[1]})" if rest else first


def _place_columns(
    names: Mapping[float, str], width: float, x: Axis, told: Mapping[str, Mapping[float, str]]
) -> Markup:
    """Invisible columns around places that show their values to a pointer."""
    parts = []
    for place, name in names.items():
        lines = [name, *(f"{label}: {texts[place]}" for label, texts in told.items() if place in texts)]
        left, right = x(place - width / 2), x(place + width / 2)
        parts.append(
            tag(
                "rect",
                tag("title", "\n".join(lines)),
                class_="over",
                x=left,
                y=TOP,
                width=right - left,
                height=BOTTOM - TOP,
            )
        )
    return Markup("").join(parts)


def stacked_chart(
    title: str,
    unit: str,
    bars: Mapping[float, Mapping[str, float]],
    styles: Mapping[str, str],
    *,
    share: bool = False,
    x_title: str = "cycle",
    width: float = 1.0,
    names: Mapping[float, str] | None = None,
) -> Markup:
    """A bar for each cycle, made of parts.

    Args:
        title, unit: title and unit of the sizes.
        bars: cycle -> part -> size.
        styles: part -> its CSS class, from the bottom up.
        share: show sizes as parts of 100 %.
        x_title: name of a cycle, or of what stands in its place.
        width: distance between two bars.
        names: names of the bars; None: ``x_title`` and the cycle.
    """
    cycles = sorted(bars)
    names = names or {cycle: f"{x_title} {cycle}" for cycle in cycles}
    totals = {cycle: sum(bars[cycle].values()) or 1.0 for cycle in cycles}
    x = _place_axis(cycles, width)
    y = Axis(0.0, 100.0 if share else max(totals.values()), BOTTOM, TOP)
    half = min(24.0, (x(width) - x(0)) * 0.36)
    parts = [_frame(x, y, x_title)]
    texts: dict[str, dict[float, str]] = {part: {} for part in styles}
    for cycle in cycles:
        below = 0.0
        for part in styles:
            size = bars[cycle].get(part, 0.0)
            scaled = 100 * size / totals[cycle] if share else size
            if size > 0:
                place, height = y(below + scaled), y(below) - y(below + scaled)
                attributes = {"x": x(cycle) - half, "y": place, "width": 2 * half, "height": height}
                parts.append(tag("rect", class_=f"part {styles[part]}", **attributes))
                more = f" ({short_number(scaled)} %)" if share else ""
                texts[part][cycle] = short_number(size) + more
            below += scaled
    parts.append(_place_columns(names, width, x, texts))
    used = [part for part in reversed(list(styles)) if texts[part]]
    said = "; ".join(
        f"{names[cycle]}: " + ", ".join(f"{part} {texts[part][cycle]}" for part in used if cycle in texts[part])
        for cycle in cycles
    )
    return _figure(title, unit, Markup("").join(parts), said, [(part, f"block {styles[part]}") for part in used])
