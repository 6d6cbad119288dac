"""Measure a model on the validation rows of SFT or DPO without training: loss, perplexity, and other measurements.

The loss is the recipe's ``val_loss``.
"""

import json
import math
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
from omegaconf import DictConfig

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import disk_errors, replace_text
from rocm_ext.base.log import Progress
from rocm_ext.data.rows import SIDE, Rows, labelled
from rocm_ext.data.tokenizer import open_tokenizer
from rocm_ext.model.download import use_downloaded
from rocm_ext.plan import workload
from rocm_ext.runs.intervals import mcnemar, paired_ratio
from rocm_ext.train.builders import check_tokenizer
from rocm_ext.train.learner import Learner
from rocm_ext.train.lifecycle import Runtime
from rocm_ext.train.output_dir import pick_seed
from rocm_ext.train.scoring import FILE, reference, score, validation_loss

ROWS, RESULT = "rows.jsonl", "eval.json"
_BLOCK = 64  # rows between two updates of the progress


@dataclass(frozen=True)
class Measured:
    """A model's results on held-out rows.

    Attributes:
        scores: ``loss``, ``perplexity``, ``rows``, ``tokens``, and the objective's measurements.
        rows: measurements by row: ``row``, its number; for SFT ``tokens`` and ``loss``, the mean NLL of its labels in
            nats; for single answers with a label also ``good``; for pairs ``logprob_chosen``, ``logprob_rejected``,
            ``tokens_chosen`` and ``tokens_rejected``. The perplexity excludes bad answers.
    """

    scores: dict[str, float]
    rows: list[dict[str, float]]


class SupervisedRecipe(Protocol):
    """The SFT recipe, or one that extends it."""

    cfg: DictConfig
    columns: tuple[str, ...]
    runtime: Runtime
    learner: Learner

    def setup_data(self, tokenizer: Any) -> tuple[Rows, Rows | None]:
        """Read and tokenise the rows for training and for validation."""

    def add_columns(self, folder: Path, rows: Mapping[str, Rows | None]) -> None:
        """Add the columns in ``columns`` to the rows."""

    def cleanup(self) -> None:
        """Close files and leave the process group."""


def measure(recipe: SupervisedRecipe, adapter: Path | None, base: bool = False) -> list[Measured]:
    """Measure a model on the validation rows of a config of SFT or DPO.

    The reference of DPO is the model that the config starts from.

    Args:
        recipe: ``lora_finetune_rocm``, ``dpo_rocm`` or a recipe that extends one of them, with its config.
        adapter: PEFT folder; None measures the model that the config starts from.
        base: whether to measure the model that the config starts from, in addition.

    Returns:
        The results; with ``base`` also the results of the model that the config starts from.

    Raises:
        UserError: the config has no validation rows, or the model or the rows cannot be read.
    """
    learner, rows = _open(recipe)
    try:
        with TemporaryDirectory() as folder:
            if (kept := Path(recipe.cfg.output_dir) / FILE).is_file():
                shutil.copy(kept, folder)
            recipe.add_columns(Path(folder), {"dataset_val": rows})
        with nullcontext() if adapter is None else reference(learner, learner.read_adapter(adapter), str(adapter)):
            results = [_measure(learner, rows)]
        if base:
            results.append(_measure(learner, rows))
        return results
    finally:
        recipe.cleanup()


def compare(measured: Measured, base: Measured) -> dict[str, float | list[float]]:
    """Compare two models on the same rows.

    Returns:
        ``difference``: the difference of the NLL per token of the answers (for pairs, the chosen ones), with its 95 %
        ``interval`` over rows. For pairs also ``gained`` and ``lost``, pairs in which only one model prefers the chosen
        answer, and ``p`` of McNemar's exact test.
    """
    nll, before = (np.array([_nll(row) for row in model.rows]) for model in (measured, base))
    change = paired_ratio(nll - before, np.array([float(_tokens(row)) for row in measured.rows]))
    result: dict[str, float | list[float]] = {"difference": change.value, "interval": [change.low, change.high]}
    if "logprob_chosen" in measured.rows[0]:
        pairs = list(zip(measured.rows, base.rows, strict=True))
        gained = sum(_prefers(row) > _prefers(other) for row, other in pairs)
        lost = sum(_prefers(row) < _prefers(other) for row, other in pairs)
        result |= {"gained": gained, "lost": lost, "p": mcnemar(lost, gained)}
    return result


