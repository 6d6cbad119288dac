"""How far a run has come, read from its files."""

import os
import re
import time
from pathlib import Path
from typing import Any

from rocm_ext.files import json_object
from rocm_ext.runs.cycles import raft_finished
from rocm_ext.runs.records import is_rows, number, read_json, read_yaml

_TAIL = 1 << 16  # bytes read from the end of a metrics.jsonl: some hundred lines
_WRITTEN_BY = {  # file of a RAFT cycle -> the phase that writes it
    "samples.jsonl": "sampling",
    "verdicts.jsonl": "sampling",
    "metrics.jsonl": "training",
    "eval/samples.jsonl": "evaluating",
    "eval/verdicts.jsonl": "evaluating",
}
_TOLD = ("step", "epoch", "loss", "tokens_per_second", "val_loss")


def progress(out: Path) -> dict[str, Any]:
    """The newest values that the run in ``out`` wrote, without those that are missing or half written.

    Returns:
        ``cycle`` and ``phase`` of a RAFT run; ``step``, ``epoch``, ``loss``, ``tokens_per_second`` and ``val_loss`` of
        the current or last training; ``seconds_ago``, since the last write; ``finished``; or ``problem``, why there is
        no run to show.
    """
    if not out.is_dir():
        return {"problem": f"{out} {'is a file' if out.exists() else 'does not exist'}"}
    cycles = sorted((int(name[6:]), out / name) for name in _names(out) if re.fullmatch(r"cycle_\d{1,9}", name))
    told: dict[str, Any]
    if not cycles:
        written = _written(out / "metrics.jsonl")
        told = _last_values(out / "metrics.jsonl")
    else:
        cycle, folder = cycles[-1]
        written, file = max((_written(folder / name), name) for name in _WRITTEN_BY)
        told = {"cycle": cycle}
        if written:
            told["phase"] = _WRITTEN_BY[file]
        told |= _last_values(folder / "metrics.jsonl")
        if _skipped(folder):
            told["phase"] = "skipped"
    if written:
        told["seconds_ago"] = round(max(0.0, time.time() - written), 1)
        told["finished"] = _finished(out, cycles, told)
    elif not cycles and not (out / "config.yaml").exists():
        told["problem"] = f"no run in {out}"
    return told


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


def _skipped(folder: Path) -> bool:
    try:
        return (folder / "kept.jsonl").stat().st_size == 0
    except OSError:
        return False


def _last_values(path: Path) -> dict[str, Any]:
    """The newest of each value in a ``metrics.jsonl``."""
    values: dict[str, Any] = {}
    for line in _tail(path).splitlines():
        row = json_object(line) or {}  # empty if the run is writing the line or the tail begins inside it
        values |= {key: row[key] for key in _TOLD if type(row.get(key)) in (int, float) and abs(row[key]) < 1e300}
    return values


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            return file.read()
    except OSError:
        return b""


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
