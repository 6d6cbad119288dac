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
    """``; did you mean …?`` where a name is near, and the known names where they are few or none is near."""
    names = sorted(known)
    match = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    guess = f"; did you mean {match[0]}?" if match else ""
    return guess if match and len(names) > 9 else f"{guess or ';'} known: {', '.join(names)}"


def one_line(error: BaseException) -> str:
    """What ``error`` says, without line breaks; with its type where the text alone would say little."""
    text = " ".join(str(error).split())
    return text if type(error) in (UserError, ValueError) else f"{type(error).__name__}: {text}"
