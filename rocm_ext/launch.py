"""Runs a recipe's script as ``tune run`` would, without what else ``tune`` imports.

python launch.py file /path/to/recipe.py --config NAME ...
python launch.py module my_recipe --config NAME ...
"""

import sys

if __name__ == "__main__":  # this folder's modules are no top-level modules
    sys.path[:] = [folder for folder in sys.path if folder != __file__.replace("\\", "/").rpartition("/")[0]]

import gc
import os
import runpy
from collections.abc import Sequence


def command(recipe, arguments: Sequence[str]) -> list[str]:
    """The command that replaces ``tune run ARGUMENTS``, with this interpreter's own options.

    Args:
        recipe: of the table; None: the first argument is a user's file.
        arguments: the recipe, then its own.
    """
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
    options = options[:-1] if options[-1:] == ["-m"] else options
    module = os.path.splitext(arguments[0])[0].replace("/", ".")
    what = ["module", module] if recipe is None else ["file", str(recipe.file)]
    return [sys.executable, *options, os.path.abspath(__file__), *what, *arguments[1:]]


def main() -> None:
    """Run what the arguments name as ``__main__``."""
    _, kind, what, *arguments = sys.argv
    gc.disable()  # see rocm_ext.config.startup
    sys.argv = [what, *arguments]
    sys.path.append(os.getcwd())  # a user's own components lie beside their YAML
    if kind == "file":
        runpy.run_path(what, run_name="__main__")
    else:
        runpy.run_module(what, run_name="__main__")


if __name__ == "__main__":
    main()
