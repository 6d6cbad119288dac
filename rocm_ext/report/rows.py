"""A run's data from ``rows.json``: numbers, and some rows with their trained parts."""

from dataclasses import dataclass
from itertools import pairwise

from rocm_ext.base.types import Json
from rocm_ext.report.charts import Chart, Table
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.records import ROWS

# Columns of lengths
COLUMNS = {"min": "min", "median": "median", "p95": "95 %", "max": "max", "total": "total"}
_EQUAL = {
    "repeated": "equal an earlier row",
    "trained_on": "are training rows, too",
    "prompt_trained_on": "have a prompt that is trained on",
}
_PARTS = 24  # most parts of a sequence that are shown

Parts = list[tuple[str, bool]]  # text, and whether it is trained


@dataclass(frozen=True)
class Data:
    """The data of a run.

    Attributes:
        facts: sentences.
        lengths: rows of :func:`length_table`.
        sets: name, rows, share of an epoch and weight of the data sets, if there are several.
        chart: histogram of the rows' lengths.
        rows: titles of some rows, with the headings and parts of their sequences.
    """

    facts: list[str]
    lengths: Table
    sets: Table
    chart: Chart
    rows: list[tuple[str, list[tuple[str, Parts]]]]


def data(run: RunFolder) -> Data | None:
    """Return a run's data. None if the run has not written it, or if it is damaged (a message in ``run.problems``)."""
    if not run.rows:
        return None
    try:
        return _data(run.rows)
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError):
        run.problems.append(f"{run.path / ROWS} is damaged and is skipped")
        return None


def _data(content: Json) -> Data:
    facts = []
    lengths = []
    for key in ("dataset", *validations(content)):
        prefix = "" if key == "dataset" else f"{key}: "
        facts += facts_of(key, content[key])
        for what, *columns in length_table(content[key]):
            lengths.append([prefix + what, *columns])
    facts.append(ends(content))
    sets = []
    for part in content.get("data_sets", ()):
        weight = str(part["weight"] or "")
        sets.append([str(part["name"]), f"{part['rows']:,}", f"{part['share']:.1%}", weight])
    rows = []
    for row in content["shown"]:
        sequences = []
        for sequence in row["sequences"]:
            sequences.append((heading(sequence), shown_parts(sequence)))
        rows.append((title(row), sequences))
    return Data(facts, lengths, sets, _histogram(content["dataset"]), rows)


def validations(content: Json) -> list[str]:
    """Return the keys of validation rows: ``validation``, or ``validation.NAME`` of named data sets."""
    return [key for key in content if key.partition(".")[0] == "validation"]


def facts_of(key: str, data: Json) -> list[str]:
    """Return sentences on rows that are kept, left out or repeated, and on the share of trained tokens.

    Args:
        key: ``dataset``, or one of :func:`validations`.
        data: its value in ``rows.json``.
    """
    lines = [f"{key}: {data['kept']:,} of {data['rows']:,} rows"]
    for reason, first in data["first"].items():
        lines.append(f"{reason.replace('_', ' ')}: {data['counts'][reason]:,}, first {first}")
    for kind, words in _EQUAL.items():
        for row, other in data.get(f"first_{kind}", ()):
            lines.append(f"{words}: {data[kind]:,}, first {row} as {other}")
    if "trained_share" in data:
        lines.append(f"trained: {data['trained_share']:.1%} of all tokens")
    if "weights" in data:
        lines.append("weights of rows: {:g} to {:g}".format(*data["weights"]))
    return lines


def length_table(data: Json) -> Table:
    """Return rows of a name and lengths in tokens by :data:`COLUMNS`, for rows, prompts and so on."""
    table = []
    for name, lengths in data["tokens"].items():
        table.append([name, *(f"{lengths[column]:,}" for column in COLUMNS)])
    return table


def ends(content: Json) -> str:
    """Return a sentence on the steps of an epoch, or on the length of answers."""
    if "longest_answer" in content:
        return f"answers have up to {content['longest_answer']:,} tokens; the model takes {content['window']:,}"
    on = "one rank" if content["ranks"] == 1 else f"{content['ranks']:,} ranks"
    return f"steps of an epoch: {content['steps_per_epoch']:,}, each of {content['rows_per_step']:,} rows on {on}"


def title(row: Json) -> str:
    """Name a row."""
    name = f"row {row['row']}, {row['origin']}"
    if "weight" in row:
        name += f", weight {row['weight']:g}"
    return name


def heading(sequence: Json) -> str:
    """Name a sequence of a row."""
    name = f"{sequence['tokens']:,} tokens"
    if "side" in sequence:
        name = f"{sequence['side']}: {name}"
    if sequence["trained"]:
        name += f", {sequence['trained_tokens']:,} trained"
    return name


def shown_parts(sequence: Json) -> Parts:
    """Return the parts of a sequence; of many, the first and the last ones. A rejected answer goes without prompt."""
    text = str(sequence["text"])
    spans = sequence["trained"]
    bounds = sorted({0, len(text)}.union(*spans))
    parts = []
    for start, end in pairwise(bounds):
        trained = [start, end] in spans
        parts.append((text[start:end], trained))
    if sequence.get("side") == "rejected" and not parts[0][1]:
        parts = parts[1:]  # the chosen side has shown it
    omitted = len(parts) - _PARTS
    if omitted > 0:
        half = _PARTS // 2
        parts[half:-half] = [(f"\n… {omitted:,} parts …\n", False)]
    return parts


def _histogram(data: Json) -> Chart:
    """The lengths of the rows."""
    name, lengths = next(iter(data["tokens"].items()))
    bars = {}
    for low, high, count in lengths["histogram"]:
        bar = f"{low:,}" if low == high else f"{low:,}–{high:,}"
        bars[bar] = int(count)
    words = (
        f"from {lengths['min']:,} to {lengths['max']:,}, half of them up to {lengths['median']:,}"
    )
    trace = {
        "type": "bar",
        "x": list(bars),
        "y": list(bars.values()),
        "marker": {"color": "var(--c0)"},
    }
    x_axis = {"type": "category", "title": {"text": f"tokens of a {name}"}}
    layout = {"xaxis": x_axis, "showlegend": False}
    figure = {"data": [trace], "layout": layout}
    return Chart("Lengths", "rows", words, figure)
