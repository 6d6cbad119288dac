"""Attention of transformers' models, through its interfaces: in packed rows, and over the slots of a cache.

A model's code asks for a mask once per kind of layer, and passes it to the layers' attention. For packed rows a mask
holds the lengths of the sequences and the model's rule for attending, so sliding and chunked windows give transformers'
results.

In sampling every row of a batch is a slot with a position. A slot of sliding attention is a ring: it stores position p
at index p mod R, where R is at least the window. The mask evaluates the model's rule at the stored positions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from rocm_ext.base.errors import UserError
from rocm_ext.model.attention import Lengths, SlotCache, sdpa
from rocm_ext.model.hf.packed_states import ROWS

PACKED = "rocm_ext_packed"
SLOTS = "rocm_ext_slots"
_packed: ContextVar[tuple[Lengths, str]] = ContextVar(
    "lengths of the packed sequences, and kernel of attention"
)
# Arguments of a layer's call that change nothing here: q and k contain the positions, masks the windows.
_KNOWN = {"position_ids", "sliding_window", "use_cache", "cache_position", "output_attentions"}


# ---- packed rows


class Mask:
    """Which token attends to which, in packed rows.

    Args:
        lengths: the sequences' lengths.
        rule: transformers' mask function, ``(batch, head, query, key) -> bool`` on indices.
        window: up to this many tokens per sequence the rule is causal attention. None if no such number is known.
        kernel: see :func:`rocm_ext.model.attention.sdpa`.

    Attributes:
        plain: whether the rule is causal attention.
    """

    def __init__(
        self, lengths: Lengths, rule: Callable[..., Any], window: int | None, kernel: str
    ) -> None:
        self.lengths = lengths
        self.kernel = kernel
        self._rule = rule
        self._window = window
        self.plain = rule is causal_mask_function
        self._dense: dict[int, Tensor] = {}

    def of(self, length: int, device: torch.device) -> Tensor | None:
        """Return the mask within a sequence of ``length`` tokens, or None if it is causal.

        It is [s, s], True where tokens attend.
        """
        in_window = self._window is not None and length <= self._window
        if self.plain or in_window:
            return None
        if length not in self._dense:
            index = torch.arange(length, device=device)
            zero = index.new_zeros(())
            query = index[:, None]
            key = index[None, :]
            attends = self._rule(zero, zero, query, key)
            self._dense[length] = attends.expand(length, length)
        return self._dense[length]


@contextmanager
def packed(lengths: Lengths, kernel: str) -> Iterator[None]:
    """Give ``lengths`` and ``kernel`` to the masks that a model makes inside."""
    token = _packed.set((lengths, kernel))
    try:
        yield
    finally:
        _packed.reset(token)


class _EachSequence(nn.Module):
    """LongRoPE for packed sequences; transformers uses the longest row's frequencies for all."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        limit = self.config.rope_parameters["original_max_position_embeddings"]  # type: ignore[union-attr, index]
        lengths, _ = _packed.get()
        beyond = []  # for each token, whether its sequence is long
        for length in lengths.values:
            beyond += [bool(length > limit)] * length
        if all(beyond) or not any(beyond):
            return super().forward(x, position_ids)
        is_long = torch.tensor([beyond]).to(x.device, non_blocking=True)  # [1, s]
        near = super().forward(x, position_ids * ~is_long)
        far = super().forward(x, position_ids)
        tables = []
        for short, long in zip(near, far, strict=True):
            tables.append(torch.where(is_long[..., None], long, short))
        return tuple(tables)


def scale_each_sequence(model: nn.Module) -> None:
    """Let LongRoPE choose between its two sets of frequencies for every packed sequence.

    Such sequences cannot share their beginnings, because the frequencies depend on the sequence's length.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) == "longrope":
            kind = type(module)
            module.__class__ = type(kind.__name__, (_EachSequence, kind), {})


def packed_mask(
    *args, mask_function: Callable[..., Any] = causal_mask_function, local_size=None, **_
) -> Mask:
    """Build a model's mask for the current packed rows; ``local_size`` is the size of the window or chunk."""
    lengths, kernel = _packed.get()
    return Mask(lengths, mask_function, local_size, kernel)


@torch.compiler.disable
def _attend(query, key, value, mask: Mask, dropout, scaling, softcap, sinks) -> Tensor:
    settings = {"dropout": dropout, "scale": scaling, "softcap": softcap}
    if sinks is not None:
        settings["sinks"] = sinks.view(1, -1, 1, 1)

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        allowed = mask.of(q.shape[2], q.device)
        return sdpa(q, k, v, mask.kernel, mask=allowed, **settings)

    has_kernel = mask.kernel in ("auto", "flash") and softcap is None and sinks is None
    together = mask.plain and has_kernel
    return mask.lengths.attend([query, key, value], compute, together)


# ---- slots


