"""RAFT's cycles: a trainer that begins a schedule in every cycle, and the entries of ``summary.json``."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from statistics import fmean

import torch
from omegaconf import DictConfig
from torchtune.training.seed import set_seed

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import (
    append_line,
    disk_errors,
    read_lines,
    remove_folder,
    replace_folder,
    replace_text,
    rewrite_lines,
)
from rocm_ext.base.log import log
from rocm_ext.base.types import Json
from rocm_ext.data.batches import StepLoader, Steps, rows_per_step
from rocm_ext.data.rows import Rows
from rocm_ext.rl.evaluation import stop_reason
from rocm_ext.rl.records import measure, pass_rates
from rocm_ext.rl.selection import Selected
from rocm_ext.rl.trainer import PolicyTrainer
from rocm_ext.runs.records import PHASES, EvalScores, PhaseLines, SampleKey
from rocm_ext.sampling import sample_seed
from rocm_ext.train.builders import nothing_changed
from rocm_ext.train.checkpoint import FREE_KEYS, State
from rocm_ext.train.loop import Training
from rocm_ext.train.metrics import describe_lost, summarize
from rocm_ext.verifiers import Result

# Keys that a resumed RAFT run may change, in addition to FREE_KEYS
RAFT_FREE_KEYS = FREE_KEYS | frozenset(
    """
    cycles prompts eval_prompts verify_workers verify_timeout max_error_share stop_after_no_gain min_entropy
    max_empty_cycles eval_every_n_cycles keep_last_n_adapters retry_unsolved_after
    engine.slots engine.graphs engine.urls engine.concurrency engine.timeout engine.patience engine.api_key_env
    """.split()  # noqa: SIM905
)


class CycleTrainer(PolicyTrainer):
    """Trains the adapter for some epochs on the answers that a cycle keeps.

    A step is a cycle. It writes to the folder ``cycle_k``; the run reads ``metrics.jsonl`` again, and
    ``cycle_k/adapter``, for servers.

    Attributes:
        done: updates of the unfinished cycle.
        trained: cycles that trained, in order; the others kept no answer.
        kept: by cycle, the kept answers that later cycles train on again.
        earlier_updates: updates of all finished cycles.
    """

    free_keys = RAFT_FREE_KEYS
    unit = "cycle"

    def begin_run(self) -> None:
        """Build an optimiser, and continue the checkpoint, which may be inside a cycle."""
        self.done = self.earlier_updates = 0
        self.trained: list[int] = []
        self.kept: dict[int, list[SampleKey]] = {}
        self.begin(self.folder.resumed[1]["total_steps"] if self.folder.resumed else 0)
        if self.fresh and self.ranks.is_main:  # of another run, or of one killed before its first checkpoint
            for folder in self.folder.path.glob("cycle_*"):
                shutil.rmtree(folder, ignore_errors=True)

    def cycle_folder(self, cycle: int) -> Path:
        """Create and return the folder of a cycle."""
        folder = self.folder.path / f"cycle_{cycle}"
        with disk_errors(folder):
            folder.mkdir(exist_ok=True)
        return folder

    def adapter_folder(self, cycle: int) -> Path:
        """Return the folder of a cycle's adapter."""
        return self.folder.path / f"cycle_{cycle}" / "adapter"

    @property
    def adapter_step(self) -> int:
        """The last trained cycle, or 0."""
        return self.trained[-1] if self.trained else 0

    @property
    def where(self) -> str:
        """Where the next update is in the run, for messages."""
        return f"cycle {self.step + 1}, step {self.done + 1}"

    @property
    def count(self) -> int:
        """The number of the next checkpoint: the updates of all cycles."""
        return self.earlier_updates + self.done

    @property
    def updates(self) -> int:
        """Updates that the unfinished cycle has done in its schedule."""
        return self.done

    def position(self) -> dict[str, int]:
        """Return nothing: the lines of ``metrics.jsonl`` name their cycle."""
        return {}

    def keeps_line(self, line: Json) -> bool:
        """Return whether a resumed run keeps a line; it repeats other phases, and evaluations from their records."""
        return line["cycle"] <= (self.evaluated if line["phase"] == "eval" else self.step)

    def logged_steps(self, lines: Iterable[Json]) -> set[int]:
        """Return the cycles whose sampling is in ``lines`` of ``metrics.jsonl``."""
        return {line["cycle"] for line in lines if line["phase"] == "sample"}

    def identity(self) -> dict[str, str | int | None]:
        """Return what a run shares with the one it resumes, in addition to the config."""
        return {**super().identity(), "rows per step": rows_per_step(self.cfg, self.ranks.world)}

    def extra_state(self) -> State:
        """Return the part of a checkpoint that other trainings do not have."""
        kept = {cycle: [list(key) for key in keys] for cycle, keys in self.kept.items()}
        return super().extra_state() | {
            # a resumed run selects the answers of the skipped cycles since the last trained one again
            "step": self.step if self.done else self.adapter_step,
            "done": self.done,
            "trained": self.trained,
            "kept": kept,
            "earlier_updates": self.earlier_updates,
        }

    def load_extra_state(self, state: State) -> None:
        """Take over what :meth:`extra_state` put into a checkpoint."""
        super().load_extra_state(state)
        self.done, self.trained, self.earlier_updates = state["done"], state["trained"], state["earlier_updates"]
        self.kept = {cycle: [(prompt, sample) for prompt, sample in keys] for cycle, keys in state["kept"].items()}

    # ---- a cycle

    def write_selection(
        self, selected: Selected, passes: Callable[[Result], bool], prompts: Mapping[str, Sequence[int]]
    ) -> None:
        """Log which answers a cycle keeps, and write them to ``kept.jsonl``, with rewards and prompts.

        Args:
            selected: the cycle's answers.
            passes: whether a result counts as passed in its prompt's pass rate.
            prompts: token ids by prompt id.
        """
        cycle, counts = self.step + 1, _count_answers(selected, passes)
        outcome = ":" if selected.advantages else " is skipped, nothing to train on."
        log.info("cycle %d%s %s", cycle, outcome, _in_words(counts))
        if self.ranks.is_main:
            kept = []
            for sample in selected.trained:
                reward, prompt = selected.results[sample.key].reward, prompts[sample.prompt_id]
                kept.append(json.dumps({**sample.record(), "reward": reward, "prompt_tokens": prompt}) + "\n")
            replace_text(self.cycle_folder(cycle) / "kept.jsonl", "".join(kept))
        self.log_phase(cycle, "sample", {**selected.stats, "counts": counts})

    def train_on(self, rows: Rows, groups: Sequence[str]) -> Json:
        """Train on the rows of a cycle, from where a checkpoint stopped.

        Args:
            rows: rows to train on.
            groups: not used; rows are dealt out by chance.

        Raises:
            UserError: a loss is not finite, or the training changes nothing.
            Interrupted: the user asked to stop; the last update is saved.
        """
        cfg, cycle = self.cfg, self.step + 1
        self.learner.check_rows(rows)
        limits = cfg.max_steps_per_epoch, cfg.data_seed, cfg.shuffle
        steps = Steps(len(rows), rows_per_step(cfg, self.ranks.world), *limits)
        log.info("%s rows, %d per step, %d steps per epoch", f"{len(rows):,}", steps.per_step, steps.per_epoch)
        before = None if self.done else self._begin_cycle(steps.per_epoch * cfg.epochs)
        path = self._cycle_metrics = self.cycle_folder(cycle) / "metrics.jsonl"
        if self.ranks.is_main:
            rewrite_lines(path, lambda line: line["step"] <= self.done)
            if lost := describe_lost(path, self.done, [line["step"] for line in read_lines(path)]):
                log.warning("%s, which summary.json and reports then cannot show", lost)
        loader = StepLoader(rows, steps, self.learner.layout, pin_memory=cfg.pin_memory)
        self.learner.model.train()
        self.train_epochs(loader, steps.per_epoch, f"in cycle {cycle} ")
        if before is not None and all(torch.equal(before[k], v) for k, v in self.learner.adapter_state().items()):
            raise UserError(f"cycle {cycle}: {nothing_changed(self.total_steps, 'the cycle')}")

        def measured() -> Json:
            rate = max(line["lr"] for line in read_lines(path))
            return {**summarize(path), "lr": rate, "rows": rows.counts, **Training.summary(self)}

        return self.ranks.on_main(measured)

    def count_update(self) -> None:
        """Count an update of the cycle."""
        self.done += 1

    def log_update(self, to_logger: bool, values: dict[str, float]) -> None:
        """Log the values of an update in the cycle's ``metrics.jsonl``."""
        if self.ranks.is_main:
            epoch = (self.done - 1) * self.cfg.epochs // self.total_steps + 1
            append_line(self._cycle_metrics, dict(step=self.done, epoch=epoch, **values))
        if to_logger:
            self.log_numbers(values)

    def saves(self, epoch_ends: bool) -> bool:
        """Return whether to save after this update; :meth:`finish_step` saves after the last."""
        every = self.cfg.save_every_n_steps
        return self.done < self.total_steps and (self.done % every == 0 if every else epoch_ends)

    def train_on_nothing(self) -> dict[str, float]:
        """Leave the adapter as it is, because the cycle kept no answer."""
        return {}

    def _begin_cycle(self, updates: int) -> Mapping[str, torch.Tensor]:
        """Begin a cycle with the config's adapter, learning rate and moments; return the adapter before training."""
        cfg, lr = self.cfg, self.cfg.optimizer.lr
        set_seed(seed=sample_seed(cfg.seed, self.step + 1, "train", 0) % 2**31, debug_mode=cfg.cudnn_deterministic_mode)
        if cfg.start_from == "base":
            self.learner.load_adapter(self.first, "the first adapter")
        moments, scale = self.optimizer.state_dict()["state"], self.scaler.state_dict()
        # in the config, because an overridden setup_optimizer or setup_scheduler reads the rate there
        cfg.optimizer.lr = max(lr * cfg.lr_decay ** len(self.trained), min(cfg.lr_floor, lr))
        try:
            self.build(updates)
        finally:
            cfg.optimizer.lr = lr
        if cfg.optimizer_state == "run" and self.trained:
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
            self.scaler.load_state_dict(scale)
        return self.learner.adapter_state()

    def finish_step(self, selected: Selected, updates: Json, seconds: float) -> None:
        """Write the outputs of a cycle, and save; a cycle without updates is skipped."""
        self.step += 1
        if updates:
            self.log_phase(self.step, "train", updates)
            self.trained.append(self.step)
            if count := self.replayed:
                self.kept[self.step] = [sample.key for sample in selected.trained]
                self.kept = {cycle: self.kept[cycle] for cycle in self.trained[-count:]}
            self.earlier_updates += self.done
            self.done = 0
            if self.ranks.is_main:
                with replace_folder(self.adapter_folder(self.step)) as adapter:
                    self.learner.write_adapter(adapter)
            self.save_checkpoint()
        self._write_summary()

    @property
    def replayed(self) -> int:
        """Number of earlier cycles whose kept answers a cycle trains on again."""
        count = self.cfg.replay_cycles
        if count is None:
            count = "all" if self.cfg.start_from == "base" else 0
        return self.cfg.cycles if count == "all" else count

    def finish_evaluation(self, step: int, scores: EvalScores, stats: Mapping[str, float]) -> None:
        """Log the scores of a cycle's adapter, and remember the adapter if none before it is better."""
        self.evaluated = max(step, self.evaluated)
        if step and (self.best is None or scores["correct"] >= self.best["score"]):
            self.best = {"score": scores["correct"], "step": step, "adapter": self.learner.adapter_state()}
        self.log_phase(step, "eval", {"eval": scores, **stats})
        self.log_numbers({"eval_correct": scores["pass_at_1"]})
        self._write_summary()

    def log_phase(self, cycle: int, phase: str, values: Mapping[str, object]) -> None:
        """Write a line of ``metrics.jsonl`` about a phase; the metric logger gets the numbers in it."""
        self.log(False, cycle=cycle, phase=phase, **values)
        self.log_numbers({f"{phase}_{name}": value for name, value in values.items()})

    # ---- the outputs

    def save_if_due(self) -> None:
        """Do nothing: a cycle saves after its training."""

    def _write_summary(self) -> None:
        """Write ``summary.json``, and remove adapters that ``keep_last_n_adapters`` does not keep."""
        if not self.ranks.is_main:
            return
        replace_text(self.folder.path / "summary.json", json.dumps(self.summary(), indent=2) + "\n")
        if keep := self.cfg.keep_last_n_adapters:
            kept = {self.best["step"] if self.best else 0, *self.trained[-keep:]}
            for cycle in self.trained:
                if cycle not in kept and self.adapter_folder(cycle).exists():
                    remove_folder(self.adapter_folder(cycle))

    def write_outputs(self) -> None:
        """Write ``adapter/``, ``summary.json`` and perhaps ``merged/``; a UserError if no cycle was trained."""
        entries = cycle_entries(self.lines)
        if not self.trained:
            raise UserError(_nothing_trained(entries))
        if self.ranks.is_main:
            log.info("%s", _table(entries))
        super().write_outputs()

    def summary(self) -> Json:
        """Return the content of ``summary.json``."""
        return {"cycles": cycle_entries(self.lines)}


