"""Verifiers that combine others."""

import contextlib
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rocm_ext.base.errors import UserError
from rocm_ext.base.types import Row
from rocm_ext.sandbox.helper import blame
from rocm_ext.verifiers.base import (
    Result,
    Verdict,
    Verifier,
    checked,
    error,
    group_results,
    name_of,
)
from rocm_ext.verifiers.build import build


class _Several(Verifier):
    """Verifiers that judge an answer in order. If one of them judges groups, all answers to a prompt come together.

    A result's parts are the rewards of the verifiers that judged the answer, by name, and the parts of these.
    """

    def __init__(self, verifiers: Sequence[Any]) -> None:
        if not (verifiers and not isinstance(verifiers, (str, Mapping))):
            raise UserError(
                f"{type(self).__name__}: verifiers must be a list of verifiers, found {verifiers!r}"
            )
        self.verifiers = [build(node) for node in verifiers]
        names = [name_of(verifier) for verifier in self.verifiers]
        self.names = names.copy()
        for i, name in enumerate(names):
            if names.count(name) > 1:
                self.names[i] = f"{name} {i + 1}"
        needs: dict[str, None] = {}  # a dict keeps the order
        for verifier in self.verifiers:
            needs |= dict.fromkeys(verifier.needs)
        self.needs = tuple(needs)
        self.groups = any(verifier.groups for verifier in self.verifiers)

    def check(self) -> None:
        for verifier in self.verifiers:
            verifier.check()

    def check_row(self, row: Row) -> None:
        for verifier in self.verifiers:
            verifier.check_row(row)

    def __call__(self, completion: str, row: Row) -> Result:
        return self.judge_group([completion], row)[0]

    def judge_group(self, completions: Sequence[str], row: Row) -> list[Result]:
        earlier: list[list[Result]] = [[] for _ in completions]  # the results so far, by answer
        for verifier in self.verifiers:
            left = []
            for i, results in enumerate(earlier):
                if not (results and self._ends(results[-1])):
                    left.append(i)
            if verifier.groups and left:
                group = group_results(verifier, completions, row)
                judged = [group[i] for i in left]
            else:
                judged = _one_by_one(verifier, [completions[i] for i in left], row)
            for i, result in zip(left, judged, strict=True):
                earlier[i].append(result)
        return list(map(self._joined, earlier))

    def _joined(self, results: Sequence[Result]) -> Result:
        """The combined result on one answer, with its parts; an ERROR as it is."""
        if results[-1].reward is None:
            return results[-1]
        parts: dict[str, float] = {}
        for name, result in zip(self.names, results, strict=False):
            parts[name] = result.reward or 0.0
            for part, value in result.parts.items():
                parts[f"{name}/{part}"] = value
        return replace(self._combined(results), parts=parts)

    def _ends(self, result: Result) -> bool:
        """Whether an answer with this result goes to no further verifier."""
        return result.reward is None

    def _combined(self, results: Sequence[Result]) -> Result:
        """The result on one answer, from the verifiers' results in order."""
        raise NotImplementedError


class All(_Several):
    """CORRECT if all verifiers say so; else the first other verdict, with the least reward so far.

    The first verdict that is not CORRECT ends the judging: put cheap verifiers first. A verifier of groups sees all
    answers to the prompt, also wrong ones.

    Args:
        verifiers: their configurations.
    """

    def _ends(self, result: Result) -> bool:
        return result.verdict is not Verdict.CORRECT

    def _combined(self, results: Sequence[Result]) -> Result:
        last = results[-1]
        reward = min(result.reward or 0.0 for result in results)
        if last.verdict is Verdict.CORRECT:
            return Result(Verdict.CORRECT, reward, "")
        return Result(last.verdict, reward, f"{self.names[len(results) - 1]}: {last.detail}")


class Weighted(_Several):
    """The weighted mean of the verifiers' rewards; an ERROR of any of them is an ERROR.

    Args:
        verifiers: their configurations.
        weights: a weight >= 0 per verifier; they are divided by their sum.
        threshold: reward from which the verdict is CORRECT; below, it is the first verdict that is not CORRECT.
    """

    def __init__(
        self, verifiers: Sequence[Any], weights: Sequence[float], threshold: float = 1.0
    ) -> None:
        super().__init__(verifiers)
        count = len(self.verifiers)
        listed = isinstance(weights, (list, tuple)) and len(weights) == count
        numbers = listed and all(type(weight) in (int, float) for weight in weights)
        in_range = numbers and all(0 <= weight < math.inf for weight in weights)
        if not (in_range and 0 < sum(weights) < math.inf):
            raise UserError(f"Weighted needs {count} weights >= 0, not all 0; found {weights!r}")
        if not (0 < threshold <= 1):
            raise UserError(f"Weighted: threshold must be in (0, 1], found {threshold}")
        self.weights = list(weights)
        self.threshold = threshold

    def _combined(self, results: Sequence[Result]) -> Result:
        rewards = [result.reward or 0.0 for result in results]
        weighted = map(operator.mul, self.weights, rewards)
        mean = sum(weighted) / sum(self.weights)
        details = []
        for name, reward, result in zip(self.names, rewards, results, strict=True):
            why = f" ({result.detail})" if result.detail else ""
            details.append(f"{name} {reward:g}{why}")
        if mean >= self.threshold - 1e-9:
            verdict = Verdict.CORRECT
        else:
            others = (result.verdict for result in results if result.verdict is not Verdict.CORRECT)
            verdict = next(others, Verdict.WRONG)  # all may say CORRECT with partial rewards
        return Result(verdict, min(1.0, mean), "; ".join(details))


def _one_by_one(verifier: Verifier, completions: Sequence[str], row: Row) -> list[Result]:
    """Judge answers independently, in batches if the verifier takes them."""
    results: list[Result] = []
    size = max(1, verifier.batch_size)
    for start in range(0, len(completions), size):
        batch = completions[start : start + size]
        if len(completions) > 1 and size > 1:
            with contextlib.suppress(Exception):  # one answer must not spoil the others
                judged = verifier.judge_batch(batch, [row] * len(batch))
                results += [
                    checked(verifier, result) for result, _ in zip(judged, batch, strict=True)
                ]
                continue
        for completion in batch:
            try:
                results.append(checked(verifier, verifier(completion, row)))
            except Exception as problem:
                results.append(error(blame(problem)))
    return results
