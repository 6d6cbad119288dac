"""Experts of mixture-of-experts models as one matrix product per expert over its own tokens.

transformers' default, ``torch._grouped_mm``, crashes in ROCm wheels that are built for many GPUs at once; its plain
loop waits for the device once per expert. This one waits once per layer, and adds up in a fixed order.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

SORTED = "rocm_ext_sorted"


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
    parts = hidden_states[order // top_k_index.shape[1]].split(_counts(chosen, len(self.down_proj)))
    out = torch.cat([_expert(self, i, part) for i, part in enumerate(parts)])
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    out = out[back].view(*top_k_index.shape, -1) * top_k_weights[..., None]
    return out.sum(dim=1).to(hidden_states.dtype)


def _expert(self: Any, i: int, x: Tensor) -> Tensor:
    if not len(x):
        return x
    if self.has_gate:
        x = self._apply_gate(_linear(self, "gate_up_proj", i, x))
    else:
        x = self.act_fn(_linear(self, "up_proj", i, x))
    x = _linear(self, "down_proj", i, x)
    return self.post_expert_norm(x) if self.has_post_expert_norm else x


def _linear(self: Any, name: str, i: int, x: Tensor) -> Tensor:
    weight = getattr(self, name)[i]
    weight = weight if self.is_transposed else weight.T
    return torch.addmm(getattr(self, f"{name}_bias")[i], x, weight) if self.has_bias else x @ weight


@torch.compiler.disable
def _counts(chosen: Tensor, experts: int) -> list[int]:
    """Count the tokens of each expert. A plan's fake tensors have no values: there each expert has equally many."""
    if isinstance(chosen, FakeTensor):
        return [len(chosen) // experts + (i < len(chosen) % experts) for i in range(experts)]
    return torch.bincount(chosen, minlength=experts).tolist()


ALL_EXPERTS_FUNCTIONS.register(SORTED, sorted_experts)
