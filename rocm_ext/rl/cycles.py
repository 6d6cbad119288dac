"""What is told of a RAFT run's cycles: counts, entries of ``summary.json``, and reasons to stop. Without torch."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from rocm_ext.base.files import replace_text
from rocm_ext.rl.records import Sample, entropy, pass_rates
from rocm_ext.rl.selection import Selected
from rocm_ext.runs.folder import PHASES, SampleKey
from rocm_ext.verifiers import Result


def rows(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of ``summary.json``, one for each cycle that has ended; cycle 0 is before any training.

    Args:
        lines: lines of ``metrics.jsonl``: ``cycle``, ``phase`` and measurements, for each phase that has ended.
    """
    of_cycles: dict[int, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for line in lines:
        of_cycles[line["cycle"]][line["phase"]] = line
    found = []
    for cycle, phases in sorted(of_cycles.items()):
        row: dict[str, Any] = {"cycle": cycle}
        counts = phases.get("sample", {}).get("counts", {})
        if counts and not counts["kept"]:
            row["skipped"] = True
        row |= counts
        if training := phases.get("train"):
            row |= {key: training[key] for key in ("steps", "first_loss", "last_loss", "lr")}
        if evaluation := phases.get("eval"):
            row["held_out"] = evaluation["eval"]
        row["seconds"] = {phase: phases.get(phase, {}).get("seconds", 0) for phase in PHASES}
        if not cycle or row.get("skipped") or "train" in phases:
            found.append(row)
    return found


def count_answers(selected: Selected, passes: Callable[[Result], bool]) -> dict[str, Any]:
    """Count a cycle's answers for its entry in ``summary.json``.

    Args:
        selected: the answers.
        passes: what an answer needs to count for ``pass_rate``, the mean over prompts of the share that passed.
    """
    samples, results, dropped = selected.samples, selected.results, selected.dropped
    rates = [rate for rate in pass_rates(results, passes).values() if rate is not None]
    return {
        "prompts": len({prompt for prompt, _ in samples}),
        "samples": len(samples),
        "verdicts": dict(sorted(Counter(result.verdict.value for result in results.values()).items())),
        "pass_rate": fmean(rates) if rates else 0.0,
        "filter": dict(dropped),
        "kept": dropped["kept"],
        "mean_tokens": fmean(len(sample.tokens) for sample in samples.values()),
        "entropy": entropy(samples.values()),
    }


def in_words(counts: Mapping[str, Any]) -> str:
    """Describe the counts of a selection: ``48 answers: 20 CORRECT, 28 WRONG; 28 below threshold, 20 kept``."""
    rules = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in counts["filter"].items())
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts["verdicts"].items())
    return f"{counts['samples']} answers: {verdicts}; {rules}"


def nothing_trained(rows: Sequence[Mapping[str, Any]]) -> str:
    """Describe why no cycle was trained, and what to do.

    Args:
        rows: entries of ``summary.json``.
    """
    empty = [row for row in rows if row.get("skipped")]
    if not empty:
        return "no prompt qualifies for the first cycle, so no cycle was trained"
    return (
        f"no cycle was trained. Cycle {empty[-1]['cycle']}: nothing to train on. {in_words(empty[-1])}. Continue with "
        "resume_from_checkpoint=True and more samples_per_prompt, a larger max_new_tokens, a lower reward_threshold or "
        "other settings of the verifier; or use easier prompts or a model that is right more often"
    )


def trained_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the entries of the trained cycles among ``rows``."""
    return [row for row in rows if row["cycle"] and not row.get("skipped")]


def _correct(row: Mapping[str, Any], otherwise: int) -> int:
    return row["held_out"]["correct"] if "held_out" in row else otherwise


def stop_reason(
    rows: Sequence[Mapping[str, Any]], *, min_entropy: float | None, stop_after: int | None, max_empty: int
) -> str | None:
    """Decide whether a run stops early.

    Args:
        rows: entries of ``summary.json`` up to the newest cycle, in order.
        min_entropy: stop if the entropy of the newest answers is below this, in nats per token; None: never.
        stop_after: stop after this many trained cycles without a better held-out score; None: never.
        max_empty: stop after this many skipped cycles in a row.

    Returns:
        The reason to stop, or None to continue.
    """
    empty = sum(1 for _ in takewhile(lambda row: row.get("skipped"), reversed(rows)))
    if empty >= max_empty:
        return f"no answer was kept in {empty} cycle{'s in a row' if empty > 1 else ''} (max_empty_cycles {max_empty})"
    now = rows[-1]["entropy"] if rows and rows[-1]["cycle"] else None
    if min_entropy is not None and now is not None and now < min_entropy:
        return f"the answers' entropy is {now:.3f} nats per token, under min_entropy {min_entropy:g}"
    scored = [row for row in rows if "held_out" in row]
    if stop_after is not None and scored:
        highest = max(scored, key=lambda row: _correct(row, 0))  # the first of equals
        since = sum(
            row["cycle"] > highest["cycle"] for row in trained_rows(rows) if row["cycle"] <= scored[-1]["cycle"]
        )
        if since >= stop_after:
            return f"no gain on held-out prompts for {since} cycles"
    return None


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the entries of ``summary.json`` as a table with a line per cycle."""
    titles = ("cycle", "samples", "pass rate", "kept", "steps", "lr", "loss", "held-out", "95 % interval", "time")
    lines: list[tuple[str, ...]] = [titles]
    for row in rows:
        answers, held = ["-"] * 6, ["-"] * 2
        if row["cycle"]:
            answers[:3] = f"{row['samples']}", f"{row['pass_rate']:.1%}", f"{row['kept']}"
            answers[5] = "skipped"
        if row["cycle"] and not row.get("skipped"):
            loss = f"{row['first_loss']:.3f} -> {row['last_loss']:.3f}"
            answers[3:] = f"{row['steps']}", f"{row['lr']:.1e}", loss
        if "held_out" in row:
            low, high = row["held_out"]["interval"]
            held = [f"{row['held_out']['pass_at_1']:.1%}", f"{low:.1%} - {high:.1%}"]
        lines.append((str(row["cycle"]), *answers, *held, f"{sum(row['seconds'].values()):.0f} s"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def write_kept(
    path: Path,
    kept: Sequence[Sample],
    results: Mapping[SampleKey, Result],
    prompts: Mapping[str, Sequence[int]],
) -> None:
    """Write ``kept.jsonl``: the samples with their rewards and the token ids of their prompts.

    Args:
        path: path of the file.
        kept: samples to write.
        results: verdicts by prompt id and sample index.
        prompts: token ids of each prompt, by id.

    Raises:
        UserError: the disk is full.
    """
    lines = []
    for sample in kept:
        more = {"reward": results[sample.key].reward, "prompt_tokens": prompts[sample.prompt_id]}
        lines.append(json.dumps({**sample.record(), **more}) + "\n")
    replace_text(path, "".join(lines))
