"""Reasons to end a run early, or to warn: pure functions of the lines of ``metrics.jsonl``, without torch."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from statistics import fmean, median
from typing import Any

from rocm_ext.rl.advantages import EQUAL

Lines = Sequence[Mapping[str, Any]]

ENTROPY_STEPS, LENGTH_STEPS = 3, 10  # newest steps whose mean counts: one step alone is noisy
_MISMATCH_FACTOR = 5.0  # of the median of all earlier steps
_MISMATCH_LEAST = 0.02  # nats per token; 16-bit servers and answers of the step before give 1e-4 to 1e-2
_MISMATCH_STEPS = 3  # earlier steps that a median needs


def stop_reason(
    lines: Lines, *, min_entropy: float | None, stop_after_no_gain: int | None, max_length_share: float | None
) -> str | None:
    """Decide whether a run stops early.

    Args:
        lines: the lines of ``metrics.jsonl``, those of steps and those of evaluations, in order.
        min_entropy: stop if the mean entropy of the answers of the last 3 steps is below this, in nats per token;
            None: never.
        stop_after_no_gain: stop after this many evaluations in a row without a better held-out score; None: never.
        max_length_share: stop if the length of answers explains more than this share of the rewards' variance inside
            groups, as the mean of the last 10 steps; None: never.

    Returns:
        The reason to stop and what to do, in one line; None to continue. Steps without a measured value are skipped.
    """
    entropy = _mean_of_last(lines, "entropy", ENTROPY_STEPS)
    if min_entropy is not None and entropy is not None and entropy < min_entropy:
        return (
            f"the entropy of the answers was {entropy:.3g} nats per token over the last {ENTROPY_STEPS} steps, below "
            f"min_entropy {min_entropy:g}: groups of nearly equal answers teach little. Lower lr, or raise clip_high, "
            "entropy_coef or the temperature"
        )
    since = _evaluations_since_best(lines)
    if stop_after_no_gain is not None and since >= stop_after_no_gain:
        return (
            f"no better held-out score in {since} evaluation{'s' * (since > 1)} (stop_after_no_gain "
            f"{stop_after_no_gain}): the best adapter is kept. To go on, raise stop_after_no_gain and resume"
        )
    length = _mean_of_last(lines, "length_share", LENGTH_STEPS)
    if max_length_share is not None and length is not None and length > max_length_share:
        return (
            f"the length of answers explains {length:.0%} of the differences between rewards over the last "
            f"{LENGTH_STEPS} steps, above max_length_share {max_length_share:g}: the policy may be learning length "
            "instead of the task. Read answers with their rewards, and correct the verifier or the truncation penalty"
        )
    return None


def flat_reason(lines: Lines, *, max_flat_steps: int) -> str | None:
    """Decide whether a run stops because its newest steps taught nothing.

    Args:
        lines: as in :func:`stop_reason`.
        max_flat_steps: stop after this many steps in a row without an update.

    Returns:
        How the rewards of these steps were and what to do, in one line; None to continue.
    """
    flat = list(takewhile(lambda row: not row["updates"], reversed(_steps(lines))))
    if len(flat) < max_flat_steps:
        return None
    many = f"the last {len(flat)} steps" if len(flat) > 1 else "the last step"
    found, cure = _how_flat(flat)
    needed = "training needs groups of unequal rewards"
    return (
        f"no update in {many} (max_flat_steps {max_flat_steps}): {found}; {needed}. {cure}. To resume this run, raise "
        "max_flat_steps"
    )


def _how_flat(flat: Lines) -> tuple[str, str]:
    """Return what the rewards of steps without an update were, and what to do."""
    means = [row["reward"] for row in flat if row["reward"] is not None]
    if not means:
        return "no answer has a reward, all verdicts are ERROR", "Correct the verifier; verdicts.jsonl has the errors"
    cut = fmean(row["truncated"] for row in flat)
    same = all((row["reward_std"] or 0.0) <= EQUAL for row in flat) and max(means) - min(means) <= EQUAL
    check = "check the verifier on known answers with rocm-ext verify"
    if same and abs(means[0]) <= EQUAL:
        easier = "Choose easier prompts, more samples_per_prompt, a higher temperature or partial rewards"
        if cut > 0.5:
            easier = f"{cut:.0%} of the answers were cut: raise max_new_tokens. {easier}"
        return "all rewards are 0", f"{easier}, or {check}"
    if same and abs(means[0] - 1) <= EQUAL:
        return "all rewards are 1", f"Choose harder prompts or a stricter verifier, or {check}"
    found = f"all rewards are {means[0]:g}" if same else "the rewards are equal inside each group"
    if any(row["flat"] < 1 for row in flat):  # groups with unequal rewards were there, but no answer to train on
        return f"{found} or the answers were cut ({cut:.0%})", "Raise max_new_tokens, or set truncated: keep"
    return found, f"Choose prompts of medium difficulty, more samples_per_prompt or a higher temperature, or {check}"


def mismatch_warning(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a warning if the newest step's divergence is far above that of the steps before it.

    Args:
        lines: the lines of ``metrics.jsonl``, in order.

    Returns:
        The warning, in one line; None if there is nothing to warn of, or if the step before deserved the same warning.
    """
    values = [line["mismatch_kl"] for line in lines if line.get("mismatch_kl") is not None]
    if not _is_high(values) or _is_high(values[:-1]) or lines[-1].get("mismatch_kl") is None:
        return None
    return (
        f"step {lines[-1]['step']}: the log-probs of the sampler and those of the trainer differ more than before: "
        f"mismatch_kl is {values[-1]:.2g} nats per token, and was {median(values[:-1]):.2g} in the median of the "
        "earlier steps. A server may sample with an old adapter, or the policy changes fast: lower lr"
    )


def _is_high(values: Sequence[float]) -> bool:
    earlier = values[:-1]
    return len(earlier) >= _MISMATCH_STEPS and values[-1] > max(_MISMATCH_LEAST, _MISMATCH_FACTOR * median(earlier))


def _steps(lines: Lines) -> list[Mapping[str, Any]]:
    return [row for row in lines if "eval" not in row]


def _mean_of_last(lines: Lines, name: str, count: int) -> float | None:
    """Return the mean of the newest ``count`` measured values; None if there are fewer."""
    values = [row[name] for row in _steps(lines) if row.get(name) is not None][-count:]
    return fmean(values) if len(values) == count else None


def _evaluations_since_best(lines: Lines) -> int:
    """Return how many evaluations came after the best; the first of equals is the best."""
    scores = [row["eval"]["correct"] for row in lines if "eval" in row]
    return len(scores) - 1 - scores.index(max(scores)) if scores else 0
