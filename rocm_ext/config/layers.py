"""From a YAML's name and the command line to one checked config.

Layers, lowest first: the recipe's defaults, the hardware profile, the run YAML, the command line.
``hardware=…`` on the command line lifts its profile over the run YAML, so that any config runs on
any machine with ``hardware=cpu``. A component (a mapping with ``_component_``) in a higher layer
changes arguments of the same component in a lower layer, and replaces any other component.

Only :func:`load` imports torchtune: a run reads its config before it imports anything heavy.
"""

import copy
import os
import re
from argparse import Namespace
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib.resources import files
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rocm_ext.base import registry
from rocm_ext.base.errors import UserError, nearest, one_line, refuse
from rocm_ext.base.log import log
from rocm_ext.base.structure import flatten
from rocm_ext.base.types import Config
from rocm_ext.config import references
from rocm_ext.config.components import COMPONENT, NAMED, component_faults, leaves
from rocm_ext.config.model_folder import complete
from rocm_ext.config.other_trainers import our_names
from rocm_ext.machine.bench_file import of_this_machine
from rocm_ext.machine.detect import detect
from rocm_ext.machine.profile import choose_profile, load_profile

# Keys whose values are paths, where ~ is the home folder
_PATHS = {
    "adapter_checkpoint",
    "checkpoint_dir",
    "log_dir",
    "merges_file",
    "output_dir",
    "path",
    "special_tokens_path",
}
# Mutually exclusive keys: a value in a higher layer unsets the other key.
_RIVALS = {"gradient_accumulation_steps": "sequences_per_step", "verifier": "environment"}
_RIVALS |= {rival: key for key, rival in _RIVALS.items()}
# Mappings that an override replaces: merging would keep the YAML's entries
_REPLACED = ("model.rank_pattern", "model.alpha_pattern", "model.trainable_tokens")
# ours and torchtune's
_LOSSES_OF_PAIRS = {"Preference", "UnpairedPreference", "DPOLoss", "RSOLoss"}


def load(
    recipe: str | registry.Recipe,
    name: str,
    overrides: Iterable[str] = (),
    content: Config | None = None,
) -> DictConfig:
    """Return the config of a run.

    Args:
        recipe: recipe that runs the config, or its name.
        name: a YAML file, or the name of one in ``recipe_configs``.
        overrides: ``key=value`` or ``~key``, as on the command line.
        content: keys of a config without a file; keys that a run must set may then be missing, and become null.

    Returns:
        All keys of the recipe's defaults, with ``recipe`` and ``hardware`` resolved to names. Texts from the
        environment stay references, see :mod:`rocm_ext.config.references`.

    Raises:
        UserError: the file is unreadable, the config is for another recipe, a key is unknown or missing, or a value is
            of the wrong kind.
    """
    from torchtune.config._utils import _merge_yaml_and_cli_args

    folder = Path.cwd()
    if content is None:
        folder = find(name).parent
    if isinstance(recipe, str):
        recipe = registry.find(recipe, folder)
    run = read(find(name)) if content is None else dict(content)
    # in torchtune's QLoRA configs; here weights are always loaded one by one
    run.pop("low_cpu_ram", None)
    overrides = _remove_keys(run, name, overrides)
    on_command_line = by_key(overrides)
    known = defaults(recipe)
    _check_recipe(name, run, on_command_line, recipe, folder, guess=content is None)
    if content is not None:
        known = nothing_required(known)
    hardware, profile = _resolve_hardware(
        on_command_line.get("hardware", run.get("hardware", known["hardware"]))
    )
    _check_known(run, on_command_line, known, recipe)
    merged = _merged(known, profile, run, on_command_line)
    try:
        overrides = _replace_components(merged, overrides)
        cfg = _merge_yaml_and_cli_args(Namespace(**merged), overrides)
        cfg.recipe, cfg.hardware = recipe.name, hardware
        _check_complete(cfg, known, name)
        references.resolve(cfg, plain=_PATHS)
        for variable in set(cfg) - set(known):  # nothing refers to it any more
            del cfg[variable]
        _expand_home(cfg)
    # OmegaConf raises all of them
    except (OmegaConfBaseException, TypeError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"config {name}: {_first_line(error)}") from error
    refuse(component_faults(cfg, known))
    return cfg


def defaults(recipe: str | registry.Recipe) -> Config:
    """Return every key of a recipe, with its default.

    ``extends`` in a defaults file names a recipe whose keys it inherits. ``include`` lists files in the same folder,
    without ``.yaml``, whose keys it adds; an included file may include others.
    """
    merged: Config = {}
    recipe = registry.find(recipe) if isinstance(recipe, str) else recipe
    for part in reversed(registry.chain(recipe)):
        merged |= _with_included(part.defaults)
        merged.pop("extends", None)
    if "hardware" not in merged:
        raise UserError(
            f"{recipe.defaults}: the defaults lack the key hardware; add `extends: {registry.SFT}` or it"
        )
    return merged


