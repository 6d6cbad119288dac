"""Ask torch, in a separate process: torch may not import, and a broken driver may crash or hang it.

The process prints every fact at once, as a line with ``MARK`` and a JSON object with keys of
:class:`rocm_ext.machine.doctor.recorded.Recorded`.
"""

import json
import os
import platform
import re
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.machine.detect import Machine, ask_torch, describe
from rocm_ext.machine.doctor.recorded import MARK, Finding, Level
from rocm_ext.machine.environment import apply_environment
from rocm_ext.machine.profile import Profile, choose_profile, intended_machine, load_profile
from rocm_ext.machine.sysfs import host_memory

ROOT = Path("/")


def main() -> None:
    """Print facts about torch, its memory and its arithmetic."""
    try:
        known = ask_torch()
    except Exception as error:  # ImportError, OSError from a library, RuntimeError from a driver
        _tell(torch_error=one_line(error))
        return
    host_total = host_memory(ROOT, "MemTotal")
    machine = describe(known, platform.system(), os.environ, host_total, ROOT)
    profile = _enter_environment(machine)
    _tell(torch=asdict(known))
    import torch

    _tell(blas=_blas(machine))
    if machine.backend != "cpu":
        free, total = torch.cuda.mem_get_info()
        _tell(hip_memory={"available": free, "total": total})
        # no room for a temporary file; the canaries matter more
        with suppress(OSError, RuntimeError):
            _tell(copies=_copies(torch.device("cuda")))
    if profile:
        _tell(canaries=[asdict(canary) for canary in _canaries(machine, profile)])


def _tell(**facts: Any) -> None:
    print(MARK + json.dumps(facts), flush=True)


def _enter_environment(machine: Machine) -> Profile | None:
    """Set the environment of the machine's profile, as recipes do; return the profile."""
    try:
        profile = load_profile(choose_profile(machine)[0])
        if machine.backend != "cpu":  # the CPU profile's variables serve other programs
            apply_environment(profile, machine, restart=True)
    except UserError:  # hardware_profile says so; the canaries are worth running anyway
        return intended_machine(machine)[1] if machine.backend != "cpu" else None
    return profile


def _canaries(machine: Machine, profile: Profile) -> list[Finding]:
    """All canaries of the first GPU, and those that fail on the others."""
    import torch

    from rocm_ext.machine import numerics

    cuda = profile.settings.get("device") == "cuda"
    requested = str(profile.settings.get("dtype", "auto"))
    dtype, _ = numerics.pick_dtype(requested, machine)
    devices = [torch.device("cpu")]
    if cuda:
        devices = [torch.device("cuda", number) for number in range(machine.gpu_count)]
    findings = []
    for device in devices:
        for check in numerics.canaries(machine, device, dtype):
            name = f"{check.name}, GPU {device.index}" if device.index else check.name
            if not check.ok:
                level: Level = "error" if check.fatal else "warning"
                findings.append(Finding(name, level, check.found, fix=check.fix))
            elif not device.index:
                findings.append(Finding(name, "ok", check.found))
    return findings


def _copies(device: Any, size: int = 2**24) -> dict[str, float]:
    """Time two copies of a file of ``size`` bytes to ``device``: mapped, as safetensors does, and read first.

    Linux kernels that stall need a second for about two MiB.
    """
    import torch

    to = torch.empty(size, dtype=torch.uint8, device=device)

    def timed(tensor: torch.Tensor, began: float) -> float:
        to.copy_(tensor)
        to[-1].item()  # waits for the copy
        return time.perf_counter() - began

    # Windows keeps mapped files
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "weights"
        path.write_bytes(b"\1" * size)
        content = torch.empty(size, dtype=torch.uint8)
        timed(content, 0.0)  # the first copy also allocates buffers
        began = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            file.readinto(content.numpy().data)
        read = timed(content, began)
        mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        mapped.sum()  # pages in memory stall
        return {"size": size, "read": read, "mapped": timed(mapped, time.perf_counter())}


def _blas(machine: Machine) -> str:
    import torch

    if machine.backend == "cpu":
        match = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
        return match[1] if match else "unknown"
    library = str(torch.backends.cuda.preferred_blas_library())
    chosen = library.rpartition(".")[2].lower()
    if machine.backend != "rocm":
        return chosen
    names = {"cublas": "hipBLAS", "cublaslt": "hipBLASLt", "ck": "Composable Kernel"}
    return names.get(chosen, chosen)


if __name__ == "__main__":
    main()
