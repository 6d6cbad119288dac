"""Values and lines of a run's files, read as far as possible."""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeGuard

import numpy as np
import yaml

from rocm_ext.base.files import json_object
from rocm_ext.base.types import Json
from rocm_ext.runs.scores import wilson
from rocm_ext.runs.tails import JsonLines, Record

GREEDY = -1  # index of a held-out prompt's greedy answer; drawn answers count from 0
MOST = 1e12  # seconds or prompts; a file with more is damaged
MOST_STEPS = 2**31
ROWS = "rows.json"  # a run's data, see rocm_ext.data.overview
SampleKey = tuple[str, int]  # prompt id, index of the sample


class Columns:
    """The lines of a file such as ``metrics.jsonl``, by column; :meth:`put` adds some."""

    def __init__(self, lines: Iterable[Record] = ()) -> None:
        self.lines = list(lines)
        self._steps: list[float] = []  # of the lines that were put
        self._read: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, key: str) -> np.ndarray:
        """[n] float64; NaN where a line has no number."""
        column = self._read.setdefault(key, array("d"))
        column.extend(number(line.get(key)) for line in self.lines[len(column) :])
        return np.array(column)

    def has(self, key: str) -> np.ndarray:
        """[n] bool: whether a line has the key."""
        return np.array([key in line for line in self.lines], dtype=bool)

    def put(self, step: float, line: Record) -> None:
        """Take the line of a step, in the steps' order; it replaces an earlier one of the same step.

        All lines come this way, or all come at the start.
        """
        at = bisect_left(self._steps, step)
        if at < len(self._steps):
            self._read.clear()
        again = self._steps[at : at + 1] == [step]
        self._steps[at : at + again] = [step]
        self.lines[at : at + again] = [line]


class MetricLines(JsonLines):
    """The training steps, validations and evaluations in a ``metrics.jsonl``; the last line of a step counts.

    Attributes:
        steps, validations: lines by step.
        evaluations: scores by step.
        evaluated: the lines of these evaluations.
    """

    def __init__(self) -> None:
        self.steps, self.validations, self.evaluated = Columns(), Columns(), Columns()
        self.evaluations: dict[int, Scores] = {}

    def take(self, record: Record, position: int) -> None:
        """Take a line."""
        if math.isfinite(step := number(record.get("step"))):
            if "loss" in record:
                self.steps.put(step, record)
            if "val_loss" in record:
                self.validations.put(step, record)
            self._add_scores(step, record)

    def _add_scores(self, step: float, line: Record) -> None:
        if (scores := parse_scores(line.get("eval"))) is not None and 0 <= step < MOST_STEPS:
            self.evaluations[int(step)] = scores
            self.evaluated.put(step, line)


class SampledLines(MetricLines):
    """The steps and the evaluations of a run that learns from sampled answers; a step of RAFT is a cycle.

    Earlier versions of RAFT wrote a line for each phase of a cycle instead, which this joins.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sampling: dict[float, Record] = {}  # an earlier version's lines about sampling, by cycle

    def take(self, record: Record, position: int) -> None:
        """Take a line."""
        step = number(record.get("step"))
        phase = record.get("phase")
        if phase is not None:
            step = number(record.get("cycle"))
        if not 0 <= step < MOST_STEPS or step != int(step):
            return
        self._add_scores(step, record)
        if "reward" in record:
            self.steps.put(step, {key: value for key, value in record.items() if value is not None})
        elif phase == "sample":
            self._sampling[step] = record
            if self._counts(step).get("kept") == 0:
                self.steps.put(step, self._joined(step, {}))
        elif phase == "train":
            self.steps.put(step, self._joined(step, record))

    def _counts(self, cycle: float) -> Record:
        counts = self._sampling.get(cycle, {}).get("counts")
        return counts if isinstance(counts, dict) else {}

    def _joined(self, cycle: float, training: Record) -> Record:
        """Join an earlier version's lines about a cycle to the line that a step has now."""
        sampling, counts = self._sampling.get(cycle, {}), self._counts(cycle)
        verdicts = counts.get("verdicts")
        right = number(verdicts.get("CORRECT", 0)) if isinstance(verdicts, dict) else math.nan
        seconds = number(sampling.get("seconds")), number(training.get("seconds", 0))
        return {
            **counts,
            "step": cycle,
            "answers": counts.get("samples"),
            "sampled_tokens": sampling.get("tokens"),
            "sample_seconds": seconds[0],
            "wait_seconds": sampling.get("waiting"),
            "right": right / max(1.0, number(counts.get("samples"))),
            "updates": training.get("steps", 0),
            "train_seconds": seconds[1],
            "seconds": sum(seconds),
            **{key: training[key] for key in ("tokens", "tokens_per_second", "peak_memory") if key in training},
        }


