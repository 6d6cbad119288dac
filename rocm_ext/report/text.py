"""Makes text of models, data and configs visible.

It may hold anything: markup, control characters, half a surrogate pair, characters that change the direction of the
text, megabytes in one line. This module replaces invisible characters; the template escapes markup.
"""

import unicodedata

_KEPT = "\n\t\u200c\u200d"  # many scripts, and emoji, need the joiners
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: str, limit: int) -> str:
    """``text`` with a visible escape for every invisible character, and without its middle if it is too long.

    Args:
        text: any text.
        limit: most characters of ``text`` to show.
    """
    if text.isascii() and text.isprintable() and len(text) <= limit:
        return text
    if len(text) > limit:
        tail = limit // 4
        left_out = len(text) - limit
        text = f"{text[: limit - tail]}\n[ {left_out:,} characters left out ]\n{text[-tail:]}"
    return "".join(map(_visible, text.replace("\r\n", "\n")))


def _visible(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _HIDDEN:
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)  # pictures of control characters
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
