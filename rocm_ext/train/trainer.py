"""One training run over rows: epochs and validation."""

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rocm_ext.base import supervised
from rocm_ext.base.errors import UserError, nearest
from rocm_ext.base.log import Progress, log
from rocm_ext.data.batches import StepLoader, Steps, Update, rows_per_step
from rocm_ext.data.mixture import Mixture
from rocm_ext.data.rows import Rows
from rocm_ext.train.checkpoint import FREE_KEYS
from rocm_ext.train.learner import Learner
from rocm_ext.train.lifecycle import Interrupt, Interrupted
from rocm_ext.train.loop import StepStats, Training
from rocm_ext.train.metrics import summarize
from rocm_ext.train.output_dir import OutputDir
from rocm_ext.train.scoring import set_baseline, validation_loss


class Trainer(Training):
    """One run of ``cfg.epochs`` epochs over ``rows``, fresh or resumed.

    To change a part, subclass and override :meth:`setup_optimizer`, :meth:`setup_scheduler` or :meth:`train_step`.

    Args:
        learner: the model, after its :meth:`Learner.setup`.
        rows: training rows.
        cfg: config of the SFT recipe or of a recipe that extends it.
        folder: output folder from :meth:`OutputDir.open`; the run resumes the checkpoint that the folder has read.
        validation_rows: validation rows; None disables validation.
        metric_logger: a torchtune metric logger in addition to ``metrics.jsonl``; the caller closes it.
        interrupt: receives the user's signals to stop.

    Attributes:
        steps: the rows of each step.
        mixture: the data sets that the rows come from.
        step: optimiser steps done; it determines all other progress.
        total_steps: optimiser steps of all epochs.
        best: loss, step and adapter of the best validation by ``early_stopping_metric`` so far, with the metric and its
            value; None before the first.

    Raises:
        UserError: the rows do not fit the model.
    """

    free_keys = FREE_KEYS | {"epochs", "max_steps_per_epoch"}

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
    ) -> None:
        super().__init__(learner, cfg, folder, metric_logger=metric_logger, interrupt=interrupt)
        self.rows, self.validation_rows = rows, validation_rows
        self.worse = 0  # number of validations since the best one
        self.validated = 0  # step of the last validation
        self._computed = False  # whether this process has done a step
        for part in filter(None, (rows, validation_rows)):
            learner.check_rows(part)
        per_step = rows_per_step(cfg, self.ranks.world)
        self.mixture = Mixture.of(cfg.dataset, rows)
        order = cfg.max_steps_per_epoch, cfg.data_seed, cfg.shuffle, self.mixture
        self.steps = Steps(len(rows), per_step, *order)
        self.loader = StepLoader(rows, self.steps, learner.layout, cfg.num_workers, cfg.pin_memory)

    def open(self) -> None:
        """Continue the folder's checkpoint, or claim the folder for a run that begins; all other set-up is done.

        Raises:
            UserError: a component cannot be built, or the checkpoint belongs to another run.
        """
        steps = self.steps
        log.info("%s rows, %d per step, %d steps per epoch", f"{len(self.rows):,}", steps.per_step, steps.per_epoch)
        self.begin(steps.per_epoch * self.cfg.epochs)

    @classmethod
    def check(cls, cfg: DictConfig, learner: Learner, rows: int) -> None:
        """Try out what the config names for a training on ``rows`` rows, see :meth:`Training.try_out`.

        Args:
            cfg: config of the SFT recipe or of a recipe that extends it.
            learner: the model, before its :meth:`Learner.setup`.
            rows: number of training rows, or an estimate.

        Raises:
            UserError: optimiser or schedule cannot be built, or does not work; or validations do not measure
                ``early_stopping_metric``.
        """
        _metric_direction(cfg, learner)
        steps = Steps(rows, rows_per_step(cfg, learner.runtime.ranks.world), cfg.max_steps_per_epoch).per_epoch
        cls.try_out(cfg, learner, steps * cfg.epochs)

    @property
    def takes_best(self) -> bool:
        """Whether ``adapter/`` gets the best adapter by validation: with ``early_stopping_patience``."""
        return bool(self.cfg.early_stopping_patience) and self.best is not None

    def position(self) -> dict[str, int]:
        """Return step and epoch, from 1."""
        return {"step": self.step, "epoch": (self.step - 1) // self.steps.per_epoch + 1}

    def identity(self) -> dict[str, Any]:
        """Return what a run must share with the one it resumes, beside the config."""
        mixture = self.mixture
        return {
            **super().identity(),
            "data": self.rows.fingerprint(),
            "validation data": self.validation_rows.fingerprint() if self.validation_rows else None,
            "rows per step": self.steps.per_step,
            "rows and weights of the data sets": str(mixture.rows + mixture.weights) if mixture.weights else None,
        }

    def keeps_line(self, line: dict[str, Any]) -> bool:
        """Return whether a line of ``metrics.jsonl`` stays when the run resumes."""
        return line["step"] <= (self.validated if "val_loss" in line else self.step)

    def extra_state(self) -> dict[str, Any]:
        """Return the step of the last validation, and the number of validations since the best one."""
        return {"worse": self.worse, "validated": self.validated}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`extra_state` returned; after a change of the metric, look for the best anew."""
        self.validated = state["validated"]
        metric = self.cfg.early_stopping_metric
        if self.best is None or self.best["metric"] == metric:
            self.worse = state["worse"]
            return
        log.info("early_stopping_metric is now %s: the best validation is one of those to come", metric)
        self.best = None

    def check_length(self, path: Path, state: dict[str, Any]) -> bool:
        """Check ``epochs`` and ``max_steps_per_epoch`` as :meth:`Training.check_length` does.

        Raises:
            UserError: the checkpoint is past this run's end, or its steps had other rows.
        """
        before = replace(self.steps, limit=state["config"]["max_steps_per_epoch"])
        if before.per_epoch != self.steps.per_epoch and self.step > min(before.per_epoch, self.steps.per_epoch):
            raise UserError(
                f"{path} has {self.step} steps, so max_steps_per_epoch cannot change from {before.limit} to "
                f"{self.steps.limit}: with it these steps would have had other rows. Undo the change; epochs may be "
                "raised"
            )
        return super().check_length(path, state)

    # ---- the run

    def train_step(self, update: Update) -> StepStats:
        """Do an update as :meth:`Training.train_step` does, after setting the baseline of an objective that has one."""
        set_baseline(self.learner, self.rows, update.rows)
        return super().train_step(update)

    def train(self) -> None:
        """Train to the last step, then write the outputs.

        Raises:
            Interrupted: the user asked to stop; the last step is saved.
            UserError: a loss is not finite, or the disk is full.
        """
        per_epoch = self.steps.per_epoch
        progress = Progress(self.total_steps, self.step, self.ranks.is_main)
        self.learner.model.train()
        if self.step == self.total_steps:
            log.info("all %d steps are done already; raise epochs to train further", self.step)
        with contextlib.closing(progress), self.interrupt:
            self._validate_if_due()  # after a process that ended for it
            while self.step < self.total_steps and not self.stopped_early:
                end = (self.step // per_epoch + 1) * per_epoch
                began = time.perf_counter()
                for update in self.loader.range(self.step, end):
                    stats = self.train_step(update)
                    self.step, self._computed = self.step + 1, True
                    seconds = time.perf_counter() - began
                    values = stats.line(seconds) | self.memory()
                    self.write_metrics(self.step % self.cfg.log_every_n_steps == 0, **values)
                    progress.update(f"loss {stats.loss:.4f}  {stats.tokens / seconds:,.0f} tok/s")
                    self._validate_if_due()
                    leaving = self.step == end or stats.interrupted or self.stopped_early
                    if self._due(self.cfg.save_every_n_steps, False) or leaving:
                        self.save_checkpoint()
                    if stats.interrupted:
                        raise Interrupted(f"at step {self.step}", self.interrupt.agree(self.ranks))
                    if self.stopped_early:
                        break
                    began = time.perf_counter()
        if self.stopped_early:
            log.info(
                "stopped early at step %d: %d validations without a better %s", self.step, self.worse, self._metric_name
            )
        self.write_outputs()

    def _due(self, every: int | None, epoch_end: bool) -> bool:
        return self.step % every == 0 if every else epoch_end

    def _validate_if_due(self) -> None:
        """Validate this step if it is due and not done yet; where processes validate or train, perhaps in another one.

        Raises:
            Interrupted: another process goes on; all is saved.
        """
        epoch_end = self.step % self.steps.per_epoch == 0
        due = self.step > self.validated and self._due(self.cfg.run_val_every_n_steps, epoch_end)
        if not due or self.validation_rows is None:
            return
        if supervised.apart() and self._computed:
            self.save_checkpoint()
            raise Interrupted(f"before the validation of step {self.step}", self.interrupt.agree(self.ranks))
        self.validate()
        self.validated = self.step
        if supervised.apart():
            self.save_checkpoint()
            if self.step < self.total_steps and not self.stopped_early:
                raise Interrupted(f"after the validation of step {self.step}", self.interrupt.agree(self.ranks))

    @property
    def stopped_early(self) -> bool:
        """Whether the last ``early_stopping_patience`` validations brought no improvement."""
        patience = self.cfg.early_stopping_patience
        return bool(patience) and self.worse >= patience

    def validate(self) -> float | None:
        """Compute the objective on the validation rows, log it, and remember the best adapter.

        Returns:
            The normalised objective; None without validation rows.

        Raises:
            UserError: the loss is not finite.
        """
        if self.validation_rows is None:
            return None
        loss, labels, measurements = validation_loss(self.learner, self.validation_rows)
        if not math.isfinite(loss):
            raise UserError(f"step {self.step}: the validation loss is {loss}; lower the learning rate")
        also = {f"val_{name}": value for name, value in measurements.items()}
        self._compare({"val_loss": loss, **also})
        self.write_metrics(True, val_loss=loss, val_tokens=labels, **also)
        return loss

    def _compare(self, values: Mapping[str, float]) -> None:
        """Compare a validation with the best one so far, by ``early_stopping_metric``, and log it.

        Raises:
            UserError: its value is not finite.
        """
        metric, loss = self.cfg.early_stopping_metric, values["val_loss"]
        value = values.get(metric, math.nan)
        if not math.isfinite(value):
            raise UserError(f"step {self.step}: {metric} is {value}; set early_stopping_metric=val_loss")
        sign = 1 if _metric_direction(self.cfg, self.learner) == "higher" else -1
        best = self.best
        if best is None or sign * value > sign * best["value"]:
            adapter = self.learner.adapter_state()
            self.best = best = {"loss": loss, "step": self.step, "adapter": adapter, "metric": metric, "value": value}
            self.worse = 0
        else:
            self.worse += 1
        also = "" if metric == "val_loss" else f", {metric} {value:.4f}"
        so_far = f"best {best['value']:.4f} at step {best['step']}"
        log.info("step %d: validation loss %.4f%s (%s)", self.step, loss, also, so_far)

    @property
    def _metric_name(self) -> str:
        metric = self.cfg.early_stopping_metric
        return "validation loss" if metric == "val_loss" else metric

    def summary(self) -> dict[str, Any]:
        """Return the content of ``summary.json``."""
        best, metric = None, self.cfg.early_stopping_metric
        if self.best is not None:
            chosen_by = {} if metric == "val_loss" else {metric: self.best["value"]}
            best = {"loss": self.best["loss"], "step": self.best["step"], **chosen_by}
        return {
            **summarize(self.folder.path / "metrics.jsonl"),
            "rows": self.rows.counts,
            "data_sets": self.mixture.table(self.steps[step] for step in range(self.step)),
            "best_validation": best,
            "adapter_is": f"best by {self._metric_name}" if self.takes_best else "last",
            **super().summary(),
        }


def _metric_direction(cfg: DictConfig, learner: Learner) -> str:
    """Return whether ``higher`` or ``lower`` values of ``early_stopping_metric`` are better.

    Raises:
        UserError: the objective does not say.
    """
    objective = learner.objective
    ways = {"val_loss": "lower", **{f"val_{name}": way for name, way in objective.better.items()}}
    if (metric := cfg.early_stopping_metric) not in ways:
        loss = type(objective).__name__
        raise UserError(f"early_stopping_metric {metric} is unknown for loss {loss}{nearest(metric, ways)}")
    return ways[metric]
