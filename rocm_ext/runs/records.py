"""Values and lines of a run's files, read as far as possible."""

import math
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeGuard, TypeVar

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
_Item = TypeVar("_Item")
SampleKey = tuple[str, int]  # prompt id, index of the sample


class Columns:
    """The lines of a file such as ``metrics.jsonl``, by column; :meth:`put` adds some."""

    def __init__(self, lines: Iterable[Record] = ()) -> None:
        self.lines = list(lines)
        self._steps: list[float] = []  # steps of the lines that were put
        self._read: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, key: str) -> np.ndarray:
        """[n] float64; NaN where a line has no number."""
        column = self._read.setdefault(key, array("d"))
        unread = self.lines[len(column) :]
        column.extend(number(line.get(key)) for line in unread)
        return np.array(column)

    def has(self, key: str) -> np.ndarray:
        """[n] bool: whether a line has the key."""
        return np.array([key in line for line in self.lines], dtype=bool)

    def put(self, step: float, line: Record) -> None:
        """Take the line of a step, in the steps' order; it replaces an earlier one of the same step.

        All lines come this way, or all come at the start.
        """
        i = bisect_left(self._steps, step)
        end = bisect_right(self._steps, step)
        if i < len(self._steps):
            self._read.clear()
        self._steps[i:end] = [step]
        self.lines[i:end] = [line]


class MetricLines(JsonLines):
    """The training steps, validations and evaluations in a ``metrics.jsonl``; the last line of a step counts.

    Attributes:
        steps, validations: lines by step.
        evaluations: scores by column, ``eval`` or ``eval/NAME``, and step.
        evaluated: the lines of these evaluations.
    """

    def __init__(self) -> None:
        self.steps = Columns()
        self.validations = Columns()
        self.evaluated = Columns()
        self.evaluations: dict[str, dict[int, Scores]] = defaultdict(dict)

    def take(self, record: Record, position: int) -> None:
        """Take a line."""
        step = number(record.get("step"))
        if not math.isfinite(step):
            return
        if "loss" in record:
            self.steps.put(step, record)
        if of_sets([record]):
            self.validations.put(step, record)
        self._take_scores(step, record)

    def _take_scores(self, step: float, line: Record) -> None:
        for key in of_sets([line], "eval"):
            scores = parse_scores(line[key])
            if scores is not None and 0 <= step < MOST_STEPS:
                self.evaluations[key][int(step)] = scores
                self.evaluated.put(step, line)


class SampledLines(MetricLines):
    """The steps and the evaluations of a run that learns from sampled answers; a step of RAFT is a cycle.

    Earlier versions of RAFT wrote a line for each phase of a cycle instead, which this joins.
    """

    def __init__(self) -> None:
        super().__init__()
        # an earlier version's lines about sampling, by cycle
        self._sampling: dict[float, Record] = {}

    def take(self, record: Record, position: int) -> None:
        """Take a line."""
        phase = record.get("phase")
        step = number(record.get("step" if phase is None else "cycle"))
        if not 0 <= step < MOST_STEPS or step != int(step):
            return
        self._take_scores(step, record)
        if "reward" in record:
            known = {key: value for key, value in record.items() if value is not None}
            self.steps.put(step, known)
        elif phase == "sample":
            self._sampling[step] = record
            line = _joined(step, record, {})
            if line.get("kept") == 0:  # no training follows
                self.steps.put(step, line)
        elif phase == "train":
            sampling = self._sampling.get(step, {})
            self.steps.put(step, _joined(step, sampling, record))


