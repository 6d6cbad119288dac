"""Measure a model on the validation rows of SFT or DPO without training: loss, perplexity, and other measurements.

The loss is the recipe's ``val_loss``.
"""

import json
import math
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from omegaconf import DictConfig

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import disk_errors, replace_text
from rocm_ext.base.log import Progress
from rocm_ext.config.components import chosen_set
from rocm_ext.data.rows import SIDE, Rows, labelled
from rocm_ext.data.tokenizer import open_tokenizer
from rocm_ext.model.download import use_downloaded
from rocm_ext.plan import workload
from rocm_ext.runs.intervals import gained_and_lost, mcnemar, paired_ratio
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


def measure(
    recipe: Any, adapter: Path | None, base: bool = False, name: str | None = None
) -> list[Measured]:
    """Measure a model on the validation rows of a config of SFT or DPO.

    The reference of DPO is the model that the config starts from.

    Args:
        recipe: a :class:`~rocm_ext.recipes.lora_finetune_rocm.LoRAFinetune`, or a recipe that extends it.
        adapter: PEFT folder. None measures the model that the config starts from.
        base: whether to measure the model that the config starts from, in addition.
        name: data set of ``dataset_val``, if it has several.

    Returns:
        The results; with ``base`` also the results of the model that the config starts from.

    Raises:
        UserError: the config has no validation rows, or the model or the rows cannot be read.
    """
    learner, rows = _open(recipe, name)
    try:
        with TemporaryDirectory() as folder:
            kept = Path(recipe.cfg.output_dir) / FILE
            if kept.is_file():
                shutil.copy(kept, folder)
            recipe.add_columns(Path(folder), {"dataset_val": rows})
        model: AbstractContextManager[None] = nullcontext()
        if adapter is not None:
            model = reference(learner, learner.read_adapter(adapter), str(adapter))
        with model:
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
    nll = np.fromiter(map(_nll, measured.rows), np.float64)
    nll_before = np.fromiter(map(_nll, base.rows), np.float64)
    tokens = np.fromiter(map(_tokens, measured.rows), np.float64)
    difference = paired_ratio(nll - nll_before, tokens)
    result: dict[str, float | list[float]] = {
        "difference": difference.value,
        "interval": [difference.low, difference.high],
    }
    if "logprob_chosen" in measured.rows[0]:
        gained, lost = gained_and_lost(_preferred(base), _preferred(measured))
        result |= {"gained": gained, "lost": lost, "p": mcnemar(lost, gained)}
    return result


def keep(measured: Measured, folder: Path) -> None:
    """Write ``eval.json`` and ``rows.jsonl`` into a new folder."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in measured.rows]
    replace_text(folder / ROWS, "".join(lines))
    replace_text(folder / RESULT, json.dumps(measured.scores, indent=2) + "\n")


def open_learner(cfg: DictConfig) -> Learner:
    """Open the machine and the model of a config, without its weights."""
    runtime = Runtime.open(cfg)
    use_downloaded(cfg, runtime.ranks)
    cfg.seed = pick_seed(cfg.seed, None, runtime.ranks)
    tokenizer = open_tokenizer(cfg)
    check_tokenizer(tokenizer, cfg)
    return Learner(cfg, runtime, tokenizer)


def _open(recipe: Any, name: str | None) -> tuple[Learner, Rows]:
    """Open the model that the config starts from, and the held-out rows, or those of the data set ``name``."""
    cfg = recipe.cfg
    if cfg.dataset_val is None and not cfg.validation_fraction:
        raise UserError(
            "the config has no held-out rows: set dataset_val or validation_fraction, or name them: --data"
        )
    recipe.learner = learner = open_learner(cfg)
    recipe.runtime = learner.runtime
    tokenizer = learner.tokenizer
    if cfg.dataset_val is not None or name:  # the training rows are not read
        cfg.dataset = chosen_set(cfg, name)
        cfg.dataset_val = None
        cfg.early_stopping_patience = None
        rows, _ = recipe.setup_data(tokenizer)
    else:
        _, rows = recipe.setup_data(tokenizer)
    learner.check_rows(rows, recipe.columns)
    work = workload.describe(rows, len(rows), "the held-out rows", learner.shares)
    learner.setup(work)
    return learner, rows


def _measure(learner: Learner, rows: Rows) -> Measured:
    result = validation_loss(learner, rows)
    measured: list[dict[str, float]] = []
    is_main = learner.runtime.ranks.is_main
    progress = Progress(len(rows), 0, is_main, "row", brief=True)
    for start in range(0, len(rows), _BLOCK):
        end = min(start + _BLOCK, len(rows))
        block = rows.part(range(start, end))
        for logprobs in score(learner, block):
            measured.append(_row(rows, len(measured), logprobs))
            progress.update("")
    progress.close()
    nll = sum(map(_nll, measured))
    tokens = sum(map(_tokens, measured))
    mean_nll = nll / max(1, tokens)
    scores = {
        "loss": result.loss,
        "perplexity": math.exp(min(mean_nll, 700)),
        "rows": len(rows),
        "tokens": result.labels,
        **result.measurements,
    }
    return Measured(scores, measured)


def _row(rows: Rows, number: int, logprobs: np.ndarray) -> dict[str, float]:
    """Return a row of :class:`Measured` from the log-probs of its labels."""
    row: dict[str, float] = {"row": number}
    if not rows.pairs:
        row["tokens"] = len(logprobs)
        row["loss"] = -float(logprobs.mean(dtype=np.float64))
        if SIDE in rows.columns:
            side = rows.columns[SIDE][number][0]
            row["good"] = bool(side > 0)
        return row
    labels = labelled(rows.labels[number], rows.lengths[number])
    side = rows.columns[SIDE][number][labels]
    by_side = {"chosen": logprobs[side > 0], "rejected": logprobs[side < 0]}
    for name, values in by_side.items():
        row[f"logprob_{name}"] = float(values.sum(dtype=np.float64))
        row[f"tokens_{name}"] = len(values)
    return row


def _nll(row: dict[str, float]) -> float:
    """Return the NLL of a row's answer or of a pair's chosen answer, and 0 for a bad answer."""
    if "loss" in row:
        return row["loss"] * _tokens(row)
    return -row["logprob_chosen"]


def _tokens(row: dict[str, float]) -> float:
    """Return the number of tokens of a row's answer or of a pair's chosen answer, and 0 for a bad answer."""
    if "tokens" in row:
        return row["tokens"] * row.get("good", True)
    return row["tokens_chosen"]


def _preferred(model: Measured) -> dict[int, bool]:
    """Return whether a model prefers the chosen answer, by pair."""
    preferred = {}
    for row in model.rows:
        preferred[int(row["row"])] = row["logprob_chosen"] > row["logprob_rejected"]
    return preferred
