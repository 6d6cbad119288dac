"""From a YAML's name and the command line to one checked config.

Layers, lowest first: the recipe's defaults, the hardware profile, the run YAML, the command line.
``hardware=…`` on the command line lifts its profile over the run YAML, so that any config runs on
any machine with ``hardware=cpu``. A component (a node with ``_component_``) in a higher layer
replaces the lower one whole; single arguments change on the command line (``optimizer.lr=1e-4``).
"""

import inspect
import os
import re
import signal
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import wraps
from importlib.resources import files
from pathlib import Path
from typing import Any

import torchtune
import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path, _merge_yaml_and_cli_args

from rocm_ext.errors import UserError, nearest, one_line
from rocm_ext.hardware.bench_file import of_this_machine
from rocm_ext.hardware.environment import ensure_environment
from rocm_ext.hardware.machine import detect
from rocm_ext.hardware.profile import choose_profile, load_profile
from rocm_ext.log import log, setup_logging

COMPONENT = "_component_"
# Keys whose value names a component
_COMPONENTS = {"model", "checkpointer", "tokenizer", "dataset", "dataset_val", "optimizer", "lr_scheduler"}
_COMPONENTS |= {"loss", "metric_logger", "prompts", "eval_prompts", "engine", "verifier"}
# Two ways to say the same: the higher layer's wins, and unsets the other.
_RIVALS = {
    "gradient_accumulation_steps": "sequences_per_step",
    "sequences_per_step": "gradient_accumulation_steps",
}


