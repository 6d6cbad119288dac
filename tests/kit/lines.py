"""What a program says, by its facts rather than its sentences."""

from collections.abc import Sequence


def one_line_has(text: str | Sequence[str], *facts: str) -> bool:
    """Whether a line, of a text or of a list of messages, has all ``facts``: the key, the value, the file, the cure."""
    lines = text.splitlines() if isinstance(text, str) else text
    return any(all(fact in line for fact in facts) for line in lines)
