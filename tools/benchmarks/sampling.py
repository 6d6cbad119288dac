"""Sampling: seconds until every answer to the same prompts has the length that a seeded trace sets.

The sides get the trace in different ways. Only tokens up to an answer's end count. The model has no adapter.

Gates:

- In fp32 each side's greedy answers equal ours token by token. This must also hold before bf16 is timed. In bf16
  greedy tokens must be about as probable as the best token.
- The sampled tokens of the last timed round have the model's probabilities: log p - E[log p] has mean zero within its
  error.
- Our reported log-probabilities equal the model's.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tools.benchmarks import peers
from tools.benchmarks.protocol import Failed, Ratio, Side, Timed, take_turns
from tools.benchmarks.work import Task, flops, gsm8k_lengths, write_random_model

Prompts = list[list[int]]


@dataclass(frozen=True)
class Peer:
    """A way to sample.

    Attributes:
        module: the side's program.
        environment: key of :data:`tools.benchmarks.peers.PINS`; empty: this environment.
        option: argument of the program.
        prefill: the way of computing, see :func:`computed`.
    """

    module: str
    environment: str
    option: str
    prefill: str


ENGINE = "transformers' modules"  # ours, for models without a native decoder
US = Peer("sample_ours", "", "", "ours")
PEERS = {
    ENGINE: Peer("sample_ours", "", "transformers", "ours"),
    "transformers generate": Peer("sample_transformers", "trl", "generate", "each row"),
    "transformers continuous batching": Peer("sample_transformers", "trl", "continuous", "ours"),
    "vLLM": Peer("sample_vllm", "vllm", "", "ours"),
    "torchtune generate": Peer("sample_torchtune", "torchtune", "", "all logits"),
}


@dataclass(frozen=True)
class Trace:
    """A sampling load.

    Attributes:
        prompts: number of prompts.
        samples: answers per prompt.
        median: median of an answer's tokens.
        most: most tokens of an answer.
    """

    prompts: int
    samples: int
    median: int
    most: int

    def make(self, vocab: int) -> tuple[Prompts, list[int]]:
        """Return the prompts' tokens and the length of every answer, log-normal with sigma 0.7."""
        rng = np.random.default_rng(1)
        lengths, _ = gsm8k_lengths(rng, self.prompts)
        prompts = [rng.integers(1, vocab, n).tolist() for n in lengths]
        answers = np.exp(rng.normal(np.log(self.median), 0.7, self.prompts * self.samples)).astype(
            int
        )
        return prompts, answers.clip(2, self.most).tolist()


TRACE = Trace(16, 8, 67, 256)


def compare(base: Path, task: Task, args: argparse.Namespace, gated: set[str]) -> list[dict]:
    """Gate and time one model; return a row of the table per peer.

    Args:
        base: empty folder.
        task: the comparison.
        args: the command's options.
        gated: peers that have passed the fp32 gate; this call adds to them.

    Raises:
        Failed: a side fails a gate or ends early.
    """
    work = TRACE
    model = write_random_model(base / "model", task.shape, task.vocab, initializer_range=0.06)
    prompts, trace = work.make(task.vocab)
    if task.dtype != "fp32" and not gated.issuperset(task.peers):
        with ExitStack() as stack:
            gate(stack, base, model, replace(task, dtype="fp32"), work, prompts, args)
    with ExitStack() as stack:
        sides, until_warm = gate(stack, base, model, task, work, prompts, args)
        gated.update(task.peers)
        for side in sides.values():
            sample(side, prompts, trace)  # warms up the shapes that the gate did not use
        turns = take_turns(sides, args.rounds, lambda side: sample(side, prompts, trace))
    last = {name: answers[-1] for name, answers in turns.items()}
    with judge(base, model, work, args) as knows:
        for name, answer in last.items():
            if any([len(tokens) for tokens in each["answers"]] != trace for each in turns[name]):
                raise Failed(f"{name} gave answers of wrong lengths")
            check_sampled(
                name, answer, knows.ask(prompts=prompts, answers=answer["answers"]), task.dtype
            )
    walls, processor = (
        {name: [each["seconds"][i] for each in turns[name]] for name in turns} for i in (0, 1)
    )
    timed = Timed(walls, last, until_warm)
    pairs = [("ours", name) for name in task.peers]
    pairs += [(ENGINE, name) for name in task.peers if ENGINE in task.peers and name != ENGINE]
    ours = computed(task, prompts, trace, "ours")
    return [
        {
            **task.describe(name if side == "ours" else f"{name}, by {side}"),
            **timed.describe(side, name),
            "bound": computed(task, prompts, trace, PEERS[name].prefill) / ours,
            "in_processor_time": Ratio.of(processor[name], processor[side]).median,
            "tokens_per_second": sum(trace) / statistics.median(walls[side]),
        }
        for side, name in pairs
    ]


