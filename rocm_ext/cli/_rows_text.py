"""The output of ``rocm-ext rows``."""

import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rocm_ext.cli._common import console, printable, table
from rocm_ext.data.mixture import lines
from rocm_ext.report import rows as words

_LONG, _ENDS = 900, 300  # characters: a longer part of a row is cut to its two ends
_BAR = 40  # characters


def print_rows(content: Mapping[str, Any]) -> None:
    """Print shown rows, and below them the numbers."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack characters of rows
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for row in content["shown"]:
        print(printable(words.title(row)))
        for sequence in row["sequences"]:
            print(f"--- {words.heading(sequence)}")
            print(_text(words.shown_parts(sequence), colour))
        print()
    _print_numbers("dataset", content["dataset"])
    for line in lines(content.get("data_sets", ())):
        print(printable(line))
    print(words.ends(content))
    if "validation" in content:
        print()
        _print_numbers("validation", content["validation"])


def _text(parts: Sequence[tuple[str, bool]], colour: bool) -> str:
    """Join the parts of a sequence and mark the trained ones."""
    marked = (_marked(_shortened(text), colour) if trained else _shortened(text) for text, trained in parts)
    return "".join(marked).removesuffix("\n")


def _marked(text: str, colour: bool) -> str:
    # line by line: some terminals fill the rest of a line with its background
    return "\n".join(f"\033[30;42m{line}\033[0m" for line in text.split("\n")) if colour else f"⟦{text}⟧"


def _shortened(text: str) -> str:
    """Cut the middle of a long text, and escape control characters."""
    if len(text) > _LONG:
        return f"{_escaped(text[:_ENDS])} … {len(text) - 2 * _ENDS:,} characters … {_escaped(text[-_ENDS:])}"
    return _escaped(text)


def _escaped(text: str) -> str:
    known = (c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(known)


def _print_numbers(key: str, of: Mapping[str, Any]) -> None:
    first, *others = words.facts_of(key, of)
    print(first)
    for line in others:
        print(f"  {printable(line)}")
    columns = list(words.COLUMNS.values())
    made = table("", "tokens of a", *columns, right=tuple(columns))
    made.title = None
    for row in words.length_table(of):
        made.add_row(*row)
    console().print(made)
    if key != "dataset":
        return
    lengths = next(iter(of["tokens"].values()))
    most = max(count for *_, count in lengths["histogram"])
    width = len(f"{lengths['max']:,}")
    for low, high, count in lengths["histogram"]:
        print(f"  {low:>{width},} – {high:>{width},}  {'█' * -(-_BAR * count // most)} {count:,}")
