"""The cycles of a RAFT run."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rocm_ext.base.files import json_object
from rocm_ext.runs.records import MOST, Judged, SampleKey, finite, number, parse_scores, read_json, read_steps
from rocm_ext.runs.tails import Tails

PHASES = ("sample", "train", "eval")  # of a RAFT cycle

_Scope = tuple[Any, Any]  # cycle, phase


@dataclass(frozen=True)
class Answers:
    """Lengths and entropy of a cycle's answers.

    Attributes:
        lengths: [n] tokens of each answer.
        truncated: how many answers ``max_new_tokens`` cut off.
        entropy: nats per token, see :func:`rocm_ext.rl.records.entropy`; None without log-probs.
    """

    lengths: np.ndarray
    truncated: int
    entropy: float | None


class _Verdicts(defaultdict[_Scope, dict[SampleKey, Judged]]):
    """The last verdict on each answer, by cycle and phase."""

    def __init__(self) -> None:
        super().__init__(dict)

    def add(self, content: bytes, position: int) -> bool:
        """Take a line."""
        line = json_object(content)
        if line is not None and (key := _key(line)) is not None and isinstance(line.get("verdict"), str):
            judged = Judged(line["verdict"], number(line.get("reward")), str(line.get("detail") or ""))
            self[_scope(line)][key] = judged
        return line is not None


class _Samples:
    """Where the last line of each answer begins, and of its first: tokens, whether it was cut off, the sum of its
    log-probs and their number; by cycle and phase."""

    def __init__(self) -> None:
        self.positions: dict[_Scope, dict[SampleKey, int]] = defaultdict(dict)
        self.sizes: dict[_Scope, dict[SampleKey, tuple[int, bool, float, int]]] = defaultdict(dict)

    def add(self, content: bytes, position: int) -> bool:
        """Take a line."""
        line = json_object(content)
        if line is None or (key := _key(line)) is None:
            return line is not None
        scope, tokens = _scope(line), line.get("tokens")
        self.positions[scope][key] = position
        if key not in self.sizes[scope] and isinstance(tokens, list):
            known = finite(line.get("logprobs"))
            cut = line.get("finish_reason") == "length"
            self.sizes[scope][key] = len(tokens), cut, float(known.sum()), len(known)
        return True


def _key(line: Mapping[str, Any]) -> SampleKey | None:
    prompt, sample = line.get("prompt_id"), line.get("sample")
    return (prompt, sample) if isinstance(prompt, str) and type(sample) is int else None


def _scope(line: Mapping[str, Any]) -> _Scope:
    step, phase = line.get("step"), line.get("phase")
    return (step, phase) if type(step) is int and isinstance(phase, str) else (None, None)


_Read = TypeVar("_Read", _Verdicts, _Samples)


class Journal:
    """``samples.jsonl`` and ``verdicts.jsonl`` of a RAFT run; in a running run, each rank has such files.

    Args:
        folder: the run's.
        problems: takes messages about damaged files.
        tails: what was read of them before.
    """

    def __init__(self, folder: Path, problems: list[str], tails: Tails) -> None:
        self._folder, self._problems, self._tails = folder, problems, tails

    def _files(self, stem: str, kind: Callable[[], _Read]) -> list[tuple[Path, _Read]]:
        paths = sorted(self._folder.glob(f"{stem}*.jsonl"))
        return [(path, self._tails.lines(path, kind, self._problems)) for path in paths]

    @cached_property
    def _verdicts(self) -> list[_Verdicts]:
        return [read for _, read in self._files("verdicts", _Verdicts)]

    @cached_property
    def _samples(self) -> list[tuple[Path, _Samples]]:
        return self._files("samples", _Samples)

    def has(self, cycle: int, phase: str) -> bool:
        """Whether there are answers of this phase (``sample`` or ``eval``) of a cycle."""
        return any(read.positions.get((cycle, phase)) for _, read in self._samples)

    def verdicts(self, cycle: int, phase: str) -> dict[SampleKey, Judged]:
        """The verdicts of a phase; greedy answers have the index :data:`GREEDY`."""
        files = [read.get((cycle, phase), {}) for read in self._verdicts]
        return files[0] if len(files) == 1 else {key: judged for read in files for key, judged in read.items()}

    def answers(self, cycle: int) -> Answers:
        """Lengths and entropy of a cycle's answers."""
        found: dict[SampleKey, tuple[int, bool, float, int]] = {}
        for _, read in self._samples:
            found = {**read.sizes.get((cycle, "sample"), {}), **found}
        lengths, cut, sums, known = zip(*found.values(), strict=True) if found else ((), (), (), ())
        entropy = -sum(sums) / sum(known) if sum(known) else None
        return Answers(np.array(lengths, dtype=np.float64), sum(cut), entropy)

    def texts(self, cycle: int, phase: str, wanted: set[SampleKey]) -> dict[SampleKey, dict[str, Any]]:
        """The records of the answers ``wanted``, by key, in the files' order."""
        found: dict[SampleKey, dict[str, Any]] = {}
        for path, read in self._samples:
            of_phase = read.positions.get((cycle, phase), {})
            positions = {key: position for key, position in of_phase.items() if key in wanted}
            with suppress(OSError), path.open("rb") as file:  # it may have been rewritten or removed since
                for key, position in positions.items():
                    file.seek(position)
                    if (line := json_object(file.readline())) is not None and _key(line) == key:
                        found[key] = line
        return found


