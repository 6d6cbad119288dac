"""Append-only files of samples and verdicts, written by every rank."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from rocm_ext.files import disk_errors, replace_text
from rocm_ext.ranks import Ranks
from rocm_ext.rollouts.samples import read_records
from rocm_ext.runs.reader import SampleKey


class Records(Protocol):
    """The records of a phase, one per prompt and sample.

    Attributes:
        records: the records by prompt id and sample index: all that were there on opening, and this rank's own.
    """

    records: dict[SampleKey, dict[str, Any]]

    def append(self, record: dict[str, Any]) -> None:
        """Append one record and write it at once; raises UserError if the disk is full."""

    def drop(self, unwanted: Callable[[dict[str, Any]], bool]) -> None:
        """Remove the ``unwanted`` records; call it on every rank, on opening or after :meth:`collect`."""

    def collect(self) -> None:
        """Give every rank the records of all."""


class Journal:
    """An append-only file of JSON lines, with one record per prompt and sample.

    Every rank appends to its own file. Opening the journal again merges these files, with any number of ranks.

    Args:
        path: file of the main rank and of the merged records; other ranks write files beside it.
        ranks: all processes of the run.

    Attributes:
        records: the records by prompt id and sample index: all that were there on opening, and this rank's own.
    """

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self._path, self._ranks = path, ranks
        self._own = path if ranks.is_main else path.with_suffix(f".rank{ranks.rank}.jsonl")
        self._file: Any = None
        self.records: dict[SampleKey, dict[str, Any]] = {}
        self._read()

    def append(self, record: dict[str, Any]) -> None:
        """Append one record and write it at once.

        Raises:
            UserError: the disk is full, or the file cannot be written.
        """
        with disk_errors(self._own):
            self._file = self._file or self._own.open("ab", buffering=0)  # a kill damages at most this line
            line = json.dumps(record).encode() + b"\n"
            if self._file.write(line) != len(line):  # on a full disk it may write a part, and only the count tells
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.records[record["prompt_id"], record["sample"]] = record

    def drop(self, unwanted: Callable[[dict[str, Any]], bool]) -> None:
        """Remove the ``unwanted`` records; call it on every rank, on opening or after :meth:`collect`."""
        kept = {key: record for key, record in self.records.items() if not unwanted(record)}
        if len(kept) < len(self.records) and self._ranks.is_main:
            replace_text(self._path, "".join(json.dumps(record) + "\n" for record in kept.values()))
        self.records = kept
        self._ranks.barrier()

    def collect(self) -> None:
        """Close the file, then merge and read the records of all ranks."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._ranks.world > 1:
            self._read()

    def _read(self) -> None:
        self._ranks.barrier()
        if self._ranks.is_main:
            self._merge()
        self._ranks.barrier()
        self.records = {(record["prompt_id"], record["sample"]): record for record in read_records(self._path)}

    def _merge(self) -> None:
        with disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                whole = _whole(self._path.read_bytes())
                with self._path.open("r+b") as file:
                    file.truncate(whole)
            for part in sorted(self._path.parent.glob(f"{self._path.stem}.rank*.jsonl")):
                content = part.read_bytes()
                with self._path.open("ab") as file:
                    file.write(content[: _whole(content)])
                part.unlink()


def _whole(content: bytes) -> int:
    """Return the length of ``content`` without an incomplete last line, which a kill may leave."""
    return content.rfind(b"\n") + 1


def journals_in(folder: Path, ranks: Ranks) -> tuple[Journal, Journal]:
    """Open ``samples.jsonl`` and ``verdicts.jsonl`` in ``folder``."""
    return Journal(folder / "samples.jsonl", ranks), Journal(folder / "verdicts.jsonl", ranks)
