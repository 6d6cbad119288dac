"""LoRA supervised fine-tuning on 1…N ranks.

    tune run lora_finetune_rocm --config strix_halo_qwen7b
    tune run --nproc_per_node 8 lora_finetune_rocm --config mi300x_qwen72b

``LoRAFinetune.setup`` is the table of contents. To change a part, subclass and override its ``_setup_*``.
"""

import contextlib
import json
import math
import os
import random
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import training

from rocm_ext import config
from rocm_ext.config.checks import check_max_seq_len, check_values
from rocm_ext.data.batches import Batch, StepLoader, Steps, micro_batch_budget, rows_per_step, width_multiple
from rocm_ext.data.rows import Rows, open_dataset, tokenize
from rocm_ext.errors import UserError
from rocm_ext.files import replace_folder, replace_text
from rocm_ext.hardware import numerics
from rocm_ext.hardware.budget import memory_budget, open_device
from rocm_ext.hardware.counter_log import recording
from rocm_ext.hardware.machine import detect
from rocm_ext.hardware.profile import check_locked, check_profile, load_profile
from rocm_ext.log import Progress, duration, log
from rocm_ext.model import adapter_files
from rocm_ext.model.attention import use_packed_attention
from rocm_ext.model.build import (
    CausalLM,
    Weights,
    build_model,
    check_quantized,
    load_adapter,
    load_weights,
    read_weights,
)
from rocm_ext.model.lora import adapter_parameters
from rocm_ext.objectives.loss import from_config
from rocm_ext.plan import checkpointing, workload
from rocm_ext.plan.costs import Kernels
from rocm_ext.plan.planner import TrainingPlanner
from rocm_ext.plan.speeds import figures_for
from rocm_ext.ranks import Ranks, local_rank, local_world_size
from rocm_ext.train.checkpoint import check_same_run, rng_state, set_rng_state
from rocm_ext.train.interrupt import Interrupt
from rocm_ext.train.metrics import peak_memory, summarize
from rocm_ext.train.output_dir import OutputDir


