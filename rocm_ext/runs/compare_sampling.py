"""Two runs that learn from sampled answers, RAFT's or GRPO's: held-out scores and speed."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rocm_ext.base.registry import GRPO, RAFT
from rocm_ext.runs.comparison import Scores
from rocm_ext.runs.cycles import PHASES, CycleFolder
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.held_out import HeldOut, held_out
from rocm_ext.runs.intervals import Interval, finite_median, mcnemar, paired_gain, ratio_of_medians, unpaired_gain
from rocm_ext.runs.records import number

WARM_UP = 10  # steps at a run's beginning that do not show its speed: compilation, caches, clocks
_ALIKE = 0.7  # ratio of numbers of answers that count as about equal
_STEP_SIZE = ("prompts_per_step", "samples_per_prompt", "refill")
_LEARNING = {  # row of the table: column
    "reward": "reward",
    "share of right answers": "right",
    "share of flat groups": "flat",
    "share of answers cut off": "truncated",
    "tokens of an answer": "mean_tokens",
    "entropy": "entropy",
    "mismatch, mean": "mismatch_mean",
    "mismatch, KL": "mismatch_kl",
    "share of tokens clipped, low": "clipped_low",
    "share of tokens clipped, high": "clipped_high",
    "KL from the first adapter": "kl",
}
_TIMES = {"sampling": "sample_seconds", "waiting on verdicts": "wait_seconds", "training": "train_seconds"}


# ---- held-out scores


def scores(a: RunFolder, b: RunFolder, settings: Mapping[str, Any]) -> list[Scores]:
    """The held-out scores of two runs, in pairs.

    Evaluations after the same cycle, or after the same step of runs whose steps have as many answers, are pairs. For
    other runs, those after about as many sampled answers are.

    Args:
        a, b: the runs.
        settings: those that differ.
    """
    judges = [key for key in settings if key.startswith("verifier.")]
    by_number = a.family == b.family and not (a.family == GRPO and any(key in settings for key in _STEP_SIZE))
    pair = _by_number if by_number else _by_answers
    return [_scores(x, y, judges) for x, y in pair(held_out(a), held_out(b))]


def _by_number(a: Sequence[HeldOut], b: Sequence[HeldOut]) -> list[tuple[HeldOut, HeldOut]]:
    of_b = {each.number: each for each in b}
    return [(each, of_b[each.number]) for each in a if each.number in of_b]


def _by_answers(a: Sequence[HeldOut], b: Sequence[HeldOut]) -> list[tuple[HeldOut, HeldOut]]:
    """Pairs after about as many answers, for each evaluation of the run that has fewer of them."""
    found = [(x, y) for x in a for y in b if x.number == y.number == 0]
    trained = [[each for each in run if each.number] for run in (a, b)]
    swapped = len(trained[1]) < len(trained[0])
    few, many = trained[::-1] if swapped else trained
    for each in few if many else ():
        nearest = min(many, key=lambda other: abs(other.answers - each.answers))
        low, high = sorted((each.answers, nearest.answers))
        if low >= _ALIKE * high > 0:
            found.append((nearest, each) if swapped else (each, nearest))
    return found


def _scores(a: HeldOut, b: HeldOut, judges: Sequence[str]) -> Scores:
    totals = (a.scores["correct"], a.scores["prompts"]), (b.scores["correct"], b.scores["prompts"])
    about = (a.after, b.after), a.number > 0 and b.number > 0, (a.answers, b.answers)
    why = f"different verifiers judged (different {', '.join(judges)})" if judges else ""
    right_a, right_b = a.greedy(), b.greedy()
    if right_a.keys() != right_b.keys() or len(right_a) != totals[0][1]:
        other = bool(right_a and right_b) or totals[0][1] != totals[1][1]
        why = why or ("they are of different prompts" if other else "")
        return Scores(*about, *totals, unpaired_gain(*totals), None, why)
    a_only = sum(right and not right_b[prompt] for prompt, right in right_a.items())
    b_only = sum(right and not right_a[prompt] for prompt, right in right_b.items())
    return Scores(*about, *totals, paired_gain(a_only, b_only, len(right_a)), mcnemar(a_only, b_only), why)


# ---- speed


def speed(a: RunFolder, b: RunFolder) -> tuple[Interval, dict[str, tuple[float, float]]]:
    """The speed of B as a multiple of A's, and other measures of speed and size by name, A's and B's."""
    if a.family == b.family:
        return (_speed_of_cycles if a.family == RAFT else _speed_of_steps)(a, b)
    (tokens_a, seconds_a), (tokens_b, seconds_b) = _totals(a), _totals(b)
    fast = _ratio(tokens_a, seconds_a), _ratio(tokens_b, seconds_b)
    rates = {"seconds of sampling and training": (seconds_a, seconds_b), "sampled tokens/s": fast}
    return Interval(_ratio(fast[1], fast[0]), -math.inf, math.inf), rates


def _ratio(a: float, b: float) -> float:
    return a / b if a > 0 and b > 0 else math.nan


def _totals(run: RunFolder) -> tuple[float, float]:
    """Tokens that a run sampled to train on, and the seconds that it sampled and trained."""
    if run.family == GRPO:
        return float(np.nansum(run.steps["sampled_tokens"])), float(np.nansum(run.steps["seconds"]))
    cycles = [cycle for cycle in run.cycles if cycle.number and cycle.state == "complete"]
    tokens = np.array([number(cycle.phases.get("sample", {}).get("tokens")) for cycle in cycles])
    seconds = sum(cycle.seconds.get(phase, 0.0) for cycle in cycles for phase in ("sample", "train"))
    return float(np.nansum(tokens)), seconds


