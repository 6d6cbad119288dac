"""Write the tables of README.md and docs from what was measured and what is computed: ``make tables``.

A table stands between two marks in its page, the first of which names the function that makes it. Speeds come from
the files in tools/benchmarks/figures, which ``python -m tools.benchmarks --json FILE`` writes.
"""

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rocm_ext.cli import main as rocm_ext  # noqa: E402
from tools import models  # noqa: E402
from tools.benchmarks.table import GIB, NAMES, key, name_of  # noqa: E402

FIGURES = ROOT / "tools" / "benchmarks" / "figures"
HEADLINE = (("sft", "torchtune as shipped"), ("dpo", "torchtune"), ("sampling", "transformers continuous batching"),
            ("grpo", "TRL + PEFT"), ("grpo drawn", "TRL + PEFT"))  # fmt: skip
PLANS = {  # what the config is planned for, beside its arguments
    "strix_halo_qwen0_5b": ("rows of 2,048 tokens", ["--rows=10000"]),
    "strix_halo_qwen7b": ("the same", ["--rows=10000"]),
    "strix_halo_qwen7b_raft": ("500 prompts × 8 answers of 256 tokens", ["--rows=500"]),
    "strix_halo_qwen3_4b_grpo": ("32 prompts × 8 answers of 256 tokens", []),
    "mi300x_qwen7b": ("rows of 2,048 tokens", ["--rows=10000"]),
    "mi50_qwen1_5b": ("the same", ["--rows=10000"]),
}
Row = dict[str, Any]


def main() -> None:
    """Write the pages."""
    for page, parts in PAGES.items():
        path = ROOT / page
        path.write_text(filled(path.read_text(), parts))