@dataclass(frozen=True)
class StepStats:
    """What one optimiser step did, over all ranks.

    Attributes:
        loss: mean NLL of the step's labels.
        grad_norm: of the adapters, before clipping.
        lr: that the step used.
        tokens: real ones, computed.
        padding: share of computed tokens that were not real.
        interrupted: whether some rank was asked to stop.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    padding: float
    interrupted: bool


class LoRAFinetune:
    """Fine-tunes LoRA or DoRA adapters of a torchtune model.

    Args:
        cfg: what :func:`rocm_ext.config.load` returns for ``lora_finetune_rocm``.
    """

    def __init__(self, cfg: DictConfig) -> None:
        check_values(cfg)
        self.cfg = cfg
        self.rows: Any = None  # Rows, the config's or, in RAFT, a cycle's
        self.validation_rows: Rows | None = None
        self.step = 0  # optimiser steps done; everything about progress derives from it
        self.best: dict[str, Any] | None = None  # of the validations so far: loss, step, adapter
        self.worse = 0  # validations since then
        self.metric_logger: Any = None
        self.steps_before = 0  # of earlier runs with this model: RAFT's cycles
        self.interrupt = Interrupt()

    def setup(self) -> None:
        """Everything that can fail for the user's reasons, the cheap parts first."""
        self._setup_machine()
        self._setup_output_dir()
        self._setup_tokenizer()
        self._setup_data()
        self._setup_model()
        self._setup_activations(workload.describe(self.rows, len(self.rows), "the run's rows"))
        self._setup_weights()
        self._setup_run()

    def start(self, cfg: DictConfig, rows: Rows, steps_before: int) -> None:
        """Begin another run with the model as it is now; then :meth:`train`.

        Args:
            cfg: its keys for machine, model and data have had their say.
            rows: to train on.
            steps_before: of earlier runs, which loggers count too.
        """
        self.cfg, self.rows, self.steps_before = cfg, rows, steps_before
        self.step, self.best, self.worse = 0, None, 0
        self._setup_output_dir()
        self._setup_run()

    def _setup_run(self) -> None:
        """What belongs to one run over ``rows``: a RAFT cycle is one, and there are many with one model."""
        self._setup_loaders()
        self._setup_optimizer()
        self._setup_scheduler()
        self._setup_logging()
        self._resume()

    def _setup_machine(self) -> None:
        cfg = self.cfg
        self.profile, self.machine = load_profile(cfg.hardware), detect()
        warnings = check_profile(self.profile, self.machine, local_world_size())
        settings = OmegaConf.to_container(cfg)
        warnings += check_locked(self.profile, settings, list(cfg.hardware_overrides))  # type: ignore[arg-type]
        self.dtype, why = numerics.pick_dtype(cfg.dtype, self.machine)
        self.device = open_device(self.profile, self.machine, local_rank(), cfg.memory_fraction, cfg.device)
        self.ranks = Ranks.from_env(self.device)
        self._warn(warnings)
        log.info("hardware %s: %s", self.profile.name, self.machine)
        log.info("dtype %s (%s)", self.dtype, why)

    @staticmethod
    def _warn(lines: list[str]) -> None:
        for line in lines:
            log.warning("%s", line)

    def _setup_output_dir(self) -> None:
        cfg, resume = self.cfg, self.cfg.resume_from_checkpoint
        self.output_dir = OutputDir(
            Path(cfg.output_dir), keep=cfg.keep_last_n_checkpoints, resume=resume, overwrite=cfg.overwrite_output_dir
        )
        self.output_dir.check()
        self.checkpoints = self.output_dir.checkpoints
        self._resumed = self.checkpoints.newest() if resume else None
        # the run's seed: the config's, else the one it began with, else a new one, the same on all ranks
        saved = self._resumed[1]["config"]["seed"] if self._resumed else None
        seed = next(s for s in (cfg.seed, saved, random.SystemRandom().randrange(2**31)) if s is not None)
        cfg.seed = self.ranks.agree(seed)
        training.set_seed(seed=cfg.seed, debug_mode=cfg.cudnn_deterministic_mode)
        if self.ranks.is_main:
            self.output_dir.create()

    def _setup_tokenizer(self) -> None:
        self.tokenizer = config.instantiate(self.cfg.tokenizer, key="tokenizer")
        check_max_seq_len(getattr(self.tokenizer, "max_seq_len", None))

    def _setup_data(self) -> None:
        cfg = self.cfg
        rows = self._rows(cfg.dataset, "dataset")
        if cfg.dataset_val is not None and cfg.validation_fraction:
            raise UserError("dataset_val and validation_fraction are both set; keep one of them")
        validation = self._rows(cfg.dataset_val, "dataset_val") if cfg.dataset_val is not None else None
        if cfg.validation_fraction:
            rows, validation = rows.split(cfg.validation_fraction, cfg.data_seed)
        if cfg.early_stopping_patience and validation is None:
            raise UserError("early_stopping_patience needs validation rows: set dataset_val or validation_fraction")
        self.rows, self.validation_rows = rows, validation

    def _rows(self, node: Any, key: str) -> Rows:
        rows = tokenize(
            open_dataset(node, self.tokenizer, self.cfg.too_long),
            max_seq_len=getattr(self.tokenizer, "max_seq_len", None),
            too_long=self.cfg.too_long,
            progress=self.ranks.is_main and os.isatty(2),
        )
        log.info("%s: %s", key, ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in rows.counts.items()))
        return rows

    def _setup_model(self) -> None:
        cfg = self.cfg
        adapter_files.check_model_type(cfg.checkpointer.model_type)
        self.decoder = decoder = build_model(cfg.model, self.dtype, cfg.seed, self.device)
        self.adapter = adapter_parameters(decoder)
        self._warn(check_quantized(decoder, self.profile, list(cfg.hardware_overrides), self.ranks.world))
        for rows in filter(None, (self.rows, self.validation_rows)):
            rows.check_vocabulary(decoder.tok_embeddings.num_embeddings)
        if cfg.startup_checks:
            checks = numerics.canaries(self.machine, self.device, self.dtype, decoder.head_dim, decoder.num_heads)
            self._warn(numerics.require(checks))
        self.packed = use_packed_attention(decoder)
        self.loss = from_config(config.instantiate(cfg.loss, key="loss"))

    def _setup_activations(self, rows: workload.Workload) -> None:
        cfg = self.cfg
        budget, _ = memory_budget(self.profile, self.machine)
        planner = TrainingPlanner(
            cfg,
            self.decoder,
            self.loss,
            self.dtype,
            self.device,
            rows=rows,
            ranks=self.ranks.world,
            figures=partial(figures_for, self.profile, self.machine),
            kernels=Kernels.on(self.device, self.machine.bf16),
        )
        if cfg.tokens_per_micro_batch == "auto":
            self.tokens_per_micro_batch = self.ranks.agree(planner.fit(budget).micro_batch)
            log.info("micro-batches: %s tokens, by the plan", f"{self.tokens_per_micro_batch:,}")
        else:
            self.tokens_per_micro_batch = micro_batch_budget(rows.longest, cfg.batch_size, cfg.tokens_per_micro_batch)
        plan = planner.memory(self.tokens_per_micro_batch)
        chosen = checkpointing.checkpointed_layers(cfg.enable_activation_checkpointing, plan, budget)
        layers, why = self.ranks.agree(chosen)  # free host memory may differ
        self.planned_peak = plan.peak(layers)
        checkpointing.apply_checkpointing(self.decoder, layers)
        log.info("activation checkpointing: %d of %d layers (%s)", len(layers), plan.layers, why)
        self.offloading: Any = contextlib.nullcontext()
        if cfg.enable_activation_offloading:
            if self.device.type != "cuda":
                raise UserError("enable_activation_offloading needs a GPU; activations are in host memory already")
            self.offloading = training.get_act_offloading_ctx_manager(self.decoder, True)

    def _setup_weights(self) -> None:
        cfg, decoder = self.cfg, self.decoder
        if cfg.compile:
            for layer in decoder.layers:
                layer.compile(dynamic=True)
        weights = self._read_weights()
        self.base_fingerprint = weights.fingerprint()
        self.model = CausalLM(decoder, self.loss)
        self.ranks.shard(decoder.layers, self.model, set(self.adapter.values()))
        load_weights(decoder, weights, self.ranks)
        if source := cfg.checkpointer.get("adapter_checkpoint"):
            load_adapter(decoder, adapter_files.read_adapter(Path(source), decoder, weights.model_type), source)
        trainable = sum(p.numel() for p in self.adapter.values())
        total = sum(p.numel() for p in decoder.parameters())
        log.info("model: %s parameters, %s trainable", f"{total:,}", f"{trainable:,}")

    def _read_weights(self) -> Weights:
        return read_weights(self.cfg.checkpointer)

    def _setup_loaders(self) -> None:
        cfg, per_step = self.cfg, self.rows_per_step
        steps = Steps(len(self.rows), per_step, cfg.max_steps_per_epoch, cfg.data_seed, cfg.shuffle)
        self.loader = self._loader(self.rows, steps)
        self.total_steps = steps.per_epoch * cfg.epochs
        self.validation_loader = None
        if self.validation_rows is not None:
            once = Steps(len(self.validation_rows), per_step, shuffle=False)
            self.validation_loader = self._loader(self.validation_rows, once)
        log.info("%s rows, %d a step, %d steps an epoch", f"{len(self.rows):,}", per_step, steps.per_epoch)

    @property
    def rows_per_step(self) -> int:
        """Rows that an optimiser step sees, over all ranks."""
        return rows_per_step(self.cfg, self.ranks.world)

    def _loader(self, rows: Rows, steps: Steps) -> StepLoader:
        return StepLoader(
            rows,
            steps,
            rank=self.ranks.rank,
            ranks=self.ranks.world,
            tokens_per_micro_batch=self.tokens_per_micro_batch,
            packed=self.packed,
            pad_id=getattr(self.tokenizer, "pad_id", 0) or 0,
            multiple=width_multiple(self.cfg.compile, self.device, self.dtype),
            num_workers=self.cfg.num_workers,
            pin_memory=self.cfg.pin_memory,
        )

    def _setup_optimizer(self) -> None:
        self.optimizer = config.instantiate(self.cfg.optimizer, list(self.adapter.values()), key="optimizer")
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)

    def _setup_scheduler(self) -> None:
        node, self.scheduler = self.cfg.lr_scheduler, None
        if node is not None:
            length = {"num_training_steps": self.total_steps}  # torchtune's want it, torch's do not know it
            wanted = length if config.takes(node, "num_training_steps", key="lr_scheduler") else {}
            self.scheduler = config.instantiate(node, self.optimizer, key="lr_scheduler", **wanted)

    def _setup_logging(self) -> None:
        cfg = self.cfg
        if self.ranks.is_main and cfg.metric_logger is not None and self.metric_logger is None:
            self.metric_logger = config.instantiate(cfg.metric_logger, key="metric_logger")
        profiler = OmegaConf.create({config.COMPONENT: "torchtune.training.setup_torch_profiler", "enabled": False})
        profiler.update(cfg.profiler or {})
        self.profiler, _ = config.instantiate(profiler, key="profiler")

    def _resume(self) -> None:
        self._identity = self._find_identity()
        if self._resumed is not None:
            path, state = self._resumed
            check_same_run(path, state, self.cfg, self._identity)
            load_adapter(self.decoder, state["adapter"], str(path))
            self.optimizer.load_state_dict(state["optimizer"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
            self.scaler.load_state_dict(state["scaler"])
            self.step, self.best, self.worse = state["step"], state["best"], state["worse"]
            if len(state["rng"]) == self.ranks.world:
                set_rng_state(state["rng"][self.ranks.rank], self.device)
            else:
                log.warning("the run had %d ranks, now %d: dropout differs", len(state["rng"]), self.ranks.world)
            log.info("resumed from %s", path)
            self._resumed = None
        elif self.cfg.resume_from_checkpoint:
            log.info("no checkpoint in %s: starting from the beginning", self.checkpoints.folder)
        self.ranks.barrier()  # every rank has read the checkpoint
        yaml = OmegaConf.to_yaml(self.cfg, resolve=True)
        self.metrics = self.output_dir.take(yaml, self.step) if self.ranks.is_main else None

    def _find_identity(self) -> dict[str, Any]:
        """What a run must have in common with the one it resumes, beside its config."""
        return {
            "base model": self.base_fingerprint,
            "data": self.rows.fingerprint(),
            "validation data": self.validation_rows.fingerprint() if self.validation_rows else None,
            "rows per step": self.loader.steps.per_step,
            "dtype": str(self.dtype),
            "seed": self.cfg.seed,
        }

    def train(self) -> None:
        """Train to the last step, then write the outputs."""
        cfg, per_epoch = self.cfg, self.loader.steps.per_epoch
        progress = Progress(self.total_steps, self.step, self.ranks.is_main)
        self.model.train()
        with self.interrupt, self.profiler as profiler:
            while self.step < self.total_steps and not self._stopped_early():
                end = (self.step // per_epoch + 1) * per_epoch
                began = time.perf_counter()
                for batches in self.loader.range(self.step, end):
                    stats = self.train_step(batches)
                    self.step += 1
                    seconds = time.perf_counter() - began
                    self._log_step(stats, seconds)
                    progress.update(f"loss {stats.loss:.4f}  {stats.tokens / seconds:,.0f} tok/s")
                    profiler.step()
                    if self._due(cfg.run_val_every_n_steps, self.step == end):
                        self.validate()
                    leaving = self.step == end or stats.interrupted or self._stopped_early()
                    if self._due(cfg.save_every_n_steps, False) or leaving:
                        self.save_checkpoint()
                    if stats.interrupted:
                        progress.close()
                        self._leave_interrupted()
                    if self._stopped_early():
                        break
                    began = time.perf_counter()
        progress.close()
        self.write_outputs()

    def _due(self, every: int | None, epoch_end: bool) -> bool:
        return self.step % every == 0 if every else epoch_end

    def train_step(self, batches: list[Batch]) -> StepStats:
        """One optimiser step over this rank's micro-batches of step ``self.step``."""
        parameters = list(self.adapter.values())
        targets = self.loader.count(self.step)  # over all ranks, known before the first forward pass
        nll = torch.zeros((), dtype=torch.float32, device=self.device)
        with self._first_step_checks():
            for batch in batches:
                with self.offloading:
                    loss = self.model(batch.to(self.device))
                self.scaler.scale(loss / targets).backward()
                nll += loss.detach()
        self.ranks.sum_gradients(parameters)
        self.scaler.unscale_(self.optimizer)
        limit = self.cfg.clip_grad_norm
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf if limit is None else float(limit))
        total, real, computed, interrupted = self.ranks.sum(
            [
                nll.item(),
                sum(batch.real_tokens for batch in batches),
                sum(batch.tokens.numel() for batch in batches),
                float(self.interrupt.signum is not None),
            ]
        )
        loss, norm = total / targets, float(grad_norm)
        self._check_finite(loss, norm)
        lr = self.optimizer.param_groups[0]["lr"]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()
        return StepStats(loss, norm, lr, int(real), 1 - real / computed, bool(interrupted))

    @contextlib.contextmanager
    def _first_step_checks(self):
        if self.step or self.dtype == torch.float32:
            yield
            return
        with numerics.dtype_leaks(self.decoder, self.dtype) as leaks:  # the loss around it is fp32 on purpose
            yield
        if leaks:
            log.warning("modules that left %s: %s", self.dtype, ", ".join(leaks[:5]))

    def _check_finite(self, loss: float, grad_norm: float) -> None:
        scaled = self.scaler.is_enabled()  # fp16 gradients overflow now and then: the scaler skips such a step
        if math.isfinite(loss) and (math.isfinite(grad_norm) or (scaled and self.scaler.get_scale() >= 1)):
            return
        rows = self.loader.steps[self.step]
        last = self.checkpoints.steps()
        raise UserError(
            f"step {self.step + 1}: loss {loss}, gradient norm {grad_norm}; nothing was updated. Rows of this step: "
            f"{', '.join(map(str, rows[:32]))}{' …' if len(rows) > 32 else ''}. Lower the learning rate, set "
            "clip_grad_norm, or look at these rows. "
            + (f"The last good checkpoint is {last[-1]}" if last else "There is no checkpoint yet")
        )

    @torch.no_grad()
    def validate(self) -> float | None:
        """Mean NLL of the validation rows, remembered and logged; None where there are none."""
        loader = self.validation_loader
        if loader is None:
            return None
        self.model.eval()
        nll = tokens = 0.0
        for batches in loader.range(0, loader.steps.per_epoch):
            for batch in batches:
                nll += self.model(batch.to(self.device)).item()
                tokens += len(batch.targets)
        self.model.train()
        nll, tokens = self.ranks.sum([nll, tokens])
        loss = nll / tokens
        if not math.isfinite(loss):
            raise UserError(f"step {self.step}: the validation loss is {loss}; lower the learning rate")
        if self.best is None or loss < self.best["loss"]:
            self.best = {"loss": loss, "step": self.step, "adapter": adapter_files.adapter_state(self.decoder)}
            self.worse = 0
        else:
            self.worse += 1
        best = f"best {self.best['loss']:.4f} at step {self.best['step']}"
        log.info("step %d: validation loss %.4f (%s)", self.step, loss, best)
        self._write_metrics(val_loss=loss, val_tokens=int(tokens))
        return loss

    def _stopped_early(self) -> bool:
        patience = self.cfg.early_stopping_patience
        return bool(patience) and self.worse >= patience

    def _log_step(self, stats: StepStats, seconds: float) -> None:
        values: dict[str, Any] = {
            "loss": stats.loss,
            "lr": stats.lr,
            "grad_norm": stats.grad_norm,
            "tokens": stats.tokens,
            "tokens_per_second": stats.tokens / seconds,
            "padding": stats.padding,
            "seconds": seconds,
        }
        if self.cfg.log_peak_memory_stats:
            values["peak_memory"] = peak_memory(self.device)
        self._write_metrics(**values)

    def _write_metrics(self, **values: Any) -> None:
        if self.metrics is not None:
            epoch = (self.step - 1) // self.loader.steps.per_epoch + 1
            self.metrics.write(step=self.step, epoch=epoch, **values)
        if self.metric_logger is not None and self.step % self.cfg.log_every_n_steps == 0:
            self.metric_logger.log_dict(values, step=self.steps_before + self.step)

    def save_checkpoint(self) -> None:
        """Write everything that a resumed run needs, and the adapter as PEFT reads it."""
        rng = self.ranks.gather(rng_state(self.device))
        if self.ranks.is_main:
            state = {
                "step": self.step,
                "adapter": adapter_files.adapter_state(self.decoder),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
                "scaler": self.scaler.state_dict(),
                "rng": rng,
                "best": self.best,
                "worse": self.worse,
                "config": OmegaConf.to_container(self.cfg, resolve=True),
                "identity": self._identity,
            }
            self.checkpoints.save(self.step, state, self._write_adapter)
        self.ranks.barrier()

    def _write_adapter(self, folder: Path) -> None:
        checkpointer = self.cfg.checkpointer
        base = adapter_files.base_model_name(Path(checkpointer.checkpoint_dir))
        adapter_files.write_adapter(folder, self.decoder, checkpointer.model_type, base)

    def write_outputs(self) -> None:
        """Write ``adapter/``, ``merged/`` if asked for, and ``summary.json``."""
        cfg, out = self.cfg, self.output_dir.path
        early = cfg.early_stopping_patience and self.best is not None
        if early:
            load_adapter(self.decoder, self.best["adapter"], "best")  # type: ignore[index]
        if self.ranks.is_main:
            with replace_folder(out / "adapter") as folder:
                self._write_adapter(folder)
            log.info("adapter: %s", out / "adapter")
            if not cfg.save_adapter_weights_only:
                adapter_files.merge(cfg.checkpointer, out / "adapter", out / "merged")
            replace_text(out / "summary.json", json.dumps(self._summary(bool(early)), indent=2) + "\n")
        self.ranks.barrier()

    def _summary(self, early: bool) -> dict[str, Any]:
        return {
            **summarize(self.output_dir.path / "metrics.jsonl"),
            "rows": self.rows.counts,
            "best_validation": {k: self.best[k] for k in ("loss", "step")} if self.best else None,
            "adapter_is": "best by validation loss" if early else "last",
            "peak_memory": peak_memory(self.device),
            "planned_memory": self.planned_peak,
            "machine": str(self.machine),
            "dtype": str(self.dtype).removeprefix("torch."),
            "ranks": self.ranks.world,
        }

    def _leave_interrupted(self) -> None:
        self.leave(f"at step {self.step}", max(s or 0 for s in self.ranks.gather(self.interrupt.signum)))

    def leave(self, where: str, signum: int) -> None:
        """Stop ``where`` a signal asked for it, with all saved."""
        log.info("stopped %s, all saved; go on with resume_from_checkpoint=True", where)
        self.cleanup()
        raise SystemExit(128 + signum)

    def cleanup(self) -> None:
        """Close files and leave the process group."""
        if self.metric_logger is not None:
            self.metric_logger.close()
        self.ranks.close()


def run(recipe: Any) -> None:
    """Set ``recipe`` up, train, recording the hardware's counters, and clean up."""
    began = time.monotonic()
    recipe.setup()
    with recording(Path(recipe.cfg.output_dir), recipe.cfg.hardware_log_seconds if recipe.ranks.is_main else None):
        recipe.train()
    recipe.cleanup()
    log.info("done in %s", duration(time.monotonic() - began))


@config.recipe_main("lora_finetune_rocm")
def main(cfg: DictConfig) -> None:
    """LoRA fine-tuning: `tune run lora_finetune_rocm --config NAME [key=value ...]`."""
    run(LoRAFinetune(cfg))


if __name__ == "__main__":
    main()
