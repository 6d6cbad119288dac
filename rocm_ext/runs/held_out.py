"""The held-out scores of a run, of RAFT's cycles or of GRPO's steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocm_ext.base.registry import GRPO
from rocm_ext.runs.folder import CycleFolder, RunFolder
from rocm_ext.runs.records import GREEDY, MOST, number


@dataclass(frozen=True)
class HeldOut:
    """An evaluation.

    Attributes:
        after: what was done before it: ``cycle 3`` or ``step 40``.
        number: number of that cycle or step; 0 is before any training.
        answers: how many answers were sampled for training before it.
        scores: as of :func:`rocm_ext.runs.records.parse_scores`.
        greedy: whether each prompt's greedy answer is right, by prompt id; reads the verdicts.
    """

    after: str
    number: int
    answers: int
    scores: Mapping[str, Any]
    greedy: Callable[[], dict[str, bool]]


def held_out(run: RunFolder) -> list[HeldOut]:
    """The evaluations of a run, in order; none of SFT."""
    if run.family == GRPO:
        return _of_steps(run)
    found, answers = [], 0
    for cycle in run.cycles:
        answers += _sampled(cycle)
        if cycle.scores is not None:
            greedy = _greedy_of(run, cycle.number)
            found.append(HeldOut(f"cycle {cycle.number}", cycle.number, answers, cycle.scores, greedy))
    return found


def _of_steps(run: RunFolder) -> list[HeldOut]:
    counts = np.clip(np.nan_to_num(run.steps["answers"]), 0, MOST)
    before = np.concatenate([[0.0], np.cumsum(counts)])
    found = []
    for each in run.evaluations:
        answers = int(before[np.searchsorted(run.steps["step"], each.step, side="right")])
        found.append(HeldOut(f"step {each.step}", each.step, answers, each.scores, _greedy_of(run, each.step)))
    return found


def _greedy_of(run: RunFolder, step: int) -> Callable[[], dict[str, bool]]:
    return lambda: run.answers.verdicts.greedy(step, GREEDY)


def _sampled(cycle: CycleFolder) -> int:
    counted = number(cycle.row.get("samples"))
    return int(counted) if 0 <= counted < MOST else len(cycle.rewards)
