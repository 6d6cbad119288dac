"""RMSNorm without fp32 copies of its input."""

import torch.nn.functional as F
from torch import Tensor, nn
from torchtune.modules import RMSNorm


class FusedRMSNorm(RMSNorm):
    """torchtune's RMSNorm as one kernel call.

    torchtune first converts the input to fp32. That keeps an fp32 copy for the backward pass and rules out
    the fused kernel. torch's ``rms_norm`` computes bf16 inputs in fp32 internally.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return F.rms_norm(x, self.normalized_shape, self.scale.to(x.dtype), self.eps)


def use_fused_norms(model: nn.Module) -> None:
    """Turn every RMSNorm of ``model`` into a :class:`FusedRMSNorm`; parameters and names stay the same."""
    for module in model.modules():
        if type(module) is RMSNorm:
            module.__class__ = FusedRMSNorm
