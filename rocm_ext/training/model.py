"""A model in training: gradients, optimiser steps, samples and saved states, one call each."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any
from weakref import finalize

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from rocm_ext.base.errors import UserError, nearest, one_line
from rocm_ext.base.files import replace_folder
from rocm_ext.base.log import Progress, log, warn
from rocm_ext.base.types import Json, Message
from rocm_ext.chat.conversation import Chat, model_sampling
from rocm_ext.config.chosen_model import BASE
from rocm_ext.data.batches import MicroBatch, Steps, Update, label_counts
from rocm_ext.data.render import render_prompt
from rocm_ext.data.rows import SIDE, Rows
from rocm_ext.data.sources import ROW_WEIGHT
from rocm_ext.export import open_source
from rocm_ext.export.gguf_model import write_model
from rocm_ext.export.push import card
from rocm_ext.export.source import write_merged
from rocm_ext.losses import Objective
from rocm_ext.losses.distillation import HIDDEN, LOGPROBS
from rocm_ext.losses.objective import REFERENCE
from rocm_ext.machine.budget import readable
from rocm_ext.plan.workload import Workload
from rocm_ext.rl.engines import free_memory, open_engines
from rocm_ext.rl.loop import RLRecipe
from rocm_ext.sampling import Completion, Request, Sampling, sample_seed
from rocm_ext.train.builders import is_rate
from rocm_ext.train.checkpoint import read_state, rng_state, set_rng_state, write_state
from rocm_ext.train.lifecycle import Interrupt
from rocm_ext.train.loop import Training
from rocm_ext.train.output_dir import OutputDir, hold
from rocm_ext.train.scoring import (
    MISMATCHED,
    logprobs_by_row,
    micro_batches,
    reference,
    score,
    set_baseline,
)
from rocm_ext.train.teacher import Teacher
from rocm_ext.training.losses import objective
from rocm_ext.training.progress import Shown
from rocm_ext.training.rows import Answer, Data, to_rows

Prompt = str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True)
class Output:
    """What :meth:`Model.forward_backward` computed.

    Attributes:
        loss: the objective, normalised over the labels or sequences of this call.
        summed: the objective's sum, before this division.
        logprobs: by row, the log-probs of its labels in order, fp32, before the next optimiser step.
        metrics: other measurements of the objective, by name.
    """

    loss: float
    summed: float
    logprobs: list[np.ndarray]
    metrics: dict[str, float]


class _Opened(RLRecipe):
    """The parts of a recipe that a model in training needs."""

    judges = False
    samples_new_adapters = True
    sessions_stay_open = True

    def open_folder(self) -> None:
        """Create the output folder and seed all random generators."""
        self.folder = OutputDir.open(self.cfg, self.ranks)

    def open_beside(self, other: RLRecipe, tokenizer: Any, work: Workload, taken: int) -> None:
        """Prepare model and engines over the base weights of ``other``; for the arguments see :class:`Model`."""
        self.runtime = other.runtime
        self.ranks = other.ranks
        self.open_folder()
        self.learner = self._learner_class(self.training_config(), self.runtime, tokenizer)
        self.engines = open_engines(self.cfg, self.learner, self.stopped, self.sampling, [], False)
        taken += self.engines.layout_bytes
        self.learner.plan(work, taken, other.learner.planned_budget)
        self.learner.check_budget()
        self.learner.load_beside(other.learner)


class Model:
    """A model with an adapter in training; :func:`rocm_ext.training.open` makes one.

    Args:
        cfg: config for sampling, with the keys of training.
        output_dir: folder for ``config.yaml`` and ``metrics.jsonl``; None keeps nothing.
        state: folder from :meth:`save` to continue from.
        beside: a model whose base weights this one uses; ``cfg`` has the same base model.
        taken: bytes that further models over these weights hold while this one computes.

    Attributes:
        cfg: the config that it was opened with.
        learner: decoder, adapter and objective, for programs that need them.
        step: optimiser steps done.
        metrics: measurements of each step, as in ``metrics.jsonl``.
        tokenizer: the model's tokenizer.
    """

    def __init__(
        self,
        cfg: DictConfig,
        output_dir: Path | None = None,
        state: Path | None = None,
        *,
        beside: "Model | None" = None,
        taken: int = 0,
    ) -> None:
        cfg.resume_from_checkpoint = state is not None
        self.cfg = cfg
        self.metrics: list[Json] = []
        self._shown = Shown()
        self._said: set[str] = set()  # warnings about rows
        self._keeps = output_dir is not None
        with ExitStack() as stack:
            folder = output_dir or stack.enter_context(TemporaryDirectory())
            cfg.output_dir = cfg.checkpointer.output_dir = str(folder)
            stack.enter_context(hold(Path(folder)))
            self._recipe = _Opened(cfg)
            if beside is None:
                self._recipe.open_model(self._work())
                stack.callback(self._recipe.cleanup)
            else:
                self._recipe.open_beside(beside._recipe, beside.tokenizer, self._work(), taken)
            self.learner = self._recipe.learner
            self._open = stack.enter_context(ExitStack())  # the sessions for sampling
            self._open.enter_context(self._recipe.engines.keep_open())
            self._trainer = Training(
                self.learner, self._recipe.training_config(), self._recipe.folder
            )
            self._trainer.build(0)
            rates = [float(group["lr"]) for group in self._trainer.optimizer.param_groups]
            self._ratios = [rate / rates[0] for rate in rates]  # of LoRA+
            self._sampled = 0  # calls of `sample`, for its seed
            self._chat: Chat | None = None
            self.forget_gradients()
            if state is not None:
                self.load(state)
            self._claim_folder(state is not None)
            # also at the end of the program, if nobody calls close
            self._close = finalize(self, stack.pop_all().close)
        self.tokenizer: Any = self.learner.tokenizer
        self.learner.model.train()

    def _claim_folder(self, resumes: bool) -> None:
        """Write ``config.yaml``, and drop the lines of ``metrics.jsonl`` after the state."""
        recipe = self._recipe
        if recipe.ranks.is_main:
            config = OmegaConf.to_yaml(self.cfg)
            recipe.folder.take(config, self.step if resumes else None, self._trainer.keeps_line)

    def _work(self) -> Workload:
        """Return rows of the greatest length that the config allows, which the memory plan takes."""
        longest = self.cfg.tokenizer.get("max_seq_len") or 2048
        return Workload(longest, longest, 1.0, None, "rows of the maximum length")

    def __enter__(self) -> "Model":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model's memory and its output folder."""
        self._close()

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self._trainer.step

    @property
    def positions(self) -> int:
        """Most tokens of a prompt with its answer."""
        return int(min(self._recipe.engines.max_seq_len, self.learner.decoder.max_seq_len))

    def quiet(self) -> None:
        """Log no lines about steps."""
        self._shown.lines = False

    def rows(self, data: Data) -> Rows:
        """Tokenise rows; see :func:`rocm_ext.training.rows.to_rows`. Each warning about rows comes once."""
        rows = to_rows(data, self.tokenizer, self.learner.decoder.max_seq_len)
        warn(line for line in rows.said if line not in self._said)
        self._said.update(rows.said)
        rows.said.clear()
        return rows

    # ---- gradients

    def forward_backward(
        self, data: Data, loss: str | Objective = "cross_entropy", **settings: Any
    ) -> Output:
        """Add the gradients of a loss on rows to those that wait for :meth:`optim_step`.

        Args:
            data: rows, see :func:`rocm_ext.training.rows.to_rows`.
            loss: name in :data:`rocm_ext.training.losses.LOSSES`, or an objective.
            settings: arguments of a named loss, such as ``clip_high``.

        Raises:
            UserError: rows and loss do not fit the model or each other, or the loss is not finite.
        """
        return self._compute(data, objective(loss, **settings), gradients=True)

    def forward(
        self, data: Data, loss: str | Objective = "cross_entropy", **settings: Any
    ) -> Output:
        """Compute what :meth:`forward_backward` computes, without dropout and without gradients."""
        return self._compute(data, objective(loss, **settings), gradients=False)

    def _compute(self, data: Data, loss: Objective, gradients: bool) -> Output:
        began = time.perf_counter()
        learner = self.learner
        ranks = self._recipe.ranks
        rows = self.rows(data)
        teacher = getattr(loss, "teacher", None)
        if teacher is not None and LOGPROBS in loss.columns:
            rows.add_labels_column(LOGPROBS, teacher.logprobs(rows, loss.temperature))
        learner.objective = learner.model.objective = loss
        learner.check_rows(rows, [HIDDEN] if teacher is not None else [])
        set_baseline(learner, rows, range(len(rows)))
        labels, sequences = _counts(rows)
        denominator = loss.denominator(labels, sequences)
        loss.entropy_weight = denominator / labels
        order, batches = micro_batches(learner, rows)
        with loss.measuring() as tally, loss.recording() as recorded:
            summed = self._add_gradients(batches) if gradients else self._forward(batches)
        (total,) = ranks.sum([summed.item()])
        value = total / denominator
        if gradients:
            self._check_finite(value, 0.0, range(len(rows)))
            self._denominator += denominator
            self._loss += total
            self._tokens += sum(map(len, rows.tokens))
            self._seconds += time.perf_counter() - began
        logprobs = logprobs_by_row(rows, order, recorded, ranks)
        return Output(value, total, logprobs, tally.result(ranks))

    def _add_gradients(self, batches: Iterable[MicroBatch]) -> Tensor:
        """Add gradients as :meth:`Training.add_gradients`; if that ends early, no gradients wait any more."""
        try:
            return self._trainer.add_gradients(batches)
        except BaseException:  # also Ctrl-C
            self.forget_gradients()
            raise

    @torch.no_grad()
    def _forward(self, batches: Iterable[MicroBatch]) -> Tensor:
        model = self.learner.model
        device = self._recipe.runtime.device
        summed = torch.zeros((), dtype=torch.float32, device=device)
        model.eval()
        for batch in batches:
            summed += model(batch.to(device))
        model.train()
        return summed

    def optim_step(
        self,
        lr: float | None = None,
        *,
        clip_grad_norm: float | None = None,
        normalize: bool = True,
        **settings: Any,
    ) -> Json:
        """Update the adapter with the gradients that wait, and drop them.

        Args:
            lr: learning rate; by default that of the config, or of the last step.
            clip_grad_norm: maximum norm of the gradients; by default the config's.
            normalize: whether to divide the gradients by the number of labels, or of sequences, of all calls of
                :meth:`forward_backward` since the last step, as the recipes do. Without, the loss is a sum.
            settings: other settings of the optimiser, such as ``betas`` and ``weight_decay``.

        Returns:
            The step's ``step``, ``loss``, ``lr``, ``grad_norm`` before clipping, ``tokens`` and ``seconds``.

        Raises:
            UserError: no gradients wait, the optimiser has no such setting, or the norm is not finite; no weight
                changed.
        """
        began = time.perf_counter()
        if not self._denominator:
            raise UserError("no gradients wait for a step; call forward_backward first")
        trainer = self._trainer
        with self._set(settings if lr is None else {**settings, "lr": lr}):
            if normalize:
                for parameter in self.learner.adapter.values():
                    if parameter.grad is not None:
                        parameter.grad /= self._denominator
            limit = self.cfg.clip_grad_norm if clip_grad_norm is None else clip_grad_norm
            norm = float(trainer.clip_gradients(limit))
            self._check_finite(0.0, norm, ())
            rate = trainer.apply_gradients()
        trainer.step += 1
        seconds = self._seconds + time.perf_counter() - began
        line = {
            "step": trainer.step,
            "loss": self._loss / self._denominator,
            "lr": rate,
            "grad_norm": norm,
            "tokens": self._tokens,
            "tokens_per_second": self._tokens / seconds,
            "seconds": seconds,
        }
        self.metrics.append(line)
        if self._recipe.ranks.is_main:
            self._shown.step(self.metrics)
        if self._keeps:
            trainer.write_metrics(True, **line)
        self.forget_gradients()
        return line

    def _check_finite(self, loss: float, norm: float, rows: Sequence[int]) -> None:
        """Check loss and gradient norm; where one is not finite, the gradients that wait are dropped."""
        try:
            self._trainer.check_finite(loss, norm, Update([], 0.0, 0.0, rows))
        except UserError:
            self.forget_gradients()
            raise

    def forget_gradients(self) -> None:
        """Drop the gradients that wait for :meth:`optim_step`."""
        self._trainer.optimizer.zero_grad(set_to_none=True)
        self._denominator = 0.0
        self._loss = 0.0
        self._tokens = 0
        self._seconds = 0.0

    @contextmanager
    def _set(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Context of a step with these settings of the optimiser; an error undoes them, and drops the gradients."""
        groups = self._trainer.optimizer.param_groups
        known = [name for name in groups[0] if name != "params"]
        for name, value in settings.items():
            if name not in known:
                raise UserError(
                    f"the optimiser has no setting {name}{nearest(name, known)}; it has {', '.join(known)}"
                )
            if name == "lr" and not is_rate(value):
                raise UserError(f"lr is {value!r}; expected a number of at least 0")
        before = [{name: group[name] for name in settings} for group in groups]
        try:
            for group, group_before, ratio in zip(groups, before, self._ratios, strict=True):
                group.update(settings)
                if "lr" in settings:
                    group["lr"] = _like(settings["lr"] * ratio, group_before["lr"])
            yield
        except BaseException as error:
            for group, values in zip(groups, before, strict=True):
                group.update(values)
            self.forget_gradients()
            if isinstance(error, TypeError | ValueError):
                raise UserError(f"the optimiser cannot do a step: {one_line(error)}") from error
            raise

    def train_on(
        self,
        data: Data,
        epochs: int = 1,
        rows_per_step: int = 32,
        loss: str | Objective = "cross_entropy",
    ) -> None:
        """Do all steps of some epochs over rows, with the config's learning rate and schedule, and show progress.

        Ctrl-C ends it after the present step; with an ``output_dir`` the state is then saved in it.

        Raises:
            KeyboardInterrupt: the user asked to stop.
        """
        rows = self.rows(data)
        trainer = self._trainer
        steps = Steps(len(rows), rows_per_step, None, trainer.cfg.data_seed)
        total = steps.per_epoch * epochs
        trainer.total_steps = trainer.step + total
        trainer.scheduler = trainer.setup_scheduler()
        self._shown.lines = False  # the bar says the same
        interrupt = Interrupt()
        with interrupt, closing(Progress(total, 0, self._recipe.ranks.is_main)) as progress:
            for step in range(total):
                self.forward_backward(rows.part(steps[step]), loss)
                line = self.optim_step()
                progress.update(f"loss {line['loss']:.4f}  {line['tokens_per_second']:,.0f} tok/s")
                if interrupt.signum is not None:
                    break
        trainer.scheduler = None
        self._shown.lines = True
        self._shown.draw(self.metrics)
        if interrupt.signum is not None:
            self._stop(total)

    def _stop(self, total: int) -> None:
        """Save the state of a loop that the user ends, if there is an output folder, and raise KeyboardInterrupt."""
        if self._keeps:
            state = Path(self.cfg.output_dir) / "state"
            self.save(state)
            log.info(
                "stopped at step %d of %d, saved in %s; training.open(..., state=...) goes on",
                self.step,
                total,
                state,
            )
        raise KeyboardInterrupt

    # ---- samples and log-probs

    def sample(
        self,
        prompts: Sequence[Prompt],
        samples: int = 1,
        *,
        max_new_tokens: int | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        **settings: Any,
    ) -> list[list[Answer]]:
        """Sample answers from the model with its present adapter.

        Args:
            prompts: texts of a user, lists of messages ``{role, content}``, or token ids, which are taken as they are.
            samples: answers per prompt.
            max_new_tokens: tokens of an answer at most; by default the config's number, or as many as the model takes.
            seed: determines the answers; by default the config's seed and the number of this call.
            stop: texts that end an answer.
            settings: other values of :class:`rocm_ext.sampling.Sampling`: ``temperature``, ``top_p``, ``top_k``,
                ``min_p``.

        Returns:
            The answers by prompt.

        Raises:
            UserError: a prompt is malformed or too long, or a value is out of range.
        """
        if isinstance(prompts, str):
            raise UserError("prompts are a list; for one prompt: [prompt]")
        self._sampled += 1
        if seed is None:
            seed = sample_seed(self.cfg.seed, "call", str(self._sampled), 0)
        rendered = [self._render(prompt, index) for index, prompt in enumerate(prompts)]
        if not rendered:
            return []
        if max_new_tokens is None:
            room = self._recipe.engines.max_seq_len - max(map(len, rendered))
            max_new_tokens = int(max(1, min(self.cfg.max_new_tokens, room)))
        sampling = _sampling(max_new_tokens, stop, settings)
        requests = []
        for index, tokens in enumerate(rendered):
            name = str(index)
            for number in range(samples):
                draw = sample_seed(seed, "sample", name, number)
                requests.append(Request(name, number, draw, tokens))
        answers: list[dict[int, Answer]] = [{} for _ in prompts]
        bar = Progress(len(requests), 0, self._recipe.ranks.is_main, "answer", brief=True)
        with closing(bar) as progress:
            for completion in self.generate(requests, sampling):
                request = completion.request
                answers[int(request.prompt_id)][request.sample] = Answer(
                    request.tokens,
                    completion.tokens,
                    completion.logprobs,
                    completion.text,
                    completion.finish_reason,
                )
                progress.update("sampled")
        return [[group[number] for number in sorted(group)] for group in answers]

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield the answers to requests of the engine as they finish, with the present adapter."""
        with self._recipe.engines.session("sample", None) as session:
            yield from session.generate(requests, sampling)

    def release_sampler(self) -> None:
        """Free what sampling keeps: its copies of weights and its caches. The next sampling makes them again."""
        self._open.close()
        self._open.enter_context(self._recipe.engines.keep_open())

    def _render(self, prompt: Prompt, index: int) -> tuple[int, ...]:
        """Return the token ids of a prompt."""
        parts: Any = prompt
        if isinstance(prompt, str):
            parts = [{"role": "user", "content": prompt}]
        if not all(isinstance(part, int) for part in parts):
            try:
                parts = render_prompt(self.tokenizer, parts)
            except ValueError as error:
                raise UserError(f"prompt {index}: {error}") from error
        tokens: tuple[int, ...] = tuple(parts)
        vocabulary = self.learner.decoder.tok_embeddings.num_embeddings
        if not tokens or not all(0 <= token < vocabulary for token in tokens):
            raise UserError(f"prompt {index}: expected token ids from 0 to {vocabulary - 1}")
        return tokens

    def logprobs(
        self, data: Data, *, base: bool = False, temperature: float = 1.0
    ) -> list[np.ndarray]:
        """Return the log-probs of the rows' labels, fp32 by row, without dropout.

        ``base`` leaves the adapter out.
        """
        rows = self.rows(data)
        if not base:
            return score(self.learner, rows, temperature)
        with reference(self.learner):
            return score(self.learner, rows, temperature)

    def with_reference(self, data: Data) -> Rows:
        """Return rows with the column ``reference_logprobs``, which losses of preferences need.

        They are log-probs under the present weights, so call this before the first step.
        """
        rows = self.rows(data)
        rows.add_labels_column(REFERENCE, self.logprobs(rows))
        if SIDE in rows.columns and not rows.pairs:
            mismatched = rows.mismatched()
            mismatched.add_labels_column(REFERENCE, self.logprobs(mismatched))
            rows.beside[MISMATCHED] = mismatched
        return rows

    # ---- state

    def save(self, path: str | Path, texts: Mapping[str, str] | None = None) -> None:
        """Write adapter, optimiser, generators and position to a folder, which appears whole.

        :meth:`load` continues from it bit for bit; other tools read the adapter in it. ``texts`` are further files by
        name.

        Raises:
            UserError: gradients wait for :meth:`optim_step`, or the disk is full; an earlier folder stays as it is.
        """
        if self._denominator:
            raise UserError("gradients wait for a step; call optim_step, then save")
        trainer = self._trainer
        runtime = self._recipe.runtime
        rng = runtime.ranks.gather(rng_state(runtime.device))
        if runtime.ranks.is_main:
            state = {
                "step": trainer.step,
                "seed": self.cfg.seed,
                "sampled": self._sampled,
                "metrics": self.metrics,
                "adapter": self.learner.adapter_state(),
                "optimizer": trainer.optimizer.state_dict(),
                "scaler": trainer.scaler.state_dict(),
                "rng": rng,
                "identity": self._identity(),
            }
            with replace_folder(Path(path)) as folder:
                for name, text in (texts or {}).items():
                    (folder / name).write_text(text)
                write_state(folder, state, self.learner.write_adapter)
        runtime.ranks.barrier()

    def load(self, path: str | Path) -> None:
        """Continue from a folder that :meth:`save` wrote.

        Raises:
            UserError: it cannot be read, or belongs to another model.
        """
        path = Path(path)
        try:
            state = read_state(path)
        except Exception as error:  # torch.load raises whatever the damaged bytes lead to
            raise UserError(f"cannot read {path} as a saved state: {error}") from error
        for name, value in self._identity().items():
            was = state["identity"].get(name)
            if was != value:
                raise UserError(f"{path} belongs to another model: {name} was {was}, is {value}")
        trainer = self._trainer
        ranks = self._recipe.ranks
        self.learner.load_adapter(state["adapter"], str(path))
        trainer.optimizer.load_state_dict(state["optimizer"])
        trainer.scaler.load_state_dict(state["scaler"])
        trainer.step = state["step"]
        self.cfg.seed = state["seed"]
        self._sampled = state["sampled"]
        self.metrics = state["metrics"]
        self.forget_gradients()
        if len(state["rng"]) == ranks.world:
            set_rng_state(state["rng"][ranks.rank], self._recipe.runtime.device)
        else:
            log.warning("%s is of %d ranks, so dropout differs", path, len(state["rng"]))

    def renew_optimizer(self) -> None:
        """Drop what the optimiser and its loss scaler remember, and the gradients that wait."""
        self._trainer.build(0)
        self.forget_gradients()

    def _identity(self) -> dict[str, str]:
        """Return what a state shares with the model that continues from it."""
        return {
            "base model": self.learner.base_fingerprint,
            "dtype": str(self._recipe.runtime.dtype),
            "optimizer": type(self._trainer.optimizer).__name__,
        }

    # ---- use

    def chat(self, question: str, **settings: Any) -> str:
        """Ask a question in a conversation with the present model, and return its answer without reasoning.

        Args:
            question: text of the user.
            settings: values of :class:`rocm_ext.sampling.Sampling`, by default the model's own.
        """
        given = model_sampling(Path(self.cfg.checkpointer.checkpoint_dir)) | settings
        sampling = Sampling(**{"max_new_tokens": 1024, **given})
        with self._recipe.engines.session("sample", None) as session:
            if self._chat is None:
                self._chat = Chat(self._recipe, session, sampling, self.cfg.seed)
            self._chat.session = session
            self._chat.sampling = sampling
            for _ in self._chat.ask(question):
                pass
            return self._chat.answer.visible

    def teacher(self, name: str | Path = BASE, adapter: str | Path | None = None) -> Teacher:
        """Open a teacher for the losses ``jsd`` and ``reverse_kl``.

        Args:
            name: a model's folder, or ``base`` for this model without its adapter.
            adapter: PEFT folder with the teacher's adapter.

        Raises:
            UserError: it has another tokenizer, or does not fit into memory.
        """
        cfg = OmegaConf.create(
            {
                "teacher": str(name),
                "teacher_adapter": None if adapter is None else str(adapter),
                "teacher_quantize_base": False,
            }
        )
        teacher = Teacher(cfg, self.learner)
        free = free_memory(self.cfg, self.learner)
        if teacher.frozen > free:
            raise UserError(
                f"teacher {name} takes {readable(teacher.frozen)}, and {readable(free)} are free; choose a smaller one"
            )
        teacher.load()
        return teacher

    def export(self, path: str | Path, *, merged: bool = False) -> None:
        """Write the trained model for other programs.

        Args:
            path: a new folder for the adapter in PEFT's format; or a new file ``.gguf`` for the merged model.
            merged: whether the folder gets the base model with the adapter merged into its weights.

        Raises:
            UserError: ``path`` exists, or the model cannot be merged.
        """
        path = Path(path)
        if path.exists():
            raise UserError(f"{path} exists; choose a new name")
        if not self._recipe.ranks.is_main:
            return
        if not merged and path.suffix != ".gguf":
            with replace_folder(path) as folder:
                self.learner.write_adapter(folder)
            return
        with TemporaryDirectory() as folder:
            adapter = Path(folder)
            self.learner.write_adapter(adapter)
            source = open_source(adapter, Path(self.cfg.checkpointer.checkpoint_dir))
            if path.suffix == ".gguf":
                write_model(source, path, "f16")
            else:
                write_merged(source, path, lambda: card(source, merged=True))


def _like(rate: float, before: Any) -> Any:
    """Return a learning rate in the form that the optimiser has: torchao's are tensors."""
    return torch.full_like(before, rate) if isinstance(before, Tensor) else rate


def _counts(rows: Rows) -> tuple[float, float]:
    """Return the numbers of labels and of sequences with a label, each times its row's weight."""
    counts = np.array(label_counts(rows), np.float64)  # [rows, 2]
    weights = np.ones(len(rows))
    if ROW_WEIGHT in rows.columns:
        weights = np.array([column[0] for column in rows.columns[ROW_WEIGHT]], np.float64)
    labels, sequences = weights @ counts
    return float(labels), float(sequences)


def _sampling(max_new_tokens: int, stop: Sequence[str], settings: Mapping[str, Any]) -> Sampling:
    """Return the settings of sampling; a UserError names an unknown one."""
    known = ("temperature", "top_k", "top_p", "min_p")
    for name in settings:
        if name not in known:
            raise UserError(f"sample has no setting {name}{nearest(name, known)}")
    temperature = settings.get("temperature", 1.0)
    return Sampling(
        max_new_tokens,
        stop_strings=tuple(stop),
        logprobs_temperature=temperature or 1.0,
        **settings,
    )
