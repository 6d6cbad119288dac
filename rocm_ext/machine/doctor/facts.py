"""The facts about a machine, live or recorded, that the checks judge."""

import re
from dataclasses import replace
from pathlib import Path

from rocm_ext.base.errors import UserError
from rocm_ext.machine.budget import gib, memory_parameters, uses_carve_out
from rocm_ext.machine.detect import STRIX_HALO, VISIBLE_VARIABLES, Torch, describe, installed_gib
from rocm_ext.machine.doctor.recorded import NAME, Recorded, read_recorded
from rocm_ext.machine.doctor.system import NVIDIA, System, read_system
from rocm_ext.machine.profile import bad_build, below_floor, intended_machine, load_profile, reinstall_command
from rocm_ext.machine.sysfs import to_number

# The commands to install a package and to upgrade the system, by the words of ID and ID_LIKE in os-release
_MANAGERS = {
    **dict.fromkeys(("debian", "ubuntu"), ("sudo apt install", "sudo apt update && sudo apt full-upgrade")),
    **dict.fromkeys(("fedora", "rhel"), ("sudo dnf install", "sudo dnf upgrade --refresh")),
    "arch": ("sudo pacman -S", "sudo pacman -Syu"),
    "suse": ("sudo zypper install", "sudo zypper update"),
}
_BUILDS = {"rocm": "ROCm", "cuda": "CUDA", "cpu": "CPU"}
# Share of the installed memory that the GPU should map: the default is half, and some owners choose 96 of 128 GiB
ENOUGH = 0.7


