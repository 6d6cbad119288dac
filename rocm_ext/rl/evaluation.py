"""Scores of an evaluation, and reasons to stop a run early or to warn, from its measurements."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from math import sqrt
from statistics import fmean, median, variance

import numpy as np
from omegaconf import DictConfig

from rocm_ext.base.log import log
from rocm_ext.base.types import Json
from rocm_ext.data.prompts import Prompt
from rocm_ext.rl.records import is_correct, pass_at_ks
from rocm_ext.rl.rollout import Answers
from rocm_ext.rl.selection import EQUAL
from rocm_ext.runs.intervals import mcnemar
from rocm_ext.runs.records import GREEDY, EvalScores, PassAtK, SampleKey, of_sets
from rocm_ext.runs.scores import wilson
from rocm_ext.train.forgetting import Scored
from rocm_ext.verifiers import Result

Lines = Sequence[Json]  # lines of ``metrics.jsonl`` in order, for steps and evaluations

LENGTH_STEPS = 10  # newest steps whose mean counts: one step alone is noisy
_MISMATCH_FACTOR = 5.0  # a multiple of the median of all earlier steps
# nats per token; 16-bit servers and answers of the step before give 1e-4 to 1e-2
_MISMATCH_LEAST = 0.02
_MISMATCH_STEPS = 3  # earlier steps that a median needs
_EARLY_STEPS = 20  # steps after which a reward should have moved
_WINDOW = 10  # steps whose mean is advised on
_MANY = 0.5  # share of the groups
_GROUPS = {  # what groups that teach nothing have, and the cure
    "all_right": "have right answers only: choose harder prompts, or set curriculum: informative",
    "all_wrong": "have no right answer: choose easier prompts, partial rewards, or more samples_per_prompt",
}
# sum of learning rates: 20 updates of Tinker's recipe for GSM8K with LoRA (tinker-cookbook, math_rl)
_FAR = 20 * 8e-5


def steps_of(lines: Lines) -> list[Json]:
    """Return the lines of steps."""
    return [line for line in lines if "reward" in line]


def evaluations_of(lines: Lines) -> list[Json]:
    """Return the lines of evaluations."""
    return [line for line in lines if "reward" not in line]


def target_scores(line: Json) -> EvalScores:
    """Return the scores in an evaluation's line, of named sets the first one's."""
    column, *_ = of_sets([line], "eval")
    scores: EvalScores = line[column]
    return scores


# ---- held-out scores


def judge(
    answers: Answers, sets: Mapping[str, Sequence[Prompt]], samples: int
) -> dict[str, Scored]:
    """Compute the scores of an evaluation by set of prompts; see :func:`score`."""
    judged = {}
    for name, prompts in sets.items():
        of_set = answers.of(prompts)
        right = greedy(of_set.results)
        # by id: a resumed run may read the prompts in another order
        wrong = [float(not right[prompt]) for prompt in sorted(right)]
        judged[name] = Scored(score(of_set, samples), np.array(wrong))
    return judged


def score(answers: Answers, samples: int) -> EvalScores:
    """Compute the scores of an evaluation.

    They are pass@1 of the greedy answers, and pass@k of the sampled ones for k = 1, 2, 4 … up to ``samples``. An answer
    passes if its verdict is CORRECT; an ERROR does not pass. The interval of pass@k counts a prompt as one trial, so it
    is wider than necessary.

    Args:
        answers: answers to the requests of :meth:`rocm_ext.rl.prompts.PromptSet.evaluation_requests`.
        samples: sampled answers per prompt.
    """
    right = greedy(answers.results)
    correct = sum(right.values())
    drawn: dict[str, int] = defaultdict(int)  # right sampled answers, by prompt
    for (prompt, sample), result in answers.results.items():
        if sample != GREEDY:
            drawn[prompt] += is_correct(result)
    at_k: dict[str, PassAtK] = {}
    groups = [(samples, count) for count in drawn.values()]
    for k, share in pass_at_ks(groups).items():
        interval = wilson(share * len(drawn), len(drawn))
        at_k[str(k)] = {"pass": share, "interval": list(interval)}
    return {
        "prompts": len(right),
        "correct": correct,
        "pass_at_1": correct / len(right),
        "interval": list(wilson(correct, len(right))),
        "pass_at_k": at_k,
        "samples_per_prompt": samples,
        "verdicts": dict(sorted(answers.verdicts().items())),
        "truncated": sum(sample.finish_reason == "length" for sample in answers.samples.values()),
    }


def report_gain(
    before: Mapping[str, bool], after: Mapping[str, bool], chosen: str, looks: int
) -> None:
    """Log how the chosen adapter does on the held-out prompts against the initial model.

    A gain has the p-value of a paired test. The best of several evaluations on the same prompts scores too high, so the
    p-value is multiplied by their number (Bonferroni). Without a gain or without records this is a warning.

    Args:
        before: by prompt id, whether the initial model's greedy answer is right. Empty if its records are lost.
        after: the same for the chosen adapter.
        chosen: name of the chosen adapter, such as ``cycle 3``.
        looks: number of evaluations that chose it.
    """
    if not before or before.keys() != after.keys():
        log.warning(
            "%s is not compared with the initial model: verdicts.jsonl has lost held-out verdicts",
            chosen,
        )
        return
    gained = sum(right and not before[prompt] for prompt, right in after.items())
    lost = sum(right and not after[prompt] for prompt, right in before.items())
    changed = f"{chosen} against the initial model: {gained} of {len(after)} held-out prompts gained, {lost} lost"
    if gained <= lost:
        log.warning("%s, so the training has not raised the held-out score", changed)
        return
    p = mcnemar(lost, gained)
    best_of = ""
    if looks > 1:
        best_of = (
            f", {min(1.0, looks * p):.2g} as the best of {looks} evaluations (Bonferroni). The prompts that chose it "
            "make its score too high: measure it on others with rocm-ext eval"
        )
    log.info("%s; by chance with p = %.2g (McNemar)%s", changed, p, best_of)


def greedy(results: Mapping[SampleKey, Result]) -> dict[str, bool]:
    """Return by prompt id whether the greedy answer is right."""
    return {
        prompt: is_correct(result)
        for (prompt, sample), result in results.items()
        if sample == GREEDY
    }


# ---- reasons to stop: pure functions


def stop_reason(lines: Lines, cfg: DictConfig, entropy_steps: int) -> str | None:
    """Decide whether a run stops early. Steps without a measured value are skipped.

    Args:
        lines: the lines of ``metrics.jsonl``.
        cfg: config with ``min_entropy``, in nats per token: stop below it, because the answers became similar;
            ``stop_after_no_gain``: evaluations without a better held-out score to stop after; and, if it has the key,
            ``max_length_share`` of the last 10 steps: the share of the rewards' variance inside groups that the length
            of answers explains, either way.
        entropy_steps: newest steps whose mean entropy counts.

    Returns:
        The reason to stop and what to do, in one line; None to continue.
    """
    entropies = _newest(lines, "entropy", entropy_steps)
    if cfg.min_entropy is not None and entropies and fmean(entropies) < cfg.min_entropy:
        return (
            f"the entropy of the newest answers is {fmean(entropies):.3g} nats per token, below min_entropy "
            f"{cfg.min_entropy:g}: nearly equal answers teach little. Lower lr, or raise temperature, clip_high or the "
            "loss's entropy_coef"
        )
    scores = [target_scores(line)["correct"] for line in evaluations_of(lines)]
    without_gain = 0
    if scores:  # the first of equals is the best
        without_gain = len(scores) - 1 - scores.index(max(scores))
    if cfg.stop_after_no_gain is not None and without_gain >= cfg.stop_after_no_gain:
        plural = "s" if without_gain > 1 else ""
        return (
            f"no better held-out score in {without_gain} evaluation{plural} (stop_after_no_gain "
            f"{cfg.stop_after_no_gain}): the best adapter is kept. To go on, raise stop_after_no_gain and resume"
        )
    shares = _newest(lines, "length_share", LENGTH_STEPS)
    most = cfg.get("max_length_share")
    share = fmean(shares) if shares else 0.0
    if most is not None and abs(share) > most:
        earning = "longer" if share > 0 else "shorter"
        return (
            f"the length of answers explains {abs(share):.0%} of the differences between rewards over the last "
            f"{LENGTH_STEPS} steps, above max_length_share {most:g}: {earning} answers "
            "earn more, and the policy may be learning that instead of the task. Read answers with their rewards, and "
            "correct the verifier or the truncation penalty"
        )
    return None


def without_update(lines: Lines) -> list[Json]:
    """Return the newest steps in a row without an update, the newest first."""
    return list(takewhile(lambda line: not line["updates"], reversed(steps_of(lines))))


def flat_reason(lines: Lines, *, max_flat_steps: int) -> str | None:
    """Return why a run stops after ``max_flat_steps`` steps in a row without an update; None to continue."""
    flat = without_update(lines)
    if len(flat) < max_flat_steps:
        return None
    many = f"the last {len(flat)} steps" if len(flat) > 1 else "the last step"
    rewards, cure = _how_flat(flat)
    return (
        f"no update in {many} (max_flat_steps {max_flat_steps}): {rewards}; training needs rewards that differ. "
        f"{cure}. To resume this run, raise max_flat_steps"
    )


def untrained_warning(lines: Lines) -> str | None:
    """Return a warning about a finished run without any update, in one line; None if a step had one."""
    steps = steps_of(lines)
    if not steps or any(line["updates"] for line in steps):
        return None
    rewards, cure = _how_flat(steps)
    return f"no step had an update, so the adapter is the one that the run began with: {rewards}. {cure}"


def _how_flat(flat: Lines) -> tuple[str, str]:
    """Describe the rewards of steps without an update, and say what to do."""
    means = _measured(flat, "reward")
    if not means:
        cure = "Correct the verifier; verdicts.jsonl has the errors"
        return "no answer has a reward, all verdicts are ERROR", cure
    cut = fmean(line["truncated"] for line in flat)
    deviations = [line["reward_std"] or 0.0 for line in flat]
    same = max(means) - min(means) <= EQUAL and max(deviations) <= EQUAL
    check = "check the verifier on known answers with rocm-ext verify"
    if same and abs(means[0]) <= EQUAL:
        easier = "Choose easier prompts, more samples_per_prompt, a higher temperature or partial rewards"
        if cut > 0.5:
            easier = f"{cut:.0%} of the answers were cut: raise max_new_tokens. {easier}"
        return "all rewards are 0", f"{easier}, or {check}"
    if same and abs(means[0] - 1) <= EQUAL:
        return "all rewards are 1", f"Choose harder prompts or a stricter verifier, or {check}"
    rewards = f"all rewards are {means[0]:g}" if same else "the rewards are equal inside each group"
    cure = f"Choose prompts of medium difficulty, more samples_per_prompt or a higher temperature, or {check}"
    # groups with unequal rewards were there, but no answer to train on
    if any(line["flat"] < 1 for line in flat):
        rewards += f" or the answers were cut ({cut:.0%})"
        cure = "Raise max_new_tokens, or set truncated: keep"
    return rewards, cure


def mismatch_warning(lines: Lines) -> str | None:
    """Return a warning if the newest step's divergence is far above the earlier ones, and was not one step before."""
    values = _measured(lines, "mismatch_kl")
    if not _is_high(values) or _is_high(values[:-1]):
        return None
    *earlier, newest = values
    step = lines[-1]
    if step.get("mismatch_kl") is None:
        return None
    return (
        f"step {step['step']}: the log-probs of the sampler and those of the trainer differ more than before: "
        f"mismatch_kl is {newest:.2g} nats per token, and was {median(earlier):.2g} in the median of the "
        "earlier steps. A server may sample with an old adapter, or the policy changes fast: lower lr"
    )


