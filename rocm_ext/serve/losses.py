"""The losses of Tinker's protocol: sums over tokens, as tinker-docs.thinkingmachines.ai/tinker/losses defines them.

``q`` is the sampler's probability, whose logarithm is the column ``logprobs``, p the model's, and A the column
``advantages``. Gradients are by the label's NLL, which is -log p.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rocm_ext.base.errors import UserError, nearest
from rocm_ext.losses import Objective
from rocm_ext.losses.objective import Columns, Terms, sum_over_sequences

WEIGHTS = "weights"
LOGPROBS = "logprobs"
ADVANTAGES = "advantages"
IN_RATIO = "sequence_ratio_mask"
_HIGHEST = 20.0  # nats, as in rocm_ext.losses.PolicyGradient
_NOT_HERE = {
    "stable_reinforce": "it needs records of sampling that only the hosted service has; take another, such as "
    "importance_sampling or ppo",
    "custom": "the service runs uploaded losses; forward_backward_custom with a Python function works",
}


class WeightedCrossEntropy(Objective):
    """-w log p, for weights w of any sign: also the second pass of ``forward_backward_custom``."""

    columns = (WEIGHTS,)

    def terms(self, nll: Tensor, columns: Columns, sequence: Tensor) -> Terms:
        """Return the terms as :meth:`Objective.terms` does."""
        weights = columns[WEIGHTS]
        return weights * nll, weights


class ImportanceSampling(Objective):
    """-A p / q."""

    columns = (LOGPROBS, ADVANTAGES)

    def terms(self, nll: Tensor, columns: Columns, sequence: Tensor) -> Terms:
        """Return the terms as :meth:`Objective.terms` does."""
        gain = columns[ADVANTAGES] * _exp(-nll - columns[LOGPROBS])
        return -gain, gain


class _Clipped(Objective):
    """A loss with limits of the ratio p / q.

    Args:
        clip_low_threshold, clip_high_threshold: the lowest and the highest ratio.
    """

    columns: tuple[str, ...] = (LOGPROBS, ADVANTAGES)

    def __init__(self, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> None:
        super().__init__()
        if not 0 <= clip_low_threshold <= clip_high_threshold:
            raise UserError(
                f"clip_low_threshold {clip_low_threshold:g} and clip_high_threshold {clip_high_threshold:g} must be "
                "ratios, at least 0, and the second not below the first"
            )
        self._low = clip_low_threshold
        self._high = clip_high_threshold


class PPO(_Clipped):
    """-min(r A, clip(r) A) with r = p / q (arXiv:1707.06347)."""

    def terms(self, nll: Tensor, columns: Columns, sequence: Tensor) -> Terms:
        """Return the terms as :meth:`Objective.terms` does."""
        ratio = self._ratio(nll, columns, sequence)
        gain = ratio * columns[ADVANTAGES]
        bounded = ratio.clamp(self._low, self._high) * columns[ADVANTAGES]
        moves = gain <= bounded
        return -torch.minimum(gain, bounded), torch.where(moves, gain, 0.0)

    def _ratio(self, nll: Tensor, columns: Columns, sequence: Tensor) -> Tensor:
        return _exp(-nll - columns[LOGPROBS])


class GSPO(PPO):
    """PPO's loss whose ratio is the geometric mean over the sequence's marked tokens (arXiv:2507.18071, GSPO-token)."""

    columns: tuple[str, ...] = (LOGPROBS, ADVANTAGES, IN_RATIO)
    whole_sequences = True

    def _ratio(self, nll: Tensor, columns: Columns, sequence: Tensor) -> Tensor:
        marked = (columns[IN_RATIO] != 0).float()
        summed = sum_over_sequences(marked * (-nll - columns[LOGPROBS]), sequence)
        tokens = sum_over_sequences(marked, sequence)
        return _exp(summed / tokens.clamp(min=1.0))


class CISPO(_Clipped):
    """-clip(p / q) A log p, whose first factor has no gradient (arXiv:2506.13585)."""

    def terms(self, nll: Tensor, columns: Columns, sequence: Tensor) -> Terms:
        """Return the terms as :meth:`Objective.terms` does."""
        ratio = _exp(-nll - columns[LOGPROBS]).clamp(self._low, self._high)
        weight = ratio * columns[ADVANTAGES]
        return weight * nll, weight


class DRO(Objective):
    """-(A log p - beta / 2 (log p / q)^2) (arXiv:2405.19107).

    Args:
        beta: weight of the distance.
    """

    columns = (LOGPROBS, ADVANTAGES)

    def __init__(self, beta: float = 0.05) -> None:
        super().__init__()
        self._beta = beta

    def terms(self, nll: Tensor, columns: Columns, sequence: Tensor) -> Terms:
        """Return the terms as :meth:`Objective.terms` does."""
        advantages = columns[ADVANTAGES]
        distance = -nll - columns[LOGPROBS]
        value = advantages * nll + self._beta / 2 * distance.square()
        return value, advantages - self._beta * distance


LOSSES: dict[str, type[Objective]] = {
    "cross_entropy": WeightedCrossEntropy,
    "importance_sampling": ImportanceSampling,
    "ppo": PPO,
    "cispo": CISPO,
    "gspo": GSPO,
    "dro": DRO,
}
_SETTINGS = {
    **dict.fromkeys(("ppo", "cispo", "gspo"), ("clip_low_threshold", "clip_high_threshold")),
    "dro": ("beta",),
}


def loss_of(name: str, settings: Mapping[str, float | str]) -> Objective:
    """Return a loss of the protocol.

    Raises:
        UserError: it is not served, or a setting is unknown or no finite number.
    """
    if name in _NOT_HERE:
        raise UserError(f"loss_fn {name} is not served: {_NOT_HERE[name]}")
    if name not in LOSSES:
        raise UserError(
            f"loss_fn {name!r} is unknown{nearest(name, LOSSES)}; served: {', '.join(LOSSES)}"
        )
    known = _SETTINGS.get(name, ())
    for key, value in settings.items():
        if key not in known:
            raise UserError(
                f"loss_fn_config of {name} has no {key}; it has {', '.join(known) or 'no setting'}"
            )
        if isinstance(value, str) or not math.isfinite(value):
            raise UserError(f"loss_fn_config: {key} is {value!r}; expected a finite number")
    kind: Callable[..., Objective] = LOSSES[name]
    return kind(**settings)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=_HIGHEST).exp()
