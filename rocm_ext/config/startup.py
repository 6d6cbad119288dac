"""The start of a run, right after ``import torch`` and before anything else heavy is imported.

Some variables of a hardware profile are read when torch's libraries are loaded. ``tune`` imports torch before it can
ask anybody, so where a variable is missing, the process is replaced by one that has it. That one runs the recipe
directly (:mod:`rocm_ext.config.launch`), without the imports of ``tune``'s other commands. Under torchrun the launcher
sets the variables and its ranks inherit them. The script of a recipe has not begun by then, so nothing of it runs
twice.
"""

import gc
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from rocm_ext.base import registry
from rocm_ext.base.errors import UserError
from rocm_ext.base.process import report_ranks
from rocm_ext.config import launch
from rocm_ext.config.layers import requested_hardware
from rocm_ext.config.main import command_line
from rocm_ext.machine.detect import Machine, detect
from rocm_ext.machine.environment import apply_environment, environment_for, preset, put, replace_process, this_command
from rocm_ext.machine.profile import Profile, choose_profile, load_profile


def begin(tune: bool) -> None:
    """Complete the environment of this program, which may replace it. What a user can set wrong is left to the recipe
    to report, but a recipe that cannot be imported on this system ends here with one line.

    Args:
        tune: this is `tune`, and its arguments name a recipe or a config of ours.
    """
    with suppress(UserError):
        if tune:
            if sys.argv[1:2] == ["run"]:
                _begin_tune(sys.argv[2:])
            return
        script = Path(sys.argv[0]).resolve()
        if script.stem in registry.TITLES and (recipe := registry.find(script.stem)).file.resolve() == script:
            _end_on_wrong_system(recipe)
            gc.disable()  # imports leave hardly any garbage to look for; recipe_main enables it
            apply_environment(*_profile(recipe, sys.argv[1:]), restart=True)


def prepare(config: str, overrides: Sequence[str]) -> list[str]:
    """Complete the environment of one of our commands that computes as a recipe does. Call it before torch is
    imported; it may replace the process.

    Returns:
        lines that say what was set and why.

    Raises:
        UserError: there is no such config, or no profile for this machine.
    """
    return prepare_for(requested_hardware(config, overrides))


def prepare_for(requested: str) -> list[str]:
    """Do as :func:`prepare`, for a value of ``hardware``: the name of a profile, or ``auto``."""
    if requested != "auto":
        preset(load_profile(requested))
    machine = detect()
    name = choose_profile(machine)[0] if requested == "auto" else requested
    return apply_environment(load_profile(name), machine, restart=True)


def _begin_tune(arguments: Sequence[str]) -> None:
    """`tune run [torchrun's options] RECIPE --config NAME …`."""
    table = registry.recipes()
    at = next((i for i, name in enumerate(arguments) if name in table or registry.is_recipe_file(name)), None)
    if at is None:
        return
    if at:
        _end_on_lone_machine(arguments[:at])
        report_ranks()
    if at == 0:
        gc.disable()
    elif os.environ.get(_LAUNCHER) == str(os.getpid()):  # replaced already; looking again would take a GPU's memory
        return
    recipe = table.get(arguments[at]) or registry.read_recipe(Path(arguments[at]))
    _end_on_wrong_system(recipe)
    profile, machine = _profile(recipe, arguments[at + 1 :])
    ranks = _ranks(arguments[:at], machine)
    environ = {**os.environ, "WORLD_SIZE": str(ranks)} if ranks > 1 else os.environ
    missing = environment_for(profile, machine, environ)
    put({name: value for name, (value, _) in missing.items()})
    os.environ.setdefault(registry.DECIDED, "")  # child processes are known by it
    if at == 0 and missing:
        replace_process(launch.command(table.get(arguments[0]), arguments))
    elif at and sys.modules["torch"].cuda.is_initialized():  # a launcher must not keep a GPU's memory
        os.environ[_LAUNCHER] = str(os.getpid())
        replace_process(this_command())


_LAUNCHER = "ROCM_EXT_LAUNCHER"  # process id of a launcher that was replaced, which keeps its id


def _end_on_wrong_system(recipe: registry.Recipe) -> None:
    try:
        registry.check_system(recipe, platform.system())
    except UserError as error:
        sys.exit(f"error: {error}")


def _profile(recipe: registry.Recipe, arguments: Sequence[str]) -> tuple[Profile, Machine]:
    """The profile that ``recipe`` will have with these arguments.

    Raises:
        UserError: something is wrong with them.
    """
    name, overrides = command_line([argument for argument in arguments if argument not in ("-h", "--help")])
    requested = requested_hardware(name, overrides, recipe)
    machine = detect()
    return load_profile(choose_profile(machine)[0] if requested == "auto" else requested), machine


def _given(options: Sequence[str]) -> dict[str, str]:
    """Values of torchrun's options by name, those of its environment variables among them."""
    parts = [part for option in options for part in option.split("=", 1)]
    variables = {name[4:].lower(): value for name, value in os.environ.items() if name.startswith("PET_")}
    return variables | {name.lstrip("-").replace("-", "_"): value for name, value in pairwise(parts)}


def _end_on_lone_machine(options: Sequence[str]) -> None:
    """End with one line where torchrun would wait ten minutes for machines that cannot find this one."""
    values = _given(options)
    nodes = values.get("nnodes", "1").partition(":")[0]
    if not (nodes.isdecimal() and int(nodes) > 1):
        return
    if not values.get("rdzv_endpoint"):
        sys.exit(
            f"error: --nnodes {nodes} needs --rdzv_endpoint HOST:PORT, the same on every machine: an address of the "
            "first machine and a free port there, such as 192.168.1.10:29500"
        )
    if values.get("rdzv_backend", "static") == "static" and "node_rank" not in values:
        sys.exit(
            f"error: --nnodes {nodes} needs --node_rank, the number of this machine: 0 on the machine of "
            f"--rdzv_endpoint, {'1' if nodes == '2' else f'1 to {int(nodes) - 1}'} on the "
            f"{'other' if nodes == '2' else 'others'}"
        )


def _ranks(options: Sequence[str], machine: Machine) -> int:
    """Processes that torchrun starts with these options, on all nodes; 1 where they do not say."""
    values = _given(options)
    a_node, nodes = values.get("nproc_per_node", "1"), values.get("nnodes", "1").rpartition(":")[2]
    return (int(a_node) if a_node.isdecimal() else max(1, machine.gpu_count)) * (int(nodes) if nodes.isdecimal() else 1)
