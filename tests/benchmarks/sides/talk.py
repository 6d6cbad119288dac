"""A side's end of the pipe to :mod:`tests.benchmarks.protocol`, and a metric logger that runs steps on order."""

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@cache
def pipe() -> Connection:
    """Open the pipe to the harness, which passes its file descriptor in the environment."""
    return Connection(int(os.environ["BENCHMARK_PIPE"]))


def hear() -> dict[str, Any]:
    """Wait for the next order; if the harness has ended, end this process."""
    try:
        return pipe().recv()
    except EOFError:
        os._exit(0)


def peak_memory() -> int:
    """Peak bytes of the GPU's tensors; without a GPU, of the process including libraries."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()  # getrusage's peak includes the parent's before exec
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def reset_peak() -> None:
    """Reset the peak that :func:`peak_memory` returns."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):  # some kernels lack this file
            Path("/proc/self/clear_refs").write_text("5")


class Pace:
    """Lets a trainer run as many steps as the harness orders, then reports the seconds and the loss of each.

    The time between a report and the next order does not count.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[float, float]] = []
        self._wait()

    def step(self, loss: float) -> None:
        """Record the end of a step. The first step's time includes the rest of the set-up."""
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
            sys.modules["torch"].cuda.synchronize()
        now = time.perf_counter()
        self._steps.append((now - self._began, loss))
        self._began = now
        if len(self._steps) == self._ordered:
            pipe().send({"steps": self._steps, "peak_memory": peak_memory()})
            self._steps = []
            self._wait()

    def _wait(self) -> None:
        self._ordered = hear()["steps"]
        self._began = time.perf_counter()


class StepLogger:
    """A torchtune metric logger that calls :class:`Pace` at every step.

    Args:
        value: name of the measurement that is reported.
        sign: name of a measurement that every step has, and nothing else.
    """

    def __init__(self, value: str = "loss", sign: str = "loss") -> None:
        self._pace, self._value, self._sign = Pace(), value, sign

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        if self._sign in payload:
            self._pace.step(float(payload.get(self._value, 0.0)))

    def log_config(self, config: object) -> None:
        """Do nothing; torchtune's interface requires this method."""

    def close(self) -> None:
        """Do nothing; no file is open."""
