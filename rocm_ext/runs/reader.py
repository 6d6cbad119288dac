"""Reads the folder of a run as far as possible.

A run may still be going on, may have been killed, or may be copied in part. So this reader needs no file: missing ones
are empty, and ``problems`` lists those that cannot be read. The recipes' own readers are strict, since a run must not
continue from damaged files; and they import torch, which takes longer than all that happens here.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import yaml

from rocm_ext.errors import UserError
from rocm_ext.files import json_object, read_lines
from rocm_ext.hardware.counters import HARDWARE_LOG
from rocm_ext.importing import with_new_names
from rocm_ext.nested import flatten
from rocm_ext.registry import RAFT, SFT, TITLES
from rocm_ext.runs.scores import wilson

PHASES = ("sample", "train", "eval")  # of a RAFT cycle
GREEDY = -1  # index of a held-out prompt's greedy answer; those drawn at random count from 0
SELECTION = "selection.json"  # of a RAFT cycle: what the selection of its answers counted
_PAUSE = 60.0  # seconds without a line in hardware.jsonl after which a run counts as paused
_MOST = 1e12  # seconds or prompts; a file with more is damaged
_BOOKKEEPING = {"output_dir", "resume_from_checkpoint", "overwrite_output_dir"}
SampleKey = tuple[str, int]  # prompt id, index of the sample


class Columns:
    """The lines of a file such as ``metrics.jsonl``, by column."""

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.lines = lines

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, key: str) -> np.ndarray:
        """[n] float64; NaN where a line has no number."""
        return np.array([number(line.get(key)) for line in self.lines], dtype=np.float64)

    def has(self, key: str) -> np.ndarray:
        """[n] bool: whether a line has the key."""
        return np.array([key in line for line in self.lines], dtype=bool)


@dataclass(frozen=True)
class Judged:
    """A verdict on an answer, from ``verdicts.jsonl``. ``reward`` is NaN if the line has none."""

    verdict: str
    reward: float
    detail: str


@dataclass(frozen=True)
class Answers:
    """Lengths and entropy of a cycle's answers.

    Attributes:
        lengths: [n] tokens of each answer.
        truncated: how many answers ``max_new_tokens`` cut off.
        entropy: nats per token, see :func:`rocm_ext.rollouts.samples.entropy`; None without log-probs.
    """

    lengths: np.ndarray
    truncated: int
    entropy: float | None


class CycleFolder:
    """``cycle_k`` of a RAFT run.

    Attributes:
        number: k; cycle 0 holds the evaluation before any training.
        steps: optimiser steps of its training.
        summary: of its training; empty before the end.
        seconds: duration of each phase that ended.
        phases: the last line of each phase in the run's ``metrics.jsonl``.
        row: its entry in the run's ``summary.json``; empty for an unfinished cycle.
    """

    def __init__(self, folder: Path, lines: Sequence[Mapping[str, Any]], row: Mapping[str, Any], problems: list[str]):
        self.folder, self.number, self.row, self._problems = folder, int(folder.name[6:]), row, problems
        self.steps, _ = read_steps(folder / "metrics.jsonl", problems)
        self.summary = read_json(folder / "summary.json", problems)
        mine = [line for line in lines if line.get("cycle") == self.number]
        self.phases = {line["phase"]: line for line in mine if line.get("phase") in PHASES}
        self.seconds: dict[str, float] = {}
        for line in mine:
            if line.get("phase") in PHASES and 0 <= (seconds := number(line.get("seconds"))) < _MOST:
                self.seconds[line["phase"]] = self.seconds.get(line["phase"], 0.0) + seconds

    @cached_property
    def scores(self) -> dict[str, Any] | None:
        """``eval.json`` with its intervals; None if it is missing or damaged."""
        read = read_json(self.folder / "eval.json", self._problems)
        total, correct = number(read.get("prompts")), number(read.get("correct"))
        if not 0 <= correct <= total < _MOST or total < 1:
            return None
        drawn = read.get("pass_at_k")
        shares = {
            int(k): (p, *wilson(p * total, int(total)))
            for k, at in (drawn.items() if isinstance(drawn, dict) else ())
            if k.isdecimal() and len(k) < 9 and isinstance(at, dict) and 0 <= (p := number(at.get("pass"))) <= 1
        }
        interval = wilson(correct, int(total))
        return {"prompts": int(total), "correct": int(correct), "pass": (correct / total, *interval), "at": shares}

    @property
    def state(self) -> str:
        """``begun``, ``sampling``, ``training``, ``trained``, ``evaluating``, ``complete`` or ``skipped``."""
        if self.kept == 0:
            return "skipped"
        if (self.folder / "eval.json").exists() or (self.row and self.number):
            return "complete"
        for sign, state in (
            ("eval", "evaluating"),
            ("summary.json", "trained"),
            ("kept.jsonl", "training"),
            ("samples.jsonl", "sampling"),
        ):
            if (self.folder / sign).exists():
                return state
        return "begun"

    @cached_property
    def judged(self) -> dict[SampleKey, Judged]:
        """The verdicts on the cycle's answers."""
        return self._read_verdicts(self.folder)

    @cached_property
    def judged_held_out(self) -> dict[SampleKey, Judged]:
        """The verdicts of its evaluation; greedy answers have the index :data:`GREEDY`."""
        return self._read_verdicts(self.folder / "eval")

    def _read_verdicts(self, folder: Path) -> dict[SampleKey, Judged]:
        found = {}
        for key, line in self._records(folder, "verdicts"):
            if isinstance(line.get("verdict"), str):
                found[key] = Judged(line["verdict"], number(line.get("reward")), str(line.get("detail") or ""))
        return found

    def _records(self, folder: Path, stem: str) -> Iterator[tuple[SampleKey, dict[str, Any]]]:
        # in a running run, each rank has a file of its own
        for path in sorted(folder.glob(f"{stem}*.jsonl")):
            for line in read_lines(path, problems=self._problems):
                prompt, sample = line.get("prompt_id"), line.get("sample")
                if isinstance(prompt, str) and type(sample) is int:
                    yield (prompt, sample), line

    def verdicts(self) -> Counter[str]:
        """How many answers got each verdict."""
        return Counter(judged.verdict for judged in self.judged.values())

    @cached_property
    def answers(self) -> Answers:
        """Lengths and entropy of the cycle's answers."""
        lengths: dict[SampleKey, int] = {}
        truncated, logprob, tokens = 0, 0.0, 0
        for key, line in self._records(self.folder, "samples"):
            if key in lengths or not isinstance(line.get("tokens"), list):
                continue
            lengths[key] = len(line["tokens"])
            truncated += line.get("finish_reason") == "length"
            known = _finite(line.get("logprobs"))
            logprob, tokens = logprob + float(known.sum()), tokens + len(known)
        entropy = -logprob / tokens if tokens else None
        return Answers(np.array(list(lengths.values()), dtype=np.float64), truncated, entropy)

    def texts(self, wanted: set[SampleKey], held_out: bool = False) -> dict[SampleKey, dict[str, Any]]:
        """The records of the answers ``wanted``, by key; ``held_out``: those of the evaluation."""
        records = self._records(self.folder / "eval" if held_out else self.folder, "samples")
        return {key: line for key, line in records if key in wanted}

    @cached_property
    def kept(self) -> int | None:
        """How many of its answers the cycle trains on, 0 if it was skipped; None before they are chosen."""
        path = self.folder / "kept.jsonl"
        try:
            return path.read_bytes().count(b"\n") if path.exists() else None
        except OSError:
            return None


