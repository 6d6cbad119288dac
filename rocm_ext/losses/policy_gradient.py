"""Policy gradients on sampled answers: GRPO, its variants, and RAFT++, whose advantage is 1 (arXiv:2504.11343)."""

from collections.abc import Sequence

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from rocm_ext.base import registry
from rocm_ext.base.errors import UserError
from rocm_ext.base.importing import COMPONENT
from rocm_ext.base.kinds import POSITIVE, check, one_of
from rocm_ext.config.algorithms import ALGORITHMS, complete, limits_of, updates_of_step
from rocm_ext.config.keys import kinds
from rocm_ext.losses.objective import (
    REFERENCE,
    Columns,
    Objective,
    Tally,
    Terms,
    sum_over_sequences,
)

_HIGHEST = 20.0  # nats; beyond, a ratio is a fault of numerics or of a server and has no gradient
_MOST = 3.0  # maximum of the ratio that weighs the KL divergence
_OF_GRPO = kinds(registry.GRPO)
_ARGUMENTS = (  # that are keys of GRPO, too
    "clip_low",
    "clip_high",
    "clip_dual",
    "kl_coef",
    "kl_in",
    "entropy_coef",
    "mismatch",
    "mismatch_level",
    "mismatch_limits",
)
_KINDS = {"loss": one_of(*ALGORITHMS), "temperature": POSITIVE}
_KINDS |= {name: _OF_GRPO[name] for name in _ARGUMENTS}


