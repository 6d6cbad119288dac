"""Resuming with another number of steps than the run began with."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from rocm_ext.base.errors import UserError
from rocm_ext.base.log import log
from rocm_ext.data.batches import Steps


def check_length(path: Path, step: int, steps: Steps, cfg: DictConfig, begun: Mapping[str, Any]) -> bool:
    """Check that ``epochs`` and ``max_steps_per_epoch`` continue the steps done.

    Args:
        path: the checkpoint, for messages.
        step: optimiser steps done.
        steps: rows of each step of this run.
        cfg: config of this run.
        begun: config of the run that wrote the checkpoint.

    Returns:
        Whether the run has as many steps as when it began.

    Raises:
        UserError: the checkpoint is past this run's end, or its steps had other rows.
    """
    before = replace(steps, limit=begun["max_steps_per_epoch"])
    if before.per_epoch != steps.per_epoch and step > min(before.per_epoch, steps.per_epoch):
        raise UserError(
            f"{path} has {step} steps, so max_steps_per_epoch cannot change from {before.limit} to {steps.limit}: with "
            "it these steps would have had other rows. Undo the change; epochs may be raised"
        )
    total = steps.per_epoch * cfg.epochs
    if step > total:
        raise UserError(f"{path} has {step} steps, but epochs={cfg.epochs} ends the run after {total}; raise epochs")
    was = before.per_epoch * begun["epochs"]
    if total != was:
        log.info("the run had %d steps in all; it now has %d", was, total)
    return total == was


def check_updates(path: Path, updates: int, total: int, was: int) -> bool:
    """Check that a run of ``total`` updates continues the ``updates`` that a checkpoint at ``path`` has done.

    Returns:
        Whether the run has as many updates as when it began, ``was``.

    Raises:
        UserError: the checkpoint is past this run's end.
    """
    if updates > total:
        raise UserError(f"{path} has {updates} updates, but the run ends after {total}; raise its number of steps")
    if total != was:
        log.info("the run had %d updates in all; it now has %d", was, total)
    return total == was


def load_for_new_length(optimizer: torch.optim.Optimizer, scheduler: Any, state: Mapping[str, Any], step: int) -> None:
    """Load an optimiser's state, and bring the schedule of the new length to ``step``.

    Args:
        optimizer: the optimiser, as built.
        scheduler: its schedule, as built for the new number of steps; None: constant learning rate.
        state: the checkpoint's state of the optimiser.
        step: optimiser steps done.
    """
    if scheduler is None:
        optimizer.load_state_dict(dict(state))
        return
    advance(scheduler, step)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(state))
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate != (was := float(group["lr"])):
            log.info("lr_scheduler follows the new number of steps: learning rate %.3g, was %.3g", rate, was)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def advance(scheduler: Any, steps: int) -> None:
    """Step a schedule ``steps`` times without its optimiser."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch expects an optimiser step before each of these
        for _ in range(steps):
            scheduler.step()
