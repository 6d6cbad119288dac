"""The facts about a machine, live or recorded, that the checks judge."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from rocm_ext.base.errors import UserError
from rocm_ext.machine.budget import memory_parameters, uses_carve_out
from rocm_ext.machine.detect import STRIX_HALO, Machine, Torch, describe, installed_gib
from rocm_ext.machine.doctor.recorded import NAME, DeviceNode, Recorded, gib, read_recorded
from rocm_ext.machine.doctor.system import NVIDIA, Card, System, read_system
from rocm_ext.machine.profile import Profile, intended_machine, load_profile
from rocm_ext.machine.sysfs import to_number

# The commands to install a package and to upgrade the system, by the words of ID and ID_LIKE in os-release
_MANAGERS = {
    "debian": ("sudo apt install", "sudo apt update && sudo apt full-upgrade"),
    "ubuntu": ("sudo apt install", "sudo apt update && sudo apt full-upgrade"),
    "fedora": ("sudo dnf install", "sudo dnf upgrade --refresh"),
    "rhel": ("sudo dnf install", "sudo dnf upgrade --refresh"),
    "arch": ("sudo pacman -S", "sudo pacman -Syu"),
    "suse": ("sudo zypper install", "sudo zypper update"),
}


# Share of the installed memory that the GPU should map: the default is half, and some owners choose 96 of 128 GiB
ENOUGH = 0.7


@dataclass(frozen=True)
class Facts:
    """The facts, with conclusions from them."""

    said: Recorded
    files: System
    machine: Machine  # as torch can use it now
    fit: Machine  # as it is once torch can use its GPU
    profile: Profile | None  # of ``fit``

    @property
    def title(self) -> str:
        """The machine in a line: its GPUs or CPU, and its system."""
        fit = self.fit
        gpu = f"{max(1, self.gpu_count)} x {fit.name or 'AMD GPU'} ({fit.arch})"
        return f"{gpu if fit.arch else self.files.cpu or 'CPU'}, {fit.system} {fit.kernel}".strip()

    @property
    def linux(self) -> bool:
        """Whether Linux drives the GPU, so not in WSL."""
        return self.machine.system == "Linux" and not self.machine.wsl

    @property
    def amd(self) -> bool:
        """Whether an AMD GPU to train on is here, usable or not."""
        return self.fit.backend == "rocm"

    @property
    def amd_linux(self) -> bool:
        """Whether an AMD GPU is here and Linux drives it."""
        return self.amd and self.linux

    @property
    def has_gpu(self) -> bool:
        """Whether any GPU is here that some torch could use."""
        return self.fit.backend != "cpu" or bool(self.files.nvidia) or NVIDIA in self.files.displays.values()

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables that matter and are set."""
        return self.said.environment or {}

    @property
    def gpu_count(self) -> int:
        """GPUs that torch or, where it sees none, KFD lists."""
        return self.machine.gpu_count or self.files.amd_gpus.count(self.fit.arch or "")

    @property
    def installed_gpus(self) -> int:
        """GPUs like the one that trains, even if KFD and torch do not list them; in a container, at most its GPUs."""
        largest = max(self.cards, key=lambda card: card.vram or 0, default=None)
        alike = sum(card.device == largest.device for card in self.cards) if largest and largest.device else 0
        there = max(self.files.amd_gpus.count(self.fit.arch or ""), alike, self.files.accelerators)
        given = sum("renderD" in path for path in self.gpu_nodes)
        return min(there, given) if self.said.container and given else there

    def choose_gpus(self, arch: str) -> str:
        """The command that hides all GPUs of other architectures from torch."""
        name = "HIP_VISIBLE_DEVICES" if self.machine.system == "Windows" else "ROCR_VISIBLE_DEVICES"
        gpus = self.said.torch.gpus if self.said.torch else ()
        return self.export(name, ",".join(str(i) for i, gpu in enumerate(gpus) if gpu.kind == arch))

    @property
    def host_total(self) -> int | None:
        """Bytes of host memory that the kernel manages."""
        recorded = self.said.host_memory.total if self.said.host_memory else None
        return self.files.memory.get("MemTotal", recorded)

    @property
    def available(self) -> int | None:
        """Bytes of host memory that are free."""
        recorded = self.said.host_memory.available if self.said.host_memory else None
        return self.files.memory.get("MemAvailable", recorded)

    @cached_property
    def cards(self) -> list[Card]:
        """The AMD GPUs; if Strix Halo's integrated GPU trains, only that one."""
        cards = [card for card in self.files.cards if card.is_amd]
        integrated = [card for card in cards if card.device == STRIX_HALO] if self.fit.arch == "gfx1151" else []
        return integrated or cards

    @property
    def unified(self) -> bool:
        """Whether the GPU shares the host's memory, according to the profile."""
        return self.profile is not None and self.profile.memory["of"] == "unified"

    @property
    def in_carve_out(self) -> bool:
        """Whether the GPU allocates in its carve-out, not in the host's memory."""
        return uses_carve_out(self.gtt, self.carve_out)

    @property
    def carve_out(self) -> int | None:
        """Bytes of unified memory that the BIOS reserves for the GPU."""
        return max((card.vram for card in self.cards if card.vram is not None), default=None)

    @property
    def gtt(self) -> int | None:
        """Bytes of host memory that the GPU may map."""
        return max((card.gtt for card in self.cards if card.gtt is not None), default=None)

    @property
    def pages_by_hand(self) -> int | None:
        """TTM's limit on the kernel's command line, in pages."""
        return to_number((self.files.parameters or {}).get(f"{self.files.ttm}.pages_limit", ""))

    @property
    def mappable(self) -> int | None:
        """Bytes of host memory that HIP gets. TTM's limit binds it even where amdgpu.gttsize makes GTT larger."""
        pages = self.files.pages_limit
        if self.gtt is pages is None:
            pages = self.pages_by_hand
        return min((size for size in (self.gtt, pages and pages * 4096) if size is not None), default=None)

    @property
    def installed_gib(self) -> int | None:
        """GiB of unified memory in the machine."""
        return None if self.host_total is None else installed_gib(self.host_total, self.carve_out)

    @property
    def too_little(self) -> str:
        """A sentence if the GPU may map too little memory; empty if it is enough or unknown."""
        total, limit = self.installed_gib, self.mappable
        short = total is not None and limit is not None and limit < ENOUGH * total * 2**30
        return f"the GPU may map {gib(limit or 0)} of {total} GiB" if short and not self.in_carve_out else ""

    @property
    def memory_parameters(self) -> str:
        """The kernel parameters that let the GPU map all of the memory."""
        return memory_parameters(self.machine.kernel, self.installed_gib or 128, self.files.ttm)

    def access(self, node: DeviceNode) -> bool | None:
        """Whether the user can read and write a device; None: unknown."""
        return node.allows(self.said.user) if node.access is None else node.access

    @property
    def gpu_nodes(self) -> dict[str, DeviceNode]:
        """/dev/kfd and the render nodes that exist."""
        nodes = self.said.device_nodes or {}
        return {path: node for path, node in nodes.items() if re.fullmatch(r"/dev/(kfd|dri/renderD\d+)", path)}

    def install(self, package: str) -> str:
        """The command that installs a package on this distribution."""
        return f"{self._manager[0]} {package}" if self._manager else f"install {package} with the package manager"

    def boot(self, add: str = "", remove: str = "") -> str:
        """How to change the kernel's command line: a command, or an instruction where the boot loader is unknown."""
        words = self._distribution
        # by ID alone: immutable systems derived from Fedora name it in ID_LIKE and set parameters otherwise
        if words[:1] and words[0] in ("fedora", "rhel", "centos", "rocky", "almalinux"):
            changes = [f"--remove-args='{remove}'" if remove else "", f"--args='{add}'" if add else ""]
            return f"sudo grubby --update-kernel=ALL {' '.join(filter(None, changes))}  # then reboot"
        if {"debian", "ubuntu"} & set(words):  # \x27: the other quote that /etc/default/grub may have
            keys = "|".join(filter(None, [remove, *(word.partition("=")[0] for word in add.split())]))
            edits = [rf'/^GRUB_CMDLINE_LINUX/s/ *\<({keys})\>(=[^ "\x27]*)?//g',
                     rf's/^(GRUB_CMDLINE_LINUX_DEFAULT=["\x27].*)(["\x27])/\1 {add}\2/' if add else ""]  # fmt: skip
            script = "; ".join(filter(None, edits))
            return f"sudo sed -E -i '{script}' /etc/default/grub && sudo update-grub  # then reboot"
        changes = [f"remove {remove}" if remove else "", f"add {add}" if add else ""]
        return f"in the boot loader's kernel command line {' and '.join(filter(None, changes))}"

    @property
    def upgrade(self) -> str:
        """The command that upgrades the system."""
        return f"{self._manager[1] if self._manager else 'upgrade all packages'}  # then reboot"

    @property
    def newer_kernel(self) -> str:
        """The command for a newer kernel. On Ubuntu an upgrade keeps the release's kernel."""
        if self.files.distribution.get("ID") != "ubuntu":
            return self.upgrade
        release = self.files.distribution.get("VERSION_ID", "")
        supported = re.fullmatch(r"(\d[02468])\.04", release) and release >= "24.04"  # its kernel has gfx1151's fixes
        install = f"sudo apt update && sudo apt install linux-generic-hwe-{release}"
        return f"{install if supported else 'sudo do-release-upgrade'}  # then reboot"

    @property
    def _manager(self) -> tuple[str, str] | None:
        return next((_MANAGERS[word] for word in self._distribution if word in _MANAGERS), None)

    @property
    def _distribution(self) -> list[str]:
        """ID and ID_LIKE of os-release, the nearest first."""
        return f"{self.files.distribution.get('ID', '')} {self.files.distribution.get('ID_LIKE', '')}".split()

    def export(self, name: str, value: str) -> str:
        """The command that sets an environment variable."""
        return f'$env:{name} = "{value}"' if self.machine.system == "Windows" else f"export {name}={value}"

    def unset(self, *names: str) -> str:
        """The command that removes environment variables."""
        if self.machine.system == "Windows":
            return "Remove-Item " + ", ".join(f"Env:{name}" for name in names)
        return "unset " + " ".join(names)


