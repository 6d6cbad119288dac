"""``rocm-ext pocket``: make the pocket model.

Makes a Qwen2.5 model with a million parameters in Hugging Face's format, with train.jsonl and heldout.jsonl beside it.
Training on two-digit additions and subtractions stops once about a third of the held-out answers are right. It takes a
minute or two on two CPU cores.
"""

import logging
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rocm_ext.cli._common import number, options, seed
from rocm_ext.runs.scores import Score


def add(parser: ArgumentParser) -> None:
    option = options(parser)
    option("dir DIR", "folder to write; an earlier pocket model is kept", Path)
    option("--seed N", "seed of problems and weights (default: 0)", seed, 0)
    stop = "stop at this share of right held-out answers (default: 0.33; of names and results copied by --tools: 0.95)"
    option("--accuracy ACCURACY", stop, number(float, 0, 1))
    option("--tools", "teach the model the form of a tool's calls instead, and add an agent")
    option("--force", "replace an earlier pocket model")


def run(args: Namespace) -> None:
    """Make the pocket model and print its accuracy."""
    from rocm_ext.pocket import make

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    accuracy = args.accuracy
    if accuracy is None:
        accuracy = 0.95 if args.tools else 0.33
    card, is_new = make(args.dir, args.seed, accuracy, args.force, args.tools)
    kept = "" if is_new else "already exists (--force remakes it), "
    score = Score(card["correct"], card["total"])
    print(
        f"{args.dir}: {kept}held-out {score} after {card['steps']} steps, {card['parameters']:,} parameters"
    )
