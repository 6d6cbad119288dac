"""Charts and a table of a GRPO run's steps."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup

from rocm_ext.base.registry import GRPO
from rocm_ext.report.charts import Line, Spans, line_chart, span_chart, stacked_chart
from rocm_ext.report.curves import short_number, smooth, smoothing_width, thin
from rocm_ext.report.raft import time_text, verdict_styles
from rocm_ext.report.updates import Colours, Curve, chart, columns_chart
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.held_out import HeldOut, held_out

_BARS = 40  # most bars of a chart
_POINTS = 60  # most evaluations of a chart
_ROWS = 40  # most evaluations of a table
_CURVES = (
    Curve("reward", "Reward", "mean of the answers", noisy=True),
    Curve("right", "Right answers", "% of the answers", scale=100, noisy=True),
    Curve("flat", "Flat groups", "% with equal rewards, not trained on", scale=100, noisy=True),
    Curve("mean_tokens", "Answer length", "tokens, mean", noisy=True),
    Curve("truncated", "Answers cut off", "% at max_new_tokens", scale=100, noisy=True),
    Curve("length_share", "Length", "% of the rewards' variance that it explains", scale=100, noisy=True),
    Curve("entropy", "Entropy", "nats per token", noisy=True),
    Curve("kl", "KL divergence", "from the first adapter, nats per token", noisy=True),
    Curve("mismatch_mean", "Mismatch", "trainer − sampler, nats, mean", noisy=True),
    Curve("mismatch_max", "Largest mismatch", "trainer − sampler, nats", noisy=True),
    Curve("mismatch_kl", "Mismatch KL", "nats per token", noisy=True),
)
_PAIRS = (  # title, unit, factor, columns with their labels
    ("Clipped tokens", "% of the tokens", 100.0, (("clipped_low", "low"), ("clipped_high", "high"))),
    ("Probability ratio", "trainer / sampler", 1.0, (("ratio_mean", "mean"), ("ratio_max", "largest"))),
)
_TIMES = {"sampling": "c0", "waiting": "r2", "training": "c1", "other": "v2"}


def charts(runs: Sequence[RunFolder]) -> list[Markup]:
    """Charts by step of the GRPO runs among ``runs``; beside other runs, also held-out scores by answers sampled."""
    own = [(colour, run) for colour, run in enumerate(runs) if run.family == GRPO]
    if not own:
        return []
    several = len(runs) > 1
    drawn = [
        _passes(own),
        _passes_by_answers(runs) if several else None,
        _passes_at_k(own, several),
        *(chart(curve, runs) for curve in _CURVES),
        *(columns_chart(*pair, own, several) for pair in _PAIRS),
        _policy_lag(runs),
        *(_verdicts(run, several) for _, run in own),
        *(_times(run, several) for _, run in own),
        _sampling_speed(own),
    ]
    return [each for each in drawn if each is not None]


def _passes(runs: Colours) -> Markup | None:
    found: list[Spans] = []
    for colour, run in runs:
        at = {each.number: [100 * value for value in each.scores["pass"]] for each in _few(held_out(run), _POINTS)}
        found += [Spans(run.name, at, colour)] if at else []
    return _spans("Held-out pass@1", "%, greedy, with 95 % intervals", found)


def _passes_at_k(runs: Colours, several: bool) -> Markup | None:
    found: list[Spans] = []
    for colour, run in runs:
        shown = _few(held_out(run), _POINTS)
        for i, k in enumerate(sorted({k for each in shown for k in each.scores["at"]})):
            label = f"{run.name}, pass@{k}" if several else f"pass@{k}"
            at = {each.number: [100 * v for v in each.scores["at"][k]] for each in shown if k in each.scores["at"]}
            found.append(Spans(label, at, colour if several else i, i if several else 0))
    return _spans("Held-out pass@k", "%, drawn answers", found, legend=True)


def _spans(title: str, unit: str, found: Sequence[Spans], legend: bool = False) -> Markup | None:
    if not found:
        return None
    places = sorted({place for each in found for place in each.at})
    width = float(min(np.diff(places), default=1))
    return span_chart(title, unit, found, x_title="step", width=width, legend=legend)


def _few(evaluations: Sequence[HeldOut], most: int) -> list[HeldOut]:
    """At most about ``most`` evaluations, with the best and the worst of every stretch, the first and the last."""
    return [evaluations[i] for i in thin(np.array([each.scores["pass"][0] for each in evaluations]), most)]


def _passes_by_answers(runs: Sequence[RunFolder]) -> Markup | None:
    lines = []
    for colour, run in enumerate(runs):
        if shown := _few(held_out(run), _POINTS):
            x = np.array([each.answers for each in shown], dtype=np.float64)
            y = np.array([100 * each.scores["pass"][0] for each in shown])
            lines.append(Line(run.name, x, y, colour))
    return line_chart("Held-out pass@1 by answers", "%, greedy", lines, x_title="answers sampled") if lines else None


def _policy_lag(runs: Sequence[RunFolder]) -> Markup | None:
    late = any(np.nanmax(lag, initial=0.0) > 0 for run in runs if len(lag := run.steps["policy_lag"]))
    return chart(Curve("policy_lag", "Age of the policy", "steps, of the one that sampled"), runs) if late else None


def _sampling_speed(runs: Colours) -> Markup | None:
    lines = []
    for colour, run in runs:
        y = run.steps["sampled_tokens"] / run.steps["sample_seconds"]
        if np.isfinite(y).any():
            lines.append(Line(run.name, run.steps["step"], smooth(y, smoothing_width(len(y))), colour))
    return line_chart("Sampling speed", "tokens per second", lines, zero=True) if lines else None


def _verdicts(run: RunFolder, several: bool) -> Markup | None:
    verdicts = run.answers.verdicts
    steps, counts = verdicts.counts()
    parts = {name: values.astype(np.float64) for name, values in counts.items()}
    return _bars("Verdicts", "% of answers", run, several, steps, parts, verdict_styles(verdicts.kinds), share=True)


def _times(run: RunFolder, several: bool) -> Markup | None:
    steps = run.steps
    kinds = {"sampling": "sample_seconds", "waiting": "wait_seconds", "training": "train_seconds"}
    parts = {name: np.clip(np.nan_to_num(steps[key], posinf=0.0), 0, None) for name, key in kinds.items()}
    parts["other"] = np.clip(np.nan_to_num(steps["seconds"], posinf=0.0) - sum(parts.values()), 0, None)
    return _bars("Time of a step", "seconds", run, several, steps["step"], parts, _TIMES)


def _bars(
    title: str,
    unit: str,
    run: RunFolder,
    several: bool,
    steps: np.ndarray,
    parts: Mapping[str, np.ndarray],
    styles: Mapping[str, str],
    share: bool = False,
) -> Markup | None:
    """A bar for each step, or the means of stretches of equally many steps."""
    if not len(steps) or not sum(values.sum() for values in parts.values()) > 0:
        return None
    first = int(steps.min())
    width = math.ceil((int(steps.max()) - first + 1) / _BARS)
    stretch = ((steps - first) // width).astype(int)
    bars: dict[float, dict[str, float]] = {}
    names: dict[float, str] = {}
    for i in np.unique(stretch):
        begin = first + int(i) * width
        place = begin + (width - 1) / 2
        bars[place] = {name: float(values[stretch == i].mean()) for name, values in parts.items()}
        names[place] = f"step {begin}" if width == 1 else f"steps {begin} to {begin + width - 1}"
    unit += ", mean of stretches" if width > 1 and not share else ""
    title = f"{title}, {run.name}" if several else title
    return stacked_chart(title, unit, bars, styles, share=share, x_title="step", width=width, names=names)


COLUMNS = ("step", "answers", "right", "pass@1", "95 % interval", "pass@k", "cut off", "time")


def table(run: RunFolder) -> list[list[str]]:
    """The evaluations as rows of text under :data:`COLUMNS`."""
    rows = []
    more = {each.step: each for each in run.evaluations}
    for each in _few(held_out(run), _ROWS):
        value, low, high = (100 * v for v in each.scores["pass"])
        drawn = each.scores["at"]
        seconds, cut = more[each.number].seconds, more[each.number].truncated
        rows.append(
            [
                str(each.number),
                f"{each.answers:,}",
                f"{each.scores['correct']:,} of {each.scores['prompts']:,}",
                f"{value:.1f} %",
                f"{low:.1f} – {high:.1f}",
                ", ".join(f"{100 * drawn[k][0]:.1f} % at {k}" for k in sorted(drawn)),
                short_number(cut) if math.isfinite(cut) else "",
                time_text(seconds) if math.isfinite(seconds) else "",
            ]
        )
    return rows
