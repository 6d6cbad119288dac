"""Conversations in ``samples.jsonl`` and in the rows of prompts, message by message, as the page shows them.

Programs send messages and tools, and files may be damaged: what is not in OpenAI's form is left out.
"""

import json
import re
from typing import NamedTuple

from rocm_ext.base.types import Json
from rocm_ext.data.messages import REASONING_KEYS
from rocm_ext.verifiers.extract import REASONING

_TAGS = re.compile(r"</?think>|\[/?THINK\]")


class Function(NamedTuple):
    """A tool that the model may call, or a call of one.

    Attributes:
        name: its name.
        about: the tool's description; of a call, what is wrong with its text.
        parameters: names of parameters, with their types and descriptions; of a call, with their values.
    """

    name: str
    about: str
    parameters: tuple[tuple[str, str], ...]


class Turn(NamedTuple):
    """A message.

    Attributes:
        role: ``system``, ``user``, ``assistant``, ``tool``, or another one that a program sends.
        name: the tool whose result the text is; of other messages, the speaker's name.
        reasoning: reasoning before the text.
        text: the message without reasoning and calls.
        calls: calls of tools.
    """

    role: str
    name: str
    reasoning: str
    text: str
    calls: tuple[Function, ...]


def turns_of(messages: object) -> list[Turn]:
    """Return the turns of messages in OpenAI's form."""
    turns = []
    called: dict[str, str] = {}  # ids of calls -> names of their functions
    for message in _objects(messages):
        calls = []
        for call in _objects(message.get("tool_calls")):
            function = _object(call.get("function", call))
            arguments = tuple((name, _text(value)) for name, value in _object(function.get("arguments")).items())
            calls.append(Function(_text(function.get("name")), _text(call.get("problem")), arguments))
            called[_text(call.get("id"))] = calls[-1].name
        name = message.get("name") or called.get(_text(message.get("tool_call_id")))
        turns.append(Turn(_text(message.get("role")), _text(name), *_split(message), tuple(calls)))
    return turns


def tools_of(schemas: object) -> list[Function]:
    """Return the functions that JSON schemas in OpenAI's form describe."""
    tools = []
    for schema in _objects(schemas):
        function = _object(schema.get("function", schema))
        properties = _object(_object(function.get("parameters")).get("properties"))
        parameters = tuple((name, _described(_object(value))) for name, value in properties.items())
        tools.append(Function(_text(function.get("name")), _text(function.get("description")), parameters))
    return tools


def _split(message: Json) -> tuple[str, str]:
    """Return a message's reasoning, which has a key of its own or stands before the answer, and its text."""
    text = _text(message.get("content"))
    for key in REASONING_KEYS:
        if message.get(key):
            return _text(message[key]), text
    inline = REASONING.match(text) if message.get("role") == "assistant" else None
    if inline is None:
        return "", text
    return _TAGS.sub("", inline[0]), text[inline.end() :]


def _described(parameter: Json) -> str:
    kind = parameter.get("type") or parameter.get("enum") or parameter.get("anyOf")
    return f"{_text(kind)} {_text(parameter.get('description'))}"


def _text(value: object) -> str:
    """Return a text as it is, any other value as JSON; nothing is an empty text."""
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _object(value: object) -> Json:
    return value if isinstance(value, dict) else {}


def _objects(values: object) -> list[Json]:
    """Return the objects in a list."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list | tuple) else []
