"""Components of a config: blocks that name a function or class, with its arguments."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from rocm_ext.base import registry
from rocm_ext.base.errors import UserError, explain_errors, nearest
from rocm_ext.base.importing import COMPONENT, import_component
from rocm_ext.base.types import Config
from rocm_ext.config.other_trainers import our_names
from rocm_ext.machine.profile import profile_names

# Keys whose value is a component
_COMPONENTS = {
    "model",
    "checkpointer",
    "tokenizer",
    "dataset",
    "dataset_val",
    "optimizer",
    "lr_scheduler",
    "loss",
    "metric_logger",
    "prompts",
    "eval_prompts",
    "engine",
    "verifier",
    "environment",
}
_LISTS = {"dataset", "dataset_val"}  # these may be lists of components
NAMED = {"dataset_val", "eval_prompts"}  # these may be mappings of names to components
_SET = re.compile(r"\w+(\.[A-Za-z0-9_-]+)?")  # key of a data set
WEIGHT = "weight"  # key of the entries of a list in `dataset`; no component gets it
VERIFIER = "verifier"  # key of a named set in `eval_prompts`; no component gets it

# Components that the config in a folder may use without --trust-config: they read files, and do nothing else
_DATASET = r"rocm_ext\.data\.(sft|preference)_dataset|torchtune\.datasets\.\w+_dataset"
_PROMPTS = r"rocm_ext\.data\.(prompt_dataset|reasoning_gym_prompts)"
_BUILDERS = {
    "model": r"rocm_ext\.model\.from_checkpoint|torchtune\.models\.\w+\.q?lora_\w+",
    "checkpointer": r"rocm_ext\.model\.HFCheckpointer|torchtune\.training\.FullModel\w+Checkpointer",
    "tokenizer": r"rocm_ext\.data\.HFTokenizer|torchtune\.models\.\w+\.\w+_tokenizer",
    "dataset": _DATASET,
    "dataset_val": _DATASET,
    "prompts": _PROMPTS,
    "eval_prompts": _PROMPTS,
    "optimizer": r"torch\.optim\.\w+",
    "loss": r"(rocm_ext\.losses|torchtune\.modules\.loss|torchtune\.rlhf\.loss)\.\w+",
    "engine": r"rocm_ext\.sampling\.LocalEngine",
    "verifier": r"rocm_ext\.verifiers\.(All|Compile|ExactMatch|JsonSchema|MajorityAnswer|MathAnswer|PythonTests|"
    r"ReasoningGym|Regex|Run|Weighted)",
}
# Arguments that can make such a component run code: their harmless values
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "trust_remote_code": (None, False),
    "prompt_template": (None,),  # torchtune calls what it names
    "python": (None,),
    "sandbox": ("bubblewrap",),
}


def instantiate(block: DictConfig, *args: Any, key: str, **kwargs: Any) -> Any:
    """Build a component as torchtune's ``config.instantiate`` does; a UserError in one line if it fails.

    Args:
        block: ``_component_`` and its arguments.
        args, kwargs: more arguments; kwargs override the block's.
        key: key of ``block`` in the config, for messages.
    """
    component = _component(block, key)
    arguments: Any = OmegaConf.to_container(block, resolve=True)
    del arguments[COMPONENT]
    arguments |= kwargs
    try:
        with suppress(ValueError):  # a builtin without a signature
            inspect.signature(component).bind(*args, **arguments)
    except TypeError as error:
        raise UserError(f"{key}: {block[COMPONENT]}: {error}") from error
    with explain_errors(f"{key}: {block[COMPONENT]}"):
        return component(*args, **arguments)


def takes(block: DictConfig, argument: str, key: str) -> bool:
    """Return whether the component of ``block`` has an argument of this name."""
    return argument in (_parameters(block, key) or ())


def without(block: DictConfig, *keys: str) -> DictConfig:
    """Copy ``block`` without ``keys``; references in it still find the rest of the config."""
    part = block.copy()
    for key in keys:
        part.pop(key, None)
    return part


def data_weights(dataset: Any) -> tuple[float, ...]:
    """Return the weights of the entries of ``dataset``; () without weights, or if it is no list.

    Raises a UserError if a weight is no number above 0, or only some entries have one.
    """
    blocks = dataset if isinstance(dataset, ListConfig) else []
    weights = []
    for i, block in enumerate(blocks):
        weight = block.get(WEIGHT) if isinstance(block, DictConfig) else None
        if weight is None:
            continue
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 < weight <= sys.float_info.max:
            raise UserError(f"dataset.{i}.weight is {weight!r}; expected a number above 0")
        weights.append(float(weight))
    if weights and len(weights) < len(blocks):
        raise UserError(
            f"{len(weights)} of {len(blocks)} entries of dataset have a weight; give one to all of them or none"
        )
    return tuple(weights)


def data_sets(key: str, value: Any) -> dict[str, Any]:
    """Return the parts of a value by key: ``dataset_val.NAME`` of named data sets; any other value is one part."""
    has_names = isinstance(value, Mapping) and COMPONENT not in value
    if key not in NAMED or not has_names or not value:
        return {key: value}
    return {f"{key}.{name}": part for name, part in value.items()}


def set_names(cfg: Mapping, key: str) -> list[str]:
    """Return the names of the data sets in ``dataset_val`` or ``eval_prompts``; one without a name has an empty one."""
    return [part.partition(".")[2] for part in data_sets(key, cfg.get(key))]


def names_prompts(cfg: Mapping, name: str | None) -> bool:
    """Return whether ``name`` is a set of prompts, and no data set of rows, in a config that may be incomplete."""
    return name in set_names(cfg, "eval_prompts") and name not in set_names(cfg, "dataset_val")


def chosen_set(cfg: DictConfig, name: str | None, key: str = "dataset_val") -> Any:
    """Return the data set ``name`` of ``dataset_val`` or ``eval_prompts``, or without a name the only one.

    Raises:
        UserError: there is no such data set, or without a name there are several.
    """
    sets = data_sets(key, cfg[key])
    chosen = f"{key}.{name}" if name else key
    if name is None and len(sets) == 1:
        (chosen,) = sets
    if chosen in sets:
        return sets[chosen]
    if key in sets:
        raise UserError(f"--set is {name}, and {key} has no named data sets; drop --set")
    known = set_names(cfg, key)
    if name is None:
        raise UserError(f"{key} has several data sets; choose one: --set {' or '.join(known)}")
    raise UserError(f"--set is {name}; expected a name in {key}{nearest(name, known)}")


def choose_prompts(cfg: DictConfig, name: str | None) -> None:
    """Make the set ``name``, or without a name the only one, the ``eval_prompts`` of an evaluation, with its verifier.

    A UserError as from :func:`chosen_set`.
    """
    chosen = chosen_set(cfg, name, "eval_prompts")
    if chosen is not cfg.eval_prompts:  # it has a name
        cfg.verifier = chosen.get(VERIFIER) or cfg.verifier
        chosen = without(chosen, VERIFIER)
    cfg.eval_prompts = chosen


def prompt_sets(cfg: DictConfig) -> Iterator[tuple[str, Any, DictConfig | None]]:
    """Yield key, component without a verifier, and own verifier of the :func:`data_sets` of ``eval_prompts``."""
    for key, part in data_sets("eval_prompts", cfg.eval_prompts).items():
        if key == "eval_prompts":
            yield key, part, None
        else:
            yield key, without(part, VERIFIER), part.get(VERIFIER)


def judges_held_out(cfg: DictConfig) -> bool:
    """Return whether a verifier, or an environment, judges the answers to each set of ``eval_prompts``."""
    of_run = cfg.verifier or cfg.get("environment")
    return all(not prompts or of_run or own for _, prompts, own in prompt_sets(cfg))


def component_faults(cfg: DictConfig, defaults: Config) -> Iterator[str]:
    """Yield a message for each key that lacks its component, and each argument that a component does not take.

    A key whose default is a name, such as ``loss: dapo``, may hold a name instead of a component. Defaults are not
    checked: some of their modules take a second to import.
    """
    for key, block in _parts(cfg):
        root = key.partition(".")[0]
        if root in NAMED and not _SET.fullmatch(key):
            yield f"{key}: a data set's name has letters, digits, _ and - only"
        is_list = isinstance(block, ListConfig)
        if is_list and root in _COMPONENTS - _LISTS:
            yield f"{key} is {block!r}; expected one _component_ and its arguments"
            continue
        mixed = is_list and key == "dataset"
        if mixed:
            data_weights(block)
        default = defaults.get(key)
        has_names = isinstance(default, str) and default != "???"
        for part in block if is_list else [block]:
            is_name = has_names and isinstance(part, str)
            if isinstance(part, DictConfig) and part == default:
                continue
            if isinstance(part, DictConfig) and COMPONENT in part:
                others = (COMPONENT, WEIGHT) if mixed else (COMPONENT,)
                if root == "eval_prompts" and key != root:
                    others = (COMPONENT, VERIFIER)
                    yield from _verifier_faults(f"{key}.{VERIFIER}", part.get(VERIFIER), cfg)
                yield from _argument_faults(key, part, others, cfg)
            elif root in _COMPONENTS and (part is not None or key != root) and not is_name:
                yield f"{key} is {part!r}; expected a _component_ and its arguments"


def _verifier_faults(key: str, verifier: Any, cfg: DictConfig) -> Iterator[str]:
    """Yield a message for each fault in the verifier of a set of prompts."""
    if isinstance(verifier, DictConfig) and COMPONENT in verifier:
        yield from _argument_faults(key, verifier, (COMPONENT,), cfg)
    elif verifier is not None:
        yield f"{key} is {verifier!r}; expected a _component_ and its arguments"
    if verifier is not None and cfg.get("environment") is not None:
        yield f"{key} and environment are both set, and both judge answers; set one of them to null"


def _parts(cfg: DictConfig) -> Iterator[tuple[str, Any]]:
    """Yield the values of a config by key; of ``dataset_val`` and ``eval_prompts``, the :func:`data_sets`."""
    for key, value in cfg.items():
        yield from data_sets(str(key), value).items()


def check_from_folder(content: Config, file: Path) -> None:
    """Raise a UserError for a folder's config that could run code: a run or an adapter may come from anybody.

    ``content`` is the part of the config that is used, ``file`` its file, for the message.
    """
    for path, value in leaves(content):
        key, name = path[0], path[-1]
        if name == COMPONENT:
            of_set = key == "eval_prompts" and path[2:3] == (VERIFIER,)
            pattern = _BUILDERS.get(VERIFIER if of_set else key, r"(?!)")
            harmless = isinstance(value, str) and bool(re.fullmatch(pattern, value))
        elif name in _HARMLESS:
            harmless = value in _HARMLESS[name]
        elif path == ("recipe",):  # a recipe's file in the folder would bring its defaults
            harmless = value in registry.recipes()
        elif path == ("hardware",):  # a profile's file would set environment variables
            harmless = value in ("auto", *profile_names())
        else:
            harmless = not (isinstance(value, str) and "${" in value)  # it may read the environment
        if not harmless:
            raise UserError(
                f"{file}: {'.'.join(path)} is {value!r}, which may run code or read the environment. If you trust this "
                "file, add --trust-config"
            )


def leaves(block: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield all values in a config with their keys; the items of a list have the list's keys."""
    if isinstance(block, Mapping):
        for key, value in block.items():
            yield from leaves(value, (*path, str(key)))
    elif isinstance(block, list):
        for value in block:
            yield from leaves(value, path)
    else:
        yield path, block


