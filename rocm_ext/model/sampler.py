"""A copy of a model for sampling, which shares the weights that no adapter changes.

The copy has the modules of training once more, without wrappers, hooks and dropout, so it computes the same. Linear
layers have their adapters merged or beside them. Sampling never writes to the weights under training, so they stay the
same bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.modules import TiedLinear
from torchtune.modules.peft import DoRALinear, LoRALinear

from rocm_ext.model.attention import Lengths, attend
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.lora import Dora, Lora, adapters, dense, factors, merged_layer, plain
from rocm_ext.model.slots import PrefixCache, Prompts, SlotCache

# On CPUs, matrix products with fewer or more rows use other kernels, which round differently (measured with MKL on
# several threads). Without these bounds a sample would depend on the number of samples in its batch.
MIN_ROWS, MAX_ROWS = 16, 96
_EXPANDED = 3  # times in fp32 that keys and values made of a smaller cache are in memory; measured 2.5


@dataclass(frozen=True)
class Needs:
    """What a model keeps of a sequence.

    Attributes:
        keys: bytes per position and window of each layer with keys; None: it attends to all positions.
        states: bytes of all recurrent states.
        windows: whether any layer has a window.
        scores: whether attention holds its scores in memory.
        expanded: bytes per position, in fp32, of a layer's keys and values that the model makes of its cache in each
            step (DeepSeek); 0 if it keeps them.
        positions: of the longest sequence.
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
        decoder: the copy.
        adapted: its linear layers that have an adapter, and those of the model under training.
        needs: what the model keeps of a sequence.
        heads: queries of attention.
        tied: whether the output layer is the embeddings.

    Attributes:
        decoder: the copy.
        device, dtype: of the weights.
        max_seq_len: positions of the longest sequence.
        vocabulary: logits per row.
        weight_bytes: bytes of weights that a step of many rows reads.
        flops_per_token: operations of the matrix products for one token.
        splits_rows: whether a matrix product of many rows is computed in parts on CPUs, see :data:`MAX_ROWS`.
        mask_bytes: of a step's positions and masks, per position of a slot.
    """

    splits_rows: bool
    mask_bytes: int

    def __init__(
        self, decoder: Any, adapted: list[tuple["SamplingLinear", Any]], needs: Needs, heads: int, tied: bool
    ) -> None:
        self.decoder, self._adapted, self.needs, self._heads = decoder, adapted, needs, heads
        embeddings = decoder.tok_embeddings.weight
        self.device, self.dtype = embeddings.device, embeddings.dtype
        self.max_seq_len, self.vocabulary = needs.positions, len(embeddings)
        matrices = {id(p): p for p in decoder.parameters() if p.ndim > 1 and (tied or p is not embeddings)}
        self.weight_bytes = sum(p.nbytes for p in matrices.values())
        self.flops_per_token = 2.0 * sum(p.numel() * self._share(p) for p in matrices.values())

    def _share(self, parameter: Tensor) -> float:
        """Share of a weight that one token is multiplied with."""
        return 1.0

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the adapter's present values into the copy, in place.

        It then equals, bit for bit, a copy that is made now. Its tensors stay where they are, so that graphs that read
        them stay valid. With sharded weights every rank calls this.
        """
        for mine, layer in self._adapted:
            mine.refresh(layer)

    def free(self) -> None:
        """Free the weights, even if a caller keeps this object."""
        vars(self).clear()

    def cache_bytes(self, length: float) -> float:
        """Bytes of a slot of ``length`` positions."""
        return self.needs.states + sum(
            size * (length if window is None else min(length, self._ring(window))) for size, window in self.needs.keys
        )

    def _ring(self, window: int) -> int:
        """Places of a slot for a window."""
        return window

    @property
    def _score_bytes(self) -> int:
        return self._heads * (3 * self.dtype.itemsize + 5) if self.needs.scores else 0

    def step_bytes(self, length: int) -> int:
        """Bytes that a step holds per slot of ``length`` positions, without logits."""
        return self.bytes_per_row + length * (self.mask_bytes + self._score_bytes + _EXPANDED * self.needs.expanded)

    @property
    @abstractmethod
    def bytes_per_row(self) -> int:
        """Bytes that a pass holds at once for one token, in addition to the cache."""

    @abstractmethod
    def prefill_bytes(self, prompts: Sequence[int], most: int) -> int:
        """Bytes that hold the caches of prompts of these lengths and compute them.

        Args:
            prompts: tokens of each prompt.
            most: tokens of prompts that are computed before the first answer.
        """

    @abstractmethod
    def new_cache(self, slots: int, length: int) -> SlotCache:
        """Return a cache of ``slots`` sequences of ``length`` positions; it may be allocated at first use."""

    @abstractmethod
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Any]:
        """Compute the keys and values of ``prompts``.

        Args:
            prompts: token ids of each prompt.

        Returns:
            One cache per prompt.
        """

    @abstractmethod
    def step(self, tokens: Tensor, positions: Tensor, cache: Any, span: int) -> Tensor:
        """Decode one token in each of the first n slots.

        Args:
            tokens: [n], the newest token of each slot.
            positions: [n], its position in the slot's sequence, where the step writes its keys and values.
            cache: of all earlier tokens.
            span: cache positions that attention reads; more than the largest of ``positions``.

        Returns:
            Logits [n, v] of the next tokens.
        """


