"""Checks of the keys of training."""

import os
from collections.abc import Iterator
from contextlib import suppress

from omegaconf import DictConfig

from rocm_ext.base.errors import refuse
from rocm_ext.base.kinds import (
    ANY_COMPONENT,
    NOT_NEGATIVE,
    NULL,
    POSITIVE,
    REST,
    SHARE,
    SWITCH,
    Kind,
    by_pattern,
    check,
    integer,
    list_of_texts,
    number,
    one_of,
    text,
)
from rocm_ext.machine.profile import ATTENTION, COMPILE

EVAL_METRIC = "eval_correct"  # share of right answers to eval_prompts
UNJUDGED = "eval_prompts has prompts, and nothing judges the answers: set verifier, or eval_prompts=null"
_MOST_PROCESSES = 1024  # or threads; the largest servers have 512 hardware threads
_MOST_PROFILED = 100  # steps; their events are in memory until the trace is written
_KINDS: dict[str, Kind] = {
    "device": text("a name") | NULL,
    "dtype": text("a name") | NULL,
    "hardware_overrides": list_of_texts("a list of keys"),
    "memory_fraction": SHARE | NULL,
    "node_timeout": number(lambda x: 3 <= x <= 86400, "seconds from 3 to 86400"),
    "startup_checks": SWITCH,
    "cpu_threads": integer(1, _MOST_PROCESSES) | one_of("auto"),
    "num_workers": integer(0, _MOST_PROCESSES),
    "pin_memory": SWITCH,
    "compile": one_of(*COMPILE),
    "attention": one_of(*ATTENTION),
    "use_rslora": one_of(True, False, None),
    "over_budget": one_of("refuse", "try"),
    "enable_activation_offloading": SWITCH,
    "validation_fraction": REST,
    "shuffle": SWITCH,
    "bad_rows": one_of("error", "drop"),
    "keep_rows": SWITCH,
    "too_long": one_of("truncate", "drop", "error"),
    "data_seed": integer(0, 2**63 - 1),  # torch's limit, with epochs
    "batch_size": integer(1, 10**6),
    "gradient_accumulation_steps": integer(1) | NULL,
    "sequences_per_step": integer(1) | NULL,
    "tokens_per_micro_batch": integer(1) | one_of("auto") | NULL,
    "loss": ANY_COMPONENT,
    "loraplus_lr_ratio": POSITIVE | NULL,
    "clip_grad_norm": POSITIVE | NULL,
    "epochs": integer(1),
    "max_steps_per_epoch": integer(1) | NULL,
    "run_val_every_n_steps": integer(1) | NULL,
    "eval_every_n_steps": integer(1) | NULL,
    "early_stopping_patience": integer(1) | NULL,
    "early_stopping_metric": text("a name, such as val_loss"),
    "seed": integer(0, 2**32 - 1) | NULL,  # NumPy's limit
    "cudnn_deterministic_mode": one_of(True, False, None, 0, 1, 2, "default", "warn", "error"),  # what torch takes
    "resume_from_checkpoint": SWITCH,
    "overwrite_output_dir": SWITCH,
    "validate_only": SWITCH,
    "save_every_n_steps": integer(1) | NULL,
    "keep_last_n_checkpoints": integer(1),
    "save_adapter_weights_only": SWITCH,
    "log_every_n_steps": integer(1),
    "log_peak_memory_stats": SWITCH,
    "hardware_log_seconds": number(lambda x: 0.1 <= x <= 86400, "seconds from 0.1 to 86400") | NULL,
    "profile_steps": integer(0, _MOST_PROFILED) | NULL,
}
ANSWERS: dict[str, Kind] = {  # keys of all recipes, in answers.yaml
    "engine": ANY_COMPONENT,
    "verifier": ANY_COMPONENT | NULL,
    "max_new_tokens": integer(1),
    "stop_strings": list_of_texts("a list of texts"),
    "verify_workers": integer(1, 1024) | NULL,
    "verify_timeout": number(lambda x: x > 0, "seconds above 0"),
    "max_error_share": number(lambda x: 0 <= x <= 1, "a share from 0 to 1"),
}
PATTERNS = {"rank_pattern": by_pattern(integer(1, 2**16)) | NULL, "alpha_pattern": by_pattern(POSITIVE) | NULL}
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
        ("null, because a run resumes from output_dir/checkpoints: set resume_from_checkpoint=True",),
    ),
}


def check_values(cfg: DictConfig) -> None:
    """Raise a UserError for numbers out of range and values of the wrong kind."""
    check(cfg, _KINDS | ANSWERS)
    check(cfg.model, _MODEL, "model.")
    check(cfg.optimizer, _OPTIMIZER, "optimizer.")
    check({"checkpoint_dir": None, "model_type": None, **cfg.checkpointer}, _CHECKPOINTER, "checkpointer.")
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
    if cfg.eval_prompts is not None and cfg.verifier is None:
        yield UNJUDGED
    if cfg.eval_prompts is None and cfg.early_stopping_metric == EVAL_METRIC:
        yield f"early_stopping_metric {EVAL_METRIC} needs held-out prompts: set eval_prompts and a verifier"
    for key in ("verifier", "eval_every_n_steps"):
        if cfg.eval_prompts is None and cfg[key] is not None:
            yield f"{key} is set, and without eval_prompts nothing reads it: set eval_prompts, or {key}=null"
    held_out = cfg.dataset_val is not None or cfg.validation_fraction
    if cfg.run_val_every_n_steps and not held_out:
        yield "run_val_every_n_steps is set without rows to validate on: set dataset_val, validation_fraction, or null"
