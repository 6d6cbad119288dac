"""A server that leaves the GPU's memory to a run: stopped before it and started after it, whatever happens.

A record, held under a lock, says who stopped the server. It is removed once the server was started again. A process of
its own starts the server if the supervisor is killed; if that one is killed, too, the next supervisor does.
"""

import json
import os
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import disk_errors, replace_text
from rocm_ext.base.log import duration
from rocm_ext.base.types import Json
from rocm_ext.runs.folder import newest_adapter
from rocm_ext.runs.records import read_json
from rocm_ext.supervise.attempt import end_earlier
from rocm_ext.supervise.messages import Messenger, say, tell_systemd
from rocm_ext.supervise.window import POLL

ADAPTER = "SUPERVISE_ADAPTER"  # environment variable of the command that starts the server
_MANAGERS = (("systemctl", "--user"), ("systemctl",))
_TO_STOP = 600.0  # seconds: a server may have to finish its answers
_TO_START = (
    120.0  # seconds: a command that takes longer is left alone, because it may be the server itself
)
_RUNNING = ("active", "activating", "reloading")


@dataclass(frozen=True)
class Server:
    """A program that serves models on this machine's GPU.

    Attributes:
        name: what messages call it.
        stop: command that stops it, and ends when it has stopped.
        start: command that starts it.
        state: command that prints its state in systemd's words; empty: it counts as running.
    """

    name: str
    stop: Sequence[str]
    start: Sequence[str]
    state: Sequence[str] = ()

    @classmethod
    def of_unit(cls, unit: str) -> "Server":
        """The service ``unit`` of the user's systemd or the system's; a UserError if neither has it."""
        for manager in _MANAGERS:
            show = (*manager, "show", "--value", "--property")
            if _output((*show, "LoadState", unit)) != "loaded":
                continue
            return cls(
                unit,
                stop=(*manager, "--no-ask-password", "stop", unit),
                start=(*manager, "--no-ask-password", "start", unit),
                state=(*show, "ActiveState", unit),
            )
        raise UserError(
            f"--beside {unit}: found no such unit of your systemd or the system's; "
            "`systemctl --user list-unit-files` has yours",
            2,
        )

    @classmethod
    def of_commands(cls, stop: str, start: str) -> "Server":
        """The server that two shell commands stop and start."""
        return cls("the server", ("/bin/sh", "-c", stop), ("/bin/sh", "-c", start))

    @contextmanager
    def away(self, run: Path, messenger: Messenger) -> Iterator[None]:
        """Context in which the server does not run; a server that did not run before stays as it is.

        Raises:
            UserError: it does not stop, or another run has stopped it.
        """
        with self._claimed(run):
            if not (self._record.exists() or self._runs):
                say(f"{self.name} does not run")
                yield
                return
            record = {"server": self.name, "start": list(self.start), "run": str(run.absolute())}
            replace_text(self._record, json.dumps(record | {"supervisor": os.getpid()}) + "\n")
            watcher = _watch(self._record)
            try:
                say(f"stopping {self.name}")
                _finish(self.stop, self.name)
                yield
            finally:
                problem = give_back(self._record)
                if problem:
                    messenger.tell("failed", problem)
                watcher.kill()
                watcher.communicate()

    def recover(self, run: Path, messenger: Messenger) -> None:
        """Start the server if a supervisor stopped it and was killed before it could start it."""
        if not self._record.exists():
            return
        with suppress(UserError), self._claimed(run):  # another run may have it
            problem = give_back(self._record)
            if problem:
                messenger.tell("failed", problem)

    @property
    def _record(self) -> Path:
        """A file that exists while somebody has stopped this server."""
        states = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
        identity = zlib.crc32(json.dumps(self.start).encode())
        name = re.sub(r"[^\w.@-]+", "_", self.name)
        return Path(states) / "torchtune-rocm" / f"{name}-{identity:08x}.json"

    @property
    def _runs(self) -> bool:
        return not self.state or _output(self.state) in _RUNNING

    @contextmanager
    def _claimed(self, run: Path) -> Iterator[None]:
        """Context in which no other process stops or starts this server for a run."""
        lock = _lock_of(self._record)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            other = read_json(self._record, []).get("run", "another run")
            raise UserError(
                f"{self.name} is stopped for {other}; {run} can go on when that run has ended"
            ) from None
        try:
            yield
        finally:
            lock.release()


def give_back(record: Path) -> str:
    """Start the server that ``record`` names, and remove the record; return what went wrong, or an empty text."""
    content = read_json(record, [])
    name = content.get("server", "the server")
    start = content.get("start")
    if not isinstance(start, list):
        return f"{record} is damaged; start the server by hand, then remove the file"
    say(f"starting {name}")
    environ = dict(os.environ)
    adapter = newest_adapter(Path(content["run"]))
    if adapter is not None:
        environ[ADAPTER] = str(adapter)
    try:
        code = _end_of(start, _TO_START, environ)
    except UserError as error:
        return str(error)
    if code:
        return f"{name} did not start: {' '.join(start)} ended with code {code}"
    with disk_errors(record):
        record.unlink(missing_ok=True)
    return ""


def _finish(command: Sequence[str], name: str) -> None:
    """Stop the server; a UserError if it still runs."""
    code = _end_of(command, _TO_STOP, dict(os.environ))
    if code is None:
        raise UserError(f"{name} did not stop within {duration(_TO_STOP)}; the run was not started")
    if code:
        raise UserError(
            f"{name} did not stop: {' '.join(command)} ended with code {code}; the run was not started"
        )


def _end_of(command: Sequence[str], patience: float, environ: dict[str, str]) -> int | None:
    """Run a command with its output on stderr; return its exit code, or None if it still runs after ``patience``."""
    environ.pop("NOTIFY_SOCKET", None)  # of this process
    try:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=sys.stderr,
            start_new_session=True,  # Ctrl-C is for the run
        )
    except OSError as error:
        raise UserError(f"cannot start {command[0]}: {error.strerror}") from error
    end = time.monotonic() + patience
    while process.poll() is None and time.monotonic() < end:
        tell_systemd("READY=1\nWATCHDOG=1")
        time.sleep(POLL)
    return process.returncode


def _output(command: Sequence[str]) -> str:
    """What a command prints; empty if it cannot run."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
        )
        return done.stdout.strip()
    return ""


def _lock_of(record: Path) -> FileLock:
    with disk_errors(record):
        record.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(record.with_suffix(".lock"))


# ---- the process that starts the server if the supervisor is killed


def _watch(record: Path) -> subprocess.Popen:
    """Start the process that starts the server when this one has been killed: the end of its input tells it."""
    return subprocess.Popen(
        [sys.executable, "-m", "rocm_ext.supervise.server", str(record)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def _after_the_supervisor(record: Path) -> None:
    sys.stdin.buffer.read()
    content: Json = read_json(record, [])
    if not content:
        return
    say("the supervisor was killed")
    end_earlier(Path(content["run"]))
    with _lock_of(record):  # a new supervisor may have it by now
        if record.exists():
            problem = give_back(record)
            if problem:
                say(problem)


if __name__ == "__main__":
    _after_the_supervisor(Path(sys.argv[1]))
