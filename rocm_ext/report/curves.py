"""Charts of optimiser steps and validations, of all recipes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rocm_ext.base.registry import BY_STEP, DPO, RAFT
from rocm_ext.report.charts import Chart, Line, line_chart, smooth
from rocm_ext.runs.folder import RunFolder

_FEW = 3  # runs; the noise of more would hide the curves


@dataclass(frozen=True)
class Curve:
    """Columns of ``metrics.jsonl`` in one chart.

    Attributes:
        title, unit: arguments of :func:`rocm_ext.report.charts.line_chart`.
        columns: names, or ``a / b`` for a ratio, with the lines' labels; columns of validations begin with ``val_``. A
            name that ends in ``/`` or ``_`` stands for all columns that begin with it.
        scale: factor from the columns to the unit.
        zero: begin the y axis at 0.
        lost: mark values that are not finite.
        noisy: smooth the lines of many points.
    """

    title: str
    unit: str
    columns: dict[str, str]
    scale: float = 1.0
    zero: bool = True
    lost: bool = False
    noisy: bool = True


def _share(title: str, unit: str, **columns: str) -> Curve:
    return Curve(title, unit, columns, scale=100)


def _sides(column: str) -> dict[str, str]:
    return {f"{column}_chosen": "chosen", f"{column}_rejected": "rejected"}


TRAINING = (
    Curve("Loss", "nats per token", {"loss": "loss"}, zero=False, lost=True),
    Curve("Validation loss", "nats per token", {"val_loss": "validation loss"}, zero=False, lost=True),
    Curve("Learning rate", "", {"lr": "learning rate"}, noisy=False),
    Curve("Gradient norm", "before clipping", {"grad_norm": "gradient norm"}, lost=True),
    Curve("Speed", "tokens per second", {"tokens_per_second": "speed"}),
    Curve("Padding", "% of computed tokens", {"padding": "padding"}, scale=100, noisy=False),
    Curve("Peak memory", "bytes", {"peak_memory": "peak memory"}, noisy=False),
)
PREFERENCES = (
    Curve(
        "Margin",
        "reward of the chosen answer − reward of the rejected one; of single answers, distance from the baseline",
        {"margin": "training", "val_margin": "validation"},
    ),
    _share("Accuracy", "% with a margin above 0", accuracy="training", val_accuracy="validation"),
    Curve("Rewards", "factor beta × score", _sides("reward")),
    Curve("Validation: rewards", "factor beta × score", _sides("val_reward")),
    Curve("Log-probs", "nats, sums over an answer", _sides("logprobs")),
    Curve("Validation: log-probs", "nats, sums over an answer", _sides("val_logprobs")),
    Curve("KL divergence", "from the reference, nats per token", {"kl": "training", "val_kl": "validation"}),
    Curve("Baseline", "nats, KTO's", {"baseline": "training", "val_baseline": "validation"}),
)
POLICY = (
    Curve("Reward", "mean of the answers", {"reward": "reward"}),
    Curve("Parts of the reward", "means of the answers", {"reward/": ""}),
    _share("Right answers", "% of the answers", right="right"),
    Curve("Pass@k", "of a group, mean", {"pass_at_": "k = "}),
    _share("Flat groups", "% that teach nothing", flat="flat", all_right="all right", all_wrong="all wrong"),
    _share("Distinct answers", "% of a group, mean", distinct="distinct"),
    Curve(
        "Answer length",
        "tokens, mean",
        {"mean_tokens": "all", "mean_tokens_right": "right ones", "mean_tokens_wrong": "wrong ones"},
    ),
    _share("Answers cut off", "% at max_new_tokens", truncated="cut off"),
    _share("Length", "% of the rewards' variance by it; below 0: short ones earn more", length_share="share"),
    Curve("Entropy", "nats per token", {"entropy": "entropy"}),
    Curve("KL divergence", "from the first adapter, nats per token", {"kl": "KL"}),
    _share("Agreement with the teacher", "% of the tokens, most probable word", agreement="agreement"),
    Curve("Mismatch", "trainer − sampler, nats, mean", {"mismatch_mean": "mismatch"}),
    Curve("Largest mismatch", "trainer − sampler, nats", {"mismatch_max": "mismatch"}),
    Curve("Mismatch KL", "nats per token", {"mismatch_kl": "mismatch KL"}),
    _share("Limited weights", "% of the tokens, by the mismatch", mismatch_limited="limited"),
    _share("Clipped tokens", "% of the tokens", clipped_low="low", clipped_high="high", clipped_dual="dual"),
    Curve("Information of an update", "", {"informative_answers": "answers", "effective_tokens": "effective tokens"}),
    _share("Improbable tokens of wrong answers", "% of the gradients' energy", improbable_share="share"),
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
        families: recipes whose runs are drawn; none: all.
    """
    shown = [(colour, run) for colour, run in enumerate(runs) if not families or run.family in families]
    x_title = "cycle" if RAFT in families else "step"
    marks = _cycle_marks(runs[0]) if len(runs) == 1 and not families else []
    drawn = [_chart(curve, shown, len(runs) > 1, x_title, marks) for curve in curves]
    return [chart for chart in drawn if chart is not None]


