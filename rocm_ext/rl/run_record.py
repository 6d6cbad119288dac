"""``run.json``: what a RAFT run or an evaluation started with."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import disk_errors, read_json, replace_text
from rocm_ext.config import references
from rocm_ext.machine.counter_log import remove_logs
from rocm_ext.machine.trace import FOLDER


class RunRecord:
    """``run.json``: the config and identity that a run started with.

    Args:
        out: the run's output folder.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.path = out, out / "run.json"

    def begun(self, resume: bool, overwrite: bool) -> dict[str, Any] | None:
        """Read the record of the run that this one continues.

        Args:
            resume: whether this run continues the one in the folder.
            overwrite: whether this run replaces the one in the folder.

        Returns:
            The ``config`` and ``identity`` of the earlier run; None if this run starts from the beginning.

        Raises:
            UserError: the folder holds another run, or its record cannot be read.
        """
        if resume and self.path.exists():
            begun = read_json(self.path) or {}
            if not all(isinstance(begun.get(key), dict) for key in ("config", "environment", "identity")):
                raise UserError(f"{self.path} is damaged; expected config, environment and identity. Restore it")
            return begun
        names = ("run.json", "cycle_0", "cycle_1", "adapter", "checkpoints")
        earlier = [name for name in names if (self.out / name).exists()]
        if earlier and not overwrite:
            raise UserError(
                f"output_dir {self.out} holds an earlier run ({', '.join(earlier)}); resume_from_checkpoint=True "
                "continues a RAFT run, overwrite_output_dir=True replaces it, or choose another output_dir"
            )
        return None

    def take(self, cfg: DictConfig, identity: Mapping[str, Any], fresh: bool) -> None:
        """Claim the folder for this run.

        Args:
            cfg: config of the run.
            identity: values that a resuming run must share beside the config, by name.
            fresh: whether to remove an earlier run's files.

        Raises:
            UserError: the disk is full, or the folder is not writable.
        """
        with disk_errors(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        if fresh:
            self.path.unlink(missing_ok=True)  # first, so that nobody can resume a half-removed run
            for pattern in ("cycle_*", "adapter", "merged", "checkpoints", FOLDER):
                for folder in self.out.glob(pattern):
                    shutil.rmtree(folder, ignore_errors=True)
            for name in ("metrics.jsonl", "summary.json"):
                (self.out / name).unlink(missing_ok=True)
            remove_logs(self.out)
        config = OmegaConf.to_container(cfg)
        content = {"config": config, "environment": references.digests(cfg), "identity": identity}
        replace_text(self.path, json.dumps(content, indent=2) + "\n")
        replace_text(self.out / "config.yaml", OmegaConf.to_yaml(cfg))
