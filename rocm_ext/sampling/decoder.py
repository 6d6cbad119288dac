"""A torchtune decoder laid out for decoding: merged adapters, few large matrices, grouped attention.

The layout is a copy. Sampling never writes to the weights under training, so they stay the same bit for
bit. The copy shares the tensors that are neither adapted nor fused (embeddings, norms, most output
layers). Its adapter values are those of the moment it was made; :meth:`Decoder.refresh` copies newer ones.
It is freed when the context ends.
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

from rocm_ext.base.errors import UserError
from rocm_ext.model.attention import HeadNormAttention
from rocm_ext.model.lora import dense
from rocm_ext.model.rope import HalvesRoPE
from rocm_ext.model.sdpa import sdpa
from rocm_ext.sampling.matrix import MIN_ROWS, AdaptedLayer, Matrix, Order, as_it_is, joined, refresh

_ROPES = (HalvesRoPE, Qwen2RotaryPositionalEmbeddings, Llama3ScaledRoPE, RotaryPositionalEmbeddings)
_MASK_BYTES = 10  # a step's mask, per position of a slot
_SCORE_BYTES = 12  # of a head, per query and position: scores and weights in fp32, weights in the dtype, the mask
_SUPPORTED = "Llama 3, Mistral, Qwen2.5 and Qwen3"


@dataclass(frozen=True)
class Layer:
    """One transformer layer; ``qkv`` holds the rows of q, then k, then v, and ``gate_up`` of gate, then up.

    ``q_norm`` and ``k_norm`` are the scales of the norms of each head, [head_dim]; None: the family has none.
    """

    attention_norm: Tensor
    qkv: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True)
class Cache:
    """Keys and values: ``keys[layer]`` and ``values[layer]`` are [slots, kv_heads, length, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]

    def put(self, rows: slice, prefix: "Cache", known: int) -> None:
        """Copy the first ``known`` positions of ``prefix``, a cache of one slot, into the slots ``rows``."""
        for mine, theirs in ((self.keys, prefix.keys), (self.values, prefix.values)):
            for target, source in zip(mine, theirs, strict=True):
                target[rows, :, :known] = source

    def move(self, to: int, source: int, known: int) -> None:
        """Copy the first ``known`` positions of slot ``source`` to slot ``to``."""
        for tensor in (*self.keys, *self.values):
            tensor[to, :, :known] = tensor[source, :, :known]


