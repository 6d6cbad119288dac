"""How much memory a process may take on its device, and the device opened with that as its cap."""

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
    """Bytes that one process may take on its device, and why.

    Raises :class:`UserError` where unified memory leaves nothing after the host's share."""
    gtt, vram = shared_memory(root)
    parameters = memory_parameters(machine.kernel, installed_gib(host_memory(root, "MemTotal"), vram), ttm_module(root))
    return budget_from(profile, machine, host_memory(root, "MemAvailable"), gtt, vram, parameters)


def uses_carve_out(gtt: int | None, vram: int | None) -> bool:
    """Whether an integrated GPU allocates in its carve-out: amdgpu prefers GTT only where that is the larger
    (apu_prefer_gtt; ROCm#6050)."""
    return gtt is not None and vram is not None and vram >= gtt


def budget_from(
    profile: Profile, machine: Machine, available: int, gtt: int | None, vram: int | None, parameters: str
) -> tuple[int, str]:
    """:func:`memory_budget` with these bytes of available host memory, of host memory that the GPU may map and of its
    carve-out; ``parameters`` are the kernel's that let it map more."""
    kind = profile.memory["of"]
    if kind == "host":
        return available, f"{_gib(available)} of host memory are available"
    if kind == "device":
        fraction = profile.memory["fraction"]
        total = machine.total_memory
        return int(total * fraction), f"{fraction:.0%} of the GPU's {_gib(total)}"

    if uses_carve_out(gtt, vram):  # none of the host's
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
    """The same for a machine that is not this one, with ``memory`` bytes on its device."""
    if profile.memory["of"] == "device":
        fraction = profile.memory["fraction"]
        return int(memory * fraction), f"{fraction:.0%} of {_gib(memory)}"
    reserve = _host_share(profile, memory)
    return memory - reserve, f"{_gib(memory)} less {_gib(reserve)} for the host"


def _host_share(profile: Profile, memory: int) -> int:
    return int(max(profile.memory["reserve_fraction"] * memory, profile.memory["reserve_gib"] * GIB))


def memory_parameters(kernel: str, gib: int, ttm: str = "ttm") -> str:
    """The kernel parameters that let the GPU of a machine with ``gib`` GiB of unified memory map all of it.
    ``ttm``: :func:`rocm_ext.hardware.machine.ttm_module`.

    Without them it is half (ROCm#5444, ROCm#6004). amdgpu.gttsize is deprecated since 6.16."""
    limit = f"{ttm}.pages_limit={gib * 2**18}"  # of 4 KiB
    if not before_6_16(kernel):
        return limit
    return f"amd_iommu=off amdgpu.gttsize={gib * 1024} {limit}"  # MiB


def before_6_16(kernel: str) -> bool:
    """Whether this kernel wants amd_iommu=off and amdgpu.gttsize; one that is not known is taken for newer."""
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
    """The device of this rank, made current and, where that helps, capped.

    ``memory_fraction`` (0 to 1) of the device's memory is the cap. None caps unified memory at
    :func:`memory_budget`, because overcommitting it tends to hang the driver, and leaves discrete memory to
    raise torch's own error. ``device``: "cpu" or "cuda"; None is the profile's.
    Raises :class:`UserError` for a device that is not here and for a fraction that cannot be applied."""
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
        # torch multiplies the fraction with total_memory from 2.10 on, before with what the driver reports
        total = machine.total_memory if parse_version(machine.torch) >= (2, 10) else torch.cuda.mem_get_info()[1]
        memory_fraction = min(1.0, memory_budget(profile, machine)[0] / total)
    if memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(float(memory_fraction), local_rank)
    return torch.device("cuda", local_rank)
