"""Whether training on pairs makes the chosen answers less likely from beginning to end."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

_PARTS = 4  # a run's steps are compared by their quarters, because steps differ in their pairs
_LEAST = 3  # validations, which have the same pairs each time


def falling_likelihood(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Find out whether the chosen answers' likelihood falls all the way.

    Losses of pairs see only the margin. It also grows where both sides become less likely, the chosen one less so,
    and then the model moves to answers that are in no pair (arXiv:2404.04626).

    Args:
        lines: the run's ``metrics.jsonl``.

    Returns:
        A warning; None if the likelihood rises somewhere, or too few lines have it.
    """
    held_out = [line["val_logprobs_chosen"] for line in lines if "val_logprobs_chosen" in line]
    rewards = [line["reward_chosen"] for line in lines if "reward_chosen" in line and "kl" in line]
    if len(held_out) >= _LEAST:
        values, what = held_out, "log-prob of the chosen validation answers"
    elif len(rewards) >= 2 * _PARTS:
        size = len(rewards) / _PARTS
        values = [fmean(rewards[round(i * size) : round((i + 1) * size)]) for i in range(_PARTS)]
        values, what = [0.0, *values], "reward of the chosen answers"  # before the first step it is 0
    else:
        return None
    if not all(later < earlier for earlier, later in pairwise(values)):
        return None
    return (
        f"the {what} fell all the way, from {values[0]:.2f} to {values[-1]:.2f}: the model moves away from the chosen "
        "answers, too. Set loss.rpo_alpha=1, raise loss.beta or lower the learning rate"
    )
