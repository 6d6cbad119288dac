"""How far a run has come, read from its files."""

import os
import re
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from rocm_ext.base.files import json_object
from rocm_ext.runs.cycles import raft_finished
from rocm_ext.runs.records import MOST, is_rows, number, parse_scores, read_json, read_yaml
from rocm_ext.runs.steps import steps_finished

_TAIL = 1 << 16  # bytes read from the end of a metrics.jsonl: some hundred lines
_RECENT = 20  # steps that tell the speed of a GRPO run
_TOLD = ("step", "epoch", "loss", "margin", "accuracy", "tokens_per_second", "val_loss", "val_margin", "val_accuracy")


def progress(out: Path) -> dict[str, Any]:
    """The newest values that the run in ``out`` wrote, without those that are missing or half written.

    Returns:
        ``cycle`` and ``phase`` of a RAFT run; ``step``, ``epoch``, ``loss``, ``tokens_per_second`` and ``val_loss`` of
        the current or last training, of DPO also margin and accuracy; those of a GRPO run, see
        :func:`_policy_progress`; ``seconds_ago``, since the last write; ``finished``; or ``problem``, why there is no
        run to show.
    """
    if not out.is_dir():
        return {"problem": f"{out} {'is a file' if out.exists() else 'does not exist'}"}
    cycles = sorted((int(name[6:]), out / name) for name in _names(out) if re.fullmatch(r"cycle_\d{1,9}", name))
    told: dict[str, Any]
    lines = [] if cycles else _last_lines(out / "metrics.jsonl")
    policy = not cycles and (
        (out / "samples.jsonl").exists() or any({"reward", "eval"} & line.keys() for line in lines)
    )
    if policy:
        written = max(_written(out / name) for name in ("metrics.jsonl", "samples.jsonl", "verdicts.jsonl"))
        told = _policy_progress(out, lines)
    elif not cycles:
        written = _written(out / "metrics.jsonl")
        told = _last_values(lines)
    else:
        cycle, folder = cycles[-1]
        file = max((folder / "metrics.jsonl", out / "samples.jsonl", out / "verdicts.jsonl"), key=_written)
        written, told = _written(file), {"cycle": cycle}
        if written:
            told["phase"] = "training" if file.parent == folder else _answering(file)
        told |= _last_values(_last_lines(folder / "metrics.jsonl"))
        if _skipped(folder):
            told["phase"] = "skipped"
    if written:
        told["seconds_ago"] = round(max(0.0, time.time() - written), 1)
        told["finished"] = _policy_finished(out, told) if policy else _finished(out, cycles, told)
    elif not cycles and not (out / "config.yaml").exists():
        told["problem"] = f"no run in {out}"
    return told


def position(out: Path) -> tuple[float, float, int]:
    """How far the run in ``out`` has come: its cycle, its step, and the bytes of its answers and verdicts."""
    newest = progress(out)
    return (
        newest.get("cycle", 0),
        newest.get("step", 0),
        sum(_size(out / f"{n}.jsonl") for n in ("samples", "verdicts")),
    )


def slowest_step(out: Path) -> float:
    """Seconds of the slowest of the last steps; 0 before the first. A cycle of RAFT has steps of its training."""
    path = max([out / "metrics.jsonl", *out.glob("cycle_*/metrics.jsonl")], key=_written)
    steps = [line for line in _last_lines(path) if "loss" in line and "phase" not in line][-_RECENT:]
    return max((seconds for line in steps if 0 <= (seconds := number(line.get("seconds"))) < MOST), default=0.0)


def _answering(path: Path) -> str:
    """What the newest line of a RAFT run's answers or verdicts is of: ``sampling`` or ``evaluating``."""
    lines = _last_lines(path)
    return "evaluating" if lines and lines[-1].get("phase") == "eval" else "sampling"


def _finished(out: Path, cycles: list[tuple[int, Path]], told: dict[str, Any]) -> bool:
    # not from the files' times, which copying may change
    unreadable: list[str] = []  # not shown: a file may be unreadable while the run writes it
    summary = read_json(out / "summary.json", unreadable)
    if not cycles:
        return number(summary.get("steps")) == told.get("step")
    last, folder = cycles[-1]
    listed = summary.get("cycles")
    complete = (folder / "eval.json").exists() or (
        is_rows(listed) and any(last and row.get("cycle") == last for row in listed)
    )
    return complete and raft_finished(out, read_yaml(out / "config.yaml", unreadable), last, _skipped(folder))


