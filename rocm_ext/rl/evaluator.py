"""Evaluation between the steps of a training on rows, by the model's greedy answers to held-out prompts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig

from rocm_ext.base.errors import UserError
from rocm_ext.base.importing import COMPONENT, import_component
from rocm_ext.config.chosen_model import sampling_config
from rocm_ext.plan.workload import Workload
from rocm_ext.rl import evaluation
from rocm_ext.rl.loop import RLRecipe
from rocm_ext.rl.records import Records
from rocm_ext.train.checkpoint import rng_state, set_rng_state
from rocm_ext.train.learner import Learner


class Evaluator(RLRecipe):
    """Lets a model in training answer ``eval_prompts``, in this process, and verifies the answers.

    An evaluation opens a session and processes, frees their memory for training, and restores the random generators.

    Args:
        cfg: config of the SFT recipe or of a recipe that extends it, with ``eval_prompts``.
        learner: the model; its weights may be missing until :meth:`open_records`.
    """

    logs_long_rollouts_only = True

    def __init__(self, cfg: DictConfig, learner: Learner) -> None:
        if hasattr(import_component(cfg.engine[COMPONENT]), "check_adapter"):
            raise UserError(
                f"engine {cfg.engine[COMPONENT]} samples on servers, and {cfg.recipe} evaluates the adapter that is in "
                "this process; set engine._component_=rocm_ext.sampling.LocalEngine"
            )
        super().__init__(sampling_config(cfg), lambda *_: learner)
        self.runtime, self.ranks, self._tokenizer = learner.runtime, learner.runtime.ranks, learner.tokenizer

    def check(self) -> None:
        """Read the prompts, and check them, the verifier and the engine; see :meth:`RLRecipe.check`."""
        with self._same_random_numbers():
            super().check()

    def _open_tokenizer(self) -> Any:
        return self._tokenizer

    def plan_memory(self, work: Workload, beside: int = 0) -> None:
        """Plan nothing: training has planned its memory, and a session fits into what is free."""

    def fingerprint(self) -> str:
        """Return a hash of the prompts; a run shares it with the one it resumes."""
        return self.prompts.fingerprint(self.prompts.held_out)

    def open_records(self, step: int, evaluated: int) -> None:
        """Open the records of a run that goes on after ``step``; evaluations after ``evaluated`` are unfinished."""
        self.records = Records.open(self.out, self.ranks, step, evaluated)

    def evaluate(self, step: int) -> tuple[dict[str, Any], float]:
        """Evaluate the present adapter, of ``step``, and continue recorded answers; all ranks call this.

        Returns:
            Scores from :func:`rocm_ext.rl.evaluation.score`, and the seconds of sampling and verifying.

        Raises:
            Interrupted: the user asked to stop; the answers so far are recorded.
            UserError: the verifier failed on too many answers, or the copies of weights do not fit into memory.
        """
        with self._same_random_numbers(), self.verification():
            answers = self.answer_held_out(step, lambda requests: self.engines.session("eval", None))
        return evaluation.score(answers, 0), answers.stats["seconds"]

    @contextmanager
    def _same_random_numbers(self) -> Iterator[None]:
        """Context after which training draws the random numbers that it would have drawn without it."""
        state = rng_state(self.runtime.device)
        try:
            yield
        finally:
            set_rng_state(state, self.runtime.device)
