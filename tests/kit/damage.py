"""Random damage to files and folders that programs read."""

import shutil
from pathlib import Path

from hypothesis import strategies as st

JUNK = st.binary(max_size=60) | st.integers(-(2**70), 10**30).map(
    lambda number: str(number).encode()
)


def spoil(data: st.DataObject, path: Path) -> None:
    """Replace a file or a folder by something else, if it still exists."""
    content = path.read_bytes() if path.is_file() else b""
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
    else:
        return
    how = data.draw(st.sampled_from(["junk", "cut", "folder", "loop", "gone"]))
    if how == "junk":
        path.write_bytes(data.draw(JUNK))
    elif how == "cut":
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    elif how == "folder":
        path.mkdir()
    elif how == "loop":
        path.symlink_to(path)


def spoil_some(data: st.DataObject, paths: list[Path], most: int) -> None:
    """Spoil at least one and at most ``most`` of ``paths``."""
    for path in data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=most, unique=True)):
        spoil(data, path)
