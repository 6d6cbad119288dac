"""The system's files, of this machine or of a recorded one."""

import re
from dataclasses import dataclass
from pathlib import Path

from rocm_ext.machine.detect import amd_gpus, ttm_module
from rocm_ext.machine.processes import GpuProcess, gpu_memory_by_process
from rocm_ext.machine.sysfs import (
    AMD,
    Sensor,
    cards,
    listing,
    read_number,
    read_text,
    temperatures,
)

NVIDIA = "0x10de"  # PCI vendor
# The firmware's mode; FILE_choices has all modes. Mini PCs with Sixunited's board (EVO-X2, Bosgame M5, others) have a
# button instead, which their owners' driver ec_su_axb35 shows
POWER_MODES = ("sys/class/ec_su_axb35/apu/power_mode", "sys/firmware/acpi/platform_profile")


@dataclass(frozen=True)
class Card:
    """A GPU's folder in /sys/class/drm. Unknown numbers are None, unknown texts empty."""

    vendor: str
    device: str  # PCI device: "0x1586"
    vram: int | None  # bytes
    gtt: int | None  # bytes of host memory that it may map
    mes: int | None  # version of the firmware that schedules the GPU's work
    vbios: str
    used: int  # bytes of vram and gtt
    folder: str  # its files, below the root
    cap: int | None  # W that it may take
    usual_cap: int | None  # W, unless somebody changes it
    level: str  # how the driver chooses the clocks: "auto", "low", ...

    @property
    def is_amd(self) -> bool:
        """Whether the GPU is AMD's; if the vendor is missing, amdgpu's files decide."""
        if self.vendor:
            return self.vendor == AMD
        return any(fact is not None for fact in (self.gtt, self.vram, self.mes))


@dataclass(frozen=True)
class System:
    """The content of Linux's files; empty on other systems."""

    distribution: dict[str, str]  # /etc/os-release
    parameters: dict[str, str] | None  # the kernel's command line
    memory: dict[str, int]  # /proc/meminfo, bytes
    cpu: str
    amd_gpus: tuple[str, ...]  # architectures that KFD lists, one per GPU
    cards: tuple[Card, ...]
    displays: dict[str, str]  # PCI address and vendor of all GPUs, also of those without a driver
    accelerators: int  # AMD GPUs without a display: Instinct
    ttm: str  # the module that maps host memory: amdttm with AMD's DKMS driver
    pages_limit: int | None  # that module's limit in effect; pages of 4 KiB
    numa_balancing: int | None
    processes: tuple[GpuProcess, ...]
    driver: str  # the version of amdgpu, where AMD's DKMS package replaces the kernel's own
    lockup_timeout: str  # amdgpu's, milliseconds; empty: its default
    sensors: tuple[Sensor, ...]
    # of the machine's firmware, by file: the mode, and all modes
    power_modes: dict[str, tuple[str, str]]
    groups: dict[str, tuple[str, ...]] | None  # /etc/group: members
    nvidia: str  # the driver's version


def read_system(root: Path) -> System:
    """Parse the files below ``root``; a missing or damaged one leaves its facts unknown."""

    def text(path: str) -> str:
        return read_text(root / path)

    cpu = re.search(r"^model name\s*:\s*(.+)$", text("proc/cpuinfo"), re.MULTILINE)
    distribution = {}
    release = text("etc/os-release") or text("usr/lib/os-release")
    for key, value in re.findall(r"^(\w+)=(.*)$", release, re.MULTILINE):
        distribution[key] = value.strip("\"'")
    nvidia = re.search(
        r"Kernel Module[^\n]*?\s(\d+\.\d+(\.\d+)?)(\s|$)", text("proc/driver/nvidia/version")
    )
    command_line = text("proc/cmdline")
    sizes = re.findall(r"^(\w+):\s+([0-9]{1,15}) kB$", text("proc/meminfo"), re.MULTILINE)
    displays = _displays(root)
    accelerators = [vendor for kind, vendor in displays.values() if kind.startswith("0x12")]
    ttm = ttm_module(root)
    return System(
        distribution=distribution,
        parameters=_parameters(command_line) if command_line else None,
        memory={key: int(number) * 1024 for key, number in sizes},
        cpu=cpu[1] if cpu else "",
        amd_gpus=tuple(amd_gpus(root)),
        cards=tuple(_card(card / "device", root) for card in cards(root)),
        displays={name: vendor for name, (_, vendor) in displays.items()},
        accelerators=accelerators.count(AMD),
        ttm=ttm,
        pages_limit=read_number(root / f"sys/module/{ttm}/parameters/pages_limit"),
        numa_balancing=read_number(root / "proc/sys/kernel/numa_balancing"),
        processes=tuple(gpu_memory_by_process(root)),
        driver=text("sys/module/amdgpu/version"),
        lockup_timeout=text("sys/module/amdgpu/parameters/lockup_timeout"),
        sensors=tuple(temperatures(root)),
        power_modes=_power_modes(root),
        groups=_groups(text("etc/group")),
        nvidia=nvidia[1] if nvidia else "",
    )


def _displays(root: Path) -> dict[str, tuple[str, str]]:
    """The PCI class and vendor of all GPUs by address; MI300X is a processing accelerator."""
    folder = root / "sys/bus/pci/devices"
    displays = {}
    for name in listing(folder):
        kind = read_text(folder / name / "class")
        if kind.startswith(("0x03", "0x12")):
            displays[name] = kind, read_text(folder / name / "vendor")
    return displays


def _card(device: Path, root: Path) -> Card:
    used = [read_number(device / f"mem_info_{pool}_used") for pool in ("vram", "gtt")]
    hwmon = device / "hwmon"
    for name in listing(hwmon)[:1]:
        hwmon /= name
    return Card(
        read_text(device / "vendor"),
        read_text(device / "device"),
        read_number(device / "mem_info_vram_total"),
        read_number(device / "mem_info_gtt_total"),
        read_number(device / "fw_version/mes_fw_version"),
        read_text(device / "vbios_version"),
        used=sum(filter(None, used)),
        folder=str(device.relative_to(root)),
        cap=_watts(hwmon / "power1_cap"),
        usual_cap=_watts(hwmon / "power1_cap_default"),
        level=read_text(device / "power_dpm_force_performance_level"),
    )


def _watts(path: Path) -> int | None:
    microwatts = read_number(path)
    return None if microwatts is None else round(microwatts / 1e6)


def _power_modes(root: Path) -> dict[str, tuple[str, str]]:
    modes = {}
    for file in POWER_MODES:
        mode = read_text(root / file)
        if mode:
            modes[file] = (mode, read_text(root / f"{file}_choices"))
    return modes


def _parameters(text: str) -> dict[str, str]:
    parameters = {}
    for word in text.replace('"', "").split():  # the kernel allows quotes
        name, _, value = word.partition("=")
        parameters[name.replace("-", "_")] = value  # the kernel treats - and _ in names alike
    return parameters


def _groups(text: str) -> dict[str, tuple[str, ...]] | None:
    groups = {}
    for line in text.splitlines():
        fields = line.split(":")
        if len(fields) == 4:
            name, _, _, members = fields
            groups[name] = tuple(filter(None, members.split(",")))
    return groups or None