def _common(a: RunFolder, b: RunFolder, key: str) -> tuple[np.ndarray, np.ndarray]:
    """A column of A and of B, at the steps that both have."""
    _, in_a, in_b = np.intersect1d(a.steps["step"], b.steps["step"], return_indices=True)
    return a.steps[key][in_a], b.steps[key][in_b]


def _speed_of_steps(a: RunFolder, b: RunFolder) -> tuple[Interval, dict[str, tuple[float, float]]]:
    seconds, tokens = _common(a, b, "seconds"), _common(a, b, "sampled_tokens")
    first = min(WARM_UP, len(seconds[0]) // 4)
    fast = [tokens[i][first:] / seconds[i][first:] for i in (0, 1)]
    good = np.isfinite(fast[0]) & np.isfinite(fast[1])
    rates = {
        "steps": (float(len(a.steps)), float(len(b.steps))),
        "sampled tokens per second of a step, median": (finite_median(fast[0]), finite_median(fast[1])),
        "seconds per step, median": (finite_median(seconds[0][first:]), finite_median(seconds[1][first:])),
    }
    for name, key in _TIMES.items():
        own = _common(a, b, key)
        rates[f"seconds of {name}, median"] = finite_median(own[0][first:]), finite_median(own[1][first:])
    return ratio_of_medians(fast[0][good], fast[1][good]), rates


def _speed_of_cycles(a: RunFolder, b: RunFolder) -> tuple[Interval, dict[str, tuple[float, float]]]:
    of_b = {cycle.number: cycle for cycle in b.cycles}
    pairs = [(cycle, of_b[cycle.number]) for cycle in a.cycles if cycle.number in of_b]
    evaluations = a.is_evaluation and b.is_evaluation
    timed = ("eval",) if evaluations else ("sample", "train")
    whole = [
        (x, y)
        for x, y in pairs
        if (x.number or evaluations) and x.state == y.state == "complete" and x.seconds and y.seconds
    ]
    times = [same_work for x, y in whole if (same_work := _seconds_of_same_work(x, y, timed)) is not None]
    found = Interval(math.nan, -math.inf, math.inf)
    if times:
        ratios = [x / y for x, y in times]
        ends = (min(ratios), max(ratios)) if len(ratios) > 2 else (-math.inf, math.inf)
        found = Interval(sum(x for x, _ in times) / sum(y for _, y in times), *ends)
    rates: dict[str, tuple[float, float]] = {"cycles": (_trained(a), _trained(b))}
    for phase in PHASES if whole else ():
        spent = np.array([[cycle.seconds.get(phase, 0.0) for cycle in pair] for pair in whole]).sum(axis=0)
        rates[f"seconds to {phase}, {len(whole)} cycles"] = float(spent[0]), float(spent[1])
    for phase in timed if whole else ():
        speeds = [[number(c.phases.get(phase, {}).get("tokens_per_second")) for c in pair] for pair in whole]
        rates[f"{phase} tokens/s"] = float(np.mean(speeds, axis=0)[0]), float(np.mean(speeds, axis=0)[1])
    return found, rates


def _seconds_of_same_work(a: CycleFolder, b: CycleFolder, phases: Sequence[str]) -> tuple[float, float] | None:
    """Seconds that A's cycle took for ``phases``, and those that B would take for as many tokens.

    Fewer answers are less work, not more speed. None if the tokens are unknown.
    """
    both = [0.0, 0.0]
    for phase in phases:
        tokens = [number(cycle.phases.get(phase, {}).get("tokens")) for cycle in (a, b)]
        seconds = [cycle.seconds.get(phase, math.nan) for cycle in (a, b)]
        if not all(math.isfinite(value) and value > 0 for value in (*tokens, *seconds)):
            return None
        both[0] += seconds[0]
        both[1] += seconds[1] * tokens[0] / tokens[1]
    return both[0], both[1]


def _trained(run: RunFolder) -> int:
    return sum(cycle.number > 0 and cycle.state == "complete" for cycle in run.cycles)


# ---- learning


def learning(a: RunFolder, b: RunFolder) -> dict[str, tuple[float, float]]:
    """Means over the last half of the common steps of two GRPO runs, by name; empty for other runs."""
    if not a.family == b.family == GRPO:
        return {}
    found = {}
    for name, key in _LEARNING.items():
        means = [_mean(values[len(values) // 2 :]) for values in _common(a, b, key)]
        if not all(map(math.isnan, means)):
            found[name] = (means[0], means[1])
    return found


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values[np.isfinite(values)])) if np.isfinite(values).any() else math.nan


def notes(a: RunFolder, b: RunFolder, found: Sequence[Scores]) -> list[str]:
    """What cannot be compared."""
    told = []
    if a.family != b.family:
        told.append(
            f"{RAFT} and {GRPO} are compared by held-out scores after about as many sampled answers, sampled tokens "
            "per second, and memory; rewards, groups, losses and keys that only one of them has are not compared"
        )
    if not found:
        unit = "cycle" if a.family == b.family == RAFT else "step"
        pair = f"no {unit} has held-out scores in both runs" if a.family == b.family else "no held-out scores to pair"
        told.append(f"{pair}; set eval_prompts")
    return told + [
        f"held-out scores cannot be compared: {why}" for why in {each.not_comparable for each in found} if why
    ]
