"""RAFT on 1…N ranks: sample answers, verify them, keep the correct ones, train on those, repeat (arXiv:2304.06767).

    tune run raft_rocm --config strix_halo_qwen7b_raft
    tune run --nproc_per_node 8 raft_rocm --config mi300x_qwen7b_raft_8gpu

:class:`rocm_ext.rl.loop.Loop` has the steps, which RAFT calls cycles. A cycle begins a new optimiser and trains for
some epochs on the answers that it keeps. ``cycle_k/`` has its outputs: ``kept.jsonl``, ``metrics.jsonl`` with its
updates, and ``adapter/``. A cycle that keeps no answer is skipped.

To change a part, subclass :class:`RAFT` and override :meth:`RAFT.choose`, :meth:`RAFT.select`, :meth:`RAFT.rows` or
:meth:`RAFT.training_config`; or subclass :class:`RAFTTrainer`.
"""

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune.training.seed import set_seed

from rocm_ext import config
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
from rocm_ext.base.log import Progress, log
from rocm_ext.base.types import Json
from rocm_ext.data.batches import Steps, rows_per_step
from rocm_ext.data.prompts import Prompt
from rocm_ext.data.rows import Rows
from rocm_ext.losses import check_columns
from rocm_ext.plan import workload
from rocm_ext.rl.evaluation import evaluations_of, steps_of, target_scores, without_update
from rocm_ext.rl.loop import Loop
from rocm_ext.rl.prompts import choose_unsolved
from rocm_ext.rl.records import Sample, pass_rates
from rocm_ext.rl.rollout import Answers
from rocm_ext.rl.selection import Selected, filter_samples, missed_rule, replay, to_rows
from rocm_ext.rl.trainer import PolicyTrainer
from rocm_ext.runs.records import SampleKey
from rocm_ext.sampling import sample_seed
from rocm_ext.train.builders import nothing_changed
from rocm_ext.train.checkpoint import State
from rocm_ext.train.forgetting import Scored
from rocm_ext.train.lifecycle import run
from rocm_ext.train.metrics import describe_lost
from rocm_ext.verifiers import Result


def replayed_cycles(cfg: DictConfig) -> int:
    """Return how many earlier cycles' kept answers a cycle trains on again."""
    count = cfg.replay_cycles
    if count is None:
        count = "all" if cfg.start_from == "base" else 0
    return cfg.cycles if count == "all" else count


