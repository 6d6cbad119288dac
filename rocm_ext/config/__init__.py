"""From a YAML's name and the command line to one checked config."""

from rocm_ext.config.components import COMPONENT, check_from_folder, instantiate, takes, without
from rocm_ext.config.layers import (
    defaults,
    difference,
    find,
    load,
    recipe_of,
    requested_hardware,
    startable,
    trainer_config,
)
from rocm_ext.config.main import command_line, guarded, recipe_main

__all__ = [
    "COMPONENT",
    "check_from_folder",
    "command_line",
    "defaults",
    "difference",
    "find",
    "guarded",
    "instantiate",
    "load",
    "recipe_main",
    "recipe_of",
    "requested_hardware",
    "startable",
    "takes",
    "trainer_config",
    "without",
]
