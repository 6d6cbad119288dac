"""What a run tells `rocm-ext supervise`: that it goes on, why it ends, and that it is to be started again."""

import json
import os
import time
from contextlib import suppress

NOTES = "ROCM_EXT_SUPERVISED"  # environment variable: a file; its time says that the run lives, its lines what happened
APART = "ROCM_EXT_EVALUATE_APART"  # environment variable: evaluations have a process of their own
RETRY = 75  # exit code (EX_TEMPFAIL of sysexits.h) of errors after which the same command may succeed

_next_beat = 0.0


def beat() -> None:
    """Say that the run goes on, at most once a second. Loops that may last minutes call this in each turn."""
    global _next_beat
    if NOTES in os.environ and time.monotonic() >= _next_beat:
        _next_beat = time.monotonic() + 1
        with suppress(OSError):
            os.utime(os.environ[NOTES])


def note(**values: str | int) -> None:
    """Leave a line: ``error`` and ``code`` of a run that a user's error ends, or ``segment``, see :func:`apart`."""
    if NOTES in os.environ:
        with suppress(OSError), open(os.environ[NOTES], "a") as file:
            file.write(json.dumps(values) + "\n")


def apart() -> bool:
    """Return whether this process either trains or evaluates: it ends between the two, and is started again."""
    return APART in os.environ
