"""The page of runs while they go on, with the machine's counters, and its server.

The server listens at the loopback address alone: everybody with an account on this machine can open the page, nobody
else. A site that a browser visits cannot read it, since browsers keep answers of another origin from it, and since the
``Host`` of a request must be a name of the loopback address (a site's name that leads here would be another name).
"""

import math
import os
import re
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from threading import Lock
from typing import Any

import numpy as np

from rocm_ext.base.errors import UserError
from rocm_ext.base.log import duration
from rocm_ext.report import content, hardware, render
from rocm_ext.report.charts import Table, library
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.progress import progress
from rocm_ext.runs.records import Readings, number
from rocm_ext.runs.tails import Record, Tails

PORT = 8642
_PATTERNS = ("*.json*", "config.yaml", "adapter", "cycle_*/*.json*")  # files that the page shows
_Files = dict[Path, tuple[int, int, int]]  # inode, size, and time in nanoseconds
_CONTENT = "<main>"  # the beginning of the page's content
_GZIP = 31  # zlib's number for the format gzip
# the names that a browser may have for the server
_LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[^:]*)?")
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Encoding": "gzip",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_MINUTES = 15  # minutes of counters on the page
_SHARE = 0.1  # most of a core's time that drawing takes
_LONGEST = 20.0  # most seconds without drawing
# least seconds without a new line after which a run counts as silent, see _patience
_QUIET, _LEAST = 120.0, 30.0
_RECORDED = 600.0  # seconds after its last reading in which a run still counts as recording


class LivePage:
    """A page that is drawn when it is asked for, within a tenth of a core's time: after 2 s of drawing, every 20 s.

    Args:
        folders: output_dirs of runs; they need not exist yet.
        interval: seconds between questions of a browser.
        notes: messages about counters that this machine lacks.
    """

    def __init__(self, folders: Sequence[Path], interval: float, notes: Sequence[str] = ()) -> None:
        library()  # raises before a browser asks
        different = {path.resolve(): path for path in folders}
        self._tails = {folder: Tails() for folder in different.values()}
        self._interval = interval
        self._notes = notes
        most = math.ceil(60 * _MINUTES / interval)
        self._readings: deque[Record] = deque(maxlen=most)
        self._lock = Lock()
        self._files: dict[Path, _Files] = {}  # the files that were read
        self._runs: dict[Path, RunFolder] = {}
        self._waiting: list[tuple[Path, str]] = []
        self._content: dict[str, object] = {}
        self._live: dict[str, object] = {}
        self._page = ""
        self._due = 0.0  # the page is drawn again from this time.monotonic() on

    def take(self, reading: Record) -> None:
        """Take a reading of the machine's counters."""
        self._readings.append(reading)

    def draw(self, with_script: bool = True) -> str:
        """The page as HTML; without the script, the next state of a page that a browser has."""
        with self._lock:
            if time.monotonic() >= self._due:
                begun = time.thread_time()
                first = not self._page
                self._read_runs()
                self._live = self._state_now()
                self._page = render(self._content, self._live, with_script=False)
                pause = (time.thread_time() - begun) * (1 / _SHARE - 1)
                if first:
                    pause = 0.0  # this time was spent on imports
                self._due = time.monotonic() + min(pause, _LONGEST)
            if with_script:
                return render(self._content, self._live)
            return self._page

    def parts(self) -> Iterator[str]:
        """Yield the page up to its content, which says that this is loading, and what :meth:`draw` puts there."""
        nothing = dict.fromkeys(("waiting", "readings", "columns", "notes", "charts"), ())
        loading = {"interval": self._interval, **nothing}
        empty = render(content([]), loading, with_script=False)
        yield empty[: empty.index(_CONTENT)]
        drawn = self.draw()
        yield drawn[drawn.index(_CONTENT) :]

    def _read_runs(self) -> None:
        """Read the folders anew if a file has changed."""
        files = {folder: _files(folder) for folder in self._tails if folder.exists()}
        if self._content and files == self._files:
            return
        self._files = files
        self._runs = {}
        self._waiting = []
        for folder, tails in self._tails.items():
            try:
                self._runs[folder] = RunFolder(folder, tails)
            except UserError as error:
                why = f"{error}."
                if not folder.exists():
                    why = "The folder does not exist yet."
                elif folder.is_dir():
                    why = "The run has written nothing yet."
                self._waiting.append((folder, why))
        self._content = content(list(self._runs.values()))

    def _state_now(self) -> dict[str, object]:
        """The content that a report does not have."""
        readings = list(self._readings)
        history = Readings()
        for reading in readings:
            history.take(reading)
        columns: list[str] = []
        rows: Table = []
        names: list[str] = []
        if readings:
            columns, rows, names = hardware.table(readings[-1])
        charts = []
        recorded = any(run.hardware for run in self._runs.values())
        if len(history) > 1 and not recorded:
            charts = hardware.charts([("this machine", history)], from_now=True)
        states = []
        for folder, run in self._runs.items():
            states.append(_state(run, self._files[folder]))
        return {
            "interval": self._interval,
            "waiting": self._waiting,
            "states": states,
            "columns": ["", *columns],
            "readings": rows,
            "notes": [*self._notes, *names],
            "charts": charts,
        }


