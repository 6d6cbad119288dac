"""Our training and sampling for as many seconds as ordered: ``… beside_ours MODEL`` samples from the pocket model.

An order has ``threads`` as ``cpu_threads`` takes them, ``settle`` (seconds before the measurement) and ``seconds``.
"""

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from rocm_ext.hardware.threads import use_threads
from tests.benchmarks.sides.talk import hear, pipe

CORES = torch.get_num_threads()


class Turns:
    """Waits for an order, and reports tokens per second when its time is over."""

    def __init__(self) -> None:
        self._wait()

    def count(self, tokens: int) -> None:
        """Record a finished piece of work."""
        now = time.perf_counter()
        if self._began is None:
            if now >= self._settled:
                self._began = now, time.process_time()
            return
        self._tokens += tokens
        seconds = now - self._began[0]
        if seconds >= self._seconds:
            busy = time.process_time() - self._began[1]
            threads = torch.get_num_threads()
            pipe().send({"rate": self._tokens / seconds, "cores": busy / seconds, "threads": threads})
            self._wait()

    def _wait(self) -> None:
        order = hear()
        torch.set_num_threads(CORES)
        use_threads(order["threads"], torch.device("cpu"), {**os.environ, "OMP_NUM_THREADS": ""})
        self._tokens, self._began = 0, None
        self._settled, self._seconds = time.perf_counter() + order["settle"], order["seconds"]


class Logger:
    """A torchtune metric logger that counts the steps of a training."""

    def __init__(self) -> None:
        self._turns = Turns()

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        if "loss" in payload:
            self._turns.count(payload["tokens"])

    def log_config(self, config: object) -> None:
        """Do nothing; torchtune's interface requires this method."""

    def close(self) -> None:
        """Do nothing; no file is open."""


def main() -> None:
    """Sample 16 answers to each of 4 prompts, again and again."""
    sys.argv[2:] = ["fp32", "64"]  # what sample_ours reads
    from tests.benchmarks.sides.sample_ours import generate

    prompts, lengths = [list(range(10 * i + 1, 10 * i + 21)) for i in range(4)], [16] * 64
    generate(prompts, lengths, False)
    turns = Turns()
    while True:
        generate(prompts, lengths, False)
        turns.count(sum(lengths))


if __name__ == "__main__":
    main()