def _policy_progress(out: Path, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The newest values of a GRPO run.

    Returns:
        ``phase``: ``sampling``, ``training`` or ``evaluating``; ``step`` and ``steps``, of the whole run; ``reward``,
        ``flat`` (share of groups) and ``entropy`` of the last step; ``held_out``, the last score; ``seconds``, the
        median of the last steps; ``seconds_left``.
    """
    config = _config(out / "config.yaml", _written(out / "config.yaml"))
    steps = [line for line in lines if "reward" in line and _is_number(line.get("step"))]
    scores = [parsed for line in lines if (parsed := _scores(line)) is not None]
    told: dict[str, Any] = {}
    if phase := _phase(out, config):
        told["phase"] = phase
    if steps:
        told["step"] = steps[-1]["step"]
    if 0 < (planned := number(config.get("steps"))) < 1e9:
        told["steps"] = planned
    told |= {key: steps[-1][key] for key in ("reward", "flat", "entropy") if steps and _is_number(steps[-1].get(key))}
    if scores:
        told["held_out"] = scores[-1]["pass"][0]
    times = [seconds for line in steps[-_RECENT:] if 0 <= (seconds := number(line.get("seconds"))) < MOST]
    if times:
        told["seconds"] = median(times)
        if planned > told["step"]:
            told["seconds_left"] = (planned - told["step"]) * told["seconds"] + _evaluating(lines, config, told["step"])
    return told


def _phase(out: Path, config: Mapping[str, Any]) -> str:
    """What a GRPO run does, by its newest verdicts; empty if they do not tell."""
    if _written(out / "verdicts.jsonl") < _written(out / "metrics.jsonl"):
        return ""
    asked = number(config.get("prompts_per_step")) * number(config.get("samples_per_prompt"))
    size = int(400 * asked) if 0 < asked < 10_000 else _TAIL
    verdicts = _last_lines(out / "verdicts.jsonl", size)
    if not verdicts:
        return ""
    if verdicts[-1].get("phase") == "eval":
        return "evaluating"
    there = sum(line.get("step") == verdicts[-1].get("step") for line in verdicts)
    if there >= asked:
        return "training"
    return "sampling" if there < len(verdicts) or _size(out / "verdicts.jsonl") <= size else ""


def _evaluating(lines: list[dict[str, Any]], config: Mapping[str, Any], step: float) -> float:
    """Seconds that the evaluations after ``step`` will take."""
    times = [seconds for line in lines if "eval" in line and 0 <= (seconds := number(line.get("seconds"))) < MOST]
    planned, every = number(config.get("steps")), number(config.get("eval_every_n_steps"))
    if not times or not every >= 1:
        return 0.0
    return times[-1] * (planned // every - step // every + (planned % every > 0))


def _scores(line: Mapping[str, Any]) -> dict[str, Any] | None:
    return parse_scores(read) if isinstance(read := line.get("eval"), dict) else None


@lru_cache(maxsize=4)
def _config(path: Path, written: float) -> dict[str, Any]:
    """The content of a ``config.yaml`` of this time; reading YAML is slow."""
    return read_yaml(path, [])


def _policy_finished(out: Path, told: Mapping[str, Any]) -> bool:
    config = _config(out / "config.yaml", _written(out / "config.yaml"))
    return steps_finished(read_json(out / "summary.json", []), config, told.get("step", 0))


def _skipped(folder: Path) -> bool:
    try:
        return (folder / "kept.jsonl").stat().st_size == 0
    except OSError:
        return False


def _last_values(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The newest of each value in lines of a ``metrics.jsonl``."""
    values: dict[str, Any] = {}
    for row in lines:
        values |= {key: row[key] for key in _TOLD if _is_number(row.get(key))}
    return values


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def _last_lines(path: Path, size: int = _TAIL) -> list[dict[str, Any]]:
    """The newest lines of a file of JSON lines, without those that begin before the tail or are being written."""
    return [row for line in _tail(path, size).splitlines() if (row := json_object(line)) is not None]


def _tail(path: Path, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read()
    except OSError:
        return b""


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
