"""A torchtune decoder laid out for decoding: adapters merged, few large matrices, grouped attention.

The layout is a copy: the weights that are trained are never touched, so whatever happens while
sampling they stay what they were, bit for bit. What is not adapted and not fused (embeddings, norms,
most output layers) is shared. The copy goes when the context ends.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE
from torchtune.models.qwen2._positional_embeddings import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    RotaryPositionalEmbeddings,
    TiedLinear,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)

from rocm_ext.errors import UserError
from rocm_ext.export import merged_weight
from rocm_ext.lora import Dora, Lora, dense

_ROPES = (Qwen2RotaryPositionalEmbeddings, Llama3ScaledRoPE, RotaryPositionalEmbeddings)


@dataclass(frozen=True)
class Layer:
    """Weights of one transformer layer, matrices [out, in]; rows of q, then k, then v, and of gate, then up."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Cache:
    """Keys and values: ``keys[layer]`` and ``values[layer]`` are [slots, kv_heads, length, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]


class Decoder:
    """Forward passes for sampling. Made by :func:`merged`.

    Args:
        decoder: a torchtune decoder of a supported family, with or without adapters.
    """

    def __init__(self, decoder: TransformerDecoder) -> None:
        check_family(decoder)
        attention: Any = _bare(decoder.layers[0]).attn
        self.heads, self.kv_heads = attention.num_heads, attention.num_kv_heads
        self.head_dim = attention.head_dim
        self.max_seq_len = decoder.max_seq_len
        self.embedding = dense(decoder.tok_embeddings.weight.detach())
        self.cos, self.sin = _rope_tables(attention.pos_embeddings, self.head_dim)
        self.layers = [self._layer(_bare(layer)) for layer in decoder.layers]
        self.norm, self.eps = dense(decoder.norm.scale.detach()), decoder.norm.eps
        tied = isinstance(decoder.output, TiedLinear)
        self.output = self.embedding if tied else _weight(decoder.output)[0]
        self.device, self.dtype = self.embedding.device, self.embedding.dtype

    def _layer(self, layer: Any) -> Layer:
        attention, mlp = layer.attn, layer.mlp
        pairs = not isinstance(attention.pos_embeddings, Qwen2RotaryPositionalEmbeddings)
        parts: list[Any] = [_weight(p) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        if pairs:
            # rotate halves in every family: q·k is the same whatever the order of a head's dimensions
            parts[:2] = [tuple(map(self._pairs_to_halves, part)) for part in parts[:2]]
        weights, biases = zip(*parts, strict=True)
        if any(bias is not None for bias in biases):
            zeros = [torch.zeros(len(w), dtype=w.dtype, device=w.device) for w in weights]
            biases = tuple(zero if b is None else b for b, zero in zip(biases, zeros, strict=True))
        out, out_bias = _weight(attention.output_proj)
        return Layer(
            attention_norm=dense(layer.sa_norm.scale.detach()),
            qkv=torch.cat(weights),
            qkv_bias=None if biases[0] is None else torch.cat(biases),
            out=out,
            out_bias=out_bias,
            mlp_norm=dense(layer.mlp_norm.scale.detach()),
            gate_up=torch.cat([_weight(mlp.w1)[0], _weight(mlp.w3)[0]]),
            down=_weight(mlp.w2)[0],
        )

    def _pairs_to_halves(self, rows: Tensor | None) -> Tensor | None:
        if rows is None:
            return None
        split = rows.view(-1, self.head_dim // 2, 2, *rows.shape[1:])
        return split.transpose(1, 2).reshape(rows.shape)

    @property
    def weight_bytes(self) -> int:
        """What one decoding step reads of the weights."""
        tensors = [t for layer in self.layers for t in vars(layer).values() if t is not None]
        return sum(t.nbytes for t in (*tensors, self.output))

    @property
    def bytes_per_position(self) -> int:
        """What the cache holds for one token."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_row(self) -> int:
        """What a pass holds of one token, beside the cache: a layer's inputs and outputs, q and k rotated in fp32."""
        layer = self.layers[0]
        return (4 * layer.down.shape[0] + 5 * layer.down.shape[1]) * self.dtype.itemsize + 16 * len(layer.qkv)

    def new_cache(self, slots: int, length: int) -> Cache:
        """An empty cache."""
        shape = (slots, self.kv_heads, length, self.head_dim)
        keys, values = (
            [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in self.layers] for _ in range(2)
        )
        return Cache(keys, values)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Cache]:
        """The cache of each prompt, one slot of its length each.

        Prompts lie end to end, without padding; each attends to itself alone.
        """
        lengths = [len(prompt) for prompt in prompts]
        padding = max(0, MIN_ROWS - sum(lengths))
        flat = [token for prompt in prompts for token in prompt] + [0] * padding
        spans = [*lengths, padding] if padding else lengths
        tokens = torch.tensor(flat, device=self.device)
        positions = torch.cat([torch.arange(n, device=self.device) for n in spans])
        caches = [Cache([], []) for _ in prompts]

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            outs = []
            for i, (q1, k1, v1) in enumerate(zip(*(t.split(spans) for t in (q, k, v)), strict=True)):
                k1, v1 = k1.transpose(0, 1), v1.transpose(0, 1)  # [kv_heads, s, head_dim]
                if i < len(caches):
                    caches[i].keys.append(k1[None])
                    caches[i].values.append(v1[None])
                # kv heads as the batch, their groups as heads: keys are expanded in stride only
                grouped = q1.view(-1, self.kv_heads, self.heads // self.kv_heads, self.head_dim).permute(1, 2, 0, 3)
                k1, v1 = (t[:, None].expand(-1, grouped.shape[1], -1, -1) for t in (k1, v1))
                out = F.scaled_dot_product_attention(grouped, k1, v1, is_causal=True)
                outs.append(out.permute(2, 0, 1, 3).reshape(len(q1), self.heads * self.head_dim))
            return torch.cat(outs)

        self._hidden(tokens, positions, attend)
        return caches

    @torch.no_grad()
    def step(self, tokens: Tensor, positions: Tensor, cache: Cache, span: int) -> Tensor:
        """Logits [n, v] of what follows ``tokens`` in the first n slots.

        Args:
            tokens: [n], the newest token of each slot.
            positions: [n], its place in the slot's sequence; its keys and values go there.
            cache: with the keys and values of everything before.
            span: how far to look into the cache: beyond the largest position.
        """
        n = len(tokens)
        rows = torch.arange(n, device=self.device)
        visible = torch.arange(span, device=self.device) <= positions[:, None]
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device).masked_fill_(~visible, -torch.inf)
        mask = mask[:, None, None, :]

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.keys[index], cache.values[index]
            keys[rows, :, positions] = k
            values[rows, :, positions] = v
            # the heads of a group are queries of one kv head: nothing is expanded
            grouped = q.view(n, self.kv_heads, -1, self.head_dim)
            out = F.scaled_dot_product_attention(grouped, keys[:n, :, :span], values[:n, :, :span], attn_mask=mask)
            return out.reshape(n, -1)

        hidden = self._hidden(tokens, positions, attend)
        return _linear(self._rms_norm(hidden, self.norm), self.output)

    def _hidden(self, tokens: Tensor, positions: Tensor, attend) -> Tensor:
        """[n, d], before the last norm. ``attend(layer, q, k, v)``: [n, heads, head_dim] each -> [n, d]."""
        x = F.embedding(tokens, self.embedding)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        split = [self.heads + self.kv_heads, self.kv_heads]
        for index, layer in enumerate(self.layers):
            h = self._rms_norm(x, layer.attention_norm)
            qkv = _linear(h, layer.qkv, layer.qkv_bias).view(len(tokens), -1, self.head_dim)
            qk, v = qkv.split(split, dim=1)
            q, k = _rotate(qk, cos, sin).split([self.heads, self.kv_heads], dim=1)
            x = x + _linear(attend(index, q, k, v), layer.out, layer.out_bias)
            h = self._rms_norm(x, layer.mlp_norm)
            gate, up = _linear(h, layer.gate_up).chunk(2, dim=-1)
            x = x + _linear(_silu(gate) * up, layer.down)
        return x

    def _rms_norm(self, x: Tensor, scale: Tensor) -> Tensor:
        return F.rms_norm(x, scale.shape, scale.to(x.dtype), self.eps)


