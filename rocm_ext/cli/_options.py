"""Options that several subcommands have."""

import argparse


def add_format(add) -> None:
    add("--format", metavar="NAME", help="gsm8k, mbpp or humaneval: ready mappings of their columns")


def count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number
