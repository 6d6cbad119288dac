"""Which values the keys of a recipe may have, beside what their components check themselves."""

from omegaconf import DictConfig

from rocm_ext.errors import UserError

_OR_NULL = ", or null"
_WHOLE = {  # key -> the least, and whether it may be null
    **dict.fromkeys(["batch_size", "epochs", "log_every_n_steps", "keep_last_n_checkpoints"], (1, False)),
    **dict.fromkeys(["gradient_accumulation_steps", "sequences_per_step", "tokens_per_micro_batch"], (1, True)),
    **dict.fromkeys(["max_steps_per_epoch", "run_val_every_n_steps", "save_every_n_steps"], (1, True)),
    "early_stopping_patience": (1, True),
    "num_workers": (0, False),
    "data_seed": (0, False),
    "seed": (0, True),
}
_SWITCHES = (
    *("startup_checks", "pin_memory", "compile", "enable_activation_offloading", "shuffle"),
    *("resume_from_checkpoint", "overwrite_output_dir", "save_adapter_weights_only", "log_peak_memory_stats"),
)


def check_values(cfg: DictConfig) -> None:
    """Refuse numbers out of range and values of the wrong kind.

    Raises:
        UserError: naming the key, what was found and what was expected.
    """
    for key, (least, optional) in _WHOLE.items():
        value = cfg[key]
        if not (type(value) is int and value >= least) and not (value is None and optional):
            raise UserError(f"{key} is {value!r}; expected a whole number of at least {least}{_OR_NULL * optional}")
    if (cfg.seed or 0) >= 2**32:  # NumPy's limit
        raise UserError(f"seed is {cfg.seed}; expected a whole number from 0 to {2**32 - 1}, or null")
    rank = cfg.model.get("lora_rank", 1)
    if not (type(rank) is int and rank >= 1):
        raise UserError(f"model.lora_rank is {rank!r}; expected a whole number of at least 1")
    for key in _SWITCHES:
        if not isinstance(cfg[key], bool):
            raise UserError(f"{key} is {cfg[key]!r}; expected True or False")
    for key, fits, expected in (
        ("validation_fraction", lambda x: 0 <= x < 1, "a share from 0 to under 1"),
        ("memory_fraction", lambda x: x is None or 0 < x <= 1, "a share above 0, at most 1" + _OR_NULL),
        ("clip_grad_norm", lambda x: x is None or x > 0, "a number above 0" + _OR_NULL),
    ):
        value = cfg[key]
        if isinstance(value, bool) or not isinstance(value, int | float | None) or not fits(value):
            raise UserError(f"{key} is {value!r}; expected {expected}")
    if cfg.sequences_per_step and cfg.gradient_accumulation_steps:
        raise UserError("sequences_per_step and gradient_accumulation_steps are both set; keep one of them")
