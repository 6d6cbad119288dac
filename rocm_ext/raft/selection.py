"""What is trained on and what is asked next: two pure functions of what was measured.

Neither depends on the order of files: ties are broken by a hash of the seed.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from rocm_ext.data.render import IGNORE
from rocm_ext.data.rows import Rows
from rocm_ext.generation import sample_seed
from rocm_ext.raft.rollouts import Key, Sample
from rocm_ext.verifiers import Result


def filter_samples(
    samples: Mapping[Key, Sample],
    results: Mapping[Key, Result],
    *,
    threshold: float,
    per_prompt: int | None,
    best_fraction: float,
    deduplicate: bool,
    drop_truncated: bool,
    seed: int,
) -> tuple[list[Sample], dict[str, int]]:
    """The samples to train on.

    Args:
        samples, results: by the same keys. A result without a reward (ERROR) is never kept.
        threshold: least reward.
        per_prompt: most samples of a prompt; None: any number.
        best_fraction: of a prompt's samples that are left by then, the share with the highest rewards; at
            least one.
        deduplicate: keep one of a prompt's samples that have the same tokens.
        drop_truncated: drop answers that ``max_new_tokens`` cut off.
        seed: decides between equals.

    Returns:
        the kept samples, ordered by prompt id and index, and how many each rule dropped, with ``kept``.
    """
    dropped: Counter[str] = Counter()
    by_prompt: dict[str, list[Sample]] = {}
    for key, sample in samples.items():
        reward = results[key].reward
        if reward is None:
            dropped["without_reward"] += 1
        elif reward < threshold:
            dropped["below_threshold"] += 1
        elif drop_truncated and sample.finish_reason == "length":
            dropped["truncated"] += 1
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
        for rule, most in (
            ("not_among_best", max(1, math.ceil(best_fraction * len(left) - 1e-9))),
            ("over_cap", len(left) if per_prompt is None else per_prompt),
        ):
            dropped[rule] += max(0, len(left) - most)
            left = left[:most]
        kept += left
    kept.sort(key=lambda sample: sample.key)
    return kept, {**{rule: count for rule, count in dropped.items() if count}, "kept": len(kept)}


def to_rows(kept: Sequence[Sample], prompts: Mapping[str, Sequence[int]], with_logprobs: bool) -> Rows:
    """Rows to train on: prompt and answer as they were sampled, the loss on the answer alone.

    Args:
        kept: samples.
        prompts: token ids of each prompt, by id.
        with_logprobs: the objective needs the log-probs of sampling.
    """
    rows = Rows([], [], [], {"rows": len(kept)}, [] if with_logprobs else None)
    for sample in kept:
        prompt = prompts[sample.prompt_id]
        tokens = np.array([*prompt, *sample.tokens], dtype=np.int32)
        labels = tokens.copy()
        labels[: len(prompt)] = IGNORE
        rows.tokens.append(tokens)
        rows.labels.append(labels)
        rows.lengths.append((len(tokens),))
        if rows.logprobs is not None:
            rows.logprobs.append(np.array([*[0.0] * len(prompt), *sample.logprobs], dtype=np.float32))
    return rows


def choose_prompts(
    prompts: Sequence[str],
    pass_rates: Sequence[Mapping[str, float]],
    *,
    count: int | None,
    skip_solved: bool,
    retry_unsolved_after: int | None,
    seed: int,
) -> list[str]:
    """The prompts of the next cycle, by how often their answers passed when they were last asked.

    Args:
        prompts: all ids.
        pass_rates: of each earlier cycle, the prompts it asked and the share of their answers that passed.
        count: how many are wanted; None: all that qualify.
        skip_solved: leave out prompts whose answers all passed: nothing is left to learn from them.
        retry_unsolved_after: cycles until a prompt none of whose answers passed is asked again (1: the next);
            None: never.
        seed: decides which of them, if more qualify than are wanted.

    Returns:
        ids, those not asked for longest first; fewer than ``count`` where fewer qualify.
    """
    last: dict[str, int] = {}
    for cycle, asked in enumerate(pass_rates):
        last.update(dict.fromkeys(asked, cycle))

    def qualifies(prompt: str) -> bool:
        if prompt not in last:
            return True
        rate, ago = pass_rates[last[prompt]][prompt], len(pass_rates) - last[prompt]
        if rate == 0:
            return retry_unsolved_after is not None and ago >= retry_unsolved_after
        return rate < 1 or not skip_solved

    chosen = [prompt for prompt in prompts if qualifies(prompt)]
    chosen.sort(key=lambda prompt: (last.get(prompt, -1), sample_seed(seed, "prompts", prompt, len(pass_rates))))
    return chosen[:count]
