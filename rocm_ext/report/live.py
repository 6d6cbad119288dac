"""The page of runs while they go on, and of the machine's counters."""

import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import compress
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from markupsafe import Markup

from rocm_ext.base.errors import UserError
from rocm_ext.base.log import duration
from rocm_ext.report import HERE, content, hardware, name_apart, template
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.progress import progress
from rocm_ext.runs.records import Readings
from rocm_ext.runs.tails import Tails

SCRIPT = (HERE / "live.js").read_text()
_FILES = ("*.json*", "config.yaml", "adapter", "cycle_*/*.json*", "cycle_*/eval/*.json*")  # that the page shows
_JOURNALS = ("*.jsonl", "cycle_*/*.jsonl", "cycle_*/eval/*.jsonl")  # a run that goes on adds lines to these
_MINUTES = 15  # of the machine's counters that are shown
_SHARE, _LONGEST = 0.1, 20.0  # most of a core's time that drawing takes; most seconds without drawing
_QUIET, _LEAST = 120.0, 30.0  # least seconds without a new line after which a run counts as silent, see _patience
_RECORDED = 600.0  # seconds after its last reading of counters in which a run still records them
_MACHINE = '<section id="machine" data-own></section>'  # where the template has the machine
_COLUMNS = ("load", "memory, GiB", "GTT, GiB", "W", "°C", "MHz")
_GIB = 2**30

State = tuple[str, str, float]  # CSS class, words, and when the run last wrote (seconds since 1970)


@dataclass(frozen=True)
class _Live:
    """What a live page says beside a report."""

    interval: float
    waiting: list[tuple[Path, str]]
    states: list[State]
    script: Markup = field(default=Markup(SCRIPT), repr=False)


@dataclass
class _History:
    """Readings of this machine."""

    hardware: Readings
    name: str = "this machine"


class LivePage:
    """A page that is drawn when it is asked for, if something has changed since.

    Drawing takes at most a tenth of a core's time if it takes at most 2 s: then the page is drawn every 20 s.

    Args:
        folders: output_dirs of runs; they need not exist yet.
        interval: seconds between questions of a browser.
        notes: about counters that this machine does not have.
    """

    def __init__(self, folders: Sequence[Path], interval: float, notes: Sequence[str] = ()) -> None:
        self._folders = list({path.resolve(): path for path in folders}.values())
        self._interval, self._notes = interval, notes
        self._tails = {path: Tails() for path in self._folders}
        self._readings: deque[dict[str, Any]] = deque(maxlen=math.ceil(60 * _MINUTES / interval))
        self._lock = Lock()
        self._drawn, self._recorded = "", False
        self._machine: tuple[object, str] = object(), ""  # of which readings, and what was drawn
        self._patience: dict[Path, float] = {}
        self._of: object = None  # state of the files that was drawn
        self._due = 0.0  # time.monotonic() before which nothing is drawn again

    def take(self, reading: dict[str, Any]) -> None:
        """Take a reading of the machine's counters."""
        self._readings.append(reading)

    def whole(self) -> str:
        """The page with the machine in it."""
        return self.page().replace(_MACHINE, self.machine(), 1)

    def page(self) -> str:
        """The page of the runs; it has an empty place for the machine."""
        with self._lock:
            if time.monotonic() >= self._due:
                now = [_sign(path, self._patience.get(path, _QUIET)) for path in self._folders]
                if now != self._of:
                    first, begun = not self._drawn, time.thread_time()
                    self._drawn, self._of = self._draw(), now
                    pause = 0.0 if first else (time.thread_time() - begun) * (1 / _SHARE - 1)  # the first one imports
                    self._due = time.monotonic() + min(pause, _LONGEST)
            return self._drawn

    def _draw(self) -> str:
        runs: list[RunFolder] = []
        waiting: list[tuple[Path, str]] = []
        for path in self._folders:
            try:
                runs.append(RunFolder(path, self._tails[path]))
            except UserError as error:
                waiting.append((path, _why(path, error)))
        name_apart(runs)
        shown = content(runs)
        shown["title"] = shown["title"] or "rocm-ext monitor"
        facts = [[fact for fact in own if fact[0] != "State"] for _, _, own in shown["runs"]]
        shown["runs"] = [(run, style, own) for (run, style, _), own in zip(shown["runs"], facts, strict=True)]
        self._recorded = any(run.hardware for run in runs)
        self._patience = {run.path: _patience(run) for run in runs}
        live = _Live(self._interval, waiting, [_state(run, self._patience[run.path]) for run in runs])
        return template("page").render(**shown, live=live)

    def machine(self) -> str:
        """The machine's counters as HTML: the last values, and their curves unless a run has recorded them."""
        readings = list(self._readings)
        of = readings[-1] if readings else None, self._recorded
        with self._lock:
            if self._machine[0] != of:
                self._machine = of, self._draw_machine(readings)
            return self._machine[1]

    def _draw_machine(self, readings: Sequence[dict[str, Any]]) -> str:
        history = Readings()
        for reading in readings:
            history.take(reading)
        drawn = hardware.charts([_History(history)], from_now=True) if len(history) > 1 and not self._recorded else []
        columns, rows = _table(readings[-1]) if readings else ([], [])
        notes = [*self._notes, *(_names(readings[-1]) if readings else ())]
        return template("machine").render(columns=columns, rows=rows, notes=notes, charts=drawn)


