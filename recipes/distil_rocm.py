"""Distillation on 1…N ranks: a model learns a teacher's distributions on the model's answers (arXiv:2306.13649).

    tune run distil_rocm --config strix_halo_qwen3_4b_from_32b

A step of :class:`rocm_ext.rl.loop.Loop` asks the next prompts, samples answers, and lowers the divergence between model
and teacher at the answers' tokens. It needs no verifier; with one it measures the answers, and evaluates held-out
prompts. With ``given_answers`` the data has the answers.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from rocm_ext import config
from rocm_ext.base.log import log
from rocm_ext.config.algorithms import updates_of_step
from rocm_ext.data.batches import Steps
from rocm_ext.data.prompts import Prompt
from rocm_ext.data.rows import Rows
from rocm_ext.losses.distillation import LOGPROBS, loss_config
from rocm_ext.plan.workload import Workload, describe
from rocm_ext.rl.loop import Loop
from rocm_ext.rl.prompts import given_samples
from rocm_ext.rl.rollout import Answers
from rocm_ext.rl.selection import Selected, to_rows
from rocm_ext.train.lifecycle import run
from rocm_ext.train.teacher import open_teacher
from rocm_ext.verifiers import Verdict


class Distil(Loop):
    """Trains an adapter to answer as a teacher does; see :class:`Loop`."""

    recipe = "distil_rocm"
    samples_new_adapters = True
    logs_long_rollouts_only = True
    judges = False

    # ---- set-up

    def objective_config(self) -> dict[str, object]:
        """Return the component of the divergence."""
        return loss_config(self.cfg)

    def check_training(self) -> None:
        """Build the teacher, and check prompts and given answers, before weights are read."""
        cfg, learner = self.cfg, self.learner
        self.teacher = open_teacher(cfg, learner)
        decoder = self.teacher.learner.decoder
        self.prompts.check_model(decoder, "teacher")
        self.sessions_stay_open = cfg.given_answers is None  # otherwise evaluations alone sample
        if cfg.given_answers is not None:
            most = min(learner.decoder.max_seq_len, decoder.max_seq_len)
            self._given = given_samples(self.prompts, cfg.given_answers, learner, most)
        updates = cfg.steps * updates_of_step(cfg)
        self.trainer_cls.try_out(learner.cfg, learner, updates)

    def expected_work(self) -> Workload:
        """Describe the rows of a step: of given answers, or an estimate."""
        work = super().expected_work()
        if self.cfg.given_answers is None:
            return work
        samples = list(self._given.values())
        rows, _ = to_rows(samples, self.prompts.tokens)
        described = describe(rows, work.count or len(rows), "the given answers")
        return replace(described, most=work.most)

    def plan_memory(self, work: Workload, beside: int = 0) -> None:
        """Plan the memory of training with the teacher's weights, and of the teacher's forward pass."""
        super().plan_memory(work, beside + self.teacher.frozen)
        self.learner.planned_peak = self.teacher.peak(self.learner, work.longest)

    def load(self) -> None:
        """Read the weights of model and teacher."""
        super().load()
        self.teacher.load()
        objective: Any = self.learner.objective
        objective.teacher = self.teacher

    def inputs(self) -> dict[str, str | int]:
        """Return values that a resumed run shares with the one before."""
        return super().inputs() | {"teacher": self.teacher.fingerprint}

    # ---- a step

    def choose(self, step: int, count: int, exclude: Collection[str] = ()) -> list[Prompt]:
        """Choose the next prompts, in a new order in every pass over all."""
        prompts = self.prompts.training
        steps = Steps(len(prompts), self.prompts_per_step, data_seed=self.cfg.seed)
        return [prompts[i] for i in steps[step - 1]]

    def sample(self, step: int) -> Selected:
        """Sample the answers of a step, or take the given ones."""
        if self.cfg.given_answers is None:
            return super().sample(step)
        asked = [prompt.id for prompt in self.choose(step, self.prompts_per_step)]
        samples = {(prompt, 0): self._given[prompt] for prompt in sorted(asked)}
        stats = {"policy": len(samples) * (step - 1.0)}
        return self.select([Answers(samples, {}, stats)], asked)

    def select(self, rounds: Sequence[Answers], asked: Sequence[str]) -> Selected:
        """Take all answers without ERROR that have tokens, unless a token is outside the teacher's vocabulary."""
        (answers,) = rounds
        samples = dict(sorted(answers.samples.items()))
        vocabulary = range(self.teacher.learner.decoder.tok_embeddings.num_embeddings)
        worth = {}
        for key, sample in samples.items():
            result = answers.results.get(key)
            failed = result is not None and result.verdict is Verdict.ERROR
            if not failed and max(sample.tokens, default=-1) in vocabulary:
                worth[key] = 1.0
        return Selected(samples, answers.results, worth, set(), asked, answers.stats)

    def rows(self, selected: Selected) -> tuple[Rows, list[str]]:
        """Convert the answers to rows, for ``reverse_kl`` with the teacher's log-probs."""
        objective = self.learner.objective
        rows, pieces = to_rows(selected.trained, self.prompts.tokens)
        if LOGPROBS in objective.columns:
            logprobs = self.teacher.logprobs(rows, objective.temperature)
            rows.add_labels_column(LOGPROBS, logprobs)
        return rows, [sample.prompt_id for sample, _ in pieces]

    def report_gain(self) -> None:
        """Log the gain on the held-out prompts, and warn if nothing was trained."""
        super().report_gain()
        updates = [line.get("updates", 0) for line in self.trainer.lines]
        if self.ranks.is_main and not any(updates):
            log.warning(
                "no step had an update: each answer was empty, an ERROR or has tokens that the teacher lacks"
            )


@config.recipe_main("distil_rocm")
def main(cfg: DictConfig) -> None:
    """Distillation: `tune run distil_rocm --config NAME [key=value ...]`."""
    run(Distil(cfg))


if __name__ == "__main__":
    main()
