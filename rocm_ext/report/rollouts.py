"""Charts of runs that learn from sampled answers, and of evaluations, with tables: RAFT by cycle, others by step."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

import numpy as np

from rocm_ext.base.registry import BY_STEP, RAFT
from rocm_ext.report.charts import (
    Chart,
    Line,
    Table,
    bar_chart,
    colour_and_dash,
    line_chart,
    time_unit,
)
from rocm_ext.runs.folder import HeldOut, RunFolder, held_out
from rocm_ext.runs.records import MOST, number
from rocm_ext.runs.tails import Record

# colours of verdicts
VERDICTS = {"CORRECT": "v0", "WRONG": "v1", "UNPARSED": "v2", "TIMEOUT": "v3", "ERROR": "v4"}
# colours of the filter's rules
_RULES = {
    "kept": "v0",
    "over cap": "r3",
    "not among best": "r2",
    "duplicate": "r1",
    "truncated": "v2",
    "empty": "v2",
    "not correct": "v3",
    "below threshold": "v1",
    "without reward": "v4",
    "not kept": "v2",
}
_TIMES = {"sampling": "sample_seconds", "waiting": "wait_seconds", "training": "train_seconds"}
_TIME_COLOURS = {"sampling": "c0", "waiting": "r2", "training": "c1", "other": "v2"}
_EVALUATIONS, _ROWS = 60, 40  # most evaluations of a chart, most rows of a table


# ---- held-out scores


def score_charts(runs: Sequence[RunFolder], *families: str) -> list[Chart]:
    """Held-out scores of the runs of ``families``; by step, several runs are also drawn by answers sampled."""
    charts = []
    for of_set in dict.fromkeys(chain.from_iterable(map(held_out, runs))):
        charts += _charts_of(of_set, runs, *families)
    return charts


def _charts_of(of_set: str, runs: Sequence[RunFolder], *families: str) -> list[Chart]:
    """The charts of a set of prompts, whose name ends their titles."""
    several = len(runs) > 1
    x_title = "cycle" if RAFT in families else "step"
    greedy = []
    by_answers = []
    drawn = []
    for index, run in enumerate(runs):
        evaluations = _few(held_out(run).get(of_set, ()), _EVALUATIONS)
        if not evaluations:
            continue
        steps = np.array([evaluation.number for evaluation in evaluations], np.float64)
        answers = np.array([evaluation.answers for evaluation in evaluations], np.float64)
        shares = np.array([evaluation.scores.passed for evaluation in evaluations])
        percent = 100 * shares.T  # [3, n] scores, and the ends of their intervals
        passed, ends = percent[0], percent[1:]
        by_answers.append(Line(run.name, answers, passed, index))
        if run.family in families:
            greedy.append(Line(run.name, steps, passed, index, ends=ends))
            drawn += _drawn_lines(run, evaluations, index, several)
    charts = []
    if greedy:
        charts.append(
            line_chart(
                f"Held-out pass@1{of_set}",
                "%, greedy, with 95 % intervals",
                greedy,
                x_title=x_title,
            )
        )
    if greedy and several and families == BY_STEP:
        charts.append(
            line_chart(
                f"Held-out pass@1{of_set} by answers",
                "%, greedy",
                by_answers,
                x_title="answers sampled",
            )
        )
    if drawn:
        charts.append(
            line_chart(
                f"Held-out pass@k{of_set}", "%, drawn answers", drawn, x_title=x_title, legend=True
            )
        )
    return charts


def _drawn_lines(
    run: RunFolder, evaluations: Sequence[HeldOut], index: int, several: bool
) -> list[Line]:
    """A line of pass@k for each k."""
    points: dict[int, list[tuple[float, ...]]] = defaultdict(list)
    for evaluation in evaluations:
        for k, share in evaluation.scores.drawn.items():
            points[k].append((evaluation.number, *share))
    lines = []
    for i, k in enumerate(sorted(points)):
        columns = np.array(points[k], np.float64).T  # [4, n] steps, scores, and the intervals' ends
        steps, percent = columns[0], 100 * columns[1:]
        label = f"{run.name}, pass@{k}" if several else f"pass@{k}"
        colour, dash = colour_and_dash(index, i, several)
        line = Line(label, steps, percent[0], colour, dash, ends=percent[1:])
        lines.append(line)
    return lines


EVALUATION_COLUMNS = ("after", "answers", "right", "pass@1", "95 % interval", "pass@k")


def evaluation_table(run: RunFolder) -> Table:
    """The evaluations as rows of text under :data:`EVALUATION_COLUMNS`."""
    rows = []
    evaluations: list[HeldOut] = []
    for of_set in held_out(run).values():
        evaluations += _few(of_set, _ROWS)
    for evaluation in evaluations:
        scores = evaluation.scores
        passed, low, high = (100 * share for share in scores.passed)
        drawn = []
        for k, share in sorted(scores.drawn.items()):
            drawn.append(f"{100 * share[0]:.1f} % at {k}")
        row = [
            ", ".join(filter(None, (evaluation.set, evaluation.after))),
            f"{evaluation.answers:,}",
            f"{scores.correct:,} of {scores.prompts:,}",
            f"{passed:.1f} %",
            f"{low:.1f} – {high:.1f}",
            ", ".join(drawn),
        ]
        rows.append(row)
    return rows


def _few(evaluations: Sequence[HeldOut], most: int) -> list[HeldOut]:
    """At most ``most`` evaluations: the best, the first, the last, and others at equal distances."""
    if len(evaluations) <= most:
        return list(evaluations)
    shares = [evaluation.scores.passed[0] for evaluation in evaluations]
    equal_distances = np.linspace(0, len(shares) - 1, most - 1)
    kept = np.union1d(equal_distances.astype(int), np.argmax(shares))
    return [evaluations[i] for i in kept]


# ---- bars of steps and cycles


def bar_charts(run: RunFolder, suffix: str) -> list[Chart]:
    """Verdicts and times of a run, of RAFT also kept answers; ``suffix`` ends the titles."""
    steps = run.steps["step"]
    sampled_steps, verdicts = run.answers.verdicts.counts()
    seconds = {}
    for name, column in _TIMES.items():
        known = np.nan_to_num(run.steps[column], posinf=0.0)
        seconds[name] = np.clip(known, 0, None)
    in_all = np.nan_to_num(run.steps["seconds"], posinf=0.0)
    rest = in_all - sum(seconds.values())
    seconds["other"] = np.clip(rest, 0, None)
    size, unit = time_unit(in_all.max(initial=0.0))
    times = {name: values / size for name, values in seconds.items()}
    charts = [
        bar_chart("Verdicts" + suffix, "% of answers", sampled_steps, verdicts, VERDICTS, run.unit),
        bar_chart(f"Time of a {run.unit}{suffix}", unit, steps, times, _TIME_COLOURS, run.unit),
    ]
    if run.family == RAFT:
        kept = _fates(run.steps.lines)
        charts.append(bar_chart("Answers kept" + suffix, "answers", steps, kept, _RULES, run.unit))
    return [chart for chart in charts if chart is not None]


def _fates(cycles: Sequence[Record]) -> dict[str, np.ndarray]:
    """[n] numbers of the cycles' answers that were kept, and that the filter dropped, by rule."""
    fates = {name: np.zeros(len(cycles)) for name in _RULES}
    for i, cycle in enumerate(cycles):
        counts = cycle.get("filter")
        if not isinstance(counts, dict):
            continue
        for rule, count in counts.items():
            name = str(rule).replace("_", " ")
            if name in fates and 0 < number(count) < MOST:
                fates[name][i] = count
    return fates
