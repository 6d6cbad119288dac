"""What the keys of RAFT and GRPO may hold."""

import inspect

from omegaconf import DictConfig

from rocm_ext.base.errors import UserError
from rocm_ext.base.importing import COMPONENT as NAME
from rocm_ext.base.importing import import_component
from rocm_ext.config.checks.kinds import (
    COMPONENT,
    NOT_NEGATIVE,
    NULL,
    POSITIVE,
    SHARE,
    SWITCH,
    Kind,
    check,
    integer,
    list_of_texts,
    number,
    one_of,
)

_SHARED: dict[str, Kind] = {
    "engine": COMPONENT,
    "samples_per_prompt": integer(1),
    "max_new_tokens": integer(1),
    "stop_strings": list_of_texts("a list of texts"),
    "verify_workers": integer(1) | NULL,
    "verify_timeout": number(lambda x: x > 0, "seconds above 0"),
    "max_error_share": number(lambda x: 0 <= x <= 1, "a share from 0 to 1"),
    "clip_high": POSITIVE,
    "min_entropy": POSITIVE | NULL,
    "stop_after_no_gain": integer(1) | NULL,
    "eval_samples": integer(0),
}
_RAFT: dict[str, Kind] = {
    "cycles": integer(1),
    "prompts_per_cycle": integer(1) | NULL,
    "retry_unsolved_after": integer(1) | NULL,
    "skip_solved": SWITCH,
    "keep": one_of("correct", "rewarded"),
    "reward_threshold": number(lambda x: 0 < x <= 1, "a number above 0, at most 1"),
    "max_per_prompt": integer(1) | NULL,
    "best_fraction": SHARE,
    "deduplicate": SWITCH,
    "drop_truncated": SWITCH,
    "replay_cycles": integer(0) | one_of("all") | NULL,
    "objective": one_of("raft", "raft++"),
    "loss": COMPONENT,
    "start_from": one_of("previous", "base"),
    "optimizer_state": one_of("run", "cycle"),
    "lr_decay": number(lambda x: 0 < x <= 1, "a number above 0, at most 1"),
    "lr_floor": NOT_NEGATIVE,
    "max_empty_cycles": integer(1),
    "eval_every_n_cycles": integer(1),
    "keep_last_n_adapters": integer(1) | NULL,
}
_GRPO: dict[str, Kind] = {
    "steps": integer(1),
    "prompts_per_step": integer(1),
    "samples_per_prompt": Kind(
        integer(2).fits,
        ("at least 2: an advantage compares an answer with the others of its group, so one answer alone has none",),
    ),
    "temperature": number(lambda x: x > 0, "a number above 0, because a group needs different answers"),
    "refill": SWITCH,
    "max_refills": integer(1),
    "curriculum": one_of("none", "informative", "easy_to_hard"),
    "max_length_share": SHARE | NULL,
    "truncated": one_of("mask", "penalize", "keep"),
    "truncation_margin": integer(0),
    "truncation_penalty": POSITIVE,
    "center": one_of("mean", "leave_one_out"),
    "scale": one_of("std", "batch", "none"),
    "clip_low": POSITIVE,
    "kl_coef": NOT_NEGATIVE,
    "entropy_coef": NOT_NEGATIVE,
    "old_logprobs": one_of("trainer", "sampler"),
    "mismatch": one_of("truncate", "mask", "none"),
    "mismatch_level": one_of("token", "sequence"),
    "mismatch_limit": number(lambda x: x > 1, "a number above 1"),
    "updates_per_step": integer(1),
    "groups_per_update": integer(1) | NULL,
    "max_staleness": one_of(0, 1),
    "max_flat_steps": integer(1),
    "eval_every_n_steps": integer(1),
    "save_every_n_steps": integer(1),
    "keep_samples": one_of("all") | integer(1),
}
# The names of rocm_ext.losses.policy_gradient.LOSSES, which stands above this room
_WITH_RATIO = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")
_WITHOUT_RATIO = ("rloo", "reinforce")


