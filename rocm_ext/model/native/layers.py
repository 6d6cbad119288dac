"""RMSNorm and rotary position embeddings of the native decoders, in fewer operations than torchtune's."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.models.qwen2._positional_embeddings import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import RMSNorm

from rocm_ext.model.families import Rope
from rocm_ext.model.rope import frequencies

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
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        x32 = x.float()
        factor = x32.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()  # [..., 1]
        ctx.save_for_backward(x, scale, factor)
        return (x32 * factor).mul_(scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        x, scale, factor = ctx.saved_tensors
        x32, grad32 = x.float(), grad * scale.float()
        # d factor / dx = -factor^3 x / d
        along = torch.linalg.vecdot(grad32, x32).unsqueeze(-1) * factor.pow(3) / x.shape[-1]
        return grad32.mul_(factor).addcmul_(x32, along, value=-1).to(x.dtype), None, None


def use_fused_norms(model: nn.Module) -> None:
    """Turn every RMSNorm of ``model`` into a :class:`FusedRMSNorm`; parameters and names stay the same."""
    for module in model.modules():
        if type(module) is RMSNorm:
            module.__class__ = FusedRMSNorm


class HalvesRoPE(Qwen2RotaryPositionalEmbeddings):
    """torchtune's position embeddings of Qwen2 with linear, Llama 3 or YaRN scaling of the frequencies.

    Args:
        dim: dimensions of a head.
        max_seq_len: number of positions.
        rope: base and scaling.
    """

    def __init__(self, dim: int, max_seq_len: int, rope: Rope) -> None:
        self.rope = rope
        super().__init__(dim, max_seq_len, rope.base)

    def rope_init(self) -> None:
        """Compute the frequencies and the tables of cosines and sines."""
        self.register_buffer("theta", frequencies(self.dim, self.rope), persistent=False)
        self.build_rope_cache(self.max_seq_len)
        if self.rope.yarn and self.rope.yarn.attention != 1:
            self.cache *= self.rope.yarn.attention

    def forward(self, x: Tensor, input_pos: Tensor | None = None) -> Tensor:
        """Rotate heads [b, s, heads, head_dim] at positions [b, s], bit for bit as torchtune does; None: indices."""
        if torch.compiler.is_compiling():
            return super().forward(x, input_pos=input_pos)
        return rotated(x, self.tables(x.dtype, x.shape[1], input_pos))

    def tables(self, dtype: torch.dtype, length: int, input_pos: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, with the first half of the sines negated: two [..., 1, head_dim] of ``dtype``.

        Args:
            dtype: the heads' dtype.
            length: number of tokens.
            input_pos: [...], the tokens' positions; None: indices, [1, length].
        """
        table = self.cache[:length][None] if input_pos is None else self.cache[input_pos]
        cos, sin = table.unsqueeze(-2).to(dtype).chunk(2, dim=-1)
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
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return (grad * cos).sub_(_swapped(grad).mul_(sin)), None, None  # the rotation back


def _swapped(x: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, -1)
