"""Objectives of a training step. A YAML's ``loss`` names one of them, or a user's subclass of ``Objective``."""

from typing import Any

from torch import nn

from rocm_ext.base.errors import UserError
from rocm_ext.losses.distillation import Distillation
from rocm_ext.losses.objective import CrossEntropy, Objective, Tally
from rocm_ext.losses.policy_gradient import PolicyGradient
from rocm_ext.losses.preference import Preference, UnpairedPreference

__all__ = [
    "CrossEntropy",
    "Distillation",
    "Objective",
    "PolicyGradient",
    "Preference",
    "Tally",
    "UnpairedPreference",
    "objective_of",
]


def objective_of(loss: Any) -> Objective:
    """Convert a config's ``loss`` to an objective.

    The plain cross-entropies of torchtune and torch become :class:`CrossEntropy`, and torchtune's losses of pairs
    :class:`Preference`, which have the same values. The function rejects any other loss, because replacing it would
    silently change the training.

    Args:
        loss: an :class:`Objective`, or a loss of torchtune or torch.

    Raises:
        UserError: the loss is not supported; the message names it and the supported ones.
    """
    from torchtune.data import CROSS_ENTROPY_IGNORE_IDX as IGNORE_INDEX
    from torchtune.modules.loss import CEWithChunkedOutputLoss
    from torchtune.rlhf.loss import DPOLoss, RSOLoss

    if isinstance(loss, Objective):
        return loss
    plain = isinstance(loss, nn.CrossEntropyLoss) and loss.weight is None and loss.label_smoothing == 0
    if (plain or isinstance(loss, CEWithChunkedOutputLoss)) and loss.ignore_index == IGNORE_INDEX:
        return CrossEntropy()
    if isinstance(loss, DPOLoss):
        return Preference("sigmoid", beta=loss.beta, label_smoothing=loss.label_smoothing)
    if isinstance(loss, RSOLoss):
        return Preference("hinge", beta=loss.gamma)
    raise UserError(
        f"loss {type(loss).__name__} is not supported here; use rocm_ext.losses.CrossEntropy, "
        "torchtune.modules.loss.CEWithChunkedOutputLoss or torch.nn.CrossEntropyLoss, "
        f"the latter two with ignore_index {IGNORE_INDEX} and without weights or smoothing; for pairs "
        "rocm_ext.losses.Preference, or torchtune.rlhf.loss.DPOLoss or RSOLoss; for single answers that are good or "
        "bad rocm_ext.losses.UnpairedPreference"
    )
