"""torch's hook, through which ``tune`` learns of our recipes and a run begins early.

torch calls :func:`register` at the end of ``import torch``, through ``rocm_ext_hook`` and the entry point group
``torch.backends`` (device extension autoload, PyTorch RFC 122468). In programs that are not ours it only lets
torchtune import newer torchao. The top of this file imports nothing that torch has not imported.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import logging
import os
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from rocm_ext.base import deferred, packages, registry
from rocm_ext.base.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


def register() -> None:
    """torch's hook. In `tune`: append our recipes to torchtune's registry. In a program that runs a recipe: complete
    the environment before anything else is imported. In both, and in `rocm-ext`: defer most of torchtune and torchao.
    In every program: let torchtune import names that torchao has moved. Never raises, but answers `tune ls`, `tune cp`
    and, for our configs, `tune validate` itself, and ends `tune`, `rocm-ext` and recipes with one line where the
    installed torchtune or torchao cannot work, where `tune` is asked for a recipe that does not exist, or where
    `tune cp` would overwrite a file with one of ours."""
    what = "its recipes are not registered"
    try:
        deferred.bridge()
        tune, script = _is_tune(), _script()
        if tune:
            problem = packages.wrong_pins()
            table = registry.recipes()
            named = _names_us(sys.argv, table)
            if problem and named:
                sys.exit(problem)
            command, arguments = "".join(sys.argv[1:2]), sys.argv[2:]
            if command == "ls" and not any(word.startswith("-") for word in arguments):
                _list(table, arguments)
                sys.exit()
            _add_recipes(table)
            if command in _FIRST:
                problem = _FIRST[command](arguments, table)
                if problem:
                    sys.exit(f"error: {problem}")
            if not named:
                if not {"-h", "--help"}.isdisjoint(sys.argv):
                    leave_out_warnings()
                return
        elif script.endswith((*_RECIPES, *_COMMANDS)):
            if problem := packages.wrong_pins():
                sys.exit(problem)
        elif registry.DECIDED not in os.environ:
            return
        deferred.defer()
        gc.freeze()  # no collection of garbage searches torch again
        what = "the environment of this run is not prepared"
        leave_out_warnings()
        if (tune or script.endswith(_RECIPES)) and not _is_worker():
            from rocm_ext.config import startup

            startup.begin(tune)
    except Exception as error:
        print(f"torchtune-rocm: {what}: {error}", file=sys.stderr)


def _script() -> str:
    return "/" + sys.argv[0].replace("\\", "/") if sys.argv else ""


def _is_tune() -> bool:
    if sys.argv[:1] == ["-m"]:  # `python -m torchtune._cli.tune` is still importing torchtune
        return sys.orig_argv[-len(sys.argv) :][:1] in (
            ["torchtune._cli.tune"],
            ["-mtorchtune._cli.tune"],
        )
    return _script().rpartition("/")[2] in ("tune", "tune.exe", "tune-script.py")


_RECIPES = tuple(f"/recipes/{name}.py" for name in registry.TITLES)
_COMMANDS = ("/rocm-ext", "/rocm-ext.exe", "/rocm_ext/cli/__main__.py", "/rocm_ext/bench/child.py")


def _is_worker() -> bool:
    """Whether this is a worker process of a run."""
    return (
        "multiprocessing" in sys.modules
        and sys.modules["multiprocessing"].parent_process() is not None
    )


def leave_out_warnings() -> None:
    """Leave out warnings of torch and torchao that concern nobody here."""
    for name in ("torchao", "torch.utils._pytree", "torch.distributed.run"):
        logging.getLogger(name).addFilter(_concerns_us)


def _concerns_us(record: logging.LogRecord) -> bool:
    # torchao's C++ kernels are for the torch and the GPUs that it was built for, and nothing here uses them; torch 2.13
    # warns of enums that torchao 0.18 registers; our line on cpu_threads says that torchrun set OMP_NUM_THREADS
    about = (
        "Skipping import of cpp extensions",
        "Failed to load ",
        "<enum 'KernelPreference'>",
        "<enum 'ScaleCalculationMode'>",
        "Setting OMP_NUM_THREADS",
    )
    return not record.getMessage().lstrip("\n*").startswith(about)


def _names_us(argv: list[str], table: Mapping[str, registry.Recipe]) -> bool:
    # `tune ls` fails in torchtune itself if the pair is broken; other people's recipes are not our business
    names = {*table, *(path.stem for recipe in table.values() for path in recipe.configs)}
    return len(argv) < 3 or any(name in names or registry.is_recipe_file(name) for name in argv[2:])


def _unknown_recipe(arguments: list[str], _: Mapping[str, registry.Recipe]) -> str | None:
    """The message about the recipe in `tune run ARGUMENTS`, unless it is one of `tune`'s, a file or a module."""
    from torchtune._recipe_registry import get_all_recipes

    known = {recipe.name for recipe in get_all_recipes()}
    if not arguments or not {*known, "-h", "--help"}.isdisjoint(arguments):
        return None
    from torch.distributed.run import get_args_parser  # only here: it takes long

    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        name = get_args_parser().parse_known_args(arguments)[0].training_script
        top = re.split(r"[/\\.]", name)[0]
        module = PathFinder.find_spec(top, [*sys.path, os.getcwd()])
        if module is None and not Path(name).exists():
            near = "" if name.endswith(".py") else nearest(name, known)
            return f"there is no recipe {name}, neither in `tune ls` nor as a file here{near}"
    return None  # `tune` itself reports what is wrong


