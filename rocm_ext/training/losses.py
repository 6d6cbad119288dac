"""Objectives by name."""

from typing import Any

from rocm_ext.base.errors import UserError, nearest
from rocm_ext.config.algorithms import ALGORITHMS
from rocm_ext.losses import (
    CrossEntropy,
    Distillation,
    Objective,
    PolicyGradient,
    Preference,
    UnpairedPreference,
)
from rocm_ext.losses.preference import LOSSES as PAIRED
from rocm_ext.losses.preference import UNPAIRED

LOSSES = ("cross_entropy", *ALGORITHMS, "dpo", *PAIRED, *UNPAIRED, "jsd", "reverse_kl")


def objective(loss: str | Objective, **settings: Any) -> Objective:
    """Return an objective.

    Args:
        loss: one of :data:`LOSSES`, or an objective.
        settings: arguments of the objective's class. Policy gradients with a ratio read the column ``old_logprobs``
            unless ``on_policy`` is True.

    Raises:
        UserError: no loss has this name, or an argument is unknown or out of range.
    """
    if isinstance(loss, Objective):
        if settings:
            names = ", ".join(settings)
            raise UserError(f"{names}: set these where you make the {type(loss).__name__}")
        return loss
    if loss not in LOSSES:
        raise UserError(
            f"loss {loss!r} is unknown{nearest(loss, LOSSES)}; losses: {', '.join(LOSSES)}"
        )
    try:
        return _made(loss, settings)
    except TypeError as error:  # an argument that the class does not have
        raise UserError(f"loss {loss}: {error}") from error


def _made(loss: str, settings: dict[str, Any]) -> Objective:
    if loss == "cross_entropy":
        return CrossEntropy(**settings)
    if loss in ALGORITHMS:
        settings.setdefault("on_policy", ALGORITHMS[loss].ratio == "none")
        return PolicyGradient(loss, **settings)
    if loss in ("jsd", "reverse_kl"):
        teacher = settings.pop("teacher", None)
        if teacher is None:
            raise UserError(f"loss {loss} needs a teacher: teacher=model.teacher(...)")
        distillation = Distillation(loss, **settings)
        distillation.teacher = teacher
        return distillation
    if loss in UNPAIRED:
        return UnpairedPreference(loss, **settings)
    return Preference("sigmoid" if loss == "dpo" else loss, **settings)
