"""Charts and tables of runs that learn from sampled answers: RAFT by cycle, GRPO by step."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rocm_ext.base.registry import GRPO
from rocm_ext.report.charts import Chart, Line, bar_chart, line_chart, short_number, time_unit
from rocm_ext.runs.folder import PHASES, CycleFolder, RunFolder
from rocm_ext.runs.held_out import HeldOut, held_out
from rocm_ext.runs.records import number

VERDICTS = {"CORRECT": "v0", "WRONG": "v1", "UNPARSED": "v2", "TIMEOUT": "v3", "ERROR": "v4"}  # and their colours
_REWARDS = {"1": "r4", "0.5 to 1": "r3", "0 to 0.5": "r2", "0": "r1", "none": "v4"}
_RULES = {"kept": "v0", "over cap": "r3", "not among best": "r2", "duplicate": "r1", "truncated": "v2", "empty": "v2"}
_RULES |= {"not correct": "v3", "below threshold": "v1", "without reward": "v4", "not kept": "v2"}
_PHASES = {"sample": "c0", "train": "c1", "eval": "c2"}
_TIMES = {"sampling": "sample_seconds", "waiting": "wait_seconds", "training": "train_seconds"}
_TIME_COLOURS = {"sampling": "c0", "waiting": "r2", "training": "c1", "other": "v2"}
_BARS, _EVALUATIONS, _ROWS = 40, 60, 40  # most bars and evaluations of a chart, most rows of a table


# ---- held-out scores


def score_charts(runs: Sequence[RunFolder], family: str) -> list[Chart]:
    """Held-out scores of the runs of RAFT or of GRPO; of GRPO beside other runs also by answers sampled."""
    several, x_title = len(runs) > 1, "step" if family == GRPO else "cycle"
    greedy, by_answers, drawn = [], [], []
    for colour, run in enumerate(runs):
        if not (shown := _few(held_out(run), _EVALUATIONS)):
            continue
        passed = 100 * np.array([each.scores["pass"] for each in shown])
        sampled = np.array([each.answers for each in shown], dtype=np.float64)
        by_answers.append(Line(run.name, sampled, passed[:, 0], colour))
        if run.family != family:
            continue
        at = np.array([each.number for each in shown], dtype=np.float64)
        greedy.append(Line(run.name, at, passed[:, 0], colour, ends=passed[:, 1:].T))
        for i, k in enumerate(sorted({k for each in shown for k in each.scores["at"]})):
            label = f"{run.name}, pass@{k}" if several else f"pass@{k}"
            some = [(each.number, *each.scores["at"][k]) for each in shown if k in each.scores["at"]]
            x, y, low, high = np.array(some, dtype=np.float64).T
            ends = 100 * np.stack([low, high])
            drawn.append(Line(label, x, 100 * y, colour if several else i, i if several else 0, ends=ends))
    charts = []
    if greedy:
        charts.append(line_chart("Held-out pass@1", "%, greedy, with 95 % intervals", greedy, x_title=x_title))
    if greedy and several and family == GRPO:
        charts.append(line_chart("Held-out pass@1 by answers", "%, greedy", by_answers, x_title="answers sampled"))
    if drawn:
        charts.append(line_chart("Held-out pass@k", "%, drawn answers", drawn, x_title=x_title, legend=True))
    return charts


def _few(evaluations: Sequence[HeldOut], most: int) -> list[HeldOut]:
    """At most ``most`` evaluations: the best, the first, the last, and others at equal distances."""
    if len(evaluations) <= most:
        return list(evaluations)
    kept = {int(i) for i in np.linspace(0, len(evaluations) - 1, most - 1)}
    kept.add(max(range(len(evaluations)), key=lambda i: evaluations[i].scores["pass"][0]))
    return [evaluations[i] for i in sorted(kept)]


# ---- RAFT


def cycle_charts(runs: Sequence[RunFolder]) -> list[Chart]:
    """Charts by cycle of the RAFT runs among ``runs``."""
    several = len(runs) > 1
    lengths, entropies, speeds, drawn = [], [], [], []
    for colour, run in enumerate(runs):
        if not run.cycles:
            continue
        sampled = [cycle for cycle in run.cycles if cycle.lengths[0].any()]
        if sampled:
            low, median, high = np.array([np.quantile(c.lengths[0], [0.05, 0.5, 0.95]) for c in sampled]).T
            x = np.array([float(cycle.number) for cycle in sampled])
            lengths.append(Line(run.name, x, median, colour, ends=np.stack([low, high])))
        at = np.array([cycle.number for cycle in run.cycles], dtype=np.float64)
        entropy = np.array([math.nan if (e := c.lengths[1]) is None else e for c in run.cycles])
        speed = np.array([number(c.phases.get("sample", {}).get("tokens_per_second")) for c in run.cycles])
        entropies += [Line(run.name, at, entropy, colour)] if np.isfinite(entropy).any() else []
        speeds += [Line(run.name, at, speed, colour)] if np.isfinite(speed).any() else []
        drawn += _cycle_bars(run, f", {run.name}" if several else "")
    for title, unit, lines in (
        ("Answer length", "tokens, median, with 5 and 95 %", lengths),
        ("Entropy", "nats per token", entropies),
        ("Sampling speed", "tokens per second", speeds),
    ):
        drawn += [line_chart(title, unit, lines, x_title="cycle", zero=True)] if lines else []
    return drawn


def _cycle_bars(run: RunFolder, suffix: str) -> list[Chart]:
    longest = max((sum(cycle.seconds.values()) for cycle in run.cycles), default=0.0)
    size, unit = time_unit(longest)
    times = [{phase: seconds / size for phase, seconds in cycle.seconds.items()} for cycle in run.cycles]
    kinds = (
        ("Verdicts", "% of answers", [cycle.verdicts() for cycle in run.cycles], VERDICTS),
        ("Rewards", "% of answers", [_rewards(cycle) for cycle in run.cycles], _REWARDS),
        ("Answers kept", "answers", [_fates(cycle) for cycle in run.cycles], _RULES),
        ("Time", unit, times, _PHASES),
    )
    drawn = []
    for title, unit, counts, colours in kinds:
        kept = [i for i, parts in enumerate(counts) if sum(parts.values()) > 0]
        names = [*colours, *sorted({name for parts in counts for name in parts} - colours.keys())]
        sizes = {name: np.array([float(counts[i].get(name, 0)) for i in kept]) for name in names}
        x = np.array([float(run.cycles[i].number) for i in kept])
        if kept:
            drawn.append(bar_chart(title + suffix, unit, x, sizes, dict.fromkeys(names, "v2") | colours, "cycle"))
    return drawn


def _rewards(cycle: CycleFolder) -> Mapping[str, float]:
    """How many of a cycle's answers have a reward in each range."""
    values = cycle.rewards
    ranges = (values >= 1, (values >= 0.5) & (values < 1), (values > 0) & (values < 0.5), values <= 0, np.isnan(values))
    return {name: float(inside.sum()) for name, inside in zip(_REWARDS, ranges, strict=True)}


