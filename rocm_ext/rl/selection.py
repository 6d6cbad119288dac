"""The answers that a step trains on, and their rows: RAFT keeps right answers, GRPO compares the answers of a group.

These are pure functions of the results. A hash of the seed breaks ties, so the order of files does not matter. The key
of an answer is its prompt's id and its index.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import copysign, fsum, sqrt
from operator import mul
from statistics import fmean, pstdev
from typing import Any

import numpy as np
from omegaconf import DictConfig

from rocm_ext.base.types import Json
from rocm_ext.data.render import IGNORE
from rocm_ext.data.rows import Rows
from rocm_ext.rl.records import Sample, measure
from rocm_ext.rl.rollout import Answers
from rocm_ext.runs.records import SampleKey
from rocm_ext.sampling import sample_seed
from rocm_ext.verifiers import Result, Verdict

# added to the standard deviation that advantages are divided by, as in TRL's GRPOTrainer
EPSILON = 1e-4
EQUAL = 1e-8  # rewards closer than this are equal: weighted means of the same parts differ in the last bits


def missed_rule(result: Result, keep: str, threshold: float) -> str:
    """Return the rule that drops an answer with this result; empty if it is kept and counts as passed.

    Args:
        result: the answer's verdict.
        keep: ``correct``: the verdict CORRECT and the reward count; ``rewarded``: the reward alone.
        threshold: minimum reward.
    """
    if result.reward is None:
        return "without_reward"
    if result.reward < threshold:
        return "below_threshold"
    if keep == "correct" and result.verdict is not Verdict.CORRECT:
        return "not_correct"
    return ""


def filter_samples(
    samples: Mapping[SampleKey, Sample],
    results: Mapping[SampleKey, Result],
    *,
    keep: str,
    threshold: float,
    per_prompt: int | None,
    best_fraction: float,
    deduplicate: bool,
    drop_truncated: bool,
    seed: int,
) -> tuple[list[Sample], dict[str, int]]:
    """Select the samples to train on. A sample without a reward (ERROR) is always dropped.

    Args:
        samples: samples by prompt id and sample index.
        results: verdicts under the same keys.
        keep, threshold: see :func:`missed_rule`.
        per_prompt: keep at most this many samples of a prompt. None for no limit.
        best_fraction: keep this share of a prompt's samples by highest reward, and at least one. It applies after all
            other rules except ``per_prompt``.
        deduplicate: keep one of a prompt's samples with the same tokens.
        drop_truncated: drop answers that ``max_new_tokens`` cut off.
        seed: breaks ties between equal rewards.

    Returns:
        The kept samples, ordered by prompt id and index; and by rule the number of dropped samples, with ``kept``.
    """
    dropped: Counter[str] = Counter()
    by_prompt: dict[str, list[Sample]] = {}
    for key, sample in samples.items():
        missed = missed_rule(results[key], keep, threshold)
        if missed:
            dropped[missed] += 1
        elif drop_truncated and sample.finish_reason == "length":
            dropped["truncated"] += 1
        elif not sample.tokens:  # a server's answer may be empty: there is nothing to train on
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
        count = math.ceil(best_fraction * len(left) - 1e-9)
        best = left[: max(1, count)]
        dropped["not_among_best"] += len(left) - len(best)
        allowed = best[:per_prompt]
        dropped["over_cap"] += len(best) - len(allowed)
        kept += allowed
    kept.sort(key=lambda sample: sample.key)
    fates = {rule: count for rule, count in dropped.items() if count}
    return kept, fates | {"kept": len(kept)}


def replay(
    kept: Sequence[Sample],
    earlier: Sequence[Sequence[Sample]],
    *,
    per_prompt: int | None,
    deduplicate: bool,
) -> list[Sample]:
    """Return the answers of earlier cycles that a cycle trains on again.

    STaR (arXiv:2203.14465) and ReST-EM (arXiv:2312.06585) train the initial model on the newest answers alone, but ask
    every prompt every time. Cycles that ask a part of the prompts, or skip solved ones, would forget the rest; V-STaR
    (arXiv:2402.06457) adds up the answers of all iterations, as this does.

    Args:
        kept: the cycle's answers.
        earlier: kept answers of the cycles before it, oldest first; newer answers go first.
        per_prompt: limit of a prompt's answers of all cycles together. None for no limit.
        deduplicate: leave out a prompt's answers with the same tokens as a newer one.
    """
    seen = {(sample.prompt_id, tuple(sample.tokens)) for sample in kept}
    of_prompt = Counter(sample.prompt_id for sample in kept)
    replayed = []
    for sample in chain.from_iterable(reversed(earlier)):
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
        flat: prompts that teach nothing, because no answer has an advantage.
        asked: prompts in the order of the requests.
        stats: costs of sampling; see :class:`rocm_ext.rl.rollout.Answers`.
        length_share: see :func:`length_share`.
        answers: denominator of a loss's mean over answers: all answers with a reward; with ``refill``, which replaces
            flat groups, only of trained groups. 0 stands for the number of trained answers.
        reference: log-probs of the answers' tokens under the reference, if their rewards have a KL divergence.
        more: further values for the step's line of ``metrics.jsonl``.
    """

    samples: Mapping[SampleKey, Sample]
    results: Mapping[SampleKey, Result]
    advantages: Mapping[SampleKey, float]
    flat: set[str]
    asked: Sequence[str]
    stats: Mapping[str, float] = field(default_factory=dict)
    length_share: float | None = None
    answers: int = 0
    reference: Mapping[SampleKey, np.ndarray] = field(default_factory=dict)
    more: Json = field(default_factory=dict)

    @property
    def groups(self) -> int:
        """Number of groups with answers to train on."""
        return len({prompt for prompt, _ in self.advantages})

    @property
    def trained(self) -> list[Sample]:
        """The answers to train on."""
        return [self.samples[key] for key in self.advantages]

    def policy_lag(self, adapter_step: int) -> float:
        """Return the mean number of steps between the answers' adapters and the adapter of ``adapter_step``."""
        return adapter_step - self.stats["policy"] / len(self.samples)

    def measurements(self) -> Json:
        """Compute the step's entry in ``metrics.jsonl``, without the measurements of training."""
        results = self.results.values()
        samples = self.samples.values()
        rewards = [result.reward for result in results if result.reward is not None]
        verdicts = Counter(result.verdict for result in results)
        groups = len(self.asked)
        return {
            "answers": len(samples),
            "sampled_tokens": sum(len(sample.tokens) for sample in samples),
            "sample_seconds": self.stats.get("seconds", 0.0),
            "wait_seconds": self.stats.get("waiting", 0.0),
            "hidden_seconds": self.stats.get("hidden", 0.0),
            "reward": fmean(rewards) if rewards else None,
            "reward_std": pstdev(rewards) if rewards else None,
            "right": verdicts[Verdict.CORRECT] / len(results) if results else None,
            "errors": verdicts[Verdict.ERROR],
            "flat": len(self.flat) / max(1, groups),
            "groups": groups,
            "trained_groups": self.groups,
            "truncated": fmean(sample.finish_reason == "length" for sample in samples),
            "length_share": self.length_share,
            **measure(self.samples, self.results),
            **self._of_conversations(),
            **self.more,
        }

    def _of_conversations(self) -> dict[str, float]:
        """Return the mean number of the model's messages, and the share of histories that a template rewrote."""
        turns = []
        rewritten = []
        for sample in self.samples.values():
            if sample.messages is not None:
                later = [fresh for before, _, fresh in sample.given or () if before]
                turns.append(1 + len(later))
                rewritten.append(any(later))
        if not turns:
            return {}
        return {"turns": fmean(turns), "rewritten": fmean(rewritten)}


