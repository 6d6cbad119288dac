"""How much of the machine other programs take while it is measured."""

import os
import time

import psutil


class OtherPrograms:
    """Counts from the moment it is made.

    Where threads wait for each other, one busy core of two makes small steps ten times slower (measured), so evenly
    that quartiles do not show it.
    """

    WORTH_TELLING = 0.1  # cores

    def __init__(self) -> None:
        self._began = self._now()

    def cores(self) -> float:
        """Cores that others kept busy since then, on average; 0 on Windows, which does not tell children's time."""
        elapsed, busy, own = (now - then for now, then in zip(self._now(), self._began, strict=True))
        return 0.0 if os.name == "nt" else max(0.0, (busy - own) / max(elapsed, 1e-9))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        every, own = psutil.cpu_times(), os.times()
        busy = every.user + every.system + getattr(every, "nice", 0.0)
        return time.perf_counter(), busy, own.user + own.system + own.children_user + own.children_system
