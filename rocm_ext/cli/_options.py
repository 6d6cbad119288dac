"""Options that several subcommands share."""

import argparse


def add_format(add) -> None:
    """Add ``--format`` with a parser's ``add_argument``."""
    names = "gsm8k, mbpp, mbppplus, humaneval, apps, taco or livecodebench"
    add("--format", metavar="NAME", help=f"read the columns of a data set: {names}")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add ``key=value …``, as in ``tune run``."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config, as in `tune run`")


def add_trust(add) -> None:
    """Add ``--trust-config`` with a parser's ``add_argument``."""
    told = "use the run's config also where it names code that is not this library's; read it first"
    add("--trust-config", action="store_true", help=told)


def count(text: str) -> int:
    """Parse an option's number of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number
