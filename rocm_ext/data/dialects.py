"""Roles, flags and columns of other trainers' data, and their conversion to ours, without torch."""

import json
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

from rocm_ext.base.types import Json, Message, Row

# LLaMA-Factory, ms-swift: the text is a call, or a list of calls, in JSON
CALLS = ("function_call", "tool_call")
ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
ROLES |= {
    "human": "user",
    "gpt": "assistant",
    "developer": "system",
    **dict.fromkeys(CALLS, "assistant"),
}
ROLES |= dict.fromkeys(("function", "ipython", "observation", "tool_response"), "tool")
FLAGS = {  # 0 or false keeps a message out of the loss -> whether the author's trainer reads it in all roles
    "weight": False,  # OpenAI, mistral-finetune
    "loss": False,  # ms-swift
    "step_loss_mask": False,  # slime
    "loss_mask": True,
    "loss_weight": True,  # LLaMA-Factory
    "train": True,  # axolotl
    "training": True,
    "trainable": True,  # Tinker
}
DETAILS = ("train_detail", "training_detail")  # axolotl: parts of a message
# a pair's answers
PAIRED = ("chosen", "rejected", "rejected_response", "rejected_messages", "preferred_output")
# TRL and ms-swift, LLaMA-Factory, logs of chats: whether an answer is good
KTO = ("label", "kto_tag", "thumbs")
_WORDS = {"true": True, "up": True, "thumbs_up": True, "good": True, "👍": True}
_WORDS |= {"false": False, "down": False, "thumbs_down": False, "bad": False, "👎": False}
# In rows of SFT, a number may be the label of a class.
_GOOD = _WORDS | {"1": True, "1.0": True, "0": False, "0.0": False, "-1": False, "-1.0": False}
_PREFERENCES = "recipe: dpo_rocm, dataset._component_: rocm_ext.data.preference_dataset"
ALPACA = ("instruction", "input", "history")


def role_of(message: Any) -> str | None:
    """Return our name for a message's role; None if it is missing or unknown."""
    role = message.get("role", message.get("from")) if isinstance(message, Mapping) else None
    return ROLES.get(role) if isinstance(role, str) else None


def masked(message: Row, role: str) -> bool:
    """Return whether the loss excludes a message, by role and :data:`FLAGS`; ValueError: the flags are wrong."""
    for detail in DETAILS:
        if message.get(detail) is not None:
            raise ValueError(
                f"{detail} trains on parts of a message, which is not supported; remove it"
            )
    flags = {key: message[key] for key in FLAGS if message.get(key) is not None}
    for key, value in flags.items():
        if value not in (0, 1):
            raise ValueError(f"{key} must be 0 or 1, found {value!r}")
        if value and FLAGS[key] and role != "assistant":
            raise ValueError(
                f"{key} is {value!r}, but the loss can only cover the assistant's turns"
            )
    trained = set(map(bool, flags.values()))
    if len(trained) > 1:
        raise ValueError(f"{' and '.join(flags)} contradict each other")
    return role != "assistant" or False in trained


def parsed(value: Any, otherwise: str) -> Any:
    """Parse a text as JSON; return any other value as it is. ValueError, ``otherwise``: the text is not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{otherwise}: {error}") from error


def called(text: Any) -> list[Json]:
    """Return the calls in an assistant's turn of :data:`CALLS`, in OpenAI's form."""
    calls = parsed(text, "the call is not valid JSON")
    if not isinstance(calls, list):
        calls = [calls]
    return [{"type": "function", "function": call} for call in calls]


def refuse_kto(fields: Row) -> None:
    """Raise a ValueError for a row that says whether its only answer is good."""
    for label in KTO:
        if str(fields.get(label)).lower() in _WORDS:
            raise ValueError(
                f"{label} is {fields[label]}: training would also teach the bad answers; for KTO set {_PREFERENCES} "
                "and loss: {_component_: rocm_ext.losses.UnpairedPreference}, or keep the good ones and remove "
                f"{label}"
            )


def refuse_pair(fields: Row) -> None:
    """Raise a ValueError for a row with the answers of a pair."""
    answers = [key for key in PAIRED if key in fields]
    if answers:
        raise ValueError(
            f"the row is a pair ({', '.join(answers)}): for DPO set {_PREFERENCES}, or map the better answer with "
            "column_map to train on it alone"
        )


def listed(value: Any, what: str) -> list[Any]:
    """Return a list as it is, or parse it from JSON text; ValueError: it is neither."""
    rule = f"{what} must be a list of messages"
    return expect(parsed(value, f"{rule}, found a text that is not valid JSON"), list, rule)


def asked(fields: Row) -> list[Message]:
    """Return the messages before the answer in a row with columns of :data:`ALPACA`."""
    text = string(fields["instruction"], "instruction")
    if fields.get("input"):
        text += "\n\n" + string(fields["input"], "input")
    history = listed(fields.get("history") or [], "history")
    messages = []
    for exchange in history:
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise ValueError(
                f"history must be a list of pairs, a question and its answer, found {history!r}"
            )
        question, answer = exchange
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": text})
    return messages


def pair(fields: Row, columns: Collection[str]) -> Json:
    """Rename a pair's columns to TRL's ``prompt``, ``chosen`` and ``rejected``.

    ``fields`` has no nulls; ``columns`` are the names of all columns of the data set.
    """
    row = dict(fields)
    if "preferred_output" in row and isinstance(row.get("input"), Mapping):
        return _openai_pair(row)
    talk = _talk_of(row)
    chosen = row.get("chosen")
    has_other = "rejected_response" in columns or "rejected_messages" in columns
    if talk and chosen is None and has_other:
        return _swift_pair(row, talk)
    # a conversation in `chosen` has its prompt already
    has_prompt = isinstance(chosen, list) and chosen and role_of(chosen[0]) != "assistant"
    if "prompt" in row or has_prompt:
        return row
    if talk:
        row["prompt"] = listed(row.pop(talk), talk)
    elif "instruction" in row:
        row["prompt"] = asked(row)
        _drop(row, ALPACA)
    return row


def _openai_pair(row: Json) -> Json:
    given = row.pop("input")
    row["chosen"] = row.pop("preferred_output")
    row["rejected"] = row.pop("non_preferred_output", [])
    row["prompt"] = given.get("messages")
    row["tools"] = given.get("tools")
    return present(row)


def _swift_pair(row: Json, talk: str) -> Json:
    """Rename the columns of ms-swift: a conversation, and another answer to it."""
    row["chosen"] = listed(row.pop(talk), talk)
    answer = row.pop("rejected_response", "")
    answers = [{"role": "assistant", "content": answer}]
    if not isinstance(answer, str):
        answers = conversation(answer)
    rejected = row.pop("rejected_messages", None)
    row["rejected"] = rejected or [*row["chosen"][:-1], *answers]
    return row


def _talk_of(row: Row) -> str | None:
    """Return the column with the row's conversation."""
    for column in ("messages", "conversations"):
        if column in row:
            return column
    return None


