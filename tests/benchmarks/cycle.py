"""RAFT: the share of a cycle's time spent outside generation and training.

This share loads verifiers, waits for verdicts, filters answers, merges and restores weights, and writes files. It is
measured on the pocket model, because its generation and training are so short that the rest is most visible.
"""

import subprocess
import sys
from pathlib import Path
from statistics import median

from tests.benchmarks.protocol import Failed, Side


def measure(base: Path, runs: int) -> list[dict]:
    """Measure ``runs`` runs of two cycles and return one row of the table."""
    done = subprocess.run([sys.executable, "-m", "rocm_ext.cli", "pocket", str(base / "pocket")], capture_output=True)
    if done.returncode:
        raise Failed(f"cannot make the pocket model: {done.stderr.decode()[-2000:]}")
    shares = []
    for number in range(runs):
        arguments = ["-m", "tests.benchmarks.sides.cycle_ours", "--config", "cpu_pocket_raft", f"pocket={base}/pocket",
                     f"output_dir={base}/{number}", "cycles=2", "prompts_per_cycle=1000"]  # fmt: skip
        with Side("ours", Path(sys.executable), arguments, base / f"{number}.log") as side:
            seconds = side.ask(report=True)
        shares.append(1 - (seconds["generation"] + seconds["training"]) / seconds["cycles"])
    return [{"work": "cycle", "runs": runs, "outside": median(shares), "range": [min(shares), max(shares)]}]