class Facts:
    """The facts about a machine, whose files are below ``root``, with conclusions from them.

    Attributes:
        machine: the machine as torch can use it now.
        fit: the machine once torch can use its GPU.
        profile: the profile of ``fit``.
    """

    def __init__(self, said: Recorded, files: System, root: Path) -> None:
        self.said, self.files, self.environment = said, files, said.environment or {}
        host = said.host_memory
        self.host_total = files.memory.get("MemTotal", host.total if host else None)  # bytes that the kernel manages
        self.available = files.memory.get("MemAvailable", host.available if host else None)
        torch = said.torch or Torch("")
        machine = describe(torch, said.system or "Linux", self.environment, self.host_total or 0, root)
        if not machine.amd_archs and re.search("Ryzen AI Max", files.cpu or said.cpu, re.IGNORECASE):
            machine = replace(machine, amd_archs=("gfx1151",))  # sold with this GPU only; Windows has no KFD
        fit, profile = intended_machine(machine)
        nvidia = bool(files.nvidia) or NVIDIA in files.displays.values()
        if said.torch is None and fit.backend == "cpu" and nvidia:
            fit, profile = replace(machine, backend="cuda"), load_profile("cuda")
        self.machine, self.fit, self.profile = machine, fit, profile

        # ---- system
        self.linux = machine.system == "Linux" and not machine.wsl  # Linux drives the GPU
        self.nomodeset = "nomodeset" in (files.parameters or {})  # the kernel's command line keeps drivers away
        parts = files.distribution.get("PRETTY_NAME", ""), "in a container" if said.container else ""
        self.where = "".join(f", {part}" for part in parts if part)
        # ID and ID_LIKE of os-release, the nearest first
        self._distribution = f"{files.distribution.get('ID', '')} {files.distribution.get('ID_LIKE', '')}".split()
        self._manager = next((_MANAGERS[word] for word in self._distribution if word in _MANAGERS), None)
        self.upgrade = f"{self._manager[1] if self._manager else 'upgrade all packages'}  # then reboot"

        # ---- torch
        self.rocm_torch = torch.build == "rocm"
        self.torch_build = f"{torch.version}, a {_BUILDS[torch.build]} build"
        self.reinstall = reinstall_command(profile, machine) if profile and profile.install else "pip install torch"
        self.outside = below_floor(profile, machine) if profile else {}  # versions outside the profile's limits
        self.bad_build = bad_build(profile, machine) if profile else None

        # ---- GPUs
        self.amd = fit.backend == "rocm"  # an AMD GPU to train on is here, usable or not
        self.amd_linux = self.amd and self.linux
        self.has_gpu = fit.backend != "cpu" or nvidia  # any GPU that some torch could use
        self.torch_gpus = torch.gpus
        self.other_gpus = [gpu.kind for gpu in torch.gpus if gpu.kind != torch.gpus[0].kind]
        self.chosen = [name for name in VISIBLE_VARIABLES if self.environment.get(name)]  # variables that select GPUs
        amd_cards = [card for card in files.cards if card.is_amd]
        strix = [card for card in amd_cards if card.device == STRIX_HALO] if fit.arch == "gfx1151" else []
        self.cards = strix or amd_cards  # if Strix Halo's integrated GPU trains, only that one
        may_be_strix = [card for card in amd_cards if card.device in (STRIX_HALO, "")] or amd_cards  # or Gorgon Halo
        self.strix_mes = [card.mes for card in may_be_strix if fit.arch == "gfx1151"]
        nodes = said.device_nodes or {}  # of the GPU: /dev/kfd and the render nodes
        of_gpu = re.compile(r"/dev/(kfd|dri/renderD\d+)").fullmatch
        self.gpu_nodes = {path: node for path, node in nodes.items() if of_gpu(path)}
        self.access = {  # whether the user can read and write them; None: unknown
            path: node.allows(said.user) if node.access is None else node.access
            for path, node in self.gpu_nodes.items()
        }
        render = [path for path in self.gpu_nodes if "renderD" in path]
        exist = {"/dev/kfd": "/dev/kfd" in self.gpu_nodes, "/dev/dri/renderD*": bool(render)}
        self.missing_nodes = [path for path in exist if not exist[path]]

        # ---- numbers of GPUs like the one that trains
        self.listed_gpus = files.amd_gpus.count(fit.arch or "")  # by KFD
        self.gpu_count = machine.gpu_count or self.listed_gpus
        self.seen_gpus, self.seen_by = self.listed_gpus, "KFD lists"
        if machine.backend == "rocm":
            self.seen_gpus, self.seen_by = machine.gpu_count, "torch sees"
        largest = max(self.cards, key=lambda card: card.vram or 0, default=None)
        equal = sum(card.device == largest.device for card in self.cards) if largest and largest.device else 0
        there = max(self.listed_gpus, equal, files.accelerators)
        # or given to the container
        self.installed_gpus = min(there, len(render)) if said.container and render else there

        # ---- unified memory, in bytes
        self.unified = profile is not None and profile.memory["of"] == "unified"
        self.carve_out = max((card.vram for card in self.cards if card.vram is not None), default=None)
        self.gtt = max((card.gtt for card in self.cards if card.gtt is not None), default=None)  # the GPU may map it
        self.in_carve_out = uses_carve_out(self.gtt, self.carve_out)
        self.pages_by_hand = to_number((files.parameters or {}).get(f"{files.ttm}.pages_limit", ""))
        # HIP gets this much host memory: TTM's limit binds it even where amdgpu.gttsize makes GTT larger
        pages = self.pages_by_hand if self.gtt is files.pages_limit is None else files.pages_limit
        self.mappable = min((size for size in (self.gtt, pages and pages * 4096) if size is not None), default=None)
        self.installed_gib = None if self.host_total is None else installed_gib(self.host_total, self.carve_out)
        known = self.installed_gib is not None and self.mappable is not None and not self.in_carve_out
        short = known and (self.mappable or 0) < ENOUGH * (self.installed_gib or 0) * 2**30
        self.too_little = f"the GPU may map {gib(self.mappable or 0)} of {self.installed_gib} GiB" if short else ""
        # the kernel parameters that let the GPU map all of the memory
        self.memory_parameters = memory_parameters(machine.kernel, self.installed_gib or 128, files.ttm)

    @property
    def title(self) -> str:
        """The machine in a line: its GPUs or CPU, and its system."""
        fit = self.fit
        gpu = f"{max(1, self.gpu_count)} x {fit.name or 'AMD GPU'} ({fit.arch})"
        return f"{gpu if fit.arch else self.files.cpu or 'CPU'}, {fit.system} {fit.kernel}".strip()

    def choose_gpus(self, arch: str) -> str:
        """The command that hides all GPUs of other architectures from torch."""
        name = "HIP_VISIBLE_DEVICES" if self.machine.system == "Windows" else "ROCR_VISIBLE_DEVICES"
        return self.export(name, ",".join(str(i) for i, gpu in enumerate(self.torch_gpus) if gpu.kind == arch))

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
    def newer_kernel(self) -> str:
        """The command for a newer kernel. On Ubuntu an upgrade keeps the release's kernel."""
        if self.files.distribution.get("ID") != "ubuntu":
            return self.upgrade
        release = self.files.distribution.get("VERSION_ID", "")
        supported = re.fullmatch(r"(\d[02468])\.04", release) and release >= "24.04"  # its kernel has gfx1151's fixes
        install = f"sudo apt update && sudo apt install linux-generic-hwe-{release}"
        return f"{install if supported else 'sudo do-release-upgrade'}  # then reboot"

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
        copied = {path.name for path in root.iterdir()} & {NAME, "proc", "sys"}
        problem = "" if copied else f" holds neither {NAME} nor proc/ or sys/"
    except OSError as error:
        problem = f": {error.strerror or error}"
    if not problem:
        said = read_recorded(root)
        # with another system's facts, Linux files in the folder belong to another machine
        folder = root if said.system in (None, "Linux") else root / "none"
        files = read_system(folder)
        if said != Recorded() or files != read_system(root / "none"):
            return Facts(said, files, folder)
        problem = " holds no file that describes a machine"
    raise UserError(f"--root {root}{problem}; expected a folder made with --save")
