"""``rocm-ext compare``: is a faster setting as good as a safe one?

Compares two runs of one recipe, finished or not: a safe baseline A and a faster setting B. Prints their speed, memory,
losses (or held-out scores of RAFT and GRPO), and whether to take B.
Exit code: 0 take B, 1 keep A, 2 the runs cannot be compared, 3 undecided yet.
"""

import math
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from rocm_ext.cli._common import (
    add_json,
    console,
    exits_with,
    number,
    options,
    print_json,
    printable,
    table,
)
from rocm_ext.runs.compare import compare
from rocm_ext.runs.folder import RunFolder

# Exit code and colour of an answer
_ANSWERS = {"take": (0, "green"), "reject": (1, "red"), "unknown": (3, "yellow")}


def add(parser: ArgumentParser) -> None:
    option, share = options(parser), number(float, 0.001, 99)
    option("a RUN_A", "output_dir of the baseline", Path)
    option("b RUN_B", "output_dir of the run with the faster setting", Path)
    option(
        "--tolerance PERCENT",
        "difference of losses to ignore, in percent of A's (default: 1)",
        share,
        1.0,
    )
    scores = "difference of held-out pass@1 to ignore, in percentage points (default: 5)"
    option("--score-tolerance POINTS", scores, share, 5.0)
    add_json(parser)


def run(args: Namespace) -> int:
    """Compare two runs; returns the exit code, which is the answer."""
    with exits_with(2):  # 1 means: keep A
        losses, scores = args.tolerance / 100, args.score_tolerance / 100
        compared = compare(RunFolder(args.a), RunFolder(args.b), losses, scores)
    code, colour = _ANSWERS[compared.answer]
    if args.json:
        print_json(asdict(compared) | {"exit_code": code})
        return code
    out = console()
    out.print(Text(f"A  {printable(str(compared.a))}\nB  {printable(str(compared.b))}\n"))
    if compared.settings:
        settings = table("", "settings that differ", "A", "B")
        for key, (a, b) in compared.settings.items():
            settings.add_row(Text(key), Text(_short(a)), Text(_short(b)))
        out.print(settings, "")
    measured = table("", "measured", "A", "B", "B against A", right=("A", "B"))
    for name, (a, b) in compared.measured.items():
        change = ""
        if a > 0 and b > 0:
            percent = round(100 * (b / a - 1), 2) + 0.0  # no "-0.00"
            change = f"{percent:+.2f} %"
        measured.add_row(name, _number(a), _number(b), change)
    out.print(measured, "")
    for note in compared.notes:
        out.print(Text(f"note: {printable(note)}"), soft_wrap=True)
    out.print(Text(f"verdict: {compared.text}", style=f"bold {colour}"), soft_wrap=True)
    return code


def _short(value: Any) -> str:
    text = "-" if value is None else printable(str(value))
    return text if len(text) <= 60 else f"{text[:28]} … {text[-28:]}"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "?"
    if abs(value) >= 1000 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"
