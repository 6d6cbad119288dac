"""Updates of the policy on the answers of a step."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from omegaconf import DictConfig

from rocm_ext.base import registry
from rocm_ext.base.errors import UserError
from rocm_ext.base.files import read_lines
from rocm_ext.base.log import Progress, warn
from rocm_ext.base.types import Json
from rocm_ext.config.algorithms import updates_of_pass, updates_of_step
from rocm_ext.config.components import set_names
from rocm_ext.config.keys import free_keys
from rocm_ext.data.batches import StepLoader, label_counts
from rocm_ext.data.rows import Rows
from rocm_ext.model.adapters import peft_files
from rocm_ext.rl import evaluation
from rocm_ext.rl.records import Asked
from rocm_ext.rl.selection import Selected
from rocm_ext.sampling import sample_seed
from rocm_ext.train.checkpoint import State
from rocm_ext.train.forgetting import Forgetting, Scored, shares
from rocm_ext.train.learner import Learner
from rocm_ext.train.lifecycle import Interrupt
from rocm_ext.train.loop import Training
from rocm_ext.train.metrics import scores_of
from rocm_ext.train.output_dir import OutputDir

NO_UPDATES = {"updates": 0, "train_seconds": 0.0}
# Values of an update's line that `summarize_updates` treats in other ways than the objective's measurements
_OF_EVERY_UPDATE = frozenset(
    """
    step epoch loss lr grad_norm tokens tokens_per_second padding seconds peak_memory labels sequences token_gradient
    """.split()  # noqa: SIM905
)


class PolicyTrainer(Training):
    """Updates the adapter on the rows of a step; optimiser and schedule live as long as the run.

    A subclass in which they live for a step sets :attr:`updates_of_step` to 0 and builds them in :meth:`begin_step`.

    Args:
        learner, cfg, folder, metric_logger, interrupt: see :class:`Training`.
        inputs: values that a run shares with the one it resumes, such as hashes of its prompts.

    Attributes:
        done: updates of the unfinished step.
        update_lines: their measurements from :meth:`rocm_ext.train.loop.StepStats.line`, with ``labels`` and
            ``sequences``.
        first: the adapter that the run began with.
        lines: the lines of ``metrics.jsonl``, the same on all ranks.
        asked: see :class:`rocm_ext.rl.records.Records`; a checkpoint has it, because it decides the next prompts.
        evaluated: step of the last evaluation; -1 before the first.
        forgetting: compares the evaluations on named sets of prompts.
        saved: steps of the last checkpoint and of its last evaluation.
        stopped: why the run ends before its last step. None if it does not.
        fresh: whether the run began here, without a checkpoint.
    """

    free_keys = free_keys(*registry.SAMPLED)
    rules = ("min_entropy", "stop_after_no_gain", "max_length_share")
    # returns the folder of a step's adapter, where the run keeps one
    adapter_folder: Callable[[int], Path] | None = None

    def __init__(
        self,
        learner: Learner,
        cfg: DictConfig,
        folder: OutputDir,
        *,
        inputs: Mapping[str, str | int],
        metric_logger: Any = None,
        interrupt: Interrupt | None = None,
    ) -> None:
        super().__init__(learner, cfg, folder, metric_logger=metric_logger, interrupt=interrupt)
        self._inputs = inputs
        self.first = learner.adapter_state()
        self.done = 0
        self.update_lines: list[dict[str, float]] = []
        self.stopped: str | None = None
        self.evaluated = -1
        target, *_ = set_names(cfg, "eval_prompts")
        self.forgetting = Forgetting(target, "share of wrong held-out answers", self.unit)
        self.fresh = folder.resumed is None
        self.lines: list[Json] = []
        self.asked: Asked = {}
        self.saved = (-1, -1)

    def open(self) -> None:
        """Continue the folder's checkpoint, or claim the folder for a new run; all other set-up is done."""
        self.begin_run()
        if self.ranks.is_main:
            (self.folder.path / "samples.jsonl").touch()  # tells monitor that this is a run of GRPO
        self.ranks.barrier()
        self.lines = self.ranks.agree(list(read_lines(self.folder.path / "metrics.jsonl")))
        if self.fresh:
            self.save_checkpoint()
        self.saved = self.step, self.evaluated

    def begin_run(self) -> None:
        """Begin the run, see :meth:`begin`, and its progress."""
        total = self.steps * self.updates_of_step
        if not total and self.folder.resumed is not None:
            total = self.folder.resumed[1]["total_steps"]
        self.begin(total)
        self._progress = Progress(self.steps, self.step, self.ranks.is_main)

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self.cfg[f"{self.unit}s"]

    @property
    def goes_on(self) -> bool:
        """Whether steps follow."""
        return self.step < self.steps and self.stopped is None

    @property
    def updates_of_step(self) -> int:
        """Updates of a step in the run's schedule, even if few of its groups teach. 0 if a step has its own."""
        return updates_of_step(self.cfg)

    @property
    def updates(self) -> int:
        """Optimiser updates that are done in the schedule."""
        return self.step * self.updates_of_step + self.done

    @property
    def where(self) -> str:
        """Where the next update is in the run, for messages."""
        return f"{self.unit} {self.step + 1}, update {self.done + 1}"

    def keeps_line(self, line: Json) -> bool:
        """Return whether a resumed run keeps a line; it repeats the other steps, and evaluations from their records."""
        return line["step"] <= (self.step if "reward" in line else self.evaluated)

    def identity(self) -> dict[str, str | int | None]:
        """Return what a run shares with the one it resumes, in addition to the config."""
        return {
            **super().identity(),
            **self._inputs,
            "first adapter": peft_files.fingerprint(self.first),
        }

    def extra_state(self) -> State:
        """Return the part of a checkpoint that other trainings do not have."""
        state: State = {"evaluated": self.evaluated, "asked": self.asked}
        if self.forgetting.target:
            state["forgetting"] = self.forgetting.best, self.forgetting.sums
        return state

    def load_extra_state(self, state: State) -> None:
        """Take over the values of :meth:`extra_state` from a checkpoint's ``state``, for the finished steps."""
        missing = self.extra_state().keys() - state.keys()
        if missing:
            raise UserError(
                f"the checkpoint is an earlier version's and lacks {', '.join(sorted(missing))}; resume it with that "
                "version, or begin anew with overwrite_output_dir=True"
            )
        self.evaluated = state["evaluated"]
        compared = state.get("forgetting", ({}, {}))
        self.forgetting.best, self.forgetting.sums = compared
        for prompt, steps in state["asked"].items():
            finished = [entry for entry in steps if entry[0] <= self.step]
            if finished:
                self.asked[prompt] = finished

    # ---- a step

    def train_on(self, rows: Rows, groups: Sequence[str]) -> Json:
        """Do the updates of a step that are left.

        Args:
            rows: rows to train on. With the counts ``trained`` and ``answers``, a loss's mean over answers divides by
                ``answers``; without them, by the number of sequences.
            groups: the groups of the rows; see :meth:`deal`.

        Returns:
            Measurements of all updates for ``metrics.jsonl``, from :func:`summarize_updates`. ``lr_sum`` adds up the
            learning rates of the run's updates.
        """
        updates = self.deal(rows, groups)
        self.begin_step(len(updates))
        self.learner.model.train()
        # the memory plan cannot know which answers will share a prompt, so it counts a prompt per answer
        loader = StepLoader(
            rows, updates, self.learner.layout, pin_memory=self.cfg.pin_memory, count_shared=True
        )
        began = time.perf_counter()
        for update in loader.range(self.done, len(updates)):
            stats = self.train_step(
                replace(update, sequences=update.sequences / rows.trained_share)
            )
            self.done += 1
            line = stats.line(time.perf_counter() - began)
            sizes = {"labels": update.labels, "sequences": update.sequences}
            self.update_lines.append({**line, **sizes})
            self.finish_update(stats.interrupted)
            began = time.perf_counter()
        self.skip_updates(self.updates_of_step - self.done)
        if not self.done:
            return NO_UPDATES
        rates = sum(line["lr"] for line in self.update_lines)
        lr_sum = evaluation.lr_sum(self.lines) + rates
        return {**summarize_updates(self.update_lines), "lr_sum": lr_sum, "updates": self.done}

    def deal(self, rows: Rows, groups: Sequence[str]) -> Sequence[Sequence[int]]:
        """Return the rows of a step's updates: a pass deals the groups out evenly, in a new order.

        Args:
            rows: the rows of the step.
            groups: by row the name of its group, which an update never splits.
        """
        updates = []
        labels = [count for count, _ in label_counts(rows)]
        seed = self.cfg.seed
        for number in range(self.cfg.updates_per_step):
            order = {name: sample_seed(seed, self.step, name, number) for name in set(groups)}
            names = sorted(order, key=order.__getitem__)
            count = updates_of_pass(self.cfg, len(names))
            for part in range(count):
                chosen = set(names[part::count])
                indices = [i for i, group in enumerate(groups) if group in chosen]
                if any(labels[i] for i in indices):  # a server may answer with no token at all
                    updates.append(indices)
        return updates

    def begin_step(self, updates: int) -> None:
        """Run before the updates of a step, or the rest of them after a resume; ``updates`` counts all of them."""

    def finish_update(self, interrupted: bool) -> None:
        """Run after an update of a step; ``interrupted``: the user has asked to stop."""

    def train_on_nothing(self) -> Json:
        """Advance the schedule by a step without rows, and return what :meth:`train_on` returns."""
        self.skip_updates(self.updates_of_step)
        return NO_UPDATES

    def finish_step(self, selected: Selected, updates: Json, seconds: float) -> None:
        """Count a step and log it, with the ``updates`` from :meth:`train_on`."""
        lag = selected.policy_lag(self.adapter_step)
        self.step += 1
        self.done = 0
        self.update_lines = []
        values = {
            **selected.measurements(),
            **updates,
            "policy_lag": lag,
            "seconds": seconds,
            **self.resources(),
        }
        self.log(self.step % self.cfg.log_every_n_steps == 0, **values)
        if self.ranks.is_main:
            warn(evaluation.advice(self.lines))
        shown = f"loss {values['loss']:.4f}" if values["updates"] else "no updates"
        if values["reward"] is not None and "advantages" in self.learner.objective.columns:
            shown = f"reward {values['reward']:.3f}  {values['flat']:.0%} of {values['groups']} groups flat"
        elif values["reward"] is not None:
            shown += f"  reward {values['reward']:.3f}"
        self._progress.update(f"{shown}  {values['mean_tokens']:.0f} tokens  {seconds:.1f} s")

    def finish_evaluation(
        self, step: int, judged: Mapping[str, Scored], stats: Mapping[str, float]
    ) -> None:
        """Log an evaluation of the adapter of ``step``, and remember the adapter if it is the best on the target."""
        self.evaluated = step
        scores = judged[self.forgetting.target].scores
        if step and (self.best is None or scores["correct"] > self.best["score"]):
            self.best = {
                "score": scores["correct"],
                "step": step,
                "adapter": self.learner.adapter_state(),
            }
        self.log(False, step=step, **self.forgetting.line(step, judged, stats["seconds"]))
        self.log_numbers(shares(judged))

    def log(self, to_logger: bool, **values: Any) -> None:
        """Write a line of ``metrics.jsonl``, and add it to ``lines``; the metric logger gets the numbers in it."""
        self.write_metrics(False, **values)
        line = {**self.position(), **values}
        self.lines.append(self.ranks.agree(line))
        if to_logger:
            self.log_numbers(values)

    # ---- checkpoints

    def save_checkpoint(self) -> None:
        """Write a checkpoint; see :meth:`Training.save_checkpoint`."""
        super().save_checkpoint()
        self.saved = self.step, self.evaluated

    def save_if_due(self) -> None:
        """Write a checkpoint every ``save_every_n_steps`` steps and after the last."""
        every = self.cfg.save_every_n_steps
        due = every and self.step % every == 0
        if due or self.step == self.steps:
            self.save_checkpoint()

    def save_if_new(self) -> None:
        """Write a checkpoint unless the last one has the present step and its evaluation."""
        if self.saved != (self.step, self.evaluated):
            self.save_checkpoint()

    def summary(self) -> Json:
        """Return the content of ``summary.json``."""
        steps = evaluation.steps_of(self.lines)
        return {
            "steps": self.step,
            "first_reward": steps[0]["reward"] if steps else None,
            "last_reward": steps[-1]["reward"] if steps else None,
            "evaluations": scores_of(self.lines),
            "best_step": None if self.best is None else self.best["step"],
            "adapter_is": "last" if self.best is None else "best by held-out score",
            "samples": sum(line["answers"] for line in steps),
            "tokens": sum(line.get("tokens", 0) for line in steps),
            "seconds": sum(line["seconds"] for line in self.lines),
            "stopped": self.stopped,
            **super().summary(),
        }


