"""How many threads torch computes with on a CPU: as many as have a core, beside other programs' work.

A parallel loop ends with its last thread. A thread without a core makes all others wait, and beside busy programs two
threads on two cores compute a sixth of what one thread computes (docs/hardware.md has the measurements).
"""

import math
import os
import time
from collections.abc import Mapping
from typing import NamedTuple

import psutil
import torch

from rocm_ext.hardware.cgroups import CpuQuota, cpu_quota
from rocm_ext.log import log

USERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # torchrun sets the first for several ranks of a machine
WINDOW = 2.0  # seconds of a measurement; the kernel counts in hundredths
CALM = 3  # measurements in a row that must find a core free before a thread joins


class Clocks(NamedTuple):
    """A reading, in seconds."""

    now: float
    idle: float  # of the CPUs that this process may use
    own: float  # processor time of this process
    group: float | None  # processor time of the control group with a quota

    @classmethod
    def read(cls, quota: CpuQuota | None) -> "Clocks":
        """Read the clocks; without per-process affinity all CPUs count."""
        cpus = psutil.cpu_times(percpu=True)
        if hasattr(os, "sched_getaffinity"):
            allowed = os.sched_getaffinity(0)
            cpus = [times for number, times in enumerate(cpus) if number in allowed] or cpus
        idle = sum(times.idle + getattr(times, "iowait", 0.0) for times in cpus)
        return cls(time.monotonic(), idle, time.process_time(), quota.used() if quota else None)


class Threads:
    """Follows the number of cores that other programs, including this one's children, leave to this process.

    Args:
        most: threads on a machine without other work.
        quota: limit of the control group.

    Attributes:
        count: threads now.
    """

    def __init__(self, most: int, quota: CpuQuota | None) -> None:
        self.most = self.count = most
        self._quota, self._calm = quota, 0
        self._last = Clocks.read(quota)

    def follow(self) -> None:
        """Give the calling thread's parallel loops the present number of threads; measure where it is time."""
        if time.monotonic() - self._last.now >= WINDOW:
            self._choose(self._free())
        if torch.get_num_threads() != self.count:  # torch keeps a number for each Python thread
            torch.set_num_threads(self.count)

    def _free(self) -> float:
        """Cores that others left since the last measurement: idle ones and those that this process used."""
        before, self._last = self._last, Clocks.read(self._quota)
        seconds = self._last.now - before.now
        own = self._last.own - before.own
        free = (self._last.idle - before.idle + own) / seconds
        if self._quota is not None and self._last.group is not None and before.group is not None:
            free = min(free, self._quota.cpus - (self._last.group - before.group - own) / seconds)
        return free

    def _choose(self, free: float) -> None:
        # Half a core of others' work is too much for a thread to stay, a quarter for one to join. So an even load
        # does not make the number swing.
        stay, join = (max(1, min(self.most, math.floor(free + part))) for part in (0.5, 0.25))
        self._calm = self._calm + 1 if join > self.count else 0
        chosen = join if self._calm >= CALM else min(self.count, stay)
        if chosen != self.count:
            self.count, self._calm = chosen, 0
            log.info(
                "cpu_threads: %d of %d, because other programs leave %.1f cores to this one",
                chosen, self.most, max(0.0, free),
            )  # fmt: skip


_threads: Threads | None = None  # of this process, like torch's own number


def use_threads(setting: int | str, device: torch.device, environ: Mapping[str, str], fixed: bool = False) -> None:
    """Choose the threads of this process.

    Args:
        setting: their number; ``auto``: as many as have a core at present, unless ``environ`` says a number.
        device: that the run computes on; ``auto`` acts on a CPU alone.
        environ: the user's environment.
        fixed: ``auto`` keeps torch's number.
    """
    global _threads
    before, _threads = _threads, None
    if before is not None:  # of an earlier run in this process
        torch.set_num_threads(before.most)
    if setting != "auto":
        torch.set_num_threads(int(setting))
    elif device.type == "cpu" and not fixed and not any(environ.get(name) for name in USERS):
        quota = cpu_quota()
        most = torch.get_num_threads()
        if quota is not None:  # which torch does not know
            most = min(most, max(1, int(quota.cpus)))
        torch.set_num_threads(most)
        _threads = Threads(most, quota) if most > 1 else None


def follow_free_cores() -> None:
    """Adapt the threads to the free cores, every few seconds; call it before each piece of computation."""
    if _threads is not None:
        _threads.follow()
