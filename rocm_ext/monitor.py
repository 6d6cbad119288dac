"""What a run tells while it goes on: log lines, a progress bar, ``metrics.jsonl``."""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from tqdm import tqdm

from rocm_ext.files import disk_errors, replace_text

log = logging.getLogger("rocm_ext")


def setup_logging() -> None:
    """Plain lines on stderr, from rank 0 alone below warnings."""
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)


class Metrics:
    """``metrics.jsonl``: one JSON object per line, written at once.

    Args:
        path: the file.
        keep: which lines of an earlier process stay: those of steps that are about to be done again go. A last
            line that a kill tore goes too.
    """

    def __init__(self, path: Path, keep: Callable[[dict[str, Any]], bool] = lambda line: True) -> None:
        lines = [line for line in read_metrics(path) if keep(line)] if path.exists() else []
        replace_text(path, "".join(json.dumps(line) + "\n" for line in lines))
        self._path = path

    def write(self, **values: Any) -> None:
        """Append one line."""
        with disk_errors(self._path), self._path.open("a") as file:
            file.write(json.dumps(values) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``, without a torn last one."""
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def summarize(path: Path) -> dict[str, Any]:
    """What the steps in a ``metrics.jsonl`` add up to."""
    steps = [line for line in read_metrics(path) if "loss" in line]
    tokens, seconds = sum(s["tokens"] for s in steps), sum(s["seconds"] for s in steps)
    return {
        "steps": len(steps),
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }


class Progress:
    """A progress bar on a terminal; elsewhere a line now and then.

    Args:
        total: steps, or what else is counted.
        start: how many of them are done already.
        enabled: False says nothing.
        unit: what is counted.
    """

    def __init__(self, total: int, start: int, enabled: bool, unit: str = "step") -> None:
        self.total, self.done, self._unit = total, start, unit
        self._bar = None
        self._enabled = enabled
        self._began, self._start, self._spoke = time.monotonic(), start, 0.0
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=start, unit=unit, dynamic_ncols=True)

    def update(self, text: str) -> None:
        """One more is done; ``text`` says how it goes."""
        self.done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
            return
        now = time.monotonic()
        if self._enabled and (now - self._spoke >= 30 or self.done in (self._start + 1, self.total)):
            self._spoke = now
            left = (now - self._began) / (self.done - self._start) * (self.total - self.done)
            known = now - self._began >= 5  # before that it would be a guess
            told = f"  {duration(left)} left" * known
            log.info("%s %d/%d  %s%s", self._unit, self.done, self.total, text, told)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()


def duration(seconds: float) -> str:
    """``75`` -> ``1m15s``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def peak_memory(device: torch.device) -> int:
    """Bytes: the most this process has had, of the device's memory or, on a CPU, resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
