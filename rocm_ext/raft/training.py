"""The SFT config that a cycle trains with."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.generation import sample_seed


def training_config(cfg: DictConfig, **changes: Any) -> DictConfig:
    """The SFT recipe's keys as a RAFT config has them, its objective as ``loss``, and ``changes`` over both."""
    trainer = config.trainer_config(cfg)
    if cfg.objective == "raft++":
        ratio = {config.COMPONENT: "rocm_ext.objectives.ClippedRatio", "clip_high": cfg.clip_high}
        trainer["loss"] = trainer["loss"] | ratio
    return OmegaConf.create(trainer | changes)


def cycle_config(cfg: DictConfig, cycle: int, folder: Path) -> DictConfig:
    """The config of one cycle's training in the cycle's ``folder``."""
    lr = cfg.optimizer.lr
    return training_config(
        cfg,
        output_dir=str(folder),
        seed=sample_seed(cfg.seed, cycle, "train", 0) % 2**31,
        optimizer={**cfg.optimizer, "lr": max(lr * cfg.lr_decay ** (cycle - 1), min(cfg.lr_floor, lr))},
        resume_from_checkpoint=(folder / "checkpoints").exists(),
        overwrite_output_dir=True,
        save_adapter_weights_only=True,
    )
