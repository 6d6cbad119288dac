"""Causal attention over sequences packed end to end, without leakage between them.

Each sequence gets its own call of torch's SDPA with ``is_causal``. The fast kernel of every backend
(flash on CUDA, AOTriton on ROCm, the CPU's own) takes that call; none takes a block-diagonal mask. A few
dozen launches per layer cost little compared with the matrix products of thousands of tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.modules import MultiHeadAttention


class Lengths:
    """Lengths of packed sequences, passed through torchtune's ``mask`` argument.

    This is an object because ``torch.compile`` compiles a new graph for every new tuple.

    Attributes:
        values: tokens per sequence.
    """

    __slots__ = ("values",)

    def __init__(self, values: tuple[int, ...]) -> None:
        self.values = values


class PackedAttention(MultiHeadAttention):
    """torchtune's self-attention for packed rows; ``mask`` gives the sequence lengths."""

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        *,
        mask: Lengths | Tensor | None = None,
        input_pos: Tensor | None = None,
    ) -> Tensor:
        """Attend within each sequence; call torchtune's forward where ``mask`` is not a :class:`Lengths`.

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
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(b, s, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).view(b, s, self.num_kv_heads, self.head_dim)
        if self.pos_embeddings is not None:
            q, k = (self.pos_embeddings(t, input_pos=input_pos) for t in (q, k))
        # torchtune applies these norms to [b, h, s, head_dim] after RoPE. They act on head_dim alone, so the
        # result is the same before the transpose.
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(q, k, v, mask, self.attn_dropout if self.training else 0.0)
        return self.output_proj(out.view(b, s, -1))


@torch.compiler.disable
def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, dropout: float = 0.0) -> Tensor:
    """Compute causal attention within each sequence.

    Args:
        q: [1, s, heads, head_dim].
        k, v: [1, s, kv_heads, head_dim].
        lengths: tokens per sequence; they sum to s.
        dropout: dropout probability on attention weights.

    Returns:
        [1, s, heads, head_dim].
    """
    groups = q.shape[2] // k.shape[2]
    pieces = []
    for q1, k1, v1 in zip(*(t.transpose(1, 2).split(lengths.values, dim=2) for t in (q, k, v)), strict=True):
        if groups > 1:  # enable_gqa falls back to the math path on backends without grouped kernels
            k1, v1 = (t.repeat_interleave(groups, dim=1) for t in (k1, v1))
        pieces.append(F.scaled_dot_product_attention(q1, k1, v1, dropout_p=dropout, is_causal=True).transpose(1, 2))
    return torch.cat(pieces, dim=1)


def use_packed_attention(model: nn.Module) -> bool:
    """Make every self-attention of ``model`` accept packed rows.

    Returns:
        False, with ``model`` unchanged, if a layer has its own attention class (Gemma 2's soft-capping).
        Such a model needs padded rows.
    """
    layers = list(model.layers)  # type: ignore[arg-type]
    if not all(type(getattr(layer, "attn", None)) is MultiHeadAttention for layer in layers):
        return False
    for layer in layers:
        layer.attn.__class__ = PackedAttention  # keeps parameters, names and hooks; FSDP2 uses the same technique
    return True
