"""What goes wrong for reasons a user can mend, and how it is said."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """One line for the user: what was found, what was expected and what to do.

    The recipes and ``rocm-ext`` print it without a traceback and exit with ``code``.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def nearest(name: object, known: Iterable[str]) -> str:
    """``; did you mean …?``, or the known names where none is near."""
    known = sorted(known)
    match = difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    return f"; did you mean {match[0]}?" if match else f"; known: {', '.join(known)}"


def one_line(error: BaseException) -> str:
    """What ``error`` says, without line breaks; with its type where the text alone would say little."""
    text = " ".join(str(error).split())
    return text if type(error) in (UserError, ValueError) else f"{type(error).__name__}: {text}"
