"""Objectives of a training step. A YAML's ``loss`` names one of them, or a user's subclass of ``Objective``."""

from collections.abc import Collection

from torch import nn

from rocm_ext.base.errors import UserError
from rocm_ext.losses.distillation import HIDDEN, LOGPROBS, Distillation
from rocm_ext.losses.objective import CrossEntropy, Objective, Tally
from rocm_ext.losses.policy_gradient import PolicyGradient
from rocm_ext.losses.preference import SIDE, Preference, UnpairedPreference

__all__ = [
    "CrossEntropy",
    "Distillation",
    "Objective",
    "PolicyGradient",
    "Preference",
    "Tally",
    "UnpairedPreference",
    "check_columns",
    "check_fit",
    "objective_of",
]

_TEACH = "; start distil_rocm, which has a teacher"
_CURES = {SIDE: "; start dpo_rocm on preferences", HIDDEN: _TEACH, LOGPROBS: _TEACH}


def objective_of(loss) -> Objective:
    """Convert a config's ``loss`` to an objective.

    The plain cross-entropies of torchtune and torch become :class:`CrossEntropy`, and torchtune's losses of pairs
    :class:`Preference`, which have the same values. The function rejects any other loss, because replacing it would
    silently change the training.

    Args:
        loss: an :class:`Objective`, or a loss of torchtune or torch.

    Raises:
        UserError: the loss is not supported; the message names it and the supported ones.
    """
    if isinstance(loss, Objective):
        return loss
    from torchtune.data import CROSS_ENTROPY_IGNORE_IDX as IGNORE_INDEX
    from torchtune.modules.loss import CEWithChunkedOutputLoss
    from torchtune.rlhf.loss import DPOLoss, RSOLoss

    plain = (
        isinstance(loss, nn.CrossEntropyLoss) and loss.weight is None and loss.label_smoothing == 0
    )
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


def check_fit(objective: Objective, columns: Collection[str], pairs: bool) -> None:
    """Check that an objective can train on rows with these columns; ``pairs`` says whether a row has two answers.

    Raises:
        UserError: the rows lack a column that the objective needs, or it is for another kind of preferences.
    """
    check_columns(objective, columns)
    if SIDE not in columns:
        return
    kind = "pairs"
    bad = "rejected"
    fitting: type[Objective] = Preference
    if not pairs:
        kind = "single answers with a label"
        bad = "bad"
        fitting = UnpairedPreference
    problem = ""
    if SIDE not in objective.columns:
        problem = f"would train on the {bad} answers, too; start dpo_rocm, or"
    elif pairs == isinstance(objective, UnpairedPreference):
        problem = "is not for them;"
    if problem:
        raise UserError(
            f"the rows are {kind}, and loss {type(objective).__name__} {problem} "
            f"set loss to rocm_ext.losses.{fitting.__name__}"
        )


def check_columns(objective: Objective, available: Collection[str]) -> None:
    """Raise a UserError if the rows' ``available`` columns lack one that the objective needs."""
    missing = [name for name in objective.columns if name not in available]
    if missing:
        loss = type(objective).__name__
        cures = [_CURES[name] for name in objective.columns if name in _CURES]
        cure = cures[0] if cures else ""
        raise UserError(
            f"loss {loss} needs the columns {', '.join(missing)}, which the rows do not have{cure}"
        )
