"""An objective: what a step minimises, as a value and a derivative per label.

The usual way builds logits of shape [tokens, vocabulary] for every token, masked ones too, keeps them for the backward
pass and adds their gradient: at 152k words and 4,096 tokens 7.5 GB in fp32. Here the gradient of each chunk is taken
as soon as its logits exist, so one chunk of them is alive at a time. The idea is Liger Kernel's
FusedLinearCrossEntropy (arXiv:2410.10989); this is plain torch, and works for any head: tied, with LoRA, with
soft-capping.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rocm_ext.errors import UserError

Head = Callable[[Tensor], Tensor]
Terms = tuple[Tensor, Tensor | None]

# Logits of one chunk: large enough to fill the device's matrix units, small beside the model.
_CHUNK = {"cuda": 1024, "cpu": 256}


class Objective(ABC):
    """A function of the labels' negative log-likelihoods (NLL).

    A subclass defines :meth:`terms` and says with two class attributes what it needs:

    - ``columns``: names of the per-token columns (``old_logprobs``, ``advantages``, …) that rows must carry.
    - ``whole_sequences``: :meth:`terms` sees all labels of a micro-batch at once, not a chunk of them, so that it
      can add up over sequences. A sequence is never cut, so these sums are whole. It costs a second pass through the
      output layer: the first yields the NLLs alone.

    Args:
        normalize: what a step's sum is divided by. ``tokens``: the step's labels. ``sequences``: each sequence counts
            the mean of its labels, and the step the mean of its sequences. A number: this times the step's sequences
            (Dr. GRPO, arXiv:2503.20783). The counts are those of the whole step, over all micro-batches and ranks.
        chunk_tokens: labels whose logits are in memory at once; None: 1,024 on a GPU, 256 on a CPU.

    Raises:
        UserError: an argument is out of range.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    whole_sequences: ClassVar[bool] = False

    def __init__(self, normalize: str | float = "tokens", chunk_tokens: int | None = None) -> None:
        if chunk_tokens is not None and not (type(chunk_tokens) is int and chunk_tokens >= 1):
            raise UserError(f"loss.chunk_tokens is {chunk_tokens!r}; expected a whole number of at least 1")
        number = isinstance(normalize, int | float) and not isinstance(normalize, bool) and normalize > 0
        if not number and normalize not in ("tokens", "sequences"):
            raise UserError(f"loss.normalize is {normalize!r}; expected tokens, sequences or a number above 0")
        self.normalize, self.chunk_tokens = normalize, chunk_tokens

    @abstractmethod
    def terms(self, nll: Tensor, columns: Mapping[str, Tensor], sequence: Tensor) -> Terms:
        """What each label adds to the objective, and the derivative of that by its NLL.

        With ``whole_sequences`` the derivative of label i is that of the *sum* of all values by the NLL of i.

        Args:
            nll: [n] fp32, of the labels under the model as it is now.
            columns: [n] fp32 each, by name: at least those named in ``columns``.
            sequence: [n] int64, the number of the sequence that each label belongs to; a micro-batch counts its own
                from 0 without gaps.

        Returns:
            value [n] and derivative [n], both fp32; None for a derivative of 1 everywhere.
        """

    def weights(self, sequence: Tensor) -> Tensor | None:
        """What :attr:`normalize` multiplies each label's value by: [n] fp32; None for 1 everywhere.

        Args:
            sequence: [n] int64, of all labels of a micro-batch.
        """
        if self.normalize != "sequences":
            return None
        return 1.0 / sum_over_sequences(torch.ones_like(sequence, dtype=torch.float32), sequence)

    def denominator(self, labels: float, sequences: float) -> float:
        """What the sum over a step is divided by.

        Args:
            labels: of the whole step.
            sequences: of the whole step, those with at least one label.
        """
        if self.normalize == "tokens":
            return labels
        return sequences if self.normalize == "sequences" else float(self.normalize) * sequences

    def chunk_for(self, device: torch.device) -> int:
        """Labels whose logits exist at once on ``device``."""
        return self.chunk_tokens or _CHUNK.get(device.type, 256)

    def __call__(
        self, head: Head, hidden: Tensor, targets: Tensor, columns: Mapping[str, Tensor], sequence: Tensor
    ) -> Tensor:
        """The sum over the labels of a micro-batch, differentiable by ``hidden`` and the head's parameters.

        Args:
            head: maps [n, d] to logits [n, v].
            hidden: [n, d], the hidden states that predict ``targets``.
            targets: [n], token ids, none of them masked.
            columns, sequence: see :meth:`terms`.

        Returns:
            scalar, fp32; divide the sum over a step by :meth:`denominator`.
        """
        parameters = [p for p in head.parameters() if p.requires_grad] if isinstance(head, nn.Module) else []
        labels = _Labels(self, targets, columns, sequence)
        return _Summed.apply(head, labels, torch.is_grad_enabled(), hidden, *parameters)


