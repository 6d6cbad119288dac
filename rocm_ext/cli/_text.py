"""Text from files, made safe for the terminal."""


def printable(text: str) -> str:
    """``text`` without control characters: files of a run or of a recorded machine may hold any."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
