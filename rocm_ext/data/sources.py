"""Read conversations from files or the hub, and recognise their schema."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from rocm_ext.base.errors import UserError, nearest, one_line
from rocm_ext.base.kinds import check, one_of
from rocm_ext.base.types import Json, Row
from rocm_ext.data.dialects import (
    ALPACA,
    asked,
    conversation,
    listed,
    present,
    refuse_kto,
    refuse_pair,
    string,
)
from rocm_ext.data.loading import Origin, open_source, row_at
from rocm_ext.data.messages import REASONING_KEYS, Turn, to_tools, to_turns, with_system
from rocm_ext.data.render import (
    Conversation,
    Labelled,
    PlainRenderer,
    Renderer,
    each,
    end_of,
    render_conversations,
    renderer_of,
    returned,
)
from rocm_ext.data.tokenizer import special_token_lines, special_tokens_in

SCHEMAS = {  # required columns; the others of ALPACA are optional
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
ROW_WEIGHT = "weight"  # column of any schema
# optional columns of every schema; text has only the weight
EXTRAS = ("system", "tools", ROW_WEIGHT)
FIELDS = (*ALPACA, *EXTRAS, *(field for fields in SCHEMAS.values() for field in fields))
_BATCH = 128  # rows that are tokenised at once
_NO_TOKENS: Labelled = ([], [])
NEEDS = ", ".join(f"{name} ({' + '.join(fields)})" for name, fields in SCHEMAS.items())


def sft_dataset(
    tokenizer: Any,
    *,
    source: str,
    split: str = "train",
    data_files: Any = None,
    name: str | None = None,
    column_map: Mapping[str, str] | None = None,
    schema: str = "auto",
    system_prompt: str | None = None,
    assistant_turns: str = "all",
    train_on_input: bool = False,
) -> "ConversationDataset":
    """Open a dataset of conversations; a component for YAML.

    Schemas and the columns they need:

    - messages: ``messages``, a list of ``{role, content}``
    - sharegpt: ``conversations``, a list of ``{from, value}``
    - prompt_completion: ``prompt`` and ``completion``, strings or lists of messages
    - alpaca: ``instruction``, ``output`` and optionally ``input`` and ``history``, earlier pairs of a question and its
      answer. The user's turn is the instruction, a blank line and the input. The model's chat template formats it
    - text: ``text``. Every token is labelled. The model's BOS and EOS are added if they are missing

    Rows of the first four may also have ``system``, the text of the system message, and ``tools``, the JSON schemas
    of functions that the assistant may call (a list, or JSON text). ``chat_template: none`` takes prompt_completion
    with strings, and text.

    A row of any schema may have ``weight``, a number that multiplies its value in the loss; rows without it have 1. A
    row of weight 0 is left out. The flag ``weight`` of a message, 0 or 1, says whether the loss covers it.

    Args:
        tokenizer: a torchtune model tokenizer.
        source: a .jsonl, .ndjson, .json, .parquet, .csv or .tsv file or a glob of them, also as .gz; a folder that
            ``save_to_disk`` wrote; or any path that ``datasets.load_dataset`` takes: a folder, a hub name, or a loader
            (``json``) with ``data_files``.
        split: as in `datasets`, including ``train[:10%]``; a file has one split, ``train``.
        data_files, name: passed on to `datasets`; ``name`` is the configuration of a hub dataset.
        column_map: our column -> yours, ``{prompt: question, completion: answer}``.
        schema: one of the above, or ``auto``, which chooses the matching schema row by row.
        system_prompt: added to conversations without a system message. With None, the chat template may add a
            default one, as Qwen 2.5's does.
        assistant_turns: ``all``, or ``last`` to train only on a conversation's last assistant turn. Templates that cut
            the reasoning from earlier turns, such as Qwen 3's, need it.
        train_on_input: whether to label every token instead of only the assistant's.

    Returns:
        A dataset that tokenises rows on access, where a malformed row raises a ``UserError``.

    Raises:
        UserError: the source cannot be read, or an argument does not match it.
    """
    if schema not in ("auto", *SCHEMAS):
        raise UserError(
            f"schema {schema!r} is unknown{nearest(schema, ['auto', *SCHEMAS])}; schemas: {NEEDS}"
        )
    check({"assistant_turns": assistant_turns}, {"assistant_turns": one_of("all", "last")})
    rows, origin, columns = open_source(source, split, data_files, name, column_map, FIELDS)
    return ConversationDataset(
        tokenizer=tokenizer,
        rows=rows,
        origin=origin,
        column_map=columns,
        schema=schema,
        system_prompt=system_prompt,
        last_turn=assistant_turns == "last",
        train_on_input=train_on_input,
        source=source,
    )


def weight_in(fields: Row) -> Json:
    """Return ``{"weight": …}`` for an item of a dataset; {} if the row has no weight."""
    return {ROW_WEIGHT: fields[ROW_WEIGHT]} if ROW_WEIGHT in fields else {}


class ReadRow(NamedTuple):
    """A row that is checked, but not tokenised.

    Attributes:
        fields: its values under our column names.
        conversations: what to tokenise; none for a text without turns. None instead of a conversation is an empty
            answer, which has no tokens.
        turns: its turns, which :meth:`SourceDataset.warnings` may be about.
    """

    fields: Row
    conversations: list[Conversation | None]
    turns: Sequence[Turn]


@dataclass(eq=False, kw_only=True)
class SourceDataset(Dataset, ABC):
    """Rows of a source that are tokenised on access.

    Attributes:
        rows: the raw rows.
        origin: function from a row's index to its origin: ``file:line`` in JSON lines, else the index, from 0.
        tokenizer, column_map, system_prompt, source: see :func:`sft_dataset`.
    """

    tokenizer: Any
    rows: Sequence[Mapping]
    origin: Origin
    column_map: dict[str, str]
    system_prompt: str | None
    source: str
    _seen: set[str] = field(default_factory=set)  # columns of the rows read so far
    _used: set[str] = field(default_factory=set)  # columns that a row has used
    # keys of messages that the template does not read
    _unread: set[str] = field(default_factory=set)
    _reserved: dict[int, str] = field(default_factory=dict)  # row -> a special token in its text
    # rows that close at once the reasoning that the prompt opens
    _unreasoned: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        (item,) = self.items([index])
        return returned(item)

    def conversation(self, index: int) -> Conversation | None:
        """Return a row's conversation, of a pair the chosen one; None for a text without turns.

        Raises:
            UserError, ValueError: the row is malformed, or its answer is empty.
        """
        row = self._read_row(index)
        if not row.conversations:
            return None
        conversation = row.conversations[0]
        if conversation is None:
            raise UserError(f"{self.origin(index)}: the answer is empty")
        return conversation

    def items(self, indices: Sequence[int]) -> Iterator[Json | Exception]:
        """Tokenise rows; yield an exception instead of a malformed row."""
        for start in range(0, len(indices), _BATCH):
            batch = indices[start : start + _BATCH]
            rows = each(self._read_row, batch)
            items = each(self._item, batch, rows, self._rendered(rows))
            for index, item in zip(batch, items, strict=True):
                # ValueError: the tokenizer cannot encode the text
                wrong = isinstance(item, UserError | ValueError)
                yield UserError(f"{self.origin(index)}: {one_line(item)}") if wrong else item

    def _rendered(self, rows: Sequence[ReadRow | Exception]) -> list[list[Labelled | Exception]]:
        """Render the conversations of all rows at once; return the results by row."""
        by_row = [row.conversations if isinstance(row, ReadRow) else [] for row in rows]
        conversations = [conversation for part in by_row for conversation in part if conversation]
        rendered = iter(render_conversations(self.tokenizer, conversations))
        results = []
        for part in by_row:
            answers = [next(rendered) if conversation else _NO_TOKENS for conversation in part]
            results.append(answers)
        return results

    @abstractmethod
    def _read_row(self, index: int) -> ReadRow:
        """Read and check row ``index``."""

    @abstractmethod
    def _item(self, index: int, row: ReadRow, rendered: Sequence[Labelled | Exception]) -> Row:
        """Return the item of a row from its conversations' tokens and labels, or raise the exception among them."""

    def warnings(self) -> list[str]:
        """Return warnings about the rows read so far, in one line each."""
        lines = []
        unused = self._seen - self._used
        if unused:
            lines.append(f"{self.source}: the columns {', '.join(sorted(unused))} are not used")
        if self._unread:
            keys = ", ".join(sorted(self._unread))
            lines.append(
                f"{self.source}: {keys} of the messages are not used, because the chat template lacks them"
            )
        if self._unreasoned:
            lines.append(self._about_unreasoned())
        reserved = []
        for index, token in sorted(self._reserved.items()):
            reserved.append((token, self.origin(index)))
        lines += special_token_lines(f"rows of {self.source}", len(self), reserved)
        return lines

    def _about_unreasoned(self) -> str:
        """Return the warning about rows without reasoning where the prompt opens it."""
        template: Any = self._renderer.template
        switch = ""
        if template.switches_reasoning:
            switch = ", or set chat_template_args: {enable_thinking: False}"
        return (
            f"{len(self._unreasoned):,} of {len(self):,} rows of {self.source} have no reasoning, first "
            f"{self.origin(min(self._unreasoned))}, and the prompt of {template.origin} opens it with <think>: they "
            f"teach the model to close it at once; give their messages reasoning_content{switch}"
        )

    def _mapped(self, index: int) -> tuple[Row, Json]:
        """Return a row, and its values under our column names."""
        row = row_at(self.rows, index)
        values = present(row)
        self._seen.update(values)
        fields = {key: value for key, value in values.items() if key not in self.column_map}
        for ours, yours in self.column_map.items():
            if yours in values:
                fields[ours] = values[yours]
        return row, fields

    def _use(self, columns: Iterable[str]) -> None:
        """Note used columns, given by our names; ``tools`` counts only if the template reads it."""
        for ours in columns:
            if ours != "tools" or ours in self._names_read:
                self._used.add(self.column_map.get(ours, ours))

    def _note(self, index: int, turns: Sequence[Turn]) -> None:
        """Note what :meth:`warnings` says of a row: unread keys, special tokens in its texts, missing reasoning."""
        reasons = all(turn.masked or turn.reasons for turn in turns)
        if self._renderer.opens_reasoning and not reasons:
            self._unreasoned.add(index)
        for turn in turns:
            self._unread.update(turn.more.keys() - self._names_read)
        special = self._special_token(turn.content for turn in turns)
        if special:
            self._reserved[index] = special

    @cached_property
    def _renderer(self) -> Renderer:
        return renderer_of(self.tokenizer)

    @cached_property
    def _names_read(self) -> frozenset[str]:
        """Keys of messages that the template reads; all names of the reasoning if it reads one."""
        names = {"tool_call_id"}
        if self._renderer.template is not None:
            names |= self._renderer.template.names
        if not names.isdisjoint(REASONING_KEYS):
            names |= set(REASONING_KEYS)
        return frozenset(names)

    @cached_property
    def _special_token(self) -> Callable[[Iterable[str]], str | None]:
        return special_tokens_in(self.tokenizer)


