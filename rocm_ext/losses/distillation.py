"""The loss of distillation: the divergence between next-token distributions of a model and its teacher."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import Tensor

from rocm_ext.base.importing import COMPONENT
from rocm_ext.base.kinds import POSITIVE, check, number, one_of
from rocm_ext.losses.objective import Columns, Objective, Terms

# The columns that a teacher adds to the rows.
HIDDEN = "teacher_hidden"
LOGPROBS = "teacher_logprobs"
_IN_CACHE = 2**19  # logits
_KINDS = {
    "loss": one_of("jsd", "reverse_kl"),
    "beta": number(lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "temperature": POSITIVE,
}


class Distillation(Objective):
    """The divergence between the distributions of a model and of its teacher, in nats per label.

    ``jsd`` is the generalised Jensen-Shannon divergence over the whole vocabulary (GKD, arXiv:2306.13649), with
    M = beta teacher + (1 - beta) model::

        beta KL(teacher || M) + (1 - beta) KL(model || M)

    As in GKD and TRL, 0 means the forward divergence KL(teacher || model), and 1 the reverse divergence
    KL(model || teacher). The value is exact: both logits of a chunk are in memory. If the vocabularies are padded to
    different sizes, both are cut to the smaller size.

    ``reverse_kl`` estimates KL(model || teacher) from the labels, which the model must have sampled: the label's
    log-prob minus the teacher's, as the reward of a policy gradient
    (thinkingmachines.ai/blog/on-policy-distillation). It reads the column ``teacher_logprobs``, at ``temperature``;
    ``jsd`` computes ``teacher_hidden``.

    ``jsd`` also measures ``agreement``, the share of labels for which both find the same word most probable; of equally
    probable ones, one that both have is enough.

    Args:
        loss: ``jsd`` or ``reverse_kl``.
        beta: weight of the teacher in M, from 0 to 1.
        temperature: divisor of both logits.
        chunk_tokens: see :class:`Objective`.

    Attributes:
        teacher: teacher of ``jsd``, see :class:`rocm_ext.train.teacher.Teacher`: ``hidden(batch)`` returns the hidden
            states [n, d] that predict the labels of a micro-batch, and ``logits(hidden)`` their logits [n, v]. None in
            a memory plan stands for a teacher with the model's vocabulary.

    Raises:
        UserError: an argument is out of range.
    """

    def __init__(
        self,
        loss: str = "jsd",
        *,
        beta: float = 1.0,
        temperature: float = 1.0,
        chunk_tokens: int | None = None,
    ) -> None:
        super().__init__(chunk_tokens=chunk_tokens)
        check({"loss": loss, "beta": beta, "temperature": temperature}, _KINDS, "loss.")
        self.beta = float(beta)
        self.temperature = temperature
        self.over_vocabulary = loss == "jsd"
        self.columns = (HIDDEN,) if self.over_vocabulary else (LOGPROBS,)
        self.better = {"agreement": "higher"}
        self.teacher: Any = None

    def columns_of(self, batch: Any) -> Columns:
        """Return the teacher's hidden states of the labels of a micro-batch, [n, d]."""
        if self.teacher is None or not self.over_vocabulary:
            return {}
        return {HIDDEN: self.teacher.hidden(batch)}

    def terms(self, nll: Tensor, columns: Columns, sequence: Tensor) -> Terms:
        """Return the terms of ``reverse_kl`` as :meth:`Objective.terms` does."""
        divergence = -nll - columns[LOGPROBS]
        return divergence, -divergence

    def chunk(self, columns: Columns) -> Tensor | None:
        """Return the teacher's logits [n, v] of a chunk, divided by the temperature."""
        if self.teacher is None:
            return None
        logits = self.teacher.logits(columns[HIDDEN])
        return logits if self.temperature == 1 else logits / self.temperature

    def compare(self, logits: Tensor, other: Tensor | None, gradient: bool) -> Terms:
        """Return the divergence [n] between the model's ``logits`` and ``other``, and its gradient [n, v], in fp32."""
        if other is None:
            other = torch.zeros_like(logits)
        rows = len(logits)
        size = _rows_in_cache(logits)
        if size >= rows:
            return self._divergence(logits, other, gradient)
        values = []
        grad: Any = None
        if gradient:
            grad = torch.empty_like(logits, dtype=torch.float32)
        for start in range(0, rows, size):
            block = slice(start, start + size)
            value, part = self._divergence(logits[block], other[block], gradient)
            values.append(value)
            if gradient:
                grad[block] = part
        return torch.cat(values), grad

    def _divergence(self, logits: Tensor, other: Tensor, gradient: bool) -> Terms:
        """Return what :meth:`compare` returns, for some rows."""
        words = min(logits.shape[-1], other.shape[-1])
        model = logits[:, :words]
        teacher = other[:, :words]
        if self.tally is not None:
            self.tally.mean("agreement", _agreement(model, teacher))
        model_logprobs = model.log_softmax(-1, dtype=torch.float32)
        teacher_logprobs = teacher.log_softmax(-1, dtype=torch.float32)
        value, grad = divergence(model_logprobs, teacher_logprobs, self.beta, gradient)
        padding = logits.shape[-1] - words
        if grad is not None and padding:
            grad = F.pad(grad, (0, padding))
        return value, grad