class RAFTTrainer(PolicyTrainer):
    """Trains on the kept answers of a cycle for some epochs, with a new optimiser and schedule in each cycle.

    It saves inside a cycle, too: every ``save_every_n_steps`` updates, else after each epoch.

    Attributes:
        trained: cycles that trained, in order; the others kept no answer.
        kept: by cycle, the kept answers that later cycles train on again.
        updates_before: updates of all finished cycles.
    """

    unit = "cycle"
    updates_of_step = 0

    def begin_run(self) -> None:
        """Begin or continue the run; a new one removes the cycles of another run in its folder."""
        self.trained: list[int] = []
        self.kept: dict[int, list[SampleKey]] = {}
        self.updates_before = 0
        # the adapter at the beginning of a whole cycle
        self._before: Mapping[str, torch.Tensor] | None = None
        super().begin_run()
        self._progress.close()  # each cycle shows its updates instead
        if self.fresh and self.ranks.is_main:
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
        """The last cycle that trained, or 0."""
        return self.trained[-1] if self.trained else 0

    @property
    def count(self) -> int:
        """The number of the next checkpoint: the updates of all cycles."""
        return self.updates_before + self.done

    def extra_state(self) -> State:
        """Return the part of a checkpoint that other trainings do not have."""
        kept = {cycle: list(map(list, keys)) for cycle, keys in self.kept.items()}
        more = {
            "done": self.done,
            "trained": self.trained,
            "kept": kept,
            "updates_before": self.updates_before,
        }
        return super().extra_state() | more

    def load_extra_state(self, state: State) -> None:
        """Take over what :meth:`extra_state` put into a checkpoint."""
        super().load_extra_state(state)
        self.done = state["done"]
        self.trained = state["trained"]
        for cycle, keys in state["kept"].items():
            self.kept[cycle] = [(prompt, sample) for prompt, sample in keys]
        self.updates_before = state["updates_before"]

    # ---- a cycle

    def train_on(self, rows: Rows, groups: Sequence[str]) -> Json:
        """Train on the rows of a cycle, from where a checkpoint stopped.

        Args:
            rows: rows to train on.
            groups: not used; rows are dealt out by chance.

        Returns:
            See :meth:`PolicyTrainer.train_on`; in addition the first and the last loss.

        Raises:
            UserError: a loss is not finite, or the training changes nothing.
            Interrupted: the user asked to stop; the last update is saved.
        """
        self.learner.check_rows(rows)
        try:
            measured = super().train_on(rows, groups)
        finally:
            self._progress.close()
        if self._before is not None:
            adapter = self.learner.adapter_state()
            unchanged = (torch.equal(adapter[name], old) for name, old in self._before.items())
            if all(unchanged):
                raise UserError(f"cycle {self.step + 1}: {nothing_changed(self.done, 'the cycle')}")
            self._before = None  # frees its tensors
        if not self.update_lines:
            return measured
        first, last = self.update_lines[0], self.update_lines[-1]
        return measured | {"first_loss": first["loss"], "last_loss": last["loss"]}

    def deal(self, rows: Rows, groups: Sequence[str]) -> Sequence[Sequence[int]]:
        """Return the rows of a cycle's updates: in each epoch all rows, in a new order."""
        cfg = self.cfg
        per_step = rows_per_step(cfg, self.ranks.world)
        steps = Steps(len(rows), per_step, cfg.max_steps_per_epoch, cfg.data_seed, cfg.shuffle)
        log.info(
            "%s rows, %d per step, %d steps per epoch", f"{len(rows):,}", per_step, steps.per_epoch
        )
        return [steps[number] for number in range(steps.per_epoch * cfg.epochs)]

    def begin_step(self, updates: int) -> None:
        """Begin the schedule of a cycle, or read the lines of the updates that a checkpoint has."""
        path = self._updates_file()
        if self.ranks.is_main:
            rewrite_lines(path, lambda line: line["step"] <= self.done)
        self.update_lines = self.ranks.on_main(lambda: list(read_lines(path)))
        logged = {int(line["step"]) for line in self.update_lines}
        lost = describe_lost(path, self.done, logged)
        if lost and self.ranks.is_main:
            log.warning("%s, which metrics.jsonl and reports then cannot show", lost)
        self._before = None
        if not self.done:
            self._begin_schedule(updates)
            self._before = self.learner.adapter_state()
        self._progress = Progress(updates, self.done, self.ranks.is_main)

    def _updates_file(self) -> Path:
        """Return the file with the measurements of the cycle's updates."""
        return self.cycle_folder(self.step + 1) / "metrics.jsonl"

    def _begin_schedule(self, updates: int) -> None:
        """Begin a cycle with the config's adapter, learning rate and moments."""
        cfg = self.cfg
        lr = cfg.optimizer.lr
        seed = sample_seed(cfg.seed, self.step + 1, "train", 0) % 2**31
        set_seed(seed=seed, debug_mode=cfg.cudnn_deterministic_mode)
        if cfg.start_from == "base":
            self.learner.load_adapter(self.first, "the first adapter")
        moments = self.optimizer.state_dict()["state"]
        scale = self.scaler.state_dict()
        # the config has the rate, because an overridden setup_optimizer or setup_scheduler reads it there
        decayed = lr * cfg.lr_decay ** len(self.trained)
        cfg.optimizer.lr = max(decayed, min(cfg.lr_floor, lr))
        try:
            self.build(updates)
        finally:
            cfg.optimizer.lr = lr
        if cfg.optimizer_state == "run" and self.trained:
            fresh = self.optimizer.state_dict()
            self.optimizer.load_state_dict({**fresh, "state": moments})
            self.scaler.load_state_dict(scale)

    def finish_update(self, interrupted: bool) -> None:
        """Log an update of the cycle; save where it is due.

        Raises:
            Interrupted: the user asked to stop; the update is saved.
        """
        line = self.update_lines[-1]
        per_epoch = self.total_steps // self.cfg.epochs
        epoch = (self.done - 1) // per_epoch + 1
        if self.ranks.is_main:
            position = {"step": self.done, "epoch": epoch}
            append_line(self._updates_file(), {**position, **line, **self.resources()})
        if self.done % self.cfg.log_every_n_steps == 0:
            self.log_numbers(line)
        self._progress.update(f"loss {line['loss']:.4f}  {line['tokens_per_second']:,.0f} tok/s")
        due = self.done % (self.cfg.save_every_n_steps or per_epoch) == 0
        cycle_ends = self.done == self.total_steps  # `finish_step` saves then
        if interrupted or (due and not cycle_ends):
            self.save_checkpoint()
        if interrupted:
            self.interrupt.check(f"in cycle {self.step + 1} at step {self.done}", self.ranks)

    def finish_step(self, selected: Selected, updates: Json, seconds: float) -> None:
        """Count and log a cycle, write its adapter, and save; a cycle without updates is skipped."""
        self.updates_before += self.done
        super().finish_step(selected, updates, seconds)
        if not updates["updates"]:
            return
        self.trained.append(self.step)
        count = replayed_cycles(self.cfg)
        if count:
            self.kept[self.step] = [sample.key for sample in selected.trained]
            self.kept = {cycle: self.kept[cycle] for cycle in self.trained[-count:]}
        if self.ranks.is_main:
            with replace_folder(self.adapter_folder(self.step)) as folder:
                self.learner.write_adapter(folder)
            self._remove_adapters()
        self.save_checkpoint()

    def _remove_adapters(self) -> None:
        """Remove the adapters of cycles that ``keep_last_n_adapters`` does not keep."""
        if self.cfg.keep_last_n_adapters is None:
            return
        kept = self.trained[-self.cfg.keep_last_n_adapters :]
        if self.best is not None:
            kept.append(self.best["step"])
        for cycle in set(self.trained) - set(kept):
            if self.adapter_folder(cycle).exists():
                remove_folder(self.adapter_folder(cycle))

    def save_if_due(self) -> None:
        """Do nothing: a cycle saves before its evaluation, which may take long."""

    # ---- the outputs

    def finish_evaluation(
        self, step: int, judged: Mapping[str, Scored], stats: Mapping[str, float]
    ) -> None:
        """Log an evaluation; the adapter that was the best before may go."""
        super().finish_evaluation(step, judged, stats)
        if self.ranks.is_main:
            self._remove_adapters()

    def write_outputs(self) -> None:
        """Write ``adapter/``, ``summary.json`` and perhaps ``merged/``; a UserError if no cycle was trained."""
        if not self.trained:
            raise UserError(_nothing_trained(self.lines))
        if self.ranks.is_main:
            log.info("%s", _table(self.lines))
        super().write_outputs()


