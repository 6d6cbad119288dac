"""Rewards of a step's answers, and what each answer's reward is worth in its group.

Pure functions without torch. The key of an answer is its prompt's id and its index; a prompt's answers are a group.
"""

from collections.abc import Mapping
from math import fsum, sqrt
from typing import TYPE_CHECKING

from rocm_ext.base.errors import UserError
from rocm_ext.runs.folder import SampleKey
from rocm_ext.verifiers import Result

if TYPE_CHECKING:  # the module needs torch
    from rocm_ext.rl.records import Sample

EPSILON = 1e-4  # added to the standard deviation that advantages are divided by, as in TRL's GRPOTrainer
EQUAL = 1e-8  # rewards closer than this are equal: weighted means of the same parts differ in the last bits


def rewards(
    samples: "Mapping[SampleKey, Sample]",
    results: Mapping[SampleKey, Result],
    *,
    truncated: str,
    penalty: float,
    margin: int,
    max_new_tokens: int,
) -> dict[SampleKey, float]:
    """Return the rewards of a step's answers. Answers without a reward (verdict ERROR) are left out.

    Args:
        samples: answers by prompt id and sample index.
        results: verdicts under the same keys.
        truncated: ``penalize`` subtracts a penalty from the rewards of answers that ``max_new_tokens`` cut; any other
            value leaves the rewards as they are.
        penalty: subtracted from the reward of a cut answer.
        margin: number of tokens before ``max_new_tokens`` over which the penalty grows linearly from 0, also for
            answers that ended by themselves: the soft overlong punishment of DAPO (arXiv:2503.14476, equation 13). 0:
            only cut answers have a penalty.
        max_new_tokens: longest answer, in tokens.
    """
    found = {key: result.reward for key, result in results.items() if result.reward is not None}
    if truncated != "penalize":
        return found

    def share(sample: "Sample") -> float:
        if sample.finish_reason == "length":
            return 1.0
        over = len(sample.tokens) - (max_new_tokens - margin)
        return min(1.0, over / margin) if margin and over > 0 else 0.0

    return {key: reward - penalty * share(samples[key]) for key, reward in found.items()}


def groups(rewards: Mapping[SampleKey, float]) -> dict[str, dict[SampleKey, float]]:
    """Return the rewards by prompt."""
    found: dict[str, dict[SampleKey, float]] = {}
    for key, reward in rewards.items():
        found.setdefault(key[0], {})[key] = reward
    return found


def flat(rewards: Mapping[SampleKey, float]) -> set[str]:
    """Return the prompts that teach nothing: their rewards are all equal, or they have fewer than two."""
    return {prompt for prompt, group in groups(rewards).items() if _equal(group)}


def advantages(rewards: Mapping[SampleKey, float], center: str, scale: str) -> dict[SampleKey, float]:
    """Return the advantage of each answer. The advantages of a group add up to 0; those of a flat group are 0.

    Args:
        rewards: all rewards of the step, those of flat groups too.
        center: what a reward is compared with. ``mean``: the mean of its group, as in GRPO (arXiv:2402.03300);
            ``leave_one_out``: the mean of the group's other rewards, as in RLOO (arXiv:2402.14740).
        scale: what the difference is divided by. ``std``: the sample standard deviation of the group's rewards;
            ``batch``: that of all rewards of the step; both as in TRL's GRPOTrainer. ``none``: nothing, as in Dr. GRPO
            (arXiv:2503.20783).

    Raises:
        UserError: ``center`` or ``scale`` has another value.
    """
    if center not in ("mean", "leave_one_out"):
        raise UserError(f"center must be mean or leave_one_out, found {center!r}")
    if scale not in ("std", "batch", "none"):
        raise UserError(f"scale must be std, batch or none, found {scale!r}")
    found: dict[SampleKey, float] = {}
    of_step = _deviation(rewards) if scale == "batch" else 0.0
    for group in groups(rewards).values():
        if _equal(group):
            found |= dict.fromkeys(group, 0.0)
            continue
        count, mean = len(group), fsum(group.values()) / len(group)
        # a reward minus the mean of the others is this factor times the reward minus the mean of all
        factor = count / (count - 1) if center == "leave_one_out" else 1.0
        if scale != "none":
            factor /= (_deviation(group) if scale == "std" else of_step) + EPSILON
        found |= {key: factor * (reward - mean) for key, reward in group.items()}
    return found


def length_share(rewards: Mapping[SampleKey, float], lengths: Mapping[SampleKey, int]) -> float | None:
    """Return the share of the rewards' variance inside groups that a linear function of the length explains.

    It is the squared correlation of rewards and lengths, both minus the mean of their group, over all groups that are
    not flat.

    Args:
        rewards: the step's rewards.
        lengths: length of each of these answers, in tokens.

    Returns:
        The share, from 0 to 1; None if every group is flat.
    """
    both = of_rewards = of_lengths = 0.0
    for group in groups(rewards).values():
        if _equal(group):
            continue
        mean, length = fsum(group.values()) / len(group), sum(lengths[key] for key in group) / len(group)
        pairs = [(reward - mean, lengths[key] - length) for key, reward in group.items()]
        both += fsum(x * y for x, y in pairs)
        of_rewards += fsum(x * x for x, _ in pairs)
        of_lengths += fsum(y * y for _, y in pairs)
    if not of_rewards:
        return None
    return min(1.0, both**2 / (of_rewards * of_lengths)) if of_lengths else 0.0


def _equal(group: Mapping[SampleKey, float]) -> bool:
    return max(group.values()) - min(group.values()) <= EQUAL


def _deviation(rewards: Mapping[SampleKey, float]) -> float:
    """Return the sample standard deviation; 0 for fewer than two rewards."""
    if len(rewards) < 2:
        return 0.0
    mean = fsum(rewards.values()) / len(rewards)
    return sqrt(fsum((reward - mean) ** 2 for reward in rewards.values()) / (len(rewards) - 1))
