"""Prompts to sample answers for, with the columns that a verifier needs."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rocm_ext.base.errors import UserError, one_line, require_known
from rocm_ext.base.kinds import NULL, Kind, check, integer, one_of
from rocm_ext.base.log import log
from rocm_ext.base.types import Json, Message, Row
from rocm_ext.data.dialects import conversation, listed, present
from rocm_ext.data.formats import FORMATS
from rocm_ext.data.loading import about_bad_rows, open_source, row_at
from rocm_ext.data.messages import Turn, to_tools, to_turns, with_system

_KINDS = {
    "limit": integer(1) | NULL,
    "bad_rows": one_of("error", "drop"),
    "system_prompt": Kind(lambda value: isinstance(value, str), ("a string",)),
}


@dataclass(frozen=True)
class Prompt:
    """A conversation up to the assistant's answer.

    Attributes:
        id: the row's ``id`` or ``task_id`` as text, else the first 16 hex digits of ``key``.
        messages: messages ``{role, content}``, with ``tool_calls`` if the assistant calls tools; an optional system
            message first, the turn of a user or a tool last.
        row: the row's columns under our names, without nulls, for the verifier. ``prompt`` is the text of the last
            message as the model reads it.
        origin: ``file:line`` in JSON lines, else the source and the row's index from 0.
        tools: JSON schemas of the functions that the assistant may call.
        set: name of its set in ``eval_prompts``, which then begins the id: ``SET/ID``.
    """

    id: str
    messages: tuple[Message, ...]
    row: Row
    origin: str
    tools: tuple[Json, ...] = ()
    set: str = ""

    @property
    def own_id(self) -> str:
        """The id without the name of the set, the same as in a run with this set alone."""
        return self.id[len(self.set) + 1 :] if self.set else self.id

    @property
    def key(self) -> str:
        """SHA-256 of messages and tools, in hex; prompts with the same key are identical for the model."""
        content = (self.messages, self.tools) if self.tools else self.messages
        return hashlib.sha256(_canonical(content).encode()).hexdigest()


class Prompts(list[Prompt]):
    """Prompts of a source.

    Args:
        prompts: the prompts.
        read: number of rows that were read.
        dropped: origins of dropped rows, by reason: ``bad_rows``, ``dropped_by_format`` or ``dropped_repeated``.
    """

    def __init__(
        self, prompts: Iterable[Prompt], read: int, dropped: Mapping[str, list[str]]
    ) -> None:
        super().__init__(prompts)
        self.read, self.dropped = read, dropped


def prompt_dataset(
    *,
    source: str,
    split: str = "train",
    data_files: Any = None,
    name: str | None = None,
    format: str | None = None,
    column_map: Mapping[str, str] | None = None,
    system_prompt: str = "",
    limit: int | None = None,
    bad_rows: str = "error",
) -> Prompts:
    """Read prompts; a component for YAML: ``_component_: rocm_ext.data.prompt_dataset``.

    A row has ``prompt``, the text of one user's turn, or ``messages``, a conversation that ends with the turn of a
    user or a tool. It may have ``system``, the text of the system message, and ``tools``, the JSON schemas of
    functions that the assistant may call. It also has the columns of its verifier (``answer``, ``tests``, ...).
    A row may have both ``prompt`` and ``messages`` if they agree; ``messages`` may then include the assistant's
    answer. If they differ, ``column_map`` must name one of them.

    Formats convert the columns of well-known datasets to ours; see :mod:`rocm_ext.data.formats`. A format may leave
    out rows, such as rows without tests; a warning counts them. Of several identical rows it keeps one.

    Args:
        source, split, data_files, name: see :func:`rocm_ext.data.sft_dataset`.
        format: name of a format; without it, the columns have our names already, or get them from ``column_map``.
        column_map: our column -> yours, ``{prompt: problem}``; with a format, the format's column -> yours.
        system_prompt: added to conversations without a system message; empty adds nothing.
        limit: maximum number of rows to read.
        bad_rows: policy for malformed rows: ``error``, which names all of them, or ``drop``.

    Returns:
        The prompts, in the order of their rows.

    Raises:
        UserError: the source cannot be read, a row is malformed, two rows share an id, or two rows have the same
            conversation but different columns. The message has the rows' origins.
    """
    if format is not None:
        require_known("format", format, FORMATS)
    check({"limit": limit, "bad_rows": bad_rows, "system_prompt": system_prompt}, _KINDS)
    rows, origin, mapping = open_source(source, split, data_files, name, column_map)
    prompts = []
    bad = []
    unused = []
    count = len(rows) if limit is None else min(limit, len(rows))
    for index in range(count):
        try:
            row = row_at(rows, index)
            prompt = _prompt(row, mapping, format, system_prompt, origin(index))
            if prompt is None:
                unused.append(origin(index))
            else:
                prompts.append(prompt)
        except ValueError as error:
            bad.append(f"{origin(index)}: {error}")
    all_bad = len(bad) == count
    if bad and (bad_rows == "error" or all_bad):
        cure = "" if all_bad else ", or set bad_rows: drop to leave it out"
        raise UserError(about_bad_rows(bad, count, f"correct what is bad{cure}"))
    if bad:
        log.warning("%s", about_bad_rows(bad, count, "left out (bad_rows: drop)"))
    if unused:
        log.warning("%s: left out %d rows without usable tests", source, len(unused))
    distinct = _distinct(prompts, source)
    kept = {prompt.origin for prompt in distinct}
    dropped = {
        "bad_rows": [message.partition(": ")[0] for message in bad],
        "dropped_by_format": unused,
        "dropped_repeated": [prompt.origin for prompt in prompts if prompt.origin not in kept],
    }
    given = {reason: origins for reason, origins in dropped.items() if origins}
    return Prompts(distinct, count, given)


def check_disjoint(train: Iterable[Prompt], held_out: Sequence[Prompt]) -> None:
    """Raise a UserError if a held-out prompt is among the training prompts.

    Two prompts overlap if all their turns are equal, except for case, white space and the system message. They also
    overlap if their last turns are, and one of them has a single user's turn: this covers examples in front of the
    question. The same short last turn ("go on") after different turns does not count.
    """
    trained = defaultdict(list)
    for prompt in train:
        trained[_turns(prompt)[-1]].append(prompt)
    pairs = []
    for held in held_out:
        last = _turns(held)[-1]
        for prompt in trained.get(last, ()):
            if _is_single(prompt) or _is_single(held) or _turns(prompt) == _turns(held):
                pairs.append((prompt, held))
                break
    if pairs:
        first, held = pairs[0]
        raise UserError(
            f"{len(pairs)} of {len(held_out)} held-out prompts are among the training prompts, first {held.origin} "
            f"(training: {first.origin}); remove them from one of the two sets"
        )


def _turns(prompt: Prompt) -> list[str]:
    """Return the turns without system messages, in lower case, with single spaces."""
    turns = []
    for message in prompt.messages:
        if message["role"] != "system":
            words = message["content"].casefold().split()
            turns.append(" ".join(words))
    return turns


def _is_single(prompt: Prompt) -> bool:
    roles = [message["role"] for message in prompt.messages]
    return roles.count("user") == 1


def _prompt(
    row: Row, mapping: dict[str, str], format: str | None, system: str, origin: str
) -> Prompt | None:
    """Return the row's prompt, or None if the format leaves it out."""
    values = present(row)
    taken = {*mapping, *mapping.values()}
    fields = {key: value for key, value in values.items() if key not in taken}
    for ours, yours in mapping.items():
        if yours in values:
            fields[ours] = values[yours]
    tools = to_tools(fields.get("tools"))
    if format is None:
        asked = dict(fields)
        if "messages" in fields:
            asked["messages"] = conversation(fields["messages"], tools)
        turns = _turns_of(asked, mapping)
    else:
        formatted = FORMATS[format](fields)
        if formatted is None:
            return None
        fields = formatted
        turns = _from_text(fields["prompt"])
    said = [turn.message() for turn in turns]
    messages = with_system(said, fields.get("system"), system or None)
    columns = {**fields, "prompt": messages[-1]["content"]}
    prompt = Prompt("", tuple(messages), columns, origin, tuple(tools or ()))
    return replace(prompt, id=_id(fields) or prompt.key[:16])


