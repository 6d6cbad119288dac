"""The memory budget: how many bytes a process may take on its device, and opening the device with that cap."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_ext.base.errors import UserError
from rocm_ext.base.heartbeat import RETRY, beat
from rocm_ext.base.log import log
from rocm_ext.machine.detect import Machine, integrated_gpus, parse_version, shared_memory
from rocm_ext.machine.processes import gpu_memory_by_process
from rocm_ext.machine.profile import Profile
from rocm_ext.machine.sysfs import host_memory, read_number

if TYPE_CHECKING:  # `rocm-ext doctor` computes budgets where torch does not import
    import torch

GIB = 2**30
# what wait_while_freed looks for
_LITTLE = 0.05  # share of the memory: what a desktop holds
_CHANGE = 64 * 2**20  # bytes
_LOOK = 3.0  # seconds between two readings
_STEADY = 30.0  # seconds
_LONGEST = 300.0
Budget = tuple[int, str]  # bytes, and the reason


@dataclass(frozen=True)
class HostMemory:
    """Sizes of the host's memory in bytes.

    Attributes:
        total: memory that the kernel manages.
        available: memory that is free or can be freed.
        gtt: memory that an integrated GPU may map, if it is known.
        carve_out: memory that the BIOS reserves for an integrated GPU, if it is known.
    """

    total: int
    available: int
    gtt: int | None = None
    carve_out: int | None = None


def memory_budget(
    profile: Profile, machine: Machine, root: Path = Path("/"), taken: int = 0
) -> Budget:
    """The bytes that one process may take on its device now.

    Args:
        profile: the machine's profile; it says which memory counts and how much the host keeps.
        machine: this machine.
        root: folder with ``proc`` and ``sys``.
        taken: bytes that the process has already allocated.

    Returns:
        The bytes, including ``taken``, and the reason.

    Raises:
        UserError: unified memory has nothing left after the host's share.
    """
    gtt, carve_out = shared_memory(root)
    host = HostMemory(
        host_memory(root, "MemTotal"), host_memory(root, "MemAvailable"), gtt, carve_out
    )
    return budget_from(profile, machine, host, taken)


def gpu_memory_in_use(root: Path = Path("/")) -> int:
    """Bytes of GTT and VRAM in use on the integrated GPU: by processes, and by dead ones until the kernel frees it."""
    used = 0
    for gpu in integrated_gpus(root):
        for file in ("mem_info_gtt_used", "mem_info_vram_used"):
            used += read_number(gpu / file) or 0
    return used


def wait_while_freed(root: Path = Path("/"), tick: Callable[[], object] = beat) -> int:
    """Wait while the kernel frees an integrated GPU's memory: dead processes were seen to hold 95 GiB for minutes.

    What living processes hold counts as theirs, as far as it can be read, and is not awaited. The wait ends after five
    minutes, or 30 seconds without a change.

    Args:
        root: folder with ``proc`` and ``sys``.
        tick: called every three seconds.

    Returns:
        The bytes in use that no readable process holds.
    """
    little = _LITTLE * sum(filter(None, shared_memory(root)))
    least = _held_by_nobody(root)
    began = changed = time.monotonic()
    if least > little:
        log.info(
            "%s of the GPU's memory are held by no process that can be read; waiting whether they are freed",
            gib(least),
        )
    while least > little:
        time.sleep(_LOOK)
        tick()
        now = time.monotonic()
        left = _held_by_nobody(root)
        if left < least - _CHANGE:
            least = left
            changed = now
        if now - changed >= _STEADY or now - began >= _LONGEST:
            log.warning("%s of the GPU's memory are held by no process that can be read", gib(left))
            break
    return least


def _held_by_nobody(root: Path) -> int:
    held = sum(process.memory for process in gpu_memory_by_process(root))
    return max(0, gpu_memory_in_use(root) - held)


def uses_carve_out(gtt: int | None, vram: int | None) -> bool:
    """Whether an integrated GPU allocates in its carve-out. amdgpu prefers GTT only where GTT is larger
    (apu_prefer_gtt; ROCm#6050)."""
    return gtt is not None and vram is not None and vram >= gtt


def budget_from(profile: Profile, machine: Machine, host: HostMemory, taken: int = 0) -> Budget:
    """:func:`memory_budget` for given sizes of the host's memory; a UserError as there."""
    kind = profile.memory["of"]
    if kind == "host":
        return host.available, f"{gib(host.available)} of host memory are available"
    if kind == "device":
        return _share_of(profile, machine.total_memory, "the GPU's")
    if uses_carve_out(host.gtt, host.carve_out):  # takes no host memory
        return int(
            0.95 * machine.total_memory
        ), f"95% of the carve-out's {gib(machine.total_memory)}"
    limits = [_share_of(profile, machine.total_memory, "total_memory")]
    if host.gtt is not None:
        limits.append(_share_of(profile, host.gtt, "GTT"))
    limits.append(_without_host(profile, host.total, "MemTotal"))
    # MemAvailable leaves out what the desktop uses. Half of the host's share stays free: the desktop grows, and this
    # process also needs host memory
    free = host.available + taken
    room = _host_share(profile, host.total) // 2
    if free <= room:
        raise UserError(
            f"unified memory: MemAvailable is {gib(free)}, the host keeps {gib(room)}. Free host memory",
            RETRY,
        )
    limits.append((free - room, f"MemAvailable {gib(free)} less {gib(room)}"))
    return _least(limits)


def nominal_budget(profile: Profile, memory: int) -> Budget:
    """The budget and its reason on another machine, whose device has ``memory`` bytes."""
    if profile.memory["of"] == "device":
        fraction = profile.memory["fraction"]
        return int(memory * fraction), f"{fraction:.0%} of {gib(memory)}"
    if profile.memory["of"] == "host":
        return memory, f"all of {gib(memory)}"
    share = _share_of(profile, memory, "the memory")
    return _least([share, _without_host(profile, memory, "the memory")])


def _share_of(profile: Profile, size: int, name: str) -> Budget:
    fraction = profile.memory["fraction"]
    return int(fraction * size), f"{fraction:.0%} of {name} {gib(size)}"


def _without_host(profile: Profile, total: int, name: str) -> Budget:
    share = _host_share(profile, total)
    return total - share, f"{name} {gib(total)} less {gib(share)} for the host"


def _host_share(profile: Profile, total: int) -> int:
    """Bytes of unified memory that the host keeps, its desktop included."""
    return int(min(profile.memory["host_gib"] * GIB, profile.memory["host_fraction"] * total))


def _least(limits: list[Budget]) -> Budget:
    return min(limits)[0], f"the least of {', '.join(why for _, why in limits)}"


def memory_parameters(kernel: str, total: int, ttm: str) -> str:
    """The kernel parameters that let an integrated GPU map all of the memory; the default is half
    (ROCm#5444, ROCm#6004). amdgpu.gttsize is deprecated since Linux 6.16.

    Args:
        kernel: ``uname -r``, or empty.
        total: GiB of unified memory.
        ttm: the kernel module, see :func:`rocm_ext.machine.detect.ttm_module`.
    """
    limit = f"{ttm}.pages_limit={total * 2**18}"  # pages of 4 KiB
    if not before_6_16(kernel):
        return limit
    return f"amd_iommu=off amdgpu.gttsize={total * 1024} {limit}"  # MiB


def before_6_16(kernel: str) -> bool:
    """Whether this kernel needs amd_iommu=off and amdgpu.gttsize. An unknown kernel counts as newer."""
    return () < parse_version(kernel) < (6, 16)


def gib(size: float) -> str:
    """Bytes as ``12.3 GiB``."""
    return f"{size / GIB:.1f} GiB"


def readable(size: float) -> str:
    """Bytes as ``16.0 GiB``, or as ``1.0 MiB`` if they are fewer than a GiB."""
    return gib(size) if size >= GIB else f"{size / 2**20:.1f} MiB"


def open_device(
    profile: Profile,
    machine: Machine,
    local_rank: int = 0,
    memory_fraction: float | None = None,
    device: str | None = None,
) -> torch.device:
    """Make this rank's device current and cap its memory.

    Args:
        profile: the machine's profile.
        machine: this machine.
        local_rank: index of the GPU.
        memory_fraction: cap as a share of the device's memory, above 0 and at most 1. None caps unified memory at
            :func:`memory_budget`, because overcommitting it tends to hang the driver, and leaves discrete memory
            uncapped, where torch raises an error.
        device: "cpu" or "cuda". Without it, the profile's device.

    Raises:
        UserError: the machine lacks the device, or the device is a CPU and ``memory_fraction`` is set.
    """
    import torch

    kind = device or profile.settings.get("device", "cpu")
    if kind == "cpu":
        if memory_fraction is not None:
            raise UserError("memory_fraction caps a GPU's memory; on the CPU leave it null")
        # it warns about missing GPU kernels on a CPU
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        return torch.device("cpu")
    if kind != "cuda" or local_rank >= machine.gpu_count:
        raise UserError(
            f'device={kind} for local rank {local_rank}: found {machine}. "cuda" is any GPU; "cpu" runs everywhere'
        )
    if machine.unified:
        wait_while_freed()
    torch.cuda.set_device(local_rank)
    if memory_fraction is None and machine.unified:
        # torch 2.10 and later multiply the fraction with total_memory; earlier ones, with what the driver reports
        total = machine.total_memory
        if parse_version(machine.torch) < (2, 10):
            _, total = torch.cuda.mem_get_info()
        memory_fraction = min(1.0, memory_budget(profile, machine)[0] / total)
    if memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(float(memory_fraction), local_rank)
    return torch.device("cuda", local_rank)
