"""The held-out scores of a run, of RAFT's cycles or of the steps of others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rocm_ext.base.registry import RAFT
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.records import GREEDY, MOST, number


@dataclass(frozen=True)
class HeldOut:
    """An evaluation.

    Attributes:
        after: the cycle or step before it: ``cycle 3`` or ``step 40``.
        number: number of the cycle or step; 0 is before any training.
        answers: number of answers sampled for training before it.
        scores: result of :func:`rocm_ext.runs.records.parse_scores`.
        greedy: reads the verdicts; whether the greedy answer is right, by prompt id.
    """

    after: str
    number: int
    answers: int
    scores: Mapping[str, Any]
    greedy: Callable[[], dict[str, bool]]


def held_out(run: RunFolder) -> list[HeldOut]:
    """The evaluations of a run, in order; SFT and DPO have them with ``eval_prompts``."""
    scored: list[tuple[int, int, Mapping[str, Any]]] = []
    if run.family != RAFT:
        counts = np.clip(np.nan_to_num(run.steps["answers"]), 0, MOST)
        before = np.concatenate([[0.0], np.cumsum(counts)])
        for step, scores in run.evaluations.items():
            scored.append((step, int(before[np.searchsorted(run.steps["step"], step, side="right")]), scores))
    else:
        answers = 0
        for cycle in run.cycles:
            counted = number(cycle.row.get("samples"))
            answers += int(counted) if 0 <= counted < MOST else len(cycle.rewards)
            if cycle.scores is not None:
                scored.append((cycle.number, answers, cycle.scores))
    unit = "cycle" if run.family == RAFT else "step"

    def greedy(at: int) -> dict[str, bool]:  # the verdicts are read when somebody asks
        return run.answers.verdicts.greedy(at, GREEDY)

    return [HeldOut(f"{unit} {at}", at, count, scores, partial(greedy, at)) for at, count, scores in scored]
