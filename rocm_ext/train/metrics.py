"""``metrics.jsonl``: what a run measured, a line per step, and what the lines add up to."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from rocm_ext.files import disk_errors, read_lines, replace_text


class Metrics:
    """``metrics.jsonl``: one JSON object per line, written at once.

    Args:
        path: the file.
        keep: which lines of an earlier process stay: those of steps that are about to be done again go. A last
            line that a kill tore goes too.
    """

    def __init__(self, path: Path, keep: Callable[[dict[str, Any]], bool] = lambda line: True) -> None:
        lines = [line for line in read_metrics(path) if keep(line)]
        replace_text(path, "".join(json.dumps(line) + "\n" for line in lines))
        self._path = path

    def write(self, **values: Any) -> None:
        """Append one line."""
        with disk_errors(self._path), self._path.open("a") as file:
            file.write(json.dumps(values) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``, without a torn last one.

    Raises:
        UserError: naming a damaged line.
    """
    return list(read_lines(path))


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


def peak_memory(device: torch.device) -> int:
    """Bytes: the most this process has had, of the device's memory or, on a CPU, resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
