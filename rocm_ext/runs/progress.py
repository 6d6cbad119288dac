"""How far a run has come, read from the ends of its files."""

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TypeGuard

from rocm_ext.base.files import json_object
from rocm_ext.base.types import Json
from rocm_ext.runs.folder import begun_cycles, learns_from_samples, steps_finished
from rocm_ext.runs.records import MOST, number, parse_scores, read_json, read_yaml
from rocm_ext.runs.tails import Record

_TAIL = 1 << 16  # bytes read from the end of a metrics.jsonl: some hundred lines
_RECENT = 20  # steps whose times give the speed of a GRPO run
_SHOWN = ("step", "epoch", "loss", "margin", "accuracy", "tokens_per_second", "val_loss", "val_margin", "val_accuracy")

LatestValues = dict[str, float | str]  # values by name, see :func:`progress`


def progress(out: Path) -> LatestValues:
    """The newest values that the run in ``out`` wrote, without those that are missing or half written.

    Returns:
        ``step``, ``epoch``, ``loss``, ``tokens_per_second`` and ``val_loss`` of the training, of DPO also margin and
        accuracy, and ``held_out``; for runs that learn from sampled answers, see :func:`_sampled_progress`;
        ``seconds_ago``, since the last write; ``finished``; or ``problem``, why there is no run to show.
    """
    if not out.is_dir():
        return {"problem": f"{out} {'is a file' if out.exists() else 'does not exist'}"}
    metrics, samples, verdicts = (out / f"{name}.jsonl" for name in ("metrics", "samples", "verdicts"))
    summary = read_json(out / "summary.json", [])  # a file may be unreadable while the run writes it
    config = read_yaml(out / "config.yaml", [])
    lines = _last_lines(metrics)
    cycles = begun_cycles(out)
    written = max(_stat(path)[0] for path in (metrics, samples, verdicts))
    values: LatestValues
    if cycles or learns_from_samples(config, lines, samples.exists()):
        steps = [line for line in lines if "reward" in line and _is_number(line.get("step"))]
        values = _sampled_progress(lines, steps, config)
        if cycles or "cycles" in config:
            updates = out / f"cycle_{max(cycles, default=0)}" / "metrics.jsonl"
            values = _cycle_progress(values, updates, verdicts)
            written = max(written, _stat(updates)[0])
        elif phase := _step_phase(out, config):
            values["phase"] = phase
        finished = steps_finished(summary, config, number(steps[-1]["step"]) if steps else 0.0)
    else:
        answered = max(_stat(samples)[0], _stat(verdicts)[0])
        values = {"phase": "evaluating"} if answered > _stat(metrics)[0] else {}
        values |= _numbers(lines) | _held_out(lines)
        finished = number(summary.get("steps")) == values.get("step")
    if written:
        values |= {"seconds_ago": round(max(0.0, time.time() - written), 1), "finished": bool(finished)}
        if finished:
            values.pop("phase", None)
    elif not cycles and not (out / "config.yaml").exists():
        values["problem"] = f"no run in {out}"
    return values


def position(out: Path) -> tuple[float, float, int]:
    """How far the run in ``out`` has come: its cycle, its step, and the bytes of its answers and verdicts."""
    newest = progress(out)
    size = sum(_stat(out / f"{name}.jsonl")[1] for name in ("samples", "verdicts"))
    return number(newest.get("cycle", 0)), number(newest.get("step", 0)), size


def slowest_step(out: Path) -> float:
    """Seconds of the slowest of the last steps, in RAFT of the newest cycle's training; 0 before the first."""
    paths = [*out.glob("cycle_*/metrics.jsonl")] or [out / "metrics.jsonl"]
    path = max(paths, key=lambda path: _stat(path)[0])
    steps = [line for line in _last_lines(path) if "loss" in line and "phase" not in line][-_RECENT:]
    return max(_times(steps), default=0.0)


