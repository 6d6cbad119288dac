"""Estimate the data that a run trains on and samples, before any download."""

import math
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.config.algorithms import updates_of_pass
from rocm_ext.data.batches import label_counts, shared_beginnings
from rocm_ext.data.mixture import Mixture
from rocm_ext.data.render import render_prompt
from rocm_ext.data.rows import SIDE, Rows, open_dataset, tokenize
from rocm_ext.data.tokenizer import open_tokenizer
from rocm_ext.losses import UnpairedPreference, objective_of

_LONGEST_ROW, _PROMPT = 2048, 128  # assumed tokens, if neither the config nor its data are known
_RIGHT = 0.5  # assumed share of right answers
_LOOKED_AT = 2000  # rows that are tokenised to estimate lengths
# Lengths and shared tokens of a row's sequences, as in MicroBatch, and its number of labels
Row = tuple[tuple[int, ...], tuple[int, ...], int]


@dataclass(frozen=True)
class Known:
    """The user's sizes of data that are not on disk, or None.

    Attributes:
        rows: number of training rows; in RAFT prompts per cycle, in GRPO and distillation prompts per step.
        row_tokens: mean tokens of a row; of a prompt where the recipe samples answers.
        answer_tokens: mean tokens of an answer, where the recipe samples them.
    """

    rows: int | None = None
    row_tokens: float | None = None
    answer_tokens: float | None = None


@dataclass(frozen=True)
class Workload:
    """The training data of an SFT run, of a cycle of RAFT, or of a step of GRPO or distillation.

    Attributes:
        longest: tokens of the longest row.
        mean: mean tokens of a row.
        supervised: share of tokens with a label.
        count: number of rows, or None.
        source: origin of these numbers.
        per_row: every row; empty where they are unknown.
        sequences: mean number of sequences in a row: 1, or 2 of a pair. Attention does not cross sequences.
        shared: mean number of a row's tokens that its second sequence shares with the first; only attention computes
            them twice, and ``mean`` leaves them out.
        most: the most rows of an update, if updates differ.
        mixture: data sets of the rows; the means are of an epoch that follows their weights.
    """

    longest: int
    mean: float
    supervised: float
    count: int | None
    source: str
    per_row: tuple[Row, ...] = ()
    sequences: float = 1.0
    shared: float = 0.0
    most: int | None = None
    mixture: Mixture | None = None


@dataclass(frozen=True)
class Questions:
    """The prompts and answers of a cycle of RAFT, or of a step of GRPO or distillation.

    Attributes:
        prompts: prompts per cycle or step, or None.
        held_out: prompts of an evaluation, or None.
        longest: tokens of the longest prompt.
        mean: mean tokens of a prompt.
        answer: mean tokens of an answer.
        source: origin of these numbers.
    """

    prompts: int | None
    held_out: int | None
    longest: int
    mean: float
    answer: float
    source: str


