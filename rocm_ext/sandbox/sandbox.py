"""A program in the sandbox: how it starts, runs and ends."""

import contextlib
import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rocm_ext.base.errors import UserError, require_known
from rocm_ext.sandbox import bubblewrap
from rocm_ext.sandbox.children import DYING, MARK, Child, readable, supervise
from rocm_ext.sandbox.limits import ENVIRONMENT, Limits, tool

KINDS = ("bubblewrap", "rlimits")
F_ADD_SEALS, F_SEAL_ALL = 1033, 15  # <linux/fcntl.h>; seal, shrink, grow, write
START = 60.0  # seconds that bwrap may take to start its first process
SPARE = 4  # processes of bwrap
INODES = 20_000  # files, folders and links in /tmp and /dev/shm; one takes 1 to 5 KB of the kernel's memory
BOX = "{box}"  # in argv: the folder with the run's files
FOLDER = "ROCM_EXT_FOLDER"  # environment variable: the :func:`folder_of_runs` of this process and its children
USER = "{user}"  # in argv: the user id that the program must change to, unless it is empty


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        returncode: the program's exit status; 128 + n or -n after signal n.
        stdout, stderr: its output.
        seconds: wall time.
        timed_out: whether it exceeded the wall or CPU time.
        started: False if the sandbox failed; ``stderr`` says why.
        killed: the limit, other than time, for which we killed it; empty if we did not.
    """

    returncode: int
    stdout: bytes
    stderr: bytes
    seconds: float
    timed_out: bool
    started: bool
    killed: str


class RunningProgram:
    """A started run; see :meth:`Sandbox.start`."""

    def __init__(self, child: Child, status: int | None, cleanup: contextlib.ExitStack) -> None:
        self.child = child
        self._status = status
        self._cleanup = cleanup

    def started(self) -> bool:
        """Whether the sandbox was set up; for runs that have ended by themselves."""
        if self._status is None:
            return True
        os.set_blocking(self._status, False)
        with contextlib.suppress(BlockingIOError):
            return b"exit-code" in os.read(self._status, 4096)
        return False

    def last_words(self) -> str:
        """End a run that did not start; the text on its stderr."""
        self.child.kill()
        said = self.child.process.stderr.read() if self.child.process.stderr else b""
        self.close()
        return said.decode("utf-8", "replace")

    def close(self) -> None:
        """Kill the run and all its processes, and remove its files."""
        self.child.close()
        self._cleanup.close()


class Sandbox:
    """Runs programs under limits; the docstring of :mod:`rocm_ext.sandbox` compares the kinds.

    Args:
        kind: ``bubblewrap`` or ``rlimits``.
        readable: further folders, which the program sees read-only at the same path.

    Raises:
        UserError: the kind is unknown, or a folder would expose the home.
    """

    def __init__(self, kind: str = "bubblewrap", readable: Sequence[str] = ()) -> None:
        require_known("sandbox", kind, KINDS)
        home = Path.home().resolve()
        for folder in readable:
            if home.is_relative_to(Path(folder).resolve()):
                raise UserError(
                    f"the program needs {folder}, which holds your home; the sandbox hides that, so install the "
                    "program elsewhere"
                )
        self.kind = kind
        self.readable = tuple(dict.fromkeys(readable))

    def check(self) -> None:
        """Run a tiny program; raises UserError, with advice, if that fails on this machine."""
        if not sys.platform.startswith("linux"):
            raise UserError(f"the sandbox needs Linux, this is {sys.platform}")
        if self.kind == "bubblewrap":
            bubblewrap.usable_mode()
        else:
            tool("prlimit")
        outcome = self.run(["/bin/echo", "ok"], limits=Limits(seconds=20))
        if outcome.stdout != b"ok\n":
            said = outcome.stderr.decode("utf-8", "replace").split()
            why = " ".join(said) or f"exit status {outcome.returncode}"
            raise UserError(f"the sandbox does not work here: {why}{bubblewrap.advice()}")

    def start(
        self,
        argv: Sequence[str],
        files: Mapping[str, bytes | str] | None = None,
        stdin: bytes | None = None,
        limits: Limits | None = None,
        pass_fds: Sequence[int] = (),
    ) -> RunningProgram:
        """Start a program. The caller supervises and closes it.

        Args:
            argv: absolute path of the program, and arguments. ``{box}`` stands for the folder with ``files``. A program
                with an argument ``{user}`` must change to that user and group id, unless it is empty, before it runs
                code that nobody has read: this saves the start of setpriv.
            files: name -> content, read-only and executable in the sandbox.
            stdin: the program's input; by default it is empty.
            limits: the run's limits; by default those of :class:`Limits`.
            pass_fds: descriptors that the program inherits under the same numbers.
        """
        limits = limits or Limits()
        # the sandbox has no /a, so it does not find /a/../usr/bin/x
        argv = [os.path.normpath(argv[0]), *argv[1:]]
        data = {}
        for name, content in (files or {}).items():
            if isinstance(content, str):
                content = content.encode("utf-8", "surrogatepass")
            data[name] = content
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            fds = list(pass_fds)
            path = status = None
            mark = user = ""
            if self.kind == "bubblewrap":
                uid = bubblewrap.ids.take()
                ours.callback(bubblewrap.ids.give_back, uid)
                status, writer = _pipe(ours, theirs)
                blocked, _ = _pipe(theirs, theirs)  # bwrap waits until we close the other end
                command, opened = bubblewrap.command_line(
                    data, self.readable, limits, writer, blocked
                )
                for fd in opened:
                    theirs.callback(os.close, fd)
                fds += [*opened, writer, blocked]
                if USER not in argv:
                    command += bubblewrap.as_user(uid)
                command += [arg.replace(BOX, "/box") for arg in argv]
                user = "" if uid is None else str(uid)
                path, _ = bubblewrap.bwrap()
                cwd, environment = "/", {}  # the program can read bwrap's environment in /proc/1
            else:
                folder, cwd = _working_folder(data)
                ours.callback(shutil.rmtree, folder, ignore_errors=True)
                command = limits.prlimit() + [arg.replace(BOX, folder) for arg in argv]
                mark = uuid.uuid4().hex  # no PID namespace ends all its processes
                environment = ENVIRONMENT | {"HOME": cwd, "TMPDIR": cwd, MARK: mark}
            process = subprocess.Popen(
                [user if part == USER else part for part in command],
                executable=path,
                stdin=subprocess.DEVNULL if stdin is None else _sealed(stdin, theirs),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=fds,
                cwd=cwd,
                env=environment,
                start_new_session=True,
                bufsize=0,
            )
            inodes = INODES if self.kind == "bubblewrap" else None
            child = Child(
                process,
                b"",
                limits.output_bytes,
                limits.memory_mb,
                limits.processes + SPARE,
                inodes,
                mark,
            )
            if status is not None:
                # bwrap writes the files under the limits
                largest = max(map(len, data.values()), default=0)
                file_mb = max(limits.file_mb, -(-largest >> 20))
                _limit(child, status, replace(limits, file_mb=file_mb))
            return RunningProgram(child, status, ours.pop_all())

    def run(
        self,
        argv: Sequence[str],
        files: Mapping[str, bytes | str] | None = None,
        stdin: bytes | None = None,
        limits: Limits | None = None,
    ) -> Outcome:
        """Run a program until it ends or exceeds a limit; arguments as for :meth:`start`."""
        limits = limits or Limits()
        begin = time.monotonic()
        running = self.start(argv, files, stdin, limits)
        try:
            in_time = supervise([running.child], limits.seconds)
            child = running.child
            return Outcome(
                returncode=-9 if child.returncode is None else child.returncode,
                stdout=bytes(child.stdout),
                stderr=bytes(child.stderr),
                seconds=time.monotonic() - begin,
                timed_out=not in_time or child.returncode in (128 + 24, -24),  # SIGXCPU
                started=not in_time or bool(child.killed) or running.started(),
                killed=child.killed,
            )
        finally:
            running.close()


def _pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe whose ends the two stacks close."""
    ends = os.pipe()
    reader.callback(os.close, ends[0])
    writer.callback(os.close, ends[1])
    return ends


