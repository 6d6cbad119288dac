"""Our training and sampling for as many seconds as ordered: ``… beside_ours MODEL CPU_THREADS`` samples.

An order has ``seconds``. A setting of ``cpu_threads`` is decided when the side begins, as in a run.
"""

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from rocm_ext.machine.threads import choose_threads
from tools.benchmarks.sides.talk import Logger, hear, pipe


class Turns:
    """Waits for an order, and reports tokens per second when its time is over."""

    def __init__(self) -> None:
        self._wait()

    def count(self, tokens: int) -> None:
        """Record a finished piece of work."""
        self._tokens += tokens
        seconds = time.perf_counter() - self._began
        if seconds >= self._seconds:
            pipe().send({"rate": self._tokens / seconds, "threads": torch.get_num_threads()})
            self._wait()

    def _wait(self) -> None:
        self._seconds = hear()["seconds"]
        self._tokens, self._began = 0, time.perf_counter()


class Counting(Logger):
    """A torchtune metric logger that counts the steps of a training."""

    def __init__(self) -> None:
        self._turns: Turns | None = None

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        if "loss" not in payload:
            return
        if self._turns is None:  # after the first step, so that the set-up is over
            self._turns = Turns()
        else:
            self._turns.count(payload["tokens"])


def main() -> None:
    """Sample 16 answers to each of 4 prompts, again and again."""
    setting, sys.argv[2:] = sys.argv[2], ["fp32", "64"]  # what sample_ours reads
    torch.set_num_threads(choose_threads(os.environ)[0] if setting == "auto" else int(setting))
    from tools.benchmarks.sides.sample_ours import generate

    prompts, lengths = [list(range(10 * i + 1, 10 * i + 21)) for i in range(4)], [16] * 64
    generate(prompts, lengths, False)
    turns = Turns()
    while True:
        generate(prompts, lengths, False)
        turns.count(sum(lengths))


if __name__ == "__main__":
    main()
