"""What is trained on and what is asked next: two pure functions of what was measured.

Neither depends on the order of files: ties are broken by a hash of the seed.
"""

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from rocm_ext.data.render import IGNORE
from rocm_ext.data.rows import Rows
from rocm_ext.files import replace_text
from rocm_ext.generation import sample_seed
from rocm_ext.raft.rollouts import Sample, SampleKey
from rocm_ext.verifiers import Result


def filter_samples(
    samples: Mapping[SampleKey, Sample],
    results: Mapping[SampleKey, Result],
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


def to_rows(kept: Sequence[Sample], prompts: Mapping[str, Sequence[int]], columns: Collection[str]) -> Rows:
    """Rows to train on: prompt and answer as they were sampled, the loss on the answer alone.

    Args:
        kept: samples.
        prompts: token ids of each prompt, by id.
        columns: that the objective needs; of those there is ``old_logprobs`` here, the log-probs of sampling.
    """
    old_logprobs: list[np.ndarray] = []
    wanted = {"old_logprobs": old_logprobs} if "old_logprobs" in columns else {}
    rows = Rows([], [], [], {"rows": len(kept)}, wanted)
    for sample in kept:
        prompt = prompts[sample.prompt_id]
        tokens = np.array([*prompt, *sample.tokens], dtype=np.int32)
        labels = tokens.copy()
        labels[: len(prompt)] = IGNORE
        rows.tokens.append(tokens)
        rows.labels.append(labels)
        rows.lengths.append((len(tokens),))
        if wanted:
            old_logprobs.append(np.array([*[0.0] * len(prompt), *sample.logprobs], dtype=np.float32))
    return rows


def write_kept(
    path: Path,
    kept: Sequence[Sample],
    results: Mapping[SampleKey, Result],
    prompts: Mapping[str, Sequence[int]],
) -> None:
    """``kept.jsonl``: the samples with their rewards and the token ids of their prompts.

    Raises:
        UserError: the disk is full.
    """
    lines = []
    for sample in kept:
        more = {"reward": results[sample.key].reward, "prompt_tokens": prompts[sample.prompt_id]}
        lines.append(json.dumps({**sample.record(), **more}) + "\n")
    replace_text(path, "".join(lines))


def choose_prompts(
    prompts: Sequence[str],
    last_asked: Mapping[str, tuple[int, float]],
    cycle: int,
    *,
    count: int | None,
    skip_solved: bool,
    retry_unsolved_after: int | None,
    seed: int,
) -> list[str]:
    """The prompts of a cycle, by how often their answers passed when they were last asked.

    Args:
        prompts: all ids.
        last_asked: of each prompt that was asked before, the cycle that asked it last and the share of its answers
            that passed.
        cycle: the number of this cycle, from 1.
        count: how many are wanted; None: all that qualify.
        skip_solved: leave out prompts whose answers all passed: nothing is left to learn from them.
        retry_unsolved_after: cycles until a prompt none of whose answers passed is asked again (1: the next);
            None: never.
        seed: decides which of them, if more qualify than are wanted.

    Returns:
        ids, those not asked for longest first; fewer than ``count`` where fewer qualify.
    """

    def qualifies(prompt: str) -> bool:
        if prompt not in last_asked:
            return True
        asked, rate = last_asked[prompt]
        if rate == 0:
            return retry_unsolved_after is not None and cycle - asked >= retry_unsolved_after
        return rate < 1 or not skip_solved

    def order(prompt: str) -> tuple[int, int]:
        asked, _ = last_asked.get(prompt, (0, 0.0))
        return asked, sample_seed(seed, "prompts", prompt, cycle - 1)

    return sorted(filter(qualifies, prompts), key=order)[:count]
