"""``bench.json``, the file that ``rocm-ext bench`` writes."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.log import log
from rocm_ext.base.types import Config, Json
from rocm_ext.machine.detect import Machine
from rocm_ext.machine.profile import COMPILE

_FIGURES = {"bandwidth", "efficiency", "decode_efficiency", "attention", "launch"}  # besides flops


@dataclass(frozen=True)
class BenchFile:
    """The part of the file that the library reads.

    Attributes:
        date: day of the measurement, as in 2026-01-31.
        machine: :func:`machine_key` of the measured machine.
        figures: arguments of :class:`rocm_ext.plan.speeds.Figures`.
        settings: the fastest ``compile``, for `hardware: auto`. Sizes, dtype and attention depend on the config.
    """

    date: str
    machine: Json
    figures: Json
    settings: Config

    @classmethod
    def read(cls, path: Path) -> "BenchFile":
        """Read the file.

        Raises:
            UserError: the file is damaged or incomplete.
        """
        try:
            content = json.loads(path.read_text())
            figures = content["figures"]
            flops = {dtype: _speed(value) for dtype, value in figures.pop("flops").items()}
            others = {key: _speed(value) for key, value in figures.items()}
            unknown = sorted(others.keys() - _FIGURES)
            if unknown:
                raise ValueError(f"unknown figure {unknown[0]}")
            if "bandwidth" not in others:
                raise KeyError("bandwidth")
            settings = {}
            if "compile" in content["settings"]:
                settings["compile"] = content["settings"]["compile"]
                if type(settings["compile"]) is int or settings["compile"] not in COMPILE:
                    raise ValueError(f"compile is {settings['compile']!r}")
            figures = {"flops": flops, **others}
            return cls(str(content["date"]), dict(content["machine"]), figures, settings)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"cannot read {path} as a file of `rocm-ext bench` ({one_line(error)}); measure again: rocm-ext bench"
            ) from error


def _speed(value: Any) -> float:
    speed = float(value)
    if not 0 < speed < math.inf:
        raise ValueError("a speed is not a number above 0")
    return speed


def bench_path() -> Path | None:
    """The path of the file: $ROCM_EXT_BENCH, or ``bench.json`` in the cache folder; None for a user without a home."""
    if os.environ.get("ROCM_EXT_BENCH"):
        return Path(os.environ["ROCM_EXT_BENCH"])
    cache = cache_folder()
    return cache / "bench.json" if cache else None


def cache_folder() -> Path | None:
    """The user's folder for files of this library; None for a user without a home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return cache / "torchtune-rocm" if cache.is_absolute() else None


def machine_key(machine: Machine) -> dict[str, str | int | None]:
    """The machine's identity: a measurement is valid for machines with an equal key."""
    return {
        "backend": machine.backend,
        "arch": machine.arch,
        "name": machine.name,
        "torch": machine.torch,
        "cores": os.cpu_count() if machine.backend == "cpu" else None,
    }


def of_this_machine(machine: Machine) -> BenchFile | None:
    """The file at :func:`bench_path` if ``machine`` was measured, else None. Warns of a damaged file."""
    path = bench_path()
    try:
        if path is None or not path.is_file():
            return None
        file = BenchFile.read(path)
    except PermissionError:  # the folder is closed
        return None
    except UserError as error:
        log.warning("%s", error)
        return None
    return file if file.machine == machine_key(machine) else None
