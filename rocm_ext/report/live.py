"""The page of runs while they go on, with the machine's counters, and its server.

The server listens at the loopback address alone: everybody with an account on this machine can open the page, nobody
else. A site that a browser visits cannot read it, since browsers keep answers of another origin from it, and since the
``Host`` of a request must be a name of the loopback address (a site's name that leads here would be another name).
"""

import math
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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
from rocm_ext.report.charts import library
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.progress import progress
from rocm_ext.runs.records import Readings, number
from rocm_ext.runs.tails import Record, Tails

PORT = 8642
_FILES = ("*.json*", "config.yaml", "adapter", "cycle_*/*.json*")  # files that the page shows
_CONTENT = "<main>"  # the beginning of the page's content
_GZIP = 31  # zlib's number for the format gzip
_MINUTES = 15  # minutes of counters on the page
_SHARE, _LONGEST = 0.1, 20.0  # most of a core's time that drawing takes; most seconds without drawing
_QUIET, _LEAST = 120.0, 30.0  # least seconds without a new line after which a run counts as silent, see _patience
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
        self._tails = {folder: Tails() for folder in {path.resolve(): path for path in folders}.values()}
        self._interval, self._notes = interval, notes
        self._readings: deque[Record] = deque(maxlen=math.ceil(60 * _MINUTES / interval))
        self._lock = Lock()
        self._files: object = None  # drawn files
        self._runs: list[tuple[RunFolder, Mapping[Path, Sequence[int]]]] = []
        self._shown: dict[str, object] = {}
        self._live: dict[str, object] = {}
        self._page, self._due = "", 0.0  # the page is drawn again from this time.monotonic() on

    def take(self, reading: Record) -> None:
        """Take a reading of the machine's counters."""
        self._readings.append(reading)

    def draw(self, with_script: bool = True) -> str:
        """The page as HTML; without the script, the next state of a page that a browser has."""
        with self._lock:
            if time.monotonic() >= self._due:
                first, begun = not self._page, time.thread_time()
                self._read()
                self._page = render(self._shown, self._live, with_script=False)
                pause = 0.0 if first else (time.thread_time() - begun) * (1 / _SHARE - 1)  # the first one imports
                self._due = time.monotonic() + min(pause, _LONGEST)
            return render(self._shown, self._live) if with_script else self._page

    def parts(self) -> Iterator[str]:
        """Yield the page up to its content, which says that this is loading, and what :meth:`draw` puts there."""
        nothing = dict.fromkeys(("waiting", "readings", "columns", "notes", "charts"), ())
        empty = render(content([]), {"interval": self._interval, **nothing}, with_script=False)
        yield empty[: empty.index(_CONTENT)]
        whole = self.draw()
        yield whole[whole.index(_CONTENT) :]

    def _read(self) -> None:
        files = {folder: (folder.exists(), _files(folder)) for folder in self._tails}
        if files != self._files:
            self._files, self._runs, waiting = files, [], []
            for folder, tails in self._tails.items():
                try:
                    self._runs.append((RunFolder(folder, tails), files[folder][1]))
                except UserError as error:
                    why = "The run has written nothing yet." if folder.is_dir() else f"{error}."
                    waiting.append((folder, why if folder.exists() else "The folder does not exist yet."))
            self._shown = content([run for run, _ in self._runs])
            self._live["waiting"] = waiting
        readings, history = list(self._readings), Readings()
        for reading in readings:
            history.take(reading)
        columns, rows, names = hardware.table(readings[-1]) if readings else ([], [], [])
        recorded = len(history) < 2 or any(run.hardware for run, _ in self._runs)
        self._live |= {
            "interval": self._interval,
            "states": [_state(run, written) for run, written in self._runs],
            "columns": ["", *columns],
            "readings": rows,
            "notes": [*self._notes, *names],
            "charts": [] if recorded else hardware.charts([("this machine", history)], from_now=True),
        }


def _files(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Inode, size and time in nanoseconds of the page's files."""
    files = {}
    for path in (path for pattern in _FILES for path in folder.glob(pattern)):
        with suppress(OSError):  # removed meanwhile
            stat = path.stat()
            files[path] = stat.st_ino, stat.st_size, stat.st_mtime_ns
    return files


def _state(run: RunFolder, files: Mapping[Path, Sequence[int]]) -> dict[str, object]:
    """``kind``, a class of the style sheet; ``words``; when the run last ``written``, seconds since 1970, 0: never."""
    written = max((file[2] for path, file in files.items() if path.suffix == ".jsonl"), default=0) / 1e9
    if run.finished:
        kind, words = "finished", "Finished"
    elif not written:
        kind, words = "running", "Started, nothing written yet"
    elif time.time() - written > _patience(run):
        kind, words = "silent", "Nothing new: the run has stopped, hangs or was killed"
    else:
        values = progress(run.path)
        parts = [f"cycle {values['cycle']}"] if "cycle" in values else []
        parts += [str(values["phase"])] if "phase" in values else []
        parts += [f"{duration(number(values['seconds_left']))} left"] if "seconds_left" in values else []
        kind, words = "running", ": ".join(["Running", *([", ".join(parts)] if parts else [])])
    return {"kind": kind, "words": words, "written": written}


def _patience(run: RunFolder) -> float:
    """Seconds without a new line after which a run counts as silent: a few readings of its counters, or ten steps."""
    gaps = np.diff(run.hardware.times[-20:])
    if len(gaps) and time.time() - run.hardware.times[-1] < _RECORDED:
        return max(_LEAST, 6 * float(np.median(gaps)))
    seconds = run.updates["seconds"][-20:]
    return max(_QUIET, 10 * float(np.nanmedian(seconds))) if np.isfinite(seconds).any() else _QUIET


# ---- the server


class PageServer(ThreadingHTTPServer):
    """An HTTP server of one page at the loopback address.

    ``port`` None: :data:`PORT`, or a free one if that is in use. Raises UserError if a given port cannot be used.
    """

    daemon_threads = True
    allow_reuse_address = os.name != "nt"  # there, two servers would share the port

    def __init__(self, page: LivePage, port: int | None = None) -> None:
        self.page = page
        try:
            super().__init__(("127.0.0.1", PORT if port is None else port), _Handler)
        except OSError as error:
            if port is not None:
                raise UserError(f"--port {port}: {error.strerror or error}; name another with --port") from error
            super().__init__(("127.0.0.1", 0), _Handler)

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
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in ("127.0.0.1", "localhost", "[::1]"):
            self.send_error(HTTPStatus.FORBIDDEN, "open the address that was printed")
            return
        if self.path not in ("/", "/page"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.end_headers()
        packer = zlib.compressobj(1, wbits=_GZIP)
        for part in self.server.page.parts() if self.path == "/" else [self.server.page.draw(with_script=False)]:
            packed = packer.compress(part.encode("ascii", "xmlcharrefreplace"))
            self.wfile.write(packed + packer.flush(zlib.Z_SYNC_FLUSH))
        self.wfile.write(packer.flush())

    def log_message(self, *args: Any) -> None:
        """Say nothing."""
