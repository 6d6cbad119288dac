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

_BEGINNING = re.compile(rb'\{"step": (\d{1,9}), "phase": "(sample|eval)", ')  # as the recipe begins a line
_FILE_BITS = 48  # low bits of a position: the offset in its file
_Scope = tuple[int, str]  # step, and ``sample`` or ``eval``
_NOWHERE: _Scope = (-1, "")  # for lines without them


class _Positions(JsonLines, dict[_Scope, "array[int]"]):
    """Offsets of the lines of a ``samples.jsonl``, by step and phase."""

    def add(self, content: bytes, position: int) -> bool:
        """Take a line; its tokens are not parsed where the line begins as the recipe writes it."""
        if (match := _BEGINNING.match(content)) and content.endswith(b"}\n"):
            self.setdefault((int(match[1]), match[2].decode()), array("q")).append(position)
            return True
        return super().add(content, position)

    def take(self, record: Record, position: int) -> None:
        """Take a line."""
        self.setdefault(_scope(record), array("q")).append(position)


class _VerdictLines(JsonLines):
    """The lines of a ``verdicts.jsonl`` as columns."""

    def __init__(self) -> None:
        self.prompts: dict[str, int] = {}
        self.kinds: dict[str, int] = {}
        self.columns: list[array[Any]] = [array(code) for code in "bqqqqdq"]

    def take(self, record: Record, position: int) -> None:
        """Take a line."""
        (step, phase), key, verdict = _scope(record), _key(record), record.get("verdict")
        if step >= 0 and key is not None and isinstance(verdict, str):
            prompt = self.prompts.setdefault(key[0], len(self.prompts))
            kind = self.kinds.setdefault(verdict, len(self.kinds))
            reward = number(record.get("reward"))
            values: tuple[Any, ...] = (phase == "eval", step, prompt, key[1], kind, reward, position)
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
        self._problems, self._tails = problems, tails
        self._samples, self._verdicts = (
            [folder / f"{stem}.jsonl", *sorted(folder.glob(f"{stem}.rank*.jsonl"))] for stem in ("samples", "verdicts")
        )

    @cached_property
    def verdicts(self) -> "Verdicts":
        """All verdicts."""
        return Verdicts([self._tails.lines(path, _VerdictLines, self._problems) for path in self._verdicts])

    @cached_property
    def _positions(self) -> dict[_Scope, "array[int]"]:
        """Positions of the answers, by step and phase."""
        positions: dict[_Scope, array[int]] = defaultdict(lambda: array("q"))
        for index, path in enumerate(self._samples):
            for scope, of_file in self._tails.lines(path, _Positions, self._problems).items():
                positions[scope].extend(position + (index << _FILE_BITS) for position in of_file)
        return positions

    def steps(self, held_out: bool = False) -> list[int]:
        """The steps with recorded answers, of their sampling or of the evaluation after them."""
        return sorted(step for step, phase in self._positions if phase == ("eval" if held_out else "sample"))

    def answers(self, step: int, held_out: bool = False) -> Iterator[tuple[SampleKey, int, Record]]:
        """The answers of a step's sampling, or of the evaluation after it: key, position and record."""
        positions = self._positions.get((step, "eval" if held_out else "sample"), ())
        for position, line in _read(self._samples, positions):
            if (key := _key(line)) is not None:
                yield key, position, line

    def records(self, positions: Iterable[int]) -> dict[SampleKey, Record]:
        """The answers at these positions, by key."""
        return {key: line for _, line in _read(self._samples, positions) if (key := _key(line)) is not None}

    def judged(self, rows: Sequence[int]) -> dict[int, Judged]:
        """Verdicts with their details, by row of :attr:`verdicts`."""
        columns = self.verdicts
        positions = columns.position[list(rows)].tolist()
        lines = dict(_read(self._verdicts, positions))
        details = [str(lines.get(position, {}).get("detail") or "") for position in positions]
        rewards = columns.reward[list(rows)].tolist()
        return {row: Judged(columns.name(row), *of) for row, *of in zip(rows, rewards, details, strict=True)}


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
        parts = []
        for index, file in enumerate(files):
            columns = [np.array(column) for column in file.columns]
            for at, names, known in ((2, file.prompts, prompts), (4, file.kinds, kinds)):
                columns[at] = np.array([known.setdefault(n, len(known)) for n in names], np.int64)[columns[at]]
            columns[6] += index << _FILE_BITS
            parts.append(columns)
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

    def groups(self, step: int, held_out: bool = False) -> list[np.ndarray]:
        """The rows by prompt that a step, or the evaluation after it, asked."""
        rows = self.rows(step, held_out)
        return np.split(rows, np.flatnonzero(np.diff(self.prompt[rows])) + 1) if len(rows) else []

    def name(self, row: int) -> str:
        """The verdict in a row."""
        return self.kinds[int(self.kind[row])]

    def key(self, row: int) -> SampleKey:
        """The key of a row's answer."""
        return self.prompts[int(self.prompt[row])], int(self.sample[row])

    def counts(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The steps that sampled, in order, and by verdict the number of their answers, [steps]."""
        sampled = self.held_out == 0
        steps, at = np.unique(self.step[sampled], return_inverse=True)
        kinds = self.kind[sampled]
        return steps, {name: np.bincount(at[kinds == i], minlength=len(steps)) for i, name in enumerate(self.kinds)}

    def greedy(self, step: int) -> dict[str, bool]:
        """Whether the greedy answer is right after a step, by held-out prompt."""
        rows = self.rows(step, held_out=True)
        chosen = rows[self.sample[rows] == GREEDY]
        return {self.prompts[int(self.prompt[row])]: self.name(row) == "CORRECT" for row in chosen}


def _read(paths: Sequence[Path], positions: Iterable[int]) -> Iterator[tuple[int, Record]]:
    """The objects at these positions in files."""
    by_file: dict[int, list[int]] = defaultdict(list)
    for position in positions:
        by_file[position >> _FILE_BITS].append(position)
    for index, of_file in by_file.items():
        try:
            with paths[index].open("rb") as file:
                for position in of_file:
                    file.seek(position & ((1 << _FILE_BITS) - 1))
                    if (line := json_object(file.readline())) is not None:
                        yield position, line
        except OSError:  # the file was rewritten or removed since
            continue


def _scope(line: Record) -> _Scope:
    step, phase = line.get("step"), line.get("phase")
    if type(step) is int and 0 <= step < MOST_STEPS and isinstance(phase, str) and phase in ("sample", "eval"):
        return step, phase
    return _NOWHERE


def _key(line: Record) -> SampleKey | None:
    prompt, sample = line.get("prompt_id"), line.get("sample")
    if isinstance(prompt, str) and type(sample) is int and -1 <= sample < MOST_STEPS:
        return prompt, sample
    return None