def must_be_set(default: Any) -> bool:
    """Return whether a run must set a key with this default, or an argument of it."""
    return default == "???" or (isinstance(default, Mapping) and "???" in default.values())


def nothing_required(defaults: Config) -> Config:
    """Return defaults with null for the keys that a run must set."""
    return {key: None if must_be_set(default) else default for key, default in defaults.items()}


def _with_included(path: Path) -> Config:
    content = read(path)
    include = content.pop("include", [])
    if not isinstance(include, list):
        raise UserError(
            f"{path}: include is {include!r}; expected a list of names, such as [common]"
        )
    merged: Config = {}
    for name in include:
        merged |= _with_included(path.with_name(f"{name}.yaml"))
    return merged | content


def trainer_config(cfg: DictConfig) -> Config:
    """Return the config of a training run inside another recipe: the SFT recipe's keys, with defaults for keys that
    ``cfg`` lacks, and keys that a user's recipe adds. Keys of data and evaluation are null: the recipe does both."""
    settings: Any = OmegaConf.to_container(cfg)
    known = defaults(registry.SFT)
    ours = set().union(*map(defaults, registry.TITLES))
    for key, value in settings.items():
        if key in known or key not in ours:
            known[key] = value
    data = ("dataset", "dataset_val", "eval_prompts", "eval_every_n_steps", "verifier")
    return known | {
        "recipe": registry.SFT,
        "early_stopping_metric": "val_loss",
        **dict.fromkeys(data),
    }


def recipe_of(name: str, overrides: Iterable[str] = ()) -> registry.Recipe:
    """Return the recipe that ``recipe=…`` or the config names; UserError: the config or the recipe does not exist.

    torchtune's configs name none. They are for DPO if their loss compares answers, else for the first recipe of this
    library that knows the most of their keys.
    """
    path = find(name)
    content = read(path)
    on_command_line = by_key(overrides)
    stated = on_command_line.get("recipe") or content.get("recipe")
    if stated is None:
        return _guessed(content, on_command_line)
    return registry.find(str(stated), path.parent)


def _guessed(content: Config, on_command_line: Mapping[str, str]) -> registry.Recipe:
    loss = on_command_line.get("loss") or content.get("loss")
    component = loss.get(COMPONENT) if isinstance(loss, Mapping) else loss
    if str(component).rpartition(".")[2] in _LOSSES_OF_PAIRS:
        return registry.find(registry.DPO)

    def known_keys(recipe: str) -> int:
        return len(defaults(recipe).keys() & content.keys())

    return registry.find(max(registry.TITLES, key=known_keys))


def requested_hardware(
    name: str, overrides: Iterable[str] = (), recipe: registry.Recipe | None = None
) -> str:
    """Return the value of ``hardware`` that :func:`load` would resolve, without loading the rest.

    ``recipe`` runs the config, by default :func:`recipe_of` it.
    """
    stated = by_key(overrides).get("hardware") or read(find(name)).get("hardware")
    return str(stated or defaults(recipe or recipe_of(name, overrides))["hardware"])


def by_key(overrides: Iterable[str]) -> dict[str, str]:
    """Return the values of ``key=value …`` as texts, the last of each key."""
    return dict(item.split("=", 1) for item in overrides if "=" in item)


def _remove_keys(run: Config, name: str, overrides: Iterable[str]) -> list[str]:
    """Remove the keys from ``run`` that ``~key`` names, and return the other overrides.

    torchtune would leave a hole where our default belongs.
    """
    rest = []
    for item in overrides:
        if "=" not in item and not item.startswith("~"):
            raise UserError(f"cannot read override {item!r}; expected key=value or ~key", code=2)
        if not item.startswith("~") or "." in item:
            rest.append(item)
            continue
        key = item[1:]
        if key not in run:
            raise UserError(f"~{key}: config {name} has no such key{nearest(key, list(run))}")
        del run[key]
    return rest


