"""Checkpoints of a run. Writing one is atomic, and a run that resumes from it equals an undisturbed run bit for bit."""

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

# Keys that may change when a run resumes. Either they do not affect the results, or `check_same_run` compares
# their effect (rows per step, data, base model).
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
    """The checkpoint folders of a run, such as ``step_00000012``.

    Args:
        folder: folder that holds them.
        keep: number of checkpoints to keep; saving removes older ones.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def steps(self) -> list[Path]:
        """Return the checkpoint folders, oldest first."""
        return sorted(p for p in self.folder.glob("step_*") if p.is_dir())

    def save(self, step: int, state: dict[str, Any], write_more: Callable[[Path], None]) -> Path:
        """Write a checkpoint and remove those that are no longer kept.

        Args:
            step: optimiser steps done.
            state: content of ``state.pt``.
            write_more: adds files to the checkpoint's folder.

        Returns:
            The checkpoint's folder.

        Raises:
            UserError: the disk is full; earlier checkpoints stay as they are.
        """
        path = self.folder / f"step_{step:08d}"
        with replace_folder(path) as folder:
            torch.save(state, folder / STATE)
            write_more(folder)
        # later checkpoints were unreadable when this run resumed from an earlier one, so they go too
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
        """Remove folders that a killed process left half written or half removed."""
        for path in self.folder.glob(".step_*"):
            shutil.rmtree(path, ignore_errors=True)

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest readable checkpoint and its state, or None; warn about unreadable ones."""
        for path in reversed(self.steps()):
            try:
                return path, torch.load(path / STATE, map_location="cpu", weights_only=True)
            except Exception as error:
                log.warning("checkpoint %s cannot be read and is skipped: %s", path, str(error).split("\n")[0])
        return None


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the state of every random generator that a recipe or a component may draw from.

    Args:
        device: the rank's device; on a GPU the state includes its generator.
    """
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
    """Restore every random generator to a ``state`` from :func:`rng_state`."""
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
    """Check that this run and the one it resumes are the same.

    Args:
        path: source of ``state``, for messages.
        state: ``config`` and ``identity`` of the run to resume.
        cfg: config of this run.
        identity: values that the two runs must share beside the config, by name.
        free: keys that may differ.

    Raises:
        UserError: the runs differ in something that changes the results; the message names every difference.
    """
    now: Any = OmegaConf.to_container(cfg, resolve=True)
    begun = now | state["config"]  # a run of an earlier version lacks the keys that came later
    problems = difference(begun, now, free)
    for what, is_ in identity.items():
        was = state["identity"][what]
        if was != is_:  # hashes tell a reader nothing, so the message omits them
            problems.append(f"{what} changed" if len(str(was)) == 64 else f"{what}: was {was}, is {is_}")
    if problems:
        raise UserError(
            f"{path} belongs to another run: {'; '.join(problems)}. "
            "Undo these changes, or start a new run in another output_dir"
        )