def _why(path: Path, error: UserError) -> str:
    """Why there is no run to show yet."""
    if not path.exists():
        return "The folder does not exist yet."
    return "The run has written nothing yet." if path.is_dir() else f"{error}."


def tag_of(page: str) -> str:
    """The ETag of a page."""
    return f'"{blake2b(page.encode(), digest_size=12).hexdigest()}"'


def _sign(folder: Path, patience: float) -> object:
    """Something that changes whenever the page of a run does.

    Args:
        folder: folder of the run.
        patience: seconds without a new line after which it counts as silent.
    """
    found = [(str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in _stats(folder, _FILES)]
    return folder.is_dir(), time.time() - _written(folder) > patience, found


def _stats(folder: Path, patterns: Sequence[str]) -> Iterator[tuple[Path, os.stat_result]]:
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            with suppress(OSError):  # removed meanwhile
                yield path, path.stat()


def _written(folder: Path) -> float:
    """When a run last wrote a line, seconds since 1970; 0 if it wrote none."""
    return max((stat.st_mtime for _, stat in _stats(folder, _JOURNALS)), default=0.0)


def _patience(run: RunFolder) -> float:
    """Seconds without a new line after which a run counts as silent: a few readings of its counters, or ten steps."""
    gaps = np.diff([line["time"] for line in run.hardware[-20:]])
    if len(gaps) and time.time() - run.hardware[-1]["time"] < _RECORDED:
        return max(_LEAST, 6 * float(np.median(gaps)))
    seconds = run.steps["seconds"][-20:]
    return max(_QUIET, 10 * float(np.median(seconds))) if np.isfinite(seconds).any() else _QUIET


def _state(run: RunFolder, patience: float) -> State:
    written = _written(run.path)
    if run.finished:
        return "finished", "Finished", written
    if not written:
        return "running", "Started, nothing written yet", 0.0
    if time.time() - written > patience:
        return "silent", "Nothing new: the run has stopped, hangs or was killed", written
    told = progress(run.path)
    words = [f"cycle {told['cycle']}"] if "cycle" in told else []
    words += [str(told["phase"])] if "phase" in told else []
    words += [f"{duration(told['seconds_left'])} left"] if "seconds_left" in told else []
    return "running", "Running" + (f": {', '.join(words)}" if words else ""), written


def _table(reading: Mapping[str, Any]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The columns with values, and names and values of each GPU and of the host."""
    rows = []
    for i, gpu in enumerate(reading["gpus"]):
        cells = [_percent(gpu.get("busy")), _used(gpu, "vram"), _used(gpu, "gtt")]
        cells += [f"{gpu[key]:.0f}" if key in gpu else "" for key in ("power", "temperature", "clock")]
        rows.append((f"GPU {i}", cells))
    host = reading["host"]
    rows.append(("Host", [_percent(host.get("cpu")), _used(host, "memory"), "", "", "", ""]))
    known = [any(cells[i] for _, cells in rows) for i in range(len(_COLUMNS))]
    return list(compress(_COLUMNS, known)), [(name, list(compress(cells, known))) for name, cells in rows if any(cells)]


def _names(reading: Mapping[str, Any]) -> list[str]:
    """The names of the GPUs, those of one name together."""
    found: dict[str, list[int]] = {}
    for i, gpu in enumerate(reading["gpus"]):
        found.setdefault(str(gpu.get("name", gpu.get("id", "unknown"))), []).append(i)
    return [f"GPU {', '.join(map(str, numbers))}: {name}" for name, numbers in found.items()]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} %"


def _used(counters: Mapping[str, Any], pool: str) -> str:
    used, total = (counters.get(f"{pool}_{what}") for what in ("used", "total"))
    if used is None:
        return ""
    return " of ".join(f"{size / _GIB:.{int(size < 100 * _GIB)}f}" for size in (used, total) if size is not None)
