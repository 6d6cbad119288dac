"""Evaluate a model's answers: of an adapter and of the model that a config starts from, or between training steps."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import append_line, replace_text
from rocm_ext.base.importing import COMPONENT, import_component
from rocm_ext.base.types import Json
from rocm_ext.config.chosen_model import sampling_config
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.plan.workload import Workload
from rocm_ext.rl import evaluation
from rocm_ext.rl.loop import RLRecipe
from rocm_ext.rl.records import Records
from rocm_ext.rl.rollout import Answers, Job
from rocm_ext.runs.intervals import mcnemar, paired_gain
from rocm_ext.runs.records import EvalScores
from rocm_ext.train.checkpoint import rng_state, set_rng_state
from rocm_ext.train.learner import Learner
from rocm_ext.train.lifecycle import Interrupted
from rocm_ext.train.output_dir import OutputDir, hold
from rocm_ext.train.scoring import reference, without_adapter

ANSWERS = "answers.jsonl"  # prompts, answers and verdicts, in the output folder


@dataclass(frozen=True)
class Evaluation:
    """The measured answers of one model.

    Attributes:
        scores: see :func:`rocm_ext.rl.evaluation.score`.
        answers: lines of ``answers.jsonl``: ``prompt_id``, ``sample`` (-1: the greedy answer), ``prompt``, ``text``,
            ``verdict``, ``reward``, ``detail`` and ``finish_reason``.
        right: whether the greedy answer is right, by prompt.
    """

    scores: EvalScores
    answers: list[Json]
    right: dict[str, bool]


def evaluate(cfg: DictConfig, adapter: Path | None, base: bool = False) -> list[Evaluation]:
    """Score a model on a config's ``eval_prompts``.

    ``output_dir`` gets the records of an evaluation before a run's first step. The second evaluation has the folder
    ``base`` in it.

    Args:
        cfg: config with the keys of ``defaults/sampling.yaml``, and an ``output_dir`` for this evaluation.
        adapter: PEFT folder; None evaluates the model that the config starts from.
        base: whether to evaluate the model that the config starts from, in addition.

    Returns:
        The evaluation, and the one of the model that the config starts from if ``base`` is set.

    Raises:
        UserError: ``eval_prompts`` is not set, or the evaluation cannot run.
        SystemExit: 128 + the signal's number, after Ctrl-C or SIGTERM.
    """
    if cfg.eval_prompts is None:
        raise UserError("eval_prompts is not set; set it to the prompts to evaluate on, or name them with --data")
    start = deepcopy(cfg)  # the model that the config starts from
    if adapter is not None:
        cfg.checkpointer.adapter_checkpoint = str(adapter)
    cfg.prompts = start.prompts = cfg.metric_logger = None  # an evaluation reads no training prompts and does not log
    recipe = RLRecipe(cfg)
    folders = [recipe.out, *[recipe.out / "base"] * base]
    with hold(recipe.out):
        outs = [
            OutputDir(out, keep=1, resume=False, overwrite=cfg.overwrite_output_dir, ranks=Ranks(torch.device("cpu")))
            for out in folders
        ]
        recipe.open()
        try:
            with recipe.verification():
                evaluations = [_evaluate(recipe, cfg, outs[0], "the evaluation")]
                if base:
                    first, learner = start.checkpointer.get("adapter_checkpoint"), recipe.learner
                    read = reference(learner, learner.read_adapter(Path(first)), first) if first else None
                    with read or without_adapter(learner):
                        evaluations.append(_evaluate(recipe, start, outs[1], "the evaluation without the adapter"))
            return evaluations
        except Interrupted as stop:
            raise SystemExit(128 + stop.signum) from None
        finally:
            recipe.cleanup()


def compare(evaluation: Evaluation, base: Evaluation) -> dict[str, float | list[float]]:
    """Compare the greedy answers of two models to the same prompts.

    Returns:
        ``gained`` and ``lost``: prompts that only one model got right; ``gain``: the difference of pass@1 with its
        95 % ``interval``; ``p`` of McNemar's exact test.
    """
    before, after = base.right, evaluation.right
    gained = sum(right and not before[prompt] for prompt, right in after.items())
    lost = sum(right and not after[prompt] for prompt, right in before.items())
    gain = paired_gain(lost, gained, len(after))
    interval = [gain.low, gain.high]
    return {"gained": gained, "lost": lost, "gain": gain.value, "interval": interval, "p": mcnemar(lost, gained)}


def _evaluate(recipe: RLRecipe, cfg: DictConfig, output: OutputDir, name: str) -> Evaluation:
    ranks, out = recipe.ranks, output.path
    if ranks.is_main:
        output.create()
        output.take(OmegaConf.to_yaml(cfg), None, lambda line: False)
    ranks.barrier()
    first, requests = cfg.checkpointer.get("adapter_checkpoint"), recipe.prompts.evaluation_requests(recipe.sampling)
    adapter = Path(first) if first else None

    def check(session: Any) -> None:
        recipe.server_check.check(session, requests, Path(first), None)

    job = Job(name, requests, recipe.prompts.held_out, *Records.open(out, ranks, -1, -1).phase(0, "eval"))
    judged = recipe.rollout(job, lambda: recipe.engines.session("eval", adapter, check)).finish()
    scores, answers = evaluation.score(judged, recipe.cfg.eval_samples), _answers(recipe, judged)
    if ranks.is_main:
        append_line(out / "metrics.jsonl", {"step": 0, "eval": scores, **judged.stats})
        replace_text(out / ANSWERS, "".join(json.dumps(answer) + "\n" for answer in answers))
    ranks.barrier()
    return Evaluation(scores, answers, evaluation.greedy(judged.results))


def _answers(recipe: RLRecipe, judged: Answers) -> list[Json]:
    """Return the lines of ``answers.jsonl``, in the order of the prompts."""
    order: Mapping[str, int] = {prompt.id: number for number, prompt in enumerate(recipe.prompts.held_out)}
    answers = []
    for key in sorted(judged.samples, key=lambda key: (order[key[0]], key[1])):
        sample, result = judged.samples[key], judged.results[key]
        answers.append(
            {
                "prompt_id": sample.prompt_id,
                "sample": sample.sample,
                "prompt": recipe.prompts[sample.prompt_id].messages[-1]["content"],
                "text": sample.text,
                **({} if sample.messages is None else {"messages": sample.messages}),
                "verdict": result.verdict.value,
                "reward": result.reward,
                "detail": result.detail,
                "finish_reason": sample.finish_reason,
            }
        )
    return answers


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
        """Open the records of a run that continues after ``step``; evaluations after ``evaluated`` are unfinished."""
        self.records = Records.open(self.out, self.ranks, step, evaluated)

    def evaluate(self, step: int) -> tuple[EvalScores, float]:
        """Evaluate the present adapter, of ``step``, and continue recorded answers; all ranks call this.

        Returns:
            Scores from :func:`rocm_ext.rl.evaluation.score`, and the seconds of sampling and verifying.
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
