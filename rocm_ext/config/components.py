"""Nodes of a config that name a component: a function or class, with its arguments."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from rocm_ext.errors import UserError, nearest, one_line
from rocm_ext.importing import COMPONENT, import_component

# Keys whose value names a component
_COMPONENTS = {"model", "checkpointer", "tokenizer", "dataset", "dataset_val", "optimizer", "lr_scheduler"}
_COMPONENTS |= {"loss", "metric_logger", "prompts", "eval_prompts", "engine", "verifier"}
_LISTS = {"dataset", "dataset_val"}  # these may be lists of components


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
    try:
        return argument in inspect.signature(_component(node, key)).parameters
    except ValueError:  # a builtin without a signature
        return False


def without(node: DictConfig, *keys: str) -> DictConfig:
    """A copy of ``node`` that lacks ``keys``."""
    return OmegaConf.create({k: v for k, v in node.items() if k not in keys})


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
        for part in node if isinstance(node, ListConfig) else [node]:
            if isinstance(part, DictConfig) and COMPONENT in part:
                _check_arguments(str(key), part)
            elif key in _COMPONENTS and part is not None and not (key in names and isinstance(part, str)):
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
    try:
        return import_component(node[COMPONENT])
    except UserError as error:
        raise UserError(f"{key}.{COMPONENT} {error}") from error
