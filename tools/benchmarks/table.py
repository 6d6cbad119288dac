"""The table of a benchmark run, in Markdown."""

from collections.abc import Sequence
from typing import Any

GIB = 2**30
_COLUMNS = ("work", "model", "against", "speed-up", "of which by skipped work", "peak memory, ours / theirs",
            "threads, ours / theirs", "until warm, ours / theirs")  # fmt: skip
NAMES = {"sft": "LoRA SFT", "dpo": "LoRA DPO, an epoch", "dpo step": "LoRA DPO, each further epoch",
         "sampling": "sampling", "grpo": "GRPO, a step", "grpo drawn": "GRPO, a step of equal updates",
         "distil": "distillation, a step"}  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format a line per comparison, and a sentence on cycles."""
    lines = [
        _COLUMNS,
        ("---",) * len(_COLUMNS),
        *(cells(row) for row in rows if row["work"] in NAMES),
    ]
    said = [cycles(row) for row in rows if row["work"] == "cycle"]
    return "\n\n".join(["\n".join(f"| {' | '.join(line)} |" for line in lines), *said])


def cycles(row: dict[str, Any]) -> str:
    """A sentence on the share of a cycle outside generation and training."""
    low, high = row["range"]
    return (
        f"RAFT, pocket model: cycles spend {row['outside']:.1%} ({low:.1%}-{high:.1%}, {row['runs']} runs) "
        "of their time outside generation and training."
    )


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return what identifies a comparison: work, size, dtype, vocabulary, peer and our side."""
    size = round(row["parameters"] / 1e6)
    return row["work"], size, row["dtype"], row["vocab"], row["peer"], row.get("ours", "ours")


def name_of(row: dict[str, Any]) -> str:
    """Name the work."""
    return NAMES[row["work"]] + row.get("ours", "ours").removeprefix("ours")


def model_of(row: dict[str, Any]) -> str:
    """Describe the model."""
    return f"{row['parameters'] / 1e6:,.0f} M, {row['vocab']:,} tokens, {row['dtype']}"


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Format the cells of one comparison."""
    low, high = row["range"]
    memory = " / ".join(f"{value / GIB:.2f}" for value in row["peak_memory"]) + " GiB"
    warm = " / ".join(f"{value:.0f}" for value in row["until_warm"]) + " s"
    return (
        name_of(row),
        model_of(row),
        row["peer"],
        f"{row['speedup']:.2f} x ({low:.2f}-{high:.2f})",
        "" if row["bound"] is None else f"{row['bound']:.2f} x",
        memory,
        "{} / {}".format(*row["threads"]),
        warm,
    )
