"""The start of a run, right after ``import torch`` and before anything else heavy is imported.

torch's libraries read some variables of a hardware profile when they load, and ``tune`` imports torch first. If a
variable is missing, a new process with it replaces this one. It runs the recipe directly
(:mod:`rocm_ext.config.launch`), without importing ``tune``'s other commands. Under torchrun the launcher sets the
variables and its ranks inherit them. The recipe's script has not started yet, so no part of it runs twice.
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
from rocm_ext.machine.environment import (
    apply_environment,
    environment_for,
    preset,
    put,
    replace_process,
    this_command,
)
from rocm_ext.machine.profile import Profile, choose_profile, load_profile


def begin(tune: bool) -> None:
    """Complete the environment of this program, which may replace its process. The recipe reports a user's mistakes
    later, but a recipe that does not run on this system ends here with one line. ``tune``: this program is `tune`,
    with a recipe or a config of ours as an argument."""
    with suppress(UserError):
        if tune:
            if sys.argv[1:2] == ["run"]:
                _begin_tune(sys.argv[2:])
            return
        script = Path(sys.argv[0]).resolve()
        if script.stem not in registry.TITLES:
            return
        recipe = registry.find(script.stem)
        if recipe.file.resolve() == script:
            _end_on_wrong_system(recipe)
            gc.disable()  # imports leave hardly any garbage; recipe_main enables it
            apply_environment(*_profile(recipe, sys.argv[1:]), restart=True)


def prepare_for(requested: str, restart: bool = True) -> list[str]:
    """Complete the environment of a program that computes as a recipe does; call it before importing torch.

    Args:
        requested: name of a profile, or ``auto``.
        restart: whether the program may be replaced by one with the environment.

    Returns:
        Lines for the log: each variable that was set, and why.
    """
    late = []
    if requested != "auto":
        late = preset(load_profile(requested))
    machine = detect()
    name = choose_profile(machine)[0] if requested == "auto" else requested
    return late + apply_environment(load_profile(name), machine, restart)


def _begin_tune(arguments: Sequence[str]) -> None:
    """`tune run [torchrun's options] RECIPE --config NAME …`."""
    table = registry.recipes()
    at = next(
        (i for i, name in enumerate(arguments) if name in table or registry.is_recipe_file(name)),
        None,
    )
    if at is None:
        return
    if at:
        _end_on_lone_machine(arguments[:at])
        report_ranks()
    if at == 0:
        gc.disable()
    elif os.environ.get(_LAUNCHER) == str(os.getpid()):
        return  # replaced already; looking again would take a GPU's memory
    recipe = table.get(arguments[at]) or registry.read_recipe(Path(arguments[at]))
    _end_on_wrong_system(recipe)
    profile, machine = _profile(recipe, arguments[at + 1 :])
    ranks = _ranks(arguments[:at], machine)
    environ = {**os.environ, "WORLD_SIZE": str(ranks)} if ranks > 1 else os.environ
    missing = environment_for(profile, machine, environ)
    put(missing)
    os.environ.setdefault(registry.DECIDED, "")  # child processes inherit it
    if at == 0 and missing:
        replace_process(launch.command(table.get(arguments[0]), arguments))
    elif at and sys.modules["torch"].cuda.is_initialized():
        # a launcher must not keep a GPU's memory
        os.environ[_LAUNCHER] = str(os.getpid())
        replace_process(this_command())


# process id of a launcher that was replaced; replacing keeps the id
_LAUNCHER = "ROCM_EXT_LAUNCHER"


def _end_on_wrong_system(recipe: registry.Recipe) -> None:
    try:
        registry.check_system(recipe, platform.system())
    except UserError as error:
        sys.exit(f"error: {error}")


def _profile(recipe: registry.Recipe, arguments: Sequence[str]) -> tuple[Profile, Machine]:
    """Return the profile that ``recipe`` will use with these arguments, and the machine."""
    without_help = [item for item in arguments if item not in ("-h", "--help")]
    name, overrides = command_line(without_help)
    requested = requested_hardware(name, overrides, recipe)
    machine = detect()
    if requested == "auto":
        requested, _ = choose_profile(machine)
    return load_profile(requested), machine


def _given(options: Sequence[str]) -> dict[str, str]:
    """Return torchrun's options by name, also from its environment variables."""
    given = {}
    for name, value in os.environ.items():
        if name.startswith("PET_"):
            given[name[4:].lower()] = value
    parts = []
    for option in options:
        parts += option.split("=", 1)
    for name, value in pairwise(parts):
        given[name.lstrip("-").replace("-", "_")] = value
    return given


def _end_on_lone_machine(options: Sequence[str]) -> None:
    """End with one line if torchrun would wait ten minutes for machines that cannot reach this one."""
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
        others = "1 on the other"
        if int(nodes) > 2:
            others = f"1 to {int(nodes) - 1} on the others"
        sys.exit(
            f"error: --nnodes {nodes} needs --node_rank, the number of this machine: 0 on the machine of "
            f"--rdzv_endpoint, {others}"
        )


def _ranks(options: Sequence[str], machine: Machine) -> int:
    """Return the number of processes that torchrun starts on all machines; 1 if the options do not say."""
    values = _given(options)
    nodes = values.get("nnodes", "1").rpartition(":")[2]
    processes = values.get("nproc_per_node", "1")
    ranks = int(nodes) if nodes.isdecimal() else 1
    if processes.isdecimal():
        return ranks * int(processes)
    return ranks * max(1, machine.gpu_count)
