"""Running code that nobody has read: a model's.

``Sandbox("bubblewrap")`` gives each run, by bubblewrap, namespaces of its own (no network; processes that end with
the run, daemons too), a read-only system (/usr, the libraries, the interpreter's or compiler's folder; no home, no
repository, nothing of /etc but what the loader needs), a /tmp of limited size in memory that vanishes, an empty
environment, no capabilities, a user id of nobody's, a filter of system calls (x86-64), and limits: wall and CPU
time, memory, processes, file size, open files, output.

As root the run has a real user id from 2 000 000 000 up that nobody else has, so that it may not start more
processes than it should; as another user it has a user namespace, in which the kernel counts its processes apart
from the user's others since Linux 5.14. Elsewhere processes are counted from outside, every 50 ms.

What this does not cover:

- holes in the kernel or in bubblewrap: both sides share one kernel. For more, use a virtual machine
- side channels: CPU caches, timing, load; the code can see the machine's CPU and kernel version
- memory is limited for each process by the address space and for all processes of a run together by looks at their
  resident memory, 50 ms apart: in between, at most processes x memory may be used. No cgroup is made. What the kernel
  holds for the run besides (pipes, sockets, page tables) is bounded by the numbers of processes and open files only
- what is installed in the interpreter's folder can be read: keep secrets out of site-packages
- a machine that is not x86-64 has no filter of system calls; nested user namespaces are then possible

``Sandbox("rlimits")`` only sets the limits, a temporary working folder and an empty environment: the code reads
and writes whatever you may, reaches the network, and can signal and outlive you. It is for code that you trust,
where bubblewrap cannot be had, and is never chosen by itself.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocm_ext.errors import UserError, nearest
from rocm_ext.verifiers.sandbox import bubblewrap
from rocm_ext.verifiers.sandbox.limits import ENVIRONMENT, Limits, tool
from rocm_ext.verifiers.sandbox.process import Child, descendants, supervise

KINDS = ("bubblewrap", "rlimits")
BOX = "{box}"  # in argv: the folder with the run's files


@dataclass(frozen=True)
class Outcome:
    """How a run ended. ``returncode`` is 128 + n or -n after signal n.

    ``started`` is False where the sandbox itself failed, with its words in ``stderr``. ``killed`` says which limit
    we killed it for, if not for the time; ``too_big``: it was the memory.
    """

    returncode: int
    stdout: bytes
    stderr: bytes
    seconds: float
    timed_out: bool
    started: bool
    killed: str
    too_big: bool


class Running:
    """A started run; see :meth:`Sandbox.start`."""

    def __init__(self, child: Child, status: int | None, folder: str | None) -> None:
        self.child = child
        self._status, self._folder = status, folder

    def started(self) -> bool:
        """Whether the sandbox was set up; known only once the run has ended by itself."""
        if self._status is None:
            return True
        os.set_blocking(self._status, False)
        with contextlib.suppress(BlockingIOError):
            return b"exit-code" in os.read(self._status, 4096)
        return False

    def close(self) -> None:
        """Kill the run with all that it started, and forget its files."""
        daemons = descendants(self.child.process.pid) if self._folder else []
        self.child.close()
        for pid in daemons:  # without a PID namespace only what still hangs below it can be found
            with contextlib.suppress(OSError):
                os.kill(pid, 9)
        if self._status is not None:
            os.close(self._status)
            self._status = None
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


class Sandbox:
    """Runs programs under limits; see the module's text for what each kind does and does not.

    Args:
        kind: ``bubblewrap`` or ``rlimits``.
        readable: folders that the program needs besides the system, seen read-only at the same path.

    Raises:
        UserError: an unknown kind, or a folder that would expose the home.
    """

    def __init__(self, kind: str = "bubblewrap", readable: Sequence[str] = ()) -> None:
        if kind not in KINDS:
            raise UserError(f"sandbox {kind!r} is unknown{nearest(kind, KINDS)}")
        home = Path.home().resolve()
        for folder in readable:
            path = Path(folder).resolve()
            if path == home or path in home.parents:
                raise UserError(f"the sandbox would have to show {folder}, which holds your home; install it elsewhere")
        self.kind, self.readable = kind, tuple(dict.fromkeys(readable))

    def check(self) -> None:
        """Run a tiny program.

        Raises:
            UserError: this machine cannot; with what to do about it.
        """
        if not sys.platform.startswith("linux"):
            raise UserError(f"the sandbox needs Linux, this is {sys.platform}")
        if self.kind == "bubblewrap":
            bubblewrap.usable_mode()
        else:
            tool("prlimit")
        outcome = self.run(["/bin/echo", "ok"], limits=Limits(seconds=20))
        if outcome.stdout != b"ok\n":
            why = " ".join(outcome.stderr.decode("utf-8", "replace").split()) or f"exit status {outcome.returncode}"
            raise UserError(f"the sandbox does not work here: {why}{bubblewrap.advice()}")

    def start(
        self,
        argv: Sequence[str],
        files: Mapping[str, bytes | str] | None = None,
        stdin: bytes | None = None,
        limits: Limits | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Running:
        """Start a program; the caller supervises it and then closes it.

        Args:
            argv: absolute program and arguments, in which ``{box}`` stands for the folder with ``files``.
            files: name -> content; read-only and executable in the sandbox.
            stdin: None: empty.
            limits: None: the defaults.
            pass_fds: descriptors that the program inherits under the same numbers.
        """
        limits = limits or Limits()
        data = {name: text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
                for name, text in (files or {}).items()}  # fmt: skip
        with contextlib.ExitStack() as stack:
            fds = list(pass_fds)
            status = folder = None
            if self.kind == "bubblewrap":
                status, writer = os.pipe()
                stack.callback(os.close, writer)
                command, opened = bubblewrap.command_line(data, self.readable, limits, writer)
                for fd in opened:
                    stack.callback(os.close, fd)
                fds += [*opened, writer]
                command += [arg.replace(BOX, "/box") for arg in argv]
                cwd, environment = "/", {}  # bwrap's own environment can be read in /proc/1
            else:
                folder = tempfile.mkdtemp(prefix="rocm-ext-")
                for name, content in data.items():
                    Path(folder, name).write_bytes(content)
                    Path(folder, name).chmod(0o555)
                cwd = str(Path(folder, "work"))
                os.mkdir(cwd)
                command = limits.prlimit(processes=False) + [arg.replace(BOX, folder) for arg in argv]
                environment = ENVIRONMENT | {"HOME": cwd, "TMPDIR": cwd}
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=fds,
                    cwd=cwd,
                    env=environment,
                    start_new_session=True,
                    bufsize=0,
                )
            except BaseException:
                if status is not None:
                    os.close(status)
                if folder:
                    shutil.rmtree(folder, ignore_errors=True)
                raise
        spare = 4  # bwrap's own and what sets the limits
        child = Child(process, stdin or b"", limits.output_bytes, limits.memory_mb, limits.processes + spare)
        child.unsized_tmp = self.kind == "bubblewrap" and not bubblewrap.sized()
        return Running(child, status, folder)

    def run(
        self,
        argv: Sequence[str],
        files: Mapping[str, bytes | str] | None = None,
        stdin: bytes | None = None,
        limits: Limits | None = None,
    ) -> Outcome:
        """Run a program to its end or to a limit; the arguments are those of :meth:`start`."""
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
                too_big=child.too_big,
            )
        finally:
            running.close()


@functools.cache
def interpreter(executable: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The folders that a Python interpreter needs to be readable, and those with its installed packages.

    Raises:
        UserError: it does not run.
    """
    code = "import os,site,sys;p=[sys.prefix,sys.base_prefix,os.path.realpath(sys.base_prefix)];"
    code += "print(*p,sep='\\0',end='\\1');print(*site.getsitepackages(),sep='\\0',end='')"
    try:
        result = subprocess.run([executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"python {executable!r} does not run: {error}") from error
    folders, packages = result.stdout.split("\1")
    found = [folder for folder in dict.fromkeys(folders.split("\0")) if folder not in ("/usr", "/")]
    return tuple(found), tuple(packages.split("\0"))
