"""Compare this library with its alternatives: `python -m tools.benchmarks`; the options select parts."""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import rocm_ext
from rocm_ext.base.files import replace_text
from tools.benchmarks import cycle, distil, dpo, grpo, peers, sampling, sft, training
from tools.benchmarks.protocol import Failed, clocks
from tools.benchmarks.table import NAMES as WORKS
from tools.benchmarks.table import key, table
from tools.benchmarks.training import BACKED
from tools.benchmarks.work import Task

# Cores. One busy core of two makes small steps ten times slower, evenly, so that quartiles do not show it.
BUSY = 0.1
STOCK, BEST, PACKED = "torchtune as shipped", "torchtune compiled", "torchtune packed"
TRL = "TRL + PEFT"
PLAIN, TRL_FIRST = "torchtune", "TRL + PEFT, reference first"  # of DPO
ENGINE, GENERATE, CONTINUOUS, _, TORCHTUNE = list(sampling.PEERS)[:5]
# 11 and 41 million parameters; Qwen3's shape has 48 and 109 million
SMALL_SET = (
    Task("sft", "small", 32768, "fp32", (STOCK, BEST, PACKED, TRL)),
    Task("sft", "small", 152064, "fp32", (STOCK,)),
    Task("sft", "small", 32768, "bf16", (STOCK,)),
    Task("sft", "qwen3-small", 32768, "fp32", (BACKED, TRL)),
    Task("dpo", "small", 32768, "fp32", (PLAIN, TRL)),
    Task("sampling", "small", 32768, "fp32", (ENGINE, GENERATE, CONTINUOUS)),
)
SLOW_SET = (  # slow peers
    Task("sft", "small", 152064, "fp32", (TRL,)),
    Task("sft", "small", 32768, "bf16", (TRL,)),
    Task("sft", "small", 152064, "bf16", (STOCK,)),
    Task("sft", "qwen3-small", 151936, "fp32", (BACKED, TRL)),
    Task("sft", "qwen3-small", 32768, "bf16", (BACKED, TRL)),
    Task("dpo", "small", 32768, "fp32", (STOCK, TRL_FIRST)),
    Task("dpo", "small", 152064, "fp32", (PLAIN, "torchtune batch 1", "TRL + PEFT batch 1")),
    Task("sampling", "small", 32768, "fp32", (TORCHTUNE,)),
    Task("sampling", "small", 152064, "fp32", (GENERATE, CONTINUOUS)),
    Task("sampling", "small", 32768, "bf16", (GENERATE, CONTINUOUS)),
)
PEERS = {"sft": sft.WORK.peers, "dpo": dpo.WORK.peers, "sampling": sampling.PEERS}
DISTILLED = {
    "distil": ("on the pocket model", distil.POCKET),
    "distil-40m": ("from 40 million parameters", distil.RANDOM),
}
WORK = [*PEERS, "grpo", "grpo-40m", *DISTILLED, "cycle"]
COMPARE = {
    "sft": partial(training.compare, sft.WORK),
    "dpo": partial(training.compare, dpo.WORK),
    "sampling": sampling.compare,
}


def main() -> None:
    """Run the comparisons; print and write each as it ends, then all in a table. Exit with 1 if one failed."""
    args = parse()
    rows = []
    failures = 0
    try:
        for said, compare in comparisons(args):
            tell(said)
            measured = finish(compare, args)
            if measured is None:
                failures += 1
            else:
                rows += measured
    except KeyboardInterrupt:
        tell("interrupted; results so far:")
    print(f"{machine()}, {date.today()}\n\n{table(rows)}")
    sys.exit(1 if failures else 0)