def keep(measured: Measured, folder: Path) -> None:
    """Write ``eval.json`` and ``rows.jsonl`` into a new folder."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / ROWS, "".join(json.dumps(row) + "\n" for row in measured.rows))
    replace_text(folder / RESULT, json.dumps(measured.scores, indent=2) + "\n")


def _open(recipe: SupervisedRecipe) -> tuple[Learner, Rows]:
    """Open the model that the config starts from, and the held-out rows."""
    cfg = recipe.cfg
    if cfg.dataset_val is None and not cfg.validation_fraction:
        raise UserError("the config has no held-out rows: set dataset_val or validation_fraction, or name them: --data")
    recipe.runtime = Runtime.open(cfg)
    use_downloaded(cfg, recipe.runtime.ranks)
    cfg.seed = pick_seed(cfg.seed, None, recipe.runtime.ranks)
    tokenizer = open_tokenizer(cfg)
    check_tokenizer(tokenizer, cfg)
    recipe.learner = learner = Learner(cfg, recipe.runtime, tokenizer)
    if cfg.dataset_val is not None:  # the training rows are not read
        cfg.dataset, cfg.dataset_val, cfg.early_stopping_patience = cfg.dataset_val, None, None
        rows, _ = recipe.setup_data(tokenizer)
    else:
        _, split = recipe.setup_data(tokenizer)
        assert split is not None, "validation_fraction is set"
        rows = split
    learner.check_rows(rows, recipe.columns)
    learner.setup(workload.describe(rows, len(rows), "the held-out rows", learner.shares))
    return learner, rows


def _measure(learner: Learner, rows: Rows) -> Measured:
    ranks = learner.runtime.ranks
    loss, labels, measurements = validation_loss(learner, rows)
    logprobs: list[np.ndarray] = []
    progress = Progress(len(rows), 0, ranks.is_main, "row", brief=True)
    for start in range(0, len(rows), _BLOCK):
        block = rows.part(range(start, min(start + _BLOCK, len(rows))))
        for values in score(learner, block):
            logprobs.append(values)
            progress.update("")
    progress.close()
    measured = [_row(rows, i, values) for i, values in enumerate(logprobs)]
    nll = sum(map(_nll, measured)) / max(1, sum(map(_tokens, measured)))
    scores = {"loss": loss, "perplexity": math.exp(min(nll, 700)), "rows": len(rows), "tokens": labels, **measurements}
    return Measured(scores, measured)


def _row(rows: Rows, number: int, logprobs: np.ndarray) -> dict[str, float]:
    if not rows.pairs:
        good = {"good": bool(rows.columns[SIDE][number][0] > 0)} if SIDE in rows.columns else {}
        return {"row": number, "tokens": len(logprobs), "loss": -float(logprobs.mean(dtype=np.float64)), **good}
    side = rows.columns[SIDE][number][labelled(rows.labels[number], rows.lengths[number])]
    sums = {name: logprobs[side * sign > 0] for name, sign in (("chosen", 1), ("rejected", -1))}
    row: dict[str, float] = {"row": number}
    for name, values in sums.items():
        row |= {f"logprob_{name}": float(values.sum(dtype=np.float64)), f"tokens_{name}": len(values)}
    return row


def _nll(row: dict[str, float]) -> float:
    """Return the NLL of a row's answer or of a pair's chosen answer, and 0 for a bad answer."""
    return row["loss"] * _tokens(row) if "loss" in row else -row["logprob_chosen"]


def _tokens(row: dict[str, float]) -> float:
    return row["tokens"] * row.get("good", True) if "tokens" in row else row["tokens_chosen"]


def _prefers(row: dict[str, float]) -> bool:
    return bool(row["logprob_chosen"] > row["logprob_rejected"])
