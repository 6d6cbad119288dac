"""GRPO and its kin on 1…N ranks: sample groups of answers, verify them, learn from right and wrong (arXiv:2402.03300).

    tune run grpo_rocm --config strix_halo_qwen3_4b_grpo
    tune run --nproc_per_node 7 grpo_rocm --config mi300x_qwen3_8b_grpo_8gpu

A step chooses prompts, samples a group of answers to each, verifies them, compares each reward with those of its group,
and updates the adapter. Optimiser and schedule run through the whole run. ``samples.jsonl``, ``verdicts.jsonl`` and
``metrics.jsonl`` grow by each step. A stopped run trains again from its last checkpoint on the recorded answers, and
goes on from there.

To change a part, subclass :class:`GRPO` and override :meth:`GRPO.choose`, :meth:`GRPO.select`, :meth:`GRPO.rows` or
:meth:`GRPO.training_config`.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.base.log import log
from rocm_ext.config.checks import check_grpo_values, check_values
from rocm_ext.data.prompts import Prompt
from rocm_ext.data.rows import Rows
from rocm_ext.model.adapters import peft_files
from rocm_ext.plan.policy import rows_of_update
from rocm_ext.rl import curriculum, evaluation, objective, stopping
from rocm_ext.rl.policy import Policy
from rocm_ext.rl.recipe import RLRecipe
from rocm_ext.rl.records import Records
from rocm_ext.rl.rollout import Answers, BackgroundRollout, Job, Rollout
from rocm_ext.rl.rows import to_rows
from rocm_ext.rl.selection import Selected, select
from rocm_ext.rl.trainer import PolicyTrainer
from rocm_ext.runs.scores import Score
from rocm_ext.train.builders import log_config
from rocm_ext.train.interrupt import Interrupted
from rocm_ext.train.learner import Learner
from rocm_ext.train.lifecycle import run
from rocm_ext.train.output_dir import OutputDir
from rocm_ext.train.scoring import reference, score

_ROWS_PER_MICRO_BATCH = 4  # rows of joined answers that fit into one


class GRPO(RLRecipe):
    """Trains an adapter on the model's own verified answers, right and wrong, with policy gradients.

    Args:
        cfg: config of ``grpo_rocm`` or of a recipe that extends it, from :func:`rocm_ext.config.load`.
        learner: class that builds the model.
        trainer: class that updates the adapter.

    Raises:
        UserError: a value in ``cfg`` is out of range.
    """

    samples_new_adapters = True
    logs_long_rollouts_only = True
    sessions_stay_open = True

    def __init__(
        self, cfg: DictConfig, learner: type[Learner] = Learner, trainer: type[PolicyTrainer] = PolicyTrainer
    ) -> None:
        check_grpo_values(cfg)
        super().__init__(cfg, learner)
        self.sampling = replace(self.sampling, logprobs_temperature=cfg.temperature)
        check_values(self.training_config())
        self.trainer_cls = trainer

    # ---- set-up

    def training_config(self) -> DictConfig:
        """Return the config of the learner; its ``loss`` is the objective that the config's keys describe."""
        rows = rows_of_update(self.cfg, self.cfg.prompts_per_step * self.cfg.samples_per_prompt)
        ours = {"loss": objective.loss_config(self.cfg), "sequences_per_step": rows}
        return OmegaConf.create(config.trainer_config(self.cfg) | ours)

    def recorded_seed(self) -> int | None:
        """Open the output folder, and return the seed of the run that it continues."""
        self.folder = OutputDir.open(self.cfg, self.ranks)
        return self.cfg.seed

    def logprobs_for(self) -> list[str]:
        """Return the settings that need the token ids and log-probs of sampling."""
        return objective.logprobs_for(self.cfg, self.learner.objective)

    def check_training(self) -> None:
        """Check what training needs of the learner, before the weights are read."""
        self.learner.check_columns(objective.COLUMNS)
        objective.check(self.cfg, self.learner.objective)
        self.trainer_cls.try_out(self.learner.cfg, self.learner, self.cfg.steps * objective.updates_of_step(self.cfg))

    def setup(self) -> None:
        """Prepare the run, cheap steps first, so that a user's mistake ends the run early.

        Raises:
            UserError: the config, the prompts, the weights or the machine do not allow this run.
        """
        self.open()
        self.first = self.learner.adapter_state()  # the reference of kl_coef
        self.trainer = self.trainer_cls(
            self.learner,
            self.cfg,
            self.folder,
            inputs={
                "prompts": self.prompts.fingerprint(self.prompts.training),
                "eval prompts": self.prompts.fingerprint(self.prompts.held_out),
                "first adapter": peft_files.fingerprint(self.first),
            },
            metric_logger=self.metric_logger,
            interrupt=self.interrupt,
        )
        self.records = Records(self.out, self.ranks, self.trainer.step, self.trainer.evaluated)
        self.policy = Policy(self.engines, self.learner, self.server_check, self.out)
        self.prefetched: BackgroundRollout | None = None  # the next step's answers, with max_staleness 1
        log_config(self.metric_logger, self.cfg)

    # ---- the run

    def train(self) -> None:
        """Do all steps, then write the outputs.

        Raises:
            Interrupted: the user asked to stop; all finished work is saved.
            UserError: a step cannot continue; the message says why.
        """
        trainer = self.trainer
        with self.interrupt, self.verification(), self.policy.opened():
            try:
                if trainer.fresh:
                    trainer.save_checkpoint()
                self.evaluate_if_due()
                while trainer.step < self.cfg.steps and not self.stops():
                    self.step()
                self.stop_sampling()
                self.evaluate_if_due(last=True)
                if self.prefetched is None:  # no thread writes to the file
                    self.drop_old_samples(trainer.step, last=True)
            except Interrupted:
                trainer.save_if_new()
                self.stop_sampling()
                raise
            finally:
                if self.prefetched is not None:
                    self.prefetched.abandon()
                self.records.close()
        if trainer.stopped:
            log.info("stopped: %s", trainer.stopped)
        trainer.write_outputs()
        self.report_gain()

    def stops(self) -> bool:
        """Return whether the run ends before its last step; ``trainer.stopped`` then says why.

        Raises:
            UserError: too many steps in a row taught nothing.
        """
        cfg, lines = self.cfg, self.trainer.lines
        if flat := stopping.flat_reason(lines, max_flat_steps=cfg.max_flat_steps):
            self.stop_sampling()
            raise UserError(flat)
        self.trainer.stopped = stopping.stop_reason(
            lines,
            min_entropy=cfg.min_entropy,
            stop_after_no_gain=cfg.stop_after_no_gain,
            max_length_share=cfg.max_length_share,
        )
        return self.trainer.stopped is not None

    def step(self) -> None:
        """Do one step: sample, verify, compare, update, log; perhaps evaluate and save.

        Raises:
            Interrupted: the user asked to stop; all finished work is saved.
            UserError: the step cannot continue; the message says why.
        """
        began, trainer, number = time.perf_counter(), self.trainer, self.trainer.step + 1
        selected = self.sample(number)
        self.records.finish(number, selected.results)
        self.drop_old_samples(number)  # before a thread writes to the same file
        if self.cfg.max_staleness and number < self.cfg.steps:
            prompts = self.choose(number + 1, self.cfg.prompts_per_step)
            self.prefetched = self.rollout_of(self.job(number + 1, 0, prompts), BackgroundRollout)
        updates = trainer.train_on(*self.rows(selected)) if selected.advantages else trainer.train_on_nothing()
        lag = {"policy_lag": selected.policy_lag(number)}
        trainer.finish_step(selected.measurements() | updates | lag | {"seconds": time.perf_counter() - began})
        self.warn_if_sampler_drifts()
        self.evaluate_if_due()
        trainer.save_if_due()
        if signum := self.interrupt.agree(self.ranks):
            raise Interrupted(f"at step {number}", signum)

    def drop_old_samples(self, step: int, last: bool = False) -> None:
        """Remove the samples that neither ``keep_samples`` nor a resumed run needs, where many are old.

        Args:
            step: the newest step with samples.
            last: whether the run ends here; then all old ones go.
        """
        keep = self.cfg.keep_samples
        if keep != "all" and (last or step % keep == 0):
            self.records.keep_samples_from(min(step - keep, self.trainer.saved) + 1, at_once=last)

    # ---- sampling

    def choose(self, step: int, count: int, exclude: Collection[str] = ()) -> list[Prompt]:
        """Choose the prompts of a step.

        Args:
            step: number of the step, from 1.
            count: number of prompts.
            exclude: ids of prompts that the step has asked already.
        """
        ids = curriculum.choose(
            [prompt.id for prompt in self.prompts.training],
            self.records.asked,
            step,
            self.cfg.steps,
            count=count,
            curriculum=self.cfg.curriculum,
            seed=self.cfg.seed,
            exclude=exclude,
        )
        return [self.prompts[each] for each in ids]

    def sample(self, step: int) -> Selected:
        """Sample and verify the answers of a step; with ``refill``, until there are enough groups to train on."""
        cfg, rollout = self.cfg, self.prefetched
        if rollout is None:
            rollout = self.rollout_of(self.job(step, 0, self.choose(step, cfg.prompts_per_step)))
        self.prefetched, asked = None, list(rollout.job.prompts)
        rounds = [rollout.finish()]
        selected = self.select(rounds, [prompt.id for prompt in asked])
        for round_ in range(1, cfg.max_refills + 1 if cfg.refill else 1):
            missing = cfg.prompts_per_step - selected.groups
            if missing <= 0:
                break
            useful = max(0.25, selected.groups / len(asked))
            count = min(cfg.prompts_per_step, round(missing / useful))
            more = self.choose(step, count, exclude={prompt.id for prompt in asked})
            if not more:
                break
            asked += more
            job = self.job(step, round_, more, earlier=len(selected.samples))
            rounds.append(self.rollout_of(job).finish())
            selected = self.select(rounds, [prompt.id for prompt in asked])
        return selected

    def job(self, step: int, round_: int, prompts: Sequence[Prompt], earlier: int = 0) -> Job:
        """Return what a round of a step's sampling does; ``earlier`` answers came before it in the step."""
        return Job(
            f"step {step}" + (f" refill {round_}" if round_ else ""),
            [(request, self.sampling) for request in self.prompts.requests(prompts, step)],
            prompts,
            *self.records.phase(step, "sample", round_, policy=self.trainer.step),
            self.logprobs_for(),
            earlier,
        )

    def rollout_of(self, job: Job, kind: type[Rollout] = Rollout) -> Any:
        """Begin a rollout with the present adapter."""
        step = self.trainer.step
        return self.rollout(job, lambda: self.policy.session(step, job.requests), kind)

    def select(self, rounds: Sequence[Answers], asked: Sequence[str]) -> Selected:
        """Compare the rewards of each group, and choose the answers to train on.

        Args:
            rounds: answers of each round of the step's sampling.
            asked: ids of their prompts, in order.
        """
        return select(rounds, asked, self.cfg)

    def stop_sampling(self) -> None:
        """Stop sampling in the background, on all ranks together; a resumed run uses the answers so far."""
        if self.prefetched is not None:
            self.prefetched.stop()
            self.prefetched = None

    def warn_if_sampler_drifts(self) -> None:
        """Warn if sampler and trainer differ more than in earlier steps, and check the servers' adapters again."""
        if warning := stopping.mismatch_warning(self.trainer.lines):
            if self.ranks.is_main:
                log.warning("%s", warning)
            self.policy.check_again()

    # ---- training

    def rows(self, selected: Selected) -> tuple[Rows, list[str]]:
        """Convert the answers to train on to rows, with the columns that the objective needs or measures.

        Answers to one prompt are joined to rows where the model can compute their prompt once.

        Returns:
            The rows, and the prompt of each.
        """
        cfg, learner, samples = self.cfg, self.learner, selected.trained
        rows, groups = to_rows(samples, self.prompts.tokens), [sample.prompt_id for sample in samples]
        lengths = [len(sample.tokens) for sample in samples]
        advantages = selected.advantages.values()
        rows.add_labels_column("advantages", [[a] * n for a, n in zip(advantages, lengths, strict=True)])
        if all(len(sample.logprobs) == n for sample, n in zip(samples, lengths, strict=True)):
            rows.add_labels_column("sampler_logprobs", [sample.logprobs for sample in samples])
        columns = learner.objective.columns
        if "old_logprobs" in columns and cfg.old_logprobs == "sampler":
            rows.columns["old_logprobs"] = rows.columns["sampler_logprobs"]
        if learner.shares:
            # rows well below a micro-batch, and several for each rank: large ones would fill neither
            of_rank = sum(map(len, rows.tokens)) / (cfg.minibatches * self.ranks.world)  # tokens of an update
            most = min(learner.tokens_per_micro_batch, of_rank) / _ROWS_PER_MICRO_BATCH
            rows, groups = rows.join_groups(groups, most)
        if "old_logprobs" in columns and cfg.old_logprobs != "sampler":
            rows.add_labels_column("old_logprobs", score(learner, rows, cfg.temperature))
        if "reference_logprobs" in columns:
            with reference(learner, self.first, "the first adapter"):
                rows.add_labels_column("reference_logprobs", score(learner, rows, cfg.temperature))
        return rows, groups

    # ---- evaluation

    def evaluate_if_due(self, last: bool = False) -> None:
        """Evaluate the present adapter on the held-out prompts, every so many steps and after the last.

        Args:
            last: whether the run ends here.
        """
        step, every = self.trainer.step, self.cfg.eval_every_n_steps
        due = last or step % every == 0 or step == self.cfg.steps
        if not (self.prompts.held_out and due) or self.trainer.evaluated == step:
            return
        if self.prefetched is not None:
            self.prefetched.wait()  # a server must not exchange adapters while it answers
        requests = self.prompts.evaluation_requests(self.sampling)
        job = Job(f"evaluation at step {step}", requests, self.prompts.held_out, *self.records.phase(step, "eval"))
        answers = self.rollout_of(job).finish()
        scores = evaluation.score(answers, self.cfg.eval_samples)
        self.trainer.finish_evaluation(scores, answers.stats["seconds"])
        log.info("step %d: held-out %s", step, Score(scores["correct"], scores["prompts"]))

    def report_gain(self) -> None:
        """Log how the best adapter does on the held-out prompts against the initial model."""
        best = self.trainer.best
        if best is None or not self.ranks.is_main:
            return
        before, after = (evaluation.greedy(self.records.verdicts(step, "eval")) for step in (0, best["step"]))
        looks = sum("eval" in line and line["step"] > 0 for line in self.trainer.lines)
        evaluation.report_gain(before, after, f"step {best['step']}", looks)


@config.recipe_main("grpo_rocm")
def main(cfg: DictConfig) -> None:
    """GRPO: `tune run grpo_rocm --config NAME [key=value ...]`."""
    run(GRPO(cfg))


if __name__ == "__main__":
    main()
