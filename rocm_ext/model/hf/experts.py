"""Experts of mixture-of-experts models: every expert computes its tokens, by :mod:`rocm_ext.model.hf.grouped_product`.

transformers' plain loop waits for the device once per expert. This waits at most once per layer, and adds up in a fixed
order. LoRA on the weights (:class:`rocm_ext.model.lora.ExpertLora`) is computed on an expert's tokens, without the
product B A.

:class:`Replay` lets routers choose the experts of sampling again, in the forward passes of an update.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from torch.return_types import topk
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rocm_ext.model.hf.attention import current_pass
from rocm_ext.model.hf.grouped_product import Rows
from rocm_ext.model.lora import ExpertLora

SORTED = "rocm_ext_sorted"
ROUTES = "routes"  # attribute of an experts module, [slots, k] int16: the experts that a decoding step chose


@torch.compiler.disable  # counts differ between batches, and torch would compile every one anew
def sorted_experts(
    self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Apply a layer's experts; transformers calls it as the ``forward`` of an experts module.

    Args:
        self: the module; its weights are [experts, out, in], or [experts, in, out] with ``is_transposed``.
        hidden_states: [t, d].
        top_k_index: [t, k], the tokens' chosen experts.
        top_k_weights: [t, k], their weights.

    Returns:
        [t, d].
    """
    now = current_pass()
    if ROUTES in vars(self) and now is not None and now.ring is not None:
        vars(self)[ROUTES][: len(top_k_index)] = top_k_index
    experts = len(self.down_proj)
    if now is not None and now.fixed:
        rows = Rows.all(top_k_index, experts)
        x = hidden_states.expand(experts, *hidden_states.shape)  # [experts, t, d]
    else:
        rows = Rows.of(top_k_index, experts, hidden_states.dtype)
        x = _Spread.apply(hidden_states, rows.order, rows.back)  # [n, d]
    if self.has_gate:
        x = self._apply_gate(_products(self, "gate_up_proj", x, rows))
    else:
        x = self.act_fn(_products(self, "up_proj", x, rows))
    x = _products(self, "down_proj", x, rows)
    if self.has_post_expert_norm:
        x = self.post_expert_norm(x)
    out = _Combine.apply(x, top_k_weights, rows.order, rows.back)
    return out.to(hidden_states.dtype)


def _products(self, name: str, x: Tensor, rows: Rows) -> Tensor:
    """Multiply every expert's rows with its weight, and add bias and LoRA: [n, in] -> [n, out]."""
    weight = getattr(self, name)
    if not self.is_transposed:
        weight = weight.transpose(1, 2)
    bias = getattr(self, f"{name}_bias") if self.has_bias else None
    lora = self._modules.get(f"{name}{ExpertLora.SUFFIX}")
    a = b = None
    if lora is not None and not lora.disabled:
        a, b = lora.factors(x.dtype)
    return _Products.apply(x, weight, bias, a, b, rows)


