"""Components that every recipe builds from its config: tokenizer, optimiser and schedule."""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from tokenizers import Tokenizer
from torch import nn

from rocm_ext import config
from rocm_ext.base.errors import UserError, one_line, refuse
from rocm_ext.base.log import log
from rocm_ext.data.encoder import HFTokenizer

_TRIED_STEPS = 10_000  # of a schedule, before the weights are read; they take a second
# Their tokens differ between vocabularies and between merges. Tokenizers of a family encode them equally.
_TEXTS = (
    "How many clips did Natalia sell altogether in April and May?",
    "def add(a, b):\n    return a + b  # 12345 * 67.89",
    "The answer is 72. Übermorgen, naïve café; 你好世界!",
)


# ---- tokenizer


def check_tokenizer(tokenizer: Any, cfg: DictConfig) -> None:
    """Compare a tokenizer with the weights' ``tokenizer.json``, if there is one.

    It skips a user's tokenizer without torchtune's ``encode``.

    Raises:
        UserError: they encode text in different ways, or a special token has another id.
    """
    path = Path(cfg.checkpointer.checkpoint_dir) / "tokenizer.json"
    is_ours = isinstance(getattr(tokenizer, "base", tokenizer), HFTokenizer)
    if is_ours and path == Path(cfg.tokenizer.path):
        return
    if not (path.is_file() and hasattr(tokenizer, "encode")):
        return
    problems = []
    try:
        theirs = Tokenizer.from_file(str(path))
        for text in _TEXTS:
            ids = list(tokenizer.encode(text, add_bos=False, add_eos=False))
            expected = theirs.encode(text, add_special_tokens=False).ids
            if ids != expected:
                problems.append(
                    f"it encodes {text!r} as {len(ids)} tokens {str(ids[:4])[:-1]}, …], but {path} of the base model "
                    f"as {len(expected)} tokens {str(expected[:4])[:-1]}, …]"
                )
    # tokenizers raises a bare Exception, and a user's tokenizer anything
    except Exception as error:
        log.warning("the tokenizer could not be compared with %s: %s", path, one_line(error))
        return
    special = getattr(tokenizer, "special_tokens", None)
    for token, number in (special if isinstance(special, Mapping) else {}).items():
        their_id = theirs.token_to_id(token)
        # torchtune numbers Llama's reserved tokens in another way, and uses none of them
        if "reserved_special_token" not in token and their_id not in (None, number):
            problems.append(
                f"the id of {token} is {number}, but in {path} of the base model it is {their_id}"
            )
    cure = "set tokenizer.path and its other files to those of checkpointer.checkpoint_dir"
    refuse(f"tokenizer: {problem}; {cure}" for problem in problems)


# ---- optimiser and schedule


