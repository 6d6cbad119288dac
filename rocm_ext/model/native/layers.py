"""torchtune's layers for the native decoders: RMSNorm and rotary position embeddings in fewer operations, and
self-attention that also takes packed rows and samples."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.models.qwen2._positional_embeddings import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import MultiHeadAttention, RMSNorm

from rocm_ext.model.attention import Lengths, Pass, Slots, attend, sdpa
from rocm_ext.model.families import Rope

# torch's kernel for GPUs; without it, `rms_norm` is half a dozen operations, and their backward passes a dozen more
HAS_KERNEL = hasattr(torch.ops.aten, "_fused_rms_norm_backward")


class FusedRMSNorm(RMSNorm):
    """torchtune's RMSNorm as one kernel call, or as one autograd node where torch has no kernel.

    torchtune first converts the input to fp32. That keeps an fp32 copy for the backward pass and rules out
    the fused kernel. torch's ``rms_norm`` computes bf16 inputs in fp32 internally.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        scale = self.scale.to(x.dtype)
        trains = x.requires_grad and torch.is_grad_enabled() and not self.scale.requires_grad
        if not trains or (x.is_cuda and HAS_KERNEL) or torch.compiler.is_compiling():
            return F.rms_norm(x, self.normalized_shape, scale, self.eps)
        return _Norm.apply(x, scale, self.eps)


class _Norm(torch.autograd.Function):
    """``rms_norm`` with a frozen scale; its values equal those of torch's operations bit for bit."""

    @staticmethod
    def forward(ctx, x, scale, eps):  # type: ignore[override]
        x32 = x.float()
        mean_square = x32.pow(2).mean(-1, keepdim=True)  # [..., 1]
        factor = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, factor)
        return (x32 * factor).mul_(scale).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        x, scale, factor = ctx.saved_tensors
        x32 = x.float()
        grad32 = grad * scale.float()
        # d factor / dx = -factor^3 x / d
        dot = torch.linalg.vecdot(grad32, x32).unsqueeze(-1)  # [..., 1]
        along = dot * factor.pow(3) / x.shape[-1]
        grad_x = grad32.mul_(factor).addcmul_(x32, along, value=-1)
        return grad_x.to(x.dtype), None, None


def use_fused_norms(model: nn.Module) -> None:
    """Turn every RMSNorm of ``model`` into a :class:`FusedRMSNorm`; parameters and names stay the same."""
    for module in model.modules():
        if type(module) is RMSNorm:
            module.__class__ = FusedRMSNorm


class HalvesRoPE(Qwen2RotaryPositionalEmbeddings):
    """torchtune's position embeddings of Qwen2, for heads of ``dim`` dimensions, with any scaling of :class:`Rope`."""

    def __init__(self, dim: int, max_seq_len: int, rope: Rope) -> None:
        self.rope = rope
        super().__init__(dim, max_seq_len, rope.base)

    def rope_init(self) -> None:
        """Compute the frequencies and the tables of cosines and sines."""
        self.register_buffer("theta", self.rope.frequencies(self.dim), persistent=False)
        self.build_rope_cache(self.max_seq_len)
        if self.rope.yarn and self.rope.yarn.attention != 1:
            self.cache *= self.rope.yarn.attention

    def forward(self, x: Tensor, input_pos: Tensor | None = None) -> Tensor:
        """Rotate heads [b, s, heads, head_dim], bit for bit as torchtune does; positions [b, s] may be left out."""
        if torch.compiler.is_compiling():
            return super().forward(x, input_pos=input_pos)
        tables = self.tables(x.dtype, x.shape[1], input_pos)
        return rotated(x, tables)

    def tables(
        self, dtype: torch.dtype, length: int, input_pos: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, with the first half of the sines negated: two [..., 1, head_dim] of ``dtype``.

        Args:
            dtype: the heads' dtype.
            length: number of tokens.
            input_pos: [...], the tokens' positions, by default indices, [1, length].
        """
        table = self.cache[:length][None] if input_pos is None else self.cache[input_pos]
        table = table.unsqueeze(-2).to(dtype)  # [..., 1, 2 head_dim]
        cos, sin = table.chunk(2, dim=-1)
        first, second = sin.chunk(2, dim=-1)
        return cos, torch.cat((-first, second), dim=-1)


def rotated(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads [..., heads, head_dim] by :meth:`HalvesRoPE.tables`."""
    return _Rotation.apply(x, *tables) if x.requires_grad else _rotated(x, *tables)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x * cos).add_(_swapped(x).mul_(sin))


