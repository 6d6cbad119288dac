"""Our speed beside busy programs, by ``cpu_threads``: ``python -m tests.benchmarks.beside``.

One process trains or samples. Its settings take turns in it, so that only the number of threads differs, and the result
is the median and range of the ratio of speeds within a round. The share is the speed beside the other programs as a
part of the speed that all threads reach alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.benchmarks.protocol import Failed, Ratio, Side
from tests.benchmarks.work import model_config, write_random_model
from tests.tiny import run_config, write_yaml

BUSY = "while True: pass"
TORCH = "import torch\nx = torch.randn(200, 200)\nwhile True: x = (x @ x).tanh().softmax(-1)"
LOADS = {
    "alone": (0, BUSY),
    "2 busy loops": (2, BUSY),
    "10 busy loops": (10, BUSY),
    "4 torch programs": (4, TORCH),
}
WORK = ("pocket", "qwen", "sampling")
SIDES = "tests.benchmarks.sides.beside_ours"


@dataclass(frozen=True)
class Result:
    """Speeds beside one load.

    Attributes:
        rates: tokens per second in each round, by the setting of ``cpu_threads``.
        alone: the first setting's median alone; None if it was not measured.
    """

    work: str
    load: str
    rates: dict[int | str, list[float]]
    alone: float | None

    def lines(self) -> Iterator[str]:
        """Yield the table's rows."""
        first = next(iter(self.rates.values()))
        for setting, rates in self.rates.items():
            ratio, median = Ratio.of(rates, first), statistics.median(rates)
            share = "" if self.alone is None else f"{median / self.alone:.3f}"
            yield (
                f"| {self.work} | {self.load} | {setting} | {median:,.0f} | "
                f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f}) | {share} |"
            )


def main() -> None:
    """Print the table, and exit with 1 if a side failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.beside", description=__doc__)
    parser.add_argument("--work", nargs="+", choices=WORK, default=WORK)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--settings", nargs="+", help="of cpu_threads (default: all cores, auto and 1)")
    parser.add_argument("--rounds", type=int, default=6, help="even numbers balance the order (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3, help="of a turn, after as many (default: %(default)s)")
    args = parser.parse_args()
    settings = [int(each) if each.isdecimal() else each for each in args.settings or (str(cores()), "auto", "1")]
    print("| work | beside | cpu_threads | tokens/s | times the first | share of alone |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        try:
            for work in args.work:
                for result in measure(Path(folder), work, args.loads, settings, args.rounds, args.seconds):
                    print(*result.lines(), sep="\n", flush=True)
        except Failed as error:
            sys.exit(f"failed: {error}")


def cores() -> int:
    """Torch's own number of threads."""
    import torch

    return torch.get_num_threads()


def measure(
    base: Path, work: str, loads: Sequence[str], settings: Sequence[int | str], rounds: int, seconds: float
) -> Iterator[Result]:
    """Measure a work beside each load.

    Args:
        base: a folder for models and outputs; a folder ``pocket`` in it serves as the pocket model.
        work: of :data:`WORK`.
        loads: of :data:`LOADS`.
        settings: of ``cpu_threads``.
        rounds: turns of each setting.
        seconds: of a turn, after as many to settle; ``auto`` takes its first decision after two.

    Raises:
        Failed: the model cannot be made, or the side ended.
    """
    alone = None
    with Side("ours", Path(sys.executable), command(base, work), base / f"{work}.log") as side:
        side.ask(threads=settings[0], settle=0, seconds=0)  # ends the set-up
        for load in loads:
            rates: dict[int | str, list[float]] = {setting: [] for setting in settings}
            with busy(*LOADS[load]):
                for number in range(rounds):
                    for setting in settings[:: 1 if number % 2 == 0 else -1]:
                        rates[setting].append(side.ask(threads=setting, settle=seconds, seconds=seconds)["rate"])
            if load == "alone":
                alone = statistics.median(rates[settings[0]])
            yield Result(work, load, rates, alone)


@contextmanager
def busy(count: int, code: str) -> Iterator[None]:
    """Context with ``count`` busy programs.

    The side has a session of its own. Where the kernel groups programs by session (``sched_autogroup_enabled``), it
    gets more than one program's share.
    """
    programs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        time.sleep(5 if count and code == TORCH else 0)  # torch's import
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def command(base: Path, work: str) -> list[str | Path]:
    """Make the work's model and rows; return the arguments of the side's interpreter."""
    if work == "qwen":
        return ["-m", "rocm_ext.recipes.lora_finetune_rocm", "--config", qwen(base)]
    if not (base / "pocket").exists():
        make = ["-m", "rocm_ext.cli", "pocket", base / "pocket", "--accuracy", "0.01"]
        done = subprocess.run([sys.executable, *make], capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"cannot make the pocket model: {done.stderr[-2000:]}")
    if work == "sampling":
        return ["-m", SIDES, base / "pocket"]
    changes = [f"pocket={base}/pocket", f"output_dir={base}/out", "epochs=200"]
    changes += [f"metric_logger={{_component_: {SIDES}.Logger}}"]
    return ["-m", "rocm_ext.recipes.lora_finetune_rocm", "--config", "cpu_pocket", *changes]


def qwen(base: Path) -> Path:
    """Write a Qwen2.5 with 11 million parameters and 32,768 tokens, rows of 150 tokens, and the YAML of a run."""
    model, rows, rng = base / "qwen", base / "rows.jsonl", np.random.default_rng(1)
    write_random_model(model, "small", 32768)
    tokens = rng.integers(10, 32768, (400, 150)).tolist()
    rows.write_text("".join(json.dumps({"tokens": row, "labels": [-100] * 70 + row[70:]}) + "\n" for row in tokens))
    cfg = run_config(model, rows, base / "out_qwen")
    cfg["tokenizer"]["max_seq_len"] = None
    return write_yaml(base / "qwen.yaml", {
        **cfg, "model": model_config(model, "small"), "hardware": "cpu", "dtype": "fp32", "epochs": 200,
        "batch_size": 2, "sequences_per_step": 4, "metric_logger": {"_component_": f"{SIDES}.Logger"},
        "dataset": {"_component_": "tests.benchmarks.sides.rows.TokenRows", "path": str(rows)},
    })  # fmt: skip


if __name__ == "__main__":
    main()
