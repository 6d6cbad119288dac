"""Runs measurements in child processes and survives their crashes and hangs."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import IO, Any

from rocm_ext.bench.child import MARK
from rocm_ext.bench.spec import Item, Spec
from rocm_ext.errors import UserError


@dataclass(frozen=True)
class Measurement:
    """The outcome of one item, a row of the table.

    Attributes:
        item: what was measured.
        status: ok, skipped, failed (the probe raised an error), out of memory, crashed or timeout.
        result: where ok: ``value``, ``low``, ``high``, ``unit`` and further facts of the probe.
        detail: otherwise: the reason.
    """

    item: Item
    status: str
    result: dict[str, Any]
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def run(
    spec: Spec, items: Sequence[Item], timeout: float, tell: Callable[[Measurement], None], environ: Mapping[str, str]
) -> list[Measurement]:
    """Measure ``items`` in child processes.

    Args:
        spec: for the children.
        items: in any order; items of equal environment share a process.
        timeout: seconds that a measurement may take.
        tell: called with each measurement at once.
        environ: environment variables of all children; those of the items overrule them.

    Returns:
        The measurements, in the order of ``items``.

    Raises:
        UserError: where a child refuses the config.
    """
    done: dict[int, Measurement] = {}

    def record(index: int, status: str, result: dict[str, Any] | None = None, detail: str = "") -> None:
        done[index] = Measurement(items[index], status, result or {}, detail)
        tell(done[index])

    for index, item in enumerate(items):
        if item.skip:
            record(index, "skipped", detail=item.skip)
    while waiting := [index for index in range(len(items)) if index not in done]:
        own = items[waiting[0]].environ
        same = [index for index in waiting if items[index].environ == own]
        with _Child(spec, [(index, items[index]) for index in same], {**environ, **own}) as child:
            _follow(child, timeout, record)
        if not done.keys() & set(same):
            record(same[0], "crashed", detail=child.last_words())
    return [done[index] for index in range(len(items))]


def _follow(child: "_Child", timeout: float, record: Callable[..., None]) -> None:
    """Record what a child says until it ends, crashes or times out."""
    current: int | None = None
    while True:
        try:
            line = child.lines.get(timeout=timeout + (0 if current is not None else 120))  # 120: to import torch
        except Empty:
            if current is not None:
                record(current, "timeout", detail=f"no result within {timeout:g} s")
            return
        if line is None:
            if current is not None:
                record(current, "crashed", detail=child.last_words())
            return
        said = json.loads(line)
        if "error" in said:
            raise UserError(said["error"])
        if "begin" in said:
            current = said["begin"]
        else:
            record(said.pop("index"), **said)
            current = None


class _Child:
    """A process of :mod:`rocm_ext.bench.child`. It ends with this object's context."""

    def __init__(self, spec: Spec, items: Sequence[tuple[int, Item]], environ: dict[str, str]) -> None:
        job = {"spec": asdict(spec), "items": [(index, item.to_dict()) for index, item in items]}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rocm_ext.bench.child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            env={**os.environ, **environ},
        )  # fmt: skip
        self._errors: list[str] = []
        self.lines: SimpleQueue[str | None] = SimpleQueue()
        readers = (self._read_lines, self._process.stdout), (self._read_errors, self._process.stderr)
        self._threads = [threading.Thread(target=read, args=(pipe,), daemon=True) for read, pipe in readers]
        for thread in self._threads:
            thread.start()
        # it may crash at once; last_words says why
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:  # type: ignore[union-attr]
            json.dump(job, pipe)

    def _read_lines(self, pipe: IO[str]) -> None:
        for line in pipe:
            if line.startswith(MARK):
                self.lines.put(line[len(MARK) :])
        self.lines.put(None)

    def _read_errors(self, pipe: IO[str]) -> None:
        for line in pipe:
            self._errors = [*self._errors[-20:], line.rstrip()]

    def last_words(self) -> str:
        """How the process ended, and its last line on stderr."""
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "closed its output and does not end"
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._threads[1].join(timeout=5)
        return f"{how}: {self._errors[-1]}" if self._errors else how

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # SIGKILL does not end a process that hangs in a driver
            self._process.wait(10)
        for thread in self._threads:
            thread.join(timeout=5)
