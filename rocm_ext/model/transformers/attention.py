"""Packed rows in transformers' models, through its interfaces for masks and attention.

A model's code asks for a mask once per kind of layer, and hands it to each layer's attention. Here a mask holds the
lengths of the packed sequences and the model's own rule of who attends to whom, so sliding and chunked windows come
out as transformers computes them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from rocm_ext.model.attention import Lengths
from rocm_ext.model.sdpa import sdpa

PACKED = "rocm_ext_packed"
_lengths: ContextVar[Lengths] = ContextVar("lengths of the packed sequences")
_kernel: ContextVar[str] = ContextVar("kernel of attention")
# Arguments of a layer's call that change nothing here: positions are in q and k already, masks hold the windows.
_KNOWN = ("position_ids", "sliding_window", "use_cache", "cache_position", "output_attentions")


class Mask:
    """Which token attends to which, in packed rows.

    Args:
        lengths: of the sequences.
        rule: transformers' mask function, ``(batch, head, query, key) -> bool`` on indices.
        window: up to this many tokens per sequence the rule is plain causal attention; None: ``rule`` is plain.
        kernel: see :func:`rocm_ext.model.sdpa.sdpa`.

    Attributes:
        lengths, kernel: as above.
    """

    def __init__(self, lengths: Lengths, rule: Callable[..., Any], window: int | None, kernel: str) -> None:
        self.lengths, self.kernel, self._rule, self._window = lengths, kernel, rule, window
        self._dense: dict[int, Tensor] = {}

    def of(self, length: int, device: torch.device) -> Tensor | None:
        """Return the mask within a sequence of ``length`` tokens: [s, s], True where it attends; None: causal."""
        plain = self._rule is causal_mask_function or (self._window is not None and length <= self._window)
        if plain:
            return None
        if length not in self._dense:
            index = torch.arange(length, device=device)
            zero = index.new_zeros(())
            self._dense[length] = self._rule(zero, zero, index[:, None], index[None, :]).expand(length, length)
        return self._dense[length]


@contextmanager
def packed(lengths: Lengths, kernel: str) -> Iterator[None]:
    """Give ``lengths`` and ``kernel`` to the masks that a model makes inside."""
    tokens = _lengths.set(lengths), _kernel.set(kernel)
    try:
        yield
    finally:
        _lengths.reset(tokens[0])
        _kernel.reset(tokens[1])


class _EachSequence(nn.Module):
    """LongRoPE as of each packed sequence alone; transformers takes the frequencies of the longest row for all."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        limit = self.config.rope_parameters["original_max_position_embeddings"]  # type: ignore[union-attr, index]
        beyond = [length > limit for length in _lengths.get().values for _ in range(length)]
        if all(beyond) or not any(beyond):
            return super().forward(x, position_ids)
        is_long = torch.tensor([beyond]).to(x.device, non_blocking=True)
        near, far = (super(_EachSequence, self).forward(x, p) for p in (position_ids * ~is_long, position_ids))
        return tuple(torch.where(is_long[..., None], b, a) for a, b in zip(near, far, strict=True))


def scale_each_sequence(model: nn.Module) -> None:
    """Make LongRoPE's choice between its two sets of frequencies one of each packed sequence.

    Such sequences cannot share their beginnings, because the frequencies depend on what follows.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            module.__class__ = type(type(module).__name__, (_EachSequence, type(module)), {})


def make_mask(*args: Any, mask_function: Callable[..., Any] = causal_mask_function, local_size=None, **_: Any) -> Mask:
    """Build a model's mask for the current packed rows; transformers calls it.

    Args:
        mask_function: the rule, on indices.
        local_size: size of the sliding window or chunk, if the rule has one.
    """
    return Mask(_lengths.get(), mask_function, local_size, _kernel.get())


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within each packed sequence; a layer of a transformers model calls it.

    Args:
        module: the layer.
        query: [1, heads, s, head_dim].
        key, value: [1, kv_heads, s, head_dim].
        attention_mask: of :func:`make_mask`.
        dropout: probability on attention weights.
        scaling: factor of the scores; None: 1 / sqrt(head_dim).
        softcap: Gemma 2's c in ``c tanh(score / c)``.
        s_aux: gpt-oss's sinks, [heads]: a score without a value.
        others: arguments that :data:`_KNOWN` names; any other could change the result.

    Returns:
        [1, s, heads, head_dim], and None for the weights.

    Raises:
        TypeError: an argument is unknown.
    """
    check_arguments(module, others)
    return _attend(query, key, value, attention_mask, dropout, scaling, softcap, s_aux), None


def check_arguments(module: nn.Module, others: Mapping[str, Any]) -> None:
    """Check what a layer asks of attention beside the arguments of :func:`attention`.

    Raises:
        TypeError: an argument is unknown, so it could change the result.
    """
    if unknown := sorted(name for name, value in others.items() if name not in _KNOWN and value is not None):
        raise TypeError(f"{type(module).__name__} asks attention for {', '.join(unknown)}, which is not known here")


@torch.compiler.disable
def _attend(query, key, value, mask: Mask, dropout, scaling, softcap, sinks) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    pieces = []
    for (q, k, v), shared in mask.lengths.sequences(query, key, value):
        if groups > 1:  # enable_gqa falls back to the math path on backends without grouped kernels
            k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        allowed = mask.of(q.shape[2], q.device)
        score = None if sinks is None else sinks.view(1, -1, 1, 1)
        out = sdpa(q, k, v, mask.kernel, mask=allowed, dropout=dropout, scale=scaling, softcap=softcap, sinks=score)
        pieces.append(out[:, :, shared:].transpose(1, 2))
    return torch.cat(pieces, dim=1)


AttentionInterface.register(PACKED, attention)
AttentionMaskInterface.register(PACKED, make_mask)
