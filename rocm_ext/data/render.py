"""Messages -> tokens and labels, by the tokenizer's own rendering.

These are the only places where messages become tokens, so that a row that is trained on starts with
exactly what the sampler would be given, and is labelled right behind it.

Labels are torchtune's: ``labels[t]`` is the token at ``t`` itself, or -100 where it bears no loss.
"""

import copy
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from torchtune.data import Message

from rocm_ext.errors import UserError

IGNORE = -100
ROLES = {role: role for role in ("system", "user", "assistant", "ipython")}
ROLES |= {"human": "user", "gpt": "assistant", "tool": "ipython"}


def render_prompt(tokenizer: Any, messages: Sequence[Mapping]) -> list[int]:
    """The token ids ``[s]`` to sample from: the conversation so far and the header of the assistant's turn.

    Text that looks like a special token (``<|im_end|>``) becomes that token with torchtune's Qwen tokenizers,
    as in transformers, and stays text with the Llama 3 one. ``tokenizer.max_seq_len`` is not applied.

    Args:
        tokenizer: a torchtune model tokenizer.
        messages: ``{"role", "content"}`` each, or ShareGPT's ``{"from", "value"}``.

    Raises:
        UserError: a message is malformed.
    """
    conversation = [*to_messages(messages), Message(role="assistant", content="")]
    tokens, mask = _render(tokenizer, conversation, unmasked=[len(conversation) - 1])
    start = mask.index(False) if False in mask else len(mask)
    return tokens[: start + _header_length(tokenizer)]


def render_conversation(
    tokenizer: Any, messages: Sequence[Mapping], train_on_input: bool = False
) -> tuple[list[int], list[int]]:
    """Tokens ``[s]`` and labels ``[s]`` of a conversation; arguments as in :func:`render_prompt`.

    Every assistant turn is labelled, but for those with ``weight: 0``: its content and end-of-turn token, not
    its header, which a generation prompt contains. Turns behind the last labelled one bear no loss and are
    left out. ``train_on_input`` labels every token instead.

    Raises:
        UserError: a message is malformed, or there is no assistant turn to train on.
    """
    conversation = to_messages(messages)
    trained = [i for i, message in enumerate(conversation) if not message.masked]
    if not trained:
        raise UserError("no assistant turn to train on")
    conversation = conversation[: trained[-1] + 1]
    if train_on_input:
        tokens, _ = _render(tokenizer, conversation, unmasked=trained)
        return tokens, list(tokens)

    labels: list[int] = []
    header, stops = _header_length(tokenizer), getattr(tokenizer, "stop_tokens", ())
    # A run of unmasked tokens is one turn, unless assistant turns follow each other: then unmask every other.
    adjacent = any(b - a == 1 for a, b in pairwise(trained))
    for group in (trained[::2], trained[1::2]) if adjacent else (trained,):
        tokens, mask = _render(tokenizer, conversation, unmasked=group)
        labels = labels or [IGNORE] * len(tokens)
        for masked, run in groupby(range(len(mask)), key=mask.__getitem__):
            own = [] if masked else list(run)[header:]
            # What the template puts behind the end of turn ("\n") is not the model's own.
            end = max((n for n, i in enumerate(own, 1) if tokens[i] in stops), default=len(own))
            for i in own[:end]:
                labels[i] = tokens[i]
    return tokens, labels


def _render(tokenizer: Any, messages: list[Message], unmasked: list[int]) -> tuple[list[int], list[bool]]:
    """Tokens and mask as the tokenizer renders them, with only the messages of these indexes unmasked."""
    messages = [Message(m.role, m.content, masked=i not in unmasked) for i, m in enumerate(messages)]
    out = unlimited(tokenizer)({"messages": messages})
    return out["tokens"], out["mask"]


def _header_length(tokenizer: Any) -> int:
    """How many tokens of an assistant's turn come before its content: where an empty turn and another part.

    ``inference=True`` cannot tell: torchtune's Qwen, Mistral and Gemma tokenizers ignore it and end the empty
    turn, and Phi 4's does not take it.
    """

    def turn(content: str) -> list[int]:
        tokens, mask = _render(tokenizer, [Message("user", "a"), Message("assistant", content)], unmasked=[1])
        return [token for token, masked in zip(tokens, mask, strict=True) if not masked]

    empty, other = turn(""), turn("a")
    return next((i for i, (a, b) in enumerate(zip(empty, other, strict=False)) if a != b), len(empty))


def unlimited(tokenizer: Any) -> Any:
    """A tokenizer without ``max_seq_len``: with it, it cuts rows without a word and ends them with an EOS,
    which teaches the model to stop in mid-sentence. `too_long` decides instead, and counts."""
    if getattr(tokenizer, "max_seq_len", None) is not None:
        tokenizer = copy.copy(tokenizer)
        tokenizer.max_seq_len = None
    return tokenizer


def to_messages(turns: Any) -> list[Message]:
    """torchtune messages, ``masked`` where there is nothing to train on. ``turns`` as in :func:`render_prompt`.

    Raises:
        UserError: a message is malformed.
    """
    if not isinstance(turns, (list, tuple)):
        raise UserError(f"a conversation must be a list of messages, found {type(turns).__name__}")
    return [_to_message(turn, f"message {number}") for number, turn in enumerate(turns)]


def _to_message(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping):
        raise UserError(f"{where} must be an object with role and content, found {type(turn).__name__}")
    role, weight = turn.get("role", turn.get("from")), turn.get("weight")
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f"{where}: unknown role {role!r}; known: {', '.join(ROLES)}")
    if turn.get("tool_calls"):
        raise UserError(f"{where}: tool_calls are not rendered; write the call in content as the model does")
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):  # OpenAI's parts
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise UserError(f"{where}: content of type {kind!r}; only text is trained here, no images")
        content = "".join(string(part.get("text"), f"{where}: text") for part in content)
    content = string(content, f"{where}: content")
    if ROLES[role] == "assistant" and not content.strip():
        raise UserError(f"{where}: the assistant's content is empty")
    if weight not in (None, 0, 1):
        raise UserError(f"{where}: weight must be 0 or 1, found {weight!r}")
    return Message(ROLES[role], content, masked=ROLES[role] != "assistant" or weight == 0)


def string(value: Any, what: str) -> str:
    """``value``, which must be text; ``what`` names it in the error."""
    if not isinstance(value, str):
        raise UserError(f"{what} must be a string, found {type(value).__name__}")
    return value


def to_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """What ``tokens`` [s] say. Ids that the tokenizer does not know (a model's embeddings are padded beyond its
    vocabulary, and a sample may hit the padding) say nothing; torchtune's tokenizers raise on them."""
    try:
        return tokenizer.decode(list(tokens))
    except (TypeError, KeyError, IndexError, OverflowError):
        return tokenizer.decode([token for token in tokens if _known(tokenizer, token)])


def _known(tokenizer: Any, token: int) -> bool:
    try:
        tokenizer.decode([token])
    except (TypeError, KeyError, IndexError, OverflowError):
        return False
    return True