def _check_recipe(
    name: str,
    run: Config,
    on_command_line: Mapping[str, str],
    recipe: registry.Recipe,
    folder: Path,
    guess: bool,
) -> None:
    """Refuse a config that names another recipe, unless the running recipe extends that one.

    With ``guess``, a config that names none, such as torchtune's, is refused if keys or loss belong to another recipe.
    """
    family = registry.family(recipe)
    fits = [part.name for part in registry.chain(recipe)]
    if family:
        fits = fits[: fits.index(family) + 1]
    why = ""
    stated = []
    for name_of_recipe in (run.get("recipe"), on_command_line.get("recipe")):
        if name_of_recipe is not None:
            stated.append(str(name_of_recipe))
    others = []
    for name_of_recipe in stated:
        if name_of_recipe not in fits:  # the running recipe's file may be in any folder
            others.append(registry.find(name_of_recipe, folder))
    if guess and family and not stated:
        known = defaults(recipe)
        other = _guessed(read(find(name)), on_command_line)
        theirs = defaults(other).keys() - known
        keys = [key for key in run if key in theirs]
        has_loss = isinstance(run.get("loss"), Mapping)
        if has_loss and not keys and registry.DPO in (other.name, *fits):
            keys = ["loss"]
        if keys:
            why = f" (by its {', '.join(keys[:3])})"
            others.append(other)
    for other in others:
        if other.name not in fits:
            raise UserError(
                f"config {name} is for recipe {other.name}{why}, this is {recipe.name}; start it with "
                f"`tune run {startable(other)} --config {name}`"
            )


def startable(recipe: registry.Recipe) -> str:
    """Return a recipe's name for `tune run`; for a user's recipe, its file."""
    if recipe.name in registry.recipes():
        return recipe.name
    here = Path.cwd().resolve()
    if recipe.file.is_relative_to(here):
        return recipe.file.relative_to(here).as_posix()
    return recipe.file.name


def find(name: str) -> Path:
    """Return the YAML file called ``name``: a path, a config of this library, or a config of torchtune.

    A UserError suggests the nearest name.
    """
    if Path(name).is_file():
        return Path(name)
    folders = [Path(str(files("rocm_ext.recipe_configs")))]
    torchtune = find_spec("torchtune")
    if torchtune:
        folders.append(Path(str(torchtune.origin)).parents[1] / "recipes" / "configs")
    for folder in folders:
        shipped = folder / f"{name}.yaml"
        if shipped.is_file():
            return shipped
    packaged = {}
    for recipe in registry.recipes().values():
        for path in recipe.configs:
            packaged[path.stem] = path
    if name in packaged:
        return packaged[name]
    near = nearest(name, packaged, "; `tune ls` lists these")
    raise UserError(f"config {name} is neither a file nor one of this library's{near}")


def difference(old: Config, new: Config, free: frozenset[str]) -> list[str]:
    """Return ``key: was A, is B`` for every value that differs, except under the keys in ``free``."""
    flat_old = flatten(old)
    flat_new = flatten(new)
    changes = []
    for key in sorted({*flat_old, *flat_new}):
        was, is_now = flat_old.get(key), flat_new.get(key)
        if was != is_now and key not in free and key.split(".")[0] not in free:
            changes.append(f"{key}: was {was}, is {is_now}")
    return changes


