"""What a check finds."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error", "not recorded"]


@dataclass(frozen=True)
class Finding:
    """A check's outcome, one row of the table.

    ``error`` means that training will not work; ``not recorded``, that the facts to judge are missing.
    """

    check: str
    level: Level
    found: str
    why: str = ""
    fix: str = ""  # one line: a shell command, a kernel parameter or a setting to copy, or what to do by hand


def unrecorded(check: str, what: str = "") -> Finding:
    """The finding of a check whose facts are missing; ``what`` says which."""
    return Finding(check, "not recorded", what or "not recorded")


def gib(size: float) -> str:
    """Bytes as ``12.3 GiB``."""
    return f"{size / 2**30:.1f} GiB"
