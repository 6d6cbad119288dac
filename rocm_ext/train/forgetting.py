"""Forgetting: a named held-out data set on which the model gets worse while it gets better on the target."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rocm_ext.base.log import warn
from rocm_ext.base.types import Json
from rocm_ext.config.checks.training import EVAL_METRIC
from rocm_ext.runs.intervals import Interval, paired_gain
from rocm_ext.runs.records import EvalScores, column
from rocm_ext.runs.scores import Score
from rocm_ext.train.scoring import Validation

_MARGIN = 0.01  # share of the loss; a smaller rise does not matter


class Scored(NamedTuple):
    """A model's answers to the prompts of a set.

    Attributes:
        scores: see :func:`rocm_ext.rl.evaluation.score`.
        sums: [prompts] 1 if the greedy answer is wrong, else 0, in the order of the prompts.
    """

    scores: EvalScores
    sums: np.ndarray

    @property
    def loss(self) -> float:
        """The share of wrong greedy answers."""
        return float(self.sums.mean())

    def rise(self, before: Sequence[float]) -> Interval:
        """Return the rise of this share since an evaluation with the ``sums`` ``before``."""
        changes = self.sums - before
        gained = int((changes < 0).sum())
        lost = int((changes > 0).sum())
        return paired_gain(gained, lost, len(changes))


def shares(judged: Mapping[str, Scored]) -> dict[str, float]:
    """Return pass@1 by the column of the metric logger."""
    values = {}
    for name, part in judged.items():
        values[column(EVAL_METRIC, name)] = part.scores["pass_at_1"]
    return values


def in_words(judged: Mapping[str, Scored]) -> str:
    """Return the right answers by set, for the log."""
    words = []
    for name, part in judged.items():
        score = Score(part.scores["correct"], part.scores["prompts"])
        words.append(f"held-out {name} {score}" if name else f"held-out {score}")
    return ", ".join(words)


class Forgetting:
    """Compares each validation, or evaluation, of the named data sets with the best one so far.

    A loss has risen if its rise is above 1 % of the best loss by twice the half width of the rise's 95 % interval: the
    best of many validations is too low by chance. The interval is paired: by blocks of rows, as many as a step has,
    which are the same in all validations, or by prompts. After a warning, the next one takes a rise above that
    validation.

    Args:
        target: name of the data set that the run is for; empty without names, when nothing is compared.
        loss: name of the loss in warnings.
        unit: name of a step in warnings.

    Attributes:
        best: by name of a data set, ``loss`` and ``step`` of its best validation, and the ``last`` loss.
        sums: by name, the sums with which the next validation is compared.
    """

    def __init__(self, target: str, loss: str = "validation loss", unit: str = "step") -> None:
        self.target = target
        self.loss = loss
        self.unit = unit
        self.best: dict[str, Json] = {}
        self.sums: dict[str, list[float]] = {}

    def warnings(self, step: int, results: Mapping[str, Validation | Scored]) -> Json:
        """Take results as :meth:`take` does; log the warnings, and return them for a line of ``metrics.jsonl``."""
        warnings = self.take(step, results) if self.target else []
        warn(warnings)
        return {"warnings": warnings} if warnings else {}

    def line(self, step: int, judged: Mapping[str, Scored], seconds: float) -> Json:
        """Take an evaluation, and return its line of ``metrics.jsonl``: scores by column, seconds and warnings."""
        scores = {column("eval", name): part.scores for name, part in judged.items()}
        return {**scores, "seconds": seconds, **self.warnings(step, judged)}

    def take(self, step: int, results: Mapping[str, Validation | Scored]) -> list[str]:
        """Take the results of a validation by name, and return warnings, if the target is at its best."""
        warnings = []
        for name, result in results.items():
            best = self.best.get(name)
            if best is None or result.loss < best["loss"]:
                self.best[name] = best = {"loss": result.loss, "step": step}
                self.sums[name] = result.sums.tolist()
            best["last"] = result.loss
        for name, result in results.items():
            best = self.best[name]
            rise = result.rise(self.sums[name])
            improves = results[self.target].loss <= self.best[self.target]["loss"]
            least = 2 * rise.low - rise.value  # by twice the half width
            if improves and least > _MARGIN * abs(best["loss"]):
                self.sums[name] = result.sums.tolist()
                warnings.append(
                    f"{self.unit} {step}: the {self.loss} of {name} has risen to {result.loss:.4f}, from "
                    f"{best['loss']:.4f} at {self.unit} {best['step']}, while that of {self.target} is the lowest so "
                    f"far: the model may forget. Lower optimizer.lr, train for fewer steps, or also train on rows like "
                    f"{name}"
                )
        return warnings
