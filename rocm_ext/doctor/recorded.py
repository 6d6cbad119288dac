"""``rocm-ext.json``: what no file of the system tells. Every part may be missing."""

import json
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rocm_ext.doctor.rows import Row
from rocm_ext.errors import UserError
from rocm_ext.hardware.machine import Torch

NAME = "rocm-ext.json"


@dataclass(frozen=True)
class User:
    """Who trains. Groups that do not matter here are left out."""

    name: str = "user"
    groups: tuple[str, ...] | None = None  # of this session; those in /etc/group may be more
    root: bool = False


@dataclass(frozen=True)
class DeviceNode:
    mode: str  # "0660"
    owner: str
    group: str
    access: bool | None = None  # whether the user can read and write it, where mode and groups do not say (an ACL)

    @property
    def _bits(self) -> int:
        return int(self.mode, 8) if re.fullmatch("[0-7]{1,4}", self.mode) else 0

    @property
    def open_to_all(self) -> bool:
        return self._bits & 6 == 6

    def allows(self, user: User | None) -> bool | None:
        """Whether owner, group and mode let the user read and write it; None where the user's groups are not known."""
        if self.open_to_all:
            return True
        if user is None:
            return None
        if user.root or (self.owner == user.name and self._bits >> 6 & 6 == 6):
            return True
        if user.groups is None:
            return None
        return self.group in user.groups and self._bits >> 3 & 6 == 6


@dataclass(frozen=True)
class Memory:
    total: int  # bytes
    available: int


@dataclass(frozen=True)
class Process:
    """Somebody's process on the GPU."""

    pid: int
    name: str = ""
    memory: int | None = None  # bytes of the GPU's


@dataclass(frozen=True)
class Sandbox:
    works: bool
    found: str = ""  # why not


@dataclass(frozen=True)
class Recorded:
    """What a live look gathered; :func:`read_recorded` reads it back."""

    system: str | None = None  # platform.system(): "Linux", "Windows", "Darwin"
    release: str = ""  # of the system, where it is not Linux
    cpu: str = ""  # its name, where there is no /proc/cpuinfo
    container: bool = False
    environment: dict[str, str] | None = None  # only the variables that matter here
    user: User | None = None
    device_nodes: dict[str, DeviceNode] | None = None  # "/dev/kfd", …
    packages: dict[str, str | None] | None = None  # torchtune, torchao: version; null: not installed
    commands: tuple[str, ...] | None = None  # of those that verifiers call, the ones that are installed
    sandbox: Sandbox | None = None
    disk_free: dict[str, int] | None = None  # bytes: "current folder", "Hugging Face cache"
    cpus: int | None = None  # hardware threads that this process may run on
    cpu_quota: float | None = None  # CPUs' worth of time that its cgroups allow
    memory_limit: int | None = None  # bytes that its cgroups allow
    host_memory: Memory | None = None  # where there is no /proc/meminfo
    processes: tuple[Process, ...] | None = None  # on NVIDIA GPUs; AMD's are in sysfs
    torch: Torch | None = None
    torch_error: str = ""  # why torch does not import
    threads: int | None = None  # torch.get_num_threads()
    hip_memory: Memory | None = None  # torch.cuda.mem_get_info(), of the first GPU
    blas: str = ""  # the library that multiplies matrices
    canaries: tuple[Row, ...] | None = None


def read_recorded(root: Path) -> Recorded:
    """``rocm-ext.json`` in the folder ``root``; an empty :class:`Recorded` where there is none.

    Raises :class:`UserError` for a file that is torn or says something else."""
    path = root / NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Recorded()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}; record it again with rocm-ext doctor --save") from error
    try:
        return parse(Recorded, json.loads(text), str(path))
    except UserError as error:
        raise UserError(f"{error}; record it again with rocm-ext doctor --save") from error
    except (ValueError, RecursionError) as error:
        message = f"{path} is not JSON ({' '.join(str(error).split())}); record it again with rocm-ext doctor --save"
        raise UserError(message) from error


def parse(kind: Any, value: Any, where: str) -> Any:
    """``value``, from JSON, as the type ``kind``: dataclasses, tuples, dicts, literals and plain values.

    Raises :class:`UserError` that names the place of what does not fit."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):  # only with None
        return None if value is None else parse(arguments[0], value, where)
    if is_dataclass(kind) and isinstance(value, Mapping):
        return _dataclass(kind, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(parse(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {key: parse(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is Literal and value in arguments:
        return value
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 2**53 else value
    if type(value) is kind and (kind not in (int, float) or 0 <= value < 2**63):  # bytes, counts: never negative
        return value
    expected = "an object" if is_dataclass(kind) or origin is dict else "a list" if origin is tuple else None
    expected = expected or (f"one of {', '.join(arguments)}" if origin is Literal else f"{kind.__name__}")
    raise UserError(f"{where} is {repr(value)[:60]}, expected {expected}")


def _dataclass(kind: Any, value: Mapping[str, Any], where: str) -> Any:
    known = {field.name: field for field in fields(kind)}
    if unknown := sorted(set(value) - set(known)):
        raise UserError(f"{where} has the unknown key {unknown[0]!r}; known: {', '.join(known)}")
    if missing := [name for name, field in known.items() if name not in value and field.default is MISSING]:
        raise UserError(f"{where} lacks {missing[0]!r}")
    hints = get_type_hints(kind)
    return kind(**{name: parse(hints[name], item, f"{where}.{name}") for name, item in value.items()})