def _fates(cycle: CycleFolder) -> Mapping[str, float]:
    """How many of a cycle's answers were kept, and how many each rule of the filter dropped."""
    counts = cycle.row.get("filter")
    if isinstance(counts, dict):
        named = {str(rule).replace("_", " "): number(count) for rule, count in counts.items()}
        return {rule: count for rule, count in named.items() if 0 < count < 1e12 and rule in _RULES}
    if cycle.kept is None:
        return {}
    return {"kept": cycle.kept, "not kept": max(0, len(cycle.lengths[0]) - cycle.kept)}


CYCLE_COLUMNS = ("cycle", "state", "answers", "right", "kept", "steps", "loss", "pass@1", "95 % interval", *PHASES)


def cycle_table(run: RunFolder) -> list[list[str]]:
    """Rows of text under :data:`CYCLE_COLUMNS`."""
    rows = []
    for cycle in run.cycles:
        losses, counts = cycle.steps["loss"], cycle.verdicts()
        rows.append(
            [
                str(cycle.number),
                cycle.state,
                f"{len(cycle.lengths[0]):,}" if len(cycle.lengths[0]) else "",
                f"{100 * counts['CORRECT'] / counts.total():.1f} %" if counts else "",
                f"{cycle.kept:,}" if cycle.kept is not None else "",
                f"{len(cycle.steps):,}" if len(cycle.steps) else "",
                f"{short_number(losses[0])} → {short_number(losses[-1])}" if len(losses) else "",
                *(_score_cells(cycle.scores["pass"]) if cycle.scores else ("", "")),
                *(_seconds(cycle.seconds.get(phase, math.nan)) for phase in PHASES),
            ]
        )
    return rows