def sft_rows(cfg: DictConfig, known: Known, share: bool) -> Workload:
    """Estimate the rows of an SFT config.

    It tokenises up to 2,000 rows if data and tokenizer are on disk. Otherwise it assumes rows of full length. Sizes in
    ``known`` take precedence; for ``share``, see :func:`describe`.
    """
    limit = cfg.tokenizer.get("max_seq_len")
    if _is_local(cfg.dataset) and _tokenizer_is_here(cfg):
        tokenizer = open_tokenizer(cfg)
        dataset = open_dataset(cfg.dataset, tokenizer, cfg.too_long)
        count = len(dataset)  # type: ignore[arg-type]
        every = max(1, -(-count // _LOOKED_AT))
        rows = tokenize(
            dataset,
            max_seq_len=limit,
            progress=False,
            every=every,
            too_long=cfg.too_long,
            bad_rows=cfg.bad_rows,
        )
        read = f"{rows.counts['rows']:,} of {count:,} rows read"
        workload = describe(rows, count, read, share, Mixture.of(cfg.dataset, rows))
    else:
        objective = objective_of(config.instantiate(cfg.loss, key="loss"))
        pairs = SIDE in objective.columns and not isinstance(objective, UnpairedPreference)
        sequences_of_row = 2 if pairs else 1
        longest = (limit or _LONGEST_ROW) * sequences_of_row
        lengths = "rows as given" if known.row_tokens else "rows of full length assumed"
        missing = "model" if _is_local(cfg.dataset) else "data"
        source = f"{missing} not on disk: {lengths}, with a label on every token"
        workload = Workload(longest, longest, 1.0, None, source, sequences=sequences_of_row)
    mean = min(known.row_tokens or workload.mean, workload.longest)
    return replace(workload, mean=mean, count=known.rows or workload.count)


def describe(
    rows: Rows, count: int, source: str, share: bool = False, mixture: Mixture | None = None
) -> Workload:
    """Summarise tokenised ``rows``, a sample of ``count`` rows.

    Args:
        rows: the rows.
        count: number of rows that the run has.
        source: origin of the rows, for the user.
        share: whether sequences of a row share their beginnings, see :func:`rocm_ext.data.batches.collate`.
        mixture: data sets of the rows.
    """
    per_row = []
    sums = []  # a row's tokens, labels, sequences and shared tokens
    for tokens, lengths, (labels, _) in zip(
        rows.tokens, rows.lengths, label_counts(rows), strict=True
    ):
        shared = (0,) * len(lengths)
        if share:
            shared = tuple(shared_beginnings(tokens, lengths))
        unshared = tuple(length - common for length, common in zip(lengths, shared, strict=True))
        per_row.append((unshared, shared, labels))
        sums.append((sum(unshared), labels, len(unshared), sum(shared)))
    weights = None
    if mixture is not None and mixture.weights:  # an epoch has the rows of a set more or less often
        frequencies = [
            given / max(1, number)
            for given, number in zip(mixture.shares, mixture.rows, strict=True)
        ]
        weights = np.repeat(frequencies, mixture.rows)
    mean, labels, sequences, shared_tokens = np.average(sums, 0, weights).tolist()
    return Workload(
        longest=max(tokens for tokens, *_ in sums),
        mean=mean,
        supervised=labels / mean,
        count=count,
        source=source,
        per_row=tuple(per_row),
        sequences=sequences,
        shared=shared_tokens,
        mixture=mixture,
    )


def questions(cfg: DictConfig, known: Known) -> Questions:
    """Estimate the prompts and answers of a config of a recipe that samples; sizes in ``known`` take precedence."""
    count = None
    lengths = [_PROMPT]
    source = "prompts assumed, not on disk"
    if _is_local(cfg.prompts):
        prompts = config.instantiate(cfg.prompts, key="prompts")
        count, source = len(prompts), f"{len(prompts):,} prompts read"
        if _tokenizer_is_here(cfg):
            tokenizer = open_tokenizer(cfg)
            lengths = [len(render_prompt(tokenizer, prompt.messages)) for prompt in prompts]
        else:
            source += ", their tokens assumed: the model is not on disk"
    held_out: list[int | None] = []
    for key, part, _ in config.components.prompt_sets(cfg):
        count_of_set = _count(part)
        if _is_local(part):
            count_of_set = len(config.instantiate(part, key=key))
        held_out.append(count_of_set)
    if not known.answer_tokens:
        source += "; answers assumed to be half of max_new_tokens"
    return Questions(
        prompts=known.rows
        or _least(cfg.get("prompts_per_cycle"), cfg.get("prompts_per_step"), count),
        held_out=None if None in held_out else sum(filter(None, held_out)),
        longest=max(lengths),
        mean=known.row_tokens or fmean(lengths),
        answer=min(known.answer_tokens or cfg.max_new_tokens / 2, cfg.max_new_tokens),
        source=source,
    )


def _least(*limits: int | None) -> int | None:
    """The least of the limits that are set."""
    return min(filter(None, limits), default=None)


def longest_answer(cfg: DictConfig) -> int:
    """The most tokens after a prompt: of an answer, or of a conversation."""
    if cfg.environment is None:
        return cfg.max_new_tokens
    return cfg.max_new_tokens + cfg.max_environment_tokens


def kept_rows(cfg: DictConfig, asked: Questions) -> Workload:
    """Estimate the rows that a cycle of RAFT trains on, assuming that half of the answers are right."""
    kept = cfg.samples_per_prompt * _RIGHT
    kept = min(kept, cfg.max_per_prompt or kept)
    count = None
    if asked.prompts is not None:
        count = max(1, round(asked.prompts * kept))
    return _answers(cfg, asked, count, "half of the answers assumed to be right")


def sampled_rows(cfg: DictConfig, asked: Questions) -> Workload:
    """Estimate the rows of a step of GRPO or distillation: every answer to its prompts."""
    prompts = _least(cfg.get("prompts_per_step"), asked.prompts)
    rows = _answers(
        cfg, asked, prompts and prompts * cfg.samples_per_prompt, "every answer trained on"
    )
    if "prompts_per_step" not in cfg:  # an evaluation with a config of RAFT
        return rows
    groups_per_update = cfg.groups_per_update or cfg.prompts_per_step
    # one group fewer than for two updates
    groups = min(cfg.prompts_per_step, 2 * groups_per_update - 1)
    return replace(rows, most=groups * cfg.samples_per_prompt)


def _answers(cfg: DictConfig, asked: Questions, count: int | None, which: str) -> Workload:
    mean = asked.mean + asked.answer
    longest = asked.longest + longest_answer(cfg)
    return Workload(longest, mean, asked.answer / mean, count, f"{asked.source}; {which}")


def rows_of_update(cfg: DictConfig, rows: int) -> int:
    """Return the rows of an optimiser update over all ranks, if a step trains on ``rows`` rows."""
    return math.ceil(rows / updates_of_pass(cfg))


def old_logprobs(cfg: DictConfig, dtype: torch.dtype) -> str:
    """Return the value of ``old_logprobs``, with ``auto`` resolved.

    A sampler in this process that computes in fp32 gives the trainer's log-probs, up to rounding. In 16 bits the two
    round differently, and a server may compute anything.
    """
    if cfg.old_logprobs != "auto":
        return cfg.old_logprobs
    ours = ("rocm_ext.sampling.LocalEngine", "rocm_ext.sampling.local.LocalEngine")
    here = cfg.engine[config.COMPONENT] in ours
    return "sampler" if here and dtype == torch.float32 else "trainer"


def _is_local(component: Any) -> bool:
    """Whether the rows of a component are files on this machine."""
    if OmegaConf.is_list(component):
        return all(map(_is_local, component))
    if not OmegaConf.is_dict(component):
        return False
    files = component.get("data_files") or component.get("source")
    return isinstance(files, str) and bool(glob(files))


def _tokenizer_is_here(cfg: DictConfig) -> bool:
    return Path(str(cfg.tokenizer.get("path"))).exists()


def _count(component: Any) -> int | None:
    """Number of held-out prompts from a split such as ``test[:200]`` or from ``limit``."""
    if component is None:
        return 0
    _, _, rest = str(component.get("split", "")).partition("[:")
    number = rest.rstrip("]")
    return int(number) if number.isdigit() else component.get("limit")
