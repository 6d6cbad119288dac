"""Updates of the policy on the answers of a step."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from omegaconf import DictConfig

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import read_lines
from rocm_ext.base.log import Progress, log
from rocm_ext.base.types import Json
from rocm_ext.config.algorithms import updates_of_pass, updates_of_step
from rocm_ext.data.batches import StepLoader, label_counts
from rocm_ext.data.rows import Rows
from rocm_ext.model.adapters import peft_files
from rocm_ext.rl import evaluation
from rocm_ext.rl.records import Asked
from rocm_ext.rl.selection import Selected
from rocm_ext.runs.records import EvalScores
from rocm_ext.sampling import sample_seed
from rocm_ext.train.checkpoint import FREE_KEYS, State
from rocm_ext.train.learner import Learner
from rocm_ext.train.lifecycle import Interrupt
from rocm_ext.train.loop import StepStats, Training
from rocm_ext.train.output_dir import OutputDir

# Keys that a resumed GRPO run may change, in addition to FREE_KEYS
GRPO_FREE_KEYS = FREE_KEYS | frozenset(
    """
    steps prompts eval_prompts verify_workers verify_timeout max_error_share max_flat_steps stop_after_no_gain
    min_entropy max_length_share eval_every_n_steps keep_samples max_staleness
    engine.slots engine.graphs engine.urls engine.concurrency engine.timeout engine.patience engine.api_key_env
    teacher teacher_adapter
    """.split()  # noqa: SIM905
)
NO_UPDATES = {"updates": 0, "train_seconds": 0.0}


class PolicyTrainer(Training):
    """Updates the adapter on the rows of a step; optimiser and schedule live as long as the run.

    Args:
        learner, cfg, folder, metric_logger, interrupt: see :class:`Training`.
        inputs: hashes that a run shares with the one it resumes, such as of its prompts.

    Attributes:
        first: the adapter that the run began with.
        lines: the lines of ``metrics.jsonl``, the same on all ranks.
        asked: see :class:`rocm_ext.rl.records.Records`; a checkpoint has it, because it decides the next prompts.
        evaluated: step of the last evaluation; -1 before the first.
        saved: steps of the last checkpoint and of its last evaluation.
        stopped: why the run ends before its last step; None: it does not.
        fresh: whether the run began here, without a checkpoint.
    """

    free_keys = GRPO_FREE_KEYS
    rules = ("min_entropy", "stop_after_no_gain", "max_length_share")
    adapter_folder: Callable[[int], Path] | None = None  # of the adapter of a step, where the run keeps one

    def __init__(
        self,
        learner: Learner,
        cfg: DictConfig,
        folder: OutputDir,
        *,
        inputs: Mapping[str, str],
        metric_logger: Any = None,
        interrupt: Interrupt | None = None,
    ) -> None:
        super().__init__(learner, cfg, folder, metric_logger=metric_logger, interrupt=interrupt)
        self._inputs, self.first = inputs, learner.adapter_state()
        self.stopped: str | None = None
        self.evaluated, self.fresh = -1, folder.resumed is None
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
        self.begin(self.cfg.steps * self.updates_of_step)
        self._progress = Progress(self.cfg.steps, self.step, self.ranks.is_main)

    @property
    def updates_of_step(self) -> int:
        """Updates of a step in the schedule, even if few of its groups teach."""
        return updates_of_step(self.cfg)

    @property
    def updates(self) -> int:
        """Optimiser updates that the steps done take in the schedule."""
        return self.step * self.updates_of_step

    def keeps_line(self, line: Json) -> bool:
        """Return whether a resumed run keeps a line; it repeats the other steps, and evaluations from their records."""
        return line["step"] <= (self.evaluated if "eval" in line else self.step)

    def identity(self) -> dict[str, str | int | None]:
        """Return what a run shares with the one it resumes, in addition to the config."""
        return {**super().identity(), **self._inputs, "first adapter": peft_files.fingerprint(self.first)}

    def extra_state(self) -> State:
        """Return the part of a checkpoint that other trainings do not have."""
        return {"evaluated": self.evaluated, "asked": self.asked}

    def load_extra_state(self, state: State) -> None:
        """Take over the values of :meth:`extra_state` from a checkpoint's ``state``, for the finished steps."""
        self.evaluated = state["evaluated"]
        if "asked" not in state:
            raise UserError(
                "the checkpoint is an earlier version's and lacks the pass rates that choose prompts; resume it with "
                "that version, or begin anew with overwrite_output_dir=True"
            )
        for prompt, steps in state["asked"].items():
            if finished := [entry for entry in steps if entry[0] <= self.step]:
                self.asked[prompt] = finished

    # ---- a step

    def train_on(self, rows: Rows, groups: Sequence[str]) -> dict[str, float]:
        """Do the updates of a step.

        Args:
            rows: rows to train on. With the counts ``trained`` and ``answers``, a loss's mean over answers divides by
                ``answers``; without them, by the number of sequences.
            groups: the groups of the rows. An update never splits a group.

        Returns:
            Means over the updates, for ``metrics.jsonl``; maxima of measurements that end in ``_max``. An update has
            ``informative_answers``, and ``effective_tokens``, the sum of their labels' ``token_gradient``. ``lr_sum``
            adds up the learning rates of the run's updates.
        """
        done: list[StepStats] = []
        labels, answers = [], []  # by update
        self.learner.model.train()
        began = time.perf_counter()
        updates = self._rows_of_updates(rows, groups)
        layout, cfg = self.learner.layout, self.cfg
        # the memory plan cannot know which answers will share a prompt, so it counts a prompt per answer
        loader = StepLoader(rows, updates, layout, pin_memory=cfg.pin_memory, count_shared=True)
        share = rows.counts.get("trained", 1) / rows.counts.get("answers", 1)
        for update in loader.range(0, len(updates)):
            done.append(self.train_step(replace(update, sequences=update.sequences / share)))
            labels.append(update.labels)
            answers.append(update.sequences)
        seconds = time.perf_counter() - began
        self.skip_updates(self.updates_of_step - len(done))
        if not done:
            return NO_UPDATES
        tokens, computed = sum(s.tokens for s in done), sum(s.tokens / (1 - s.padding) for s in done)
        measured: dict[str, list[float]] = {}
        for stats in done:
            for name, value in stats.measurements.items():
                measured.setdefault(name, []).append(value)
        if "token_gradient" in measured:  # of our policy gradients, not of any objective
            sizes = zip(measured.pop("token_gradient"), labels, strict=True)
            measured["effective_tokens"] = [mean * count for mean, count in sizes]
        return {
            "loss": fmean(s.loss for s in done),
            "lr": done[-1].lr,
            "lr_sum": evaluation.lr_sum(self.lines) + sum(s.lr for s in done),
            "informative_answers": fmean(answers),
            "grad_norm": fmean(s.grad_norm for s in done),
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "train_seconds": seconds,
            "padding": 1 - tokens / computed,
            "updates": len(done),
            **{name: (max if name.endswith("_max") else fmean)(values) for name, values in measured.items()},
        }

    def train_on_nothing(self) -> dict[str, float]:
        """Advance the schedule by a step without rows, and return what :meth:`train_on` returns."""
        self.skip_updates(self.updates_of_step)
        return NO_UPDATES

    def _rows_of_updates(self, rows: Rows, groups: Sequence[str]) -> list[list[int]]:
        """Return the rows of the updates: a pass deals the groups out evenly, in a new order."""
        updates = []
        labels = [count for count, _ in label_counts(rows)]
        for number in range(self.cfg.updates_per_step):
            names = sorted(set(groups), key=lambda name: sample_seed(self.cfg.seed, self.step, name, number))
            count = updates_of_pass(self.cfg, len(names))
            for part in range(count):
                chosen = set(names[part::count])
                indices = [i for i, group in enumerate(groups) if group in chosen]
                if any(labels[i] for i in indices):  # a server may answer with no token at all
                    updates.append(indices)
        return updates

    def finish_step(self, selected: Selected, updates: Json, seconds: float) -> None:
        """Count a step and log it, with the ``updates`` from :meth:`train_on`."""
        self.step += 1
        lag = {"policy_lag": selected.policy_lag(self.step)}
        values = selected.measurements() | dict(updates) | lag | {"seconds": seconds} | self.memory()
        self.log(self.step % self.cfg.log_every_n_steps == 0, **values)
        for line in evaluation.advice(self.lines) if self.ranks.is_main else ():
            log.warning("%s", line)
        shown = f"loss {values['loss']:.4f}" if values["updates"] else "no updates"
        if values["reward"] is not None and "advantages" in self.learner.objective.columns:
            shown = f"reward {values['reward']:.3f}  {values['flat']:.0%} of {values['groups']} groups flat"
        elif values["reward"] is not None:
            shown += f"  reward {values['reward']:.3f}"
        self._progress.update(f"{shown}  {values['mean_tokens']:.0f} tokens  {seconds:.1f} s")

    def finish_evaluation(self, step: int, scores: EvalScores, stats: Mapping[str, float]) -> None:
        """Log an evaluation of the adapter of ``step``, and remember the adapter if it is the best so far."""
        self.evaluated = step
        if step and (self.best is None or scores["correct"] > self.best["score"]):
            self.best = {"score": scores["correct"], "step": step, "adapter": self.learner.adapter_state()}
        self.log(False, eval=scores, seconds=stats["seconds"])
        self.log_numbers({"eval_correct": scores["pass_at_1"]})

    def log(self, to_logger: bool, **values: Any) -> None:
        """Write a line of ``metrics.jsonl``, and add it to ``lines``; the metric logger gets the numbers in it."""
        self.write_metrics(False, **values)
        self.lines.append(self.ranks.agree({**self.position(), **values}))
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
        if (every and self.step % every == 0) or self.step == self.cfg.steps:
            self.save_checkpoint()

    def save_if_new(self) -> None:
        """Write a checkpoint unless the last one has the present step and its evaluation."""
        if self.saved != (self.step, self.evaluated):
            self.save_checkpoint()

    def summary(self) -> Json:
        """Return the content of ``summary.json``."""
        steps = [line for line in self.lines if "eval" not in line]
        keys = ("correct", "prompts", "pass_at_1", "interval")
        evaluations = [line for line in self.lines if "eval" in line]
        return {
            "steps": self.step,
            "first_reward": steps[0]["reward"] if steps else None,
            "last_reward": steps[-1]["reward"] if steps else None,
            "evaluations": [{"step": e["step"]} | {key: e["eval"][key] for key in keys} for e in evaluations],
            "best_step": None if self.best is None else self.best["step"],
            "adapter_is": "last" if self.best is None else "best by held-out score",
            "samples": sum(line["answers"] for line in steps),
            "tokens": sum(line.get("tokens", 0) for line in steps),
            "seconds": sum(line["seconds"] for line in self.lines),
            "stopped": self.stopped,
            **super().summary(),
        }
