"""The teacher of a distillation: a second model, the model in training with another adapter, or a server."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from tokenizers import Tokenizer
from torch import Tensor

from rocm_ext.base.errors import UserError
from rocm_ext.base.hub import how_to_download
from rocm_ext.base.log import log
from rocm_ext.config.chosen_model import BASE, is_server, teacher_config
from rocm_ext.data.batches import MicroBatch
from rocm_ext.data.encoder import TOKENIZER
from rocm_ext.data.rows import Rows, labelled
from rocm_ext.losses import CrossEntropy, Objective
from rocm_ext.model.adapters import peft_files
from rocm_ext.model.build import check_adapter
from rocm_ext.model.download import use_downloaded
from rocm_ext.model.lora import trained
from rocm_ext.plan.costs import Kernels
from rocm_ext.plan.memory import held_bytes, plan_memory, worst_rows
from rocm_ext.train.learner import Learner, first_adapter
from rocm_ext.train.scoring import reference, score


class Teacher:
    """A model whose distributions are learned; see :class:`rocm_ext.losses.Distillation`.

    It computes in the training step, right before the model in training, so its outputs are not stored.

    Args:
        cfg: config of ``distil_rocm``.
        student: the model in training, before its weights are read.

    Attributes:
        frozen: bytes of its weights on this rank, with the weights gathered from others; 0 if it is the student.

    Raises:
        UserError: it cannot be built, has other tokens than the student, or cannot compute the student's rows.
    """

    def __init__(self, cfg: DictConfig, student: Learner) -> None:
        self._student = student
        self._adapter: Mapping[str, Tensor] | None = None
        self._source = str(cfg.teacher_adapter or cfg.teacher)
        self.learner = student
        self.frozen = 0
        if cfg.teacher != BASE:
            made = teacher_config(cfg, student.cfg)
            use_downloaded(made, student.runtime.ranks)
            folder = Path(made.checkpointer.checkpoint_dir)
            if not folder.exists():
                raise UserError(
                    f"the teacher's folder {folder} does not exist; {how_to_download(folder)}"
                )
            _check_tokens(made, student.cfg)
            try:
                self.learner = Learner(made, student.runtime, student.tokenizer)
            except UserError as error:
                raise UserError(f"teacher: {error}", error.code) from error
            self.learner.model.objective = _Hidden()
            self.frozen = held_bytes(self.learner.decoder, student.runtime.ranks.world)
            if student.packed and not self.learner.packed:
                raise UserError(
                    f"teacher {cfg.teacher} computes no packed rows, and the model in training does; choose another one"
                )
        elif set(student.adapter.values()).intersection(
            getattr(student.decoder.output_layer, "parameters", tuple)()
        ):
            raise UserError(
                "teacher is base, whose output layer is that of the model, and it trains; leave lm_head out of "
                "target_modules, and out of trainable_tokens (of tied layers: embed_tokens, too)"
            )
        elif cfg.teacher_adapter:
            self._adapter = student.read_adapter(Path(cfg.teacher_adapter))
            check_adapter(student.decoder, self._adapter, cfg.teacher_adapter)

    def peak(self, student: Learner, longest: int) -> int:
        """Return the higher planned peak of training and of a forward pass on ``longest`` tokens, in bytes."""
        learner, runtime = self.learner, self.learner.runtime
        if learner is student:  # training takes more than a forward pass
            return student.planned_peak
        plan = plan_memory(
            learner.decoder,
            CrossEntropy(),
            worst_rows(longest, max(student.tokens_per_micro_batch, longest)),
            runtime.device,
            optimizer=learner.cfg.optimizer,
            ranks=runtime.ranks.world,
            targets=1,
            kernels=Kernels.on(runtime.device, runtime.machine.bf16, learner.cfg.attention),
        )
        forward = max(layer.entry + layer.kept for layer in plan.layer_costs)
        return max(student.planned_peak, student.planned_fixed + forward)

    def load(self) -> None:
        """Read the weights.

        Raises:
            UserError: they are missing, damaged or of another model.
        """
        if self.learner is self._student:
            return
        log.info("teacher: %s", self._source)
        self.learner.load()
        self.learner.model.requires_grad_(False).eval()
        if first_adapter(self.learner.cfg) is None:
            for _, layer in trained(self.learner.decoder):
                layer.disabled = True

    @property
    def fingerprint(self) -> str:
        """A hash of its weights, after :meth:`load`."""
        state = self._adapter
        if self.learner is not self._student and first_adapter(self.learner.cfg):
            state = self.learner.adapter_state()
        adapter = peft_files.fingerprint(state) if state else "no adapter"
        return f"{self.learner.base_fingerprint} {adapter}"

    @torch.no_grad()
    def hidden(self, batch: MicroBatch) -> Tensor:
        """Return the hidden states [n, d] that predict the labels of a micro-batch, without dropout."""
        if self.learner is not self._student:
            return self.learner.model(batch)
        decoder = self.learner.decoder
        training = decoder.training
        with reference(self.learner, self._adapter, self._source):
            decoder.eval()
            hidden = decoder.hidden_states(batch).flatten(0, 1)[batch.index]
        decoder.train(training)
        return hidden

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, v] of hidden states [n, d]."""
        return self.learner.decoder.output(hidden)

    def logprobs(self, rows: Rows, temperature: float) -> list[np.ndarray]:
        """Return the labels' log-probs, as :func:`rocm_ext.train.scoring.score`; all ranks call this."""
        if self.learner is self._student:
            with reference(self.learner, self._adapter, self._source):
                return score(self.learner, rows, temperature)
        self.learner.tokens_per_micro_batch = self._student.tokens_per_micro_batch
        return score(self.learner, rows, temperature)


