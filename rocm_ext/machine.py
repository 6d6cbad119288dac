"""Which machine this is: GPU, memory, kernel and torch build."""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

_UNIFIED = {"gfx1103", "gfx1150", "gfx1151", "gfx1152"}  # is_integrated is missing on some wheels


@dataclass(frozen=True)
class Machine:
    """What :func:`detect` found. ``arch`` and ``name`` are None where torch can use no GPU."""

    backend: str  # what torch can compute on: "rocm" | "cuda" | "cpu"
    system: str  # platform.system(): "Linux" | "Windows" | ...
    torch: str  # torch.__version__
    torch_build: str  # "rocm" | "cuda" | "cpu"
    total_memory: int  # bytes, of the first GPU or of the host
    bf16: bool  # computed natively, not emulated
    arch: str | None = None  # "gfx1151", "sm_90"
    name: str | None = None
    gpu_count: int = 0
    unified: bool = False  # host and device share one memory
    kernel: str = ""  # Linux: "6.18.4-arch1-1"
    wsl: bool = False
    rocm: str | None = None  # "7.2"; not torch.version.hip, whose numbering differs
    native_archs: tuple[str, ...] = ()  # architectures torch has kernels for; empty: unknown
    amd_archs: tuple[str, ...] = ()  # AMD GPUs the kernel lists, largest first, usable or not
    hidden_by: str | None = None  # the environment variable that hides all GPUs

    @property
    def has_kernels(self) -> bool:
        return not self.native_archs or self.arch is None or self.arch in self.native_archs

    def __str__(self) -> str:
        versions = f"torch {self.torch}"
        if self.backend == "cpu":
            return f"{self.system} without a GPU that torch can use, {versions}"
        return f"{self.gpu_count} x {self.name} ({self.arch}), {self.system}, {versions}"


def detect(root: Path = Path("/")) -> Machine:
    """Look at torch's device properties, and below ``root`` at sysfs and procfs.

    Starts HIP or CUDA if there is a GPU."""
    system = platform.system()
    release = read_text(root / "proc/sys/kernel/osrelease") or platform.release()
    kernel = release if system == "Linux" else ""
    build = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
    version = str(torch.__version__)
    amd_archs = _amd_archs(root)
    host: dict[str, Any] = {
        "system": system,
        "kernel": kernel,
        "wsl": "microsoft" in kernel.lower(),
        "torch": version,
        "torch_build": build,
        "rocm": _rocm_version(version, root) if build == "rocm" else None,
        "amd_archs": amd_archs,
    }
    if build == "cpu" or not torch.cuda.is_available():
        visible = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
        hidden = next((name for name in visible if os.environ.get(name) in ("", "-1")), None)
        total, bf16 = host_memory(root, "MemTotal"), _cpu_bf16(root)
        return Machine("cpu", total_memory=total, bf16=bf16, hidden_by=hidden, **host)

    properties = torch.cuda.get_device_properties(0)
    if build == "rocm":
        arch = getattr(properties, "gcnArchName", "").split(":")[0]
        overridden = "HSA_OVERRIDE_GFX_VERSION" in os.environ  # renames the GPU for HIP, never in sysfs
        if amd_archs and (not arch or (overridden and arch not in amd_archs)):
            arch = amd_archs[0]
        bf16 = _amd_bf16(arch)
    else:
        arch, bf16 = f"sm_{properties.major}{properties.minor}", properties.major >= 8
    return Machine(
        build,
        total_memory=properties.total_memory,
        bf16=bf16,
        arch=arch or None,
        name=properties.name,
        gpu_count=torch.cuda.device_count(),
        unified=bool(getattr(properties, "is_integrated", False)) or arch in _UNIFIED,
        native_archs=tuple(torch.cuda.get_arch_list()) if build == "rocm" else (),
        **host,
    )


def gfx_name(target_version: int) -> str:
    """The kernel's decimal ``gfx_target_version`` as LLVM spells it: 110501 is gfx1151, 90010 is gfx90a."""
    major, minor, stepping = target_version // 10000, target_version // 100 % 100, target_version % 100
    return f"gfx{major}{minor:x}{stepping:x}"


def _amd_archs(root: Path) -> tuple[str, ...]:
    found = []
    for path in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        node = dict(line.split(maxsplit=1) for line in read_text(path).splitlines() if " " in line)
        version = int(node.get("gfx_target_version", 0))
        if version:  # 0 is a CPU
            found.append((-int(node.get("simd_count", 0)), gfx_name(version)))
    return tuple(dict.fromkeys(arch for _, arch in sorted(found)))


def _amd_bf16(arch: str) -> bool:
    # matrix cores came with CDNA (gfx908), WMMA with RDNA3; torch.cuda.is_bf16_supported() is
    # always True on ROCm (pytorch#80410)
    match = re.fullmatch(r"gfx(\d+)([0-9a-f])([0-9a-f])", arch)
    if not match:
        return False
    major, minor, stepping = int(match[1]), int(match[2], 16), int(match[3], 16)
    return major >= 11 or (major == 9 and (minor > 0 or stepping in (0x8, 0xA)))


def _cpu_bf16(root: Path) -> bool:
    # x86 says avx512_bf16 or amx_bf16, Arm bf16; torch's own test also accepts emulation
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(read_text(root / "proc/cpuinfo").split()))


def _rocm_version(torch_version: str, root: Path) -> str | None:
    match = re.search(r"\+rocm(\d+\.\d+)", torch_version)
    if match:
        return match[1]
    match = re.match(r"\d+\.\d+", read_text(root / "opt/rocm/.info/version"))  # source builds, AMD's images
    return match[0] if match else None


def host_memory(root: Path, key: str) -> int:
    """Bytes of ``key`` ("MemTotal" or "MemAvailable") in /proc/meminfo; from psutil where there is none."""
    match = re.search(rf"^{key}:\s+(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    if match:
        return int(match[1]) * 1024
    memory = psutil.virtual_memory()
    return memory.available if key == "MemAvailable" else memory.total


def read_text(path: Path) -> str:
    """The file's text without the white space around it; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
