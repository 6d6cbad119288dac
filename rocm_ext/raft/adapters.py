"""The adapters that a run's cycles begin with and leave."""

from collections.abc import Mapping
from pathlib import Path

import torch
from omegaconf import DictConfig

from rocm_ext.errors import UserError
from rocm_ext.raft.cycles import Cycle
from rocm_ext.train.learner import Learner


class Adapters:
    """Loads adapters always from their files: a resumed run has nothing else.

    Args:
        cfg: of ``raft_rocm``.
        learner: set up, with the adapter that the run begins with.
        out: the run's folder.

    Attributes:
        first: what the run begins with, by torchtune's names.
    """

    def __init__(self, cfg: DictConfig, learner: Learner, out: Path) -> None:
        self._cfg, self._learner, self._out = cfg, learner, out
        self.first = learner.adapter_state()

    def folder(self, cycle: int) -> Path:
        """The PEFT folder that a cycle leaves; cycle 0's is the one that the config starts from, if it names one."""
        first = self._cfg.checkpointer.get("adapter_checkpoint")
        return Path(first) if first and cycle == 0 else Cycle(self._out, cycle).adapter

    def load(self, cycle: int) -> None:
        """Put what a cycle left into the learner."""
        self._learner.load_adapter(self._state(cycle), str(self.folder(cycle)))

    def load_for_training(self, cycle: int) -> None:
        """Put what a cycle's training begins with into the learner."""
        self.load(self._trained_from(cycle))

    def check_changed(self, cycle: int) -> None:
        """Refuse to call it training if nothing was learnt.

        Raises:
            UserError: the adapter is what the cycle began with.
        """
        before, after = self._state(self._trained_from(cycle)), self._state(cycle)
        if all(torch.equal(before[name], tensor) for name, tensor in after.items()):
            steps = Cycle(self._out, cycle).training()["steps"]
            raise UserError(
                f"cycle {cycle}: {steps} optimiser steps changed nothing, bit for bit. A warm-up as long as the cycle "
                "does that, and fp16 whose loss scale never settles: drop lr_scheduler, keep more answers, or take "
                "another dtype"
            )

    def _trained_from(self, cycle: int) -> int:
        return cycle - 1 if self._cfg.start_from == "previous" else 0

    def _state(self, cycle: int) -> Mapping[str, torch.Tensor]:
        return self._learner.read_adapter(self.folder(cycle)) if cycle else self.first