def lr_sum(lines: Lines) -> float:
    """Return the sum of the learning rates of all updates so far; it bounds how far Adam has moved a weight."""
    return next((line["lr_sum"] for line in reversed(lines) if "lr_sum" in line), 0.0)


def advice(lines: Lines) -> list[str]:
    """Return warnings about the newest steps, a line per warning.

    Every ten steps this compares the newest ten with the first ten. It omits what the ten steps before showed already.
    """
    warning = rate_warning(lines)
    warnings = [warning] if warning else []
    steps = steps_of(lines)
    if len(steps) % _WINDOW == 0:
        earlier = _findings(steps[:-_WINDOW])
        for name, text in _findings(steps).items():
            if name not in earlier:
                warnings.append(text)
    return warnings


def _findings(steps: Lines) -> dict[str, str]:
    """Return warnings about the newest steps, by the name of a measurement."""
    findings = {}
    for name, cure in _GROUPS.items():
        flat = _newest(steps, "flat", _WINDOW)
        shares = _newest(steps, name, _WINDOW)
        if flat and shares and min(fmean(flat), fmean(shares)) > _MANY:
            findings[name] = f"{fmean(shares):.0%} of the groups in the last {_WINDOW} steps {cure}"
    names = set().union(*steps)
    ks = [int(name.removeprefix("pass_at_")) for name in names if name.startswith("pass_at_")]
    parts = sorted(name for name in names if name.startswith("reward/"))
    ends = {}  # the first and the newest values
    moved = {}
    for name in ("reward", "distinct", "right", f"pass_at_{max(ks, default=1)}", *parts):
        values = _measured(steps, name)
        if len(values) >= 2 * _WINDOW:
            first = values[:_WINDOW]
            last = values[-_WINDOW:]
            ends[name] = first, last
            moved[name] = f"from {fmean(first):.3g} to {fmean(last):.3g}"
    if "distinct" in ends:
        first, last = ends["distinct"]
        if fmean(last) < fmean(first) / 2:
            findings["distinct"] = (
                f"the share of different answers in a group has fallen {moved['distinct']}: the policy collapses; "
                "lower optimizer.lr, or raise temperature, entropy_coef or clip_high"
            )
    if "reward" in ends and _change(*ends["reward"]) > 0:
        for name in moved:
            if _change(*ends[name]) < 0 and name != "distinct":
                findings[name] = (
                    f"the reward has risen {moved['reward']}, and {name} has fallen {moved[name]}: the model may earn "
                    "the one at the cost of the other; read answers with their rewards (rocm-ext report)"
                )
    return findings


