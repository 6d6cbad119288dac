"""Python as a model's tool: an interpreter in the sandbox that lives as long as the conversation."""

import contextlib
import functools
import os
import re
import signal
import socket
import sys
import weakref
from collections.abc import Sequence

from rocm_ext.environments.tools import Fault
from rocm_ext.sandbox import Limits, Sandbox, check_limits, interpreter
from rocm_ext.sandbox.children import descendants, kill, readable, supervise
from rocm_ext.verifiers.base import short
from rocm_ext.verifiers.python.start import compiled, start

_START = 60.0  # seconds that the interpreter may take to start
_CODE = 50_000  # bytes of a call: the socket takes them at once
_ROUNDS = 20  # times that it kills processes which start others
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Python:
    """Python as a tool, whose names and files in /tmp last from call to call.

    It runs in the sandbox of the verifiers, one interpreter per conversation, from the first call on. Between calls it
    is stopped, and the processes that a call has started are killed. An interpreter that exceeds a limit is killed; the
    model gets a message, and its next call starts a new one.

    Args:
        timeout: seconds of wall time for a call.
        memory_mb: memory limit, at least 128, which numpy needs.
        sandbox: ``bubblewrap``, or ``rlimits`` for a model that you trust; see rocm_ext.sandbox.
        python: the interpreter, whose installed packages the code can import; by default this one.

    Raises:
        UserError: the sandbox or the interpreter does not work here, or an argument is out of range.
    """

    def __init__(
        self,
        timeout: float = 10.0,
        memory_mb: int = 512,
        sandbox: str = "bubblewrap",
        python: str | None = None,
    ) -> None:
        check_limits("Python", timeout, memory_mb)
        # the wall time limits a call; a limit on CPU time would add up over the calls
        self._limits = Limits(seconds=timeout, cpu_seconds=0, memory_mb=memory_mb)
        self._where = _sandbox(sandbox, python or sys.executable)
        self._running: _Interpreter | None = None

    def python(self, code: str) -> str:
        """Run Python code. You get what it prints and the value of its last expression.

        Names stay defined from call to call. There is no network.

        Args:
            code: the code.
        """
        data = code.encode("utf-8", "replace") or b"\n"
        if len(data) > _CODE:
            raise ValueError(f"the code has {len(data)} bytes, more than {_CODE}")
        if self._running is None:
            self._running = _Interpreter(*self._where, self._limits)
        output, ended = self._running.run(data)
        text = output.decode("utf-8", "replace").replace("\r\n", "\n")
        text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text).strip("\n")
        if ended:
            self._running.close()
            self._running = None
            text += f"\nerror: {ended}; all names and files are lost, and the next call starts a new interpreter"
        return text.removeprefix("\n") or "(no output)"


@functools.cache  # forks of a process that has called it begin with the answer
def _sandbox(kind: str, python: str) -> tuple[Sandbox, str, Sequence[str]]:
    """Return a sandbox that works, the interpreter's file and the folders of its packages."""
    folders, packages, path = interpreter(python)
    sandbox = Sandbox(kind, folders)
    sandbox.check()
    compiled(path)
    return sandbox, path, packages


class _Interpreter:
    """A process of ``_interpreter.py``.

    Its socket carries code in and a byte out. If the code sends a byte, it only ends its call too early.
    """

    def __init__(
        self, sandbox: Sandbox, path: str, packages: Sequence[str], limits: Limits
    ) -> None:
        self._limits = limits
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.setblocking(False)
        with theirs:
            task = {"path": list(packages), "alone": sandbox.kind != "bubblewrap"}
            running = start("interpreter", sandbox, path, task, limits, [theirs.fileno()])
        self._child = running.child
        self.close = weakref.finalize(self, running.close)
        process = self._child.process
        if not readable(self._link.fileno(), _START) or not self._link.recv(1):
            raise Fault(f"Python did not start in the sandbox: {short(running.last_words())}")
        assert process.stdout is not None
        assert process.stderr is not None
        self._stdout = process.stdout
        process.stderr.close()
        process.stderr = None  # the interpreter's stderr goes to stdout
        # bwrap's processes, and last the interpreter
        self._pids = [process.pid, *descendants(process.pid)]
        self._rest()

    def run(self, code: bytes) -> tuple[bytes, str]:
        """Run code: its output, and why the interpreter must be closed, or "" if it can go on."""
        child = self._child
        seconds = self._limits.seconds
        child.stdout.clear()
        with contextlib.suppress(OSError):  # it has died; reading finds its end
            os.kill(self._pids[-1], signal.SIGCONT)
            self._link.send(code)
        in_time = supervise([child], seconds, self._link.fileno())
        rests = self._rest()
        with contextlib.suppress(BlockingIOError, ValueError):  # all is read; the pipe is closed
            while len(child.stdout) < child.output_bytes:
                part = os.read(self._stdout.fileno(), 1 << 16)
                if not part:
                    break
                child.stdout += part
        answered = b""
        if in_time:
            with contextlib.suppress(OSError):
                answered = self._link.recv(1)
        why = ""
        if child.killed:
            why = f"the code {child.killed}"
        elif not in_time:
            why = f"the code ran for more than {seconds:g} s"
        elif not answered:
            why = "the interpreter ended"
        elif not rests:
            why = "the code left processes that go on"
        elif self._stdout.closed:
            why = "the code closed its output"
        return bytes(child.stdout), why

    def _rest(self) -> bool:
        """Stop the interpreter and kill its child processes; False if some are left."""
        known = set(self._pids)
        with contextlib.suppress(OSError):
            os.kill(self._pids[-1], signal.SIGSTOP)
        for _ in range(_ROUNDS):
            others = set(descendants(self._pids[0])) - known
            if not others:
                return True
            known |= others  # zombies stay until the interpreter goes on
            kill(others)
        return False
