"""Read preferences from files or the hub: pairs of a chosen and a rejected answer, or answers that are good or bad."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rocm_ext.base.types import Json, Row
from rocm_ext.data.dialects import KTO, PAIRED, conversation, expect, pair, role_of, single
from rocm_ext.data.loading import open_source
from rocm_ext.data.messages import REASONING_KEYS, Turn, to_tools, to_turns, with_system
from rocm_ext.data.render import Conversation, Labelled, returned
from rocm_ext.data.rows import SIDE, SIDES
from rocm_ext.data.sources import EXTRAS, ReadRow, SourceDataset, weight_in

FIELDS = ("prompt", *SIDES, "completion", *KTO, *EXTRAS)
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")  # the form of Anthropic's hh-rlhf


def preference_dataset(
    tokenizer: Any,
    *,
    source: str,
    split: str = "train",
    data_files: Any = None,
    name: str | None = None,
    column_map: Mapping[str, str] | None = None,
    system_prompt: str | None = None,
) -> "PreferenceDataset":
    """Open a dataset of preferences; a component for YAML.

    A row has ``chosen`` and ``rejected`` in one of these forms:

    - texts, with ``prompt``: a text, or a list of messages ``{role, content}``
    - lists of messages with ``prompt``: the answers, or conversations that contain the prompt
    - lists of messages without ``prompt``: conversations with the same beginning
    - texts or messages with ``conversations``, ``messages`` or Alpaca's ``instruction``, as in LLaMA-Factory
    - ``messages`` and ``rejected_response`` (ms-swift), or ``preferred_output`` and ``non_preferred_output`` (OpenAI)
    - texts without ``prompt``, written as in Anthropic's hh-rlhf: ``\\n\\nHuman: …\\n\\nAssistant: …``

    The common beginning of both conversations is the prompt. A side's answer is every assistant turn after it; only
    answers have labels. Rows may also have ``system``, ``tools`` and ``weight``, as in
    :func:`rocm_ext.data.sft_dataset`.

    Or a row has one answer and ``label``, ``kto_tag`` or ``thumbs``, for
    :class:`rocm_ext.losses.UnpairedPreference`: true, 1, ``up`` or ``good`` for a good answer; false, 0, -1, ``down``
    or ``bad``. The answer is ``completion`` with ``prompt``, both texts or lists of messages; the assistant turns
    behind the last user's turn of ``messages`` or ``conversations``; or Alpaca's ``output``.

    Args:
        tokenizer, source, split, data_files, name, system_prompt: see :func:`rocm_ext.data.sft_dataset`.
        column_map: our column -> yours, ``{prompt: question, chosen: response_j, rejected: response_k}``.

    Returns:
        A dataset that tokenises rows on access, where a malformed row raises a ``UserError``.

    Raises:
        UserError: the source cannot be read, or an argument does not match it.
    """
    rows, origin, columns = open_source(source, split, data_files, name, column_map, FIELDS)
    return PreferenceDataset(
        tokenizer=tokenizer,
        rows=rows,
        origin=origin,
        column_map=columns,
        system_prompt=system_prompt,
        source=source,
    )


@dataclass(eq=False, kw_only=True)
class PreferenceDataset(SourceDataset):
    """Preferences that are tokenised on access.

    A pair has ``chosen_input_ids``, ``chosen_labels``, ``rejected_input_ids`` and ``rejected_labels``, as in
    torchtune's ``PreferenceDataset``. A single answer has ``tokens``, ``labels`` and ``side``, 1 if it is good and -1
    if it is bad. An empty answer has no tokens and labels.
    """

    def _read_row(self, index: int) -> ReadRow:
        fields = self._fields(index)
        tools = to_tools(fields.get("tools"))
        for key in ("prompt", "completion", *SIDES):
            if key in fields:
                fields[key] = conversation(fields[key], tools)
        if "completion" in fields:
            turns = _turns("completion", fields, self.system_prompt)
            sides = [turns]
            shared = _last(turns, "user", -1) + 1
        else:
            sides, shared = _sides(fields, self.system_prompt)
        conversations = []
        noted = []
        for turns in sides:
            prompt = [turn._replace(masked=True) for turn in turns[:shared]]
            answer = turns[shared:]
            noted += [*prompt, *answer]
            whole = Conversation([*prompt, *answer], tools)
            conversations.append(whole if answer else None)
        return ReadRow(fields, conversations, noted)

    def _item(self, index: int, row: ReadRow, rendered: Sequence[Labelled | Exception]) -> Row:
        sides = [returned(side) for side in rendered]
        self._note(index, row.turns)
        item = {}
        if "completion" in row.fields:
            ((tokens, labels),) = sides
            item = {"tokens": tokens, "labels": labels, SIDE: 1 if row.fields["label"] else -1}
        else:
            for side, (tokens, labels) in zip(SIDES, sides, strict=True):
                item[f"{side}_input_ids"] = tokens
                item[f"{side}_labels"] = labels
        return item | weight_in(row.fields)

    def _fields(self, index: int) -> Json:
        """Return a row under our column names, ``chosen`` and ``rejected``, or ``completion`` and ``label``."""
        row, given = self._mapped(index)
        columns = getattr(self.rows, "column_names", row)
        named = {*columns, *given}
        if not named & {*PAIRED} and named & {*KTO}:
            fields = single(given)
            renamed = given.keys() - fields.keys()
            self._use(["prompt", "completion", *KTO, *EXTRAS, *renamed])
            return fields
        given.pop("completion", None)
        fields = pair(given, columns)
        for side in SIDES:
            if side not in fields and self.column_map.get(side, side) in columns:
                fields[side] = []  # a null is no answer
        missing = [side for side in SIDES if side not in fields]
        if missing:
            what = f"the columns {list(row)} lack {' and '.join(missing)}"
            if len(missing) == 1:
                raise ValueError(f"{what}; use column_map")
            raise ValueError(
                f"{what}, or label (true or false) for single answers; use column_map, or lora_finetune_rocm with "
                "rocm_ext.data.sft_dataset to train on right answers alone"
            )
        renamed = given.keys() - fields.keys()
        self._use(["prompt", *SIDES, *EXTRAS, *renamed])
        return fields


def _sides(fields: Row, system_prompt: str | None) -> tuple[list[list[Turn]], int]:
    """Return the turns of both sides, and the number of turns before the answers, which may be empty."""
    sides = []
    for side in SIDES:
        try:
            sides.append(_turns(side, fields, system_prompt))
        except ValueError as error:
            raise ValueError(f"{side}: {error}") from error
    chosen, rejected = sides
    shortest = min(len(chosen), len(rejected))
    shared = 0
    while shared < shortest and chosen[shared] == rejected[shared]:
        shared += 1
    if shared < shortest:
        for turns in sides:
            role = turns[shared].role
            if role != "assistant":
                raise ValueError(
                    f"the prompts of chosen and rejected differ: message {shared} is of the {role}, and not the same"
                )
    elif len(chosen) == len(rejected):
        # equal sides: show the last answers, so that the pair is counted as equal
        shared = _last(chosen, "assistant", shared)
    return sides, shared


def _last(turns: Sequence[Turn], role: str, default: int) -> int:
    """Return the index of the last turn of a role, or ``default`` without one."""
    for i in reversed(range(len(turns))):
        if turns[i].role == role:
            return i
    return default


def _turns(side: str, fields: Row, system_prompt: str | None) -> list[Turn]:
    """Return the turns of one answer with its prompt."""
    messages = _conversation(side, fields)
    return to_turns(with_system(messages, fields.get("system"), system_prompt))


def _conversation(side: str, fields: Row) -> list[Any]:
    """Return the messages of one side with its prompt; an empty answer is left out."""
    value = fields[side]
    prompt = fields.get("prompt")
    if prompt is None and isinstance(value, str):
        return _dialogue(value)
    asked = _messages_of(prompt)
    if isinstance(value, str):
        return [*asked, {"role": "assistant", "content": value}] if value.strip() else asked
    expect(value, list, "it must be a text or a list of messages")
    messages = value[:-1] if value and _is_empty_answer(value[-1]) else value
    if prompt is None:
        return messages
    if not messages or role_of(messages[0]) == "assistant":
        return [*asked, *messages]
    if not _contains(messages, prompt):
        raise ValueError(
            "the conversation does not contain the row's prompt; leave one of them out with column_map"
        )
    return messages


def _messages_of(prompt: Any) -> list[Any]:
    """Return a prompt's messages; a text is a user's."""
    if prompt is None:
        return []
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt:
        return prompt
    raise ValueError(f"prompt must be a text or a list of messages, found {prompt!r}")


def _dialogue(text: str) -> list[dict[str, str]]:
    """Return the messages of a text of hh-rlhf."""
    before, *parts = _SPEAKER.split(text)
    if before.strip() or not parts:
        raise ValueError(
            "it is a text, so the row needs a prompt as well; or write both as \\n\\nHuman: …\\n\\nAssistant: …"
        )
    messages = []
    for speaker, content in zip(parts[::2], parts[1::2], strict=True):
        role = "user" if speaker == "Human" else "assistant"
        messages.append({"role": role, "content": content.strip()})
    return messages[:-1] if _is_empty_answer(messages[-1]) else messages


def _contains(messages: list[Any], prompt: Any) -> bool:
    turns = to_turns(messages)
    if isinstance(prompt, str):
        questions = [turn.content.strip() for turn in turns if turn.role == "user"]
        return prompt.strip() in questions
    return turns[: len(prompt)] == to_turns(prompt)


def _is_empty_answer(message: Any) -> bool:
    if role_of(message) != "assistant":
        return False
    if any(message.get(key) for key in ("tool_calls", "function_call", *REASONING_KEYS)):
        return False
    content = message.get("content", message.get("value"))
    return content is None or (isinstance(content, str) and not content.strip())
