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
    if isinstance(getattr(tokenizer, "base", tokenizer), HFTokenizer) and path == Path(
        cfg.tokenizer.path
    ):
        return
    if not (path.is_file() and hasattr(tokenizer, "encode")):
        return
    try:
        theirs = Tokenizer.from_file(str(path))
        pairs = [
            (
                tokenizer.encode(text, add_bos=False, add_eos=False),
                theirs.encode(text, add_special_tokens=False).ids,
            )
            for text in _TEXTS
        ]
    except (
        Exception
    ) as error:  # tokenizers raises a bare Exception, and a user's tokenizer anything
        log.warning("the tokenizer could not be compared with %s: %s", path, one_line(error))
        return
    problems = [
        f"it encodes {text!r} as {len(ours)} tokens {str(list(ours[:4]))[:-1]}, …], but {path} of the base model as "
        f"{len(expected)} tokens {str(expected[:4])[:-1]}, …]"
        for text, (ours, expected) in zip(_TEXTS, pairs, strict=True)
        if list(ours) != expected
    ]
    special = getattr(tokenizer, "special_tokens", None)
    problems += [
        f"the id of {token} is {number}, but in {path} of the base model it is {theirs.token_to_id(token)}"
        for token, number in (special.items() if isinstance(special, Mapping) else ())
        # torchtune numbers Llama's reserved tokens in another way, and uses none of them
        if "reserved_special_token" not in token and theirs.token_to_id(token) not in (None, number)
    ]
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
    slow: dict[str, list[nn.Parameter]] = {"params": []}
    fast: dict[str, list[nn.Parameter]] = {"params": []}
    for name, parameter in adapter.items():
        is_fast = "lora_b" in name or parameter.ndim == 1
        (fast if is_fast else slow)["params"].append(parameter)
    optimizer = config.instantiate(cfg.optimizer, [slow, fast], key="optimizer")
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
    length = {
        "num_training_steps": steps
    }  # torchtune's schedules need it, torch's do not accept it
    arguments = length if config.takes(component, "num_training_steps", key="lr_scheduler") else {}
    before = _rates(optimizer)
    scheduler = config.instantiate(component, optimizer, key="lr_scheduler", **arguments)
    if len(before) > 1 and len(after := _rates(optimizer)) == 1 and any(after):
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
    rates: list[Any] = [group.get("lr") for group in optimizer.param_groups]
    if not all(map(_is_rate, rates)) or not any(map(float, rates)):
        text = ", ".join(str(float(r)) if isinstance(r, torch.Tensor) else repr(r) for r in rates)
        raise UserError(f"optimizer.lr is {text}; expected a number above 0")


def in_force(optimizer: torch.optim.Optimizer) -> str:
    """Return an optimiser's arguments without switches that are off: ``AdamW, lr 3e-05, betas (0.9, 0.95), eps 1e-08``.

    ``lr`` is the rate before any schedule. Where groups of parameters differ, ``|`` stands between their values.
    """
    groups, parts = optimizer.param_groups, [type(optimizer).__name__]
    for name in [name for name in groups[0] if name not in ("params", "initial_lr")]:
        values = [
            group.get("initial_lr" if name == "lr" else name, group.get(name)) for group in groups
        ]
        texts = [f"{float(v):g}" if isinstance(v, float | torch.Tensor) else str(v) for v in values]
        if {*texts} - {"None", "False"}:
            parts.append(f"{name} {' | '.join(dict.fromkeys(texts))}")
    return ", ".join(parts)


def _is_rate(value: Any) -> bool:
    number = isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def try_out(cfg: DictConfig, adapter: Mapping[str, nn.Parameter], steps: int) -> None:
    """Do one step of the config's optimiser and all ``steps`` of its schedule on copies of the parameters ``adapter``.

    Raises:
        UserError: optimiser or schedule cannot be built, does not work with a plain training step, or gives a learning
            rate that is negative or not finite.
    """
    named = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in adapter.items()}
    optimizer, copies = setup_optimizer(cfg, named), list(named.values())
    check_learning_rate(optimizer)
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    with torch.random.fork_rng(
        [copies[0].device] if copies[0].is_cuda else []
    ):  # some optimisers round at random
        try:
            optimizer.step()
        except Exception as error:  # whatever the component raises
            raise UserError(
                f"optimizer: {cfg.optimizer[config.COMPONENT]}: {one_line(error)}; an optimiser gets dense gradients "
                "and no closure here: choose another, such as torch.optim.AdamW"
            ) from error
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch counts the optimiser's steps, and this one has done a single step
        _try_schedule(cfg, optimizer, steps)


def _try_schedule(cfg: DictConfig, optimizer: torch.optim.Optimizer, steps: int) -> None:
    scheduler = setup_scheduler(cfg.lr_scheduler, optimizer, steps)
    if scheduler is None:
        return
    name = cfg.lr_scheduler[config.COMPONENT]
    for step in range(min(steps, _TRIED_STEPS)):
        if not all(_is_rate(group["lr"]) for group in optimizer.param_groups):
            rate = float(optimizer.param_groups[0]["lr"])
            raise UserError(f"lr_scheduler: {name}: the learning rate of step {step + 1} is {rate}")
        try:
            scheduler.step()
        except Exception as error:
            raise UserError(
                f"lr_scheduler: {name}: step {step + 1} of {steps}: {one_line(error)}; a schedule gets neither a "
                "metric nor other arguments here, and must be as long as the run"
            ) from error


def nothing_changed(steps: int, length: str) -> str:
    """Return a warning about ``steps`` optimiser steps that changed nothing in ``length``, such as ``the run``."""
    done = f"{steps} optimiser steps" if steps != 1 else "1 optimiser step"
    return (
        f"{done} changed nothing, bit for bit. Either the warm-up is as long as {length}, or the loss "
        "scale of fp16 never settles: remove lr_scheduler, train on more rows, or set another dtype"
    )
