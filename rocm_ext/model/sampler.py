"""A copy of a model for sampling, which shares the weights that no adapter changes.

The copy has the same modules without wrappers, hooks and dropout, so it computes the same. Linear layers have their
adapters merged or separate; in fp32 on a CPU a native decoder's are copies in another layout, see
:mod:`rocm_ext.model.products`. Sampling never writes to the weights under training.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rocm_ext.model.attention import SlotCache
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.lora import (
    Dora,
    Lora,
    changed_weights,
    dense,
    is_plain,
    merged_layer,
    plain,
    quantized,
)
from rocm_ext.model.products import product, uses_onednn
from rocm_ext.model.token_rows import token_rows
from rocm_ext.model.weights.quantized import Quantized, frozen

# On CPUs, matrix products with fewer or more rows use other kernels, which round differently (measured with MKL on
# several threads). Without these bounds a sample would depend on the number of samples in its batch.
MIN_ROWS = 16
MAX_ROWS = 96
_EXPANDED = 3  # copies in fp32 of keys and values made from a smaller cache; measured 2.5


class SequenceMemory(NamedTuple):
    """The memory of a sequence in a model.

    Attributes:
        keys: bytes per position, and window, of all layers with keys. The window is None for all positions.
        states: bytes of all recurrent states.
        windows: whether any layer has a window.
        scores: whether attention holds its scores in memory.
        expanded: bytes per position, in fp32, of the keys and values that a layer computes from its cache in every step
            (DeepSeek). 0 if the cache has them.
        positions: most positions of a sequence.
    """

    keys: list[tuple[int, int | None]]
    states: int
    windows: bool
    scores: bool
    expanded: int
    positions: int


class Sampler(ABC):
    """Forward passes for sampling; :func:`sampler_of` opens one.

    Args:
        adapted: pairs of the copy's layers and token rows with adapters, and the layers under training.
        memory: the memory of a sequence.
        heads: number of query heads.
        tied: whether the output layer is the embeddings.

    Attributes:
        decoder: the copy.
        device, dtype: the weights' device and dtype.
        max_seq_len: most positions of a sequence.
        vocabulary: logits per row.
        weight_bytes: bytes of weights that a step of many rows reads.
        flops_per_token: operations of the matrix products for one token.
        splits_rows: whether CPUs compute a product of many rows in parts, see :data:`MAX_ROWS`.
        mask_bytes: bytes of a step's positions and masks, per position of a slot.
        fixed_shapes: whether shapes in a step may not depend on values, because a graph replays it.
    """

    splits_rows: bool
    mask_bytes: int
    fixed_shapes = False

    def __init__(
        self,
        decoder,
        adapted: list[tuple[Any, list[Any]]],
        memory: SequenceMemory,
        heads: int,
        tied: bool,
    ) -> None:
        self.decoder = decoder
        self._adapted = adapted
        self.memory = memory
        self._heads = heads
        embeddings = decoder.tok_embeddings.weight
        self.device = embeddings.device
        self.dtype = embeddings.dtype
        self.max_seq_len = memory.positions
        self.vocabulary = len(embeddings)
        self.weight_bytes = 0
        self.flops_per_token = 0.0
        for parameter in decoder.parameters():
            if parameter.ndim > 1 and (tied or parameter is not embeddings):
                self.weight_bytes += parameter.nbytes
                self.flops_per_token += 2.0 * parameter.numel() * self._share(parameter)

    def _share(self, parameter: Tensor) -> float:
        """Return the share of a weight that a product with one token uses."""
        return 1.0

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the adapter's values into the copy.

        The copy then equals a new one bit for bit. Its tensors keep their addresses, so graphs stay valid. With sharded
        weights every rank calls this.
        """
        for mine, layers in self._adapted:
            mine.refresh(layers)

    def keep_routes(self, slots: int) -> Tensor:
        """Let steps keep the chosen experts, for models with experts.

        Returns:
            [slots, layers, chosen] int16 on the device; a step overwrites its rows.
        """
        raise NotImplementedError

    def free(self) -> None:
        """Free the weights, also where a caller keeps this object."""
        self.decoder = self._adapted = None  # type: ignore[assignment]

    def cache_bytes(self, length: float) -> float:
        """Bytes of a slot of ``length`` positions."""
        total: float = self.memory.states
        for size, window in self.memory.keys:
            stored = length if window is None else min(length, self._ring(window))
            total += size * stored
        return total

    def _ring(self, window: int) -> int:
        """Positions that a slot stores for a sliding window."""
        return window

    @property
    def _score_bytes(self) -> int:
        if not self.memory.scores:
            return 0
        return self._heads * (3 * self.dtype.itemsize + 5)

    def step_bytes(self, length: int) -> int:
        """Bytes that a step holds per slot of ``length`` positions, without logits."""
        per_position = self.mask_bytes + self._score_bytes + _EXPANDED * self.memory.expanded
        return self.bytes_per_row + length * per_position

    @property
    @abstractmethod
    def bytes_per_row(self) -> int:
        """Bytes that a pass holds at once for one token, in addition to the cache."""

    @abstractmethod
    def prefill_bytes(self, prompts: Sequence[int], most: int) -> int:
        """Bytes of the caches of prompts with these numbers of tokens, and of computing them.

        ``most`` is the number of the prompts' tokens that are computed before the first answer.
        """

    @abstractmethod
    def new_cache(self, slots: int, length: int) -> SlotCache:
        """Return a cache of ``slots`` sequences of ``length`` positions; it may be allocated at first use."""

    @abstractmethod
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Any]:
        """Compute the keys and values of prompts, given as token ids; return one cache per prompt."""

    @abstractmethod
    def step(self, tokens: Tensor, positions: Tensor, cache, span: int) -> Tensor:
        """Decode one token in each of the first n slots.

        Args:
            tokens: [n], the slots' newest tokens.
            positions: [n], these tokens' positions, where the step writes keys and values.
            cache: keys and values of all earlier tokens.
            span: cache positions that attention reads; more than the largest of ``positions``.

        Returns:
            Logits [n, v] of the next tokens.
        """


