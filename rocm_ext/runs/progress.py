"""How far a run has come, read from the ends of its files."""

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TypeGuard

from rocm_ext.base.files import json_object
from rocm_ext.base.types import Json
from rocm_ext.runs.folder import (
    begun_cycles,
    learns_from_samples,
    planned_steps,
    steps_finished,
)
from rocm_ext.runs.records import MOST, number, of_sets, parse_scores, read_json, read_yaml
from rocm_ext.runs.tails import Record

_TAIL = 1 << 16  # bytes read from the end of a metrics.jsonl: some hundred lines
_RECENT = 20  # steps whose times give the speed of a GRPO run
_SHOWN = (
    "step",
    "epoch",
    "loss",
    "margin",
    "accuracy",
    "tokens_per_second",
    "val_loss",
    "val_margin",
    "val_accuracy",
)

LatestValues = dict[str, float | str]  # values by name, see :func:`progress`


def progress(out: Path) -> LatestValues:
    """The newest values that the run in ``out`` wrote, without those that are missing or half written.

    Returns:
        ``step``, ``epoch``, ``loss``, ``tokens_per_second`` and ``val_loss`` of the training, of DPO also margin and
        accuracy, and ``held_out``, the last two perhaps by data set; for runs that learn from sampled answers, see
        :func:`_sampled_progress`; ``seconds_ago``, since the last write; ``finished``; or ``problem``, why there is no
        run to show.
    """
    if not out.is_dir():
        return {"problem": f"{out} is a file" if out.exists() else f"{out} does not exist"}
    # a file may be unreadable while the run writes it
    summary = read_json(out / "summary.json", [])
    config = read_yaml(out / "config.yaml", [])
    lines = _last_lines(out / "metrics.jsonl")
    cycles = begun_cycles(out)
    updates = out / f"cycle_{max(cycles, default=0)}" / "metrics.jsonl"  # RAFT's newest ones
    trained, _ = written_and_size(out / "metrics.jsonl")
    sampled, _ = written_and_size(out / "samples.jsonl")
    judged, _ = written_and_size(out / "verdicts.jsonl")
    written = max(trained, sampled, judged)
    values: LatestValues = {}
    if cycles or learns_from_samples(config, lines, (out / "samples.jsonl").exists()):
        values = _sampled_progress(lines, config)
        finished = steps_finished(summary, config, number(values.get("step", 0.0)))
        if cycles or "cycles" in config:
            values = _cycle_progress(values, updates)
            written = max(written, written_and_size(updates)[0])
        else:
            values |= _step_phase(out, config)
    else:
        if max(sampled, judged) > trained:
            values["phase"] = "evaluating"
        values |= _numbers(lines, dict.fromkeys((*_SHOWN, *of_sets(lines)))) | _held_out(lines)
        finished = number(summary.get("steps")) == values.get("step")
    if written:
        ago = max(0.0, time.time() - written)
        values["seconds_ago"] = round(ago, 1)
        values["finished"] = bool(finished)
        if finished:
            values.pop("phase", None)
    elif not cycles and not (out / "config.yaml").exists():
        values["problem"] = f"no run in {out}"
    return values


def position(out: Path) -> tuple[float, float, int]:
    """How far the run in ``out`` has come: its cycle, its step, and the bytes of its answers and verdicts."""
    newest = progress(out)
    _, samples = written_and_size(out / "samples.jsonl")
    _, verdicts = written_and_size(out / "verdicts.jsonl")
    cycle = number(newest.get("cycle", 0))
    step = number(newest.get("step", 0))
    return cycle, step, samples + verdicts


def slowest_step(out: Path) -> float:
    """Seconds of the slowest of the last steps, in RAFT of the newest cycle's training; 0 before the first."""
    paths = list(out.glob("cycle_*/metrics.jsonl")) or [out / "metrics.jsonl"]
    lines = _last_lines(max(paths, key=written_and_size))
    steps = [line for line in lines if "loss" in line and "phase" not in line]
    return max(_times(steps[-_RECENT:]), default=0.0)


def _sampled_progress(lines: Sequence[Record], config: Json) -> LatestValues:
    """The newest values of a run that learns from sampled answers.

    Args:
        lines: lines of its ``metrics.jsonl``.
        config: content of ``config.yaml``.

    Returns:
        ``step`` and ``steps`` of the run; ``reward``, ``flat`` (share of groups) and ``entropy`` of the last step;
        ``held_out``, the last score; ``seconds``, the median of the last steps; ``seconds_left``. :func:`progress` adds
        ``phase``: ``sampling``, ``training`` or ``evaluating``.
    """
    steps = [line for line in lines if "reward" in line and _is_number(line.get("step"))]
    evaluations = [line for line in lines if of_sets([line], "eval")]
    values = _numbers(steps[-1:], ("step", "reward", "flat", "entropy"))
    planned = planned_steps(config)
    if 0 < planned < 1e9:
        values["steps"] = planned
    values |= _held_out(evaluations)
    step_seconds = _times(steps[-_RECENT:])
    if not step_seconds:
        return values
    step = number(values["step"])
    seconds = median(step_seconds)
    values["seconds"] = seconds
    if planned > step:
        seconds_left = (planned - step) * seconds
        interval = number(config.get("eval_every_n_cycles", config.get("eval_every_n_steps")))
        evaluation_seconds = _times(evaluations)
        if evaluation_seconds and interval >= 1:
            evaluations_left = planned // interval - step // interval
            if planned % interval > 0:
                evaluations_left += 1  # after the last step
            seconds_left += evaluation_seconds[-1] * evaluations_left
        values["seconds_left"] = seconds_left
    return values


