"""The child process of ``rocm-ext bench``: it reads a spec and then items, as lines of JSON, and answers the items."""

import json
import sys
from typing import Any

import torch

from rocm_ext.base.errors import UserError
from rocm_ext.base.process import end_with_parent
from rocm_ext.bench.probes import Bench, measure
from rocm_ext.bench.sweep import MARK, Item, Spec


def say(**values: Any) -> None:
    """Send a line to the parent."""
    print(f"\n{MARK}{json.dumps(values)}", flush=True)  # a library may not have ended its line


def main() -> None:
    """Read the spec from stdin, then items, and answer them one by one."""
    try:
        bench = Bench(Spec(**json.loads(sys.stdin.readline())))
    except UserError as error:
        say(error=str(error))
        return
    say(ready=True)
    for line in iter(sys.stdin.readline, ""):
        say(**measure(bench, Item(**json.loads(line))))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    end_with_parent()  # a measurement takes minutes
    main()