def _change(first: Sequence[float], last: Sequence[float]) -> int:
    """Return 1 or -1 if the second mean is above or below the first by more than two standard errors, else 0."""
    change = fmean(last) - fmean(first)
    error = sqrt((variance(first) + variance(last)) / len(first))
    if abs(change) <= 2 * error:
        return 0
    return 1 if change > 0 else -1


def rate_warning(lines: Lines) -> str | None:
    """Return a warning after 20 steps if the reward has not moved, and low learning rates may be the reason.

    It has moved if the means of the first and the last ten steps differ by more than two standard errors.
    """
    steps = steps_of(lines)
    rewards = _measured(steps, "reward")
    if not len(steps) == len(rewards) == _EARLY_STEPS:
        return None
    half = _EARLY_STEPS // 2
    first, last = rewards[:half], rewards[half:]
    rates = lr_sum(lines)
    if rates >= _FAR or _change(first, last):
        return None
    return (
        f"the reward has hardly moved in {_EARLY_STEPS} steps ({fmean(first):.3f} in the first half, {fmean(last):.3f} "
        f"in the second), and the learning rates of all updates add up to {rates:.2g}, those of 20 updates in "
        f"Tinker's recipe for GSM8K to {_FAR:g}. Raise optimizer.lr two- to threefold"
    )


def _measured(lines: Lines, name: str) -> list[float]:
    """Return the values of a measurement in the lines that have it."""
    return [line[name] for line in lines if line.get(name) is not None]


def _newest(lines: Lines, name: str, count: int) -> list[float]:
    """Return the newest ``count`` measured values; none if there are fewer."""
    values = _measured(steps_of(lines), name)
    return values[-count:] if len(values) >= count else []


def _is_high(values: Sequence[float]) -> bool:
    if len(values) <= _MISMATCH_STEPS:
        return False
    *earlier, newest = values
    return newest > max(_MISMATCH_LEAST, _MISMATCH_FACTOR * median(earlier))
