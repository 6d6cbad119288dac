"""Range checks of the keys of training."""

import os
from typing import Any

from omegaconf import DictConfig, ListConfig

from rocm_ext.config.checks.kinds import (
    OR_NULL,
    check_choices,
    check_named,
    check_numbers,
    check_switches,
    check_whole,
)
from rocm_ext.errors import UserError
from rocm_ext.hardware.choices import ATTENTION, COMPILE

_WHOLE = {  # key -> the least, and whether it may be null
    **dict.fromkeys(["batch_size", "epochs", "log_every_n_steps", "keep_last_n_checkpoints"], (1, False)),
    **dict.fromkeys(["gradient_accumulation_steps", "sequences_per_step"], (1, True)),
    **dict.fromkeys(["max_steps_per_epoch", "run_val_every_n_steps", "save_every_n_steps"], (1, True)),
    "early_stopping_patience": (1, True),
    "num_workers": (0, False),
    "data_seed": (0, False),
    "seed": (0, True),
}
_SWITCHES = (
    *("startup_checks", "pin_memory", "enable_activation_offloading", "shuffle"),
    *("resume_from_checkpoint", "overwrite_output_dir", "save_adapter_weights_only", "log_peak_memory_stats"),
)


_MOST_PROFILED = 100  # steps; their events are in memory until the trace is written
_DETERMINISM = (None, False, True, 2, "default", "warn", "error")  # what torch takes; 0 is False and 1 is True


def check_values(cfg: DictConfig) -> None:
    """Refuse numbers out of range and values of the wrong kind.

    Raises:
        UserError: naming the key, what was found and what was expected.
    """
    check_whole(cfg, _WHOLE)
    if (tokens := cfg.tokens_per_micro_batch) not in (None, "auto") and not (type(tokens) is int and tokens >= 1):
        raise UserError(f"tokens_per_micro_batch is {tokens!r}; expected a whole number of at least 1, auto, or null")
    if (threads := cfg.cpu_threads) != "auto" and not (type(threads) is int and threads >= 1):
        raise UserError(f"cpu_threads is {threads!r}; expected a whole number of at least 1, or auto")
    for key, most in (("seed", 2**32 - 1), ("data_seed", 2**63 - 1)):  # the limits of NumPy, and of torch with epochs
        if (cfg[key] or 0) > most:
            null = OR_NULL * (key == "seed")
            raise UserError(f"{key} is {cfg[key]}; expected a whole number from 0 to {most}{null}")
    check_switches(cfg, _SWITCHES)
    check_choices(cfg, attention=ATTENTION)
    if type(cfg.compile) is int or cfg.compile not in COMPILE:  # 1 == True
        raise UserError(f"compile is {cfg.compile!r}; expected {', '.join(map(str, COMPILE[:-1]))} or {COMPILE[-1]}")
    if not isinstance(cfg.use_rslora, bool | None):
        raise UserError(f"use_rslora is {cfg.use_rslora!r}; expected True, False or null")
    for key in ("dtype", "device"):
        if not isinstance(cfg[key], str | None):
            raise UserError(f"{key} is {cfg[key]!r}; expected a name")
    overrides = cfg.hardware_overrides
    if not (isinstance(overrides, ListConfig) and all(isinstance(key, str) for key in overrides)):
        raise UserError(f"hardware_overrides is {overrides!r}; expected a list of keys")
    if (mode := cfg.cudnn_deterministic_mode) not in _DETERMINISM:
        raise UserError(f"cudnn_deterministic_mode is {mode!r}; expected True, False or null")
    if not isinstance(cfg.early_stopping_metric, str):
        raise UserError(f"early_stopping_metric is {cfg.early_stopping_metric!r}; expected a name, such as val_loss")
    check_named(cfg, "loss")
    _check_model(cfg.model)
    _check_checkpointer(cfg.checkpointer)
    _check_output_dir(cfg.output_dir)
    _check_profile(cfg)
    check_numbers(
        cfg,
        validation_fraction=(lambda x: 0 <= x < 1, "a share from 0 to under 1"),
        memory_fraction=(lambda x: x is None or 0 < x <= 1, "a share above 0, at most 1" + OR_NULL),
        clip_grad_norm=(lambda x: x is None or x > 0, "a number above 0" + OR_NULL),
        node_timeout=(lambda x: 3 <= x <= 86400, "seconds from 3 to 86400"),
        hardware_log_seconds=(lambda x: x is None or 0.1 <= x <= 86400, "seconds from 0.1 to 86400" + OR_NULL),
    )
    if cfg.sequences_per_step and cfg.gradient_accumulation_steps:
        raise UserError("sequences_per_step and gradient_accumulation_steps are both set; keep one of them")


