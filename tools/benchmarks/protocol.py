"""Run each side in its own process and give it orders over a pipe, so that the sides take turns on one machine.

Only ratios of times within a round count. Rounds alternate their order (A B C, C B A, …), so a machine that slowly
gets busier or hotter hardly favours any side.
"""

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from rocm_ext.base.process import end_with_parent

ROOT = Path(__file__).parents[2]
PATIENCE = 1800  # seconds to wait for an answer


class Failed(Exception):
    """A side ended early or a gate failed; the message is for the user."""


class Side:
    """A process that follows orders. It ends with this one, however this one ends.

    Args:
        name: in the table.
        python: interpreter of its environment.
        arguments: of the interpreter.
        log: file for its output.
    """

    def __init__(self, name: str, python: Path, arguments: Sequence[str], log: Path) -> None:
        self.name, self._log = name, log
        self._pipe, theirs = Pipe()
        self.began = time.perf_counter()
        # All sides use our CPU profile's spin count, so that waiting threads do not spin into another side's turn.
        common = {"GOMP_SPINCOUNT": "20000", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
                  "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
        # without our hook, which an environment of the other side may find in this folder
        autoload = {} if Path(python) == Path(sys.executable) else {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
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
                raise Failed(f"{self.name} has not answered for {PATIENCE} s:\n{self._log.read_text()[-3000:]}")
            return self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self._process.wait()
            raise Failed(f"{self.name} ended:\n{self._log.read_text()[-3000:]}") from error

    def end(self) -> None:
        """Kill the process and its children; they have nothing to save."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def in_turn(sides: Sequence[Side], rounds: int) -> Iterator[Side]:
    """Yield the sides in the order A B C C B A …"""
    for number in range(rounds):
        yield from sides[:: 1 if number % 2 == 0 else -1]


def both(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the table's columns of what two sides used, from an answer of each."""
    return {key: [ours[key], theirs[key]] for key in ("peak_memory", "threads")}


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
