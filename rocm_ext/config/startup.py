"""The start of a run, right after ``import torch`` and before anything else heavy is imported.

Some variables of a hardware profile are read when torch's libraries are loaded. ``tune`` imports torch before it can
ask anybody, so where a variable is missing, the process is replaced by one that has it. That one runs the recipe
directly (:mod:`rocm_ext.launch`), without the imports of ``tune``'s other commands. Under torchrun the launcher sets
the variables and its ranks inherit them. The script of a recipe has not begun by then, so nothing of it runs twice.
"""

import gc
import logging
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rocm_ext import launch, registry
from rocm_ext.config.layers import requested_hardware
from rocm_ext.config.main import command_line
from rocm_ext.errors import UserError
from rocm_ext.hardware.environment import (
    ensure_environment,
    environment_for,
    preset,
    replace_process,
    this_command,
)
from rocm_ext.hardware.machine import Machine, detect
from rocm_ext.hardware.profile import Profile, choose_profile, load_profile


def begin(tune: bool) -> None:
    """Complete the environment of this program, which may replace it.

    Args:
        tune: this is `tune`, and its arguments name a recipe or a config of ours.
    """
    logging.getLogger("torchao").addFilter(_unless_about_extensions)
    if "multiprocessing" in sys.modules and sys.modules["multiprocessing"].parent_process() is not None:
        return  # a worker of a run
    if tune:
        if sys.argv[1:2] == ["run"]:
            _begin_tune(sys.argv[2:])
    elif Path(sys.argv[0]).resolve() in [recipe.file.resolve() for recipe in map(registry.find, registry.TITLES)]:
        gc.disable()  # imports leave hardly any garbage to look for; recipe_main enables it
        if registry.DECIDED not in os.environ and (found := _profile(sys.argv[1:])):
            ensure_environment(*found)


def prepare(config: str, overrides: Sequence[str]) -> list[str]:
    """Complete the environment of one of our commands that computes as a recipe does. Call it before torch is
    imported; it may replace the process.

    Returns:
        lines that say what was set and why.

    Raises:
        UserError: there is no such config, or no profile for this machine.
    """
    requested = requested_hardware(config, overrides)
    if requested != "auto":
        preset(load_profile(requested))
    machine = detect()
    name = choose_profile(machine)[0] if requested == "auto" else requested
    return ensure_environment(load_profile(name), machine)


def _unless_about_extensions(record: logging.LogRecord) -> bool:
    # torchao's C++ kernels are for torch versions that it was built with; nothing here uses them
    return not record.getMessage().startswith("Skipping import of cpp extensions")


def _begin_tune(arguments: Sequence[str]) -> None:
    """`tune run [torchrun's options] RECIPE --config NAME …`."""
    table = registry.recipes()
    at = next((i for i, each in enumerate(arguments) if each in table or registry.is_recipe_file(each)), None)
    if at is None:
        return
    gc.disable()
    if registry.DECIDED in os.environ or (found := _profile(arguments[at + 1 :])) is None:
        return
    profile, machine = found
    ranks = _ranks(arguments[:at], machine)
    environ = {**os.environ, "WORLD_SIZE": str(ranks)} if ranks > 1 else os.environ
    missing = environment_for(profile, machine, environ)
    os.environ |= {name: value for name, (value, _) in missing.items()}
    os.environ[registry.DECIDED] = ",".join(sorted(missing))
    if at == 0 and missing:
        replace_process(launch.command(table.get(arguments[0]), arguments))
    elif at and sys.modules["torch"].cuda.is_initialized():  # a launcher must not keep a GPU's memory
        replace_process(this_command())


def _profile(arguments: Sequence[str]) -> tuple[Profile, Machine] | None:
    """The profile that a recipe with these arguments will have; None: it will say what is wrong with them."""
    try:
        requested = requested_hardware(*command_line([each for each in arguments if each not in ("-h", "--help")]))
        machine = detect()
        name = choose_profile(machine)[0] if requested == "auto" else requested
        return load_profile(name), machine
    except UserError:
        return None


def _ranks(options: Sequence[str], machine: Machine) -> int:
    """Processes that torchrun starts with these options, on all nodes; 1 where they do not say."""
    parts = [part for each in options for part in each.split("=", 1)]
    given = {name.lstrip("-").replace("-", "_"): value for name, value in pairwise(parts)}
    a_node, nodes = given.get("nproc_per_node", "1"), given.get("nnodes", "1").rpartition(":")[2]
    return (int(a_node) if a_node.isdecimal() else max(1, machine.gpu_count)) * (int(nodes) if nodes.isdecimal() else 1)