def _score_cells(interval: Sequence[float]) -> tuple[str, str]:
    value, low, high = (100 * v for v in interval)
    return f"{value:.1f} %", f"{low:.1f} – {high:.1f}"


def _seconds(value: float) -> str:
    return "" if not math.isfinite(value) else f"{value:,.0f} s" if value >= 10 else f"{value:.1f} s"


# ---- GRPO


def step_bars(run: RunFolder, suffix: str) -> list[Chart]:
    """Verdicts and times of a GRPO run, each bar a step or the mean of a stretch of steps."""
    asked, counts = run.answers.verdicts.counts()
    colours = dict.fromkeys(sorted(counts), "v2") | VERDICTS
    verdicts = {name: counts[name].astype(np.float64) for name in colours if name in counts}
    seconds = {name: np.clip(np.nan_to_num(run.steps[key], posinf=0.0), 0, None) for name, key in _TIMES.items()}
    in_all = np.nan_to_num(run.steps["seconds"], posinf=0.0)
    seconds["other"] = np.clip(in_all - sum(seconds.values()), 0, None)
    drawn = []
    for title, unit, steps, parts, colour in (
        ("Verdicts", "% of answers", asked, verdicts, colours),
        ("Time of a step", "seconds", run.steps["step"], seconds, _TIME_COLOURS),
    ):
        if not len(steps) or not sum(values.sum() for values in parts.values()) > 0:
            continue
        first, last = int(steps.min()), int(steps.max())
        width = math.ceil((last - first + 1) / _BARS)
        stretch = (steps - first).astype(int) // width
        known = np.unique(stretch)
        x = first + known * width + (width - 1) / 2
        means = {name: np.array([values[stretch == i].mean() for i in known]) for name, values in parts.items()}
        unit += f", means of {width} steps" if width > 1 else ""
        drawn.append(bar_chart(title + suffix, unit, x, means, colour, "step"))
    return drawn


STEP_COLUMNS = ("step", "answers", "right", "pass@1", "95 % interval", "pass@k", "cut off", "time")


def step_table(run: RunFolder) -> list[list[str]]:
    """The evaluations as rows of text under :data:`STEP_COLUMNS`."""
    rows = []
    lines = {each.step: each for each in run.evaluations}
    for each in _few(held_out(run), _ROWS):
        line, drawn = lines[each.number], each.scores["at"]
        rows.append(
            [
                str(each.number),
                f"{each.answers:,}",
                f"{each.scores['correct']:,} of {each.scores['prompts']:,}",
                *_score_cells(each.scores["pass"]),
                ", ".join(f"{100 * drawn[k][0]:.1f} % at {k}" for k in sorted(drawn)),
                short_number(line.truncated) if math.isfinite(line.truncated) else "",
                _seconds(line.seconds),
            ]
        )
    return rows
