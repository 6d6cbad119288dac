"""Range checks of the keys of RAFT and GRPO."""

import inspect

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
from rocm_ext.importing import COMPONENT, import_component

_WHOLE = {  # key -> the least, and whether it may be null
    **dict.fromkeys(["samples_per_prompt", "max_new_tokens"], (1, False)),
    **dict.fromkeys(["verify_workers", "stop_after_no_gain"], (1, True)),
    "eval_samples": (0, False),
}
_RAFT_WHOLE = {
    **dict.fromkeys(["cycles", "max_empty_cycles", "eval_every_n_cycles"], (1, False)),
    **dict.fromkeys(["prompts_per_cycle", "max_per_prompt", "keep_last_n_adapters", "retry_unsolved_after"], (1, True)),
}
_GRPO_WHOLE = {
    **dict.fromkeys(["steps", "prompts_per_step", "updates_per_step", "minibatches"], (1, False)),
    **dict.fromkeys(["max_refills", "max_flat_steps", "eval_every_n_steps", "save_every_n_steps"], (1, False)),
    "truncation_margin": (0, False),
}
# The names of rocm_ext.objectives.policy_gradient.LOSSES, which stands above this room
_WITH_RATIO = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")
_WITHOUT_RATIO = ("rloo", "reinforce")


def check_raft_values(cfg: DictConfig) -> None:
    """Refuse values of the keys that RAFT has and SFT lacks. ``Sampling`` checks its own.

    Raises:
        UserError: naming the key, what was found and what was expected.
    """
    _check_sampled(cfg)
    check_whole(cfg, _RAFT_WHOLE)
    check_named(cfg, "loss")
    check_switches(cfg, ("drop_truncated", "deduplicate", "skip_solved"))
    check_numbers(
        cfg,
        reward_threshold=(lambda x: 0 < x <= 1, "a number above 0, at most 1"),
        best_fraction=(lambda x: 0 < x <= 1, "a share above 0, at most 1"),
        lr_decay=(lambda x: 0 < x <= 1, "a number above 0, at most 1"),
        lr_floor=(lambda x: x >= 0, "a number of at least 0"),
    )
    check_choices(cfg, objective=("raft", "raft++"), start_from=("previous", "base"))
    if cfg.keep not in (None, "correct", "rewarded"):
        raise UserError(f"keep is {cfg.keep!r}; expected correct or rewarded{OR_NULL}")
    _check_cycles(cfg)
    if cfg.temperature == 0 and cfg.samples_per_prompt > 1:
        raise _same_answers(cfg, "samples_per_prompt", 1)


def _check_cycles(cfg: DictConfig) -> None:
    if (replay := cfg.replay_cycles) not in (None, "all") and not (type(replay) is int and replay >= 0):
        raise UserError(f"replay_cycles is {replay!r}; expected a whole number of at least 0, all{OR_NULL}")
    check_choices(cfg, optimizer_state=("run", "cycle"))
    if cfg.optimizer_state == "run" and cfg.start_from == "base":
        raise UserError(
            "optimizer_state=run keeps the moments of other weights: with start_from=base each cycle trains the run's "
            "initial adapter anew; set optimizer_state=cycle, or start_from=previous"
        )


def check_grpo_values(cfg: DictConfig) -> None:
    """Refuse values of the keys that GRPO has and SFT lacks. ``Sampling`` checks its own.

    Raises:
        UserError: naming the key, what was found and what was expected.
    """
    _check_sampled(cfg)
    check_whole(cfg, _GRPO_WHOLE)
    check_switches(cfg, ("refill",))
    check_choices(
        cfg,
        curriculum=("none", "informative", "easy_to_hard"),
        center=("mean", "leave_one_out"),
        scale=("std", "batch", "none"),
        old_logprobs=("trainer", "sampler"),
        mismatch=("truncate", "mask", "none"),
        mismatch_level=("token", "sequence"),
        truncated=("mask", "penalize", "keep"),
    )
    check_numbers(
        cfg,
        temperature=(lambda x: x > 0, "a number above 0, because a group needs different answers"),
        clip_low=(lambda x: x > 0, "a number above 0"),
        kl_coef=(lambda x: x >= 0, "a number of at least 0"),
        entropy_coef=(lambda x: x >= 0, "a number of at least 0"),
        mismatch_limit=(lambda x: x > 1, "a number above 1"),
        truncation_penalty=(lambda x: x > 0, "a number above 0"),
        max_length_share=(lambda x: x is None or 0 < x <= 1, "a share above 0, at most 1" + OR_NULL),
    )
    _check_groups(cfg)
    _check_loss(cfg)
    _check_staleness(cfg)
    _check_kept_samples(cfg)


