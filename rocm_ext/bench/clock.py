"""Times repeated work: warm-up, repeats, median and quartiles."""

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

    @classmethod
    def of(cls, times: list[float]) -> "Times":
        """Summarise the seconds of each call; there are at least two."""
        low, middle, high = quantiles(times, n=4, method="inclusive")
        return cls(middle, low, high, len(times))

    def rate(self, amount: float) -> dict[str, float]:
        """``amount`` per second: ``value`` with ``low`` and ``high``."""
        return {"value": amount / self.median, "low": amount / self.high, "high": amount / self.low}


def measure(
    work: Callable[[], Any], device: torch.device, *, seconds: float, least: int = 5, warm_up: int = 2
) -> Times:
    """Time calls of ``work``.

    On a GPU it waits for each call: ``work`` should last longer than the launch of its kernels.

    Args:
        work: function to time.
        device: device that runs it.
        seconds: time for which it is called again and again.
        least: number of calls that are made in any case.
        warm_up: number of calls before these, which are not timed.
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
    return Times.of(times)


def wait(device: torch.device) -> None:
    """Wait until ``device`` has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
