"""The policy-gradient algorithms: the values of null keys, and the updates in a step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rocm_ext.base.errors import UserError
from rocm_ext.base.importing import COMPONENT
from rocm_ext.base.types import Config

KEYS = ("center", "scale", "clip_low", "clip_high", "clip_dual", "kl_in")


@dataclass(frozen=True)
class Algorithm:
    """The settings that an algorithm's paper gives.

    Attributes:
        center, scale: see :func:`rocm_ext.rl.selection.advantages`.
        ratio: probability ratio of a ``token``, or the geometric mean over its ``sequence``; ``none``: the loss is the
            advantage times the log-prob, which is right only for answers of the current policy.
        frozen: whether the ratio is a constant factor of the log-prob's gradient.
        normalize: see :class:`rocm_ext.losses.Objective`. None for the maximum length of an answer.
        clip_low, clip_high, clip_dual: see :class:`rocm_ext.losses.PolicyGradient`. None for no limit.
        kl_in: where ``kl_coef`` enters, the ``loss`` or the ``reward``. None if the loss component decides.
    """

    center: str = "mean"
    scale: str = "std"
    ratio: str = "token"
    frozen: bool = False
    normalize: str | float | None = "tokens"
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    clip_dual: float | None = 3.0  # a guard of verl's, in no paper of these; "none" switches it off
    kl_in: str | None = "loss"


_UNCLIPPED = Algorithm(clip_low=None, clip_high=None, clip_dual=None)
_ON_POLICY = replace(_UNCLIPPED, scale="none", ratio="none", normalize=1.0, kl_in="reward")
ALGORITHMS = {
    "grpo": Algorithm(normalize="sequences"),  # arXiv:2402.03300
    "dr_grpo": Algorithm(scale="none", normalize=None),  # arXiv:2503.20783
    "dapo": Algorithm(clip_high=0.28),  # arXiv:2503.14476
    "gspo": Algorithm(  # arXiv:2507.18071
        ratio="sequence", normalize="sequences", clip_low=3e-4, clip_high=4e-4, clip_dual=None
    ),
    # arXiv:2506.13585; limit of ScaleRL and TRL
    "cispo": replace(_UNCLIPPED, frozen=True, clip_high=4.0),
    "rloo": replace(_ON_POLICY, center="leave_one_out"),  # arXiv:2402.14740
    "reinforce": replace(_ON_POLICY, center="none"),  # Williams 1992
}
_OF_COMPONENT = replace(_UNCLIPPED, kl_in=None)
MISMATCH_LIMITS = {
    **{("truncate", level): (0.0, 2.0) for level in ("token", "sequence", "geometric")},  # TIS
    ("mask", "token"): (0.5, 5.0),  # IcePop, of the paper of Ring-1T, arXiv:2510.18855
    ("mask", "sequence"): (0.0, 3.0),  # TRL 1.16
    ("mask", "geometric"): (0.999, 1.001),  # verl
}


def complete(loss: Any, given: Config) -> Config:
    """Replace None by the algorithm's value; UserError: a value is given, and the algorithm has no such limit.

    Args:
        loss: name of the algorithm, or a component.
        given: value of each key, a part of ``KEYS``.
    """
    named = isinstance(loss, str)
    algorithm = ALGORITHMS[loss] if named else _OF_COMPONENT
    filled = {}
    for key, value in given.items():
        usual = getattr(algorithm, key)
        filled[key] = usual if value is None else value
        if usual is not None or value is None or (named and value == "none"):
            continue
        why = f"loss {loss} has no such limit"
        if not named:
            why = "loss is a component, which does not read it"
        raise UserError(f"{key} is {value!r}, and {why}; set {key}=null")
    return filled


def filled(cfg: DictConfig) -> DictConfig:
    """Return a copy of a GRPO config with the algorithm's values in place of nulls.

    The saved config keeps its nulls, so that the values follow the loss. Raises a UserError if a key is set that the
    loss or the ``mismatch`` does not read.
    """
    copy = OmegaConf.create(cfg)
    copy.update(complete(cfg.loss, {key: cfg[key] for key in KEYS}))
    if isinstance(cfg.loss, str):
        copy.mismatch_limits = limits_of(cfg.mismatch, cfg.mismatch_level, cfg.mismatch_limits)
        return copy
    for key in ("kl_coef", "entropy_coef", "mismatch_limits"):
        if cfg[key]:
            raise UserError(
                f"{key} is {cfg[key]!r}, and loss is a component: set loss.{key} instead"
            )
    return copy


def limits_of(mismatch: str, level: str, given: Sequence[float] | None) -> list[float] | None:
    """Return the lowest and highest weight; None without a mismatch. UserError: limits are given without one."""
    if mismatch != "none":
        return list(given or MISMATCH_LIMITS[mismatch, level])
    if given is not None:
        raise UserError(
            f"mismatch_limits={list(given)} needs mismatch=truncate or mask; set mismatch_limits=null"
        )
    return None


def describe(cfg: DictConfig) -> str:
    """Describe the algorithm of a config from :func:`filled` in one line."""
    name = cfg.loss if isinstance(cfg.loss, str) else cfg.loss[COMPONENT]
    keys = (*KEYS, "mismatch_limits")
    values = [f"{key} {cfg[key]}" for key in keys if cfg[key] is not None]
    return f"loss {name}: {', '.join(values)}"


def updates_of_pass(cfg: DictConfig, groups: int | None = None) -> int:
    """Count the updates in a pass of GRPO over ``groups``, by default ``prompts_per_step``: an update has
    ``groups_per_update`` groups or more; 1 if there are fewer."""
    groups = cfg.prompts_per_step if groups is None else groups
    return max(1, groups // (cfg.groups_per_update or cfg.prompts_per_step))


def updates_of_step(cfg: DictConfig) -> int:
    """Return the maximum number of updates in a step, in which every group trains."""
    return cfg.updates_per_step * updates_of_pass(cfg)
