"""What a step or cycle learns from: RAFT keeps right answers, GRPO compares those of a group.

Both selections are pure functions of the results, and so are the rows. They do not depend on the order of files: a hash
of the seed breaks ties.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

import numpy as np
from omegaconf import DictConfig

from rocm_ext.data.render import IGNORE
from rocm_ext.data.rows import Rows
from rocm_ext.rl import advantages
from rocm_ext.rl.records import Sample, entropy
from rocm_ext.rl.rollout import Answers
from rocm_ext.runs.folder import SampleKey
from rocm_ext.sampling import sample_seed
from rocm_ext.verifiers import Result, Verdict


@dataclass(frozen=True)
class KeepRule:
    """What an answer needs to pass: to be kept for training, and to count for its prompt's pass rate.

    Attributes:
        keep: ``correct``: the verdict CORRECT and the reward; ``rewarded``: the reward alone.
        threshold: minimum reward.
    """

    keep: str
    threshold: float

    def missed(self, result: Result) -> str:
        """Return the name of the rule that drops an answer with this result; "" if the answer passes."""
        if result.reward is None:
            return "without_reward"
        if result.reward < self.threshold:
            return "below_threshold"
        return "not_correct" if self.keep == "correct" and result.verdict is not Verdict.CORRECT else ""


def filter_samples(
    samples: Mapping[SampleKey, Sample],
    results: Mapping[SampleKey, Result],
    *,
    rule: KeepRule,
    per_prompt: int | None,
    best_fraction: float,
    deduplicate: bool,
    drop_truncated: bool,
    seed: int,
) -> tuple[list[Sample], dict[str, int]]:
    """Select the samples to train on.

    Args:
        samples: samples by prompt id and sample index.
        results: verdicts under the same keys. A sample without a reward (ERROR) is always dropped.
        rule: what an answer needs to be kept.
        per_prompt: keep at most this many samples of a prompt; None: no limit.
        best_fraction: keep this share of a prompt's samples, those with the highest rewards, and at least one. It
            applies after all other rules except ``per_prompt``.
        deduplicate: keep one of a prompt's samples with the same tokens.
        drop_truncated: drop answers that ``max_new_tokens`` cut off.
        seed: breaks ties between equal rewards.

    Returns:
        The kept samples, ordered by prompt id and index, and the number of samples that each rule dropped, with the
        number of kept ones as ``kept``.
    """
    dropped: Counter[str] = Counter()
    by_prompt: dict[str, list[Sample]] = {}
    for key, sample in samples.items():
        if missed := rule.missed(results[key]):
            dropped[missed] += 1
        elif drop_truncated and sample.finish_reason == "length":
            dropped["truncated"] += 1
        elif not sample.tokens:  # of a server: there is nothing to train on
            dropped["empty"] += 1
        else:
            by_prompt.setdefault(sample.prompt_id, []).append(sample)

    def rank(sample: Sample) -> tuple[float, int]:
        reward = results[sample.key].reward or 0.0
        return -reward, sample_seed(seed, "ties", sample.prompt_id, sample.sample)

    kept: list[Sample] = []
    for group in by_prompt.values():
        left = sorted(group, key=rank)
        if deduplicate:
            unique = {tuple(sample.tokens): sample for sample in reversed(left)}
            dropped["duplicate"] += len(left) - len(unique)
            left = sorted(unique.values(), key=rank)
        for reason, most in (
            ("not_among_best", max(1, math.ceil(best_fraction * len(left) - 1e-9))),
            ("over_cap", len(left) if per_prompt is None else per_prompt),
        ):
            dropped[reason] += max(0, len(left) - most)
            left = left[:most]
        kept += left
    kept.sort(key=lambda sample: sample.key)
    return kept, {**{reason: count for reason, count in dropped.items() if count}, "kept": len(kept)}


def replay(
    kept: Sequence[Sample], earlier: Sequence[Sequence[Sample]], *, per_prompt: int | None, deduplicate: bool
) -> list[Sample]:
    """Return the answers of earlier cycles that a cycle trains on in addition to its own.

    STaR (arXiv:2203.14465) and ReST-EM (arXiv:2312.06585) train the initial model on the newest answers alone, but ask
    every prompt each time. Cycles that ask a part of the prompts, or skip solved ones, would forget the rest; V-STaR
    (arXiv:2402.06457) adds up the answers of all iterations, as this does.

    Args:
        kept: the cycle's own answers.
        earlier: kept answers of the cycles before it, oldest first; newer answers go first.
        per_prompt: limit of a prompt's answers of all cycles together; None: no limit.
        deduplicate: leave out a prompt's answers with the same tokens as a newer one.
    """
    seen = {(sample.prompt_id, tuple(sample.tokens)) for sample in kept}
    of_prompt = Counter(sample.prompt_id for sample in kept)
    replayed = []
    for sample in (sample for cycle in reversed(earlier) for sample in cycle):
        key = sample.prompt_id, tuple(sample.tokens)
        full = per_prompt is not None and of_prompt[sample.prompt_id] >= per_prompt
        if not full and not (deduplicate and key in seen):
            seen.add(key)
            of_prompt[sample.prompt_id] += 1
            replayed.append(sample)
    return replayed


@dataclass
class Selected:
    """The answers of a step.

    Attributes:
        samples: all answers, by prompt id and sample index, in this order.
        results: their verdicts.
        advantages: of the answers to train on.
        flat: prompts whose answers had equal rewards; nothing is learned from them.
        asked: prompts in the order in which they were asked.
        stats: costs of sampling; see :class:`rocm_ext.rl.rollout.Answers`.
        length_share: see :func:`rocm_ext.rl.advantages.length_share`.
        dropped: number of answers that each rule of :func:`filter_samples` dropped, and of those ``kept``.
    """

    samples: Mapping[SampleKey, Sample]
    results: Mapping[SampleKey, Result]
    advantages: Mapping[SampleKey, float]
    flat: set[str]
    asked: Sequence[str]
    stats: Mapping[str, float] = field(default_factory=dict)
    length_share: float | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)

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


def select(rounds: Sequence[Answers], asked: Sequence[str], cfg: DictConfig) -> Selected:
    """Compare the rewards of each group, and choose the answers to train on.

    An answer with the verdict ERROR has no reward: it is neither compared nor trained on. Truncated answers count in
    their group's mean; ``truncated: mask`` does not train on them. Of more groups than a step needs, the first are
    taken.

    Args:
        rounds: the rounds of the step's sampling.
        asked: ids of their prompts, in order.
        cfg: config of ``grpo_rocm``.
    """
    samples = {key: sample for answers in rounds for key, sample in answers.samples.items()}
    samples = {key: samples[key] for key in sorted(samples)}  # ranks have them in different orders
    results = {key: result for answers in rounds for key, result in answers.results.items()}
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
        _summed([answers.stats for answers in rounds]),
        advantages.length_share(rewards, {key: len(sample.tokens) for key, sample in samples.items()}),
    )


def _summed(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = ("tokens", "seconds", "waiting", "hidden", "policy")
    return {name: sum(each.get(name, 0.0) for each in stats) for name in names}


def to_rows(samples: Sequence[Sample], prompts: Mapping[str, Sequence[int]]) -> Rows:
    """Convert samples to training rows: the tokens of prompt and answer as sampled, with labels on the answer only.

    Args:
        samples: samples to train on.
        prompts: token ids of each prompt, by id.
    """
    rows = Rows([], [], [], {"rows": len(samples)})
    for sample in samples:
        prompt = prompts[sample.prompt_id]
        tokens = np.array([*prompt, *sample.tokens], dtype=np.int32)
        labels = tokens.copy()
        labels[: len(prompt)] = IGNORE
        rows.tokens.append(tokens)
        rows.labels.append(labels)
        rows.lengths.append((len(tokens),))
    return rows
