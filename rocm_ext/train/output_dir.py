"""The output folder of a run, protected against accidental overwriting."""

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torchtune import training

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import disk_errors, replace_text
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.machine.counters import HARDWARE_LOG, remove_logs
from rocm_ext.machine.trace import FOLDER
from rocm_ext.train.checkpoint import Checkpoints
from rocm_ext.train.metrics import Metrics


class OutputDir:
    """``output_dir`` of a run.

    Args:
        path: the folder; it need not exist.
        keep: number of checkpoints to keep.
        resume: whether this run continues the one in the folder.
        overwrite: whether this run replaces the one in the folder.
        ranks: all processes of the run.

    Attributes:
        checkpoints: the run's checkpoints.
        resumed: the checkpoint to resume from and its state, or None.

    Raises:
        UserError: the folder holds another run, or its checkpoints cannot be read.
    """

    def __init__(self, path: Path, *, keep: int, resume: bool, overwrite: bool, ranks: Ranks) -> None:
        self.path, self.resume, self.overwrite = path, resume, overwrite
        self.checkpoints = Checkpoints(path / "checkpoints", keep)
        self._check()
        self.resumed: tuple[Path, dict[str, Any]] | None = self.checkpoints.newest(ranks) if resume else None

    @classmethod
    def open(cls, cfg: DictConfig, ranks: Ranks) -> "OutputDir":
        """Create a config's output folder, and seed every random generator.

        If ``cfg.seed`` is null, this sets it to the seed of the run to resume, or to a new one.

        Args:
            cfg: config of the run; this may change its ``seed``.
            ranks: all processes of the run; only the main one creates the folder.

        Raises:
            UserError: the folder holds another run, its checkpoints cannot be read, or it is not writable.
        """
        folder = cls(
            Path(cfg.output_dir),
            keep=cfg.keep_last_n_checkpoints,
            resume=cfg.resume_from_checkpoint,
            overwrite=cfg.overwrite_output_dir,
            ranks=ranks,
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
                "continues it, overwrite_output_dir=True replaces it, or choose another output_dir"
            )

    def create(self) -> None:
        """Create the folder.

        Raises:
            UserError: the folder cannot be created, or is not writable.
        """
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def take(self, config: str, step: int | None, keeps: Callable[[dict[str, Any]], bool]) -> Metrics:
        """Claim the folder for this run; called once all other set-up has succeeded.

        This removes leftovers of killed processes and, if the run overwrites an earlier one, that run's files.

        Args:
            config: text of ``config.yaml``.
            step: number of the checkpoint that the run resumes. None: a fresh run, for which ``metrics.jsonl`` loses
                all lines, and ``hardware.jsonl`` goes.
            keeps: whether a resumed run keeps a line of ``metrics.jsonl``.

        Returns:
            The open ``metrics.jsonl``.

        Raises:
            UserError: the disk is full, or a file cannot be written.
        """
        if self.overwrite and not self.resume:
            self.checkpoints.clear()
            for name in ("adapter", "merged", FOLDER):
                shutil.rmtree(self.path / name, ignore_errors=True)
            (self.path / "summary.json").unlink(missing_ok=True)
        self.checkpoints.sweep(step or 0)
        if step is None:
            with disk_errors(self.path / HARDWARE_LOG):
                remove_logs(self.path)
        replace_text(self.path / "config.yaml", config)
        return Metrics(self.path / "metrics.jsonl", lambda line: step is not None and keeps(line))


def pick_seed(requested: int | None, recorded: int | None, ranks: Ranks) -> int:
    """Choose a run's seed, the same on all ranks.

    Args:
        requested: the config's seed, or None.
        recorded: seed of the run to resume, or None.
        ranks: all processes of the run.

    Returns:
        The requested seed, else the recorded one, else a random one below 2**31.
    """
    drawn = random.SystemRandom().randrange(2**31)
    return ranks.agree(next(seed for seed in (requested, recorded, drawn) if seed is not None))
