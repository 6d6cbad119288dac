"""Charts of runs that learn from sampled answers, and of evaluations, with tables: RAFT by cycle, others by step."""

from collections.abc import Mapping, Sequence

import numpy as np

from rocm_ext.base.registry import BY_STEP, RAFT
from rocm_ext.report.charts import Chart, Line, bar_chart, line_chart, time_unit
from rocm_ext.runs.folder import HeldOut, RunFolder, held_out
from rocm_ext.runs.records import MOST, number
from rocm_ext.runs.tails import Record

VERDICTS = {"CORRECT": "v0", "WRONG": "v1", "UNPARSED": "v2", "TIMEOUT": "v3", "ERROR": "v4"}  # and their colours
_RULES = {"kept": "v0", "over cap": "r3", "not among best": "r2", "duplicate": "r1", "truncated": "v2", "empty": "v2"}
_RULES |= {"not correct": "v3", "below threshold": "v1", "without reward": "v4", "not kept": "v2"}
_TIMES = {"sampling": "sample_seconds", "waiting": "wait_seconds", "training": "train_seconds"}
_TIME_COLOURS = {"sampling": "c0", "waiting": "r2", "training": "c1", "other": "v2"}
_EVALUATIONS, _ROWS = 60, 40  # most evaluations of a chart, most rows of a table


# ---- held-out scores


def score_charts(runs: Sequence[RunFolder], *families: str) -> list[Chart]:
    """Held-out scores of the runs of ``families``; by step, several runs are also drawn by answers sampled."""
    several, x_title = len(runs) > 1, "cycle" if RAFT in families else "step"
    greedy, by_answers, drawn = [], [], []
    for colour, run in enumerate(runs):
        if not (shown := _few(held_out(run), _EVALUATIONS)):
            continue
        passed = 100 * np.array([scored.scores.passed for scored in shown])
        sampled = np.array([scored.answers for scored in shown], dtype=np.float64)
        by_answers.append(Line(run.name, sampled, passed[:, 0], colour))
        if run.family not in families:
            continue
        at = np.array([scored.number for scored in shown], dtype=np.float64)
        greedy.append(Line(run.name, at, passed[:, 0], colour, ends=passed[:, 1:].T))
        for i, k in enumerate(sorted({k for scored in shown for k in scored.scores.at})):
            label = f"{run.name}, pass@{k}" if several else f"pass@{k}"
            some = [(scored.number, *scored.scores.at[k]) for scored in shown if k in scored.scores.at]
            x, y, low, high = np.array(some, dtype=np.float64).T
            ends = 100 * np.stack([low, high])
            drawn.append(Line(label, x, 100 * y, colour if several else i, i if several else 0, ends=ends))
    charts = []
    if greedy:
        charts.append(line_chart("Held-out pass@1", "%, greedy, with 95 % intervals", greedy, x_title=x_title))
    if greedy and several and families == BY_STEP:
        charts.append(line_chart("Held-out pass@1 by answers", "%, greedy", by_answers, x_title="answers sampled"))
    if drawn:
        charts.append(line_chart("Held-out pass@k", "%, drawn answers", drawn, x_title=x_title, legend=True))
    return charts


EVALUATION_COLUMNS = ("after", "answers", "right", "pass@1", "95 % interval", "pass@k")


def evaluation_table(run: RunFolder) -> list[list[str]]:
    """The evaluations as rows of text under :data:`EVALUATION_COLUMNS`."""
    rows = []
    for scored in _few(held_out(run), _ROWS):
        value, low, high = (100 * share for share in scored.scores.passed)
        right = f"{scored.scores.correct:,} of {scored.scores.prompts:,}"
        drawn = ", ".join(f"{100 * of[0]:.1f} % at {k}" for k, of in sorted(scored.scores.at.items()))
        rows.append([scored.after, f"{scored.answers:,}", right, f"{value:.1f} %", f"{low:.1f} – {high:.1f}", drawn])
    return rows


def _few(evaluations: Sequence[HeldOut], most: int) -> list[HeldOut]:
    """At most ``most`` evaluations: the best, the first, the last, and others at equal distances."""
    if len(evaluations) <= most:
        return list(evaluations)
    kept = {int(i) for i in np.linspace(0, len(evaluations) - 1, most - 1)}
    kept.add(max(range(len(evaluations)), key=lambda i: evaluations[i].scores.passed[0]))
    return [evaluations[i] for i in sorted(kept)]


# ---- bars of steps and cycles


def bar_charts(run: RunFolder, suffix: str) -> list[Chart]:
    """Verdicts and times of a run, of RAFT also kept answers; ``suffix`` ends the titles."""
    asked, counts = run.answers.verdicts.counts()
    seconds = {name: np.clip(np.nan_to_num(run.steps[key], posinf=0.0), 0, None) for name, key in _TIMES.items()}
    in_all = np.nan_to_num(run.steps["seconds"], posinf=0.0)
    seconds["other"] = np.clip(in_all - sum(seconds.values()), 0, None)
    size, unit = time_unit(float(np.max(in_all, initial=0.0)))
    times = {name: of_part / size for name, of_part in seconds.items()}
    steps = run.steps["step"]
    charts = [
        bar_chart("Verdicts" + suffix, "% of answers", asked, counts, VERDICTS, run.unit),
        bar_chart(f"Time of a {run.unit}{suffix}", unit, steps, times, _TIME_COLOURS, run.unit),
    ]
    if run.family == RAFT:
        fates = [_fates(line) for line in run.steps.lines]
        kept = {name: np.array([fate.get(name, 0.0) for fate in fates]) for name in _RULES}
        charts.append(bar_chart("Answers kept" + suffix, "answers", steps, kept, _RULES, run.unit))
    return [chart for chart in charts if chart is not None]


def _fates(cycle: Record) -> Mapping[str, float]:
    """Numbers of a cycle's answers that were kept, and that the filter dropped, by rule."""
    counts = cycle.get("filter")
    if not isinstance(counts, dict):
        return {}
    named = {str(rule).replace("_", " "): number(count) for rule, count in counts.items()}
    return {rule: count for rule, count in named.items() if 0 < count < MOST}
