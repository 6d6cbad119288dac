"""The base of all trainers: optimiser, schedule, step, checkpoints and outputs."""

import contextlib
import itertools
import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from rocm_ext.base import heartbeat, registry
from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.files import append_line, read_lines, replace_folder, replace_text
from rocm_ext.base.log import log
from rocm_ext.base.types import Json
from rocm_ext.config import references
from rocm_ext.config.keys import free_keys
from rocm_ext.data.batches import MicroBatch, Update
from rocm_ext.machine import numerics
from rocm_ext.machine.cooling import take_paused
from rocm_ext.machine.trace import TRAINING
from rocm_ext.model.adapters.merge import merge
from rocm_ext.model.attention import has_dropout
from rocm_ext.runs.records import of_sets
from rocm_ext.train import builders
from rocm_ext.train.checkpoint import Best, State, check_same_run, rng_state, set_rng_state
from rocm_ext.train.learner import Learner
from rocm_ext.train.lifecycle import Interrupt, Interrupted, peak_memory
from rocm_ext.train.metrics import describe_lost
from rocm_ext.train.output_dir import OutputDir

# in a run's identity: the cut of a step decides which masks dropout draws
_DROPOUT_CUT = "tokens_per_micro_batch, which dropout depends on"
# keys that decide about the memory plan, beside tokens_per_micro_batch
_PLANNED_BY = ("enable_activation_checkpointing", "memory_fraction")


