"""A cache of slots for decoding transformers' models, and attention over it.

Each row of a batch is a slot with its own position. A slot of sliding attention is a ring: position p lies at place
p mod R, where R is at least the window. The mask evaluates the model's own rule at the positions that lie there.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)
from transformers.masking_utils import causal_mask_function

from rocm_ext.base.errors import UserError
from rocm_ext.model.sdpa import sdpa
from rocm_ext.model.slots import SlotCache, Slots
from rocm_ext.model.transformers.attention import check_arguments

SLOTS = "rocm_ext_slots"


@dataclass
class AttentionUse:
    """What a model's code asks for in a pass.

    Attributes:
        windows: whether for a mask with a window.
        layers: how many layers ask for attention.
        scores: whether attention holds its scores in memory.
        read: numbers per position in the keys and values of the largest layer.
    """

    windows: bool = False
    layers: int = 0
    scores: bool = False
    read: int = 0


@dataclass(frozen=True)
class _ForwardPass:
    """A forward pass.

    Attributes:
        positions: of its tokens, [n, s].
        ring: maps the size of a window to the places of its ring; None for all positions. None: a prefill, whose keys
            lie in order.
        kernel: see :func:`rocm_ext.model.sdpa.sdpa`.
        asked: what the model's code asks for.
    """

    positions: Tensor
    ring: Callable[[int | None], int] | None
    kernel: str
    asked: "AttentionUse"


_pass: ContextVar[_ForwardPass] = ContextVar("the forward pass")


@contextmanager
def forward_pass(positions: Tensor, kernel: str, cache: SlotCache | None = None) -> Iterator[AttentionUse]:
    """Give ``positions`` [n, s] to the masks that a model makes inside.

    Args:
        positions: of the pass's tokens.
        kernel: of attention.
        cache: the slots; None: a prefill.

    Yields:
        What the model's code asks for.
    """
    now = _ForwardPass(positions, cache.ring if cache is not None else None, kernel, AttentionUse())
    token = _pass.set(now)
    try:
        yield now.asked
    finally:
        _pass.reset(token)


def make_mask(
    *, kv_length: int, mask_function: Callable[..., Any] = causal_mask_function, local_size: int | None = None, **_: Any
) -> Tensor:
    """Build a model's mask for the current pass; transformers calls it.

    Args:
        kv_length: places that attention reads.
        mask_function: the model's rule, ``(batch, head, query, key) -> bool`` on positions.
        local_size: size of the sliding window or chunk, if the rule has one.

    Returns:
        [n, 1, s, kv_length], True where a token attends.
    """
    now = _pass.get()
    now.asked.windows |= local_size is not None
    query = now.positions[:, None, :, None]
    place = torch.arange(kv_length, device=query.device)
    # the newest position that lies at each place; negative: none yet
    key = place if now.ring is None else query - (query - place) % now.ring(local_size)
    zero = place.new_zeros(())
    return mask_function(zero, zero, query, key) & (key >= 0)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend to the places of each slot; a layer of a transformers model calls it.

    Args:
        module: the layer.
        query: [n, heads, s, head_dim].
        key, value: [n, kv_heads, places, head_dim].
        attention_mask: of :func:`make_mask`.
        dropout: unused; a sampling model has none.
        scaling: factor of the scores; None: 1 / sqrt(head_dim).
        softcap: Gemma 2's c in ``c tanh(score / c)``.
        s_aux: gpt-oss's sinks, [heads]: a score without a value.
        others: as in :func:`rocm_ext.model.transformers.attention.attention`.

    Returns:
        [n, s, heads, head_dim], and None for the weights.

    Raises:
        TypeError: an argument is unknown.
        UserError: the layer's code does not use the mask.
    """
    check_arguments(module, others)
    wanted = (1, query.shape[2], key.shape[2])
    if attention_mask is None or attention_mask.shape[1:] != wanted:
        raise UserError(f"{type(module).__name__} makes masks of its own")
    now = _pass.get()
    asked = now.asked
    asked.layers += 1
    asked.read = max(asked.read, key.shape[1] * (key.shape[-1] + value.shape[-1]))
    asked.scores |= softcap is not None or s_aux is not None
    n, heads, s, _ = query.shape
    groups = heads // key.shape[1]
    if s == 1:  # the heads of a group become queries of one kv head, so keys and values are not expanded
        query = query.view(n, -1, groups, query.shape[-1])
    elif groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    sinks = None if s_aux is None else s_aux.view(1, *((-1, groups) if s == 1 else (heads, 1)), 1)
    out = sdpa(query, key, value, now.kernel, mask=attention_mask, scale=scaling, softcap=softcap, sinks=sinks)
    return out.reshape(n, heads, s, -1).transpose(1, 2), None


