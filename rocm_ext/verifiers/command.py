"""A user's program as the verifier."""

import contextlib
import functools
import json
import os
import select
import selectors
import shutil
import subprocess
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from rocm_ext.base.errors import UserError
from rocm_ext.base.types import Json, Row
from rocm_ext.sandbox import helper
from rocm_ext.sandbox.children import CHUNK, MARK, Child, supervise
from rocm_ext.verifiers.base import Result, Verifier, check_time, error, short

MAX_LINE = 1 << 20  # bytes of an answer
TAIL = 4096  # bytes of stderr that are kept


class Command(Verifier):
    """Asks any program: JSON ``{"completion", "row"}`` on its stdin, ``{"verdict", "reward", "detail"}`` on its stdout.

    The answer may also have ``parts``, see :class:`rocm_ext.verifiers.Result`.

    The program is trusted: it runs as you, in the current directory, without a sandbox. If it fails, hangs or answers
    anything else, the verdict is ERROR. In the end it is killed with all processes that it started, except one that has
    lost its parent and cleared its environment.

    A persistent program answers many requests. A request is one line of JSON that also has an ``id``; the answer is one
    line that repeats it. The program must print nothing else on stdout and flush its answers. If it dies, hangs or
    answers anything else, it is ended and started anew. Each worker has one, which ends with it.

    Args:
        command: program and arguments, run without a shell.
        timeout: seconds of wall time for one verdict.
        persistent: keep the program running between verdicts.
    """

    def __init__(
        self, command: Sequence[str], timeout: float = 30.0, persistent: bool = False
    ) -> None:
        listed = bool(command) and not isinstance(command, str)
        if not (listed and all(isinstance(part, str) for part in command)):
            raise UserError(
                f"Command: command must be a list of strings, [program, argument, ...], found {command!r}"
            )
        check_time("Command", timeout)
        self.command = list(command)
        self.timeout = timeout
        self.persistent = persistent
        self._program: _Program | None = None
        self._asked = 0
        self._lock = threading.Lock()

    def check(self) -> None:
        path = shutil.which(self.command[0])
        if not path:
            raise UserError(
                f"Command: there is no program {self.command[0]!r} here or in PATH (in {os.getcwd()})"
            )

    def __call__(self, completion: str, row: Row) -> Result:
        request = {"completion": completion, "row": dict(row)}
        try:
            if self.persistent:
                with self._lock:
                    return self._ask(request)
            return self._run(json.dumps(request).encode())
        except OSError as problem:
            return error(f"{self.command[0]} cannot be run: {problem}")
        except _Fault as fault:
            return error(f"{self.command[0]} {fault}")

    def _run(self, request: bytes) -> Result:
        """The answer of a new process."""
        child = _started(self.command, request)
        if not supervise([child], self.timeout):
            raise _Fault(f"was still running after {self.timeout:g} s")
        if child.killed or child.returncode != 0:
            said = bytes(child.stderr).decode("utf-8", "replace")
            raise _Fault(child.killed or f"ended with {child.returncode}: {short(said, 200)}")
        return _result(bytes(child.stdout))

    def _ask(self, request: Json) -> Result:
        """The answer of the persistent process."""
        self._asked += 1
        if self._program is None:
            self._program = _Program(self.command)
            # it runs also when the interpreter ends
            self._end = weakref.finalize(self, self._program.end)
        try:
            line = json.dumps({"id": self._asked, **request}).encode() + b"\n"
            return _result(self._program.ask(line, self.timeout), self._asked)
        except _Fault as fault:
            self._program = None
            noise = short(self._end(), 120)
            raise _Fault(f"{fault}; its stderr: {noise}" if noise else str(fault)) from None


class _Fault(Exception):
    """A program's fault."""


def _started(
    command: Sequence[str], feed: bytes = b"", tie: Callable[[], None] | None = None
) -> Child:
    mark = uuid.uuid4().hex
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, bufsize=0,
                               env=os.environ | {MARK: mark}, preexec_fn=tie)  # fmt: skip
    return Child(process, feed, mark=mark)


def _result(said: bytes, number: int | None = None) -> Result:
    """The result in a program's answer to request ``number``; raises _Fault if the answer is invalid."""
    text = said.decode("utf-8", "replace")
    try:
        answer = json.loads(text)
        if number is not None and answer["id"] != number:
            raise ValueError(f"the id is {answer.get('id')!r}")
        detail = str(answer.get("detail", ""))
        return Result(answer["verdict"], answer["reward"], detail, answer.get("parts", {}))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as problem:
        expected = '"verdict": "CORRECT", "reward": 1.0, "detail": ""'
        if number is not None:
            expected = f'"id": {number}, {expected}'
        found = short(text, 80)
        raise _Fault(f"must answer like {{{expected}}}, found {found!r}: {problem}") from problem


class _Program:
    """A running program that answers line by line."""

    def __init__(self, command: Sequence[str]) -> None:
        # a worker has one thread, so Python code may run between fork and exec
        tie = functools.partial(helper.die_with, os.getpid()) if helper.RUNNING else None
        self._child = _started(command, tie=tie)
        self._process = process = self._child.process
        pipes: Sequence[Any] = (process.stdin, process.stdout, process.stderr)
        self._in, self._out, self._err = (pipe.fileno() for pipe in pipes)
        os.set_blocking(self._err, False)  # reading it to its end must not wait
        self._noise = b""

    def ask(self, line: bytes, seconds: float) -> bytes:
        """Send a line and return the answer; raises _Fault if that is late or not one line, or the program ended."""
        deadline = time.monotonic() + seconds
        rest = memoryview(line)  # the part of the request that is not yet sent
        said = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._in, selectors.EVENT_WRITE)
            selector.register(self._out, selectors.EVENT_READ)
            selector.register(self._err, selectors.EVENT_READ)
            while b"\n" not in said:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise _Fault(f"has not answered within {seconds:g} s")
                for key, _ in selector.select(left):
                    if key.fd == self._in:
                        try:
                            # a writable pipe takes this much
                            count = os.write(self._in, rest[: select.PIPE_BUF])
                        except OSError:  # it has closed its stdin; reading stdout says why
                            count = len(rest)
                        rest = rest[count:]
                        if not rest:
                            selector.unregister(self._in)
                    elif key.fd == self._err:
                        if not self._listen():
                            selector.unregister(self._err)
                    else:
                        data = os.read(self._out, CHUNK)
                        if not data:
                            raise _Fault(self._end())
                        said += data
                        if len(said) > MAX_LINE:
                            raise _Fault(f"printed more than {MAX_LINE} bytes")
        answer, _, more = bytes(said).partition(b"\n")
        if more:
            found = short(said.decode("utf-8", "replace"), 120)
            raise _Fault(f"printed more than one line for a request: {found!r}")
        if rest:
            raise _Fault("answered before it had read the request")
        return answer

    def _listen(self) -> bool:
        """Read stderr without waiting; False at its end."""
        data = os.read(self._err, CHUNK)
        self._noise = (self._noise + data)[-TAIL:]
        return bool(data)

    def _end(self) -> str:
        try:
            return f"ended with {self._process.wait(timeout=1)} instead of answering"
        except subprocess.TimeoutExpired:
            return "closed its stdout"

    def end(self) -> str:
        """Kill the program with all that it started; the end of its stderr."""
        self._child.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            while self._listen():
                pass
        self._child.close()
        return self._noise.decode("utf-8", "replace")
