"""A process of the run with its children: start it, watch it, ask it to save, end it, and say how it ended."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import append_line, disk_errors, read_lines
from rocm_ext.base.heartbeat import APART, NOTES, RETRY
from rocm_ext.base.log import duration
from rocm_ext.base.process import adopt_orphans, signal_at_parents_end
from rocm_ext.base.types import Json
from rocm_ext.runs.progress import position, slowest_step
from rocm_ext.supervise.messages import say, tell_systemd
from rocm_ext.supervise.window import POLL, Stop, Window

LOG = "supervise.log"  # in output_dir: the run's output
_NOTES = ".supervised"  # in output_dir: see rocm_ext.base.heartbeat
PATIENCE = 900.0  # seconds: a shorter silence ends no run, because torch may be compiling
SLOWER = 5  # a step that takes so many times its slowest recent predecessor has hung
_BUSY = (
    0.02  # share of a core; a run that imports or compiles uses more, and one that waits uses less
)
_TO_SAVE = 60.0  # seconds that a hung run has to save


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Context in which no other process supervises the run in ``out``, and its earlier processes have ended."""
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / ".supervise.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"another process supervises {out}; stop it first") from None
    try:
        end_earlier(out)
        adopt_orphans()
        yield
    finally:
        lock.release()


def end_earlier(out: Path) -> None:
    """Wait until the processes of a supervisor that has ended have saved, and kill them if they do not."""
    for line in read_lines(out / _NOTES, ["pid", "began"], problems=[]):
        with suppress(psutil.Error):
            earlier = psutil.Process(line["pid"])
            if abs(earlier.create_time() - line["began"]) < 2:  # the clock may have been set
                say(f"waiting until process {earlier.pid} of an earlier supervisor has saved")
                # The kernel sent it SIGTERM when the earlier supervisor ended.
                _, alive = psutil.wait_procs([earlier], timeout=_TO_SAVE)
                for process in alive:
                    process.kill()
                    process.wait(_TO_SAVE)


@dataclass(frozen=True)
class Ending:
    """How an attempt ended.

    Attributes:
        complete: whether the run is done.
        saved: where it stopped and saved, as it was asked to.
        segment: where it stopped, if another process is to go on.
        why: why it died, otherwise.
        code: exit code of the error that ended it; RETRY if another attempt may succeed.
    """

    complete: bool = False
    saved: str = ""
    segment: str = ""
    why: str = ""
    code: int = RETRY


