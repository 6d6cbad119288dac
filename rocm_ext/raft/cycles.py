"""The files of a RAFT run's cycles, and what they add up to.

Everything here is read from those files, so a resumed run knows what a run that was never stopped knows.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rocm_ext.errors import UserError
from rocm_ext.files import disk_errors, replace_text
from rocm_ext.hardware.counters import HARDWARE_LOG
from rocm_ext.raft.rollouts import Sample, SampleKey, entropy, read_results, read_samples
from rocm_ext.train.checkpoint import FREE_KEYS
from rocm_ext.train.metrics import read_metrics
from rocm_ext.verifiers import Result

Filter = Callable[[Mapping[SampleKey, Sample], Mapping[SampleKey, Result]], tuple[list[Sample], dict[str, int]]]


# Keys that a resumed run may change, beside those that an SFT run may
RAFT_FREE_KEYS = FREE_KEYS | frozenset(
    """
    cycles prompts eval_prompts verify_workers verify_timeout max_error_share stop_after_no_gain min_entropy
    engine.slots engine.graphs engine.urls engine.concurrency engine.timeout engine.retries engine.api_key_env
    """.split()  # noqa: SIM905
)


class RunRecord:
    """``run.json``: the config and identity that a run in this folder was begun with."""

    def __init__(self, out: Path) -> None:
        self.out, self.path = out, out / "run.json"

    def begun(self, resume: bool, overwrite: bool) -> dict[str, Any] | None:
        """``config`` and ``identity`` of the run that is there, if this one is to continue it.

        Raises:
            UserError: another run is there, or this one cannot be read.
        """
        if resume and self.path.exists():
            try:
                return json.loads(self.path.read_text())
            except (OSError, ValueError) as error:
                raise UserError(f"cannot read {self.path}: {error}; take another output_dir") from error
        names = ("run.json", "cycle_0", "cycle_1", "adapter", "checkpoints")
        earlier = [name for name in names if (self.out / name).exists()]
        if earlier and not overwrite:
            raise UserError(
                f"output_dir {self.out} holds an earlier run ({', '.join(earlier)}); resume_from_checkpoint=True goes "
                "on with a RAFT run, overwrite_output_dir=True replaces it, or choose another output_dir"
            )
        return None

    def take(self, cfg: DictConfig, identity: Mapping[str, Any], fresh: bool) -> None:
        """Make the folder this run's; a fresh one begins with nothing in it."""
        with disk_errors(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        if fresh:
            self.path.unlink(missing_ok=True)  # first: a run without it cannot be resumed by mistake
            for pattern in ("cycle_*", "adapter", "merged", "checkpoints"):
                for folder in self.out.glob(pattern):
                    shutil.rmtree(folder, ignore_errors=True)
            for name in ("metrics.jsonl", HARDWARE_LOG, "summary.json"):
                (self.out / name).unlink(missing_ok=True)
        content = {"config": OmegaConf.to_container(cfg, resolve=True), "identity": identity}
        replace_text(self.path, json.dumps(content, indent=2) + "\n")
        replace_text(self.out / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))


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

    @property
    def trained(self) -> bool:
        """Whether training has left all its outputs; its summary is the last of them."""
        return (self.folder / "summary.json").exists()

    def phase(self, what: str) -> Path:
        """Where the samples and verdicts of a phase are."""
        return self.folder if what == "sample" else self.folder / what

    def results(self) -> dict[SampleKey, Result]:
        """The verdicts on the cycle's answers."""
        return read_results(self.folder / "verdicts.jsonl")

    def scores(self) -> dict[str, Any] | None:
        """The content of ``eval.json``, if there is one."""
        return json.loads(self.eval.read_text()) if self.eval.exists() else None

    def training(self) -> dict[str, Any]:
        """The summary that the SFT recipe left."""
        return json.loads((self.folder / "summary.json").read_text())

    def row(self, threshold: float, filter_: Filter) -> dict[str, Any]:
        """What the cycle's files say of it: its entry in ``summary.json``, without the seconds."""
        row: dict[str, Any] = {"cycle": self.number}
        if self.number:
            samples = {sample.key: sample for sample in read_samples(self.folder / "samples.jsonl")}
            results = self.results()
            rates, training = pass_rates(results, threshold), self.training()
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
        return row


def pass_rates(results: Mapping[SampleKey, Result], threshold: float) -> dict[str, float]:
    """The share of each prompt's answers whose reward reached ``threshold``; a verifier's failure says nothing
    about a prompt."""
    passed: dict[str, list[bool]] = {}
    for (prompt_id, _), result in results.items():
        if result.reward is not None:
            passed.setdefault(prompt_id, []).append(result.reward >= threshold)
    return {prompt_id: fmean(each) for prompt_id, each in passed.items()}


def best(rows: Sequence[Mapping[str, Any]]) -> int:
    """The cycle that did best on held-out prompts, of equals the last; without any the last one."""
    trained = [row for row in rows if row["cycle"]]
    return max(trained, key=lambda row: (row["held_out"]["correct"] if "held_out" in row else 0, row["cycle"]))["cycle"]


def gained(rows: Sequence[Mapping[str, Any]], number: int) -> bool:
    """Whether a cycle does better on held-out prompts than the model that the run began with."""
    correct = {row["cycle"]: row["held_out"]["correct"] for row in rows}
    return correct[number] > correct[0]


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
