"""Causal attention over sequences that are packed end to end, without leakage between them.

Every sequence gets a call of torch's SDPA of its own, with ``is_causal``: the fast kernel of each
backend (flash on CUDA, AOTriton on ROCm, the CPU's own) takes it, which none does for a block-diagonal
mask. A few dozen launches a layer are nothing beside the matrix products of thousands of tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.modules import MultiHeadAttention


class Lengths:
    """Lengths of packed sequences, on their way through torchtune's ``mask`` argument.

    An object, not a tuple: ``torch.compile`` would make a new graph for every new tuple.
    """

    __slots__ = ("values",)

    def __init__(self, values: tuple[int, ...]) -> None:
        self.values = values


class PackedAttention(MultiHeadAttention):
    """torchtune's self-attention, for rows whose ``mask`` says where sequences begin."""

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        *,
        mask: Lengths | Tensor | None = None,
        input_pos: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            x: [1, s, d], sequences end to end.
            y: as ``x``; anything else is cross-attention, which torchtune's own forward does.
            mask: the sequences' lengths, which sum to s. Without them this is torchtune's forward.
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
        # torchtune norms [b, h, s, head_dim], after RoPE; a norm over head_dim may come before the transpose
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(q, k, v, mask, self.attn_dropout if self.training else 0.0)
        return self.output_proj(out.view(b, s, -1))


@torch.compiler.disable
def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, dropout: float = 0.0) -> Tensor:
    """Causal attention inside each sequence.

    Args:
        q: [1, s, heads, head_dim].
        k, v: [1, s, kv_heads, head_dim].
        lengths: tokens of each sequence; they sum to s.
        dropout: probability on attention weights.

    Returns:
        [1, s, heads, head_dim].
    """
    groups = q.shape[2] // k.shape[2]
    pieces = []
    for q1, k1, v1 in zip(*(t.transpose(1, 2).split(lengths.values, dim=2) for t in (q, k, v)), strict=True):
        if groups > 1:  # enable_gqa would drop to the math path on backends without grouped kernels
            k1, v1 = (t.repeat_interleave(groups, dim=1) for t in (k1, v1))
        pieces.append(F.scaled_dot_product_attention(q1, k1, v1, dropout_p=dropout, is_causal=True).transpose(1, 2))
    return torch.cat(pieces, dim=1)


def use_packed_attention(model: nn.Module) -> bool:
    """Let every self-attention of ``model`` take packed rows. False, and nothing changed, where one
    has attention of its own (Gemma 2's soft-capping): such a model gets padded rows."""
    layers = list(model.layers)  # type: ignore[arg-type]
    if not all(type(getattr(layer, "attn", None)) is MultiHeadAttention for layer in layers):
        return False
    for layer in layers:
        layer.attn.__class__ = PackedAttention  # keeps parameters, names and hooks, as FSDP2 does it
    return True