def _drop(row: Json, columns: Collection[str]) -> None:
    for column in columns:
        row.pop(column, None)


def single(fields: Row) -> Json:
    """Rename the columns of a row with one answer to TRL's ``prompt``, ``completion`` and ``label``, a boolean.

    ``fields`` has no nulls. Without ``prompt``, ``completion`` is the conversation.
    """
    labels = [key for key in KTO if key in fields] or KTO
    said = fields.get(labels[0])
    label = _GOOD.get(str(said).lower())
    if label is None:
        raise ValueError(f"{labels[0]} is {said!r}; expected true, the answer is good, or false")
    row = dict(fields)
    _drop(row, KTO)
    talk = _talk_of(row)
    if "completion" not in row:
        if talk:
            row["completion"] = listed(row.pop(talk), talk)
        elif "instruction" in row and "output" in row:
            row["prompt"] = asked(row)
            row["completion"] = row.pop("output")
            _drop(row, ALPACA)
        else:
            raise ValueError(
                f"the columns {list(fields)} have a label, but lack completion, messages or output"
            )
    row["label"] = label
    return row


def conversation(value: Any, tools: list[Json] | None = None) -> Any:
    """Return a row's messages as a list, without the nulls that Arrow fills gaps with; text as it is.

    Arrow gives every object the keys of all rows' objects, and so does JSON written from its tables. A null argument of
    a call stays if the schema in ``tools`` allows it, or if the arguments are JSON text.
    """
    if not isinstance(value, list | Mapping):
        return value
    schemas = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, Mapping):
            schemas[str(function.get("name"))] = function.get("parameters")
    messages = value if isinstance(value, list) else [value]
    return [_message(message, schemas) for message in messages]


def _message(message: Any, schemas: Json) -> Any:
    message = present(message)
    if not isinstance(message, dict):
        return message
    if "function_call" in message:  # OpenAI's, before tools
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_call(call, schemas) for call in message["tool_calls"]]
    return message


def _call(call: Any, schemas: Json) -> Any:
    call = present(call)
    if not isinstance(call, dict):
        return call
    if "function" in call:
        call["function"] = _call(call["function"], schemas)
    elif "arguments" in call:
        parameters = schemas.get(str(call.get("name")))
        call["arguments"] = _arguments(call["arguments"], parameters)
    return call


def present(value: Any) -> Any:
    """Return an object without its nulls, which Arrow fills gaps with; any other value as it is."""
    if not isinstance(value, Mapping):
        return value
    return {key: part for key, part in value.items() if part is not None}


def _arguments(value: Any, schema: Any) -> Any:
    """Remove nulls from a call's arguments, unless the schema allows them."""
    if not isinstance(schema, Mapping):
        schema = {}
    if isinstance(value, list):
        return [_arguments(part, schema.get("items")) for part in value]
    if not isinstance(value, Mapping):
        return value
    known = schema.get("properties")
    if not isinstance(known, Mapping):
        known = {}
    arguments = {}
    for name, part in value.items():
        if part is not None or _nullable(known.get(name)):
            arguments[name] = _arguments(part, known.get(name))
    return arguments


def schema(value: Any) -> Any:
    """Remove Arrow's nulls from a JSON schema; the default of a nullable value may be null."""
    if isinstance(value, list):
        return [schema(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    may_be_null = ("default", "const") if _nullable(value) else ()
    parts = {}
    for key, part in value.items():
        if part is not None or key in may_be_null:
            parts[key] = schema(part)
    return parts


def _nullable(schema: Any) -> bool:
    """Return whether a JSON schema allows null."""
    if not isinstance(schema, Mapping):
        return False
    kind = schema.get("type")
    if kind == "null" or (isinstance(kind, list) and "null" in kind):
        return True
    if schema.get("nullable") is True or None in (schema.get("enum") or ()):
        return True
    choices = (schema.get(key) or () for key in ("anyOf", "oneOf"))
    return any(map(_nullable, chain(*choices)))


def string(value: Any, what: str) -> str:
    """Return ``value`` if it is a string, else raise a ValueError that names ``what``."""
    return expect(value, str, f"{what} must be a string")


def expect(value: Any, kind: type | tuple[type, ...], rule: str) -> Any:
    """Return ``value`` if it is an instance of ``kind``, else raise a ValueError with the rule that it breaks."""
    if not isinstance(value, kind):
        raise ValueError(f"{rule}, found {type(value).__name__}")
    return value
