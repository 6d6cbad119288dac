"""The answers of a run of RAFT or GRPO and their verdicts: ``samples.jsonl`` and ``verdicts.jsonl``.

The files may have millions of lines. So they are read line by line, and only numbers are kept: the verdicts as columns,
and the positions of the answers, whose texts are read on demand. A position is the number of the file, since the ranks
of a running run have separate files, and an offset in it. A step of RAFT is a cycle.
"""

import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rocm_ext.base.files import json_object
from rocm_ext.runs.records import GREEDY, MOST_STEPS, Judged, SampleKey, number
from rocm_ext.runs.tails import JsonLines, Record, Tails

# the recipe begins a line like this
_BEGINNING = re.compile(rb'\{"step": (\d{1,9}), "phase": "(sample|eval)", ')
_FILE_BITS = 48  # low bits of a position: the offset in its file
_Scope = tuple[int, str]  # step, and ``sample`` or ``eval``
_NOWHERE: _Scope = (-1, "")  # the scope of a line that names none


class _Positions(JsonLines, dict[_Scope, "array[int]"]):
    """Offsets of the lines of a ``samples.jsonl``, by step and phase."""

    def add(self, content: bytes, position: int) -> bool:
        """Take a line; its tokens are not parsed where the line begins as the recipe writes it."""
        match = _BEGINNING.match(content)
        if match is None or not content.endswith(b"}\n"):
            return super().add(content, position)
        step, phase = match.groups()
        self._put((int(step), phase.decode()), position)
        return True

    def take(self, record: Record, position: int) -> None:
        """Take a line."""
        self._put(_scope(record), position)

    def _put(self, scope: _Scope, position: int) -> None:
        self.setdefault(scope, array("q")).append(position)


class _VerdictLines(JsonLines):
    """The lines of a ``verdicts.jsonl`` as columns.

    Attributes:
        prompts, kinds: indices of the names in the columns.
        columns: whether it is of an evaluation, step, prompt, sample, kind, reward and position, by line.
    """

    def __init__(self) -> None:
        self.prompts: dict[str, int] = {}
        self.kinds: dict[str, int] = {}
        self.columns: list[array[Any]] = [array(code) for code in "bqqqqdq"]

    def take(self, record: Record, position: int) -> None:
        """Take a line."""
        step, phase = _scope(record)
        key = _key(record)
        verdict = record.get("verdict")
        if step < 0 or key is None or not isinstance(verdict, str):
            return
        prompt, sample = key
        values = (
            phase == "eval",
            step,
            self.prompts.setdefault(prompt, len(self.prompts)),
            sample,
            self.kinds.setdefault(verdict, len(self.kinds)),
            number(record.get("reward")),
            position,
        )
        for column, value in zip(self.columns, values, strict=True):
            column.append(value)


class AnswerLog:
    """The answers of a run and their verdicts.

    Args:
        folder: the run's folder.
        problems: list that gets messages about damaged files.
        tails: contents of the files that were read before.
    """

    def __init__(self, folder: Path, problems: list[str], tails: Tails) -> None:
        self._problems = problems
        self._tails = tails
        self._samples = [folder / "samples.jsonl", *sorted(folder.glob("samples.rank*.jsonl"))]
        self._verdicts = [folder / "verdicts.jsonl", *sorted(folder.glob("verdicts.rank*.jsonl"))]

    @cached_property
    def verdicts(self) -> "Verdicts":
        """All verdicts."""
        files = [self._tails.lines(path, _VerdictLines, self._problems) for path in self._verdicts]
        return Verdicts(files)

    @cached_property
    def _positions(self) -> dict[_Scope, "array[int]"]:
        """Positions of the answers, by step and phase."""
        positions: dict[_Scope, array[int]] = defaultdict(lambda: array("q"))
        for index, path in enumerate(self._samples):
            file = index << _FILE_BITS
            by_scope = self._tails.lines(path, _Positions, self._problems)
            for scope, offsets in by_scope.items():
                positions[scope].extend(file + offset for offset in offsets)
        return positions

    def steps(self, held_out: bool = False) -> list[int]:
        """The steps with recorded answers, of their sampling or of the evaluation after them."""
        return sorted(step for step, phase in self._positions if phase == _phase(held_out))

    def answers(self, step: int, held_out: bool = False) -> Iterator[tuple[SampleKey, int, Record]]:
        """The answers of a step's sampling, or of the evaluation after it: key, position and record."""
        return self._at(self._positions.get((step, _phase(held_out)), ()))

    def records(self, positions: Iterable[int]) -> dict[SampleKey, Record]:
        """The answers at these positions, by key."""
        return {key: record for key, _, record in self._at(positions)}

    def _at(self, positions: Iterable[int]) -> Iterator[tuple[SampleKey, int, Record]]:
        for position, record in _read(self._samples, positions):
            key = _key(record)
            if key is not None:
                yield key, position, record

    def judged(self, rows: Sequence[int]) -> dict[int, Judged]:
        """Verdicts with their details, by row of :attr:`verdicts`."""
        verdicts = self.verdicts
        positions = {row: int(verdicts.position[row]) for row in rows}
        records = dict(_read(self._verdicts, positions.values()))
        judged = {}
        for row, position in positions.items():
            detail = records.get(position, {}).get("detail") or ""
            reward = float(verdicts.reward[row])
            judged[row] = Judged(verdicts.name(row), reward, str(detail))
        return judged


