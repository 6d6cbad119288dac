"""A server that leaves the GPU's memory to a run: stopped before it and started after it, whatever happens.

A record, held under a lock, says who stopped the server. It is removed once the server was started again. A process of
its own starts the server if the supervisor is killed; if that one is killed, too, the next supervisor does.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from filelock import FileLock, Timeout

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import replace_text
from rocm_ext.base.log import duration
from rocm_ext.machine.budget import wait_while_freed
from rocm_ext.runs.folder import newest_adapter
from rocm_ext.runs.records import read_json
from rocm_ext.supervise.attempt import end_earlier
from rocm_ext.supervise.messages import Messenger, say, tell_systemd
from rocm_ext.supervise.window import POLL, Stop, Window

ADAPTER = "SUPERVISE_ADAPTER"  # environment variable of the command that starts the server
_MANAGERS = (("systemctl", "--user"), ("systemctl",))
_TO_STOP = 600.0  # seconds: a server may have to finish its answers
_TO_START = (
    30.0  # seconds: a command that takes longer is left alone, because it may be the server itself
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
        problems = ""
        for manager in _MANAGERS:
            show = (*manager, "show", "--value", "--property")
            try:
                if _output((*show, "LoadState", unit)) != "loaded":
                    continue
                name = _output((*show, "Id", unit))  # one name, however the user spelt it
            except UserError as error:  # as in a login without a systemd of its own
                problems += f". {error}"
                continue
            act = (*manager, "--no-ask-password")
            state = (*show, "ActiveState", name)
            return cls(name, (*act, "stop", name), (*act, "start", name), state)
        raise UserError(
            f"--beside {unit}: found no such unit of your systemd or the system's; "
            f"`systemctl --user list-unit-files` has yours{problems}",
            2,
        )

    @classmethod
    def of_commands(cls, stop: str, start: str) -> "Server":
        """The server that two shell commands stop and start."""
        return cls("the server", ("/bin/sh", "-c", stop), ("/bin/sh", "-c", start))

    @contextmanager
    def away(self, run: Path, messenger: Messenger, stop: Stop, window: Window) -> Iterator[None]:
        """Context in which the server does not run; a server that did not run before stays as it is.

        It waits while another run has stopped the server, until a signal comes or the window closes.

        Raises:
            UserError: the server does not stop.
        """
        lock = _lock_of(self._record)
        if not self._claim(lock, run, stop, window):
            yield
            return
        watcher = None
        try:
            left_behind = self._record.exists()
            if left_behind or self._runs:
                self._write_record(run)
                watcher = _watch(self._record)
                say(f"stopping {self.name}")
                self._finish(stop, left_behind)
            else:
                say(f"{self.name} does not run")
            yield
        finally:
            try:
                self._give_back(messenger)
            finally:
                if watcher is not None:  # until here it starts the server if this process is killed
                    watcher.kill()
                    watcher.communicate()
                lock.release()

    def recover(self, messenger: Messenger) -> None:
        """Start the server if a supervisor stopped it and was killed before it could start it."""
        lock = _lock_of(self._record)
        with suppress(Timeout), lock.acquire(timeout=0):  # else another run has it
            self._give_back(messenger)

    def check(self) -> None:
        """Raise a UserError if records of stopped servers cannot be kept."""
        folder = self._record.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise UserError(
                f"cannot write to {folder}, where a record says who stopped the server: {error.strerror}. "
                "XDG_STATE_HOME names another folder"
            ) from error

    @property
    def _record(self) -> Path:
        """A file that exists while somebody has stopped this server."""
        states = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
        identity = zlib.crc32(json.dumps(self.start).encode())
        name = re.sub(r"[^\w.@-]+", "_", self.name)
        return Path(states) / "torchtune-rocm" / f"{name}-{identity:08x}.json"

    @property
    def _runs(self) -> bool:
        """Whether the server runs; without a command that tells, it may."""
        return not self.state or _output(self.state) in _RUNNING

    def _write_record(self, run: Path) -> None:
        record = {
            "server": self.name,
            "start": list(self.start),
            "run": str(run.absolute()),
            "supervisor": os.getpid(),
        }
        replace_text(self._record, json.dumps(record) + "\n")

    def _claim(self, lock: FileLock, run: Path, stop: Stop, window: Window) -> bool:
        """Wait until no other process holds the server; return whether this one does."""
        said = False
        while window.is_open and not stop.signum:
            with suppress(Timeout):
                lock.acquire(timeout=0)
                return True
            if not said:
                said = True
                other = read_json(self._record, []).get("run", "another run")
                say(f"{self.name} is stopped for {other}; {run} waits until it is free")
            stop.wait(1.0, window)
        return False

    def _finish(self, stop: Stop, left_behind: bool) -> None:
        """Stop the server.

        Raises:
            UserError: it still runs.
        """
        code = _end_of(self.stop, _TO_STOP, dict(os.environ), self._record, stop)
        if code == 0 or stop.signum:
            return
        if code is None:
            command = " ".join(self.stop)
            raise UserError(f"{self.name} did not stop within {duration(_TO_STOP)}: {command}")
        if self.state and self._runs:
            raise UserError(f"{self.name} did not stop: {_failed(self.stop, code, self._record)}")
        say(f"the command to stop {self.name} ended with code {code}: it counts as not running")
        if not left_behind:
            self._record.unlink(missing_ok=True)  # so it stays as it is

    def _give_back(self, messenger: Messenger) -> None:
        """Start the server if a record says that it was stopped."""
        if not self._record.exists():
            return
        with suppress(UserError):
            if self.state and self._runs:  # it never stopped, or somebody has started it
                self._record.unlink()
                return
        problem = give_back(self._record)
        if problem:
            messenger.tell("failed", problem)


def give_back(record: Path) -> str:
    """Start the server that ``record`` names, and remove the record; return what went wrong, or an empty text."""
    content = read_json(record, [])
    name = content.get("server", "the server")
    start = content.get("start")
    run = content.get("run")
    if not isinstance(start, list) or not isinstance(run, str):
        return f"{record} is damaged: start the server by hand, and remove the file"
    # a server that finds no memory would end at once
    wait_while_freed(tick=_live)
    say(f"starting {name}")
    environ = dict(os.environ)
    adapter = newest_adapter(Path(run))
    if adapter is not None:
        environ[ADAPTER] = str(adapter)
    try:
        code = _end_of(start, _TO_START, environ, record)
        if not code:
            record.unlink(missing_ok=True)
            return ""
    except (UserError, OSError) as error:
        return f"{name} did not start: {error}"
    return f"{name} did not start: {_failed(start, code, record)}"


def _failed(command: Sequence[str], code: int | None, record: Path) -> str:
    return (
        f"{' '.join(command)} ended with code {code}; {record.with_suffix('.log')} has its output"
    )


def _end_of(
    command: Sequence[str],
    patience: float,
    environ: dict[str, str],
    record: Path,
    stop: Stop | None = None,
) -> int | None:
    """Run a command, with its output in a file beside ``record``.

    With ``stop`` it is ended at a signal, and after ``patience`` seconds. Otherwise it may go on after them.

    Returns:
        The exit code; None if the command did not end by itself.
    """
    environ.pop("NOTIFY_SOCKET", None)  # of this process
    try:
        with record.with_suffix(".log").open("ab") as output:
            process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the run
            )
    except OSError as error:
        raise UserError(f"cannot start {command[0]}: {error.strerror}") from error
    end = time.monotonic() + patience
    while process.poll() is None and time.monotonic() < end:
        if stop is not None and stop.signum:
            break
        _live()
        time.sleep(POLL)
    if process.poll() is None and stop is not None:
        os.killpg(process.pid, signal.SIGTERM)
    return process.returncode


def _live() -> None:
    tell_systemd("READY=1\nWATCHDOG=1")


def _output(command: Sequence[str]) -> str:
    """What a command of systemd prints; a UserError if it does not answer."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{' '.join(command)} does not answer: {error}") from error
    answer = done.stdout.strip()
    if not answer:
        words = " ".join(done.stderr.split())
        raise UserError(f"{' '.join(command)} does not answer: {words}")
    return answer


def _lock_of(record: Path) -> FileLock:
    return FileLock(record.with_suffix(".lock"))


# ---- the process that starts the server if the supervisor is killed


def _watch(record: Path) -> subprocess.Popen:
    """Start the process that starts the server when this one has been killed: the end of its input tells it."""
    return subprocess.Popen(
        [sys.executable, "-m", "rocm_ext.supervise.server", str(record), str(os.getpid())],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def _after_the_supervisor(record: Path, supervisor: int) -> None:
    sys.stdin.buffer.read()
    with _lock_of(record):  # a new supervisor may have it, and then starts the server itself
        content = read_json(record, [])
        if content.get("supervisor") != supervisor:
            return
        say("the supervisor was killed")
        end_earlier(Path(content["run"]))
        problem = give_back(record)
        if problem:
            say(problem)


if __name__ == "__main__":
    _after_the_supervisor(Path(sys.argv[1]), int(sys.argv[2]))
