"""Matrix products of the model's feed-forward layer, and copies within the device."""

from typing import Any

import torch

from rocm_ext.bench.clock import measure
from rocm_ext.bench.context import Bench
from rocm_ext.machine.numerics import DTYPES

_TOKENS = {"cuda": 4096, "cpu": 512}
_COPIED = {"cuda": 512 * 2**20, "cpu": 64 * 2**20}  # bytes, well above the caches


def gemm(bench: Bench, values: dict[str, Any]) -> dict[str, Any]:
    """FLOP/s of x Wᵀ (``forward``), g W (``dgrad``) or gᵀ x (``wgrad``)."""
    mlp: Any = bench.shape.layers[0].mlp  # type: ignore[union-attr, index]
    wide, width = mlp.w1.weight.shape
    tokens, dtype = _TOKENS[bench.device.type], DTYPES[values["dtype"]]
    bench.require((tokens * (wide + width) + wide * width) * dtype.itemsize * 2)
    x, g, w = (
        torch.randn(shape, device=bench.device).to(dtype) for shape in ((tokens, width), (tokens, wide), (wide, width))
    )
    work = {"forward": lambda: x @ w.T, "dgrad": lambda: g @ w, "wgrad": lambda: g.T @ x}[values["direction"]]
    times = measure(work, bench.device, seconds=bench.spec.seconds)
    return {**times.rate(2 * tokens * wide * width), "unit": "FLOP/s", "shape": [tokens, width, wide]}


def bandwidth(bench: Bench, values: dict[str, Any]) -> dict[str, Any]:
    """Bytes per second of a copy within the device, which reads and writes each byte."""
    size = _COPIED[bench.device.type]
    bench.require(2 * size)
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    times = measure(lambda: target.copy_(source), bench.device, seconds=bench.spec.seconds)
    return {**times.rate(2 * size), "unit": "B/s"}