def _chart(
    curve: Curve, runs: Sequence[tuple[int, RunFolder]], several: bool, x_title: str, marks: Sequence[tuple[float, str]]
) -> Chart | None:
    lines, width, columns = [], 1, _columns(curve, runs)
    for colour, run in runs:
        for i, (column, label) in enumerate(columns.items()):
            x, y = _values(run, column, x_title)
            y = y * curve.scale
            if not len(y) or not (np.isfinite(y).any() or curve.lost):
                continue
            name = label if not several else run.name if len(columns) == 1 else f"{run.name}, {label}"
            line = Line(name, x, y, colour if several else i, i if several else 0, lost=curve.lost)
            smoothed, width = smooth(y) if curve.noisy else (y, 1)
            if width == 1:
                lines.append(line)
            elif len(runs) * len(columns) <= _FEW:
                lines += [replace(line, faint=True), replace(line, y=smoothed, lost=False)]
            else:
                lines.append(replace(line, y=np.where(np.isfinite(y) | (not curve.lost), smoothed, y)))
    if not lines:
        return None
    # the losses of GRPO, DPO and distillation are no cross-entropies
    unit = "" if curve.title.endswith("oss") and any(run.family in (*BY_STEP, DPO) for _, run in runs) else curve.unit
    unit += ", smoothed" if width > 1 else ""
    legend = len(columns) > 1 or columns != curve.columns
    return line_chart(curve.title, unit, lines, x_title=x_title, zero=curve.zero, marks=marks, legend=legend)


def _columns(curve: Curve, runs: Sequence[tuple[int, RunFolder]]) -> dict[str, str]:
    """The columns of a curve with their labels."""
    named = {}
    for column, label in curve.columns.items():
        if column[-1] not in "/_":
            named[column] = label
            continue
        names = dict.fromkeys(name for _, run in runs for line in run.steps.lines for name in line)
        named |= {name: label + name[len(column) :] for name in names if name.startswith(column)}
    return named


def _values(run: RunFolder, column: str, x_title: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps or cycles and values of a column, where they have it: a step of GRPO without an update has no loss."""
    lines = run.steps if x_title == "cycle" else run.updates
    if column.startswith("val_"):
        lines = run.validations
    name, _, divisor = column.partition(" / ")
    has = lines.has(name)
    y = lines[name] / lines[divisor] if divisor else lines[name]
    return lines["step"][has], y[has]


def _cycle_marks(run: RunFolder) -> list[tuple[float, str]]:
    """The first updates of a RAFT run's cycles, with the cycles' names; only some of many."""
    if run.family != RAFT or not len(run.updates):
        return []
    cycles = run.updates["cycle"]
    starts = np.flatnonzero(np.diff(cycles, prepend=-1))
    return [(float(run.updates["step"][i]), f"{cycles[i]:.0f}") for i in starts[:: len(starts) // 12 + 1]]
