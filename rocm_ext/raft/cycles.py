"""The files of a RAFT run's cycles, and their summaries.

All results here come from these files, so a resumed run has the same information as an undisturbed one.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from rocm_ext.files import read_json
from rocm_ext.rollouts.samples import Sample, SampleKey, entropy, read_results, read_samples
from rocm_ext.runs.reader import SELECTION
from rocm_ext.train.checkpoint import FREE_KEYS
from rocm_ext.train.metrics import read_metrics
from rocm_ext.verifiers import Result, Verdict

Filter = Callable[[Mapping[SampleKey, Sample], Mapping[SampleKey, Result]], tuple[list[Sample], dict[str, int]]]


# Keys that a resumed run may change although they affect results; see :func:`rocm_ext.raft.reopen.reopen`
CHANGEABLE = frozenset({"samples_per_prompt", "max_new_tokens", "keep", "reward_threshold", "verifier"})
# Keys that a resumed RAFT run may change, in addition to those that a resumed SFT run may change
RAFT_FREE_KEYS = (
    FREE_KEYS
    | CHANGEABLE
    | frozenset(
        """
    cycles prompts eval_prompts verify_workers verify_timeout max_error_share stop_after_no_gain min_entropy
    max_empty_cycles eval_every_n_cycles keep_last_n_adapters
    engine.slots engine.graphs engine.urls engine.concurrency engine.timeout engine.patience engine.api_key_env
    """.split()  # noqa: SIM905
    )
)


@dataclass(frozen=True)
class Bar:
    """What an answer needs to pass: to be kept for training, and to count for its prompt's pass rate.

    Attributes:
        keep: ``correct``: the verdict CORRECT and the reward; ``rewarded``: the reward alone.
        threshold: minimum reward.
    """

    keep: str
    threshold: float

    def missed(self, result: Result) -> str:
        """Return the name of the rule that drops an answer with this result; "" if the answer passes."""
        if result.reward is None:
            return "without_reward"
        if result.reward < self.threshold:
            return "below_threshold"
        return "not_correct" if self.keep == "correct" and result.verdict is not Verdict.CORRECT else ""


class Cycle:
    """The files of one cycle.

    Args:
        out: the run's output folder.
        number: number of the cycle; 0 is the evaluation before any training.
    """

    def __init__(self, out: Path, number: int) -> None:
        self.out, self.number = out, number
        self.folder = out / f"cycle_{number}"
        self.adapter = self.folder / "adapter"
        self.kept = self.folder / "kept.jsonl"
        self.selection = self.folder / SELECTION
        self.optimizer = self.folder / "optimizer"
        self.eval = self.folder / "eval.json"

    @property
    def selected(self) -> bool:
        """Whether the answers to train on are chosen."""
        return self.kept.exists()

    @property
    def trained(self) -> bool:
        """Whether training has written all its outputs; it writes the summary last."""
        return (self.folder / "summary.json").exists()

    @property
    def skipped(self) -> bool:
        """Whether the cycle ended without training, because no answer was kept."""
        return self.kept.exists() and not self.kept.stat().st_size

    @property
    def done(self) -> bool:
        """Whether the cycle is trained or skipped."""
        return self.trained or self.skipped

    @property
    def phases(self) -> dict[str, bool]:
        """Whether each phase is complete."""
        return {"sample": self.selected or self.trained, "train": self.trained, "eval": self.eval.exists()}

    def phase(self, what: str) -> Path:
        """Return the folder with the samples and verdicts of the phase ``what`` (``sample`` or ``eval``)."""
        return self.folder if what == "sample" else self.folder / what

    def results(self) -> dict[SampleKey, Result]:
        """Read the verdicts on the cycle's answers."""
        return read_results(self.folder / "verdicts.jsonl")

    def scores(self) -> dict[str, Any] | None:
        """Read ``eval.json``; return None if the file is missing."""
        return read_json(self.eval)

    def training(self) -> dict[str, Any]:
        """Read the ``summary.json`` that the cycle's training wrote."""
        return read_json(self.folder / "summary.json") or {}

    def agrees_with(self, row: Mapping[str, Any]) -> bool:
        """Return whether an entry of ``summary.json`` tells what is in the cycle's files.

        It does not if the files were deleted, or made again under changed settings and a kill came before the entry.
        """
        counts = (read_json(self.selection) or {}).get("counts", {})
        return (
            all(row.get(key) == value for key, value in counts.items())
            and bool(row.get("skipped")) == self.skipped
            and row.get("held_out") == self.scores()
        )

    def row(self, bar: Bar, filter_: Filter) -> dict[str, Any]:
        """Compute the cycle's entry in ``summary.json`` from its files.

        Args:
            bar: what an answer needs to pass.
            filter_: selects the answers to train on, and counts what each rule dropped.

        Returns:
            The entry without its ``seconds``.
        """
        row: dict[str, Any] = {"cycle": self.number}
        if self.skipped:
            row["skipped"] = True
        if self.number:
            if selection := read_json(self.selection):
                row |= selection["counts"]
            else:  # an earlier version wrote none
                samples = {sample.key: sample for sample in read_samples(self.folder / "samples.jsonl")}
                results = self.results()
                row |= count_answers(samples, results, filter_(samples, results)[1], bar)
        if self.trained:
            training = self.training()
            row |= {key: training[key] for key in ("steps", "first_loss", "last_loss")}
            row["lr"] = max(line["lr"] for line in read_metrics(self.folder / "metrics.jsonl") if "lr" in line)
        if scores := self.scores():
            row["held_out"] = scores
        return row


