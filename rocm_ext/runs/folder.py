"""Reads the folder of a run as far as possible.

A run may still be going on, may have been killed, or may be copied in part. So this reader needs no file: missing ones
are empty, and ``problems`` lists those that cannot be read. The recipes' readers are strict, since a run must not
continue from damaged files; and they import torch, which takes longer than all of this module's work.
"""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import read_lines
from rocm_ext.base.nested import flatten
from rocm_ext.base.registry import BY_STEP, DPO, GRPO, RAFT, SFT, TITLES
from rocm_ext.base.types import Json
from rocm_ext.machine.counters import HARDWARE_LOG
from rocm_ext.runs.answers import AnswerLog
from rocm_ext.runs.records import (
    MOST,
    ROWS,
    Columns,
    MetricLines,
    PhaseLines,
    PolicyLines,
    Readings,
    Scores,
    is_rows,
    number,
    parse_scores,
    read_json,
    read_yaml,
)
from rocm_ext.runs.tails import Record, Tails

_PAUSE = 60.0  # seconds without a line in hardware.jsonl after which a run counts as paused
_BOOKKEEPING = {"output_dir", "resume_from_checkpoint", "overwrite_output_dir"}


class RunFolder:
    """``output_dir`` of a run of one of this library's recipes, or of a recipe that extends one.

    Args:
        path: the folder.
        tails: contents that were read before, if the folder is read again and again.

    Attributes:
        name: the folder's name; the report changes it where two runs share it.
        recipe: the recipe's name.
        family: the recipe, or the one that it extends; it decides the kind of records.
        unit: what it counts: ``cycle`` in RAFT, else ``step``.
        config: content of ``config.yaml``.
        summary: content of ``summary.json``; empty before the end of SFT and DPO, or of RAFT's first cycle.
        summaries: it, and the summaries of the training in RAFT's cycles.
        rows: content of ``rows.json``.
        steps: optimiser steps in order: ``step``, ``loss``, ``lr`` … A RAFT run counts them across its cycles. A step
            of GRPO may have several updates, or none and no loss.
        validations: ``step``, ``val_loss``.
        cycles: cycles of a RAFT run, in order.
        evaluations: scores by step, in order; empty for RAFT.
        answers: answers that the run sampled (SFT and DPO only in evaluations); a step of RAFT is a cycle.
        hardware: lines of ``hardware.jsonl``, by time.
        problems: messages about files that could not be read.
        tails: contents of its files as they were last read.

    Raises:
        UserError: ``path`` holds no run.
    """

    def __init__(self, path: Path, tails: Tails | None = None) -> None:
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise UserError(f"{path} {what}; expected the folder of a run (its output_dir)")
        self.path, self.name = path, path.resolve().name
        self.problems: list[str] = []
        self.tails = tails = tails or Tails()
        self.config = deepcopy(tails.content(path / "config.yaml", read_yaml, self.problems))
        self.summary = read_json(path / "summary.json", self.problems)
        self.rows = tails.content(path / ROWS, read_json, self.problems)
        begun = begun_cycles(path)
        shape = self._shape(bool(begun))
        self.recipe = str(self.config.get("recipe", shape))
        self.family = self.recipe if self.recipe in TITLES else shape
        self.cycles: list[CycleFolder] = []
        self.evaluations: dict[int, Scores] = {}
        self.validations = Columns()
        self.answers = AnswerLog(path, self.problems, tails)
        if self.family in BY_STEP and shape == RAFT:  # rocm-ext eval with a config of GRPO: it writes a cycle's records
            self.family = RAFT
        if self.family == RAFT:
            self._read_cycles(begun)
        else:
            kind = PolicyLines if self.family in BY_STEP else MetricLines
            lines = tails.lines(path / "metrics.jsonl", kind, self.problems)
            self.steps, self.validations = lines.steps, lines.validations
            self.evaluations = dict(sorted(lines.evaluations.items()))
        known = {"model", "checkpointer", "output_dir"} <= self.config.keys()
        if not (known or self.cycles or len(self.steps) or len(self.validations) or self.evaluations):
            *others, last = TITLES
            raise UserError(
                f"{path} holds no run: neither its config.yaml nor its metrics.jsonl can be read; expected the "
                f"output_dir of {', '.join(others)} or {last}" + "".join(f" ({p})" for p in self.problems[:1])
            )
        self.summaries = [self.summary, *(cycle.phases.get("train", {}) for cycle in self.cycles)]
        self.unit = "cycle" if self.family == RAFT else "step"
        self.hardware = tails.lines(path / HARDWARE_LOG, Readings, self.problems)

    def _shape(self, cycles: bool) -> str:
        """The recipe whose records the folder has; for a user's recipe, the one that it extends."""
        if cycles or "cycles" in self.config:
            return RAFT
        lines = list(islice(read_lines(self.path / "metrics.jsonl", problems=[]), 2))
        if PhaseLines(lines):
            return RAFT
        if of_policy(self.config, lines, (self.path / "samples.jsonl").exists()):
            return GRPO
        if any("reward_chosen" in line for line in lines):
            return DPO
        return SFT

    def _read_cycles(self, begun: set[int]) -> None:
        lines = self.tails.lines(self.path / "metrics.jsonl", PhaseLines, self.problems)
        listed = self.summary.get("cycles")
        rows = {r["cycle"]: r for r in listed if type(r.get("cycle")) is int} if is_rows(listed) else {}
        self.cycles = [CycleFolder(self, k, lines.get(k, {}), rows.get(k, {})) for k in sorted({*begun, *lines})]
        steps = [{**line, "cycle": cycle.number} for cycle in self.cycles for line in cycle.steps.lines]
        self.steps = Columns([{**line, "step": number} for number, line in enumerate(steps, start=1)])

    @property
    def finished(self) -> bool:
        """Whether the run has ended by itself, with all its steps or cycles."""
        if self.is_evaluation:
            return self.cycles[0].scores is not None
        if self.family == RAFT:
            states = [cycle.state for cycle in self.cycles]
            last = self.cycles[-1].number if self.cycles else 0
            complete = all(state in ("complete", "skipped") for state in states)
            return complete and raft_finished(self.path, self.config, last, states[-1:] == ["skipped"])
        if self.family in BY_STEP:
            return steps_finished(self.summary, self.config, self.steps["step"][-1] if len(self.steps) else 0.0)
        return number(self.summary.get("steps")) == len(self.steps)

    @property
    def is_evaluation(self) -> bool:
        """Whether ``rocm-ext eval --output`` wrote this folder: the evaluation of one adapter, without training."""
        return [cycle.number for cycle in self.cycles] == [0] and self.config.get("prompts", "") is None

    def setting(self, key: str) -> Any:
        """A value of ``config.yaml`` by its dotted name; None if the file has no such key."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def settings(self) -> dict[str, object]:
        """``config.yaml``, flat: ``optimizer.lr`` and so on."""
        return flatten(self.config)

    def differing_settings(self, other: "RunFolder") -> dict[str, tuple[object, object]]:
        """Settings that differ, by name, with this run's value and the other's.

        The output folder does not count as a setting, and paths below it are equal in both runs.
        """
        mine, theirs = self._comparable_settings(), other._comparable_settings()
        return {
            key: (mine.get(key), theirs.get(key))
            for key in sorted({*mine, *theirs} - _BOOKKEEPING)
            if mine.get(key) != theirs.get(key)
        }

    def _comparable_settings(self) -> dict[str, object]:
        out = str(self.config.get("output_dir") or "")
        return {
            key: "${output_dir}" + value[len(out) :]
            if out and isinstance(value, str) and value.startswith(out)
            else value
            for key, value in self.settings().items()
        }

    def fact(self, key: str) -> Any:
        """A value of a summary: ``machine``, ``dtype``, ``ranks`` or ``base_model``."""
        return next((summary[key] for summary in self.summaries if summary.get(key) is not None), None)


class CycleFolder:
    """A cycle of a RAFT run, and its folder ``cycle_k``.

    Attributes:
        number: k; cycle 0 is the evaluation before any training.
        steps: optimiser steps of its training.
        phases: the lines of its finished phases in the run's ``metrics.jsonl``.
        seconds: durations of these phases.
        scores: scores of its evaluation; None before its end.
        row: the cycle's entry in the run's ``summary.json``; empty for an unfinished cycle.
    """

    def __init__(self, run: RunFolder, cycle: int, phases: Mapping[str, Record], row: Record) -> None:
        self.folder, self.number, self.row = run.path / f"cycle_{cycle}", cycle, row
        self._answers = run.answers
        self.steps = run.tails.lines(self.folder / "metrics.jsonl", MetricLines, run.problems).steps
        self.phases = dict(phases)
        if not cycle and "eval" not in phases and (older := read_json(self.folder / "eval.json", run.problems)):
            self.phases["eval"] = {"eval": older}  # of a rocm-ext eval that wrote no line
        seconds = {phase: number(line.get("seconds")) for phase, line in self.phases.items()}
        self.seconds = {phase: duration for phase, duration in seconds.items() if 0 <= duration < MOST}
        self.scores = parse_scores(self.phases.get("eval", {}).get("eval"))

    @property
    def state(self) -> str:
        """``begun``, ``sampling``, ``training``, ``trained``, ``evaluating``, ``complete`` or ``skipped``."""
        if self.kept == 0:
            return "skipped"
        if "eval" in self.phases or (self.row and self.number):
            return "complete"
        if self._answers.has(self.number, held_out=True):
            return "evaluating"
        if "train" in self.phases:
            return "trained"
        if self.kept is not None:
            return "training"
        return "sampling" if self._answers.has(self.number) else "begun"

    @cached_property
    def rewards(self) -> np.ndarray:
        """[n] rewards of the cycle's answers; NaN without one."""
        verdicts = self._answers.verdicts
        return verdicts.reward[verdicts.rows(self.number)]

    @cached_property
    def lengths(self) -> tuple[np.ndarray, float | None]:
        """Lengths in tokens of the cycle's answers, and their entropy; see :meth:`AnswerLog.lengths`."""
        return self._answers.lengths(self.number)

    @cached_property
    def kept(self) -> int | None:
        """How many of its answers the cycle trains on, 0 if it was skipped; None before they are chosen."""
        try:
            return (self.folder / "kept.jsonl").read_bytes().count(b"\n")
        except OSError:
            return None


