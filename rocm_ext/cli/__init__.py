"""``rocm-ext``: the tools around the recipes, one subcommand each, in a file of its name.

A subcommand's file has ``add(commands)``, which adds its parser, and ``run(args)``, which may return an exit code.
Both import what they need when they run: torch takes seconds, and --help must not.
"""

import argparse
import os
import signal
import sys
from typing import NoReturn

from rocm_ext.cli import (
    bench,
    chat,
    compare,
    doctor,
    eval,
    export,
    monitor,
    pairs,
    plan,
    pocket,
    report,
    validate,
    verify,
)
from rocm_ext.errors import UserError

_COMMANDS = (pocket, chat, eval, export, verify, pairs, validate, plan, bench, monitor, compare, doctor, report)


def main(argv: list[str] | None = None) -> int:
    """Run ``rocm-ext`` with these arguments; returns the exit code."""
    parser = _parser()
    args, more = parser.parse_known_args(argv)
    for name in ("overrides", "arguments"):  # argparse takes those in one run only, before or after the options
        if hasattr(args, name) and all(item[0] == "~" or ("=" in item and item[0] != "-") for item in more):
            getattr(args, name).extend(more)
            more = []
    if more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    try:
        return args.run(args) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `rocm-ext … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rocm-ext",
        description="Tools around the torchtune-rocm recipes. The recipes themselves run with `tune run`.",
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print the versions of this library, torchtune and torch"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add(commands)
    return parser


class _Version(argparse.Action):
    """Prints versions from the packages' metadata: importing torch would take seconds."""

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        for name in ("torchtune-rocm", "torchtune", "torch"):
            try:
                print(name, version(name))
            except PackageNotFoundError:
                print(name, "is not installed")
        sys.exit()
