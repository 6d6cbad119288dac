"""RAFT: the share of a cycle's time in which nothing is generated and no step is trained.

Loading verifiers, verdicts that are waited for, filtering, merging and restoring weights, files. Measured on the pocket
model, whose generation and training take so little that the rest shows most.
"""

import subprocess
import sys
from pathlib import Path
from statistics import median

from tests.benchmarks.protocol import Failed, Side


def measure(base: Path, runs: int) -> list[dict]:
    """A row of the table, from ``runs`` runs of two cycles."""
    done = subprocess.run([sys.executable, "-m", "rocm_ext.cli", "pocket", str(base / "pocket")], capture_output=True)
    if done.returncode:
        raise Failed(f"no pocket model: {done.stderr.decode()[-2000:]}")
    shares = []
    for number in range(runs):
        arguments = ["-m", "tests.benchmarks.sides.cycle_ours", "--config", "cpu_pocket_raft", f"pocket={base}/pocket",
                     f"output_dir={base}/{number}", "cycles=2", "prompts_per_cycle=1000"]  # fmt: skip
        with Side("ours", Path(sys.executable), arguments, base / f"{number}.log") as side:
            seconds = side.ask(report=True)
        shares.append(1 - (seconds["generation"] + seconds["training"]) / seconds["cycles"])
    return [{"work": "cycle", "runs": runs, "outside": median(shares), "range": [min(shares), max(shares)]}]