def filled(page: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with what stands between its marks made anew."""
    for name, make in parts.items():
        begin, end = f"<!-- {name}: made by tools/tables.py -->\n\n", "<!-- end -->"
        before, after = page.split(begin)
        page = before + begin + make() + "\n\n" + after[after.index(end) :]
    return page


# ---- measured


def measured() -> dict[str, list[Row]]:
    """Return the rows by machine, newest figures first."""
    files = [json.loads(path.read_text()) for path in sorted(FIGURES.glob("*.json"))]
    newest = sorted(files, key=lambda file: max(row["date"] for row in file["rows"]), reverse=True)
    return {file["machine"]: file["rows"] for file in newest}


def by_comparison() -> dict[tuple[Any, ...], dict[str, Row]]:
    """Return the rows by comparison and machine."""
    rows_of: dict[tuple[Any, ...], dict[str, Row]] = {}
    for machine, rows in measured().items():
        for row in rows:
            rows_of.setdefault(key(row), {})[machine] = row
    works = list(NAMES)
    return dict(
        sorted(
            rows_of.items(),
            key=lambda item: (works.index(item[0][0]), item[0][2] == "bf16", item[0][1]),
        )
    )


def speeds() -> str:
    """The table of comparisons by their newest figures, without those with a note (a busy machine, an old version)."""
    lines = [
        [
            "work",
            "model",
            "against",
            "times as fast",
            "of which by skipped work",
            "GiB, ours / theirs",
        ]
    ]
    lines.append(["---"] * len(lines[0]))
    letters = dict(zip(measured(), "abcdefgh", strict=False))
    for rows in by_comparison().values():
        machine, row = next(
            ((name, row) for name, row in rows.items() if not row.get("note")), ("", None)
        )
        if row is not None:
            memory = " / ".join(f"{value / GIB:.2f}" for value in row["peak_memory"])
            skipped = "" if row["bound"] is None else f"{row['bound']:.1f} ×"
            cell = f"{_cell(row)} ({letters[machine]})"
            model = f"{row['parameters'] / 1e6:.0f} M" + ", bf16" * (row["dtype"] == "bf16")
            lines.append([name_of(row), model, row["peer"], cell, skipped, memory])
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    said = [
        f"- ({letters[name]}) {name}, {_dates(rows)}, beside {_pins(rows)}"
        for name, rows in measured().items()
    ]
    return "\n".join([text, "", *said])


def headline() -> str:
    """README's table: the smallest model's speed-ups, in fp32."""
    machines = list(measured())
    lines = [["work", "against", *map(_short, machines)]]
    lines.append(["---"] * len(lines[0]))
    for work, peer in HEADLINE:
        rows = next(
            rows for of, rows in by_comparison().items() if of[0] == work and of[-2] == peer
        )
        ratios = [_speed(rows[machine]) if machine in rows else "" for machine in machines]
        lines.append([NAMES[work].removeprefix("LoRA "), peer, *ratios])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _short(machine: str) -> str:
    return machine.split(",")[0]


def _cell(row: Row) -> str:
    low, high = row["range"]
    rounds = "" if row["rounds"] == 4 else f", {row['rounds']} rounds"
    return f"{_speed(row)} ({_ratio(low)}-{_ratio(high)}){rounds}"


def _speed(row: Row) -> str:
    return f"{_ratio(row['speedup'])} ×"


def _ratio(value: float) -> str:
    return f"{value:.{2 if value < 2 else 1}f}"


def _dates(rows: list[Row]) -> str:
    dates = sorted({row["date"] for row in rows})
    return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def _pins(rows: list[Row]) -> str:
    return ", ".join(
        pin.replace("==", " ") for pin in dict.fromkeys(pin for row in rows for pin in row["pins"])
    )


# ---- computed


def plans() -> str:
    """The table of what ``rocm-ext plan`` computes from data sheets."""
    lines = [
        "| config | peak | training, tokens/s | sampling, tokens/s | time |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(plan_line, PLANS)])


def plan_line(config: str) -> str:
    """The line of a config of :data:`PLANS`."""
    what, arguments = PLANS[config]
    with redirect_stdout(StringIO()) as out:
        rocm_ext(["plan", "--json", "--config", config, *arguments])
    plan = json.loads(out.getvalue())
    slow, fast = plan["published"]["training"]
    rollout, step = plan["rollout"], plan["configured"]["step"]
    training = (
        f"{_two(step['tokens_per_second'] * slow)} to {_two(step['tokens_per_second'] * fast)}"
    )
    peak, sampling = plan["configured"]["memory"]["peak"], ""
    if rollout is None:
        least, most = (plan["training_seconds"] / share for share in (fast, slow))
        time = f"{_time(least)} to {_time(most)} for {plan['rows']['count']:,} rows"
    else:
        worst, best = plan["published"]["sampling"]
        rate = rollout["sampling"]["tokens_per_second"]
        sampling = f"{_two(rate * worst)} to {_two(rate * best)}"
        peak = max(peak, rollout["peak"])
        parts = [
            (rollout["sampling_seconds"], (worst, best)),
            (rollout["updates_seconds"], (slow, fast)),
        ]
        least, most = (sum(seconds / shares[i] for seconds, shares in parts) for i in (1, 0))
        time = f"{_time(least)} to {_time(most)} a {'step' if 'grpo' in config else 'cycle'}, without evaluations"
    return f"| `{config}`, {what} | {peak / GIB:.0f} GiB | {training} | {sampling} | {time} |"


def _two(value: float) -> str:
    """A number with two or three digits that count."""
    unit = 10 if value < 10_000 else 100
    return f"{round(value / unit) * unit:,}"


def _time(seconds: float) -> str:
    return (
        f"{seconds / 3600:.1f} h"
        if seconds >= 3600
        else f"{seconds / 60:.{0 if seconds >= 600 else 1}f} min"
    )


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"headline": headline},
    "docs/benchmarks.md": {"speeds": speeds},
    "docs/plan-and-bench.md": {"plans": plans},
    "docs/models.md": {"text": models.text, "more": models.more, "multimodal": models.multimodal},
}


if __name__ == "__main__":
    main()
