"""Charts of optimiser steps and validations, of all recipes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rocm_ext.base.registry import BY_STEP, DPO, RAFT
from rocm_ext.report.charts import Chart, Line, colour_and_dash, line_chart, smooth
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.records import of_sets

_FEW = 3  # runs; the noise of more would hide the curves


@dataclass(frozen=True)
class Curve:
    """Columns of ``metrics.jsonl`` in one chart.

    Attributes:
        title, unit: arguments of :func:`rocm_ext.report.charts.line_chart`; a unit that begins with % shows shares.
        columns: names, or ``a / b`` for a ratio, with the lines' labels; columns of validations begin with ``val_``,
            and stand for a line of each named data set. A name that ends in ``/`` or ``_`` stands for all columns that
            begin with it.
        zero: begin the y axis at 0.
        lost: mark values that are not finite.
        noisy: smooth the lines of many points.
    """

    title: str
    unit: str
    columns: dict[str, str]
    zero: bool = True
    lost: bool = False
    noisy: bool = True


def _sides(column: str) -> dict[str, str]:
    return {f"{column}_chosen": "chosen", f"{column}_rejected": "rejected"}


TRAINING = (
    Curve("Loss", "nats per token", {"loss": "loss"}, zero=False, lost=True),
    Curve(
        "Validation loss", "nats per token", {"val_loss": "validation loss"}, zero=False, lost=True
    ),
    Curve("Learning rate", "", {"lr": "learning rate"}, noisy=False),
    Curve("Gradient norm", "before clipping", {"grad_norm": "gradient norm"}, lost=True),
    Curve("Speed", "tokens per second", {"tokens_per_second": "speed"}),
    Curve("Padding", "% of computed tokens", {"padding": "padding"}, noisy=False),
    Curve("Peak memory", "bytes", {"peak_memory": "peak memory"}, noisy=False),
)
PREFERENCES = (
    Curve(
        "Margin",
        "reward of the chosen answer − reward of the rejected one; of single answers, distance from the baseline",
        {"margin": "training", "val_margin": "validation"},
    ),
    Curve(
        "Accuracy",
        "% with a margin above 0",
        {"accuracy": "training", "val_accuracy": "validation"},
    ),
    Curve("Rewards", "factor beta × score", _sides("reward")),
    Curve("Validation: rewards", "factor beta × score", _sides("val_reward")),
    Curve("Log-probs", "nats, sums over an answer", _sides("logprobs")),
    Curve("Validation: log-probs", "nats, sums over an answer", _sides("val_logprobs")),
    Curve(
        "KL divergence",
        "from the reference, nats per token",
        {"kl": "training", "val_kl": "validation"},
    ),
    Curve("Baseline", "nats, KTO's", {"baseline": "training", "val_baseline": "validation"}),
)
POLICY = (
    Curve("Reward", "mean of the answers", {"reward": "reward"}),
    Curve("Parts of the reward", "means of the answers", {"reward/": ""}),
    Curve("Right answers", "% of the answers", {"right": "right"}),
    Curve("Pass@k", "of a group, mean", {"pass_at_": "k = "}),
    Curve(
        "Flat groups",
        "% that teach nothing",
        {"flat": "flat", "all_right": "all right", "all_wrong": "all wrong"},
    ),
    Curve("Distinct answers", "% of a group, mean", {"distinct": "distinct"}),
    Curve(
        "Answer length",
        "tokens, mean",
        {
            "mean_tokens": "all",
            "mean_tokens_right": "right ones",
            "mean_tokens_wrong": "wrong ones",
        },
    ),
    Curve("Answers cut off", "% at max_new_tokens", {"truncated": "cut off"}),
    Curve(
        "Length",
        "% of the rewards' variance by it; below 0: short ones earn more",
        {"length_share": "share"},
    ),
    Curve("Entropy", "nats per token", {"entropy": "entropy"}),
    Curve("KL divergence", "from the first adapter, nats per token", {"kl": "KL"}),
    Curve(
        "Agreement with the teacher",
        "% of the tokens, most probable word",
        {"agreement": "agreement"},
    ),
    Curve("Mismatch", "trainer − sampler, nats, mean", {"mismatch_mean": "mismatch"}),
    Curve("Largest mismatch", "trainer − sampler, nats", {"mismatch_max": "mismatch"}),
    Curve("Mismatch KL", "nats per token", {"mismatch_kl": "mismatch KL"}),
    Curve("Limited weights", "% of the tokens, by the mismatch", {"mismatch_limited": "limited"}),
    Curve(
        "Clipped tokens",
        "% of the tokens",
        {"clipped_low": "low", "clipped_high": "high", "clipped_dual": "dual"},
    ),
    Curve(
        "Information of an update",
        "",
        {"informative_answers": "answers", "effective_tokens": "effective tokens"},
    ),
    Curve(
        "Improbable tokens of wrong answers",
        "% of the gradients' energy",
        {"improbable_share": "share"},
    ),
    Curve("Sum of learning rates", "of all updates", {"lr_sum": "sum"}, noisy=False),
    Curve("Probability ratio", "trainer / sampler", {"ratio_mean": "mean", "ratio_max": "largest"}),
    Curve("Age of the policy", "steps, of the one that sampled", {"policy_lag": "age"}),
    Curve("Sampling speed", "tokens per second", {"sampled_tokens / sample_seconds": "speed"}),
)


def charts(curves: Sequence[Curve], runs: Sequence[RunFolder], *families: str) -> list[Chart]:
    """The charts in which some run has values.

    Args:
        curves: :data:`TRAINING`, :data:`PREFERENCES` or :data:`POLICY`.
        runs: all runs of the page.
        families: recipes whose runs are drawn. None of them means all.
    """
    drawn = {}
    for index, run in enumerate(runs):
        if not families or run.family in families:
            drawn[index] = run
    several = len(runs) > 1
    x_title = "cycle" if RAFT in families else "step"
    marks = []
    if len(runs) == 1 and not families:
        marks = _cycle_marks(runs[0])
    # the losses of GRPO, DPO and distillation are no cross-entropies
    nats = not any(run.family in (*BY_STEP, DPO) for run in drawn.values())
    result = []
    for curve in curves:
        columns = _columns(curve, drawn.values())
        lines, smoothed = _lines(curve, columns, drawn, several, x_title)
        if not lines:
            continue
        unit = curve.unit if nats or curve.title not in ("Loss", "Validation loss") else ""
        if smoothed:
            unit += ", smoothed"
        chart = line_chart(
            title=curve.title,
            unit=unit,
            lines=lines,
            x_title=x_title,
            zero=curve.zero,
            marks=marks,
            legend=len(columns) > 1 or columns != curve.columns,
        )
        result.append(chart)
    return result


def _lines(
    curve: Curve,
    columns: Mapping[str, str],
    runs: Mapping[int, RunFolder],
    several: bool,
    x_title: str,
) -> tuple[list[Line], bool]:
    """The lines of a curve, and whether they are smoothed."""
    lines = []
    smoothed = False
    for index, run in runs.items():
        for i, (column, label) in enumerate(columns.items()):
            x, y = _values(run, column, x_title)
            if curve.unit.startswith("%"):
                y = 100 * y
            finite = np.isfinite(y)
            if not finite.any() and not (len(y) and curve.lost):
                continue
            if several:
                label = run.name if len(columns) == 1 else f"{run.name}, {label}"
            colour, dash = colour_and_dash(index, i, several)
            line = Line(label, x, y, colour, dash, lost=curve.lost)
            mean, width = smooth(y) if curve.noisy else (y, 1)
            smoothed = width > 1
            if not smoothed:
                lines.append(line)
            elif len(runs) * len(columns) <= _FEW:
                lines.append(replace(line, faint=True))
                lines.append(replace(line, y=mean, lost=False))
            else:
                if curve.lost:
                    mean = np.where(finite, mean, y)
                lines.append(replace(line, y=mean))
    return lines, smoothed


def _columns(curve: Curve, runs: Iterable[RunFolder]) -> dict[str, str]:
    """The columns of a curve with their labels."""
    labels: dict[str, str] = {}
    for column, label in curve.columns.items():
        if not column.endswith(("/", "_")):
            found: dict[str, str] = {}
            if column.startswith("val_"):
                for run in runs:
                    found |= of_sets(run.validations.lines, column, label)
            labels |= found or {column: label}
            continue
        for run in runs:
            for line in run.steps.lines:
                for name in line:
                    if name.startswith(column):
                        labels[name] = label + name.removeprefix(column)
    return labels


def _values(run: RunFolder, column: str, x_title: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps or cycles and values of a column, where they have it: a step of GRPO without an update has no loss."""
    lines = run.steps if x_title == "cycle" else run.updates
    if column.startswith("val_"):
        lines = run.validations
    name, _, divisor = column.partition(" / ")
    y = lines[name]
    if divisor:
        y = y / lines[divisor]
    has = lines.has(name)
    return lines["step"][has], y[has]


def _cycle_marks(run: RunFolder) -> list[tuple[float, str]]:
    """The first updates of a RAFT run's cycles, with the cycles' names; only some of many."""
    if run.family != RAFT:
        return []
    cycles = run.updates["cycle"]
    starts = np.flatnonzero(np.diff(cycles, prepend=-1))
    steps = run.updates["step"]
    some = starts[:: len(starts) // 12 + 1]
    return [(float(steps[i]), f"{cycles[i]:.0f}") for i in some]
