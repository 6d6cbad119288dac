"""Causal attention over sequences packed end to end, without leakage between them.

Each sequence gets its own call of torch's SDPA with ``is_causal``. The fast kernel of every backend
(flash on CUDA, AOTriton on ROCm, the CPU's own) takes that call; none takes a block-diagonal mask. A few
dozen launches per layer cost little compared with the matrix products of thousands of tokens.

Sequences that begin alike, as the two sides of a pair, may have that beginning once. Attention puts its queries, keys
and values before those of each such sequence, so only scores are computed again. The kernels' causal masks are
aligned to the first query and key; few backends have one that is aligned to the last.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.modules import MultiHeadAttention

from rocm_ext.base.errors import UserError
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.rope import HalvesRoPE, rotated
from rocm_ext.model.sdpa import sdpa
from rocm_ext.model.slots import Prompts, Slots


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


class Attention(MultiHeadAttention):
    """torchtune's self-attention, also for packed rows and for sampling; ``mask`` says which.

    Attributes:
        kernel: that computes packed rows and sampling; see :func:`rocm_ext.model.sdpa.sdpa`.
        norms_first: whether the norms of each head of q and k come before RoPE, as in Qwen3. torchtune's come after it,
            which is another function.
    """

    kernel = "auto"
    norms_first = False

    @classmethod
    def of(cls, theirs: MultiHeadAttention) -> "Attention":
        """Make one of the parts of torchtune's."""
        numbers = ("embed_dim", "num_heads", "num_kv_heads", "head_dim", "max_seq_len", "is_causal", "attn_dropout")
        parts = ("q_proj", "k_proj", "v_proj", "output_proj", "pos_embeddings", "q_norm", "k_norm")
        return cls(**{name: getattr(theirs, name) for name in (*numbers, *parts)})

    def forward(
        self,
        x: Tensor,
        y: Tensor | None = None,
        *,
        mask: Lengths | Slots | Prompts | Tensor | None = None,
        input_pos: Tensor | None = None,
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            x: [b, s, d]; [1, s, d] of sequences end to end, unless ``mask`` is a tensor or None.
            y: same as ``x``.
            mask: lengths of packed sequences, a cache that the sampler reads or fills, or [b, s, s], True where the
                first attends to the second; None: each row is one sequence.
            input_pos: [b, s], each token's position in its sequence; None: its index.

        Returns:
            [b, s, d].
        """
        if self.kv_cache is not None:
            raise NotImplementedError("no key-value cache; rocm_ext.sampling samples from such models")
        q, k, v = self.heads(x, input_pos, mask if isinstance(mask, Slots | Prompts) else None)
        dropout = self.attn_dropout if self.training else 0.0
        if isinstance(mask, Slots | Prompts):
            out = mask.attend(q, k, v, self.kernel)
        elif isinstance(mask, Lengths):
            out = attend(q, k, v, mask, dropout, self.kernel)
        else:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            k, v = (t.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for t in (k, v))
            allowed, causal = None if mask is None else mask[:, None], mask is None
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout, is_causal=causal)
            out = out.transpose(1, 2)
        return self.output_proj(out.flatten(2))

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Return q, k and v, without heads."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def heads(
        self, x: Tensor, input_pos: Tensor | None, pass_: Slots | Prompts | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project x, rotate and normalise its q and k.

        Args:
            x: [b, s, d].
            input_pos: [b, s], each token's position; None: its index.
            pass_: of the sampler, whose layers share tables of rotations.

        Returns:
            q [b, s, heads, head_dim], k and v [b, s, kv_heads, head_dim].
        """
        q, k, v = (t.view(*x.shape[:2], -1, self.head_dim) for t in self.project(x))
        if self.norms_first:
            q, k = self.q_norm(q), self.k_norm(k)
        if isinstance(self.pos_embeddings, HalvesRoPE) and not torch.compiler.is_compiling():
            make = partial(self.pos_embeddings.tables, x.dtype, x.shape[1], input_pos)
            tables = make() if pass_ is None else pass_.once(self.pos_embeddings, make)
            q, k = rotated(q, tables), rotated(k, tables)
        elif self.pos_embeddings is not None:
            q, k = (self.pos_embeddings(t, input_pos=input_pos) for t in (q, k))
        # torchtune applies these norms to [b, h, s, head_dim]. They act on head_dim alone, so the result is the same.
        if self.q_norm is not None and not self.norms_first:
            q, k = self.q_norm(q), self.k_norm(k)
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


def shares_beginnings(decoder: Decoder) -> bool:
    """Return whether packed sequences may share their beginnings. Dropout draws other values for each."""
    return decoder.shares and not has_dropout(decoder)


def has_dropout(model: nn.Module) -> bool:
    """Return whether a training step of ``model`` draws dropout masks."""
    modules = list(model.modules())
    attention = [getattr(m, key, 0) or 0 for m in modules for key in ("attn_dropout", "attention_dropout")]
    return any(isinstance(m, nn.Dropout) and m.p > 0 for m in modules) or any(
        isinstance(p, float | int) and p > 0 for p in attention
    )


def choose_attention(decoder: Decoder, kernel: str) -> None:
    """Compute the attention of packed rows with ``kernel``, in training and in sampling.

    Args:
        decoder: the model.
        kernel: see :func:`rocm_ext.model.sdpa.sdpa`.

    Raises:
        UserError: the model computes attention in its own code.
    """
    if kernel == "auto":
        return
    if not decoder.packs:
        raise UserError(f"attention is {kernel!r}, but this model has its own code for attention; set attention: auto")
    decoder.kernel = kernel
