"""The system's files, of this machine or of a recorded one."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from rocm_ext.machine.detect import amd_gpus, kernel_release, ttm_module
from rocm_ext.machine.doctor.recorded import Process
from rocm_ext.machine.sysfs import cards, listing, read_number, read_text, to_number

AMD, NVIDIA = "0x1002", "0x10de"  # PCI vendors


@dataclass(frozen=True)
class Card:
    """A GPU's folder in /sys/class/drm. Unknown numbers are None, unknown texts empty."""

    vendor: str
    device: str  # PCI device: "0x1586"
    vram: int | None  # bytes
    gtt: int | None  # bytes of host memory that it may map
    mes: int | None  # version of the firmware that schedules the GPU's work
    vbios: str

    @property
    def is_amd(self) -> bool:
        """Whether the GPU is AMD's; if the vendor is missing, amdgpu's files decide."""
        if self.vendor:
            return self.vendor == AMD
        return any(fact is not None for fact in (self.gtt, self.vram, self.mes))


@dataclass(frozen=True)
class System:
    """The content of Linux's files; empty on other systems."""

    kernel: str
    distribution: dict[str, str]  # /etc/os-release
    parameters: dict[str, str] | None  # of the kernel's command line
    memory: dict[str, int]  # /proc/meminfo, bytes
    cpu: str
    amd_gpus: tuple[str, ...]  # architectures that KFD lists, one per GPU
    cards: tuple[Card, ...]
    displays: dict[str, str]  # PCI address and vendor of all GPUs, also of those without a driver
    accelerators: int  # AMD GPUs without a display: Instinct
    ttm: str  # the module that maps host memory: amdttm with AMD's DKMS driver
    pages_limit: int | None  # of that module, in effect; pages of 4 KiB
    numa_balancing: int | None
    processes: tuple[Process, ...]  # on AMD GPUs
    groups: dict[str, tuple[str, ...]] | None  # /etc/group: members
    nvidia: str  # the driver's version
    unreadable: tuple[str, ...] = field(default=())  # files with unexpected content


def read_system(root: Path) -> System:
    """Parse the files below ``root``, without the missing ones; list damaged ones in ``unreadable``."""
    reader = _Reader(root)
    cpu = re.search(r"^model name\s*:\s*(.+)$", reader.text("proc/cpuinfo"), re.MULTILINE)
    distribution = {}
    release = reader.text("etc/os-release") or reader.text("usr/lib/os-release")
    for key, value in re.findall(r"^(\w+)=(.*)$", release, re.MULTILINE):
        distribution[key] = value.strip("\"'")
    nvidia = reader.text("proc/driver/nvidia/version") + " "
    nvidia_version = re.search(r"Kernel Module[^\n]*?\s(\d+\.\d+(\.\d+)?)\s", nvidia)
    command_line = reader.text("proc/cmdline")
    ttm = ttm_module(root)
    return System(
        kernel=reader.kernel(),
        distribution=distribution,
        parameters=_parameters(command_line) if command_line else None,
        memory=reader.meminfo(),
        cpu=cpu[1] if cpu else "",
        amd_gpus=tuple(amd_gpus(root)),
        cards=tuple(reader.card(card.relative_to(root) / "device") for card in cards(root)),
        displays=reader.displays("0x(03|12)"),  # MI300X: processing accelerator
        accelerators=list(reader.displays("0x12").values()).count(AMD),
        ttm=ttm,
        pages_limit=reader.number(f"sys/module/{ttm}/parameters/pages_limit"),
        numa_balancing=reader.number("proc/sys/kernel/numa_balancing"),
        processes=tuple(reader.processes()),
        groups=_groups(reader.text("etc/group")),
        nvidia=nvidia_version[1] if nvidia_version else "",
        unreadable=tuple(reader.unreadable),
    )


class _Reader:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.unreadable: list[str] = []

    def text(self, path: str | Path) -> str:
        return read_text(self.root / path)

    def number(self, path: str | Path) -> int | None:
        number = read_number(self.root / path)
        if number is None and self.text(path):
            self.unreadable.append(str(path))
        return number

    def kernel(self) -> str:
        kernel = kernel_release(self.root)
        if not kernel and self.text("proc/sys/kernel/osrelease"):
            self.unreadable.append("proc/sys/kernel/osrelease")
        return kernel

    def meminfo(self) -> dict[str, int]:
        text = self.text("proc/meminfo")
        sizes = re.findall(r"^(\w+):\s+([0-9]{1,15}) kB$", text, re.MULTILINE)
        memory = {key: int(number) * 1024 for key, number in sizes}
        if text and "MemTotal" not in memory:
            self.unreadable.append("proc/meminfo")
        return memory

    def card(self, device: Path) -> Card:
        return Card(
            self.text(device / "vendor"),
            self.text(device / "device"),
            self.number(device / "mem_info_vram_total"),
            self.number(device / "mem_info_gtt_total"),
            self.number(device / "fw_version/mes_fw_version"),
            self.text(device / "vbios_version"),
        )

    def displays(self, classes: str) -> dict[str, str]:
        folder = Path("sys/bus/pci/devices")
        vendors = {}
        for name in listing(self.root / folder):
            if re.match(classes, self.text(folder / name / "class")):
                vendors[name] = self.text(folder / name / "vendor")
        return vendors

    def processes(self) -> list[Process]:
        folder = Path("sys/class/kfd/kfd/proc")
        processes = []
        for name in listing(self.root / folder):
            pid = to_number(name) if name.isdecimal() else None
            if pid is None:
                continue
            memory = 0
            for file in listing(self.root / folder / name):
                if file.startswith("vram_"):
                    memory += self.number(folder / name / file) or 0
            processes.append(Process(pid, self.text(f"proc/{name}/comm"), memory))
        return processes


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
            groups[fields[0]] = tuple(filter(None, fields[3].split(",")))
    return groups or None
