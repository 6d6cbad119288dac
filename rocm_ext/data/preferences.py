"""Read preferences from files or the hub: pairs of a chosen and a rejected answer, or answers that are good or bad."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rocm_ext.base.types import Json, Row
from rocm_ext.data.dialects import KTO, PAIRED, conversation, expect, pair, role_of, single
from rocm_ext.data.loading import open_source
from rocm_ext.data.messages import REASONING_KEYS, Turn, to_tools, to_turns, with_system
from rocm_ext.data.render import Steps, render_turns
from rocm_ext.data.rows import SIDE, SIDES
from rocm_ext.data.sources import EXTRAS, SourceDataset, weight_in

FIELDS = ("prompt", *SIDES, "completion", *KTO, *EXTRAS)
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")  # of Anthropic's hh-rlhf


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
        tokenizer=tokenizer, rows=rows, origin=origin, column_map=columns, system_prompt=system_prompt, source=source
    )


@dataclass(eq=False, kw_only=True)
class PreferenceDataset(SourceDataset):
    """Preferences that are tokenised on access.

    A pair has ``chosen_input_ids``, ``chosen_labels``, ``rejected_input_ids`` and ``rejected_labels``, as in
    torchtune's ``PreferenceDataset``. A single answer has ``tokens``, ``labels`` and ``side``, 1 if it is good and -1
    if it is bad. An empty answer has no tokens and labels.
    """

    def _item(self, index: int) -> Steps:
        fields = self._fields(index)
        tools = to_tools(fields.get("tools"))
        keys = {"prompt", "completion", *SIDES} & fields.keys()
        fields |= {key: conversation(fields[key], tools) for key in keys}
        if "completion" in fields:
            sides = [_turns("completion", fields, self.system_prompt)]
            shared = max((i for i, turn in enumerate(sides[0], 1) if turn.role == "user"), default=0)
        else:
            sides, shared = _conversations(fields, self.system_prompt)
        sequences: list[list[int]] = []  # tokens and labels, by side
        noted: list[Turn] = []
        for turns in sides:
            answers = [turn._replace(masked=turn.masked or i < shared) for i, turn in enumerate(turns)]
            noted += answers
            empty = len(turns) == shared
            sequences += ([], []) if empty else (yield from render_turns(self.tokenizer, answers, tools=tools))
        self._note(index, noted)
        if "completion" in fields:
            tokens, labels = sequences
            return {"tokens": tokens, "labels": labels, SIDE: 1 if fields["label"] else -1, **weight_in(fields)}
        names = [f"{side}_{what}" for side in SIDES for what in ("input_ids", "labels")]
        return {**dict(zip(names, sequences, strict=True)), **weight_in(fields)}

    def _fields(self, index: int) -> Json:
        """Return a row under our column names, ``chosen`` and ``rejected``, or ``completion`` and ``label``."""
        row, given = self._mapped(index)
        columns = getattr(self.rows, "column_names", row)
        named = {*columns, *given}
        if not named & {*PAIRED} and named & {*KTO}:
            fields = single(given)
            self._use({"prompt", "completion", *KTO, *EXTRAS, *(given.keys() - fields.keys())})
            return fields
        fields = pair({key: value for key, value in given.items() if key != "completion"}, columns)
        nulls = (side for side in SIDES if side not in fields and self.column_map.get(side, side) in columns)
        fields |= {side: [] for side in nulls}  # no answer
        if missing := [side for side in SIDES if side not in fields]:
            what = f"the columns {list(row)} lack {' and '.join(missing)}"
            if len(missing) == 1:
                raise ValueError(f"{what}; use column_map")
            raise ValueError(
                f"{what}, or label (true or false) for single answers; use column_map, or lora_finetune_rocm with "
                "rocm_ext.data.sft_dataset to train on right answers alone"
            )
        self._use({"prompt", *SIDES, *EXTRAS, *(given.keys() - fields.keys() - {"completion"})})
        return fields


def _conversations(fields: Row, system_prompt: str | None) -> tuple[list[list[Turn]], int]:
    """Return the turns of both sides, and the number of turns before the answers, which may be empty."""
    sides = []
    for side in SIDES:
        try:
            sides.append(_turns(side, fields, system_prompt))
        except ValueError as error:
            raise ValueError(f"{side}: {error}") from error
    chosen, rejected = sides
    shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if shared is None:
        shared = min(map(len, sides))
        if len(chosen) == len(rejected):  # equal sides: show the last answers, so that the pair is counted as equal
            shared = max((i for i, turn in enumerate(chosen) if turn.role == "assistant"), default=shared)
        return sides, shared
    if other := next((turns[shared] for turns in sides if turns[shared].role != "assistant"), None):
        raise ValueError(
            f"the prompts of chosen and rejected differ: message {shared} is of the {other.role}, and not the same"
        )
    return sides, shared


def _turns(side: str, fields: Row, system_prompt: str | None) -> list[Turn]:
    """Return the turns of one answer with its prompt."""
    return to_turns(with_system(_conversation(side, fields), fields.get("system"), system_prompt))


def _conversation(side: str, fields: Row) -> list[Any]:
    """Return the messages of one side with its prompt; an empty answer is left out."""
    value, prompt = fields[side], fields.get("prompt")
    if isinstance(value, str) and prompt is None:
        return _dialogue(value)
    asked = prompt if isinstance(prompt, list) else []
    if isinstance(prompt, str):
        asked = [{"role": "user", "content": prompt}]
    elif prompt is not None and not asked:
        raise ValueError(f"prompt must be a text or a list of messages, found {prompt!r}")
    if isinstance(value, str):
        return [*asked, *([{"role": "assistant", "content": value}] if value.strip() else [])]
    expect(value, list, "it must be a text or a list of messages")
    messages = value[:-1] if value and _is_empty_answer(value[-1]) else value
    if prompt is None:
        return messages
    if not messages or role_of(messages[0]) == "assistant":
        return [*asked, *messages]
    if not _contains(messages, prompt):
        raise ValueError("the conversation does not contain the row's prompt; leave one of them out with column_map")
    return messages


def _dialogue(text: str) -> list[dict[str, str]]:
    """Return the messages of a text of hh-rlhf."""
    before, *parts = _SPEAKER.split(text)
    if before.strip() or not parts:
        raise ValueError(
            "it is a text, so the row needs a prompt as well; or write both as \\n\\nHuman: …\\n\\nAssistant: …"
        )
    texts, roles = zip(parts[::2], parts[1::2], strict=True), {"Human": "user", "Assistant": "assistant"}
    turns = [{"role": roles[speaker], "content": content.strip()} for speaker, content in texts]
    return turns[:-1] if _is_empty_answer(turns[-1]) else turns


def _contains(messages: list[Any], prompt: Any) -> bool:
    if isinstance(prompt, str):
        return prompt.strip() in [turn.content.strip() for turn in to_turns(messages) if turn.role == "user"]
    return to_turns(messages)[: len(prompt)] == to_turns(prompt)


def _is_empty_answer(message: Any) -> bool:
    if role_of(message) != "assistant":
        return False
    content = message.get("content", message.get("value"))
    calls = any(message.get(key) for key in ("tool_calls", "function_call", *REASONING_KEYS))
    return (content is None or (isinstance(content, str) and not content.strip())) and not calls