@torch.no_grad()
def one_step(sampler: Sampler, rows: int, watching: AbstractContextManager[Any]) -> None:
    """Decode a token after a prompt of two in ``rows`` slots; the context ``watching`` covers only the step."""
    known = 2
    cache = sampler.new_cache(rows, known + 1)
    (prefix,) = sampler.prefill([[0] * known])
    cache.put(slice(0, rows), prefix, known)
    tokens = torch.zeros(rows, dtype=torch.long, device=sampler.device)
    positions = tokens + known
    with watching:
        sampler.step(tokens, positions, cache, known + 1)


@contextmanager
def sampler_of(decoder: Decoder, merge: bool | None = None) -> Iterator[Sampler]:
    """Copy ``decoder`` and its adapters into a :class:`Sampler`; ``decoder`` itself does not change.

    The context may stay open while the adapters are trained.

    Updates are merged into fp32 weights. 16-bit weights would round much of a small update away (rank 16, entries of B
    at 3e-4: 59 % is left). For 16-bit weights the adapter therefore stays separate, as in training, unless ``merge`` is
    True. With sharded weights this is a collective call: every rank gathers a copy.

    Raises:
        UserError: the model cannot be sampled from in this process.
    """
    made = decoder.sampler(merge)
    try:
        yield made
    finally:
        made.free()


def merges(source: Decoder, merge: bool | None) -> bool:
    """Return whether a sampler adds the adapters' updates to the weights."""
    if merge is None:
        return source.tok_embeddings.weight.dtype == torch.float32
    return merge


def stays_quantized(weight: Tensor) -> bool:
    """Return whether a sampler keeps ``weight`` quantised: it dequantises fused experts one at a time."""
    return isinstance(weight, Quantized) and weight.ndim == 3


def copied_bytes(
    source: Decoder, merge: bool | None = None, device: torch.device | None = None
) -> int:
    """Bytes that a :class:`Sampler` allocates for weights that it merges, gathers, dequantises, joins or transposes.

    Args:
        source: the model.
        merge: see :func:`sampler_of`.
        device: device for sampling, by default the weights' device.
    """
    weights = {plain(name): p for name, p in source.named_parameters()}
    small = quantized(source)
    copied = set()
    for name, weight in weights.items():
        needs_copy = weight in small or not is_plain(weight)
        if needs_copy and not stays_quantized(weight):
            copied.add(name)
    changed = changed_weights(source).items()
    adapted = {name: layer for name, layer in changed if isinstance(layer, Lora | Dora)}
    groups = source.joined_weights()
    numbers = 0
    for _, rows in token_rows(source):
        numbers += 2 * rows.weight.numel()  # fp32 counts twice
    if merges(source, merge):
        copied.update(adapted)
    else:
        joined = {name: group for group in groups for name in group}
        for name, layer in adapted.items():
            group = joined.get(name, [name])
            b_rows = sum(len(weights[other]) for other in group)  # see SamplingLinear
            rank = layer.lora_b.weight.shape[1]
            numbers += layer.lora_a.weight.numel() + b_rows * rank
    for group in groups:
        parts = [weights[name] for name in group]
        is_copied = not copied.isdisjoint(group)
        if is_copied or not (parts[0].is_meta or _is_one(parts)):
            copied.update(group)
    embeddings = source.tok_embeddings.weight
    if uses_onednn(embeddings.dtype, device or embeddings.device):
        copied.update(source.transposed_weights())
        if source.transposes_tied:  # beside a copy of the embeddings, if there is one
            numbers += embeddings.numel()
    numbers += sum(weights[name].numel() for name in copied)
    return numbers * embeddings.dtype.itemsize


def _is_one(weights: Sequence[Tensor]) -> bool:
    """Return whether the rows of ``weights`` lie one after the other in memory."""
    storage = weights[0].untyped_storage().data_ptr()
    end = weights[0].data_ptr()
    for weight in weights:
        follows = weight.data_ptr() == end and weight.untyped_storage().data_ptr() == storage
        if not follows or not weight.is_contiguous():
            return False
        end += weight.nbytes
    return True