def loss_config(cfg: DictConfig) -> dict[str, object]:
    """Return the loss component for a config of ``distil_rocm``."""
    temperature = cfg.temperature or 1.0  # greedy answers: the distributions as they are
    name = "rocm_ext.losses.Distillation"
    return {COMPONENT: name, "loss": cfg.loss, "beta": cfg.beta, "temperature": temperature}


def _rows_in_cache(logits: Tensor) -> int:
    """Return how many rows of ``logits`` to compare at once, so that a CPU's caches hold what is between.

    Measured with 256 rows of 32,000 logits and two cores: a divergence and its gradient take 15 ms instead of 35.
    """
    rows, vocabulary = logits.shape
    # a plan's fake tensors need no caches, and fewer of them are planned faster
    if type(logits) is not Tensor or logits.device.type != "cpu":
        return rows
    return max(torch.get_num_threads(), _IN_CACHE // vocabulary)


def _agreement(model: Tensor, teacher: Tensor) -> Tensor:
    """Return by row [n] whether a word is the most probable one of both logits [n, v]."""
    # argmax takes ten times as long as amax on a CPU
    best = model == model.amax(-1, keepdim=True)
    teachers_best = teacher == teacher.amax(-1, keepdim=True)
    return (best & teachers_best).any(-1)


def divergence(model: Tensor, teacher: Tensor, beta: float, gradient: bool) -> Terms:
    """Return the generalised Jensen-Shannon divergence of two distributions, and its gradient by the model's logits.

    Args:
        model, teacher: log-probs [n, v] fp32, which the function overwrites.
        beta: see :class:`Distillation`.
        gradient: whether to compute the gradient.

    Returns:
        Divergence [n] and gradient [n, v], or None.
    """
    if beta == 0:
        q = teacher.exp()
        value = (q * teacher.sub_(model)).sum(-1)
        return value, model.exp_().sub_(q) if gradient else None
    weight = 1.0
    teacher_part: Any = 0.0
    if beta == 1:
        ratio = teacher.neg_().add_(model)
    else:
        weight = 1 - beta
        mixture = torch.logaddexp(model + math.log(weight), teacher + math.log(beta))
        ratio = model - mixture
        teacher_ratio = mixture.neg_().add_(teacher)
        teacher_part = beta * (teacher.exp() * teacher_ratio).sum(-1)
    p = model.exp_()
    kl = (p * ratio).sum(-1)
    value = weight * kl + teacher_part
    if not gradient:
        return value, None
    # the derivative by a logit is p (g - sum(p g)), where g, the derivative by a probability, is the weighted log-ratio
    ratio.sub_(kl[:, None])
    return value, p.mul_(ratio).mul_(weight)
