"""The load of other programs while something is measured."""

import os
import time

import psutil


def clocks() -> tuple[float, float, float]:
    """The time, and processor time of all programs and of this one with its ended children, all in seconds."""
    times, own_times = psutil.cpu_times(), os.times()
    used = times.user + times.system + getattr(times, "nice", 0.0)
    own = own_times.user + own_times.system + own_times.children_user + own_times.children_system
    return time.perf_counter(), used, own


class OtherPrograms:
    """The load of other programs since this object was made.

    One busy core of two makes small steps ten times slower when threads wait for one another (measured), and so evenly
    that quartiles do not show it.
    """

    WORTH_TELLING = 0.1  # cores

    def __init__(self) -> None:
        self._began = clocks()

    def cores(self) -> float:
        """Cores that other programs kept busy on average. 0 on Windows, which hides children's time."""
        elapsed, used, own = (
            now - before for now, before in zip(clocks(), self._began, strict=True)
        )
        if os.name == "nt":
            return 0.0
        return max(0.0, (used - own) / elapsed)