def select(
    rounds: Sequence[Answers],
    asked: Sequence[str],
    cfg: DictConfig,
    reference: Mapping[SampleKey, np.ndarray] | None = None,
    kl_coef: float = 0.0,
) -> Selected:
    """Compare the rewards inside groups, and choose the answers to train on.

    An answer with the verdict ERROR has no reward: it is neither compared nor trained on. Truncated answers count in
    their group's mean; ``truncated: mask`` does not train on them. ``negative_weight: 0`` trains on positive advantages
    alone. Of more groups than a step needs, the first are taken.

    Args:
        rounds: the rounds of the step's sampling.
        asked: ids of their prompts, in order.
        cfg: config of ``grpo_rocm``.
        reference: log-probs of all answers' tokens under the reference. None if rewards have no KL divergence.
        kl_coef: weight of an answer's KL divergence, which is subtracted from its reward: centred as rewards are, and
            not scaled. The estimate (k1) is the sampled log-prob minus the reference's, as in RLOO (arXiv:2402.14740).
    """
    samples: dict[SampleKey, Sample] = {}
    results: dict[SampleKey, Result] = {}
    for answers in rounds:
        samples |= answers.samples
        results |= answers.results
    samples = {key: samples[key] for key in sorted(samples)}  # ranks have them in different orders
    results = {key: results[key] for key in samples}
    rewards = shaped_rewards(samples, results, cfg)
    values = advantages(rewards, center=cfg.center, scale=cfg.scale)
    if reference:
        penalties = {}
        for key in rewards:
            divergence = fsum(samples[key].logprobs) - fsum(reference[key])
            penalties[key] = -kl_coef * divergence
        penalties = advantages(penalties, cfg.center, "none")
        values = {key: value + penalties[key] for key, value in values.items()}
    taught = set()  # prompts
    for key, value in values.items():
        if value <= 0:
            values[key] = cfg.negative_weight * value
        if values[key]:
            taught.add(key[0])
    trainable = {}
    for key, value in values.items():
        masked = cfg.truncated == "mask" and samples[key].finish_reason == "length"
        counts = value > 0 or cfg.negative_weight
        if key[0] in taught and counts and not masked:
            trainable[key] = value
    useful = {prompt for prompt, _ in trainable}
    in_order = [prompt for prompt in asked if prompt in useful]
    chosen = set(in_order[: cfg.prompts_per_step])
    stats = {}
    for name in ("tokens", "seconds", "waiting", "hidden", "policy"):
        stats[name] = sum(answers.stats.get(name, 0.0) for answers in rounds)
    lengths = {key: len(sample.tokens) for key, sample in samples.items()}
    return Selected(
        samples,
        results,
        advantages={key: value for key, value in trainable.items() if key[0] in chosen},
        flat=set(asked) - taught,
        asked=asked,
        stats=stats,
        length_share=length_share(rewards, lengths),
        answers=sum(prompt in chosen or not cfg.refill for prompt, _ in rewards),
        reference=reference or {},
    )


