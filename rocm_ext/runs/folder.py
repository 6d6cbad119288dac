"""Reads the folder of a run as far as possible.

A run may still be going on, may have been killed, or may be copied in part. So this reader needs no file: missing ones
are empty, and ``problems`` lists those that cannot be read. The recipes' own readers are strict, since a run must not
continue from damaged files; and they import torch, which takes longer than all that happens here.
"""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import read_lines
from rocm_ext.base.nested import flatten
from rocm_ext.base.registry import DPO, GRPO, RAFT, SFT, TITLES
from rocm_ext.machine.counters import HARDWARE_LOG
from rocm_ext.runs.cycles import PHASES as PHASES
from rocm_ext.runs.cycles import CycleFolder, Journal, raft_finished
from rocm_ext.runs.records import GREEDY as GREEDY
from rocm_ext.runs.records import Columns, Lines, Readings, is_rows, number, read_json, read_steps, read_yaml
from rocm_ext.runs.records import SampleKey as SampleKey
from rocm_ext.runs.steps import AnswerLog, EvaluationLine, read_policy_steps, steps_finished
from rocm_ext.runs.tails import Tails

_PAUSE = 60.0  # seconds without a line in hardware.jsonl after which a run counts as paused
_BOOKKEEPING = {"output_dir", "resume_from_checkpoint", "overwrite_output_dir"}


class RunFolder:
    """``output_dir`` of a run of one of this library's recipes, or of a recipe that extends one.

    Args:
        path: the folder.
        tails: what was read of the folder before, if it is read again and again.

    Attributes:
        name: the folder's; the report changes it where two runs share it.
        recipe: its name.
        family: the recipe of this library that it is or extends; its records are of that kind.
        config: content of ``config.yaml``.
        summary: content of ``summary.json``; empty before the end of SFT and DPO, or of RAFT's first cycle.
        steps: optimiser steps in order: ``step``, ``loss``, ``lr`` … A RAFT run counts them across its cycles. Those of
            GRPO may have several updates, or none and no loss.
        validations: ``step``, ``val_loss``.
        cycles: cycles of a RAFT run, in order.
        evaluations: evaluations of a GRPO run, in order.
        answers: answers of a run of RAFT or GRPO.
        hardware: lines of ``hardware.jsonl``, by time.
        problems: messages about files that could not be read.

    Raises:
        UserError: ``path`` holds no run.
    """

    def __init__(self, path: Path, tails: Tails | None = None) -> None:
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise UserError(f"{path} {what}; expected the folder of a run (its output_dir)")
        self.path, self.name = path, path.resolve().name
        self.problems: list[str] = []
        self._tails = tails = tails or Tails()
        self.config = deepcopy(tails.whole(path / "config.yaml", read_yaml, self.problems))
        self.summary = read_json(path / "summary.json", self.problems)
        folders = [p for p in path.glob("cycle_*") if re.fullmatch(r"cycle_(0|[1-9]\d{0,8})", p.name) and p.is_dir()]
        shape = self._shape(bool(folders))
        self.recipe = str(self.config.get("recipe", shape))
        self.family = self.recipe if self.recipe in TITLES else shape
        self.cycles: list[CycleFolder] = []
        self.evaluations: list[EvaluationLine] = []
        self.validations = Columns([])
        self.answers = AnswerLog(path, self.problems, tails)
        if self.family == GRPO and folders:  # rocm-ext eval with a config of GRPO: its records are those of a cycle
            self.family = RAFT
        if self.family == RAFT:
            self._read_cycles(sorted(folders, key=lambda p: int(p.name[6:])))
        elif self.family == GRPO:
            self.steps, self.evaluations = read_policy_steps(path / "metrics.jsonl", self.problems, tails)
        else:
            self.steps, self.validations = read_steps(path / "metrics.jsonl", self.problems, tails)
        known = {"model", "checkpointer", "output_dir"} <= self.config.keys()
        if not (known or self.cycles or len(self.steps) or len(self.validations) or self.evaluations):
            *others, last = TITLES
            raise UserError(
                f"{path} holds no run: neither its config.yaml nor its metrics.jsonl can be read; expected the "
                f"output_dir of {', '.join(others)} or {last}" + "".join(f" ({p})" for p in self.problems[:1])
            )
        self.hardware = tails.lines(path / HARDWARE_LOG, Readings, self.problems)

    def _shape(self, cycles: bool) -> str:
        """The recipe whose records the folder has. A user's recipe need not be here: they tell which one it extends."""
        if cycles or "cycles" in self.config:
            return RAFT
        lines = list(islice(read_lines(self.path / "metrics.jsonl", problems=[]), 2))
        if (self.path / "samples.jsonl").exists() or any({"reward", "eval"} & line.keys() for line in lines):
            return GRPO
        if any("reward_chosen" in line for line in lines):
            return DPO
        return SFT

    def _read_cycles(self, folders: Sequence[Path]) -> None:
        lines = self._tails.lines(self.path / "metrics.jsonl", Lines, self.problems)
        listed = self.summary.get("cycles")
        rows = {r["cycle"]: r for r in listed if type(r.get("cycle")) is int} if is_rows(listed) else {}
        journal = Journal(self.path, self.problems, self._tails)
        self.cycles = [
            CycleFolder(p, lines, rows.get(int(p.name[6:]), {}), journal, self.problems, self._tails) for p in folders
        ]
        steps: list[Mapping[str, Any]] = []
        for cycle in self.cycles:
            before = len(steps)
            own = cycle.steps.lines
            steps += [{**line, "step": before + i, "cycle": cycle.number} for i, line in enumerate(own, start=1)]
        self.steps = Columns(steps)

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
        if self.family == GRPO:
            return steps_finished(self.summary, self.config, self.steps["step"][-1] if len(self.steps) else 0.0)
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


def running_time(lines: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """The running time of a run, without the pauses between a kill and a resume.

    Args:
        lines: lines of ``hardware.jsonl``, by time.

    Returns:
        [n] seconds at each line; indices of the lines before which the run had paused.
    """
    times = np.array([number(line.get("time")) for line in lines], dtype=np.float64)
    steps = np.diff(times, prepend=times[:1])
    usual = float(np.median(steps[1:])) if len(steps) > 1 else 0.0
    pauses = np.flatnonzero(steps > max(_PAUSE, 10 * usual))
    steps[pauses] = usual
    return np.cumsum(steps), pauses
