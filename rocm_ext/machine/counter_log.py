"""``hardware.jsonl``: the counters of :mod:`rocm_ext.machine.counters`, sampled every few seconds."""

import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rocm_ext.machine.counters import HARDWARE_LOG, Counters

log = logging.getLogger("rocm_ext")
_TAIL = 1 << 20  # bytes; a line is a few kB at most
_PATIENCE = 2  # seconds to wait for the last reading; the files of a GPU that hangs may block for long


class HardwareLog:
    """A file of readings, one JSON object per line. It holds complete lines only.

    Args:
        path: the file; it need not exist. An incomplete last line, which a killed program leaves, is removed.

    Raises:
        OSError: where the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 - closed by __exit__
        end = self._file.seek(0, os.SEEK_END)
        start = max(0, end - _TAIL)
        self._file.seek(start)
        self._file.truncate(start + (self._file.read(_TAIL) or b"").rfind(b"\n") + 1)

    def __enter__(self) -> "HardwareLog":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, reading: Mapping[str, Any]) -> None:
        """Append one line.

        Raises:
            OSError: where the disk is full, for example; no part of the line stays in the file.
        """
        line = json.dumps(reading).encode() + b"\n"
        size, done = self._file.seek(0, os.SEEK_END), 0
        try:
            while done < len(line):
                done += self._file.write(line[done:])
        except OSError:
            self._file.truncate(size)
            raise


@contextmanager
def recording(folder: Path, seconds: float | None, root: Path = Path("/"), name: str = HARDWARE_LOG) -> Iterator[None]:
    """Context in which a thread writes readings to a file.

    A failure of the thread does not stop the run. The thread draws no random numbers and does not use torch.

    Args:
        folder: folder of the file; an existing log is continued.
        seconds: between readings; None: write nothing.
        root: root folder for :class:`~rocm_ext.machine.counters.Counters`.
        name: name of the file.
    """
    if seconds is None:
        yield
        return
    stop = threading.Event()
    args = (folder / name, seconds, root, stop)
    thread = threading.Thread(target=_record, args=args, name="hardware counters", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_PATIENCE)


def log_of(machine: int) -> str:
    """Return the name of the file of a run's machine; the first one has ``hardware.jsonl``."""
    return f"hardware.machine{machine}.jsonl" if machine else HARDWARE_LOG


def remove_logs(folder: Path) -> None:
    """Remove the files of all machines of a run from its folder.

    Raises:
        OSError: the folder is read-only.
    """
    for path in [folder / HARDWARE_LOG, *folder.glob("hardware.machine*.jsonl")]:
        path.unlink(missing_ok=True)


def _record(path: Path, seconds: float, root: Path, stop: threading.Event) -> None:
    counters = Counters(root, process=True)
    for note in counters.notes:
        log.info("%s", note)
    try:
        with HardwareLog(path) as file:
            file.write(counters.read())
            while not stop.wait(seconds):
                file.write(counters.read())
    except OSError as error:
        log.warning("%s: %s; hardware is no longer recorded, the run continues", path, error.strerror or error)
