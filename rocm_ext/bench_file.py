"""``bench.json``, the file of ``rocm-ext bench``: where it is, and whether it is about this machine."""

import json
import os
from pathlib import Path
from typing import Any

from rocm_ext.errors import UserError
from rocm_ext.machine import Machine

# Settings of it that `hardware: auto` takes over; sizes depend on the config that was measured
TAKEN_OVER = ("num_workers", "pin_memory", "compile")


def bench_path() -> Path:
    """Where ``rocm-ext bench`` writes to, and others look: $ROCM_EXT_BENCH, or the user's cache folder."""
    if named := os.environ.get("ROCM_EXT_BENCH"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "torchtune-rocm" / "bench.json"


def machine_key(machine: Machine) -> dict[str, Any]:
    """What a measurement is valid for."""
    return {"backend": machine.backend, "arch": machine.arch, "name": machine.name, "torch": machine.torch,
            "cores": os.cpu_count() if machine.backend == "cpu" else None}  # fmt: skip


def read_bench(path: Path | None, machine: Machine) -> dict[str, Any] | None:
    """The content of a ``bench.json`` that was measured on ``machine``, or None.

    Args:
        path: the file; None: :func:`bench_path`, where a file that is missing, torn or of another machine is no error.

    Raises:
        UserError: the named file cannot be read, or is of another machine.
    """
    found = path or bench_path()
    try:
        content = json.loads(found.read_text())
        about, _ = content["machine"], content["figures"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if path is None:
            return None
        raise UserError(f"cannot read {path} as a file of `rocm-ext bench`: {error}") from error
    if about == machine_key(machine):
        return content
    if path is None:
        return None
    raise UserError(f"{path} was measured on {about}; this is {machine_key(machine)}. Measure again: rocm-ext bench")


def measured_settings(machine: Machine) -> tuple[dict[str, Any], str]:
    """What ``hardware: auto`` adds to the profile of ``machine``, and why; nothing where nothing was measured."""
    content = read_bench(None, machine)
    if content is None:
        return {}, ""
    settings = {key: value for key, value in content.get("settings", {}).items() if key in TAKEN_OVER}
    return settings, f"measured {content.get('date')} by rocm-ext bench: {settings}"
