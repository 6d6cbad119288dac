"""The files of a RAFT run's cycles, and what they add up to.

Everything here is read from those files, so a resumed run knows what a run that was never stopped knows.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rocm_ext.monitor import read_metrics
from rocm_ext.rollouts import Key, Sample, entropy, read_records, read_results, read_samples
from rocm_ext.verifiers import Result

PHASES = ("sample", "train", "eval")
Filter = Callable[[Mapping[Key, Sample], Mapping[Key, Result]], tuple[list[Sample], dict[str, int]]]


class Cycle:
    """Files of a cycle; cycle 0 is what comes before any training.

    Args:
        out: the run's folder.
        number: of the cycle.
    """

    def __init__(self, out: Path, number: int) -> None:
        self.out, self.number = out, number
        self.folder = out / f"cycle_{number}"
        self.adapter = self.folder / "adapter"
        self.kept = self.folder / "kept.jsonl"
        self.eval = self.folder / "eval.json"

    def phase(self, what: str) -> Path:
        """Where the samples and verdicts of a phase are."""
        return self.folder if what == "sample" else self.folder / what

    def pass_rates(self, threshold: float) -> dict[str, float]:
        """The share of each prompt's answers whose reward reached ``threshold``; a verifier's failure says nothing
        about a prompt."""
        passed: dict[str, list[bool]] = {}
        for record in read_records(self.folder / "verdicts.jsonl"):
            if record["reward"] is not None:
                passed.setdefault(record["prompt_id"], []).append(record["reward"] >= threshold)
        return {prompt_id: fmean(each) for prompt_id, each in passed.items()}

    def scores(self) -> dict[str, Any] | None:
        """The content of ``eval.json``, if there is one."""
        return json.loads(self.eval.read_text()) if self.eval.exists() else None

    def training(self) -> dict[str, Any]:
        """The summary that the SFT recipe left."""
        return json.loads((self.folder / "summary.json").read_text())

    def row(self, threshold: float, filter_: Filter) -> dict[str, Any]:
        """The cycle's entry in ``summary.json``."""
        row: dict[str, Any] = {"cycle": self.number}
        if self.number:
            samples = {sample.key: sample for sample in read_samples(self.folder / "samples.jsonl")}
            results = read_results(self.folder / "verdicts.jsonl")
            rates, training = self.pass_rates(threshold), self.training()
            kept, counts = filter_(samples, results)
            row |= {
                "prompts": len({prompt for prompt, _ in samples}),
                "samples": len(samples),
                "verdicts": dict(sorted(Counter(result.verdict.value for result in results.values()).items())),
                "pass_rate": fmean(rates.values()) if rates else 0.0,
                "filter": counts,
                "kept": len(kept),
                "mean_tokens": fmean(len(sample.tokens) for sample in samples.values()),
                "entropy": entropy(samples.values()),
                **{key: training[key] for key in ("steps", "first_loss", "last_loss")},
                "lr": max(line["lr"] for line in read_metrics(self.folder / "metrics.jsonl") if "lr" in line),
            }
        if scores := self.scores():
            row["held_out"] = scores
        times = [line for line in read_metrics(self.out / "metrics.jsonl") if line["cycle"] == self.number]
        return row | {"seconds": {each: sum(t["seconds"] for t in times if t["phase"] == each) for each in PHASES}}


def best(rows: Sequence[Mapping[str, Any]]) -> int:
    """The cycle that did best on held-out prompts, of equals the last; without any the last one."""
    trained = [row for row in rows if row["cycle"]]
    return max(trained, key=lambda row: (row["held_out"]["correct"] if "held_out" in row else 0, row["cycle"]))["cycle"]


def stop_reason(rows: Sequence[Mapping[str, Any]], min_entropy: float | None, stop_after: int | None) -> str | None:
    """Why no other cycle should follow, or None."""
    now = rows[-1]["entropy"]
    if min_entropy is not None and now is not None and now < min_entropy:
        return f"the answers' entropy is {now:.3f} nats per token, under min_entropy {min_entropy:g}"
    if stop_after is not None:
        correct = [row["held_out"]["correct"] for row in rows]
        since = len(correct) - 1 - correct.index(max(correct))
        if since >= stop_after:
            return f"no gain on held-out prompts for {since} cycles"
    return None


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line per cycle, for people."""
    titles = ("cycle", "samples", "pass rate", "kept", "steps", "lr", "loss", "held-out", "95 % interval", "time")
    lines: list[tuple[str, ...]] = [titles]
    for row in rows:
        trained, held = ["-"] * 6, ["-"] * 2
        if row["cycle"]:
            loss = f"{row['first_loss']:.3f} -> {row['last_loss']:.3f}"
            trained = [f"{row['samples']}", f"{row['pass_rate']:.1%}", f"{row['kept']}", f"{row['steps']}"]
            trained += [f"{row['lr']:.1e}", loss]
        if "held_out" in row:
            low, high = row["held_out"]["interval"]
            held = [f"{row['held_out']['pass_at_1']:.1%}", f"{low:.1%} - {high:.1%}"]
        lines.append((str(row["cycle"]), *trained, *held, f"{sum(row['seconds'].values()):.0f} s"))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
