"""``cpu_threads: auto`` against each number of threads: ``python -m tools.benchmarks.beside``.

Every setting is a separate run that begins, and thus decides, beside the other programs. The runs take turns, and the
result is the median and range of the ratio of speeds within a round, to the fixed number whose median is best. The
gates say what ``auto`` must reach of it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rocm_ext.base.process import end_with_parent
from tests.kit.tiny import run_config, write_yaml
from tools.benchmarks.protocol import Failed, Ratio, Side, take_turns
from tools.benchmarks.work import model_config, pocket, write_random_model

AUTO = "auto"
BUSY = "while True: pass"
TORCH = "import torch\nx = torch.randn(200, 200)\nwhile True: x = (x @ x).tanh().softmax(-1)"
# computes for the seconds on each line of its input, and then answers
TURNS = """
import sys, time, torch
x = torch.randn(200, 200)
for line in sys.stdin:
    end = time.monotonic() + float(line)
    while time.monotonic() < end: x = (x @ x).tanh().softmax(-1)
    print(flush=True)
"""
IN_TURNS = "in turns with a torch program"
LOADS = {  # programs that are busy all the time, and the gate
    "alone": (0, BUSY, 0.98),
    IN_TURNS: (0, BUSY, 0.98),
    "4 busy loops": (4, BUSY, 0.9),
    "4 torch programs": (4, TORCH, 0.9),
}
WORK = ("pocket", "qwen", "sampling")
SIDES = "tools.benchmarks.sides.beside_ours"


@dataclass(frozen=True)
class Result:
    """Speeds beside one load.

    Attributes:
        rates: tokens per second in each round, by the setting of ``cpu_threads``.
        threads: that ``auto`` chose.
    """

    work: str
    load: str
    rates: dict[str, list[float]]
    threads: int

    @property
    def best(self) -> str:
        """The fixed number with the highest median."""
        medians = {
            setting: statistics.median(rates)
            for setting, rates in self.rates.items()
            if setting != AUTO
        }
        return max(medians, key=lambda setting: medians[setting])

    @property
    def holds(self) -> bool:
        """Whether ``auto`` passes the gate."""
        return Ratio.of(self.rates[AUTO], self.rates[self.best]).median >= LOADS[self.load][2]

    def lines(self) -> Iterator[str]:
        """Yield the table's rows."""
        for setting, rates in self.rates.items():
            ratio = Ratio.of(rates, self.rates[self.best])
            gate = (
                f"at least {LOADS[self.load][2]}: {'holds' if self.holds else 'FAILS'}"
                if setting == AUTO
                else ""
            )
            said = f"{setting}, which is {self.threads}" if setting == AUTO else setting
            rate = f"{statistics.median(rates):,.0f}"
            yield f"| {self.work} | {self.load} | {said} | {rate} | {ratio.cell()} | {gate} |"