class Attempt:
    """A process of the run, with its children.

    Args:
        out: the run's output_dir.
        hung_after: seconds of silence that end the run; None: see :data:`PATIENCE`.
        apart: whether no process both trains and evaluates.
    """

    def __init__(self, out: Path, hung_after: float | None, apart: bool) -> None:
        self._out = out
        self._hung_after = hung_after
        self._apart = apart
        self._notes = out / _NOTES
        self._tail = b""  # the end of the output
        self._oom_kills = _oom_kills()
        self._began = position(out)
        self._computed = 0.0  # seconds of CPU time, see _sets_up

    def run(self, command: Sequence[str], stop: Stop, window: Window) -> Ending:
        """Start the run, and wait for its end.

        Raises:
            UserError: it cannot be started, the disk is full, or the killed process does not end.
        """
        self._start(command)
        hung = self._wait(stop, window)
        notes = list(read_lines(self._notes, problems=[]))
        if _complete(notes):
            return Ending(complete=True)
        ended_well = not hung and self._code == 0
        for line in notes:
            if ended_well and "segment" in line:
                return Ending(segment=line["segment"])
            if "error" in line:
                return Ending(why=line["error"], code=line["code"])
            if "saved" in line:
                return Ending(saved=line["saved"], why="a signal stopped it")
        wrong_command = self._code == 2  # as argparse of tune and torchrun ends
        return Ending(why=hung or self._reason(), code=2 if wrong_command else RETRY)

    def _start(self, command: Sequence[str]) -> None:
        with disk_errors(self._out):
            self._notes.write_text("")
            self._log = (self._out / LOG).open("ab")
            self._printed = (self._out / LOG).open("rb")
            self._printed.seek(0, os.SEEK_END)
        environ = os.environ | {NOTES: str(self._notes.absolute())}
        if self._apart:
            environ[APART] = "1"
        environ.pop("NOTIFY_SOCKET", None)  # systemd's, of this process
        self._earlier = {child.pid for child in psutil.Process().children()}
        try:
            self._process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
                # The run saves if this process is killed.
                preexec_fn=partial(signal_at_parents_end, signal.SIGTERM),
            )
        except OSError as error:
            raise UserError(f"cannot start {command[0]}: {error.strerror}", code=2) from error
        began = psutil.Process(self._process.pid).create_time()
        append_line(self._notes, {"pid": self._process.pid, "began": began})

    def _wait(self, stop: Stop, window: Window) -> str:
        """Wait for the end; return that the run hung, or an empty text.

        Ask it to save after a signal, when the window closes, or if it hangs; then kill it if it does not.
        """
        hung = ""
        asked = False
        kill_at = math.inf
        last_sign: tuple[int, int] | None = (
            None  # when the run last beat, and how much it had printed
        )
        alive = shown = (
            0.0  # when the run lived for all that is known, and when it gave the last sign
        )
        while self._process.poll() is None and not stop.again:
            self._follow()
            now = time.monotonic()
            sign = (self._notes.stat().st_mtime_ns, self._printed.tell())
            if sign != last_sign:
                last_sign = sign
                alive = shown = now
            silent = now - alive
            limit = self._limit(silent)
            if not hung and silent > limit:
                if now - shown < PATIENCE and self._sets_up(silent):
                    alive = now
                else:
                    hung = f"it hung for {duration(silent)}"
                    kill_at = now + min(_TO_SAVE, limit)
                    say(hung)
            if not asked and (hung or stop.signum or not window.is_open):
                self._ask_to_save()
                asked = True
            if now > kill_at:
                break
            tell_systemd("READY=1\nWATCHDOG=1")
            time.sleep(POLL)
        self._code = self._kill()
        self._follow()
        self._log.close()
        self._printed.close()
        return hung

    def _sets_up(self, silent: float) -> bool:
        """Return whether the run has made no step yet, and has computed since this was last asked.

        Imports and compilers give no sign of life, however long a busy machine takes for them.
        """
        computed = 0.0
        for process in [psutil.Process(self._process.pid), *self._others()]:
            with suppress(psutil.Error):
                computed += sum(process.cpu_times()[:4])  # includes children that have ended
        busy = computed - self._computed > _BUSY * silent
        self._computed = computed
        return busy and position(self._out) == self._began

    def _kill(self) -> int:
        """Kill the processes of the run, and return the exit code of the first one.

        Ranks and workers are in other process groups; orphans have become children of this process.
        """
        pid = self._process.pid
        end = time.monotonic() + _TO_SAVE
        self._process.kill()
        while True:
            ended = self._process.poll() is not None
            others = self._others()
            if ended and not others:
                return self._process.returncode
            _, alive = psutil.wait_procs(others, timeout=0.5)
            for process in alive:
                with suppress(psutil.Error):
                    process.kill()
            if time.monotonic() > end:
                raise UserError(
                    f"process {pid}, or a child of it, does not end when it is killed: its driver hangs. "
                    "Restart the machine; the same command then goes on"
                )
            time.sleep(0.02)

    def _others(self) -> list[psutil.Process]:
        """The processes of the run but its first one; this process has other children, too."""
        others = []
        for child in psutil.Process().children():
            if child.pid in self._earlier:
                continue
            with suppress(psutil.Error):
                others += child.children(recursive=True)
            if child.pid != self._process.pid:
                others.append(child)
        return others

    def _follow(self) -> None:
        """Pass on the run's new output."""
        new = self._printed.read()
        self._tail = (self._tail + new)[-8192:]
        with suppress(OSError):  # the terminal was closed
            sys.stderr.write(new.decode(errors="replace"))
            sys.stderr.flush()

    @property
    def lines(self) -> list[str]:
        """The last lines that the run printed."""
        lines = self._tail.decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-20:]

    def _limit(self, silent: float) -> float:
        """Return the seconds of silence that end the run; it has been ``silent`` for so many."""
        if self._hung_after is not None:
            return self._hung_after
        if silent <= PATIENCE:
            return PATIENCE
        return max(PATIENCE, SLOWER * slowest_step(self._out))

    def _ask_to_save(self) -> None:
        """Send SIGTERM to the run, or to torchrun's ranks: torchrun would kill them 30 s after it got the signal."""
        with suppress(psutil.Error):
            main = psutil.Process(self._process.pid)
            ranks = [child for child in main.children() if _is_rank(child)]
            for process in ranks or [main]:
                process.terminate()
                process.resume()  # a stopped process takes no signal; systemd also resumes it

    def _reason(self) -> str:
        """Return why the run is not complete: how it ended, and what it printed last."""
        how = f"ended with code {self._code}"
        if self._code < 0:
            how = f"killed by {signal.Signals(-self._code).name}"
        elif self._code == 0:
            how += ", but it is not complete"
        if _oom_kills() > self._oom_kills:
            how += ", and the kernel killed a process because memory ran out"
        lines = self.lines
        return f"{how}; its last line: {lines[-1].strip()}" if lines else how


def _complete(notes: Sequence[Json]) -> bool:
    """Return whether all ranks noted that they are complete.

    The exit code does not say: a process that has started HIP may end with code 0 whatever happened, or crash at the
    very end.
    """
    if any("error" in line for line in notes):
        return False
    complete = [line for line in notes if "complete" in line]
    return bool(complete) and len(complete) == complete[0]["ranks"]


def _is_rank(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "LOCAL_RANK" in process.environ()
    return False


def _oom_kills() -> int:
    """Processes that the kernel has killed since its start because memory ran out; 0 where it does not say."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return 0
