"""The table of recipes: their files, their defaults and their configs. It also tells ``tune`` of them.

A recipe is one of this library's, one that an installed package announces, or a Python file of the user's:

- A file is a recipe if it calls ``recipe_main("NAME", defaults="FILE.yaml")``. The call is read, not run, so both
  arguments must be written out. The defaults' path is relative to the file.
- A package announces the module of such a file in the entry point group ``rocm_ext.recipes``::

      [project.entry-points."rocm_ext.recipes"]
      lora_plus = "my_package.lora_plus"

  The module itself is not imported, but its parent package is. YAML files beside the recipe that say
  ``recipe: lora_plus`` are its configs.

torch loads :func:`register` at the end of ``import torch``, through the entry point group ``torch.backends`` (device
extension autoload, PyTorch RFC 122468). In programs that are not ours it returns at once. Nothing that torch has
not imported itself is imported at the top of this file.
"""

from __future__ import annotations

import os
import sys
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

TORCHTUNE_PIN = "0.6.1"
TORCHAO_PIN = ("0.13", "0.16")  # from, below
SFT, RAFT = "lora_finetune_rocm", "raft_rocm"
TITLES = {SFT: "LoRA fine-tuning", RAFT: "RAFT"}  # of this library's recipes
GROUP = "rocm_ext.recipes"  # of entry points
DECIDED = "ROCM_EXT_ENVIRONMENT"  # set in processes whose environment one of our commands has completed


# ----------------------------------------------------------------------------------------------- the recipes
class Recipe:
    """A recipe.

    Attributes:
        name: what its defaults say of themselves and configs say of it.
        file: the script that `tune run` runs.
        defaults: YAML of every key it reads.
    """

    def __init__(self, name: str, file: Path, defaults: Path) -> None:
        self.name, self.file, self.defaults = name, file, defaults

    @property
    def title(self) -> str:
        """Its name for people."""
        return TITLES.get(self.name, self.name)

    @cached_property
    def configs(self) -> list[Path]:
        """The YAML files that are shipped for it, by name."""
        folder = _folder("recipe_configs") if self.name in TITLES else self.file.parent
        others = {self.defaults.resolve()}
        found = sorted(path for path in folder.iterdir() if path.suffix == ".yaml" and path.resolve() not in others)
        return [path for path in found if read_yaml(path).get("recipe") == self.name]


def recipes() -> dict[str, Recipe]:
    """This library's recipes and those of installed packages, by name. A package that is broken is left out, with a
    line on stderr."""
    from importlib.metadata import entry_points

    found = {name: _shipped(name) for name in TITLES}
    for entry in entry_points(group=GROUP):
        try:
            recipe = _of_module(entry.value)
            if recipe.name != entry.name:
                raise ValueError(f"{recipe.file} is recipe {recipe.name}")
            found.setdefault(recipe.name, recipe)
        except Exception as error:
            print(f"torchtune-rocm: entry point {entry.name} = {entry.value} is no recipe: {error}", file=sys.stderr)
    return found


def find(name: str, *folders: Path) -> Recipe:
    """The recipe called ``name``, or in the file ``name``.

    Args:
        name: of a recipe, or a path that ends in ``.py``.
        folders: where a user's files may be, beside the current folder.

    Raises:
        UserError: there is none, or its file does not say what it needs to.
    """
    from pathlib import Path

    from rocm_ext.errors import UserError, nearest

    folders = (*folders, Path.cwd())
    if name in TITLES:
        return _shipped(name)
    if name.endswith(".py"):
        if path := next((folder / name for folder in folders if (folder / name).is_file()), None):
            return read_recipe(path)
        raise UserError(f"recipe {name} is not a file in {' or '.join(dict.fromkeys(map(str, folders)))}")
    known = recipes()
    if name in known:
        return known[name]
    for path in (path for folder in folders for path in sorted(folder.glob("*.py"))):
        call = _recipe_main_call(path)
        if call and call[0] == name:
            return read_recipe(path)
    looked = " or ".join(dict.fromkeys(map(str, folders)))
    raise UserError(
        f"recipe {name} is unknown: no Python file in {looked} calls recipe_main({name!r}, …){nearest(name, known)}"
    )


