"""Real optimiser steps of the config's model with random weights, by rows computed at once and by settings."""

import gc
from collections.abc import Iterator, Mapping
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from rocm_ext.base.errors import UserError
from rocm_ext.base.log import log
from rocm_ext.bench.clock import measure as timed
from rocm_ext.bench.context import Bench, Skipped
from rocm_ext.data.batches import Update
from rocm_ext.data.rows import Rows
from rocm_ext.model.build import Weights
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.lora import plain
from rocm_ext.plan import workload
from rocm_ext.plan.costs import CostCounter
from rocm_ext.plan.memory import readable
from rocm_ext.plan.planner import dtype_name
from rocm_ext.train.learner import Learner
from rocm_ext.train.lifecycle import Runtime
from rocm_ext.train.output_dir import OutputDir
from rocm_ext.train.trainer import Trainer

_LONGEST = 2048  # tokens of a row, unless the config says less


class RandomWeights(Mapping[str, Tensor]):
    """Random weights, drawn at each access.

    Args:
        decoder: the model whose names and shapes they have.
        device: device that holds them.
    """

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        shapes: dict[str, Tensor] = {name: p for name, p in decoder.named_parameters() if not p.requires_grad}
        shapes |= decoder.buffers_to_load()
        self._shapes = {plain(name): shape for name, shape in shapes.items()}  # as checkpoints name them
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        like = self._shapes[name]
        return torch.empty(like.shape, dtype=like.dtype, device=self._device).normal_(std=0.02)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class ProbeLearner(Learner):
    """The recipe's model with random weights.

    Args:
        cfg: config of the SFT recipe.
        runtime: what to compute on.
        budget: bytes that a step may take.
    """

    def __init__(self, cfg: DictConfig, runtime: Runtime, budget: int) -> None:
        super().__init__(cfg, runtime, tokenizer=None)
        self._budget = budget

    def read_weights(self) -> Weights:
        """Random ones, if a step fits into the budget."""
        if self.planned_peak > self._budget:
            raise Skipped(f"would take {readable(self.planned_peak)}, the budget is {readable(self._budget)}")
        return Weights(RandomWeights(self.decoder, self.runtime.device), "random")


def random_rows(count: int, shortest: int, longest: int, vocabulary: int) -> Rows:
    """Rows of random tokens, all of them trained on, of lengths from ``shortest`` to ``longest``."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(shortest, longest + 1, count)
    tokens = [rng.integers(0, vocabulary, length, dtype=np.int32) for length in lengths]
    return Rows(tokens, tokens, [(int(length),) for length in lengths], {})


def longest_row(cfg: DictConfig) -> int:
    """Tokens of the rows that are trained on."""
    return min(cfg.tokenizer.get("max_seq_len") or _LONGEST, _LONGEST)


def measure(bench: Bench, values: dict[str, Any]) -> dict[str, Any]:
    """Real tokens per second, forward to optimiser; and the peak of memory."""
    log.disabled = True
    cfg = probe_config(bench.cfg, values, list(bench.profile.locked))
    runtime = Runtime.open(cfg)
    try:
        with TemporaryDirectory() as folder:
            cfg.output_dir = folder
            return _measure(_trainer(cfg, runtime, values["rows"], bench.spec.budget), bench.spec.seconds)
    except UserError as error:
        if "attention" in values:  # a kernel that this machine does not have
            raise Skipped(str(error)) from error
        raise
    finally:
        runtime.ranks.close()
        gc.collect()  # a compiled model is in cycles


def _trainer(cfg: DictConfig, runtime: Runtime, count: int, budget: int) -> Trainer:
    """The recipe's trainer over one step of random rows."""
    longest = longest_row(cfg)
    rows = random_rows(count, longest, longest, 256)
    learner = ProbeLearner(cfg, runtime, budget)
    learner.setup(workload.describe(rows, count, "random"))
    trainer = Trainer(learner, rows, cfg, OutputDir.open(cfg, runtime.ranks))
    trainer.open()
    return trainer


def _measure(trainer: Trainer, seconds: float) -> dict[str, Any]:
    (update,) = trainer.loader.range(0, 1)
    learner, device = trainer.learner, trainer.runtime.device
    learner.model.train()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = timed(lambda: trainer.train_step(update), device, seconds=2 * seconds, least=3)
    return {
        **times.rate(sum(batch.real_tokens for batch in update.batches)),
        "unit": "tokens/s",
        "seconds": times.median,
        "peak_memory": _peak(trainer, update),
        "planned_memory": learner.planned_peak,
        "dtype": dtype_name(trainer.runtime.dtype),
        "checkpointed": sum(hasattr(layer, "_checkpoint_wrapped_module") for layer in learner.decoder.layers),
    }


def probe_config(cfg: DictConfig, values: Mapping[str, Any], insist: list[str]) -> DictConfig:
    """``cfg`` for steps of ``values["rows"]`` rows at once; the other ``values`` are keys of it."""
    changes: dict[str, Any] = {
        "sequences_per_step": values["rows"],
        "gradient_accumulation_steps": None,
        "batch_size": values["rows"],
        "tokens_per_micro_batch": None,
        "max_steps_per_epoch": None,
        "epochs": 1,
        "seed": 0,
        "lr_scheduler": None,
        "resume_from_checkpoint": False,
        "overwrite_output_dir": True,
        "hardware_overrides": insist,
        "startup_checks": False,
        "metric_logger": None,
        "profiler": None,
        "profile_steps": None,
        **{key: value for key, value in values.items() if key != "rows"},
    }
    changed = OmegaConf.create({**OmegaConf.to_container(cfg), **changes})  # type: ignore[dict-item]
    changed.checkpointer.pop("adapter_checkpoint", None)
    return changed


def _peak(trainer: Trainer, update: Update) -> int:
    if trainer.runtime.device.type == "cuda":
        return torch.cuda.max_memory_allocated(trainer.runtime.device)
    decoder = trainer.learner.decoder
    tensors = [*decoder.parameters(), *decoder.buffers()]
    state = [t for each in trainer.optimizer.state.values() for t in each.values() if isinstance(t, Tensor)]
    tally = CostCounter()
    tally.ignore([*tensors, *state])
    with tally:
        trainer.train_step(update)
    return tally.peak + sum(t.nbytes for t in {id(t): t for t in (*tensors, *state)}.values())
