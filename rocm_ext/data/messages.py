"""Check the messages of a conversation in a row, without importing torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rocm_ext.errors import UserError

ROLES = {role: role for role in ("system", "user", "assistant", "ipython")}
ROLES |= {"human": "user", "gpt": "assistant", "tool": "ipython"}


class Turn(NamedTuple):
    """One message.

    Attributes:
        role: torchtune's name of the role, a value of :data:`ROLES`.
        content: text of the message.
        masked: whether the loss excludes the whole message.
    """

    role: str
    content: str
    masked: bool


def to_turns(turns: Any) -> list[Turn]:
    """Check a conversation and return its turns.

    Args:
        turns: ``{"role", "content"}`` each, or ShareGPT's ``{"from", "value"}``; roles as in :data:`ROLES`.

    Raises:
        UserError: a message is malformed.
    """
    if not isinstance(turns, (list, tuple)):
        raise UserError(f"a conversation must be a list of messages, found {type(turns).__name__}")
    return [_to_turn(turn, f"message {number}") for number, turn in enumerate(turns)]


def _to_turn(turn: Any, where: str) -> Turn:
    if not isinstance(turn, Mapping):
        raise UserError(f"{where} must be an object with role and content, found {type(turn).__name__}")
    role, weight = turn.get("role", turn.get("from")), turn.get("weight")
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f"{where}: unknown role {role!r}; known: {', '.join(ROLES)}")
    if turn.get("tool_calls"):
        raise UserError(f"{where}: tool_calls are not supported; write the call into content as the model does")
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):  # a list of parts, as in OpenAI's API
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise UserError(f"{where}: content of type {kind!r}; only text is supported, no images")
        content = "".join(string(part.get("text"), f"{where}: text") for part in content)
    content = string(content, f"{where}: content")
    if ROLES[role] == "assistant" and not content.strip():
        raise UserError(f"{where}: the assistant's content is empty")
    if weight not in (None, 0, 1):
        raise UserError(f"{where}: weight must be 0 or 1, found {weight!r}")
    return Turn(ROLES[role], content, masked=ROLES[role] != "assistant" or weight == 0)


def string(value: Any, what: str) -> str:
    """Return ``value`` if it is a string.

    Raises:
        UserError: it is not; the message calls it ``what``.
    """
    if not isinstance(value, str):
        raise UserError(f"{what} must be a string, found {type(value).__name__}")
    return value
