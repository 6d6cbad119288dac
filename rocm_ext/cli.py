"""``rocm-ext``: the tools around the recipes, one subcommand each."""

import argparse
import json
import signal
import sys
from pathlib import Path

from rocm_ext.errors import UserError

# Subcommands import what they need when they run: torch takes seconds, and --help must not.


def main(argv: list[str] | None = None) -> int:
    """Run ``rocm-ext`` with these arguments; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rocm-ext",
        description="Tools around the torchtune-rocm recipes. The recipes themselves run with `tune run`.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_pocket, _add_eval):
        add(commands)
    return parser


def _add_pocket(commands) -> None:
    parser = commands.add_parser(
        "pocket",
        help="make a small model and its data to try the recipes with, offline, on any machine",
        description="Make a Qwen2.5 model of a million parameters in Hugging Face's format, trained on the "
        "spot on two-digit additions and subtractions until it is right about a third of the time, with "
        "train.jsonl and heldout.jsonl beside it. Takes a minute or two on two CPU cores.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="where to; an earlier pocket model is kept")
    parser.add_argument("--seed", type=int, default=0, help="of problems and weights")
    parser.add_argument(
        "--accuracy", type=float, default=0.33, help="stop training at this share of right held-out answers"
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier pocket model")
    parser.set_defaults(run=_pocket)


def _pocket(args: argparse.Namespace) -> None:
    import logging

    from rocm_ext.evaluation import Score
    from rocm_ext.pocket import make

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    card, is_new = make(args.dir, args.seed, args.accuracy, args.force)
    score = Score(card["correct"], card["total"])
    print(
        f"{args.dir}: {'' if is_new else 'exists already (--force remakes it), '}held-out {score} "
        f"after {card['steps']} steps, {card['parameters']:,} parameters"
    )


def _add_eval(commands) -> None:
    parser = commands.add_parser(
        "eval",
        help="measure how often a model's greedy answer is right",
        description="Greedy accuracy of a Qwen2 or Qwen2.5 model on rows with a known answer. A reply is "
        "right if the last number in it equals the row's answer.",
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="model in Hugging Face's format")
    add("--adapter", type=Path, metavar="DIR", help="PEFT LoRA or DoRA adapter to merge in")
    add("--data", type=Path, required=True, metavar="FILE", help='JSONL rows: {"prompt": …, "answer": …}')
    add("--max-new-tokens", type=_count, default=64, metavar="N", help="tokens of a reply, at most (64)")
    add("--limit", type=_count, metavar="N", help="evaluate the first N rows only")
    add("--batch-size", type=_count, default=64, metavar="N", help="prompts at once, at most (64)")
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default=dtypes[0], help="of the weights (float32)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda also means ROCm (cpu)")
    add("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_eval)


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def _eval(args: argparse.Namespace) -> None:
    import torch

    from rocm_ext.evaluation import accuracy, load_model, load_tokenizer, read_rows, wilson

    rows = read_rows(args.data, args.limit)
    tokenizer = load_tokenizer(args.model)
    model = load_model(args.model, args.adapter, getattr(torch, args.dtype), args.device)
    score = accuracy(model, tokenizer, rows, args.max_new_tokens, args.batch_size)
    if args.json:
        content = {"accuracy": score.accuracy, "correct": score.correct, "total": score.total}
        print(json.dumps({**content, "interval": wilson(score.correct, score.total)}))
    else:
        print(score)


if __name__ == "__main__":
    sys.exit(main())
