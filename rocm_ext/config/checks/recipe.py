"""Check all keys of a config, by the recipe that runs it."""

from omegaconf import DictConfig, OmegaConf

from rocm_ext.base import registry
from rocm_ext.config.checks.rollouts import check_sampled_values
from rocm_ext.config.checks.training import check_values
from rocm_ext.config.layers import trainer_config


def check_config(cfg: DictConfig, family: str) -> None:
    """Raise a UserError for values that a recipe would refuse before it reads a file.

    ``family`` is the recipe of this library that runs it or that its recipe extends; empty: nothing is checked.
    """
    if family in registry.SAMPLED:
        check_values(OmegaConf.create(trainer_config(cfg)))
        check_sampled_values(cfg, family)
    elif family:
        check_values(cfg)
