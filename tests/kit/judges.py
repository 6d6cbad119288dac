"""Verifiers for tests; they judge the answers of a model with random weights."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from rocm_ext.verifiers import Result, Verdict, Verifier


class Coin(Verifier):
    """Decides by a hash of the answer, so that half of them are right; ``needs`` the field ``answer``.

    The hash, from 0 to 1, is a part of the reward.
    """

    needs = ("answer",)

    def __init__(self, log: str | None = None, share: float = 0.5) -> None:
        self.log, self.share = log, share

    def __call__(self, completion, row):
        if self.log is not None:
            with Path(self.log).open("a") as file:
                file.write("judged\n")
        value = hashlib.sha256(f"{completion} {row['answer']}".encode()).digest()[0] / 256
        parts = {"hash": value}
        right = value < self.share
        return (
            Result(Verdict.CORRECT, 1.0, "", parts)
            if right
            else Result(Verdict.WRONG, 0.0, f"{value:.2f}", parts)
        )


class After(Verifier):
    """Finds nothing right until the file ``end`` exists; then everything."""

    def __init__(self, end: str) -> None:
        self.end = end

    def __call__(self, completion, row):
        right = Path(self.end).exists()
        return Result(Verdict.CORRECT, 1.0) if right else Result(Verdict.WRONG, 0.0)


class Graded(Coin):
    """A coin that gives wrong answers the reward 0.5."""

    def __call__(self, completion, row):
        result = super().__call__(completion, row)
        return result if result.verdict is Verdict.CORRECT else Result(Verdict.WRONG, 0.5)


class Broken(Verifier):
    """Raises on every answer that contains an ``e``."""

    def __call__(self, completion, row):
        if "e" in completion:
            raise RuntimeError("the judge is ill")
        return Result(Verdict.CORRECT, 1.0)


class Tired(Coin):
    """A coin that raises at some calls, counted from 1."""

    def __init__(self, fails: Sequence[int] = (), share: float = 0.5) -> None:
        super().__init__(share=share)
        self.fails, self.calls = list(fails), 0

    def __call__(self, completion, row):
        self.calls += 1
        if self.calls in self.fails:
            raise RuntimeError("the judge is tired")
        return super().__call__(completion, row)


class Turns(Verifier):
    """Finds every other answer right, whatever it says."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completion, row):
        self.calls += 1
        return Result(Verdict.CORRECT, 1.0) if self.calls % 2 else Result(Verdict.WRONG, 0.0)


class Dies(Verifier):
    """Kills its own process."""

    def __call__(self, completion, row):
        os._exit(3)


class Until(Coin):
    """A coin until the file ``end`` exists; then nothing is right. Right answers have the reward ``right``."""

    def __init__(self, end: str | None = None, share: float = 0.5, right: float = 1.0) -> None:
        super().__init__(share=share)
        self.end, self.right = end, right

    def __call__(self, completion, row):
        result = super().__call__(completion, row)
        if self.end is not None and Path(self.end).exists():
            return Result(Verdict.WRONG, 0.0)
        return Result(Verdict.CORRECT, self.right) if result.verdict is Verdict.CORRECT else result
