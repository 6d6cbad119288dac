"""The memory budget: how many bytes a process may take on its device, and opening the device with that cap."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rocm_ext.errors import UserError
from rocm_ext.hardware.machine import Machine, host_memory, installed_gib, parse_version, shared_memory, ttm_module
from rocm_ext.hardware.profile import Profile

if TYPE_CHECKING:  # `rocm-ext doctor` computes budgets where torch does not import
    import torch

GIB = 2**30


def memory_budget(profile: Profile, machine: Machine, root: Path = Path("/")) -> tuple[int, str]:
    """The bytes that one process may take on its device now.

    Args:
        profile: of the machine; it says which memory counts and how much the host keeps.
        machine: this one.
        root: where ``proc`` and ``sys`` are.

    Returns:
        The bytes and the reason.

    Raises:
        UserError: where unified memory leaves nothing after the host's share.
    """
    gtt, vram = shared_memory(root)
    parameters = memory_parameters(machine.kernel, installed_gib(host_memory(root, "MemTotal"), vram), ttm_module(root))
    return budget_from(profile, machine, host_memory(root, "MemAvailable"), gtt, vram, parameters)


def uses_carve_out(gtt: int | None, vram: int | None) -> bool:
    """Whether an integrated GPU allocates in its carve-out. amdgpu prefers GTT only where GTT is larger
    (apu_prefer_gtt; ROCm#6050).

    Args:
        gtt: bytes of host memory that the GPU may map; None: unknown.
        vram: bytes of its carve-out; None: unknown.
    """
    return gtt is not None and vram is not None and vram >= gtt


def budget_from(
    profile: Profile, machine: Machine, available: int, gtt: int | None, vram: int | None, parameters: str
) -> tuple[int, str]:
    """:func:`memory_budget`, of sizes that the caller has read.

    Args:
        profile: of the machine.
        machine: whose total_memory counts.
        available: bytes of host memory that are free.
        gtt: bytes of host memory that the GPU may map; None: unknown.
        vram: bytes of the GPU's carve-out; None: unknown.
        parameters: the kernel parameters that let the GPU map more, for the message.

    Returns:
        The bytes and the reason.

    Raises:
        UserError: where unified memory leaves nothing after the host's share.
    """
    kind = profile.memory["of"]
    if kind == "host":
        return available, f"{_gib(available)} of host memory are available"
    if kind == "device":
        fraction = profile.memory["fraction"]
        total = machine.total_memory
        return int(total * fraction), f"{fraction:.0%} of the GPU's {_gib(total)}"

    if uses_carve_out(gtt, vram):  # takes no host memory
        return int(0.95 * machine.total_memory), f"95% of the carve-out's {_gib(machine.total_memory)}"
    limits = {"total_memory": machine.total_memory, "MemAvailable": available}
    if gtt is not None:
        limits["GTT"] = gtt
    tightest = min(limits, key=lambda name: limits[name])
    limit = limits[tightest]
    reserve = _host_share(profile, limit)
    if limit <= reserve:
        fix = "Free host memory" if tightest == "MemAvailable" else f"Boot with {parameters}"
        raise UserError(f"unified memory: {tightest} is {_gib(limit)}, the host keeps {_gib(reserve)}. {fix}")
    found = ", ".join(f"{name} {_gib(value)}" for name, value in limits.items())
    return limit - reserve, f"the least of {found}, less {_gib(reserve)} for the host"


def nominal_budget(profile: Profile, memory: int) -> tuple[int, str]:
    """The budget on another machine, from its data sheet.

    Args:
        profile: of that machine.
        memory: bytes on its device.

    Returns:
        The bytes and the reason.
    """
    if profile.memory["of"] == "device":
        fraction = profile.memory["fraction"]
        return int(memory * fraction), f"{fraction:.0%} of {_gib(memory)}"
    reserve = _host_share(profile, memory)
    return memory - reserve, f"{_gib(memory)} less {_gib(reserve)} for the host"


def _host_share(profile: Profile, memory: int) -> int:
    return int(max(profile.memory["reserve_fraction"] * memory, profile.memory["reserve_gib"] * GIB))


def memory_parameters(kernel: str, gib: int, ttm: str = "ttm") -> str:
    """The kernel parameters that let an integrated GPU map all of the memory; the default is half
    (ROCm#5444, ROCm#6004). amdgpu.gttsize is deprecated since Linux 6.16.

    Args:
        kernel: ``uname -r``; empty: unknown.
        gib: GiB of unified memory.
        ttm: the kernel module, see :func:`rocm_ext.hardware.machine.ttm_module`.
    """
    limit = f"{ttm}.pages_limit={gib * 2**18}"  # pages of 4 KiB
    if not before_6_16(kernel):
        return limit
    return f"amd_iommu=off amdgpu.gttsize={gib * 1024} {limit}"  # MiB


def before_6_16(kernel: str) -> bool:
    """Whether this kernel needs amd_iommu=off and amdgpu.gttsize. An unknown kernel counts as newer."""
    return () < parse_version(kernel) < (6, 16)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def open_device(
    profile: Profile,
    machine: Machine,
    local_rank: int = 0,
    memory_fraction: float | None = None,
    device: str | None = None,
) -> torch.device:
    """Make this rank's device current and cap its memory.

    Args:
        profile: of the machine.
        machine: this one.
        local_rank: the GPU's number.
        memory_fraction: the cap, as a share of the device's memory, above 0 and at most 1. None caps unified memory at
            :func:`memory_budget`, because overcommitting it tends to hang the driver, and leaves discrete memory
            uncapped: there torch raises an error of its own.
        device: "cpu" or "cuda"; None: the profile's.

    Raises:
        UserError: for a device that is not here and for a fraction that cannot be applied.
    """
    import torch

    kind = device or profile.settings.get("device", "cpu")
    if memory_fraction is not None and not 0 < memory_fraction <= 1:
        raise UserError(f"memory_fraction={memory_fraction} is not a share: above 0, at most 1")
    if kind == "cpu":
        if memory_fraction is not None:
            raise UserError("memory_fraction caps a GPU's memory; on the CPU leave it null")
        return torch.device("cpu")
    if kind != "cuda" or local_rank >= machine.gpu_count:
        raise UserError(
            f'device={kind} for local rank {local_rank}: found {machine}. "cuda" is any GPU; "cpu" runs everywhere'
        )
    torch.cuda.set_device(local_rank)
    if memory_fraction is None and machine.unified:
        # torch 2.10 and later multiply the fraction with total_memory; earlier ones, with what the driver reports
        total = machine.total_memory if parse_version(machine.torch) >= (2, 10) else torch.cuda.mem_get_info()[1]
        memory_fraction = min(1.0, memory_budget(profile, machine)[0] / total)
    if memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(float(memory_fraction), local_rank)
    return torch.device("cuda", local_rank)