# ---- rewards and advantages; the answers to one prompt are a group


def shaped_rewards(
    samples: Mapping[SampleKey, Sample], results: Mapping[SampleKey, Result], cfg: DictConfig
) -> dict[SampleKey, float]:
    """Return the rewards of a step's answers. Answers without a reward (verdict ERROR) are left out.

    ``truncated: penalize`` subtracts ``truncation_penalty`` from the reward of an answer that ``max_new_tokens`` cut.
    Over the last ``truncation_margin`` tokens before that, the penalty grows linearly from 0, also for answers that
    ended by themselves: the soft overlong punishment of DAPO (arXiv:2503.14476, equation 13).
    """
    rewards = {key: result.reward for key, result in results.items() if result.reward is not None}
    if cfg.truncated != "penalize":
        return rewards
    margin = cfg.truncation_margin
    for key in rewards:
        over = len(samples[key].tokens) - (cfg.max_new_tokens - margin)
        share = 0.0
        if samples[key].finish_reason == "length":
            share = 1.0
        elif margin and over > 0:
            share = min(1.0, over / margin)
        rewards[key] -= cfg.truncation_penalty * share
    return rewards


def by_prompt(rewards: Mapping[SampleKey, float]) -> dict[str, dict[SampleKey, float]]:
    """Return the rewards of each prompt's group."""
    groups: dict[str, dict[SampleKey, float]] = defaultdict(dict)
    for key, reward in rewards.items():
        groups[key[0]][key] = reward
    return groups


