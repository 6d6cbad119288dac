"""Which machine this is: GPU, memory, kernel and torch build.

Only :func:`ask_torch` imports torch: `rocm-ext doctor` judges machines where torch does not import.
"""

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path

from rocm_ext.machine.sysfs import cards, host_memory, listing, read_number, read_text, to_number

# AMD's GPUs that share the host's memory: torch's is_integrated is missing on some wheels
UNIFIED = {"gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"}
# bytes that a compute unit of gfx1151 saves: vector and scalar registers, shared memory, hardware registers
_GFX1151_STATE = 0x60000 + 0x4000 + 0x10000 + 0x1000
STRIX_HALO = "0x1586"  # PCI device number
VISIBLE_VARIABLES = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class TorchGpu:
    """A GPU as torch's device properties show it."""

    name: str
    total_memory: int  # bytes
    arch: str = ""  # gcnArchName: "gfx942:sramecc+:xnack-"; empty on NVIDIA and on some ROCm wheels
    major: int = 0  # compute capability; NVIDIA only
    minor: int = 0
    integrated: bool = False

    @property
    def kind(self) -> str:
        """The architecture's name: gfx942, sm_90."""
        return self.arch.split(":")[0] or f"sm_{self.major}{self.minor}"


@dataclass(frozen=True)
class Torch:
    """The installed torch and the GPUs that it can use."""

    version: str
    hip: str | None = None  # torch.version.hip
    cuda: str | None = None  # torch.version.cuda
    gpus: tuple[TorchGpu, ...] = ()
    kernels: tuple[str, ...] = ()  # torch.cuda.get_arch_list()

    @property
    def build(self) -> str:
        """rocm, cuda or cpu."""
        if self.hip:
            return "rocm"
        return "cuda" if self.cuda else "cpu"


@dataclass(frozen=True)
class Machine:
    """The result of :func:`detect`. ``arch`` and ``name`` are None where torch can use no GPU."""

    backend: str  # what torch can compute on: "rocm" | "cuda" | "cpu"
    system: str  # platform.system(): "Linux" | "Windows" | ...
    torch: str  # torch.__version__
    torch_build: str  # "rocm" | "cuda" | "cpu"
    total_memory: int  # bytes, of the first GPU or of the host
    bf16: bool  # computed natively, not emulated
    arch: str | None = None  # "gfx1151", "sm_90"
    name: str | None = None
    # the first GPU and the equal ones that follow it: ranks can use these together
    gpu_count: int = 0
    unified: bool = False  # host and device share one memory
    kernel: str = ""  # Linux: "6.18.4-arch1-1"
    saves_registers: bool | None = None  # of a gfx1151; see :func:`saves_registers`
    wsl: bool = False
    rocm: str | None = None  # "7.2"; not torch.version.hip, whose numbering differs
    native_archs: tuple[str, ...] = ()  # architectures torch has kernels for, if it says so
    amd_archs: tuple[str, ...] = ()  # AMD GPUs the kernel lists, largest first, usable or not
    hidden_by: str | None = None  # the environment variable that hides all GPUs

    @property
    def has_kernels(self) -> bool:
        """Whether torch has kernels for the GPU; True where that is unknown."""
        return not self.native_archs or self.arch is None or self.arch in self.native_archs

    def __str__(self) -> str:
        versions = f"torch {self.torch}"
        if self.backend == "cpu":
            return f"{self.system} without a GPU that torch can use, {versions}"
        return f"{self.gpu_count} x {self.name} ({self.arch}), {self.system}, {versions}"


def detect(root: Path = Path("/")) -> Machine:
    """Describe this machine from torch's device properties and the files in ``root``. Starts HIP or CUDA."""
    host_total = host_memory(root, "MemTotal")
    return describe(ask_torch(), platform.system(), os.environ, host_total, root)


def ask_torch() -> Torch:
    """Ask torch for its build and its GPUs. Starts HIP or CUDA."""
    import torch

    known = Torch(str(torch.__version__), torch.version.hip, torch.version.cuda)
    if known.build == "cpu" or not torch.cuda.is_available():
        return known
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpu = TorchGpu(
            properties.name,
            properties.total_memory,
            arch=getattr(properties, "gcnArchName", ""),
            major=getattr(properties, "major", 0),
            minor=getattr(properties, "minor", 0),
            integrated=bool(getattr(properties, "is_integrated", False)),
        )
        gpus.append(gpu)
    return replace(known, gpus=tuple(gpus), kernels=tuple(torch.cuda.get_arch_list()))