def summarize_updates(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Summarise the updates of a step.

    Args:
        lines: measurements by update, as in :attr:`PolicyTrainer.update_lines`.

    Returns:
        Means over the updates; maxima of measurements that end in ``_max``; the last ``lr``; sums of ``tokens`` and,
        as ``train_seconds``, of seconds. An update has ``informative_answers``, and ``effective_tokens``, the sum of
        its labels' ``token_gradient``. Empty without updates.
    """
    if not lines:
        return {}
    tokens = sum(line["tokens"] for line in lines)
    computed = sum(line["tokens"] / (1 - line["padding"]) for line in lines)
    seconds = sum(line["seconds"] for line in lines)
    summary = {
        "loss": fmean(line["loss"] for line in lines),
        "lr": lines[-1]["lr"],
        "informative_answers": fmean(line["sequences"] for line in lines),
        "grad_norm": fmean(line["grad_norm"] for line in lines),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "train_seconds": seconds,
        "padding": 1 - tokens / computed,
    }
    measured: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        for name in line.keys() - _OF_EVERY_UPDATE:
            measured[name].append(line[name])
    for name, values in sorted(measured.items()):
        summary[name] = max(values) if name.endswith("_max") else fmean(values)
    if "token_gradient" in lines[0]:  # our policy gradients measure it, not every objective
        effective = [line["token_gradient"] * line["labels"] for line in lines]
        summary["effective_tokens"] = fmean(effective)
    return summary
