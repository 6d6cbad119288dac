"""The training and validation rows of a config, from its data sets."""

from typing import Any

from omegaconf import DictConfig

from rocm_ext.base.errors import UserError, refuse
from rocm_ext.base.log import log
from rocm_ext.base.types import Json
from rocm_ext.config.checks.training import EVAL_METRIC
from rocm_ext.data.row_cache import cache_key, cached_rows
from rocm_ext.data.rows import SIDE, Rows, open_dataset, tokenize


def training_rows(
    cfg: DictConfig, tokenizer: Any, positions: int, *, cached: bool, progress: bool
) -> tuple[Rows, Rows | None]:
    """Read and tokenise the rows of ``dataset`` and ``dataset_val``.

    Args:
        cfg: config of SFT or DPO.
        tokenizer: from :func:`rocm_ext.data.tokenizer.open_tokenizer`, or a recipe's own.
        positions: the model's maximum length of a sequence in tokens.
        cached: whether rows may come from the cache, which knows the config's tokenizer alone.
        progress: whether to show progress bars.

    Returns:
        The training rows, and the validation rows or None.

    Raises:
        UserError: the data cannot be read, or keys of the config contradict each other.
    """

    def read(key: str) -> Rows:
        return _rows(cfg, key, tokenizer, positions, cached, progress)

    rows = read("dataset")
    if cfg.dataset_val is not None and cfg.validation_fraction:
        raise UserError("dataset_val and validation_fraction are both set; keep one of them")
    validation = read("dataset_val") if cfg.dataset_val is not None else None
    if cfg.validation_fraction:
        rows, validation = rows.split(cfg.validation_fraction, cfg.data_seed)
        log.info("validation_fraction: %s rows are set aside", f"{len(validation):,}")
    watches_rows = cfg.early_stopping_patience and cfg.early_stopping_metric != EVAL_METRIC
    if watches_rows and validation is None:
        raise UserError(
            "early_stopping_patience needs validation rows: set dataset_val or validation_fraction; or set "
            f"eval_prompts and early_stopping_metric={EVAL_METRIC}"
        )
    return rows, validation


def refuse_single_answers(recipe: str, rows: Rows, validation: Rows | None) -> None:
    """Raise a UserError if rows for ``recipe``, which compares answers, are not preferences."""
    parts = {"dataset": rows, "dataset_val": validation}
    refuse(
        f"{key} has single answers, and {recipe} needs pairs of a chosen and a rejected one: "
        "use rocm_ext.data.preference_dataset"
        for key, part in parts.items()
        if part is not None and SIDE not in part.columns
    )


def _rows(
    cfg: DictConfig, key: str, tokenizer: Any, positions: int, cached: bool, progress: bool
) -> Rows:
    component = cfg[key]
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
