"""Regular expressions that come with a stranger's adapter or model: matching one may take for ever."""

from functools import cache

import regex

from rocm_ext.base.errors import UserError

_SECONDS = 1.0

# regex itself keeps 500 patterns, fewer than the keys of a model with one per layer
_compiled = cache(regex.compile)


def matches(pattern: str, text: str) -> bool:
    """Return whether ``pattern`` matches the beginning of ``text``, as ``re.match`` does.

    Raises:
        UserError: that takes more than a second, or ``pattern`` is no regular expression.
    """
    try:
        return _compiled(pattern).match(text, timeout=_SECONDS) is not None
    except TimeoutError as error:
        raise UserError(
            f"the regular expression {pattern[:80]!r} takes more than {_SECONDS:g} s on {text}; write it simpler"
        ) from error
    except regex.error as error:
        raise UserError(f"{pattern[:80]!r} is no regular expression: {error}") from error