@dataclass(eq=False, kw_only=True)
class ConversationDataset(SourceDataset):
    """Conversations that are tokenised on access: ``{"tokens": list[int], "labels": list[int]}``.

    Attributes:
        schema, train_on_input: see :func:`sft_dataset`.
        last_turn: whether to train only on a conversation's last assistant turn.
    """

    schema: str
    last_turn: bool
    train_on_input: bool

    def _read_row(self, index: int) -> ReadRow:
        schema, fields = self._fields(index)
        if schema == "text":
            return ReadRow(fields, [], [])
        tools = to_tools(fields.get("tools"))
        messages = self._messages(schema, fields, tools)
        self._refuse_turns_without_template(schema, fields)
        turns = to_turns(messages)
        if turns and turns[-1].role != "assistant":
            refuse_pair(fields)
        conversation = Conversation(turns, tools, self.train_on_input, self.last_turn)
        return ReadRow(fields, [conversation], turns)

    def _item(self, index: int, row: ReadRow, rendered: Sequence[Labelled | Exception]) -> Row:
        if row.conversations:
            tokens, labels = returned(rendered[0])
            self._note(index, row.turns)
        else:
            tokens = self._tokens_of_text(row.fields["text"])
            labels = list(tokens)
        return {"tokens": tokens, "labels": labels, **weight_in(row.fields)}

    def _tokens_of_text(self, value: Any) -> list[int]:
        text = string(value, "text")
        if not text:
            raise ValueError("text is empty")
        tokens = self.tokenizer.encode(text, add_bos=True, add_eos=False)
        end = getattr(self.tokenizer, "end_of_text", self.tokenizer.eos_id)
        return [*tokens, *end_of(tokens, self.tokenizer, end)]

    def _refuse_turns_without_template(self, schema: str, fields: Row) -> None:
        """Raise a ValueError if there is no chat template, and the row is not a prompt and a completion in strings."""
        if not isinstance(self._renderer, PlainRenderer):
            return
        columns = SCHEMAS[schema]
        has_messages = any(isinstance(fields[column], list) for column in columns)
        if schema == "prompt_completion" and not has_messages:
            return
        found = " and ".join(f"{column} ({type(fields[column]).__name__})" for column in columns)
        raise ValueError(
            f"chat_template none trains on prompt and completion, or text, as strings, found {found}; convert the "
            "rows, or set chat_template to a template's file"
        )

    def _fields(self, index: int) -> tuple[str, Json]:
        """Return the matching schema of a row, and its values under our column names."""
        row, fields = self._mapped(index)
        fits = [name for name in self._schemas if fields.keys() >= set(SCHEMAS[name])]
        mapped = [name for name in fits if self.column_map.keys() & set(SCHEMAS[name])]
        if len(fits) > 1 and mapped:
            fits = mapped
        if len(fits) != 1:
            raise ValueError(self._misfit(row, fields, fits))
        (schema,) = fits
        if schema == "text":
            self._use(["text", ROW_WEIGHT])
            return schema, fields
        refuse_kto(fields)
        self._use([*SCHEMAS[schema], *EXTRAS])
        if schema == "alpaca":
            self._use(ALPACA)
        return schema, fields

    @property
    def _schemas(self) -> list[str]:
        return list(SCHEMAS) if self.schema == "auto" else [self.schema]

    def _misfit(self, row: Row, fields: Row, fits: Sequence[str]) -> str:
        """Say why a row has the columns of several schemas, or of none."""
        columns = f"the columns {list(row)}"
        if fits:
            return f"{columns} fit {' and '.join(fits)}: set schema to one of them"
        refuse_pair(fields)
        known = set(getattr(self.rows, "column_names", row))
        for name in self._schemas:
            needed = [self.column_map.get(ours, ours) for ours in SCHEMAS[name]]
            if known.issuperset(needed):
                nulls = [column for column in needed if row.get(column) is None]
                return f"{' and '.join(nulls)} is null"
        for name, needs in SCHEMAS.items():
            if fields.keys() >= set(needs):
                return f"{columns} fit schema {name}, not {self.schema}: correct dataset.schema"
        what = "any schema" if self.schema == "auto" else f"schema {self.schema}"
        return f"{columns} do not fit {what}; use column_map, {{ours: yours}}. Known: {NEEDS}"

    def _messages(self, schema: str, fields: Row, tools: list[Json] | None) -> list[Any]:
        """Return the messages of a row, with the system message of the row or of the config."""
        if schema == "prompt_completion":
            prompt = _said_or_listed("user", "prompt", fields)
            completion = _said_or_listed("assistant", "completion", fields)
            messages = prompt + completion
        elif schema == "alpaca":
            messages = [*asked(fields), _said("assistant", "output", fields)]
        else:
            (column,) = SCHEMAS[schema]
            messages = listed(fields[column], column)
        return with_system(conversation(messages, tools), fields.get("system"), self.system_prompt)


def _said(role: str, column: str, fields: Row) -> Json:
    """Return the message in a column with text."""
    return {"role": role, "content": string(fields[column], column)}


def _said_or_listed(role: str, column: str, fields: Row) -> list[Any]:
    """Return the messages in a column with text or with messages."""
    value = fields[column]
    return value if isinstance(value, list) else [_said(role, column, fields)]