def setup_optimizer(cfg: DictConfig, adapter: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Build the config's optimiser over an adapter's parameters, by name.

    With ``loraplus_lr_ratio`` there are two groups (LoRA+, arXiv:2402.12354). As in PEFT's
    ``create_loraplus_optimizer``, the fast one has B and DoRA's magnitudes.
    """
    ratio = cfg.loraplus_lr_ratio
    if ratio is None:
        return config.instantiate(cfg.optimizer, list(adapter.values()), key="optimizer")
    slow: list[nn.Parameter] = []
    fast: list[nn.Parameter] = []
    for name, parameter in adapter.items():
        is_fast = "lora_b" in name or parameter.ndim == 1
        (fast if is_fast else slow).append(parameter)
    groups = [{"params": slow}, {"params": fast}]
    optimizer = config.instantiate(cfg.optimizer, groups, key="optimizer")
    group = optimizer.param_groups[1]
    group["lr"] = group["lr"] * ratio  # no *=: torchao's is a tensor, which the groups may share
    return optimizer


def setup_scheduler(
    component: DictConfig | None, optimizer: torch.optim.Optimizer, steps: int
) -> Any:
    """Build the schedule that ``component`` names for a run of ``steps`` optimiser steps; None without one.

    Raises:
        UserError: it cannot be built, or gives groups of parameters with different learning rates the same one.
    """
    if component is None:
        return None
    length = {}
    # torchtune's schedules need it, torch's do not accept it
    if config.takes(component, "num_training_steps", key="lr_scheduler"):
        length["num_training_steps"] = steps
    before = _rates(optimizer)
    scheduler = config.instantiate(component, optimizer, key="lr_scheduler", **length)
    after = _rates(optimizer)
    if len(before) > 1 and len(after) == 1 and any(after):
        raise UserError(
            f"lr_scheduler: {component[config.COMPONENT]} sets one learning rate for all parameters, and they begin "
            "with different ones, as with loraplus_lr_ratio; choose a schedule that scales them, such as "
            "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
        )
    return scheduler


def _rates(optimizer: torch.optim.Optimizer) -> set[float]:
    return {float(group["lr"]) for group in optimizer.param_groups}


def check_learning_rate(optimizer: torch.optim.Optimizer) -> None:
    """Check the learning rates that an optimiser begins with.

    Raises:
        UserError: one is missing, negative or not finite, or all are 0.
    """
    rates: list[Any] = []
    for group in optimizer.param_groups:
        rate = group.get("lr")
        rates.append(float(rate) if isinstance(rate, torch.Tensor) else rate)
    if not all(map(is_rate, rates)) or not any(rates):
        text = ", ".join(map(repr, rates))
        raise UserError(f"optimizer.lr is {text}; expected a number above 0")


def in_force(optimizer: torch.optim.Optimizer) -> str:
    """Return an optimiser's arguments without switches that are off: ``AdamW, lr 3e-05, betas (0.9, 0.95), eps 1e-08``.

    ``lr`` is the rate before any schedule. Where groups of parameters differ, ``|`` stands between their values.
    """
    parts = [type(optimizer).__name__]
    for name in optimizer.param_groups[0]:
        if name in ("params", "initial_lr"):
            continue
        texts = []
        for group in optimizer.param_groups:
            value: Any = group.get(name)
            if name == "lr":
                value = group.get("initial_lr", value)
            is_number = isinstance(value, float | torch.Tensor)
            texts.append(f"{float(value):g}" if is_number else str(value))
        if {*texts} - {"None", "False"}:
            parts.append(f"{name} {' | '.join(dict.fromkeys(texts))}")
    return ", ".join(parts)


def is_rate(value: Any) -> bool:
    """Return whether a value is a learning rate: a finite number of at least 0."""
    number = isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def try_out(cfg: DictConfig, adapter: Mapping[str, nn.Parameter], steps: int) -> None:
    """Do one step of the config's optimiser and all ``steps`` of its schedule on copies of the parameters ``adapter``.

    Raises:
        UserError: optimiser or schedule cannot be built, does not work with a plain training step, or gives a learning
            rate that is negative or not finite.
    """
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in adapter.items()}
    optimizer = setup_optimizer(cfg, copies)
    check_learning_rate(optimizer)
    devices = []
    for copy in copies.values():
        copy.grad = torch.zeros_like(copy)
        if copy.is_cuda:
            devices = [copy.device]
    with torch.random.fork_rng(devices):  # some optimisers round at random
        try:
            optimizer.step()
        except Exception as error:  # whatever the component raises
            raise UserError(
                f"optimizer: {cfg.optimizer[config.COMPONENT]}: {one_line(error)}; an optimiser gets dense gradients "
                "and no closure here: choose another, such as torch.optim.AdamW"
            ) from error
    with warnings.catch_warnings():
        # torch counts the optimiser's steps, and this one has done a single step
        warnings.simplefilter("ignore")
        scheduler = setup_scheduler(cfg.lr_scheduler, optimizer, steps)
        if scheduler is None:
            return
        name = cfg.lr_scheduler[config.COMPONENT]
        for step in range(1, min(steps, _TRIED_STEPS) + 1):
            for group in optimizer.param_groups:
                if not is_rate(group["lr"]):
                    raise UserError(
                        f"lr_scheduler: {name}: the learning rate of step {step} is {float(group['lr'])}"
                    )
            try:
                scheduler.step()
            except Exception as error:
                raise UserError(
                    f"lr_scheduler: {name}: step {step} of {steps}: {one_line(error)}; a schedule gets neither a "
                    "metric nor other arguments here, and must be as long as the run"
                ) from error


def nothing_changed(steps: int, length: str) -> str:
    """Return a warning about ``steps`` optimiser steps that changed nothing in ``length``, such as ``the run``."""
    done = f"{steps} optimiser steps" if steps != 1 else "1 optimiser step"
    return (
        f"{done} changed nothing, bit for bit. Either the warm-up is as long as {length}, or the loss "
        "scale of fp16 never settles: remove lr_scheduler, train on more rows, or set another dtype"
    )