# ---- entries of ``summary.json``


def cycle_entries(lines: Sequence[Json]) -> list[Json]:
    """Return the entries of ``summary.json``, one per finished cycle; cycle 0 is before any training.

    Args:
        lines: lines of ``metrics.jsonl``, one per finished phase: ``cycle``, ``phase`` and measurements.
    """
    entries = []
    for cycle, phases in sorted(PhaseLines(lines).items()):
        entry: Json = {"cycle": cycle}
        counts = phases.get("sample", {}).get("counts", {})
        if counts and not counts["kept"]:
            entry["skipped"] = True
        entry |= counts
        if training := phases.get("train"):
            entry |= {key: training[key] for key in ("steps", "first_loss", "last_loss", "lr")}
        if evaluation := phases.get("eval"):
            entry["held_out"] = evaluation["eval"]
        entry["seconds"] = {phase: phases.get(phase, {}).get("seconds", 0) for phase in PHASES}
        if not cycle or entry.get("skipped") or "train" in phases:
            entries.append(entry)
    return entries


def _count_answers(selected: Selected, passes: Callable[[Result], bool]) -> Json:
    """Count a cycle's answers for its entry in ``summary.json``; ``pass_rate`` is a mean over prompts."""
    samples, results, dropped = selected.samples, selected.results, selected.dropped
    rates = [rate for rate in pass_rates(results, passes).values() if rate is not None]
    return {
        "prompts": len({prompt for prompt, _ in samples}),
        "samples": len(samples),
        "verdicts": dict(sorted(Counter(result.verdict.value for result in results.values()).items())),
        "pass_rate": fmean(rates) if rates else 0.0,
        "filter": dict(dropped),
        "kept": dropped["kept"],
        **measure(samples, results),
    }


