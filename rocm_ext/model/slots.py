"""A cache of keys and values with a slot for each sequence; attention reads it when it is open.

Each layer gets its own :class:`Slots` where a training step gives it the lengths of packed sequences. A decoding step
is a packed row, too: one token of each running sequence.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rocm_ext.model.sdpa import sdpa

# Attention reads a multiple of this many positions of a cache. CPU: other numbers change the rounding of attention's
# sums (see `span_for`). GPU: few distinct shapes need few graphs.
_SPAN = {"cpu": 16, "cuda": 256}


def span_for(device: torch.device, positions: int) -> int:
    """Return the positions of a cache to read for ``positions``, rounded up so that results stay bit-identical."""
    positions += -positions % _SPAN.get(device.type, 256)
    # On CPUs torch's attention works on blocks of 512 positions, and MKL sums more than 384 positions of a block in two
    # halves (measured). So attention reads either the whole last block or its first half at most.
    return positions + -positions % 512 if device.type == "cpu" and positions % 512 > 256 else positions


class Slots:
    """Keys and values of one layer: [slots, kv_heads, places, head_dim] each, allocated at first use.

    Args:
        cache: that it belongs to.
        window: of the layer's attention; None: it attends to all positions. The slots of a window are rings: position p
            lies at place p mod ``places``.

    Attributes:
        places: of a slot.
    """

    keys: Any = None
    values: Any = None
    is_initialized = False

    def __init__(self, cache: "SlotCache", window: int | None = None) -> None:
        self._cache, self.places = cache, cache.ring(window)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the slots in the form of one row."""
        self.keys, self.values = (
            t.new_zeros(self._cache.slots, t.shape[1], self.places, t.shape[3]) for t in (key_states, value_states)
        )
        self.is_initialized = True

    def write(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token's key and value in each of the first n slots.

        Args:
            key, value: [n, kv_heads, 1, head_dim].

        Returns:
            What attention reads of these slots: [n, kv_heads, span, head_dim] each.
        """
        if not self.is_initialized:
            self.lazy_initialization(key, value)
        rows = self._cache.rows
        places = self.once(self.places, lambda: self._cache.positions % self.places)
        self.keys[rows, :, places] = key[:, :, 0]
        self.values[rows, :, places] = value[:, :, 0]
        n, span = len(rows), min(self._cache.span, self.places)
        return self.keys[:n, :, :span], self.values[:n, :, :span]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: str) -> Tensor:
        """Write the step's keys and values, and attend to those of each slot.

        Args:
            q: [1, n, heads, head_dim], one token of each of the first n slots.
            k, v: [1, n, kv_heads, head_dim].
            kernel: see :func:`rocm_ext.model.sdpa.sdpa`.

        Returns:
            [1, n, heads, head_dim].
        """
        n, kv_heads, head_dim = k.shape[1:]
        keys, values = self.write(k.view(n, kv_heads, 1, head_dim), v.view(n, kv_heads, 1, head_dim))
        # The heads of a group become queries of one kv head, so keys and values are not expanded.
        out = sdpa(q.view(n, kv_heads, -1, head_dim), keys, values, kernel, mask=self._cache.mask(q.dtype))
        return out.reshape(q.shape)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returned for ``key`` at the first call in this step, in any layer."""
        return self._cache.once(key, make)

    def put(self, rows: slice, prefix: Any, known: int) -> None:
        """Copy the first ``known`` positions of ``prefix``, the keys and values of one sequence, into slots."""
        if not known:
            return
        if not self.is_initialized:
            self.lazy_initialization(prefix.keys, prefix.values)
        first = max(0, known - self.places)
        places = torch.arange(first, known, device=self.keys.device) % self.places
        self.keys[rows, :, places] = prefix.keys[:, :, first:known]
        self.values[rows, :, places] = prefix.values[:, :, first:known]

    def move(self, to: int, source: int, known: int) -> None:
        """Copy one slot, of which ``known`` positions are in use, to another."""
        if self.is_initialized:
            for tensor in (self.keys, self.values):
                tensor[to, :, :known] = tensor[source, :, :known]


class SlotCache:
    """The cache of several sequences, one in each slot.

    Args:
        layers: number of the model's layers.
        slots: number of sequences.
        length: positions of a slot.

    Attributes:
        layers: the :class:`Slots` of each layer.
        slots: their number.
        span: positions that the current step reads.
        rows: indices of its slots, [n].
        positions: of its tokens, [n].
    """

    span = 1
    rows: Tensor
    positions: Tensor
    layers: Sequence[Any]

    def __init__(self, layers: int, slots: int, length: int) -> None:
        self.slots, self._length = slots, length
        self.layers = [Slots(self) for _ in range(layers)]
        self._made: dict[Any, Any] = {}

    def ring(self, window: int | None) -> int:
        """Return the places of a slot for ``window``; None: attention to all positions."""
        return self._length

    def begin(self, positions: Tensor, span: int) -> None:
        """Begin a step in the first n slots.

        Args:
            positions: of the step's tokens, [n].
            span: more than the largest of them.
        """
        self.positions, self.span, self._made = positions, span, {}
        self.rows = torch.arange(len(positions), device=positions.device)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Return the mask of the current step: [n, 1, 1, span], 0 where a token attends and -inf elsewhere."""

        def make() -> Tensor:
            hidden = torch.arange(self.span, device=self.positions.device) > self.positions[:, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            return mask[:, None, None]

        return self.once("mask", make)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returned for ``key`` at the first call in this step."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def put(self, rows: slice, prefix: Any, known: int) -> None:
        """Copy a prompt into slots.

        Args:
            rows: the slots.
            prefix: cache of its first tokens.
            known: number of these tokens.
        """
        for mine, theirs in zip(self.layers, prefix.layers, strict=True):
            mine.put(rows, theirs, known)

    def move(self, to: int, source: int, known: int) -> None:
        """Copy slot ``source``, of which the first ``known`` positions are in use, to slot ``to``."""
        for layer in self.layers:
            layer.move(to, source, known)


class Prefix:
    """Keys and values of one prompt, in one layer: [1, kv_heads, s, head_dim] each."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values


class PrefixCache:
    """The cache of one prompt: a :class:`Prefix` of each layer."""

    def __init__(self) -> None:
        self.layers: list[Prefix] = []


class Prompts:
    """Packed prompts whose keys and values stay in caches.

    Args:
        lengths: tokens of each sequence; sequences beyond the number of ``caches`` are padding.
        caches: of the prompts.
        attend: causal attention within each sequence, ``(q, k, v, kernel) -> out``.
    """

    def __init__(self, lengths: Sequence[int], caches: Sequence[PrefixCache], attend: Callable[..., Tensor]) -> None:
        self._lengths, self._caches, self._attend = lengths, caches, attend
        self._made: dict[Any, Any] = {}

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returned for ``key`` at the first call in this pass."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: str) -> Tensor:
        """Keep k and v of each prompt, and attend within each; shapes as of :func:`rocm_ext.model.attention.attend`."""
        pieces = zip(*(t.transpose(1, 2).split(self._lengths, dim=2) for t in (k, v)), strict=True)
        for cache, (key, value) in zip(self._caches, pieces, strict=False):
            # copies, because views would keep those of the other prompts alive
            cache.layers.append(Prefix(*(t.clone(memory_format=torch.contiguous_format) for t in (key, value))))
        return self._attend(q, k, v, kernel)
