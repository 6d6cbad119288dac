"""Charts and a table of a RAFT run's cycles."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from markupsafe import Markup

from rocm_ext.report.charts import Spans, span_chart, stacked_chart
from rocm_ext.report.curves import short_number, time_unit
from rocm_ext.runs.cycles import PHASES, CycleFolder
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.records import number

VERDICTS = ("CORRECT", "WRONG", "UNPARSED", "TIMEOUT", "ERROR")
_VERDICT_STYLES = {verdict: f"v{i}" for i, verdict in enumerate(VERDICTS)}
_REWARD_STYLES = {"1": "r4", "0.5 to 1": "r3", "0 to 0.5": "r2", "0": "r1", "none": "v4"}
_PHASE_STYLES = {"sample": "c0", "train": "c1", "eval": "c2"}
_RULE_STYLES = {
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


def charts(runs: Sequence[RunFolder]) -> list[Markup]:
    """Charts by cycle of the RAFT runs among ``runs``."""
    cycles = [(colour, run) for colour, run in enumerate(runs) if run.cycles]
    raft, several = [run for _, run in cycles], len(runs) > 1
    drawn = [
        _passes(cycles),
        _passes_at_k(cycles, several),
        *(_bars("Verdicts", "% of answers", run, several, CycleFolder.verdicts, _styles(run)) for run in raft),
        *(_bars("Rewards", "% of answers", run, several, rewards, _REWARD_STYLES) for run in raft),
        _spans("Answer length", "tokens", cycles, _length_box),
        _spans("Entropy", "nats per token", cycles, _entropy),
        *(_bars("Answers kept", "answers", run, several, fates, _RULE_STYLES) for run in raft),
        *(_times(run, several) for run in raft),
        _spans("Sampling speed", "tokens per second", cycles, _sampling_speed),
    ]
    return [each for each in drawn if each is not None]


_Colours = Sequence[tuple[int, RunFolder]]
_Read = Callable[[CycleFolder], Sequence[float] | None]


def _passes(cycles: _Colours) -> Markup | None:
    def read(cycle: CycleFolder) -> Sequence[float] | None:
        return None if cycle.scores is None else [100 * value for value in cycle.scores["pass"]]

    return _spans("Held-out pass@1", "%, greedy, with 95 % intervals", cycles, read, zero=False)


def _passes_at_k(cycles: _Colours, several: bool) -> Markup | None:
    found: list[Spans] = []
    for colour, run in cycles:
        shares = {cycle.number: cycle.scores["at"] for cycle in run.cycles if cycle.scores}
        for i, k in enumerate(sorted({k for at in shares.values() for k in at})):
            label = f"{run.name}, pass@{k}" if several else f"pass@{k}"
            at = {number: [100 * value for value in at[k]] for number, at in shares.items() if k in at}
            found.append(Spans(label, at, colour if several else i, i if several else 0))
    return span_chart("Held-out pass@k", "%, drawn answers", found, legend=True) if found else None


def _spans(title: str, unit: str, cycles: _Colours, read: _Read, zero: bool = True) -> Markup | None:
    found = []
    for colour, run in cycles:
        at = {cycle.number: values for cycle in run.cycles if (values := read(cycle)) is not None}
        if at:
            found.append(Spans(run.name, at, colour))
    return span_chart(title, unit, found, zero=zero) if found else None


def _bars(
    title: str,
    unit: str,
    run: RunFolder,
    several: bool,
    read: Callable[[CycleFolder], Mapping[str, float]],
    styles: Mapping[str, str],
) -> Markup | None:
    bars: dict[float, Mapping[str, float]] = {
        cycle.number: parts for cycle in run.cycles if sum((parts := read(cycle)).values()) > 0
    }
    title = f"{title}, {run.name}" if several else title
    return stacked_chart(title, unit, bars, styles, share=unit.startswith("%")) if bars else None


def _times(run: RunFolder, several: bool) -> Markup | None:
    longest = max((sum(cycle.seconds.values()) for cycle in run.cycles), default=0.0)
    size, unit = time_unit(longest)

    def read(cycle: CycleFolder) -> dict[str, float]:
        return {phase: seconds / size for phase, seconds in cycle.seconds.items()}

    return _bars("Time", unit, run, several, read, _PHASE_STYLES)


def _styles(run: RunFolder) -> dict[str, str]:
    return verdict_styles(verdict for cycle in run.cycles for verdict in cycle.verdicts())


def verdict_styles(found: Iterable[str]) -> dict[str, str]:
    """Styles of the known verdicts and of others that were found in files."""
    others = sorted(set(found) - set(VERDICTS))
    return {**_VERDICT_STYLES, **dict.fromkeys(others, "v2")}


def rewards(cycle: CycleFolder) -> dict[str, float]:
    """How many of a cycle's answers have a reward in each range."""
    values = np.array([judged.reward for judged in cycle.judged.values()])
    return {
        "1": float((values >= 1).sum()),
        "0.5 to 1": float(((values >= 0.5) & (values < 1)).sum()),
        "0 to 0.5": float(((values > 0) & (values < 0.5)).sum()),
        "0": float((values <= 0).sum()),
        "none": float(np.isnan(values).sum()),
    }


