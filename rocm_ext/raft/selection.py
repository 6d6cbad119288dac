"""Select the answers to train on and the prompts to ask next.

Both selections are pure functions of the results. They do not depend on the order of files: a hash of the seed breaks
ties.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rocm_ext.files import replace_text
from rocm_ext.generation import sample_seed
from rocm_ext.raft.cycles import Bar
from rocm_ext.rollouts.samples import Sample, SampleKey
from rocm_ext.verifiers import Result


def filter_samples(
    samples: Mapping[SampleKey, Sample],
    results: Mapping[SampleKey, Result],
    *,
    bar: Bar,
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
        bar: what an answer needs to be kept.
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
        if missed := bar.missed(results[key]):
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
        for rule, most in (
            ("not_among_best", max(1, math.ceil(best_fraction * len(left) - 1e-9))),
            ("over_cap", len(left) if per_prompt is None else per_prompt),
        ):
            dropped[rule] += max(0, len(left) - most)
            left = left[:most]
        kept += left
    kept.sort(key=lambda sample: sample.key)
    return kept, {**{rule: count for rule, count in dropped.items() if count}, "kept": len(kept)}


def write_kept(
    path: Path,
    kept: Sequence[Sample],
    results: Mapping[SampleKey, Result],
    prompts: Mapping[str, Sequence[int]],
) -> None:
    """Write ``kept.jsonl``: the samples with their rewards and the token ids of their prompts.

    Args:
        path: path of the file.
        kept: samples to write.
        results: verdicts by prompt id and sample index.
        prompts: token ids of each prompt, by id.

    Raises:
        UserError: the disk is full.
    """
    lines = []
    for sample in kept:
        more = {"reward": results[sample.key].reward, "prompt_tokens": prompts[sample.prompt_id]}
        lines.append(json.dumps({**sample.record(), **more}) + "\n")
    replace_text(path, "".join(lines))


def write_selection(path: Path, counts: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Write ``selection.json``: what the selection counted, and the settings it was made with.

    Args:
        path: path of the file.
        counts: see :func:`rocm_ext.raft.cycles.count_answers`.
        settings: values of the keys that a resumed run may change.

    Raises:
        UserError: the disk is full.
    """
    replace_text(path, json.dumps({"counts": counts, "settings": settings}, indent=2) + "\n")


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
    """Choose the prompts of a cycle by the pass rates of their last answers.

    Args:
        prompts: ids of all training prompts.
        last_asked: for each prompt asked before, the last cycle that asked it and the share of its answers that
            passed.
        cycle: number of this cycle, from 1.
        count: maximum number of prompts; None: all that qualify.
        skip_solved: skip prompts whose answers all passed, because they teach nothing more.
        retry_unsolved_after: number of cycles until a prompt without a passing answer is asked again (1: in the next
            cycle); None: never.
        seed: breaks ties between prompts that were last asked in the same cycle.

    Returns:
        Prompt ids, the longest unasked first; fewer than ``count`` if fewer qualify.
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
