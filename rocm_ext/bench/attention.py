"""Causal attention, forward and backward, at the model's heads: torch's kernels against plain matrix products."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rocm_ext.bench.clock import measure as timed
from rocm_ext.bench.context import Bench, Skipped

_KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


def measure(bench: Bench, values: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second."""
    model, tokens = bench.shape, values["tokens"]
    bench.require(model.num_heads * tokens * (12 * tokens + 40 * model.head_dim))
    shape = (1, model.num_heads, tokens, model.head_dim)
    q, k, v = (torch.randn(shape, device=bench.device).to(bench.dtype).requires_grad_() for _ in range(3))
    grad = torch.randn_like(q)

    def attend() -> Tensor:
        if values["backend"] == "eager":
            return _eager(q, k, v)
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def work() -> None:
        torch.autograd.grad(attend(), (q, k, v), grad)

    with sdpa_kernel(_KERNELS.get(values["backend"], SDPBackend.MATH)), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once for each reason that a kernel cannot run
        try:
            work()
        except RuntimeError as error:
            if "No available kernel" in str(error):
                raise Skipped(
                    f"no {values['backend']} kernel for head_dim {model.head_dim} in {bench.dtype}"
                ) from error
            raise
        times = timed(work, bench.device, seconds=bench.spec.seconds)
    return {**times.rate(tokens), "unit": "tokens/s", "heads": model.num_heads, "head_dim": model.head_dim}


def _eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    return scores.softmax(dim=-1) @ v