def _in_words(counts: Json) -> str:
    """Describe the counts of a selection: ``48 answers: 20 CORRECT, 28 WRONG; 28 below threshold, 20 kept``."""
    rules = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in counts["filter"].items())
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts["verdicts"].items())
    return f"{counts['samples']} answers: {verdicts}; {rules}"


def cycle_stop_reason(entries: Sequence[Json], cfg: DictConfig) -> str | None:
    """Decide whether a run stops early.

    Args:
        entries: entries of ``summary.json`` up to the newest cycle, in order.
        cfg: config with ``min_entropy`` of the newest cycle's answers; ``stop_after_no_gain``, in trained cycles; and
            ``max_empty_cycles``, the number of skipped cycles in a row to stop after.

    Returns:
        The reason to stop, in one line; None to continue.
    """
    empty, most = sum(1 for _ in takewhile(lambda entry: entry.get("skipped"), reversed(entries))), cfg.max_empty_cycles
    if empty >= most:
        return f"no answer was kept in {empty} cycle{'s in a row' if empty > 1 else ''} (max_empty_cycles {most})"
    newest = entries[-1]["entropy"] if entries and entries[-1]["cycle"] else None
    scored = [entry for entry in entries if "held_out" in entry]
    best = max(scored, key=lambda entry: entry["held_out"]["correct"], default={"cycle": 0})["cycle"]  # first of equals
    measured = range(best + 1, scored[-1]["cycle"] + 1) if scored else ()
    without_gain = sum(entry["cycle"] in measured and not entry.get("skipped") for entry in entries)
    limits = {"min_entropy": cfg.min_entropy, "stop_after": cfg.stop_after_no_gain}
    return stop_reason([] if newest is None else [newest], without_gain, "cycle", **limits)


def _nothing_trained(entries: Sequence[Json]) -> str:
    """Describe why no cycle was trained, and say what to do."""
    empty = [entry for entry in entries if entry.get("skipped")]
    if not empty:
        return "no prompt qualifies for the first cycle, so no cycle was trained"
    return (
        f"no cycle was trained. Cycle {empty[-1]['cycle']}: nothing to train on. {_in_words(empty[-1])}. Start "
        "again (overwrite_output_dir=True) with more samples_per_prompt, a larger max_new_tokens, a lower "
        "reward_threshold or other settings of the verifier; or use easier prompts or a model that is right more often"
    )


def _table(entries: Sequence[Json]) -> str:
    """Format the entries of ``summary.json`` as a table."""
    titles = ("cycle", "samples", "pass rate", "kept", "steps", "lr", "loss", "held-out", "95 % interval", "time")
    lines: list[tuple[str, ...]] = [titles]
    for row in entries:
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
