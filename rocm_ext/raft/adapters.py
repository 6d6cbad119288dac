"""The adapters of a run: each cycle starts from one and writes one."""

import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from omegaconf import DictConfig

from rocm_ext.errors import UserError
from rocm_ext.files import remove_folder
from rocm_ext.raft.cycles import Cycle
from rocm_ext.train.components import nothing_changed
from rocm_ext.train.learner import Learner


class Adapters:
    """Loads the adapters of earlier cycles from their files, so that a resumed run does the same as any other.

    Args:
        cfg: config of ``raft_rocm``.
        learner: the model, set up, with the run's initial adapter.
        out: the run's output folder.

    Attributes:
        first: weights of the run's initial adapter, under torchtune's names.
    """

    def __init__(self, cfg: DictConfig, learner: Learner, out: Path) -> None:
        self._cfg, self._learner, self._out = cfg, learner, out
        self.first = learner.adapter_state()
        self._pruned: set[int] = set()

    def folder(self, cycle: int) -> Path:
        """Return the PEFT folder of a cycle's adapter; cycle 0 has the ``adapter_checkpoint`` of the config, if any."""
        first = self._cfg.checkpointer.get("adapter_checkpoint")
        return Path(first) if first and cycle == 0 else Cycle(self._out, cycle).adapter

    def load(self, cycle: int) -> None:
        """Load the adapter that a cycle wrote into the learner; cycle 0 is the initial adapter."""
        self._learner.load_adapter(self._state(cycle), str(self.folder(cycle)))

    def before(self, cycle: int) -> tuple[str, Mapping[str, torch.Tensor]] | None:
        """Return the folder's name and the weights of the last adapter before that of ``cycle``; None without one."""
        folders = (self.folder(earlier) for earlier in range(cycle - 1, -1, -1))
        folder = next((folder for folder in folders if folder.exists()), None)
        return None if folder is None else (str(folder), self._learner.read_adapter(folder))

    def exists(self, cycle: int) -> bool:
        """Return whether the adapter of a cycle is there; ``keep_last_n_adapters`` removes adapters."""
        return not cycle or self.folder(cycle).exists()

    def check_changed(self, cycle: int, start: int) -> None:
        """Check that a cycle's training changed the adapter.

        Args:
            cycle: the trained cycle.
            start: the cycle with whose adapter the training started.

        Raises:
            UserError: the adapter equals the one that the training started from.
        """
        before, after = self._state(start), self._state(cycle)
        if all(torch.equal(before[name], tensor) for name, tensor in after.items()):
            steps = Cycle(self._out, cycle).training()["steps"]
            raise UserError(f"cycle {cycle}: {nothing_changed(steps, 'the cycle')}")

    def prune(self, keep: Collection[int], trained: Sequence[int]) -> None:
        """Remove the adapters of the cycles in ``trained`` that are not in ``keep``."""
        for cycle in trained:
            if cycle not in keep and cycle not in self._pruned:
                folder = Cycle(self._out, cycle).adapter
                if folder.exists():
                    remove_folder(folder)
                shutil.rmtree(folder.with_name(f".{folder.name}.tmp"), ignore_errors=True)  # a killed process's
                self._pruned.add(cycle)

    def _state(self, cycle: int) -> Mapping[str, torch.Tensor]:
        return self._learner.read_adapter(self.folder(cycle)) if cycle else self.first
