"""RMSNorm without fp32 copies of its input."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.modules import RMSNorm

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
    """``rms_norm`` with a frozen scale; its values are those of torch's operations bit for bit."""

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
