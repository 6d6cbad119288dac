"""Charts of ``hardware.jsonl``."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from markupsafe import Markup

from rocm_ext.report.charts import Line, line_chart
from rocm_ext.report.curves import memory_unit, time_unit
from rocm_ext.runs.folder import running_time
from rocm_ext.runs.records import Readings, is_rows, number

_Read = Callable[[Mapping[str, Any]], float]
_GPU = (
    ("GPU load", "%", ("busy",)),
    ("GPU memory", "bytes", ("vram_used", "gtt_used")),  # the GPU's own memory, and the host's that it uses
    ("GPU power", "W", ("power",)),
    ("GPU temperature", "°C", ("temperature",)),
    ("GPU clock", "MHz", ("clock",)),
)
_HOST = (
    ("Processor load", "% of all cores", "cpu"),
    ("Host memory in use", "bytes", "memory_used"),
    ("Memory of the process", "bytes", "process_memory"),
)


class HasReadings(Protocol):
    """A run, or anything else with readings of counters."""

    @property
    def name(self) -> str:
        """Its name in charts."""

    @property
    def hardware(self) -> Readings:
        """The readings."""


def charts(runs: Sequence[HasReadings], from_now: bool = False) -> list[Markup]:
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
    several = len(runs) != 1
    marks = [] if several else [(float(clocks[0][0][i]) / size, "resumed") for i in clocks[0][1]]
    drawn: list[Markup] = []
    for title, unit, sources in _sources(runs):
        lines = []
        for label, colour, owner, read in sources:
            y = runs[owner].hardware.column((title, label), read)
            if np.isfinite(y).any():
                clock, pauses = clocks[owner]
                # a NaN at each pause breaks the line
                x, y = np.insert(clock, pauses, clock[pauses]) / size, np.insert(y, pauses, np.nan)
                lines.append(Line(label, x, y, colour))
        if lines:
            legend = len(lines) > 1 and not several
            drawn.append(_chart(title, unit, lines, x_title=x_title, marks=marks, legend=legend))
    return drawn


def _sources(runs: Sequence[HasReadings]) -> list[tuple[str, str, list[tuple[str, int, int, _Read]]]]:
    """Title and unit of each counter, with its lines: label, colour, index of the run, and a function that reads it."""
    found = []
    for title, unit, keys in _GPU:
        if len(runs) == 1:
            names = gpu_names(runs[0])
            lines = [(_short(i, len(names)), i, 0, _gpu([name], keys)) for i, name in enumerate(names)]
        else:
            lines = [(run.name, i, i, _gpu(gpu_names(run), keys)) for i, run in enumerate(runs)]
        found.append((title, unit, lines))
    for title, unit, key in _HOST:
        label = [run.name if len(runs) > 1 else "host" for run in runs]
        found.append((title, unit, [(label[i], i, i, _host(key)) for i in range(len(runs))]))
    return found


def _short(index: int, gpus: int) -> str:
    return f"GPU {index}" if gpus > 1 else "GPU"


def _chart(title: str, unit: str, lines: list[Line], **more: Any) -> Markup:
    if unit == "bytes":
        size, unit = memory_unit([line.y for line in lines])
        lines = [Line(line.label, line.x, line.y / size, line.colour) for line in lines]
    return line_chart(title, unit, lines, zero=True, whole=False, **more)


def gpu_names(run: HasReadings) -> list[str]:
    """The ids of the GPUs that a run recorded."""
    return list(run.hardware.gpus)


def _gpu(names: Sequence[str], keys: Sequence[str]) -> _Read:
    """A function that sums some counters of each GPU and returns the mean over the GPUs."""

    def read(line: Mapping[str, Any]) -> float:
        gpus = line.get("gpus")
        found = []
        for i, gpu in enumerate(gpus if is_rows(gpus) else ()):
            if str(gpu.get("id", i)) in names:
                known = [value for key in keys if math.isfinite(value := number(gpu.get(key)))]
                found += [sum(known)] if known else []
        return sum(found) / len(found) if found else math.nan

    return read


def _host(key: str) -> _Read:
    def read(line: Mapping[str, Any]) -> float:
        host = line.get("host")
        return number(host.get(key)) if isinstance(host, dict) else math.nan

    return read