def read(path: Path) -> Config:
    """Read a config's file without resolving interpolations; UserError: it is unreadable, or holds no mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read config {path}: {error}") from error
    return copy.deepcopy(_parsed(path, text))


@lru_cache(maxsize=32)  # a run reads the defaults of its recipe dozens of times
def _parsed(path: Path, text: str) -> Config:
    try:
        loaded = OmegaConf.load(StringIO(text))
    except yaml.YAMLError as error:
        raise UserError(
            f"config {path} is no valid YAML: {' '.join(str(error).split())}"
        ) from error
    except OmegaConfBaseException as error:
        raise UserError(f"config {path}: {_first_line(error)}") from error
    if not isinstance(loaded, DictConfig):
        raise UserError(f"config {path} holds a {type(loaded).__name__}; expected keys with values")
    return OmegaConf.to_container(loaded, resolve=False)  # type: ignore[return-value]


def _resolve_hardware(requested: Any) -> tuple[str, Config]:
    """Return name and settings of the profile; ``auto`` adds what `rocm-ext bench` measured on this machine."""
    if requested != "auto":
        return str(requested), load_profile(str(requested)).settings
    machine = detect()
    profile = load_profile(choose_profile(machine)[0])
    bench = of_this_machine(machine)
    if bench is None:
        return profile.name, profile.settings
    measured = {k: value for k, value in bench.settings.items() if k not in profile.locked}
    if measured:
        log.info("hardware auto: %s (measured %s by rocm-ext bench)", measured, bench.date)
    return profile.name, {**profile.settings, **measured}


def _merged(
    known: Config, profile: Config, run: Config, on_command_line: Mapping[str, str]
) -> Config:
    """Merge the layers, lowest first; ``hardware=…`` on the command line lifts the profile over the run."""
    merged: Config = {}
    layers = [known, profile, run]
    if "hardware" in on_command_line:
        layers.append(profile)
    for layer in layers:
        _unset_rivals(merged, layer, known)
        for key, value in layer.items():
            merged[key] = _over(merged.get(key), value)
    _unset_rivals(merged, on_command_line, known)
    complete(merged, on_command_line)
    return merged


def _unset_rivals(merged: Config, layer: Mapping[str, object], defaults: Config) -> None:
    # the command line's keys have parts
    layer = {str(key).split(".")[0]: value for key, value in layer.items()}
    for key, rival in _RIVALS.items():
        is_set = layer.get(key) not in (None, "null", "None")
        if is_set and rival in defaults and layer.get(rival) is None:
            merged[rival] = defaults[rival]


def _over(lower: Any, value: Any) -> Any:
    """Return ``value`` with further arguments of the same component in a lower layer."""
    if isinstance(lower, Mapping) and isinstance(value, Mapping) and COMPONENT in lower:
        component = lower[COMPONENT]
        if value.get(COMPONENT, component) == component:
            return {**lower, **value}
    return value


def _replace_components(merged: Config, overrides: list[str]) -> list[str]:
    """Apply overrides like ``lr_scheduler=null``, and return the others without ``hardware`` and ``recipe``.

    torchtune reads ``key=VALUE`` as ``key._component_=VALUE`` if ``key`` is a component, even if VALUE is null or a
    list. It adds VALUE to named data sets.
    """
    rest = []
    for item in overrides:
        key, _, value = item.partition("=")
        if key in ("hardware", "recipe"):
            continue
        try:
            parsed = OmegaConf.from_dotlist([item])
        except yaml.YAMLError as error:
            raise UserError(f"cannot read override {item!r}: {one_line(error)}") from error
        if isinstance(merged.get(key), Mapping) and (COMPONENT in merged[key] or key in NAMED):
            new = None if value == "None" else OmegaConf.to_container(parsed)[key]  # type: ignore
            if not isinstance(new, str):
                merged[key] = new
                continue
        root, dot, leaf = key.lstrip("~").partition(".")
        if key in _REPLACED and isinstance(merged.get(root), Mapping):
            merged[root] = {**merged[root], leaf: OmegaConf.select(parsed, key)}
            continue
        if dot and not isinstance(merged.get(root), Mapping | list | None):
            raise UserError(f"unknown key {key}: {root} is {merged[root]!r} and has no keys")
        rest.append(item)
    return rest


def _expand_home(config: Any, prefix: str = "") -> None:
    items: Any = config.items() if isinstance(config, DictConfig) else enumerate(config)
    for key, value in items:
        if isinstance(value, DictConfig | ListConfig):
            _expand_home(value, f"{prefix}{key}.")
        elif key in _PATHS and isinstance(value, str):
            config[key] = os.path.expanduser(value)
        elif key in _PATHS and value is not None:
            # open() takes a number for a file that is open, and closes it
            raise UserError(f"{prefix}{key} is {value!r}; expected a path, such as ./{value}")


def _check_known(
    run: Config, on_command_line: Mapping[str, str], known: Config, recipe: registry.Recipe
) -> None:
    """Refuse unknown keys. A key to which a value refers, as in ``${key}``, is a variable of the user's."""
    variables: set[str] = set()
    for _, value in leaves(run):
        if isinstance(value, str):
            variables.update(re.findall(r"\$\{\.*([^${}.:\[\]]+)[.\[}]", value))
    overridden = [key.lstrip("~").split(".")[0] for key in on_command_line]
    for key in dict.fromkeys([*run, *overridden]):
        if key in known or str(key) in variables:
            continue
        named = our_names(str(key), known)
        for name in sorted(flatten({**known, **run})):
            if name.endswith(f".{key}"):
                named.append(name)
        others = [other for other in registry.TITLES if key in defaults(other)]
        if others:
            hint = f": it is a key of {' and '.join(others)}, not of {recipe.name}"
        elif named:
            hint = f"; did you mean {' or '.join(dict.fromkeys(named))}?"
        else:
            hint = nearest(key, list(known), f"; all keys: {recipe.defaults}")
        raise UserError(f"unknown key {key}{hint}")


def _check_complete(cfg: DictConfig, defaults: Config, name: str) -> None:
    missing = set(OmegaConf.missing_keys(cfg))
    for key, default in defaults.items():
        node: Any = cfg._get_node(key)
        if must_be_set(default) and node._is_none():
            missing.add(key)
    # a missing key of the recipe explains the missing values that refer to it
    missing = missing & {*defaults, *flatten(defaults)} or missing
    # a teacher replaces the verifier; verifier and environment default to null
    needs_judge = defaults.get("prompts") == "???" and "teacher" not in defaults
    if needs_judge and cfg.verifier is None and cfg.environment is None:
        missing.add("verifier or environment")
    if missing:
        raise UserError(f"config {name}: {', '.join(sorted(missing))} must be set")


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
