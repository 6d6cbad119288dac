"""Attention within packed sequences in training, and over a cache of slots in sampling.

Packed sequences go to torch's SDPA with ``is_causal``. The fast kernel of every backend (flash on CUDA, AOTriton on
ROCm, the CPU's) takes that call; none takes a block-diagonal mask. On CPUs short sequences of similar length share a
call, padded on the right, where causal attention does not look. All others get one call per sequence: a few dozen
launches per layer cost little compared with the matrix products of thousands of tokens.

Sequences with a common beginning, such as the two sides of a pair, may store it once. Attention repeats its queries,
keys and values in front of every such sequence, so only scores are computed again. The kernels' causal masks are
aligned to the first query and key; few backends can align them to the last.

A decoding step is a packed row of one token per running sequence. A training step gives a layer the :class:`Lengths` of
packed sequences; the sampler gives it :class:`Slots`.
"""

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from rocm_ext.base.errors import UserError
from rocm_ext.machine.numerics import SDPA_KERNELS
from rocm_ext.model.decoder import Decoder

_NO_KERNEL = ("No available kernel", "No viable backend")  # what torch says on GPUs, and on CPUs


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: str,
    *,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention with one of torch's kernels, or with its scores in memory.

    Args:
        q: [n, heads, queries, head_dim].
        k, v: [n, kv_heads, keys, head_dim].
        kernel: auto: torch chooses; flash, efficient, math: torch's kernel of this name; eager: plain matrix products
            in q's dtype (math computes in fp32). A GPU's flash kernel takes no masks: with one, torch chooses. apart:
            a GPU's auto, in plans only.
        mask: True where a query attends, or 0 there and -inf elsewhere; it broadcasts to [n, heads, queries, keys].
            None for causal attention.
        dropout: probability on attention weights.
        scale: factor of the scores, by default 1 / sqrt(head_dim).
        softcap: Gemma 2's c in ``c tanh(score / c)``.
        sinks: scores without values (gpt-oss); they broadcast to [n, heads, queries, 1].

    Returns:
        [n, heads, queries, head_dim].

    Raises:
        UserError: torch has no such kernel for these tensors, or the kernel cannot cap scores or add sinks.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:  # torch's enable_gqa takes the math path where no kernel has groups
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
    plain = softcap is None and sinks is None
    if not plain and kernel not in ("auto", "apart", "eager"):
        raise UserError(
            "attention: no kernel of torch's computes this model's capped scores or sinks; set attention: eager"
        )
    if kernel == "eager" or not plain:
        return _by_scores(q, k, v, mask, dropout, scale, softcap, sinks)
    if kernel == "flash" and mask is not None and q.device.type != "cpu":
        kernel = "auto"
    compute = partial(F.scaled_dot_product_attention, q, k, v, mask, dropout, mask is None)
    if kernel not in SDPA_KERNELS:
        return compute(scale=scale)
    try:
        with sdpa_kernel(SDPA_KERNELS[kernel]):
            return compute(scale=scale)
    except RuntimeError as error:
        if not any(words in str(error) for words in _NO_KERNEL):
            raise
        dtype = str(q.dtype).removeprefix("torch.")
        device = "CPU" if q.device.type == "cpu" else "GPU"
        raise UserError(
            f"attention: torch has no {kernel} kernel for {dtype} and head_dim {q.shape[-1]} on this {device}; "
            "set attention: auto"
        ) from error


def _by_scores(q: Tensor, k: Tensor, v: Tensor, mask, dropout, scale, softcap, sinks) -> Tensor:
    """Compute :func:`sdpa` with its scores in memory."""
    queries = q.shape[2]
    keys = k.shape[2]
    if mask is None:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril()
    allowed = mask if mask.dtype == torch.bool else mask == 0
    if scale is None:
        scale = q.shape[-1] ** -0.5
    scores = q @ k.transpose(2, 3) * scale  # [n, heads, queries, keys]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    if sinks is not None:
        last = sinks.to(scores.dtype).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, last], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(weights[..., :keys], dropout) @ v


def check_kernel(
    kernel: str, device: torch.device, dtype: torch.dtype, num_heads: int, head_dim: int
) -> None:
    """Run ``kernel`` on a small causal input; raise a UserError if torch does not have it for these arguments."""
    q = torch.zeros(1, num_heads, 128, head_dim, device=device, dtype=dtype, requires_grad=True)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")  # torch warns of every reason against a kernel
        sdpa(q, q, q, kernel)


# ---- the cache of slots