def advantages(
    rewards: Mapping[SampleKey, float], center: str, scale: str
) -> dict[SampleKey, float]:
    """Return the answers' advantages.

    Where rewards are compared inside groups, a group's advantages add up to 0, and are 0 if its rewards are equal.

    Args:
        rewards: all rewards of the step, with groups of equal rewards.
        center: the baseline of a reward. ``mean``: the mean of its group, as in GRPO (arXiv:2402.03300);
            ``leave_one_out``: the mean of the group's other rewards, as in RLOO (arXiv:2402.14740); ``batch``: the
            mean of the step, as in REINFORCE++ (arXiv:2501.03262); ``none``: 0.
        scale: the divisor of the difference. ``std``: the sample standard deviation of the group's rewards;
            ``batch``: of all rewards of the step; both as in TRL's GRPOTrainer. ``none``: nothing, as in Dr. GRPO
            (arXiv:2503.20783).
    """
    values: dict[SampleKey, float] = {}
    of_step = _deviation(rewards) if scale == "batch" else 0.0
    mean_of_step = fsum(rewards.values()) / max(1, len(rewards))
    for group in by_prompt(rewards).values():
        count = len(group)
        mean = fsum(group.values()) / count
        baselines = {"mean": mean, "leave_one_out": mean, "batch": mean_of_step, "none": 0.0}
        baseline = baselines[center]
        if _equal(group) and abs(mean - baseline) <= EQUAL:
            values |= dict.fromkeys(group, 0.0)
            continue
        # a reward minus the mean of the others is this factor times the reward minus the mean of all
        factor = count / (count - 1) if center == "leave_one_out" else 1.0
        if scale != "none":
            deviation = of_step if scale == "batch" else _deviation(group)
            factor /= deviation + EPSILON
        values |= {key: factor * (reward - baseline) for key, reward in group.items()}
    return values


def length_share(
    rewards: Mapping[SampleKey, float], lengths: Mapping[SampleKey, int]
) -> float | None:
    """Return the share of the rewards' variance inside groups that a linear function of the length explains.

    It is the squared correlation of rewards and lengths, both minus the mean of their group, over all groups that are
    not flat, with the sign of the correlation.

    Returns:
        The share: above 0 where longer answers have higher rewards, below 0 where shorter ones have; None if all groups
        are flat.
    """
    covariance = of_rewards = of_lengths = 0.0
    for group in by_prompt(rewards).values():
        if _equal(group):
            continue
        mean_reward = fsum(group.values()) / len(group)
        mean_length = sum(lengths[key] for key in group) / len(group)
        centred_rewards = [reward - mean_reward for reward in group.values()]
        centred_lengths = [lengths[key] - mean_length for key in group]
        covariance += fsum(map(mul, centred_rewards, centred_lengths))
        of_rewards += fsum(map(mul, centred_rewards, centred_rewards))
        of_lengths += fsum(map(mul, centred_lengths, centred_lengths))
    if not of_rewards:
        return None
    if not of_lengths:
        return 0.0
    share = min(1.0, covariance**2 / (of_rewards * of_lengths))
    return copysign(share, covariance)


def _equal(group: Mapping[SampleKey, float]) -> bool:
    return max(group.values()) - min(group.values()) <= EQUAL


def _deviation(rewards: Mapping[SampleKey, float]) -> float:
    """Return the sample standard deviation; 0 for fewer than two rewards."""
    if len(rewards) < 2:
        return 0.0
    mean = fsum(rewards.values()) / len(rewards)
    squares = [(reward - mean) ** 2 for reward in rewards.values()]
    return sqrt(fsum(squares) / (len(rewards) - 1))


# ---- rows


def to_rows(
    samples: Sequence[Sample], prompts: Mapping[str, Sequence[int]], **columns: Sequence[Any]
) -> tuple[Rows, list[tuple[Sample, slice]]]:
    """Convert samples to training rows: the tokens of prompt and answer, with labels on the sampled ones.

    A conversation whose history the chat template rewrote gives several rows.

    Args:
        samples: the samples.
        prompts: the prompts' tokens, by id.
        columns: columns of the rows: by sample, a value for each of its tokens.

    Returns:
        The rows; and per row its sample and the slice of the sample's tokens.
    """
    rows = Rows([], [], [], {"rows": len(samples)})
    pieces = []
    by_row: dict[str, list[Any]] = {name: [] for name in columns}
    for number, sample in enumerate(samples):
        for ids, sampled, piece in sample.sequences(prompts[sample.prompt_id]):
            tokens = np.array(ids, dtype=np.int32)
            labels = np.where(sampled, tokens, IGNORE)
            rows.tokens.append(tokens)
            rows.labels.append(labels.astype(np.int32))
            rows.lengths.append((len(tokens),))
            pieces.append((sample, piece))
            for name, values in columns.items():
                by_row[name].append(values[number][piece])
    for name, parts in by_row.items():
        rows.add_labels_column(name, parts)
    return rows, pieces
