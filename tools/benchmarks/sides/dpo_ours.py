"""Run our DPO recipe: ``… dpo_ours --config YAML``; between steps it scores rows under the reference on order."""

from collections.abc import Mapping
from pathlib import Path

from rocm_ext.recipes import dpo_rocm

from rocm_ext.data.rows import Rows
from rocm_ext.train.scoring import score
from tools.benchmarks.sides.talk import StepLogger


class Paced(dpo_rocm.DPO):
    """Our recipe, which also keeps the rows to score. The run itself has scored them before its first step."""

    def add_columns(self, folder: Path, rows: Mapping[str, Rows]) -> None:
        REST.append((self.learner, rows["dataset"]))
        super().add_columns(folder, rows)


class Logger(StepLogger):
    """A metric logger that runs steps and scores rows on order, and reports losses and gradient norms."""

    def __init__(self) -> None:
        super().__init__(("loss", "grad_norm"), score=score_rows)


REST: list[tuple] = []


def score_rows(start: int, end: int) -> None:
    """Score the rows as the recipe does before training."""
    learner, rows = REST[-1]
    score(learner, rows.part(range(start, end)))


if __name__ == "__main__":
    from tools.benchmarks.sides import (
        dpo_ours,
    )  # the module that the config's metric logger comes from

    dpo_rocm.DPO = dpo_ours.Paced  # type: ignore[misc]
    dpo_rocm.main()
