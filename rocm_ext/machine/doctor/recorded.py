"""``rocm-ext.json``: the facts that are in no file of the system. Every part may be missing."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.structure import parse
from rocm_ext.machine.detect import Torch

NAME = "rocm-ext.json"
MARK = "rocm-ext: "  # begins the lines of the probe; libraries print others
Level = Literal["ok", "warning", "error", "not recorded"]


@dataclass(frozen=True)
class Finding:
    """A check's outcome, one row of the table.

    Attributes:
        check: name of the check; an empty one becomes the name in the table of checks.
        level: ``error`` means that training will not work, ``not recorded`` that facts are missing.
        found: the fact.
        why: its meaning.
        fix: one line: a shell command, a kernel parameter or a setting to copy, or what to do by hand.
    """

    check: str
    level: Level
    found: str
    why: str = ""
    fix: str = ""


def ok(found: str, why: str = "") -> Finding:
    """The finding of a check that passes."""
    return Finding("", "ok", found, why)


def warning(found: str, why: str, fix: str) -> Finding:
    """The finding of a fault that costs speed or memory, or that the user should know."""
    return Finding("", "warning", found, why, fix)


def error(found: str, why: str, fix: str) -> Finding:
    """The finding of a fault that prevents training."""
    return Finding("", "error", found, why, fix)


def unrecorded(found: str = "") -> Finding:
    """The finding of a check whose facts are missing; ``found`` says which."""
    return Finding("", "not recorded", found or "not recorded")


@dataclass(frozen=True)
class User:
    """The user who trains. Only groups that matter here are kept."""

    name: str = "user"
    groups: tuple[str, ...] | None = None  # this session's; /etc/group may list more
    root: bool = False


@dataclass(frozen=True)
class DeviceNode:
    """The owner and the mode of a file in /dev."""

    mode: str  # "0660"
    owner: str
    group: str
    access: bool | None = None  # the user's access, if an ACL decides

    def allows(self, user: User | None) -> bool | None:
        """Whether the user can read and write it; None if the user's groups are unknown."""
        if self.access is not None:
            return self.access
        bits = int(self.mode, 8) if re.fullmatch("[0-7]{1,4}", self.mode) else 0
        if bits & 0o006 == 0o006:
            return True
        if user is None:
            return None
        if user.root or (bits & 0o600 == 0o600 and self.owner == user.name):
            return True
        if user.groups is None:
            return None
        return bits & 0o060 == 0o060 and self.group in user.groups


@dataclass(frozen=True)
class Memory:
    """Sizes of a memory."""

    total: int  # bytes
    available: int


@dataclass(frozen=True)
class Copies:
    """Seconds of a copy to the first GPU: from a mapped file, and of a file that is read first."""

    size: int  # bytes
    mapped: float
    read: float


@dataclass(frozen=True)
class SandboxState:
    """Whether bubblewrap works."""

    works: bool
    found: str = ""  # the reason why not, or its version, origin and gaps


@dataclass(frozen=True)
class Recorded:
    """The content of ``rocm-ext.json``."""

    system: str | None = None  # platform.system(): "Linux", "Windows", "Darwin"
    release: str = ""  # the system's, where it is not Linux
    cpu: str = ""  # its name, where there is no /proc/cpuinfo
    container: bool = False
    rootless: bool = False  # the container is one of rootless podman
    environment: dict[str, str] | None = None  # only the variables that matter here
    user: User | None = None
    device_nodes: dict[str, DeviceNode] | None = None  # "/dev/kfd", …
    # torchtune, torchao, torch: version; null: not installed
    packages: dict[str, str | None] | None = None
    commands: tuple[str, ...] | None = None  # installed programs, of those that verifiers call
    sandbox: SandboxState | None = None
    disk_free: dict[str, int] | None = None  # bytes: "current folder", "Hugging Face cache"
    memory_limit: int | None = None  # bytes that its cgroups allow
    host_memory: Memory | None = None  # None where /proc/meminfo has it
    torch: Torch | None = None
    torch_error: str = ""  # why torch does not import
    hip_memory: Memory | None = None  # torch.cuda.mem_get_info(), of the first GPU
    blas: str = ""  # the library that multiplies matrices
    canaries: tuple[Finding, ...] | None = None
    copies: Copies | None = None


def read_recorded(root: Path) -> Recorded:
    """Read ``rocm-ext.json`` in the folder ``root``; without this file, return an empty :class:`Recorded`.

    Raises:
        UserError: the file is damaged or has unknown content.
    """
    path = root / NAME
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
        return parse(Recorded, content, str(path))
    except FileNotFoundError:
        return Recorded()
    except (OSError, UserError, ValueError, RecursionError) as problem:
        text = one_line(problem)
        if not isinstance(problem, UserError):
            text = f"{path} cannot be read, or is not JSON: {text}"
        raise UserError(f"{text}; record it again with rocm-ext doctor --save") from problem
