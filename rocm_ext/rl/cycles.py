"""The files of a RAFT run's cycles, their summaries, and the totals over a run.

All results here come from these files, so a resumed run has the same information as an undisturbed one. A run reads
the files once, when it starts. After that a cycle reads only its own files, however many cycles came before. What grows
is the text of ``summary.json``, by about a kilobyte per cycle.
"""

import json
import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import count, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from rocm_ext.base.files import read_json, replace_text
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.rl.records import Sample, SampleKey, entropy, read_results
from rocm_ext.rl.selection import KeepRule
from rocm_ext.runs.folder import PHASES, SELECTION
from rocm_ext.train.checkpoint import FREE_KEYS
from rocm_ext.train.metrics import Metrics, read_metrics
from rocm_ext.verifiers import Result

# Keys that a resumed run may change although they affect results; see :func:`rocm_ext.rl.reopen.reopen`
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

    def row(self) -> dict[str, Any]:
        """Compute the cycle's entry in ``summary.json``, without its ``seconds``, from its files."""
        row: dict[str, Any] = {"cycle": self.number}
        if self.skipped:
            row["skipped"] = True
        if selection := read_json(self.selection):
            row |= selection["counts"]
        if self.trained:
            training = self.training()
            row |= {key: training[key] for key in ("steps", "first_loss", "last_loss")}
            row["lr"] = max(line["lr"] for line in read_metrics(self.folder / "metrics.jsonl") if "lr" in line)
        if scores := self.scores():
            row["held_out"] = scores
        return row


def count_answers(
    samples: Mapping[SampleKey, Sample], results: Mapping[SampleKey, Result], dropped: dict[str, int], rule: KeepRule
) -> dict[str, Any]:
    """Count a cycle's answers for its entry in ``summary.json``.

    Args:
        samples: answers by prompt id and sample index.
        results: verdicts under the same keys.
        dropped: the counts of :func:`rocm_ext.rl.selection.filter_samples`.
        rule: what an answer needs to pass.
    """
    rates = pass_rates(results, rule)
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


def pass_rates(results: Mapping[SampleKey, Result], rule: KeepRule) -> dict[str, float]:
    """Compute the share of each prompt's answers that passed.

    Answers without a reward (ERROR) do not count, because a verifier's failure says nothing about a prompt.

    Args:
        results: verdicts by prompt id and sample index.
        rule: what an answer needs to pass.

    Returns:
        Share from 0 to 1 by prompt id; prompts without any reward are missing.
    """
    passed: dict[str, list[bool]] = {}
    for (prompt_id, _), result in results.items():
        if result.reward is not None:
            passed.setdefault(prompt_id, []).append(not rule.missed(result))
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


def write_selection(path: Path, counts: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Write ``selection.json``: what the selection counted, and the settings it was made with.

    Args:
        path: path of the file.
        counts: see :func:`rocm_ext.rl.cycles.count_answers`.
        settings: values of the keys that a resumed run may change.

    Raises:
        UserError: the disk is full.
    """
    replace_text(path, json.dumps({"counts": counts, "settings": settings}, indent=2) + "\n")


class History:
    """The finished cycles of a run.

    Args:
        out: the run's output folder.
        rule: what an answer needs to pass.
        ranks: all processes of the run. All hold the same data; the main one writes ``metrics.jsonl`` and
            ``summary.json``.

    Attributes:
        last_asked: for each prompt asked so far, the last cycle that asked it and the share of its answers that
            passed.
        trained: numbers of the trained cycles, in order; skipped ones are missing.
        steps: number of optimiser steps of all trained cycles.
        rows: entries of ``summary.json``, by cycle.
    """

    def __init__(self, out: Path, rule: KeepRule, ranks: Ranks) -> None:
        self.out, self._rule, self._ranks = out, rule, ranks
        self.last_asked: dict[str, tuple[int, float]] = {}
        self.trained: list[int] = []
        self.steps = 0
        self._seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._metrics: Metrics | None = None
        if ranks.is_main:
            # a phase that is not complete writes its line again, with the work of all processes
            self._metrics = Metrics(
                out / "metrics.jsonl", lambda line: Cycle(out, line["cycle"]).phases.get(line["phase"], True)
            )
            for line in read_metrics(out / "metrics.jsonl"):
                self._add_seconds(line)
        last = 0
        for number in count(1):
            if not (cycle := Cycle(out, number)).done:
                break
            self.add(cycle)
            last = number
        self._summary = out / "summary.json"
        written = (read_json(self._summary) or {"cycles": []})["cycles"]
        whole = [row for row in written if row["cycle"] <= last and Cycle(out, row["cycle"]).agrees_with(row)]
        self.rows: dict[int, dict[str, Any]] = {row["cycle"]: row for row in whole}
        self._texts = {number: _text(row) for number, row in self.rows.items()}

    def add(self, cycle: Cycle) -> None:
        """Add a trained or skipped cycle to ``last_asked``, ``trained`` and ``steps``."""
        for prompt, rate in pass_rates(cycle.results(), self._rule).items():
            self.last_asked[prompt] = cycle.number, rate
        if cycle.trained and cycle.number not in self.trained:
            self.trained.append(cycle.number)
            self.steps += cycle.training()["steps"]

    def trained_before(self, cycle: int) -> list[int]:
        """Return the numbers of the trained cycles before ``cycle``, in order."""
        return [number for number in self.trained if number < cycle]

    def source(self, cycle: int) -> int:
        """Return the cycle whose adapter ``cycle`` samples with: the last trained one before it, or 0."""
        return max(self.trained_before(cycle), default=0)

    def _add_seconds(self, line: Mapping[str, Any]) -> None:
        self._seconds[line["cycle"]][line["phase"]] += line["seconds"]

    def logged(self, cycle: int, phase: str) -> bool:
        """Return whether ``metrics.jsonl`` has a line of this phase, on the main rank."""
        return phase in self._seconds[cycle]

    def log(self, cycle: int, phase: str, values: Mapping[str, Any]) -> None:
        """Write a line of ``metrics.jsonl``, and add its seconds to the phase's time in the cycle.

        Args:
            cycle: number of the cycle.
            phase: ``sample``, ``train``, ``eval`` or a phase of a subclass.
            values: measurements of the phase, among them ``seconds``.
        """
        if self._metrics is not None:
            line = {"cycle": cycle, "phase": phase, **values}
            self._metrics.write(**line)
            self._add_seconds(line)

    def summarize(self, cycle: Cycle) -> None:
        """Add a finished cycle to ``summary.json``."""
        number, row = cycle.number, None
        if self._ranks.is_main:
            seconds = {phase: self._seconds[number].get(phase, 0) for phase in PHASES}
            row = cycle.row() | {"seconds": seconds}
        self.rows[number] = self._ranks.agree(row)
        self._texts[number] = _text(self.rows[number])
        self.write(number)

    def until(self, cycle: int) -> list[dict[str, Any]]:
        """Return the entries of the cycles up to ``cycle``, in order."""
        return [row for number, row in sorted(self.rows.items()) if number <= cycle]

    def write(self, last: int) -> None:
        """Write ``summary.json`` with the cycles up to ``last``, in the format of ``json.dumps(…, indent=2)``."""
        if not self._ranks.is_main:
            return
        rows = ",\n".join(text for number, text in sorted(self._texts.items()) if number <= last)
        replace_text(self._summary, f'{{\n  "cycles": [\n{rows}\n  ]\n}}\n')


def _text(row: Mapping[str, Any]) -> str:
    # each entry is encoded once, because a thousand cycles take a megabyte
    return textwrap.indent(json.dumps(row, indent=2), "    ")
