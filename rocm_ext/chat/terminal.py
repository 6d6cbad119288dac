"""Write an answer to a terminal or a pipe."""

import os
from typing import TextIO

_DIM, _PLAIN = "\033[2m", "\033[0m"


class Writer:
    """Writes the pieces of an answer as they come.

    A terminal gets reasoning dimmed, and no control characters of the model's. A pipe gets the answer without its
    reasoning.

    Args:
        out: where to write.
    """

    def __init__(self, out: TextIO) -> None:
        self._out, self._terminal = out, out.isatty()
        self._dims = self._terminal and not os.environ.get("NO_COLOR")
        self._dim, self._behind, self._line_ended = False, False, False

    def write(self, text: str, reasoning: bool) -> None:
        """Write a piece."""
        if reasoning and not self._terminal:
            self._behind = True
            return
        if self._behind:  # models begin the text behind their reasoning with empty lines
            text = text.lstrip("\n")
            self._behind = not text
        if self._terminal:
            text = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
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
        self._out.write(_PLAIN * self._dim + "\n" * (not self._line_ended))
        self._out.flush()
