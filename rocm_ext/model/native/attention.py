"""torchtune's self-attention for packed rows and for sampling."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtune.modules import MultiHeadAttention

from rocm_ext.model.attention import Lengths, Pass, Slots, attend
from rocm_ext.model.native.layers import HalvesRoPE, rotated


class Prefix(NamedTuple):
    """Keys and values of one prompt in one layer, [1, kv_heads, s, head_dim]."""

    keys: Tensor
    values: Tensor


@dataclass
class PrefixCache:
    """The cache of one prompt: one :class:`Prefix` per layer."""

    layers: list[Prefix] = field(default_factory=list)


class Prompts(Pass):
    """Packed prompts whose keys and values stay in caches.

    Args:
        lengths: tokens per sequence; sequences beyond the number of ``caches`` are padding.
        caches: the prompts' caches, which :meth:`attend` fills.
    """

    def __init__(self, lengths: Sequence[int], caches: Sequence[PrefixCache]) -> None:
        super().__init__()
        self._lengths, self._caches = Lengths(tuple(lengths)), caches

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: str) -> Tensor:
        """Keep k and v in the caches, and attend within each prompt; for shapes see :func:`attend`."""
        pieces = zip(*(t.transpose(1, 2).split(self._lengths.values, dim=2) for t in (k, v)), strict=True)
        for cache, (key, value) in zip(self._caches, pieces, strict=False):
            # copies, because views would keep the other prompts' tensors alive
            cache.layers.append(Prefix(*(t.clone(memory_format=torch.contiguous_format) for t in (key, value))))
        return attend(q, k, v, self._lengths, kernel=kernel, together=False)  # else others' lengths would change a sum


class Attention(MultiHeadAttention):
    """torchtune's self-attention, also for packed rows and for sampling; ``mask`` says which.

    Attributes:
        kernel: kernel for packed rows and sampling; see :func:`sdpa`.
        norms_first: whether the head norms of q and k come before RoPE, as in Qwen3. torchtune's come after it, which
            is another function.
    """

    kernel = "auto"
    norms_first = False

    @classmethod
    def of(cls, theirs: MultiHeadAttention) -> "Attention":
        """Make one from torchtune's module, with the same parts."""
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
            x: [b, s, d]; [1, s, d] for packed sequences; [n, d] in a step of sampling, one token per slot.
            y: same as ``x``.
            mask: lengths of packed sequences, a cache that the sampler reads or fills, or [b, s, s], True where the
                first attends to the second; None: every row is one sequence.
            input_pos: [b, s] or [n], the tokens' positions in their sequences; None: their indices.

        Returns:
            A tensor shaped like ``x``.
        """
        if self.kv_cache is not None:
            raise NotImplementedError("no key-value cache; rocm_ext.sampling samples from such models")
        sampling = mask if isinstance(mask, Slots | Prompts) else None
        q, k, v = self.heads(x, input_pos, sampling)
        dropout = self.attn_dropout if self.training else 0.0
        if sampling is not None:
            out = sampling.attend(q, k, v, self.kernel)
        elif isinstance(mask, Lengths):
            out = attend(q, k, v, mask, dropout, self.kernel)
        else:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            k, v = (t.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for t in (k, v))
            allowed, causal = mask[:, None] if isinstance(mask, Tensor) else None, mask is None
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=dropout, is_causal=causal)
            out = out.transpose(1, 2)
        return self.output_proj(out.flatten(-2))

    def project(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return q and k, with heads, as two tensors or as one joined tensor, and v."""
        q, k, v = (p(x).view(*x.shape[:-1], -1, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        return [q, k], v

    def heads(
        self, x: Tensor, input_pos: Tensor | None, sampling: Slots | Prompts | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project x, rotate and normalise its q and k.

        Args:
            x, input_pos: as in :meth:`forward`.
            sampling: the pass, whose layers share tables of rotations; None in training.

        Returns:
            q [..., heads, head_dim], k and v [..., kv_heads, head_dim].
        """
        qk, v = self.project(x)
        if self.norms_first:
            qk = [norm(t) for norm, t in zip((self.q_norm, self.k_norm), qk, strict=True)]
        rope: Any = self.pos_embeddings
        if isinstance(rope, HalvesRoPE) and not torch.compiler.is_compiling():
            make = partial(rope.tables, x.dtype, x.shape[-2], input_pos)
            tables = make() if sampling is None else sampling.once(rope, make)
            qk = [rotated(t, tables) for t in qk]
        elif rope is not None and x.ndim == 2:  # torchtune's take rows
            qk = [rope(t[None], input_pos=None if input_pos is None else input_pos[None])[0] for t in qk]
        elif rope is not None:
            qk = [rope(t, input_pos=input_pos) for t in qk]
        q, k = qk if len(qk) == 2 else qk[0].split_with_sizes((self.num_heads, self.num_kv_heads), dim=-2)
        # torchtune applies these norms to [b, h, s, head_dim]. They act only on head_dim, so the result is the same.
        if self.q_norm is not None and not self.norms_first:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v
