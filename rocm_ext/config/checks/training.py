"""Checks of the keys of training."""

import os
from collections.abc import Iterator
from contextlib import suppress

from omegaconf import DictConfig

from rocm_ext.base import registry
from rocm_ext.base.errors import refuse
from rocm_ext.base.kinds import (
    NOT_NEGATIVE,
    NULL,
    POSITIVE,
    REST,
    SWITCH,
    Kind,
    by_pattern,
    check,
    integer,
    one_of,
    text,
)
from rocm_ext.config.components import judges_held_out
from rocm_ext.config.keys import kinds

EVAL_METRIC = "eval_correct"  # share of right answers to eval_prompts
UNJUDGED = (
    "eval_prompts has prompts, and nothing judges the answers: set verifier, or eval_prompts=null"
)
PATTERNS = {
    "rank_pattern": by_pattern(integer(1, 2**16)) | NULL,
    "alpha_pattern": by_pattern(POSITIVE) | NULL,
}
_MODEL: dict[str, Kind] = {
    **PATTERNS,
    "lora_rank": integer(1, 8192),  # as wide as layers of large models
    "lora_alpha": POSITIVE,
    "lora_dropout": REST,
    "quantize_base": one_of(True, False, "nf4", "fp8"),
    **dict.fromkeys(("use_dora", "apply_lora_to_mlp", "apply_lora_to_output"), SWITCH),
}
_OPTIMIZER: dict[str, Kind] = {"lr": POSITIVE, "weight_decay": NOT_NEGATIVE}
_CHECKPOINTER: dict[str, Kind] = {
    "checkpoint_dir": text("a text"),
    "model_type": text("a text"),
    "adapter_checkpoint": text("an adapter's folder") | NULL,
    "recipe_checkpoint": Kind(
        lambda value: value is None,
        (
            "null, because a run resumes from output_dir/checkpoints: set resume_from_checkpoint=True",
        ),
    ),
}


def by_answers(cfg: DictConfig) -> bool:
    """Whether evaluations, not validations, choose the best adapter: the metric is the score of ``eval_prompts``."""
    return cfg.early_stopping_metric.partition("/")[0] == EVAL_METRIC


def check_values(cfg: DictConfig) -> None:
    """Raise a UserError for numbers out of range and values of the wrong kind."""
    check(cfg, kinds(registry.SFT))
    check(cfg.model, _MODEL, "model.")
    check(cfg.optimizer, _OPTIMIZER, "optimizer.")
    check(
        {"checkpoint_dir": None, "model_type": None, **cfg.checkpointer},
        _CHECKPOINTER,
        "checkpointer.",
    )
    refuse(_faults(cfg))


def _faults(cfg: DictConfig) -> Iterator[str]:
    path, profiler = cfg.output_dir, cfg.profiler
    if not isinstance(path, str) or not path.strip():
        yield f"output_dir is {path!r}; expected a folder"
    try:
        with suppress(FileNotFoundError):  # the run creates it
            os.stat(path)
    except ValueError as error:  # a NUL byte
        yield f"output_dir is {path!r}; expected a folder: {error}"
    except OSError as error:
        shown = path if len(path) <= 80 else f"{path[:80]}… ({len(path)} characters)"
        yield f"cannot write output_dir {shown}: {error.strerror}; choose another output_dir"
    if profiler is not None:  # torchtune's configs have this key; its profiler does not run here
        if not isinstance(profiler, DictConfig):
            yield f"profiler is {profiler!r}; expected null, or torchtune's arguments with enabled: False"
        check(profiler, {"enabled": SWITCH}, "profiler.")
        if profiler.get("enabled"):
            yield (
                "profiler.enabled is True, and torchtune's profiler does not run here; write profiler.enabled=False "
                "profile_steps=2, which records so many steps in output_dir/profile"
            )
    if cfg.sequences_per_step and cfg.gradient_accumulation_steps:
        yield "sequences_per_step and gradient_accumulation_steps are both set; keep one of them"
    if not judges_held_out(cfg):
        yield UNJUDGED
    if cfg.eval_prompts is None and by_answers(cfg):
        yield f"early_stopping_metric {EVAL_METRIC} needs held-out prompts: set eval_prompts and a verifier"
    for key in ("verifier", "eval_every_n_steps"):
        if cfg.eval_prompts is None and cfg[key] is not None:
            yield f"{key} is set, and without eval_prompts nothing reads it: set eval_prompts, or {key}=null"
    held_out = cfg.dataset_val is not None or cfg.validation_fraction
    if cfg.run_val_every_n_steps and not held_out:
        yield "run_val_every_n_steps is set without rows to validate on: set dataset_val, validation_fraction, or null"