class RunFolder:
    """``output_dir`` of a run of ``lora_finetune_rocm`` or ``raft_rocm``.

    Args:
        path: the folder.

    Attributes:
        name: the folder's; the report changes it where two runs share it.
        recipe: its name.
        family: the recipe of this library that it is or extends; its records are of that kind.
        config: content of ``config.yaml``, with components by their names of today.
        summary: content of ``summary.json``; empty before the end of SFT or of RAFT's first cycle.
        steps: optimiser steps in order: ``step``, ``loss``, ``lr`` … A RAFT run counts them across its cycles.
        validations: ``step``, ``val_loss``.
        cycles: of RAFT, in order.
        hardware: lines of ``hardware.jsonl``, by time.
        problems: messages about files that could not be read.

    Raises:
        UserError: ``path`` holds no run.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise UserError(f"{path} {what}; expected the folder of a run (its output_dir)")
        self.path, self.name = path, path.resolve().name
        self.problems: list[str] = []
        self.config = with_new_names(read_yaml(path / "config.yaml", self.problems))
        self.summary = read_json(path / "summary.json", self.problems)
        folders = [p for p in path.glob("cycle_*") if re.fullmatch(r"cycle_(0|[1-9]\d{0,8})", p.name) and p.is_dir()]
        # older runs name no recipe, and a user's recipe need not be here: its records tell which of ours it extends
        shape = RAFT if folders or (path / "run.json").exists() else SFT
        self.recipe = str(self.config.setdefault("recipe", shape)) if self.config else shape
        self.family = self.recipe if self.recipe in TITLES else shape
        self.cycles: list[CycleFolder] = []
        if self.family == RAFT:
            self._read_cycles(sorted(folders, key=lambda p: int(p.name[6:])))
        else:
            self.steps, self.validations = read_steps(path / "metrics.jsonl", self.problems)
        known = {"model", "checkpointer", "output_dir"} <= self.config.keys()
        if not (known or self.cycles or len(self.steps) or len(self.validations)):
            raise UserError(
                f"{path} holds no run: neither its config.yaml nor its metrics.jsonl can be read; expected the "
                "output_dir of lora_finetune_rocm or raft_rocm" + "".join(f" ({p})" for p in self.problems[:1])
            )
        lines = [
            line
            for line in read_lines(path / HARDWARE_LOG, problems=self.problems)
            if 0 <= number(line.get("time")) < _MOST
        ]
        self.hardware = sorted(lines, key=lambda line: line["time"])

    def _read_cycles(self, folders: Sequence[Path]) -> None:
        lines = list(read_lines(self.path / "metrics.jsonl", problems=self.problems))
        listed = self.summary.get("cycles")
        rows = {r["cycle"]: r for r in listed if type(r.get("cycle")) is int} if is_rows(listed) else {}
        self.cycles = [CycleFolder(p, lines, rows.get(int(p.name[6:]), {}), self.problems) for p in folders]
        steps: list[Mapping[str, Any]] = []
        for cycle in self.cycles:
            before = len(steps)
            own = cycle.steps.lines
            steps += [{**line, "step": before + i, "cycle": cycle.number} for i, line in enumerate(own, start=1)]
        self.steps, self.validations = Columns(steps), Columns([])

    @property
    def finished(self) -> bool:
        """Whether the run has ended by itself, with all its steps or cycles."""
        if self.is_evaluation:
            return self.cycles[0].scores is not None
        if self.family == RAFT:
            whole = all(cycle.state in ("complete", "skipped") for cycle in self.cycles)
            last = self.cycles[-1] if self.cycles else None
            skipped = last is not None and last.state == "skipped"
            return whole and raft_finished(self.path, self.config, last.number if last else 0, skipped)
        return number(self.summary.get("steps")) == len(self.steps)

    @property
    def is_evaluation(self) -> bool:
        """Whether ``rocm-ext eval --output`` wrote this folder: the evaluation of one adapter, without training."""
        return [cycle.number for cycle in self.cycles] == [0] and self.config.get("prompts", "") is None

    def setting(self, key: str) -> Any:
        """A value of ``config.yaml`` by its dotted name; None if the file has no such key."""
        node: Any = self.config
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node

    def settings(self) -> dict[str, Any]:
        """``config.yaml``, flat: ``optimizer.lr`` and so on."""
        return flatten(self.config)

    def differing_settings(self, other: "RunFolder") -> dict[str, tuple[Any, Any]]:
        """Settings that differ, by name, with this run's value and the other's.

        The output folder does not count as a setting, and paths below it are equal in both runs.
        """
        mine, theirs = self._own_settings(), other._own_settings()
        return {
            key: (mine.get(key), theirs.get(key))
            for key in sorted({*mine, *theirs} - _BOOKKEEPING)
            if mine.get(key) != theirs.get(key)
        }

    def _own_settings(self) -> dict[str, Any]:
        own = str(self.config.get("output_dir") or "")
        return {
            key: "${output_dir}" + value[len(own) :]
            if own and isinstance(value, str) and value.startswith(own)
            else value
            for key, value in self.settings().items()
        }

    def fact(self, key: str) -> Any:
        """A value of a summary: ``machine``, ``dtype`` or ``ranks``. In RAFT it is in the summaries of the cycles."""
        found = [self.summary, *(cycle.summary for cycle in self.cycles)]
        return next((each[key] for each in found if each.get(key) is not None), None)


def raft_finished(path: Path, config: Mapping[str, Any], last: int, skipped: bool = False) -> bool:
    """Whether a RAFT run whose cycle ``last`` is complete has ended.

    ``adapter/`` alone does not show it: a run that continues with more cycles still has the adapter of the shorter
    run. If the run may have stopped early, because its config allows it or its last cycle was ``skipped``, the adapter
    decides.
    """
    may_stop = skipped or any(config.get(key) for key in ("min_entropy", "stop_after_no_gain", "skip_solved"))
    return (path / "adapter").exists() and (may_stop or not last < number(config.get("cycles")))


def number(value: Any) -> float:
    """A JSON number as a float; NaN for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _finite(values: Any) -> np.ndarray:
    """The finite numbers of a list; empty if it is not a list of numbers."""
    try:
        numbers = np.array(values if isinstance(values, list) else [], dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        return np.array([])
    return numbers[np.isfinite(numbers)]


def is_rows(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    """Whether ``value`` is a list of JSON objects."""
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def running_time(lines: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """The running time of a run, without the pauses between a kill and a resume.

    Args:
        lines: of ``hardware.jsonl``, by time.

    Returns:
        [n] seconds at each line; indices of the lines before which the run had paused.
    """
    times = np.array([number(line.get("time")) for line in lines], dtype=np.float64)
    steps = np.diff(times, prepend=times[:1])
    usual = float(np.median(steps[1:])) if len(steps) > 1 else 0.0
    pauses = np.flatnonzero(steps > max(_PAUSE, 10 * usual))
    steps[pauses] = usual
    return np.cumsum(steps), pauses


def read_steps(path: Path, problems: list[str]) -> tuple[Columns, Columns]:
    """Training steps and validations in a ``metrics.jsonl``, each in order; the last line of a step counts."""
    steps: dict[float, dict[str, Any]] = {}
    validations: dict[float, dict[str, Any]] = {}
    for line in read_lines(path, problems=problems):
        if math.isfinite(step := number(line.get("step"))):
            if "loss" in line:
                steps[step] = line
            if "val_loss" in line:
                validations[step] = line
    return Columns([steps[step] for step in sorted(steps)]), Columns([validations[s] for s in sorted(validations)])


def read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing or holds none, which ``problems`` then says."""
    content = _read_bytes(path, problems)
    value = {} if content is None else json_object(content)
    if value is None:
        problems.append(f"{path} holds no JSON object and is skipped")
        return {}
    return value


def read_yaml(path: Path, problems: list[str]) -> dict[str, Any]:
    """The YAML mapping in a file; empty if the file is missing or holds none, which ``problems`` then says."""
    content = _read_bytes(path, problems)
    try:
        value = {} if content is None else yaml.safe_load(content.decode())
    except (yaml.YAMLError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        problems.append(f"{path} holds no YAML mapping and is skipped")
        return {}
    return {str(key): each for key, each in value.items()}


def _read_bytes(path: Path, problems: list[str]) -> bytes | None:
    try:
        return path.read_bytes() if path.exists() else None
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror or error}")
        return None