class RAFT(Loop):
    """Trains an adapter on the model's verified answers; see :class:`Loop`."""

    recipe = "raft_rocm"
    trainer: RAFTTrainer
    trainer_cls = RAFTTrainer
    entropy_steps = 1  # a cycle samples many answers

    # ---- set-up

    def training_config(self) -> DictConfig:
        """Return the config of the learner; the key ``objective`` determines its ``loss``."""
        trainer = config.trainer_config(self.cfg)
        if self.cfg.objective == "raft++":
            trainer["loss"] = trainer["loss"] | {
                config.COMPONENT: "rocm_ext.losses.PolicyGradient",
                "loss": "dapo",
                "clip_high": self.cfg.clip_high,
                "on_policy": False,
            }
        return OmegaConf.create(trainer)

    def logprobs_for(self) -> list[str]:
        """Return the settings that need the token ids and log-probs of sampling."""
        settings = super().logprobs_for()
        loss = self.learner.objective
        if "old_logprobs" in loss.columns:
            settings.insert(0, f"loss {type(loss).__name__}")
        return settings

    def check_training(self) -> None:
        """Check that the learner fits the training, before the weights are read."""
        cfg, learner = self.cfg, self.learner
        self.samples_new_adapters = cfg.cycles > 1
        check_columns(learner.objective, ("advantages", "old_logprobs"))
        if "old_logprobs" in learner.objective.columns and replayed_cycles(cfg):
            log.warning(
                "replay_cycles: the log-probs of replayed answers are those of older adapters. Many of their tokens "
                "are outside the clipping range from the start and then teach nothing"
            )
        # how many rows a cycle keeps is not known yet
        self.trainer_cls.try_out(learner.cfg, learner, cfg.epochs)

    def expected_work(self) -> workload.Workload:
        """Estimate the rows that the cycles will train on, before any sampling."""
        return workload.kept_rows(self.cfg, self.prompts.questions())

    def setup(self) -> None:
        """Prepare the run; see :meth:`Loop.setup`."""
        super().setup()
        self.kept: dict[int, list[Sample]] = self.records.samples(self.trainer.kept)

    def inputs(self) -> dict[str, str | int]:
        """Return values that a resumed run shares with the one before."""
        return super().inputs() | {"rows per step": rows_per_step(self.cfg, self.ranks.world)}

    # ---- a cycle

    def passes(self, result: Result) -> bool:
        """Return whether an answer is good enough to be kept."""
        return not missed_rule(result, self.cfg.keep, self.cfg.reward_threshold)

    def choose(self, step: int, count: int, exclude: Collection[str] = ()) -> list[Prompt]:
        """Choose the prompts that a cycle asks."""
        last_asked = {}
        for prompt, asked in self.records.asked.items():
            for cycle, rate in asked:
                if rate is not None:
                    last_asked[prompt] = cycle, rate
        chosen = choose_unsolved(
            [prompt.id for prompt in self.prompts.training],
            last_asked,
            step,
            count=count,
            skip_solved=self.cfg.skip_solved,
            retry_unsolved_after=self.cfg.retry_unsolved_after,
            seed=self.cfg.seed,
        )
        return [self.prompts[prompt_id] for prompt_id in chosen]

    def trains_on(self, policy: int, step: int) -> bool:
        """Return whether a cycle trains on answers of the adapter of ``policy``: only of the last trained cycle."""
        return policy == self.trainer.adapter_step

    def select(self, rounds: Sequence[Answers], asked: Sequence[str]) -> Selected:
        """Keep correct answers, all worth the same."""
        cfg = self.cfg
        (answers,) = rounds
        kept, fates = filter_samples(
            answers.samples,
            answers.results,
            keep=cfg.keep,
            threshold=cfg.reward_threshold,
            per_prompt=cfg.max_per_prompt,
            best_fraction=cfg.best_fraction,
            deduplicate=cfg.deduplicate,
            drop_truncated=cfg.drop_truncated,
            seed=sample_seed(cfg.seed, self.trainer.step + 1, "filter", 0),
        )
        by_prompt = pass_rates(answers.results, self.passes)
        rates = [rate for rate in by_prompt.values() if rate is not None]
        counts = {
            "verdicts": dict(sorted(answers.verdicts().items())),
            "pass_rate": fmean(rates) if rates else 0.0,
            "filter": fates,
            "kept": fates["kept"],
        }
        worth = {sample.key: 1.0 for sample in kept}
        without = set(asked) - {sample.prompt_id for sample in kept}
        return Selected(
            answers.samples, answers.results, worth, without, asked, answers.stats, more=counts
        )

    def finish_sampling(self, step: int, selected: Selected) -> None:
        """Log which answers a cycle keeps, and write them to ``kept.jsonl`` for people; a resumed run selects again."""
        outcome = ":" if selected.advantages else " is skipped, nothing to train on."
        words = _in_words({"answers": len(selected.samples), **selected.more})
        log.info("cycle %d%s %s", step, outcome, words)
        if not self.ranks.is_main:
            return
        lines = []
        for sample in selected.trained:
            reward = selected.results[sample.key].reward
            prompt = self.prompts.tokens[sample.prompt_id]
            line = {**sample.record(), "reward": reward, "prompt_tokens": prompt}
            lines.append(json.dumps(line) + "\n")
        replace_text(self.trainer.cycle_folder(step) / "kept.jsonl", "".join(lines))

    def rows(self, selected: Selected) -> tuple[Rows, list[str]]:
        """Convert the kept and the replayed answers to rows."""
        cycle = self.trainer.step + 1
        kept = selected.trained
        self.kept = {earlier: self.kept[earlier] for earlier in self.trainer.kept}
        replayed = replay(
            kept,
            list(self.kept.values()),
            per_prompt=self.cfg.max_per_prompt,
            deduplicate=self.cfg.deduplicate,
        )
        if replayed:
            log.info("cycle %d: also trains on %d answers of earlier cycles", cycle, len(replayed))
        if replayed_cycles(self.cfg):
            self.kept[cycle] = kept
        samples = [*kept, *replayed]
        columns: dict[str, list[list[float]]] = {}
        if "old_logprobs" in self.learner.objective.columns:
            columns["old_logprobs"] = [sample.logprobs for sample in samples]
        if "advantages" in self.learner.objective.columns:
            columns["advantages"] = [[1.0] * len(sample.tokens) for sample in samples]
        rows, pieces = to_rows(samples, self.prompts.tokens, **columns)
        return rows, [sample.prompt_id for sample, _ in pieces]

    def stop_reason(self) -> str | None:
        """Return why the run ends before its last cycle; None to continue."""
        empty = len(without_update(self.trainer.lines))
        most = self.cfg.max_empty_cycles
        if empty >= most:
            in_a_row = "s in a row" if empty > 1 else ""
            return f"no answer was kept in {empty} cycle{in_a_row} (max_empty_cycles {most})"
        reason = super().stop_reason()
        if reason:
            return reason
        cycle = self.trainer.step + 1
        if not self.choose(cycle, self.prompts_per_step):
            count = len(self.prompts.training)
            return f"none of {count} prompts qualifies for cycle {cycle} (skip_solved, retry_unsolved_after)"
        return None


