"""Judge in a child process with a time limit, for work that Python cannot interrupt."""

import contextlib
import json
import os
import resource
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from rocm_ext.base.types import Row
from rocm_ext.sandbox.children import readable
from rocm_ext.verifiers.base import Result, timeout
from rocm_ext.verifiers.workers.pool import Pool

MEMORY = 2 << 30  # bytes of address space that the child may use beyond the worker's memory


def forked(judge: Callable[[], Result], seconds: float, what: str) -> Result | None:
    """Call ``judge`` in a forked child that has limited time and memory; ``what`` names the work in messages.

    Only for a process with one thread and no GPU: see ``helper.RUNNING``. A timer in the same process would not do:
    Python cannot interrupt a regular expression, or a multiplication of huge numbers. The result is TIMEOUT after
    ``seconds``, and None if the child needed too much memory or ``judge`` raised.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            os.close(reader)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[0])
            limit = pages * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            result = judge()
            said = json.dumps(result.values(), ensure_ascii=False).encode()
            os.write(writer, said)  # at once, since it is shorter than PIPE_BUF
        os._exit(0)
    os.close(writer)
    try:
        answer = os.read(reader, 1 << 16) if readable(reader, seconds) else None
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if answer is None:
        return timeout(f"{what} took more than {seconds:g} s")
    if not answer:
        return None
    return Result(*json.loads(answer))


class Elsewhere:
    """A verifier of this library in a separate worker, for processes that must not fork; starts on the first call."""

    def __init__(self, name: str, timeout: float, **arguments: Any) -> None:
        self._node = {"_component_": f"rocm_ext.verifiers.{name}", "timeout": timeout, **arguments}
        self._timeout = timeout
        self._pool: Pool | None = None
        self._lock = threading.Lock()

    def __call__(self, completion: str, row: Row) -> Result:
        return self._started().submit(completion, row).result()

    def judge_group(self, completions: Sequence[str], row: Row) -> list[Result]:
        return self._started().submit_group(completions, row).result()

    def _started(self) -> Pool:
        with self._lock:
            if self._pool is None:
                seconds = 2 * self._timeout + 30  # the verifier's own limit ends first
                self._pool = Pool(self._node, workers=1, timeout=seconds).__enter__()
                weakref.finalize(self, self._pool.close)  # runs also when the interpreter ends
            return self._pool
