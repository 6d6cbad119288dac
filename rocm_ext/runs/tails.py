"""Reads growing files of lines, and parses a line once.

A page that shows a run while it goes on reads its files every few seconds. They may have a million lines, of which a
handful are new.
"""

import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from rocm_ext.base.files import json_object

# a line of a run's file as it was read: any value may be missing or damaged
Record = Mapping[str, object]
_Reader = Callable[[Path, list[str]], Any]
_Sign = tuple[int, ...]  # device, inode, size, and time of the last change
_CHECKED = 256  # bytes before the new lines; they differ if the file was rewritten


class JsonLines:
    """The parsed content of a file's lines, which are JSON objects."""

    def add(self, content: bytes, position: int) -> bool:
        """Take a line that begins at byte ``position``; False if it is damaged."""
        record = json_object(content)
        if record is None:
            return False
        self.take(record, position)
        return True

    def take(self, record: Record, position: int) -> None:
        """Take the object of a line."""
        raise NotImplementedError


_Kept = TypeVar("_Kept", bound=JsonLines)


@dataclass
class _Tail(Generic[_Kept]):
    kept: _Kept
    sign: _Sign
    end: int = 0  # offset behind the lines that were read
    before: bytes = b""  # the end of the last line
    damaged: int = 0

    def continues(self, file: BinaryIO, sign: _Sign) -> bool:
        """Whether the file still begins with the lines that were read."""
        *same_file, _, _ = self.sign
        *inode, size, _ = sign
        if inode != same_file or size < self.end:
            return False
        file.seek(self.end - len(self.before))
        return file.read(len(self.before)) == self.before

    def read(self, file: BinaryIO) -> None:
        """Read the new lines, without a last one that is being written."""
        file.seek(self.end)
        for content in file:
            if not self.kept.add(content, self.end):
                if not content.endswith(b"\n"):
                    break
                self.damaged += not content.isspace()
            self.end += len(content)
            self.before = content[-_CHECKED:]


class Tails:
    """The parsed contents of files; a file whose earlier lines have changed is read anew."""

    def __init__(self) -> None:
        self._tails: dict[Hashable, _Tail[Any]] = {}
        self._contents: dict[Path, tuple[_Sign, Any, list[str]]] = {}

    def lines(self, path: Path, kind: Callable[[], _Kept], problems: list[str]) -> _Kept:
        """Return the parsed lines of a file so far.

        Args:
            path: the file; a missing one is empty.
            kind: makes an empty object that takes lines. The next call for the same file and kind continues it, so the
                caller must not change it.
            problems: list that gets messages about an unreadable file or damaged lines.
        """
        key = path, kind
        tail: _Tail[_Kept] | None = self._tails.get(key)
        try:
            if tail is None or _sign(path.stat()) != tail.sign:
                with path.open("rb") as file:
                    sign = _sign(os.fstat(file.fileno()))
                    if tail is None or not tail.continues(file, sign):
                        tail = self._tails[key] = _Tail(kind(), sign)
                    tail.sign = sign
                    tail.read(file)
        except FileNotFoundError:
            self._tails.pop(key, None)
            return kind()
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror or error}")
        if tail is None:
            return kind()
        if tail.damaged == 1:
            problems.append(f"{path}: skipped 1 line that is not a JSON object")
        elif tail.damaged:
            problems.append(f"{path}: skipped {tail.damaged} lines that are not JSON objects")
        return tail.kept

    def content(self, path: Path, read: _Reader, problems: list[str]) -> Any:
        """Return ``read``'s result for a file, cached while the file does not change.

        Args:
            path: the file.
            read: takes the file and a list for messages. The caller must not change its result.
            problems: list that gets the messages.
        """
        try:
            sign = _sign(path.stat())
        except OSError:
            return read(path, problems)
        cached = self._contents.get(path)
        if cached is None or cached[0] != sign:
            messages: list[str] = []
            cached = self._contents[path] = sign, read(path, messages), messages
        _, content, messages = cached
        problems += messages
        return content


def _sign(stat: os.stat_result) -> _Sign:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
