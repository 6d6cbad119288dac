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

from rocm_ext.data.messages import to_turns
from rocm_ext.errors import UserError

IGNORE = -100


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
    return [Message(turn.role, turn.content, masked=turn.masked) for turn in to_turns(turns)]


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
