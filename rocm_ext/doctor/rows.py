"""What a check says."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error", "not recorded"]


@dataclass(frozen=True)
class Row:
    """A check's outcome: ``error`` means that training will not work, ``not recorded`` that nobody can tell."""

    check: str
    level: Level
    found: str
    why: str = ""
    fix: str = ""  # one line to copy: a shell command, a kernel parameter, a setting, or what to do by hand


def unrecorded(check: str, what: str = "") -> Row:
    return Row(check, "not recorded", what or "not recorded")


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
