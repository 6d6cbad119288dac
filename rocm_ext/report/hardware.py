"""Charts of ``hardware.jsonl``, and a reading as a table."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rocm_ext.report.charts import Chart, Line, Table, colour_and_dash, line_chart, time_unit
from rocm_ext.runs.folder import running_time
from rocm_ext.runs.records import Readings, is_rows, number
from rocm_ext.runs.tails import Record

_COUNTERS = (  # title, unit, keys whose values are added; of the host unless the title says GPU
    ("GPU load", "%", ("busy",)),
    # the GPU's memory, and the host's that it uses
    ("GPU memory", "bytes", ("vram_used", "gtt_used")),
    ("GPU power", "W", ("power",)),
    ("GPU temperature", "°C", ("temperature",)),
    ("GPU clock", "MHz", ("clock",)),
    ("Processor load", "% of all cores", ("cpu",)),
    ("Host memory in use", "bytes", ("memory_used",)),
    ("Memory of the process", "bytes", ("process_memory",)),
)
_COLUMNS = ("load", "memory", "GTT", "power", "temperature", "clock")
_POOLS = {"vram": "memory", "memory": "memory", "gtt": "GTT"}  # pools of memory, with their columns
_UNITS = {"busy": "%", "cpu": "%", "power": "W", "temperature": "°C", "clock": "MHz"}


def charts(runs: Sequence[tuple[str, Readings]], from_now: bool = False) -> list[Chart]:
    """Charts of the recorded counters over the running time.

    A single run has a line for each GPU; several runs have a line each, the mean of their GPUs.

    Args:
        runs: names of runs, and their readings.
        from_now: draw over the time before the last reading instead.
    """
    several = len(runs) != 1
    clocks = [running_time(readings) for _, readings in runs]
    ends = [seconds[-1] for seconds, _ in clocks if len(seconds)]
    size, x_title = time_unit(max(ends, default=0.0))
    marks = []
    if not several:
        seconds, pauses = clocks[0]
        marks = [(float(seconds[pause]) / size, "resumed") for pause in pauses]
    if from_now:
        x_title += " from now"
    drawn = []
    for title, unit, keys in _COUNTERS:
        lines = []
        for i, (name, readings) in enumerate(runs):
            seconds, pauses = clocks[i]
            if from_now:
                seconds = seconds - seconds[-1:]
            # a NaN at a pause breaks the line
            x = np.insert(seconds, pauses, seconds[pauses]) / size
            for j, gpus in enumerate(_sources(title, readings, several)):
                values = readings.column((title, *gpus), partial(_sum, keys, gpus))
                if not np.isfinite(values).any():
                    continue
                y = np.insert(values, pauses, np.nan)
                label = title
                if several:
                    label = name
                elif len(gpus) < len(readings.gpus) and gpus:
                    label = f"GPU {j}"
                colour, dash = colour_and_dash(i, j, several)
                lines.append(Line(label, x, y, colour, dash))
        if lines:
            legend = not several and len(lines) > 1
            chart = line_chart(
                title, unit, lines, x_title=x_title, zero=True, marks=marks, legend=legend
            )
            drawn.append(chart)
    return drawn


def _sources(title: str, readings: Readings, several: bool) -> list[list[str]]:
    """Ids of the GPUs of each line. A line of the host has none."""
    if not title.startswith("GPU"):
        return [[]]
    if several:
        return [list(readings.gpus)] if readings.gpus else []
    return [[gpu] for gpu in readings.gpus]


def _sum(keys: Sequence[str], gpus: Sequence[str], reading: Record) -> float:
    """Add up counters of a reading: the host's, or the mean over GPUs with these ids."""
    rows: object = [reading.get("host")]
    if gpus:
        rows = reading.get("gpus")
    if not is_rows(rows):
        return math.nan
    sums = []
    for i, row in enumerate(rows):
        counters = [number(row.get(key)) for key in keys]
        known = [value for value in counters if math.isfinite(value)]
        if known and (not gpus or str(row.get("id", i)) in gpus):
            sums.append(sum(known))
    return sum(sums) / len(sums) if sums else math.nan


def table(reading: Mapping[str, Any]) -> tuple[list[str], Table, list[str]]:
    """Return columns with values, rows that begin with the name of a GPU or "Host", and notes that name the GPUs."""
    cells = {}
    numbers: dict[str, list[str]] = {}
    for i, gpu in enumerate(reading["gpus"]):
        cells[f"GPU {i}"] = _cells(gpu)
        name = str(gpu.get("name", gpu.get("id", "unknown")))
        numbers.setdefault(name, []).append(str(i))
    cells["Host"] = _cells(reading["host"])
    filled = set[str]().union(*cells.values())
    columns = [column for column in _COLUMNS if column in filled]
    rows = []
    for name, row in cells.items():
        if row:
            values = [row.get(column, "") for column in columns]
            rows.append([name, *values])
    notes = [f"GPU {', '.join(gpus)}: {name}" for name, gpus in numbers.items()]
    return columns, rows, notes


def _cells(counters: Mapping[str, Any]) -> dict[str, str]:
    """``{"load": "97 %", "memory": "12.3 of 64.0 GiB", …}``."""
    cells = {}
    for pool, column in _POOLS.items():
        sizes = []
        for key in (f"{pool}_used", f"{pool}_total"):
            if key in counters:
                size = counters[key] / 2**30
                sizes.append(f"{size:.0f}" if size >= 100 else f"{size:.1f}")
        if sizes:
            cells[column] = " of ".join(sizes) + " GiB"
    for key, unit in _UNITS.items():
        if key in counters:
            column = "load" if unit == "%" else key
            limit = f" of {counters[f'{key}_limit']:.0f}" if f"{key}_limit" in counters else ""
            cells[column] = f"{counters[key]:.0f}{limit} {unit}"
    return cells
