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

from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.config.checks import check_grpo_values, check_values
from rocm_ext.data.prompts import Prompt
from rocm_ext.data.rows import Rows
from rocm_ext.errors import UserError
from rocm_ext.grpo import curriculum, mismatch, objective, stopping
from rocm_ext.grpo.policy_trainer import PolicyTrainer
from rocm_ext.grpo.records import Records
from rocm_ext.grpo.sampler import Beside, Sampler
from rocm_ext.grpo.selection import Selected, select
from rocm_ext.log import log
from rocm_ext.model import adapter_files
from rocm_ext.plan.policy import rows_of_update
from rocm_ext.rollouts import evaluation
from rocm_ext.rollouts.phases import Phase
from rocm_ext.rollouts.recipe import RolloutRecipe
from rocm_ext.rollouts.rows import add_column, to_rows
from rocm_ext.rollouts.samples import sampling_requests
from rocm_ext.runs.scores import Score
from rocm_ext.train.components import log_config
from rocm_ext.train.interrupt import Interrupted
from rocm_ext.train.learner import Learner
from rocm_ext.train.output_dir import OutputDir
from rocm_ext.train.run import run
from rocm_ext.train.scoring import reference, score


class GRPO(RolloutRecipe):
    """Trains an adapter on the model's own verified answers, right and wrong, with policy gradients.

    Args:
        cfg: config of ``grpo_rocm`` or of a recipe that extends it, from :func:`rocm_ext.config.load`.
        learner: class that builds the model.
        trainer: class that updates the adapter.

    Raises:
        UserError: a value in ``cfg`` is out of range.
    """

    own_adapters = brief = keeps_open = True

    def __init__(
        self, cfg: DictConfig, learner: type[Learner] = Learner, trainer: type[PolicyTrainer] = PolicyTrainer
    ) -> None:
        check_grpo_values(cfg)
        super().__init__(cfg, learner)
        self.sampling = replace(self.sampling, logprobs_temperature=cfg.temperature)
        check_values(self.training_config())
        self._trainer = trainer

    # ---- set-up

    def training_config(self) -> DictConfig:
        """Return the config of the learner; its ``loss`` is the objective that the config's keys describe."""
        rows = rows_of_update(self.cfg, self.cfg.prompts_per_step * self.cfg.samples_per_prompt)
        ours = {"loss": objective.node(self.cfg), "sequences_per_step": rows}
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
        self._trainer.try_out(self.learner.cfg, self.learner, self.cfg.steps * objective.updates_of_step(self.cfg))

    def setup(self) -> None:
        """Prepare the run, cheap steps first, so that a user's mistake ends the run early.

        Raises:
            UserError: the config, the prompts, the weights or the machine do not allow this run.
        """
        self.open()
        self.first = self.learner.adapter_state()  # the reference of kl_coef
        self.trainer = self._trainer(
            self.learner,
            self.cfg,
            self.folder,
            inputs={
                "prompts": self.prompts.fingerprint(self.prompts.training),
                "eval prompts": self.prompts.fingerprint(self.prompts.held_out),
                "first adapter": adapter_files.fingerprint(self.first),
            },
            metric_logger=self.metric_logger,
            interrupt=self.interrupt,
        )
        self.records = Records(self.out, self.ranks, self.trainer.step, self.trainer.evaluated)
        self.sampler = Sampler(self, lambda: self.trainer.step)
        self.next: Beside | None = None  # the next step's answers, with max_staleness 1
        log_config(self.metric_logger, self.cfg)

    # ---- the run

    def train(self) -> None:
        """Do all steps, then write the outputs.

        Raises:
            Interrupted: the user asked to stop; all finished work is saved.
            UserError: a step cannot continue; the message says why.
        """
        trainer = self.trainer
        with self.interrupt, self.verification(), self.sampler.opened():
            try:
                if trainer.fresh:
                    trainer.save_checkpoint()
                self.evaluate_if_due()
                while trainer.step < self.cfg.steps and not self.stops():
                    self.step()
                self.stop_sampling()
                self.evaluate_if_due(last=True)
                if self.next is None:  # no thread writes to the file
                    self.drop_old_samples(trainer.step, last=True)
            except Interrupted:
                trainer.save_if_new()
                self.stop_sampling()
                raise
            finally:
                if self.next is not None:
                    self.next.abandon()
                self.records.close()
        if trainer.stopped:
            log.info("stopped: %s", trainer.stopped)
        trainer.write_outputs()
        self.tell_gain()

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
        began, cfg, trainer = time.perf_counter(), self.cfg, self.trainer
        number = trainer.step + 1
        selected = self.sample(number)
        self.records.finish(number, selected.results)
        self.drop_old_samples(number)  # before a thread writes to the same file
        if cfg.max_staleness and number < cfg.steps:
            self.next = self.begin(number + 1)
        rows = self.rows(selected) if selected.advantages else None
        updates = trainer.update(rows, [sample.prompt_id for sample in selected.trained])
        trainer.finish_step(
            {
                **selected.measurements(),
                **updates,
                "policy_lag": selected.policy_lag(number),
                "seconds": time.perf_counter() - began,
            }
        )
        self.doubt_sampler()
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

    def select(self, phases: Sequence[Phase], asked: Sequence[str]) -> Selected:
        """Compare the rewards of each group, and choose the answers to train on.

        Args:
            phases: the rounds of the step's sampling.
            asked: ids of their prompts, in order.
        """
        return select(phases, asked, self.cfg)

    def sample(self, step: int) -> Selected:
        """Sample and verify the answers of a step; with ``refill``, until there are enough groups to train on."""
        cfg, begun = self.cfg, self.next
        if begun is None:
            asked = self.choose(step, cfg.prompts_per_step)
            phases = [self.sampler.phase(*self._round(step, 0, asked))]
        else:
            asked, self.next = list(begun.prompts), None
            phases = [begun.finish()]
        selected = self.select(phases, [prompt.id for prompt in asked])
        for round_ in range(1, cfg.max_refills + 1 if cfg.refill else 1):
            missing = cfg.prompts_per_step - selected.groups
            if missing <= 0:
                break
            useful = max(0.25, selected.groups / len(asked))
            count = min(cfg.prompts_per_step, round(missing / useful))
            more = self.choose(step, count, exclude={prompt.id for prompt in asked})
            if not more:
                break
            asked = [*asked, *more]
            answers = len(selected.samples)
            phases.append(self.sampler.phase(*self._round(step, round_, more), earlier=answers))
            selected = self.select(phases, [prompt.id for prompt in asked])
        return selected

    def begin(self, step: int) -> Beside:
        """Begin to sample the answers of the next step while this one trains."""
        return self.sampler.begin(*self._round(step, 0, self.choose(step, self.cfg.prompts_per_step)))

    def _round(self, step: int, round_: int, asked: Sequence[Prompt]) -> tuple:
        """Return the arguments of a phase: name, records, requests, prompts, settings that need log-probs."""
        requests = sampling_requests(asked, self.prompts.tokens, self.cfg.samples_per_prompt, self.cfg.seed, step)
        wanted = [(request, self.sampling) for request in requests]
        name = f"step {step}" + (f" refill {round_}" if round_ else "")
        journals = self.records.journals(step, "sample", round_, policy=self.trainer.step)
        return name, journals, wanted, asked, self.logprobs_for()

    def stop_sampling(self) -> None:
        """Stop sampling beside training, on all ranks together; a resumed run uses the answers so far."""
        if self.next is not None:
            self.next.stop()
            self.next = None

    def doubt_sampler(self) -> None:
        """Warn if sampler and trainer differ more than in earlier steps, and check the servers' adapters again."""
        if grown := mismatch.grown(self.trainer.lines):
            if self.ranks.is_main:
                log.warning("%s", grown)
            self.sampler.check_again()

    # ---- training

    def rows(self, selected: Selected) -> Rows:
        """Convert the answers to train on to rows, with the columns that the objective needs or measures."""
        cfg, learner, samples = self.cfg, self.learner, selected.trained
        worth = [[value] * len(selected.samples[key].tokens) for key, value in selected.advantages.items()]
        rows = to_rows(samples, self.prompts.tokens, {"advantages": worth})
        columns = learner.objective.columns
        if all(len(sample.logprobs) == len(sample.tokens) for sample in samples):
            add_column(rows, "sampler_logprobs", [sample.logprobs for sample in samples])
        if "old_logprobs" in columns:
            sampled = cfg.old_logprobs == "sampler"
            old = [sample.logprobs for sample in samples] if sampled else score(learner, rows, cfg.temperature)
            add_column(rows, "old_logprobs", old)
        if "reference_logprobs" in columns:
            with reference(learner, self.first, "the first adapter"):
                add_column(rows, "reference_logprobs", score(learner, rows, cfg.temperature))
        return rows

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
        if self.next is not None:
            self.next.wait()  # a server must not exchange adapters while it answers
        phase = self.sampler.phase(
            f"evaluation at step {step}",
            self.records.journals(step, "eval"),
            self.evaluation_requests(),
            self.prompts.held_out,
        )
        scores = evaluation.score(phase, self.cfg.eval_samples)
        self.trainer.finish_evaluation(scores, phase.stats["seconds"])
        log.info("step %d: held-out %s", step, Score(scores["correct"], scores["prompts"]))

    def tell_gain(self) -> None:
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