class TeacherServer:
    """A teacher on a server, which only gives log-probs of tokens.

    Args:
        cfg: config of ``distil_rocm``; ``teacher`` is the server's address.
        student: the model in training; the server's vocabulary and context are unknown, and assumed to be the same.

    Raises:
        UserError: the server cannot be reached, or serves no such model.
    """

    frozen = 0
    _scorer: Any

    def __init__(self, cfg: DictConfig, student: Learner) -> None:
        self.learner = student
        self._ranks = student.runtime.ranks

        def connect() -> str:
            from rocm_ext.sampling.server.scorer import Scorer  # needs an HTTP client

            self._scorer = Scorer(cfg.teacher, cfg.teacher_model, cfg.teacher_api_key_env)
            return self._scorer.model

        self.fingerprint = self._ranks.on_main(connect)

    def peak(self, student: Learner, longest: int) -> int:
        """Return the planned peak of the student's training in bytes."""
        return student.planned_peak

    def load(self) -> None:
        """Ask for the log-probs of two tokens, as a test."""
        self._ranks.on_main(lambda: self._scorer.logprobs([[0, 0]]))

    def logprobs(self, rows: Rows, temperature: float) -> list[np.ndarray]:
        """Return the labels' log-probs, as :func:`rocm_ext.train.scoring.score`; all ranks call this."""
        logprobs = self._ranks.on_main(lambda: self._scorer.logprobs(rows.tokens))
        parts = zip(logprobs, rows.labels, rows.lengths, strict=True)
        return [values[labelled(labels, lengths)[1:]] for values, labels, lengths in parts]


def open_teacher(cfg: DictConfig, student: Learner) -> Teacher | TeacherServer:
    """Return the teacher of a config of ``distil_rocm``, without its weights; see the classes."""
    return (TeacherServer if is_server(cfg.teacher) else Teacher)(cfg, student)


class _Hidden(Objective):
    """Returns the hidden states of the labels in place of a loss."""

    def __call__(self, head: Any, hidden: Tensor, *_: Any) -> Tensor:
        return hidden

    terms: Any = None


def _check_tokens(cfg: DictConfig, training: DictConfig) -> None:
    """Refuse a teacher whose tokenizer gives one of the student's ids to another token."""
    teacher = Path(cfg.checkpointer.checkpoint_dir) / TOKENIZER
    student = Path(training.checkpointer.checkpoint_dir) / TOKENIZER
    if not (teacher.is_file() and student.is_file()):
        log.warning(
            "the teacher's tokens are not compared with the model's: %s or %s is missing",
            teacher,
            student,
        )
        return
    theirs = Tokenizer.from_file(str(teacher)).get_vocab()
    ours = Tokenizer.from_file(str(student)).get_vocab()
    differ = []
    for token, number in ours.items():
        is_padding = token == f"[PAD{number}]"  # of a GGUF file
        if theirs.get(token) != number and not is_padding:
            differ.append(token)
    if differ:
        token = min(differ, key=ours.__getitem__)
        instead = f"it is {theirs[token]}" if token in theirs else "there is no such token"
        raise UserError(
            f"teacher {cfg.model.checkpoint_dir} has another tokenizer: token {ours[token]} of the model in training "
            f"is {token!r}, and in the teacher's {instead} ({len(differ):,} of {len(ours):,} tokens differ); choose a "
            "teacher of the same family"
        )
