"""Conversations in which a model uses tools, and a verifier judges its answer."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rocm_ext.base.errors import UserError, explain_errors, refuse
from rocm_ext.base.importing import COMPONENT, import_component
from rocm_ext.base.types import Row
from rocm_ext.environments.base import Environment
from rocm_ext.verifiers.build import build


class ToolEnvironment(Environment):
    """Tools and a verifier: the first message that calls no tool is the answer.

    Args:
        row: the columns of the prompt's row, for the verifier.
        tools: names such as ``my_module.search``, or components with arguments. A function is a tool. A class is built
            for each conversation, and its public methods are tools.
        verifier: the verifier's component.
    """

    def __init__(self, row: Row, tools: Sequence[Any], verifier: Any) -> None:
        super().__init__(row)
        if not (isinstance(tools, (list, tuple)) and tools):
            raise UserError(f"tools: found {tools!r}; expected a list of names and components")
        self.tools = [function for tool in tools for function in functions_of(tool)]
        self.judge_by(build(verifier))


def functions_of(tool: Any) -> list[Callable[..., Any]]:
    """Return the functions of an item of ``tools``; UserError if it cannot be built, or has no public method."""
    config = {COMPONENT: tool} if isinstance(tool, str) else tool
    if not (isinstance(config, Mapping) and COMPONENT in config):
        raise UserError(f"tools: found {tool!r}; expected a name, or a mapping with {COMPONENT}")
    arguments = {str(name): value for name, value in config.items()}
    path = arguments.pop(COMPONENT)
    try:
        component = import_component(path)
    except UserError as error:
        raise UserError(f"tools: {error}") from error
    if not inspect.isclass(component):
        refuse(
            f"tools: {path} is a function, which takes no argument {name!r} here"
            for name in arguments
        )
        return [component]
    with explain_errors(f"tools: {path} cannot be built"):
        built = component(**arguments)
    methods = [
        name
        for name, _ in inspect.getmembers(component, inspect.isroutine)
        if not name.startswith("_")
    ]
    if not methods:
        raise UserError(f"tools: {path} has no public method; its public methods are the tools")
    return [getattr(built, name) for name in methods]
