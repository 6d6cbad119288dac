"""Text of others on its way to the terminal."""


def printable(text: str) -> str:
    """Without what a terminal would obey: files of a run, and copies of a system's, may hold anything."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
