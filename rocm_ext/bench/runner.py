"""Run measurements in child processes and survive their crashes and hangs."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile

from rocm_ext.base.errors import UserError
from rocm_ext.base.types import Json
from rocm_ext.bench.sweep import MARK, Item, Measurement, ProbeReply, Spec

_STARTING = 120  # seconds in which a child imports torch and opens the device


@contextlib.contextmanager
def children(
    spec: Spec, timeout: float, environ: Mapping[str, str]
) -> Iterator[Callable[[Item], Measurement]]:
    """Context with a function that measures an item in a child process; a user's error about the config is raised.

    Consecutive items of equal environment share a child, unless it crashes or hangs.

    Args:
        spec: config and limits of the measurements.
        timeout: seconds that a measurement may take.
        environ: environment variables of all children; an item's variables take precedence.
    """
    child: _Child | None = None
    with contextlib.ExitStack() as running:

        def measure(item: Item) -> Measurement:
            nonlocal child
            if item.skip:
                return Measurement(item, "skipped", {}, item.skip)
            if child is None or child.ended or child.environ != item.environ:
                running.close()
                child = running.enter_context(_Child(spec, item.environ, environ))
            return child.measure(item, timeout)

        yield measure


class _Child:
    """A process of :mod:`rocm_ext.bench.child`. It ends with this object's context.

    Attributes:
        environ: environment variables of the items.
        ended: whether the process has crashed or hangs.
    """

    def __init__(self, spec: Spec, environ: Mapping[str, str], common: Mapping[str, str]) -> None:
        self.environ = environ
        self.ended = False
        self._started = False
        self._errors = TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rocm_ext.bench.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            errors="replace",
            env={**os.environ, **common, **environ},
        )
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        threading.Thread(target=self._read_lines, daemon=True).start()
        self._send(asdict(spec))

    def measure(self, item: Item, timeout: float) -> Measurement:
        """Measure an item."""
        self._send(asdict(item))
        reply: ProbeReply = {}
        for seconds in (timeout,) if self._started else (_STARTING, timeout):
            try:
                line = self._lines.get(timeout=seconds)
            except Empty:
                self.ended = True
                return Measurement(item, "timeout", {}, f"no result within {seconds:g} s")
            if line is None:
                self.ended = True
                return Measurement(item, "crashed", {}, self._last_words())
            reply = json.loads(line)
            if "error" in reply:
                raise UserError(reply["error"])
            self._started = True
        result = reply.get("result", {})
        return Measurement(item, reply["status"], result, reply.get("detail", ""))

    def _send(self, content: Json) -> None:
        with contextlib.suppress(BrokenPipeError):  # if the child has crashed, _last_words says why
            self._process.stdin.write(json.dumps(content) + "\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]

    def _read_lines(self) -> None:
        for line in self._process.stdout:  # type: ignore[union-attr]
            if line.startswith(MARK):
                self._lines.put(line[len(MARK) :])
        self._lines.put(None)

    def _last_words(self) -> str:
        """The way in which the process ended, and its last line on stderr."""
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "closed its output and does not end"
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace")
        _, _, last = said.strip().rpartition("\n")
        return f"{how}: {last}" if last else how

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        # the child ends when its input ends
        patience = 0 if self.ended or error[0] else 10
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            # SIGKILL ends no process that hangs in a driver
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        self._errors.close()