def recorded_facts(root: Path) -> Facts:
    """The facts of the machine whose files were copied to the folder ``root``.

    Raises:
        UserError: the folder holds no such copy, or a damaged ``rocm-ext.json``.
    """
    try:
        inside = {path.name for path in root.iterdir()}
    except OSError as error:
        raise UserError(f"--root {root}: {error.strerror or error}; expected a folder made with --save") from error
    if not inside & {NAME, "proc", "sys"}:
        raise UserError(f"--root {root} holds neither {NAME} nor proc/ or sys/; expected a folder made with --save")
    said = read_recorded(root)
    if said.system not in (None, "Linux"):  # Linux files in the folder belong to another machine
        root = root / "none"
    files = read_system(root)
    if said == Recorded() and files == read_system(root / "none"):
        raise UserError(f"--root {root} holds no file that describes a machine; expected a folder made with --save")
    return combine(said, files, root)


def combine(said: Recorded, files: System, root: Path) -> Facts:
    """The facts from both sources.

    Args:
        said: content of ``rocm-ext.json``.
        files: content of the system's files.
        root: folder of the system's files.
    """
    total = files.memory.get("MemTotal", said.host_memory.total if said.host_memory else 0)
    machine = describe(said.torch or Torch(""), said.system or "Linux", said.environment or {}, total, root)
    if not machine.amd_archs and re.search("Ryzen AI Max", files.cpu or said.cpu, re.IGNORECASE):
        machine = replace(machine, amd_archs=("gfx1151",))  # sold with this GPU only; Windows has no KFD
    fit, profile = intended_machine(machine)
    if said.torch is None and fit.backend == "cpu" and (files.nvidia or NVIDIA in files.displays.values()):
        fit, profile = replace(machine, backend="cuda"), load_profile("cuda")
    return Facts(said, files, machine, fit, profile)
