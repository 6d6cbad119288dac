"""The text of tokens as they are sampled, its reasoning, and its output to a terminal or a pipe."""

import os
from typing import Any, TextIO

from rocm_ext.data.encoder import TextEncoder, to_text

_DIM, _PLAIN = "\033[2m", "\033[0m"
_BROKEN = "\N{REPLACEMENT CHARACTER}"
# Around reasoning; other models' marks are special tokens, which no text shows
_OPEN = "<think>"
_CLOSE = "</think>"


class TextStream:
    """Decodes tokens one after another.

    The pieces of :meth:`add` and :meth:`end` together are the text of all tokens. A character whose bytes are in
    several tokens comes with the last of them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        encoder = getattr(tokenizer, "encoder", None)
        self._bytes = encoder.byte_tokens if isinstance(encoder, TextEncoder) else frozenset()
        self._tokens: list[int] = []
        self._settled = 0  # tokens whose text was returned; it ends with a complete character
        # decoding begins here; decoders strip the space in front of a text's first word
        self._anchor = 0

    def add(self, token: int) -> str:
        """Return the text that is complete with ``token``: often the token's text, sometimes nothing."""
        self._tokens.append(token)
        # One wrong byte makes a decoder with byte fallback replace all bytes of a run. Tokens without a text, such as
        # special ones, do not end a run.
        in_run = token in self._bytes
        if self._bytes and not in_run:
            in_run = not self._text(len(self._tokens) - 1)
        if in_run or self._text(self._settled).endswith(_BROKEN):
            return ""
        return self.end()

    def end(self) -> str:
        """Return the rest, with replacement characters for bytes that are no characters."""
        known = self._text(self._anchor, self._settled)
        piece = self._text(self._anchor)[len(known) :]
        self._settled = len(self._tokens)
        last = self._text(self._settled - 1) if self._tokens else ""
        if last.strip() and _BROKEN not in last:
            self._anchor = self._settled - 1
        return piece

    def _text(self, start: int, end: int | None = None) -> str:
        tokens = self._tokens[start:end]
        return to_text(self._tokenizer, tokens) if tokens else ""


class Reasoning:
    """Splits an answer into reasoning, which ``<think>`` and ``</think>`` enclose, and the rest.

    Args:
        prompt: text that the answer continues; it may open the reasoning.

    Attributes:
        open: whether the text so far ends inside of reasoning.
    """

    def __init__(self, prompt: str) -> None:
        self.open = prompt.rstrip().endswith(_OPEN)
        self._waiting = ""  # the end of the text, which may begin a tag

    def add(self, piece: str) -> list[tuple[str, bool]]:
        """Return the new parts of the text, and whether they are reasoning; tags count as reasoning.

        The end of ``piece`` waits for the next one if it may be the beginning of a tag.
        """
        text = self._waiting + piece
        parts = []
        tag = _CLOSE if self.open else _OPEN
        while tag in text:
            before, _, text = text.partition(tag)
            if self.open:
                parts.append((before + tag, True))
            else:
                parts += [(before, False), (tag, True)]
            self.open = not self.open
            tag = _CLOSE if self.open else _OPEN
        # The longest end that begins the tag. The tag itself is not in the text any more.
        cut = max(0, len(text) - len(tag) + 1)
        while not tag.startswith(text[cut:]):
            cut += 1
        self._waiting = text[cut:]
        parts.append((text[:cut], self.open))
        return [part for part in parts if part[0]]

    def end(self) -> list[tuple[str, bool]]:
        """Return the text that waits."""
        waiting, self._waiting = self._waiting, ""
        return [(waiting, self.open)] if waiting else []


def harmless(text: str) -> str:
    """Return ``text`` without control characters, which would move a terminal's cursor or more."""
    return "".join(c if c.isprintable() or c in "\n\t" else _BROKEN for c in text)


class Writer:
    """Writes the pieces of an answer as they come.

    A terminal gets reasoning dimmed, and no control characters. A pipe gets the answer without its reasoning.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._dims = self._terminal and not os.environ.get("NO_COLOR")
        self._dim = False  # what the terminal writes now
        self._behind = False  # whether a pipe's reader waits for the text behind reasoning
        self._line_ended = False

    def write(self, text: str, reasoning: bool) -> None:
        """Write a piece."""
        if reasoning and not self._terminal:
            self._behind = True
            return
        if self._behind:  # models begin the text behind their reasoning with empty lines
            text = text.lstrip("\n")
            self._behind = not text
        if self._terminal:
            text = harmless(text)
        if not text:
            return
        if self._dims and reasoning != self._dim:
            self._out.write(_DIM if reasoning else _PLAIN)
            self._dim = reasoning
        self._out.write(text)
        self._out.flush()
        self._line_ended = text.endswith("\n")

    def end(self) -> None:
        """End the last line."""
        if self._dim:
            self._out.write(_PLAIN)
        if not self._line_ended:
            self._out.write("\n")
        self._out.flush()
