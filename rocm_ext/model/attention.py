"""Causal attention over sequences packed end to end, without leakage between them.

Each sequence gets its own call of torch's SDPA with ``is_causal``. The fast kernel of every backend
(flash on CUDA, AOTriton on ROCm, the CPU's own) takes that call; none takes a block-diagonal mask. A few
dozen launches per layer cost little compared with the matrix products of thousands of tokens.

Sequences that begin alike, as the two sides of a pair, may have that beginning once. Attention puts its queries, keys
and values before those of each such sequence, so only scores are computed again. The kernels' causal masks are
aligned to the first query and key; few backends have one that is aligned to the last.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.modules import MultiHeadAttention

from rocm_ext.base.errors import UserError
from rocm_ext.model.foreign import ForeignDecoder
from rocm_ext.model.sdpa import sdpa


class Lengths:
    """Lengths of packed sequences, passed through torchtune's ``mask`` argument.

    This is an object because ``torch.compile`` compiles a new graph for every new tuple.

    Attributes:
        values: tokens per sequence, without shared ones.
        shared: tokens that each sequence shares, see :class:`rocm_ext.data.batches.MicroBatch`.
    """

    __slots__ = ("shared", "values")

    def __init__(self, values: tuple[int, ...], shared: tuple[int, ...] = ()) -> None:
        self.values, self.shared = values, shared or (0,) * len(values)

    def sequences(self, *packed: Tensor) -> Iterator[tuple[list[Tensor], int]]:
        """Take tensors of packed tokens apart.

        Args:
            packed: [b, heads, s, head_dim] each.

        Yields:
            Of each sequence: its part of each tensor, with the shared beginning, and the length of this beginning.
        """
        first: list[Tensor] = []
        each = zip(*(t.split(self.values, dim=2) for t in packed), strict=True)
        for pieces, shared in zip(each, self.shared, strict=True):
            if shared:
                yield [torch.cat([a[:, :, :shared], b], dim=2) for a, b in zip(first, pieces, strict=True)], shared
            else:
                first = list(pieces)
                yield first, 0


class HeadNormAttention(MultiHeadAttention):
    """Self-attention that normalises each head of q and k before RoPE, as Qwen3 does.

    torchtune's forward applies ``q_norm`` and ``k_norm`` after RoPE, which is another function.
    """

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        input_pos: Tensor | None = None,
    ) -> Tensor:
        """Attend over padded rows.

        Args:
            x: [b, s, d].
            y: same as ``x``.
            mask: [b, s, s], True where the first attends to the second; None: causal.
            input_pos: [b, s], each token's position; None: its index.

        Returns:
            [b, s, d].
        """
        if self.kv_cache is not None:
            raise NotImplementedError("no key-value cache; rocm_ext.sampling samples from such models")
        q, k, v = (t.transpose(1, 2) for t in heads(self, x, input_pos))
        k, v = (t.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if mask is None else mask[:, None],
            dropout_p=self.attn_dropout if self.training else 0.0,
            is_causal=mask is None,
        )
        return self.output_proj(out.transpose(1, 2).flatten(2))


class PackedAttention(MultiHeadAttention):
    """torchtune's self-attention for packed rows; ``mask`` gives the sequence lengths.

    Attributes:
        kernel: that computes them; see :func:`rocm_ext.model.sdpa.sdpa`.
    """

    kernel = "auto"

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        *,
        mask: Lengths | Tensor | None = None,
        input_pos: Tensor | None = None,
    ) -> Tensor:
        """Attend within each sequence; compute padded rows where ``mask`` is not a :class:`Lengths`.

        Args:
            x: [1, s, d], sequences end to end.
            y: same as ``x`` for self-attention. Cross-attention needs torchtune's forward.
            mask: sequence lengths, which sum to s, or torchtune's own mask.
            input_pos: [1, s], each token's position in its sequence.

        Returns:
            [1, s, d].
        """
        if not isinstance(mask, Lengths):
            return super().forward(x, y, mask=mask, input_pos=input_pos)
        out = attend(*heads(self, x, input_pos), mask, self.attn_dropout if self.training else 0.0, self.kernel)
        return self.output_proj(out.flatten(2))


class PackedHeadNormAttention(PackedAttention, HeadNormAttention):
    """:class:`HeadNormAttention` for packed rows."""


def heads(attention: MultiHeadAttention, x: Tensor, input_pos: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Project x, rotate and normalise its q and k.

    Args:
        attention: a self-attention layer.
        x: [b, s, d].
        input_pos: [b, s], each token's position; None: its index.

    Returns:
        q [b, s, heads, head_dim], k and v [b, s, kv_heads, head_dim].
    """
    q, k, v = (
        linear(x).unflatten(-1, (count, attention.head_dim))
        for linear, count in (
            (attention.q_proj, attention.num_heads),
            (attention.k_proj, attention.num_kv_heads),
            (attention.v_proj, attention.num_kv_heads),
        )
    )
    normed = attention.q_norm is not None and attention.k_norm is not None
    before = isinstance(attention, HeadNormAttention)
    if normed and before:
        q, k = attention.q_norm(q), attention.k_norm(k)  # type: ignore[misc]
    if attention.pos_embeddings is not None:
        q, k = (attention.pos_embeddings(t, input_pos=input_pos) for t in (q, k))
    # torchtune applies these norms to [b, h, s, head_dim]. They act on head_dim alone, so the result is the same.
    if normed and not before:
        q, k = attention.q_norm(q), attention.k_norm(k)  # type: ignore[misc]
    return q, k, v


