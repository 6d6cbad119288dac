"""Options that several subcommands have."""

import argparse


def add_format(add) -> None:
    add("--format", metavar="NAME", help="gsm8k, mbpp or humaneval: ready mappings of their columns")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """``key=value …``, as `tune run` takes them."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config, as in `tune run`")


def count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number
