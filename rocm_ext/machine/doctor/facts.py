"""The facts about a machine, live or recorded, that the checks judge."""

import re
from dataclasses import replace
from pathlib import Path

from rocm_ext.base.errors import UserError
from rocm_ext.machine.budget import gib, memory_parameters, uses_carve_out
from rocm_ext.machine.detect import STRIX_HALO, VISIBLE_VARIABLES, Torch, describe, installed_gib
from rocm_ext.machine.doctor.distribution import Distribution
from rocm_ext.machine.doctor.recorded import NAME, Recorded, read_recorded
from rocm_ext.machine.doctor.system import NVIDIA, Card, System, read_system
from rocm_ext.machine.profile import intended_machine, load_profile, reinstall_command
from rocm_ext.machine.sysfs import to_number

# Share of the installed memory that the GPU should map: the default is half, and some owners choose 96 of 128 GiB
ENOUGH = 0.7
_BUILDS = {"rocm": "ROCm", "cuda": "CUDA", "cpu": "CPU"}
_PAGE = 4096  # bytes
_GPU_NODE = re.compile(r"/dev/(kfd|dri/renderD\d+)")


class Facts:
    """The facts about a machine, with conclusions from them.

    Args:
        recorded: the facts that are in no file of the system.
        files: the content of the system's files.
        root: folder with these files.

    Attributes:
        machine: the machine as torch can use it now.
        intended: the machine once torch can use its GPU.
        profile: the profile of ``intended``.
        nvidia: whether an NVIDIA GPU or driver is here.
        linux: whether Linux drives the GPU.
        amd: whether an AMD GPU to train on is here, usable or not.
        amd_linux: both of these.
        cards: the folders of the AMD GPUs that may train.
        gpu_nodes: the GPU's files in /dev.
        render_nodes: the number of them that are render nodes.
        visible_by: set variables that select GPUs.
        listed_gpus: number of GPUs like the one that trains, as KFD lists them.
        unified: whether the GPU shares the host's memory.
        host_total, available: bytes of host memory.
        carve_out, gtt: bytes that the BIOS reserves for the GPU, and that it may map.
        mappable: bytes of host memory that HIP gets.
        pages_by_hand: TTM's limit on the kernel's command line, in pages.
        installed_gib: GiB of host memory and carve-out together.
        too_little: what is wrong if the GPU may map too little memory.
        memory_parameters: the kernel parameters that let the GPU map all of the memory.
    """

    def __init__(self, recorded: Recorded, files: System, root: Path) -> None:
        self.recorded = recorded
        self.files = files
        self.environment = recorded.environment or {}
        self.distribution = Distribution(files.distribution)
        self.torch = recorded.torch or Torch("")
        self.nvidia = bool(files.nvidia) or NVIDIA in files.displays.values()
        memory = files.memory
        if host := recorded.host_memory:
            memory = {"MemTotal": host.total, "MemAvailable": host.available, **memory}
        self.host_total = memory.get("MemTotal")
        self.available = memory.get("MemAvailable")
        self._describe_machine(root)
        self.linux = self.machine.system == "Linux" and not self.machine.wsl
        self.amd = self.intended.backend == "rocm"
        self.amd_linux = self.amd and self.linux
        self.cards = self._training_cards()
        nodes = recorded.device_nodes or {}
        self.gpu_nodes = {path: nodes[path] for path in nodes if _GPU_NODE.fullmatch(path)}
        self.render_nodes = sum("renderD" in path for path in self.gpu_nodes)
        self.visible_by = [name for name in VISIBLE_VARIABLES if self.environment.get(name)]
        self.listed_gpus = files.amd_gpus.count(self.intended.arch or "")
        self._measure_unified_memory()

    def _describe_machine(self, root: Path) -> None:
        recorded = self.recorded
        machine = describe(
            self.torch, recorded.system or "Linux", self.environment, self.host_total or 0, root
        )
        cpu = self.files.cpu or recorded.cpu
        if not machine.amd_archs and re.search("Ryzen AI Max", cpu, re.IGNORECASE):
            # sold with this GPU only; Windows has no KFD
            machine = replace(machine, amd_archs=("gfx1151",))
        self.machine = machine
        self.intended, self.profile = intended_machine(machine)
        if recorded.torch is None and self.intended.backend == "cpu" and self.nvidia:
            self.intended = replace(machine, backend="cuda")
            self.profile = load_profile("cuda")

    def _training_cards(self) -> list[Card]:
        cards = [card for card in self.files.cards if card.is_amd]
        if self.intended.arch != "gfx1151":
            return cards
        # Strix Halo's integrated GPU trains alone
        return [card for card in cards if card.device == STRIX_HALO] or cards

    def _measure_unified_memory(self) -> None:
        files = self.files
        self.unified = self.profile is not None and self.profile.memory["of"] == "unified"
        self.carve_out = _largest([card.vram for card in self.cards])
        self.gtt = _largest([card.gtt for card in self.cards])
        self.in_carve_out = uses_carve_out(self.gtt, self.carve_out)
        self.pages_by_hand = to_number((files.parameters or {}).get(f"{files.ttm}.pages_limit", ""))
        pages = files.pages_limit
        if pages is None and self.gtt is None:
            pages = self.pages_by_hand
        # TTM's limit binds HIP even where amdgpu.gttsize makes GTT larger
        limits = []
        if self.gtt is not None:
            limits.append(self.gtt)
        if pages is not None:
            limits.append(pages * _PAGE)
        self.mappable = min(limits, default=None)
        self.installed_gib: int | None = None
        self.too_little = ""
        if self.host_total is not None:
            self.installed_gib = installed_gib(self.host_total, self.carve_out)
            enough = ENOUGH * self.installed_gib * 2**30
            if self.mappable is not None and self.mappable < enough and not self.in_carve_out:
                self.too_little = (
                    f"the GPU may map {gib(self.mappable)} of {self.installed_gib} GiB"
                )
        self.memory_parameters = memory_parameters(
            self.machine.kernel, self.installed_gib or 128, files.ttm
        )

    @property
    def title(self) -> str:
        """The machine in a line: its GPUs or CPU, and its system."""
        intended = self.intended
        computes = self.files.cpu or "CPU"
        if intended.arch:
            computes = f"{max(1, self.gpu_count)} x {intended.name or 'AMD GPU'} ({intended.arch})"
        return f"{computes}, {intended.system} {intended.kernel}".strip()

    @property
    def gpu_count(self) -> int:
        """Number of GPUs that ranks can use together, as torch or else KFD counts them."""
        return self.machine.gpu_count or self.listed_gpus

    @property
    def rocm_torch(self) -> bool:
        """Whether torch is built for AMD GPUs."""
        return self.torch.build == "rocm"

    @property
    def torch_build(self) -> str:
        """torch's version and the kind of its build."""
        return f"{self.torch.version}, a {_BUILDS[self.torch.build]} build"

    @property
    def reinstall(self) -> str:
        """The command that installs the right torch."""
        if self.profile and self.profile.install:
            return reinstall_command(self.profile, self.machine)
        return "pip install torch"

    def choose_gpus(self, arch: str) -> str:
        """The command that hides all GPUs of other architectures from torch."""
        name = "HIP_VISIBLE_DEVICES" if self.machine.system == "Windows" else "ROCR_VISIBLE_DEVICES"
        numbers = []
        for number, gpu in enumerate(self.torch.gpus):
            if gpu.kind == arch:
                numbers.append(str(number))
        return self.export(name, ",".join(numbers))

    def export(self, name: str, value: str) -> str:
        """The command that sets an environment variable."""
        if self.machine.system == "Windows":
            return f'$env:{name} = "{value}"'
        return f"export {name}={value}"

    def unset(self, *names: str) -> str:
        """The command that removes environment variables."""
        if self.machine.system == "Windows":
            return "Remove-Item " + ", ".join(f"Env:{name}" for name in names)
        return "unset " + " ".join(names)


def _largest(sizes: list[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)


def recorded_facts(root: Path) -> Facts:
    """The facts of the machine whose files were copied to the folder ``root``.

    Raises:
        UserError: the folder holds no such copy, or a damaged ``rocm-ext.json``.
    """
    try:
        names = {path.name for path in root.iterdir()}
    except OSError as error:
        raise _not_a_copy(root, f": {error.strerror or error}") from error
    if not names & {NAME, "proc", "sys"}:
        raise _not_a_copy(root, f" holds neither {NAME} nor proc/ or sys/")
    recorded = read_recorded(root)
    nothing = root / "none"
    # with another system's facts, Linux files in the folder belong to another machine
    folder = root if recorded.system in (None, "Linux") else nothing
    files = read_system(folder)
    if recorded == Recorded() and files == read_system(nothing):
        raise _not_a_copy(root, " holds no file that describes a machine")
    return Facts(recorded, files, folder)


def _not_a_copy(root: Path, problem: str) -> UserError:
    return UserError(f"--root {root}{problem}; expected a folder made with --save")
