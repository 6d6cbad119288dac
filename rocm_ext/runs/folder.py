"""Reads the folder of a run as far as possible.

A run may still be going on, may have been killed, or may be copied in part. So this reader needs no file: missing ones
are empty, and ``problems`` lists those that cannot be read. The recipes' readers are strict, since a run must not
continue from damaged files; and they import torch, which takes longer than all of this module's work.
"""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import read_lines
from rocm_ext.base.registry import DPO, GRPO, RAFT, SAMPLED, SFT, TITLES
from rocm_ext.base.structure import flatten
from rocm_ext.base.types import Json
from rocm_ext.machine.counters import HARDWARE_LOG
from rocm_ext.runs.answers import AnswerLog
from rocm_ext.runs.records import (
    MOST,
    ROWS,
    Columns,
    MetricLines,
    Readings,
    SampledLines,
    Scores,
    number,
    of_sets,
    parse_scores,
    read_json,
    read_yaml,
)
from rocm_ext.runs.tails import JsonLines, Record, Tails

_PAUSE = 60.0  # seconds without a line in hardware.jsonl after which a run counts as paused
_Kept = TypeVar("_Kept", bound=JsonLines)
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
        summary: content of ``summary.json``. Empty before the run's end.
        rows: content of ``rows.json``.
        steps: the run's steps in order: ``step``, ``loss``, ``lr`` … A step of GRPO may have several updates, or none
            and no loss; a step of RAFT is a cycle.
        updates: of RAFT, the optimiser's steps, which ``step`` counts across the cycles; else the same as ``steps``.
        validations: ``step``, ``val_loss``.
        evaluations: scores by column, ``eval`` or ``eval/NAME``, and step, in order.
        evaluated: the lines of the evaluations.
        answers: answers that the run sampled (SFT and DPO only in evaluations).
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
        self.path = path
        self.name = path.resolve().name
        self.problems: list[str] = []
        self.tails = tails or Tails()
        config = self.tails.content(path / "config.yaml", read_yaml, self.problems)
        self.config = deepcopy(config)
        self.summary = read_json(path / "summary.json", self.problems)
        self.rows = self.tails.content(path / ROWS, read_json, self.problems)
        shape = self._shape()
        self.recipe = str(self.config.get("recipe", shape))
        self.family = self.recipe if self.recipe in TITLES else shape
        self.unit = "cycle" if self.family == RAFT else "step"
        self.answers = AnswerLog(path, self.problems, self.tails)
        lines = self._lines(
            "metrics.jsonl", SampledLines if self.family in SAMPLED else MetricLines
        )
        self.steps = lines.steps
        self.validations = lines.validations
        self.evaluated = lines.evaluated
        self.updates = self._updates() if self.family == RAFT else self.steps
        self.evaluations: dict[str, dict[int, Scores]] = {}
        for column, scores_of_set in lines.evaluations.items():
            self.evaluations[column] = dict(sorted(scores_of_set.items()))
        if not self.evaluations:
            # rocm-ext eval of an earlier version wrote its scores here
            scores = parse_scores(read_json(path / "cycle_0" / "eval.json", self.problems))
            if scores is not None:
                self.evaluations["eval"] = {0: scores}
        configured = {"model", "checkpointer", "output_dir"} <= self.config.keys()
        if not (configured or self.steps or self.updates or self.validations or self.evaluations):
            *others, last = TITLES
            message = (
                f"{path} holds no run: neither its config.yaml nor its metrics.jsonl can be read; expected the "
                f"output_dir of {', '.join(others)} or {last}"
            )
            if self.problems:
                message += f" ({self.problems[0]})"
            raise UserError(message)
        self.hardware = self._lines(HARDWARE_LOG, Readings)

    def _lines(self, name: str, kind: type[_Kept]) -> _Kept:
        return self.tails.lines(self.path / name, kind, self.problems)

    def _shape(self) -> str:
        """The recipe whose records the folder has; for a user's recipe, the one that it extends."""
        if "cycles" in self.config or begun_cycles(self.path):
            return RAFT
        lines = list(islice(read_lines(self.path / "metrics.jsonl", problems=[]), 2))
        if learns_from_samples(self.config, lines, (self.path / "samples.jsonl").exists()):
            return GRPO
        if any("reward_chosen" in line for line in lines):
            return DPO
        return SFT

    def _updates(self) -> Columns:
        """Read the updates of RAFT's cycles, and number them."""
        updates: list[Record] = []
        for cycle in begun_cycles(self.path):
            for line in self._lines(f"cycle_{cycle}/metrics.jsonl", MetricLines).steps.lines:
                updates.append({**line, "cycle": cycle, "step": len(updates) + 1})
        return Columns(updates)

    @property
    def finished(self) -> bool:
        """Whether the run has ended by itself."""
        if self.is_evaluation:
            return bool(self.evaluations)
        if self.family not in SAMPLED:
            return number(self.summary.get("steps")) == len(self.steps)
        last = self.steps["step"][-1] if self.steps else 0.0
        if "cycles" in self.summary:  # an earlier version, which wrote the summary after each cycle
            newest = max(begun_cycles(self.path), default=0)
            return newest == last and (self.path / "adapter").exists()
        return steps_finished(self.summary, self.config, last)

    @property
    def peak_memory(self) -> float:
        """The most bytes that the run used on its device; NaN if it says none."""
        at_end = number(self.summary.get("peak_memory"))
        peaks = [*self.updates["peak_memory"], *self.steps["peak_memory"], at_end]
        return max(filter(math.isfinite, peaks), default=math.nan)

    @property
    def paused(self) -> float:
        """Seconds in which the run paused for heat."""
        seconds = np.nansum(self.steps["paused"])
        if self.family == RAFT:
            seconds += np.nansum(self.updates["paused"])
        return float(seconds)

    @property
    def is_evaluation(self) -> bool:
        """Whether ``rocm-ext eval --output`` wrote this folder: the evaluation of one adapter, without training."""
        evaluated = list(self.evaluations.get("eval", ()))
        only_at_0 = evaluated == [0] and not self.steps
        return only_at_0 and self.config.get("prompts", "") is None

    def setting(self, key: str) -> Any:
        """A value of ``config.yaml`` by its dotted name. None if the file has no such key."""
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
        mine = self._comparable_settings()
        theirs = other._comparable_settings()
        differing = {}
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                differing[key] = mine.get(key), theirs.get(key)
        return differing

    def _comparable_settings(self) -> dict[str, object]:
        out = str(self.config.get("output_dir") or "")
        settings = self.settings()
        for key, value in self.settings().items():
            if key in _BOOKKEEPING:
                del settings[key]
            elif out and isinstance(value, str) and value.startswith(out):
                settings[key] = "${output_dir}" + value.removeprefix(out)
        return settings