class Verdicts:
    """The verdicts of a run as columns, sorted by phase, step, prompt and sample; the last line of an answer counts.

    Args:
        files: the lines, by file.

    Attributes:
        kinds, prompts: the names that ``kind`` and ``prompt`` index.
        held_out, step, prompt, sample, kind, reward, position: [n] columns; ``reward`` is NaN without one.
    """

    def __init__(self, files: Sequence[_VerdictLines]) -> None:
        prompts: dict[str, int] = {}
        kinds: dict[str, int] = {}
        by_file: list[tuple[np.ndarray, ...]] = []
        for index, file in enumerate(files):
            held_out, step, prompt, sample, kind, reward, offset = map(np.array, file.columns)
            prompt = _renumbered(prompt, file.prompts, prompts)
            kind = _renumbered(kind, file.kinds, kinds)
            position = offset + (index << _FILE_BITS)
            by_file.append((held_out, step, prompt, sample, kind, reward, position))
        columns = [np.concatenate(parts) for parts in zip(*by_file, strict=True)]
        keys = np.stack(columns[:4])
        order = np.lexsort(keys[::-1])  # stable: the lines of an answer stay in their order
        next_differs = np.diff(keys[:, order]).any(axis=0)
        last = np.append(next_differs, True)[: len(order)]
        rows = order[last]
        held_out, step, prompt, sample, kind, reward, position = columns
        self.held_out = held_out[rows]
        self.step = step[rows]
        self.prompt = prompt[rows]
        self.sample = sample[rows]
        self.kind = kind[rows]
        self.reward = reward[rows]
        self.position = position[rows]
        self.prompts = list(prompts)
        self.kinds = list(kinds)

    def rows(self, step: int, held_out: bool = False) -> np.ndarray:
        """[n] rows of a step's sampling, or of the evaluation after it."""
        return np.flatnonzero((self.step == step) & (self.held_out == held_out))

    def groups(self, step: int, held_out: bool = False) -> list[np.ndarray]:
        """The rows by prompt that a step, or the evaluation after it, asked."""
        rows = self.rows(step, held_out)
        if not len(rows):
            return []
        starts = np.flatnonzero(np.diff(self.prompt[rows])) + 1
        return np.split(rows, starts)

    def name(self, row: int) -> str:
        """The verdict in a row."""
        return self.kinds[self.kind[row]]

    def key(self, row: int) -> SampleKey:
        """The key of a row's answer."""
        return self.prompts[self.prompt[row]], int(self.sample[row])

    def counts(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The steps that sampled, in order, and by verdict the number of their answers, [steps]."""
        sampled = self.held_out == 0
        kinds = self.kind[sampled]
        steps, indices = np.unique(self.step[sampled], return_inverse=True)
        counts = {}
        for i, name in enumerate(self.kinds):
            counts[name] = np.bincount(indices[kinds == i], minlength=len(steps))
        return steps, counts

    def greedy(self, step: int) -> dict[str, bool]:
        """Whether the greedy answer is right after a step, by held-out prompt."""
        right = {}
        for row in self.rows(step, held_out=True):
            prompt, sample = self.key(row)
            if sample == GREEDY:
                right[prompt] = self.name(row) == "CORRECT"
        return right


def _renumbered(column: np.ndarray, names: Iterable[str], numbers: dict[str, int]) -> np.ndarray:
    """Replace a file's indices of names by the indices that all files share, and add new names to these."""
    shared = [numbers.setdefault(name, len(numbers)) for name in names]
    return np.array(shared, np.int64)[column]


def _read(paths: Sequence[Path], positions: Iterable[int]) -> Iterator[tuple[int, Record]]:
    """The objects at these positions in files."""
    by_file: dict[int, list[int]] = defaultdict(list)
    for position in positions:
        by_file[position >> _FILE_BITS].append(position)
    for index, in_file in by_file.items():
        try:
            with paths[index].open("rb") as file:
                for position in in_file:
                    file.seek(position - (index << _FILE_BITS))
                    record = json_object(file.readline())
                    if record is not None:
                        yield position, record
        except OSError:  # the file was rewritten or removed since
            continue


def _phase(held_out: bool) -> str:
    return "eval" if held_out else "sample"


def _scope(record: Record) -> _Scope:
    step = record.get("step")
    phase = record.get("phase")
    if type(step) is int and 0 <= step < MOST_STEPS and phase in ("sample", "eval"):
        return step, str(phase)
    return _NOWHERE


def _key(record: Record) -> SampleKey | None:
    prompt = record.get("prompt_id")
    sample = record.get("sample")
    if isinstance(prompt, str) and type(sample) is int and GREEDY <= sample < MOST_STEPS:
        return prompt, sample
    return None
