"""Charts of optimiser steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from markupsafe import Markup

from rocm_ext.base.registry import DPO, GRPO, RAFT
from rocm_ext.report.charts import Line, line_chart
from rocm_ext.report.curves import memory_unit, smooth, smoothing_width
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.records import Columns


@dataclass(frozen=True)
class Curve:
    """A column of ``metrics.jsonl`` and its chart.

    Attributes:
        key: key of the column.
        title, unit: title and unit of the chart.
        scale: factor from the column to the unit.
        zero: begin the axis at 0.
        noisy: smooth the curve.
        finite: mark values that are not finite.
    """

    key: str
    title: str
    unit: str
    scale: float = 1.0
    zero: bool = True
    noisy: bool = False
    finite: bool = False


_CURVES = (
    Curve("loss", "Loss", "nats per token", zero=False, noisy=True, finite=True),
    Curve("val_loss", "Validation loss", "nats per token", zero=False, finite=True),
    Curve("lr", "Learning rate", ""),
    Curve("grad_norm", "Gradient norm", "before clipping", noisy=True, finite=True),
    Curve("tokens_per_second", "Speed", "tokens per second", noisy=True),
    Curve("padding", "Padding", "% of computed tokens", scale=100),
    Curve("peak_memory", "Peak memory", "", zero=True),
)
Colours = Sequence[tuple[int, RunFolder]]
_FEW = 3  # runs; the noise of more would hide the curves


def charts(runs: Sequence[RunFolder]) -> list[Markup]:
    """A chart for each column in which some run has values."""
    marks = _cycle_marks(runs[0]) if len(runs) == 1 else []
    other = any(run.family in (GRPO, DPO) for run in runs)  # whose loss is no cross-entropy
    curves = [replace(curve, unit="") if curve.key in ("loss", "val_loss") and other else curve for curve in _CURVES]
    return [drawn for curve in curves if (drawn := chart(curve, runs, marks)) is not None]


def chart(curve: Curve, runs: Sequence[RunFolder], marks: Sequence[tuple[float, str]] = ()) -> Markup | None:
    """The chart of a column; None if no run has values."""
    columns = [lines_with(curve.key, run.validations if curve.key == "val_loss" else run.steps) for run in runs]
    values = [each[curve.key] for each in columns]
    scale, unit = curve.scale, curve.unit
    if curve.key == "peak_memory":
        bytes_, unit = memory_unit(values)
        scale = 1 / bytes_
    lines: list[Line] = []
    widths: set[int] = set()
    for colour, (run, each, y) in enumerate(zip(runs, columns, values, strict=True)):
        if not len(y) or (not np.isfinite(y).any() and not curve.finite):
            continue
        if curve.key == "padding" and not np.nanmax(y):  # always 0 where rows are packed; the card says "none"
            continue
        label = run.name if len(runs) > 1 else curve.title.lower()
        x, y = each["step"], y * scale
        width = smoothing_width(len(y)) if curve.noisy else 1
        widths |= {width} - {1}
        if width == 1:
            lines.append(Line(label, x, y, colour, lost=curve.finite))
        elif len(runs) <= _FEW:
            lines.append(Line(label, x, y, colour, faint=True, lost=curve.finite))
            lines.append(Line(label, x, smooth(y, width), colour))
        else:
            lines.append(Line(label, x, np.where(np.isfinite(y), smooth(y, width), y), colour, lost=curve.finite))
    if not lines:
        return None
    if widths:
        smoothed = f"mean of {widths.pop()} steps" if len(widths) == 1 else "smoothed"
        unit = f"{unit}, {smoothed}" if unit else smoothed
    return line_chart(curve.title, unit, lines, zero=curve.zero, marks=marks)


def lines_with(key: str, columns: Columns) -> Columns:
    """The lines that have a key: a step of GRPO without an update has no loss."""
    has = columns.has(key)
    return columns if has.all() else Columns([line for line, own in zip(columns.lines, has, strict=True) if own])


def columns_chart(
    title: str, unit: str, scale: float, columns: Sequence[tuple[str, str]], runs: Colours, several: bool
) -> Markup | None:
    """A chart of several columns.

    Args:
        title, unit: title and unit of the chart.
        scale: factor from the columns to the unit.
        columns: names in ``metrics.jsonl`` and labels of the lines; ``val_`` begins the name of one of validations.
        runs: runs with their colours.
        several: whether the report shows several runs.

    Returns:
        The chart; None if no run has values.
    """
    lines, widths = [], set()
    for colour, run in runs:
        for i, (key, label) in enumerate(columns):
            known = lines_with(key, run.validations if key.startswith("val_") else run.steps)
            x, y = known["step"], scale * known[key]
            if np.isfinite(y).any():
                widths.add(width := smoothing_width(len(y)))
                name = f"{run.name}, {label}" if several else label
                lines.append(Line(name, x, smooth(y, width), colour if several else i, i if several else 0))
    smoothed = ", smoothed" if widths - {1} else ""
    return line_chart(title, unit + smoothed, lines, zero=True, legend=True) if lines else None


def _cycle_marks(run: RunFolder) -> list[tuple[float, str]]:
    """The step at which each cycle of a RAFT run begins, with its name."""
    if run.family != RAFT:
        return []
    cycles = run.steps["cycle"]
    starts = np.flatnonzero(np.diff(cycles, prepend=-1))
    return [(float(run.steps["step"][i]), f"cycle {cycles[i]:.0f}") for i in starts]
