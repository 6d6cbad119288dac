"""The cycles of a RAFT run."""

from collections import Counter
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
SELECTION = "selection.json"  # of a RAFT cycle: what the selection of its answers counted


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


class _Verdicts(dict[SampleKey, Judged]):
    """The last verdict on each answer."""

    def add(self, content: bytes, position: int) -> bool:
        """Take a line."""
        line = json_object(content)
        if line is not None and (key := _key(line)) is not None and isinstance(line.get("verdict"), str):
            self[key] = Judged(line["verdict"], number(line.get("reward")), str(line.get("detail") or ""))
        return line is not None


class _Samples:
    """Where the last line of each answer begins, and of its first: tokens, whether it was cut off, the sum of its
    log-probs and their number."""

    def __init__(self) -> None:
        self.positions: dict[SampleKey, int] = {}
        self.sizes: dict[SampleKey, tuple[int, bool, float, int]] = {}

    def add(self, content: bytes, position: int) -> bool:
        """Take a line."""
        line = json_object(content)
        if line is None or (key := _key(line)) is None:
            return line is not None
        self.positions[key] = position
        tokens = line.get("tokens")
        if key not in self.sizes and isinstance(tokens, list):
            known = finite(line.get("logprobs"))
            self.sizes[key] = len(tokens), line.get("finish_reason") == "length", float(known.sum()), len(known)
        return True


def _key(line: Mapping[str, Any]) -> SampleKey | None:
    prompt, sample = line.get("prompt_id"), line.get("sample")
    return (prompt, sample) if isinstance(prompt, str) and type(sample) is int else None


_Read = TypeVar("_Read", _Verdicts, _Samples)


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
        problems: list[str],
        tails: Tails,
    ) -> None:
        self.folder, self.number, self.row = folder, int(folder.name[6:]), row
        self._problems, self._tails = problems, tails
        self.steps, _ = read_steps(folder / "metrics.jsonl", problems, tails)
        self.summary = read_json(folder / "summary.json", problems)
        mine = [line for line in lines if line.get("cycle") == self.number]
        self.phases = {line["phase"]: line for line in mine if line.get("phase") in PHASES}
        self.seconds: dict[str, float] = {}
        for line in mine:
            if line.get("phase") in PHASES and 0 <= (seconds := number(line.get("seconds"))) < MOST:
                self.seconds[line["phase"]] = self.seconds.get(line["phase"], 0.0) + seconds

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
        files = [read for _, read in self._files(folder, "verdicts", _Verdicts)]
        return files[0] if len(files) == 1 else {key: judged for read in files for key, judged in read.items()}

    def _files(self, folder: Path, stem: str, kind: Callable[[], _Read]) -> list[tuple[Path, _Read]]:
        # in a running run, each rank has a file of its own
        paths = sorted(folder.glob(f"{stem}*.jsonl"))
        return [(path, self._tails.lines(path, kind, self._problems)) for path in paths]

    def verdicts(self) -> Counter[str]:
        """How many answers got each verdict."""
        return Counter(judged.verdict for judged in self.judged.values())

    @cached_property
    def answers(self) -> Answers:
        """Lengths and entropy of the cycle's answers."""
        found: dict[SampleKey, tuple[int, bool, float, int]] = {}
        for _, read in self._files(self.folder, "samples", _Samples):
            found = {**read.sizes, **found}
        lengths, cut, sums, known = zip(*found.values(), strict=True) if found else ((), (), (), ())
        entropy = -sum(sums) / sum(known) if sum(known) else None
        return Answers(np.array(lengths, dtype=np.float64), sum(cut), entropy)

    def texts(self, wanted: set[SampleKey], held_out: bool = False) -> dict[SampleKey, dict[str, Any]]:
        """The records of the answers ``wanted``, by key, in the files' order; ``held_out``: those of the evaluation."""
        found: dict[SampleKey, dict[str, Any]] = {}
        for path, read in self._files(self.folder / "eval" if held_out else self.folder, "samples", _Samples):
            positions = {key: position for key, position in read.positions.items() if key in wanted}
            with suppress(OSError), path.open("rb") as file:  # it may have been rewritten or removed since
                for key, position in positions.items():
                    file.seek(position)
                    if (line := json_object(file.readline())) is not None and _key(line) == key:
                        found[key] = line
        return found

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
