"""How much of the machine other programs use while it is measured."""

import os
import time
from typing import NamedTuple

import psutil


class Seconds(NamedTuple):
    """A reading of clocks."""

    clock: float
    all: float  # processor time of all programs, since boot
    own: float  # of this program and of its children that have ended


class OtherPrograms:
    """Measures from the moment it is made.

    One busy core of two makes small steps ten times slower where threads wait for each other (measured), and so evenly
    that quartiles do not show it.
    """

    WORTH_TELLING = 0.1  # cores

    def __init__(self) -> None:
        self._began = seconds()

    def cores(self) -> float:
        """Cores that other programs kept busy since then, on average. 0 on Windows, which hides children's time."""
        elapsed, every, own = (now - then for now, then in zip(seconds(), self._began, strict=True))
        return 0.0 if os.name == "nt" else max(0.0, (every - own) / max(elapsed, 1e-9))


def seconds() -> Seconds:
    """Read the clocks."""
    every, own = psutil.cpu_times(), os.times()
    used = every.user + every.system + getattr(every, "nice", 0.0)
    return Seconds(time.perf_counter(), used, own.user + own.system + own.children_user + own.children_system)
