"""The table of a benchmark run, in Markdown."""

from collections.abc import Sequence
from typing import Any

GIB = 2**30
_COLUMNS = ("work", "model", "against", "speed-up", "of which by skipped work", "peak memory, ours / theirs",
            "threads, ours / theirs", "until warm, ours / theirs")  # fmt: skip
NAMES = {"sft": "LoRA SFT", "dpo": "LoRA DPO, an epoch", "dpo step": "LoRA DPO, each further epoch",
         "sampling": "sampling", "grpo": "GRPO, a step", "distil": "distillation, a step"}  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format a line per comparison, and a sentence on cycles, verdicts and learning."""
    lines = [
        _COLUMNS,
        ("---",) * len(_COLUMNS),
        *(cells(row) for row in rows if row["work"] in NAMES),
    ]
    said = [SENTENCES[row["work"]](row) for row in rows if row["work"] in SENTENCES]
    return "\n\n".join(["\n".join(f"| {' | '.join(line)} |" for line in lines), *said])


def cycles(row: dict[str, Any]) -> str:
    """A sentence on the share of a cycle outside generation and training."""
    low, high = row["range"]
    return (
        f"RAFT, pocket model: cycles spend {row['outside']:.1%} ({low:.1%}-{high:.1%}, {row['runs']} runs) "
        "of their time outside generation and training."
    )


def accuracy(row: dict[str, Any]) -> str:
    """A sentence on what both sides learned in the same number of steps, and their speeds at equal updates."""
    ours, theirs = row["accuracy"]
    mine, other = (100 * gain for gain in row["gain_per_hour"])
    seconds = " and ".join(f"{value:.2f} s" for value in row["step_seconds"])
    made, all_of_them = row["updates"]
    return (
        f"GRPO, {row['parameters'] / 1e6:,.0f} M parameters, {row['answers']} answers a step: a step takes "
        f"{seconds} (ours, {row['peer']}), with {made:.1f} and {all_of_them} updates: {row['speedup']:.2f} x, at equal "
        f"updates {row['speedup'] * made / all_of_them:.2f} x. {row['steps']} steps take the held-out accuracy from "
        f"{row['before']:.1%} to {ours:.1%} (ours) and {theirs:.1%}: {mine:.0f} and {other:.0f} points an hour of "
        "steps."
    )


def verdicts(row: dict[str, Any]) -> str:
    """A sentence on the verdicts of one number of workers beside one peer."""
    low, high = (1 / ratio for ratio in reversed(row["range"]))
    return (
        f"MBPP's right answers, workers: {row['workers']}: {row['right']} of {row['rows']} pass, "
        f"{1 / row['seconds']:.1f} verdicts a second; a verdict takes {1 / row['speedup']:.2f} ({low:.2f}-{high:.2f}, "
        f"{row['rounds']} rounds) times as long as starting {row['peer']}."
    )


SENTENCES = {"cycle": cycles, "verify": verdicts, "grpo": accuracy}


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