@dataclass(frozen=True)
class HeldOut:
    """An evaluation.

    Attributes:
        after: the cycle or step before it: ``cycle 3`` or ``step 40``.
        number: number of the cycle or step; 0 is before any training.
        answers: number of answers sampled for training before it.
        scores: its scores.
        run: the run.
    """

    after: str
    number: int
    answers: int
    scores: Scores
    run: RunFolder

    def greedy(self) -> dict[str, bool]:
        """Read the verdicts; return whether the greedy answer is right, by prompt id."""
        return self.run.answers.verdicts.greedy(self.number)


def held_out(run: RunFolder) -> list[HeldOut]:
    """The evaluations of a run, in order; SFT and DPO have them with ``eval_prompts``."""
    scored: list[tuple[int, int, Scores]] = []
    if run.family != RAFT:
        counts = np.clip(np.nan_to_num(run.steps["answers"]), 0, MOST)
        before = np.concatenate([[0.0], np.cumsum(counts)])
        for step, scores in run.evaluations.items():
            scored.append((step, int(before[np.searchsorted(run.steps["step"], step, side="right")]), scores))
    else:
        answers = 0
        for cycle in run.cycles:
            counted = number(cycle.row.get("samples"))
            answers += int(counted) if 0 <= counted < MOST else len(cycle.rewards)
            if cycle.scores is not None:
                scored.append((cycle.number, answers, cycle.scores))
    return [HeldOut(f"{run.unit} {at}", at, count, scores, run) for at, count, scores in scored]


