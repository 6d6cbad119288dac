"""Products with frozen weights: large ones in fp32 on a CPU are oneDNN's instead of MKL's.

torch multiplies fp32 matrices with MKL, which is slow for few rows, at least on AMD's processors. Measured on two cores
of an EPYC (Zen 4), in ms, oneDNN and MKL; no Intel processor was measured:

==============  ====================  ====================
weight          16 rows, transposed   256 rows
==============  ====================  ====================
32,000 x 256    2.1, 8.8              22.6, 29.8
896 x 4,864     0.7, 2.4              11.2, 15.0
4,096 x 512     0.5, 0.7              5.3, 6.5
==============  ====================  ====================

Below a hundred thousand weights MKL is as fast. From 16 rows on, the fewest that samplers compute, a row's result does
not depend on the others.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchtune.modules import TiedLinear
from torchtune.modules.tied_linear import Linear as TiedProduct

_LEAST = 2**17  # weights

# The operator of torch's own compiler. ARM's builds of torch have no MKL, and multiply with oneDNN already.
_available = (
    torch.backends.mkl.is_available()
    and torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


def uses_onednn(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether products with large weights of this dtype and device are oneDNN's."""
    return _available and dtype == torch.float32 and device.type == "cpu"


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x Wᵀ + b`` without gradients: x [..., in], W [out, in] -> [..., out]."""
    if _is_faster(x, weight):
        return _onednn(x, weight, bias)
    return F.linear(x, weight, bias)


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """Compute ``g W``, the gradient of :func:`product` with respect to x: g [..., out] -> [..., in]."""
    if _is_faster(grad, weight):
        return _onednn(grad, weight.T, None)
    return grad @ weight


def frozen_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x Wᵀ + b``, as :func:`product`; x may have a gradient."""
    trains = weight.requires_grad or (bias is not None and bias.requires_grad)
    if trains or torch.compiler.is_compiling() or not _is_faster(x, weight):
        return F.linear(x, weight, bias)
    out = _Frozen.apply(x.reshape(-1, x.shape[-1]), weight, bias)
    # here, because torch refuses to change a view from a function in place
    return out.view(*x.shape[:-1], -1)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def _is_faster(x: Tensor, weight: Tensor) -> bool:
    if x.dtype != weight.dtype or weight.numel() < _LEAST:
        return False
    return _is_plain(x) and _is_plain(weight) and uses_onednn(weight.dtype, weight.device)


def _is_plain(tensor: Tensor) -> bool:
    # sharded, quantised and fake tensors have classes of their own
    return type(tensor) in (Tensor, nn.Parameter)


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):  # type: ignore[override]
        ctx.save_for_backward(weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return input_gradient(grad, weight), None, None


class FrozenLinear(nn.Linear):
    """A linear layer whose product is :func:`frozen_linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return frozen_linear(x, self.weight, self.bias)


class _FrozenTiedProduct(TiedProduct):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return frozen_linear(x, weight)


def use_frozen_products(model: nn.Module) -> None:
    """Turn every linear layer of ``model`` into a :class:`FrozenLinear`; parameters and names stay the same."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FrozenLinear
    output: Any = getattr(model, "output", None)
    if isinstance(output, TiedLinear):
        output.linear.__class__ = _FrozenTiedProduct
