"""RAFT on 1…N ranks: sample answers, verify them, keep the correct ones, train on those, repeat (arXiv:2304.06767).

    tune run raft_rocm --config strix_halo_qwen7b_raft
    tune run --nproc_per_node 8 raft_rocm --config mi300x_qwen7b_raft_8gpu

Each stage writes a file: ``cycle_k/`` has ``samples.jsonl``, ``verdicts.jsonl``, ``selection.json``, ``kept.jsonl``,
``adapter/`` and ``eval.json``. ``cycle_0/`` has the evaluation before any training. A stopped run continues after its
last complete record. To train, each cycle runs the SFT recipe's :class:`Trainer` once. A cycle that keeps no answer is
skipped.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.base.files import replace_folder, replace_text
from rocm_ext.base.log import log
from rocm_ext.config.checks import check_raft_values, check_values
from rocm_ext.data.batches import rows_per_step
from rocm_ext.data.prompts import Prompt
from rocm_ext.model.adapters import peft_files
from rocm_ext.model.adapters.merge import merge
from rocm_ext.plan import workload
from rocm_ext.rl import curriculum, cycle_training, cycles, evaluation
from rocm_ext.rl.cycle_training import Adapters
from rocm_ext.rl.cycles import Cycle, History
from rocm_ext.rl.recipe import RLRecipe
from rocm_ext.rl.records import Sample, phase_records, read_results, read_samples
from rocm_ext.rl.reopen import discard_after, reopen
from rocm_ext.rl.rollout import Answers, Job, Requests
from rocm_ext.rl.rows import to_rows
from rocm_ext.rl.run_record import RunRecord
from rocm_ext.rl.selection import KeepRule, filter_samples
from rocm_ext.runs.scores import Score
from rocm_ext.sampling import Session, sample_seed
from rocm_ext.train.builders import log_config
from rocm_ext.train.checkpoint import check_same_run
from rocm_ext.train.learner import Learner
from rocm_ext.train.lifecycle import run
from rocm_ext.train.output_dir import OutputDir
from rocm_ext.train.trainer import Trainer


class RAFT(RLRecipe):
    """Trains an adapter on the model's own verified answers.

    Args:
        cfg: config of ``raft_rocm`` or of a recipe that extends it, from :func:`rocm_ext.config.load`.
        learner: class that builds the model.
        trainer: class that trains the model in each cycle.

    Raises:
        UserError: a value in ``cfg`` is out of range.
    """

    def __init__(self, cfg: DictConfig, learner: type[Learner] = Learner, trainer: type[Trainer] = Trainer) -> None:
        check_raft_values(cfg)
        check_values(cycle_training.training_config(cfg))
        super().__init__(cfg, learner)
        self.trainer_cls = trainer

    # ---- set-up

    def training_config(self) -> DictConfig:
        """Return the config of the learner."""
        return cycle_training.training_config(self.cfg)

    def recorded_seed(self) -> int | None:
        """Read the record of the run that this one resumes, and return its seed."""
        self._begun = RunRecord(self.out).begun(self.cfg.resume_from_checkpoint, self.cfg.overwrite_output_dir)
        return self._begun["identity"]["seed"] if self._begun else None

    @property
    def samples_new_adapters(self) -> bool:
        """Whether the run samples answers to train on with adapters that it has written."""
        return self.cfg.cycles > 1

    def logprobs_for(self) -> list[str]:
        """Return the settings that need the token ids and log-probs of sampling."""
        loss = self.learner.objective
        needs = [f"loss {type(loss).__name__}"] * ("old_logprobs" in loss.columns)
        return needs + ["min_entropy"] * (self.cfg.min_entropy is not None)

    def check_training(self) -> None:
        """Check what training needs of the learner, before the weights are read."""
        self.learner.check_columns(("old_logprobs",))
        cycle_training.warn_of_old_logprobs(self.cfg, self.learner.objective.columns)
        self.trainer_cls.check(self.learner.cfg, self.learner, rows=1)  # how many rows a cycle keeps is not known yet

    def expected_work(self) -> workload.Workload:
        """Estimate the rows that the cycles will train on, before any sampling."""
        return workload.kept_rows(self.cfg, self.prompts.questions())

    def setup(self) -> None:
        """Prepare the run, cheap steps first, so that a user's mistake ends the run early.

        Raises:
            UserError: the config, the prompts, the weights or the machine do not allow this run.
        """
        self.open()
        self.adapters = Adapters(self.cfg, self.learner, self.out)
        self.history = self._setup_folder(self._begun)
        log_config(self.metric_logger, self.cfg)

    def _setup_folder(self, begun: dict[str, Any] | None) -> History:
        """Claim the output folder for this run; called once all other set-up has succeeded.

        Args:
            begun: the recorded config and identity of the run to resume; None starts a new run.

        Raises:
            UserError: the recorded run differs from this one, or the disk is full.
        """
        cfg, prompts = self.cfg, self.prompts
        identity = {
            "base model": self.learner.base_fingerprint,
            "prompts": prompts.fingerprint(prompts.training),
            "eval prompts": prompts.fingerprint(prompts.held_out),
            "dtype": str(self.runtime.dtype),
            "seed": cfg.seed,
            "first adapter": peft_files.fingerprint(self.adapters.first),
            "rows per step": rows_per_step(cfg, self.ranks.world),
        }
        record = RunRecord(self.out)
        if begun is not None:
            check_same_run(record.path, begun, cfg, identity, cycles.RAFT_FREE_KEYS)
            reopen(self.out, begun["config"], cfg, self.ranks)
        if self.ranks.is_main:
            record.take(cfg, identity, fresh=begun is None)
        self.ranks.barrier()
        return History(self.out, self._rule, self.ranks)

    # ---- the cycle

    def train(self) -> None:
        """Run all cycles, then write the outputs.

        Raises:
            Interrupted: the user asked to stop; all finished work is saved.
            UserError: a cycle cannot continue; the message says why.
        """
        done = 0
        with self.verification():
            if self.prompts.held_out:
                self.evaluate(0)
            for cycle in range(1, self.cfg.cycles + 1):
                reason = self.cycle(cycle)
                if cycle in self.history.rows:
                    done = cycle
                if reason:
                    log.info("stopped: %s", reason)
                    break
            self._evaluate_last(done)
        self.write_outputs(done)

    def cycle(self, cycle: int) -> str | None:
        """Sample, verify, filter, train, evaluate; skip stages whose files are complete.

        Args:
            cycle: number of the cycle, from 1.

        Returns:
            The reason to stop after this cycle, or None to continue.
        """
        files = Cycle(self.out, cycle)
        if cycle not in self.history.rows:
            if not files.selected and not files.trained:
                asked = self.choose(cycle)
                if not asked:
                    asked_of = len(self.prompts.training)
                    return f"none of {asked_of} prompts qualifies for cycle {cycle} (skip_solved, retry_unsolved_after)"
                self.keep(cycle, self.sample(cycle, asked))
            if not files.done:
                self.fit(cycle, read_samples(files.kept))
            self.history.add(files)
            if files.trained:
                self._finish_training(cycle)
                if self.prompts.held_out and self._due(cycle) and self.adapters.exists(cycle):
                    self.evaluate(cycle)
            self._summarize(cycle)
        cfg, rows = self.cfg, self.history.until(cycle)
        return cycles.stop_reason(
            rows, min_entropy=cfg.min_entropy, stop_after=cfg.stop_after_no_gain, max_empty=cfg.max_empty_cycles
        )

    def _due(self, cycle: int) -> bool:
        return cycle % self.cfg.eval_every_n_cycles == 0 or cycle == self.cfg.cycles

    def choose(self, cycle: int) -> list[Prompt]:
        """Choose the prompts that a cycle asks."""
        cfg = self.cfg
        chosen = curriculum.choose_unsolved(
            [prompt.id for prompt in self.prompts.training],
            self.history.last_asked,
            cycle,
            count=cfg.prompts_per_cycle,
            skip_solved=cfg.skip_solved,
            retry_unsolved_after=cfg.retry_unsolved_after,
            seed=cfg.seed,
        )
        return [self.prompts[prompt_id] for prompt_id in chosen]

    def sample(self, cycle: int, asked: Sequence[Prompt]) -> Answers:
        """Sample answers to ``asked`` with the adapter of the last trained cycle, and verify them."""
        requests = [(request, self.sampling) for request in self.prompts.requests(asked, cycle)]
        return self._answers(cycle, "sample", self.history.source(cycle), requests, asked)

    def _answers(
        self, cycle: int, phase: str, adapter_of: int, requests: Requests, prompts: Sequence[Prompt]
    ) -> Answers:
        """Complete ``requests`` with the adapter of cycle ``adapter_of``, and verify the completions."""
        self.adapters.load(adapter_of)
        folder = self.adapters.folder(adapter_of)
        adapter = folder if folder.exists() else None

        def check(session: Session) -> None:
            self.server_check.check(session, requests, folder, self.adapters.before(adapter_of))

        records = phase_records(Cycle(self.out, cycle).phase(phase), self.ranks, cycle, phase)
        job = Job(f"cycle {cycle} {phase}", requests, prompts, *records)
        answers = self.rollout(job, lambda: self.engines.session(phase, adapter, check)).finish()
        if not self.history.logged(cycle, phase):
            self._record(cycle, phase, answers.stats)
        return answers

    def _record(self, cycle: int, phase: str, values: Mapping[str, Any]) -> None:
        """Write ``values`` to ``metrics.jsonl``, and pass the numbers among them to the metric logger."""
        self.history.log(cycle, phase, values)
        if self.metric_logger is not None:
            numbers = {f"{phase}_{name}": value for name, value in values.items() if isinstance(value, int | float)}
            self.metric_logger.log_dict(numbers, step=self.history.steps)

    def keep(self, cycle: int, answers: Answers) -> None:
        """Select the samples to train on, and write them to ``kept.jsonl``; without any, the cycle is skipped."""
        cfg, files = self.cfg, Cycle(self.out, cycle)
        kept, dropped = filter_samples(
            answers.samples,
            answers.results,
            rule=self._rule,
            per_prompt=cfg.max_per_prompt,
            best_fraction=cfg.best_fraction,
            deduplicate=cfg.deduplicate,
            drop_truncated=cfg.drop_truncated,
            seed=sample_seed(cfg.seed, cycle, "filter", 0),
        )
        counts = cycles.count_answers(answers.samples, answers.results, dropped, self._rule)
        told = ":" if kept else " is skipped, nothing to train on."
        log.info("cycle %d%s %s", cycle, told, cycles.in_words(counts))
        if self.ranks.is_main:
            settings: Any = OmegaConf.to_container(OmegaConf.masked_copy(cfg, sorted(cycles.CHANGEABLE)))
            cycles.write_selection(files.selection, counts, settings)
            # last, because it says that the selection is complete
            cycles.write_kept(files.kept, kept, answers.results, self.prompts.tokens)
        self.ranks.barrier()

    @property
    def _rule(self) -> KeepRule:
        return KeepRule(self.cfg.keep, self.cfg.reward_threshold)

    def fit(self, cycle: int, kept: Sequence[Sample]) -> None:
        """Train on ``kept`` and the replayed answers, in the cycle's folder.

        Raises:
            UserError: the objective needs log-probs and the samples have none, or training fails.
        """
        columns, folder, history = self.learner.objective.columns, Cycle(self.out, cycle).folder, self.history
        earlier = history.trained_before(cycle)
        replayed = cycle_training.replay(self.cfg, self.out, kept, earlier)
        if replayed:
            log.info("cycle %d: also trains on %d answers of earlier cycles", cycle, len(replayed))
        samples = [*kept, *replayed]
        if "old_logprobs" in columns and any(len(sample.logprobs) != len(sample.tokens) for sample in samples):
            loss = type(self.learner.objective).__name__
            raise UserError(f"loss {loss} needs the log-probs of sampling, and this engine returned none")
        rows = to_rows(samples, self.prompts.tokens)
        if "old_logprobs" in columns:
            rows.add_labels_column("old_logprobs", [sample.logprobs for sample in samples])
        if self.ranks.is_main:
            discard_after(self.out, cycle)
            shutil.rmtree(Cycle(self.out, cycle).optimizer, ignore_errors=True)  # of a training that is done again
        self.adapters.load(self._start(cycle))
        cfg = cycle_training.cycle_config(self.cfg, cycle, len(earlier), folder)
        trainer = self.trainer_cls(
            self.learner,
            rows,
            cfg,
            OutputDir.open(cfg, self.ranks),
            metric_logger=self.metric_logger,
            interrupt=self.interrupt,
            steps_before=history.steps,
        )
        if earlier and self.cfg.optimizer_state == "run":
            cycle_training.load_optimizer(trainer, Cycle(self.out, earlier[-1]))
        trainer.train()

    def _start(self, cycle: int) -> int:
        """Return the cycle with whose adapter the training of ``cycle`` starts; 0 is the run's initial adapter."""
        return self.history.source(cycle) if self.cfg.start_from == "previous" else 0

    def _finish_training(self, cycle: int) -> None:
        """Check the trained adapter, and do what is left to do after training; doing it again changes nothing.

        Raises:
            UserError: training changed nothing.
        """
        files, start = Cycle(self.out, cycle), self._start(cycle)
        if self.ranks.is_main:
            trained = [Cycle(self.out, number) for number in self.history.trained_before(cycle + 1)]
            cycle_training.clean_up(files, trained, self.cfg.optimizer_state == "run")
        if not self.history.logged(cycle, "train"):
            self._record(cycle, "train", files.training())
        if self.adapters.exists(cycle) and self.adapters.exists(start):
            self.adapters.check_changed(cycle, start)
        self.ranks.barrier()

    def evaluate(self, cycle: int) -> None:
        """Score a cycle's adapter on the held-out prompts, and write ``eval.json`` unless it exists."""
        path = Cycle(self.out, cycle).eval
        if path.exists():
            return
        requests = self.prompts.evaluation_requests(self.sampling)
        answers = self._answers(cycle, "eval", cycle, requests, self.prompts.held_out)
        scores = evaluation.score(answers, self.cfg.eval_samples)
        if self.ranks.is_main:
            replace_text(path, json.dumps(scores, indent=2) + "\n")
        self.ranks.barrier()
        if self.metric_logger is not None:
            share = scores["correct"] / scores["prompts"]
            self.metric_logger.log_dict({"eval_correct": share}, step=self.history.steps)
        log.info("cycle %d: held-out %s", cycle, Score(scores["correct"], scores["prompts"]))

    # ---- the outputs

    def _evaluate_last(self, last: int) -> None:
        """Evaluate the last trained cycle up to ``last`` unless ``eval_every_n_cycles`` had it evaluated."""
        cycle = self.history.source(last + 1)
        missing = cycle and self.prompts.held_out and "held_out" not in self.history.rows[cycle]
        if missing and self.adapters.exists(cycle):
            self.evaluate(cycle)
            self._summarize(cycle)

    def _summarize(self, cycle: int) -> None:
        """Add this cycle to ``summary.json``, with the evaluation of cycle 0 before the first one; remove adapters."""
        history, keep = self.history, self.cfg.keep_last_n_adapters
        for each in ([0] if self.prompts.held_out and 0 not in history.rows else []) + [cycle]:
            history.summarize(Cycle(self.out, each))
        if keep and self.ranks.is_main and history.trained and history.rows.keys() >= set(history.trained):
            rows = [row for row in history.rows.values() if self.adapters.exists(row["cycle"])]
            self.adapters.prune({cycles.best(rows), *history.trained[-keep:]}, history.trained)
        self.ranks.barrier()

    def write_outputs(self, last: int) -> None:
        """Write ``adapter/`` and, if the config asks for it, ``merged/``.

        The adapter is that of the cycle with the best held-out score. Without held-out prompts it is the last
        cycle's.

        Args:
            last: number of the last finished cycle; 0 without one.

        Raises:
            UserError: no cycle was trained, or its adapter was removed.
        """
        rows = self.history.until(last)
        if not cycles.trained_rows(rows):
            raise UserError(cycles.nothing_trained(rows))
        there = [row for row in rows if self.adapters.exists(row["cycle"])]
        if not cycles.trained_rows(there):
            raise UserError(f"keep_last_n_adapters removed the adapters of all cycles up to {last}; raise cycles")
        self.history.write(last)
        if self.ranks.is_main:
            number = cycles.best(there)
            with replace_folder(self.out / "adapter") as folder:
                shutil.copytree(Cycle(self.out, number).adapter, folder, dirs_exist_ok=True)
            if not self.cfg.save_adapter_weights_only:
                merge(self.learner.cfg.checkpointer, self.out / "adapter", self.out / "merged", self.learner.decoder)
            log.info("%s", cycles.table(rows))
            log.info("adapter: %s, of cycle %d", self.out / "adapter", number)
            if self.prompts.held_out:
                before, after = (
                    evaluation.greedy(read_results(Cycle(self.out, each).phase("eval") / "verdicts.jsonl"))
                    for each in (0, number)
                )
                looks = sum(bool(row["cycle"]) and "held_out" in row for row in rows)
                evaluation.report_gain(before, after, f"cycle {number}", looks)
        self.ranks.barrier()


@config.recipe_main("raft_rocm")
def main(cfg: DictConfig) -> None:
    """RAFT: `tune run raft_rocm --config NAME [key=value ...]`."""
    run(RAFT(cfg))


if __name__ == "__main__":
    main()
