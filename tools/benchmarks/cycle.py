"""RAFT: the share of a cycle's time spent outside generation and training.

This share loads verifiers, waits for verdicts, filters answers, merges and restores weights, and writes files. It is
measured on the pocket model, because its generation and training are so short that the rest is most visible.
"""

import sys
from pathlib import Path
from statistics import median

from tools.benchmarks.protocol import Side
from tools.benchmarks.work import pocket


def measure(base: Path, runs: int, prompts: int = 1000) -> list[dict]:
    """Measure ``runs`` runs of two cycles with ``prompts`` each, and return one row of the table."""
    model, shares = pocket(base), []
    for number in range(runs):
        arguments = ["-m", "tools.benchmarks.sides.cycle_ours", "--config", "cpu_pocket_raft", f"pocket={model}",
                     f"output_dir={base}/{number}", "cycles=2", f"prompts_per_cycle={prompts}",
                     "eval_prompts=null"]  # evaluations generate, too, outside of cycles  # fmt: skip
        with Side("ours", Path(sys.executable), arguments, base / f"{number}.log") as side:
            seconds = side.ask(report=True)
        shares.append(1 - (seconds["generation"] + seconds["training"]) / seconds["cycles"])
    return [
        {
            "work": "cycle",
            "runs": runs,
            "outside": median(shares),
            "range": [min(shares), max(shares)],
        }
    ]