def finish(
    compare: Callable[[Path], list[dict]], args: argparse.Namespace
) -> list[dict[str, Any]] | None:
    """Do a comparison, print and write what it measured, and return that; None if it failed."""
    began, used = clocks()
    with tempfile.TemporaryDirectory() as folder:
        try:
            rows = compare(Path(folder))
        except (Failed, OSError) as error:
            tell(f"failed: {error}")
            return None
    end, used_at_end = clocks()
    tell(f"{table(rows)}\n    took {end - began:.0f} s")
    busy = (used_at_end - used) / (end - began)
    if busy > BUSY:
        tell(f"warning: other programs used {busy:.1f} cores during this comparison")
    if args.json:
        write_figures(args.json, rows, args.rounds, busy)
    return rows


def tell(text: str) -> None:
    """Print to stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def write_figures(path: Path, rows: Sequence[dict[str, Any]], rounds: int, busy: float) -> None:
    """Write the comparisons of ``rows`` to ``path``, a line each; its other comparisons stay."""
    common = {"rounds": rounds, "date": str(date.today()), "version": rocm_ext.__version__}
    if busy > BUSY:
        common["note"] = f"other programs used {busy:.1f} cores"
    before = json.loads(path.read_text()) if path.exists() else {"machine": machine(), "rows": []}
    kept = {key(row): row for row in before["rows"]}
    kept |= {
        key(row): {**common, **row, "pins": peers.pins_of(row["peer"])}
        for row in rows
        if row["work"] in WORKS
    }
    lines = ",\n".join(json.dumps(row) for row in kept.values())
    text = f'{{"machine": {json.dumps(before["machine"])}, "rows": [\n{lines}\n]}}\n'
    replace_text(path, text)


def comparisons(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[Path], list[dict]]]]:
    """Yield a headline and a function for each comparison; the function measures it in the folder it gets."""
    tasks = SMALL_SET + (SLOW_SET if args.all else ())
    tasks = tuple(task for task in tasks if task.work in args.work)
    gated: dict[str, set[str]] = {work: set() for work in PEERS}
    for number, task in enumerate(tasks, 1):
        said = f"[{number}/{len(tasks)}] {task.work}, {task.shape}, {task.vocab:,} tokens, {task.dtype}: "
        yield (
            said + ", ".join(task.peers),
            partial(COMPARE[task.work], task=task, args=args, gated=gated[task.work]),
        )
    shared = {"rounds": args.rounds, "installed": args.installed}
    sizes = {"grpo": "the pocket model", "grpo-40m": "40 million parameters"}
    for work, size in sizes.items():
        if work in args.work:
            compare = partial(grpo.measure, **shared, wide=work == "grpo-40m")
            yield f"GRPO on {size}: TRL + PEFT", compare
            yield f"GRPO on {size}, equal updates: TRL + PEFT", partial(compare, drawn=True)
    for work, (size, pair) in DISTILLED.items():
        if work in args.work:
            compare = partial(distil.measure, **shared, pair=pair)
            yield f"distillation {size}: TRL + PEFT", compare
    if "cycle" in args.work:
        yield "RAFT's cycle", partial(cycle.measure, runs=2)


def parse() -> argparse.Namespace:
    """Parse the command line; exit with 2 if an option would have no effect."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks", description=__doc__)
    option = parser.add_argument
    option("--work", nargs="+", choices=WORK, default=WORK)
    option("--all", action="store_true", help="also run the slow comparisons")
    option(
        "--rounds",
        type=int,
        default=6,
        help="turns of each side; even numbers balance their order (default: 6)",
    )
    option(
        "--ours",
        nargs="*",
        default=[],
        metavar="key=value",
        help="changes to our config for sft and dpo",
    )
    option(
        "--installed",
        action="store_true",
        help="run peers with this environment's packages; pip installs nothing",
    )
    option(
        "--json",
        type=Path,
        help="also write each comparison to this file as it ends; its others stay",
    )
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be at least 1")
    args.gpu = torch.cuda.is_available()
    return args


def machine() -> str:
    """Describe this machine for the table."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    return f"{name}, {os.cpu_count()} cores, torch {metadata.version('torch')}"


def processor() -> str:
    """Return the CPU's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


if __name__ == "__main__":
    main()