class _Spread(torch.autograd.Function):
    """Copies a token's hidden states to its k experts' rows: [t, d] -> [n, d]."""

    @staticmethod
    def forward(ctx, x, order, back):  # type: ignore[override]
        tokens = len(x)
        chosen = len(back) // tokens
        ctx.save_for_backward(back)
        ctx.shape = tokens, chosen
        return _with_zeros(x, order, back)[order // chosen]

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        (back,) = ctx.saved_tensors
        by_token = grad[back].view(*ctx.shape, -1)  # [t, k, d]
        return by_token.sum(1), None, None


def _with_zeros(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Add a row of zeros, [n, d] -> [n + 1, d], if ``order`` has padding."""
    if len(order) == len(back):
        return x
    return pad(x, (0, 0, 0, 1))


class _Products(torch.autograd.Function):
    """x W + bias + x Aᵀ Bᵀ by expert; W and the bias are frozen."""

    @staticmethod
    def forward(ctx, x, weight, bias, a, b, rows):  # type: ignore[override]
        """Shapes: x [n, in], weight [e, in, out], bias [e, out], a [e, r, in], b [e, out, r]."""
        ctx.rows = rows
        if a is None:
            ctx.save_for_backward(weight, None, None, None, None)
            return rows.products((x, weight), bias=bias)
        low = rows.products((x, a.mT))  # [n, r]
        ctx.save_for_backward(weight, a, b, low, x)
        return rows.products((x, weight), (low, b.mT), bias=bias)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        weight, a, b, low, x = ctx.saved_tensors
        rows = ctx.rows
        grad_x = grad_a = grad_b = None
        pairs = [(grad, weight.mT)]
        if a is not None:
            down = rows.products((grad, b))  # [n, r]
            grad_a = rows.gradient(down, x)
            grad_b = rows.gradient(grad, low)
            pairs.append((down, a))
        if ctx.needs_input_grad[0]:
            grad_x = rows.products(*pairs)
        return grad_x, None, None, grad_a, grad_b, None


class _Combine(torch.autograd.Function):
    """Adds up the tokens' experts, by their weights: [n, d] -> [t, d]."""

    @staticmethod
    def forward(ctx, out, weights, order, back):  # type: ignore[override]
        ctx.save_for_backward(out, weights, order, back)
        by_token = out[back].view(*weights.shape, -1)  # [t, k, d]
        return (by_token * weights[..., None]).sum(1)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        out, weights, order, back = ctx.saved_tensors
        chosen = weights.shape[1]
        by_row = _with_zeros(grad, order, back)[order // chosen]  # [n, d]
        of_rows = (by_row * out).sum(1)  # [n]
        grad_weights = of_rows[back].view_as(weights).to(weights.dtype)
        factors = _with_zeros(weights.reshape(-1, 1), order, back)[order]  # [n, 1]
        grad_out = (by_row * factors).to(out.dtype)
        return grad_out, grad_weights, None, None


ALL_EXPERTS_FUNCTIONS.register(SORTED, sorted_experts)


# ---- routers' choices from sampling, replayed in the forward passes of an update (R3, arXiv:2510.11370)


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers' fused experts by name, in the model's order."""
    experts = {}
    for name, part in model.named_modules():
        # transformers' mark of experts whose forward pass can be replaced
        if hasattr(part, "is_transposed"):
            experts[name] = part
    return experts


class Replay:
    """Replaces the choices of a model's routers; it wraps the modules with router and experts.

    The model's code still computes the weights of the chosen experts. Sampler and trainer round differently, so a
    router that is undecided between two experts may choose another one in training. Other weights than in sampling
    would then compute the token.

    Args:
        model: the model, whose modules are changed.
        chosen: experts per token and layer.

    Attributes:
        layers: number of layers with experts.
        counts: number of choices per layer.
    """

    def __init__(self, model: nn.Module, chosen: int) -> None:
        self.chosen = chosen
        self._given: Tensor | None = None
        self._differs: list[Tensor] | None = None
        every = experts_of(model)
        self.layers = len(every)
        self.counts = [0] * self.layers
        for layer, (name, experts) in enumerate(every.items()):
            owner, _, _ = name.rpartition(".")
            block = model.get_submodule(owner)
            count = len(experts.down_proj)  # type: ignore[arg-type]
            block.forward = partial(self._run, layer, count, block.forward)

    def begin(self, routes: Tensor | None) -> None:
        """Begin a forward pass, whose backward pass may compute layers again.

        ``routes`` [..., layers * chosen] are the tokens' experts by number; if negative or None, routers choose.
        """
        self._differs = []
        self._given = None
        if routes is not None:
            self._given = routes.reshape(-1, self.layers, self.chosen)

    def differing(self) -> tuple[Tensor, Tensor] | None:
        """Return where the given choices differ from the routers', and where choices are given.

        Both are [t, layers, chosen] booleans for the pass since :meth:`begin`, or the result is None if no choices are
        given. Layers that are computed again do not count.
        """
        differs = self._differs
        self._differs = None
        if self._given is None or not differs:
            return None
        return torch.stack(differs, 1), self._given >= 0

    def _run(self, layer: int, experts: int, forward: Callable[..., Any], *args, **kwargs) -> Any:
        if self._given is None:
            return forward(*args, **kwargs)
        with _Chooses(experts, self.chosen, partial(self._choose, layer)):
            return forward(*args, **kwargs)

    def _choose(self, layer: int, routers: Tensor) -> Tensor:
        """Return the tokens' experts, [t, chosen], from the given ones and the router's choice."""
        self.counts[layer] += 1
        assert self._given is not None
        given = self._given[:, layer].to(routers)
        if self._differs is not None:
            differs = given[..., None] != routers[:, None]  # [t, chosen, chosen]
            self._differs.append(differs.all(-1) & (given >= 0))
        return torch.where(given < 0, routers, given)


class _Chooses(TorchFunctionMode):
    """Replaces the result of a router's ``topk`` over [t, experts]."""

    def __init__(self, experts: int, chosen: int, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._experts = experts
        self._chosen = chosen
        self._choose = choose

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return out
        values = args[0] if args else kwargs["input"]
        sizes = *values.shape[1:], out.indices.shape[1]
        if sizes != (self._experts, self._chosen):
            return out
        index = self._choose(out.indices)
        return topk((values.gather(1, index), index))
