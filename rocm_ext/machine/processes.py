"""The processes that hold memory of AMD's GPUs, from the kernel's files: what DRM and KFD count. It needs no torch."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from rocm_ext.machine.sysfs import listing, read_number, read_text

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20}


@dataclass(frozen=True)
class GpuProcess:
    """A process with memory on AMD's GPUs.

    Attributes:
        pid: its number.
        name: its program.
        computes: whether KFD lists it: it computes with HIP or OpenCL.
        memory: bytes of VRAM, and of host memory that a GPU maps (GTT).
    """

    pid: int
    name: str
    computes: bool
    memory: int


def gpu_memory_by_process(root: Path = Path("/")) -> list[GpuProcess]:
    """The processes that hold memory of AMD's GPUs or compute on them, the largest first.

    Only root can read what other users' processes hold. Of these, the list has the ones that compute, with the memory
    that KFD counts.
    """
    kfd = root / "sys/class/kfd/kfd/proc"
    computing = set(_numbers(kfd))
    counted = set[tuple[str, str]]()
    processes = []
    for pid in sorted(computing.union(_numbers(root / "proc"))):
        process = root / f"proc/{pid}"
        memory = _held(process, counted)
        if pid in computing:
            memory = max(memory, _counted_by_kfd(kfd / str(pid)))
        if memory or pid in computing:
            name = read_text(process / "comm")
            processes.append(GpuProcess(pid, name, pid in computing, memory))
    return sorted(processes, key=lambda process: -process.memory)


def _numbers(folder: Path) -> list[int]:
    return [int(name) for name in listing(folder) if re.fullmatch(r"\d{1,9}", name)]


def _held(process: Path, counted: set[tuple[str, str]]) -> int:
    """Bytes that DRM clients of a process hold (docs.kernel.org/gpu/drm-usage-stats.html).

    Several files, also of several processes, may belong to one client; ``counted`` has the clients so far.
    """
    held = 0
    for number in listing(process / "fdinfo"):
        try:
            target = os.readlink(process / "fd" / number)
        except OSError:  # a recording
            target = "/dev/dri/"
        if not target.startswith("/dev/dri/"):
            continue
        text = read_text(process / "fdinfo" / number)
        facts = dict(re.findall(r"^(drm-[\w-]+):[ \t]*(\S.*)$", text, re.MULTILINE))
        client = (facts.get("drm-pdev", ""), facts.get("drm-client-id", ""))
        if facts.get("drm-driver") != "amdgpu" or client in counted:
            continue
        counted.add(client)
        for pool in ("gtt", "vram"):
            # the older name of the same count
            size = facts.get(f"drm-resident-{pool}") or facts.get(f"drm-memory-{pool}", "")
            held += _bytes(size)
    return held


def _bytes(size: str) -> int:
    match = re.fullmatch(r"(\d{1,15}) ?(|KiB|MiB)", size)
    return int(match[1]) * _UNITS[match[2]] if match else 0


def _counted_by_kfd(process: Path) -> int:
    files = [file for file in listing(process) if file.startswith("vram_")]
    return sum(read_number(process / file) or 0 for file in files)
