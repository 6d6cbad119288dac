"""Compare this library with its alternatives: `python -m tools.benchmarks`; the options select parts."""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import rocm_ext
from rocm_ext.bench.runner import OtherPrograms
from tools.benchmarks import cycle, distil, dpo, grpo, peers, sampling, sft, training, verify
from tools.benchmarks.protocol import Failed
from tools.benchmarks.table import NAMES as WORKS
from tools.benchmarks.table import key, table
from tools.benchmarks.training import BACKED
from tools.benchmarks.work import SHAPES, Task, is_qwen3

STOCK, BEST, PACKED, TRL = (
    "torchtune as shipped",
    "torchtune compiled",
    "torchtune packed",
    "TRL + PEFT",
)
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
    Task("dpo", "small", 32768, "fp32", (STOCK, TRL_FIRST, dpo.UNSHARED)),
    Task("dpo", "small", 152064, "fp32", (PLAIN, "torchtune batch 1", "TRL + PEFT batch 1")),
    Task("sampling", "small", 32768, "fp32", (TORCHTUNE,)),
    Task("sampling", "small", 152064, "fp32", (GENERATE, CONTINUOUS)),
    Task("sampling", "small", 32768, "bf16", (GENERATE, CONTINUOUS)),
)
GPU_SET = (
    *(
        Task(work, shape, 152064, "bf16", some)
        for shape in ("0.5b", "7b")
        for work, some in (
            ("sft", (STOCK, BEST, TRL)),
            ("dpo", (PLAIN, STOCK, TRL)),
            ("sampling", (ENGINE, GENERATE, CONTINUOUS, TORCHTUNE)),
        )
    ),
    Task("sft", "qwen3-0.6b", 151936, "bf16", (BACKED, TRL)),
)
PEERS = {"sft": sft.WORK.peers, "dpo": dpo.WORK.peers, "sampling": sampling.PEERS}
NAMES = list(dict.fromkeys(chain(*PEERS.values())))
ALONE = ["grpo", "grpo-40m", "distil", "distil-40m", "cycle", "verify"]  # they take no shape
WORK = [*PEERS, *ALONE]
COMPARE = {
    "sft": partial(training.compare, sft.WORK),
    "dpo": partial(training.compare, dpo.WORK),
    "sampling": sampling.compare,
}


def main() -> None:
    """Run the comparisons, print the table, and exit with 1 if one failed."""
    args = parse()
    others, rows, failures = OtherPrograms(), [], 0
    try:
        for said, compare in comparisons(args):
            print(said, file=sys.stderr, flush=True)
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                try:
                    rows += compare(Path(folder))
                except (Failed, OSError) as error:
                    failures += 1
                    print(f"failed: {error}", file=sys.stderr)
            print(f"    took {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted; results so far:", file=sys.stderr)
    busy = others.cores()
    print(f"{machine()}, {date.today()}\n\n{table(rows)}")
    if busy > others.WORTH_TELLING:
        print(
            f"warning: other programs used {busy:.1f} cores during the benchmark", file=sys.stderr
        )
    if args.json:
        write_figures(args.json, rows, args.rounds, busy)
    sys.exit(1 if failures else 0)


def write_figures(path: Path, rows: Sequence[dict[str, Any]], rounds: int, busy: float) -> None:
    """Write the comparisons of ``rows`` to ``path``, a line each; its other comparisons stay."""
    common = {"rounds": rounds, "date": str(date.today()), "version": rocm_ext.__version__}
    if busy > OtherPrograms.WORTH_TELLING:
        common["note"] = f"other programs used {busy:.1f} cores"
    before = json.loads(path.read_text()) if path.exists() else {"machine": machine(), "rows": []}
    kept = {key(row): row for row in before["rows"]}
    kept |= {
        key(row): {**common, **row, "pins": peers.pins_of(row["peer"])}
        for row in rows
        if row["work"] in WORKS
    }
    lines = ",\n".join(json.dumps(row) for row in kept.values())
    path.write_text(f'{{"machine": {json.dumps(before["machine"])}, "rows": [\n{lines}\n]}}\n')