def describe(
    torch: Torch, system: str, environ: Mapping[str, str], host_total: int, root: Path
) -> Machine:
    """Describe a machine from torch's report and the system's files.

    Args:
        torch: torch's report.
        system: ``platform.system()``.
        environ: environment of the process that asked torch.
        host_total: bytes of host memory.
        root: folder with ``proc`` and ``sys``, of the machine or of a recording.
    """
    build = torch.build
    amd_archs = tuple(dict.fromkeys(amd_gpus(root)))
    kernel = kernel_release(root) if system == "Linux" else ""
    machine_with = partial(
        Machine,
        system=system,
        kernel=kernel,
        saves_registers=saves_registers(root),
        wsl="microsoft" in kernel.lower(),
        torch=torch.version,
        torch_build=build,
        rocm=_rocm_version(torch.version, root) if build == "rocm" else None,
        amd_archs=amd_archs,
    )
    if not torch.gpus:
        hidden_by = None
        for name in VISIBLE_VARIABLES:
            if environ.get(name) in ("", "-1"):
                hidden_by = name
                break
        # x86 lists avx512_bf16 or amx_bf16, Arm bf16; torch's test also accepts emulation
        features = set(read_text(root / "proc/cpuinfo").split())
        bf16 = not features.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))
        return machine_with("cpu", total_memory=host_total, bf16=bf16, hidden_by=hidden_by)

    gpu = torch.gpus[0]
    if build == "rocm":
        arch = gpu.arch.split(":")[0]
        overridden = "HSA_OVERRIDE_GFX_VERSION" in environ  # renames the GPU for HIP, not in sysfs
        if amd_archs and (not arch or (overridden and arch not in amd_archs)):
            arch = amd_archs[0]
        bf16 = _amd_bf16(arch)
    else:
        arch = gpu.kind
        bf16 = gpu.major >= 8
    equal = takewhile(lambda other: other.kind == gpu.kind, torch.gpus)
    return machine_with(
        build,
        total_memory=gpu.total_memory,
        bf16=bf16,
        arch=arch or None,
        name=gpu.name,
        gpu_count=len(list(equal)),
        unified=gpu.integrated or arch in UNIFIED,
        native_archs=torch.kernels if build == "rocm" else (),
    )


def kernel_release(root: Path) -> str:
    """``uname -r``; empty if the file is missing or damaged."""
    text = read_text(root / "proc/sys/kernel/osrelease")
    return text if re.fullmatch(r"[!-~]{1,64}", text) else ""


def parse_version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``6.18.4-arch1-1`` -> (6, 18, 4); () without numbers."""
    match = re.match(r"[0-9]{1,9}(\.[0-9]{1,9})*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def amd_gpus(root: Path) -> list[str]:
    """The architectures of the AMD GPUs that the kernel can compute on, largest GPU first."""
    gpus = []
    for properties in _kfd_gpus(root):
        version = properties["gfx_target_version"]
        arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"  # 110501: gfx1151, 90010: gfx90a
        gpus.append((-properties.get("simd_count", 0), arch))
    return [arch for _, arch in sorted(gpus)]


def _kfd_gpus(root: Path) -> list[dict[str, int]]:
    """The properties of the GPUs in KFD's topology."""
    gpus = []
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    for name in listing(nodes):
        properties = {}
        for line in read_text(nodes / name / "properties").splitlines():
            key, _, value = line.partition(" ")
            properties[key] = to_number(value.strip()) or 0
        if properties.get("gfx_target_version"):  # 0 is a CPU
            gpus.append(properties)
    return gpus


def saves_registers(root: Path) -> bool | None:
    """Whether amdgpu saves all registers of a gfx1151; None if KFD lists no such GPU.

    Drivers with the fix (Linux b42f3bf9536c, 71776e0965f9) show the sizes: a cwsr_size of 19185664 and a ctl_stack_size
    of 16384 for 40 compute units.
    """
    for gpu in _kfd_gpus(root):
        if gpu["gfx_target_version"] == 110501:
            units = gpu.get("simd_count", 0) // max(1, gpu.get("simd_per_cu", 0))
            saved = gpu.get("cwsr_size", 0) - gpu.get("ctl_stack_size", 0)
            return saved >= max(1, units) * _GFX1151_STATE
    return None


def integrated_gpus(root: Path) -> list[Path]:
    """The folders of Strix Halo's GPU; without one, of all GPUs."""
    gpus = [card / "device" for card in cards(root)]
    return [gpu for gpu in gpus if read_text(gpu / "device") == STRIX_HALO] or gpus


def shared_memory(root: Path) -> tuple[int | None, int | None]:
    """Bytes of host memory that the integrated GPU may map (GTT), and of its carve-out (VRAM).

    None outside Linux and in WSL."""
    gpus = integrated_gpus(root)

    def largest(file: str) -> int | None:
        sizes = [read_number(gpu / file) for gpu in gpus]
        return max(filter(None, sizes), default=None)

    return largest("mem_info_gtt_total"), largest("mem_info_vram_total")


def installed_gib(host_total: int, carve_out: int | None) -> int:
    """GiB of unified memory in the machine: host memory and carve-out, rounded up to 16 for what the kernel keeps."""
    return -(-(host_total + (carve_out or 0)) // 2**34) * 16


def ttm_module(root: Path) -> str:
    """The kernel module that maps host memory: ttm, or amdttm with AMD's DKMS driver."""
    return "amdttm" if listing(root / "sys/module/amdttm") else "ttm"


def _amd_bf16(arch: str) -> bool:
    # CDNA (gfx908) brought matrix cores, RDNA3 brought WMMA; torch.cuda.is_bf16_supported() is always True on
    # ROCm (pytorch#80410)
    match = re.fullmatch(r"gfx(\d+)([0-9a-f])([0-9a-f])", arch)
    if not match:
        return False
    major, minor, stepping = match.groups()
    if major == "9":
        return minor != "0" or stepping in ("8", "a")
    return int(major) >= 11


def _rocm_version(torch_version: str, root: Path) -> str | None:
    match = re.search(r"\+rocm(\d+\.\d+)", torch_version)
    if match is None:  # source builds, AMD's images
        match = re.match(r"(\d+\.\d+)", read_text(root / "opt/rocm/.info/version"))
    return match[1] if match else None
