"""What a verifier is and what it answers."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from enum import Enum
from typing import Any

from rocm_ext.base.errors import UserError
from rocm_ext.base.types import Row

DETAIL = 300  # characters


class Verdict(str, Enum):
    """The judgement on a completion. Each value equals its name."""

    CORRECT = "CORRECT"  # right
    WRONG = "WRONG"  # wrong, or only partly right
    UNPARSED = "UNPARSED"  # the completion holds no answer
    TIMEOUT = "TIMEOUT"  # the completion's code exceeded a time limit
    ERROR = "ERROR"  # the verifier or the row is at fault, not the completion

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Result:
    """A verdict with its reward and the reason.

    Attributes:
        verdict: the judgement.
        reward: in [0, 1]; None for ERROR and for nothing else.
        detail: the reason, in one line of at most 300 characters.
        parts: components of the reward, or other numbers to log, by name; ``metrics.jsonl`` has their means as
            ``reward/NAME``.

    Raises:
        ValueError: the reward does not fit the verdict or is out of range, or a part is no number.
    """

    verdict: Verdict
    reward: float | None
    detail: str = ""
    parts: Mapping[str, float] = dataclass_field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdict", Verdict(self.verdict))
        object.__setattr__(self, "detail", short(self.detail))
        values = self.parts.values() if isinstance(self.parts, Mapping) else [None]
        are_numbers = all(isinstance(value, (int, float)) for value in values)
        if not (are_numbers and all(map(math.isfinite, values))):
            raise ValueError(
                f"the parts of a reward must be numbers by their names, found {self.parts!r}"
            )
        reward: Any = self.reward
        if self.verdict is Verdict.ERROR:
            if reward is not None:
                raise ValueError(f"an ERROR has no reward, found {reward!r}")
            return
        is_number = isinstance(reward, (int, float)) and not isinstance(reward, bool)
        if not (is_number and 0 <= reward <= 1):
            raise ValueError(f"the reward must be in [0, 1], found {reward!r}")
        object.__setattr__(self, "reward", float(reward))

    def values(self) -> tuple[Any, float | None, str, Mapping[str, float]]:
        """Return what JSON carries; ``Result(*values)`` is the result again."""
        return str(self.verdict), self.reward, self.detail, self.parts


class Verifier:
    """Judges one completion of one row. It is deterministic, and no completion makes it raise.

    Your verifier is a class with ``__call__``; the rest is optional.

    Attributes:
        needs: names of the fields that a row must have.
        batch_size: the most answers in one call of :meth:`judge_batch`.
        groups: whether :meth:`judge_group` judges all answers to a prompt together. Defining that method sets it.
    """

    needs: tuple[str, ...] = ()
    batch_size: int = 1
    groups: bool = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "judge_group" in vars(cls) and "groups" not in vars(cls):
            cls.groups = True

    def check(self) -> None:
        """Raise UserError if this machine cannot run the verifier."""

    def check_row(self, row: Row) -> None:
        """Raise UserError or ValueError, naming the field, if the row cannot be verified."""
        for name in self.needs:
            field(row, name)

    def __call__(self, completion: str, row: Row) -> Result:
        """Judge one completion, given its prompt's row; by default as a batch or a group of one."""
        if self.groups:
            return group_results(self, [completion], row)[0]
        if type(self).judge_batch is Verifier.judge_batch:
            raise NotImplementedError
        return self.judge_batch([completion], [row])[0]

    def at_once(self, completion: str, row: Row) -> Result | None:
        """Judge if no completion can make it slow, else return None.

        For verifiers of this library, the pool calls this in the run's process.
        """
        return None

    def judge_batch(self, completions: Sequence[str], rows: Sequence[Row]) -> list[Result]:
        """Judge several completions with their prompts' rows; for reward models and judges.

        A batch holds whatever answers are waiting, so a result must not depend on the other answers. If the call fails
        or takes too long, ``__call__`` judges the answers one by one.
        """
        return [self(completion, row) for completion, row in zip(completions, rows, strict=True)]

    def judge_group(self, completions: Sequence[str], row: Row) -> list[Result]:
        """Judge all answers to one prompt, in order; called only if ``groups`` is True.

        A result may depend on the other answers. If the call fails or takes too long, all results are ERROR.
        """
        raise NotImplementedError


def group_results(verifier: Verifier, completions: Sequence[str], row: Row) -> list[Result]:
    """A verifier's results on a group; raises ValueError unless there is one per answer."""
    return all_checked(
        verifier, "judge_group", verifier.judge_group(completions, row), len(completions)
    )


def all_checked(verifier: Verifier, method: str, results: Any, count: int) -> list[Result]:
    """The results of a verifier's method; raises ValueError unless they are a list of ``count``."""
    if not (isinstance(results, list) and len(results) == count):
        raise ValueError(f"{name_of(verifier)}.{method} must return a list of {count} results")
    return [checked(verifier, result) for result in results]


def checked(verifier: Verifier, result: Any) -> Result:
    """``result``, or an ERROR if a user's verifier returned something else."""
    if isinstance(result, Result):
        return Result(*result.values())  # a subclass may have skipped the checks
    return error(f"{name_of(verifier)} returned {type(result).__name__}, not a Result")


def name_of(verifier: Verifier) -> str:
    """The name of a verifier's class or function in messages."""
    inner = getattr(verifier, "inner", verifier)
    return getattr(inner, "__name__", type(inner).__name__)


def short(text: object, length: int = DETAIL) -> str:
    """``text`` in one printable line of at most ``length`` characters; a longer text loses its middle."""
    text = str(text)
    if len(text) > 4 * length:  # first, since splitting megabytes takes long
        text = text[: 2 * length] + text[-2 * length :]
    text = " ".join(text.split())
    line = "".join(char if char.isprintable() else "?" for char in text)
    half = (length - 3) // 2
    return line if len(line) <= length else f"{line[:half]}...{line[-half:]}"


def field(row: Row, name: str, kind: type | tuple[type, ...] = object) -> Any:
    """The value of a row's field; raises ValueError if the field is missing, None or not of type ``kind``."""
    value = row.get(name)
    if value is None:
        raise ValueError(
            f"field {name!r} is missing; the row has {', '.join(map(repr, row)) or 'none'}"
        )
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"field {name!r} must be {names}, found {type(value).__name__}")
    return value


def check_time(who: str, timeout: float) -> None:
    """Raise UserError unless a verifier's time limit is positive."""
    if timeout <= 0:
        raise UserError(f"{who}: timeout must be positive, found {timeout}")


def correct(detail: object = "") -> Result:
    """CORRECT with reward 1."""
    return Result(Verdict.CORRECT, 1.0, str(detail))


def wrong(detail: object = "", reward: float = 0.0) -> Result:
    """WRONG, perhaps with a part of the reward."""
    return Result(Verdict.WRONG, reward, str(detail))


def right_or_wrong(right: object, detail: object = "") -> Result:
    """CORRECT if the answer is right, else WRONG."""
    return correct(detail) if right else wrong(detail)


def unparsed(detail: object = "") -> Result:
    """UNPARSED with reward 0."""
    return Result(Verdict.UNPARSED, 0.0, str(detail))


def timeout(detail: object = "") -> Result:
    """TIMEOUT with reward 0."""
    return Result(Verdict.TIMEOUT, 0.0, str(detail))


def error(detail: object = "") -> Result:
    """ERROR, which has no reward."""
    return Result(Verdict.ERROR, None, str(detail))


def done(result: Result) -> Future:
    """A future that has its result."""
    future: Future = Future()
    future.set_result(result)
    return future
