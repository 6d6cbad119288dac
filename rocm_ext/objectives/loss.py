"""Cross-entropy straight from hidden states, only where a label counts, chunk by chunk.

The usual way builds logits of shape [tokens, vocabulary] for every token, masked ones too, keeps
them for the backward pass and adds their gradient: at 152k words and 4,096 tokens 7.5 GB in fp32.
Here the gradient of each chunk is taken as soon as its logits exist, so that one chunk of them is
alive at a time. The idea is Liger Kernel's FusedLinearCrossEntropy (arXiv:2410.10989); this is plain
torch, and works for any head: tied, with LoRA, with soft-capping.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rocm_ext.errors import UserError

Head = Callable[[Tensor], Tensor]

# Logits of one chunk: large enough to fill the device's matrix units, small beside the model.
_CHUNK = {"cuda": 1024, "cpu": 256}


class LinearCrossEntropyLoss(nn.Module):
    """Sum of the negative log-likelihoods of ``targets`` under ``head(hidden)``.

    Args:
        chunk_tokens: tokens whose logits are in memory at once; None: 1,024 on a GPU, 256 on a CPU.
    """

    def __init__(self, chunk_tokens: int | None = None) -> None:
        super().__init__()
        if chunk_tokens is not None and chunk_tokens < 1:
            raise UserError(f"loss.chunk_tokens is {chunk_tokens}; it must be at least 1")
        self.chunk_tokens = chunk_tokens

    def chunk_for(self, device: torch.device) -> int:
        """Tokens whose logits exist at once on ``device``."""
        return self.chunk_tokens or _CHUNK.get(device.type, 256)

    def terms(self, nll: Tensor, logprobs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What each target adds to the loss, and the derivative of that by its NLL.

        Args:
            nll: [n], fp32, of the targets now.
            logprobs: [n], fp32, of the targets when they were sampled; None where they were not.

        Returns:
            value [n] and derivative [n]; None for a derivative of 1 everywhere.
        """
        return nll, None

    def forward(self, head: Head, hidden: Tensor, targets: Tensor, logprobs: Tensor | None = None) -> Tensor:
        """
        Args:
            head: maps [n, d] to logits [n, v].
            hidden: [n, d], the hidden states that predict ``targets``.
            targets: [n], token ids, none of them masked.
            logprobs: see :meth:`terms`.

        Returns:
            scalar, fp32, the sum over n.
        """
        parameters = [p for p in _parameters(head) if p.requires_grad]
        chunk, train = self.chunk_for(hidden.device), torch.is_grad_enabled()
        return _ChunkedLoss.apply(head, chunk, self.terms, train, hidden, targets, logprobs, *parameters)


class ClippedRatioLoss(LinearCrossEntropyLoss):
    """RAFT++ (arXiv:2504.11343): ``-min(r, 1 + clip_high)`` per token of an accepted answer, where r is its
    probability now over that when it was sampled.

    An accepted answer's advantage is 1, so PPO's lower bound never binds. An upper bound above 0.2 leaves rare
    tokens room to grow ("clip-higher", DAPO, arXiv:2503.14476).

    Args:
        clip_high: how far above 1 the ratio still earns anything.
        chunk_tokens: as in :class:`LinearCrossEntropyLoss`.
    """

    def __init__(self, clip_high: float, chunk_tokens: int | None = None) -> None:
        super().__init__(chunk_tokens)
        if not clip_high > 0:
            raise UserError(f"clip_high is {clip_high}; it must be above 0")
        self.clip_high = clip_high

    def terms(self, nll: Tensor, logprobs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See :meth:`LinearCrossEntropyLoss.terms`; the derivative is r, and 0 where it is clipped."""
        if logprobs is None:
            raise UserError("the ratio needs the log-probs of sampling, which these rows do not have")
        ratio = (-nll - logprobs).exp()
        highest = 1 + self.clip_high
        return -ratio.clamp(max=highest), torch.where(ratio < highest, ratio, 0.0)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head, chunk, terms, train, hidden, targets, logprobs, *parameters):  # type: ignore[override]
        total = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden) if train else None
        grads = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            with torch.set_grad_enabled(train):
                h = hidden[rows].detach().requires_grad_(train)
                logits = head(h)
            nll, grad_logits = _nll(logits.detach(), targets[rows], gradient=train)
            value, derivative = terms(nll, None if logprobs is None else logprobs[rows])
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
        return None, None, None, None, grad_hidden * grad_output, None, None, *(g * grad_output for g in grads)


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


def _parameters(head: Head) -> list[nn.Parameter]:
    return list(head.parameters()) if isinstance(head, nn.Module) else []


def from_config(loss: nn.Module) -> LinearCrossEntropyLoss:
    """The loss that a config names, as one computed from hidden states.

    torchtune's and torch's plain cross-entropies have the same value; anything else would silently
    change what is trained, so it is refused.
    """
    from torchtune.data import CROSS_ENTROPY_IGNORE_IDX as IGNORE_INDEX
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    if isinstance(loss, LinearCrossEntropyLoss):
        return loss
    plain = isinstance(loss, nn.CrossEntropyLoss) and loss.weight is None and loss.label_smoothing == 0
    if (plain or isinstance(loss, CEWithChunkedOutputLoss)) and loss.ignore_index == IGNORE_INDEX:
        return LinearCrossEntropyLoss()
    raise UserError(
        f"loss {type(loss).__name__} is not supported here; use rocm_ext.objectives.loss.LinearCrossEntropyLoss, "
        "torchtune.modules.loss.CEWithChunkedOutputLoss or torch.nn.CrossEntropyLoss, "
        f"the latter two with ignore_index {IGNORE_INDEX} and without weights or smoothing"
    )
