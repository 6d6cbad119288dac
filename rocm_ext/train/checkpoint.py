"""Checkpoints of a run: whole or absent, everything needed to go on bit for bit."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from rocm_ext.config import difference
from rocm_ext.errors import UserError
from rocm_ext.files import remove_folder, replace_folder
from rocm_ext.log import log

STATE = "state.pt"

# Keys that may change between a run and its resumption: they do not touch what is computed, or they
# are compared by their effect (rows per step, data, base model).
FREE_KEYS = frozenset(
    """
    hardware hardware_overrides device memory_fraction startup_checks num_workers pin_memory compile
    checkpointer tokenizer enable_activation_checkpointing enable_activation_offloading low_cpu_ram
    dataset dataset_val batch_size gradient_accumulation_steps sequences_per_step tokens_per_micro_batch
    cudnn_deterministic_mode resume_from_checkpoint overwrite_output_dir save_every_n_steps seed
    keep_last_n_checkpoints save_adapter_weights_only output_dir metric_logger log_every_n_steps
    log_peak_memory_stats hardware_log_seconds profiler
    """.split()  # noqa: SIM905
)


class Checkpoints:
    """The folders ``step_00000012`` in ``folder``, the last ``keep`` of them kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def steps(self) -> list[Path]:
        """Checkpoint folders, oldest first."""
        return sorted(p for p in self.folder.glob("step_*") if p.is_dir())

    def save(self, step: int, state: dict[str, Any], write_more: Callable[[Path], None]) -> Path:
        """Write checkpoint ``step``: ``state`` and what ``write_more`` puts into its folder.

        Raises:
            UserError: if the disk is full; earlier checkpoints stay as they are.
        """
        path = self.folder / f"step_{step:08d}"
        with replace_folder(path) as folder:
            torch.save(state, folder / STATE)
            write_more(folder)
        # later ones could not be read when this run went on from an earlier one
        kept = [p for p in self.steps() if p <= path][-self.keep :]
        for other in self.steps():
            if other not in kept:
                remove_folder(other)
        return path

    def clear(self) -> None:
        """Remove every checkpoint."""
        for path in self.steps():
            remove_folder(path)

    def sweep(self) -> None:
        """Remove what a killed process left half written or half removed."""
        for path in self.folder.glob(".step_*"):
            shutil.rmtree(path, ignore_errors=True)

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint that can be read, and its state; None if there is none."""
        for path in reversed(self.steps()):
            try:
                return path, torch.load(path / STATE, map_location="cpu", weights_only=True)
            except Exception as error:
                log.warning("checkpoint %s cannot be read and is passed over: %s", path, str(error).split("\n")[0])
        return None


def rng_state(device: torch.device) -> dict[str, Any]:
    """State of every generator that a recipe or a component may draw from."""
    name, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Put every generator back to where :func:`rng_state` saw it."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "device" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"], device)


def check_same_run(
    path: Path,
    state: dict[str, Any],
    cfg: DictConfig,
    identity: dict[str, Any],
    free: frozenset[str] = FREE_KEYS,
) -> None:
    """Refuse to resume another run.

    Args:
        path: where ``state`` is from, for messages.
        state: the ``config`` and ``identity`` of the run that was begun.
        cfg, identity: of the run that resumes.
        free: keys that may differ.

    Raises:
        UserError: naming everything that differs and would change the result.
    """
    now: Any = OmegaConf.to_container(cfg, resolve=True)
    begun = {"recipe": now.get("recipe"), **state["config"]}  # older runs do not name their recipe
    problems = difference(begun, now, free)
    for what, is_ in identity.items():
        was = state["identity"][what]
        if was != is_:  # fingerprints mean nothing to a reader
            problems.append(f"{what} changed" if len(str(was)) == 64 else f"{what}: was {was}, is {is_}")
    if problems:
        raise UserError(
            f"{path} belongs to another run: {'; '.join(problems)}. "
            "Put that back, or start afresh with another output_dir"
        )
