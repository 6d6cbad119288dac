"""``rocm-ext supervise``: keep a run going for days without anybody.

    rocm-ext supervise [options] -- tune run lora_finetune_rocm --config NAME [key=value ...]

Starts the run, or continues the one in its output_dir. A run that dies or hangs begins again from its last checkpoint,
after a pause that grows. The same command continues after a reboot. Ctrl-C saves and ends everything; a second one
kills. A user's error, and three deaths without progress, end it: the last line says why.

--notify runs a shell command with the variables SUPERVISE_EVENT (finished, restarting or failed), SUPERVISE_RUN (the
output_dir), SUPERVISE_WHY, SUPERVISE_STEP and SUPERVISE_LOG (the last lines that the run printed).
"""

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml
from filelock import FileLock, Timeout
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rocm_ext import config
from rocm_ext.base import registry
from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.files import append_line, disk_errors, read_lines
from rocm_ext.base.heartbeat import APART, NOTES, RETRY
from rocm_ext.base.log import duration
from rocm_ext.base.process import (
    adopt_orphans,
    handled,
    signal_at_parents_end,
    stop_signals,
    survive_terminal,
)
from rocm_ext.base.types import Json
from rocm_ext.cli._common import count, note, number, options, refuse_first
from rocm_ext.runs.progress import position, slowest_step

LOG = "supervise.log"  # in output_dir: the run's output
_NOTES = ".supervised"  # in output_dir: see rocm_ext.base.heartbeat
_POLL = 0.2  # seconds between two looks at the run
_PATIENCE = 900.0  # seconds: a shorter silence ends no run, because torch may be compiling
_BUSY = (
    0.02  # share of a core; a run that imports or compiles uses more, and one that waits uses less
)
_SLOWER = 5  # a step that takes so many times its slowest recent predecessor has hung
_TO_SAVE = 60.0  # seconds that a hung run has to save
_LONGEST_PAUSE = 1800.0


def add(parser: ArgumentParser) -> None:
    option = options(parser)
    limit = f"{_PATIENCE:g} s, or {_SLOWER} of its slowest recent steps"
    option(
        "--hung-after S",
        f"end a run that is silent for longer (default: {limit})",
        number(float, 1, 10**7),
    )
    option("--deaths N", "give up after so many without progress (default: 3)", count, 3)
    pause = "seconds before a restart; the next pause is 4 times as long (default: 30)"
    option("--pause S", pause, number(float, 0, 10**7), 30.0)
    option("--evaluate-apart", "evaluate in separate processes, between training processes")
    option(
        "--notify COMMAND", "shell command to run at the end and on trouble, to send a message, say"
    )
    words = "the run, as you would start it"
    parser.add_argument("command", nargs=REMAINDER, metavar="-- tune run ...", help=words)


def run(args: Namespace) -> int:
    """Start the run again and again until it is done, and return the exit code.

    Raises:
        UserError: the command is no run, another process supervises it, a restart cannot mend its error, or it died
            too often.
    """
    command, out = _command(args.command)
    stop = _Stop()
    with _alone(out), handled(stop.note, signal.SIGINT, *stop_signals()):
        deaths = 0
        furthest = position(out)
        while True:
            attempt = _Attempt(out, args)
            try:
                attempt.start(command)
                why = attempt.wait(stop)
            except UserError as stuck:
                attempt.tell("failed", str(stuck))
                raise
            notes = list(read_lines(out / _NOTES, problems=[]))
            segment = next((line["segment"] for line in notes if "segment" in line), None)
            if why is None and segment is None:
                if _complete(notes):
                    attempt.tell("finished", "the run is done")
                    return 0
                why = attempt.reason()
            if stop.signum:
                return 128 + stop.signum
            if why is None:
                _say(f"supervise: the run stopped {segment}; another process goes on")
                continue
            reached = position(out)
            deaths = 1 if reached > furthest else deaths + 1
            furthest = max(reached, furthest)
            error = next((line for line in notes if "error" in line), None)
            if error is None:
                wrong_command = attempt.code == 2  # as argparse of tune and torchrun ends
                error = {"error": why, "code": 2 if wrong_command else RETRY}
            why = f"at step {reached[1]:g}: {error['error']}"
            failed = ""
            if error["code"] != RETRY:
                failed = f"the run ended {why}. Starting it again does not help"
            elif deaths >= args.deaths:
                failed = f"the run died {deaths} times without progress, {why}. {out / LOG} has its output"
            if failed:
                attempt.tell("failed", failed)
                raise UserError(failed, 1 if error["code"] == RETRY else error["code"])
            growth = 4.0 ** min(deaths - 1, 20)
            pause = min(args.pause * growth, _LONGEST_PAUSE)
            attempt.tell("restarting", f"it died {why}; the next start is in {duration(pause)}")
            if stop.within(pause):
                return 128 + stop.signum