class PolicyGradient(Objective):
    """The loss of one update on sampled answers.

    Columns, per label, with log-probs at ``temperature``:

    - ``advantages``: constant in a sequence.
    - ``old_logprobs``, unless ``on_policy``: log-probs under the policy in the ratio's denominator, by this model.
    - ``sampler_logprobs``, with a ``mismatch``: log-probs that the sampler returned.
    - ``reference_logprobs``, with a ``kl_coef``.

    Ratios end at exp(20), in losses and in measurements; beyond, a label has no gradient.

    A step measures, as means or maxima over all labels:

    - ``token_gradient``: |A| (1 - p) of a label with advantage A and current probability p, the derivative of A log p
      by its logit.
    - ``improbable_share``: the share of the sum of its squares from labels with negative advantage and p below 1/2.
      Their gradients are the largest, and change other tokens most (arXiv:2505.12929).
    - with ``old_logprobs``: ``ratio_mean`` and ``ratio_max`` of the probability ratio, ``clipped_low``,
      ``clipped_high`` and ``clipped_dual``, the shares of labels without a gradient because of these limits. With
      ``gspo`` the ratio is the sequence's. With ``cispo`` ``clipped_high`` is the share of labels with a limited ratio.
    - if the rows have ``sampler_logprobs``, with any ``mismatch``: ``mismatch_mean`` and ``mismatch_max`` of
      ``|d|``, ``d = old - sampler``, and ``mismatch_kl``, the divergence KL(sampler || trainer), estimated per label by
      ``exp(d) - d - 1`` (k3, joschu.net/blog/kl-approx.html). With a ``mismatch`` also ``mismatch_limited``, the share
      of labels with a weight outside of the limits.
    - if the rows have ``reference_logprobs``: ``kl``, the same estimate of the divergence KL(current || reference).

    Args:
        loss: a name in :data:`rocm_ext.config.algorithms.ALGORITHMS`, which gives the values of arguments that are
            None.
        normalize: as in :class:`Objective`. ``dr_grpo`` needs a number, the maximum length of an answer.
        clip_low, clip_high: a label has no gradient if its ratio is below ``1 - clip_low`` and its advantage is
            negative, or above ``1 + clip_high`` and positive. ``cispo`` limits the ratio, and only from above.
        clip_dual: a label has no gradient if its ratio is above this and its advantage is negative (dual clip,
            arXiv:1912.09729). ``none``: no such limit.
        on_policy: whether the current policy sampled the answers, so that all ratios are 1.
        kl_coef: factor of the KL divergence from the reference.
        kl_in: ``loss``: a label adds ``w d^2 / 2`` with ``d = reference - current``, where the token's ratio w, at
            most 3, is a constant. This has the gradient of the divergence, also for answers of an earlier policy
            (arXiv:2512.02556). ``reward``: the advantages contain the divergence, so the loss only measures it.
        mismatch: weights for different log-probs of sampler and trainer under the same policy. ``truncate`` weighs a
            label by ``exp(old - sampler)``, clamped to ``mismatch_limits`` (TIS, fengyao.notion.site/off-policy-rl).
            ``mask`` weighs it the same, but by 0 outside of the limits. ``none`` does not weigh.
        mismatch_level: ``token``: a weight per token; ``sequence``: their product over the sequence; ``geometric``:
            their geometric mean.
        mismatch_limits: the lowest and the highest weight.
        temperature: sampling temperature.
        entropy_coef, chunk_tokens: see :class:`Objective`.

    Raises:
        UserError: an argument is out of range, or the loss does not have it or cannot use answers of another policy.
    """

    def __init__(
        self,
        loss: str,
        *,
        normalize: str | float | None = None,
        clip_low: float | None = None,
        clip_high: float | None = None,
        clip_dual: float | str | None = None,
        on_policy: bool = True,
        kl_coef: float = 0.0,
        kl_in: str | None = None,
        mismatch: str = "none",
        mismatch_level: str = "token",
        mismatch_limits: Sequence[float] | None = None,
        temperature: float = 1.0,
        entropy_coef: float = 0.0,
        chunk_tokens: int | None = None,
    ) -> None:
        limits = {
            "clip_low": clip_low,
            "clip_high": clip_high,
            "clip_dual": clip_dual,
            "kl_in": kl_in,
        }
        weights = {
            "mismatch": mismatch,
            "mismatch_level": mismatch_level,
            "mismatch_limits": mismatch_limits,
        }
        numbers = {"kl_coef": kl_coef, "entropy_coef": entropy_coef, "temperature": temperature}
        check({"loss": loss, **weights, **limits, **numbers}, _KINDS, "loss.")
        kind = ALGORITHMS[loss]
        filled = complete(loss, limits)
        self.clip_low, self.clip_high, self.clip_dual, self.kl_in = filled.values()
        if self.clip_dual == "none":
            self.clip_dual = None
        normalize = kind.normalize if normalize is None else normalize
        if normalize is None:
            raise UserError(
                f"loss {loss} divides by a constant: set normalize to the maximum length of an answer"
            )
        if kind.ratio == "none" and not on_policy:
            raise UserError(
                f"loss {loss} has no ratio, so it takes one update per sampled answer; "
                "for more, use grpo, dr_grpo, dapo, gspo or cispo"
            )
        super().__init__(normalize, chunk_tokens)
        self.kind = kind
        self.on_policy = on_policy
        self.kl_coef = kl_coef
        self.temperature = temperature
        self.entropy_coef = entropy_coef
        self.mismatch = mismatch
        self.mismatch_level = mismatch_level
        # [0, 1] is not read
        self.mismatch_limits = limits_of(mismatch, mismatch_level, mismatch_limits) or [0.0, 1.0]
        of_sequence = kind.ratio == "sequence" and (not on_policy or mismatch != "none")
        self.whole_sequences = of_sequence or (mismatch != "none" and mismatch_level != "token")
        columns = ["advantages"]
        if not on_policy:
            columns.append("old_logprobs")
        if mismatch != "none":
            columns.append("sampler_logprobs")
        if kl_coef > 0:
            columns.append(REFERENCE)
        self.columns = tuple(columns)

    def terms(self, nll: Tensor, columns: Columns, sequence: Tensor) -> Terms:
        """Return the terms as :meth:`Objective.terms` does."""
        old = -nll if self.on_policy else columns["old_logprobs"]
        if self.tally is not None:
            self._measure(self.tally, nll, old, columns, sequence)
        value, derivative = self._surrogate(nll, old, columns["advantages"], sequence)
        if self.mismatch != "none":
            weight = self._mismatch_weight(old - columns["sampler_logprobs"], sequence)
            value = value * weight
            derivative = derivative * weight
        if self.kind.ratio == "sequence" and self.whole_sequences:
            # every NLL of a sequence changes all of its values by the same ratio
            derivative = _mean_over_sequences(derivative, sequence)
        if self.kl_coef and self.kl_in == "loss":
            distance = columns[REFERENCE] + nll
            ratio = _ratio(-nll - old).clamp(max=_MOST)
            slope = self.kl_coef * ratio * distance
            value = value + slope * distance / 2
            derivative = derivative + slope
        return value, derivative

    def _surrogate(
        self, nll: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return value and derivative, both [n], before weights of mismatch and KL."""
        if self.kind.ratio == "none":
            return advantages * nll, advantages
        log_ratio = self._log_ratio(nll, old, sequence)
        ratio = _ratio(log_ratio)
        if self.kind.frozen:
            weight = ratio.clamp(max=1 + self.clip_high) * advantages
            return weight * nll, weight
        lowest = torch.where(advantages > 0, 0.0, 1 - self.clip_low)
        highest = torch.where(advantages > 0, 1 + self.clip_high, self.clip_dual or torch.inf)
        bounded = ratio.clamp(lowest, highest)
        moves = (bounded == ratio) & (log_ratio < _HIGHEST)
        return -advantages * bounded, torch.where(moves, advantages * ratio, 0.0)

    def _log_ratio(self, nll: Tensor, old: Tensor, sequence: Tensor) -> Tensor:
        log_ratio = -nll - old
        if self.kind.ratio == "sequence" and not self.on_policy:
            return _mean_over_sequences(log_ratio, sequence)
        return log_ratio

    def _measure(
        self,
        tally: Tally,
        nll: Tensor,
        old: Tensor,
        columns: Columns,
        sequence: Tensor,
    ) -> None:
        probability = (-nll).exp()
        advantages = columns["advantages"]
        is_bad = advantages < 0
        gradient = advantages.abs() * (1 - probability)
        tally.mean("token_gradient", gradient)
        improbable = is_bad & (probability < 0.5)
        tally.mean("improbable_share", improbable, gradient.double() ** 2)
        if not self.on_policy:
            ratio = _ratio(self._log_ratio(nll, old, sequence))
            tally.mean("ratio_mean", ratio)
            tally.highest("ratio_max", ratio)
            high = ratio > 1 + self.clip_high
            if not self.kind.frozen:
                tally.mean("clipped_low", (ratio < 1 - self.clip_low) & is_bad)
                high = high & (advantages > 0)
                if self.clip_dual is not None:
                    tally.mean("clipped_dual", (ratio > self.clip_dual) & is_bad)
            tally.mean("clipped_high", high)
        if "sampler_logprobs" in columns:
            distance = old - columns["sampler_logprobs"]
            tally.mean("mismatch_mean", distance.abs())
            tally.highest("mismatch_max", distance.abs())
            tally.mean("mismatch_kl", _divergence(distance))
        if REFERENCE in columns:
            tally.mean("kl", _divergence(columns[REFERENCE] + nll))

    def _mismatch_weight(self, log_weight: Tensor, sequence: Tensor) -> Tensor:
        if self.mismatch_level != "token":
            over = sum_over_sequences if self.mismatch_level == "sequence" else _mean_over_sequences
            log_weight = over(log_weight, sequence)
        weight = _ratio(log_weight)
        lowest, highest = self.mismatch_limits
        outside = (weight < lowest) | (weight > highest)
        if self.tally is not None:
            self.tally.mean("mismatch_limited", outside)
        if self.mismatch == "truncate":
            return weight.clamp(lowest, highest)
        return torch.where(outside, 0.0, weight)


def loss_config(cfg: DictConfig) -> dict[str, object]:
    """Return the loss component for a GRPO config; a component as ``loss`` stays as it is."""
    if OmegaConf.is_dict(cfg.loss):
        return OmegaConf.to_container(cfg.loss)  # type: ignore[return-value]
    normalize = None
    if ALGORITHMS[cfg.loss].normalize is None:
        normalize = float(cfg.max_new_tokens)
    return {
        COMPONENT: "rocm_ext.losses.PolicyGradient",
        **{key: cfg[key] for key in _KINDS},
        "normalize": normalize,
        "on_policy": updates_of_step(cfg) == 1,
    }


def _ratio(log_ratio: Tensor) -> Tensor:
    """Return the ratio of probabilities, at most exp(20)."""
    return log_ratio.clamp(max=_HIGHEST).exp()


def _divergence(distance: Tensor) -> Tensor:
    return _ratio(distance) - distance.clamp(max=_HIGHEST) - 1


def _mean_over_sequences(values: Tensor, sequence: Tensor) -> Tensor:
    labels = sum_over_sequences(torch.ones_like(values), sequence)
    return sum_over_sequences(values, sequence) / labels
