"""Components that every recipe builds from its config."""

from typing import Any

from omegaconf import DictConfig

from rocm_ext import config
from rocm_ext.train.runtime import Runtime


def setup_metric_logger(cfg: DictConfig, runtime: Runtime) -> Any:
    """Build the config's metric logger.

    Returns:
        The logger; None on ranks other than the main one, and if the config names no logger.

    Raises:
        UserError: the logger cannot be built.
    """
    if cfg.metric_logger is None or not runtime.ranks.is_main:
        return None
    return config.instantiate(cfg.metric_logger, key="metric_logger")
