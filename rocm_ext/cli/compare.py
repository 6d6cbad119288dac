"""``rocm-ext compare``: is a faster setting as good as a safe one?

Compares two runs, finished or not: a safe baseline A and a faster setting B. Prints their speed, memory, losses (or
held-out scores of RAFT and GRPO) and stability, and whether to take B.
Exit code: 0 take B, 1 keep A, 2 something to compare is missing, 3 undecided yet.
"""

import argparse
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from rocm_ext.base.errors import UserError
from rocm_ext.cli._common import add_json, console, number, print_json, printable, table
from rocm_ext.runs.compare import Comparison, Losses, Scores, compare
from rocm_ext.runs.decision import Decision, decide
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.intervals import Interval

_SCORES = 20  # most evaluations that are shown
Row = tuple[str, str, str, str]  # name, A's value, B's, B against A


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("a", type=Path, metavar="RUN_A", help="output_dir of the baseline")
    parser.add_argument("b", type=Path, metavar="RUN_B", help="output_dir of the run with the faster setting")
    share = number(float, 0.001, 99)
    losses = "difference of losses to ignore, in percent of A's (default: 1)"
    parser.add_argument("--tolerance", type=share, default=1.0, metavar="PERCENT", help=losses)
    scores = "difference of held-out pass@1 to ignore, in percentage points (default: 5)"
    parser.add_argument("--score-tolerance", type=share, default=5.0, metavar="POINTS", help=scores)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Compare two runs; returns the exit code, which is the decision."""
    try:
        found = compare(RunFolder(args.a), RunFolder(args.b))
    except UserError as error:
        raise UserError(str(error), code=2) from error  # exit code 1 means: keep A
    decision = decide(found, args.tolerance / 100, args.score_tolerance / 100)
    if args.json:
        print_json(_content(found, decision))
        return decision.exit_code
    out = console()
    out.print(Text(f"A  {printable(str(found.a.path))}\nB  {printable(str(found.b.path))}\n"))
    if found.settings:
        settings = table("", "settings that differ", "A", "B")
        for key, values in found.settings.items():
            settings.add_row(Text(key), *(Text(_short(value)) for value in values))
        out.print(settings, "")
    measured = table("", "measured", "A", "B", "B against A", right=("A", "B"))
    for row in _rows(found):
        measured.add_row(*map(Text, row))
    out.print(measured, "")
    for note in found.notes:
        out.print(Text(f"note: {printable(note)}"), soft_wrap=True)
    style = {"take": "bold green", "reject": "bold red", "unknown": "bold yellow"}[decision.answer]
    out.print(Text(f"verdict: {decision.text}", style=style), soft_wrap=True)
    return decision.exit_code


def _content(found: Comparison, decision: Decision) -> dict[str, Any]:
    content = {key: value for key, value in vars(found).items() if key not in ("a", "b", "losses", "scores")}
    return content | {
        "a": found.a.path,
        "b": found.b.path,
        "recipes": [found.a.recipe, found.b.recipe],
        "finished": [found.a.finished, found.b.finished],
        "speed": asdict(found.speed),
        "losses": asdict(found.losses) if found.losses else None,
        "scores": [asdict(each) for each in found.scores],
        "decision": {"answer": decision.answer, "text": decision.text, "exit_code": decision.exit_code},
    }


def _short(value: Any) -> str:
    text = "-" if value is None else printable(str(value))
    return text if len(text) <= 60 else f"{text[:28]} … {text[-28:]}"


def _rows(found: Comparison) -> list[Row]:
    a, b = ("yes" if run.finished else "no" for run in (found.a, found.b))
    rows = [("finished", a, b, "")]
    for name, (x, y) in found.rates.items():
        rows.append((name, _number(x), _number(y), "" if name in ("steps", "cycles") else _times(x, y)))
    speed = found.speed
    around = f" ({speed.low:.2f}-{speed.high:.2f})" if math.isfinite(speed.low) else ""
    rows.append(("speed", "", "", f"{speed.value:.2f}x{around}" if math.isfinite(speed.value) else "?"))
    x, y = found.memory
    rows.append(("peak memory, MiB", _number(x / 2**20), _number(y / 2**20), _times(x, y)))
    rows += _loss_rows(found.losses) if found.losses else []
    every = max(1, math.ceil(len(found.scores) / _SCORES))
    rows += [_score_row(each) for each in found.scores[::-1][::every][::-1]]  # the last one among them
    rows += [(name, _number(x), _number(y), "") for name, (x, y) in found.learning.items()]
    return rows + [(name, f"{x:,}", f"{y:,}", "") for name, (x, y) in found.stability.items()]


def _loss_rows(losses: Losses) -> list[Row]:
    rows: list[Row] = []
    if not losses.not_comparable:
        rows.append((f"loss, all {losses.steps:,} steps of both", "", "", _interval(losses.all)))
        half = f"loss, last {losses.steps - losses.steps // 2:,} of them"
        a, b = losses.values
        rows.append((half, _number(a), _number(b), _interval(losses.last_half)))
        if losses.validation is not None:
            step, a, b = losses.validation
            rows.append((f"validation loss at step {step:,}", _number(a), _number(b), _percents(b / a - 1)))
    if losses.best_validation is not None:
        a, b = losses.best_validation
        rows.append(("best validation loss", _number(a), _number(b), _percents(b / a - 1)))
    return rows


def _score_row(scores: Scores) -> Row:
    a, b = (f"{100 * correct / total:.1f} %" for correct, total in (scores.a, scores.b))
    gain = f"{100 * scores.gain.value:+.1f} points ({100 * scores.gain.low:+.1f} to {100 * scores.gain.high:+.1f})"
    chance = f", McNemar p = {scores.p:.2g}" if scores.p is not None else ""
    answers = " and ".join(f"{count:,}" for count in scores.answers)
    after = " and ".join(dict.fromkeys(scores.after))
    after += f", {answers} answers" if scores.after[0] != scores.after[1] else ""
    return f"held-out pass@1, {after}", a, b, gain + chance


def _interval(found: Interval) -> str:
    ends = f" ({_percents(found.low)} to {_percents(found.high)})" if math.isfinite(found.low) else ""
    return _percents(found.value) + ends


def _percents(share: float) -> str:
    return f"{round(100 * share, 2) + 0.0:+.2f} %"  # + 0.0: no "-0.00"


def _times(a: float, b: float) -> str:
    return f"{b / a:.2f}x" if a > 0 and b > 0 else ""


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "?"
    return f"{value:,.0f}" if abs(value) >= 1000 or value == round(value) else f"{value:.4g}"
