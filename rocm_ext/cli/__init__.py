"""``rocm-ext``: the tools around the recipes, a subcommand a file.

The file's docstring is the subcommand's help. ``add(parser)`` adds its options, and ``run(args)`` may return an exit
code. Only the file of the given command is imported. Functions import torch where they use it: torch takes seconds,
and --help must not.
"""

import atexit
import gc
import importlib
import inspect
import os
import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import NoReturn

import rocm_ext
from rocm_ext.base import deferred, packages
from rocm_ext.base.errors import UserError, nearest

_COMMANDS = {
    "before a run": {
        "doctor": "check whether this machine is fit to train, and how to fix it",
        "pocket": "make a small model and its data to try the recipes offline, on any machine",
        "plan": "estimate a run's memory, work and time before anything is downloaded",
        "bench": "measure this machine, for `rocm-ext plan` and `hardware: auto`",
        "verify": "check a verifier on a data set's right answers",
        "rows": "show the rows that a config makes of its data, and which tokens are trained",
        "validate": "check a config on this machine: everything that needs no weights",
    },
    "during a run": {
        "serve": "train from scripts that speak Tinker's API: the SDK tinker, tinker-cookbook",
        "supervise": "run for days without anybody: restart what dies or hangs, from its last checkpoint",
        "monitor": "watch the GPUs and the host: load, memory, power, temperature, clocks",
    },
    "after a run": {
        "report": "show runs in one HTML file: curves, hardware, data, and scores and samples of answers",
        "compare": "compare a safe run with a faster one: is it faster, and does it train as well?",
        "eval": "measure a model: loss on held-out rows, or how often its answers are right",
        "chat": "talk with a model in the terminal, with or without an adapter",
        "parity": "check that a server answers as the trained model: prompts, adapter, and what differs",
        "pairs": "make DPO's pairs from the verified answers of a run",
        "export": "write a merged model for transformers and vLLM, or GGUF files for llama.cpp and Ollama",
    },
}
_NAMES = [name for commands in _COMMANDS.values() for name in commands]


def main(argv: list[str] | None = None) -> int:
    """Run ``rocm-ext`` with these arguments; returns the exit code."""
    if argv is None:  # this process is the program
        argv = sys.argv[1:]
        deferred.defer()
        # or the last collections of garbage search all that was imported: half a second
        atexit.register(gc.freeze)
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
    if not argv or argv[0] not in _NAMES:
        return _overview(argv)
    parser = parser_of(argv[0])
    args, unread = parser.parse_known_args(argv[1:])
    if unread and not any(word.startswith("-") for word in unread):
        # argparse accepts a list of words only before or only after the options
        for name in ("overrides", "arguments"):
            if hasattr(args, name):
                getattr(args, name).extend(unread)
                unread = []
    if unread:
        parser.error(f"unrecognized arguments: {' '.join(unread)}")
    return sys.modules[f"rocm_ext.cli.{argv[0]}"].run(args)


def parser_of(name: str) -> ArgumentParser:
    """Build a subcommand's parser."""
    command = importlib.import_module(f"rocm_ext.cli.{name}")
    parser = ArgumentParser(
        prog=f"rocm-ext {name}",
        description=inspect.getdoc(command).partition("\n\n")[2],  # type: ignore[union-attr]
        formatter_class=RawDescriptionHelpFormatter,
    )
    command.add(parser)
    return parser


def _overview(argv: list[str]) -> NoReturn:
    """Print the list of commands or the versions, or refuse a command that does not exist."""
    paragraphs = []
    for when, commands in _COMMANDS.items():
        lines = [f"  {name:<10}{about}" for name, about in commands.items()]
        paragraphs.append("\n".join([f"{when}:", *lines]))
    paragraphs.append("`rocm-ext COMMAND --help` has a command's options.")
    parser = ArgumentParser(
        prog="rocm-ext",
        usage="rocm-ext [-h] [--version] COMMAND ...",
        description="Tools around the torchtune-rocm recipes. The recipes themselves run with `tune run`.",
        epilog="\n\n".join(paragraphs),
        formatter_class=RawDescriptionHelpFormatter,
    )
    about = "print the versions of this library, torchtune and torch"
    # importing torch would take seconds
    installed = packages.installed()
    versions = [f"torchtune-rocm {rocm_ext.__version__}"]
    for name in ("torchtune", "torch"):
        versions.append(f"{name} {installed[name] or 'is not installed'}")
    parser.add_argument("--version", action="version", version="\n".join(versions), help=about)
    parser.parse_known_args(argv)  # --help and --version end here
    for word in argv:
        if not word.startswith("-"):
            parser.error(f"there is no command {word}{nearest(word, _NAMES)}")
    parser.print_help(sys.stderr)
    sys.exit(2)
