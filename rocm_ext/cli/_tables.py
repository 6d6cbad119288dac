"""Tables of the subcommands, on a terminal or in a pipe."""

import sys

from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 160  # columns; rich would take 80 and wrap every row


def console() -> Console:
    """Standard output, for rich."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table with these columns; those in ``right`` are right-aligned."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made
