"""The table of recipes: their files, their defaults and their configs.

A recipe is one of this library's, one that an installed package announces, or a Python file of the user's:

- A file is a recipe if it calls ``recipe_main("NAME", defaults="FILE.yaml")``. The call is read, not run, so both
  arguments must be written out. The defaults' path is relative to the file.
- A package announces the module of such a file in the entry point group ``rocm_ext.recipes``::

      [project.entry-points."rocm_ext.recipes"]
      layer_decay = "my_package.layer_decay"

  The module itself is not imported, but its parent package is. YAML files beside the recipe that say
  ``recipe: layer_decay`` are its configs.

Every program that imports torch imports this file, so functions import the modules that torch does not need.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from rocm_ext.base.errors import UserError, nearest

SFT, RAFT, GRPO, DPO = "lora_finetune_rocm", "raft_rocm", "grpo_rocm", "dpo_rocm"
DISTIL = "distil_rocm"
BY_STEP = (GRPO, DISTIL)  # their runs sample answers in every step
SAMPLED = (RAFT, *BY_STEP)  # their runs learn from sampled answers
# this library's recipes
TITLES = {SFT: "LoRA fine-tuning", RAFT: "RAFT", GRPO: "GRPO", DPO: "DPO", DISTIL: "distillation"}
GROUP = "rocm_ext.recipes"  # the group of entry points
_CALL = re.compile(
    r"""^[^#\n]*\brecipe_main\(\s*(recipe=)?["'](?P<name>[^"'\n]+)["'],?\s*"""
    r"""((defaults=)?["'](?P<defaults>[^"'\n]+)["'],?\s*)?\)""",
    re.MULTILINE,
)
# Environment variable: the names of the variables that this library has set, with commas. Child processes inherit it
DECIDED = "ROCM_EXT_ENVIRONMENT"


@dataclass(eq=False)
class Recipe:
    """A recipe.

    Attributes:
        name: name in its defaults and configs.
        file: script that `tune run` runs.
        defaults: YAML file of all keys.
    """

    name: str
    file: Path
    defaults: Path

    @property
    def title(self) -> str:
        """The name for people."""
        return TITLES.get(self.name, self.name)

    @cached_property
    def configs(self) -> list[Path]:
        """The shipped YAML files of this recipe, sorted."""
        folder = _folder("recipe_configs") if self.name in TITLES else self.file.parent
        configs = []
        for path in sorted(folder.iterdir()):
            is_config = path.suffix == ".yaml" and path.resolve() != self.defaults.resolve()
            if is_config and stated_recipe(path) == self.name:
                configs.append(path)
        return configs


@cache
def recipes() -> Mapping[str, Recipe]:
    """The recipes of this library and of installed packages, by name. A process looks packages up once; a line on
    stderr names a broken package, or one whose recipe has an existing name."""
    from importlib.metadata import entry_points
    from importlib.util import find_spec

    known = {name: _shipped(name) for name in TITLES}
    for entry in entry_points(group=GROUP):
        try:
            spec = find_spec(entry.value.partition(":")[0])
            if spec is None or not spec.origin:
                raise ValueError("there is no such module")
            recipe = read_recipe(Path(spec.origin))
            if recipe.name != entry.name:
                raise ValueError(f"{recipe.file} is recipe {recipe.name}")
            first = known.setdefault(recipe.name, recipe)
            if first.file != recipe.file:
                raise ValueError(f"recipe {recipe.name} is already in {first.file}")
        except Exception as error:
            print(
                f"torchtune-rocm: entry point {entry.name} = {entry.value} is left out: {error}",
                file=sys.stderr,
            )
    return known


def find(name: str, *folders: Path) -> Recipe:
    """The recipe called ``name``, or in the file ``name``.

    Args:
        name: name of a recipe, or a path that ends in ``.py``.
        folders: folders with user's files, besides the current folder.

    Raises:
        UserError: the name is unknown, or the file lacks the call of ``recipe_main`` or the defaults.
    """
    if name in TITLES:
        return _shipped(name)
    folders = (*folders, Path.cwd())
    looked = " or ".join(dict.fromkeys(map(str, folders)))
    if name.endswith(".py"):
        for folder in folders:
            if (folder / name).is_file():
                return read_recipe(folder / name)
        raise UserError(f"recipe {name} is not a file in {looked}")
    known = recipes()
    if name in known:
        return known[name]
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            call = _recipe_main_call(path)
            if call and call[0] == name:
                return read_recipe(path)
    raise UserError(
        f"recipe {name} is unknown: no Python file in {looked} calls recipe_main({name!r}, …){nearest(name, known)}"
    )


def read_recipe(path: Path) -> Recipe:
    """The recipe in a Python file.

    Raises:
        UserError: the file has no ``recipe_main("NAME", defaults="FILE.yaml")``, or lacks the defaults.
    """
    path = path.resolve()
    call = _recipe_main_call(path)
    if call is None:
        raise UserError(
            f'{path} is no recipe; expected recipe_main("NAME", defaults="FILE.yaml"), written out'
        )
    return made_by(*call, path)


