"""The SFT config of a cycle's training."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.generation import sample_seed


def training_config(cfg: DictConfig, **changes: Any) -> DictConfig:
    """Convert a RAFT config to the config of the SFT trainer.

    Args:
        cfg: config of ``raft_rocm`` or of a recipe that extends it; its ``objective`` determines ``loss``.
        changes: values that replace those of ``cfg``.
    """
    trainer = config.trainer_config(cfg)
    if cfg.objective == "raft++":
        ratio = {config.COMPONENT: "rocm_ext.objectives.ClippedRatio", "clip_high": cfg.clip_high}
        trainer["loss"] = trainer["loss"] | ratio
    return OmegaConf.create(trainer | changes)


def cycle_config(cfg: DictConfig, cycle: int, folder: Path) -> DictConfig:
    """Return the config of one cycle's training.

    Args:
        cfg: config of ``raft_rocm`` or of a recipe that extends it.
        cycle: number of the cycle, from 1; it determines the seed and the learning rate.
        folder: output folder of the training; the training resumes if the folder has checkpoints.
    """
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
