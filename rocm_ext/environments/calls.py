"""Read tool calls in a model's messages, in the notation of its chat template.

Templates have few notations, with different marks: JSON in ``<tool_call>`` (Hermes, Qwen2.5, Qwen3, SmolLM3), functions
and parameters as tags (Qwen3-Coder, Qwen3.5, Nemotron), keys and values as tags (GLM), JSON alone or behind
``<|python_tag|>`` (Llama 3), ``[TOOL_CALLS]`` (Mistral), channels (gpt-oss) and Python calls (LFM2).
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rocm_ext.base.errors import one_line
from rocm_ext.base.types import Json

_MOST = 32  # calls in a message; models repeat themselves, and a call costs a process's time
# JSON schemas: the types of Python's values, and whether any or all of several schemas must hold
_KINDS = {bool: ["boolean"], int: ["integer", "number"], float: ["number"], list: ["array"], dict: ["object"],
          type(None): ["null"]}  # fmt: skip
_UNREADABLE = (
    ValueError,
    SyntaxError,
    TypeError,
    KeyError,
    AttributeError,
    RecursionError,
    MemoryError,
)
_PARTS: dict[str, Callable[[Any], bool]] = {"anyOf": any, "oneOf": any, "allOf": all}
Schemas = Sequence[Mapping[str, Any]]  # JSON schemas of tools


@dataclass(frozen=True)
class Call:
    """A call of a tool.

    Attributes:
        name: the tool's name; empty if it is unreadable.
        arguments: values by the names of the tool's parameters.
        problem: the fault of the call's text; empty for a valid call.
    """

    name: str
    arguments: Json = field(default_factory=dict)
    problem: str = ""

    def message(self, number: int) -> Json:
        """Return the call in OpenAI's form, for an assistant's message; ``number`` makes its id."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"id": call_id(number), "type": "function", "function": function}


def call_id(number: int) -> str:
    """Return the id of a message's call: nine letters and digits, which Mistral's templates demand."""
    return f"call{number:05d}"


def calls_in(text: str, schemas: Schemas = ()) -> tuple[str, list[Call]]:
    """Read the calls in an answer, after its reasoning.

    Args:
        text: the answer with its special tokens.
        schemas: JSON schemas of the tools, which give the types of untyped arguments.

    Returns:
        The text without calls, and the calls in order. An unreadable call has a problem; so has one that stands for all
        beyond 32. The text of gpt-oss is its reasoning without marks, as its template takes it.
    """
    reasoning = _REASONING.match(text)
    begin = reasoning.end() if reasoning else 0
    head, answer = text[:begin], text[begin:]
    for mark, read in _NOTATIONS:
        bodies = mark.findall(answer)
        if not bodies:
            continue
        calls: list[Call] = []
        for body in bodies:
            try:
                calls += read(body, schemas)
            except _UNREADABLE as error:
                calls.append(Call("", problem=one_line(error)))
        beyond = len(calls) - _MOST
        if beyond > 0:
            problem = f"a message has at most {_MOST} calls; the last {beyond} did nothing"
            calls[_MOST:] = [Call("", problem=problem)]
        content = head + mark.sub("", answer)
        if read is _channel:
            content = _MESSAGE.sub("\n", content)
        return content.strip(), calls
    call = _bare(answer) if schemas else None
    if call is None:
        return text, []
    return head, [call]


Reader = Callable[[str, Schemas], Iterator[Call]]


