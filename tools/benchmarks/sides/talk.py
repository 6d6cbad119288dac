"""A side's end of the pipe to :mod:`tools.benchmarks.protocol`, and a metric logger that runs steps on order."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
    lines = (
        Path("/proc/self/status").read_text().splitlines()
    )  # getrusage's peak includes the parent's before exec
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def used() -> dict[str, int]:
    """Peak bytes, and the threads that torch computes with."""
    import torch

    return {"peak_memory": peak_memory(), "threads": torch.get_num_threads()}


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
    """Lets a trainer run as many steps as the harness orders, then reports the seconds and the values of each.

    The time between a report and the next order does not count.

    Args:
        score: scores a range of rows under the reference, when the harness orders it between steps.
    """

    def __init__(self, score: Callable[[int, int], object] | None = None) -> None:
        self._score = score
        self._steps: list[tuple[float, ...]] = []
        self._wait()

    def step(self, *values: float) -> None:
        """Record the end of a step. The first step's time includes the rest of the set-up."""
        synchronize()
        now = time.perf_counter()
        self._steps.append((now - self._began, *values))
        self._began = now
        if len(self._steps) == self._ordered:
            pipe().send({"steps": self._steps, **used()})
            self._steps = []
            self._wait()

    def _wait(self) -> None:
        while "steps" not in (order := hear()):
            began = time.perf_counter()
            if self._score is not None:
                self._score(*order["score"])
                synchronize()
            pipe().send({"seconds": time.perf_counter() - began})
        self._ordered = order["steps"]
        self._began = time.perf_counter()


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.synchronize()


class Logger:
    """The part of torchtune's metric logger that does nothing."""

    def log_config(self, config: object) -> None:
        """Do nothing; torchtune's interface requires this method."""

    def close(self) -> None:
        """Do nothing; no file is open."""


class StepLogger(Logger):
    """A torchtune metric logger that calls :class:`Pace` at every step.

    Args:
        values: names of the reported measurements.
        sign: name of a measurement that only steps have.
        score: see :class:`Pace`.
    """

    def __init__(
        self,
        values: Sequence[str] = ("loss",),
        sign: str = "loss",
        score: Callable[[int, int], object] | None = None,
    ) -> None:
        self._pace, self._values, self._sign = Pace(score), values, sign

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        if self._sign in payload:
            self._pace.step(*(float(payload.get(value, 0.0)) for value in self._values))
