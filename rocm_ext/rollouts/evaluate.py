"""Evaluate one adapter, without training."""

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rocm_ext.errors import UserError
from rocm_ext.files import read_json, replace_text
from rocm_ext.rollouts import evaluation
from rocm_ext.rollouts.journal import journals_in
from rocm_ext.rollouts.recipe import RolloutRecipe
from rocm_ext.rollouts.run_record import RunRecord
from rocm_ext.train.interrupt import Interrupted
from rocm_ext.train.lock import hold


def evaluate_adapter(cfg: DictConfig, adapter: Path | None) -> dict[str, Any]:
    """Score an adapter on a config's ``eval_prompts``.

    The records are those of the evaluation before a RAFT run's first cycle, in ``cycle_0`` of ``output_dir``.

    Args:
        cfg: config of ``raft_rocm`` or ``grpo_rocm``; its ``output_dir`` receives the records, so it needs one of its
            own.
        adapter: PEFT folder; None evaluates the model that the config starts from.

    Returns:
        The content of ``eval.json``, see :func:`rocm_ext.rollouts.evaluation.score`.

    Raises:
        UserError: ``eval_prompts`` is not set, or the evaluation cannot run.
        SystemExit: 128 + the signal's number, after Ctrl-C or SIGTERM.
    """
    if cfg.eval_prompts is None:
        raise UserError("eval_prompts is not set; set it to the prompts to evaluate on")
    if adapter is not None:
        cfg.checkpointer.adapter_checkpoint = str(adapter)
    cfg.prompts = cfg.metric_logger = None  # the evaluation neither reads training prompts nor logs
    recipe, record = RolloutRecipe(cfg), RunRecord(Path(cfg.output_dir))
    with hold(recipe.out):
        record.begun(resume=False, overwrite=cfg.overwrite_output_dir)
        recipe.open()
        try:
            return _evaluate(recipe, record)
        except Interrupted as stop:
            raise SystemExit(128 + stop.signum) from None
        finally:
            recipe.cleanup()


def _evaluate(recipe: RolloutRecipe, record: RunRecord) -> dict[str, Any]:
    cfg, ranks, folder = recipe.cfg, recipe.ranks, recipe.out / "cycle_0"
    if ranks.is_main:
        record.take(cfg, {"base model": recipe.learner.base_fingerprint, "seed": cfg.seed}, fresh=True)
    ranks.barrier()
    first, requests = cfg.checkpointer.get("adapter_checkpoint"), recipe.evaluation_requests()
    adapter = Path(first) if first else None

    def check(session: Any) -> None:
        if adapter is not None:
            recipe.swap.check(session, requests, adapter, None)

    with recipe.verification():
        phase = recipe.phase(
            "the evaluation",
            journals_in(folder / "eval", ranks),
            requests,
            recipe.prompts.held_out,
            lambda: recipe.engines.session("eval", adapter, check),
        )
    scores = evaluation.score(phase, cfg.eval_samples)
    if ranks.is_main:
        replace_text(folder / "eval.json", json.dumps(scores, indent=2) + "\n")
    ranks.barrier()
    return read_json(folder / "eval.json") or {}
