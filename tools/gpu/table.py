"""The results as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]


def markdown(machine: Mapping[str, Any], results: Sequence[Result]) -> str:
    """Format the machine and the results: failures, speeds, checks, and what did not run."""
    text = f"# {machine['machine']}\n\n{machine['date']}, {machine['versions']}.\n\n{summary(results)}\n"
    if failed := [
        result for result in results if result["status"] not in ("ok", "skipped", "out of time")
    ]:
        lines = [(result["name"], result["status"], result["detail"]) for result in failed]
        text += f"\n## Failed\n\n{_table(('part', 'status', 'detail'), lines)}\n"
    speeds = [(row["what"], _number(row["value"], row["unit"]), row["note"])
              for result in results for row in result["rows"] if "value" in row]  # fmt: skip
    if speeds:
        text += f"\n## Speed\n\n{_table(('what', 'measured', ''), speeds)}\n"
    checks = [(row["what"], _STATES[row["ok"]], row["found"])
              for result in results for row in result["rows"] if "ok" in row]  # fmt: skip
    if checks:
        text += f"\n## Checks\n\n{_table(('check', '', 'found'), checks)}\n"
    if left := [
        (part["name"], part["detail"])
        for part in results
        if part["status"] in ("skipped", "out of time")
    ]:
        text += f"\n## Not run\n\n{_table(('part', 'reason'), left)}\n"
    return text


_STATES = {True: "holds", False: "**does not hold**", None: ""}


def summary(results: Sequence[Result]) -> str:
    """Say in one line how the parts ended."""
    counts: dict[str, int] = {}
    for result in results:
        counts[result["status"]] = counts.get(result["status"], 0) + 1
    held = sum(row.get("ok") is True for result in results for row in result["rows"])
    ended = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"{sum(counts.values())} parts: {ended}; {held} checks hold"


def line(result: Result) -> str:
    """Say in one line how a part ended, for the terminal."""
    said = f"{result['name']}: {result['status']}"
    said += f" ({result['detail']})" if result["detail"] else ""
    rows = [
        f"{row['what']}: {_number(row['value'], row['unit'])}"
        for row in result["rows"]
        if "value" in row
    ]
    return "; ".join([said, *rows[:3]]) + f" [{result['seconds']:.0f} s]"


def _number(value: float, unit: str) -> str:
    digits = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{digits} {unit}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")
