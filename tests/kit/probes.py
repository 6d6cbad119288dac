"""Probes that misbehave like a broken driver, kernel or library."""

import os
import signal
import sys
import time
from typing import Any

import torch


def measure(bench: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Misbehave in the way that ``values["how"]`` names."""
    how = values["how"]
    if how == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "exit":
        print("the driver is gone", file=sys.stderr)
        os._exit(3)
    if how == "hang":
        time.sleep(600)
    if how == "raise":
        raise RuntimeError("HIP error: invalid device function\nCompile with TORCH_USE_HIP_DSA")
    if how == "out of memory":
        raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB")
    if how == "noise":
        print("rocBLAS: a library that talks\n{}", flush=True)
    if how == "environment":
        return {"value": float(os.environ["PROBED"]), "low": 1.0, "high": 3.0, "unit": "B/s"}
    return {"value": 2.0, "low": 1.0, "high": 3.0, "unit": "B/s"}
