"""``rocm-ext validate``: let a recipe check a config, up to the weights.

Starts the config's recipe and ends it before it reads the weights. By then it has checked keys and values, the machine,
data or prompts, tokenizer, verifier, optimiser and memory. Needs the model's folder without its weights. Starts no
metric logger and trains nothing. Exits with 1 and one line if a run would end that way. With --keys it reads the config
alone, as `tune validate CONFIG` does.
"""

import shlex
import sys
from argparse import ArgumentParser, Namespace

from rocm_ext import config
from rocm_ext.base import registry
from rocm_ext.cli._common import add_config, add_overrides, count, options
from rocm_ext.config.checks.rollouts import check_config


def add(parser: ArgumentParser) -> None:
    option = options(parser)
    add_config(parser)
    option("--ranks N", "processes, as --nproc_per_node (default: 1)", count, 1)
    option("--keys", "check keys and values alone: neither model nor data is needed")
    add_overrides(parser)


def run(args: Namespace) -> None:
    """Check keys and values, or replace this process by the recipe with ``validate_only=True``."""
    from rocm_ext.machine.environment import preset, replace_process
    from rocm_ext.machine.profile import check_locked, load_profile

    recipe = config.recipe_of(args.config, args.overrides)
    given = ["--config", args.config, *args.overrides]
    if args.keys:
        cfg = config.load(recipe, args.config, args.overrides)
        check_config(cfg, registry.family(recipe))
        check_locked(load_profile(cfg.hardware), dict(cfg), list(cfg.hardware_overrides))
        again = shlex.join(["rocm-ext", "validate", *given])
        print(f"Config is well-formed! `{again}` also checks machine, model and data")
        return
    if args.ranks == 1 and recipe.name in registry.recipes():  # seconds sooner than with `tune run`
        command = [str(recipe.file)]
        hardware = config.requested_hardware(args.config, args.overrides, recipe)
        if hardware != "auto":
            preset(load_profile(hardware))  # or the recipe would import torch twice
    else:
        command = ["-m", "torchtune._cli.tune", "run"]
        if args.ranks > 1:
            command += ["--nproc_per_node", str(args.ranks)]
        command.append(config.startable(recipe))
    replace_process([sys.executable, *command, *given, "validate_only=True"])