def _copy(arguments: list[str], table: Mapping[str, registry.Recipe]) -> str | None:
    """Answer `tune cp ARGUMENTS` with torchtune's code, before torchtune imports the rest of itself. A file that one of
    ours would overwrite ends it, unless ``--force`` allows it, which torchtune does not know."""
    from torchtune._cli.cp import Copy
    from torchtune._recipe_registry import get_all_recipes

    known = set()
    for recipe in get_all_recipes():
        known.add(recipe.name)
        known.update(config.name for config in recipe.configs)
    names = [argument for argument in arguments if not argument.startswith("-")]
    if names and names[0] not in known:
        return f"there is no recipe or config {names[0]}{nearest(names[0], known, '; `tune ls` lists them')}"
    if len(names) == 2 and _names_us(["tune", "cp", names[0]], table):
        suffix = ".py" if names[0] in table else ".yaml"
        target = Path(names[1])
        if target.name:
            target = target.with_suffix(suffix)  # as torchtune does
        if target.is_dir():
            target /= names[0] + suffix
        force = {"-f", "--force"}
        if target.exists() and {*force, "-n", "--no-clobber"}.isdisjoint(arguments):
            return f"{target} exists; name another file, or add --force to replace it"
        arguments = [argument for argument in arguments if argument not in force]
    parser = argparse.ArgumentParser(prog="tune")
    Copy.create(parser.add_subparsers())
    args = parser.parse_args(["cp", *arguments])
    args.func(args)
    sys.exit()


def _validate(arguments: list[str], table: Mapping[str, registry.Recipe]) -> None:
    """Let `rocm-ext validate` answer `tune validate ARGUMENTS` where they name a config of ours: torchtune neither
    knows our keys nor takes ``--config`` and a config's name."""
    names = [argument.removeprefix("--config=") for argument in arguments if argument != "--config"]
    shipped = [path.stem for recipe in table.values() for path in recipe.configs]
    if names and (names[0] in shipped or registry.stated_recipe(Path(names[0])) is not None):
        from rocm_ext.machine.environment import replace_process

        replace_process(
            [sys.executable, "-m", "rocm_ext.cli", "validate", "--keys", "--config", *names]
        )


# What comes before a subcommand of `tune`: a check, or the answer itself. A returned message ends `tune`.
_FIRST = {"run": _unknown_recipe, "cp": _copy, "validate": _validate}


def _list(table: Mapping[str, registry.Recipe], words: Sequence[str]) -> None:
    """Print the list of `tune ls`: torchtune's configs, then ours with machine, model and memory, which so stay on
    the screen; with ``words``, the lines that have them all. It ends `tune` before torchtune imports the rest of
    itself, which takes seconds."""
    from torchtune._recipe_registry import get_all_recipes

    def chosen(lines: Iterable[str]) -> list[str]:
        return [line for line in lines if all(word in line for word in words)]

    lines = []
    for recipe in get_all_recipes():
        lines += [f"{recipe.name:40} {config.name}" for config in recipe.configs]
    theirs = chosen(lines)
    heading, *ours = registry.listing(table.values())
    ours = chosen(ours)
    if not theirs and not ours:
        sys.exit(f"error: no recipe or config has {' and '.join(words)}; `tune ls` lists all")
    if theirs:
        print("torchtune's:", *theirs, "", sep="\n")
    if ours:
        print(heading, *ours, sep="\n")
    print(
        "\nStart one with `tune run RECIPE --config CONFIG`; hardware=NAME is for another machine. Memory is\n"
        "computed, for one GPU: from the least, where the run can recompute layers, to what is fastest."
    )


def _add_recipes(table: Mapping[str, registry.Recipe]) -> None:
    from torchtune._recipe_registry import _ALL_RECIPES, Config, Recipe

    for recipe in table.values():
        # torchtune joins these to its folder, and joining an absolute path yields that path
        configs = [Config(path.stem, str(path)) for path in recipe.configs]
        entry = Recipe(recipe.name, str(recipe.file), configs, supports_distributed=True)
        _ALL_RECIPES.append(entry)
