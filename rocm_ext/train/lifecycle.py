"""Run a recipe from set-up to clean-up, as `tune run` does."""

import shlex
import time
import traceback
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from omegaconf import DictConfig

from rocm_ext.base import supervised
from rocm_ext.base.errors import UserError
from rocm_ext.base.log import duration, log
from rocm_ext.distributed.ranks import Ranks, local_rank, machine_index, several_machines
from rocm_ext.machine import trace
from rocm_ext.machine.counters import log_of, recording
from rocm_ext.model.sampler import MIN_ROWS
from rocm_ext.plan.memory import readable
from rocm_ext.train.interrupt import Interrupted
from rocm_ext.train.lock import hold
from rocm_ext.train.metrics import peak_memory
from rocm_ext.train.runtime import Runtime


class RunnableRecipe(Protocol):
    """A recipe that :func:`run` can run.

    Attributes:
        cfg: config of the run.
        runtime: machine, device, dtype and ranks; :meth:`check` sets it.
    """

    cfg: DictConfig
    runtime: Runtime

    def check(self) -> None:
        """Do all set-up that needs no weights, cheap steps first, so that a user's mistake ends the run early."""

    def setup(self) -> None:
        """Prepare the run: :meth:`check`, then the weights and what needs them."""

    def train(self) -> None:
        """Do all of the work, then write the outputs."""

    def cleanup(self) -> None:
        """Close files and leave the process group."""


def run(recipe: RunnableRecipe) -> None:
    """Set ``recipe`` up, train while recording the hardware's counters, and clean up.

    The run holds its output folder meanwhile. With ``validate_only`` it checks ``recipe`` and does no more.

    Raises:
        UserError: another run uses the folder, or the recipe fails.
        SystemExit: Ctrl-C, SIGTERM or SIGHUP stopped the run, and all finished work is saved; the code is 128 + the
            signal's number.
    """
    with hold(Path(recipe.cfg.output_dir)):
        _run(recipe)


def _run(recipe: RunnableRecipe) -> None:
    began, cfg = time.monotonic(), recipe.cfg
    if cfg.validate_only:
        recipe.check()
        recipe.cleanup()
        log.info("valid: all checks that need no weights have passed")
        return
    try:
        recipe.setup()
        runtime, out = recipe.runtime, Path(cfg.output_dir)
        profile = runtime.trace.on(out / trace.FOLDER, cfg.profile_steps or 0, runtime.device, runtime.ranks.rank)
        with _recording(cfg, runtime.ranks), profile:
            recipe.train()
    except RuntimeError as error:
        if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)):  # a GPU's, a CPU's
            raise
        raise UserError(_out_of_memory(recipe, error), supervised.RETRY) from error
    except Interrupted as stop:
        log.info("stopped %s, all saved; continue with resume_from_checkpoint=True", stop.where)
        recipe.cleanup()
        if not stop.signum:
            supervised.note(segment=stop.where)
        raise SystemExit(128 + stop.signum if stop.signum else 0) from None
    recipe.cleanup()
    log.info("done in %s", duration(time.monotonic() - began))
    if (out / "adapter").is_dir():
        name = shlex.quote(str(out))
        log.info("try it: rocm-ext chat %s; take it elsewhere: rocm-ext export %s --gguf FILE", name, name)


def _out_of_memory(recipe: RunnableRecipe, error: RuntimeError) -> str:
    """Say what was planned and measured when memory ran out, and what to change."""
    learner, measured = getattr(recipe, "learner", None), readable(peak_memory(recipe.runtime.device))
    text = f"out of memory at {measured}: {' '.join(str(error).split())[:200]}"
    if learner is None or not hasattr(learner, "cures"):
        return f"{text} Free memory, or use a smaller model"
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    named = learner.cures(0.8 * learner.planned_peak)
    if any(name.startswith("rocm_ext.sampling") for name in modules):
        slots = (recipe.cfg.engine.get("slots") or 0) // 2
        named = f"engine.slots={max(MIN_ROWS, slots)} or max_new_tokens={recipe.cfg.max_new_tokens // 2}"
    planned = f"{readable(learner.planned_peak)} of {readable(learner.planned_budget)}"
    return f"{text} Planned for training: {planned}. Set {named}; resume_from_checkpoint=True continues"


def _recording(cfg: DictConfig, ranks: Ranks) -> AbstractContextManager[None]:
    """Context in which one rank of each machine records the machine's counters."""
    first = ranks.is_main
    if several_machines():
        first = local_rank() == 0
        ranks.barrier()  # a fresh run has removed earlier files by now
    seconds = cfg.hardware_log_seconds if first else None
    return recording(Path(cfg.output_dir), seconds, name=log_of(0 if ranks.is_main else machine_index()))
