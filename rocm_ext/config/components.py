"""Nodes of a config that name a component: a function or class, with its arguments."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from rocm_ext.base import registry
from rocm_ext.base.errors import UserError, nearest, one_line
from rocm_ext.base.importing import COMPONENT, import_component
from rocm_ext.machine.profile import profile_names

# Keys whose value names a component
_COMPONENTS = {"model", "checkpointer", "tokenizer", "dataset", "dataset_val", "optimizer", "lr_scheduler"}
_COMPONENTS |= {"loss", "metric_logger", "prompts", "eval_prompts", "engine", "verifier", "environment"}
_LISTS = {"dataset", "dataset_val"}  # these may be lists of components
WEIGHT = "weight"  # key of the entries of a list in `dataset`, which no component gets

# What the config in a run's folder may name: builders that read the files they are given, and do nothing else.
# A star stands for the rest of one name.
_DATASET = "rocm_ext.data.sft_dataset rocm_ext.data.preference_dataset torchtune.datasets.*_dataset"
_BUILDERS = {
    "model": "rocm_ext.model.from_checkpoint torchtune.models.*.lora_* torchtune.models.*.qlora_*",
    "checkpointer": "rocm_ext.model.HFCheckpointer torchtune.training.FullModel*Checkpointer",
    "tokenizer": "rocm_ext.data.HFTokenizer torchtune.models.*.*_tokenizer",
    "dataset": _DATASET,
    "dataset_val": _DATASET,
    "prompts": "rocm_ext.data.prompt_dataset rocm_ext.data.reasoning_gym_prompts",
    "eval_prompts": "rocm_ext.data.prompt_dataset rocm_ext.data.reasoning_gym_prompts",
    "optimizer": "torch.optim.*",
    "loss": "rocm_ext.losses.* torchtune.modules.loss.* torchtune.rlhf.loss.*",
    "engine": "rocm_ext.sampling.LocalEngine",
    "verifier": "rocm_ext.verifiers.All rocm_ext.verifiers.Compile rocm_ext.verifiers.ExactMatch "
    "rocm_ext.verifiers.JsonSchema rocm_ext.verifiers.MajorityAnswer rocm_ext.verifiers.MathAnswer "
    "rocm_ext.verifiers.PythonTests rocm_ext.verifiers.ReasoningGym rocm_ext.verifiers.Regex rocm_ext.verifiers.Run "
    "rocm_ext.verifiers.Weighted",
}
# Arguments with which one of these would run code, or run it unguarded: the values that are allowed
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "trust_remote_code": (None, False),
    "prompt_template": (None,),  # torchtune calls what it names
    "python": (None,),
    "sandbox": ("bubblewrap",),
}


def instantiate(node: DictConfig, *args: Any, key: str, **kwargs: Any) -> Any:
    """As torchtune's ``config.instantiate``, with one line for components that cannot be made.

    Args:
        node: has ``_component_`` and its arguments.
        args, kwargs: more arguments; kwargs overrule the node's.
        key: where in the config ``node`` is, for messages.
    """
    component = _component(node, key)
    content: Any = OmegaConf.to_container(node, resolve=True)
    arguments = {str(k): v for k, v in content.items() if k != COMPONENT} | kwargs
    try:
        with suppress(ValueError):  # a builtin without a signature checks its arguments itself
            inspect.signature(component).bind(*args, **arguments)
    except TypeError as error:
        raise UserError(f"{key}: {node[COMPONENT]}: {error}") from error
    try:
        return component(*args, **arguments)
    except UserError:
        raise
    except Exception as error:  # whatever the component raises
        raise UserError(f"{key}: {node[COMPONENT]}: {one_line(error)}") from error


def takes(node: DictConfig, argument: str, key: str) -> bool:
    """Whether the component of ``node`` has an argument of this name."""
    try:
        return argument in inspect.signature(_component(node, key)).parameters
    except ValueError:  # a builtin without a signature
        return False


def without(node: DictConfig, *keys: str) -> DictConfig:
    """A copy of ``node`` that lacks ``keys``."""
    return OmegaConf.create({k: v for k, v in node.items() if k not in keys})


def data_weights(dataset: Any) -> tuple[float, ...]:
    """Return the weights of the entries of ``dataset``; () where they have none, or it is no list.

    Raises:
        UserError: a weight is no number above 0, or some of the entries have none.
    """
    nodes = dataset if isinstance(dataset, ListConfig) else []
    weights = [node.get(WEIGHT) if isinstance(node, DictConfig) else None for node in nodes]
    given = {i: weight for i, weight in enumerate(weights) if weight is not None}
    for i, weight in given.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
            raise UserError(f"dataset.{i}.weight is {weight!r}; expected a number above 0")
    if given and len(given) < len(nodes):
        raise UserError(
            f"{len(given)} of {len(nodes)} entries of dataset have a weight; give one to all of them or none"
        )
    return tuple(map(float, given.values()))


def check_components(cfg: DictConfig, defaults: Mapping[str, Any]) -> None:
    """Refuse keys without the component that they need, and arguments that a component does not take.

    Args:
        cfg: the whole config.
        defaults: those of its recipe. A key whose default is a name, such as ``loss: dapo``, may hold a name.

    Raises:
        UserError: naming the key.
    """
    names = {key for key, default in defaults.items() if isinstance(default, str) and default != "???"}
    for key, node in cfg.items():
        if isinstance(node, ListConfig) and key in _COMPONENTS - _LISTS:
            raise UserError(f"{key} is {node!r}; expected one _component_ and its arguments")
        mixed = key == "dataset" and isinstance(node, ListConfig)
        if mixed:
            data_weights(node)
        for part in node if isinstance(node, ListConfig) else [node]:
            if isinstance(part, DictConfig) and COMPONENT in part:
                _check_arguments(str(key), part, (COMPONENT, WEIGHT) if mixed else (COMPONENT,))
            elif key in _COMPONENTS and part is not None and not (key in names and isinstance(part, str)):
                raise UserError(f"{key} must name a _component_ and its arguments, found {part!r}")


def check_from_folder(content: Mapping[str, Any], file: Path) -> None:
    """Refuse what could run code in the config of a folder: a run or an adapter may come from anybody.

    Args:
        content: content of the config, or the part of it that is used.
        file: where it is, for the message.

    Raises:
        UserError: naming the value and ``--trust-config``.
    """
    for path, value in _values(content):
        key, name = path[0], path[-1]
        if name == COMPONENT:
            pattern = _BUILDERS.get(key, "").replace(".", r"\.").replace("*", r"\w+").replace(" ", "|")
            harmless = isinstance(value, str) and bool(value) and re.fullmatch(pattern, value) is not None
        elif name in _HARMLESS:
            harmless = value in _HARMLESS[name]
        elif path == ("recipe",):  # one in a file of the folder has defaults of its own
            harmless = value in registry.recipes()
        elif path == ("hardware",):  # one in a file of the folder sets environment variables
            harmless = value in ("auto", *profile_names())
        else:
            harmless = not (isinstance(value, str) and "${" in value)  # it may read the environment
        if not harmless:
            raise UserError(
                f"{file}: {'.'.join(path)} is {value!r}, which may run code or read the environment. If you trust this "
                "file, add --trust-config"
            )


def _values(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All values in a config with their keys; those of a list have the list's."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _values(value, (*path, str(key)))
    elif isinstance(node, list):
        for value in node:
            yield from _values(value, path)
    else:
        yield path, node


def _check_arguments(key: str, node: DictConfig, others: Sequence[str]) -> None:
    """Check the arguments of a component: the keys of ``node`` but for ``others``."""
    try:
        parameters = inspect.signature(_component(node, key)).parameters
    except ValueError:
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for name in map(str, node):
        if name in others:
            continue
        if name not in parameters:
            hint = "; it is for a list of data sets to train on" if key in _LISTS and name == WEIGHT else ""
            raise UserError(f"unknown key {key}.{name} for {node[COMPONENT]}{hint or nearest(name, parameters)}")
        kinds = str(getattr(parameters[name].annotation, "__name__", parameters[name].annotation)).split(" | ")
        value = None if OmegaConf.is_interpolation(node, name) else node[name]
        if isinstance(value, str) and set(kinds) - {"None"} in ({"int"}, {"float"}, {"int", "float"}):
            raise UserError(f"{key}.{name} is {value!r}; expected a number")


def _component(node: DictConfig, key: str) -> Callable:
    try:
        return import_component(node[COMPONENT])
    except UserError as error:
        raise UserError(f"{key}.{COMPONENT} {error}") from error
