"""Functions that a model may call: their descriptions, calls and results."""

import inspect
import json
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.types import Json
from rocm_ext.environments.calls import Call

_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_MOST = 20_000  # characters of a result


class Fault(Exception):
    """A tool's fault, such as a dead server, for which the model is not to blame: the conversation is an ERROR."""


class Tools:
    """Functions that a model may call.

    A function's name, type hints and docstring describe it. A docstring has a summary, and under ``Args:`` lines
    ``name: text`` for the parameters.

    Args:
        functions: functions and bound methods.

    Attributes:
        schemas: JSON schemas of the functions in OpenAI's form, as chat templates take them.

    Raises:
        UserError: an item is not a function, or is asynchronous; a function has no docstring, a parameter has no type
            hint or one that JSON cannot express, or two functions have the same name.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self.schemas: list[Json] = []
        self._functions: dict[str, tuple[Callable[..., Any], Json]] = {}
        for function in functions:
            schema = schema_of(function)
            name = schema["function"]["name"]
            if name in self._functions:
                raise UserError(f"tools: two functions have one name, {name}; rename one of them")
            self.schemas.append(schema)
            self._functions[name] = function, schema["function"]["parameters"]

    def __call__(self, call: Call) -> str:
        """Return a call's result as text, or as JSON; a long one loses its middle. An error is a text for the model."""
        if call.problem:
            return f"error: the call cannot be read: {call.problem}"
        if call.name not in self._functions:
            return (
                f"error: there is no tool {call.name!r}; the tools are {', '.join(self._functions)}"
            )
        function, parameters = self._functions[call.name]
        from jsonschema import Draft202012Validator  # here, because it takes a third of a second

        try:
            inspect.signature(function).bind(**call.arguments)
        except TypeError as problem:
            return f"error: {call.name}: {one_line(problem)}"
        for error in Draft202012Validator(parameters).iter_errors(dict(call.arguments)):
            return f"error: {call.name}: {'.'.join(map(str, error.path)) or 'the arguments'}: {error.message}"
        try:
            result = function(**call.arguments)
            if not isinstance(result, str):
                result = json.dumps(result, ensure_ascii=False, default=str)
            # no halves of surrogate pairs
            return shortened(result.encode("utf-8", "replace").decode(), _MOST)
        except Fault:
            raise
        except (Exception, SystemExit) as problem:  # whatever a tool raises
            return f"error: {type(problem).__name__}: {one_line(problem)}"


def shortened(text: str, most: int) -> str:
    """Return ``text``, without its middle if it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}\n… the middle is left out …\n{text[-most // 2 :]}"


def schema_of(function: Callable[..., Any]) -> Json:
    """Describe a function as a JSON schema in OpenAI's form; raises UserError as :class:`Tools`."""
    later = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if not inspect.isroutine(function) or any(kind(function) for kind in later):
        raise UserError(
            f"tools: found {function!r}; expected a function that is neither asynchronous nor a generator"
        )
    name = function.__name__
    doc = inspect.getdoc(function)
    if not doc:
        raise UserError(
            f"tools: {name} has no docstring; the model reads there what the function does"
        )
    summary, descriptions = _described(doc)
    try:
        hints = get_type_hints(function)
        signature = inspect.signature(function)
    except Exception as error:  # whatever an annotation raises
        raise UserError(
            f"tools: {name}'s parameters cannot be read: {one_line(error)}; write type hints"
        ) from error
    properties = {}
    required = []
    for key, parameter in signature.parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"tools: {name} takes *{key}; a tool has only named parameters")
        if key not in hints:
            raise UserError(f"tools: {name}'s parameter {key} has no type hint")
        try:
            properties[key] = _kind(hints[key])
        except (KeyError, TypeError) as error:
            expected = "str, int, float, bool, list, dict, Literal, or one of these | None"
            raise UserError(
                f"tools: {name}'s parameter {key} is {hints[key]}; expected {expected}"
            ) from error
        if descriptions.get(key):
            properties[key]["description"] = descriptions[key]
        if parameter.default is parameter.empty:
            required.append(key)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": summary, "parameters": parameters},
    }


def _kind(hint: Any) -> Json:
    """Return the JSON schema of a type; raises KeyError if JSON has no such type."""
    if hint is Any:
        return {}
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(parts)}
    if origin in (Union, types.UnionType):
        null = {"type": "null"}
        return {"anyOf": [null if part is type(None) else _kind(part) for part in parts]}
    kind: Json = {"type": _TYPES[origin or hint]}
    if kind["type"] == "array" and parts:
        kind["items"] = _kind(parts[0])
    elif kind["type"] == "object" and len(parts) == 2:
        kind["additionalProperties"] = _kind(parts[1])
    return kind


def _described(doc: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's summary, and the descriptions of the parameters."""
    summary, *sections = re.split(
        r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):\s*$", doc, flags=re.M
    )
    described = {}
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title in ("Args", "Arguments", "Parameters"):
            parts = re.findall(
                r"^\s+(\w+)\s*(?:\([^)]*\))?:\s*(.*(?:\n(?!\s+\w+\s*(?:\([^)]*\))?:).*)*)",
                body,
                re.M,
            )
            described = {name: " ".join(text.split()) for name, text in parts}
    return " ".join(summary.split()), described
