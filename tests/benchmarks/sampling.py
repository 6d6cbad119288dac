"""Sampling: seconds until every answer to the same prompts has the length that a seeded trace gives it.

Each side is given the trace in its own way and computes every answer to its own end; only tokens up to there count.

Gates: greedy answers are ours token by token (bf16: as probable as the best token); sampled tokens are as probable as
the model says, log p - E[log p] has the mean zero within its error; our reported log-probabilities are the model's.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.benchmarks import peers
from tests.benchmarks.protocol import Failed, Ratio, Side, in_turn
from tests.benchmarks.work import Task, gsm8k_lengths, write_random_model

Prompts = list[list[int]]


@dataclass(frozen=True)
class Peer:
    """A way to sample: module of the side, its environment, what it is told."""

    module: str
    environment: str
    option: str
    waits: bool = True  # for the longest answer of the batch


PEERS = {
    "transformers generate": Peer("sample_transformers", "trl", "generate"),
    "transformers continuous batching": Peer("sample_transformers", "trl", "continuous", waits=False),
    "torchtune generate": Peer("sample_torchtune", "torchtune", "lean"),
    "torchtune generate with logits": Peer("sample_torchtune", "torchtune", ""),
}


@dataclass(frozen=True)
class Trace:
    """Prompts, samples of each, median and most tokens of an answer."""

    prompts: int
    samples: int
    median: int
    most: int

    def make(self, vocab: int) -> tuple[Prompts, list[int]]:
        """The prompts' tokens, and the length of every answer: log-normal, sigma 0.7."""
        rng = np.random.default_rng(1)
        lengths, _ = gsm8k_lengths(rng, self.prompts)
        prompts = [rng.integers(1, vocab, n).tolist() for n in lengths]
        answers = np.exp(rng.normal(np.log(self.median), 0.7, self.prompts * self.samples)).astype(int)
        return prompts, answers.clip(2, self.most).tolist()


CPU, GPU = Trace(16, 8, 67, 256), Trace(64, 8, 200, 1024)


def compare(base: Path, task: Task, args: argparse.Namespace) -> list[dict]:
    """Gate and time one model; a row of the table for each peer."""
    work = GPU if args.gpu else CPU
    model = write_random_model(base / "model", task.shape, task.vocab, initializer_range=0.06)
    prompts, trace = work.make(task.vocab)
    with ExitStack() as stack:
        sides, until_warm, greedy = [], {}, {}
        for name in ("ours", *task.peers):
            began = time.perf_counter()
            sides.append(start(stack, base, model, name, task.dtype, work, args))
            greedy[name] = sample(sides[-1], prompts, [24] * len(prompts), greedy=True)["answers"]
            until_warm[name] = time.perf_counter() - began
        gate(sides, greedy, stack.enter_context(judge(base, model, work, args)), prompts, task.dtype)
        runs: dict[str, list[tuple[float, float]]] = {side.name: [] for side in sides}
        peaks = {}
        for _, side in in_turn(sides, args.rounds):
            answer = sample(side, prompts, trace)
            if [len(tokens) for tokens in answer["answers"]] != trace:
                raise Failed(f"{side.name} made answers of other lengths")
            runs[side.name].append(answer["seconds"])
            peaks[side.name] = answer["peak_memory"]
    walls = {name: [wall for wall, _ in each] for name, each in runs.items()}
    processor = {name: [seconds for _, seconds in each] for name, each in runs.items()}
    waste = len(trace) * max(trace) / sum(trace)
    return [
        {
            **task.describe(name), **Ratio.of(walls[name], walls["ours"]).describe(),
            "bound": waste if PEERS[name].waits else 1.0,
            "in_processor_time": Ratio.of(processor[name], processor["ours"]).median,
            "tokens_per_second": sum(trace) / statistics.median(walls["ours"]),
            "until_warm": [until_warm["ours"], until_warm[name]],
            "peak_memory": [peaks["ours"], peaks[name]],
        }
        for name in task.peers
    ]  # fmt: skip


def start(
    stack: ExitStack, base: Path, model: Path, name: str, dtype: str, work: Trace, args: argparse.Namespace
) -> Side:
    """A side's process, which waits for orders."""
    peer = PEERS.get(name)
    python = Path(sys.executable) if peer is None else peers.python(peer.environment, args.gpu)
    module = "sample_ours" if peer is None else peer.module
    options = [peer.option] if peer and peer.option else []
    arguments = ["-m", f"tests.benchmarks.sides.{module}", model, dtype, work.most, *options]
    return stack.enter_context(Side(name, python, [str(a) for a in arguments], base / f"{name}.log"))


def judge(base: Path, model: Path, work: Trace, args: argparse.Namespace) -> Side:
    """A process that tells how probable answers are, in fp32."""
    arguments = ["-m", "tests.benchmarks.sides.sample_transformers", str(model), "fp32", str(work.most), "judge"]
    return Side("judge", peers.python("trl", args.gpu), arguments, base / "judge.log")


def sample(side: Side, prompts: Prompts, trace: list[int], greedy: bool = False) -> dict:
    """The side's report."""
    return side.ask(prompts=prompts, trace=trace, greedy=greedy)


def gate(sides: Sequence[Side], greedy: dict[str, Prompts], judge: Side, prompts: Prompts, dtype: str) -> None:
    """Look at the greedy answers, and at some that are sampled.

    Raises:
        Failed: a side does not answer as the model does.
    """
    exact = dtype == "fp32"
    for name, answers in greedy.items():
        if exact and answers != greedy["ours"]:
            raise Failed(f"greedy answers of {name} differ from ours")
        behind = judge.ask(prompts=prompts, answers=answers)["behind"]
        if behind > (1e-3 if exact else 0.25):
            raise Failed(f"a greedy token of {name} is less probable than the best one by a factor of e^{behind:.2f}")
    for side in sides:
        answer = sample(side, prompts, [16] * len(prompts) * 4)
        judged = judge.ask(prompts=prompts, answers=answer["answers"])
        surprise = judged["surprise"]
        mean, error = statistics.fmean(surprise), statistics.stdev(surprise) / len(surprise) ** 0.5
        if abs(mean) > 4 * error:
            raise Failed(f"sampled tokens of {side.name} are off by {mean:.3f} +- {error:.3f}")
        if side.name == "ours":
            said, found = statistics.fmean(answer["logprobs"]), statistics.fmean(judged["logprobs"])
            if abs(said - found) > (1e-4 if exact else 0.02):
                raise Failed(f"our log-probabilities have the mean {said:.4f}, not {found:.4f}")
