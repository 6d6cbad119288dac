"""Cross-entropy: supervised fine-tuning, and RAFT."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rocm_ext.errors import UserError
from rocm_ext.objectives.objective import Objective, Terms


class CrossEntropy(Objective):
    """The NLL of the labels."""

    def terms(self, nll: Tensor, columns: Mapping[str, Tensor], sequence: Tensor) -> Terms:
        """See :meth:`Objective.terms`."""
        return nll, None


def objective_of(loss: Any) -> Objective:
    """The objective that a config's ``loss`` means.

    torchtune's and torch's plain cross-entropies become :class:`CrossEntropy`, which has the same value. Another loss
    would silently change what is trained, so it is refused.

    Raises:
        UserError: naming the loss and those that are supported.
    """
    from torchtune.data import CROSS_ENTROPY_IGNORE_IDX as IGNORE_INDEX
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    if isinstance(loss, Objective):
        return loss
    plain = isinstance(loss, nn.CrossEntropyLoss) and loss.weight is None and loss.label_smoothing == 0
    if (plain or isinstance(loss, CEWithChunkedOutputLoss)) and loss.ignore_index == IGNORE_INDEX:
        return CrossEntropy()
    raise UserError(
        f"loss {type(loss).__name__} is not supported here; use rocm_ext.objectives.CrossEntropy, "
        "torchtune.modules.loss.CEWithChunkedOutputLoss or torch.nn.CrossEntropyLoss, "
        f"the latter two with ignore_index {IGNORE_INDEX} and without weights or smoothing"
    )