def made_by(name: str, defaults: str | None, file: Path) -> Recipe:
    """The recipe that ``recipe_main(name, defaults)`` in ``file`` makes. Without defaults it is another script for a
    recipe of the table.

    Raises:
        UserError: the table lacks the name, or the defaults are missing.
    """
    if defaults is None:
        known = recipes()
        if name in known:
            return known[name]
        raise UserError(f"{file}: recipe {name} needs defaults=FILE.yaml{nearest(name, known)}")
    recipe = Recipe(name, file, file.parent / defaults)
    if not recipe.defaults.is_file():
        raise UserError(f"{file}: the defaults {recipe.defaults} of recipe {name} do not exist")
    if name in TITLES:
        raise UserError(
            f"{file}: {name} is this library's recipe; give one with other defaults another name"
        )
    return recipe


def chain(recipe: Recipe) -> list[Recipe]:
    """``recipe``, the one it extends, and so on.

    Raises:
        UserError: a defaults file cannot be read, names another recipe or extends itself.
    """
    extended_by: list[Recipe] = []
    while True:
        if recipe.name in [earlier.name for earlier in extended_by]:
            raise UserError(f"{recipe.defaults}: recipe {recipe.name} extends itself")
        content = _read(recipe.defaults)
        if content.get("recipe") != recipe.name:
            raise UserError(
                f"{recipe.defaults} says recipe: {content.get('recipe')}; expected recipe: {recipe.name}"
            )
        extended_by.append(recipe)
        base = content.get("extends")
        if base is None:
            return extended_by
        recipe = find(str(base), recipe.defaults.parent)


def family(recipe: Recipe) -> str:
    """The recipe of this library that ``recipe`` is or extends, and whose records it writes; empty without one."""
    for base in chain(recipe):
        if base.name in TITLES:
            return base.name
    return ""


def extended(recipe: Recipe) -> str:
    """:func:`family`, or an error if ``recipe`` extends none of this library's recipes."""
    name = family(recipe)
    if not name:
        raise UserError(
            f"{recipe.defaults}: recipe {recipe.name} extends neither {' nor '.join(TITLES)}"
        )
    return name


def check_system(recipe: Recipe, system: str) -> None:
    """Refuse recipes that verify answers if ``system`` is Windows, where a module would be missing."""
    if system == "Windows" and family(recipe) in SAMPLED:
        raise UserError(
            f"{recipe.name} does not run on Windows, because its verifiers limit processes in ways that Windows does "
            "not have; run it in WSL2, with a config for Linux"
        )


def listing(recipes: Iterable[Recipe]) -> list[str]:
    """A heading and one line per config of ``recipes``: recipe, config, machine, model and memory. The config's head
    states the memory that `rocm-ext plan` computes."""
    rows = [("RECIPE", "CONFIG", "MACHINE", "MODEL", "MEMORY")]
    for recipe in recipes:
        for path in recipe.configs:
            rows.append((recipe.name, path.stem, *_summary(path)))
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in rows:
        cells = map(str.ljust, row, widths)
        lines.append("  ".join(cells).rstrip())
    return lines


def _summary(path: Path) -> tuple[str, str, str]:
    """Machine, model and memory (of one GPU) of a run config; an unknown one is ``-``."""
    content = _read(path)
    head = path.read_text(encoding="utf-8").partition("\n\n")[0]
    machine = str(content.get("hardware", "-"))
    if re.search(r"\bon eight\b", head.partition("\n")[0]):
        machine = f"8 x {machine}"
    folder = "-"
    for key in ("checkpointer", "model"):  # the model's folder before the checkpointer's
        block = content.get(key)
        if isinstance(block, dict) and "checkpoint_dir" in block:
            folder = str(block["checkpoint_dir"])
    variable = re.fullmatch(r"\$\{(\w+)\}", folder)
    if variable:
        folder = str(content.get(variable[1], "-"))
    memory = "-"
    stated = re.search(
        r"^# Memory: (\w+) (?:to )?(\d+) GiB(?:.*down to (\d+) GiB)?", head, re.MULTILINE
    )
    if stated:
        memory = f"{stated[2]} GiB"
        if stated[3]:
            memory = f"{stated[3]} to {memory}"
        elif stated[1] == "under":
            memory = f"under {memory}"
    return machine, folder.rpartition("/")[2], memory


def _read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, with unresolved interpolations; UserError: it is unreadable, or holds no mapping."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        content = yaml.load(path.read_bytes(), loader)
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise UserError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; expected keys with values")
    return content


def stated_recipe(path: Path) -> Any:
    """The key ``recipe`` of a YAML file; None if it is missing or the file is not a config."""
    try:
        return _read(path).get("recipe")
    except UserError:
        return None


def _shipped(name: str) -> Recipe:
    defaults = _folder("recipe_configs") / "defaults"
    return Recipe(name, _folder("recipes") / f"{name}.py", defaults / f"{name}.yaml")


def _folder(name: str) -> Path:
    from importlib.resources import files

    return Path(str(files(f"rocm_ext.{name}")))


def is_recipe_file(name: str) -> bool:
    """Whether ``name`` is a Python file that calls :func:`rocm_ext.config.recipe_main`."""
    return name.endswith(".py") and _recipe_main_call(Path(name)) is not None


def _recipe_main_call(path: Path) -> tuple[str, str | None] | None:
    """Name and defaults in the file's first call of ``recipe_main`` that writes them out; None without such a call."""
    try:
        call = _CALL.search(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return (call["name"], call["defaults"]) if call else None
