"""Run a recipe's script as ``tune run`` does, without importing ``tune``'s other commands.

python launch.py file /path/to/recipe.py --config NAME ...
python launch.py module my_recipe --config NAME ...
"""

import gc
import os
import runpy
import sys
from collections.abc import Sequence


def command(recipe, arguments: Sequence[str]) -> list[str]:
    """Return the command that replaces ``tune run ARGUMENTS``, with this interpreter's options.

    ``recipe`` is a recipe of the table. None if the first argument is a user's file.
    """
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]
    options = options[:-1] if options[-1:] == ["-m"] else options
    module = os.path.splitext(arguments[0])[0].replace("/", ".")
    what = ["module", module] if recipe is None else ["file", str(recipe.file)]
    return [sys.executable, *options, os.path.abspath(__file__), *what, *arguments[1:]]


def main() -> None:
    """Run the script or module that the arguments name as ``__main__``."""
    here = _slashes(__file__).rpartition("/")[0]
    sys.path[:] = [
        folder for folder in sys.path if _slashes(folder) != here
    ]  # Python put this file's folder there
    _, kind, what, *arguments = sys.argv
    gc.disable()  # see rocm_ext.config.startup
    sys.argv = [what, *arguments]
    sys.path.append(os.getcwd())  # a user's components are in the folder where they start the run
    if kind == "file":
        runpy.run_path(what, run_name="__main__")
    else:
        runpy.run_module(what, run_name="__main__")


def _slashes(path: str) -> str:
    return path.replace("\\", "/")


if __name__ == "__main__":
    main()
