"""One training run over rows: epochs, validation, and evaluation by answers."""

import math
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rocm_ext.base.errors import UserError, nearest
from rocm_ext.base.files import read_lines
from rocm_ext.base.log import Progress, log
from rocm_ext.base.types import Json
from rocm_ext.config.checks.training import EVAL_METRIC, by_answers
from rocm_ext.config.components import set_names
from rocm_ext.data.batches import StepLoader, Steps, Update, rows_per_step
from rocm_ext.data.mixture import Mixture
from rocm_ext.data.rows import Rows
from rocm_ext.data.training_rows import ValidationRows, validation_sets
from rocm_ext.runs.records import column, of_sets
from rocm_ext.train.checkpoint import Best, State
from rocm_ext.train.forgetting import Forgetting, in_words, shares
from rocm_ext.train.learner import Learner
from rocm_ext.train.lifecycle import Interrupt, Interrupted
from rocm_ext.train.loop import StepStats, Training
from rocm_ext.train.metrics import scores_of, summarize
from rocm_ext.train.output_dir import OutputDir
from rocm_ext.train.scoring import set_baseline, validation_loss


class Trainer(Training):
    """One run of ``cfg.epochs`` epochs over ``rows``, fresh or resumed.

    To change a part, subclass and override :meth:`setup_optimizer`, :meth:`setup_scheduler` or :meth:`train_step`.

    Args:
        learner, cfg, folder, metric_logger, interrupt: see :class:`Training`.
        rows: training rows.
        validation_rows: validation rows, or those of named data sets by name; None disables validation.
        evaluation: a :class:`rocm_ext.evaluate.answers.Evaluator`, which evaluates the model before the first step,
            between steps, and after the last; None disables evaluation.

    Attributes:
        steps: the rows of the steps.
        mixture: the data sets of the rows.
        metric: ``early_stopping_metric``; with named data sets, the target's: the first one's if it names none.
        forgetting: compares the validations of named data sets.
        forgetting_answers: compares the evaluations on named sets of prompts.
        best: loss (None of an evaluation), step, adapter, metric and value of the best validation or evaluation so far
            by ``metric``; None before the first.
    """

    def __init__(
        self,
        learner: Learner,
        rows: Rows,
        cfg: DictConfig,
        folder: OutputDir,
        *,
        validation_rows: ValidationRows = None,
        metric_logger: Any = None,
        interrupt: Interrupt | None = None,
        evaluation: Any = None,
    ) -> None:
        super().__init__(learner, cfg, folder, metric_logger=metric_logger, interrupt=interrupt)
        self.rows = rows
        self.validation_rows = validation_rows
        self.validation_sets = {}
        for key, part in validation_sets(validation_rows).items():
            self.validation_sets[key.partition(".")[2]] = part
        metric, _, chosen = cfg.early_stopping_metric.partition("/")
        target = next(iter(self.validation_sets), "")
        target_prompts, *_ = set_names(cfg, "eval_prompts")
        if by_answers(cfg):
            target_prompts = chosen or target_prompts
            self.metric = column(metric, target_prompts)
        else:
            target = chosen or target
            self.metric = column(metric, target)
        self.forgetting = Forgetting(target)
        self.forgetting_answers = Forgetting(target_prompts, "share of wrong held-out answers")
        self.evaluation = evaluation
        self.worse = 0  # number of validations, or evaluations, since the best one
        self.validated = -1 if target else 0  # step of the last validation
        self.evaluated = -1  # step of the last evaluation
        for part in (rows, *self.validation_sets.values()):
            learner.check_rows(part)
        self.mixture = Mixture.of(cfg.dataset, rows)
        self.steps = Steps(
            len(rows),
            rows_per_step(cfg, self.ranks.world),
            cfg.max_steps_per_epoch,
            cfg.data_seed,
            cfg.shuffle,
            self.mixture,
        )
        self.loader = StepLoader(rows, self.steps, learner.layout, cfg.num_workers, cfg.pin_memory)

    def open(self) -> None:
        """Continue the folder's checkpoint, or claim the folder for a new run; all other set-up is done."""
        steps = self.steps
        log.info(
            "%s rows, %d per step, %d steps per epoch",
            f"{len(self.rows):,}",
            steps.per_step,
            steps.per_epoch,
        )
        fresh = self.folder.resumed is None
        self.begin(steps.per_epoch * self.cfg.epochs)
        if self.evaluation is not None:
            self.evaluation.open_records(self.step, self.evaluated)
            if fresh:  # a run that is killed before its next checkpoint then finds the answers recorded by then
                self.save_checkpoint()

    @classmethod
    def check(cls, cfg: DictConfig, learner: Learner, rows: int) -> None:
        """Try out optimiser and schedule for ``rows`` rows, see :meth:`Training.try_out`.

        Raises:
            UserError: also if validations do not measure ``early_stopping_metric``.
        """
        _metric_direction(cfg, learner)
        steps = Steps(
            rows, rows_per_step(cfg, learner.runtime.ranks.world), cfg.max_steps_per_epoch
        ).per_epoch
        cls.try_out(cfg, learner, steps * cfg.epochs)

    @property
    def best_to_keep(self) -> Best | None:
        """The best adapter if ``adapter/`` gets it: with ``early_stopping_patience``."""
        return self.best if self.cfg.early_stopping_patience else None

    def position(self) -> dict[str, int]:
        """Return step and epoch, from 1."""
        epoch = (self.step - 1) // self.steps.per_epoch + 1
        return {"step": self.step, "epoch": epoch}

    def identity(self) -> dict[str, str | int | None]:
        """Return what a run shares with the one it resumes, in addition to the config."""
        weights = self.mixture.weights
        validation = []
        for name, part in self.validation_sets.items():
            validation.append(f"{name} {part.fingerprint()}".strip())
        return {
            **super().identity(),
            "data": self.rows.fingerprint(),
            "validation data": ", ".join(validation) or None,
            "rows per step": self.steps.per_step,
            "rows and weights of the data sets": (
                str(self.mixture.rows + weights) if weights else None
            ),
            "eval prompts": self.evaluation.fingerprint() if self.evaluation is not None else None,
        }

    def keeps_line(self, line: Json) -> bool:
        """Return whether a line of ``metrics.jsonl`` stays when the run resumes."""
        last = self.step
        if of_sets([line]):
            last = self.validated
        elif of_sets([line], "eval"):
            last = self.evaluated
        return line["step"] <= last

    def extra_state(self) -> State:
        """Return the steps of the last validation and evaluation, their number since the best, and named data sets'."""
        state: State = {
            "worse": self.worse,
            "validated": self.validated,
            "evaluated": self.evaluated,
        }
        if self.forgetting.target:
            state["forgetting"] = self.forgetting.best, self.forgetting.sums
        if self.forgetting_answers.target:
            state["forgetting_answers"] = self.forgetting_answers.best, self.forgetting_answers.sums
        return state

    def load_extra_state(self, state: State) -> None:
        """Restore the values of :meth:`extra_state`; a changed metric resets the best."""
        self.validated = state["validated"]
        self.evaluated = state.get("evaluated", -1)
        self.forgetting.best, self.forgetting.sums = state.get("forgetting", ({}, {}))
        compared = state.get("forgetting_answers", ({}, {}))
        self.forgetting_answers.best, self.forgetting_answers.sums = compared
        if self.best is None or self.best["metric"] == self.metric:
            self.worse = state["worse"]
        else:
            self.best = None
            log.info(
                "early_stopping_metric is now %s: the best validation is one of those to come",
                self.metric,
            )

    def check_length(self, path: Path, state: State) -> bool:
        """Check ``epochs`` and ``max_steps_per_epoch`` as :meth:`Training.check_length` does.

        Raises:
            UserError: the checkpoint is past this run's end, or its steps had other rows.
        """
        now = self.steps
        before = replace(now, limit=state["config"]["max_steps_per_epoch"])
        shorter, longer = sorted((before.per_epoch, now.per_epoch))
        if shorter != longer and self.step > shorter:
            raise UserError(
                f"{path} has {self.step} steps, so max_steps_per_epoch cannot change from {before.limit} to "
                f"{now.limit}: with it these steps would have had other rows. Undo the change; epochs may be "
                "raised"
            )
        return super().check_length(path, state)

    # ---- the run

    def train_step(self, update: Update) -> StepStats:
        """Set the objective's baseline, if it has one, and do an update; see :meth:`Training.train_step`."""
        set_baseline(self.learner, self.rows, update.rows)
        return super().train_step(update)

    def train(self) -> None:
        """Train to the last step, then write the outputs.

        Raises:
            Interrupted: the user asked to stop; the last step is saved.
        """
        self.learner.model.train()
        if self.step == self.total_steps:
            log.info("all %d steps are done already; raise epochs to train further", self.step)
        with self.interrupt:
            self.measure()  # before the first step, or after a process that ended for it
            self.train_epochs(self.loader, self.steps.per_epoch)
        if self.stopped_early:
            without = f"{self.worse} {'evaluations' if by_answers(self.cfg) else 'validations'}"
            log.info(
                "stopped early at step %d: %s without a better %s",
                self.step,
                without,
                self._metric_name,
            )
        self.write_outputs()

    def train_epochs(self, loader: StepLoader, per_epoch: int) -> None:
        """Do the steps that are left: log each, measure and save where due.

        Raises:
            Interrupted: the user asked to stop; the last step is saved.
        """
        cfg = self.cfg
        with closing(Progress(self.total_steps, self.step, self.ranks.is_main)) as progress:
            while self.goes_on:
                end = (self.step // per_epoch + 1) * per_epoch
                began = time.perf_counter()
                for update in loader.range(self.step, end):
                    stats = self.train_step(update)
                    self.step += 1
                    seconds = time.perf_counter() - began
                    line = stats.line(seconds) | self.resources()
                    self.write_metrics(self.step % cfg.log_every_n_steps == 0, **line)
                    progress.update(f"loss {stats.loss:.4f}  {stats.tokens / seconds:,.0f} tok/s")
                    self.measure()
                    every = cfg.save_every_n_steps
                    due = self.step == end or (every and self.step % every == 0)
                    if stats.interrupted or self.stopped_early or due:
                        self.save_checkpoint()
                    if stats.interrupted:
                        self.interrupt.check(f"at step {self.step}", self.ranks)
                    if self.stopped_early:
                        break
                    began = time.perf_counter()

    def measure(self) -> None:
        """Validate and evaluate this step, if due and not done yet."""
        if not (self._validation_is_due or self._evaluation_is_due):
            return
        with self.evaluating(f"the validation of step {self.step}"):
            if self._validation_is_due:
                self.validate()
                self.validated = self.step
            if self._evaluation_is_due:  # also after a validation that ends the run
                self.evaluate()
                self.evaluated = self.step

    @property
    def _validation_is_due(self) -> bool:
        every = self.cfg.run_val_every_n_steps or self.steps.per_epoch
        due = self.step % every == 0
        return due and bool(self.validation_sets) and self.step > self.validated

    @property
    def _evaluation_is_due(self) -> bool:
        every = self.cfg.eval_every_n_steps or self.steps.per_epoch
        ends = self.step == self.total_steps or self.stopped_early
        due = ends or self.step % every == 0
        return due and self.evaluation is not None and self.step > self.evaluated

    @property
    def stopped_early(self) -> bool:
        """Whether the last ``early_stopping_patience`` validations, or evaluations, brought no improvement."""
        patience = self.cfg.early_stopping_patience
        return bool(patience) and self.worse >= patience

    @property
    def goes_on(self) -> bool:
        """Whether steps follow."""
        return super().goes_on and not self.stopped_early

    def validate(self) -> float:
        """Return the normalised objective on the validation rows, of named data sets the target's.

        This logs it, remembers the best adapter, and warns if the model may forget.
        """
        values: dict[str, Any] = {}
        results = {}
        for name, rows in self.validation_sets.items():
            results[name] = result = validation_loss(self.learner, rows)
            measured = {"loss": result.loss, "tokens": result.labels, **result.measurements}
            for what, value in measured.items():
                values[column(f"val_{what}", name)] = value
        losses = []
        for key, title in of_sets([values]).items():
            if not math.isfinite(values[key]):
                raise UserError(
                    f"step {self.step}: the {title} is {values[key]}; lower the learning rate"
                )
            losses.append(f"{title} {values[key]:.4f}")
        # of named data sets, the first validation is before the first step
        compared = self.step > 0 and not by_answers(self.cfg)
        so_far = self._compare(values) if compared else ""
        log.info("step %d: %s%s", self.step, ", ".join(losses), so_far)
        values |= self.forgetting.warnings(self.step, results)
        self.write_metrics(True, **values)
        return results[self.forgetting.target].loss

    def evaluate(self) -> None:
        """Evaluate the model by its answers, log that, and remember the best adapter."""

        try:
            judged, seconds = self.evaluation.evaluate(self.step)
        except Interrupted:
            self.save_checkpoint()
            raise
        self.learner.model.train()
        compared = self.step > 0 and by_answers(self.cfg)
        so_far = self._compare(shares(judged)) if compared else ""
        log.info("step %d: %s%s", self.step, in_words(judged), so_far)
        self.write_metrics(False, **self.forgetting_answers.line(self.step, judged, seconds))
        self.log_numbers(shares(judged))

    def _compare(self, values: Mapping[str, float]) -> str:
        """Compare measurements with the best so far by ``early_stopping_metric``, and return a text for the log."""
        metric = self.metric
        value = values.get(metric, math.nan)
        if not math.isfinite(value):
            raise UserError(
                f"step {self.step}: {metric} is {value}; set early_stopping_metric=val_loss"
            )
        sign = 1 if _metric_direction(self.cfg, self.learner) == "higher" else -1
        best = self.best
        if best is None or sign * value > sign * best["value"]:
            self.best = best = {
                "loss": values.get(column("val_loss", self.forgetting.target)),
                "step": self.step,
                "adapter": self.learner.adapter_state(),
                "metric": metric,
                "value": value,
            }
            self.worse = 0
        else:
            self.worse += 1
        also = "" if metric in ("val_loss", EVAL_METRIC) else f", {metric} {value:.4f}"
        return f"{also} (best {best['value']:.4f} at step {best['step']})"

    def chosen(self) -> tuple[int, int, str]:
        """Return the step of the adapter in ``adapter/``, the number of evaluations that chose it, and their target."""
        best = self.best_to_keep
        target = self.forgetting_answers.target
        if best is None:
            return self.step, 1, target
        evaluations = 0
        if by_answers(self.cfg):
            for line in read_lines(self.folder.path / "metrics.jsonl"):
                evaluations += bool(of_sets([line], "eval")) and line["step"] > 0
        return best["step"], max(1, evaluations), target

    @property
    def _metric_name(self) -> str:
        metric = self.metric
        return {"val_loss": "validation loss", EVAL_METRIC: "held-out score"}.get(metric, metric)

    def summary(self) -> Json:
        """Return the content of ``summary.json``."""
        best = None
        if self.best is not None:
            named = {"loss": self.best["loss"], "step": self.best["step"]}
            if self.best["metric"] != "val_loss":
                named[self.best["metric"]] = self.best["value"]
            best = {name: value for name, value in named.items() if value is not None}
        sets: Json = {}
        if self.forgetting.best:
            sets["validation_sets"] = self.forgetting.best
        if self.forgetting_answers.target:
            sets["evaluations"] = scores_of(read_lines(self.folder.path / "metrics.jsonl"))
        return {
            **summarize(self.folder.path / "metrics.jsonl"),
            "rows": self.rows.counts,
            "data_sets": self.mixture.table(self.steps[step] for step in range(self.step)),
            "best_validation": best,
            **sets,
            "adapter_is": f"best by {self._metric_name}" if self.best_to_keep else "last",
            **super().summary(),
        }


def _metric_direction(cfg: DictConfig, learner: Learner) -> str:
    """Return whether ``higher`` or ``lower`` values of ``early_stopping_metric`` are better."""
    metric = cfg.early_stopping_metric
    of_rows = {f"val_{name}": way for name, way in learner.objective.better.items()}
    of_rows["val_loss"] = "lower"
    ways = of_rows | {EVAL_METRIC: "higher"}
    for name in set_names(cfg, "dataset_val"):
        ways |= {column(measured, name): way for measured, way in of_rows.items()}
    for name in set_names(cfg, "eval_prompts"):
        ways[column(EVAL_METRIC, name)] = "higher"
    if metric not in ways:
        loss = type(learner.objective).__name__
        raise UserError(
            f"early_stopping_metric {metric} is unknown for loss {loss}{nearest(metric, ways)}"
        )
    return ways[metric]