class _Rotation(torch.autograd.Function):
    """``x cos + swapped(x) sin``, with sin's first half negated, as one autograd node that saves only the tables."""

    @staticmethod
    def forward(ctx, x, cos, sin):  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        grad_x = (grad * cos).sub_(_swapped(grad).mul_(sin))  # the rotation back
        return grad_x, None, None


def _swapped(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x.roll(half, -1)


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
        self._lengths = Lengths(tuple(lengths))
        self._caches = caches

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernel: str) -> Tensor:
        """Keep k and v in the caches, and attend within each prompt; for shapes see :func:`attend`."""
        lengths = self._lengths.values
        keys = k.transpose(1, 2).split(lengths, dim=2)  # each [1, kv_heads, s, head_dim]
        values = v.transpose(1, 2).split(lengths, dim=2)
        # copies, because views would keep the other prompts' tensors alive
        copied = partial(torch.clone, memory_format=torch.contiguous_format)
        for cache, key, value in zip(self._caches, keys, values, strict=False):
            cache.layers.append(Prefix(copied(key), copied(value)))
        # not together, because others' lengths would change a sum
        return attend(q, k, v, self._lengths, kernel=kernel, together=False)


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
        names = inspect.signature(MultiHeadAttention).parameters.keys() - {"kv_cache"}
        return cls(**{name: getattr(theirs, name) for name in names})

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
                first attends to the second. With None every row is one sequence.
            input_pos: [b, s] or [n], the tokens' positions in their sequences, by default their indices.

        Returns:
            A tensor shaped like ``x``.
        """
        if self.kv_cache is not None:
            raise NotImplementedError(
                "no key-value cache; rocm_ext.sampling samples from such models"
            )
        sampling = mask if isinstance(mask, Slots | Prompts) else None
        q, k, v = self.heads(x, input_pos, sampling)
        dropout = self.attn_dropout if self.training else 0.0
        if sampling is not None:
            out = sampling.attend(q, k, v, self.kernel)
        elif isinstance(mask, Lengths):
            out = attend(q, k, v, mask, dropout, self.kernel)
        else:
            q = q.transpose(1, 2)  # [b, heads, s, head_dim]
            k = k.transpose(1, 2)
            v = v.transpose(1, 2)
            allowed = mask[:, None] if isinstance(mask, Tensor) else None
            out = sdpa(q, k, v, "auto", mask=allowed, dropout=dropout)
            out = out.transpose(1, 2)
        return self.output_proj(out.flatten(-2))

    def project(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return q and k, with heads, as two tensors or as one joined tensor, and v."""
        q = self.split_heads(self.q_proj(x))  # [..., heads, head_dim]
        k = self.split_heads(self.k_proj(x))  # [..., kv_heads, head_dim]
        v = self.split_heads(self.v_proj(x))  # [..., kv_heads, head_dim]
        return [q, k], v

    def split_heads(self, x: Tensor) -> Tensor:
        """[..., heads * head_dim] -> [..., heads, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim))

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
            q, k = qk
            qk = [self.q_norm(q), self.k_norm(k)]
        rope = self.pos_embeddings
        if isinstance(rope, HalvesRoPE) and not torch.compiler.is_compiling():
            make = partial(rope.tables, x.dtype, x.shape[-2], input_pos)
            tables = make() if sampling is None else sampling.once(rope, make)
            qk = [rotated(heads, tables) for heads in qk]
        elif rope is not None and x.ndim == 2:  # torchtune's take rows
            positions = None if input_pos is None else input_pos[None]
            qk = [rope(heads[None], input_pos=positions)[0] for heads in qk]
        elif rope is not None:
            qk = [rope(heads, input_pos=input_pos) for heads in qk]
        if len(qk) == 1:
            sizes = self.num_heads, self.num_kv_heads
            qk = list(qk[0].split_with_sizes(sizes, dim=-2))
        q, k = qk
        # torchtune applies these norms to [b, h, s, head_dim]. They act only on head_dim, so the result is the same.
        if self.q_norm is not None and not self.norms_first:
            q = self.q_norm(q)
            k = self.k_norm(k)
        return q, k, v