def count_answers(
    samples: Mapping[SampleKey, Sample], results: Mapping[SampleKey, Result], dropped: dict[str, int], bar: Bar
) -> dict[str, Any]:
    """Count a cycle's answers for its entry in ``summary.json``.

    Args:
        samples: answers by prompt id and sample index.
        results: verdicts under the same keys.
        dropped: the counts of :func:`rocm_ext.raft.selection.filter_samples`.
        bar: what an answer needs to pass.
    """
    rates = pass_rates(results, bar)
    return {
        "prompts": len({prompt for prompt, _ in samples}),
        "samples": len(samples),
        "verdicts": dict(sorted(Counter(result.verdict.value for result in results.values()).items())),
        "pass_rate": fmean(rates.values()) if rates else 0.0,
        "filter": dropped,
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


def pass_rates(results: Mapping[SampleKey, Result], bar: Bar) -> dict[str, float]:
    """Compute the share of each prompt's answers that passed.

    Answers without a reward (ERROR) do not count, because a verifier's failure says nothing about a prompt.

    Args:
        results: verdicts by prompt id and sample index.
        bar: what an answer needs to pass.

    Returns:
        Share from 0 to 1 by prompt id; prompts without any reward are missing.
    """
    passed: dict[str, list[bool]] = {}
    for (prompt_id, _), result in results.items():
        if result.reward is not None:
            passed.setdefault(prompt_id, []).append(not bar.missed(result))
    return {prompt_id: fmean(each) for prompt_id, each in passed.items()}


def trained_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the entries of the trained cycles among ``rows``."""
    return [row for row in rows if row["cycle"] and not row.get("skipped")]


def best(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the trained cycle with the best held-out score.

    Among equals the last one wins. If no cycle was evaluated, this is the last cycle.

    Args:
        rows: entries of ``summary.json``, at least one of them of a trained cycle.
    """
    return max(trained_rows(rows), key=lambda row: (_correct(row, -1), row["cycle"]))["cycle"]


def _correct(row: Mapping[str, Any], otherwise: int) -> int:
    return row["held_out"]["correct"] if "held_out" in row else otherwise


def empty_cycles(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return how many of the newest cycles in a row were skipped."""
    return sum(1 for _ in takewhile(lambda row: row.get("skipped"), reversed(rows)))


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
    empty = empty_cycles(rows)
    if empty >= max_empty:
        return f"no answer was kept in {empty} cycle{'s in a row' if empty > 1 else ''} (max_empty_cycles {max_empty})"
    now = rows[-1]["entropy"]
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
