"""Times of repeated work: warm-up, repeats, median and quartiles."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import torch


@dataclass(frozen=True)
class Times:
    """Seconds of one call: the median and the quartiles of ``repeats``."""

    median: float
    low: float
    high: float
    repeats: int

    def rate(self, amount: float) -> dict[str, float]:
        """``amount`` per second: ``value`` with ``low`` and ``high``."""
        return {"value": amount / self.median, "low": amount / self.high, "high": amount / self.low}


def measure(
    work: Callable[[], Any], device: torch.device, *, seconds: float, least: int = 5, warm_up: int = 2
) -> Times:
    """Call ``work`` for ``seconds``, and ``least`` times at least, after ``warm_up`` calls that do not count.

    On a GPU each call is waited for; work in chunks that outlast the launch of their kernels.
    """
    for _ in range(warm_up):
        work()
    wait(device)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        wait(device)
        times.append(time.perf_counter() - began)
    low, middle, high = quantiles(times, n=4, method="inclusive")
    return Times(middle, low, high, len(times))


def wait(device: torch.device) -> None:
    """Until ``device`` has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
