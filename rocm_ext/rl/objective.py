"""The objective that a GRPO config describes."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from rocm_ext.base.errors import UserError
from rocm_ext.config import COMPONENT
from rocm_ext.losses import Objective

# Columns that the rows of a step can have; see :meth:`rocm_ext.recipes.grpo_rocm.GRPO.rows`.
COLUMNS = ("advantages", "old_logprobs", "sampler_logprobs", "reference_logprobs")


def updates_of_step(cfg: DictConfig) -> int:
    """Return the number of optimiser updates of a step."""
    return cfg.updates_per_step * cfg.minibatches


def loss_config(cfg: DictConfig) -> dict[str, Any]:
    """Return the component that the keys of a GRPO config describe; a component as ``loss`` stays as it is."""
    if OmegaConf.is_dict(cfg.loss):
        return OmegaConf.to_container(cfg.loss)  # type: ignore[return-value]
    return {
        COMPONENT: "rocm_ext.losses.PolicyGradient",
        "loss": cfg.loss,
        "normalize": float(cfg.max_new_tokens) if cfg.loss == "dr_grpo" else None,
        "clip_low": cfg.clip_low,
        "clip_high": cfg.clip_high,
        "on_policy": updates_of_step(cfg) == 1,
        "kl_coef": cfg.kl_coef,
        "mismatch": cfg.mismatch,
        "mismatch_level": cfg.mismatch_level,
        "mismatch_limit": cfg.mismatch_limit,
        "temperature": cfg.temperature,
        "entropy_coef": cfg.entropy_coef,
    }


def check(cfg: DictConfig, objective: Objective) -> None:
    """Check that an objective, which may be a component of the user's, fits the steps.

    Raises:
        UserError: its temperature is not that of sampling, or it takes the answers of an earlier policy for those of
            the current one.
    """
    if objective.temperature != cfg.temperature:
        raise UserError(
            f"loss computes log-probs at temperature {objective.temperature:g}, and temperature {cfg.temperature:g} "
            f"samples the answers; both must be equal: set loss.temperature={cfg.temperature:g}, or temperature"
        )
    if getattr(objective, "on_policy", False) and updates_of_step(cfg) > 1:
        raise UserError(
            f"loss.on_policy is True, and a step has {updates_of_step(cfg)} updates (updates_per_step x minibatches): "
            "after the first the answers are those of an earlier policy; set loss.on_policy=False"
        )


def logprobs_for(cfg: DictConfig, objective: Objective) -> list[str]:
    """Return the settings that need the token ids and log-probs of sampling."""
    found = []
    if "sampler_logprobs" in objective.columns:
        found.append(f"mismatch={cfg.mismatch}")
    if "old_logprobs" in objective.columns and cfg.old_logprobs == "sampler":
        found.append("old_logprobs=sampler")
    if cfg.kl_coef:
        found.append(f"kl_coef={cfg.kl_coef:g}")
    if cfg.min_entropy is not None:
        found.append("min_entropy")
    return found