def _turns_of(fields: Row, mapping: dict[str, str]) -> list[Turn]:
    """Return the conversation from ``prompt`` or ``messages``; if a row has both, from the one in ``mapping``."""
    columns = [column for column in ("prompt", "messages") if column in fields]
    if len(columns) == 2:
        columns = [column for column in columns if column in mapping] or columns
    if not columns:
        raise ValueError(
            f"the columns {list(fields)} have neither prompt nor messages; map yours with column_map"
        )
    if columns == ["prompt"]:
        return _from_text(fields["prompt"])
    if columns == ["messages"]:
        return _conversation(fields["messages"])
    asked = _from_text(fields["prompt"])
    messages = fields["messages"]
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, Mapping) and last.get("role") == "assistant":
        messages = messages[:-1]
    if _conversation(messages) != asked:
        raise ValueError(
            "prompt and messages differ; set column_map to {prompt: prompt} or {messages: messages}"
        )
    return asked


def _from_text(text: Any) -> list[Turn]:
    if not isinstance(text, str):
        hint = "; a conversation goes in messages" if isinstance(text, list) else ""
        raise ValueError(f"prompt must be text, found {type(text).__name__}{hint}")
    return _encodable([Turn("user", text, masked=True)])


def _conversation(messages: Any) -> list[Turn]:
    """Check a row's messages; the last must be the turn of a user or a tool."""
    turns = to_turns(listed(messages, "a conversation"))
    if not turns:
        raise ValueError("messages is empty; expected a conversation that ends with a user's turn")
    if turns[-1].role not in ("user", "tool"):
        raise ValueError(
            f"messages must end with a user's turn, found the {turns[-1].role}'s; remove it"
        )
    if any(turn.role == "system" for turn in turns[1:]):
        raise ValueError("a system message must be the first of its conversation")
    return _encodable(turns)


