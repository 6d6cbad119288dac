"""The records of a GRPO run: a line for each step, and the answers and verdicts of all steps in two files.

The files may have millions of lines. So they are read line by line, and only numbers are kept: the verdicts as columns,
and the positions of the answers, whose texts are read when they are wanted.
"""

import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rocm_ext.base.files import json_object
from rocm_ext.runs.records import Columns, Judged, Latest, SampleKey, number, parse_scores
from rocm_ext.runs.tails import Tails

_PHASES = ("sample", "eval")
_BEGINNING = re.compile(rb'\{"step": (\d{1,9}), "phase": "(sample|eval)", ')  # of a line as the recipe writes it
_FILE_BITS = 48  # of a position are the offset in its file
_MOST_STEPS = 2**31
_Scope = tuple[int, str]  # step, phase
_NOWHERE: _Scope = (-1, "")  # of a line without them


@dataclass(frozen=True)
class EvaluationLine:
    """A line with the scores of an evaluation.

    Attributes:
        step: steps done before it.
        scores: as of :func:`rocm_ext.runs.records.parse_scores`.
        seconds: duration; NaN if unknown.
        truncated: how many answers ``max_new_tokens`` cut off; NaN if unknown.
    """

    step: int
    scores: Mapping[str, Any]
    seconds: float
    truncated: float


class _PolicySteps:
    """The steps and the evaluations in a ``metrics.jsonl``; the last line of a step counts."""

    def __init__(self) -> None:
        self.steps = Latest()
        self.evaluations: dict[int, EvaluationLine] = {}

    def add(self, content: bytes, position: int) -> bool:
        """Take a line."""
        line = json_object(content)
        if line is None or not 0 <= (step := number(line.get("step"))) < _MOST_STEPS:
            return line is not None
        if isinstance(read := line.get("eval"), dict):
            if (scores := parse_scores(read)) is not None:
                seconds, truncated = number(line.get("seconds")), number(read.get("truncated"))
                self.evaluations[int(step)] = EvaluationLine(int(step), scores, seconds, truncated)
        elif "reward" in line:
            self.steps.add(step, {key: value for key, value in line.items() if value is not None})
        return True


def read_policy_steps(path: Path, problems: list[str], tails: Tails) -> tuple[Columns, list[EvaluationLine]]:
    """The steps and the evaluations in a ``metrics.jsonl``, each in order; the last line of a step counts."""
    found = tails.lines(path, _PolicySteps, problems)
    return found.steps.columns, [found.evaluations[step] for step in sorted(found.evaluations)]


def steps_finished(summary: Mapping[str, Any], config: Mapping[str, Any], last: float) -> bool:
    """Whether a GRPO run whose last recorded step is ``last`` has ended by itself.

    A run that continues with more steps keeps the summary of the shorter run until it ends. So a summary before the
    config's last step counts only if the run may have stopped early.
    """
    wanted = number(config.get("steps"))
    may_stop = any(config.get(key) for key in ("min_entropy", "stop_after_no_gain", "max_length_share"))
    return number(summary.get("steps")) == last and (may_stop or not last < wanted)


class _Positions(dict[_Scope, "array[int]"]):
    """Where the lines of each step and phase of a ``samples.jsonl`` begin."""

    def add(self, content: bytes, position: int) -> bool:
        """Take a line."""
        if (scope := _scope(content)) is not None:
            self.setdefault(scope, array("q")).append(position)
        return scope is not None


class _VerdictLines:
    """The lines of a ``verdicts.jsonl`` as columns."""

    def __init__(self) -> None:
        self.prompts: dict[str, int] = {}
        self.kinds: dict[str, int] = {}
        self.columns: list[array[Any]] = [array(code) for code in "bqqqqdq"]

    def add(self, content: bytes, position: int) -> bool:
        """Take a line."""
        if (line := json_object(content)) is None:
            return False
        (step, phase), key, verdict = _scope_of(line), _key(line), line.get("verdict")
        if step >= 0 and key is not None and isinstance(verdict, str):
            prompt = self.prompts.setdefault(key[0], len(self.prompts))
            kind = self.kinds.setdefault(verdict, len(self.kinds))
            reward = number(line.get("reward"))
            values: tuple[Any, ...] = (phase == "eval", step, prompt, key[1], kind, reward, position)
            for column, value in zip(self.columns, values, strict=True):
                column.append(value)
        return True


class AnswerLog:
    """``samples.jsonl`` and ``verdicts.jsonl`` of a run of RAFT or GRPO; in a running run, each rank has such files.

    A position is the number of the file and an offset in it.

    Args:
        folder: the run's.
        problems: takes messages about damaged files.
        tails: what was read of them before.
    """

    def __init__(self, folder: Path, problems: list[str], tails: Tails) -> None:
        self._problems, self._tails = problems, tails
        self._samples, self._verdicts = _Files(folder, "samples"), _Files(folder, "verdicts")

    @cached_property
    def verdicts(self) -> "Verdicts":
        """All verdicts."""
        return Verdicts([self._tails.lines(path, _VerdictLines, self._problems) for path in self._verdicts.paths])

    @cached_property
    def _positions(self) -> dict[_Scope, "array[int]"]:
        """Where the answers of each step and phase are."""
        found: dict[_Scope, array[int]] = defaultdict(lambda: array("q"))
        for index, path in enumerate(self._samples.paths):
            for scope, positions in self._tails.lines(path, _Positions, self._problems).items():
                found[scope].extend(position + (index << _FILE_BITS) for position in positions)
        return found

    @property
    def steps(self) -> list[int]:
        """The steps with answers in the file."""
        return sorted(step for step, phase in self._positions if phase == "sample")

    def answers(self, step: int) -> Iterator[tuple[SampleKey, int, dict[str, Any]]]:
        """The answers of a step's sampling: key, position and record."""
        for position, line in self._samples.read(self._positions.get((step, "sample"), ())):
            if (key := _key(line)) is not None:
                yield key, position, line

    def records(self, positions: Iterable[int]) -> dict[SampleKey, dict[str, Any]]:
        """The answers at these positions, by key."""
        return {key: line for _, line in self._samples.read(positions) if (key := _key(line)) is not None}

    def details(self, step: int, rows: Sequence[int]) -> dict[int, str]:
        """The details of verdicts, by row of :attr:`verdicts`."""
        positions = self.verdicts.position[list(rows)].tolist()
        read = dict(self._verdicts.read(positions))
        return {
            row: str(read.get(position, {}).get("detail") or "") for row, position in zip(rows, positions, strict=True)
        }


