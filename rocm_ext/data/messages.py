"""Check the messages of a conversation in a row, without importing torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rocm_ext.base.types import Json, Message, Row
from rocm_ext.data.dialects import (
    CALLS,
    FLAGS,
    ROLES,
    called,
    expect,
    masked,
    parsed,
    role_of,
    schema,
    string,
)

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")  # as transformers reads them
DETAILS = "reasoning_details"  # OpenRouter's list of parts of the reasoning
# Anthropic's and others' parts of content: type -> key of its text
_PARTS = {"thinking": "thinking", "reasoning": "text"}
_READ = ("role", "from", "content", "value", *FLAGS)


class Turn(NamedTuple):
    """One message.

    Attributes:
        role: a value of :data:`rocm_ext.data.dialects.ROLES`.
        content: text of the message; empty only if an assistant calls tools or reasons.
        masked: whether the loss excludes the message.
        more: further keys for a chat template: ``tool_calls``, ``reasoning_content``, ``name``, …
    """

    role: str
    content: str
    masked: bool
    more: Mapping[str, Any] = {}

    @property
    def reasons(self) -> bool:
        """Whether the message has reasoning, also inside its content."""
        return "reasoning_content" in self.more or "</think>" in self.content

    def message(self) -> Message:
        """Return the message as chat templates and servers expect it."""
        return {"role": self.role, "content": self.content, **self.more}


def to_turns(turns: Any, blank: bool = False) -> list[Turn]:
    """Check a conversation and return its turns; ValueError: a message is malformed.

    Args:
        turns: messages ``{"role", "content"}``, or ShareGPT's ``{"from", "value"}``; roles and flags as in
            :mod:`rocm_ext.data.dialects`. An assistant's message may have ``tool_calls`` in OpenAI's form; arguments
            may be an object or JSON text.
        blank: whether an assistant's message may be empty.
    """
    checked: list[Turn] = []
    messages = expect(turns, (list, tuple), "a conversation must be a list of messages")
    for number, message in enumerate(messages):
        try:
            turn = _to_turn(message, blank)
        except ValueError as error:
            raise ValueError(f"message {number}: {error}") from error
        last = checked[-1] if checked else None
        # ms-swift writes several calls of a turn as messages
        if last and _is_call(message) and last.role == turn.role and last.masked == turn.masked:
            calls = [*last.more.get("tool_calls", ()), *turn.more["tool_calls"]]
            checked[-1] = last._replace(more={**last.more, "tool_calls": calls})
        else:
            checked.append(turn)
    return checked


def _is_call(message: Row) -> bool:
    return message.get("role", message.get("from")) in CALLS


def _to_turn(message: Any, blank: bool) -> Turn:
    expect(message, Mapping, "it must be an object with role and content")
    role = role_of(message)
    if role is None:
        unknown = message.get("role", message.get("from"))
        raise ValueError(f"unknown role {unknown!r}; known: {', '.join(ROLES)}")
    more = {}
    for key, value in message.items():
        if key not in _READ and value is not None:
            more[key] = value
    content = message.get("content", message.get("value"))
    reasoning = _reasoning(message)
    if reasoning is not None:
        more.pop(DETAILS, None)
        more["reasoning_content"] = reasoning
    if _is_call(message):
        more["tool_calls"] = called(content)
        content = None
    calls = more.pop("tool_calls", None)  # templates test for the key
    if calls:
        if role != "assistant":
            raise ValueError(f"tool_calls of the {role}; only the assistant calls tools")
        expect(calls, list, "tool_calls must be a list")
        more["tool_calls"] = [_tool_call(call, f"tool_calls[{i}]") for i, call in enumerate(calls)]
    may_be_empty = calls or reasoning or (blank and role == "assistant")
    text = "" if content is None and may_be_empty else _text(content)
    if role == "assistant" and not text.strip() and not may_be_empty:
        raise ValueError("the assistant's content is empty")
    return Turn(role, text, masked(message, role), more)


def _reasoning(message: Row) -> str | None:
    """Return a message's reasoning, under whichever name or in whichever parts it comes; None without one."""
    for key in REASONING_KEYS:
        if message.get(key) is not None:
            return string(message[key], key)
    texts = []
    for part in message.get(DETAILS) or ():
        text = part.get("text", part.get("summary")) if isinstance(part, Mapping) else None
        if text is None:
            raise ValueError(
                f"{DETAILS} has a part without text, such as an encrypted one; remove the column"
            )
        texts.append(string(text, DETAILS))
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _PARTS:
            texts.append(string(part.get(_PARTS[kind]), kind))
    return "\n".join(texts) if texts else None


def _text(content: Any) -> str:
    """Return a message's text, which may come as a list of parts, as in OpenAI's API; parts with reasoning are none."""
    if isinstance(content, list):
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind == "text":
                texts.append(string(part.get("text"), "text"))
            elif kind not in _PARTS:
                raise ValueError(f"content of type {kind!r}; only text is supported, no images")
        content = "".join(texts)
    return string(content, "content")


def _tool_call(call: Any, where: str) -> Json:
    """Check a call and parse its arguments: templates expect objects."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where} needs a function with a name, found {call!r}")
    given = function.get("arguments", function.get("parameters"))
    arguments = parsed(given, f"{where}: arguments are not valid JSON")
    if arguments is None:
        arguments = {}
    expect(arguments, Mapping, f"{where}: arguments must be an object")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def with_system(messages: list[Any], column: Any, system_prompt: str | None) -> list[Any]:
    """Add the system message of the row or of the config to messages without one; ValueError: the row has two.

    ``messages`` are those of :func:`to_turns`, ``column`` is the value of the row's column ``system``.
    """
    system: str | None = string("" if column is None else column, "system")
    for message in messages:
        if role_of(message) == "system":
            if system and system != message.get("content", message.get("value")):
                raise ValueError(
                    "the column system differs from the system message in the conversation; keep one of them"
                )
            return messages
    system = system or system_prompt
    if system is None:
        return messages
    return [{"role": "system", "content": system}, *messages]


def to_tools(value: Any) -> list[Json] | None:
    """Return the JSON schemas of a conversation's functions, without the nulls that Arrow adds.

    Args:
        value: column ``tools``: a list of objects in OpenAI's form, or of their functions; or this as JSON text; or
            nothing. Anything else is a ValueError.
    """
    if isinstance(value, str):
        value = parsed(value.strip() or "[]", "tools are not valid JSON")
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) and tool for tool in value):
        raise ValueError(f"tools must be a list of objects, as in OpenAI's API, found {value!r}")
    tools = []
    for tool in value:
        framed = {"type": "function", "function": tool} if "name" in tool else tool
        tools.append(schema(framed))
    return tools
