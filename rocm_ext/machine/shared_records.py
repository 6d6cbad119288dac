"""Measurements that owners shared: what a record holds, and the records that this library brings.

``rocm-ext bench --share FILE`` writes a record (:mod:`rocm_ext.bench.share`). A record holds no host name, user name,
path or serial number: :meth:`SharedRecord.from_dict` refuses unknown keys, paths and addresses.
"""

import json
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.machine.bench_file import check_figures
from rocm_ext.machine.chips import named_chips
from rocm_ext.machine.detect import is_unified
from rocm_ext.machine.parse import parse
from rocm_ext.machine.profile import Profile, load_profile, profile_names
from rocm_ext.machine.sysfs import read_text

FORMAT = "rocm-ext bench, 1"
# Of paths and addresses. One slash is in "FLOP/s" and "AMD Instinct MI50/MI60", an @ in "Xeon @ 2.60GHz"
_PRIVATE = re.compile(r"[\\~\x00-\x1f]|^/|/.*/|\S@|@\S")


@dataclass(frozen=True)
class Hardware:
    """The machine that was measured.

    Attributes:
        backend: rocm, cuda or cpu.
        system: platform.system().
        arch: architecture of the GPU; None: a CPU.
        name: name of the GPU as torch gives it, or of the CPU.
        count: GPUs of this kind.
        cores: cores of a CPU, threads included; None: a GPU.
        memory: GiB that the device has; on unified memory, what the GPU may use.
    """

    backend: str
    system: str
    arch: str | None
    name: str
    count: int
    cores: int | None
    memory: float


@dataclass(frozen=True)
class SharedFigure:
    """One measurement: the median and the quartiles, in ``unit``; a measurement that failed has none."""

    probe: str
    values: dict[str, Any]
    status: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str | None = None


@dataclass(frozen=True)
class SharedRecord:
    """One file of ``recipe_configs/measured``.

    Attributes:
        format: format of the file.
        date: day of the measurement, as in 2026-01-31.
        machine: machine that was measured.
        versions: versions of torch, ROCm or CUDA, the kernel, torchtune and this library.
        config: config whose model was measured; None: one that this library does not bring.
        model: the model's shape, in words.
        quick: whether the measurements were few and short.
        cores_of_other_programs: cores that other programs kept busy meanwhile.
        figures: arguments of :class:`rocm_ext.plan.speeds.Figures`.
        settings: the fastest ones.
        probes: the measurements.
    """

    format: Literal["rocm-ext bench, 1"]
    date: str
    machine: Hardware
    versions: dict[str, str]
    config: str | None
    model: str
    quick: bool
    cores_of_other_programs: float
    figures: dict[str, Any]
    settings: dict[str, Any]
    probes: tuple[SharedFigure, ...] = field(default=())

    @classmethod
    def from_dict(cls, content: Any, where: str) -> "SharedRecord":
        """Check the content of a record.

        Raises:
            UserError: for unknown and missing keys, values of the wrong type, paths and addresses.
        """
        record: SharedRecord = parse(cls, content, where)
        try:
            check_figures(record.figures)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{where}.figures: {one_line(error)}") from error
        for text in _texts(content):
            if len(text) > 120 or _PRIVATE.search(text):
                raise UserError(f"{where} has a text that may be private: {text[:60]!r}")
        return record

    def chips(self, profile: Profile) -> list[str]:
        """The chips of ``profile`` that the machine may have; its name, where it has no data sheet there."""
        machine = self.machine
        if not _describes(profile, machine):
            return []
        own = None if is_unified(machine.arch) else int(machine.memory * 2**30)
        may = named_chips(profile, machine.arch, machine.name, own) or [machine.name]
        return may[:1] if own else may

    @property
    def source(self) -> str:
        """Where the figures come from, in words."""
        versions = ", ".join(
            f"{name} {version}" for name, version in self.versions.items() if name in ("torch", "rocm")
        )
        return f"measured by another owner, {self.date}, {versions}"


def _describes(profile: Profile, machine: Hardware) -> bool:
    match = profile.match
    return (
        match.get("backend") == machine.backend
        and profile.is_for(machine.arch)
        and match.get("system", machine.system) == machine.system
    )


def _texts(content: Any) -> Iterator[str]:
    """All texts in a JSON value, keys included."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from (*_texts(key), *_texts(value))
    elif isinstance(content, list):
        for value in content:
            yield from _texts(value)


def folder() -> Path:
    """The folder of the records that this library brings."""
    try:
        return Path(str(files("rocm_ext.recipe_configs.measured")))
    except ModuleNotFoundError:  # a checkout that is not installed
        return Path(__file__).parents[2] / "recipe_configs" / "measured"


def shared_records() -> list[SharedRecord]:
    """The records that this library brings.

    Raises:
        UserError: one of them is damaged.
    """
    return [read(path) for path in sorted(folder().glob("*.json"))]


def read(path: Path) -> SharedRecord:
    """Read one record.

    Raises:
        UserError: it is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} as a record of `rocm-ext bench --share` ({one_line(error)})") from error
    return SharedRecord.from_dict(content, path.name)


def recorded_machines() -> dict[str, tuple[str, str]]:
    """The machines of all records, by what torch or the system calls them: the names of profile and chip."""
    profiles, records = [load_profile(name) for name in profile_names()], shared_records()
    found = ((each.machine.name, profile.name, each.chips(profile)) for each in records for profile in profiles)
    return {machine: (profile, chips[0]) for machine, profile, chips in found if chips}


def record_of(profile: Profile, chip: str, cores: int | None = None) -> SharedRecord | None:
    """The best record of a machine: a whole one before a quick one, then the newest.

    Args:
        profile: the machine's profile.
        chip: one of the profile's, or a CPU's name.
        cores: cores that a CPU must have; None: any number.
    """
    fitting = [
        record for record in shared_records() if chip in record.chips(profile) and cores in (None, record.machine.cores)
    ]
    return max(fitting, key=lambda record: (not record.quick, record.date), default=None)


def cpu_name(root: Path = Path("/")) -> str:
    """What this CPU is called."""
    match = re.search(r"^model name\s*:\s*(.+)$", read_text(root / "proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()