def fates(cycle: CycleFolder) -> dict[str, float]:
    """How many of a cycle's answers were kept, and how many each rule of the filter dropped."""
    counts = cycle.row.get("filter")
    if isinstance(counts, dict):
        named = {str(rule).replace("_", " "): number(count) for rule, count in counts.items()}
        return {rule: count for rule, count in named.items() if 0 < count < 1e12 and rule in _RULE_STYLES}
    if cycle.kept is None:
        return {}
    return {"kept": cycle.kept, "not kept": max(0, len(cycle.answers.lengths) - cycle.kept)}


def _length_box(cycle: CycleFolder) -> Sequence[float] | None:
    lengths = cycle.answers.lengths
    return np.quantile(lengths, [0.5, 0.05, 0.25, 0.75, 0.95]).tolist() if lengths.any() else None


def _entropy(cycle: CycleFolder) -> Sequence[float] | None:
    return None if cycle.answers.entropy is None else (cycle.answers.entropy,)


def _sampling_speed(cycle: CycleFolder) -> Sequence[float] | None:
    speed = number(cycle.phases.get("sample", {}).get("tokens_per_second"))
    return (speed,) if math.isfinite(speed) else None


COLUMNS = (
    "cycle",
    "state",
    "answers",
    "right",
    "kept",
    "steps",
    "loss",
    "pass@1",
    "95 % interval",
    *PHASES,
)


def table(run: RunFolder) -> list[list[str]]:
    """Rows of text under :data:`COLUMNS`."""
    rows = []
    for cycle in run.cycles:
        judged, losses = cycle.judged, cycle.steps["loss"]
        right = sum(each.verdict == "CORRECT" for each in judged.values())
        held = ["", ""]
        if cycle.scores is not None:
            value, low, high = (100 * v for v in cycle.scores["pass"])
            held = [f"{value:.1f} %", f"{low:.1f} – {high:.1f}"]
        rows.append(
            [
                str(cycle.number),
                cycle.state,
                f"{len(cycle.answers.lengths):,}" if len(cycle.answers.lengths) else "",
                f"{100 * right / len(judged):.1f} %" if judged else "",
                f"{cycle.kept:,}" if cycle.kept is not None else "",
                f"{len(cycle.steps):,}" if len(cycle.steps) else "",
                f"{short_number(losses[0])} → {short_number(losses[-1])}" if len(losses) else "",
                *held,
                *(time_text(cycle.seconds.get(phase)) for phase in PHASES),
            ]
        )
    return rows


def time_text(value: float | None) -> str:
    """Seconds as text; empty if they are unknown."""
    return "" if value is None else f"{value:,.0f} s" if value >= 10 else f"{value:.1f} s"
