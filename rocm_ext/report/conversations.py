"""Conversations in ``samples.jsonl`` and in the rows of prompts, message by message, as the page shows them.

Programs send messages and tools, and files may be damaged: what is not in OpenAI's form is left out.
"""

import json
import re
from typing import NamedTuple

from rocm_ext.base.types import Json
from rocm_ext.data.messages import REASONING_KEYS
from rocm_ext.runs.records import as_object
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
            function = as_object(call.get("function", call))
            arguments = as_object(function.get("arguments"))
            values = {key: _text(value) for key, value in arguments.items()}
            parsed = Function(
                name=_text(function.get("name")),
                about=_text(call.get("problem")),
                parameters=tuple(values.items()),
            )
            calls.append(parsed)
            called[_text(call.get("id"))] = parsed.name
        tool = called.get(_text(message.get("tool_call_id")), "")
        reasoning, text = _split(message)
        turn = Turn(
            role=_text(message.get("role")),
            name=_text(message.get("name") or tool),
            reasoning=reasoning,
            text=text,
            calls=tuple(calls),
        )
        turns.append(turn)
    return turns


def tools_of(schemas: object) -> list[Function]:
    """Return the functions that JSON schemas in OpenAI's form describe."""
    tools = []
    for schema in _objects(schemas):
        function = as_object(schema.get("function", schema))
        parameters = as_object(function.get("parameters"))
        described = {}
        for key, value in as_object(parameters.get("properties")).items():
            parameter = as_object(value)
            kind = parameter.get("type") or parameter.get("enum") or parameter.get("anyOf")
            described[key] = f"{_text(kind)} {_text(parameter.get('description'))}"
        tool = Function(
            name=_text(function.get("name")),
            about=_text(function.get("description")),
            parameters=tuple(described.items()),
        )
        tools.append(tool)
    return tools


def _split(message: Json) -> tuple[str, str]:
    """Return a message's reasoning, which has a key of its own or stands before the answer, and its text."""
    text = _text(message.get("content"))
    for key in REASONING_KEYS:
        if message.get(key):
            return _text(message[key]), text
    inline = REASONING.match(text)
    if inline is None or message.get("role") != "assistant":
        return "", text
    return _TAGS.sub("", inline[0]), text[inline.end() :]


def _text(value: object) -> str:
    """Return a text as it is, any other value as JSON; nothing is an empty text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _objects(values: object) -> list[Json]:
    """Return the objects in a list."""
    if not isinstance(values, list | tuple):
        return []
    return [value for value in values if isinstance(value, dict)]