def computed(task: Task, prompts: Prompts, trace: Sequence[int], way: str) -> float:
    """FLOP of the matrix products that a side computes in its way; only ratios between sides have a meaning."""
    lengths, rows, steps = [len(prompt) for prompt in prompts], len(trace), max(trace)
    if way == "ours":  # computes each prompt once
        return flops(task.shape, task.vocab, sum(lengths) + sum(trace), sum(trace))
    every = rows * (
        max(lengths) + steps
    )  # every sample's padded prompt, and every row until the longest ends
    return flops(task.shape, task.vocab, every, every if way == "all logits" else rows * steps)


def gate(
    stack: ExitStack,
    base: Path,
    model: Path,
    task: Task,
    work: Trace,
    prompts: Prompts,
    args: argparse.Namespace,
) -> tuple[dict[str, Side], dict[str, float]]:
    """Start the sides and check their greedy answers.

    Returns:
        By side: the side, and the seconds from its start to its greedy answers.

    Raises:
        Failed: a side's answers are not the model's.
    """
    sides, until_warm, greedy = {}, {}, {}
    for name in ("ours", *task.peers):
        sides[name] = stack.enter_context(start(base, model, name, task.dtype, work, args))
        greedy[name] = sample(sides[name], prompts, [24] * len(prompts), greedy=True)["answers"]
        until_warm[name] = time.perf_counter() - sides[name].began
    with judge(base, model, work, args) as knows:
        for name, answers in greedy.items():
            check_greedy(
                name,
                answers,
                greedy["ours"],
                knows.ask(prompts=prompts, answers=answers),
                task.dtype,
            )
    return sides, until_warm


def start(
    base: Path, model: Path, name: str, dtype: str, work: Trace, args: argparse.Namespace
) -> Side:
    """Start a side's process, which waits for orders."""
    peer = PEERS.get(name, US)
    foreign = peer.environment
    python = peers.python(foreign, args.gpu, args.installed) if foreign else Path(sys.executable)
    module = f"tools.benchmarks.sides.{peer.module}"
    options = ["-m", module, model, dtype, str(work.most), peer.option]
    return Side(name, python, options, base / f"{name}.log")


def judge(base: Path, model: Path, work: Trace, args: argparse.Namespace) -> Side:
    """Start a process that computes the probabilities of answers in fp32."""
    module = "tools.benchmarks.sides.sample_transformers"
    options = ["-m", module, model, "fp32", str(work.most), "judge"]
    return Side("judge", peers.python("trl", args.gpu, args.installed), options, base / "judge.log")


def sample(side: Side, prompts: Prompts, trace: list[int], greedy: bool = False) -> dict:
    """Let the side sample and return its report."""
    return side.ask(prompts=prompts, trace=trace, greedy=greedy)


def check_greedy(name: str, answers: Prompts, ours: Prompts, judged: dict, dtype: str) -> None:
    """Check greedy answers.

    Raises:
        Failed: in fp32 they differ from ours, or a token is clearly less probable than the best one.
    """
    if dtype == "fp32" and answers != ours:
        raise Failed(f"greedy answers of {name} differ from ours")
    if judged["behind"] > (1e-3 if dtype == "fp32" else 0.5):
        raise Failed(
            f"a greedy token of {name} is less probable than the best by a factor of e^{judged['behind']:.2f}"
        )


def check_sampled(name: str, answer: dict, judged: dict, dtype: str) -> None:
    """Check sampled tokens.

    Raises:
        Failed: they do not have the model's probabilities, or our reported log-probabilities are not the model's.
    """
    surprise = judged["surprise"]
    mean, error = statistics.fmean(surprise), statistics.stdev(surprise) / len(surprise) ** 0.5
    if abs(mean) > 4 * error:
        raise Failed(
            f"log-probabilities of tokens sampled by {name} are off by {mean:.3f} +- {error:.3f}"
        )
    if name in ("ours", ENGINE):
        said, model = statistics.fmean(answer["logprobs"]), statistics.fmean(judged["logprobs"])
        if abs(said - model) > (1e-4 if dtype == "fp32" else 0.02):
            raise Failed(f"our log-probabilities have mean {said:.4f}, the model's {model:.4f}")