@dataclass
class ForwardPass:
    """A forward pass, and the model's use of attention in it.

    Attributes:
        positions: positions of its tokens, [n, s].
        ring: maps the size of a window (None for all positions) to the size of its ring. None in a prefill, whose keys
            are in order.
        kernel: see :func:`rocm_ext.model.attention.sdpa`.
        fixed: whether no shape may depend on values.
        windows: whether the model's code asked for a mask with a window.
        layers: number of layers that called attention.
        scores: whether attention holds its scores in memory.
        read: numbers per position in the keys and values of the largest layer.
    """

    positions: Tensor
    ring: Callable[[int | None], int] | None
    kernel: str
    fixed: bool
    windows: bool = False
    layers: int = 0
    scores: bool = False
    read: int = 0


_pass: ContextVar[ForwardPass] = ContextVar("the forward pass")


@contextmanager
def forward_pass(
    positions: Tensor, kernel: str, cache: SlotCache | None = None, fixed: bool = False
) -> Iterator[ForwardPass]:
    """Give the positions [n, s] of a pass to the masks that a model makes inside.

    Args:
        positions, kernel: see :class:`ForwardPass`.
        cache: the slots, or None in a prefill.
        fixed: let no shape depend on values, so that a graph can replay the pass.

    Yields:
        The pass, which gets the model's use of attention.
    """
    now = ForwardPass(positions, cache.ring if cache is not None else None, kernel, fixed)
    token = _pass.set(now)
    try:
        yield now
    finally:
        _pass.reset(token)


def current_pass() -> ForwardPass | None:
    """Return the current pass of sampling, or None in training."""
    return _pass.get(None)


def slots_mask(
    *,
    kv_length: int,
    mask_function: Callable[..., Any] = causal_mask_function,
    local_size: int | None = None,
    **_,
) -> Tensor:
    """Build a model's mask for the current pass; transformers calls it.

    Args:
        kv_length: stored positions that attention reads.
        mask_function: the model's rule, ``(batch, head, query, key) -> bool`` on positions.
        local_size: size of the sliding window or chunk, if the rule has one.

    Returns:
        [n, 1, s, kv_length], True where a token attends.
    """
    now = _pass.get()
    now.windows |= local_size is not None
    query = now.positions[:, None, :, None]
    index = torch.arange(kv_length, device=query.device)
    key = index
    if now.ring is not None:  # the newest position stored at every index, or a negative number
        key = query - (query - index) % now.ring(local_size)
    zero = index.new_zeros(())
    return mask_function(zero, zero, query, key) & (key >= 0)


def _attend_to_slots(module, query, key, value, mask, scaling, softcap, sinks) -> Tensor:
    """Attend within the slots: key and value are [n, kv_heads, places, head_dim], query has s tokens per slot."""
    n, heads, s, head_dim = query.shape
    _, kv_heads, places, _ = key.shape
    if mask is None or mask.shape[1:] != (1, s, places):
        raise UserError(f"{type(module).__name__} makes masks of its own")
    now = _pass.get()
    now.layers += 1
    width = key.shape[-1] + value.shape[-1]
    now.read = max(now.read, kv_heads * width)
    now.scores |= softcap is not None or sinks is not None
    groups = heads, 1
    if s == 1:
        # the heads of a group become queries of one kv head, so keys and values are not expanded
        groups = kv_heads, heads // kv_heads
        query = query.view(n, *groups, head_dim)
    if sinks is not None:
        sinks = sinks.view(1, *groups, 1)
    out = sdpa(
        query, key, value, now.kernel, mask=mask, scale=scaling, softcap=softcap, sinks=sinks
    )
    return out.reshape(n, heads, s, -1).transpose(1, 2)


# ---- both


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others,
) -> tuple[Tensor, None]:
    """Attend within packed sequences or slots; a layer of a transformers model calls it.

    Args:
        module: the layer.
        query: [n, heads, s, head_dim]; n is 1 in packed rows.
        key, value: [n, kv_heads, s, head_dim]; in sampling, [n, kv_heads, places, head_dim].
        attention_mask: the mask from :func:`packed_mask` or :func:`slots_mask`.
        dropout: probability on attention weights; a sampling model has none.
        scaling: factor of the scores, by default 1 / sqrt(head_dim).
        softcap: Gemma 2's c in ``c tanh(score / c)``.
        s_aux: gpt-oss's sinks, [heads]: a score without a value.
        others: arguments in :data:`_KNOWN`; any other could change the result.

    Returns:
        [n, s, heads, head_dim], and None for the weights.

    Raises:
        TypeError: an argument is unknown.
        UserError: the layer's code does not use the mask.
    """
    given = {name for name, value in others.items() if value is not None}
    unknown = sorted(given - _KNOWN - {ROWS})
    if unknown:
        raise TypeError(
            f"{type(module).__name__} asks attention for {', '.join(unknown)}, which is not known here"
        )
    if isinstance(attention_mask, Mask):
        return _attend(query, key, value, attention_mask, dropout, scaling, softcap, s_aux), None
    return _attend_to_slots(
        module, query, key, value, attention_mask, scaling, softcap, s_aux
    ), None


for name, mask in ((PACKED, packed_mask), (SLOTS, slots_mask)):
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
