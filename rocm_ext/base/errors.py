"""Errors that the user can fix, and their messages."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

_MOST = 24  # names that a message lists


class UserError(Exception):
    """An error that the user can fix; the recipes and ``rocm-ext`` print it without a traceback.

    Args:
        message: one line with the problem, the expectation and the remedy.
        code: exit code of the program.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def nearest(name: object, known: Iterable[str], otherwise: str | None = None) -> str:
    """The end of a message about an unknown name.

    Args:
        name: the unknown name.
        known: the names that exist.
        otherwise: the end of the message if none of many names is similar; by default the five nearest names.

    Returns:
        ``; did you mean …?`` for a similar name, and the known names if they are few or none is similar.
    """
    import difflib  # here, because every program that imports torch imports this module, see rocm_ext.hook

    names = sorted(known)
    listed = f"known: {', '.join(names)}"
    match = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if match:
        guess = f"; did you mean {match[0]}?"
        return guess if len(names) > 9 else f"{guess} {listed}"
    if len(names) <= _MOST:
        return f"; {listed}"
    if otherwise is not None:
        return otherwise
    near = difflib.get_close_matches(str(name), names, n=5, cutoff=0.0)
    return f"; the nearest of {len(names)} known names are {', '.join(near)}"


def require_known(what: str, value: object, known: Collection[str]) -> None:
    """Raise UserError, with the nearest known value, unless an argument has a known one."""
    if value not in known:
        raise UserError(f"{what} {value!r} is unknown{nearest(value, known)}")


def refuse(problems: Iterable[str]) -> None:
    """Raise a UserError with the first of the problems, if there are any."""
    for problem in problems:
        raise UserError(problem)


@contextmanager
def explain_errors(before: str, after: str = "") -> Iterator[None]:
    """Context for foreign code that may raise anything: its errors become a UserError, between these texts."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{before}: {one_line(error)}{after}") from error


def one_line(error: BaseException) -> str:
    """The message of ``error`` in one line, after its type unless that is UserError or ValueError."""
    text = " ".join(str(error).split())
    return text if type(error) in (UserError, ValueError) else f"{type(error).__name__}: {text}"
