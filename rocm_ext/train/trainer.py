"""One training run: the loop, the step, validation and the outputs."""

import contextlib
import json
import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from rocm_ext.data.batches import Batch, StepLoader, Steps, rows_per_step, width_multiple
from rocm_ext.data.rows import Rows
from rocm_ext.errors import UserError, one_line
from rocm_ext.files import replace_folder, replace_text
from rocm_ext.hardware import numerics
from rocm_ext.log import Progress, log
from rocm_ext.model.merge import merge
from rocm_ext.train import components
from rocm_ext.train.checkpoint import FREE_KEYS, check_same_run, rng_state, set_rng_state
from rocm_ext.train.interrupt import Interrupt, Interrupted
from rocm_ext.train.learner import Learner
from rocm_ext.train.metrics import peak_memory, summarize
from rocm_ext.train.output_dir import OutputDir
from rocm_ext.train.resume import check_length, load_for_new_length

# in a run's identity: the cut of a step decides which masks dropout draws
_DROPOUT_CUT = "tokens_per_micro_batch, which dropout depends on"


@dataclass(frozen=True)
class StepStats:
    """Measurements of one optimiser step, over all ranks.

    Attributes:
        loss: the normalised objective; for cross-entropy the mean NLL of the step's labels.
        grad_norm: gradient norm of the adapters before clipping.
        lr: learning rate of the step.
        tokens: number of computed tokens without padding.
        padding: padding's share of all computed tokens.
        interrupted: whether a rank received a signal to stop.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    padding: float
    interrupted: bool


class Trainer:
    """One run of ``cfg.epochs`` epochs over ``rows``, fresh or resumed.

    To change a part, subclass and override :meth:`setup_optimizer`, :meth:`setup_scheduler` or :meth:`train_step`.

    Args:
        learner: the model, after its :meth:`Learner.setup`.
        rows: training rows.
        cfg: config of the SFT recipe or of a recipe that extends it.
        folder: output folder from :meth:`OutputDir.open`; the run resumes the checkpoint that the folder found.
        validation_rows: validation rows; None disables validation.
        metric_logger: a torchtune metric logger in addition to ``metrics.jsonl``; the caller closes it.
        interrupt: receives the user's signals to stop.
        steps_before: optimiser steps of this learner's earlier runs; the metric logger counts on from there.

    Attributes:
        step: optimiser steps done; it determines all other progress.
        total_steps: optimiser steps of all epochs.
        best: loss, step and adapter of the best validation so far; None before the first.

    Raises:
        UserError: the rows do not fit the model, a component cannot be built, or the checkpoint belongs to another
            run.
    """

    def __init__(
        self,
        learner: Learner,
        rows: Rows,
        cfg: DictConfig,
        folder: OutputDir,
        *,
        validation_rows: Rows | None = None,
        metric_logger: Any = None,
        interrupt: Interrupt | None = None,
        steps_before: int = 0,
    ) -> None:
        self.learner, self.runtime, self.ranks = learner, learner.runtime, learner.runtime.ranks
        self.rows, self.validation_rows, self.cfg, self.folder = rows, validation_rows, cfg, folder
        self.metric_logger, self.steps_before = metric_logger, steps_before
        self.interrupt = interrupt or Interrupt()
        self.step, self.worse = 0, 0  # worse: number of validations since the best one
        self.best: dict[str, Any] | None = None
        for each in filter(None, (rows, validation_rows)):
            learner.check_rows(each)
        per_step = rows_per_step(cfg, self.ranks.world)
        self.loader = self._loader(
            rows, Steps(len(rows), per_step, cfg.max_steps_per_epoch, cfg.data_seed, cfg.shuffle)
        )
        self.total_steps = self.loader.steps.per_epoch * cfg.epochs
        self.validation_loader = None
        if validation_rows is not None:
            self.validation_loader = self._loader(validation_rows, Steps(len(validation_rows), per_step, shuffle=False))
        log.info("%s rows, %d per step, %d steps per epoch", f"{len(rows):,}", per_step, self.loader.steps.per_epoch)
        self.optimizer = self.setup_optimizer()
        components.check_learning_rate(self.optimizer)
        self.scaler = torch.amp.GradScaler(self.runtime.device.type, enabled=self.runtime.dtype == torch.float16)
        self.scheduler = self.setup_scheduler()
        self.profiler = components.setup_profiler(cfg.profiler)
        self.identity = self._identity()
        self._resume()
        self.ranks.barrier()  # every rank must read the checkpoint before `take` changes the folder
        yaml = OmegaConf.to_yaml(cfg, resolve=True)
        self.metrics = folder.take(yaml, self.step) if self.ranks.is_main else None

    @classmethod
    def check(cls, cfg: DictConfig, learner: Learner, rows: int) -> None:
        """Try out what the config names for training, before the weights are read.

        A subclass's own optimiser or schedule is not tried, because it may need the whole trainer.

        Args:
            cfg: config of the SFT recipe or of a recipe that extends it.
            learner: the model, before its :meth:`Learner.setup`.
            rows: number of training rows, or an estimate.

        Raises:
            UserError: optimiser, schedule or profiler cannot be built, or does not work.
        """
        if cfg.profiler is not None:
            components.setup_profiler(cfg.profiler)
        if cls.setup_optimizer is not Trainer.setup_optimizer or cls.setup_scheduler is not Trainer.setup_scheduler:
            return
        steps = Steps(rows, rows_per_step(cfg, learner.runtime.ranks.world), cfg.max_steps_per_epoch).per_epoch
        layer = next(iter(learner.adapter)).partition(".lora_")[0]
        some = [p for name, p in learner.adapter.items() if name.startswith(f"{layer}.")]
        components.try_out(cfg, some, steps * cfg.epochs)

    def setup_optimizer(self) -> torch.optim.Optimizer:
        """Build the config's optimiser over the parameters in ``learner.adapter``."""
        return components.setup_optimizer(self.cfg.optimizer, list(self.learner.adapter.values()))

    def setup_scheduler(self) -> Any:
        """Build the config's learning-rate schedule over ``self.total_steps`` for ``self.optimizer``.

        Returns:
            A scheduler, which the run steps once per optimiser step; None without ``lr_scheduler``.
        """
        components.warn_of_warmup(self.cfg.lr_scheduler, self.total_steps)
        return components.setup_scheduler(self.cfg.lr_scheduler, self.optimizer, self.total_steps)

    def _loader(self, rows: Rows, steps: Steps) -> StepLoader:
        learner, cfg = self.learner, self.cfg
        return StepLoader(
            rows,
            steps,
            rank=self.ranks.rank,
            ranks=self.ranks.world,
            tokens_per_micro_batch=learner.tokens_per_micro_batch,
            packed=learner.packed,
            pad_id=getattr(learner.tokenizer, "pad_id", 0) or 0,
            multiple=width_multiple(cfg.compile, self.runtime.device, self.runtime.dtype),
            num_workers=cfg.num_workers,
            pin_memory=cfg.pin_memory,
        )

    def _identity(self) -> dict[str, Any]:
        """Return what a run must share with the one it resumes, beside the config."""
        return {
            "base model": self.learner.base_fingerprint,
            "data": self.rows.fingerprint(),
            "validation data": self.validation_rows.fingerprint() if self.validation_rows else None,
            "rows per step": self.loader.steps.per_step,
            "dtype": str(self.runtime.dtype),
            "seed": self.cfg.seed,
            _DROPOUT_CUT: self.learner.tokens_per_micro_batch if self._has_dropout() else None,
        }

    def _has_dropout(self) -> bool:
        modules = list(self.learner.decoder.modules())
        attention = [getattr(m, key, 0) or 0 for m in modules for key in ("attn_dropout", "attention_dropout")]
        return any(isinstance(m, nn.Dropout) and m.p > 0 for m in modules) or any(
            isinstance(p, float | int) and p > 0 for p in attention
        )

    def _resume(self) -> None:
        """Continue from the folder's checkpoint, if it found one."""
        if self.folder.resumed is None:
            if self.cfg.resume_from_checkpoint:
                log.info("no checkpoint in %s: starting from the beginning", self.folder.checkpoints.folder)
            return
        path, state = self.folder.resumed
        same_ranks = len(state["rng"]) == self.ranks.world
        identity = {what: is_ for what, is_ in self.identity.items() if same_ranks or what != _DROPOUT_CUT}
        check_same_run(path, state, self.cfg, identity, FREE_KEYS | {"epochs", "max_steps_per_epoch"})
        self.step, self.best, self.worse = state["step"], state["best"], state["worse"]
        same_length = check_length(path, self.step, self.loader.steps, self.cfg, state["config"])
        self.learner.load_adapter(state["adapter"], str(path))
        if same_length:
            self.optimizer.load_state_dict(state["optimizer"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
        else:
            load_for_new_length(self.optimizer, self.scheduler, state["optimizer"], self.step)
        self.scaler.load_state_dict(state["scaler"])
        if same_ranks:
            set_rng_state(state["rng"][self.ranks.rank], self.runtime.device)
        else:
            log.warning("the run had %d ranks and now has %d, so dropout differs", len(state["rng"]), self.ranks.world)
        log.info("resumed from %s", path)
        self.folder.resumed = None  # frees its tensors

    # ---- the run

    def train(self) -> None:
        """Train to the last step, then write the outputs.

        Raises:
            Interrupted: the user asked to stop; the last step is saved.
            UserError: a loss is not finite, or the disk is full.
        """
        per_epoch = self.loader.steps.per_epoch
        progress = Progress(self.total_steps, self.step, self.ranks.is_main)
        self.learner.model.train()
        with contextlib.closing(progress), self.interrupt, self.profiler as profiler:
            while self.step < self.total_steps and not self.stopped_early:
                end = (self.step // per_epoch + 1) * per_epoch
                began = time.perf_counter()
                for batches in self.loader.range(self.step, end):
                    stats = self.train_step(batches)
                    self.step += 1
                    seconds = time.perf_counter() - began
                    self._log_step(stats, seconds)
                    progress.update(f"loss {stats.loss:.4f}  {stats.tokens / seconds:,.0f} tok/s")
                    profiler.step()
                    if self._due(self.cfg.run_val_every_n_steps, self.step == end):
                        self.validate()
                    leaving = self.step == end or stats.interrupted or self.stopped_early
                    if self._due(self.cfg.save_every_n_steps, False) or leaving:
                        self.save_checkpoint()
                    if stats.interrupted:
                        raise Interrupted(f"at step {self.step}", self.interrupt.agree(self.ranks))
                    if self.stopped_early:
                        break
                    began = time.perf_counter()
        if self.stopped_early:
            log.info("stopped early at step %d: %d validations without a better loss", self.step, self.worse)
        self.write_outputs()

    def _due(self, every: int | None, epoch_end: bool) -> bool:
        return self.step % every == 0 if every else epoch_end

    @property
    def stopped_early(self) -> bool:
        """Whether the last ``early_stopping_patience`` validations brought no improvement."""
        patience = self.cfg.early_stopping_patience
        return bool(patience) and self.worse >= patience

    def train_step(self, batches: list[Batch]) -> StepStats:
        """Do optimiser step ``self.step``.

        Args:
            batches: this rank's micro-batches of the step.

        Returns:
            The step's measurements over all ranks.

        Raises:
            UserError: the loss or the gradient norm is not finite, or a layer cannot be compiled; the step changes no
                weight then.
        """
        learner, device = self.learner, self.runtime.device
        parameters = list(learner.adapter.values())
        # The counts cover all micro-batches and ranks, so the loss is exact and not a mean of means.
        denominator = learner.objective.denominator(*self.loader.count(self.step))
        summed = torch.zeros((), dtype=torch.float32, device=device)
        with self._first_step_checks(), self._compiling():
            for batch in batches:
                with learner.offloading:
                    value = learner.model(batch.to(device))
                self.scaler.scale(value / denominator).backward()
                summed += value.detach()
        self.ranks.sum_gradients(parameters)
        self.scaler.unscale_(self.optimizer)
        limit = self.cfg.clip_grad_norm
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf if limit is None else float(limit))
        total, real, computed, interrupted = self.ranks.sum(
            [
                summed.item(),
                sum(batch.real_tokens for batch in batches),
                sum(batch.tokens.numel() for batch in batches),
                float(self.interrupt.signum is not None),
            ]
        )
        loss, norm = total / denominator, float(grad_norm)
        self._check_finite(loss, norm)
        lr = float(self.optimizer.param_groups[0]["lr"])  # a tensor in torchao's optimisers
        if not (math.isfinite(lr) and lr >= 0):
            raise UserError(f"step {self.step + 1}: the learning rate is {lr}; look at optimizer.lr and lr_scheduler")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()
        return StepStats(loss, norm, lr, int(real), 1 - real / computed, bool(interrupted))

    @contextlib.contextmanager
    def _first_step_checks(self):
        if self.step or self.runtime.dtype == torch.float32:
            yield
            return
        # checks only the decoder, because the objective computes in fp32 on purpose
        with numerics.dtype_leaks(self.learner.decoder, self.runtime.dtype) as leaks:
            yield
        if leaks:
            log.warning("modules whose output is not %s: %s", self.runtime.dtype, ", ".join(leaks[:5]))

    @contextlib.contextmanager
    def _compiling(self):
        try:
            yield
        except RuntimeError as error:
            if not (self.cfg.compile and isinstance(error, torch._dynamo.exc.TorchDynamoException)):
                raise
            why = one_line(error)[:300]
            raise UserError(f"compile: torch cannot compile the model's layers ({why}); set compile: False") from error

    def _check_finite(self, loss: float, grad_norm: float) -> None:
        scaled = self.scaler.is_enabled()  # fp16 gradients overflow now and then, and the scaler skips such a step
        if math.isfinite(loss) and (math.isfinite(grad_norm) or (scaled and self.scaler.get_scale() >= 1)):
            return
        rows = self.loader.steps[self.step]
        last = self.folder.checkpoints.steps()
        cure = "Lower the learning rate, set clip_grad_norm, or look at these rows"
        if not self.step:
            cure = "No step came before, so the learning rate is not the cause: look at these rows, or set dtype=fp32"
        raise UserError(
            f"step {self.step + 1}: loss {loss}, gradient norm {grad_norm}; no weight changed. Rows of this step: "
            f"{', '.join(map(str, rows[:32]))}{' …' if len(rows) > 32 else ''}. {cure}. "
            + (f"The last good checkpoint is {last[-1]}" if last else "There is no checkpoint yet")
        )

    def _check_adapter(self) -> None:
        """Refuse to save an adapter that the last step has spoilt; no loss has seen it yet."""
        bad = [name for name, p in self.learner.adapter.items() if not p.isfinite().all()]
        if bad:
            raise UserError(
                f"step {self.step}: {bad[0]} has values that are not finite, so nothing was saved; "
                "lower the learning rate"
            )

    @torch.no_grad()
    def validate(self) -> float | None:
        """Compute the objective on the validation rows, log it, and remember the best adapter.

        Returns:
            The normalised objective; None without validation rows.

        Raises:
            UserError: the loss is not finite.
        """
        loader, learner = self.validation_loader, self.learner
        if loader is None:
            return None
        learner.model.eval()
        summed = labels = sequences = 0.0
        for batches in loader.range(0, loader.steps.per_epoch):
            for batch in batches:
                summed += learner.model(batch.to(self.runtime.device)).item()
                labels, sequences = labels + len(batch.targets), sequences + batch.sequences
        learner.model.train()
        summed, labels, sequences = self.ranks.sum([summed, labels, sequences])
        loss = summed / learner.objective.denominator(labels, sequences)
        if not math.isfinite(loss):
            raise UserError(f"step {self.step}: the validation loss is {loss}; lower the learning rate")
        if self.best is None or loss < self.best["loss"]:
            self.best = {"loss": loss, "step": self.step, "adapter": learner.adapter_state()}
            self.worse = 0
        else:
            self.worse += 1
        best = f"best {self.best['loss']:.4f} at step {self.best['step']}"
        log.info("step %d: validation loss %.4f (%s)", self.step, loss, best)
        self._write_metrics(True, val_loss=loss, val_tokens=int(labels))
        return loss

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
            values["peak_memory"] = peak_memory(self.runtime.device)
        self._write_metrics(self.step % self.cfg.log_every_n_steps == 0, **values)

    def _write_metrics(self, to_logger: bool, **values: Any) -> None:
        if self.metrics is not None:
            epoch = (self.step - 1) // self.loader.steps.per_epoch + 1
            self.metrics.write(step=self.step, epoch=epoch, **values)
        if self.metric_logger is not None and to_logger:
            self.metric_logger.log_dict(values, step=self.steps_before + self.step)

    # ---- the outputs

    def save_checkpoint(self) -> None:
        """Write a checkpoint: everything that a resumed run needs, and the adapter in PEFT's format."""
        self._check_adapter()
        rng = self.ranks.gather(rng_state(self.runtime.device))
        if self.ranks.is_main:
            state = {
                "step": self.step,
                "adapter": self.learner.adapter_state(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
                "scaler": self.scaler.state_dict(),
                "rng": rng,
                "best": self.best,
                "worse": self.worse,
                "config": OmegaConf.to_container(self.cfg, resolve=True),
                "identity": self.identity,
            }
            self.folder.checkpoints.save(self.step, state, self.learner.write_adapter)
        self.ranks.barrier()

    def write_outputs(self) -> None:
        """Write ``adapter/``, ``summary.json`` and, if the config asks for it, ``merged/``.

        With ``early_stopping_patience`` the adapter is the best by validation loss, else the last.
        """
        cfg, out = self.cfg, self.folder.path
        early = cfg.early_stopping_patience and self.best is not None
        if early:
            self.learner.load_adapter(self.best["adapter"], "best")  # type: ignore[index]
        if self.ranks.is_main:
            with replace_folder(out / "adapter") as folder:
                self.learner.write_adapter(folder)
            log.info("adapter: %s", out / "adapter")
            if not cfg.save_adapter_weights_only:
                merge(cfg.checkpointer, out / "adapter", out / "merged", self.learner.decoder)
            replace_text(out / "summary.json", json.dumps(self._summary(bool(early)), indent=2) + "\n")
        self.ranks.barrier()

    def _summary(self, early: bool) -> dict[str, Any]:
        return {
            **summarize(self.folder.path / "metrics.jsonl"),
            "rows": self.rows.counts,
            "best_validation": {k: self.best[k] for k in ("loss", "step")} if self.best else None,
            "adapter_is": "best by validation loss" if early else "last",
            "peak_memory": peak_memory(self.runtime.device),
            "planned_memory": self.learner.planned_peak,
            "machine": str(self.runtime.machine),
            "dtype": str(self.runtime.dtype).removeprefix("torch."),
            "ranks": self.ranks.world,
        }
