"""Losses of preferences: pairs, as in DPO, and single answers that are good or bad, as in KTO."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_ext.base.errors import UserError
from rocm_ext.base.kinds import NOT_NEGATIVE, NULL, POSITIVE, Kind, check, number, one_of
from rocm_ext.losses.objective import REFERENCE, Columns, Objective, Terms, sum_over_sequences

SIDE = "side"  # column of preferences, as in rocm_ext.data.rows, which no loss imports

_HIGHEST = 20.0  # nats; measurements stay finite numbers where a loss does
_CERTAIN = -1e-6  # nats; the odds of an answer stay finite where its probability rounds to 1
_BETTER = {
    **dict.fromkeys(("margin", "accuracy", "reward_chosen", "logprobs_chosen"), "higher"),
    **dict.fromkeys(("reward_rejected", "logprobs_rejected"), "lower"),
}
Slopes = tuple[Tensor, Tensor, Tensor]  # value, derivatives with respect to both scores
# a function of both sides' scores, beta, label smoothing and gamma
Loss = Callable[[Tensor, Tensor, float, float, float], Slopes]


@dataclass(frozen=True)
class _Kind:
    """A loss of pairs and its defaults.

    Attributes:
        loss: the function.
        reference: whether an answer's score is relative to the reference model.
        normalized: default of ``length_normalized``.
        smooth: whether the loss has label smoothing.
        beta: default factor of the scores.
        gamma: default target margin as a share of beta, or None if the loss has no margin.
        nll: factor of the chosen answer's mean NLL per token, which the loss adds.
    """

    loss: Loss
    reference: bool = True
    normalized: bool = False
    smooth: bool = False
    beta: float = 0.1
    gamma: float | None = None
    nll: float = 0.0


def _logistic(
    chosen: Tensor, rejected: Tensor, beta: float, smoothing: float, gamma: float
) -> Slopes:
    margin = beta * (chosen - rejected) - gamma
    swapped_sides = smoothing * F.logsigmoid(-margin)
    value = -(1 - smoothing) * F.logsigmoid(margin) - swapped_sides
    slope = beta * (smoothing - torch.sigmoid(-margin))
    return value, slope, -slope


def _hinge(chosen: Tensor, rejected: Tensor, beta: float, *_: float) -> Slopes:
    value = F.relu(1 - beta * (chosen - rejected))
    slope = torch.where(value > 0, -beta, 0.0)
    return value, slope, -slope


def _ipo(chosen: Tensor, rejected: Tensor, beta: float, *_: float) -> Slopes:
    distance = chosen - rejected - 1 / (2 * beta)
    return distance.square(), 2 * distance, -2 * distance


def _apo_zero(chosen: Tensor, rejected: Tensor, beta: float, *_: float) -> Slopes:
    up = torch.sigmoid(beta * chosen)
    down = torch.sigmoid(beta * rejected)
    by_chosen = -beta * up * (1 - up)
    by_rejected = beta * down * (1 - down)
    return 1 - up + down, by_chosen, by_rejected


def _odds_ratio(chosen: Tensor, rejected: Tensor, beta: float, *_: float) -> Slopes:
    chosen = chosen.clamp(max=_CERTAIN)
    rejected = rejected.clamp(max=_CERTAIN)
    # 1 - p of each side
    not_chosen = -torch.expm1(chosen)
    not_rejected = -torch.expm1(rejected)
    log_odds = (chosen - rejected) - (not_chosen.log() - not_rejected.log())
    slope = beta * torch.sigmoid(-log_odds)
    return -beta * F.logsigmoid(log_odds), -slope / not_chosen, slope / not_rejected


LOSSES = {
    "sigmoid": _Kind(_logistic, smooth=True),  # DPO, arXiv:2305.18290
    "ipo": _Kind(_ipo, normalized=True),  # arXiv:2310.12036
    "hinge": _Kind(_hinge),  # SLiC, arXiv:2305.10425; RSO, arXiv:2309.06657
    # arXiv:2405.14734: beta from 2 to 2.5, gamma from 0.3 to 0.5 of it
    "simpo": _Kind(_logistic, reference=False, normalized=True, smooth=True, beta=2.0, gamma=0.5),
    "apo_zero": _Kind(_apo_zero),  # arXiv:2408.06266
    "orpo": _Kind(_odds_ratio, reference=False, normalized=True, nll=1.0),  # arXiv:2403.07691
}
UNPAIRED = ("kto", "apo_zero_unpaired")


def _named(losses: Iterable[str], other: str) -> Kind:
    names = list(losses)
    expected = (f"one of {', '.join(names)}", f"loss: rocm_ext.losses.{other}")
    return Kind(lambda value: value in names, expected)


_PAIRED_KINDS = {
    "loss": _named(LOSSES, "UnpairedPreference for single answers"),
    "beta": POSITIVE | NULL,
    "rpo_alpha": NOT_NEGATIVE,
    "label_smoothing": number(lambda x: 0 <= x < 0.5, "a share from 0 to under 0.5"),
    "gamma": NOT_NEGATIVE | NULL,
    "length_normalized": one_of(True, False, None),
}
_SINGLE_KINDS = {
    "loss": _named(UNPAIRED, "Preference for pairs"),
    "beta": POSITIVE,
    "desirable_weight": NOT_NEGATIVE,
    "undesirable_weight": NOT_NEGATIVE,
}


class Preference(Objective):
    """The loss of pairs: a chosen and a rejected answer to one prompt.

    Sequences 2 i and 2 i + 1 of a micro-batch are pair i, and both have labels. Columns, per label: ``side``, 1 for the
    chosen answer and -1 for the rejected one, and ``reference_logprobs``, which ``simpo`` and ``orpo`` do not need. A
    step divides by its pairs.

    The score of an answer is the sum of its log-probs, minus the reference's sum. Its reward is ``beta`` times the
    score. A step measures, as means over its pairs: ``reward_chosen`` and ``reward_rejected``, their difference
    ``margin``, the share ``accuracy`` of pairs with a margin above 0, and ``logprobs_chosen`` and
    ``logprobs_rejected``, the sums of an answer's log-probs. With a reference it also measures ``kl``, the mean
    of ``exp(d) (d - 1) + 1`` with ``d = current - reference`` over all labels. It estimates the KL divergence from the
    reference per token, without bias for answers that the reference wrote.

    Args:
        loss: ``sigmoid`` (DPO), ``ipo``, ``hinge``, ``simpo``, ``apo_zero`` or ``orpo``. The last is the chosen
            answer's mean NLL per token plus ``beta`` times the loss of the odds ratio. Prompts bear no loss, as in the
            paper's formula; TRL's NLL covers them.
        beta: factor of the scores; in ``ipo`` the regularisation, tau; in ``orpo`` the paper's lambda. The default
            is 0.1, in ``simpo`` 2.
        label_smoothing: assumed share of pairs with swapped sides (conservative DPO); ``sigmoid`` and ``simpo``.
        gamma: target margin of ``simpo``, by default half of ``beta``.
        rpo_alpha: factor of the chosen answer's mean NLL per token, which the loss adds (RPO, arXiv:2404.19733);
            ``orpo`` has a factor of 1 already.
        length_normalized: whether a score is the mean over the answer's tokens instead of the sum, by default in
            ``ipo``, ``simpo`` and ``orpo``.
        chunk_tokens: see :class:`Objective`.

    Raises:
        UserError: an argument is out of range, or the loss does not have it.
    """

    whole_sequences = True

    def __init__(
        self,
        loss: str = "sigmoid",
        *,
        beta: float | None = None,
        label_smoothing: float = 0.0,
        gamma: float | None = None,
        rpo_alpha: float = 0.0,
        length_normalized: bool | None = None,
        chunk_tokens: int | None = None,
    ) -> None:
        given = {
            "loss": loss,
            "beta": beta,
            "label_smoothing": label_smoothing,
            "gamma": gamma,
            "rpo_alpha": rpo_alpha,
            "length_normalized": length_normalized,
        }
        check(given, _PAIRED_KINDS, "loss.")
        kind = LOSSES[loss]
        if label_smoothing and not kind.smooth:
            raise UserError(f"loss {loss} has no label_smoothing; sigmoid and simpo have it")
        if gamma is not None and kind.gamma is None:
            raise UserError(f"loss {loss} has no gamma; simpo has it")
        super().__init__(0.5, chunk_tokens)  # a pair is two sequences
        beta = kind.beta if beta is None else beta
        self.kind = kind
        self.beta = beta
        self.label_smoothing = label_smoothing
        self.nll = kind.nll + rpo_alpha
        self.gamma = (kind.gamma or 0.0) * beta if gamma is None else gamma
        self.length_normalized = kind.normalized if length_normalized is None else length_normalized
        self.columns = (SIDE,)
        self.better = _BETTER
        if kind.reference:
            self.columns += (REFERENCE,)
            self.better = _BETTER | {"kl": "lower"}

    def terms(self, nll: Tensor, columns: Columns, sequence: Tensor) -> Terms:
        """Return the terms of :meth:`Objective.terms`; the labels of a pair share its value equally."""
        pair = sequence // 2
        chosen = (columns[SIDE] > 0).float()
        rejected = 1 - chosen
        logprobs = -nll - columns[REFERENCE] if self.kind.reference else -nll

        def scored(side: Tensor) -> tuple[Tensor, Tensor | float, Tensor]:
            """Return the labels, divisor and score of the answers on a side, by pair."""
            labels = _sum(side, pair).clamp(min=1)
            divisor = labels if self.length_normalized else 1.0
            return labels, divisor, _sum(logprobs * side, pair) / divisor

        chosen_labels, chosen_divisor, chosen_score = scored(chosen)
        rejected_labels, rejected_divisor, rejected_score = scored(rejected)
        value, by_chosen, by_rejected = self.kind.loss(
            chosen_score, rejected_score, self.beta, self.label_smoothing, self.gamma
        )
        if self.tally is not None:
            is_pair = _sum(chosen, pair) > 0  # [n], as there are fewer pairs than labels
            chosen_reward = self.beta * chosen_score
            rejected_reward = self.beta * rejected_score
            measured = {
                "reward_chosen": chosen_reward,
                "reward_rejected": rejected_reward,
                "margin": chosen_reward - rejected_reward,
                "accuracy": chosen_reward > rejected_reward,
                "logprobs_chosen": _sum(-nll * chosen, pair),
                "logprobs_rejected": _sum(-nll * rejected, pair),
            }
            for name, values in measured.items():
                self.tally.mean(name, values, is_pair)
            if self.kind.reference:
                self.tally.mean("kl", _divergence(logprobs))
        # the NLL is minus the log-prob
        derivative = (
            -(by_chosen / chosen_divisor)[pair] * chosen
            - (by_rejected / rejected_divisor)[pair] * rejected
        )
        if self.nll:
            value = value + self.nll * _sum(nll * chosen, pair) / chosen_labels
            derivative = derivative + self.nll * chosen / chosen_labels[pair]
        return (value / (chosen_labels + rejected_labels))[pair], derivative


class UnpairedPreference(Objective):
    """The loss of single answers that are good or bad.

    A sequence is an answer, and a step divides by its answers. Columns, per label: ``side``, 1 for a good answer and
    -1 for a bad one, and ``reference_logprobs``. The score of an answer is the sum of its log-probs, minus the
    reference's sum. Its loss is ``weight * sigmoid(-side * beta * (score - baseline))``.

    KTO's baseline is the mean score of prompts with answers to other prompts, at least 0. It estimates the KL
    divergence from the reference and has no gradient. It is the same for all micro-batches of a step: the trainer sets
    it before an update, see :func:`rocm_ext.train.scoring.set_baseline`.

    A step measures, as means over its answers: ``reward_chosen`` of the good ones and ``reward_rejected`` of the bad
    ones, ``beta`` times their scores; ``margin``, ``side`` times the distance of a reward from ``beta`` times the
    baseline; ``accuracy``, the share with a margin above 0; ``logprobs_chosen`` and ``logprobs_rejected``; ``kl``, as
    in :class:`Preference`; and KTO's ``baseline``. A mean over no answers is 0.

    Args:
        loss: ``kto`` (arXiv:2402.01306), or ``apo_zero_unpaired`` (arXiv:2408.06266), whose baseline is 0.
        beta: factor of the scores.
        desirable_weight: factor of the loss of good answers.
        undesirable_weight: factor of the loss of bad answers.
        chunk_tokens: see :class:`Objective`.

    Attributes:
        baseline: in nats, or None if the loss has none.

    Raises:
        UserError: an argument is out of range.
    """

    whole_sequences = True
    columns = (SIDE, REFERENCE)
    better = _BETTER | {"kl": "lower"}

    def __init__(
        self,
        loss: str = "kto",
        *,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        chunk_tokens: int | None = None,
    ) -> None:
        weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
        check({"loss": loss, "beta": beta, **weights}, _SINGLE_KINDS, "loss.")
        super().__init__(1.0, chunk_tokens)
        self.beta = beta
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight
        self.baseline = 0.0 if loss == "kto" else None

    def terms(self, nll: Tensor, columns: Columns, sequence: Tensor) -> Terms:
        """Return the terms of :meth:`Objective.terms`; the labels of an answer share its value equally."""
        side = columns[SIDE]
        logprobs = -nll - columns[REFERENCE]
        # number of labels of the label's answer
        labels = sum_over_sequences(torch.ones_like(nll), sequence)
        reward = self.beta * sum_over_sequences(logprobs, sequence)
        margin = side * (reward - self.beta * (self.baseline or 0.0))
        missed = torch.sigmoid(-margin)
        good = side.clamp(min=0)
        bad = 1 - good
        weight = self.desirable_weight * good + self.undesirable_weight * bad
        if self.tally is not None:
            sums = sum_over_sequences(-nll, sequence)
            share = 1 / labels.double()  # a label's part of its answer
            self.tally.mean("reward_chosen", reward, share * good)
            self.tally.mean("logprobs_chosen", sums, share * good)
            self.tally.mean("reward_rejected", reward, share * bad)
            self.tally.mean("logprobs_rejected", sums, share * bad)
            self.tally.mean("margin", margin, share)
            self.tally.mean("accuracy", margin > 0, share)
            self.tally.mean("kl", _divergence(logprobs))
            if self.baseline is not None:
                self.tally.mean("baseline", torch.full_like(nll, self.baseline))
        derivative = weight * side * self.beta * missed * (1 - missed)
        return weight * missed / labels, derivative


def _divergence(distance: Tensor) -> Tensor:
    """Estimate the KL divergence per label from ``distance`` [n], log-prob minus the reference's."""
    distance = distance.clamp(max=_HIGHEST)
    return distance.exp() * (distance - 1) + 1


def _sum(values: Tensor, pair: Tensor) -> Tensor:
    """Sum values [n] over pairs; entry i is pair i. There are fewer pairs than labels, so n entries suffice."""
    return torch.zeros_like(values).index_add_(0, pair, values)
