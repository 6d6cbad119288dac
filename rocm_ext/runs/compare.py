"""Two runs, a safe baseline A and a faster setting B, measured against each other.

:mod:`rocm_ext.runs.decision` turns the measurements into an answer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from rocm_ext.base.errors import UserError
from rocm_ext.base.hub import hub_name
from rocm_ext.base.registry import DPO, GRPO, RAFT
from rocm_ext.runs.folder import PHASES, RunFolder, running_time
from rocm_ext.runs.held_out import HeldOut, held_out
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
from rocm_ext.runs.records import Columns, number

Pair = tuple[float, float]  # A's value, B's

_WARM_UP = 10  # steps at a run's beginning that do not show its speed: compilation, caches, clocks
_DATA = ("dataset", "dataset_val", "validation_fraction", "tokenizer", "data_seed", "shuffle", "too_long")
_STEP_SIZE = ("sequences_per_step", "gradient_accumulation_steps", "batch_size", "max_steps_per_epoch")
_ROLLOUT_SIZE = ("prompts_per_step", "samples_per_prompt", "refill")
_PATHS = ("source", "data_files", "path", "_path", "_file", "_dir")  # settings that say where a file is
_LEARNING = {  # columns whose means over the last half of the common steps are shown
    DPO: ("margin", "accuracy", "reward_chosen", "reward_rejected", "kl"),
    GRPO: (
        *("reward", "right", "flat", "truncated", "mean_tokens", "entropy", "kl"),
        *("mismatch_mean", "mismatch_kl", "clipped_low", "clipped_high"),
    ),
}
_TIMES = {  # of a step of GRPO or a cycle of RAFT
    "sample_seconds": "sampling",
    "wait_seconds": "waiting on verdicts",
    "train_seconds": "training",
    "eval_seconds": "evaluating",
}


@dataclass(frozen=True)
class Losses:
    """The losses of two SFT or DPO runs.

    Attributes:
        steps: number of steps with finite losses that both runs have.
        all: relative difference over all ``steps``.
        last_half: over the last half of them, which decides: in the first half, runs may not have diverged yet.
        values: mean losses of A and B in the last half.
        validation: step, A, B of the last validation at the same step with equally many labels; None without one.
        best_validation: A, B, if both runs are finished and all their validations have equally many labels.
        not_comparable: why training losses at the same step measure different things; empty if they do not.
        attributable: whether the settings can explain a difference; with different seeds it may be chance.
    """

    steps: int
    all: Interval
    last_half: Interval
    values: Pair
    validation: tuple[int, float, float] | None
    best_validation: Pair | None
    not_comparable: str
    attributable: bool


@dataclass(frozen=True)
class Scores:
    """Held-out scores of two RAFT or GRPO runs.

    Attributes:
        after: what A and B had done: ``cycle 3`` or ``step 40``.
        trained: False before any training, where settings can affect sampling alone.
        answers: how many answers A and B had sampled to train on.
        a, b: correct, total.
        gain: gain of B, as a share of prompts.
        p: p-value that both are right equally often (exact McNemar test); None without verdicts by prompt.
        not_comparable: why the scores measure different things; empty if they do not.
    """

    after: tuple[str, str]
    trained: bool
    answers: tuple[int, int]
    a: tuple[int, int]
    b: tuple[int, int]
    gain: Interval
    p: float | None
    not_comparable: str


@dataclass
class Comparison:
    """The measurements of :func:`compare`.

    Attributes:
        a, b: the runs.
        settings: those that differ, by name: A's value, B's.
        speed: speed of B, as a multiple of A's. SFT and DPO: ratio of median tokens/s after warm-up; GRPO and RAFT: of
            sampled tokens per second of a step or cycle; RAFT against GRPO: of the whole runs'.
        memory: peak bytes of A and B; NaN if unknown.
        rates: other measures of speed and size by name.
        learning: other measures of what was learned by name.
        stability: what went wrong, by name, in A and in B.
        losses: of SFT and DPO runs.
        scores: of RAFT and GRPO runs, in order.
        notes: messages for the reader.
    """

    a: RunFolder
    b: RunFolder
    settings: dict[str, tuple[Any, Any]]
    speed: Interval
    memory: Pair
    rates: dict[str, Pair]
    learning: dict[str, Pair]
    stability: dict[str, tuple[int, int]]
    losses: Losses | None = None
    scores: list[Scores] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def mishap(self) -> str:
        """Why B is less stable than A; empty if it is as stable.

        A spike of one run alone counts against it: where both spike, the rows are hard. A few are chance: B is less
        stable if a fair coin would give it as many of them in less than 5 % of cases.
        """
        a, b = self.stability["losses not finite"]
        if b > a:
            return f"{b} losses of B are not finite"
        for what in ("loss spikes", "gradient spikes"):
            a, b = self.stability.get(what, (0, 0))
            if more_often(a, b) < 0.05:
                return f"B has {b} {what} where A has {a}"
        return ""


class _Common:
    """Columns of two runs at the steps, or at the validations, that both have."""

    def __init__(self, a: Columns, b: Columns) -> None:
        self._runs = a, b
        steps, *self._rows = np.intersect1d(a["step"], b["step"], return_indices=True)
        self.steps: list[int] = steps.astype(int).tolist()

    def __getitem__(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        a, b = (run[key][rows] for run, rows in zip(self._runs, self._rows, strict=True))
        return a, b


@np.errstate(all="ignore")  # damaged files may hold 1e308
def compare(a: RunFolder, b: RunFolder) -> Comparison:
    """Measure two runs against each other.

    Raises:
        UserError: the runs are the same folder, of different models, or of recipes that cannot be compared.
    """
    rollouts = {a.family, b.family} <= {RAFT, GRPO}
    _check(a, b, rollouts)
    settings = a.differing_settings(b)
    if a.family != b.family:  # most keys are of one recipe
        common = a.settings().keys() & b.settings().keys()
        settings = {key: values for key, values in settings.items() if key in common}
    steps = _Common(a.steps, b.steps)
    speed, rates = _speeds(a, b)
    found = Comparison(
        a,
        b,
        settings,
        speed,
        (_peak_memory(a), _peak_memory(b)),
        rates,
        _learning(a, b, steps),
        _stability(a, b, steps),
    )
    if rollouts:
        found.scores = _scores(a, b, settings)
    else:
        found.losses = _losses(a, b, steps, settings)
    found.notes = _notes(found)
    return found


def _check(a: RunFolder, b: RunFolder, rollouts: bool) -> None:
    if a.path.resolve() == b.path.resolve():
        raise UserError(f"{a.path} and {b.path} are the same folder; name two runs")
    if a.family != b.family and not rollouts:
        raise UserError(
            f"{a.path} is a run of {a.recipe}, {b.path} of {b.recipe}; compare two runs of one recipe, or of "
            f"{RAFT} and {GRPO}"
        )
    models = [_model(run) for run in (a, b)]
    if None not in models and models[0] != models[1]:
        raise UserError(
            f"{a.path} is a run of the model {models[0]}, {b.path} of {models[1]}; compare two runs of one model"
        )


def _model(run: RunFolder) -> str | None:
    folder = run.setting("checkpointer.checkpoint_dir")
    return (hub_name(Path(str(folder))) or PurePath(str(folder)).name).lower() if folder else None


def _notes(found: Comparison) -> list[str]:
    a, b, notes = found.a, found.b, []
    if found.losses is not None:
        if found.losses.not_comparable:
            notes.append(f"training losses cannot be compared: {found.losses.not_comparable}")
        if not found.losses.attributable:
            notes.append("the seeds differ, so part of any difference is chance: give both runs the same seed")
    else:
        if a.family != b.family:
            notes.append(
                f"{RAFT} and {GRPO} are compared by held-out scores after about as many sampled answers, sampled "
                "tokens per second, and memory; rewards, groups, losses and keys that only one of them has are not "
                "compared"
            )
        if not found.scores:
            unit = "cycle" if a.family == RAFT else "step"
            pair = (
                f"no {unit} has held-out scores in both runs" if a.family == b.family else "no held-out scores to pair"
            )
            notes.append(f"{pair}; set eval_prompts")
        whys = dict.fromkeys(each.not_comparable for each in found.scores if each.not_comparable)
        notes += [f"held-out scores cannot be compared: {why}" for why in whys]
    for which, run in (("A", a), ("B", b)):
        if not run.finished:
            notes.append(f"{which} has not finished: its later steps are unknown")
        notes += [f"{which}: {problem}" for problem in run.problems]
    machines = a.fact("machine"), b.fact("machine")
    if None not in machines and machines[0] != machines[1]:
        notes.append(f"different machines: A on {machines[0]}, B on {machines[1]}")
    return notes


# ---- speed, memory, stability


def _peak_memory(run: RunFolder) -> float:
    summaries = [run.summary, *(cycle.summary for cycle in run.cycles)]
    found = [*run.steps["peak_memory"], *(number(summary.get("peak_memory")) for summary in summaries)]
    return max((value for value in found if math.isfinite(value)), default=math.nan)


def _median(values: np.ndarray) -> float:
    return float(np.median(values[np.isfinite(values)])) if np.isfinite(values).any() else math.nan


def _medians(pair: Sequence[np.ndarray]) -> Pair:
    return _median(pair[0]), _median(pair[1])


def _speeds(a: RunFolder, b: RunFolder) -> tuple[Interval, dict[str, Pair]]:
    """The speed of B against A's, and what it is made of, by name.

    Of RAFT and GRPO it is sampled tokens per second of sampling and training: fewer answers are less work.
    """
    rounds = [_rounds(run) for run in (a, b)]
    unit = "cycle" if a.family == RAFT else "step"
    if a.family != b.family:
        tokens, seconds = ([float(np.nansum(each[key])) for each in rounds] for key in ("sampled_tokens", "seconds"))
        x, y = (tokens[i] / seconds[i] if seconds[i] > 0 else math.nan for i in (0, 1))
        rates = {"seconds of sampling and training": (seconds[0], seconds[1]), "sampled tokens/s": (x, y)}
        return Interval(y / x if x > 0 else math.nan), rates
    common = _Common(*rounds)
    first = min(_WARM_UP, len(common.steps) // 4)
    every = {key: [values[first:] for values in common[key]] for key in ("tokens_per_second", "seconds", *_TIMES)}
    name, fast = "tokens/s", every["tokens_per_second"]
    if a.family in (RAFT, GRPO):
        sampled = [values[first:] for values in common["sampled_tokens"]]
        name, fast = "sampled tokens/s", [sampled[i] / every["seconds"][i] for i in (0, 1)]
    rates = {f"{unit}s": (float(len(rounds[0])), float(len(rounds[1]))), f"{name}, median": _medians(fast)}
    rates[f"seconds per {unit}, median"] = _medians(every["seconds"])
    for key, part in _TIMES.items():
        if any(np.isfinite(values).any() for values in every[key]):
            rates[f"seconds of {part}, median"] = _medians(every[key])
    good = np.isfinite(fast[0]) & np.isfinite(fast[1])
    return ratio_of_medians(fast[0][good], fast[1][good]), rates


def _rounds(run: RunFolder) -> Columns:
    """The steps of a run; of RAFT the complete cycles, with the tokens that they sampled and their seconds."""
    if run.family != RAFT:
        return run.steps
    lines = []
    for cycle in run.cycles:
        if cycle.state == "complete" and (cycle.number or run.is_evaluation):
            phases = ("eval",) if run.is_evaluation else ("sample", "train")
            seconds = {f"{phase}_seconds": cycle.seconds.get(phase) for phase in PHASES}
            line = {"step": cycle.number, "sampled_tokens": cycle.phases.get(phases[0], {}).get("tokens"), **seconds}
            lines.append(line | {"seconds": sum(cycle.seconds.get(phase, math.nan) for phase in phases)})
    return Columns(lines)


def _stability(a: RunFolder, b: RunFolder, steps: _Common) -> dict[str, tuple[int, int]]:
    def count(key: str) -> tuple[int, int]:
        bad = [int((~np.isfinite(run.steps[key]) & run.steps.has(key)).sum()) for run in (a, b)]
        return bad[0], bad[1]

    def alone(key: str, least: float) -> tuple[int, int]:
        columns = steps[key]
        known = np.isfinite(columns[0]) & np.isfinite(columns[1])
        spikes_a, spikes_b = (spikes(values[known], least) for values in columns)
        return int((spikes_a & ~spikes_b).sum()), int((spikes_b & ~spikes_a).sum())

    resumed = [len(running_time(run.hardware)[1]) for run in (a, b)]
    found = {"times resumed": (resumed[0], resumed[1]), "losses not finite": count("loss")}
    found["gradients not finite"] = count("grad_norm")  # fp16 skips such a step now and then
    if a.family not in (RAFT, GRPO):
        found |= {"loss spikes": alone("loss", 1.2), "gradient spikes": alone("grad_norm", 3.0)}
    return found


def _learning(a: RunFolder, b: RunFolder, steps: _Common) -> dict[str, Pair]:
    """Means over the last half of the common steps; of DPO also values of the last common validation."""
    names = _LEARNING.get(a.family, ()) if a.family == b.family and steps.steps else ()
    half = len(steps.steps) // 2
    found = {}
    for name in names:
        last = [values[half:][np.isfinite(values[half:])] for values in steps[name]]
        if len(last[0]) or len(last[1]):
            mean_a, mean_b = (float(np.mean(values)) if len(values) else math.nan for values in last)
            found[f"{name.replace('_', ' ')}, last {len(steps.steps) - half:,} steps"] = mean_a, mean_b
    validations = _Common(a.validations, b.validations)
    for name in names if validations.steps else ():
        pair = [float(values[-1]) for values in validations[f"val_{name}"]]
        if np.isfinite(pair).any():
            found[f"validation {name.replace('_', ' ')} at step {validations.steps[-1]:,}"] = pair[0], pair[1]
    return found


# ---- losses of SFT and DPO


def _losses(a: RunFolder, b: RunFolder, steps: _Common, settings: Mapping[str, Any]) -> Losses:
    loss_a, loss_b = steps["loss"]
    finite = np.isfinite(loss_a) & np.isfinite(loss_b)
    x, y = loss_a[finite], loss_b[finite]
    half = len(x) // 2
    functions = _functions_differ(a, settings)
    return Losses(
        steps=len(x),
        all=relative_difference(x, y),
        last_half=relative_difference(x[half:], y[half:]),
        values=(float(np.mean(x[half:])), float(np.mean(y[half:]))) if len(x) else (math.nan, math.nan),
        validation=_last_validation(a, b),
        best_validation=None if functions else _best_validations(a, b),
        not_comparable=functions or _rows_differ(steps, settings) or _rate_differs(steps),
        attributable="seed" not in settings,
    )


def _functions_differ(run: RunFolder, settings: Mapping[str, Any]) -> str:
    """Why the losses of the two runs are different functions; empty if they are the same."""
    named = [key for key in settings if key == "loss.normalize"]
    if run.family == DPO:  # whose losses measure against the model that the run began with
        named = [key for key in settings if key.startswith("loss.") or key == "checkpointer.adapter_checkpoint"]
        named = [key for key in named if key != "loss.chunk_tokens"]
    return f"the runs have different losses ({', '.join(named)})" if named else ""


def _rows_differ(steps: _Common, settings: Mapping[str, Any]) -> str:
    """Why the steps of the two runs saw different rows; empty if they saw the same.

    Steps with different numbers of tokens saw different rows. If the numbers vary from step to step and are always
    equal, the rows are the same, even if the data set has moved. The settings decide if the numbers do not vary, and
    always about which tokens are labels.
    """
    tokens_a, tokens_b = steps["tokens"]
    known = np.isfinite(tokens_a) & np.isfinite(tokens_b)
    other = np.flatnonzero(known & (tokens_a != tokens_b))
    named = [key for key in settings if key.split(".")[0] in _DATA + _STEP_SIZE]
    if len(other):
        because = f" (different {', '.join(named)})" if named else ""
        return f"from step {steps.steps[other[0]]} on the runs see different rows{because}"
    proven = known.all() and len(set(tokens_a)) > 1
    of_data = [key for key in named if key.split(".")[0] in _DATA and not key.endswith(_PATHS)]
    decisive = [key for key in of_data if key.startswith("dataset.") or not proven]
    return f"the runs see different rows (different {', '.join(decisive)})" if decisive else ""


def _rate_differs(steps: _Common) -> str:
    a, b = steps["lr"]
    other = np.flatnonzero(np.abs(a - b) > 1e-6 * np.maximum(np.abs(a), np.abs(b)))
    if not len(other):
        return ""
    at = other[0]
    return f"from step {steps.steps[at]} on the learning rates differ ({a[at]:.3g} and {b[at]:.3g})"


def _last_validation(a: RunFolder, b: RunFolder) -> tuple[int, float, float] | None:
    common = _Common(a.validations, b.validations)
    (labels_a, labels_b), (losses_a, losses_b) = common["val_tokens"], common["val_loss"]
    same = (labels_a == labels_b) & np.isfinite(losses_a) & np.isfinite(losses_b) & (losses_a > 0)
    rows = np.flatnonzero(same)
    return (common.steps[rows[-1]], float(losses_a[rows[-1]]), float(losses_b[rows[-1]])) if len(rows) else None


def _best_validations(a: RunFolder, b: RunFolder) -> Pair | None:
    losses = [run.validations["val_loss"] for run in (a, b)]
    labels = {*a.validations["val_tokens"], *b.validations["val_tokens"]}
    if not (a.finished and b.finished and all(np.isfinite(each).any() for each in losses) and len(labels) == 1):
        return None
    best_a, best_b = (float(np.nanmin(each)) for each in losses)
    return (best_a, best_b) if best_a > 0 else None


# ---- held-out scores of RAFT and GRPO


def _scores(a: RunFolder, b: RunFolder, settings: Mapping[str, Any]) -> list[Scores]:
    """The held-out scores of two runs, in pairs.

    Evaluations after the same cycle, or after the same step of runs whose steps have as many answers, are pairs. For
    other runs, those after about as many sampled answers are.
    """
    judges = [key for key in settings if key.startswith("verifier.")]
    other_steps = a.family == GRPO and any(key in settings for key in _ROLLOUT_SIZE)
    pair = _by_number if a.family == b.family and not other_steps else _by_answers
    return [_score(x, y, judges) for x, y in pair(held_out(a), held_out(b))]


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
        if low >= 0.7 * high > 0:
            found.append((nearest, each) if swapped else (each, nearest))
    return found


def _score(a: HeldOut, b: HeldOut, judges: Sequence[str]) -> Scores:
    total_a, total_b = ((each.scores["correct"], each.scores["prompts"]) for each in (a, b))
    about = (a.after, b.after), a.number > 0 and b.number > 0, (a.answers, b.answers), total_a, total_b
    why = f"different verifiers judged (different {', '.join(judges)})" if judges else ""
    right_a, right_b = a.greedy(), b.greedy()
    if right_a.keys() != right_b.keys() or len(right_a) != total_a[1]:
        if (right_a and right_b) or total_a[1] != total_b[1]:
            why = why or "they are of different prompts"
        return Scores(*about, unpaired_gain(total_a, total_b), None, why)
    a_only = sum(right and not right_b[prompt] for prompt, right in right_a.items())
    b_only = sum(right and not right_a[prompt] for prompt, right in right_b.items())
    return Scores(*about, paired_gain(a_only, b_only, len(right_a)), mcnemar(a_only, b_only), why)