class _Labels:
    """The labels of a micro-batch, with what the objective knows of them."""

    def __init__(self, objective: Objective, targets: Tensor, columns: Mapping[str, Tensor], sequence: Tensor) -> None:
        self.objective, self.targets, self.columns, self.sequence = objective, targets, columns, sequence
        self._weights = objective.weights(sequence)
        self._whole: Terms | None = None

    def chunks(self) -> Iterator[slice]:
        """Places of the labels whose logits exist at once."""
        size = self.objective.chunk_for(self.targets.device)
        return (slice(start, start + size) for start in range(0, len(self.targets), size))

    def look_ahead(self, head: Head, hidden: Tensor) -> None:
        """The first pass: NLLs of all labels, for an objective that wants whole sequences."""
        # the second pass draws the same dropout in the head
        with torch.no_grad(), torch.random.fork_rng([hidden.device] if hidden.is_cuda else []):
            nll = [_nll(head(hidden[rows]), self.targets[rows], gradient=False)[0] for rows in self.chunks()]
        empty = hidden.new_zeros(0, dtype=torch.float32)
        self._whole = self.objective.terms(torch.cat([empty, *nll]), self.columns, self.sequence)

    def terms(self, nll: Tensor, rows: slice) -> Terms:
        """Weighted value and derivative of one chunk."""
        if self._whole is None:
            columns = {name: column[rows] for name, column in self.columns.items()}
            value, derivative = self.objective.terms(nll, columns, self.sequence[rows])
        else:
            value, derivative = (None if part is None else part[rows] for part in self._whole)  # type: ignore[assignment]
        if self._weights is None:
            return value, derivative
        weights = self._weights[rows]
        return value * weights, weights if derivative is None else derivative * weights


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head, labels, train, hidden, *parameters):  # type: ignore[override]
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if train else None
        grads = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        if labels.objective.whole_sequences:
            labels.look_ahead(head, hidden)
        for rows in labels.chunks():
            with torch.set_grad_enabled(train):
                h = hidden[rows].detach().requires_grad_(train)
                logits = head(h)
            nll, grad_logits = _nll(logits.detach(), labels.targets[rows], gradient=train)
            value, derivative = labels.terms(nll, rows)
            total += value.sum()
            if not train:
                continue
            if derivative is not None:
                grad_logits *= derivative[:, None]
            first, *rest = torch.autograd.grad(logits, (h, *parameters), grad_logits.to(logits.dtype))
            grad_hidden[rows] = first
            for sum_, grad in zip(grads, rest, strict=True):
                sum_ += grad
            del logits, grad_logits  # before the next chunk's
        if train:
            ctx.save_for_backward(grad_hidden, *(g.to(p.dtype) for g, p in zip(grads, parameters, strict=True)))
        return total

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[override]
        grad_hidden, *grads = ctx.saved_tensors
        return None, None, None, grad_hidden * grad_output, *(g * grad_output for g in grads)


def sum_over_sequences(values: Tensor, sequence: Tensor) -> Tensor:
    """For each label the sum of ``values`` over the labels of its sequence.

    Args:
        values: [n].
        sequence: [n], see :meth:`Objective.terms`.

    Returns:
        [n].
    """
    return torch.zeros_like(values).index_add_(0, sequence, values)[sequence]  # no more sequences than labels


def _nll(logits: Tensor, targets: Tensor, gradient: bool) -> tuple[Tensor, Any]:
    """NLL [n] of ``targets`` [n] under ``logits`` [n, v] in fp32, and its gradient [n, v] in fp32 if asked for."""
    if not gradient:
        return F.cross_entropy(logits.float(), targets, reduction="none"), None
    # one buffer, from 16-bit logits too: logsumexp would take another of this size while it runs
    log_probabilities = logits.log_softmax(dim=-1, dtype=torch.float32)
    nll = -log_probabilities.gather(-1, targets[:, None]).squeeze(-1)
    # d nll / d logits = softmax - onehot; the logits stay, since a head such as tanh keeps its output
    probabilities = log_probabilities.exp_()
    probabilities.scatter_add_(-1, targets[:, None], probabilities.new_full((len(targets), 1), -1.0))
    return nll, probabilities