class Readings(JsonLines, list[Record]):
    """The lines of a ``hardware.jsonl``, by time.

    Attributes:
        times: seconds since 1970, by line.
        gpus: ids of the GPUs in them, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self._columns: dict[Any, array[float]] = {}
        self.gpus: dict[str, None] = {}

    def take(self, record: Record, position: int = 0) -> None:
        """Take a reading, unless its time is damaged."""
        if not 0 <= (time := number(record.get("time"))) < MOST:
            return
        at = bisect_right(self.times, time)
        if at < len(self):
            self._columns.clear()
        self.times.insert(at, time)
        self.insert(at, record)
        if is_rows(gpus := record.get("gpus")):
            self.gpus |= dict.fromkeys(str(gpu.get("id", i)) for i, gpu in enumerate(gpus))

    def column(self, name: Any, read: Callable[[Record], float]) -> np.ndarray:
        """[n] float64: ``read``'s results, by line.

        Args:
            name: name of the function; another function has another name.
            read: the function.
        """
        column = self._columns.setdefault(name, array("d"))
        column.extend(map(read, self[len(column) :]))
        return np.array(column)


Share = tuple[float, float, float]  # a share, and the ends of its 95 % interval


PassAtK = TypedDict("PassAtK", {"pass": float, "interval": list[float]})  # pass@k with its 95 % interval


class EvalScores(TypedDict):
    """``eval`` in a line of ``metrics.jsonl``; see :func:`rocm_ext.rl.evaluation.score`."""

    prompts: int
    correct: int
    pass_at_1: float
    interval: list[float]
    pass_at_k: dict[str, PassAtK]
    samples_per_prompt: int
    verdicts: dict[str, int]
    truncated: int


@dataclass(frozen=True)
class Scores:
    """The scores of an evaluation.

    Attributes:
        prompts: number of prompts.
        correct: number of right greedy answers.
        passed: pass@1.
        at: pass@k of drawn answers, by k.
    """

    prompts: int
    correct: int
    passed: Share
    at: dict[int, Share]


@dataclass(frozen=True)
class Judged:
    """A verdict on an answer, from ``verdicts.jsonl``. ``reward`` is NaN if the line has none."""

    verdict: str
    reward: float
    detail: str


def number(value: object) -> float:
    """A JSON number as a float; NaN for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def parse_scores(read: object) -> Scores | None:
    """The scores of an evaluation with their intervals; None without a number of prompts and of right answers.

    Args:
        read: result of :func:`rocm_ext.rl.evaluation.score`, or any other value.
    """
    read = read if isinstance(read, Mapping) else {}
    total, correct = number(read.get("prompts")), number(read.get("correct"))
    if not 0 <= correct <= total < MOST or total < 1:
        return None
    drawn = read.get("pass_at_k")
    shares = {
        int(k): (p, *wilson(p * total, int(total)))
        for k, at in (drawn.items() if isinstance(drawn, dict) else ())
        if k.isdecimal() and len(k) < 9 and isinstance(at, dict) and 0 <= (p := number(at.get("pass"))) <= 1
    }
    interval = wilson(correct, int(total))
    return Scores(int(total), int(correct), (correct / total, *interval), shares)


def is_rows(value: object) -> TypeGuard[list[Record]]:
    """Whether ``value`` is a list of JSON objects."""
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def read_json(path: Path, problems: list[str]) -> Json:
    """The JSON object in a file; empty if the file is missing or, with a message in ``problems``, damaged."""
    content = _read_bytes(path, problems)
    value = {} if content is None else json_object(content)
    if value is None:
        problems.append(f"{path} holds no JSON object and is skipped")
        return {}
    return value


def read_yaml(path: Path, problems: list[str]) -> Json:
    """The YAML mapping in a file; empty if the file is missing or, with a message in ``problems``, damaged."""
    content = _read_bytes(path, problems)
    try:
        value = {} if content is None else yaml.safe_load(content.decode())
    except (yaml.YAMLError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        problems.append(f"{path} holds no YAML mapping and is skipped")
        return {}
    return {str(key): setting for key, setting in value.items()}


def _read_bytes(path: Path, problems: list[str]) -> bytes | None:
    try:
        return path.read_bytes() if path.exists() else None
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror or error}")
        return None