def of_policy(config: Json, lines: Sequence[Record], sampled: bool) -> bool:
    """Whether GRPO wrote the records, by some ``lines`` of ``metrics.jsonl``. SFT may also have ``sampled``."""
    if config.get("dataset") or any("loss" in line and "reward" not in line for line in lines):
        return False
    return sampled or any({"reward", "eval"} & line.keys() for line in lines)


def begun_cycles(path: Path) -> set[int]:
    """The cycles that have a folder: those of RAFT from 1, and cycle 0 of ``rocm-ext eval``."""
    names = [folder.name for folder in path.glob("cycle_*") if folder.is_dir()]
    return {int(name[6:]) for name in names if re.fullmatch(r"cycle_(0|[1-9]\d{0,8})", name)}


def raft_finished(path: Path, config: Json, last: int, skipped: bool = False) -> bool:
    """Whether a RAFT run whose cycle ``last`` is complete has ended.

    ``adapter/`` alone does not show it: a run that continues with more cycles still has the adapter of the shorter
    run. If the run may have stopped early, because its config allows it or its last cycle was ``skipped``, the adapter
    decides.
    """
    may_stop = skipped or any(config.get(key) for key in ("min_entropy", "stop_after_no_gain", "skip_solved"))
    return (path / "adapter").exists() and (may_stop or not last < number(config.get("cycles")))


def steps_finished(summary: Json, config: Json, last: float) -> bool:
    """Whether a GRPO run whose last recorded step is ``last`` has ended by itself.

    A run that continues with more steps keeps the summary of the shorter run until it ends. So a summary before the
    config's last step counts only if the run may have stopped early.
    """
    may_stop = any(config.get(key) for key in ("min_entropy", "stop_after_no_gain", "max_length_share"))
    return number(summary.get("steps")) == last and (may_stop or not last < number(config.get("steps")))


def running_time(readings: Readings) -> tuple[np.ndarray, np.ndarray]:
    """The running time of a run, without the pauses between a kill and a resume.

    Args:
        readings: lines of ``hardware.jsonl``.

    Returns:
        [n] seconds by line; indices of the lines before which the run had paused.
    """
    times = np.array(readings.times, dtype=np.float64)
    steps = np.diff(times, prepend=times[:1])
    usual = float(np.median(steps[1:])) if len(steps) > 1 else 0.0
    pauses = np.flatnonzero(steps > max(_PAUSE, 10 * usual))
    steps[pauses] = usual
    return np.cumsum(steps), pauses