class Decoder:
    """Forward passes for sampling; :func:`merged` makes one.

    Args:
        decoder: a torchtune decoder of a supported family, with or without adapters.
        merge: add the adapters' updates to the weights; None: only to fp32 weights.

    Attributes:
        heads, kv_heads, head_dim: shape of attention.
        max_seq_len: positions that the model supports.
        embedding: [v, d].
        cos, sin: rotary tables [positions, head_dim / 2], fp32.
        layers: the transformer layers.
        norm, eps: the last RMSNorm.
        output: the output layer.
        device, dtype: of the weights.
        weight_bytes: bytes of weights that a decoding step reads.

    Raises:
        UserError: the family is not supported.
    """

    def __init__(self, decoder: TransformerDecoder, merge: bool | None = None) -> None:
        check_family(decoder)
        self._merge = decoder.norm.scale.dtype == torch.float32 if merge is None else merge
        attention: Any = _bare(decoder.layers[0]).attn
        self.heads, self.kv_heads = attention.num_heads, attention.num_kv_heads
        self.head_dim = attention.head_dim
        self._kernel = getattr(attention, "kernel", "auto")
        self._score_bytes = self.heads * _SCORE_BYTES * (self._kernel in ("math", "eager"))
        self.max_seq_len = decoder.max_seq_len
        self.embedding = dense(decoder.tok_embeddings.weight.detach())
        self.cos, self.sin = _rope_tables(attention.pos_embeddings, self.head_dim)
        self._sources: list[tuple[Matrix, list[AdaptedLayer]]] = []
        self.layers = [self._layer(_bare(layer)) for layer in decoder.layers]
        self.norm, self.eps = dense(decoder.norm.scale.detach()), decoder.norm.eps
        tied = isinstance(decoder.output, TiedLinear)
        self.output = Matrix(self.embedding) if tied else self._matrix((decoder.output, as_it_is))
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        matrices = [m for layer in self.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        self.weight_bytes = sum(matrix.nbytes for matrix in (*matrices, self.output))

    def _layer(self, layer: Any) -> Layer:
        attention, mlp = layer.attn, layer.mlp
        # Rotate halves in every family: q·k does not depend on the order of a head's dimensions.
        halves = isinstance(attention.pos_embeddings, Qwen2RotaryPositionalEmbeddings)
        order = as_it_is if halves else self._pairs_to_halves
        return Layer(
            attention_norm=dense(layer.sa_norm.scale.detach()),
            qkv=self._matrix((attention.q_proj, order), (attention.k_proj, order), (attention.v_proj, as_it_is)),
            q_norm=None if attention.q_norm is None else dense(attention.q_norm.scale.detach()),
            k_norm=None if attention.k_norm is None else dense(attention.k_norm.scale.detach()),
            out=self._matrix((attention.output_proj, as_it_is)),
            mlp_norm=dense(layer.mlp_norm.scale.detach()),
            gate_up=self._matrix((mlp.w1, as_it_is), (mlp.w3, as_it_is)),
            down=self._matrix((mlp.w2, as_it_is)),
        )

    def _pairs_to_halves(self, rows: Tensor) -> Tensor:
        split = rows.view(-1, self.head_dim // 2, 2, *rows.shape[1:])
        return split.transpose(1, 2).reshape(rows.shape)

    def _matrix(self, *parts: tuple[Any, Order]) -> Matrix:
        matrix, sources = joined(parts, self._merge)
        self._sources.append((matrix, sources))
        return matrix

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the adapter's present values into the layout, in place.

        The layout then equals, bit for bit, one that is made now. Its tensors stay where they are, so that graphs that
        read them stay valid. With sharded weights every rank calls this.
        """
        for matrix, sources in self._sources:
            refresh(matrix, sources)

    splits_rows = True  # see MAX_ROWS

    @property
    def vocabulary(self) -> int:
        """Logits per row."""
        return len(self.output.weight)

    @property
    def flops_per_token(self) -> float:
        """Operations of the matrix products for one token."""
        return 2 * self.weight_bytes / self.dtype.itemsize

    def cache_bytes(self, length: float) -> float:
        """Bytes of a slot of ``length`` positions."""
        return length * self.bytes_per_position

    def step_bytes(self, length: int) -> int:
        """Bytes that a step holds per slot of ``length`` positions, without logits."""
        return length * (_MASK_BYTES + self._score_bytes) + self.bytes_per_row

    def prefill_bytes(self, prompts: Sequence[int], most: int) -> int:
        """Bytes that hold the caches of prompts of these lengths and compute them.

        Args:
            prompts: tokens of each prompt.
            most: tokens of prompts that are computed at once.
        """
        rows = max(min(most, sum(prompts)), max(prompts))
        return rows * (self.bytes_per_position + self.bytes_per_row) + max(prompts) ** 2 * self._score_bytes

    @property
    def bytes_per_position(self) -> int:
        """Bytes of cache for one token."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_row(self) -> int:
        """Bytes that a pass holds at once for one token, in addition to the cache.

        It is the larger of two parts. Attention holds q, k and v, normalises q and k in some families, and rotates
        them in fp32. The MLP holds gate, up, their activation and their product.
        """
        layer, itemsize = self.layers[0], self.dtype.itemsize
        width, wide = layer.down.weight.shape
        copies = 1 if layer.q_norm is None else 2
        attention = (3 * width + copies * len(layer.qkv.weight)) * itemsize + 16 * len(layer.qkv.weight)
        return max(attention, (3 * width + 4 * wide) * itemsize)

    def new_cache(self, slots: int, length: int) -> Cache:
        """Allocate a zeroed cache for ``slots`` sequences of ``length`` positions."""
        shape = (slots, self.kv_heads, length, self.head_dim)
        keys, values = (
            [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in self.layers] for _ in range(2)
        )
        return Cache(keys, values)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[Cache]:
        """Compute the keys and values of ``prompts``.

        The prompts are packed end to end. Each attends only to itself.

        Args:
            prompts: token ids of each prompt.

        Returns:
            One cache per prompt, with one slot of the prompt's length.
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
                    for kept, new in ((caches[i].keys, k1), (caches[i].values, v1)):
                        kept.append(new[None].clone(memory_format=torch.contiguous_format))  # a view would keep q alive
                # kv heads are the batch and their groups the heads, so `expand` copies no keys
                grouped = q1.view(-1, self.kv_heads, self.heads // self.kv_heads, self.head_dim).permute(1, 2, 0, 3)
                k1, v1 = (t[:, None].expand(-1, grouped.shape[1], -1, -1) for t in (k1, v1))
                out = sdpa(grouped, k1, v1, self._kernel)
                outs.append(out.permute(2, 0, 1, 3).reshape(len(q1), self.heads * self.head_dim))
            return torch.cat(outs)

        self._hidden(tokens, positions, attend)
        return caches

    @torch.no_grad()
    def step(self, tokens: Tensor, positions: Tensor, cache: Cache, span: int) -> Tensor:
        """Decode one token in each of the first n slots.

        Args:
            tokens: [n], the newest token of each slot.
            positions: [n], its position in the slot's sequence, where the step writes its keys and values.
            cache: keys and values of all earlier tokens.
            span: cache positions that attention reads; more than the largest of ``positions``.

        Returns:
            Logits [n, v] of the next tokens.
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
            # The heads of a group become queries of one kv head, so keys and values are not expanded.
            grouped = q.view(n, self.kv_heads, -1, self.head_dim)
            out = sdpa(grouped, keys[:n, :, :span], values[:n, :, :span], self._kernel, mask=mask)
            return out.reshape(n, -1)

        hidden = self._hidden(tokens, positions, attend)
        return self.output(self._rms_norm(hidden, self.norm))

    def _hidden(self, tokens: Tensor, positions: Tensor, attend) -> Tensor:
        """Run all layers and return hidden states [n, d] before the last norm.

        ``attend(layer, q, k, v)`` maps three [n, heads, head_dim] to [n, d].
        """
        x = F.embedding(tokens, self.embedding)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        for index, layer in enumerate(self.layers):
            x = x + layer.out(attend(index, *self._heads(layer, x, cos, sin)))
            x = x + layer.down(self._gated(layer, x))
        return x

    def _heads(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, [n, heads, head_dim] each; q and k are rotated."""
        qkv = layer.qkv(self._rms_norm(x, layer.attention_norm)).view(len(x), -1, self.head_dim)
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split([self.heads, self.kv_heads], dim=1)
            qk = torch.cat([self._rms_norm(q, layer.q_norm), self._rms_norm(k, layer.k_norm)], dim=1)
        q, k = _rotate(qk, cos, sin).split([self.heads, self.kv_heads], dim=1)
        return q, k, v

    def _gated(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._rms_norm(x, layer.mlp_norm)).chunk(2, dim=-1)
        return _silu(gate) * up

    def _rms_norm(self, x: Tensor, scale: Tensor) -> Tensor:
        return F.rms_norm(x, scale.shape, scale.to(x.dtype), self.eps)


def copied_bytes(decoder: TransformerDecoder) -> int:
    """Upper bound on the bytes that a :class:`Decoder` adds to ``decoder``'s; it includes sharded embeddings."""
    layers = sum(p.numel() for layer in decoder.layers for p in layer.parameters() if not p.requires_grad)
    whole = sum(p.numel() for p in decoder.parameters() if hasattr(p, "full_tensor"))
    return max(layers, whole) * decoder.norm.scale.dtype.itemsize


@contextmanager
def merged(decoder: TransformerDecoder, merge: bool | None = None) -> Iterator[Decoder]:
    """Copy ``decoder`` and its adapters into a :class:`Decoder`; ``decoder`` itself does not change.

    The context may stay open while the adapters are trained.

    Updates are merged into fp32 weights. 16-bit weights would round much of a small update away (rank 16, entries
    of B at 3e-4: 59 % is left). For 16-bit weights the adapter therefore stays separate, as in training, unless
    ``merge`` is True. With sharded weights this is a collective call: every rank gathers its own copy.

    Args:
        decoder: a torchtune decoder, with or without adapters.
        merge: add the adapters' updates to the weights; None: only to fp32 weights.

    Raises:
        UserError: the family is not supported.
    """
    with torch.no_grad():
        made = Decoder(decoder, merge)
    try:
        yield made
    finally:
        vars(made).clear()  # frees the weights even if a caller keeps the Decoder


def check_family(decoder: nn.Module) -> None:
    """Refuse a model that :class:`Decoder` would compute wrongly.

    Raises:
        UserError: the model has a part that is not supported; the message names it.
    """
    if not isinstance(decoder, TransformerDecoder):
        raise UserError(f"sampling from a {type(decoder).__name__} is not supported; {_SUPPORTED} are")
    for layer in map(_bare, decoder.layers):  # type: ignore[arg-type]
        attention, mlp = getattr(layer, "attn", None), getattr(layer, "mlp", None)
        rope = getattr(attention, "pos_embeddings", None)
        problems = {
            f"embeddings {type(decoder.tok_embeddings).__name__}": type(decoder.tok_embeddings) is nn.Embedding,
            f"layer {type(layer).__name__}": isinstance(layer, TransformerSelfAttentionLayer),
            f"attention {type(attention).__name__}": isinstance(attention, MultiHeadAttention),
            "q/k norms after RoPE": isinstance(attention, HeadNormAttention) or getattr(attention, "q_norm", 0) is None,
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
                f"sampling from this model is not supported: it has {bad[0]}; {_SUPPORTED} models are. "
                "Sample from any other model on a server: engine._component_=rocm_ext.sampling.OpenAIEngine"
            )


_NORMS, _MLP = ("sa_norm", "mlp_norm"), ("w1", "w2", "w3")


def _bare(layer: nn.Module) -> Any:
    return getattr(layer, "_checkpoint_wrapped_module", layer)


def _rope_tables(rope: Any, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, [positions, head_dim / 2] in fp32."""
    half, cache = head_dim // 2, rope.cache.float()
    if isinstance(rope, Qwen2RotaryPositionalEmbeddings):
        return cache[:, :half].contiguous(), cache[:, head_dim : head_dim + half].contiguous()
    return cache[..., 0].contiguous(), cache[..., 1].contiguous()


def _silu(x: Tensor) -> Tensor:
    if x.is_cuda or x.dtype != torch.float32:
        return F.silu(x)
    # On CPUs F.silu rounds differently at the end of each thread's share, and the shares depend on the batch. exp
    # rounds the same everywhere.
    return x / (1 + torch.exp(-x))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [n, heads, head_dim] by the angles of cos and sin [n, 1, head_dim / 2], in fp32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
