"""Memory bandwidth: within the device, and between host and device."""

from typing import Any

import torch

from rocm_ext.bench.clock import measure as timed
from rocm_ext.bench.context import Bench

_SIZE = {"cuda": 512 * 2**20, "cpu": 64 * 2**20}  # bytes, well above the caches


def measure(bench: Bench, values: dict[str, Any]) -> dict[str, Any]:
    """Bytes per second. A device copy counts each byte twice, read and written; a transfer counts it once."""
    device, size = bench.device, _SIZE[bench.device.type]
    bench.require(2 * size)
    here = torch.zeros(size, dtype=torch.uint8, device=device)
    if values["what"] == "device copy":
        target = torch.empty_like(here)
        return {**timed(lambda: target.copy_(here), device, seconds=bench.spec.seconds).rate(2 * size), "unit": "B/s"}
    up, down = (torch.zeros(size, dtype=torch.uint8, pin_memory=values["pinned"]) for _ in range(2))
    received = torch.empty_like(here)
    side = torch.cuda.Stream(device)

    def to_device() -> None:
        received.copy_(up, non_blocking=True)

    def to_host() -> None:
        with torch.cuda.stream(side):
            down.copy_(here, non_blocking=True)

    def both() -> None:
        to_device()
        to_host()

    work, moved = {
        "host to device": (to_device, size),
        "device to host": (to_host, size),
        "both ways": (both, 2 * size),
    }[values["what"]]
    return {**timed(work, device, seconds=bench.spec.seconds).rate(moved), "unit": "B/s"}
