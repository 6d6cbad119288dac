"""What other trainers call roles, flags of messages and columns, and how such rows become ours, without torch."""

from collections.abc import Mapping
from typing import Any

ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
ROLES |= {"human": "user", "gpt": "assistant", "developer": "system"}
ROLES |= dict.fromkeys(("function", "ipython", "observation", "tool_response"), "tool")
FLAGS = {  # 0 or false keeps a message out of the loss -> whether its author's trainer reads it in all roles
    "weight": False,  # OpenAI, mistral-finetune
    "loss": False,  # ms-swift
    "step_loss_mask": False,  # slime
    "loss_mask": True,
    "loss_weight": True,  # LLaMA-Factory
    "train": True,  # axolotl, as is the next
    "training": True,
    "trainable": True,  # Tinker
}
DETAILS = ("train_detail", "training_detail")  # axolotl: parts of a message


def role_of(message: Any) -> str | None:
    """Return our name for the role of a row's message; None if it has none that is known."""
    role = message.get("role", message.get("from")) if isinstance(message, Mapping) else None
    return ROLES.get(role) if isinstance(role, str) else None


def conversation(value: Any, tools: list[dict[str, Any]] | None) -> Any:
    """Return a row's list of messages without the nulls that Arrow fills gaps with; anything else as it is.

    Arrow gives every object the keys of all rows' objects, and so does JSON that was written from its tables. A null
    argument of a call stays where the function's schema allows it, or where the arguments are JSON text.

    Args:
        value: the messages.
        tools: the row's functions, from :func:`rocm_ext.data.messages.to_tools`.
    """
    if not isinstance(value, list):
        return value
    functions = [tool.get("function", tool) for tool in tools or ()]
    schemas = {str(f.get("name")): f.get("parameters") for f in functions if isinstance(f, Mapping)}
    messages = [_present(message) for message in value]
    for message in messages:
        if isinstance(message, dict) and isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_call(call, schemas) for call in message["tool_calls"]]
    return messages


def _call(call: Any, schemas: Mapping[str, Any]) -> Any:
    call = _present(call)
    if isinstance(call, dict) and "function" in call:
        call["function"] = _call(call["function"], schemas)
    elif isinstance(call, dict) and "arguments" in call:
        call["arguments"] = _arguments(call["arguments"], schemas.get(str(call.get("name"))))
    return call


def _present(value: Any) -> Any:
    return {key: part for key, part in value.items() if part is not None} if isinstance(value, Mapping) else value


def _arguments(value: Any, schema: Any) -> Any:
    """Return arguments of a call without nulls that their schema does not allow."""
    schema = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, list):
        return [_arguments(part, schema.get("items")) for part in value]
    if not isinstance(value, Mapping):
        return value
    known = schema["properties"] if isinstance(schema.get("properties"), Mapping) else {}
    return {k: _arguments(v, known.get(k)) for k, v in value.items() if v is not None or _nullable(known.get(k))}


def schema(value: Any) -> Any:
    """Return a JSON schema without the nulls that Arrow fills gaps with; a nullable one may have a null default."""
    if isinstance(value, list):
        return [schema(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    kept = ("default", "const") if _nullable(value) else ()
    return {key: schema(part) for key, part in value.items() if part is not None or key in kept}


def _nullable(schema: Any) -> bool:
    """Whether a JSON schema says that a value may be null."""
    if not isinstance(schema, Mapping):
        return False
    listed = [*_list(schema.get("type")), *_list(schema.get("enum"))]
    others = [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]
    return schema.get("nullable") is True or "null" in listed or None in listed or any(map(_nullable, others))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def masked(message: Mapping[str, Any], role: str, where: str) -> bool:
    """Return whether the loss excludes a message, by its role and its :data:`FLAGS`.

    Raises:
        ValueError: a flag is neither 0 nor 1, two contradict each other, or one asks for what is not supported.
    """
    if detail := next((key for key in DETAILS if message.get(key) is not None), None):
        raise ValueError(f"{where}: {detail} trains on parts of a message, which is not supported; {detail} must go")
    flags = {key: message[key] for key in FLAGS if message.get(key) is not None}
    for key, value in flags.items():
        if value not in (0, 1):
            raise ValueError(f"{where}: {key} must be 0 or 1, found {value!r}")
        if value and FLAGS[key] and role != "assistant":
            raise ValueError(f"{where}: {key} is {value!r}, but the loss can only cover the assistant's turns")
    if len({bool(value) for value in flags.values()}) > 1:
        raise ValueError(f"{where}: {' and '.join(flags)} contradict each other")
    return role != "assistant" or 0 in flags.values()


def string(value: Any, what: str) -> str:
    """Return ``value`` if it is a string.

    Raises:
        ValueError: it is not; the message calls it ``what``.
    """
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a string, found {type(value).__name__}")
    return value