class _Attention(Slots, CacheLayerMixin):
    """Keys and values of one layer, as transformers asks for them."""

    def __init__(self, cache: "TransformersSlots", window: int | None) -> None:
        CacheLayerMixin.__init__(self)
        Slots.__init__(self, cache, window)
        self.is_sliding = window is not None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one token's keys and values in each of the first n slots and return what these slots hold."""
        return self.write(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of places that attention reads, and 0."""
        return min(self._cache.span, self.places), 0

    def get_seq_length(self) -> int:
        """Return the positions before the newest token of the longest slot."""
        return self._cache.span - 1

    def get_max_length(self) -> int:
        """Return the number of places."""
        return self.places


class _Nothing(DummyLayer):
    """A layer without a cache."""

    def put(self, rows: slice, prefix: Any, known: int) -> None:
        """Copy nothing."""

    def move(self, to: int, source: int, known: int) -> None:
        """Copy nothing."""


class _Recurrent(LinearAttentionLayer):
    """States of one layer, each [slots, …]; transformers' code sees those of the running rows."""

    def __init__(self, cache: "TransformersSlots", states: int) -> None:
        super().__init__(number_of_states=states)
        self._cache = cache
        self._all: dict[tuple[str, int], Tensor] = {}

    def begin(self, n: int) -> None:
        """Show the first ``n`` slots to the model."""
        for (kind, index), tensor in self._all.items():
            getattr(self, kind)[index] = tensor[:n]

    def put(self, rows: slice, prefix: Any, known: int) -> None:
        """Copy the states of one sequence into slots; see :meth:`rocm_ext.model.slots.SlotCache.put`."""
        for kind, ready in (("conv_states", "is_conv_states_initialized"),
                            ("recurrent_states", "is_recurrent_states_initialized")):  # fmt: skip
            for index, tensor in getattr(prefix, kind).items():
                if tensor is None:
                    continue
                if (kind, index) not in self._all:
                    self._all[kind, index] = tensor.new_zeros(self._cache.slots, *tensor.shape[1:])
                    getattr(self, ready)[index] = self.has_previous_state[index] = True
                    self.device, self.dtype = tensor.device, tensor.dtype
                    if kind == "conv_states":
                        self.conv_kernel_size[index] = tensor.shape[-1]
                self._all[kind, index][rows] = tensor if known else 0

    def move(self, to: int, source: int, known: int) -> None:
        """Copy one slot to another; see :meth:`rocm_ext.model.slots.SlotCache.move`."""
        for tensor in self._all.values():
            tensor[to] = tensor[source]


class _Both(_Recurrent, _Attention):  # type: ignore[misc, override]
    """A layer with both."""

    def __init__(self, cache: "TransformersSlots", states: int) -> None:
        _Attention.__init__(self, cache, None)
        _Recurrent.__init__(self, cache, states)

    lazy_initialization = _Attention.lazy_initialization  # type: ignore[assignment]
    get_max_length = _Attention.get_max_length

    def put(self, rows: slice, prefix: Any, known: int) -> None:
        _Recurrent.put(self, rows, prefix, known)
        _Attention.put(self, rows, prefix, known)

    def move(self, to: int, source: int, known: int) -> None:
        _Recurrent.move(self, to, source, known)
        _Attention.move(self, to, source, known)


class TransformersSlots(SlotCache, Cache):
    """The cache of several sequences, one in each slot.

    Args:
        config: transformers' config of the model.
        slots: their number.
        length: positions of a slot.
        rounded: returns the places of a ring for a window; None: every layer attends to all positions.

    Raises:
        UserError: the model has a kind of layer that is not supported.
    """

    def __init__(self, config: Any, slots: int, length: int, rounded: Callable[[int], int] | None) -> None:
        SlotCache.__init__(self, 0, slots, length)
        self._rounded = rounded
        Cache.__init__(self, layers=[self._layer(theirs) for theirs in layers_of(config)])

    def _layer(self, theirs: Any) -> Any:
        if isinstance(theirs, LinearAttentionAndFullAttentionLayer):
            return _Both(self, theirs.number_of_states)
        if isinstance(theirs, LinearAttentionLayer):
            return _Recurrent(self, theirs.number_of_states)
        if isinstance(theirs, DummyLayer):
            return _Nothing()
        return _Attention(self, getattr(theirs, "sliding_window", None) if self._rounded else None)

    def ring(self, window: int | None) -> int:
        """Return the places of a slot for ``window``; None: attention to all positions."""
        if window is None or self._rounded is None:
            return self._length
        return min(self._length, self._rounded(max(1, window)))  # some configs say 0 and use none

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer has states alone."""
        return [type(layer) is _Recurrent for layer in self.layers]

    def begin(self, positions: Tensor, span: int) -> None:
        """Begin a step in the first n slots; arguments as in the base class."""
        super().begin(positions, span)
        for layer in self.layers:
            if isinstance(layer, _Recurrent):
                layer.begin(len(positions))


class _WholeWindow(DynamicLayer):
    """Keys and values of a prefill in sliding attention: all of them, because rows have different lengths."""

    is_sliding = True

    def __init__(self, sliding_window: int) -> None:
        super().__init__()
        self.sliding_window = sliding_window


_KINDS = (DynamicLayer, _WholeWindow, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer, DummyLayer)


def layers_of(config: Any) -> list[Any]:
    """Return new cache layers for the prefill of a model.

    Raises:
        UserError: the model has a kind of layer that is not supported.
    """
    if "chunked_attention" in (getattr(config.get_text_config(), "layer_types", None) or ()):
        raise UserError("it has chunked attention")  # Llama 4 also scales queries by the number of cached tokens
    layers = [
        _WholeWindow(layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer else layer  # type: ignore
        for layer in DynamicCache(config=config).layers
    ]
    if odd := [type(layer).__name__ for layer in layers if type(layer) not in _KINDS]:
        raise UserError(f"it needs {odd[0]}")
    return layers


def row_of(layers: list[Any], row: int, known: int) -> Cache:
    """Return a copy of one row of a prefill's cache, of its first ``known`` positions."""
    kept: list[Any] = []
    layer: Any
    for layer in layers:
        one: Any = copy.copy(layer)
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            for name in ("keys", "values"):
                setattr(one, name, getattr(layer, name)[row : row + 1, :, :known].clone())
        if isinstance(layer, LinearAttentionLayer):
            for kind in ("conv_states", "recurrent_states"):
                states = getattr(layer, kind)
                setattr(one, kind, {i: None if t is None else t[row : row + 1].clone() for i, t in states.items()})
        kept.append(one)
    return Cache(layers=kept)


AttentionInterface.register(SLOTS, attention)
AttentionMaskInterface.register(SLOTS, make_mask)
