"""Runs a part in a process with a time limit."""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from rocm_ext.base.files import read_lines
from rocm_ext.base.process import end_with_parent, handled
from tools.benchmarks.protocol import Failed
from tools.gpu.here import Here
from tools.gpu.parts import Part

MARK = "ROCM_EXT_GPU_PART"  # in the environment of all programs that a part starts
STOP = signal.SIGINT, signal.SIGTERM
LEAST = 15.0  # seconds; with less left no part is started
Result = dict[str, Any]


class Runner:
    """Runs parts, and keeps their results.

    Args:
        device: cuda or cpu.
        tiny: small models.
        folder: for files and logs.
        minutes: for all parts.
    """

    def __init__(self, device: str, tiny: bool, folder: Path, minutes: float) -> None:
        self._here = device, tiny, folder
        self._end = time.monotonic() + 60 * minutes
        self._environ: dict[str, str] = {}
        # A fork of a process that has torch loaded starts at once; one that has started CUDA would fail.
        self._processes: Any = multiprocessing.get_context(
            "spawn" if device == "cuda" else "forkserver"
        )
        if device == "cpu":
            self._processes.set_forkserver_preload(["tools.gpu.preload"])
        self.results: dict[str, Result] = {}

    def set_environment(self, environ: Mapping[str, str]) -> None:
        """Set environment variables of the parts that follow."""
        self._environ.update(environ)

    def run(self, part: Part) -> Result:
        """Run a part and keep its result: name, kind, status, seconds, rows and detail.

        The status is ok, failed, skipped, out of memory, crashed, timeout or out of time; the detail says why.
        """
        left = self._end - time.monotonic()
        missing = [name for name in part.needs if find_spec(name) is None]
        if missing:
            result = _result("skipped", detail=f"not installed: {', '.join(missing)}")
        elif not part.cpu and self._here[0] == "cpu":
            result = _result("skipped", detail="needs a GPU, or takes minutes without one")
        elif not part.tiny and self._here[1]:
            result = _result("skipped", detail="the same as another part where models are small")
        elif left < LEAST:
            result = _result(
                "out of time", detail="the minutes were over; --parts and --minutes select"
            )
        else:
            result = self._run(part, min(part.seconds, left))
        self.results[part.name] = {"name": part.name, "kind": part.kind, **result}
        return self.results[part.name]

    def _run(self, part: Part, limit: float) -> Result:
        folder: Path = self._here[2]
        rows, log = folder / f"{part.name}.rows", folder / f"{part.name}.log"
        rows.unlink(missing_ok=True)
        here = Here(*self._here, earlier=dict(self.results))
        environ = {**self._environ, MARK: f"{os.getpid()}-{part.name}"}
        process = self._processes.Process(
            target=_child, args=(part, here, rows, log, environ), daemon=False
        )
        began = time.monotonic()
        with _uninterrupted() as came:  # a process whose start is interrupted would run on, unknown
            process.start()
        try:
            for signum in came:
                signal.raise_signal(signum)
            process.join(limit)
            timeout = process.is_alive()
        finally:
            end_all(process.pid, environ[MARK])
            process.join(10)
        content = _read(rows)
        ended = content.pop("ended", None)
        if ended is None and timeout:
            ended = {
                "status": "timeout",
                "detail": f"no end within {limit:.0f} s; {_last_line(log)}",
            }
        elif ended is None:
            code = process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            ended = {"status": "crashed", "detail": f"{how}: {_last_line(log)}"}
        return {
            **_result(**ended),
            "rows": content["rows"],
            "seconds": round(time.monotonic() - began, 1),
        }


@contextlib.contextmanager
def _uninterrupted() -> Iterator[list[int]]:
    """Context in which signals to stop are put into the list that it gives."""
    came: list[int] = []
    with handled(lambda signum, _: came.append(signum), *STOP):
        yield came


def _result(status: str, detail: str = "") -> Result:
    return {"status": status, "detail": detail, "seconds": 0.0, "rows": []}


def _read(path: Path) -> dict[str, Any]:
    """Read the rows that a part wrote, and how it ended, if it came so far."""
    content: dict[str, Any] = {"rows": []}
    for said in read_lines(path, problems=[]):  # the process may have been killed while it wrote
        if "status" in said:
            content["ended"] = said
        else:
            content["rows"].append(said)
    return content


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "no output")


def end_all(pid: int, mark: str) -> None:
    """Kill a part's process and every program that it started, orphans included."""
    programs: set[psutil.Process] = set()
    with contextlib.suppress(psutil.Error):
        top = psutil.Process(pid)
        programs = {top, *top.children(recursive=True)}
    for program in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if program.pid != os.getpid() and program.environ().get(MARK) == mark:
                programs.add(program)
    for program in programs:
        with contextlib.suppress(psutil.Error):
            program.kill()


def _child(part: Part, here: Here, rows: Path, log: Path, environ: Mapping[str, str]) -> None:
    """Run a part in this process, which is new."""
    os.setsid()  # Ctrl-C is the parent's
    end_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", 1, closefd=False) for stream in (1, 2))
    faulthandler.enable(sys.stderr)
    os.environ.update(environ)
    with rows.open("w") as file:

        def say(content: Mapping[str, Any]) -> None:
            file.write(json.dumps(content) + "\n")
            file.flush()

        say(_outcome(part, here, say))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a driver that hangs at the end would cost the rest of the limit


def _outcome(part: Part, here: Here, say: Any) -> dict[str, str]:
    """Run a part, say its rows, and return how it ended."""
    try:
        failed = [row["what"] for row in run_rows(part, here, say) if row.get("ok") is False]
    except (Exception, SystemExit) as error:
        if (
            type(error).__name__ == "Skipped"
        ):  # ours, or that of rocm_ext.bench, which imports torch
            return {"status": "skipped", "detail": str(error)}
        traceback.print_exc()
        memory = type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error).lower()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        said = f"{lines[0]} … {lines[-1]}" if len(lines) > 1 else lines[0]
        name = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
        return {"status": "out of memory" if memory else "failed", "detail": f"{name}{said}"[:600]}
    return (
        {"status": "failed", "detail": f"does not hold: {'; '.join(failed)}"}
        if failed
        else {"status": "ok"}
    )


def run_rows(part: Part, here: Here, say: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a part as it makes them, after ``say`` has written them."""
    module, _, name = part.function.partition(":")
    module = module if "." in module else f"tools.gpu.{module}"
    for row in getattr(import_module(module), name)(here, **part.arguments):
        say(row)
        yield row
