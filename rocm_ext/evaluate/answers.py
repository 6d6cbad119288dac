"""Evaluate a model's answers: of an adapter and of the model that a config starts from, or between training steps."""

import json
from collections.abc import Iterator
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
from rocm_ext.config.components import choose_prompts
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.plan.workload import Workload
from rocm_ext.rl import evaluation
from rocm_ext.rl.loop import RLRecipe
from rocm_ext.rl.records import Records, Sample
from rocm_ext.rl.rollout import Answers, Job
from rocm_ext.runs.intervals import gained_and_lost, mcnemar, paired_gain
from rocm_ext.runs.records import EvalScores
from rocm_ext.train.checkpoint import rng_state, set_rng_state
from rocm_ext.train.forgetting import Scored
from rocm_ext.train.learner import Learner, first_adapter
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
        adapter: PEFT folder. None evaluates the model that the config starts from.
        base: whether to evaluate the model that the config starts from, in addition.

    Returns:
        The evaluation, and the one of the model that the config starts from if ``base`` is set.

    Raises:
        UserError: ``eval_prompts`` is not set or has several sets, or the evaluation cannot run.
        SystemExit: 128 + the signal's number, after Ctrl-C or SIGTERM.
    """
    if cfg.eval_prompts is None:
        raise UserError(
            "eval_prompts is not set; set it to the prompts to evaluate on, or name them with --data"
        )
    choose_prompts(cfg, None)
    start = deepcopy(cfg)  # the model that the config starts from
    if adapter is not None:
        cfg.checkpointer.adapter_checkpoint = str(adapter)
    cfg.prompts = start.prompts = None  # an evaluation reads no training prompts
    cfg.metric_logger = None
    recipe = RLRecipe(cfg)
    with hold(recipe.out):
        output = _output(recipe.out, cfg)
        base_output = _output(recipe.out / "base", cfg) if base else None
        recipe.setup()
        try:
            with recipe.verification():
                evaluations = [_evaluate(recipe, cfg, output, "the evaluation")]
                if base_output is not None:
                    base_model = without_adapter(recipe.learner)
                    first = first_adapter(start)
                    if first is not None:
                        state = recipe.learner.read_adapter(first)
                        base_model = reference(recipe.learner, state, str(first))
                    with base_model:
                        base_evaluation = _evaluate(
                            recipe, start, base_output, "the evaluation without the adapter"
                        )
                    evaluations.append(base_evaluation)
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
    gained, lost = gained_and_lost(base.right, evaluation.right)
    gain = paired_gain(lost, gained, len(evaluation.right))
    return {
        "gained": gained,
        "lost": lost,
        "gain": gain.value,
        "interval": [gain.low, gain.high],
        "p": mcnemar(lost, gained),
    }


def _output(folder: Path, cfg: DictConfig) -> OutputDir:
    return OutputDir(
        folder,
        keep=1,
        resume=False,
        overwrite=cfg.overwrite_output_dir,
        ranks=Ranks(torch.device("cpu")),
    )


def _evaluate(recipe: RLRecipe, cfg: DictConfig, output: OutputDir, name: str) -> Evaluation:
    ranks = recipe.ranks
    if ranks.is_main:
        output.create()
        output.take(OmegaConf.to_yaml(cfg), None, lambda line: False)
    ranks.barrier()
    adapter = first_adapter(cfg)
    requests = recipe.prompts.evaluation_requests(recipe.sampling)

    def check(session: Any) -> None:
        assert adapter is not None
        recipe.server_check.check(session, requests, adapter, None)

    records = Records(output.path, ranks, -1, -1)
    job = Job(name, requests, recipe.prompts.held_out, *records.phase(0, "eval"))
    rollout = recipe.rollout(job, lambda: recipe.engines.session("eval", adapter, check))
    judged = rollout.finish()
    scores = evaluation.score(judged, recipe.cfg.eval_samples)
    answers = _answers(recipe, judged)
    if ranks.is_main:
        line = {"step": 0, "eval": scores, **judged.stats}
        append_line(output.path / "metrics.jsonl", line)
        lines = [json.dumps(answer) + "\n" for answer in answers]
        replace_text(output.path / ANSWERS, "".join(lines))
    ranks.barrier()
    return Evaluation(scores, answers, evaluation.greedy(judged.results))


def _answers(recipe: RLRecipe, judged: Answers) -> list[Json]:
    """Return the lines of ``answers.jsonl``, in the order of the prompts."""
    order = {prompt.id: i for i, prompt in enumerate(recipe.prompts.held_out)}

    def place(sample: Sample) -> tuple[int, int]:
        return order[sample.prompt_id], sample.sample

    answers = []
    for sample in sorted(judged.samples.values(), key=place):
        result = judged.results[sample.key]
        answer = {
            "prompt_id": sample.prompt_id,
            "sample": sample.sample,
            "prompt": recipe.prompts[sample.prompt_id].messages[-1]["content"],
            "text": sample.text,
        }
        if sample.messages is not None:
            answer["messages"] = sample.messages
        answer |= {
            "verdict": result.verdict.value,
            "reward": result.reward,
            "detail": result.detail,
            "finish_reason": sample.finish_reason,
        }
        answers.append(answer)
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
        engine = cfg.engine[COMPONENT]
        if hasattr(import_component(engine), "check_adapter"):
            raise UserError(
                f"engine {engine} samples on servers, and {cfg.recipe} evaluates the adapter that is in "
                "this process; set engine._component_=rocm_ext.sampling.LocalEngine"
            )
        super().__init__(sampling_config(cfg), lambda *_: learner)
        self.runtime = learner.runtime
        self.ranks = learner.runtime.ranks
        self._tokenizer = learner.tokenizer

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
        return self.prompts.fingerprint_held_out()

    def open_records(self, step: int, evaluated: int) -> None:
        """Open the records of a run that continues after ``step``; evaluations after ``evaluated`` are unfinished."""
        self.records = Records(self.out, self.ranks, step, evaluated)

    def evaluate(self, step: int) -> tuple[dict[str, Scored], float]:
        """Evaluate the present adapter, of ``step``, and continue recorded answers; all ranks call this.

        Returns:
            Results by set from :func:`rocm_ext.rl.evaluation.judge`, and the seconds of sampling and verifying.
        """
        with self._same_random_numbers(), self.verification():
            answers = self.answer_held_out(
                step, lambda requests: self.engines.session("eval", None)
            )
        return evaluation.judge(answers, self.prompts.sets, 0), answers.stats["seconds"]

    @contextmanager
    def _same_random_numbers(self) -> Iterator[None]:
        """Context after which training draws the random numbers that it would have drawn without it."""
        state = rng_state(self.runtime.device)
        try:
            yield
        finally:
            set_rng_state(state, self.runtime.device)