# Matrix products of fewer or of more rows take other kernels, with other rounding, on CPUs (MKL with several threads,
# measured): a sample would depend on how many others are in the batch.
MIN_ROWS, MAX_ROWS = 16, 96


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.is_cuda or len(x) <= MAX_ROWS:
        return F.linear(x, weight, bias)
    parts = x.tensor_split(-(-len(x) // MAX_ROWS))  # of nearly equal lengths, so none is short
    return torch.cat([F.linear(part, weight, bias) for part in parts])


@contextmanager
def merged(decoder: TransformerDecoder) -> Iterator[Decoder]:
    """``decoder`` with its adapters merged in, for sampling; ``decoder`` itself stays as it is.

    Collective where the weights are sharded: every rank gathers a copy of its own.

    Raises:
        UserError: for a family that is not supported.
    """
    with torch.no_grad():
        merged = Decoder(decoder)
        try:
            yield merged
        finally:
            vars(merged).clear()  # whoever still holds it holds no weights


def check_family(decoder: nn.Module) -> None:
    """Refuse, before any work, a model that :class:`Decoder` would compute wrongly.

    Raises:
        UserError: naming what is not supported.
    """
    if not isinstance(decoder, TransformerDecoder):
        raise UserError(f"sampling from a {type(decoder).__name__} is not supported; Qwen2.5 and Llama 3 are")
    for layer in map(_bare, decoder.layers):  # type: ignore[arg-type]
        attention, mlp = getattr(layer, "attn", None), getattr(layer, "mlp", None)
        rope = getattr(attention, "pos_embeddings", None)
        problems = {
            f"embeddings {type(decoder.tok_embeddings).__name__}": type(decoder.tok_embeddings) is nn.Embedding,
            f"layer {type(layer).__name__}": isinstance(layer, TransformerSelfAttentionLayer),
            f"attention {type(attention).__name__}": isinstance(attention, MultiHeadAttention),
            "q/k norms": getattr(attention, "q_norm", None) is None,
            f"position embeddings {type(rope).__name__}": type(rope) in _ROPES,
            f"mlp {type(mlp).__name__}": isinstance(mlp, FeedForward) and mlp.w3 is not None,
            "an activation other than SiLU": isinstance(getattr(mlp, "activation", None), nn.SiLU),
            "biases in the mlp": not any(getattr(getattr(mlp, w, None), "bias", None) is not None for w in _MLP),
            "norms other than RMSNorm": all(isinstance(getattr(layer, n, None), RMSNorm) for n in _NORMS),
            "a sliding window": not isinstance(getattr(attention, "sliding_window_size", None), int),
            "scaled residuals": all(isinstance(getattr(layer, s), nn.Identity) for s in ("sa_scale", "mlp_scale")),
        }
        if bad := [what for what, fine in problems.items() if not fine]:
            raise UserError(
                f"sampling from this model is not supported: it has {bad[0]}; Qwen2.5 and Llama 3 models are. "
                "Any other can be sampled from on a server: engine._component_=rocm_ext.generation.OpenAIEngine"
            )


_NORMS, _MLP = ("sa_norm", "mlp_norm"), ("w1", "w2", "w3")


def _bare(layer: nn.Module) -> Any:
    return getattr(layer, "_checkpoint_wrapped_module", layer)


def _weight(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Weight [out, in], with the adapter merged in where there is one, and bias."""
    weight, bias = dense(linear.weight.detach()), linear.bias
    bias = None if bias is None else dense(bias.detach())
    if isinstance(linear, Lora | Dora):
        update = {".lora_A.weight": linear.lora_a.weight, ".lora_B.weight": linear.lora_b.weight}
        if isinstance(linear, Dora):
            update[".lora_magnitude_vector"] = linear.magnitude
        scale = linear.scaling if isinstance(linear, Dora) else linear.alpha / linear.rank
        weight = merged_weight(weight, update, scale)
    return weight, bias


def _rope_tables(rope: Any, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, head_dim / 2], fp32."""
    half, cache = head_dim // 2, rope.cache.float()
    if isinstance(rope, Qwen2RotaryPositionalEmbeddings):
        return cache[:, :half].contiguous(), cache[:, head_dim : head_dim + half].contiguous()
    return cache[..., 0].contiguous(), cache[..., 1].contiguous()


def _silu(x: Tensor) -> Tensor:
    if x.is_cuda or x.dtype != torch.float32:
        return F.silu(x)
    # on CPUs silu rounds otherwise where a thread's share ends, which depends on what else is computed; exp does not
    return x / (1 + torch.exp(-x))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [n, heads, head_dim] at the angles of cos and sin [n, 1, head_dim / 2], computed in fp32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