class Verdicts:
    """The verdicts of a run as columns, sorted by phase, step, prompt and sample; the last line of an answer counts.

    Args:
        files: the lines of each file.

    Attributes:
        kinds, prompts: the names that ``kind`` and ``prompt`` index.
        held_out, step, prompt, sample, kind, reward, position: [n] columns; ``reward`` is NaN without one.
    """

    def __init__(self, files: Sequence[_VerdictLines]) -> None:
        prompts: dict[str, int] = {}
        kinds: dict[str, int] = {}
        parts = []
        for index, file in enumerate(files):
            own = [np.array(column) for column in file.columns]
            for column, names, all_names in ((2, file.prompts, prompts), (4, file.kinds, kinds)):
                own[column] = np.array([all_names.setdefault(n, len(all_names)) for n in names], np.int64)[own[column]]
            own[6] += index << _FILE_BITS
            parts.append(own)
        arrays = [np.concatenate(columns) for columns in zip(*parts, strict=True)]
        self.kinds, self.prompts = list(kinds), list(prompts)
        order = np.lexsort((np.arange(len(arrays[0])), *arrays[3::-1]))
        key_columns = [column[order] for column in arrays[:4]]
        last = np.ones(len(order), dtype=bool)
        last[:-1] = np.any([column[1:] != column[:-1] for column in key_columns], axis=0)
        kept = [column[order[last]] for column in arrays]
        self.held_out, self.step, self.prompt, self.sample, self.kind, self.reward, self.position = kept

    def rows(self, step: int, held_out: bool = False) -> np.ndarray:
        """[n] rows of a step's sampling, or of the evaluation after it."""
        return np.flatnonzero((self.step == step) & (self.held_out == held_out))

    def groups(self, step: int) -> list[np.ndarray]:
        """The rows of each prompt that a step asked."""
        rows = self.rows(step)
        return np.split(rows, np.flatnonzero(np.diff(self.prompt[rows])) + 1) if len(rows) else []

    def name(self, row: int) -> str:
        """The verdict in a row."""
        return self.kinds[int(self.kind[row])]

    def judged(self, row: int, detail: str = "") -> Judged:
        """A row with its detail."""
        return Judged(self.name(row), float(self.reward[row]), detail)

    def counts(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The steps that sampled, in order, and how many of the answers of each step have a verdict, by verdict."""
        own = self.held_out == 0
        steps, at = np.unique(self.step[own], return_inverse=True)
        kinds = self.kind[own]
        return steps, {name: np.bincount(at[kinds == i], minlength=len(steps)) for i, name in enumerate(self.kinds)}

    def greedy(self, step: int, index: int) -> dict[str, bool]:
        """Whether each held-out prompt's answer ``index`` is right after a step."""
        rows = self.rows(step, held_out=True)
        chosen = rows[self.sample[rows] == index]
        return {self.prompts[int(self.prompt[row])]: self.name(row) == "CORRECT" for row in chosen}


class _Files:
    """A journal with the other ranks' files beside it."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.paths = [folder / f"{stem}.jsonl", *sorted(folder.glob(f"{stem}.rank*.jsonl"))]

    def read(self, positions: Iterable[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        """The objects at these positions."""
        by_file: dict[int, list[int]] = defaultdict(list)
        for position in positions:
            by_file[position >> _FILE_BITS].append(position)
        for number_, own in by_file.items():
            try:
                with self.paths[number_].open("rb") as file:
                    for position in own:
                        file.seek(position & ((1 << _FILE_BITS) - 1))
                        if (line := json_object(file.readline())) is not None:
                            yield position, line
            except OSError:  # the file was rewritten or removed since
                continue


def _scope(content: bytes) -> _Scope | None:
    """Step and phase of a line of ``samples.jsonl``, without parsing its tokens where possible; None: damaged."""
    if (found := _BEGINNING.match(content)) and content.endswith(b"}\n"):
        return int(found[1]), found[2].decode()
    line = json_object(content)
    return None if line is None else _scope_of(line)


def _scope_of(line: Mapping[str, Any]) -> _Scope:
    step, phase = line.get("step"), line.get("phase")
    if type(step) is int and 0 <= step < _MOST_STEPS and isinstance(phase, str) and phase in _PHASES:
        return step, phase
    return _NOWHERE


def _key(line: Mapping[str, Any]) -> SampleKey | None:
    prompt, sample = line.get("prompt_id"), line.get("sample")
    if isinstance(prompt, str) and type(sample) is int and -1 <= sample < _MOST_STEPS:
        return prompt, sample
    return None
