"""Time RAFT's bookkeeping over a thousand synthetic cycles: ``python -m tests.benchmarks.bookkeeping``.

The bookkeeping of a cycle is its work beside sampling, verifying, training and evaluating. It chooses the prompts,
counts the earlier steps, and writes the entry in ``summary.json``. Its time must not grow with the number of earlier
cycles.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from rocm_ext.distributed.ranks import Ranks
from rocm_ext.rl.curriculum import choose_unsolved
from rocm_ext.rl.cycles import Cycle, History
from rocm_ext.rl.selection import KeepRule

PROMPTS, ASKED, SAMPLES = 2000, 16, 4
BAR = KeepRule("correct", 0.5)


def write_cycle(cycle: Cycle, asked: list[str], rng: random.Random) -> None:
    """Write the files that sampling, verifying, training and evaluating leave behind.

    Args:
        cycle: the cycle to write.
        asked: ids of its prompts.
        rng: generator of tokens and verdicts.
    """
    cycle.folder.mkdir()
    samples, verdicts = [], []
    for prompt in asked:
        for sample in range(SAMPLES):
            tokens = [rng.randrange(1000) for _ in range(20)]
            samples.append(
                {"prompt_id": prompt, "sample": sample, "seed": 1, "finish_reason": "stop", "text": "x" * 60,
                 "tokens": tokens, "logprobs": [-0.5] * 20}
            )  # fmt: skip
            right = rng.random() < 0.5
            verdict = {"verdict": "CORRECT" if right else "WRONG", "reward": float(right), "detail": ""}
            verdicts.append({"prompt_id": prompt, "sample": sample, **verdict})
    counts = {
        "prompts": len(asked), "samples": len(samples), "verdicts": {}, "pass_rate": 0.5, "filter": {"kept": 9},
        "kept": 9, "mean_tokens": 20.0, "entropy": 0.5,
    }  # fmt: skip
    cycle.selection.write_text(json.dumps({"counts": counts, "settings": {}}))
    steps = [{"step": n, "epoch": 1, "loss": 1.0, "lr": 1e-4, "tokens": 100, "seconds": 0.1} for n in range(1, 5)]
    for name, lines in (("samples", samples), ("verdicts", verdicts), ("metrics", steps)):
        (cycle.folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    scores = {"prompts": 100, "correct": 50, "pass_at_1": 0.5, "interval": [0.4, 0.6], "pass_at_k": {}}
    cycle.eval.write_text(json.dumps(scores))
    (cycle.folder / "summary.json").write_text(json.dumps({"steps": 4, "first_loss": 1.0, "last_loss": 0.9}))


def main() -> None:
    """Print the median milliseconds of bookkeeping per cycle for each tenth of the cycles, and last / first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=1000)
    cycles = parser.parse_args().cycles
    ids, rng, seconds = [str(i) for i in range(PROMPTS)], random.Random(0), []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        ranks = Ranks(torch.device("cpu"))
        history = History(out, BAR, ranks)
        for number in range(1, cycles + 1):
            began = time.perf_counter()
            asked = choose_unsolved(
                ids, history.last_asked, number, count=ASKED, skip_solved=True, retry_unsolved_after=2, seed=0
            )
            choosing = time.perf_counter() - began
            cycle = Cycle(out, number)
            write_cycle(cycle, asked, rng)
            began = time.perf_counter()
            history.add(cycle)
            for phase in ("sample", "train", "eval"):
                history.log(number, phase, {"seconds": 1.0})
            history.summarize(cycle)
            seconds.append(choosing + time.perf_counter() - began)
        began = time.perf_counter()
        assert History(out, BAR, ranks).until(cycles) == history.until(cycles)
        resumed = time.perf_counter() - began
    size = max(1, cycles // 10)
    for start in range(0, cycles, size):
        part = seconds[start : start + size]
        print(f"cycles {start + 1:4}-{start + len(part):4}: median {1e3 * median(part):6.2f} ms")
    print(f"last tenth / first tenth: {median(seconds[-size:]) / median(seconds[:size]):.2f}")
    print(f"a resumed run reads {cycles} cycles in {resumed:.2f} s")


if __name__ == "__main__":
    main()
