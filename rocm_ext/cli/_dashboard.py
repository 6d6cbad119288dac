"""Shows readings of the hardware's counters: as a line each, or as a live table."""

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rocm_ext.base.log import duration
from rocm_ext.cli._common import table

_GIB = 2**30
_WIDTH = {"busy": 14, "memory": 13}  # of bars, histories and their columns
_SHARES = ("held_out", "flat", "accuracy", "val_accuracy")
_LEVELS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"


def line(reading: Mapping[str, Any], run: Mapping[str, Any] | None) -> str:
    """A reading as one line of text."""
    parts = [time.strftime("%H:%M:%S", time.localtime(reading["time"]))]
    for number, gpu in enumerate(reading["gpus"]):
        values = [f"busy {gpu['busy']:.0f} %"] if "busy" in gpu else []
        values += [f"{pool.upper()} {_memory(gpu, pool)} GiB" for pool in ("vram", "gtt") if f"{pool}_used" in gpu]
        units = (("power", "W"), ("temperature", "°C"), ("clock", "MHz"))
        values += [f"{gpu[key]:.0f} {unit}" for key, unit in units if key in gpu]
        parts.append(f"GPU {number}: {', '.join(values) or 'no counters'}")
    if not reading["gpus"]:
        parts.append("no GPU")
    host = reading["host"]
    values = [f"cpu {host['cpu']:.0f} %"] if "cpu" in host else []
    if "memory_used" in host:
        values.append(f"memory {_memory(host, 'memory')} GiB")
    if values:
        parts.append(f"host: {', '.join(values)}")
    if run is not None:
        parts.append(f"run: {run_text(run)}")
    return "  ".join(parts)


def run_text(run: Mapping[str, Any]) -> str:
    """The progress of a run, in words."""
    if "problem" in run:
        return run["problem"]
    formats = {
        "cycle": "cycle {}",
        "phase": "{}",
        "step": "step {:.0f}" + (f" of {run['steps']:.0f}" if "steps" in run else ""),
        "epoch": "epoch {:.0f}",
        "loss": "loss {:.4f}",
        "margin": "margin {:.3f}",
        "accuracy": "accuracy {:.1f} %",
        "val_loss": "validation loss {:.4f}",
        "val_margin": "validation margin {:.3f}",
        "val_accuracy": "validation accuracy {:.1f} %",
        "tokens_per_second": "{:,.0f} tok/s",
        "reward": "reward {:.3f}",
        "held_out": "held-out {:.1f} %",
        "flat": "{:.0f} % of groups flat",
        "entropy": "entropy {:.2f}",
        "seconds": "{:.3g} s a step",
    }
    shares = {key: 100 * run[key] for key in _SHARES if key in run}
    told = [text.format({**run, **shares}[key]) for key, text in formats.items() if key in run]
    if "seconds_left" in run:
        told.append(f"{duration(run['seconds_left'])} left")
    if not told:
        return "nothing written yet"
    if "seconds_ago" in run:
        told.append("finished" if run["finished"] else f"{run['seconds_ago']:.0f} s ago")
    return ", ".join(told)


class Dashboard:
    """A table of the GPUs with recent loads, one of the host, and the progress of the run.

    Args:
        interval: seconds between readings.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._history: dict[tuple[str, str], deque[float | None]] = defaultdict(
            lambda: deque(maxlen=max(_WIDTH.values()))
        )

    def draw(self, reading: Mapping[str, Any], run: Mapping[str, Any] | None) -> Group:
        """The content of the terminal after this reading."""
        now = time.strftime("%H:%M:%S", time.localtime(reading["time"]))
        parts: list[Any] = [Text(f"{now}, every {self._interval:g} s; Ctrl-C ends", style="dim")]
        if reading["gpus"]:
            parts += [self._gpus(reading["gpus"])]
        else:
            parts += [Text("no GPU with readable counters: AMD's need Linux and the amdgpu driver")]
        if reading["host"]:
            parts += ["", self._host(reading["host"])]
        if run is not None:
            parts += ["", Text(f"run: {run_text(run)}")]
        return Group(*parts)

    def _gpus(self, gpus: list[Mapping[str, Any]]) -> Table:
        pools = [pool for pool in ("vram", "gtt") if any(f"{pool}_used" in gpu for gpu in gpus)]
        memory = [f"{pool.upper()} GiB" for pool in pools]
        made = table("", "GPU", "busy", *memory, "W", "°C", "MHz", right=("W", "°C", "MHz"))
        for column in made.columns[2 : 2 + len(pools)]:
            column.min_width = _WIDTH["memory"]
        for number, gpu in enumerate(gpus):
            share = gpu.get("busy")
            cells: list[Text | str] = [_bar(share), *(_memory(gpu, pool) for pool in pools)]
            cells += [f"{gpu[key]:.0f}" if key in gpu else "-" for key in ("power", "temperature", "clock")]
            made.add_row(_name(f"{number} {gpu['name']}"), *cells)
            shares = [self._spark(gpu["id"], "busy", share)]
            shares += [self._spark(gpu["id"], pool, _share(gpu, pool)) for pool in pools]
            made.add_row(_name(f"  {gpu['id']}", style="dim"), *shares)
        return made

    def _host(self, host: Mapping[str, Any]) -> Table:
        made = table("", "host cpu", "memory GiB", "swap GiB")
        swap = f"{host['swap_used'] / _GIB:.1f}" if "swap_used" in host else "-"
        made.add_row(_bar(host.get("cpu")), _memory(host, "memory"), swap)
        cpu, memory = self._spark("host", "cpu", host.get("cpu")), self._spark("host", "memory", _share(host, "memory"))
        made.add_row(cpu, memory, "")
        return made

    def _spark(self, owner: str, key: str, share: float | None) -> Text:
        """The last loads (percent) as bars, the newest at the right."""
        history = self._history[owner, key]
        history.append(share)
        shown = list(history)[-_WIDTH.get(key, _WIDTH["memory"]) :]
        marks = (" " if x is None else _LEVELS[min(7, int(max(0.0, x) / 100 * 8))] for x in shown)
        return Text("".join(marks), style="cyan", no_wrap=True)


def _name(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _bar(share: float | None) -> Text:
    """A load (percent) as a bar and a number."""
    if share is None:
        return Text("-")
    eighths = round(min(100.0, share) / 100 * 8 * 8)
    blocks = "█" * (eighths // 8) + _EIGHTHS[eighths % 8] * bool(eighths % 8)
    return Text.assemble((f"{blocks:<8}", "green"), f" {share:3.0f} %", no_wrap=True)


def _memory(counters: Mapping[str, Any], pool: str) -> str:
    """``12.3/64.0``, in GiB."""
    used, total = (counters.get(f"{pool}_{what}") for what in ("used", "total"))
    if used is None:
        return "-"
    return f"{used / _GIB:.1f}/{total / _GIB:.1f}" if total is not None else f"{used / _GIB:.1f}"


def _share(counters: Mapping[str, Any], pool: str) -> float | None:
    used, total = (counters.get(f"{pool}_{what}") for what in ("used", "total"))
    return None if used is None or not total else used / total * 100