@contextmanager
def sampler_of(decoder: Decoder, merge: bool | None = None) -> Iterator[Sampler]:
    """Copy ``decoder`` and its adapters into a :class:`Sampler`; ``decoder`` itself does not change.

    The context may stay open while the adapters are trained.

    Updates are merged into fp32 weights. 16-bit weights would round much of a small update away (rank 16, entries
    of B at 3e-4: 59 % is left). For 16-bit weights the adapter therefore stays separate, as in training, unless
    ``merge`` is True. With sharded weights this is a collective call: every rank gathers its own copy.

    Args:
        decoder: the model, with or without adapters.
        merge: add the adapters' updates to the weights; None: only to fp32 weights.

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
    return source.tok_embeddings.weight.dtype == torch.float32 if merge is None else merge


def copied_bytes(source: Decoder, merge: bool | None = None) -> int:
    """Bytes that a :class:`Sampler` adds to the model's; it gathers sharded weights and dequantises 4-bit ones."""
    parts = ("weight",) if merges(source, merge) else ("lora_a.weight", "lora_b.weight")
    linear = [name for name, layer in adapters(source) if isinstance(layer, Lora | Dora)]
    copied = {f"{name}.{part}" for name in linear for part in parts}
    return source.tok_embeddings.weight.dtype.itemsize * sum(
        p.numel()
        for name, p in source.named_parameters()
        if plain(name) in copied or hasattr(p, "full_tensor") or hasattr(p, "get_original_weight")
    )


