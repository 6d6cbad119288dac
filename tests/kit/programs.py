"""Programs that are forks of the test process instead, because each program would take seconds to import torch."""

import faulthandler
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import IO, Any

import torch

from rocm_ext.base.log import log


class ForkedPopen:
    """Stands in for :class:`subprocess.Popen`: a fork of this process calls ``main`` with the command's arguments."""

    def __init__(self, main: Callable[[list[str]], None], command: list[str], *, stdin: Any, stdout: Any, stderr: Any,
                 env: dict[str, str], start_new_session: bool = False, **_: object) -> None:  # fmt: skip
        self.returncode: int | None = None
        self.stdin, read = self._ends(stdin, "w")
        self.stdout, write = self._ends(stdout, "r")
        self.stderr, errors = (
            (None, write) if stderr == subprocess.STDOUT else self._ends(stderr, "r")
        )
        self.pid = os.fork()
        if not self.pid:
            for pipe in filter(None, (self.stdin, self.stdout, self.stderr)):
                pipe.close()  # the input ends when the parent's end is closed
            code: Any = 1
            try:
                if start_new_session:
                    os.setsid()
                for place, end in enumerate((read, write, errors)):
                    os.dup2(end, place)
                sys.stdin, sys.stdout, sys.stderr = map(os.fdopen, range(3), "rww", (-1, -1, 1))
                faulthandler.disable()  # pytest's writes to pytest's output
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                log.handlers.clear()
                torch.set_num_threads(1)
                os.environ.clear()
                os.environ.update(env)
                main(command[1:])
                code = 0
            except SystemExit as left:
                code = left.code or 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code if isinstance(code, int) else 1)
        for end in {read, write, errors}:
            os.close(end)

    @staticmethod
    def _ends(wanted: Any, mode: str) -> tuple[IO[str] | None, int]:
        """Our end of a pipe, if one is wanted, and the file descriptor of the fork."""
        if wanted == subprocess.PIPE:
            read, write = os.pipe()
            return (os.fdopen(write, "w"), read) if mode == "w" else (os.fdopen(read), write)
        return None, os.open(os.devnull, os.O_RDWR) if wanted == subprocess.DEVNULL else os.dup(
            wanted.fileno()
        )

    def kill(self) -> None:
        """Kill the fork unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None."""
        if self.returncode is None and (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(found[1])
        return self.returncode

    def wait(self, timeout: float = 600) -> int:
        """Return the exit code, negative for a signal."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.01)
        return self.returncode  # type: ignore[return-value]


def as_forks(main: Callable[[list[str]], None]) -> SimpleNamespace:
    """What stands in for the module :mod:`subprocess` where it starts a Python program, which ``main`` replaces."""
    names = ("PIPE", "STDOUT", "DEVNULL", "TimeoutExpired")
    return SimpleNamespace(
        Popen=partial(ForkedPopen, main), **{name: getattr(subprocess, name) for name in names}
    )