def _of_json(value: Any) -> Call:
    if not (isinstance(value, dict) and isinstance(value.get("name"), str)):
        raise ValueError('a call is {"name": ..., "arguments": {...}}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments are an object, found {type(arguments).__name__}")
    return Call(value["name"], arguments)


def _tagged(body: str, schemas: Schemas) -> Iterator[Call]:
    """Read JSON, functions and parameters as tags, or keys and values as tags."""
    tags = body.strip()
    function = re.match(r"<function=([^>\s]+)>", tags)
    keys = re.fullmatch(r"([\w.-]+)\s*(<arg_key>.*)?", tags, re.S)
    if function:
        parameters = _pairs(_PARAMETER, "</parameter>", tags[function.end() :])
        yield _typed(function[1], parameters, schemas)
    elif keys:
        arguments = _pairs(_ARGUMENT, "</arg_value>", keys[2] or "")
        yield _typed(keys[1], arguments, schemas)
    else:
        value = json.loads(body)
        for call in value if isinstance(value, list) else [value]:
            yield _of_json(call)


def _pairs(pattern: re.Pattern, close: str, text: str) -> list[tuple[str, str]]:
    """Find keys and values; what follows the last ``close`` is left out, since each opener there would search all."""
    closed, mark, _ = text.rpartition(close)
    return pattern.findall(closed + mark)


def _typed(name: str, pairs: Sequence[tuple[str, str]], schemas: Schemas) -> Call:
    """Read arguments that are texts: as JSON if the tool takes its type, else as the text."""
    parameters = {}
    for schema in schemas:
        function = schema.get("function", schema)
        if function.get("name") == name:
            parameters = function.get("parameters", {})
            break
    arguments = {}
    for key, text in pairs:
        arguments[key] = text
        with suppress(Exception):  # a program sends the schema, which may be anything
            value = json.loads(text)
            schema = parameters.get("properties", {}).get(key, {})
            if not isinstance(value, str) and _takes(schema, value, parameters, {}):
                arguments[key] = value
    return Call(name, arguments)


def _takes(schema: Any, value: Any, root: Any, known: dict[str, bool]) -> bool:
    """Whether a JSON schema allows values of a value's type; ``known`` has the answers for references into ``root``.

    It reads only types and choices, and a reference once: a program that sends a slow pattern, or references that
    multiply, must not stop the run. A malformed schema may raise anything.
    """
    if not isinstance(schema, Mapping):
        return schema is True
    ref = schema.get("$ref")
    if ref is not None:
        if ref not in known:
            known[ref] = False  # it may refer to itself
            target = root
            for part in ref.removeprefix("#/").split("/"):
                target = target[part]
            known[ref] = _takes(target, value, root, known)
        if not known[ref]:
            return False
    kinds = schema.get("type")
    if kinds is not None:
        types = set(_KINDS[type(value)])
        if isinstance(value, float) and value.is_integer():
            types.add("integer")
        if types.isdisjoint([kinds] if isinstance(kinds, str) else kinds):
            return False
    if value not in schema.get("enum", [value]) or value != schema.get("const", value):
        return False
    for key, enough in _PARTS.items():
        if key in schema and not enough(_takes(part, value, root, known) for part in schema[key]):
            return False
    return True


def _listed(body: str, _: Schemas) -> Iterator[Call]:
    """Read Mistral's calls: a list, or ``name[ARGS]{...}``."""
    named = re.match(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w+\s*)?(?:\[ARGS\]\s*)?(\{.*)", body, re.S)
    if named:
        arguments = json.loads(named[2])
        yield _of_json({"name": named[1], "arguments": arguments})
    else:
        yield from map(_of_json, json.loads(body))


def _channel(body: str, _: Schemas) -> Iterator[Call]:
    header, arguments = body.split("<|message|>", 1)
    name = re.split(r"[\s<]", header)[0]
    yield _of_json({"name": name, "arguments": json.loads(arguments)})


def _python(body: str, _: Schemas) -> Iterator[Call]:
    calls = ast.parse(body.strip(), mode="eval").body
    for call in calls.elts if isinstance(calls, ast.List) else [calls]:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("a call is name(parameter=value)")
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        arguments = json.loads(json.dumps(arguments))  # sets and bytes are not JSON
        yield Call(ast.unparse(call.func), arguments)


def _json_behind(body: str, _: Schemas) -> Iterator[Call]:
    for part in re.split(r";\s*(?=\{)", body):
        yield _of_json(json.loads(part))


def _bare(text: str) -> Call | None:
    """Read a message that is nothing but a call, as Llama 3 writes it; return None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("parameters"), dict):
        return None
    return _of_json(value) if isinstance(value.get("name"), str) else None


# Arguments as tags; bounded repetitions keep the search linear
_PARAMETER = re.compile(r"<parameter=([^>\s]{1,256})>\n?(.*?)\n?</parameter>", re.S)
_ARGUMENT = re.compile(r"<arg_key>(.{0,256}?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.S)
# The marks around calls, and the readers of the text between. An answer that was cut may lack the end.
_NOTATIONS: list[tuple[re.Pattern, Reader]] = [
    (re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.S), _tagged),
    (re.compile(r"<\|tool_call_start\|>(.*?)(?:<\|tool_call_end\|>|\Z)", re.S), _python),
    (
        re.compile(
            r"(?:\A|<\|start\|>assistant|<\|channel\|>\w+)\s*to=functions\.(.*?)(?:<\|call\|>|\Z)",
            re.S,
        ),
        _channel,
    ),
    (re.compile(r"\[TOOL_CALLS\](.*?)(?=\[TOOL_CALLS\]|</s>|\Z)", re.S), _listed),
    (re.compile(r"<\|python_tag\|>(.*?)(?:<\|eom_id\|>|<\|eot_id\|>|\Z)", re.S), _json_behind),
]
_REASONING = re.compile(r".*(?:</think>|\[/THINK\])", re.S)
# gpt-oss's marks
_MESSAGE = re.compile(r"(?:<\|start\|>assistant|<\|channel\|>\w+\s*<\|message\|>|<\|end\|>)+")