class CycleFolder:
    """``cycle_k`` of a RAFT run.

    Attributes:
        number: k; cycle 0 holds the evaluation before any training.
        steps: optimiser steps of its training.
        summary: summary of its training; empty before the end.
        seconds: duration of each phase that ended.
        phases: the last line of each phase in the run's ``metrics.jsonl``.
        row: its entry in the run's ``summary.json``; empty for an unfinished cycle.
    """

    def __init__(
        self,
        folder: Path,
        lines: Sequence[Mapping[str, Any]],
        row: Mapping[str, Any],
        journal: Journal,
        problems: list[str],
        tails: Tails,
    ) -> None:
        self.folder, self.number, self.row = folder, int(folder.name[6:]), row
        self._journal, self._problems = journal, problems
        self.steps, _ = read_steps(folder / "metrics.jsonl", problems, tails)
        self.summary = read_json(folder / "summary.json", problems)
        mine = [line for line in lines if line.get("cycle") == self.number]
        self.phases = {line["phase"]: line for line in mine if line.get("phase") in PHASES}
        self.seconds: dict[str, float] = {}
        for line in mine:
            if line.get("phase") in PHASES and 0 <= (seconds := number(line.get("seconds"))) < MOST:
                self.seconds[line["phase"]] = seconds

    @cached_property
    def scores(self) -> dict[str, Any] | None:
        """``eval.json`` with its intervals; None if it is missing or damaged."""
        return parse_scores(read_json(self.folder / "eval.json", self._problems))

    @property
    def state(self) -> str:
        """``begun``, ``sampling``, ``training``, ``trained``, ``evaluating``, ``complete`` or ``skipped``."""
        if self.kept == 0:
            return "skipped"
        if (self.folder / "eval.json").exists() or (self.row and self.number):
            return "complete"
        if self._journal.has(self.number, "eval"):
            return "evaluating"
        for sign, state in (("summary.json", "trained"), ("kept.jsonl", "training")):
            if (self.folder / sign).exists():
                return state
        return "sampling" if self._journal.has(self.number, "sample") else "begun"

    @cached_property
    def judged(self) -> dict[SampleKey, Judged]:
        """The verdicts on the cycle's answers."""
        return self._journal.verdicts(self.number, "sample")

    @cached_property
    def judged_held_out(self) -> dict[SampleKey, Judged]:
        """The verdicts of its evaluation; greedy answers have the index :data:`GREEDY`."""
        return self._journal.verdicts(self.number, "eval")

    def verdicts(self) -> Counter[str]:
        """How many answers got each verdict."""
        return Counter(judged.verdict for judged in self.judged.values())

    @cached_property
    def answers(self) -> Answers:
        """Lengths and entropy of the cycle's answers."""
        return self._journal.answers(self.number)

    def texts(self, wanted: set[SampleKey], held_out: bool = False) -> dict[SampleKey, dict[str, Any]]:
        """The records of the answers ``wanted``, by key, in the files' order; ``held_out``: those of the evaluation."""
        return self._journal.texts(self.number, "eval" if held_out else "sample", wanted)

    @cached_property
    def kept(self) -> int | None:
        """How many of its answers the cycle trains on, 0 if it was skipped; None before they are chosen."""
        path = self.folder / "kept.jsonl"
        try:
            return path.read_bytes().count(b"\n") if path.exists() else None
        except OSError:
            return None


def raft_finished(path: Path, config: Mapping[str, Any], last: int, skipped: bool = False) -> bool:
    """Whether a RAFT run whose cycle ``last`` is complete has ended.

    ``adapter/`` alone does not show it: a run that continues with more cycles still has the adapter of the shorter
    run. If the run may have stopped early, because its config allows it or its last cycle was ``skipped``, the adapter
    decides.
    """
    may_stop = skipped or any(config.get(key) for key in ("min_entropy", "stop_after_no_gain", "skip_solved"))
    return (path / "adapter").exists() and (may_stop or not last < number(config.get("cycles")))