def _sampled_progress(lines: Sequence[Record], steps: Sequence[Record], config: Json) -> LatestValues:
    """The newest values of a run that learns from sampled answers.

    Args:
        lines: lines of its ``metrics.jsonl``.
        steps: the lines of steps among these.
        config: content of ``config.yaml``.

    Returns:
        ``step`` and ``steps`` of the run; ``reward``, ``flat`` (share of groups) and ``entropy`` of the last step;
        ``held_out``, the last score; ``seconds``, the median of the last steps; ``seconds_left``. :func:`progress` adds
        ``phase``: ``sampling``, ``training`` or ``evaluating``.
    """
    evaluations = [line for line in lines if isinstance(line.get("eval"), dict)]
    values: LatestValues = {}
    values |= _numbers(steps[-1:], ("step", "reward", "flat", "entropy"))
    planned = number(config.get("cycles", config.get("steps")))
    if 0 < planned < 1e9:
        values["steps"] = planned
    values |= _held_out(evaluations)
    if times := _times(steps[-_RECENT:]):
        step = number(values["step"])
        every = number(config.get("eval_every_n_cycles", config.get("eval_every_n_steps")))
        values["seconds"] = seconds = median(times)
        if planned > step:
            left = (planned - step) * seconds
            if (of_evaluations := _times(evaluations)) and every >= 1:
                to_come = planned // every - step // every + (planned % every > 0)
                left += of_evaluations[-1] * to_come
            values["seconds_left"] = left
    return values


def _step_phase(out: Path, config: Json) -> str:
    """The phase of a run of GRPO or distillation, by its newest verdicts; empty if they do not show it."""
    (written, size), (trained, _) = _stat(out / "verdicts.jsonl"), _stat(out / "metrics.jsonl")
    if written < trained:
        return ""
    asked = number(config.get("prompts_per_step")) * number(config.get("samples_per_prompt"))
    tail = int(400 * asked) if 0 < asked < 10_000 else _TAIL
    verdicts = _last_lines(out / "verdicts.jsonl", tail)
    if not verdicts:
        return ""
    if verdicts[-1].get("phase") == "eval":
        return "evaluating"
    judged = sum(line.get("step") == verdicts[-1].get("step") for line in verdicts)
    if judged >= asked:
        return "training"
    return "sampling" if judged < len(verdicts) or size <= tail else ""


def _cycle_progress(values: LatestValues, updates: Path, verdicts: Path) -> LatestValues:
    """The newest values of a run of RAFT, whose steps are cycles.

    Args:
        values: result of :func:`_sampled_progress`.
        updates: file of the updates of the newest cycle that has kept answers.
        verdicts: the run's verdicts.

    Returns:
        The values, with ``cycle`` and ``cycles`` instead of the steps; ``step``, ``epoch``, ``loss`` and
        ``tokens_per_second`` of the newest training; and ``phase``.
    """
    of_run = {"step": "cycle", "steps": "cycles"}
    named: LatestValues = {of_run.get(key, key): value for key, value in values.items()}
    folder = updates.parent
    trained = int(folder.name.removeprefix("cycle_"))
    newest = (_last_lines(verdicts) or [{}])[-1]
    cycles = (named.get("cycle"), trained, newest.get("step"))
    named["cycle"] = int(max(cycle for cycle in cycles if _is_number(cycle)))
    times = {"training": _stat(updates)[0], "": _stat(folder.with_name("metrics.jsonl"))[0]}
    times["evaluating" if newest.get("phase") == "eval" else "sampling"] = _stat(verdicts)[0]
    if folder.exists() and named["cycle"] == trained:
        times["training"] = max(times["training"], _stat(folder / "kept.jsonl")[0])
    phase = max(times, key=lambda name: times[name])
    if phase:
        named["phase"] = phase
    return named | _numbers(_last_lines(updates))


def _numbers(lines: Iterable[Record], keys: Iterable[str] = _SHOWN) -> LatestValues:
    """The newest numbers in lines of a ``metrics.jsonl``, by key."""
    return {key: value for line in lines for key in keys if _is_number(value := line.get(key))}


def _held_out(lines: Iterable[Record]) -> LatestValues:
    """The last held-out score in lines of a ``metrics.jsonl``."""
    parsed = [scores for line in lines if (scores := parse_scores(line.get("eval"))) is not None]
    return {"held_out": parsed[-1].passed[0]} if parsed else {}


def _times(lines: Iterable[Record]) -> list[float]:
    return [seconds for line in lines if 0 <= (seconds := number(line.get("seconds"))) < MOST]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _last_lines(path: Path, size: int = _TAIL) -> list[Record]:
    """The newest lines of a file of JSON lines, without those that begin before the tail or are being written."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            tail = file.read()
    except OSError:
        return []
    return [row for line in tail.splitlines() if (row := json_object(line)) is not None]


def _stat(path: Path) -> tuple[float, int]:
    """When a file was written, and its bytes; zeros for a missing one."""
    try:
        stat = path.stat()
    except OSError:
        return 0.0, 0
    return stat.st_mtime, stat.st_size
