"""What a step learns from: the answers of groups with unequal rewards, and their advantages."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from omegaconf import DictConfig

from rocm_ext.grpo import advantages
from rocm_ext.rollouts.phases import Phase
from rocm_ext.rollouts.samples import Sample, entropy
from rocm_ext.runs.reader import SampleKey
from rocm_ext.verifiers import Result, Verdict


@dataclass
class Selected:
    """The answers of a step.

    Attributes:
        samples: all answers, by prompt id and sample index, in this order.
        results: their verdicts.
        advantages: of the answers to train on.
        flat: prompts whose answers had equal rewards; nothing is learned from them.
        asked: prompts in the order in which they were asked.
        stats: costs of sampling; see :class:`rocm_ext.rollouts.phases.Phase`.
        length_share: see :func:`rocm_ext.grpo.advantages.length_share`.
    """

    samples: Mapping[SampleKey, Sample]
    results: Mapping[SampleKey, Result]
    advantages: Mapping[SampleKey, float]
    flat: set[str]
    asked: Sequence[str]
    stats: Mapping[str, float] = field(default_factory=dict)
    length_share: float | None = None

    @property
    def groups(self) -> int:
        """Number of groups with answers to train on."""
        return len({prompt for prompt, _ in self.advantages})

    @property
    def trained(self) -> list[Sample]:
        """The answers to train on."""
        return [self.samples[key] for key in self.advantages]

    def policy_lag(self, step: int) -> float:
        """Return how many steps the adapter that sampled was behind the one that ``step`` trains, as a mean."""
        return step - 1 - self.stats["policy"] / len(self.samples)

    def measurements(self) -> dict[str, Any]:
        """Compute the step's entry in ``metrics.jsonl``, without what training measures."""
        rewards = [result.reward for result in self.results.values() if result.reward is not None]
        verdicts = Counter(result.verdict for result in self.results.values())
        lengths = [len(sample.tokens) for sample in self.samples.values()]
        groups = len(self.asked)
        return {
            "answers": len(self.samples),
            "sampled_tokens": sum(lengths),
            "sample_seconds": self.stats.get("seconds", 0.0),
            "wait_seconds": self.stats.get("waiting", 0.0),
            "hidden_seconds": self.stats.get("hidden", 0.0),
            "reward": fmean(rewards) if rewards else None,
            "reward_std": pstdev(rewards) if rewards else None,
            "right": verdicts[Verdict.CORRECT] / max(1, len(self.results)),
            "errors": verdicts[Verdict.ERROR],
            "flat": len(self.flat) / max(1, groups),
            "groups": groups,
            "trained_groups": self.groups,
            "mean_tokens": fmean(lengths) if lengths else None,
            "truncated": fmean(sample.finish_reason == "length" for sample in self.samples.values()),
            "entropy": entropy(self.samples.values()),
            "length_share": self.length_share,
        }


def select(phases: Sequence[Phase], asked: Sequence[str], cfg: DictConfig) -> Selected:
    """Compare the rewards of each group, and choose the answers to train on.

    An answer with the verdict ERROR has no reward: it is neither compared nor trained on. Truncated answers count in
    their group's mean; ``truncated: mask`` does not train on them. Of more groups than a step needs, the first are
    taken.

    Args:
        phases: the rounds of the step's sampling.
        asked: ids of their prompts, in order.
        cfg: config of ``grpo_rocm``.
    """
    samples = {key: sample for phase in phases for key, sample in phase.samples.items()}
    samples = {key: samples[key] for key in sorted(samples)}  # ranks have them in different orders
    results = {key: result for phase in phases for key, result in phase.results.items()}
    results = {key: results[key] for key in samples}
    rewards = advantages.rewards(
        samples,
        results,
        truncated=cfg.truncated,
        penalty=cfg.truncation_penalty,
        margin=cfg.truncation_margin,
        max_new_tokens=cfg.max_new_tokens,
    )
    compared = {prompt for prompt, _ in rewards}
    flat = advantages.flat(rewards) | {prompt for prompt in asked if prompt not in compared}
    values = advantages.advantages(rewards, center=cfg.center, scale=cfg.scale)
    masked = {key for key, sample in samples.items() if cfg.truncated == "mask" and sample.finish_reason == "length"}
    trainable = {key: value for key, value in values.items() if key[0] not in flat and key not in masked}
    useful = {prompt for prompt, _ in trainable}
    wanted = set([prompt for prompt in asked if prompt in useful][: cfg.prompts_per_step])
    return Selected(
        samples,
        results,
        {key: trainable[key] for key in samples if key in trainable and key[0] in wanted},
        flat,
        asked,
        _summed([phase.stats for phase in phases]),
        advantages.length_share(rewards, {key: len(sample.tokens) for key, sample in samples.items()}),
    )


def _summed(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = ("tokens", "seconds", "waiting", "hidden", "policy")
    return {name: sum(each.get(name, 0.0) for each in stats) for name in names}
