"""Run recipes in forks of the test process, which start at once and can be killed anywhere."""

import gc
import os
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from rocm_ext.base import files
from rocm_ext.base.log import log

RESUME = "resume_from_checkpoint=True"
# Autograd's first backward pass starts a thread for each GPU, and no fork may run another then. In a build of torch for
# GPUs, a plan on fake tensors counts as one. So the first pass comes before any plan.
torch.ones(1, requires_grad=True).sum().backward()
several_ranks = pytest.mark.skipif(
    torch.__version__ < (2, 7), reason="several ranks need torch 2.7"
)


def forked(
    main: Callable[[], None],
    path: Path,
    *overrides: str,
    prepare: Callable[[], object] | None = None,
    kill_after: float | None = None,
) -> tuple[int, str]:
    """Run ``prepare()`` and a recipe's ``main`` on the config ``path`` in a fork; kill it after ``kill_after`` seconds.

    Returns:
        The exit code, negative for a signal, and the messages.
    """
    pid, receive = start(main, path, overrides, prepare)
    if kill_after is not None:
        timer = threading.Timer(kill_after, lambda: os.kill(pid, signal.SIGKILL))
        timer.start()
    found = wait(pid, receive)
    if kill_after is not None:
        timer.cancel()
    return found


def forked_ranks(
    main: Callable[[], None],
    path: Path,
    *overrides: str,
    ranks: int = 2,
    prepare: Callable[[int], object] = lambda rank: None,
) -> list[tuple[int, str]]:
    """Run ``prepare(rank)`` and a recipe's ``main`` on several ranks, a fork each, with torchrun's environment.

    Returns:
        Exit code and messages of each rank.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    meeting |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}

    def begin(rank: int) -> None:
        os.environ.update(meeting, RANK=str(rank), LOCAL_RANK=str(rank))
        prepare(rank)

    started = [start(main, path, overrides, partial(begin, rank)) for rank in range(ranks)]
    return [wait(*each) for each in started]


def succeed(main: Callable[[], None], path: Path, *overrides: str, **more) -> str:
    """Run :func:`forked`, which must succeed; return the messages."""
    code, messages = forked(main, path, *overrides, **more)
    assert code == 0, messages
    return messages


def succeed_on_ranks(main: Callable[[], None], path: Path, *overrides: str, **more) -> None:
    """Run :func:`forked_ranks`, which must succeed."""
    for code, messages in forked_ranks(main, path, *overrides, **more):
        assert code == 0, messages


def refused(main: Callable[[], None], path: Path, *overrides: str, **more) -> str:
    """Run :func:`forked`, which must end with 1 and an error in one line; return this line."""
    code, messages = forked(main, path, *overrides, **more)
    assert code == 1, messages
    assert "Traceback" not in messages
    assert "Exception ignored" not in messages
    *_, line = messages.splitlines()
    assert line.startswith("error: ")
    return line


def kill_and_resume(main: Callable[[], None], path: Path, prepare: Callable[[], object]) -> str:
    """Run a recipe until ``prepare`` has it killed, and continue it; return the messages of the second start."""
    assert forked(main, path, prepare=prepare)[0] == -signal.SIGKILL
    return succeed(main, path, RESUME)


def start(
    main: Callable[[], None],
    path: Path,
    overrides: tuple[str, ...],
    prepare: Callable[[], object] | None,
) -> tuple[int, int]:
    """Process id of the fork, and the end of the pipe that its messages come out of."""
    receive, send = os.pipe()  # holds 64 kB, far more than a run prints
    pid = os.fork()
    if pid:
        os.close(send)
        return pid, receive
    sys.stdout = sys.stderr = os.fdopen(send, "w")
    run_and_exit(main, path, overrides, prepare)


def run_and_exit(
    main: Callable[[], None],
    path: Path,
    overrides: tuple[str, ...],
    prepare: Callable[[], object] | None,
) -> NoReturn:
    """Run ``prepare()`` and a recipe's ``main`` in this process, a fork, and end it."""
    code = 1
    gc.freeze()  # torchtune collects garbage for each file of weights that it reads, and would search all of pytest
    try:
        log.handlers.clear()
        torch.set_num_threads(1)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(
                signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
            )
        if prepare is not None:
            prepare()
        sys.argv = ["tune", "--config", str(path), *overrides]
        main()
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):  # a test may have closed the terminal
            sys.stderr.flush()
        os._exit(code)


def wait(pid: int, receive: int) -> tuple[int, str]:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with open(receive) as messages:
        return code, messages.read()


def kill_before(count: int) -> Callable[[], None]:
    """Patch file operations so that the ``count``-th flush, rename or removal kills the process."""

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

        files.flush = counted(files.flush)
        Path.rename, Path.replace = counted(Path.rename), counted(Path.replace)  # type: ignore[method-assign]
        shutil.rmtree = counted(shutil.rmtree)  # type: ignore[assignment]

    return prepare


def hook(
    owner: type, method: str, action: Callable[..., object], before: bool = False
) -> Callable[[], None]:
    """Patch ``method`` so that each call is followed by ``action(self, ...)``, or begins with it."""

    def prepare() -> None:
        original = getattr(owner, method)

        def call(*args):
            if before:
                action(*args)
            found = original(*args)
            if not before:
                action(*args)
            return found

        setattr(owner, method, call)

    return prepare


def signal_at(
    owner: type,
    method: str,
    when: Callable[..., object],
    signum: int = signal.SIGKILL,
    before: bool = False,
) -> Callable[[], None]:
    """Patch ``method`` as :func:`hook` does; the first call for which ``when(self, ...)`` holds sends a signal."""
    sent: list[int] = []

    def send(*args):
        if not sent and when(*args):
            sent.append(signum)
            os.kill(os.getpid(), signum)

    return hook(owner, method, send, before)
