"""Side by side with what users would pick instead: `python -m tests.benchmarks --help`."""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.benchmarks import sampling, sft
from tests.benchmarks.protocol import Failed
from tests.benchmarks.work import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    option = parser.add_argument
    option("--work", nargs="+", choices=["sft", "sampling"], default=["sft", "sampling"])
    option("--shape", choices=SHAPES, default="small")
    option("--vocab", type=int, nargs="+", default=[32768, 152064])
    option("--dtype", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    option("--sft-peers", nargs="+", choices=sft.PEERS, default=["torchtune as shipped", "TRL + PEFT"])
    option("--sampling-peers", nargs="+", choices=sampling.PEERS, default=list(sampling.PEERS)[:3])
    option("--rounds", type=int, default=5)
    option("--steps", type=int, default=1, help="optimiser steps of a turn")
    option("--ours", nargs="*", default=[], metavar="key=value", help="changes to our config")
    option("--attention", default="sdpa")
    option("--json", type=Path)
    args = parser.parse_args()
    args.gpu = gpu()
    table = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for vocab in args.vocab:
                for dtype in args.dtype:
                    for work in args.work:
                        module, names = {"sft": (sft, args.sft_peers), "sampling": (sampling, args.sampling_peers)}[work]
                        rows = module.compare(Path(folder, f"{work}-{vocab}-{dtype}"), vocab, dtype, names, args)
                        table += rows
                        for row in rows:
                            print(json.dumps(row), flush=True)
    except Failed as error:
        sys.exit(f"error: {error}")
    if args.json:
        args.json.write_text(json.dumps(table, indent=1))


def gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
