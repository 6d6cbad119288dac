"""Verifiers that combine others."""

from collections.abc import Mapping, Sequence
from typing import Any

from rocm_ext.errors import UserError
from rocm_ext.verifiers.base import Result, Verdict, Verifier
from rocm_ext.verifiers.build import build


class _Several(Verifier):
    def __init__(self, verifiers: Sequence[Any]) -> None:
        if isinstance(verifiers, (str, Mapping)) or not verifiers:
            raise UserError(f"{type(self).__name__}: verifiers must be a list of verifiers, found {verifiers!r}")
        self.verifiers = [build(node) for node in verifiers]
        self.needs = tuple(dict.fromkeys(name for verifier in self.verifiers for name in verifier.needs))

    def check(self) -> None:
        for verifier in self.verifiers:
            verifier.check()

    def check_row(self, row: Mapping[str, Any]) -> None:
        for verifier in self.verifiers:
            verifier.check_row(row)


class All(_Several):
    """CORRECT if all verifiers say so; else the verdict of the first that disagrees and the least reward so far.

    They judge in order, and the first verdict that is not CORRECT ends it: put the cheap ones first.

    Args:
        verifiers: their nodes.
    """

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Result:
        rewards = []
        for verifier in self.verifiers:
            result = verifier(completion, row)
            if result.reward is None:
                return result
            rewards.append(result.reward)
            if result.verdict is not Verdict.CORRECT:
                return Result(result.verdict, min(rewards), f"{_name(verifier)}: {result.detail}")
        return Result(Verdict.CORRECT, min(rewards), "")


class Weighted(_Several):
    """The weighted mean of the verifiers' rewards; an ERROR of any of them is an ERROR.

    Args:
        verifiers: their nodes.
        weights: one for each verifier, not negative; they are divided by their sum.
        threshold: the verdict is CORRECT from this reward on; below it, the first verdict that is not CORRECT.
    """

    def __init__(self, verifiers: Sequence[Any], weights: Sequence[float], threshold: float = 1.0) -> None:
        super().__init__(verifiers)
        if len(weights) != len(self.verifiers) or any(w < 0 for w in weights) or sum(weights) <= 0:
            raise UserError(
                f"Weighted needs a weight >= 0 for each of {len(self.verifiers)} verifiers, and one > 0; "
                f"found {list(weights)}"
            )
        if not 0 < threshold <= 1:
            raise UserError(f"Weighted: threshold must be in (0, 1], found {threshold}")
        self.weights, self.threshold = list(weights), threshold

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Result:
        reward, verdict, details = 0.0, Verdict.CORRECT, []
        for verifier, weight in zip(self.verifiers, self.weights, strict=True):
            result = verifier(completion, row)
            if result.reward is None:
                return result
            reward += weight * result.reward
            if verdict is Verdict.CORRECT:
                verdict = result.verdict
            details.append(f"{_name(verifier)} {result.reward:g}" + f" ({result.detail})" * bool(result.detail))
        reward = min(1.0, reward / sum(self.weights))
        if reward >= self.threshold - 1e-9:
            verdict = Verdict.CORRECT
        elif verdict is Verdict.CORRECT:  # all said CORRECT with partial rewards
            verdict = Verdict.WRONG
        return Result(verdict, reward, "; ".join(details))


def _name(verifier: Verifier) -> str:
    return type(getattr(verifier, "inner", verifier)).__name__
