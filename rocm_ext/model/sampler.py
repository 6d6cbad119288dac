"""A copy of a model for sampling, which shares the weights that no adapter changes.

The copy has the modules of training once more, without wrappers, hooks and dropout, so it computes the same. Linear
layers have their adapters merged or beside them. Sampling never writes to the weights under training, so they stay the
same bit for bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.modules import FeedForward, TiedLinear
from torchtune.modules.peft import DoRALinear, LoRALinear

from rocm_ext.model.attention import Attention, PrefixCache, Prompts, SlotCache
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.lora import Dora, Lora, adapters, dense, factors, is_plain, merged_layer, plain, quantized
from rocm_ext.model.quantized import Quantized
from rocm_ext.model.token_rows import TokenRows, token_rows

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
        adapted: its layers that have an adapter and rows of tokens, and those of the model under training.
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
        fixed_shapes: whether no shape in a step may depend on values, since a graph replays it.
    """

    splits_rows: bool
    mask_bytes: int
    fixed_shapes = False

    def __init__(
        self, decoder: Any, adapted: list[tuple[Any, list[Any]]], needs: Needs, heads: int, tied: bool
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
        for mine, layers in self._adapted:
            mine.refresh(layers)

    def keep_routes(self, slots: int) -> Tensor:
        """Let each step keep the experts that it chooses, for models with experts.

        Args:
            slots: their number.

        Returns:
            [slots, layers, chosen] int16 on the device, which each step overwrites in its rows.

        Raises:
            NotImplementedError: the model has no experts.
        """
        raise NotImplementedError

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


@torch.no_grad()
def one_step(sampler: Sampler, rows: int, watching: AbstractContextManager[Any]) -> None:
    """Decode a token after a prompt of two in each of ``rows`` slots; ``watching`` is open during the step alone."""
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


def stays_quantized(weight: Tensor) -> bool:
    """Return whether a sampler uses ``weight`` as it is: fused experts, of which one is dequantised at a time."""
    return isinstance(weight, Quantized) and weight.ndim == 3


def copied_bytes(source: Decoder, merge: bool | None = None) -> int:
    """Bytes that a :class:`Sampler` adds to the model's: weights that it merges, gathers, dequantises or joins."""
    weights = {plain(name): p for name, p in source.named_parameters()}
    small = quantized(source)  # those that become 4 bits as they are loaded, too
    copied = {name for name, p in weights.items() if (p in small or not is_plain(p)) and not stays_quantized(p)}
    adapted = {f"{name}.weight": layer for name, layer in adapters(source) if isinstance(layer, Lora | Dora)}
    groups = source.joined_weights()
    beside = sum(2 * rows.weight.numel() for _, rows in token_rows(source))  # in fp32
    if merges(source, merge):
        copied.update(adapted)
    else:
        joined = {name: group for group in groups for name in group}
        for name, layer in adapted.items():
            rows = sum(weights[other].shape[0] for other in joined.get(name, [name]))  # of B, see SamplingLinear
            beside += layer.lora_a.weight.numel() + rows * layer.lora_b.weight.shape[1]
    for group in groups:
        parts = [weights[name] for name in group]
        if not copied.isdisjoint(group) or not (parts[0].is_meta or _is_one(parts)):
            copied.update(group)
    return source.tok_embeddings.weight.dtype.itemsize * (beside + sum(weights[name].numel() for name in copied))


def _is_one(weights: Sequence[Tensor]) -> bool:
    """Return whether the rows of ``weights`` lie one after the other in memory."""
    ends = [w.data_ptr() + w.nbytes for w in weights]
    follow = all(w.data_ptr() == end for w, end in zip(weights[1:], ends, strict=False))
    of_one = len({w.untyped_storage().data_ptr() for w in weights}) == 1
    return follow and of_one and all(w.is_contiguous() for w in weights)


def _as_one(weights: Sequence[Tensor]) -> Tensor:
    """Return the rows of all ``weights``: a view where they lie one after the other in memory, else a copy."""
    if len(weights) == 1:
        return weights[0]
    if _is_one(weights):
        first, rows = weights[0], sum(map(len, weights))
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    return torch.cat(list(weights))


class SamplingLinear(nn.Module):
    """Linear layers of one input and their adapters as one product: ``(x Wᵀ + x Aᵀ Bᵀ) * factor + bias``.

    W and A have the rows of all layers, B has their columns on a block diagonal. All are in W's dtype.

    Args:
        layers: of the model, which may be under training.
        merge: add the adapters' updates to W.

    Attributes:
        rows: of tokens, whose logits take the place of W's.
    """

    a: Any
    b: Any
    factor: Any
    bias: Any
    rows: Any

    def __init__(self, layers: Sequence[Any], merge: bool) -> None:
        super().__init__()
        weights = [dense(layer.weight.detach()) for layer in layers]
        biases = [getattr(layer, "bias", None) for layer in layers]
        adapted = [isinstance(layer, Lora | Dora) for layer in layers]
        self.a = self.b = self.factor = self.bias = self.rows = None
        if merge:
            parts = zip(layers, weights, adapted, strict=True)
            weights = [merged_layer(layer, weight) if changed else weight for layer, weight, changed in parts]
        elif any(adapted):
            dtype = weights[0].dtype
            self.a, self.b, self.factor = (t if t is None else frozen(t.to(dtype)) for t in _factors(layers))
        self.weight = frozen(_as_one(weights))
        if any(bias is not None for bias in biases):
            rows = zip(biases, weights, strict=True)
            self.bias = frozen(torch.cat([w.new_zeros(len(w)) if b is None else dense(b.detach()) for b, w in rows]))

    @torch.no_grad()
    def refresh(self, layers: Sequence[Any]) -> None:
        """Copy the present values of the adapters under training, in place."""
        if self.a is not None:
            for mine, value in zip((self.a, self.b, self.factor), _factors(layers), strict=True):
                if mine is not None:
                    mine.copy_(value)
            return
        for rows, layer in zip(self.weight.split([len(layer.weight) for layer in layers]), layers, strict=True):
            if isinstance(layer, Lora | Dora):
                rows.copy_(merged_layer(layer, dense(layer.weight.detach())))

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if x.ndim > 2:
            return self.forward(x.flatten(0, -2)).view(*x.shape[:-1], -1)
        if x.is_cuda or x.shape[0] <= MAX_ROWS:
            return self._product(x)
        # nearly equal parts, so each has at least MIN_ROWS
        return torch.cat([self._product(part) for part in x.tensor_split(-(-len(x) // MAX_ROWS))])

    __call__ = forward

    def _product(self, x: Tensor) -> Tensor:
        out = self._of_weights(x)
        return out if self.rows is None else self.rows.logits(x, out)

    def _of_weights(self, x: Tensor) -> Tensor:
        if self.factor is None:
            out = F.linear(x, self.weight, self.bias)
            return out if self.a is None else out.addmm_(F.linear(x, self.a), self.b.T)
        out = F.linear(x, self.weight).addmm_(F.linear(x, self.a), self.b.T).mul_(self.factor)
        return out if self.bias is None else out.add_(self.bias)


def _factors(layers: Sequence[Any]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the present A, B and factor of :class:`SamplingLinear`, in fp32; layers without adapters have rank 0."""
    like = next(layer.lora_a.weight.detach() for layer in layers if isinstance(layer, Lora | Dora))
    parts = []
    for layer in layers:
        out, width = layer.weight.shape
        none = like.new_empty(0, width), like.new_empty(out, 0), None
        parts.append(factors(layer) if isinstance(layer, Lora | Dora) else none)
    lows, highs, ratios = zip(*parts, strict=True)
    factor = None
    if any(ratio is not None for ratio in ratios):
        factor = torch.cat([like.new_ones(len(b)) if r is None else r for b, r in zip(highs, ratios, strict=True)])
    return torch.cat(lows), torch.block_diag(*highs), factor


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
        query, and its output. The MLP holds what attention left, gate, up, the activation, and one more.
        """
        attention, mlp = self.decoder.layers[0].attn, self.decoder.layers[0].mlp
        width, wide = mlp.w2.weight.shape
        q, _, k = attention.widths
        return max(3 * width + 5 * q + 2 * k, 4 * width + 4 * wide) * self.dtype.itemsize

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
        self.decoder.run(tokens[None], positions[None], [Prompts(spans, caches)] * len(self.decoder.layers))
        return caches

    @torch.no_grad()
    def step(self, tokens: Tensor, positions: Tensor, cache: SlotCache, span: int) -> Tensor:
        """Decode one token in each of the first n slots; arguments as in the base class."""
        cache.begin(positions, span)
        return self.decoder.output(self.decoder.run(tokens, positions, cache.layers))


def _bare(module: Any) -> Any:
    """Return ``module`` without the wrappers of checkpointing and of torch.compile."""
    for wrapper in ("_checkpoint_wrapped_module", "_orig_mod"):
        module = getattr(module, wrapper, module)
    return module


class SamplingAttention(Attention):
    """Attention with one product for q, k and v."""

    parts = ("q_proj", "k_proj", "v_proj")
    joined: SamplingLinear

    @property
    def widths(self) -> tuple[int, int, int]:
        """Sizes of q, k and v."""
        k = self.num_kv_heads * self.head_dim
        return self.num_heads * self.head_dim, k, k

    def project(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return q and k, with heads, in one tensor unless they have norms of their own, and v."""
        qkv, kv_heads = self.joined(x).view(*x.shape[:-1], -1, self.head_dim), self.num_kv_heads
        sizes = (self.num_heads + kv_heads,) if self.q_norm is None else (self.num_heads, kv_heads)
        *qk, v = qkv.split_with_sizes((*sizes, kv_heads), dim=-2)
        return qk, v


class SamplingMLP(FeedForward):
    """MLP with one product for gate and up."""

    parts = ("w1", "w3")
    joined: SamplingLinear

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        gate, up = self.joined(x).chunk(2, dim=-1)
        return self.w2(self.activation(gate) * up)


def joined_kind(module: nn.Module) -> Any:
    """Return the class of a module's copy that has one product for several linear layers; None: it has none."""
    if type(module) is Attention:
        return SamplingAttention
    return SamplingMLP if type(module) is FeedForward and module.w3 is not None else None


class _Copies:
    """Copies of modules that share their weights, with linear layers for sampling.

    Args:
        merge: add the adapters' updates to the weights.

    Attributes:
        adapted: the copies of layers with adapters and of rows of tokens, and these layers.
    """

    def __init__(self, merge: bool) -> None:
        self._merge, self._made = merge, dict[Any, Any]()
        self.adapted: list[tuple[Any, list[Any]]] = []

    def of(self, module: Any) -> Any:
        """Return the one copy of ``module``, with copies of its parts."""
        module = _bare(module)
        if module not in self._made:
            self._made[module] = self._new(module)
        return self._made[module]

    def _new(self, module: Any) -> Any:
        made: Any
        if isinstance(module, TiedLinear | nn.Linear | LoRALinear | DoRALinear):
            tied = isinstance(module, TiedLinear)
            made = SamplingLinear([self.of(module.tied_module)], False) if tied else self._linear([module])
            if hasattr(module, TokenRows.NAME):
                made.rows = self.of(module.token_rows)
            return made
        if isinstance(module, TokenRows):
            made = module.copy()
            self.adapted.append((made, [module]))
            return _quick(made, made._parameters, made._buffers)
        if type(module) is nn.SiLU:
            return _SteadySiLU()
        # without calling the constructor; hooks of FSDP and others are left out
        kind = joined_kind(module)
        made = object.__new__(_without_hooks(kind or type(module)))  # type: ignore[arg-type]
        vars(made).update({**vars(module), **vars(nn.Module()), "training": False})
        made._buffers = dict(module._buffers)
        made._parameters = {k: p if p is None else frozen(dense(p.detach())) for k, p in module._parameters.items()}
        parts = getattr(kind, "parts", ())
        made._modules = {name: self.of(child) for name, child in module._modules.items() if name not in parts}
        if parts:
            made._modules["joined"] = self._linear([_bare(getattr(module, part)) for part in parts])
        for name, value in vars(module).items():
            if isinstance(value, TiedLinear):  # it is no module
                vars(made)[name] = self.of(value)
        return _quick(made, made._modules, made._parameters)

    def _linear(self, layers: list[Any]) -> SamplingLinear:
        linear = SamplingLinear(layers, self._merge)
        _quick(linear, linear._parameters)
        if any(isinstance(layer, Lora | Dora) for layer in layers):
            self.adapted.append((linear, layers))
        return linear


def _quick(module: nn.Module, *parts: Mapping[str, Any]) -> nn.Module:
    """Return ``module`` with ``parts`` as plain attributes. nn.Module looks for parts where an object has none."""
    for named in parts:
        vars(module).update(named)
    return module


@cache
def _without_hooks(kind: Any) -> type:
    """Return ``kind`` with calls that go straight to ``forward``."""
    return type(kind.__name__, (kind,), {"__call__": kind.forward})


class _SteadySiLU(nn.Module):
    """SiLU that rounds the same in any batch.

    On CPUs torch's rounds differently at the end of each thread's share, and the shares depend on the batch. exp rounds
    the same everywhere.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return F.silu(x) if x.is_cuda or x.dtype != torch.float32 else x / (1 + torch.exp(-x))

    __call__ = forward
