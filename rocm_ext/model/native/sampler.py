"""A copy of a native decoder for sampling, with one product for several linear layers."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.modules import FeedForward, TiedLinear
from torchtune.modules.peft import DoRALinear, LoRALinear

from rocm_ext.model.attention import SlotCache
from rocm_ext.model.lora import Dora, Lora, dense
from rocm_ext.model.native.layers import Attention, PrefixCache, Prompts
from rocm_ext.model.sampler import MIN_ROWS, Sampler, SamplingLinear, SequenceMemory, frozen, merges
from rocm_ext.model.token_rows import TokenRows


class NativeSampler(Sampler):
    """Forward passes of a decoder of torchtune's modules.

    Args:
        source: the model, see :class:`rocm_ext.model.native.decoder.NativeDecoder`.
        merge: see :func:`rocm_ext.model.sampler.sampler_of`.
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
        memory = SequenceMemory([(size, None)] * len(source.layers), 0, False, scores, 0, source.max_seq_len)
        super().__init__(decoder, copies.adapted, memory, shape.num_heads, isinstance(source.output, TiedLinear))

    @property
    def bytes_per_row(self) -> int:
        """Bytes that a pass holds at once for one token, in addition to the cache.

        The larger of two parts: attention holds its input, q, k and v, a sequence's k and v with a copy per query head,
        and its output; the MLP holds attention's result, gate, up, the activation, and one more tensor.
        """
        attention, mlp = self.decoder.layers[0].attn, self.decoder.layers[0].mlp
        width, wide = mlp.w2.weight.shape
        q, k = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        return max(3 * width + 5 * q + 2 * k, 4 * width + 4 * wide) * self.dtype.itemsize

    def prefill_bytes(self, prompts: Sequence[int], most: int) -> int:
        rows = max(min(most, sum(prompts)), max(prompts))
        return int(rows * (self.cache_bytes(1) + self.bytes_per_row)) + max(prompts) ** 2 * self._score_bytes

    def new_cache(self, slots: int, length: int) -> SlotCache:
        cache = SlotCache(len(self.decoder.layers), slots, length)
        attention = self.decoder.layers[0].attn
        row = torch.empty(1, attention.num_kv_heads, 1, attention.head_dim, dtype=self.dtype, device=self.device)
        for layer in cache.layers:
            layer.lazy_initialization(row, row)
        return cache

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[PrefixCache]:
        """Compute the keys and values of ``prompts``, packed end to end."""
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

    def project(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """As in the base class; q and k are one tensor unless they have norms."""
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
        adapted: pairs of copies and layers, for layers with adapters and rows of tokens.
    """

    def __init__(self, merge: bool) -> None:
        self._merge, self._made = merge, dict[Any, Any]()
        self.adapted: list[tuple[Any, list[Any]]] = []

    def of(self, module: Any) -> Any:
        """Return the copy of ``module``, with copies of its parts."""
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
        # without the constructor, and without hooks of FSDP and others
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


def _quick(module: nn.Module, *parts: Mapping[str, object]) -> nn.Module:
    """Return ``module`` with ``parts`` as plain attributes, which Python looks up faster."""
    for named in parts:
        vars(module).update(named)
    return module


@cache
def _without_hooks(kind: Any) -> type:
    """Return a subclass of ``kind`` whose calls go straight to ``forward``."""
    return type(kind.__name__, (kind,), {"__call__": kind.forward})


class _SteadySiLU(nn.Module):
    """SiLU that rounds the same in any batch.

    On CPUs torch's SiLU rounds differently at the end of a thread's share, and the shares depend on the batch. exp
    rounds the same everywhere.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return F.silu(x) if x.is_cuda or x.dtype != torch.float32 else x / (1 + torch.exp(-x))

    __call__ = forward