def _joined(cycle: float, sampling: Record, training: Record) -> Record:
    """Join an earlier version's lines about a cycle to the line that a step has now."""
    counts = as_object(sampling.get("counts"))
    verdicts = counts.get("verdicts")
    right = math.nan
    if isinstance(verdicts, dict):
        right = number(verdicts.get("CORRECT", 0))
    sample_seconds = number(sampling.get("seconds"))
    train_seconds = number(training.get("seconds", 0))
    line = {
        **counts,
        "step": cycle,
        "answers": counts.get("samples"),
        "sampled_tokens": sampling.get("tokens"),
        "sample_seconds": sample_seconds,
        "wait_seconds": sampling.get("waiting"),
        "right": right / max(1.0, number(counts.get("samples"))),
        "updates": training.get("steps", 0),
        "train_seconds": train_seconds,
        "seconds": sample_seconds + train_seconds,
    }
    for key in ("tokens", "tokens_per_second", "peak_memory"):
        if key in training:
            line[key] = training[key]
    return line


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
        time = number(record.get("time"))
        if not 0 <= time < MOST:
            return
        i = bisect_right(self.times, time)
        if i < len(self):
            self._columns.clear()
        self.times.insert(i, time)
        self.insert(i, record)
        gpus = record.get("gpus")
        if is_rows(gpus):
            for index, gpu in enumerate(gpus):
                self.gpus[str(gpu.get("id", index))] = None

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


# pass@k with its 95 % interval
PassAtK = TypedDict("PassAtK", {"pass": float, "interval": list[float]})


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
        drawn: pass@k of drawn answers, by k.
    """

    prompts: int
    correct: int
    passed: Share
    drawn: dict[int, Share]


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


def parse_scores(value: object) -> Scores | None:
    """The scores of an evaluation with their intervals.

    Args:
        value: result of :func:`rocm_ext.rl.evaluation.score`, or any other value.

    Returns:
        The scores. None without a number of prompts and of right answers.
    """
    scores = as_object(value)
    prompts = number(scores.get("prompts"))
    correct = number(scores.get("correct"))
    if not 0 <= correct <= prompts < MOST or prompts < 1:
        return None
    total = int(prompts)
    drawn = {}
    pass_at_k = as_object(scores.get("pass_at_k"))
    for k, measured in pass_at_k.items():
        share = number(as_object(measured).get("pass"))
        if k.isdecimal() and len(k) < 9 and 0 <= share <= 1:
            low, high = wilson(share * prompts, total)
            drawn[int(k)] = (share, low, high)
    low, high = wilson(correct, total)
    return Scores(
        prompts=total,
        correct=int(correct),
        passed=(correct / prompts, low, high),
        drawn=drawn,
    )


def column(measured: str, name: str) -> str:
    """The column of a measurement in ``metrics.jsonl``, of a data set with this name or an empty one."""
    return f"{measured}/{name}" if name else measured


def of_sets(
    lines: Iterable[Record], measured: str = "val_loss", title: str = "validation loss"
) -> dict[str, str]:
    """The columns of a measurement on held-out data, with titles: one, or ``measured/NAME`` by named data set."""
    found = {}
    for line in lines:
        for key in line:
            rest = key.removeprefix(measured)
            if key == measured:
                found[key] = title
            elif key != rest and re.fullmatch(r"/[\w-]+", rest):
                found[key] = f"{title} of {rest[1:]}"
    return found


def first_and_last(items: list[_Item]) -> list[_Item]:
    """The ends of a list. A list of one item has one end."""
    return items[:1] + items[1:][-1:]


def as_object(value: object) -> Json:
    """A JSON object as it is; an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def is_rows(value: object) -> TypeGuard[list[Record]]:
    """Whether ``value`` is a list of JSON objects."""
    return isinstance(value, list) and all(isinstance(row, dict) for row in value)


def read_json(path: Path, problems: list[str]) -> Json:
    """The JSON object in a file. Empty if the file is missing or, with a message in ``problems``, damaged."""
    content = _read_bytes(path, problems)
    if content is None:
        return {}
    value = json_object(content)
    if value is None:
        problems.append(f"{path} holds no JSON object and is skipped")
    return value or {}


def read_yaml(path: Path, problems: list[str]) -> Json:
    """The YAML mapping in a file. Empty if the file is missing or, with a message in ``problems``, damaged."""
    content = _read_bytes(path, problems)
    if content is None:
        return {}
    try:
        value = yaml.safe_load(content.decode())
    except (yaml.YAMLError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        problems.append(f"{path} holds no YAML mapping and is skipped")
        return {}
    return {str(key): setting for key, setting in value.items()}


def _read_bytes(path: Path, problems: list[str]) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror or error}")
        return None