def _files(folder: Path) -> _Files:
    """The page's files."""
    files = {}
    for pattern in _PATTERNS:
        for path in folder.glob(pattern):
            with suppress(OSError):  # removed meanwhile
                stat = path.stat()
                files[path] = stat.st_ino, stat.st_size, stat.st_mtime_ns
    return files


def _state(run: RunFolder, files: _Files) -> dict[str, object]:
    """``kind``, a class of the style sheet; ``words``; when the run last ``written``, seconds since 1970, or 0."""
    written = 0.0
    for path, (_, _, nanoseconds) in files.items():
        if path.suffix == ".jsonl":
            written = max(written, nanoseconds / 1e9)
    kind = "running"
    if run.finished:
        kind, words = "finished", "Finished"
    elif not written:
        words = "Started, nothing written yet"
    elif time.time() - written > _patience(run):
        kind, words = "silent", "Nothing new: the run has stopped, hangs or was killed"
    else:
        words = _progress_in_words(run)
    return {"kind": kind, "words": words, "written": written}


def _progress_in_words(run: RunFolder) -> str:
    values = progress(run.path)
    facts = []
    if "cycle" in values:
        facts.append(f"cycle {values['cycle']}")
    if "phase" in values:
        facts.append(str(values["phase"]))
    if "seconds_left" in values:
        facts.append(f"{duration(number(values['seconds_left']))} left")
    return f"Running: {', '.join(facts)}" if facts else "Running"


def _patience(run: RunFolder) -> float:
    """Seconds without a new line after which a run counts as silent: a few readings of its counters, or ten steps."""
    readings = run.hardware.times[-20:]
    if len(readings) > 1 and time.time() - readings[-1] < _RECORDED:
        interval = float(np.median(np.diff(readings)))
        return max(_LEAST, 6 * interval)
    seconds = run.updates["seconds"][-20:]
    if not np.isfinite(seconds).any():
        return _QUIET
    return max(_QUIET, 10 * float(np.nanmedian(seconds)))


# ---- the server


class PageServer(ThreadingHTTPServer):
    """An HTTP server of one page at the loopback address.

    Args:
        page: the page.
        port: its port. None takes :data:`PORT`, or a free one if that is in use.

    Raises:
        UserError: a given port cannot be used.
    """

    daemon_threads = True
    allow_reuse_address = os.name != "nt"  # there, two servers would share the port

    def __init__(self, page: LivePage, port: int | None = None) -> None:
        self.page = page
        wanted = PORT if port is None else port
        try:
            super().__init__(("127.0.0.1", wanted), _Handler)
        except OSError as error:
            if port is not None:
                raise UserError(
                    f"--port {port}: {error.strerror or error}; name another with --port"
                ) from error
            super().__init__(("127.0.0.1", 0), _Handler)  # any free port

    def server_bind(self) -> None:
        """Bind; HTTPServer also looks up the machine's name, which takes seconds without a network."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show an error, unless a browser only closed its connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30  # seconds for a request
    server_version, sys_version = "rocm-ext", ""

    def do_GET(self) -> None:
        if not _LOOPBACK.fullmatch(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.FORBIDDEN, "open the address that was printed")
            return
        if self.path not in ("/", "/page"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.OK)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        page = self.server.page
        parts = page.parts()
        if self.path == "/page":
            parts = iter([page.draw(with_script=False)])
        packer = zlib.compressobj(1, wbits=_GZIP)
        for part in parts:
            text = part.encode("ascii", "xmlcharrefreplace")
            self.wfile.write(packer.compress(text))
            self.wfile.write(packer.flush(zlib.Z_SYNC_FLUSH))
        self.wfile.write(packer.flush())

    def log_message(self, *args: Any) -> None:
        """Say nothing."""
