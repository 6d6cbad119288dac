"""Messages from a run to `rocm-ext supervise`: it goes on, it ends with an error, or it asks to be started again."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NOTES = "ROCM_EXT_SUPERVISED"  # environment variable: a file; its time shows that the run lives, its lines are notes
APART = "ROCM_EXT_EVALUATE_APART"  # environment variable: no process both trains and evaluates
# exit code (EX_TEMPFAIL of sysexits.h) of errors after which the same command may succeed
RETRY = 75

_next_beat = 0.0


def beat() -> None:
    """Say that the run goes on, at most once a second. Loops that may last minutes call this in every turn."""
    global _next_beat
    if NOTES in os.environ and time.monotonic() >= _next_beat:
        _next_beat = time.monotonic() + 1
        with suppress(OSError):
            os.utime(os.environ[NOTES])


@contextmanager
def beating() -> Iterator[None]:
    """Context that says every ten seconds that the run goes on, for work of a library that has time limits."""
    end = threading.Event()

    def work() -> None:
        while not end.wait(10):
            beat()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def note(**values: str | int) -> None:
    """Write a line: ``error`` and ``code`` when a user's error ends the run, ``segment`` when another process goes
    on, ``saved`` when a signal ends it, or ``complete`` and ``ranks`` when a rank of so many has done all its work.

    Raises:
        OSError: ``segment`` cannot be written; without it the run would count as broken.
    """
    if NOTES not in os.environ:
        return
    try:
        with open(os.environ[NOTES], "a") as file:
            file.write(json.dumps(values) + "\n")
    except OSError:
        if "segment" in values:
            raise
