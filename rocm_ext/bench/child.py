"""A child process of ``rocm-ext bench``: reads a job from stdin, writes a line for each measurement.

python -m rocm_ext.bench.child < job.json
"""

import json
import sys
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune.modules import TransformerDecoder

from rocm_ext import config, device, model, precision
from rocm_ext.attention import use_packed_attention
from rocm_ext.bench.spec import PROBES, Spec
from rocm_ext.errors import UserError, one_line
from rocm_ext.machine import detect

MARK = "rocm-ext-bench "  # in front of every line that is ours: libraries print to stdout too


class Skipped(Exception):
    """There is a reason not to measure this here."""


class Bench:
    """What the probes of one child share.

    Args:
        spec: what the user asked for.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.machine = detect()
        self.cfg = trainer_config(config.load(spec.recipe, spec.config, list(spec.overrides)))
        self.profile = device.load_profile(self.cfg.hardware)
        self.device = device.open_device(self.profile, self.machine, 0, self._fraction(), self.cfg.device)
        self.dtype, _ = precision.pick_dtype(self.cfg.dtype, self.machine)

    def _fraction(self) -> float | None:
        """The cap that keeps the process within its budget, should a probe have reckoned wrongly."""
        if self.cfg.device == "cpu" or self.machine.unified:  # unified memory is capped anyway
            return None
        return min(1.0, self.spec.budget / self.machine.total_memory)

    @cached_property
    def shape(self) -> TransformerDecoder:
        """The config's model without weights."""
        decoder = model.build(self.cfg.model, self.dtype, 0, torch.device("meta"))
        use_packed_attention(decoder)
        return decoder

    def require(self, needed: int) -> None:
        """Skip what would take more than the budget."""
        if needed > self.spec.budget:
            raise Skipped(f"needs {needed / 2**30:.1f} GiB, the budget is {self.spec.budget / 2**30:.1f} GiB")


def trainer_config(cfg: DictConfig) -> DictConfig:
    """The keys of the SFT recipe in a config of either, without what needs files."""
    whole: Any = OmegaConf.to_container(cfg)
    kept = {key: whole.get(key, default) for key, default in config.defaults("lora_finetune_rocm").items()}
    return OmegaConf.create(kept | {"dataset": None, "dataset_val": None})


def measure(bench: Bench, item: dict[str, Any]) -> dict[str, Any]:
    """One measurement: ``status`` and, as that has it, ``result`` or ``detail``."""
    name = item["probe"]
    probe = import_module(f"rocm_ext.bench.{name}" if name in PROBES else name)
    try:
        return {"status": "ok", "result": probe.measure(bench, item["values"])}
    except Skipped as reason:
        return {"status": "skipped", "detail": str(reason)}
    except torch.OutOfMemoryError as error:
        return {"status": "out of memory", "detail": one_line(error)[:200]}
    except (RuntimeError, NotImplementedError, UserError, ValueError) as error:
        return {"status": "failed", "detail": one_line(error)[:200]}


def say(**values: Any) -> None:
    """Tell the parent."""
    print(MARK + json.dumps(values), flush=True)


def main() -> None:
    """Measure what stdin asks for."""
    job = json.load(sys.stdin)
    spec = Spec(**{**job["spec"], "overrides": tuple(job["spec"]["overrides"])})
    try:
        bench = Bench(spec)
    except UserError as error:
        say(error=str(error))
        return
    for index, item in job["items"]:
        say(begin=index)
        say(index=index, **measure(bench, item))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
