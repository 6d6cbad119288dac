"""What ``rocm-ext rows`` prints."""

import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rocm_ext.cli._common import console, printable, table
from rocm_ext.data.mixture import lines

_LONG, _ENDS = 900, 300  # characters of a part of a row that is shown whole, and of each end of a longer one
_PARTS = 24  # of a sequence that are shown
_BAR = 40  # characters
_EQUAL = {
    "repeated": "equal an earlier row",
    "trained_on": "are training rows, too",
    "prompt_trained_on": "have a prompt that is trained on",
}


def print_rows(content: Mapping[str, Any]) -> None:
    """Print shown rows, and below them the numbers."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack characters of rows
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for row in content["shown"]:
        weight = f", weight {row['weight']:g}" if "weight" in row else ""
        print(f"row {row['row']}, {printable(row['origin'])}{weight}")
        for sequence in row["sequences"]:
            side = f"{sequence['side']}: " if "side" in sequence else ""
            trained = f", {sequence['trained_tokens']:,} trained" if sequence["trained"] else ""
            print(f"--- {side}{sequence['tokens']:,} tokens{trained}")
            parts = list(_parts(sequence["text"], sequence["trained"]))
            if side.startswith("rejected") and not parts[0][1]:
                parts = parts[1:]  # the prompt, which the chosen side has shown
            print(_text(parts, colour))
        print()
    _print_numbers("dataset", content["dataset"])
    for line in lines(content.get("data_sets", ())):
        print(printable(line))
    if "steps_per_epoch" in content:
        print(
            f"steps of an epoch: {content['steps_per_epoch']:,}, each of {content['rows_per_step']:,} rows on one rank"
        )
    else:
        print(f"answers have up to {content['longest_answer']:,} tokens; the model takes {content['window']:,}")
    if "validation" in content:
        print()
        _print_numbers("validation", content["validation"])


def _parts(text: str, spans: Sequence[Sequence[int]]) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a text, and whether each is trained."""
    done = 0
    for start, end in [*spans, (len(text), len(text))]:
        yield from ((part, trained) for part, trained in ((text[done:start], False), (text[start:end], True)) if part)
        done = end


def _text(parts: Sequence[tuple[str, bool]], colour: bool) -> str:
    """Return the parts of a sequence with what is trained marked; of many, the first and the last ones."""
    marked = [_marked(_shortened(text), colour) if trained else _shortened(text) for text, trained in parts]
    if len(marked) > _PARTS:
        half = _PARTS // 2
        marked = [*marked[:half], f"\n… {len(marked) - _PARTS:,} parts …\n", *marked[-half:]]
    return "".join(marked).removesuffix("\n")


def _marked(text: str, colour: bool) -> str:
    # line by line: some terminals fill the rest of a line with its background
    return "\n".join(f"\033[30;42m{line}\033[0m" for line in text.split("\n")) if colour else f"⟦{text}⟧"


def _shortened(text: str) -> str:
    """Return a text without the middle of a long one, and with escapes for control characters."""
    if len(text) > _LONG:
        return f"{_escaped(text[:_ENDS])} … {len(text) - 2 * _ENDS:,} characters … {_escaped(text[-_ENDS:])}"
    return _escaped(text)


def _escaped(text: str) -> str:
    known = (c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(known)


def _print_numbers(key: str, of: Mapping[str, Any]) -> None:
    print(f"{key}: {of['kept']:,} of {of['rows']:,} rows")
    for what, origin in of["first"].items():
        print(f"  {what.replace('_', ' ')}: {of['counts'][what]:,}, first {printable(origin)}")
    for what, said in _EQUAL.items():
        for this, other in of.get(f"first_{what}", ()):
            print(f"  {said}: {of[what]:,}, first {printable(this)} as {printable(other)}")
    columns = {"min": "min", "median": "median", "p95": "95 %", "max": "max", "total": "total"}
    made = table("", "tokens of a", *columns.values(), right=tuple(columns.values()))
    made.title = None
    for name, found in of["tokens"].items():
        made.add_row(name, *(f"{found[column]:,}" for column in columns))
    console().print(made)
    if "trained_share" in of:
        print(f"trained: {of['trained_share']:.1%} of all tokens")
    if key != "dataset":
        return
    found = next(iter(of["tokens"].values()))
    most = max(count for *_, count in found["histogram"])
    width = len(f"{found['max']:,}")
    for low, high, count in found["histogram"]:
        print(f"  {low:>{width},} – {high:>{width},}  {'█' * -(-_BAR * count // most)} {count:,}")