def _check_groups(cfg: DictConfig) -> None:
    if cfg.samples_per_prompt < 2:
        raise UserError(
            f"samples_per_prompt is {cfg.samples_per_prompt}; expected at least 2: an advantage compares an answer "
            "with the others of its group, so one answer alone has none"
        )
    if cfg.minibatches > cfg.prompts_per_step:
        raise UserError(
            f"minibatches is {cfg.minibatches}, more than the {cfg.prompts_per_step} groups of a step "
            "(prompts_per_step); each needs at least one group"
        )
    if cfg.truncation_margin > cfg.max_new_tokens:
        raise UserError(
            f"truncation_margin is {cfg.truncation_margin}; expected at most max_new_tokens, {cfg.max_new_tokens}"
        )


def _check_loss(cfg: DictConfig) -> None:
    names = (*_WITH_RATIO, *_WITHOUT_RATIO)
    component = isinstance(cfg.loss, DictConfig) and COMPONENT in cfg.loss
    if not component and cfg.loss not in names:
        raise UserError(f"loss is {cfg.loss!r}; expected {', '.join(names)}, or a _component_")
    updates = cfg.updates_per_step * cfg.minibatches
    if cfg.loss in _WITHOUT_RATIO and updates > 1:
        raise UserError(
            f"loss {cfg.loss} has no ratio, so it takes one update per step, and updates_per_step x minibatches is "
            f"{updates}; set both to 1, or loss to {', '.join(_WITH_RATIO[:-1])} or {_WITH_RATIO[-1]}"
        )


def _check_staleness(cfg: DictConfig) -> None:
    if type(cfg.max_staleness) is not int or cfg.max_staleness not in (0, 1):
        raise UserError(f"max_staleness is {cfg.max_staleness!r}; expected 0 or 1")
    if not cfg.max_staleness:
        return
    engine = import_component(cfg.engine[COMPONENT])
    if inspect.isclass(engine) and not hasattr(engine, "check_adapter"):
        raise UserError(
            f"max_staleness=1 samples while the step before trains, and {engine.__name__} samples with the weights in "
            "training; set max_staleness=0, or sample on servers with engine._component_="
            "rocm_ext.generation.OpenAIEngine"
        )
    clipped = cfg.updates_per_step * cfg.minibatches > 1 and cfg.old_logprobs == "sampler"
    if cfg.mismatch == "none" and not clipped and not isinstance(cfg.loss, DictConfig):
        raise UserError(
            "max_staleness=1 trains on answers of the adapter before the last update, and with mismatch=none nothing "
            "weighs them by how likely the present one gives them; set mismatch=truncate or mask, or max_staleness=0"
        )


def _check_kept_samples(cfg: DictConfig) -> None:
    kept, least = cfg.keep_samples, cfg.save_every_n_steps
    if kept == "all":
        return
    if not (type(kept) is int and kept >= 1):
        raise UserError(f"keep_samples is {kept!r}; expected all or a whole number of at least 1")
    if kept < least:
        raise UserError(
            f"keep_samples is {kept}, less than save_every_n_steps, {least}: a resumed run trains again on the samples "
            "since its last checkpoint; raise keep_samples or lower save_every_n_steps"
        )


def _check_sampled(cfg: DictConfig) -> None:
    """Check the keys that RAFT and GRPO share."""
    check_whole(cfg, _WHOLE)
    check_named(cfg, "engine")
    check_numbers(
        cfg,
        max_error_share=(lambda x: 0 <= x <= 1, "a share from 0 to 1"),
        verify_timeout=(lambda x: x > 0, "seconds above 0"),
        clip_high=(lambda x: x > 0, "a number above 0"),
        min_entropy=(lambda x: x is None or x > 0, "a number above 0" + OR_NULL),
    )
    if not isinstance(cfg.stop_strings, ListConfig):
        raise UserError(f"stop_strings is {cfg.stop_strings!r}; expected a list of texts")
    if cfg.temperature == 0 and cfg.eval_samples > 0:
        raise _same_answers(cfg, "eval_samples", 0)
    if not cfg.optimizer.get("lr"):
        raise UserError(f"optimizer.lr is {cfg.optimizer.get('lr')!r}; expected a number above 0")


def _same_answers(cfg: DictConfig, key: str, most: int) -> UserError:
    return UserError(
        f"temperature 0 gives the same answer {cfg[key]} times; set {key}={most}, or a temperature above 0"
    )
