"""``bench.json``, the file that ``rocm-ext bench`` writes."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

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
            flops = {dtype: float(value) for dtype, value in content["figures"]["flops"].items()}
            others = {key: float(value) for key, value in content["figures"].items() if key != "flops"}
            if unknown := others.keys() - _FIGURES:
                raise ValueError(f"unknown figure {sorted(unknown)[0]}")
            if not all(0 < value < math.inf for value in (*flops.values(), others["bandwidth"], *others.values())):
                raise ValueError("a speed is not a number above 0")
            settings = {key: value for key, value in content["settings"].items() if key == "compile"}
            if any(type(value) is int or value not in COMPILE for value in settings.values()):
                raise ValueError(f"compile is {settings['compile']!r}")
            return cls(str(content["date"]), dict(content["machine"]), {"flops": flops, **others}, settings)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"cannot read {path} as a file of `rocm-ext bench` ({one_line(error)}); measure again: rocm-ext bench"
            ) from error


def bench_path() -> Path | None:
    """The path of the file: $ROCM_EXT_BENCH, or ``bench.json`` in the cache folder; None for a user without a home."""
    if named := os.environ.get("ROCM_EXT_BENCH"):
        return Path(named)
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
    except PermissionError:  # of the folder
        return None
    except UserError as error:
        log.warning("%s", error)
        return None
    return file if file.machine == machine_key(machine) else None