# ---- cycles in words

_HEADINGS = (
    "cycle",
    "answers",
    "pass rate",
    "kept",
    "updates",
    "loss",
    "held-out",
    "95 % interval",
    "time",
)


def _in_words(cycle: Json) -> str:
    """Describe the answers of a cycle: ``48 answers: 20 CORRECT, 28 WRONG; 28 below threshold, 20 kept``."""
    rules = ", ".join(f"{count} {rule}" for rule, count in cycle["filter"].items())
    rules = rules.replace("_", " ")
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in cycle["verdicts"].items())
    return f"{cycle['answers']} answers: {verdicts}; {rules}"


def _nothing_trained(lines: Sequence[Json]) -> str:
    """Describe why no cycle was trained, and say what to do; ``lines`` are those of ``metrics.jsonl``."""
    cycles = steps_of(lines)
    if not cycles:
        return "no prompt qualifies for the first cycle, so no cycle was trained"
    return (
        f"no cycle was trained. Cycle {cycles[-1]['step']}: nothing to train on. {_in_words(cycles[-1])}. Start "
        "again (overwrite_output_dir=True) with more samples_per_prompt, a larger max_new_tokens, a lower "
        "reward_threshold or other settings of the verifier; or use easier prompts or a model that is right more often"
    )


def _table(lines: Sequence[Json]) -> str:
    """Format the cycles in the lines of ``metrics.jsonl`` as a table."""
    table: list[tuple[str, ...]] = [_HEADINGS]
    trained = {line["step"]: line for line in steps_of(lines)}
    evaluated = {line["step"]: line for line in evaluations_of(lines)}
    for number in sorted(trained.keys() | evaluated.keys()):
        sampling = ["-", "-", "-"]
        training = ["-", "-"]
        scores = ["-", "-"]
        seconds = 0.0
        cycle = trained.get(number)
        if cycle:
            seconds += cycle["seconds"]
            sampling = [f"{cycle['answers']}", f"{cycle['pass_rate']:.1%}", f"{cycle['kept']}"]
            training = ["-", "skipped"]
            if "first_loss" in cycle:
                training = [
                    f"{cycle['updates']}",
                    f"{cycle['first_loss']:.3f} -> {cycle['last_loss']:.3f}",
                ]
        evaluation = evaluated.get(number)
        if evaluation:
            seconds += evaluation["seconds"]
            held_out = target_scores(evaluation)
            low, high = held_out["interval"]
            scores = [f"{held_out['pass_at_1']:.1%}", f"{low:.1%} - {high:.1%}"]
        table.append((str(number), *sampling, *training, *scores, f"{seconds:.0f} s"))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = []
    for cells in table:
        padded = map(str.rjust, cells, widths)
        rows.append("  ".join(padded))
    return "\n".join(rows)


@config.recipe_main("raft_rocm")
def main(cfg: DictConfig) -> None:
    """RAFT: `tune run raft_rocm --config NAME [key=value ...]`."""
    run(RAFT(cfg))


if __name__ == "__main__":
    main()
