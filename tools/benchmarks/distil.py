"""Distillation: seconds of a step on the pocket model and its teacher.

Both sides learn KL(model || teacher) over the complete vocabulary from one answer to each prompt. The teacher is the
pocket model with weights changed at random.
"""

from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file

from rocm_ext import config
from rocm_ext.data.batches import Steps
from rocm_ext.pocket import load_tokenizer
from rocm_ext.rl.prompts import PromptSet
from tools.benchmarks import rl
from tools.benchmarks.work import pocket

NOISE = 0.1  # of each weight's standard deviation
STEPS = ["prompts_per_step=256", "updates_per_step=1", "groups_per_update=null", "optimizer.lr=3e-4",
         "lr_scheduler=null", "verifier=null", "eval_prompts=null"]  # fmt: skip


def measure(base: Path, rounds: int, installed: bool = False) -> list[dict]:
    """Gate and time the sides in the empty folder ``base``; return a row of the table."""
    cfg = prepare(base)
    columns, _ = rl.measure(base, "distil", cfg, describe, rounds, installed)
    return [
        {**columns, "parameters": rl.parameters(base / "teacher"), "answers": cfg.prompts_per_step}
    ]


def prepare(base: Path) -> DictConfig:
    """Make the model, its teacher and the first adapter; return the sides' common config."""
    pocket(base)
    (base / "teacher").mkdir()
    for file in (base / "pocket").iterdir():
        if file.is_file():
            (base / "teacher" / file.name).write_bytes(file.read_bytes())
    weights = load_file(base / "teacher" / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    noisy = {
        name: w + NOISE * w.std() * torch.randn(w.shape, generator=generator)
        for name, w in weights.items()
    }
    save_file(noisy, base / "teacher" / "model.safetensors", {"format": "pt"})
    given = [f"pocket={base}/pocket", f"teacher={base}/teacher", "teacher_adapter=null", f"output_dir={base}/out",
             f"checkpointer.adapter_checkpoint={base}/peft"]  # fmt: skip
    cfg = config.load("distil_rocm", "cpu_pocket_distil", [*given, *STEPS])
    rl.write_adapter(base, cfg)
    return cfg


def describe(
    cfg: DictConfig, given: int
) -> tuple[list[dict], list[dict[str, list[list[int]]]], dict[str, Any]]:
    """See :data:`tools.benchmarks.rl.Describe`."""
    prompts, folder = PromptSet(cfg), Path(cfg.checkpointer.checkpoint_dir)
    order = Steps(len(prompts.training), cfg.prompts_per_step, data_seed=cfg.seed)
    asked = [[prompts.training[i] for i in order[step]] for step in range(cfg.steps)]
    tokenizer = load_tokenizer(folder)
    answers = [
        {
            prompt.id: [rl.encoded(tokenizer, prompt.row["messages"][-1]["content"])]
            for prompt in step
        }
        for step in asked[:given]
    ]
    more = {
        "teacher": str(folder.parent / "teacher"),
        "betas": list(cfg.optimizer.betas),
        "beta": cfg.beta,
    }
    return [prompt.row for step in asked for prompt in step], answers, more