def recipe_main(recipe: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Decorator for a recipe's main function: parse, set the machine's environment, run, end with an exit code.

    A :class:`UserError` becomes one line and its code, Ctrl-C and SIGTERM become 130 and 143.
    """

    def decorate(main: Callable[[DictConfig], None]) -> Callable[[], None]:
        def action() -> None:
            setup_logging()
            cfg = load(recipe, *command_line(sys.argv[1:], main.__doc__ or ""))
            for line in ensure_environment(load_profile(cfg.hardware), detect()):
                log.info("%s", line)
            main(cfg)

        @wraps(main)
        def run() -> None:
            signal.signal(signal.SIGTERM, _terminate)
            sys.exit(guarded(action))

        return run

    return decorate


def guarded(action: Callable[[], Any]) -> int:
    """Run ``action``; returns the exit code, having told the user what went wrong in one line."""
    rank = os.environ.get("RANK")
    try:
        action()
    except UserError as error:
        print(f"error: {error}" if rank is None else f"[rank {rank}] error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _terminate(signum: int, frame: Any) -> None:
    sys.exit(128 + signum)


def command_line(argv: list[str], description: str = "") -> tuple[str, list[str]]:
    """``--config NAME key=value …`` -> the name and the overrides."""
    if any(arg in ("-h", "--help") for arg in argv):
        print(f"{inspect.cleandoc(description)}\n\nusage: --config NAME_OR_FILE [key=value ...] [~key ...]")
        sys.exit(0)
    name, overrides, rest = None, [], list(argv)
    while rest:
        arg = rest.pop(0)
        if arg == "--config" and rest:
            name = rest.pop(0)
        elif arg.startswith("--config="):
            name = arg.partition("=")[2]
        elif arg.startswith("-"):
            raise UserError(f"unknown option {arg}; expected --config NAME and key=value overrides", code=2)
        else:
            overrides.append(arg)
    if name is None:
        raise UserError("--config is missing; `tune ls` lists the configs", code=2)
    return name, overrides


def load(recipe: str, name: str, overrides: list[str] | None = None) -> DictConfig:
    """The whole config of a run.

    Args:
        recipe: name of a file in ``recipe_configs/defaults``.
        name: a YAML file, or the name of one in ``recipe_configs``.
        overrides: ``key=value`` or ``~key``, as on the command line.

    Returns:
        every key of the defaults file, with ``hardware`` resolved to a profile's name.

    Raises:
        UserError: for an unreadable file, unknown or missing keys and values of the wrong kind.
    """
    overrides = list(overrides or [])
    if strange := [item for item in overrides if "=" not in item and not item.startswith("~")]:
        raise UserError(f"cannot read override {strange[0]!r}; expected key=value or ~key", code=2)
    removed = [item for item in overrides if item.startswith("~") and "." not in item]
    overrides = [item for item in overrides if item not in removed]
    known = defaults(recipe)
    run = _read(find(name))
    for key in (item[1:] for item in removed):  # torchtune leaves a hole where our default belongs
        if key not in run:
            raise UserError(f"~{key}: config {name} has no such key{nearest(key, list(run))}")
        del run[key]
    on_command_line = dict(item.split("=", 1) for item in overrides if "=" in item)
    requested = on_command_line.get("hardware", run.get("hardware", known["hardware"]))
    hardware, profile = _resolve_hardware(requested)
    _check_known({**run, **{k.lstrip("~").split(".")[0]: None for k in on_command_line}}, known, run)
    merged: dict[str, Any] = {}
    for layer in [known, profile, run, *([profile] if "hardware" in on_command_line else [])]:
        _unset_rivals(merged, layer, known)
        merged.update(layer)
    _unset_rivals(merged, on_command_line, known)
    try:
        overrides = _replace_components(merged, [o for o in overrides if not o.startswith("hardware=")])
        cfg = _merge_yaml_and_cli_args(Namespace(**merged), overrides)
        cfg.hardware = hardware
        _check_complete(cfg, known, name)
        OmegaConf.resolve(cfg)
    except (OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
        raise UserError(f"config {name}: {_first_line(error)}") from error
    _check_components(cfg)
    return cfg


def defaults(recipe: str) -> dict[str, Any]:
    """Every key of a recipe, with its default: ``recipe_configs/defaults/<recipe>.yaml``.

    ``extends`` there names a recipe whose keys it has too, but for those in ``without``.
    """
    own = _read(Path(str(files("rocm_ext.recipe_configs") / "defaults" / f"{recipe}.yaml")))
    base = own.pop("extends", None)
    without = own.pop("without", [])
    inherited = defaults(base) if base else {}
    return {key: value for key, value in inherited.items() if key not in without} | own


def trainer_config(cfg: DictConfig) -> dict[str, Any]:
    """What the SFT recipe, which trains for all others, reads of a config; its defaults for what that lacks. Without
    data: those are the recipe's own."""
    whole: Any = OmegaConf.to_container(cfg)
    known = {key: whole.get(key, default) for key, default in defaults("lora_finetune_rocm").items()}
    return known | {"dataset": None, "dataset_val": None}


def recipe_of(name: str) -> str:
    """The recipe that a config is for: RAFT's has a verifier."""
    return "raft_rocm" if "verifier" in _read(find(name)) else "lora_finetune_rocm"


def find(name: str) -> Path:
    """The YAML file called ``name``: a path, a config of this library, or one of torchtune's.

    Raises:
        UserError: if there is none, with the nearest name.
    """
    if Path(name).is_file():
        return Path(name)
    folder = Path(str(files("rocm_ext.recipe_configs")))
    theirs = Path(torchtune.__file__).parents[1] / "recipes" / "configs"
    for shipped in (folder / f"{name}.yaml", theirs / f"{name}.yaml"):
        if shipped.is_file():
            return shipped
    raise UserError(
        f"config {name} is neither a file nor one of this library's"
        + nearest(name, [path.stem for path in folder.glob("*.yaml")])
    )


def instantiate(node: DictConfig, *args: Any, key: str, **kwargs: Any) -> Any:
    """torchtune's ``config.instantiate``, with one line for components that cannot be made.

    Args:
        node: has ``_component_`` and its arguments.
        args, kwargs: more arguments; kwargs overrule the node's.
        key: where in the config ``node`` is, for messages.
    """
    from torchtune.config import instantiate as torchtune_instantiate

    component = _component(node, key)
    given = {str(k): v for k, v in node.items() if k != COMPONENT} | kwargs
    try:
        inspect.signature(component).bind(*args, **given)
    except TypeError as error:
        raise UserError(f"{key}: {node[COMPONENT]}: {error}") from error
    except ValueError:
        pass  # a builtin without a signature checks its arguments itself
    try:
        return torchtune_instantiate(node, *args, **kwargs)
    except UserError:
        raise
    except Exception as error:  # whatever the component raises
        raise UserError(f"{key}: {node[COMPONENT]}: {one_line(error)}") from error


def takes(node: DictConfig, argument: str, key: str) -> bool:
    """Whether the component of ``node`` has an argument of this name."""
    return argument in inspect.signature(_component(node, key)).parameters


def without(node: DictConfig, *keys: str) -> DictConfig:
    """A copy of ``node`` that lacks ``keys``."""
    return OmegaConf.create({k: v for k, v in node.items() if k not in keys})


def difference(old: Mapping[str, Any], new: Mapping[str, Any], free: frozenset[str]) -> list[str]:
    """``key: was A, is B`` for every leaf that differs, keys named in ``free`` left out."""
    flat_old, flat_new = _flatten(old), _flatten(new)
    return [
        f"{key}: was {flat_old.get(key)}, is {flat_new.get(key)}"
        for key in sorted({*flat_old, *flat_new})
        if flat_old.get(key) != flat_new.get(key) and not free & {key, key.split(".")[0]}
    ]


def _flatten(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, Mapping):
        return {prefix: node}
    return {k: v for name, value in node.items() for k, v in _flatten(value, f"{prefix}.{name}".lstrip(".")).items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        node = OmegaConf.load(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read config {path}: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"config {path} is no valid YAML: {' '.join(str(error).split())}") from error
    except OmegaConfBaseException as error:
        raise UserError(f"config {path}: {_first_line(error)}") from error
    if not isinstance(node, DictConfig):
        raise UserError(f"config {path} holds a {type(node).__name__}; expected keys with values")
    return OmegaConf.to_container(node, resolve=False)  # type: ignore[return-value]


def _resolve_hardware(requested: Any) -> tuple[str, dict[str, Any]]:
    """The profile's name and its settings; ``auto`` adds what was measured on this machine."""
    if requested != "auto":
        return str(requested), load_profile(str(requested)).settings
    machine = detect()
    profile = load_profile(choose_profile(machine)[0])
    bench = of_this_machine(machine)
    measured = {key: value for key, value in bench.settings.items() if key not in profile.locked} if bench else {}
    if bench and measured:
        log.info("hardware auto: %s (measured %s by rocm-ext bench)", measured, bench.date)
    return profile.name, {**profile.settings, **measured}


def _unset_rivals(merged: dict[str, Any], layer: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    for key, rival in _RIVALS.items():
        if layer.get(key) not in (None, "null", "None") and layer.get(rival) is None:
            merged[rival] = defaults[rival]


def _replace_components(merged: dict[str, Any], overrides: list[str]) -> list[str]:
    """Carry out overrides like ``lr_scheduler=null``, and return the others.

    torchtune reads ``key=VALUE`` as ``key._component_=VALUE`` where ``key`` is a component, even if VALUE
    is null or a list.
    """
    rest = []
    for item in overrides:
        key, _, value = item.partition("=")
        try:
            OmegaConf.from_dotlist([item])
        except yaml.YAMLError as error:
            raise UserError(f"cannot read override {item!r}: {one_line(error)}") from error
        if isinstance(merged.get(key), Mapping) and COMPONENT in merged[key]:
            parsed = None if value == "None" else OmegaConf.to_container(OmegaConf.from_dotlist([item]))[key]  # type: ignore
            if not isinstance(parsed, str):
                merged[key] = parsed
                continue
        root, dot, _ = key.lstrip("~").partition(".")
        if dot and not isinstance(merged.get(root), Mapping | list | None):
            raise UserError(f"unknown key {key}: {root} is {merged[root]!r} and has no keys of its own")
        rest.append(item)
    return rest


def _check_known(given: Mapping[str, Any], defaults: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    text = str(run)
    for key in given:
        # a key that another one refers to is a variable
        if key in defaults or re.search(rf"\$\{{\.*{re.escape(str(key))}[.\[}}]", text):
            continue
        raise UserError(f"unknown key {key}{nearest(key, list(defaults))}")


def _check_complete(cfg: DictConfig, defaults: Mapping[str, Any], name: str) -> None:
    missing = set(OmegaConf.missing_keys(cfg))
    missing |= {key for key, default in defaults.items() if default == "???" and cfg._get_node(key)._is_none()}  # type: ignore
    if missing := {key for key in missing if key in defaults} or missing:  # what refers to a missing key is no news
        raise UserError(f"config {name}: {', '.join(sorted(missing))} must be set")


def _check_components(cfg: DictConfig) -> None:
    for key, node in cfg.items():
        for part in node if isinstance(node, ListConfig) else [node]:
            if isinstance(part, DictConfig) and COMPONENT in part:
                _check_arguments(str(key), part)
            elif key in _COMPONENTS and part is not None:
                raise UserError(f"{key} must name a _component_ and its arguments, found {part!r}")


def _check_arguments(key: str, node: DictConfig) -> None:
    try:
        parameters = inspect.signature(_component(node, key)).parameters
    except ValueError:
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in map(str, node):
        if name != COMPONENT and name not in parameters:
            raise UserError(f"unknown key {key}.{name} for {node[COMPONENT]}{nearest(name, parameters)}")


def _component(node: DictConfig, key: str) -> Callable:
    if os.getcwd() not in sys.path:  # a user's own components lie beside their YAML
        sys.path.append(os.getcwd())
    try:
        component = _get_component_from_path(node[COMPONENT])
    except (InstantiationError, ImportError, AttributeError, ValueError) as error:
        cause = " ".join(line for line in str(error).split("\n") if not line.startswith("Error loading"))
        raise UserError(f"{key}._component_ {node[COMPONENT]!r} cannot be imported: {cause}") from error
    if not callable(component):
        kind = type(component).__name__
        raise UserError(f"{key}._component_ {node[COMPONENT]!r} is a {kind}; expected a function or class")
    return component


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
