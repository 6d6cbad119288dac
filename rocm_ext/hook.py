"""torch's hook, through which ``tune`` learns of our recipes and a run begins early.

torch loads :func:`register` at the end of ``import torch``, through the entry point group ``torch.backends`` (device
extension autoload, PyTorch RFC 122468). In programs that are not ours it returns at once; nothing that torch has not
imported itself is imported at the top of this file.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from rocm_ext import pins, registry

if TYPE_CHECKING:
    from collections.abc import Mapping


def register() -> None:
    """torch's hook. In `tune`: append our recipes to torchtune's registry. In a program that runs a recipe: complete
    the environment before anything else is imported. Never raises, but ends ``tune`` with one line where the installed
    torchtune or torchao cannot work."""
    try:
        tune = _is_tune()
        if not tune and not _is_ours():
            return
        if tune:
            problem = pins.wrong_pins()
            table = registry.recipes()
            named = _names_us(sys.argv, table)
            if problem and named:
                sys.exit(problem)
            _add_recipes(table)
            if not named:
                return
        from rocm_ext.config import startup

        startup.begin(tune)
    except Exception as error:
        print(f"torchtune-rocm: its recipes are not registered: {error}", file=sys.stderr)


def _is_tune() -> bool:
    # sys.argv[0] is "-m" while `python -m torchtune._cli.tune` is still importing torchtune
    names = [*sys.argv[:1], *getattr(sys, "orig_argv", [])[1:3]]
    return any(name.replace("\\", "/").rsplit("/", 1)[-1] in _TUNE for name in names)


_TUNE = ("tune", "tune.exe", "tune-script.py", "torchtune._cli.tune")


def _is_ours() -> bool:
    """Whether this process runs a script of this library, or one of our commands started it."""
    if registry.DECIDED in os.environ:
        return True
    script = "/" + sys.argv[0].replace("\\", "/") if sys.argv else ""
    return script.endswith(_OURS)


_OURS = ("/rocm-ext", "/rocm-ext.exe", "/rocm_ext/cli/__main__.py", "/rocm_ext/bench/child.py",
         *(f"/recipes/{name}.py" for name in registry.TITLES))  # fmt: skip


def _names_us(argv: list[str], table: Mapping[str, registry.Recipe]) -> bool:
    # `tune ls` fails in torchtune itself if the pair is broken; other people's recipes are not our business
    names = {*table, *(path.stem for recipe in table.values() for path in recipe.configs)}
    return len(argv) < 3 or any(name in names or registry.is_recipe_file(name) for name in argv[2:])


def _add_recipes(table: Mapping[str, registry.Recipe]) -> None:
    from torchtune._recipe_registry import _ALL_RECIPES, Config, Recipe

    for recipe in table.values():
        configs = [
            # torchtune joins these to its own folder, and joining an absolute path yields that path
            Config(name=path.stem, file_path=str(path))
            for path in recipe.configs
        ]
        entry = Recipe(name=recipe.name, file_path=str(recipe.file), configs=configs, supports_distributed=True)
        _ALL_RECIPES.append(entry)
