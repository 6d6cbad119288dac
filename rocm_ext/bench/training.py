"""Real optimiser steps of the config's model with random weights, by rows computed at once."""

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from rocm_ext.bench.clock import measure as timed
from rocm_ext.bench.context import Bench, Skipped
from rocm_ext.bench.loader import random_rows
from rocm_ext.errors import UserError
from rocm_ext.log import log
from rocm_ext.model.build import Weights
from rocm_ext.plan import workload
from rocm_ext.plan.costs import Tally
from rocm_ext.plan.memory import readable
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune

_LONGEST = 2048  # tokens of a row, unless the config says less


class RandomWeights(Mapping[str, Tensor]):
    """Weights that are drawn when they are asked for.

    Args:
        decoder: says which, and of which shape.
        device: where they are made.
    """

    def __init__(self, decoder: torch.nn.Module, device: torch.device) -> None:
        self._shapes = {name: p for name, p in decoder.named_parameters() if not p.requires_grad}
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        like = self._shapes[name]
        return torch.empty(like.shape, dtype=like.dtype, device=self._device).normal_(std=0.02)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class ProbeTrainer(LoRAFinetune):
    """The recipe without files: random rows, random weights, no outputs.

    Args:
        cfg: of the SFT recipe.
        rows: of a step.
        budget: bytes that a step may take.
    """

    def __init__(self, cfg: DictConfig, rows: int, budget: int) -> None:
        super().__init__(cfg)
        self._count, self._budget = rows, budget

    def setup(self) -> None:
        """See :meth:`LoRAFinetune.setup`."""
        self._setup_machine()
        self.tokenizer, self.longest = None, longest_row(self.cfg)
        self.rows = random_rows(self._count, self.longest, self.longest, 256)
        self._setup_model()
        self._setup_activations(workload.describe(self.rows, self._count, "random"))
        self._setup_weights()
        self._setup_loaders()
        self._setup_optimizer()
        self.scheduler = None

    def _read_weights(self) -> Weights:
        return Weights(RandomWeights(self.decoder, self.device), "random")

    def _setup_activations(self, rows: workload.Workload) -> None:
        super()._setup_activations(rows)
        if self.planned_peak > self._budget:
            raise Skipped(f"would take {readable(self.planned_peak)}, the budget is {readable(self._budget)}")


def longest_row(cfg: DictConfig) -> int:
    """Tokens of the rows that are trained on."""
    return min(cfg.tokenizer.get("max_seq_len") or _LONGEST, _LONGEST)


def measure(bench: Bench, values: dict[str, Any]) -> dict[str, Any]:
    """Real tokens per second, forward to optimiser; and the peak of memory."""
    log.disabled = True
    cfg = probe_config(bench.cfg, values, list(bench.profile.locked))
    trainer = ProbeTrainer(cfg, values["rows"], bench.spec.budget)
    try:
        trainer.setup()
        return _measure(trainer, bench.spec.seconds)
    except UserError as error:
        if values["base"] == "4-bit":  # a builder without it, or sizes that it cannot have
            raise Skipped(str(error)) from error
        raise
    finally:
        if hasattr(trainer, "ranks"):
            trainer.cleanup()
        gc.collect()  # a compiled model is in cycles


def _measure(trainer: ProbeTrainer, seconds: float) -> dict[str, Any]:
    (batches,) = trainer.loader.range(0, 1)
    trainer.model.train()
    if trainer.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(trainer.device)
    times = timed(lambda: trainer.train_step(batches), trainer.device, seconds=2 * seconds, least=3)
    return {
        **times.rate(sum(batch.real_tokens for batch in batches)),
        "unit": "tokens/s",
        "seconds": times.median,
        "peak_memory": _peak(trainer, batches),
        "planned_memory": trainer.planned_peak,
        "checkpointed": sum(hasattr(layer, "_checkpoint_wrapped_module") for layer in trainer.decoder.layers),
    }


def probe_config(cfg: DictConfig, values: Mapping[str, Any], insist: list[str]) -> DictConfig:
    """``cfg`` for steps of ``values["rows"]`` rows at once, compiled or not, over the base it has or a 4-bit one."""
    changes: dict[str, Any] = {
        "sequences_per_step": values["rows"], "gradient_accumulation_steps": None, "batch_size": values["rows"],
        "tokens_per_micro_batch": None, "max_steps_per_epoch": None, "epochs": 1, "seed": 0,
        "compile": values["compile"], "hardware_overrides": insist, "startup_checks": False, "metric_logger": None,
    }  # fmt: skip
    changed = OmegaConf.create({**OmegaConf.to_container(cfg), **changes})  # type: ignore[dict-item]
    changed.checkpointer.pop("adapter_checkpoint", None)
    if values["base"] == "4-bit":
        changed.model.quantize_base = True
    return changed


def _peak(trainer: ProbeTrainer, batches: list) -> int:
    if trainer.device.type == "cuda":
        return torch.cuda.max_memory_allocated(trainer.device)
    tensors = [*trainer.decoder.parameters(), *trainer.decoder.buffers()]
    state = [t for each in trainer.optimizer.state.values() for t in each.values() if isinstance(t, Tensor)]
    tally = Tally()
    tally.ignore([*tensors, *state])
    with tally:
        trainer.train_step(batches)
    return tally.peak + sum(t.nbytes for t in {id(t): t for t in (*tensors, *state)}.values())
