"""GRPO and its kin on 1…N ranks: sample groups of answers, verify them, learn from right and wrong (arXiv:2402.03300).

    tune run grpo_rocm --config strix_halo_qwen3_4b_grpo
    tune run --nproc_per_node 7 grpo_rocm --config mi300x_qwen3_8b_grpo_8gpu

A step of :class:`rocm_ext.rl.loop.Loop` chooses prompts, samples a group of answers per prompt, verifies them, compares
rewards inside groups, and updates the adapter. Optimiser and schedule live as long as the run.

To change a part, subclass :class:`GRPO` and override :meth:`GRPO.choose`, :meth:`GRPO.select`, :meth:`GRPO.rows` or
:meth:`GRPO.training_config`.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from omegaconf import DictConfig

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.base.log import log
from rocm_ext.config.algorithms import describe, filled, updates_of_pass, updates_of_step
from rocm_ext.data.prompts import Prompt
from rocm_ext.data.rows import ROUTES, Rows
from rocm_ext.losses import check_columns
from rocm_ext.losses.objective import REFERENCE
from rocm_ext.losses.policy_gradient import loss_config
from rocm_ext.plan.workload import old_logprobs
from rocm_ext.rl import evaluation
from rocm_ext.rl.loop import Loop
from rocm_ext.rl.prompts import choose_by_curriculum
from rocm_ext.rl.rollout import Answers
from rocm_ext.rl.selection import Selected, select, to_rows
from rocm_ext.runs.records import SampleKey
from rocm_ext.train.lifecycle import run
from rocm_ext.train.scoring import reference, score

# columns that a step can have
_COLUMNS = ("advantages", "old_logprobs", "sampler_logprobs", REFERENCE)
_ROWS_PER_MICRO_BATCH = 4  # rows of joined answers in one micro-batch


class GRPO(Loop):
    """Trains an adapter on the model's verified answers, right and wrong, with policy gradients; see :class:`Loop`."""

    recipe = "grpo_rocm"
    samples_new_adapters = True
    logs_long_rollouts_only = True
    sessions_stay_open = True

    def __init__(self, cfg: DictConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self.filled = filled(cfg)
        log.info("%s", describe(self.filled))
        self.sampling = replace(self.sampling, logprobs_temperature=cfg.temperature)
        # log-probs of the step's answers, with kl_in: reward
        self._reference: dict[SampleKey, np.ndarray] = {}

    # ---- set-up

    def objective_config(self) -> dict[str, object]:
        """Return the component of the policy gradient."""
        return loss_config(self.cfg)

    def logprobs_for(self) -> list[str]:
        """Return the settings that need the token ids and log-probs of sampling."""
        columns = self.learner.objective.columns
        kl_coef = getattr(self.learner.objective, "kl_coef", None)
        settings = []
        if "sampler_logprobs" in columns:
            settings.append(f"mismatch={self.cfg.mismatch}")
        if "old_logprobs" in columns and self.old_logprobs == "sampler":
            settings.append("old_logprobs=sampler")
        if kl_coef:
            settings.append(f"kl_coef={kl_coef:g}")
        return settings + super().logprobs_for()

    def check_training(self) -> None:
        """Check that the objective fits the steps, before weights are read; it may be a user's component.

        Raises:
            UserError: it needs other columns, its temperature is not the sampler's, or it has ``on_policy=True`` with
                several updates per step.
        """
        cfg, learner, loss = self.cfg, self.learner, self.learner.objective
        check_columns(loss, _COLUMNS)
        if cfg.router_replay:
            learner.decoder.replay_routes()
        if loss.temperature != cfg.temperature:
            raise UserError(
                f"loss computes log-probs at temperature {loss.temperature:g}, and temperature {cfg.temperature:g} "
                f"samples the answers; both must be equal: set loss.temperature={cfg.temperature:g}, or temperature"
            )
        updates = updates_of_step(cfg)
        if getattr(loss, "on_policy", False) and updates > 1:
            raise UserError(
                f"loss.on_policy is True, and a step has up to {updates} updates (updates_per_step, groups_per_update):"
                " after the first the answers are those of an earlier policy; set loss.on_policy=False"
            )
        self.old_logprobs = old_logprobs(cfg, learner.runtime.dtype)
        if "old_logprobs" in loss.columns and cfg.old_logprobs == "auto":
            how = "alike here, in fp32" if self.old_logprobs == "sampler" else "in other ways"
            log.info(
                "old_logprobs=%s, because sampler and trainer compute %s", self.old_logprobs, how
            )
        self.trainer_cls.try_out(learner.cfg, learner, cfg.steps * updates)

    # ---- a step

    def stop_reason(self) -> str | None:
        """Return why the run ends before its last step; a UserError if too many steps in a row taught nothing."""
        flat = evaluation.flat_reason(self.trainer.lines, max_flat_steps=self.cfg.max_flat_steps)
        if flat:
            self.stop_sampling()
            raise UserError(flat)
        return super().stop_reason()

    def report_gain(self) -> None:
        """Log the gain on the held-out prompts, and warn if nothing was trained."""
        super().report_gain()
        warning = evaluation.untrained_warning(self.trainer.lines)
        if warning and self.ranks.is_main:
            log.warning("%s", warning)

    def choose(self, step: int, count: int, exclude: Collection[str] = ()) -> list[Prompt]:
        """Choose the prompts of a step by the ``curriculum``; see :meth:`Loop.choose`."""
        ids = choose_by_curriculum(
            [prompt.id for prompt in self.prompts.training],
            self.records.asked,
            step,
            self.cfg.steps,
            count=count,
            curriculum=self.cfg.curriculum,
            seed=self.cfg.seed,
            exclude=exclude,
        )
        return [self.prompts[prompt] for prompt in ids]

    def more_prompts(
        self, step: int, rounds: int, selected: Selected, asked: Sequence[Prompt]
    ) -> list[Prompt]:
        """With ``refill``, choose further prompts until there are enough groups to train on."""
        cfg = self.cfg
        missing = cfg.prompts_per_step - selected.groups
        if not cfg.refill or rounds > cfg.max_refills or missing <= 0:
            return []
        useful = max(0.25, selected.groups / len(asked))
        count = min(cfg.prompts_per_step, round(missing / useful))
        already = {prompt.id for prompt in asked}
        return self.choose(step, count, exclude=already)

    def select(self, rounds: Sequence[Answers], asked: Sequence[str]) -> Selected:
        """Compare the rewards inside groups, and choose the answers to train on; see :meth:`Loop.select`."""
        kl_coef = self._kl_of_rewards
        logprobs = self.reference_logprobs(rounds) if kl_coef else None
        return select(rounds, asked, self.filled, logprobs, kl_coef)

    @property
    def _kl_of_rewards(self) -> float:
        """``kl_coef`` if rewards include the divergence, else 0."""
        loss = self.learner.objective
        if getattr(loss, "kl_in", None) != "reward":
            return 0.0
        return getattr(loss, "kl_coef", 0.0)

    def reference_logprobs(self, rounds: Sequence[Answers]) -> dict[SampleKey, np.ndarray]:
        """Compute the log-probs of all answers with a reward under the run's first adapter.

        Later rounds of a step only compute new answers.
        """
        if len(rounds) == 1:
            self._reference = {}
        logprobs = self._reference
        samples = []
        for key, sample in sorted(rounds[-1].samples.items()):
            if rounds[-1].results[key].reward is not None:
                samples.append(sample)
                logprobs[key] = np.zeros(len(sample.tokens))
        if not samples:
            return logprobs
        rows, pieces = to_rows(samples, self.prompts.tokens)
        with reference(self.learner, self.trainer.first, "the first adapter"):
            scores = score(self.learner, rows, self.cfg.temperature)
        for (sample, piece), values in zip(pieces, scores, strict=True):
            logprobs[sample.key][piece] = values
        return logprobs

    def rows(self, selected: Selected) -> tuple[Rows, list[str]]:
        """Convert the answers to train on to rows, with the objective's columns; see :meth:`Loop.rows`.

        Answers to one prompt are joined to rows where the model can compute their prompt once.
        """
        if self._kl_of_rewards and not selected.reference:
            raise UserError(
                "kl_in is 'reward', and this recipe's select() gives rewards no divergence; set kl_in=loss"
            )
        rows, groups = self._sampled_rows(selected)
        columns = self.learner.objective.columns
        if self.learner.shares:
            most = self._most_joined_tokens(rows, selected.groups)
            rows, groups = rows.join_groups(groups, most)
        temperature = self.cfg.temperature
        if "old_logprobs" in columns and self.old_logprobs != "sampler":
            old_logprobs = score(self.learner, rows, temperature, replay=self.cfg.router_replay)
            rows.add_labels_column("old_logprobs", old_logprobs)
        if REFERENCE in columns and not selected.reference:
            with reference(self.learner, self.trainer.first, "the first adapter"):
                rows.add_labels_column(REFERENCE, score(self.learner, rows, temperature))
        return rows, groups

    def _sampled_rows(self, selected: Selected) -> tuple[Rows, list[str]]:
        """Convert the answers to rows with the columns that sampling and selection know; return their prompts, too."""
        samples = selected.trained
        advantages = []
        for sample in samples:
            advantage = selected.advantages[sample.key]
            advantages.append([advantage] * len(sample.tokens))
        columns: dict[str, list[Any]] = {"advantages": advantages}
        logprobs = [sample.logprobs for sample in samples]
        lengths = [len(sample.tokens) for sample in samples]
        if list(map(len, logprobs)) == lengths:
            columns["sampler_logprobs"] = logprobs
            if "old_logprobs" in self.learner.objective.columns and self.old_logprobs == "sampler":
                columns["old_logprobs"] = logprobs
        if self.cfg.router_replay:
            columns[ROUTES] = [sample.chosen_experts() for sample in samples]
        if selected.reference:
            columns[REFERENCE] = [selected.reference[sample.key] for sample in samples]
        rows, pieces = to_rows(samples, self.prompts.tokens, **columns)
        if selected.answers:
            rows = replace(rows, trained_share=len(samples) / selected.answers)
        return rows, [sample.prompt_id for sample, _ in pieces]

    def _most_joined_tokens(self, rows: Rows, groups: int) -> float:
        """Return the most tokens of a row of joined answers, for a step that trains on so many ``groups``."""
        parts = updates_of_pass(self.cfg, groups) * self.ranks.world
        tokens_of_rank = sum(map(len, rows.tokens)) / parts
        most = float(self.learner.tokens_per_micro_batch)
        if self.ranks.world == 1 and tokens_of_rank <= most:
            return most
        # small rows fill ranks and micro-batches evenly
        return min(most, tokens_of_rank) / _ROWS_PER_MICRO_BATCH


@config.recipe_main("grpo_rocm")
def main(cfg: DictConfig) -> None:
    """GRPO: `tune run grpo_rocm --config NAME [key=value ...]`."""
    run(GRPO(cfg))


if __name__ == "__main__":
    main()
