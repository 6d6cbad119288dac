"""GRPO: seconds of a step on the pocket model and on one of 40 million parameters.

The sides give as many answers to each prompt, with the same verifier, loss (DAPO) and clipping. The gate's norm depends
on the rewards, the advantages, the loss and every weight, the second step's norm also on the update before it. TRL's
continuous batching, its other way without a server, took eight times as long a step here.

Afterwards ours drops groups with equal rewards, from which no side learns; TRL computes them. The second comparison has
no such groups, so that both sides make the same updates: rewards are drawn for each answer.
"""

import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.config import algorithms
from rocm_ext.config.algorithms import updates_of_pass, updates_of_step
from rocm_ext.pocket import load_tokenizer
from rocm_ext.rl.prompts import PromptSet, choose_by_curriculum
from tools.benchmarks import rl
from tools.benchmarks.protocol import Failed
from tools.benchmarks.work import pocket

# cpu_pocket_grpo with small steps and the loss of DAPO's paper, which peers have too
POCKET_STEPS = [
    "prompts_per_step=64", "samples_per_prompt=8", "updates_per_step=1", "groups_per_update=2", "loss=dapo",
    "clip_high=null", "scale=null", "negative_weight=1.0", "optimizer.lr=3e-4", "lr_scheduler=null",
    "eval_every_n_steps=10",
]  # fmt: skip
WIDE_STEPS = ["prompts_per_step=16"]
DRAWN = {
    "_component_": "rocm_ext.verifiers.RewardFunction",
    "function": "tools.benchmarks.rewards.drawn",
    "conversational": False,
}


def measure(
    base: Path, rounds: int, installed: bool = False, wide: bool = False, drawn: bool = False
) -> list[dict]:
    """Gate and time the sides in the empty folder ``base``; return a row of the table.

    Args, Raises: see :func:`tools.benchmarks.rl.measure`; ``wide`` selects the larger model, ``drawn`` the rewards of
        :data:`DRAWN`.
    """
    cfg = prepare(base, WIDE_STEPS if wide else (), wide, drawn)
    columns, steps = rl.measure(base, "grpo", cfg, describe, rounds, installed)
    updates = statistics.fmean(step[2] for step in steps)
    if drawn and updates != updates_of_step(cfg):
        raise Failed(f"{updates:g} updates a step, {updates_of_step(cfg)} expected")
    return [
        {
            **columns,
            "work": "grpo drawn" if drawn else "grpo",
            "parameters": rl.parameters(base / "pocket"),
            "answers": cfg.prompts_per_step * cfg.samples_per_prompt,
            "updates": [updates, updates_of_step(cfg)],
        }
    ]


def prepare(
    base: Path, changes: Sequence[str], wide: bool = False, drawn: bool = False
) -> DictConfig:
    """Make the pocket model, perhaps widened, and the first adapter; return the sides' common config."""
    pocket(base)
    if wide:
        rl.widen(base / "pocket")
    given = [f"pocket={base}/pocket", f"output_dir={base}/out", "eval_prompts=null", "mismatch=none",
             *POCKET_STEPS, "verify_workers=1", f"checkpointer.adapter_checkpoint={base}/peft"]  # fmt: skip
    cfg = algorithms.filled(config.load("grpo_rocm", "cpu_pocket_grpo", [*given, *changes]))
    if drawn:
        cfg.verifier = DRAWN
    rl.write_adapter(base, cfg)
    return cfg


def describe(
    cfg: DictConfig, given: int
) -> tuple[list[dict], list[dict[str, list[list[int]]]], dict[str, Any]]:
    """See :data:`tools.benchmarks.rl.Describe`. A given group has right and wrong answers, so that none is dropped."""
    if given:  # one update per step, because the sides deal groups out to updates in different ways
        cfg.groups_per_update = None
    prompts, rng = PromptSet(cfg), random.Random(0)
    tokenizer = load_tokenizer(Path(cfg.checkpointer.checkpoint_dir))
    asked: dict[str, list[tuple[int, float | None]]] = {}
    rows, answers = [], []
    for step in range(1, cfg.steps + 1):
        ids = choose_by_curriculum([prompt.id for prompt in prompts.training], asked, step, cfg.steps,
                                   count=cfg.prompts_per_step, curriculum="none", seed=cfg.seed)  # fmt: skip
        for prompt in ids:
            asked.setdefault(prompt, []).append((step, None))
        rows += [prompts[prompt].row for prompt in ids]
        if step <= given:
            count = cfg.samples_per_prompt
            answers.append(
                {
                    prompt: group(tokenizer, prompts[prompt].row, count, prompts, rng)
                    for prompt in ids
                }
            )
    size = cfg.prompts_per_step * cfg.samples_per_prompt // updates_of_pass(cfg)
    return rows, answers, {
        "samples": cfg.samples_per_prompt, "updates": updates_of_step(cfg), "clip_low": cfg.clip_low,
        "clip_high": cfg.clip_high, "clip_dual": cfg.clip_dual, "scale": cfg.scale,
        "batch_size": max(part for part in range(1, min(rl.BATCH, size) + 1) if size % part == 0),
        "verifier": OmegaConf.to_container(cfg.verifier),
    }  # fmt: skip


def group(
    tokenizer: Any, row: Any, count: int, prompts: Any, rng: random.Random
) -> list[list[int]]:
    """Return the tokens of ``count`` answers to a row; some belong to other rows and are wrong."""
    texts = [row["messages"][-1]["content"]] * rng.randrange(1, count)
    while len(texts) < count:
        other = rng.choice(prompts.training).row
        if other["answer"] != row["answer"]:
            texts.append(other["messages"][-1]["content"])
    return [rl.encoded(tokenizer, text) for text in texts]
