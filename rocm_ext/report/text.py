"""Text of models, data and configs, made fit to be shown.

It may hold anything: markup, control characters, half a surrogate pair, characters that turn the direction of what
follows, megabytes in one line. Escaping is left to the template; this leaves nothing invisible in it.
"""

import unicodedata

_KEPT = "\n\t\u200c\u200d"  # the joiners are part of how many scripts, and emoji, are written
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: str, limit: int) -> str:
    """``text`` with every character that has no shape of its own spelt out, and its middle left out if it is longer
    than ``limit`` characters."""
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
