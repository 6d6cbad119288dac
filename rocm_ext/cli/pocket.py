"""`rocm-ext pocket`: make the pocket model."""

import argparse
import logging
import sys
from pathlib import Path

from rocm_ext.runs.scores import Score


def add(commands) -> None:
    """Add the command's parser to argparse's subparsers."""
    parser = commands.add_parser(
        "pocket",
        description="Make a Qwen2.5 model with a million parameters in Hugging Face's format, with "
        "train.jsonl and heldout.jsonl beside it. Training on two-digit additions and subtractions stops once "
        "about a third of the held-out answers are right. It takes a minute or two on two CPU cores.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="folder to write; an earlier pocket model is kept")
    parser.add_argument("--seed", type=int, default=0, help="seed of problems and weights")
    parser.add_argument(
        "--accuracy", type=float, default=0.33, help="stop training at this share of right held-out answers"
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier pocket model")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Make the pocket model and print its accuracy."""
    from rocm_ext.pocket import make

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    card, is_new = make(args.dir, args.seed, args.accuracy, args.force)
    score = Score(card["correct"], card["total"])
    print(
        f"{args.dir}: {'' if is_new else 'already exists (--force remakes it), '}held-out {score} "
        f"after {card['steps']} steps, {card['parameters']:,} parameters"
    )
