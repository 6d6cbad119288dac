"""Causal attention, forward and backward, at the model's heads, with each kernel."""

import warnings
from typing import Any

import torch

from rocm_ext.base.errors import UserError
from rocm_ext.bench.clock import measure as timed
from rocm_ext.bench.context import Bench, Skipped
from rocm_ext.model.sdpa import sdpa


def measure(bench: Bench, values: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second."""
    model, tokens = bench.shape, values["tokens"]
    bench.require(model.num_heads * tokens * (12 * tokens + 40 * model.head_dim))
    shape = (1, model.num_heads, tokens, model.head_dim)
    q, k, v = (torch.randn(shape, device=bench.device).to(bench.dtype).requires_grad_() for _ in range(3))
    grad = torch.randn_like(q)

    def work() -> None:
        torch.autograd.grad(sdpa(q, k, v, values["backend"]), (q, k, v), grad)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once for each reason that a kernel cannot run
        try:
            work()
        except UserError as error:
            raise Skipped(str(error)) from error
        times = timed(work, bench.device, seconds=bench.spec.seconds)
    return {**times.rate(tokens), "unit": "tokens/s", "heads": model.num_heads, "head_dim": model.head_dim}