@torch.compiler.disable
def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, dropout: float = 0.0, kernel: str = "auto") -> Tensor:
    """Compute causal attention within each sequence.

    Args:
        q: [1, s, heads, head_dim].
        k, v: [1, s, kv_heads, head_dim].
        lengths: of the sequences; the values sum to s.
        dropout: dropout probability on attention weights.
        kernel: see :func:`rocm_ext.model.sdpa.sdpa`.

    Returns:
        [1, s, heads, head_dim].
    """
    groups = q.shape[2] // k.shape[2]
    pieces = []
    for (q1, k1, v1), shared in lengths.sequences(*(t.transpose(1, 2) for t in (q, k, v))):
        if groups > 1:  # enable_gqa falls back to the math path on backends without grouped kernels
            k1, v1 = (t.repeat_interleave(groups, dim=1) for t in (k1, v1))
        out = sdpa(q1, k1, v1, kernel, dropout=dropout)
        pieces.append(out[:, :, shared:].transpose(1, 2))
    return torch.cat(pieces, dim=1)


_PACKED: dict[type, type] = {MultiHeadAttention: PackedAttention, HeadNormAttention: PackedHeadNormAttention}


def takes_packed_rows(model: nn.Module) -> bool:
    """Return whether :func:`use_packed_attention` made ``model`` accept packed rows."""
    if isinstance(model, ForeignDecoder):
        return model.packs
    return isinstance(getattr(model.layers[0], "attn", None), PackedAttention)  # type: ignore[index]


def shares_beginnings(model: nn.Module) -> bool:
    """Return whether packed sequences of ``model`` may share their beginnings. Dropout draws other values for each."""
    packed = model.shares if isinstance(model, ForeignDecoder) else takes_packed_rows(model)
    return packed and not has_dropout(model)


def has_dropout(model: nn.Module) -> bool:
    """Return whether a training step of ``model`` draws dropout masks."""
    modules = list(model.modules())
    attention = [getattr(m, key, 0) or 0 for m in modules for key in ("attn_dropout", "attention_dropout")]
    return any(isinstance(m, nn.Dropout) and m.p > 0 for m in modules) or any(
        isinstance(p, float | int) and p > 0 for p in attention
    )


def use_packed_attention(model: nn.Module) -> bool:
    """Make every self-attention of ``model`` accept packed rows.

    Returns:
        False, with ``model`` unchanged, if a layer has another attention class (Gemma 2's soft-capping).
        Such a model needs padded rows.
    """
    if isinstance(model, ForeignDecoder):
        return model.packs
    layers = list(model.layers)  # type: ignore[arg-type]
    if not all(type(getattr(layer, "attn", None)) in _PACKED for layer in layers):
        return False
    for layer in layers:
        layer.attn.__class__ = _PACKED[type(layer.attn)]  # keeps parameters, names and hooks; as FSDP2 does
    return True


def choose_attention(model: nn.Module, kernel: str) -> None:
    """Compute the attention of packed rows with ``kernel``, in training and in sampling from the same weights.

    Args:
        model: that :func:`use_packed_attention` has seen.
        kernel: see :func:`rocm_ext.model.sdpa.sdpa`.

    Raises:
        UserError: the model computes attention in its own code.
    """
    if kernel == "auto":
        return
    if not takes_packed_rows(model):
        raise UserError(f"attention is {kernel!r}, but this model has its own code for attention; set attention: auto")
    if isinstance(model, ForeignDecoder):
        model.kernel = kernel
    else:
        for layer in model.layers:  # type: ignore[union-attr]
            layer.attn.kernel = kernel
