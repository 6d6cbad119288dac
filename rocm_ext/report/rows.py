"""A run's data from ``rows.json``: numbers, and some rows with their trained parts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rocm_ext.base.types import Json
from rocm_ext.report.charts import Chart
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.records import ROWS

COLUMNS = {"min": "min", "median": "median", "p95": "95 %", "max": "max", "total": "total"}  # columns of lengths
_EQUAL = {
    "repeated": "equal an earlier row",
    "trained_on": "are training rows, too",
    "prompt_trained_on": "have a prompt that is trained on",
}
_PARTS = 24  # most parts of a sequence that are shown

Parts = list[tuple[str, bool]]  # text, and whether it is trained


@dataclass(frozen=True)
class Shown:
    """A row: its title, and the headings and parts of its sequences."""

    title: str
    sequences: list[tuple[str, Parts]]


@dataclass(frozen=True)
class Data:
    """The data of a run.

    Attributes:
        facts: sentences.
        lengths: rows of :func:`length_table`.
        sets: name, rows, share of an epoch and weight of the data sets, if there are several.
        chart: histogram of the rows' lengths.
        rows: some rows.
    """

    facts: list[str]
    lengths: list[list[str]]
    sets: list[list[str]]
    chart: Chart
    rows: list[Shown]


def data(run: RunFolder) -> Data | None:
    """Return a run's data; None if the run has not written it, or if it is damaged (a message in ``run.problems``)."""
    if not run.rows:
        return None
    try:
        return _data(run.rows)
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError):
        run.problems.append(f"{run.path / ROWS} is damaged and is skipped")
        return None


def _data(content: Json) -> Data:
    parts = {key: content[key] for key in ("dataset", "validation") if key in content}
    name = {"dataset": "", "validation": "validation: "}
    rows = [[name[key] + what, *lengths] for key, of in parts.items() for what, *lengths in length_table(of)]
    sets = [
        [str(part["name"]), f"{part['rows']:,}", f"{part['share']:.1%}", str(part["weight"] or "")]
        for part in content.get("data_sets", ())
    ]
    shown = [Shown(title(row), [(heading(s), shown_parts(s)) for s in row["sequences"]]) for row in content["shown"]]
    facts = [line for key, of in parts.items() for line in facts_of(key, of)]
    return Data([*facts, ends(content)], rows, sets, _histogram(content["dataset"]), shown)


def facts_of(key: str, of: Json) -> list[str]:
    """Return sentences on rows that are kept, left out or repeated, and on the share of trained tokens."""
    lines = [f"{key}: {of['kept']:,} of {of['rows']:,} rows"]
    lines += [f"{what.replace('_', ' ')}: {of['counts'][what]:,}, first {first}" for what, first in of["first"].items()]
    for what, said in _EQUAL.items():
        lines += [f"{said}: {of[what]:,}, first {this} as {other}" for this, other in of.get(f"first_{what}", ())]
    if "trained_share" in of:
        lines.append(f"trained: {of['trained_share']:.1%} of all tokens")
    if "weights" in of:
        lines.append("weights of rows: {:g} to {:g}".format(*of["weights"]))
    return lines


def length_table(of: Json) -> list[list[str]]:
    """Return rows of a name and lengths in tokens by :data:`COLUMNS`, for rows, prompts and so on."""
    return [[name, *(f"{lengths[column]:,}" for column in COLUMNS)] for name, lengths in of["tokens"].items()]


def ends(content: Json) -> str:
    """Return a sentence on the steps of an epoch, or on the length of answers."""
    if "longest_answer" in content:
        return f"answers have up to {content['longest_answer']:,} tokens; the model takes {content['window']:,}"
    on = "one rank" if content["ranks"] == 1 else f"{content['ranks']:,} ranks"
    return f"steps of an epoch: {content['steps_per_epoch']:,}, each of {content['rows_per_step']:,} rows on {on}"


def title(row: Json) -> str:
    """Name a row."""
    return f"row {row['row']}, {row['origin']}" + (f", weight {row['weight']:g}" if "weight" in row else "")


def heading(sequence: Json) -> str:
    """Name a sequence of a row."""
    side = f"{sequence['side']}: " if "side" in sequence else ""
    trained = f", {sequence['trained_tokens']:,} trained" if sequence["trained"] else ""
    return f"{side}{sequence['tokens']:,} tokens{trained}"


def shown_parts(sequence: Json) -> Parts:
    """Return the parts of a sequence; of many, the first and the last ones. A rejected answer goes without prompt."""
    parts = list(_parts(str(sequence["text"]), sequence["trained"]))
    if sequence.get("side") == "rejected" and not parts[0][1]:
        parts = parts[1:]  # the chosen side has shown it
    if len(parts) > _PARTS:
        half = _PARTS // 2
        return [*parts[:half], (f"\n… {len(parts) - _PARTS:,} parts …\n", False), *parts[-half:]]
    return parts


def _parts(text: str, spans: Sequence[Sequence[int]]) -> Iterator[tuple[str, bool]]:
    for start, end in pairwise(sorted({0, len(text), *(end for span in spans for end in span)})):
        yield text[start:end], [start, end] in spans


def _histogram(of: Json) -> Chart:
    name, lengths = next(iter(of["tokens"].items()))
    bars = {f"{low:,}" if low == high else f"{low:,}–{high:,}": int(count) for low, high, count in lengths["histogram"]}
    words = f"from {lengths['min']:,} to {lengths['max']:,}, half of them up to {lengths['median']:,}"
    trace = {"type": "bar", "x": [*bars], "y": [*bars.values()], "marker": {"color": "var(--c0)"}}
    layout = {"xaxis": {"type": "category", "title": {"text": f"tokens of a {name}"}}, "showlegend": False}
    return Chart("Lengths", "rows", words, {"data": [trace], "layout": layout})
