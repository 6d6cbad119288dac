"""``bench.json``, the file of ``rocm-ext bench``: where it is, what it holds, and whether it is about this machine."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocm_ext.errors import UserError, one_line
from rocm_ext.hardware.machine import Machine
from rocm_ext.log import log

_FIGURES = {"bandwidth", "efficiency", "decode_efficiency"}  # beside flops
# Settings of it that `hardware: auto` takes over, and their types; sizes depend on the config that was measured
TAKEN_OVER = {"num_workers": int, "pin_memory": bool, "compile": bool}


@dataclass(frozen=True)
class BenchFile:
    """What other programs use of the file.

    Attributes:
        date: of the measurement.
        machine: what :func:`machine_key` says where it was measured.
        figures: arguments of :class:`rocm_ext.plan.speeds.Figures`.
        settings: that won, those of :data:`TAKEN_OVER` alone.
    """

    date: str
    machine: Mapping[str, Any]
    figures: Mapping[str, Any]
    settings: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "BenchFile":
        """Raises :class:`UserError` for anything but a whole file of ``rocm-ext bench``."""
        try:
            content = json.loads(path.read_text())
            flops = {dtype: float(value) for dtype, value in content["figures"]["flops"].items()}
            others = {key: float(value) for key, value in content["figures"].items() if key != "flops"}
            if unknown := others.keys() - _FIGURES:
                raise ValueError(f"unknown figure {sorted(unknown)[0]}")
            if not all(0 < value < math.inf for value in (*flops.values(), others["bandwidth"], *others.values())):
                raise ValueError("a speed is no number above 0")
            settings = {key: content["settings"][key] for key in TAKEN_OVER if key in content["settings"]}
            if wrong := [key for key, value in settings.items() if type(value) is not TAKEN_OVER[key]]:
                raise ValueError(f"{wrong[0]} is {settings[wrong[0]]!r}")
            return cls(str(content["date"]), dict(content["machine"]), {"flops": flops, **others}, settings)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"cannot read {path} as a file of `rocm-ext bench` ({one_line(error)}); measure again: rocm-ext bench"
            ) from error


def bench_path() -> Path | None:
    """Where ``rocm-ext bench`` writes to, and others look: $ROCM_EXT_BENCH, or the user's cache folder; None for a
    user without a home."""
    if named := os.environ.get("ROCM_EXT_BENCH"):
        return Path(named)
    cache = cache_folder()
    return cache / "bench.json" if cache else None


def cache_folder() -> Path | None:
    """The user's, for files of this library; None for a user without a home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return cache / "torchtune-rocm" if cache.is_absolute() else None


def machine_key(machine: Machine) -> dict[str, Any]:
    """What a measurement is valid for."""
    return {"backend": machine.backend, "arch": machine.arch, "name": machine.name, "torch": machine.torch,
            "cores": os.cpu_count() if machine.backend == "cpu" else None}  # fmt: skip


def of_this_machine(machine: Machine) -> BenchFile | None:
    """The file at :func:`bench_path`, if it is there and was measured on ``machine``; a damaged one is told."""
    path = bench_path()
    try:
        if path is None or not path.is_file():
            return None
        found = BenchFile.read(path)
    except PermissionError:  # a folder that may not be looked into
        return None
    except UserError as error:
        log.warning("%s", error)
        return None
    return found if found.machine == machine_key(machine) else None