@dataclass(frozen=True)
class StepStats:
    """Measurements of one optimiser step, over all ranks.

    Attributes:
        loss: the normalised objective; for cross-entropy the mean NLL of the step's labels.
        grad_norm: gradient norm of the adapters before clipping.
        lr: learning rate of the step.
        tokens: computed tokens without padding.
        padding: share of padding in all computed tokens.
        interrupted: whether a rank received a signal to stop.
        measurements: other measurements of the objective, by name.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    padding: float
    interrupted: bool
    measurements: dict[str, float] = field(default_factory=dict)

    def line(self, seconds: float) -> dict[str, float]:
        """Return the values for ``metrics.jsonl`` of a step that took ``seconds``."""
        return {
            "loss": self.loss,
            "lr": self.lr,
            "grad_norm": self.grad_norm,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / seconds,
            "padding": self.padding,
            "seconds": seconds,
            **self.measurements,
        }


class Training:
    """Optimiser steps on a learner's adapter in an output folder, fresh or resumed.

    A subclass calls :meth:`begin` once it knows the number of updates, and is ready for :meth:`identity`,
    :meth:`setup_optimizer` and :meth:`setup_scheduler`.

    Args:
        learner: the model, set up.
        cfg: config of the SFT recipe or of a recipe that extends it.
        folder: output folder from :meth:`OutputDir.open`; the run resumes the checkpoint that the folder has read.
        metric_logger: a torchtune metric logger in addition to ``metrics.jsonl``; the caller closes it.
        interrupt: receives the user's signals to stop.

    Attributes:
        step: steps done. Metrics and checkpoints count them.
        total_steps: optimiser updates of the schedule.
        best: the best adapter so far, see :class:`rocm_ext.train.checkpoint.Best`; None before the first.
        unit: what messages call a step.
        free_keys: keys of the config that may differ when a run resumes.
        rules: keys of the config that let a run end early by the lines of ``metrics.jsonl``.
    """

    free_keys: frozenset[str] = free_keys(registry.SFT)
    rules: tuple[str, ...] = ()
    unit = "step"

    def __init__(
        self,
        learner: Learner,
        cfg: DictConfig,
        folder: OutputDir,
        *,
        metric_logger: Any = None,
        interrupt: Interrupt | None = None,
    ) -> None:
        self.learner = learner
        self.runtime = learner.runtime
        self.ranks = learner.runtime.ranks
        self.cfg = cfg
        self.folder = folder
        self.metric_logger = metric_logger
        self.interrupt = interrupt or Interrupt()
        self.step = 0
        self.total_steps = 0
        self._began_at = 0  # the step from which this process goes on
        self.best: Best | None = None
        self._updated = False  # whether the run has done an update

    def begin(self, total_steps: int) -> None:
        """Build optimiser and schedule for ``total_steps`` updates, continue the folder's checkpoint, claim the folder.

        Raises:
            UserError: a component cannot be built, or the checkpoint belongs to another run.
        """
        self.build(total_steps)
        self._identity = self.identity()
        self._environment = references.digests(self.cfg)
        resumed = self._resume()
        if resumed:
            self.ranks.on_main(self._check_metrics)
        log.info("optimizer: %s", builders.in_force(self.optimizer))
        self.ranks.barrier()  # every rank must read the checkpoint before `take` changes the folder
        if self.ranks.is_main:
            count = self.count if resumed else None
            self.folder.take(OmegaConf.to_yaml(self.cfg), count, self.keeps_line)

    def build(self, total_steps: int) -> None:
        """Build optimiser, loss scaler and schedule for ``total_steps`` updates, or 0 if they are not known yet."""
        self.total_steps = total_steps
        self.optimizer = self.setup_optimizer()
        builders.check_learning_rate(self.optimizer)
        self.scaler = torch.amp.GradScaler(
            self.runtime.device.type, enabled=self.runtime.dtype == torch.float16
        )
        self.scheduler = self.setup_scheduler() if total_steps else None

    @classmethod
    def try_out(cls, cfg: DictConfig, learner: Learner, total_steps: int) -> None:
        """Try out the config's optimiser and schedule, before the weights are read.

        This skips a subclass's optimiser and schedule, because they may need the trainer. ``total_steps`` may be an
        estimate of the schedule's updates.

        Raises:
            UserError: optimiser or schedule cannot be built, or does not work; or ``loraplus_lr_ratio`` is set, and a
                subclass overrides :meth:`setup_optimizer`.
        """
        own_optimizer = cls.setup_optimizer is not Training.setup_optimizer
        if own_optimizer and cfg.loraplus_lr_ratio is not None:
            raise UserError(f"{cls.__name__} makes its own optimiser; set loraplus_lr_ratio=null")
        if own_optimizer or cls.setup_scheduler is not Training.setup_scheduler:
            return
        first_layer, _, _ = next(iter(learner.adapter)).partition(".lora_")
        some = {}
        for name, parameter in learner.adapter.items():
            if name.startswith(f"{first_layer}."):
                some[name] = parameter
        builders.try_out(cfg, some, total_steps)

    def setup_optimizer(self) -> torch.optim.Optimizer:
        """Build the config's optimiser over the parameters in ``learner.adapter``."""
        return builders.setup_optimizer(self.cfg, self.learner.adapter)

    def setup_scheduler(self) -> Any:
        """Build the config's schedule of ``total_steps`` updates; None without ``lr_scheduler``."""
        given = self.cfg.lr_scheduler or {}
        rises = given.get("start_factor", 1.0) < given.get("end_factor", 1.0)  # LinearLR
        key = "total_iters" if rises else "num_warmup_steps"
        warmup = given.get(key)
        if isinstance(warmup, int) and warmup >= self.total_steps:
            log.warning(
                "lr_scheduler.%(key)s is %(warmup)d and the run has %(steps)d steps, so the learning rate never "
                "reaches optimizer.lr; lower %(key)s, or set lr_scheduler=null",
                {"key": key, "warmup": warmup, "steps": self.total_steps},
            )
        return builders.setup_scheduler(self.cfg.lr_scheduler, self.optimizer, self.total_steps)

    # ---- parts that a subclass may change

    @property
    def updates(self) -> int:
        """Updates of the finished steps in the schedule."""
        return self.step

    @property
    def adapter_step(self) -> int:
        """The last step that could change the adapter."""
        return self.step

    @property
    def where(self) -> str:
        """Where the next update is in the run, for messages."""
        return f"step {self.step + 1}"

    @property
    def count(self) -> int:
        """The number of the next checkpoint: the steps done."""
        return self.step

    def keeps_line(self, line: Json) -> bool:
        """Return whether a resumed run keeps a line of ``metrics.jsonl``: it repeats later steps."""
        return line["step"] <= self.step

    def position(self) -> dict[str, int]:
        """Return the first values of a line in ``metrics.jsonl``."""
        return {"step": self.step}

    def identity(self) -> dict[str, str | int | None]:
        """Return what a run shares with the one it resumes, in addition to the config."""
        learner = self.learner
        drops = has_dropout(learner.decoder)
        return {
            "base model": learner.base_fingerprint,
            "dtype": str(self.runtime.dtype),
            "seed": self.cfg.seed,
            _DROPOUT_CUT: learner.tokens_per_micro_batch if drops else None,
        }

    def extra_state(self) -> State:
        """Return a subclass's part of a checkpoint, tensors and plain values."""
        return {}

    def load_extra_state(self, state: State) -> None:
        """Restore the values of :meth:`extra_state` from a checkpoint's ``state``; ``step`` is set already."""

    def check_length(self, path: Path, state: State) -> bool:
        """Return whether the run has as many updates as before its checkpoint ``path``, so that its schedule continues.

        Raises:
            UserError: the checkpoint is past this run's end.
        """
        was = state["total_steps"]
        total = self.total_steps
        if self.updates > total:
            raise UserError(
                f"{path} has {self.updates} updates, but the run ends after {total}; raise epochs or steps"
            )
        if total != was:
            log.info("the run had %d updates in all; it now has %d", was, total)
        return total == was

    @property
    def goes_on(self) -> bool:
        """Whether updates follow."""
        return self.updates < self.total_steps

    @contextlib.contextmanager
    def evaluating(self, name: str) -> Iterator[None]:
        """Context of an evaluation; ``rocm-ext supervise --evaluate-apart`` runs it in a process of its own.

        Args:
            name: the evaluation, for messages.

        Raises:
            Interrupted: another process evaluates, or goes on after the evaluation.
        """
        apart = heartbeat.APART in os.environ
        if apart and self.step > self._began_at:
            self.save_checkpoint()
            raise Interrupted(f"before {name}")
        yield
        if apart:
            self.save_checkpoint()
            if self.goes_on:
                raise Interrupted(f"after {name}")

    # ---- resuming

    def _check_metrics(self) -> None:
        """Warn if ``metrics.jsonl`` lacks finished steps; a UserError if one of :attr:`rules` reads them."""
        path = self.folder.path / "metrics.jsonl"
        logged = set()
        for line in read_lines(path):
            if not of_sets([line]) and not of_sets([line], "eval"):
                logged.add(line["step"])
        lost = describe_lost(path, self.step, logged)
        rules = [key for key in self.rules if self.cfg.get(key) is not None]
        if lost and rules:
            raise UserError(
                f"{lost}, which {' and '.join(rules)} would read; restore the file, or set {'=null '.join(rules)}=null"
            )
        if lost:
            log.warning("%s, which summary.json and reports then cannot show", lost)

    def _resume(self) -> bool:
        """Continue from the folder's checkpoint; return whether there is one."""
        if self.folder.resumed is None:
            if self.cfg.resume_from_checkpoint:
                log.info(
                    "no checkpoint in %s: starting from the beginning",
                    self.folder.checkpoints.folder,
                )
            return False
        path, state = self.folder.resumed
        same_ranks = len(state["rng"]) == self.ranks.world
        identity = dict(self._identity)
        if not same_ranks:
            identity.pop(_DROPOUT_CUT, None)
        check_same_run(path, state, self.cfg, identity, self.free_keys)
        self._compare_plans(state)
        self.step, self.best = state["step"], state["best"]
        self._began_at = self.step
        self._updated = self.step > 0
        self.load_extra_state(state)
        same_length = self.check_length(path, state)
        self.learner.load_adapter(state["adapter"], str(path))
        if not same_length:
            self.skip_updates(self.updates)
        rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None and same_length:
            self.scheduler.load_state_dict(state["scheduler"])
        elif self.scheduler is not None:
            self._set_rates(rates)
        self.scaler.load_state_dict(state["scaler"])
        if same_ranks:
            set_rng_state(state["rng"][self.ranks.rank], self.runtime.device)
        else:
            log.warning(
                "the run had %d ranks and now has %d, so dropout differs",
                len(state["rng"]),
                self.ranks.world,
            )
        log.info("resumed from %s", path)
        self.folder.resumed = None  # frees its tensors
        return True

    def _plan(self) -> dict[str, int]:
        """Return what the memory plan has chosen, for the checkpoint."""
        return {
            "tokens_per_micro_batch": self.learner.tokens_per_micro_batch,
            "checkpointed": self.learner.checkpointed,
        }

    def _compare_plans(self, state: State) -> None:
        """Warn if the plan differs from that of a checkpoint's ``state``, and the config asks for the same."""
        now = self._plan()
        before = self.folder.earlier_plan(self.cfg) or now
        asked = any(state["config"].get(key) != self.cfg.get(key) for key in _PLANNED_BY)
        asked = asked or len(state["rng"]) != self.ranks.world
        if asked or before == now or not self.ranks.is_main:
            return
        log.warning(
            "the memory plan is another one than before the run was resumed: micro-batches of %s tokens (were %s), "
            "activation checkpointing of %d layers (was %d). It follows from the memory now: %s. Where that has "
            "passed, stop the run and resume it to plan again",
            f"{now['tokens_per_micro_batch']:,}",
            f"{before['tokens_per_micro_batch']:,}",
            now["checkpointed"],
            before["checkpointed"],
            self.learner.budget_reason,
        )

    def _set_rates(self, rates: Sequence[float]) -> None:
        """Set the learning rates of a schedule of another length than the checkpoint's."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            was = float(group["lr"])
            if rate != was:
                log.info(
                    "lr_scheduler follows the new number of steps: learning rate %.3g, was %.3g",
                    rate,
                    was,
                )
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    # ---- a step

    def train_step(self, update: Update) -> StepStats:
        """Do an update, and return its measurements over all ranks.

        Raises:
            UserError: the loss or the gradient norm is not finite, or a layer cannot be compiled; no weight changed.
        """
        try:
            with self.runtime.trace.part(TRAINING):
                return self._train_step(update)
        except RuntimeError as error:
            if not (self.cfg.compile and isinstance(error, torch._dynamo.exc.TorchDynamoException)):
                raise
            raise UserError(
                f"compile: torch cannot compile the model's layers ({one_line(error)[:300]}); set compile: False"
            ) from error

    def _train_step(self, update: Update) -> StepStats:
        objective = self.learner.objective
        # The counts cover all micro-batches and ranks, so the loss is exact and not a mean of means.
        denominator = objective.denominator(update.labels, update.sequences)
        objective.entropy_weight = denominator / max(1, update.labels)
        if not self._updated and self.runtime.dtype != torch.float32:
            self._check_dtypes(update)
        with objective.measuring() as tally:
            summed = self.add_gradients(update.batches, denominator)
        grad_norm = self.clip_gradients(self.cfg.clip_grad_norm)
        # the only wait for the device; all ranks have the same norm
        loss_sum, norm = torch.stack([summed, grad_norm.to(summed)]).tolist()
        total, real, computed, interrupted, measured = self.ranks.sum(
            [
                loss_sum,
                sum(batch.real_tokens for batch in update.batches),
                sum(batch.tokens.numel() for batch in update.batches),
                float(self.interrupt.signum is not None),
                len(tally),
            ]
        )
        loss = total / denominator
        self.check_finite(loss, norm, update)
        measurements = tally.result(self.ranks) if measured else {}
        lr = self.apply_gradients()
        return StepStats(
            loss, norm, lr, int(real), 1 - real / computed, bool(interrupted), measurements
        )

    def add_gradients(self, batches: Iterable[MicroBatch], divisor: float = 1.0) -> Tensor:
        """Add the gradients of the objective on this rank's ``batches``, divided by ``divisor``.

        Returns:
            The sum of the objective, not divided: a scalar in fp32.
        """
        learner = self.learner
        device = self.runtime.device
        summed = torch.zeros((), dtype=torch.float32, device=device)
        for batch in batches:
            with learner.offloading:
                value = learner.model(batch.to(device))
            self.scaler.scale(value / divisor).backward()
            summed += value.detach()
        return summed

    def clip_gradients(self, limit: float | None) -> Tensor:
        """Sum the gradients over all ranks and clip their norm to ``limit``; return the norm before: a scalar."""
        parameters = list(self.learner.adapter.values())
        self.ranks.sum_gradients(parameters)
        if self.cfg.compile and not self._updated:
            self._check_gradients()
        self.scaler.unscale_(self.optimizer)
        most = math.inf if limit is None else float(limit)
        return torch.nn.utils.clip_grad_norm_(parameters, most)

    def apply_gradients(self) -> float:
        """Do the optimiser's step and the schedule's, and drop the gradients; return the step's learning rate.

        Raises:
            UserError: the learning rate is negative or not finite; no weight changed.
        """
        lr = float(self.optimizer.param_groups[0]["lr"])  # a tensor in torchao's optimisers
        if not (math.isfinite(lr) and lr >= 0):
            raise UserError(
                f"{self.where}: the learning rate is {lr}; look at optimizer.lr and lr_scheduler"
            )
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            self.scheduler.step()
        self._updated = True
        return lr

    def skip_updates(self, count: int) -> None:
        """Advance the schedule by ``count`` updates without doing them, for too few rows or on a resume."""
        if self.scheduler is None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects optimiser steps in between
            for _ in range(count):
                self.scheduler.step()

    def _check_dtypes(self, update: Update) -> None:
        """Warn of modules of the decoder that leave the dtype; the objective computes in fp32 on purpose.

        This runs another forward pass: with hooks in the step, torch would compile every layer again, then give up.
        """
        learner, device = self.learner, self.runtime.device
        generators = torch.random.fork_rng([device] if device.type == "cuda" else [])
        leaking = numerics.dtype_leaks(learner.decoder, self.runtime.dtype)
        with generators, torch.no_grad(), self._uncompiled(), leaking as leaks:
            for batch in update.batches[:1]:
                learner.model(batch.to(device))
        if leaks:
            log.warning(
                "modules whose output is not %s: %s", self.runtime.dtype, ", ".join(leaks[:5])
            )

    def _check_gradients(self) -> None:
        """Check that gradients reach every layer: torch has compiled layers whose gradients are 0, without an error."""
        learns = []  # by layer with an adapter
        layers = self.learner.decoder.layers
        for layer in layers:
            trained = [p for p in layer.parameters() if p.requires_grad]
            if trained:
                learns.append(any(p.grad is not None and bool(p.grad.any()) for p in trained))
        dead = learns.count(False)
        if dead and any(learns):
            raise UserError(
                f"compile: {dead} of {len(layers)} layers get no gradient with torch {torch.__version__}, so they "
                "would learn nothing; set compile: False, or install another torch"
            )

    def _uncompiled(self) -> contextlib.AbstractContextManager:
        if self.cfg.compile:
            return torch.compiler.set_stance("force_eager")
        return contextlib.nullcontext()

    def check_finite(self, loss: float, grad_norm: float, update: Update) -> None:
        """Check that an update's loss and gradient norm are finite; a UserError says where the first bad value is."""
        # fp16 gradients overflow now and then, and the scaler skips such a step
        skipped = self.scaler.is_enabled() and self.scaler.get_scale() >= 1
        if math.isfinite(loss) and (math.isfinite(grad_norm) or skipped):
            return
        where, cure = self._locate(update, loss)
        if not cure and self._updated:
            cure = "Lower the learning rate, set clip_grad_norm, or look at these rows"
        elif not cure:
            cure = "No step came before, so the learning rate is not the cause: look at these rows, or set dtype=fp32"
        checkpoints = self.folder.checkpoints.steps()
        last = "There is no checkpoint yet"
        if checkpoints:
            last = f"The last good checkpoint is {checkpoints[-1]}"
        rows = ", ".join(map(str, update.rows[:32]))
        if len(update.rows) > 32:
            rows += " …"
        raise UserError(
            f"{self.where}: loss {loss}, gradient norm {grad_norm}; no weight changed. {where}. Rows of this step: "
            f"{rows}. {cure}. {last}"
        )

    def _locate(self, update: Update, loss: float) -> tuple[str, str]:
        """Compute the forward passes of an update with this ``loss`` again, uncompiled; all ranks call this.

        Returns:
            The origin of the first value that is not finite; and the setting that avoids it, or an empty text.
        """
        cfg, learner = self.cfg, self.learner
        values = []
        with self._uncompiled(), numerics.first_non_finite(learner.decoder) as origins:
            for batch in update.batches:
                with learner.offloading:
                    values.append(learner.model(batch.to(self.runtime.device)).item())
        finite = all(self.ranks.gather(all(map(math.isfinite, values))))
        of_ranks = list(itertools.chain(*self.ranks.gather(origins)))
        if of_ranks:
            name, computes_attention = of_ranks[0]
            cure = ""
            if computes_attention and cfg.attention not in ("math", "eager"):
                cure = "Its inputs are finite: set attention=math, or attention=eager"
            elif computes_attention or self.runtime.dtype == torch.float16:
                cure = "Its inputs are finite: set dtype=fp32"
                if self.runtime.machine.bf16:
                    cure += ", or dtype=bf16"
            return f"The first values that are not finite are those of {name}", cure
        if not finite:
            loss_name = type(learner.objective).__name__
            return f"All hidden states are finite, so it is the loss {loss_name}", ""
        if math.isfinite(loss):
            return "All activations are finite, so it is the backward pass", ""
        if cfg.compile:
            return "Computed again, uncompiled, the values are finite", "Set compile=False"
        return "Computed again, the values are finite", ""

    # ---- the outputs

    def resources(self) -> dict[str, float]:
        """Return a line's values about the machine for ``metrics.jsonl``.

        ``peak_memory``, if ``log_peak_memory_stats`` asks for it; and ``paused``, the seconds since the line before in
        which the run paused for heat, if it did.
        """
        values: dict[str, float] = {}
        if self.cfg.log_peak_memory_stats:
            values["peak_memory"] = peak_memory(self.runtime.device)
        paused = take_paused()
        if paused:
            values["paused"] = paused
        return values

    def write_metrics(self, to_logger: bool, **values: Any) -> None:
        """Append a line to ``metrics.jsonl``, and give its numbers to the metric logger if ``to_logger`` is set."""
        if self.ranks.is_main:
            append_line(self.folder.path / "metrics.jsonl", {**self.position(), **values})
        if to_logger:
            self.log_numbers(values)

    def log_numbers(self, values: Mapping[str, object]) -> None:
        """Give the numbers among ``values`` to the metric logger, if there is one."""
        if self.metric_logger is not None:
            numbers = {k: value for k, value in values.items() if isinstance(value, int | float)}
            self.metric_logger.log_dict(numbers, step=self.count)

    def save_checkpoint(self) -> None:
        """Write a checkpoint: the run's state, and the adapter in PEFT's format.

        Raises:
            UserError: the last step left values in the adapter that are not finite; or the disk is full.
        """
        for name, parameter in self.learner.adapter.items():
            if not parameter.isfinite().all():
                raise UserError(
                    f"{name} has values that are not finite after step {self.count}, so nothing was saved; "
                    "lower the learning rate"
                )
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
                "total_steps": self.total_steps,
                "config": OmegaConf.to_container(self.cfg),
                "environment": self._environment,
                "identity": self._identity,
                "plan": self._plan(),
                **self.extra_state(),
            }
            self.folder.checkpoints.save(self.count, state, self.learner.write_adapter)
        self.ranks.barrier()

    @property
    def best_to_keep(self) -> Best | None:
        """The best adapter if ``adapter/`` gets it; None if it gets the last one."""
        return self.best

    def write_outputs(self) -> None:
        """Write ``adapter/``, ``summary.json`` and, if the config asks for it, ``merged/``."""
        cfg, out = self.cfg, self.folder.path
        which = f"the last, of {self.unit} {self.adapter_step}"
        best = self.best_to_keep
        if best is not None:
            self.learner.load_adapter(best["adapter"], "best")
            which = f"the best, of {self.unit} {best['step']}"
        if self.ranks.is_main:
            with replace_folder(out / "adapter") as folder:
                self.learner.write_adapter(folder)
            log.info("adapter: %s (%s)", out / "adapter", which)
            if not cfg.save_adapter_weights_only:
                merge(cfg.checkpointer, out / "adapter", out / "merged", self.learner.decoder)
            replace_text(out / "summary.json", json.dumps(self.summary(), indent=2) + "\n")
        self.ranks.barrier()

    def summary(self) -> Json:
        """Return the content of ``summary.json``: memory, machine and ranks; only the main rank calls it."""
        return {
            "peak_memory": peak_memory(self.runtime.device),
            "planned_memory": self.learner.planned_peak,
            "machine": str(self.runtime.machine),
            "dtype": str(self.runtime.dtype).removeprefix("torch."),
            "ranks": self.ranks.world,
            "base_model": self.learner.base_fingerprint,
        }
