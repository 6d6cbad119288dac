"""RAFT on 1…N ranks: sample answers, verify them, keep the correct ones, train on those, repeat (arXiv:2304.06767).

    tune run raft_rocm --config strix_halo_qwen7b_raft
    tune run --nproc_per_node 8 raft_rocm --config mi300x_qwen7b_raft_8gpu

:class:`rocm_ext.rl.loop.Loop` has the steps, which RAFT calls cycles. ``cycle_k/`` has a cycle's outputs:
``kept.jsonl``, ``metrics.jsonl`` of its training and ``adapter/``. Cycle 0 is the evaluation before any training. A
cycle that keeps no answer is skipped.

To change a part, subclass :class:`RAFT` and override :meth:`RAFT.choose`, :meth:`RAFT.select`, :meth:`RAFT.rows` or
:meth:`RAFT.training_config`.
"""

from collections.abc import Collection, Sequence

from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.base.log import log
from rocm_ext.config.checks import check_sampled_values
from rocm_ext.data.prompts import Prompt
from rocm_ext.data.rows import Rows
from rocm_ext.losses import check_columns
from rocm_ext.plan import workload
from rocm_ext.rl.cycles import CycleTrainer, cycle_entries, cycle_stop_reason
from rocm_ext.rl.loop import Loop
from rocm_ext.rl.prompts import choose_unsolved
from rocm_ext.rl.records import Sample
from rocm_ext.rl.rollout import Answers
from rocm_ext.rl.selection import KeepRule, Selected, filter_samples, replay, to_rows
from rocm_ext.sampling import sample_seed
from rocm_ext.train.learner import Learner
from rocm_ext.train.lifecycle import run
from rocm_ext.verifiers import Result


class RAFT(Loop):
    """Trains an adapter on the model's verified answers; see :class:`Loop`."""

    unit = "cycle"
    trainer: CycleTrainer

    def __init__(
        self, cfg: DictConfig, learner: type[Learner] = Learner, trainer: type[CycleTrainer] = CycleTrainer
    ) -> None:
        check_sampled_values(cfg, "raft_rocm")
        super().__init__(cfg, learner, trainer)
        self.samples_new_adapters = cfg.cycles > 1
        self._rule = KeepRule(cfg.keep, cfg.reward_threshold)

    # ---- set-up

    def training_config(self) -> DictConfig:
        """Return the config of the learner; the key ``objective`` determines its ``loss``."""
        trainer = config.trainer_config(self.cfg)
        if self.cfg.objective == "raft++":
            ratio = {"loss": "dapo", "clip_high": self.cfg.clip_high, "on_policy": False}
            trainer["loss"] = trainer["loss"] | {config.COMPONENT: "rocm_ext.losses.PolicyGradient", **ratio}
        return OmegaConf.create(trainer)

    def logprobs_for(self) -> list[str]:
        """Return the settings that need the token ids and log-probs of sampling."""
        loss = self.learner.objective
        needs = [f"loss {type(loss).__name__}"] if "old_logprobs" in loss.columns else []
        return needs + super().logprobs_for()

    def check_training(self) -> None:
        """Check that the learner fits the training, before the weights are read."""
        cfg, learner = self.cfg, self.learner
        check_columns(learner.objective, ("advantages", "old_logprobs"))
        if "old_logprobs" in learner.objective.columns and (
            cfg.replay_cycles or (cfg.replay_cycles is None and cfg.start_from == "base")
        ):
            log.warning(
                "replay_cycles: the log-probs of replayed answers are those of older adapters. Many of their tokens "
                "are outside the clipping range from the start and then teach nothing"
            )
        self.trainer_cls.try_out(learner.cfg, learner, cfg.epochs)  # how many rows a cycle keeps is not known yet

    def expected_work(self) -> workload.Workload:
        """Estimate the rows that the cycles will train on, before any sampling."""
        return workload.kept_rows(self.cfg, self.prompts.questions())

    def setup(self) -> None:
        """Prepare the run; see :meth:`Loop.setup`."""
        super().setup()
        self.kept: dict[int, list[Sample]] = self.records.samples(self.trainer.kept)

    # ---- a cycle

    def passes(self, result: Result) -> bool:
        """Return whether an answer is good enough to be kept."""
        return not self._rule.missed(result)

    def choose(self, step: int, count: int, exclude: Collection[str] = ()) -> list[Prompt]:
        """Choose the prompts that a cycle asks."""
        asked = self.records.asked.items()
        rates = {prompt: [(cycle, rate) for cycle, rate in of if rate is not None] for prompt, of in asked}
        chosen = choose_unsolved(
            [prompt.id for prompt in self.prompts.training],
            {prompt: of[-1] for prompt, of in rates.items() if of},
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
        cfg, (answers,) = self.cfg, rounds
        kept, dropped = filter_samples(
            answers.samples,
            answers.results,
            rule=self._rule,
            per_prompt=cfg.max_per_prompt,
            best_fraction=cfg.best_fraction,
            deduplicate=cfg.deduplicate,
            drop_truncated=cfg.drop_truncated,
            seed=sample_seed(cfg.seed, self.trainer.step + 1, "filter", 0),
        )
        worth = {sample.key: 1.0 for sample in kept}
        return Selected(answers.samples, answers.results, worth, set(), asked, answers.stats, dropped=dropped)

    def finish_sampling(self, step: int, selected: Selected) -> None:
        """Write the kept answers, for people; a resumed run selects again."""
        self.trainer.write_selection(selected, self.passes, self.prompts.tokens)

    def rows(self, selected: Selected) -> tuple[Rows, list[str]]:
        """Convert the kept and the replayed answers to rows."""
        cfg, kept = self.cfg, selected.trained
        self.kept = {cycle: self.kept[cycle] for cycle in self.trainer.kept}
        earlier = list(self.kept.values())
        replayed = replay(kept, earlier, per_prompt=cfg.max_per_prompt, deduplicate=cfg.deduplicate)
        if replayed:
            log.info("cycle %d: also trains on %d answers of earlier cycles", self.trainer.step + 1, len(replayed))
        if self.trainer.replayed:
            self.kept[self.trainer.step + 1] = kept
        samples = [*kept, *replayed]
        rows, parts = to_rows(samples, self.prompts.tokens)
        columns = self.learner.objective.columns
        if "old_logprobs" in columns:
            rows.add_labels_column("old_logprobs", [samples[i].logprobs[part] for i, part in parts])
        if "advantages" in columns:
            rows.add_labels_column("advantages", [[1.0] * (part.stop - part.start) for _, part in parts])
        return rows, [samples[i].prompt_id for i, _ in parts]

    def stop_reason(self) -> str | None:
        """Return why the run ends before its last cycle; None to continue."""
        cfg, step = self.cfg, self.trainer.step + 1
        reason = cycle_stop_reason(cycle_entries(self.trainer.lines), cfg)
        if reason is None and not self.choose(step, self.prompts_of_step):
            asked_of = len(self.prompts.training)
            reason = f"none of {asked_of} prompts qualifies for cycle {step} (skip_solved, retry_unsolved_after)"
        return reason


@config.recipe_main("raft_rocm")
def main(cfg: DictConfig) -> None:
    """RAFT: `tune run raft_rocm --config NAME [key=value ...]`."""
    run(RAFT(cfg))


if __name__ == "__main__":
    main()
