"""The number of torch's threads on a CPU: one per core that other programs leave free, chosen once.

A parallel loop ends with its last thread, so a thread without a core makes all others wait. Next to one busy program
on two cores, two threads computed a sixth of what one thread computed (measured). The number stays the same during a
run, because sums of another number of threads differ in their last bits.
"""

import math
import os
import statistics
import time
from collections.abc import Mapping
from typing import NamedTuple

import psutil
import torch

from rocm_ext.machine.sysfs import CpuQuota, cpu_quota

# torchrun sets the first for several ranks of a machine
USERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# the median of these looks decides, so a program that ends meanwhile costs no thread
LOOKS, SECONDS = (5, 0.04)
_TORCHS = torch.get_num_threads()  # torch's own choice, which a run replaces


class Clocks(NamedTuple):
    """A reading, in seconds."""

    now: float
    idle: float  # idle time of the CPUs that this process may use
    process: float  # processor time of this process
    group: float | None  # processor time of the control group with a quota

    @classmethod
    def read(cls, quota: CpuQuota | None) -> "Clocks":
        """Read the clocks; without per-process affinity all CPUs count."""
        cpus = psutil.cpu_times(percpu=True)
        if hasattr(os, "sched_getaffinity"):
            allowed = os.sched_getaffinity(0)
            cpus = [times for number, times in enumerate(cpus) if number in allowed] or cpus
        idle = sum(times.idle + getattr(times, "iowait", 0.0) for times in cpus)
        group = quota.used() if quota else None
        return cls(time.monotonic(), idle, time.process_time(), group)


def cores() -> float:
    """Cores that this process may use, by its affinity and the quota of its control group."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    quota = cpu_quota()
    return min(allowed, quota.cpus) if quota else allowed


def free_cores() -> float:
    """Cores that other programs leave to this one at present; it takes a fifth of a second."""
    quota = cpu_quota()
    looks = []
    before = Clocks.read(quota)
    for _ in range(LOOKS):
        time.sleep(SECONDS)
        now = Clocks.read(quota)
        used = now.process - before.process
        seconds = now.now - before.now
        free = (now.idle - before.idle + used) / seconds
        if quota is not None and now.group is not None and before.group is not None:
            others = now.group - before.group - used  # other processes of the group
            free = min(free, quota.cpus - others / seconds)
        looks.append(free)
        before = now
    return max(0.0, statistics.median(looks))


def choose_threads(environ: Mapping[str, str], deterministic: bool = False) -> tuple[int, str]:
    """Choose the threads of a new run on a CPU.

    Args:
        environ: the user's environment, which takes precedence.
        deterministic: whether runs must compute the same next to any other programs.

    Returns:
        The number and the reason.
    """
    for name in USERS:
        if environ.get(name):
            return _TORCHS, f"{name} is set"
    most = max(1, min(_TORCHS, int(cores())))  # torch knows no quota
    if deterministic or most == 1:
        return most, "one for each core that this process may use"
    free = free_cores()
    # half a core of others' work costs more than the last thread gains
    return max(1, min(most, math.floor(free + 0.5))), f"other programs leave {free:.1f} cores"