def _check_model(model: DictConfig) -> None:
    rank = model.get("lora_rank", 1)
    if not (type(rank) is int and rank >= 1):
        raise UserError(f"model.lora_rank is {rank!r}; expected a whole number of at least 1")
    for key in ("use_dora", "quantize_base", "apply_lora_to_mlp", "apply_lora_to_output"):
        if not isinstance(model.get(key, False), bool):
            raise UserError(f"model.{key} is {model[key]!r}; expected True or False")
    found = {"model.lora_alpha": model.get("lora_alpha", 1), "model.lora_dropout": model.get("lora_dropout", 0)}
    check_numbers(
        DictConfig(found),
        **{
            "model.lora_alpha": (lambda x: x > 0, "a number above 0"),
            "model.lora_dropout": (lambda x: 0 <= x < 1, "a share from 0 to under 1"),
        },
    )


def _check_checkpointer(checkpointer: DictConfig) -> None:
    for key in ("checkpoint_dir", "model_type"):
        if not isinstance(checkpointer.get(key), str) or not checkpointer[key]:
            raise UserError(f"checkpointer.{key} is {checkpointer.get(key)!r}; expected a text")
    adapter = checkpointer.get("adapter_checkpoint")
    if adapter is not None and not (isinstance(adapter, str) and adapter):
        raise UserError(f"checkpointer.adapter_checkpoint is {adapter!r}; expected an adapter's folder{OR_NULL}")
    if (theirs := checkpointer.get("recipe_checkpoint")) is not None:
        raise UserError(
            f"checkpointer.recipe_checkpoint is {theirs!r}; expected null, because a run resumes from "
            "output_dir/checkpoints: set resume_from_checkpoint=True"
        )


def _check_profile(cfg: DictConfig) -> None:
    steps, theirs = cfg.profile_steps, cfg.profiler
    if steps is not None and not (type(steps) is int and 0 <= steps <= _MOST_PROFILED):
        raise UserError(f"profile_steps is {steps!r}; expected a whole number from 0 to {_MOST_PROFILED}{OR_NULL}")
    if theirs is None:
        return
    if not isinstance(theirs, DictConfig):
        raise UserError(f"profiler is {theirs!r}; expected null, or torchtune's arguments with enabled: False")
    enabled = theirs.get("enabled", False)
    if not isinstance(enabled, bool):
        raise UserError(f"profiler.enabled is {enabled!r}; expected False")
    if enabled:
        active = theirs.get("active_steps")
        wanted = active if type(active) is int and 1 <= active <= _MOST_PROFILED else 2  # torchtune's default
        raise UserError(
            "profiler.enabled is True, and torchtune's profiler does not run here; write profiler.enabled=False "
            f"profile_steps={wanted}, which records so many steps in output_dir/profile"
        )


def _check_output_dir(path: Any) -> None:
    if not isinstance(path, str) or not path.strip():
        raise UserError(f"output_dir is {path!r}; expected a folder")
    try:
        os.stat(path)
    except FileNotFoundError:
        pass
    except ValueError as error:  # a NUL byte
        raise UserError(f"output_dir is {path!r}; expected a folder: {error}") from error
    except OSError as error:
        found = path if len(path) <= 80 else f"{path[:80]}… ({len(path)} characters)"
        raise UserError(f"cannot write output_dir {found}: {error.strerror}; choose another output_dir") from error


def check_max_seq_len(value: Any) -> None:
    """Refuse a tokenizer's ``max_seq_len`` unless it is a whole number or null.

    Raises:
        UserError: saying what was expected.
    """
    if value is not None and not (type(value) is int and value >= 1):
        raise UserError(f"tokenizer.max_seq_len is {value!r}; expected a whole number of at least 1{OR_NULL}")