class SamplingLinear(nn.Module):
    """A linear layer with an optional adapter: ``(x Wᵀ + x Aᵀ Bᵀ) * factor + bias``; all are in W's dtype.

    Args:
        layer: the layer of the model, which may be under training.
        merge: add the adapter's update to W.
    """

    def __init__(self, layer: Any, merge: bool) -> None:
        super().__init__()
        weight, bias = dense(layer.weight.detach()), getattr(layer, "bias", None)
        self.a = self.b = self.factor = None
        if isinstance(layer, Lora | Dora):
            if merge:
                weight = merged_layer(layer, weight)
            else:
                a, b, factor = factors(layer)
                self.a, self.b = frozen(a.to(weight.dtype, copy=True)), frozen(b.to(weight.dtype))
                self.factor = None if factor is None else frozen(factor.to(weight.dtype))
        self.weight = frozen(weight)
        self.bias = None if bias is None else frozen(dense(bias.detach()))

    @torch.no_grad()
    def refresh(self, layer: Lora | Dora) -> None:
        """Copy the present values of the layer under training, in place."""
        if self.a is None:
            self.weight.copy_(merged_layer(layer, dense(layer.weight.detach())))
            return
        for mine, value in zip((self.a, self.b, self.factor), factors(layer), strict=True):
            if mine is not None and value is not None:
                mine.copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self.a is None or self.b is None:
            return _product(x, self.weight, self.bias)
        out = _product(x, self.weight)
        out += _product(_product(x, self.a), self.b)
        if self.factor is not None:
            out *= self.factor
        return out if self.bias is None else out + self.bias


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.numel() // x.shape[-1]
    if x.is_cuda or rows <= MAX_ROWS:
        return F.linear(x, weight, bias)
    parts = x.flatten(0, -2).tensor_split(-(-rows // MAX_ROWS))  # nearly equal, so each has at least MIN_ROWS
    return torch.cat([F.linear(part, weight, bias) for part in parts]).view(*x.shape[:-1], -1)


def frozen(tensor: Tensor) -> nn.Parameter:
    """Return ``tensor`` as a parameter that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)


class NativeSampler(Sampler):
    """Forward passes of a decoder of torchtune's modules.

    Args:
        source: the model, see :class:`rocm_ext.model.native.NativeDecoder`.
        merge: see :func:`sampler_of`.
    """

    splits_rows = True
    mask_bytes = 10

    @torch.no_grad()
    def __init__(self, source: Any, merge: bool | None) -> None:
        copies = _Copies(merges(source, merge))
        decoder, shape = copies.of(source), _bare(source.layers[0]).attn
        weight = decoder.tok_embeddings.weight
        size = 2 * shape.num_kv_heads * shape.head_dim * weight.dtype.itemsize
        scores = source.kernel in ("math", "eager")
        needs = Needs([(size, None)] * len(source.layers), 0, False, scores, 0, source.max_seq_len)
        super().__init__(decoder, copies.adapted, needs, shape.num_heads, isinstance(source.output, TiedLinear))

    @property
    def bytes_per_row(self) -> int:
        """Bytes that a pass holds at once for one token, in addition to the cache.

        It is the larger of two parts. Attention holds its input, q, k and v, those of a sequence with a copy for each
        query, and its output. The MLP holds what attention left, and three of gate, activation, up and their product;
        one more where an adapter is beside the weights.
        """
        layer = self.decoder.layers[0]
        width, wide = layer.mlp.w2.weight.shape
        beside = any(part.a is not None for part in (layer.mlp.w1, layer.mlp.w3))
        q, k = layer.attn.q_proj.weight.shape[0], layer.attn.k_proj.weight.shape[0]
        return max(3 * width + 5 * q + 2 * k, 4 * width + (3 + beside) * wide) * self.dtype.itemsize

    def prefill_bytes(self, prompts: Sequence[int], most: int) -> int:
        """Bytes that hold the caches of prompts of these lengths and compute them; arguments as in the base class."""
        rows = max(min(most, sum(prompts)), max(prompts))
        return int(rows * (self.cache_bytes(1) + self.bytes_per_row)) + max(prompts) ** 2 * self._score_bytes

    def new_cache(self, slots: int, length: int) -> SlotCache:
        """Return a cache of ``slots`` sequences of ``length`` positions."""
        cache = SlotCache(len(self.decoder.layers), slots, length)
        attention = self.decoder.layers[0].attn
        row = torch.empty(1, attention.num_kv_heads, 1, attention.head_dim, dtype=self.dtype, device=self.device)
        for layer in cache.layers:
            layer.lazy_initialization(row, row)
        return cache

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[PrefixCache]:
        """Compute the keys and values of ``prompts``, packed end to end; arguments as in the base class."""
        lengths = [len(prompt) for prompt in prompts]
        padding = max(0, MIN_ROWS - sum(lengths))
        spans = [*lengths, padding] if padding else lengths
        tokens = torch.tensor([token for prompt in prompts for token in prompt] + [0] * padding, device=self.device)
        positions = torch.cat([torch.arange(n, device=self.device) for n in spans])
        caches = [PrefixCache() for _ in prompts]
        packed = Lengths(tuple(spans))
        mask = Prompts(spans, caches, lambda q, k, v, kernel: attend(q, k, v, packed, kernel=kernel))
        self.decoder.run(tokens[None], positions[None], [mask] * len(self.decoder.layers))
        return caches

    @torch.no_grad()
    def step(self, tokens: Tensor, positions: Tensor, cache: SlotCache, span: int) -> Tensor:
        """Decode one token in each of the first n slots: a packed row of them; arguments as in the base class."""
        cache.begin(positions, span)
        hidden = self.decoder.run(tokens[None], positions[None], cache.layers)[0]
        return self.decoder.output(hidden)


def _bare(module: Any) -> Any:
    """Return ``module`` without the wrappers of checkpointing and of torch.compile."""
    for wrapper in ("_checkpoint_wrapped_module", "_orig_mod"):
        module = getattr(module, wrapper, module)
    return module


class _Copies:
    """Copies of modules that share their weights, with linear layers for sampling.

    Args:
        merge: add the adapters' updates to the weights.

    Attributes:
        adapted: the copies of layers with adapters, and these layers.
    """

    def __init__(self, merge: bool) -> None:
        self._merge, self._made = merge, dict[Any, Any]()
        self.adapted: list[tuple[SamplingLinear, Any]] = []

    def of(self, module: Any) -> Any:
        """Return the one copy of ``module``, with copies of its parts."""
        module = _bare(module)
        if module not in self._made:
            self._made[module] = self._new(module)
        return self._made[module]

    def _new(self, module: Any) -> Any:
        if isinstance(module, TiedLinear):
            return SamplingLinear(self.of(module.tied_module), False)
        if isinstance(module, nn.Linear | LoRALinear | DoRALinear):
            linear = SamplingLinear(module, self._merge)
            if isinstance(module, Lora | Dora):
                self.adapted.append((linear, module))
            return linear
        if type(module) is nn.SiLU:
            return _SteadySiLU()
        # without calling the constructor; hooks of FSDP and others are left out
        made = object.__new__(type(module))
        vars(made).update({**vars(module), **vars(nn.Module()), "training": False})
        vars(made).pop("_compiled_call_impl", None)
        made._buffers = dict(module._buffers)
        made._parameters = {k: p if p is None else frozen(dense(p.detach())) for k, p in module._parameters.items()}
        made._modules = {name: self.of(child) for name, child in module._modules.items()}
        for name, value in vars(module).items():
            if isinstance(value, TiedLinear):  # it is no module
                vars(made)[name] = self.of(value)
        return made


class _SteadySiLU(nn.Module):
    """SiLU that rounds the same in any batch.

    On CPUs torch's rounds differently at the end of each thread's share, and the shares depend on the batch. exp rounds
    the same everywhere.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return F.silu(x) if x.is_cuda or x.dtype != torch.float32 else x / (1 + torch.exp(-x))