def comparisons(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[Path], list[dict]]]]:
    """Yield a headline and a function for each comparison; the function measures it in the folder it gets."""
    tasks = chosen(args)
    gated: dict[str, set[str]] = {work: set() for work in PEERS}
    for number, task in enumerate(tasks, 1):
        said = f"[{number}/{len(tasks)}] {task.work}, {task.shape}, {task.vocab:,} tokens, {task.dtype}: "
        yield (
            said + ", ".join(task.peers),
            partial(COMPARE[task.work], task=task, args=args, gated=gated[task.work]),
        )
    larger = {
        "grpo": (grpo, "GRPO on the pocket model", " of 40 million parameters"),
        "distil": (
            distil,
            "distillation on the pocket model",
            ", teacher of 40 million parameters",
        ),
    }
    for name, (module, said, size) in larger.items():
        for wide in (False, True):
            if name + "-40m" * wide in args.work:
                measure = partial(
                    module.measure, rounds=args.rounds, installed=args.installed, wide=wide
                )
                yield f"{said}{size * wide}: TRL + PEFT", measure
    if "cycle" in args.work:
        yield "RAFT's cycle", partial(cycle.measure, runs=2)
    for workers in (1, 2) if "verify" in args.work else ():
        measure = partial(verify.measure, source=args.mbpp, rounds=args.rounds, workers=workers)
        yield f"verdicts on MBPP, workers: {workers}", measure


def parse() -> argparse.Namespace:
    """Parse the command line; exit with 2 if an option would have no effect."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks", description=__doc__)
    option = parser.add_argument
    option("--work", nargs="+", choices=WORK, default=WORK)
    option(
        "--shape",
        choices=SHAPES,
        help="run this shape instead of the default set; see --vocab, --dtype, --peers",
    )
    option("--vocab", type=int, nargs="+", help="vocabulary sizes for --shape (default: 32768)")
    option(
        "--dtype", nargs="+", choices=sft.WORK.tolerances, help="dtypes for --shape (default: fp32)"
    )
    option("--peers", nargs="+", choices=NAMES, help="peers for --shape (default: the set's)")
    option("--all", action="store_true", help="on a CPU, also run the slow comparisons")
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
        "--attention",
        default="sdpa",
        help="transformers' attention on a GPU, e.g. flash_attention_2 (default: sdpa)",
    )
    option(
        "--installed",
        action="store_true",
        help="run peers with this environment's packages; pip installs nothing",
    )
    option(
        "--mbpp",
        default=verify.MBPP,
        help="hub data set or file with MBPP's rows (default: %(default)s)",
    )
    option("--json", type=Path, help="also write the comparisons to this file; its others stay")
    args = parser.parse_args()
    if args.shape is None and (args.vocab or args.dtype or args.peers):
        parser.error("--vocab, --dtype and --peers apply to --shape only; add --shape")
    if args.shape is not None and args.all:
        parser.error("--all extends the default set, which --shape replaces; drop one of them")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be at least 1")
    args.gpu = torch.cuda.is_available()
    if args.shape is not None and (
        unfit := [name for name in args.peers or () if not runs(name, args.shape)]
    ):
        parser.error(f"--shape {args.shape} does not run with {', '.join(unfit)}")
    if not chosen(args) and not set(ALONE) & set(args.work):
        parser.error("none of --peers supports the work in --work")
    return args


def chosen(args: argparse.Namespace) -> list[Task]:
    """Return the default set of this machine, or the tasks that the options select."""
    if args.shape is None:
        tasks = GPU_SET if args.gpu else SMALL_SET + (SLOW_SET if args.all else ())
        return [task for task in tasks if task.work in args.work]
    names = [
        name
        for name in args.peers or [STOCK, PLAIN, BACKED, TRL, GENERATE, CONTINUOUS]
        if runs(name, args.shape)
    ]
    return [
        Task(work, args.shape, vocab, dtype, tuple(name for name in names if name in PEERS[work]))
        for vocab in args.vocab or [32768]
        for dtype in args.dtype or ["fp32"]
        for work in PEERS
        if work in args.work and any(name in PEERS[work] for name in names)
    ]


def runs(peer: str, shape: str) -> bool:
    """Whether ``peer`` runs models of ``shape``: Qwen3's only train, torchtune has none, and they alone have a twin."""
    if not is_qwen3(shape):
        return peer != BACKED
    return any(
        peer in each and each[peer].environment != "torchtune"
        for each in (PEERS["sft"], PEERS["dpo"])
    )


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