def _sealed(content: bytes, stack: contextlib.ExitStack) -> int:
    """A file in memory that nobody can change; the stack closes it."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, fd)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_ALL)
    return fd


def _limit(child: Child, status: int, limits: Limits) -> None:
    """Set the limits of bwrap's first process in the sandbox while it is blocked.

    This is faster than a program in the sandbox that sets them.
    """
    said = b""
    match = None
    while match is None and readable(status, START):
        part = os.read(status, 4096)
        if not part:
            return  # bwrap failed
        said += part
        match = re.search(rb'"child-pid": (\d+)[, }]', said)
    try:
        if match is None:
            raise OSError(f"bwrap did not start within {START:g} s")
        limits.impose(int(match[1]), bubblewrap.limits_processes())
    except OSError as problem:
        missing = isinstance(problem, FileNotFoundError | ProcessLookupError)
        if missing and child.ends_within(DYING):
            return  # bwrap has failed, and says why itself
        child.close()
        raise UserError(f"the sandbox's limits cannot be set: {problem}") from problem


def folder_of_runs() -> str:
    """The name of a folder for the files of runs in processes that will be killed, and so cannot remove them.

    The first run creates it. The code that sets ``FOLDER`` to it removes it afterwards.
    """
    return str(Path(tempfile.gettempdir(), f"rocm-ext-{uuid.uuid4().hex}"))


def _working_folder(files: Mapping[str, bytes]) -> tuple[str, str]:
    """A temporary folder with ``files``, and an empty subfolder to work in."""
    parent = os.environ.get(FOLDER)
    if parent:
        os.makedirs(parent, mode=0o700, exist_ok=True)
    folder = tempfile.mkdtemp(prefix="rocm-ext-", dir=parent)
    for name, content in files.items():
        Path(folder, name).write_bytes(content)
        Path(folder, name).chmod(0o555)
    work = str(Path(folder, "work"))
    os.mkdir(work)
    return folder, work


class Interpreter(NamedTuple):
    """A Python interpreter for the sandbox.

    Attributes:
        folders: folders that it must be able to read.
        packages: folders with its installed packages.
        path: its file with links resolved, since the sandbox may not show the links' folders.
    """

    folders: tuple[str, ...]
    packages: tuple[str, ...]
    path: str


@functools.cache
def interpreter(executable: str) -> Interpreter:
    """Ask a Python interpreter for its folders; raises UserError if the interpreter does not run."""
    code = "import os,site,sys;p=[sys.prefix,sys.base_prefix,os.path.realpath(sys.base_prefix)];"
    code += "print(*p,sep='\\0',end='\\1');print(*site.getsitepackages(),sep='\\0',end='\\1');"
    code += "print(os.path.realpath(sys.executable),end='')"
    try:
        result = subprocess.run(
            [executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"python {executable!r} does not run: {error}") from error
    folders, packages, path = result.stdout.split("\1")
    different = dict.fromkeys(folders.split("\0"))
    needed = tuple(folder for folder in different if folder not in ("/usr", "/"))
    return Interpreter(needed, tuple(packages.split("\0")), path)