# Attention reads a multiple of this many positions of a cache. CPU: other numbers change the rounding of attention's
# sums (see `span_for`). GPU: few distinct shapes need few graphs.
_SPAN = {"cpu": 16, "cuda": 256}


def span_for(device: torch.device, positions: int) -> int:
    """Return the positions of a cache to read for ``positions``, rounded up so that results stay bit-identical."""
    positions += -positions % _SPAN.get(device.type, 256)
    # On CPUs torch's attention works on blocks of 512 positions, and MKL sums more than 384 positions of a block in two
    # halves (measured). So attention reads either all of the last block or at most its first half.
    if device.type == "cpu" and positions % 512 > 256:
        positions += -positions % 512
    return positions


class Slots:
    """Keys and values of one layer: two tensors [slots, kv_heads, places, head_dim], allocated at first use.

    Args:
        cache: the model's cache.
        window: sliding window of the layer's attention, or None if it attends to all positions. With a window a slot is
            a ring: it stores position p at index p mod ``places``.

    Attributes:
        places: positions that a slot can store.
    """

    keys: Any = None
    values: Any = None
    is_initialized = False

    def __init__(self, cache: "SlotCache", window: int | None = None) -> None:
        # strong references make a cycle: the memory of all slots stays until Python looks for cycles, far into training
        self._cache = weakref.proxy(cache)
        self.places = cache.ring(window)

    def once(self, key, make: Callable[[], Any]) -> Any:
        """See :meth:`Pass.once`."""
        return self._cache.once(key, make)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the slots in the form of one row."""
        self.keys = self._new(key_states)
        self.values = self._new(value_states)
        self.is_initialized = True

    def _new(self, row: Tensor) -> Tensor:
        _, kv_heads, _, head_dim = row.shape
        return row.new_zeros(self._cache.slots, kv_heads, self.places, head_dim)

    def write(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token's key and value into the first n slots; return the keys and values that attention reads.

        The arguments are [n, kv_heads, head_dim], the results [n, kv_heads, span, head_dim].
        """
        if not self.is_initialized:
            self.lazy_initialization(key[:, :, None], value[:, :, None])
        rows = self._cache.rows
        places = self.once(self.places, lambda: self._cache.positions % self.places)
        self.keys[rows, :, places] = key
        self.values[rows, :, places] = value
        running = slice(len(key))
        read = slice(min(self._cache.span, self.places))
        return self.keys[running, :, read], self.values[running, :, read]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: str) -> Tensor:
        """Write the step's keys and values, and attend within each slot.

        Args:
            q: [n, heads, head_dim], one token for each of the first n slots.
            k, v: [n, kv_heads, head_dim].
            kernel: see :func:`sdpa`.

        Returns:
            [n, heads, head_dim].
        """
        n, kv_heads, head_dim = k.shape
        keys, values = self.write(k, v)
        # The heads of a group become queries of one kv head, so keys and values are not expanded.
        groups = q.view(n, kv_heads, -1, head_dim)
        mask = self._cache.mask(q.dtype)
        out = sdpa(groups, keys, values, kernel, mask=mask)
        return out.reshape(q.shape)

    def put(self, rows: slice, prefix, known: int) -> None:
        """Copy the first ``known`` positions of ``prefix``, the keys and values of one sequence, into slots."""
        if not known:
            return
        if not self.is_initialized:
            self.lazy_initialization(prefix.keys, prefix.values)
        first = max(0, known - self.places)
        newest = slice(first, known)
        places = torch.arange(first, known, device=self.keys.device) % self.places
        self.keys[rows, :, places] = prefix.keys[:, :, newest]
        self.values[rows, :, places] = prefix.values[:, :, newest]

    def held(self, known: int) -> list[Tensor]:
        """Return the stored values of the first ``known`` positions; see :meth:`SlotCache.held`."""
        if not self.is_initialized:
            return []
        return [self.keys[:, :, :known], self.values[:, :, :known]]