def _encodable(turns: list[Turn]) -> list[Turn]:
    """Check that the last turn is not empty and that every turn is valid Unicode; return ``turns``."""
    if not turns[-1].content.strip():
        raise ValueError("prompt is empty")
    try:
        for turn in turns:
            turn.content.encode()
    except UnicodeEncodeError as error:  # JSON can contain half a surrogate pair
        raise ValueError(f"prompt is not valid Unicode: {one_line(error)}") from error
    return turns


def _id(fields: Row) -> str:
    """Return ``id`` or ``task_id`` as text, or "" without either."""
    column = "id" if "id" in fields else "task_id"
    if column not in fields:
        return ""
    value = fields[column]
    names = isinstance(value, int | str) and not isinstance(value, bool)
    if not names or not str(value).strip():
        raise ValueError(f"{column} is {value!r}; expected text or a whole number")
    return str(value)


def _distinct(prompts: list[Prompt], source: str) -> list[Prompt]:
    """Drop repeated rows; a UserError if different rows have the same conversation or the same id."""
    by_key: dict[str, Prompt] = {}
    by_id: dict[str, Prompt] = {}
    for prompt in prompts:
        earlier = by_key.setdefault(prompt.key, prompt)
        if earlier is not prompt:
            _refuse_other_columns(prompt, earlier)
            continue
        earlier = by_id.setdefault(prompt.id, prompt)
        if earlier is not prompt:
            raise UserError(
                f"{prompt.origin} has the id {prompt.id!r} of {earlier.origin}; ids must be unique"
            )
    repeated = len(prompts) - len(by_key)
    if repeated:
        log.warning("%s: dropped %d of %d rows that repeat others", source, repeated, len(prompts))
    return list(by_key.values())


def _refuse_other_columns(prompt: Prompt, earlier: Prompt) -> None:
    """Raise a UserError if two rows with the same conversation differ in a column; NaN equals itself."""
    different = []
    for column in dict.fromkeys([*earlier.row, *prompt.row]):
        if _canonical(earlier.row.get(column)) != _canonical(prompt.row.get(column)):
            different.append(column)
    if different:
        raise UserError(
            f"{prompt.origin} asks the same as {earlier.origin}, but differs in {', '.join(different)}; keep one of "
            "them"
        )


def _canonical(value: Any) -> str:
    """Return the same text for equal values. It is ASCII, so any value can be hashed."""
    return json.dumps(value, sort_keys=True, default=str)
