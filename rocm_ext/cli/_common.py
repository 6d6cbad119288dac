"""Options, tables, JSON and files of the subcommands."""

import json
import math
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import disk_errors
from rocm_ext.base.log import note, setup_logging

if TYPE_CHECKING:
    from rocm_ext.config.chosen_model import ChosenModel

_PIPE_WIDTH = 160  # columns; rich would take 80 and wrap every row


# ---- options


def number(kind: Callable[[str], Any], least: float, most: float) -> Callable[[str], Any]:
    """A type for argparse: numbers from ``least`` to ``most``, read by ``kind`` (int or float)."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            what = "a whole number" if kind is int else "a number"
            raise ArgumentTypeError(f"{text[:40]!r} is not {what} from {least:,} to {most:,}")
        return value

    return parse


def options(parser: Any) -> Callable[..., None]:
    """Return a function that adds options to a parser: ``option("--rows N", "number of rows", count)``.

    The first text has the option's names, and last the name of its value. A single name is a switch.
    """

    def option(
        usage: str, about: str, kind: Any = str, default: Any = None, **further: Any
    ) -> None:
        *names, value = usage.split()
        if names:
            parser.add_argument(
                *names, metavar=value, help=about, type=kind, default=default, **further
            )
        else:
            parser.add_argument(usage, help=about, action="store_true")

    return option


count = number(int, 1, 10**9)
seed = number(int, 0, 2**63 - 1)


def add_json(parser: ArgumentParser) -> None:
    """Add ``--json``; :func:`print_json` prints it."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_config(parser: ArgumentParser) -> None:
    """Add ``--config``, which the command needs."""
    options(parser)("--config NAME", "config of any recipe: a name or a file", required=True)


def add_format(parser: ArgumentParser) -> None:
    """Add ``--format``; :func:`rocm_ext.data.prompt_dataset` knows the names."""
    names = "gsm8k, mbpp, mbppplus, humaneval, apps, taco or livecodebench"
    options(parser)("--format NAME", f"read the columns of a data set: {names}")


def add_overrides(parser: ArgumentParser) -> None:
    """Add ``key=value …``, as in ``tune run``."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes to the config, as in `tune run`"
    )


def add_model(parser: ArgumentParser) -> None:
    """Add ``MODEL key=value …``, for :func:`rocm_ext.config.chosen_model.find_target`; ``--config`` is MODEL, too."""
    what = "output_dir of a run, folder or GGUF file of a model, its name on the hub, or config of any recipe"
    parser.add_argument("--config", dest="model", metavar="MODEL", help="the same as MODEL")
    parser.add_argument(
        "overrides", nargs="*", metavar="MODEL key=value", help=f"{what}; and changes to its config"
    )


def take_model(args: Namespace) -> str:
    """Return MODEL, which :func:`add_model` has added, and leave the changes in ``args.overrides``.

    Raises:
        UserError: none is named, or two are.
    """
    names, changes = [], []
    for item in args.overrides:
        is_change = "=" in item or item.startswith("~")
        if is_change and not Path(item).exists():
            changes.append(item)
        else:
            names.append(item)
    if args.model:
        names.append(args.model)
    args.overrides = changes
    expected = "expected one MODEL, such as the output_dir of a run, and key=value"
    refuse_first((len(names) != 1, f"{expected}; found {' and '.join(names) or 'none'}"))
    return names[0]


def add_trust(parser: ArgumentParser) -> None:
    """Add ``--trust-config``."""
    about = (
        "also run code that the run's config names and that is not this library's; read it first"
    )
    parser.add_argument("--trust-config", action="store_true", help=about)


def add_force(parser: ArgumentParser) -> None:
    """Add ``--force``, for :func:`check_new_file`."""
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")


def check_new_file(path: Path, force: bool = False) -> Path:
    """Return ``path`` if a file may be written there.

    Raises:
        UserError: it is a folder, it exists and ``force`` is not set, or it cannot be written.
    """
    refuse_first(
        (path.is_dir(), f"{path} is a folder; name a file"),
        (
            path.exists() and not force,
            f"{path} exists; name another file, or add --force to replace it",
        ),
    )
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    with disk_errors(path), TemporaryFile(dir=folder):
        return path


def refuse_first(*problems: tuple[object, str], code: int = 2) -> None:
    """Raise a UserError with the message of the first problem whose condition holds."""
    for holds, message in problems:
        if holds:
            raise UserError(message, code)


@contextmanager
def exits_with(code: int) -> Iterator[None]:
    """Context whose UserErrors end the program with ``code``."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error), code) from error


def prepare(target: "ChosenModel", overrides: Sequence[str]) -> None:
    """Set the environment of the model's machine, which may restart this program, and set up logging."""
    from rocm_ext.config import startup

    for line in startup.prepare_for(target.hardware(overrides)):
        note(line)
    setup_logging()


# ---- output


def print_json(content: Any) -> None:
    """Print one JSON value; NaN and infinity, which JSON lacks, become null."""
    print(json.dumps(_finite(content), default=str))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def console() -> Console:
    """Standard output, for rich."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """Make an empty table; columns in ``right`` are right-aligned."""
    empty = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        empty.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return empty


def printable(text: str) -> str:
    """``text`` without control characters: files of a run or of a recorded machine may hold any."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def shortened(text: str, most: int) -> str:
    """The first ``most`` characters of a text in one line, or the last ones if ``most`` is negative."""
    line = printable(" ⏎ ".join(text.strip().splitlines()))
    if len(line) <= abs(most):
        return line
    return f"{line[:most]} …" if most > 0 else f"… {line[most:]}"
