"""Charts of ``hardware.jsonl``, and a reading as a table."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rocm_ext.report.charts import Chart, Line, line_chart, time_unit
from rocm_ext.runs.folder import running_time
from rocm_ext.runs.records import Readings, is_rows, number
from rocm_ext.runs.tails import Record

_COUNTERS = (  # title, unit, keys whose values are added
    ("GPU load", "%", ("busy",)),
    ("GPU memory", "bytes", ("vram_used", "gtt_used")),  # the GPU's memory, and the host's that it uses
    ("GPU power", "W", ("power",)),
    ("GPU temperature", "°C", ("temperature",)),
    ("GPU clock", "MHz", ("clock",)),
    ("Processor load", "% of all cores", ("cpu",)),
    ("Host memory in use", "bytes", ("memory_used",)),
    ("Memory of the process", "bytes", ("process_memory",)),
)
_CELLS = (  # column, key of a number and its unit, or of a pool of memory
    ("load", "busy", "%"),
    ("load", "cpu", "%"),
    ("memory", "vram", "GiB"),
    ("memory", "memory", "GiB"),
    ("GTT", "gtt", "GiB"),
    ("power", "power", "W"),
    ("temperature", "temperature", "°C"),
    ("clock", "clock", "MHz"),
)


def charts(runs: Sequence[tuple[str, Readings]], from_now: bool = False) -> list[Chart]:
    """Charts of the recorded counters over the running time, or over the time before the last reading (``from_now``).

    A single run has a line for each GPU; several runs have a line each, the mean of their GPUs.
    """
    clocks = [running_time(readings) for _, readings in runs]
    size, x_title = time_unit(max((float(clock[-1]) for clock, _ in clocks if len(clock)), default=0.0))
    if from_now:
        clocks, x_title = [(clock - clock[-1:], pauses) for clock, pauses in clocks], f"{x_title} from now"
    single = len(runs) == 1
    marks = [(float(clocks[0][0][i]) / size, "resumed") for i in clocks[0][1]] if single else []
    drawn = []
    for title, unit, keys in _COUNTERS:
        lines = []
        for i, (name, readings) in enumerate(runs):
            gpus = list(readings.gpus) if title.startswith("GPU") else []
            sources = [[gpu] for gpu in gpus] if single and gpus else [gpus]
            for j, ids in enumerate(sources):
                y = readings.column((title, *ids), partial(_counted, ids, keys, title.startswith("GPU")))
                if np.isfinite(y).any():
                    clock, pauses = clocks[i]
                    # a NaN at a pause breaks the line
                    x, y = np.insert(clock, pauses, clock[pauses]) / size, np.insert(y, pauses, np.nan)
                    label = name if not single else title if len(sources) == 1 else f"GPU {j}"
                    lines.append(Line(label, x, y, j if single else i))
        if lines:
            legend = single and len(lines) > 1
            drawn.append(line_chart(title, unit, lines, x_title=x_title, zero=True, marks=marks, legend=legend))
    return drawn


def _counted(ids: Sequence[str], keys: Sequence[str], gpu: bool, reading: Record) -> float:
    """Add up counters of a reading: the host's, or the mean over the GPUs with these ids."""
    rows = reading.get("gpus") if gpu else [reading.get("host")]
    sums = []
    for i, row in enumerate(rows if is_rows(rows) else ()):
        known = [value for key in keys if math.isfinite(value := number(row.get(key)))]
        if known and (not gpu or str(row.get("id", i)) in ids):
            sums.append(sum(known))
    return sum(sums) / len(sums) if sums else math.nan


def table(reading: Mapping[str, Any]) -> tuple[list[str], list[list[str]], list[str]]:
    """Return columns with values, rows that begin with the name of a GPU or "Host", and notes that name the GPUs."""
    rows = {f"GPU {i}": _cells(gpu) for i, gpu in enumerate(reading["gpus"])} | {"Host": _cells(reading["host"])}
    columns = [name for name in dict.fromkeys(cell[0] for cell in _CELLS) if any(name in row for row in rows.values())]
    names: dict[str, list[str]] = {}
    for i, gpu in enumerate(reading["gpus"]):
        names.setdefault(str(gpu.get("name", gpu.get("id", "unknown"))), []).append(str(i))
    notes = [f"GPU {', '.join(numbers)}: {name}" for name, numbers in names.items()]
    return columns, [[name, *(row.get(column, "") for column in columns)] for name, row in rows.items() if row], notes


def _cells(counters: Mapping[str, Any]) -> dict[str, str]:
    """``{"load": "97 %", "memory": "12.3 of 64.0 GiB", …}``."""
    cells = {}
    for column, key, unit in _CELLS:
        sizes = [size / 2**30 for what in ("used", "total") if (size := counters.get(f"{key}_{what}")) is not None]
        if unit == "GiB" and sizes:
            cells[column] = " of ".join(f"{size:.{int(size < 100)}f}" for size in sizes) + " GiB"
        elif key in counters:
            cells[column] = f"{counters[key]:.0f} {unit}"
    return cells
