"""Control groups of this process: folders, and the CPUs that their quotas allow."""

import re
from dataclasses import dataclass
from pathlib import Path

from rocm_ext.machine.sysfs import read_number, read_text


def cgroups(root: Path) -> list[tuple[str, Path]]:
    """(controller, folder) of this process's control groups and their parents; version 2 has one controller, ""."""
    found = []
    for controllers, path in re.findall(r"^\d+:([^:]*):(.*)$", read_text(root / "proc/self/cgroup"), re.MULTILINE):
        for controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
            own = top / path.strip("/")
            found += [(controller, own), *((controller, up) for up in own.parents if up.is_relative_to(top))]
    return found


@dataclass(frozen=True)
class CpuQuota:
    """A limit on the processor time of a control group.

    Attributes:
        cpus: processor seconds per second.
        folder: folder of the group.
    """

    cpus: float
    folder: Path

    def used(self) -> float | None:
        """Processor seconds of the group so far; None where the kernel does not count them."""
        if counted := re.search(r"^usage_usec (\d+)$", read_text(self.folder / "cpu.stat"), re.MULTILINE):
            return int(counted[1]) / 1e6
        nanoseconds = read_number(self.folder / "cpuacct.usage")
        return None if nanoseconds is None else nanoseconds / 1e9


def cpu_quota(root: Path = Path("/")) -> CpuQuota | None:
    """The tightest quota of this process's groups and their parents; None without one.

    Args:
        root: contains ``proc`` and ``sys``.
    """
    quotas = []
    for controller, folder in cgroups(root):
        if controller == "":
            quota, _, period = read_text(folder / "cpu.max").partition(" ")
        elif controller == "cpu":
            quota, period = (read_text(folder / f"cpu.cfs_{kind}_us") for kind in ("quota", "period"))
        else:
            continue
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(CpuQuota(int(quota) / int(period), folder))
    return min(quotas, key=lambda each: each.cpus, default=None)
