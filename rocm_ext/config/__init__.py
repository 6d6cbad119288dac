"""From a YAML's name and the command line to one checked config."""

from rocm_ext.config.layers import (
    COMPONENT,
    command_line,
    defaults,
    difference,
    find,
    guarded,
    instantiate,
    load,
    recipe_main,
    recipe_of,
    takes,
    trainer_config,
    without,
)

__all__ = [
    "COMPONENT",
    "command_line",
    "defaults",
    "difference",
    "find",
    "guarded",
    "instantiate",
    "load",
    "recipe_main",
    "recipe_of",
    "takes",
    "trainer_config",
    "without",
]
