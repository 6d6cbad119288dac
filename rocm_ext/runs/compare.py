"""Two runs, a safe baseline A and a faster setting B: is B faster, and does it train the same?

The dataclasses below hold the measurements and say how they are made. :mod:`rocm_ext.runs.decision` turns them into
an answer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rocm_ext.errors import UserError
from rocm_ext.registry import RAFT
from rocm_ext.runs.cycles import PHASES, CycleFolder
from rocm_ext.runs.intervals import (
    Interval,
    mcnemar,
    more_often,
    paired_gain,
    ratio_of_medians,
    relative_difference,
    spikes,
    unpaired_gain,
)
from rocm_ext.runs.reader import RunFolder, running_time
from rocm_ext.runs.records import GREEDY, number

WARM_UP = 10  # steps at a run's beginning that do not show its speed: compilation, caches, clocks
_DATA = {"dataset", "dataset_val", "validation_fraction", "tokenizer", "data_seed", "shuffle", "too_long"}
_STEP_SIZE = {"sequences_per_step", "gradient_accumulation_steps", "batch_size"}
_RATE = {"optimizer.lr", "lr_scheduler", "epochs", "max_steps_per_epoch"}
_PLACES = ("source", "data_files", "path", "_path", "_file", "_dir")  # settings that say where a file is


@dataclass(frozen=True)
class Losses:
    """The losses of two SFT runs.

    Attributes:
        steps: number of steps that both runs have.
        first: relative difference at step 1. Both runs have the same weights there (a new adapter adds nothing), so it
            shows the effect of a setting on one forward pass; None if step 1 is missing.
        last_half: relative difference over the last half of ``steps``, which decides: in the first half, runs may not
            have had the time to diverge.
        all: relative difference over all ``steps``.
        values: mean losses of A and B in the last half.
        validation: step, A, B of the last validation at the same step with equally many labels; None without one.
        best_validation: A, B, if both runs are finished and all their validations have equally many labels.
        not_comparable: why training losses at the same step measure different things; empty if they do not.
        attributable: whether the settings can explain a difference; with different seeds it may be chance.
    """

    steps: int
    first: float | None
    last_half: Interval
    all: Interval
    values: tuple[float, float]
    validation: tuple[int, float, float] | None
    best_validation: tuple[float, float] | None
    not_comparable: str
    attributable: bool


@dataclass(frozen=True)
class Scores:
    """Held-out scores of two RAFT runs after one cycle.

    Attributes:
        cycle: 0 is before any training, where settings can affect sampling alone.
        a, b: correct, total.
        gain: of B, as a share of prompts.
        p: p-value that both are right equally often (exact McNemar test); None without verdicts by prompt.
        not_comparable: why the scores measure different things; empty if they do not.
    """

    cycle: int
    a: tuple[int, int]
    b: tuple[int, int]
    gain: Interval
    p: float | None
    not_comparable: str


@dataclass(frozen=True)
class Stability:
    """What went wrong in A and in B, in steps that both runs have.

    If both spike at a step, its rows are hard; a spike of one alone counts against that run. A few spikes are chance:
    B is less stable if a fair coin would give it as many of them in less than 5 % of cases.

    Attributes:
        resumed: how often, according to hardware.jsonl.
        not_finite: losses that are not finite.
        skipped: steps whose gradient was not finite; fp16 skips one now and then.
        loss_spikes, grad_spikes: of A alone, of B alone.
    """

    resumed: tuple[int, int] = (0, 0)
    not_finite: tuple[int, int] = (0, 0)
    skipped: tuple[int, int] = (0, 0)
    loss_spikes: tuple[int, int] = (0, 0)
    grad_spikes: tuple[int, int] = (0, 0)

    @property
    def problem(self) -> str:
        """Why B is less stable than A; empty if it is as stable."""
        if self.not_finite[1] > self.not_finite[0]:
            return f"{self.not_finite[1]} losses of B are not finite"
        for what, (a, b) in (("loss", self.loss_spikes), ("gradient", self.grad_spikes)):
            if more_often(a, b) < 0.05:
                return f"B has {b} {what} spikes where A has {a}"
        return ""


@dataclass
class Comparison:
    """The measurements of :func:`compare`.

    Attributes:
        a, b: the runs.
        settings: those that differ, by name: A's value, B's.
        speed: of B, as a multiple of A's. SFT: ratio of median tokens/s after warm-up. RAFT: ratio of the time that
            both runs' cycles took for the same work; the slowest and the fastest cycle are the ends of the interval.
        memory: peak bytes of A and B; NaN if unknown.
        rates: other measures of speed and size by name: A's value, B's.
        stability: what went wrong.
        losses: of SFT runs.
        scores: of RAFT runs, by cycle.
        notes: messages for the reader.
    """

    a: RunFolder
    b: RunFolder
    settings: dict[str, tuple[Any, Any]]
    speed: Interval
    memory: tuple[float, float]
    rates: dict[str, tuple[float, float]]
    stability: Stability
    losses: Losses | None = None
    scores: list[Scores] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@np.errstate(all="ignore")  # damaged files may hold 1e308
def compare(a: RunFolder, b: RunFolder) -> Comparison:
    """Measure two runs against each other.

    Raises:
        UserError: the runs are of different recipes, or are the same folder.
    """
    if a.path.resolve() == b.path.resolve():
        raise UserError(f"{a.path} and {b.path} are the same folder; name two runs")
    if a.family != b.family:
        raise UserError(f"{a.path} is a run of {a.recipe}, {b.path} of {b.recipe}; compare two runs of one recipe")
    settings = a.differing_settings(b)
    memory = (_peak_memory(a), _peak_memory(b))
    made = _compare_raft if a.family == RAFT else _compare_sft
    found = made(a, b, settings, memory)
    for which, run in (("A", a), ("B", b)):
        if not run.finished:
            found.notes.append(f"{which} has not finished: its later steps are unknown")
        found.notes += [f"{which}: {problem}" for problem in run.problems]
    machines = a.fact("machine"), b.fact("machine")
    if None not in machines and machines[0] != machines[1]:
        found.notes.append(f"different machines: A on {machines[0]}, B on {machines[1]}")
    return found


def _peak_memory(run: RunFolder) -> float:
    summaries = [run.summary, *(cycle.summary for cycle in run.cycles)]
    found = [*run.steps["peak_memory"], *(number(summary.get("peak_memory")) for summary in summaries)]
    return max((value for value in found if math.isfinite(value)), default=math.nan)


# ---- supervised fine-tuning


def _compare_sft(a: RunFolder, b: RunFolder, settings: dict, memory: tuple[float, float]) -> Comparison:
    _, in_a, in_b = np.intersect1d(a.steps["step"], b.steps["step"], return_indices=True)
    columns = {
        key: (a.steps[key][in_a], b.steps[key][in_b])
        for key in ("step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "seconds")
    }
    losses = _losses(a, b, columns, settings)
    speeds = [each[min(WARM_UP, len(each) // 4) :] for each in columns["tokens_per_second"]]
    good = np.isfinite(speeds[0]) & np.isfinite(speeds[1])
    seconds = columns["seconds"]
    return Comparison(
        a,
        b,
        settings,
        ratio_of_medians(speeds[0][good], speeds[1][good]),
        memory,
        {
            "steps": (len(a.steps), len(b.steps)),
            "tokens/s, median": (_median(speeds[0]), _median(speeds[1])),
            "seconds per step, median": (_median(seconds[0]), _median(seconds[1])),
            f"seconds for {len(in_a):,} steps": (float(np.nansum(seconds[0])), float(np.nansum(seconds[1]))),
        },
        _stability(a, b, columns),
        losses,
        notes=_loss_notes(losses),
    )


def _losses(a: RunFolder, b: RunFolder, columns: Mapping[str, tuple[np.ndarray, np.ndarray]], settings: dict) -> Losses:
    loss_a, loss_b = columns["loss"]
    finite = np.isfinite(loss_a) & np.isfinite(loss_b)
    x, y = loss_a[finite], loss_b[finite]
    half = len(x) // 2
    first = None
    if len(columns["step"][0]) and columns["step"][0][0] == 1 and finite[0] and x[0] > 0:
        first = float((y[0] - x[0]) / x[0])
    means = (float(np.mean(x[half:])), float(np.mean(y[half:]))) if len(x) else (math.nan, math.nan)
    return Losses(
        steps=len(x),
        first=first,
        last_half=relative_difference(x[half:], y[half:]),
        all=relative_difference(x, y),
        values=means,
        validation=_last_validation(a, b),
        best_validation=_best_validations(a, b),
        not_comparable=_rows_differ(columns, settings) or _rate_differs(columns),
        attributable="seed" not in settings,
    )


def _rows_differ(columns: Mapping[str, tuple[np.ndarray, np.ndarray]], settings: Mapping[str, Any]) -> str:
    """Why the steps of the two runs saw different rows; empty if they saw the same.

    The numbers of tokens decide first: steps with different numbers saw different rows; if the numbers vary from step
    to step and are always equal, the rows are the same, even if the data set has moved. The settings decide if the
    numbers do not vary, and always about which tokens are labels.
    """
    tokens_a, tokens_b = columns["tokens"]
    known = np.isfinite(tokens_a) & np.isfinite(tokens_b)
    other = np.flatnonzero(known & (tokens_a != tokens_b))
    named = [key for key in settings if key.split(".")[0] in _DATA | _STEP_SIZE or key == "max_steps_per_epoch"]
    if len(other):
        because = f" (different {', '.join(named)})" if named else ""
        return f"from step {columns['step'][0][other[0]]:.0f} on the runs see different rows{because}"
    proven = known.all() and len(set(tokens_a)) > 1
    decisive = [
        key
        for key in named
        if key.split(".")[0] in _DATA and not key.endswith(_PLACES) and (key.startswith("dataset.") or not proven)
    ]
    return f"the runs see different rows (different {', '.join(decisive)})" if decisive else ""


def _rate_differs(columns: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> str:
    a, b = columns["lr"]
    other = np.flatnonzero(np.abs(a - b) > 1e-6 * np.maximum(np.abs(a), np.abs(b)))
    if not len(other):
        return ""
    at = other[0]
    return f"from step {columns['step'][0][at]:.0f} on the learning rates differ ({a[at]:.3g} and {b[at]:.3g})"


def _last_validation(a: RunFolder, b: RunFolder) -> tuple[int, float, float] | None:
    steps, in_a, in_b = np.intersect1d(a.validations["step"], b.validations["step"], return_indices=True)
    labels_a, labels_b = a.validations["val_tokens"][in_a], b.validations["val_tokens"][in_b]
    losses_a, losses_b = a.validations["val_loss"][in_a], b.validations["val_loss"][in_b]
    same = (labels_a == labels_b) & np.isfinite(losses_a) & np.isfinite(losses_b) & (losses_a > 0)
    at = np.flatnonzero(same)
    return (int(steps[at[-1]]), float(losses_a[at[-1]]), float(losses_b[at[-1]])) if len(at) else None


def _best_validations(a: RunFolder, b: RunFolder) -> tuple[float, float] | None:
    best: list[float] = []
    labels: set[float] = set()
    for run in (a, b):
        losses = run.validations["val_loss"]
        if not (np.isfinite(losses).any() and run.finished):
            return None
        best.append(float(np.nanmin(losses)))
        labels |= set(run.validations["val_tokens"])
    return (best[0], best[1]) if len(labels) == 1 and best[0] > 0 else None


def _loss_notes(losses: Losses) -> list[str]:
    notes = []
    if losses.not_comparable:
        notes.append(f"training losses cannot be compared: {losses.not_comparable}")
    if not losses.attributable:
        notes.append("the seeds differ, so part of any difference is chance: give both runs the same seed")
    return notes


def _stability(a: RunFolder, b: RunFolder, columns: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Stability:
    found = _mishaps(a, b)

    def alone(key: str, least: float) -> tuple[int, int]:
        known = np.isfinite(columns[key][0]) & np.isfinite(columns[key][1])
        spikes_a, spikes_b = (spikes(values[known], least) for values in columns[key])
        return int((spikes_a & ~spikes_b).sum()), int((spikes_b & ~spikes_a).sum())

    return replace(found, loss_spikes=alone("loss", 1.2), grad_spikes=alone("grad_norm", 3.0))


def _mishaps(a: RunFolder, b: RunFolder) -> Stability:
    def count(key: str) -> tuple[int, int]:
        bad = [~np.isfinite(run.steps[key]) & run.steps.has(key) for run in (a, b)]
        return int(bad[0].sum()), int(bad[1].sum())

    pauses = [len(running_time(run.hardware)[1]) for run in (a, b)]
    return Stability((pauses[0], pauses[1]), count("loss"), count("grad_norm"))


def _median(values: np.ndarray) -> float:
    return float(np.nanmedian(values)) if np.isfinite(values).any() else math.nan


# ---- RAFT


def _compare_raft(a: RunFolder, b: RunFolder, settings: dict, memory: tuple[float, float]) -> Comparison:
    of_b = {cycle.number: cycle for cycle in b.cycles}
    pairs = [(cycle, of_b[cycle.number]) for cycle in a.cycles if cycle.number in of_b]
    judges = [key for key in settings if key.startswith("verifier.")]
    scores = [_scores(x, y, judges) for x, y in pairs if x.scores is not None and y.scores is not None]
    evaluations = a.is_evaluation and b.is_evaluation
    timed = ("eval",) if evaluations else ("sample", "train")
    whole = [
        (x, y)
        for x, y in pairs
        if (x.number or evaluations) and x.state == y.state == "complete" and x.seconds and y.seconds
    ]
    times = [same_work for x, y in whole if (same_work := _seconds_of_same_work(x, y, timed)) is not None]
    speed = Interval(math.nan, -math.inf, math.inf)
    if times:
        ratios = [x / y for x, y in times]
        ends = (min(ratios), max(ratios)) if len(ratios) > 2 else (-math.inf, math.inf)
        speed = Interval(sum(x for x, _ in times) / sum(y for _, y in times), *ends)
    rates: dict[str, tuple[float, float]] = {"cycles": (_trained(a), _trained(b))}
    for phase in PHASES if whole else ():
        spent = np.array([[cycle.seconds.get(phase, 0.0) for cycle in pair] for pair in whole]).sum(axis=0)
        rates[f"seconds to {phase}, {len(whole)} cycles"] = float(spent[0]), float(spent[1])
    for phase in timed if whole else ():
        speeds = [[number(c.phases.get(phase, {}).get("tokens_per_second")) for c in pair] for pair in whole]
        rates[f"{phase} tokens/s"] = float(np.mean(speeds, axis=0)[0]), float(np.mean(speeds, axis=0)[1])
    notes = ["no cycle has held-out scores in both runs; set eval_prompts"] if not scores else []
    notes += [f"held-out scores cannot be compared: {why}" for why in {each.not_comparable for each in scores} if why]
    return Comparison(a, b, settings, speed, memory, rates, _mishaps(a, b), scores=scores, notes=notes)


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


def _scores(a: CycleFolder, b: CycleFolder, judges: Sequence[str]) -> Scores:
    assert a.scores is not None
    assert b.scores is not None
    totals = (a.scores["correct"], a.scores["prompts"]), (b.scores["correct"], b.scores["prompts"])
    why = f"different verifiers judged (different {', '.join(judges)})" if judges else ""
    right_a, right_b = _greedy(a), _greedy(b)
    if right_a.keys() != right_b.keys() or len(right_a) != totals[0][1]:
        other = bool(right_a and right_b) or totals[0][1] != totals[1][1]
        why = why or ("they are of different prompts" if other else "")
        return Scores(a.number, *totals, unpaired_gain(*totals), None, why)
    a_only = sum(right and not right_b[prompt] for prompt, right in right_a.items())
    b_only = sum(right and not right_a[prompt] for prompt, right in right_b.items())
    return Scores(a.number, *totals, paired_gain(a_only, b_only, len(right_a)), mcnemar(a_only, b_only), why)


def _greedy(cycle: CycleFolder) -> dict[str, bool]:
    """Whether each held-out prompt's greedy answer is right, as rocm_ext.rollouts.evaluation counts it."""
    judged = cycle.judged_held_out.items()
    return {prompt: each.verdict == "CORRECT" for (prompt, sample), each in judged if sample == GREEDY}
