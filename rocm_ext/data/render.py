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

from rocm_ext.data.messages import to_turns
from rocm_ext.errors import UserError

IGNORE = -100


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
    return [Message(turn.role, turn.content, masked=turn.masked) for turn in to_turns(turns)]


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