class Pass:
    """A forward pass of sampling."""

    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def once(self, key, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returned for ``key`` at the first call in this pass, in any layer."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class SlotCache(Pass):
    """The cache of several sequences, one per slot.

    Args:
        layers: number of the model's layers.
        slots: number of sequences.
        length: positions per slot.

    Attributes:
        layers: one :class:`Slots` per layer.
        span: positions that the current step reads.
        rows: slot of each token of the current step, [n].
        positions: position of each token of the current step, [n].
    """

    span = 1
    rows: Tensor
    positions: Tensor
    layers: Sequence[Any]

    def __init__(self, layers: int, slots: int, length: int) -> None:
        super().__init__()
        self.slots = slots
        self._length = length
        self.layers = [Slots(self) for _ in range(layers)]

    def ring(self, window: int | None) -> int:
        """Return the positions that a slot stores for a sliding window, or with None for attention to all positions."""
        return self._length

    def begin(self, positions: Tensor, span: int) -> None:
        """Begin a step in the first n slots, at ``positions`` [n]; ``span`` exceeds the largest of them."""
        self.positions = positions
        self.span = span
        self._made = {}
        self.rows = torch.arange(len(positions), device=positions.device)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Return the mask of the current step: [n, 1, 1, span], 0 where a token attends and -inf elsewhere."""

        def make() -> Tensor:
            index = torch.arange(self.span, device=self.positions.device)
            hidden = index > self.positions[:, None]  # [n, span]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            return mask.masked_fill_(hidden, -torch.inf)[:, None, None]

        return self.once("mask", make)

    def put(self, rows: slice, prefix, known: int) -> None:
        """Copy the first ``known`` tokens of a prompt's cache ``prefix`` into the slots ``rows``."""
        for mine, theirs in zip(self.layers, prefix.layers, strict=True):
            mine.put(rows, theirs, known)

    def move(self, to: Tensor, source: Tensor, known: int) -> None:
        """Copy slots: ``source`` to ``to``, [n] slots each, all different; at most ``known`` positions are in use."""
        for tensor in self.held(known):
            tensor[to] = tensor[source]

    def held(self, known: int) -> list[Tensor]:
        """Return views [slots, …] of all layers' tensors, of the slots' first ``known`` positions."""
        return [tensor for layer in self.layers for tensor in layer.held(known)]

    def save(self, slot: int, known: int) -> list[Tensor]:
        """Return a copy of a slot's first ``known`` positions."""
        return [tensor[slot].clone() for tensor in self.held(known)]

    def restore(self, slot: int, saved: Sequence[Tensor], known: int) -> None:
        """Put back what :meth:`save` returned."""
        for tensor, mine in zip(self.held(known), saved, strict=True):
            tensor[slot] = mine


# ---- packed sequences


# On CPUs: the longest sequence that shares a call of attention, and the least length of the others in the call, as a
# share of the longest. Longer sequences would save nothing, and padding shorter ones costs more.
_SHORT = 512
_SIMILAR = 0.75


class Lengths:
    """Lengths of packed sequences, passed through torchtune's ``mask`` argument.

    This is an object because ``torch.compile`` compiles a new graph for every new tuple.

    Attributes:
        values: tokens per sequence, without shared ones.
        shared: shared tokens per sequence, see :class:`rocm_ext.data.batches.MicroBatch`.
    """

    __slots__ = ("_calls", "shared", "values")

    def __init__(self, values: tuple[int, ...], shared: tuple[int, ...] = ()) -> None:
        self.values = values
        self.shared = shared or (0,) * len(values)
        self._calls: dict[int, _Calls] = {}

    def attend(
        self, packed: Sequence[Tensor], compute: Callable[..., Tensor], together: bool
    ) -> Tensor:
        """Compute attention within each sequence.

        Args:
            packed: q, k and v of packed tokens, [1, heads, s, head_dim].
            compute: causal attention of several sequences' q, k and v, [n, heads, longest, head_dim]. Sequences begin
                with their shared tokens; shorter ones are padded on the right.
            together: whether short sequences of similar length are computed together on a CPU.

        Returns:
            [1, s, heads, head_dim].
        """

        def by_token(*call: Tensor) -> Tensor:  # [n, longest, heads, head_dim]
            by_head = [tensor.transpose(1, 2) for tensor in call]
            return compute(*by_head).transpose(1, 2)

        rows = [tensor[0].transpose(0, 1) for tensor in packed]  # [s, heads, head_dim]
        longest = _SHORT if together and rows[0].device.type == "cpu" else 0
        return self.by_sequence(rows, by_token, longest)[None]

    def by_sequence(
        self, packed: Sequence[Tensor], compute: Callable[..., Tensor], longest: int
    ) -> Tensor:
        """Compute a causal function of each sequence.

        Args:
            packed: its arguments for packed tokens, [s, ...].
            compute: the function of several sequences, with arguments [n, longest, ...]. Sequences begin with their
                shared tokens; shorter ones are padded on the right.
            longest: tokens of the longest sequence that is computed together with others of similar length.

        Returns:
            [s, ...].
        """
        if longest not in self._calls:
            self._calls[longest] = self._planned(longest, packed[0].device)
        calls = self._calls[longest]
        # embeddings, because their backward pass is fast on CPUs and sums shared rows in a fixed order on GPUs
        if calls.inputs is not None:
            packed = [_rows(tensor, calls.inputs) for tensor in packed]
        counts = [sequences * tokens for sequences, tokens in calls.sizes]
        pieces = [tensor.split(counts) for tensor in packed]
        outs = []
        for size, *call in zip(calls.sizes, *pieces, strict=True):
            arguments = [piece.unflatten(0, size) for piece in call]
            outs.append(compute(*arguments).flatten(0, 1))
        out = torch.cat(outs)
        return out if calls.outputs is None else _rows(out, calls.outputs)

    def _planned(self, longest: int, device: torch.device) -> "_Calls":
        """Divide the sequences among calls; for ``longest`` see :meth:`by_sequence`."""
        spans = []
        first = begin = 0
        for count, shared in zip(self.values, self.shared, strict=True):
            if not shared:
                begin = first
            spans.append(_Span(shared + count, shared, begin, first))
            first += count
        if longest:
            spans.sort(reverse=True)
        calls: list[list[_Span]] = []
        most = math.inf  # tokens of the last call's longest sequence
        for span in spans:
            if longest and most <= longest and span.length >= _SIMILAR * most:
                calls[-1].append(span)
            else:
                calls.append([span])
                most = span.length
        inputs: list[int] = []
        outputs = [0] * first
        for call in calls:
            most = call[0].length
            for length, shared, begin, rest in call:
                end = rest + length - shared
                at = len(inputs)
                outputs[rest:end] = range(at + shared, at + length)
                inputs += range(begin, begin + shared)
                inputs += range(rest, end)
                inputs += [0] * (most - length)
        sizes = [(len(call), call[0].length) for call in calls]
        if inputs == outputs == [*range(first)]:
            return _Calls(sizes, None, None)
        return _Calls(sizes, _index(inputs, device), _index(outputs, device))


class _Span(NamedTuple):
    """A sequence's tokens: all, the shared ones, where these begin in the row, and where the others begin."""

    length: int
    shared: int
    begin: int
    rest: int


class _Calls(NamedTuple):
    """Calls of a function of sequences.

    Attributes:
        sizes: sequences and tokens of each call.
        inputs: the tokens of all calls. None if these are the row's tokens in their order.
        outputs: the index of every token's output in the calls' results. None with ``inputs``.
    """

    sizes: list[tuple[int, int]]
    inputs: Tensor | None
    outputs: Tensor | None


def _index(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """Return the rows ``index`` [n] of ``values`` [s, ...]: [n, ...]."""
    _, *shape = values.shape
    flat = F.embedding(index, values.flatten(1))
    return flat.unflatten(1, shape)


@torch.compiler.disable
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    dropout: float = 0.0,
    kernel: str = "auto",
    together: bool = True,
) -> Tensor:
    """Compute causal attention within each sequence.

    Args:
        q: [1, s, heads, head_dim].
        k, v: [1, s, kv_heads, head_dim].
        lengths: the sequences' lengths, which sum to s.
        dropout: dropout probability on attention weights.
        kernel: see :func:`sdpa`.
        together: whether sequences may share a call; kernels with scores in memory never allow it.

    Returns:
        [1, s, heads, head_dim].
    """
    compute = partial(sdpa, kernel=kernel, dropout=dropout)
    together = together and kernel in ("auto", "flash")
    with _no_plans():
        by_head = [tensor.transpose(1, 2) for tensor in (q, k, v)]
        return lengths.attend(by_head, compute, together)


@contextmanager
def _no_plans() -> Iterator[None]:
    """Context without cuDNN's kernel, torch's first choice on NVIDIA's GPUs from sm_90 on.

    It plans up to a second for every new sequence length (https://github.com/modelscope/FunASR/issues/3704).
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def shares_beginnings(decoder: Decoder) -> bool:
    """Return whether packed sequences may share their beginnings: not with dropout, which differs between them."""
    return decoder.shares and not has_dropout(decoder)


def has_dropout(model: nn.Module) -> bool:
    """Return whether a training step of ``model`` draws dropout masks."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            return True
        for key in ("attn_dropout", "attention_dropout"):
            probability = getattr(module, key, None)
            if isinstance(probability, float | int) and probability > 0:
                return True
    return False


def choose_attention(decoder: Decoder, kernel: str) -> None:
    """Compute the attention of packed rows with ``kernel``, see :func:`sdpa`; refuse models that know no kernels."""
    if kernel == "auto":
        return
    if not decoder.packs:
        raise UserError(
            f"attention is {kernel!r}, but this model has its own code for attention; set attention: auto"
        )
    decoder.kernel = kernel