def _as_one(weights: Sequence[Tensor]) -> Tensor:
    """Return the rows of all ``weights``: a view where they lie one after the other in memory, else a copy."""
    if len(weights) == 1:
        return weights[0]
    if _is_one(weights):
        first = weights[0]
        shape = sum(map(len, weights)), *first.shape[1:]
        return first.as_strided(shape, first.stride())
    return torch.cat(list(weights))


class SamplingLinear(nn.Module):
    """Linear layers of one input and their adapters as one product: ``(x Wᵀ + x Aᵀ Bᵀ) * factor + bias``.

    W and A have the rows of all layers, B has their columns on a block diagonal. All are in W's dtype.

    Args:
        layers: the model's layers, which may be under training.
        merge: add the adapters' updates to W.
        transpose: keep W transposed in memory for oneDNN, which then multiplies few rows faster.

    Attributes:
        rows: :class:`TokenRows` whose logits replace W's.
    """

    a: Any
    b: Any
    factor: Any
    bias: Any
    rows: Any

    def __init__(self, layers: Sequence[Any], merge: bool, transpose: bool = False) -> None:
        super().__init__()
        weights = [_weight_of(layer, merge) for layer in layers]
        self.a = self.b = self.factor = self.bias = self.rows = None
        has_adapter = any(isinstance(layer, Lora | Dora) for layer in layers)
        if has_adapter and not merge:
            dtype = weights[0].dtype
            a, b, factor = _factors(layers)
            self.a = frozen(a.to(dtype))
            self.b = frozen(b.to(dtype))
            if factor is not None:
                self.factor = frozen(factor.to(dtype))
        joined = _as_one(weights)
        if transpose and uses_onednn(joined.dtype, joined.device):
            joined = joined.T.contiguous().T
        self.weight = frozen(joined)
        values = []
        has_bias = False
        for layer, weight in zip(layers, weights, strict=True):
            bias = getattr(layer, "bias", None)
            if bias is None:
                bias = weight.new_zeros(len(weight))
            else:
                has_bias = True
            values.append(dense(bias.detach()))
        if has_bias:
            self.bias = frozen(torch.cat(values))

    @torch.no_grad()
    def refresh(self, layers: Sequence[Any]) -> None:
        """Copy the values of the adapters under training, in place."""
        if self.a is not None:
            a, b, factor = _factors(layers)
            self.a.copy_(a)
            self.b.copy_(b)
            if factor is not None:
                self.factor.copy_(factor)
            return
        sizes = [len(layer.weight) for layer in layers]
        for rows, layer in zip(self.weight.split(sizes), layers, strict=True):
            if isinstance(layer, Lora | Dora):
                rows.copy_(_weight_of(layer, merge=True))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if x.ndim > 2:
            rows = self.forward(x.flatten(0, -2))
            return rows.unflatten(0, x.shape[:-1])
        if x.is_cuda or len(x) <= MAX_ROWS:
            return self._product(x)
        # nearly equal parts have at least MIN_ROWS
        parts = x.tensor_split(math.ceil(len(x) / MAX_ROWS))
        return torch.cat([self._product(part) for part in parts])

    __call__ = forward

    def _product(self, x: Tensor) -> Tensor:
        bias = self.bias if self.factor is None else None
        out = product(x, self.weight, bias)
        if self.a is not None:
            out.addmm_(F.linear(x, self.a), self.b.T)
        if self.factor is not None:
            out.mul_(self.factor)
            if self.bias is not None:
                out.add_(self.bias)
        return out if self.rows is None else self.rows.logits(x, out)


def _weight_of(layer, merge: bool) -> Tensor:
    """Return a layer's W as an ordinary tensor, with its adapter's update if ``merge``."""
    weight = dense(layer.weight.detach())
    if merge and isinstance(layer, Lora | Dora):
        return merged_layer(layer, weight)
    return weight


def _factors(layers: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return A, B and factor of :class:`SamplingLinear`, in fp32; layers without adapters have rank 0."""
    adapted = next(layer for layer in layers if isinstance(layer, Lora | Dora))
    like = adapted.lora_a.weight.detach()
    lows = []
    highs = []
    ratios = []
    for layer in layers:
        out, width = layer.weight.shape
        if isinstance(layer, Lora | Dora):
            lows.append(layer.lora_a.weight.detach())  # [r, in]
            highs.append(layer.scale * layer.lora_b.weight.detach())  # [out, r]
        else:
            lows.append(like.new_empty(0, width))
            highs.append(like.new_empty(out, 0))
        if isinstance(layer, Dora):
            ratios.append(layer.magnitude.detach() / layer.weight_norm())
        else:
            ratios.append(like.new_ones(out))
    has_factor = any(isinstance(layer, Dora) for layer in layers)
    factor = torch.cat(ratios) if has_factor else None
    return torch.cat(lows), torch.block_diag(*highs), factor
