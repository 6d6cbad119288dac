"""The training and validation rows of a config, from its data sets."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from rocm_ext.base.errors import UserError, refuse
from rocm_ext.base.log import log
from rocm_ext.base.types import Json
from rocm_ext.config.checks.training import EVAL_METRIC, by_answers
from rocm_ext.config.components import data_sets
from rocm_ext.data.row_cache import cache_key, cached_rows
from rocm_ext.data.rows import SIDE, Rows, open_dataset, tokenize

ValidationRows = Rows | Mapping[str, Rows] | None  # named data sets by name


def training_rows(
    cfg: DictConfig, tokenizer: Any, positions: int, *, cached: bool, progress: bool
) -> tuple[Rows, ValidationRows]:
    """Read and tokenise the rows of ``dataset`` and ``dataset_val``.

    Args:
        cfg: config of SFT or DPO.
        tokenizer: from :func:`rocm_ext.data.tokenizer.open_tokenizer`, or a recipe's own.
        positions: the model's maximum length of a sequence in tokens.
        cached: whether rows may come from the cache, which knows the config's tokenizer alone.
        progress: whether to show progress bars.

    Returns:
        The training rows; and the validation rows, those of named data sets by name, or None.

    Raises:
        UserError: the data cannot be read, or keys of the config contradict each other.
    """

    def read(key: str, component: Any) -> Rows:
        return _rows(cfg, key, component, tokenizer, positions, cached, progress)

    rows = read("dataset", cfg.dataset)
    if cfg.dataset_val is not None and cfg.validation_fraction:
        raise UserError("dataset_val and validation_fraction are both set; keep one of them")
    validation: ValidationRows = None
    if cfg.dataset_val is not None:
        parts = {}
        for key, component in data_sets("dataset_val", cfg.dataset_val).items():
            parts[key.partition(".")[2]] = read(key, component)
        validation = parts.get("", parts)
    if cfg.validation_fraction:
        rows, validation = rows.split(cfg.validation_fraction, cfg.data_seed)
        log.info("validation_fraction: %s rows are set aside", f"{len(validation):,}")
    watches_rows = cfg.early_stopping_patience and not by_answers(cfg)
    if watches_rows and validation is None:
        raise UserError(
            "early_stopping_patience needs validation rows: set dataset_val or validation_fraction; or set "
            f"eval_prompts and early_stopping_metric={EVAL_METRIC}"
        )
    return rows, validation


def validation_sets(validation: ValidationRows) -> dict[str, Rows]:
    """Return validation rows by their key: ``dataset_val``, or ``dataset_val.NAME`` of named data sets."""
    if isinstance(validation, Mapping):
        return {f"dataset_val.{name}": rows for name, rows in validation.items()}
    return {"dataset_val": validation} if validation else {}


def refuse_single_answers(recipe: str, rows: Rows, validation: ValidationRows) -> None:
    """Raise a UserError if rows for ``recipe``, which compares answers, are not preferences."""
    parts = {"dataset": rows, **validation_sets(validation)}
    refuse(
        f"{key} has single answers, and {recipe} needs pairs of a chosen and a rejected one: "
        "use rocm_ext.data.preference_dataset"
        for key, part in parts.items()
        if SIDE not in part.columns
    )


def _rows(
    cfg: DictConfig,
    key: str,
    component: Any,
    tokenizer: Any,
    positions: int,
    cached: bool,
    progress: bool,
) -> Rows:
    policies = {
        "max_seq_len": getattr(tokenizer, "max_seq_len", None),
        "positions": positions,
        "too_long": cfg.too_long,
        "bad_rows": cfg.bad_rows,
        "name": key,
    }

    def make_key() -> Json | None:
        return cache_key(cfg, component, **policies) if cached and cfg.keep_rows else None

    def read() -> Rows:
        dataset = open_dataset(component, tokenizer, cfg.too_long)
        return tokenize(dataset, progress=progress, **policies)

    rows = cached_rows(make_key, read)
    counts = [f"{count:,} {what.replace('_', ' ')}" for what, count in rows.counts.items()]
    log.info("%s: %s", key, ", ".join(counts))
    weights = rows.weights()
    if weights:
        log.info("%s: its column weight weighs rows, from %g to %g", key, *weights)
    return rows
