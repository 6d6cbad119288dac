"""Run measurements in child processes and survive their crashes and hangs."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile

import psutil

from rocm_ext.base.errors import UserError
from rocm_ext.base.types import Json
from rocm_ext.bench.sweep import MARK, Item, Measurement, ProbeReply, Spec

_STARTING = 120  # seconds in which a child imports torch and opens the device


def run(
    spec: Spec,
    following: Callable[[list[Measurement]], list[Item]],
    timeout: float,
    tell: Callable[[Measurement], None],
    environ: Mapping[str, str],
) -> list[Measurement]:
    """Measure in child processes. Consecutive items of equal environment share one, unless it crashes or hangs.

    Args:
        spec: config and limits of the measurements.
        following: function that returns the next items after the measurements so far; an empty list ends the run.
        timeout: seconds that a measurement may take.
        tell: called with every measurement.
        environ: environment variables of all children; an item's variables take precedence.

    Returns:
        The measurements, in the order of the items.

    Raises:
        UserError: a child refuses the config.
    """
    done: list[Measurement] = []
    with contextlib.ExitStack() as running:
        child: _Child | None = None
        items = following(done)
        while items:
            for item in items:
                if item.skip:
                    outcome = Measurement(item, "skipped", {}, item.skip)
                else:
                    if child is None or child.ended or child.environ != item.environ:
                        running.close()
                        child = running.enter_context(_Child(spec, item.environ, environ))
                    outcome = child.measure(item, timeout)
                done.append(outcome)
                tell(outcome)
            items = following(done)
    return done


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
        lines = self._errors.read().decode(errors="replace").split("\n")
        words = [line.strip() for line in lines if line.strip()]
        return f"{how}: {words[-1]}" if words else how

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


# ---- other programs


def clocks() -> tuple[float, float, float]:
    """The time, and processor time of all programs and of this one with its ended children, all in seconds."""
    times, own_times = psutil.cpu_times(), os.times()
    used = times.user + times.system + getattr(times, "nice", 0.0)
    own = own_times.user + own_times.system + own_times.children_user + own_times.children_system
    return time.perf_counter(), used, own


class OtherPrograms:
    """The load of other programs since this object was made.

    One busy core of two makes small steps ten times slower when threads wait for one another (measured), and so evenly
    that quartiles do not show it.
    """

    WORTH_TELLING = 0.1  # cores

    def __init__(self) -> None:
        self._began = clocks()

    def cores(self) -> float:
        """Cores that other programs kept busy on average. 0 on Windows, which hides children's time."""
        elapsed, used, own = (
            now - before for now, before in zip(clocks(), self._began, strict=True)
        )
        if os.name == "nt":
            return 0.0
        return max(0.0, (used - own) / elapsed)
