"""The child process of ``rocm-ext bench``: it reads lines of JSON, a spec and then items, and answers each item."""

import json
import sys
from typing import Any

import torch

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.bench import decoding, device, training
from rocm_ext.bench.context import Bench, Skipped
from rocm_ext.bench.sweep import MARK, Spec

PROBES = {
    "gemm": device.gemm,
    "bandwidth": device.bandwidth,
    "training": training.measure,
    "decoding": decoding.measure,
}


def measure(bench: Bench, item: dict[str, Any]) -> dict[str, Any]:
    """Measure one item: the status with its result, or with the detail of what went wrong."""
    try:
        return {"status": "ok", "result": PROBES[item["probe"]](bench, item["values"])}
    except Skipped as reason:
        return {"status": "skipped", "detail": str(reason)}
    except torch.OutOfMemoryError as error:
        return {"status": "out of memory", "detail": one_line(error)[:200]}
    except Exception as error:  # anything that a driver, kernel or library raises
        return {"status": "failed", "detail": one_line(error)[:200]}


def say(**values: Any) -> None:
    """Send a line to the parent."""
    print(f"\n{MARK}{json.dumps(values)}", flush=True)  # a library may not have ended its line


def main() -> None:
    """Read the spec from stdin, then items, and answer each at once."""
    given = json.loads(sys.stdin.readline())
    spec = Spec(**{**given, "overrides": tuple(given["overrides"])})
    try:
        bench = Bench(spec)
    except UserError as error:
        say(error=str(error))
        return
    say(ready=True)
    for line in iter(sys.stdin.readline, ""):
        say(**measure(bench, json.loads(line)))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