def _argument_faults(
    key: str, block: DictConfig, others: Sequence[str], cfg: DictConfig
) -> Iterator[str]:
    """Yield a message for each fault in the arguments of a component of ``cfg``: its keys except ``others``."""
    parameters = _parameters(block, key)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in map(str, block):
        if name in others:
            continue
        if name not in parameters:
            if key.partition(".")[0] in _LISTS and name == WEIGHT:
                hint = "; it is for a list of data sets to train on"
            elif names := our_names(name, cfg):
                hint = f"; did you mean {' or '.join(names)}?"
            else:
                hint = nearest(name, parameters)
            yield f"unknown key {key}.{name} for {block[COMPONENT]}{hint}"
            continue
        annotation = parameters[name].annotation
        kinds = set(str(getattr(annotation, "__name__", annotation)).split(" | "))
        takes_number = bool(kinds & {"int", "float"}) and kinds <= {"int", "float", "None"}
        value = None if OmegaConf.is_interpolation(block, name) else block[name]
        if takes_number and isinstance(value, str):
            yield f"{key}.{name} is {value!r}; expected a number"


def _parameters(block: DictConfig, key: str) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a component by name. None for a builtin without a signature."""
    try:
        return inspect.signature(_component(block, key)).parameters
    except ValueError:
        return None


def _component(block: DictConfig, key: str) -> Callable:
    try:
        return import_component(block[COMPONENT])
    except UserError as error:
        raise UserError(f"{key}.{COMPONENT} {error}") from error