def read_recipe(path: Path) -> Recipe:
    """The recipe in a Python file.

    Raises:
        UserError: the file has no ``recipe_main("NAME", defaults="FILE.yaml")``, or lacks the defaults.
    """
    from rocm_ext.errors import UserError

    path = path.resolve()
    if (call := _recipe_main_call(path)) is None:
        raise UserError(f'{path} is no recipe; expected recipe_main("NAME", defaults="FILE.yaml"), written out')
    return made_by(call[0], call[1], path)


def made_by(name: str, defaults: str | None, file: Path) -> Recipe:
    """The recipe that ``recipe_main(name, defaults)`` in ``file`` makes. Without defaults it is another script for a
    recipe of the table.

    Raises:
        UserError: the table lacks the name, or the defaults are missing.
    """
    from rocm_ext.errors import UserError, nearest

    if defaults is None:
        if (recipe := recipes().get(name)) is None:
            raise UserError(f"{file}: recipe {name} needs defaults=FILE.yaml{nearest(name, recipes())}")
        return recipe
    if not (path := file.parent / defaults).is_file():
        raise UserError(f"{file}: the defaults {path} of recipe {name} do not exist")
    if name in TITLES:
        raise UserError(f"{file}: {name} is this library's recipe; give one with other defaults another name")
    return Recipe(name, file, path)


def chain(recipe: Recipe) -> list[Recipe]:
    """``recipe``, the one it extends, and so on.

    Raises:
        UserError: a defaults file cannot be read, names another recipe or extends itself.
    """
    from rocm_ext.errors import UserError

    found: list[Recipe] = []
    while True:
        if recipe.name in [each.name for each in found]:
            raise UserError(f"{recipe.defaults}: recipe {recipe.name} extends itself")
        content = read_yaml(recipe.defaults)
        if content.get("recipe") != recipe.name:
            raise UserError(f"{recipe.defaults} says recipe: {content.get('recipe')}; expected recipe: {recipe.name}")
        found.append(recipe)
        if (base := content.get("extends")) is None:
            return found
        recipe = find(str(base), recipe.defaults.parent)


def family(recipe: Recipe) -> str:
    """The recipe of this library that ``recipe`` is or extends: it writes the same records. Empty: none.

    Raises:
        UserError: as :func:`chain`.
    """
    return next((each.name for each in chain(recipe) if each.name in TITLES), "")


