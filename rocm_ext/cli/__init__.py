"""``rocm-ext``: the tools around the recipes, one subcommand each, in a file of its name.

A subcommand's file has ``add(commands)``, which adds its parser, and ``run(args)``, which may return an exit code.
Only the file of the command that is asked for is imported. What imports torch is imported where it is used: torch takes
seconds, and --help must not.
"""

import argparse
import importlib
import os
import signal
import sys
from typing import NoReturn

from rocm_ext.base.errors import UserError

_COMMANDS = {
    "pocket": "make a small model and its data to try the recipes offline, on any machine",
    "chat": "talk with a model in the terminal, with or without an adapter",
    "eval": "measure a model: loss on held-out rows, or how often its answers are right",
    "export": "write a merged model for transformers and vLLM, or GGUF files for llama.cpp and Ollama",
    "verify": "check a verifier on a data set's right answers",
    "pairs": "make DPO's pairs from the verified answers of a run of RAFT or GRPO",
    "validate": "check a config on this machine: everything that needs no weights",
    "plan": "estimate a run's memory, work and time before anything is downloaded",
    "bench": "measure this machine, for `rocm-ext plan` and `hardware: auto`",
    "monitor": "watch the GPUs and the host: load, memory, power, temperature, clocks",
    "compare": "compare a safe run with a faster one: is it faster, and does it train as well?",
    "doctor": "check whether this machine is fit to train, and how to fix it",
    "report": "show runs in one HTML file: curves, hardware, and scores and samples of RAFT and GRPO",
}


def main(argv: list[str] | None = None) -> int:
    """Run ``rocm-ext`` with these arguments; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _run(argv) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `rocm-ext … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: list[str]) -> int | None:
    parser = _parser(argv)
    args, more = parser.parse_known_args(argv)
    for name in ("overrides", "arguments"):  # argparse takes those in one run only, before or after the options
        if hasattr(args, name) and all(item[0] == "~" or ("=" in item and item[0] != "-") for item in more):
            getattr(args, name).extend(more)
            more = []
    if more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    return args.run(args)


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rocm-ext",
        description="Tools around the torchtune-rocm recipes. The recipes themselves run with `tune run`.",
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print the versions of this library, torchtune and torch"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, about in _COMMANDS.items():
        if argv[:1] == [name]:
            importlib.import_module(f"rocm_ext.cli.{name}").add(commands)
        else:
            commands.add_parser(name, help=about)
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
