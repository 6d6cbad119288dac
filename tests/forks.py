"""Recipes run in forks of the test process: they can be killed anywhere, and start in no time."""

import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from rocm_ext import files
from rocm_ext.log import log


def forked(
    main: Callable[[], None],
    path: Path,
    *overrides: str,
    prepare: Callable[[], object] | None = None,
    kill_after: float | None = None,
) -> tuple[int, str]:
    """A whole run of a recipe's ``main`` on the config ``path`` in a fork, after ``prepare()``: its exit code,
    negative for a signal, and its messages. It is killed after ``kill_after`` seconds."""
    receive, send = os.pipe()  # holds 64 kB, far more than a run has to say
    pid = os.fork()
    if pid:
        os.close(send)
        if kill_after is not None:
            timer = threading.Timer(kill_after, lambda: os.kill(pid, signal.SIGKILL))
            timer.start()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if kill_after is not None:
            timer.cancel()
        with open(receive) as messages:
            return code, messages.read()
    code = 1
    try:
        sys.stdout = sys.stderr = os.fdopen(send, "w")
        log.handlers.clear()
        torch.set_num_threads(1)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        if prepare is not None:
            prepare()
        sys.argv = ["tune", "--config", str(path), *overrides]
        main()
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def kill_before(count: int) -> Callable[[], None]:
    """Patches that kill the process at its ``count``-th change of the disk: a flush, a rename or a removal."""

    def prepare() -> None:
        done = 0

        def counted(function):
            def call(*args, **kwargs):
                nonlocal done
                done += 1
                if done == count:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return call

        files._sync = counted(files._sync)
        Path.rename, Path.replace = counted(Path.rename), counted(Path.replace)  # type: ignore[method-assign]
        shutil.rmtree = counted(shutil.rmtree)  # type: ignore[assignment]

    return prepare