def updates_of_pass(cfg: DictConfig, groups: int | None = None) -> int:
    """Return how many updates of ``groups_per_update`` groups or more a pass of GRPO has.

    Args:
        cfg: config of ``grpo_rocm``.
        groups: groups that a step trains on; None: as many as it asks prompts.
    """
    groups = cfg.prompts_per_step if groups is None else groups
    return max(1, groups // (cfg.groups_per_update or cfg.prompts_per_step))


def updates_of_step(cfg: DictConfig) -> int:
    """Return the most updates of a step of GRPO, those of a step in which every group teaches."""
    return cfg.updates_per_step * updates_of_pass(cfg)


def check_raft_values(cfg: DictConfig) -> None:
    """Refuse values of the keys that RAFT has and SFT lacks. ``Sampling`` checks its own.

    Raises:
        UserError: naming the key, what was found and what was expected.
    """
    check(cfg, _SHARED | _RAFT)
    _check_shared(cfg)
    if cfg.optimizer_state == "run" and cfg.start_from == "base":
        raise UserError(
            "optimizer_state=run keeps the moments of other weights: with start_from=base each cycle trains the run's "
            "initial adapter anew; set optimizer_state=cycle, or start_from=previous"
        )
    if cfg.temperature == 0 and cfg.samples_per_prompt > 1:
        raise _same_answers(cfg, "samples_per_prompt", 1)


def check_grpo_values(cfg: DictConfig) -> None:
    """Refuse values of the keys that GRPO has and SFT lacks. ``Sampling`` checks its own.

    Raises:
        UserError: naming the key, what was found and what was expected.
    """
    check(cfg, _SHARED | _GRPO)
    _check_shared(cfg)
    _check_groups(cfg)
    _check_loss(cfg)
    _check_staleness(cfg)
    if cfg.keep_samples != "all" and cfg.keep_samples < cfg.save_every_n_steps:
        raise UserError(
            f"keep_samples is {cfg.keep_samples}, less than save_every_n_steps, {cfg.save_every_n_steps}: a resumed "
            "run trains again on the samples since its last checkpoint; raise keep_samples or lower save_every_n_steps"
        )


def _check_groups(cfg: DictConfig) -> None:
    if (cfg.groups_per_update or 1) > cfg.prompts_per_step:
        raise UserError(
            f"groups_per_update is {cfg.groups_per_update}, more than the {cfg.prompts_per_step} groups of a step "
            "(prompts_per_step); null takes all of them"
        )
    if cfg.truncation_margin > cfg.max_new_tokens:
        raise UserError(
            f"truncation_margin is {cfg.truncation_margin}; expected at most max_new_tokens, {cfg.max_new_tokens}"
        )


def _check_loss(cfg: DictConfig) -> None:
    names = (*_WITH_RATIO, *_WITHOUT_RATIO)
    component = isinstance(cfg.loss, DictConfig) and NAME in cfg.loss
    if not component and cfg.loss not in names:
        raise UserError(f"loss is {cfg.loss!r}; expected {', '.join(names)}, or a _component_")
    updates = updates_of_step(cfg)
    if cfg.loss in _WITHOUT_RATIO and updates > 1:
        raise UserError(
            f"loss {cfg.loss} has no ratio, so it takes one update per step, and updates_per_step and "
            f"groups_per_update give up to {updates}; set them to 1 and null, or loss to "
            f"{', '.join(_WITH_RATIO[:-1])} or {_WITH_RATIO[-1]}"
        )


def _check_staleness(cfg: DictConfig) -> None:
    if not cfg.max_staleness:
        return
    engine = import_component(cfg.engine[NAME])
    if inspect.isclass(engine) and not hasattr(engine, "check_adapter"):
        raise UserError(
            f"max_staleness=1 samples while the step before trains, and {engine.__name__} samples with the weights in "
            "training; set max_staleness=0, or sample on servers with engine._component_="
            "rocm_ext.sampling.OpenAIEngine"
        )
    clipped = updates_of_step(cfg) > 1 and cfg.old_logprobs == "sampler"
    if cfg.mismatch == "none" and not clipped and not isinstance(cfg.loss, DictConfig):
        raise UserError(
            "max_staleness=1 trains on answers of the adapter before the last update, and with mismatch=none nothing "
            "weighs them by how likely the present one gives them; set mismatch=truncate or mask, or max_staleness=0"
        )


def _check_shared(cfg: DictConfig) -> None:
    if cfg.temperature == 0 and cfg.eval_samples > 0:
        raise _same_answers(cfg, "eval_samples", 0)
    if not cfg.optimizer.get("lr"):
        raise UserError(f"optimizer.lr is {cfg.optimizer.get('lr')!r}; expected a number above 0")


def _same_answers(cfg: DictConfig, key: str, most: int) -> UserError:
    return UserError(
        f"temperature 0 gives the same answer {cfg[key]} times; set {key}={most}, or a temperature above 0"
    )
