"""The kernel's files, below ``/`` or in a recorded copy. A file that cannot be read counts as absent."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

AMD = "0x1002"  # PCI vendor
_MOST = 4 << 20  # bytes; /proc/cpuinfo of 384 threads has 1 MB
_LABELS = ("edge", "junction", "mem", "Tctl")
HOTTEST = 250  # °C; a GPU that is powered off reports 511
# °C by PCI device, where neither amdgpu nor k10temp has a limit. Firmware of Ryzen AI Max slows it down at 95 to 100
# (RyzenAdj#334)
_LIMITS = {"0x1586": 100.0}


def read_text(path: Path) -> str:
    """The file's text, stripped; empty if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            content = b""
            while len(content) < _MOST:
                chunk = file.read(1 << 16)  # /proc/sys refuses reads of 4 MiB
                if not chunk:
                    break
                content += chunk
            return content.decode(errors="replace").strip()
    except (OSError, ValueError):
        return ""


def read_number(path: Path) -> int | None:
    """The number in the file, see :func:`to_number`."""
    return to_number(read_text(path))


def to_number(text: str) -> int | None:
    """``text`` as a number, decimal or ``0x…``; None if it is not a number below 2^63."""
    if not re.fullmatch(r"[0-9]{1,19}|0x[0-9a-fA-F]{1,16}", text):
        return None
    number = int(text, 16 if text.startswith("0x") else 10)
    return number if number < 2**63 else None


def host_memory(root: Path, key: str) -> int:
    """Bytes of ``key`` ("MemTotal" or "MemAvailable") in /proc/meminfo, or from psutil without that file."""
    match = re.search(rf"^{key}:\s+(\d{{1,15}}) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    if match:
        return int(match[1]) * 1024
    memory = psutil.virtual_memory()
    return memory.available if key == "MemAvailable" else memory.total


def listing(folder: Path) -> list[str]:
    """The names in a folder, numbers in numeric order; empty if it cannot be read."""
    try:
        names = os.listdir(folder)
    except (OSError, ValueError):
        return []

    def in_order(name: str) -> str:
        return re.sub(r"\d+", lambda number: number[0].zfill(20), name)

    return sorted(names, key=in_order)


def cards(root: Path) -> list[Path]:
    """The GPUs' folders ``card0``, ``card1``, … without connectors (``card0-DP-1``) and render nodes."""
    folder = root / "sys/class/drm"
    return [folder / name for name in listing(folder) if re.fullmatch(r"card\d+", name)]


class Sensor(NamedTuple):
    """A temperature.

    Attributes:
        device: "card0", a GPU's folder in /sys/class/drm; or "cpu".
        label: "edge", "junction" (the hottest spot) or "mem" of a GPU, "Tctl" of a processor.
        celsius: °C.
        limit: °C at which the hardware slows down, if it is known.
    """

    device: str
    label: str
    celsius: float
    limit: float | None


def temperatures(root: Path = Path("/")) -> list[Sensor]:
    """The temperatures of AMD's GPUs, in about a millisecond. It wakes no GPU that sleeps.

    An integrated GPU has the edge only, and its firmware looks at the processor's Tctl, which follows it. Beside a GPU
    with a junction, Tctl says nothing about the GPU and is left out. Files:
    docs.kernel.org/gpu/amdgpu/thermal.html.
    """
    sensors = []
    limit = None
    for card in cards(root):
        device = card / "device"
        # older kernels wake it up: rocm-systems#8024
        asleep = read_text(device / "power/runtime_status") == "suspended"
        if asleep or read_text(device / "vendor") != AMD:
            continue
        for name in listing(device / "hwmon")[:1]:
            limit = _LIMITS.get(read_text(device / "device"))
            sensors += _sensors(device / "hwmon" / name, card.name, limit)
    labels = {sensor.label for sensor in sensors}
    if "edge" not in labels or "junction" in labels:
        return sensors
    for name in k10temps(root):
        sensors += _sensors(root / "sys/class/hwmon" / name, "cpu", limit)
    return sensors


def k10temps(root: Path) -> list[str]:
    """The names of the folders in /sys/class/hwmon with an AMD processor's temperatures."""
    folder = root / "sys/class/hwmon"
    return [name for name in listing(folder) if read_text(folder / name / "name") == "k10temp"]


def hottest(sensors: list[Sensor]) -> Sensor | None:
    """The sensor that decides about throttling; memory counts by its own, higher limit."""
    cores = [sensor for sensor in sensors if sensor.label != "mem"]
    return max(cores, key=lambda sensor: sensor.celsius, default=None)


def _sensors(hwmon: Path, device: str, limit: float | None) -> list[Sensor]:
    """The sensors in a folder of the kernel's, with ``limit`` where the kernel has none."""
    sensors = []
    for number, usual in enumerate(("edge", "junction", "mem"), start=1):
        label = read_text(hwmon / f"temp{number}_label") or usual
        celsius = _celsius(hwmon / f"temp{number}_input")
        if celsius is None or label not in _LABELS:
            continue
        critical = _celsius(hwmon / f"temp{number}_crit")
        if critical is None:
            critical = _celsius(hwmon / f"temp{number}_emergency")
        sensors.append(Sensor(device, label, celsius, critical or limit))
    return sensors


def _celsius(path: Path) -> float | None:
    number = read_number(path)
    if number is None or number > HOTTEST * 1000:
        return None
    return number / 1000


def cgroups(root: Path) -> list[tuple[str, Path]]:
    """(controller, folder) of this process's control groups and their parents; version 2 has one controller, ""."""
    groups = []
    for controllers, path in re.findall(
        r"^\d+:([^:]*):(.*)$", read_text(root / "proc/self/cgroup"), re.MULTILINE
    ):
        for controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
            group = top / path.strip("/")
            for folder in (group, *group.parents):
                if folder == group or folder.is_relative_to(top):
                    groups.append((controller, folder))
    return groups


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
        """Processor seconds of the group so far; None if the kernel does not count them."""
        counted = re.search(
            r"^usage_usec (\d+)$", read_text(self.folder / "cpu.stat"), re.MULTILINE
        )
        if counted:
            return int(counted[1]) / 1e6
        nanoseconds = read_number(self.folder / "cpuacct.usage")
        return None if nanoseconds is None else nanoseconds / 1e9


def cpu_quota(root: Path = Path("/")) -> CpuQuota | None:
    """The tightest quota of this process's groups and their parents; None without one."""
    quotas = []
    for controller, folder in cgroups(root):
        if controller == "":
            quota, _, period = read_text(folder / "cpu.max").partition(" ")
        elif controller == "cpu":
            quota = read_text(folder / "cpu.cfs_quota_us")
            period = read_text(folder / "cpu.cfs_period_us")
        else:
            continue
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(CpuQuota(int(quota) / int(period), folder))
    return min(quotas, key=lambda quota: quota.cpus, default=None)