def recipe_for(config: Mapping[str, Any], *folders: Path) -> Recipe:
    """The recipe that a config is for: the one it names. One that names none, as torchtune's own do, is for the first
    recipe of this library that knows the most of its keys.

    Args:
        config: content of the YAML.
        folders: where the files of a user's recipe may be.

    Raises:
        UserError: there is no recipe of that name.
    """
    if (name := config.get("recipe")) is not None:
        return find(str(name), *folders)
    known = {name: _keys(_shipped(name)) for name in TITLES}
    return _shipped(max(TITLES, key=lambda name: len(known[name] & config.keys())))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, interpolations left as they are.

    Raises:
        UserError: it cannot be read, or holds no mapping.
    """
    import yaml

    from rocm_ext.errors import UserError

    try:
        content = yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; expected keys with values")
    return content


def _keys(recipe: Recipe) -> set[str]:
    keys: set[str] = set()
    for each in reversed(chain(recipe)):
        content = read_yaml(each.defaults)
        keys = (keys - set(content.get("without", []))) | content.keys()
    return keys


def _shipped(name: str) -> Recipe:
    return Recipe(name, _folder("recipes") / f"{name}.py", _folder("recipe_configs") / "defaults" / f"{name}.yaml")


def _folder(name: str) -> Path:
    from importlib.resources import files
    from pathlib import Path

    return Path(str(files(f"rocm_ext.{name}")))


def _of_module(module: str) -> Recipe:
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec(module.partition(":")[0])
    if spec is None or not spec.origin:
        raise ValueError("there is no such module")
    return read_recipe(Path(spec.origin))


def _recipe_main_call(path: Path) -> tuple[str, str | None] | None:
    """Name and defaults in the first call of ``recipe_main`` with a name that is written out; None: there is none."""
    import ast

    try:
        source = path.read_bytes()
        if b"recipe_main" not in source:
            return None
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", getattr(node.func, "id", "")) != "recipe_main":
            continue
        given = {"recipe": node.args[0]} if node.args else {}
        given |= {"defaults": node.args[1]} if len(node.args) > 1 else {}
        given |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        texts = {key: value.value for key, value in given.items() if isinstance(value, ast.Constant)}
        name, defaults = texts.get("recipe"), texts.get("defaults")
        if texts.keys() == given.keys() and isinstance(name, str) and isinstance(defaults, str | None):
            return name, defaults
    return None


# --------------------------------------------------------------------------------------------- torch and tune
def register() -> None:
    """torch's hook. In `tune`: append our recipes to torchtune's registry. In a program that runs a recipe: complete
    the environment before anything else is imported. Never raises, but ends ``tune`` with one line where the installed
    torchtune or torchao cannot work."""
    try:
        tune = _is_tune()
        if not tune and not _is_ours():
            return
        if tune:
            problem = wrong_pins()
            table = recipes()
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


def installed() -> dict[str, str | None]:
    """The versions of torchtune and torchao; None: not installed."""
    from importlib.metadata import PackageNotFoundError, version

    def of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {name: of(name) for name in ("torchtune", "torchao")}


def wrong_pins(versions: dict[str, str | None] | None = None) -> str | None:
    """One line that says which of torchtune and torchao does not fit, or None. ``versions``: else the installed."""
    versions = installed() if versions is None else versions
    torchtune, torchao = (versions.get(name) or "none" for name in ("torchtune", "torchao"))
    low, below = (_numbers(pin) for pin in TORCHAO_PIN)
    if _numbers(torchtune) == _numbers(TORCHTUNE_PIN) and low <= _numbers(torchao) < below:
        return None
    return (
        f"torchtune-rocm needs torchtune=={TORCHTUNE_PIN} and torchao>={TORCHAO_PIN[0]},<{TORCHAO_PIN[1]}; "
        f"found torchtune {torchtune}, torchao {torchao}. "
        f'Fix: pip install "torchtune=={TORCHTUNE_PIN}" "torchao=={TORCHAO_PIN[0]}.0"'
    )


def _is_tune() -> bool:
    # sys.argv[0] is "-m" while `python -m torchtune._cli.tune` is still importing torchtune
    names = [*sys.argv[:1], *getattr(sys, "orig_argv", [])[1:3]]
    return any(name.replace("\\", "/").rsplit("/", 1)[-1] in _TUNE for name in names)


_TUNE = ("tune", "tune.exe", "tune-script.py", "torchtune._cli.tune")


def _is_ours() -> bool:
    """Whether this process runs a script of this library, or one of our commands started it."""
    if DECIDED in os.environ:
        return True
    script = "/" + sys.argv[0].replace("\\", "/") if sys.argv else ""
    return script.endswith(_OURS)


_OURS = ("/rocm-ext", "/rocm-ext.exe", "/rocm_ext/cli/__main__.py", "/rocm_ext/bench/child.py",
         *(f"/recipes/{name}.py" for name in TITLES))  # fmt: skip


def _names_us(argv: list[str], table: Mapping[str, Recipe]) -> bool:
    # `tune ls` fails in torchtune itself if the pair is broken; other people's recipes are not our business
    names = {*table, *(path.stem for recipe in table.values() for path in recipe.configs)}
    return len(argv) < 3 or any(name in names or is_recipe_file(name) for name in argv[2:])


def is_recipe_file(name: str) -> bool:
    """Whether ``name`` is a Python file that calls :func:`rocm_ext.config.recipe_main`."""
    from pathlib import Path

    return name.endswith(".py") and _recipe_main_call(Path(name)) is not None


def _numbers(version: str) -> tuple[int, ...]:
    head = version.split("+")[0].split(".")
    return tuple(int(part) for part in head if part.isascii() and part.isdigit())


def _add_recipes(table: Mapping[str, Recipe]) -> None:
    from torchtune._recipe_registry import _ALL_RECIPES, Config, Recipe

    for recipe in table.values():
        configs = [
            # torchtune joins these to its own folder, and joining an absolute path yields that path
            Config(name=path.stem, file_path=str(path))
            for path in recipe.configs
        ]
        entry = Recipe(name=recipe.name, file_path=str(recipe.file), configs=configs, supports_distributed=True)
        _ALL_RECIPES.append(entry)
