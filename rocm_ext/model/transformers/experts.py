"""Experts of mixture-of-experts models as one matrix product per expert over its own tokens.

transformers' default, ``torch._grouped_mm``, crashes in ROCm wheels that are built for many GPUs at once; its plain
loop waits for the device once per expert. This one waits once per layer, and adds up in a fixed order. LoRA on the
weights (:class:`rocm_ext.model.lora.ExpertLora`) is computed on each expert's tokens, without its product B A.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rocm_ext.model.lora import ExpertLora

SORTED = "rocm_ext_sorted"
Rows = list[tuple[int, slice]]  # experts with tokens, and their rows among all that are sorted by expert


@torch.compiler.disable  # each batch has its own counts, and each would be compiled anew
def sorted_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Apply a layer's experts; transformers calls it as the ``forward`` of an experts module.

    Args:
        self: the module; its weights are [experts, out, in], or [experts, in, out] with ``is_transposed``.
        hidden_states: [t, d].
        top_k_index: [t, k], the chosen experts of each token.
        top_k_weights: [t, k], their weights.

    Returns:
        [t, d].
    """
    chosen = top_k_index.reshape(-1)
    order = chosen.argsort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    rows = _rows(chosen, len(self.down_proj))
    x = _Spread.apply(hidden_states, order, back)
    if self.has_gate:
        x = self._apply_gate(_products(self, "gate_up_proj", x, rows))
    else:
        x = self.act_fn(_products(self, "up_proj", x, rows))
    x = _products(self, "down_proj", x, rows)
    if self.has_post_expert_norm:
        x = self.post_expert_norm(x)
    return _Combine.apply(x, top_k_weights, order, back).to(hidden_states.dtype)


def _rows(chosen: Tensor, experts: int) -> Rows:
    """Find the rows of each expert. A plan's fake tensors have no values: there each expert has equally many."""
    if isinstance(chosen, FakeTensor):
        counts = [len(chosen) // experts + (i < len(chosen) % experts) for i in range(experts)]
    else:
        counts = torch.bincount(chosen, minlength=experts).tolist()
    rows, start = [], 0
    for i, count in enumerate(counts):
        if count:
            rows.append((i, slice(start, start + count)))
        start += count
    return rows


def _products(self: Any, name: str, x: Tensor, rows: Rows) -> Tensor:
    """Multiply each expert's rows with its weight, and add its bias and LoRA: [n, in] -> [n, out]."""
    weight = getattr(self, name)
    weight = weight if self.is_transposed else weight.transpose(1, 2)
    bias = getattr(self, f"{name}_bias") if self.has_bias else None
    lora: ExpertLora | None = self._modules.get(f"{name}{ExpertLora.SUFFIX}")
    a, b = (None, None) if lora is None or lora.disabled else lora.factors(x.dtype)
    return _Products.apply(x, weight, bias, a, b, rows)


class _Spread(torch.autograd.Function):
    """Copies each token's hidden states to its k experts' rows: [t, d] -> [t k, d]."""

    @staticmethod
    def forward(ctx, x, order, back):  # type: ignore[override]
        ctx.save_for_backward(back)
        ctx.shape = len(x), len(order) // len(x)
        return x[order // ctx.shape[1]]

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        (back,) = ctx.saved_tensors
        return grad[back].view(*ctx.shape, -1).sum(1), None, None


class _Products(torch.autograd.Function):
    """x W + bias + x Aᵀ Bᵀ by expert; W and the bias are frozen."""

    @staticmethod
    def forward(ctx, x, weight, bias, a, b, rows):  # type: ignore[override]
        """Shapes: x [n, in], weight [e, in, out], bias [e, out], a [e, r, in], b [e, out, r]."""
        out = x.new_empty(len(x), weight.shape[2])
        low = None if a is None else x.new_empty(len(x), a.shape[1])
        for i, part in rows:
            if bias is None:
                torch.mm(x[part], weight[i], out=out[part])
            else:
                torch.addmm(bias[i], x[part], weight[i], out=out[part])
            if low is not None:
                torch.mm(x[part], a[i].T, out=low[part])
                out[part].addmm_(low[part], b[i].T)
        ctx.save_for_backward(weight, a, b, low, None if a is None else x)
        ctx.rows = rows
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        weight, a, b, low, x = ctx.saved_tensors
        grad_x = grad.new_empty(len(grad), weight.shape[1]) if ctx.needs_input_grad[0] else None
        grad_a, grad_b = (None, None) if a is None else (torch.zeros_like(a), torch.zeros_like(b))
        for i, part in ctx.rows:
            g = grad[part]
            if grad_x is not None:
                torch.mm(g, weight[i].T, out=grad_x[part])
            if a is not None:
                down = g @ b[i]
                torch.mm(down.T, x[part], out=grad_a[i])
                torch.mm(g.T, low[part], out=grad_b[i])
                if grad_x is not None:
                    grad_x[part].addmm_(down, a[i])
        return grad_x, None, None, grad_a, grad_b, None


class _Combine(torch.autograd.Function):
    """Adds up each token's experts, by their weights: [t k, d] -> [t, d]."""

    @staticmethod
    def forward(ctx, out, weights, order, back):  # type: ignore[override]
        ctx.save_for_backward(out, weights, order, back)
        return (out[back].view(*weights.shape, -1) * weights[..., None]).sum(1)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        out, weights, order, back = ctx.saved_tensors
        by_row = grad[order // weights.shape[1]]
        grad_weights = (by_row * out).sum(1)[back].view_as(weights).to(weights.dtype)
        return (by_row * weights.reshape(-1)[order, None]).to(out.dtype), grad_weights, None, None


ALL_EXPERTS_FUNCTIONS.register(SORTED, sorted_experts)