@dataclass(frozen=True)
class HeldOut:
    """An evaluation.

    Attributes:
        after: the cycle or step before it: ``cycle 3`` or ``step 40``.
        number: number of the cycle or step; 0 is before any training.
        answers: number of answers sampled for training before it.
        scores: its scores.
        run: the run.
        set: name of the set of prompts; may be empty.
    """

    after: str
    number: int
    answers: int
    scores: Scores
    run: RunFolder
    set: str = ""

    def greedy(self) -> dict[str, bool]:
        """Read the verdicts; return whether the greedy answer is right, by prompt id."""
        right = self.run.answers.verdicts.greedy(self.number)
        beginning = f"{self.set}/" if self.set else ""
        return {prompt: each for prompt, each in right.items() if prompt.startswith(beginning)}


def held_out(run: RunFolder) -> dict[str, list[HeldOut]]:
    """The evaluations of a run, in order; SFT and DPO have them with ``eval_prompts``.

    Returns:
        Evaluations by the end of a title: `` of NAME`` of a named set of prompts, the target first; else empty.
    """
    steps = run.steps["step"]
    known = np.nan_to_num(run.steps["answers"])
    answers = np.clip(known, 0, MOST)
    by_title = {}
    for column, title in of_sets([run.evaluations], "eval", "").items():
        evaluations = []
        for step, scores in run.evaluations[column].items():
            evaluation = HeldOut(
                after=f"{run.unit} {step}",
                number=step,
                answers=int(answers[steps <= step].sum()),
                scores=scores,
                run=run,
                set=column.partition("/")[2],
            )
            evaluations.append(evaluation)
        by_title[title] = evaluations
    return by_title


def learns_from_samples(config: Json, lines: Sequence[Record], sampled: bool) -> bool:
    """Whether the run's recipe learns from sampled answers, by some ``lines`` of its ``metrics.jsonl``.

    Args:
        config: content of ``config.yaml``.
        lines: some lines.
        sampled: whether the run has samples; SFT and DPO may have them, too, of evaluations.
    """
    if config.get("dataset"):
        return False
    for line in lines:
        if "loss" in line and "reward" not in line:
            return False
        sampled = sampled or "reward" in line or bool(of_sets([line], "eval"))
    return sampled


def newest_adapter(path: Path) -> Path | None:
    """The folder with the adapter that the run in ``path`` wrote last; None before the first one."""
    newest = None
    written = -math.inf
    for pattern in ("adapter", "checkpoints/step_*", "cycle_*/adapter"):
        for file in path.glob(f"{pattern}/adapter_model.safetensors"):
            with suppress(OSError):  # old checkpoints are removed
                at = file.stat().st_mtime
                if at > written:
                    newest = file.parent
                    written = at
    return newest


def begun_cycles(path: Path) -> list[int]:
    """The cycles of a RAFT run that have a folder, in order."""
    cycles = []
    for folder in path.glob("cycle_*"):
        if folder.is_dir() and re.fullmatch(r"cycle_[1-9]\d{0,8}", folder.name):
            cycles.append(int(folder.name.removeprefix("cycle_")))
    return sorted(cycles)


def steps_finished(summary: Json, config: Json, last: float) -> bool:
    """Whether a run that learns from sampled answers, and whose last recorded step is ``last``, has ended by itself.

    A run that continues with more steps keeps the summary of the shorter run until it ends. So a summary before the
    config's last step counts only if the run stopped early.
    """
    stopped = summary.get("stopped") is not None
    too_early = last < planned_steps(config) and not stopped
    return number(summary.get("steps")) == last and not too_early


def planned_steps(config: Json) -> float:
    """The number of steps, in RAFT of cycles, that a config asks for; NaN if it says none."""
    return number(config.get("cycles", config.get("steps")))


def running_time(readings: Readings) -> tuple[np.ndarray, np.ndarray]:
    """The running time of a run, without the pauses between a kill and a resume.

    Args:
        readings: lines of ``hardware.jsonl``.

    Returns:
        [n] seconds by line; indices of the lines before which the run had paused.
    """
    times = np.array(readings.times, dtype=np.float64)
    steps = np.diff(times, prepend=times[:1])
    usual = np.median(steps[1:]) if len(steps) > 1 else 0.0
    pauses = np.flatnonzero(steps > max(_PAUSE, 10 * usual))
    steps[pauses] = usual
    return np.cumsum(steps), pauses
