"""Charts of ``hardware.jsonl``, and a reading as a table."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rocm_ext.report.charts import Chart, Line, line_chart, memory_unit, time_unit
from rocm_ext.runs.folder import running_time
from rocm_ext.runs.records import Readings, is_rows, number

_COUNTERS = (  # title, unit, keys whose values are added; of the GPUs, or of the host
    ("GPU load", "%", ("busy",)),
    ("GPU memory", "bytes", ("vram_used", "gtt_used")),  # the GPU's own memory, and the host's that it uses
    ("GPU power", "W", ("power",)),
    ("GPU temperature", "°C", ("temperature",)),
    ("GPU clock", "MHz", ("clock",)),
    ("Processor load", "% of all cores", ("cpu",)),
    ("Host memory in use", "bytes", ("memory_used",)),
    ("Memory of the process", "bytes", ("process_memory",)),
)


class HasReadings(Protocol):
    """A run, or anything else with readings of counters."""

    @property
    def name(self) -> str:
        """Its name in charts."""

    @property
    def hardware(self) -> Readings:
        """The readings."""


def charts(runs: Sequence[HasReadings], from_now: bool = False) -> list[Chart]:
    """A chart for each counter that some run recorded, over its running time.

    A single run has a line for each GPU; of several runs, each has one line, the mean of its GPUs.

    Args:
        runs: those to show.
        from_now: count the time from the last reading.
    """
    clocks = [running_time(run.hardware) for run in runs]
    size, x_title = time_unit(max((float(clock[-1]) for clock, _ in clocks if len(clock)), default=0.0))
    if from_now:
        clocks, x_title = [(clock - clock[-1:], pauses) for clock, pauses in clocks], f"{x_title} from now"
    single = len(runs) == 1
    marks = [(float(clocks[0][0][i]) / size, "resumed") for i in clocks[0][1]] if single else []
    drawn = []
    for title, unit, keys in _COUNTERS:
        lines = []
        for i, run in enumerate(runs):
            gpus = list(run.hardware.gpus) if title.startswith("GPU") else []
            sources = [[gpu] for gpu in gpus] if single and gpus else [gpus]
            for j, ids in enumerate(sources):
                y = run.hardware.column((title, *ids), _reader(ids, keys, title.startswith("GPU")))
                if np.isfinite(y).any():
                    clock, pauses = clocks[i]
                    # a NaN at each pause breaks the line
                    x, y = np.insert(clock, pauses, clock[pauses]) / size, np.insert(y, pauses, np.nan)
                    label = run.name if not single else title if len(sources) == 1 else f"GPU {j}"
                    lines.append(Line(label, x, y, j if single else i))
        if lines and unit == "bytes":
            bytes_, unit = memory_unit([line.y for line in lines])
            lines = [Line(line.label, line.x, line.y / bytes_, line.colour) for line in lines]
        if lines:
            legend = single and len(lines) > 1
            drawn.append(line_chart(title, unit, lines, x_title=x_title, zero=True, marks=marks, legend=legend))
    return drawn


def _reader(ids: Sequence[str], keys: Sequence[str], gpu: bool) -> Callable[[Mapping[str, Any]], float]:
    """A function that adds up counters of a reading: of the host, or the mean over the GPUs with these ids."""

    def read(line: Mapping[str, Any]) -> float:
        rows = line.get("gpus") if gpu else [line.get("host")]
        sums = []
        for i, row in enumerate(rows if is_rows(rows) else ()):
            known = [value for key in keys if math.isfinite(value := number(row.get(key)))]
            if known and (not gpu or str(row.get("id", i)) in ids):
                sums.append(sum(known))
        return sum(sums) / len(sums) if sums else math.nan

    return read


def table(reading: Mapping[str, Any]) -> tuple[list[str], list[list[str]], list[str]]:
    """The columns with values, rows of each GPU and of the host, and notes that name the GPUs."""

    def row(name: str, counters: Mapping[str, Any], load: str, pool: str) -> list[str]:
        cells = [f"{counters[load]:.0f} %" if load in counters else "", used(counters, pool), used(counters, "gtt")]
        return [
            name,
            *cells,
            *(f"{counters[k]:.0f}" if k in counters else "" for k in ("power", "temperature", "clock")),
        ]

    rows = [row(f"GPU {i}", gpu, "busy", "vram") for i, gpu in enumerate(reading["gpus"])]
    rows = [each for each in [*rows, row("Host", reading["host"], "cpu", "memory")] if any(each[1:])]
    columns = ["", "load", "memory, GiB", "GTT, GiB", "W", "°C", "MHz"]
    kept = [i for i in range(len(columns)) if any(each[i] for each in rows)]
    names: dict[str, list[str]] = {}
    for i, gpu in enumerate(reading["gpus"]):
        names.setdefault(str(gpu.get("name", gpu.get("id", "unknown"))), []).append(str(i))
    notes = [f"GPU {', '.join(numbers)}: {name}" for name, numbers in names.items()]
    return [columns[i] for i in kept], [[each[i] for i in kept] for each in rows], notes


def used(counters: Mapping[str, Any], pool: str) -> str:
    """``12.3 of 64.0``, in GiB; empty if it is unknown."""
    sizes = [counters.get(f"{pool}_{what}") for what in ("used", "total")]
    return " of ".join(f"{size / 2**30:.{int(size < 100 * 2**30)}f}" for size in sizes if size is not None)
