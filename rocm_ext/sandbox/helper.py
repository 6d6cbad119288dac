"""A helper process of a run, such as one that judges answers: it ends with the run, and reaps its sandboxes."""

import contextlib
import os
import signal
import traceback
from pathlib import Path

from rocm_ext.base.process import adopt_orphans, signal_at_parents_end
from rocm_ext.sandbox.children import children_of

RUNNING = False  # True in a helper, which has one thread and no GPU and may fork


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(parent: int) -> None:
    """Become a helper of the run: die with it, adopt orphaned descendants (see :func:`reap`), at low priority."""
    die_with(parent)
    with contextlib.suppress(OSError, AttributeError):
        adopt_orphans()
    with contextlib.suppress(OSError):
        os.nice(5)


def reap() -> None:
    """Reap the init processes of ended sandboxes: neither bwrap nor PID 1 of many containers waits for them."""
    for pid in children_of(os.getpid()):
        with contextlib.suppress(OSError):
            if "(bwrap) Z" in Path(f"/proc/{pid}/stat").read_text():
                os.waitpid(pid, os.WNOHANG)


def blame(problem: BaseException) -> str:
    """Type, message and last frame of an exception."""
    text = f"{type(problem).__name__}: {problem}"
    frames = traceback.extract_tb(problem.__traceback__)
    if frames:
        last = frames[-1]
        text += f" ({os.path.basename(last.filename)}:{last.lineno} in {last.name})"
    return text