def _step_phase(out: Path, config: Json) -> LatestValues:
    """The phase of a run of GRPO or distillation, by its newest verdicts. Empty if they do not show it."""
    trained, _ = written_and_size(out / "metrics.jsonl")
    judged, size = written_and_size(out / "verdicts.jsonl")
    if judged < trained:
        return {}
    prompts = number(config.get("prompts_per_step"))
    answers = prompts * number(config.get("samples_per_prompt"))
    tail = int(400 * answers) if 0 < answers < 10_000 else _TAIL
    verdicts = _last_lines(out / "verdicts.jsonl", tail)
    if not verdicts:
        return {}
    newest = verdicts[-1]
    if newest.get("phase") == "eval":
        return {"phase": "evaluating"}
    count = sum(line.get("step") == newest.get("step") for line in verdicts)
    if count >= answers:
        return {"phase": "training"}
    if count < len(verdicts) or size <= tail:  # the tail has all verdicts of the step
        return {"phase": "sampling"}
    return {}


def _cycle_progress(values: LatestValues, updates: Path) -> LatestValues:
    """The newest values of a run of RAFT, whose steps are cycles.

    Args:
        values: result of :func:`_sampled_progress`.
        updates: file of the updates of the newest cycle that has kept answers.

    Returns:
        The values, with ``cycle`` and ``cycles`` instead of the steps; ``step``, ``epoch``, ``loss`` and
        ``tokens_per_second`` of the newest training; and ``phase``.
    """
    folder = updates.parent
    out = folder.parent
    trained = int(folder.name.removeprefix("cycle_"))
    verdicts = _last_lines(out / "verdicts.jsonl")
    newest = verdicts[-1] if verdicts else {}
    names = {"step": "cycle", "steps": "cycles"}
    named: LatestValues = {}
    for key, value in values.items():
        named[names.get(key, key)] = value
    cycles = [named.get("cycle"), trained, newest.get("step")]
    cycle = int(max(filter(_is_number, cycles)))
    named["cycle"] = cycle
    training, _ = written_and_size(updates)
    if cycle == trained:
        kept, _ = written_and_size(folder / "kept.jsonl")
        training = max(training, kept)
    ended, _ = written_and_size(out / "metrics.jsonl")
    judged, _ = written_and_size(out / "verdicts.jsonl")
    if judged > max(training, ended):
        named["phase"] = "evaluating" if newest.get("phase") == "eval" else "sampling"
    elif training >= ended:
        named["phase"] = "training"
    return named | _numbers(_last_lines(updates))


def _numbers(lines: Iterable[Record], keys: Iterable[str] = _SHOWN) -> LatestValues:
    """The newest numbers in lines of a ``metrics.jsonl``, by key."""
    values: LatestValues = {}
    for line in lines:
        for key in keys:
            value = line.get(key)
            if _is_number(value):
                values[key] = value
    return values


def _held_out(lines: Sequence[Record]) -> LatestValues:
    """The last held-out score in lines of a ``metrics.jsonl``, perhaps by data set."""
    values: LatestValues = {}
    for line in lines:
        for column in of_sets([line], "eval"):
            scores = parse_scores(line[column])
            if scores is not None:
                values[column.replace("eval", "held_out", 1)] = scores.passed[0]
    return values


def _times(lines: Iterable[Record]) -> list[float]:
    times = [number(line.get("seconds")) for line in lines]
    return [seconds for seconds in times if 0 <= seconds < MOST]


def _is_number(value: object) -> TypeGuard[float]:
    return abs(number(value)) < 1e300  # and not NaN


def _last_lines(path: Path, size: int = _TAIL) -> list[Record]:
    """The newest lines of a file of JSON lines, without those that begin before the tail or are being written."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - size))
            tail = file.read()
    except OSError:
        return []
    lines = [json_object(line) for line in tail.splitlines()]
    return [line for line in lines if line is not None]


def written_and_size(path: Path) -> tuple[float, int]:
    """When a file was written, in seconds since 1970, and its bytes; zeros for a missing one."""
    try:
        stat = path.stat()
    except OSError:
        return 0.0, 0
    return stat.st_mtime, stat.st_size
