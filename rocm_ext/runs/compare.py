"""Two runs, a safe baseline A and a faster setting B: is B faster, and does it train the same?

:mod:`rocm_ext.runs.comparison` says how the measurements are made. :mod:`rocm_ext.runs.decision` turns them into an
answer.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rocm_ext.base.errors import UserError
from rocm_ext.base.registry import DPO, GRPO, RAFT
from rocm_ext.runs import compare_sampling
from rocm_ext.runs.compare_sampling import WARM_UP
from rocm_ext.runs.comparison import Comparison, Losses, Stability
from rocm_ext.runs.folder import RunFolder, running_time
from rocm_ext.runs.intervals import finite_median, ratio_of_medians, relative_difference, spikes
from rocm_ext.runs.records import number

_DATA = {"dataset", "dataset_val", "validation_fraction", "tokenizer", "data_seed", "shuffle", "too_long"}
_STEP_SIZE = {"sequences_per_step", "gradient_accumulation_steps", "batch_size"}
_RATE = {"optimizer.lr", "lr_scheduler", "epochs", "max_steps_per_epoch"}
_PREFERENCES = ("margin", "accuracy", "reward_chosen", "reward_rejected", "kl")
_PLACES = ("source", "data_files", "path", "_path", "_file", "_dir")  # settings that say where a file is


@np.errstate(all="ignore")  # damaged files may hold 1e308
def compare(a: RunFolder, b: RunFolder) -> Comparison:
    """Measure two runs against each other.

    Raises:
        UserError: the runs are the same folder, or their recipes cannot be compared.
    """
    if a.path.resolve() == b.path.resolve():
        raise UserError(f"{a.path} and {b.path} are the same folder; name two runs")
    sampling = {a.family, b.family} <= {RAFT, GRPO}
    if a.family != b.family and not sampling:
        raise UserError(
            f"{a.path} is a run of {a.recipe}, {b.path} of {b.recipe}; compare two runs of one recipe, or of "
            f"{RAFT} and {GRPO}"
        )
    settings = a.differing_settings(b)
    memory = (_peak_memory(a), _peak_memory(b))
    if a.family != b.family:  # most keys are of one recipe
        common = a.settings().keys() & b.settings().keys()
        settings = {key: values for key, values in settings.items() if key in common}
    made = _compare_sampling if sampling else _compare_sft
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
            "tokens/s, median": (finite_median(speeds[0]), finite_median(speeds[1])),
            "seconds per step, median": (finite_median(seconds[0]), finite_median(seconds[1])),
            f"seconds for {len(in_a):,} steps": (float(np.nansum(seconds[0])), float(np.nansum(seconds[1]))),
        },
        _stability(a, b, columns),
        losses,
        learning=_preferences(a, b, in_a, in_b) if a.family == DPO else {},
        notes=_loss_notes(losses),
    )


def _preferences(a: RunFolder, b: RunFolder, in_a: np.ndarray, in_b: np.ndarray) -> dict[str, tuple[float, float]]:
    """What two DPO runs measure: means over the last half of their common steps, and their last common validation."""
    found = {}
    half = len(in_a) // 2
    for name in _PREFERENCES if len(in_a) else ():
        means = (float(np.mean(run.steps[name][at[half:]])) for run, at in ((a, in_a), (b, in_b)))
        found[f"{name.replace('_', ' ')}, last {len(in_a) - half:,} steps"] = (next(means), next(means))
    steps, at_a, at_b = np.intersect1d(a.validations["step"], b.validations["step"], return_indices=True)
    for name in _PREFERENCES if len(steps) else ():
        last = (float(run.validations[f"val_{name}"][at[-1]]) for run, at in ((a, at_a), (b, at_b)))
        found[f"validation {name.replace('_', ' ')} at step {steps[-1]:,.0f}"] = (next(last), next(last))
    return {name: values for name, values in found.items() if np.isfinite(values).any()}


def _losses(a: RunFolder, b: RunFolder, columns: Mapping[str, tuple[np.ndarray, np.ndarray]], settings: dict) -> Losses:
    loss_a, loss_b = columns["loss"]
    finite = np.isfinite(loss_a) & np.isfinite(loss_b)
    x, y = loss_a[finite], loss_b[finite]
    half = len(x) // 2
    first = None
    if len(columns["step"][0]) and columns["step"][0][0] == 1 and finite[0] and x[0] > 0:
        first = float((y[0] - x[0]) / x[0])
    means = (float(np.mean(x[half:])), float(np.mean(y[half:]))) if len(x) else (math.nan, math.nan)
    functions = _functions_differ(a, settings)
    return Losses(
        steps=len(x),
        first=first,
        last_half=relative_difference(x[half:], y[half:]),
        all=relative_difference(x, y),
        values=means,
        validation=_last_validation(a, b),
        best_validation=None if functions else _best_validations(a, b),
        not_comparable=functions or _rows_differ(columns, settings) or _rate_differs(columns),
        attributable="seed" not in settings,
    )


def _functions_differ(run: RunFolder, settings: Mapping[str, Any]) -> str:
    """Why the losses of the two runs are different functions; empty if they are the same."""
    named = [key for key in settings if key == "loss.normalize"]
    if run.family == DPO:  # whose losses measure against the model that the run began with
        named = [key for key in settings if key.startswith("loss.") or key == "checkpointer.adapter_checkpoint"]
        named = [key for key in named if key != "loss.chunk_tokens"]
    return f"the runs have different losses ({', '.join(named)})" if named else ""


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


# ---- learning from sampled answers


def _compare_sampling(a: RunFolder, b: RunFolder, settings: dict, memory: tuple[float, float]) -> Comparison:
    scores = compare_sampling.scores(a, b, settings)
    speed, rates = compare_sampling.speed(a, b)
    learning, notes = compare_sampling.learning(a, b), compare_sampling.notes(a, b, scores)
    return Comparison(
        a, b, settings, speed, memory, rates, _mishaps(a, b), scores=scores, learning=learning, notes=notes
    )