def _command(words: list[str]) -> tuple[list[str], Path]:
    """Return the command that continues the run, and its output folder.

    Raises:
        UserError: the system is not Linux, the words start no recipe, or the config cannot be read.
    """
    refuse_first((sys.platform != "linux", "supervise needs Linux; on Windows use WSL2"))
    if words[:1] == ["--"]:
        words = words[1:]
    table = registry.recipes()
    named = [word for word in words if word in table or registry.is_recipe_file(word)]
    if not named:
        raise UserError(
            "name the run after --, such as -- tune run lora_finetune_rocm --config my_run.yaml",
            code=2,
        )
    first = named[0]
    recipe = table.get(first) or registry.read_recipe(Path(first))
    at = words.index(first)
    name, overrides = config.command_line(words[at + 1 :])
    machines = re.search(r"--nnodes[ =](\d+)(?::(\d+))?", " ".join(words[:at]))
    several = machines is not None and any(int(number) > 1 for number in machines.groups("0"))
    anew = any(item.replace(" ", "").lower() == "overwrite_output_dir=true" for item in overrides)
    refuse_first(
        (several, "supervise watches a run on one machine; drop --nnodes"),
        (anew, "supervise continues the run in output_dir; drop overwrite_output_dir=True"),
    )
    defaults = config.defaults(recipe)
    content = config.layers.read(config.find(name))
    try:
        given = OmegaConf.from_dotlist([item for item in overrides if "=" in item])
        out = str(OmegaConf.merge(defaults, content, given).output_dir)
    except (
        OmegaConfBaseException,
        TypeError,
        ValueError,
        yaml.YAMLError,
    ) as error:  # OmegaConf raises them, too
        raise UserError(f"config {name}: {one_line(error)}") from error
    program = words[0]
    if program == "tune":
        beside = Path(sys.executable).with_name(
            "tune"
        )  # this environment's; another one may be active
        program = str(beside) if beside.exists() else program
    command = [program, *words[1:], "resume_from_checkpoint=True"]
    return command, Path(os.path.expanduser(out))


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Context in which no other process supervises the run in ``out``, and its earlier processes have ended."""
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / ".supervise.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"another process supervises {out}; stop it first") from None
    try:
        for line in read_lines(out / _NOTES, ["pid", "began"], problems=[]):
            with suppress(psutil.Error):
                earlier = psutil.Process(line["pid"])
                if abs(earlier.create_time() - line["began"]) < 2:  # the clock may have been set
                    _say(
                        f"supervise: waiting until process {earlier.pid} of an earlier supervisor has saved"
                    )
                    # The kernel sent it SIGTERM when the earlier supervisor ended.
                    _, alive = psutil.wait_procs([earlier], timeout=_TO_SAVE)
                    for process in alive:
                        process.kill()
                        process.wait(_TO_SAVE)
        adopt_orphans()
        yield
    finally:
        lock.release()


class _Stop:
    """The signals to stop that came: Ctrl-C, SIGTERM and SIGHUP.

    Attributes:
        signum: number of the first signal; 0 before.
        again: whether a second Ctrl-C came.
    """

    signum = 0
    again = False

    def note(self, signum: int, frame: Any) -> None:
        """Handle a signal."""
        if not self.signum:
            self.signum = signum
        elif signum == signal.SIGINT:
            self.again = True
        survive_terminal()

    def within(self, seconds: float) -> bool:
        """Wait; return whether a signal came."""
        end = time.monotonic() + seconds
        while not self.signum:
            left = end - time.monotonic()
            if left <= 0:
                break
            _tell_systemd("WATCHDOG=1")
            time.sleep(min(left, _POLL))
        return bool(self.signum)


class _Attempt:
    """A process of the run, with its children.

    Attributes:
        code: the exit code; negative: the signal that killed the process.
    """

    def __init__(self, out: Path, args: Namespace) -> None:
        self._out = out
        self._args = args
        self._notes = out / _NOTES
        self._tail = b""  # the end of the output
        self._oom_kills = _oom_kills()
        self._began = position(out)
        self._computed = 0.0  # seconds of CPU time, see _sets_up

    def start(self, command: Sequence[str]) -> None:
        """Start the run.

        Raises:
            UserError: it cannot be started, or the disk is full.
        """
        with disk_errors(self._out):
            self._notes.write_text("")
            self._log = (self._out / LOG).open("ab")
            self._printed = (self._out / LOG).open("rb")
            self._printed.seek(0, os.SEEK_END)
        environ = os.environ | {NOTES: str(self._notes.absolute())}
        if self._args.evaluate_apart:
            environ[APART] = "1"
        environ.pop("NOTIFY_SOCKET", None)  # systemd's, of this process
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

    def wait(self, stop: _Stop) -> str | None:
        """Wait for the end, and return why the run died, or None if it is complete.

        After a signal, or if the run hangs, ask it to save, and kill it if it does not.

        Raises:
            UserError: the killed process does not end.
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
                if now - shown < _PATIENCE and self._sets_up(silent):
                    alive = now
                else:
                    hung = f"it hung for {duration(silent)}"
                    kill_at = now + min(_TO_SAVE, limit)
                    _say(f"supervise: {hung}")
            if (hung or stop.signum) and not asked:
                self._ask_to_save()
                asked = True
            if now > kill_at:
                break
            _tell_systemd("READY=1\nWATCHDOG=1")
            time.sleep(_POLL)
        self.code = self._kill()
        self._follow()
        self._log.close()
        self._printed.close()
        if hung:
            return hung
        return None if self.code == 0 else self.reason()

    def _sets_up(self, silent: float) -> bool:
        """Return whether the run has made no step yet, and has computed since this was last asked.

        Imports and compilers give no sign of life, however long a busy machine takes for them.
        """
        computed = 0.0
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                computed += sum(process.cpu_times()[:4])  # includes children that have ended
        busy = computed - self._computed > _BUSY * silent
        self._computed = computed
        return busy and position(self._out) == self._began

    def _kill(self) -> int:
        """Kill the processes of the run, and return the exit code of the first one.

        Ranks and workers are in other process groups; orphans have become children of this process.
        """
        here, pid = psutil.Process(), self._process.pid
        end = time.monotonic() + _TO_SAVE
        self._process.kill()
        while self._process.poll() is None or here.children():
            others = [child for child in here.children(recursive=True) if child.pid != pid]
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
        return self._process.returncode

    def tell(self, event: str, why: str) -> None:
        """Report an event on the terminal, to systemd and by the user's command."""
        _say(f"supervise: {event}: {why}")
        _tell_systemd(f"STATUS={event}: {why}")
        if self._args.notify is None:
            return
        environ = os.environ | {
            "SUPERVISE_EVENT": event,
            "SUPERVISE_RUN": str(self._out),
            "SUPERVISE_WHY": why,
            "SUPERVISE_STEP": f"{position(self._out)[1]:g}",
            "SUPERVISE_LOG": "\n".join(self._lines()),
        }
        with suppress(
            subprocess.TimeoutExpired, OSError, ValueError
        ):  # ValueError: the run printed a NUL
            ended = subprocess.run(self._args.notify, shell=True, env=environ, timeout=60)
            if ended.returncode == 0:
                return
        _say("supervise: the command of --notify failed, or took more than 60 s")

    def _follow(self) -> None:
        """Pass on the run's new output."""
        new = self._printed.read()
        self._tail = (self._tail + new)[-8192:]
        with suppress(OSError):  # the terminal was closed
            sys.stderr.write(new.decode(errors="replace"))
            sys.stderr.flush()

    def _lines(self) -> list[str]:
        lines = self._tail.decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-20:]

    def _limit(self, silent: float) -> float:
        """Return the seconds of silence that end the run; it has been ``silent`` for so many."""
        if self._args.hung_after is not None:
            return self._args.hung_after
        if silent <= _PATIENCE:
            return _PATIENCE
        return max(_PATIENCE, _SLOWER * slowest_step(self._out))

    def _ask_to_save(self) -> None:
        """Send SIGTERM to the run, or to torchrun's ranks: torchrun would kill them 30 s after it got the signal."""
        with suppress(psutil.Error):
            main = psutil.Process(self._process.pid)
            ranks = [child for child in main.children() if _is_rank(child)]
            for process in ranks or [main]:
                process.terminate()
                process.resume()  # a stopped process takes no signal; systemd also resumes it

    def reason(self) -> str:
        """Return why the run is not complete: how it ended, and what it printed last."""
        how = f"ended with code {self.code}"
        if self.code < 0:
            how = f"killed by {signal.Signals(-self.code).name}"
        elif self.code == 0:
            how += ", but it is not complete"
        if _oom_kills() > self._oom_kills:
            how += ", and the kernel killed a process because memory ran out"
        lines = self._lines()
        return f"{how}; its last line: {lines[-1].strip()}" if lines else how


def _complete(notes: Sequence[Json]) -> bool:
    """Return whether all ranks noted that they are complete.

    The exit code does not say: a process that has started HIP may end with code 0 whatever happened.
    """
    if any("error" in line for line in notes):
        return False
    complete = [line for line in notes if "complete" in line]
    return bool(complete) and len(complete) == complete[0]["ranks"]


def _say(text: str) -> None:
    with suppress(OSError):  # the terminal was closed, or the reader of a pipe has left
        note(text)


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


def _tell_systemd(text: str) -> None:
    """Tell systemd of this service's state, see sd_notify(3); elsewhere do nothing."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # a name in Linux's abstract namespace
        address = "\0" + address[1:]
    with (
        suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as channel,
    ):
        channel.sendto(text.encode(), address)
