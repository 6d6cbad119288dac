"""The frame of the benchmarks: sides, turns and ratios.

A side is a process that takes orders over a pipe, so that the sides take turns on one machine. Only ratios of times
within a round count. Rounds alternate their order (A B C, C B A, …), so a machine that slowly gets busier or hotter
hardly favours any side.
"""

import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, TypeVar

import psutil

from rocm_ext.base.process import end_with_parent

ROOT = Path(__file__).parents[2]
PATIENCE = 1800  # seconds to wait for an answer
S, T = TypeVar("S"), TypeVar("T")


def clocks() -> tuple[float, float]:
    """The time, and the processor time of all programs but this one and its ended children, in seconds."""
    used = psutil.cpu_times()
    own = os.times()
    return time.perf_counter(), used.user + used.system + used.nice - sum(own[:4])


class Failed(Exception):
    """A side ended early, or a gate or a part failed; the message is for the user."""


class Side:
    """A process that follows orders. It ends with this one, however this one ends.

    Args:
        name: the side's name in the table.
        python: the interpreter.
        arguments: the interpreter's arguments.
        log: file for the output.
    """

    def __init__(self, name: str, python: Path, arguments: Sequence[str], log: Path) -> None:
        self.name, self._log = name, log
        self._pipe, theirs = Pipe()
        self.began = time.perf_counter()
        # All sides use our CPU profile's spin count, so that waiting threads do not spin into another side's turn.
        common = {"GOMP_SPINCOUNT": "20000", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
                  "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
        # a peer's environment may find our hook in this folder; it must not load it
        autoload = (
            {} if Path(python) == Path(sys.executable) else {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        )
        with log.open("w") as out:
            self._process = subprocess.Popen(
                [str(python), *map(str, arguments)], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
                preexec_fn=end_with_parent,
                env={**os.environ, **common, **autoload, "BENCHMARK_PIPE": str(theirs.fileno())},
            )  # fmt: skip
        theirs.close()

    def ask(self, **order: Any) -> dict[str, Any]:
        """Send an order and return the answer.

        Raises:
            Failed: the side ended or hangs.
        """
        try:
            self._pipe.send(order)
            if not self._pipe.poll(PATIENCE):
                raise Failed(
                    f"{self.name} has not answered for {PATIENCE} s:\n{self._log.read_text()[-3000:]}"
                )
            return self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self._process.wait()
            raise Failed(f"{self.name} ended:\n{self._log.read_text()[-3000:]}") from error

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the process and its children; they have nothing to save."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()


def take_turns(sides: Mapping[str, S], rounds: int, turn: Callable[[S], T]) -> dict[str, list[T]]:
    """Call ``turn`` with the sides in the order A B C C B A …; return the results of every side, by its name."""
    results: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            results[name].append(turn(sides[name]))
    return results


@dataclass(frozen=True)
class Ratio:
    """Median and range, over the rounds, of a peer's seconds divided by ours."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, theirs: Sequence[float], ours: Sequence[float]) -> "Ratio":
        """Compute the ratios from the seconds of each round."""
        ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))

    def describe(self) -> dict[str, Any]:
        """Return the table's columns."""
        return {"speedup": self.median, "range": [self.low, self.high]}


@dataclass(frozen=True)
class Timed:
    """What the timed rounds of a comparison gave, by side.

    Attributes:
        seconds: seconds of each round.
        last: answer of the last round, with ``peak_memory`` and ``threads``.
        until_warm: seconds of imports, set-up and compilation.
    """

    seconds: Mapping[str, Sequence[float]]
    last: Mapping[str, Mapping[str, Any]]
    until_warm: Mapping[str, float]

    def describe(self, ours: str, peer: str) -> dict[str, Any]:
        """Return the table's columns that compare ``peer`` with ``ours``."""
        both = {
            key: [self.last[side][key] for side in (ours, peer)]
            for key in ("peak_memory", "threads")
        }
        until_warm = [self.until_warm[side] for side in (ours, peer)]
        return {
            **Ratio.of(self.seconds[peer], self.seconds[ours]).describe(),
            "until_warm": until_warm,
            **both,
        }


def difference(values: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest relative difference; NaN if one is NaN."""
    apart = [abs(a - b) / b for a, b in zip(values, expected, strict=True)]
    return math.nan if any(map(math.isnan, apart)) else max(apart)
