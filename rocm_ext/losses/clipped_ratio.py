"""RAFT++: the clipped importance ratio of accepted answers."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rocm_ext.base.errors import UserError
from rocm_ext.losses.objective import Objective, Terms


class ClippedRatio(Objective):
    """RAFT++ (arXiv:2504.11343): ``-min(r, 1 + clip_high)`` per token of an accepted answer.

    The ratio r is the token's current probability divided by its probability when it was sampled. An accepted answer
    has the advantage 1, so PPO's lower bound never binds. An upper bound above 0.2 lets rare tokens grow
    ("clip-higher", DAPO, arXiv:2503.14476).

    Args:
        clip_high: a token has no gradient once its ratio exceeds 1 by this.
        normalize, chunk_tokens: see :class:`Objective`.

    Raises:
        UserError: an argument is out of range.
    """

    columns = ("old_logprobs",)

    def __init__(self, clip_high: float, normalize: str | float = "tokens", chunk_tokens: int | None = None) -> None:
        super().__init__(normalize, chunk_tokens)
        if not clip_high > 0:
            raise UserError(f"clip_high is {clip_high}; it must be above 0")
        self.clip_high = clip_high

    def terms(self, nll: Tensor, columns: Mapping[str, Tensor], sequence: Tensor) -> Terms:
        """Return the terms as :meth:`Objective.terms` does; the derivative is r, and 0 where r is clipped."""
        ratio = (-nll - columns["old_logprobs"]).exp()
        highest = 1 + self.clip_high
        return -ratio.clamp(max=highest), torch.where(ratio < highest, ratio, 0.0)