def main() -> None:
    """Print the table; exit with 1 if a side failed or a gate does not hold."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.beside", description=__doc__)
    parser.add_argument("--work", nargs="+", choices=WORK, default=WORK)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument(
        "--numbers", nargs="+", type=int, help="fixed numbers of threads (default: 1 to all cores)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=6,
        help="even numbers balance the order (default: %(default)s)",
    )
    parser.add_argument("--seconds", type=float, default=3, help="of a turn (default: %(default)s)")
    args = parser.parse_args()
    import torch

    numbers, good = args.numbers or range(1, torch.get_num_threads() + 1), True
    print(
        "| work | beside | cpu_threads | tokens/s | of the best number | gate |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            for work in args.work:
                for load in args.loads:
                    result = measure(Path(folder), work, load, numbers, args.rounds, args.seconds)
                    print(*result.lines(), sep="\n", flush=True)
                    good = good and result.holds
        except Failed as error:
            sys.exit(f"failed: {error}")
    sys.exit(0 if good else "a gate does not hold")


def measure(
    base: Path, work: str, load: str, numbers: Sequence[int], rounds: int, seconds: float
) -> Result:
    """Measure a work beside a load.

    Args:
        base: a folder for models and outputs; a folder ``pocket`` in it serves as the pocket model.
        work: one of :data:`WORK`.
        load: key of :data:`LOADS`.
        numbers: fixed numbers of threads.
        rounds: turns of each setting.
        seconds: seconds of a turn.

    Raises:
        Failed: the model cannot be made, or a side ended.
    """
    settings = [*map(str, numbers), AUTO]
    with busy(*LOADS[load][:2]), ExitStack() as stack:
        other = stack.enter_context(another()) if load == IN_TURNS else None
        sides = {}
        for setting in settings:
            side = Side(
                setting, Path(sys.executable), command(base, work, setting), base / f"{setting}.log"
            )
            sides[setting] = stack.enter_context(side)
            answer = side.ask(seconds=seconds)  # ends the set-up, and warms up

        def turn(side: Side) -> float:
            if other is not None:
                take_turn(other, seconds)
            return side.ask(seconds=seconds)["rate"]

        return Result(work, load, take_turns(sides, rounds, turn), answer["threads"])


@contextmanager
def busy(count: int, code: str) -> Iterator[None]:
    """Context with ``count`` busy programs.

    A side has a session. Where the kernel groups programs by session (``sched_autogroup_enabled``), it gets
    more than one program's share.
    """
    programs = [
        subprocess.Popen([sys.executable, "-c", code], preexec_fn=end_with_parent)
        for _ in range(count)
    ]
    try:
        time.sleep(5 if count and code == TORCH else 0)  # torch's import
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


@contextmanager
def another() -> Iterator[subprocess.Popen]:
    """Context with a torch program that computes in its turns."""
    options = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
        "preexec_fn": end_with_parent,
    }
    with subprocess.Popen([sys.executable, "-c", TURNS], **options) as program:  # type: ignore[call-overload]
        take_turn(program, 0)
        try:
            yield program
        finally:
            program.kill()


def take_turn(program: subprocess.Popen, seconds: float) -> None:
    """Have :func:`another`'s program compute, and wait for its end."""
    program.stdin.write(f"{seconds}\n")  # type: ignore[union-attr]
    program.stdin.flush()  # type: ignore[union-attr]
    program.stdout.readline()  # type: ignore[union-attr]


def command(base: Path, work: str, setting: str) -> list[str | Path]:
    """Make the work's model and rows where they are missing; return the arguments of a side's interpreter."""
    if work == "qwen":
        sft = ["--config", qwen(base)]
    else:
        model = pocket(base, "--accuracy", "0.01")
        if work == "sampling":
            return ["-m", SIDES, model, setting]
        sft = ["--config", "cpu_pocket", f"pocket={model}"]
    changes = [
        f"cpu_threads={setting}",
        f"output_dir={base}/out_{setting}",
        "overwrite_output_dir=True",
        "epochs=200",
    ]
    changes.append(f"metric_logger={{_component_: {SIDES}.Counting}}")
    return ["-m", "rocm_ext.recipes.lora_finetune_rocm", *sft, *changes]


def qwen(base: Path) -> Path:
    """Write a Qwen2.5 with 11 million parameters and 32,768 tokens, rows of 150 tokens, and the YAML of a run."""
    model, rows, rng = base / "qwen", base / "rows.jsonl", np.random.default_rng(1)
    if not model.exists():
        write_random_model(model, "small", 32768)
        tokens = rng.integers(10, 32768, (400, 150)).tolist()
        rows.write_text(
            "".join(
                json.dumps({"tokens": row, "labels": [-100] * 70 + row[70:]}) + "\n"
                for row in tokens
            )
        )
    cfg = run_config(model, rows, base / "out_qwen")
    cfg["tokenizer"]["max_seq_len"] = None
    return write_yaml(base / "qwen.yaml", {
        **cfg, "model": model_config(model, "small"), "hardware": "cpu", "dtype": "fp32",
        "batch_size": 2, "sequences_per_step": 4,
        "dataset": {"_component_": "tools.benchmarks.sides.rows.TokenRows", "path": str(rows)},
    })  # fmt: skip


if __name__ == "__main__":
    main()
