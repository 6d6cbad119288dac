"""The table of a benchmark run, in Markdown."""

from collections.abc import Sequence
from typing import Any

GIB = 2**30
_COLUMNS = ("work", "model", "against", "speed-up", "of which by skipped work", "peak memory, ours / theirs",
            "until warm, ours / theirs")  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each comparison, and one for the cycle's share."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *(cells(row) for row in rows if row["work"] != "cycle")]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    for row in rows:
        if row["work"] == "cycle":
            low, high = row["range"]
            text += (
                f"\n\nRAFT, pocket model: {row['outside']:.1%} ({low:.1%}-{high:.1%}, {row['runs']} runs) of the "
                "cycles' time is neither generation nor training."
            )
    return text


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Of one comparison."""
    low, high = row["range"]
    memory = " / ".join(f"{value / GIB:.2f}" for value in row["peak_memory"]) + " GiB"
    warm = " / ".join(f"{value:.0f}" for value in row["until_warm"]) + " s"
    name = {"sft": "LoRA SFT", "sampling": "sampling"}[row["work"]]
    return (
        name,
        f"{row['parameters'] / 1e6:,.0f} M, {row['vocab']:,} tokens, {row['dtype']}",
        row["peer"],
        f"{row['speedup']:.2f} x ({low:.2f}-{high:.2f})",
        f"{row['bound']:.2f} x",
        memory,
        warm,
    )
