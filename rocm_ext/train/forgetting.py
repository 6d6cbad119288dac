"""Forgetting: a named validation data set whose loss rises while the target's falls."""

from collections.abc import Mapping

from rocm_ext.base.types import Json
from rocm_ext.runs.intervals import paired_ratio
from rocm_ext.train.scoring import Validation

_MARGIN = 0.01  # share of the loss; a smaller rise does not matter


class Forgetting:
    """Compares each validation of the named data sets with the best one so far.

    A loss has risen if its rise is above 1 % of the best loss by twice the half width of the rise's 95 % interval: the
    best of many validations is too low by chance. The interval is paired by blocks of rows, as many as a step has,
    which are the same in all validations. After a warning, the next one takes a rise above that validation.

    Args:
        target: name of the data set that the run is for.

    Attributes:
        best: by name of a data set, ``loss`` and ``step`` of its best validation, and the ``last`` loss.
        sums: by name, the blocks' sums with which the next validation is compared.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.best: dict[str, Json] = {}
        self.sums: dict[str, list[float]] = {}

    def take(self, step: int, results: Mapping[str, Validation]) -> list[str]:
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
            rise = paired_ratio(result.sums - self.sums[name], result.sizes)
            improves = self.best[self.target]["step"] == step
            least = 2 * rise.low - rise.value  # by twice the half width
            if improves and least > _MARGIN * abs(best["loss"]):
                self.sums[name] = result.sums.tolist()
                warnings.append(
                    f"step {step}: the validation loss of {name} has risen to {result.loss:.4f}, from "
                    f"{best['loss']:.4f} at step {best['step']}, while that of {self.target} is the lowest so far: the "
                    f"model may forget. Lower optimizer.lr, train for fewer steps, or add rows like {name} to dataset"
                )
        return warnings
