"""Policy gradients on sampled answers: GRPO and its kin, and RAFT++."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from rocm_ext.base.errors import UserError
from rocm_ext.config import COMPONENT
from rocm_ext.config.checks import updates_of_step
from rocm_ext.losses.objective import Objective, Tally, Terms, sum_over_sequences

_HIGHEST = 20.0  # nats; beyond, a ratio is a fault of numerics or of a server and has no gradient


@dataclass(frozen=True)
class _Loss:
    """What sets a loss apart.

    Attributes:
        ratio: the probability ratio is that of a ``token``, or the geometric mean of its ``sequence``; ``none``: the
            loss is the advantage times the log-prob, which is right only for answers of the current policy.
        frozen: the ratio weighs the log-prob's gradient, instead of having the gradient.
        normalize: of :class:`Objective`; None: a number that the user gives.
    """

    ratio: str
    frozen: bool
    normalize: str | float | None


LOSSES = {
    "grpo": _Loss("token", False, "sequences"),  # arXiv:2402.03300
    "dr_grpo": _Loss("token", False, None),  # arXiv:2503.20783
    "dapo": _Loss("token", False, "tokens"),  # arXiv:2503.14476
    "gspo": _Loss("sequence", False, "sequences"),  # arXiv:2507.18071
    "cispo": _Loss("token", True, "tokens"),  # arXiv:2506.13585
    "rloo": _Loss("none", False, 1.0),  # arXiv:2402.14740: the sum over a sequence
    "reinforce": _Loss("none", False, "tokens"),  # Williams 1992
}


class PolicyGradient(Objective):
    """The loss of one update on sampled answers.

    Columns, per label: ``advantages``, the same for all labels of a sequence. ``old_logprobs``, where the answers are
    not all of the current policy: the log-probs, by this model, of the policy that the ratio compares with.
    ``sampler_logprobs`` with a ``mismatch``: the log-probs that the sampler returned. ``reference_logprobs`` with a
    ``kl_coef``. All are at ``temperature``. A ratio counts as exp(20) from there on, in losses as in measurements, and
    has no gradient.

    A step measures, as means or maxima over all labels:

    - with ``old_logprobs``: ``ratio_mean`` and ``ratio_max`` of the probability ratio, ``clipped_low`` and
      ``clipped_high``, the shares of labels without a gradient because of ``clip_low`` and ``clip_high``. With
      ``gspo`` each label counts with its sequence's ratio. With ``cispo`` ``clipped_high`` is the share of labels
      whose ratio is limited.
    - if the rows have ``sampler_logprobs``, with any ``mismatch``: ``mismatch_mean`` and ``mismatch_max`` of the
      absolute difference between the log-probs that ``mismatch`` compares, and ``mismatch_kl``, the divergence
      KL(sampler || trainer), estimated as that of ``kl_coef``.
    - if the rows have ``reference_logprobs``: ``kl``, the divergence that ``kl_coef`` multiplies.

    Args:
        loss: ``grpo``, ``dr_grpo``, ``dapo``, ``gspo``, ``cispo``, ``rloo`` or ``reinforce``.
        normalize: as in :class:`Objective`; None: that of the loss's paper. ``dr_grpo`` needs a number, the maximum
            length of an answer.
        clip_low, clip_high: a label has no gradient where its ratio is below ``1 - clip_low`` and its advantage is
            negative, or above ``1 + clip_high`` and positive. ``cispo`` limits the ratio itself, and only from above.
        on_policy: whether the current policy sampled the answers, so that each ratio is 1.
        kl_coef: factor of the KL divergence from the reference, estimated per label by
            ``exp(d) - d - 1`` with ``d = reference - current`` (k3, joschu.net/blog/kl-approx.html).
        mismatch: what to do where sampler and trainer compute different log-probs of the same policy. ``truncate``
            weighs a label by ``exp(old - sampler)``, but at most ``mismatch_limit`` (TIS,
            fengyao.notion.site/off-policy-rl). ``mask`` weighs it the same, and by 0 outside of
            ``1 / mismatch_limit`` to ``mismatch_limit``. ``none`` does not weigh.
        mismatch_level: the weight of a ``token``, or the product of the weights of its ``sequence``.
        mismatch_limit: see ``mismatch``.
        temperature: sampling temperature.
        entropy_coef: factor of the entropy bonus; see :class:`Objective`.
        chunk_tokens: see :class:`Objective`.

    Raises:
        UserError: an argument is out of range, or the loss cannot use answers of another policy.
    """

    def __init__(
        self,
        loss: str,
        *,
        normalize: str | float | None = None,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        on_policy: bool = True,
        kl_coef: float = 0.0,
        mismatch: str = "none",
        mismatch_level: str = "token",
        mismatch_limit: float = 2.0,
        temperature: float = 1.0,
        entropy_coef: float = 0.0,
        chunk_tokens: int | None = None,
    ) -> None:
        _one_of("loss", loss, LOSSES)
        _one_of("mismatch", mismatch, ("truncate", "mask", "none"))
        _one_of("mismatch_level", mismatch_level, ("token", "sequence"))
        _at_least("clip_low", clip_low, 0, above=True)
        _at_least("clip_high", clip_high, 0, above=True)
        _at_least("kl_coef", kl_coef, 0)
        _at_least("entropy_coef", entropy_coef, 0)
        _at_least("mismatch_limit", mismatch_limit, 1, above=True)
        _at_least("temperature", temperature, 0, above=True)
        kind = LOSSES[loss]
        normalize = kind.normalize if normalize is None else normalize
        if normalize is None:
            raise UserError(f"loss {loss} divides by a constant: set normalize to the maximum length of an answer")
        if kind.ratio == "none" and not on_policy:
            raise UserError(
                f"loss {loss} has no ratio, so it takes one update per sampled answer; "
                "for more, use grpo, dr_grpo, dapo, gspo or cispo"
            )
        super().__init__(normalize, chunk_tokens)
        self.kind, self.clip_low, self.clip_high, self.on_policy = kind, clip_low, clip_high, on_policy
        self.kl_coef, self.temperature, self.entropy_coef = kl_coef, temperature, entropy_coef
        self.mismatch, self.mismatch_level, self.mismatch_limit = mismatch, mismatch_level, mismatch_limit
        of_sequence = kind.ratio == "sequence" and (not on_policy or mismatch != "none")
        self.whole_sequences = of_sequence or (mismatch != "none" and mismatch_level == "sequence")
        self.columns = (
            "advantages",
            *["old_logprobs"] * (not on_policy),
            *["sampler_logprobs"] * (mismatch != "none"),
            *["reference_logprobs"] * (kl_coef > 0),
        )

    def terms(self, nll: Tensor, columns: Mapping[str, Tensor], sequence: Tensor) -> Terms:
        """Return the terms as :meth:`Objective.terms` does."""
        old = -nll if self.on_policy else columns["old_logprobs"]
        if self.tally is not None:
            self._measure(self.tally, nll, old, columns, sequence)
        value, derivative = self._surrogate(nll, old, columns["advantages"], sequence)
        if self.mismatch != "none":
            weight = self._mismatch_weight(old - columns["sampler_logprobs"], sequence)
            value, derivative = value * weight, derivative * weight
        if self.kind.ratio == "sequence" and self.whole_sequences:
            # each NLL of a sequence changes all of its values by the same ratio
            derivative = _mean_over_sequences(derivative, sequence)
        if self.kl_coef:
            distance = columns["reference_logprobs"] + nll
            value = value + self.kl_coef * _divergence(distance)
            derivative = derivative + self.kl_coef * torch.where(distance < _HIGHEST, _ratio(distance) - 1, 0.0)
        return value, derivative

    def _surrogate(self, nll: Tensor, old: Tensor, advantages: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
        """Return value and derivative, both [n], before weights of mismatch and KL."""
        if self.kind.ratio == "none":
            return advantages * nll, advantages
        log_ratio = self._log_ratio(nll, old, sequence)
        ratio = _ratio(log_ratio)
        low, high = 1 - self.clip_low, 1 + self.clip_high
        if self.kind.frozen:
            weight = ratio.clamp(max=high) * advantages
            return weight * nll, weight
        clipped = torch.where(advantages > 0, ratio > high, ratio < low)
        value = -advantages * torch.where(clipped, ratio.clamp(low, high), ratio)
        return value, torch.where(clipped | (log_ratio >= _HIGHEST), 0.0, advantages * ratio)

    def _log_ratio(self, nll: Tensor, old: Tensor, sequence: Tensor) -> Tensor:
        log_ratio = -nll - old
        if self.kind.ratio == "sequence" and not self.on_policy:
            return _mean_over_sequences(log_ratio, sequence)
        return log_ratio

    def _measure(self, tally: Tally, nll: Tensor, old: Tensor, columns: Mapping[str, Tensor], sequence: Tensor) -> None:
        if not self.on_policy:
            ratio = _ratio(self._log_ratio(nll, old, sequence))
            tally.mean("ratio_mean", ratio)
            tally.highest("ratio_max", ratio)
            high, advantages = ratio > 1 + self.clip_high, columns["advantages"]
            if not self.kind.frozen:
                tally.mean("clipped_low", (ratio < 1 - self.clip_low) & (advantages < 0))
                high = high & (advantages > 0)
            tally.mean("clipped_high", high)
        if "sampler_logprobs" in columns:
            distance = old - columns["sampler_logprobs"]
            tally.mean("mismatch_mean", distance.abs())
            tally.highest("mismatch_max", distance.abs())
            tally.mean("mismatch_kl", _divergence(distance))
        if "reference_logprobs" in columns:
            tally.mean("kl", _divergence(columns["reference_logprobs"] + nll))

    def _mismatch_weight(self, log_weight: Tensor, sequence: Tensor) -> Tensor:
        if self.mismatch_level == "sequence":
            log_weight = sum_over_sequences(log_weight, sequence)
        weight, limit = _ratio(log_weight), self.mismatch_limit
        if self.mismatch == "truncate":
            return weight.clamp(max=limit)
        return torch.where((weight >= 1 / limit) & (weight <= limit), weight, 0.0)


def loss_config(cfg: DictConfig) -> dict[str, Any]:
    """Return the component that the keys of a GRPO config describe; a component as ``loss`` stays as it is."""
    if OmegaConf.is_dict(cfg.loss):
        return OmegaConf.to_container(cfg.loss)  # type: ignore[return-value]
    same = ("loss", "clip_low", "clip_high", "kl_coef", "mismatch", "mismatch_level", "mismatch_limit", "temperature")
    return {
        COMPONENT: "rocm_ext.losses.PolicyGradient",
        **{key: cfg[key] for key in (*same, "entropy_coef")},
        "normalize": float(cfg.max_new_tokens) if cfg.loss == "dr_grpo" else None,
        "on_policy": updates_of_step(cfg) == 1,
    }


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


def _ratio(log_ratio: Tensor) -> Tensor:
    """Return the ratio of probabilities, which stays finite, in losses as in measurements."""
    return log_ratio.clamp(max=_HIGHEST).exp()


def _divergence(distance: Tensor) -> Tensor:
    return _ratio(distance) - distance.clamp(max=_HIGHEST) - 1


def _mean_over_sequences(values: Tensor, sequence: Tensor) -> Tensor:
    return sum_over_sequences(values, sequence) / sum_over_sequences(torch.ones_like(values), sequence)


def _one_of(name: str, value: Any, choices: Any) -> None:
    if value not in choices:
        raise UserError(f"loss.{name} is {value!r}; expected one of {', '.join(choices)}")


def _at_least(name: str, value: Any, least: float, above: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and least <= value < float("inf")
    if not good or (above and value == least):
        raise UserError(f"loss.{name} is {value!r}; expected a number {'above' if above else 'of at least'} {least}")
