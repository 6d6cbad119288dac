"""Render messages to tokens and labels with the tokenizer's own template.

Only this module turns messages into tokens. A training row therefore starts with exactly the tokens that the
sampler gets, and its labels start right behind them.

Labels follow torchtune: ``labels[t]`` is the token at ``t`` itself, or -100 for no loss.
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
    """Render a prompt to sample from: the conversation so far and the header of the assistant's turn.

    torchtune's Qwen tokenizers turn text that looks like a special token (``<|im_end|>``) into that token, as
    transformers does. The Llama 3 tokenizer keeps it as text. ``tokenizer.max_seq_len`` does not apply.

    Args:
        tokenizer: a torchtune model tokenizer.
        messages: ``{"role", "content"}`` each, or ShareGPT's ``{"from", "value"}``.

    Returns:
        Token ids ``[s]``.

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
    """Render a conversation to train on.

    Labels cover the content and the end-of-turn token of every assistant turn, except turns with
    ``weight: 0``. They exclude the turn's header, which a generation prompt contains. Turns after the last
    labelled one bear no loss and are cut.

    Args:
        tokenizer: a torchtune model tokenizer.
        messages: as in :func:`render_prompt`.
        train_on_input: label every token.

    Returns:
        Tokens ``[s]`` and labels ``[s]``.

    Raises:
        UserError: a message is malformed, or the conversation has no assistant turn to train on.
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
    # A run of unmasked tokens must be one turn. Where assistant turns follow each other, render twice, each time
    # with every other assistant turn unmasked.
    adjacent = any(b - a == 1 for a, b in pairwise(trained))
    for group in (trained[::2], trained[1::2]) if adjacent else (trained,):
        tokens, mask = _render(tokenizer, conversation, unmasked=group)
        labels = labels or [IGNORE] * len(tokens)
        for masked, run in groupby(range(len(mask)), key=mask.__getitem__):
            own = [] if masked else list(run)[header:]
            # The model does not generate what the template puts after the end of turn ("\n").
            end = max((n for n, i in enumerate(own, 1) if tokens[i] in stops), default=len(own))
            for i in own[:end]:
                labels[i] = tokens[i]
    return tokens, labels


def _render(tokenizer: Any, messages: list[Message], unmasked: list[int]) -> tuple[list[int], list[bool]]:
    """Render with the tokenizer, with only the messages at these indices unmasked; return tokens and mask."""
    messages = [Message(m.role, m.content, masked=i not in unmasked) for i, m in enumerate(messages)]
    out = unlimited(tokenizer)({"messages": messages})
    return out["tokens"], out["mask"]


def _header_length(tokenizer: Any) -> int:
    """Count the tokens of an assistant's turn before its content.

    It compares an empty turn with another one; they differ from the first token of the content on.
    ``inference=True`` does not help: torchtune's Qwen, Mistral and Gemma tokenizers ignore it and end the empty
    turn, and Phi 4's tokenizer does not accept it.
    """

    def turn(content: str) -> list[int]:
        tokens, mask = _render(tokenizer, [Message("user", "a"), Message("assistant", content)], unmasked=[1])
        return [token for token, masked in zip(tokens, mask, strict=True) if not masked]

    empty, other = turn(""), turn("a")
    return next((i for i, (a, b) in enumerate(zip(empty, other, strict=False)) if a != b), len(empty))


def unlimited(tokenizer: Any) -> Any:
    """Return the tokenizer without ``max_seq_len``.

    With ``max_seq_len`` it silently cuts rows and ends them with an EOS, which teaches the model to stop in
    mid-sentence. The config's ``too_long`` handles long rows instead, and counts them.
    """
    if getattr(tokenizer, "max_seq_len", None) is not None:
        tokenizer = copy.copy(tokenizer)
        tokenizer.max_seq_len = None
    return tokenizer


def to_messages(turns: Any) -> list[Message]:
    """Convert turns to torchtune messages; a message without training tokens is ``masked``.

    Args:
        turns: ``messages`` of :func:`render_prompt`.

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
        raise UserError(f"{where}: tool_calls are not supported; write the call into content as the model does")
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):  # OpenAI's parts
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
    return Message(ROLES[role], content, masked=ROLES[role] != "assistant" or weight == 0)


def string(value: Any, what: str) -> str:
    """Return ``value`` if it is a string.

    Raises:
        UserError: it is not; the message calls it ``what``.
    """
    if not isinstance(value, str):
        raise UserError(f"{what} must be a string, found {type(value).__name__}")
    return value


def to_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Decode ``tokens`` [s] and skip ids that the tokenizer does not know.

    A model's embeddings are padded beyond its vocabulary, so a sample may contain such ids. torchtune's
    tokenizers raise on them.
    """
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
