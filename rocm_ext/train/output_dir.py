"""The folder a run writes to: whose it is, and when it may be touched."""

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torchtune import training

from rocm_ext.errors import UserError
from rocm_ext.files import disk_errors, replace_text
from rocm_ext.hardware.counters import HARDWARE_LOG
from rocm_ext.ranks import Ranks
from rocm_ext.train.checkpoint import Checkpoints
from rocm_ext.train.metrics import Metrics


class OutputDir:
    """``output_dir`` of a run.

    Args:
        path: the folder; it need not exist.
        keep: checkpoints to keep.
        resume: this run continues what is there.
        overwrite: this run replaces what is there.

    Attributes:
        checkpoints: of the run.
        resumed: the checkpoint to resume from and its state, or None.

    Raises:
        UserError: the folder holds another run.
    """

    def __init__(self, path: Path, *, keep: int, resume: bool, overwrite: bool) -> None:
        self.path, self.resume, self.overwrite = path, resume, overwrite
        self.checkpoints = Checkpoints(path / "checkpoints", keep)
        self._check()
        self.resumed: tuple[Path, dict[str, Any]] | None = self.checkpoints.newest() if resume else None

    @classmethod
    def open(cls, cfg: DictConfig, ranks: Ranks) -> "OutputDir":
        """The folder of a config's run, made and found to be writable.

        Every generator is seeded, and ``cfg.seed`` is set where it is null: to the seed that the run began with,
        else to a new one.

        Raises:
            UserError: the folder holds another run, or cannot be written to.
        """
        folder = cls(
            Path(cfg.output_dir),
            keep=cfg.keep_last_n_checkpoints,
            resume=cfg.resume_from_checkpoint,
            overwrite=cfg.overwrite_output_dir,
        )
        cfg.seed = pick_seed(cfg.seed, folder.resumed[1]["config"]["seed"] if folder.resumed else None, ranks)
        training.set_seed(seed=cfg.seed, debug_mode=cfg.cudnn_deterministic_mode)
        if ranks.is_main:
            folder.create()
        return folder

    def _check(self) -> None:
        earlier = [name for name in ("checkpoints", "adapter", "metrics.jsonl") if (self.path / name).exists()]
        if earlier and not self.resume and not self.overwrite:
            raise UserError(
                f"output_dir {self.path} holds an earlier run ({', '.join(earlier)}); resume_from_checkpoint=True "
                "goes on with it, overwrite_output_dir=True replaces it, or choose another output_dir"
            )

    def create(self) -> None:
        """Make the folder.

        Raises:
            UserError: if it cannot be written to.
        """
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def take(self, config: str, step: int) -> Metrics:
        """Make the folder this run's, once nothing in the setup can fail any more.

        Args:
            config: text of ``config.yaml``.
            step: optimiser steps done; later lines of ``metrics.jsonl`` go. At 0 ``hardware.jsonl`` begins anew.
        """
        self.checkpoints.sweep()
        if self.overwrite and not self.resume:
            self.checkpoints.clear()
            for name in ("adapter", "merged"):
                shutil.rmtree(self.path / name, ignore_errors=True)
            (self.path / "summary.json").unlink(missing_ok=True)
        if not step:
            with disk_errors(self.path / HARDWARE_LOG):
                (self.path / HARDWARE_LOG).unlink(missing_ok=True)
        replace_text(self.path / "config.yaml", config)
        return Metrics(self.path / "metrics.jsonl", lambda line: line["step"] <= step)


def pick_seed(requested: int | None, recorded: int | None, ranks: Ranks) -> int:
    """A run's seed, the same on all ranks: the one requested, else the one it began with, else a new one."""
    drawn = random.SystemRandom().randrange(2**31)
    return ranks.agree(next(seed for seed in (requested, recorded, drawn) if seed is not None))
