"""What a verifier is and what it answers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

DETAIL = 300  # characters


class Verdict(str, Enum):
    """How a completion was judged. The values are the names."""

    CORRECT = "CORRECT"  # right
    WRONG = "WRONG"  # wrong, in whole or in part
    UNPARSED = "UNPARSED"  # holds no answer to judge
    TIMEOUT = "TIMEOUT"  # the completion's code ran into a time limit
    ERROR = "ERROR"  # our fault or the user's: it says nothing about the completion

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Result:
    """A verdict, its reward in [0, 1] (None exactly for ERROR), and why, in one line of at most 300 characters.

    Raises:
        ValueError: a reward that does not fit the verdict or the range.
    """

    verdict: Verdict
    reward: float | None
    detail: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdict", Verdict(self.verdict))
        object.__setattr__(self, "detail", short(self.detail))
        if self.verdict is Verdict.ERROR:
            if self.reward is not None:
                raise ValueError(f"an ERROR has no reward, found {self.reward!r}")
            return
        if isinstance(self.reward, bool) or not isinstance(self.reward, (int, float)):
            raise ValueError(f"the reward must be a number in [0, 1], found {self.reward!r}")
        if not (math.isfinite(self.reward) and 0 <= self.reward <= 1):
            raise ValueError(f"the reward must be in [0, 1], found {self.reward!r}")
        object.__setattr__(self, "reward", float(self.reward))


class Verifier:
    """Judges one completion of one row. Deterministic, and it does not raise because of the completion.

    Write your own as a class with ``__call__``; the rest is optional.
    """

    needs: tuple[str, ...] = ()  # the fields a row must have

    def check(self) -> None:
        """Raise UserError where this machine cannot run the verifier."""

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise UserError or ValueError, naming the field, for a row that cannot be verified."""
        for name in self.needs:
            field(row, name)

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Result:
        raise NotImplementedError


def short(text: object, length: int = DETAIL) -> str:
    """Text in one printable line; its middle is left out where it is longer than ``length`` characters."""
    text = str(text)
    if len(text) > 4 * length:  # before the splitting: it may be megabytes
        text = text[: 2 * length] + text[-2 * length :]
    line = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    half = (length - 3) // 2
    return line if len(line) <= length else f"{line[:half]}...{line[-half:]}"


def field(row: Mapping[str, Any], name: str, kind: type | tuple[type, ...] = object) -> Any:
    """A row's field.

    Raises:
        ValueError: it is missing, None or of another type.
    """
    value = row.get(name)
    if value is None:
        raise ValueError(f"field {name!r} is missing; the row has {', '.join(map(repr, row)) or 'none'}")
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(k.__name__ for k in kinds)
        raise ValueError(f"field {name!r} must be {names}, found {type(value).__name__}")
    return value


def correct(detail: object = "") -> Result:
    return Result(Verdict.CORRECT, 1.0, str(detail))


def wrong(detail: object = "", reward: float = 0.0) -> Result:
    return Result(Verdict.WRONG, reward, str(detail))


def unparsed(detail: object = "") -> Result:
    return Result(Verdict.UNPARSED, 0.0, str(detail))


def timeout(detail: object = "") -> Result:
    return Result(Verdict.TIMEOUT, 0.0, str(detail))


def error(detail: object = "") -> Result:
    return Result(Verdict.ERROR, None, str(detail))
