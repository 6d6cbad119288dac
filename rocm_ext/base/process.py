"""This process, its launcher, its terminal, and the signals that ask it to stop."""

import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h
_REPORTS = "ROCM_EXT_REPORTS"  # environment variable: the launcher prints its ranks' errors
_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun expects a rank's error
_LOGGERS = (
    "multiprocessing.api",
    "multiprocessing.errors",
    "multiprocessing.errors.error_handler",
    "agent.server.api",
    "agent.server.local_elastic_agent",
)
_NOT_MET = (
    "DistStoreError",
    "DistNetworkError",
    "RendezvousConnectionError",
    "RendezvousTimeoutError",
)
_HOW_TO_MEET = (
    "Start the same command on every machine. --rdzv_endpoint is an address of machine 0 that all of them reach, and a "
    "port that is free there and open in its firewall"
)


def stop_signals() -> list[int]:
    """SIGTERM and SIGHUP, without a SIGHUP that this process ignores, as under ``nohup``."""
    signums: list[int] = [signal.SIGTERM]
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
        signums.append(hangup)
    return signums


@contextmanager
def handled(handler: Callable[[int, Any], object], *signums: int) -> Iterator[None]:
    """Context in which ``handler`` takes these signals; the earlier handlers return at its end."""
    earlier = {signum: signal.signal(signum, handler) for signum in signums}
    try:
        yield
    finally:
        for signum, before in earlier.items():
            signal.signal(signum, before)


def survive_terminal() -> None:
    """Discard further output if the terminal was closed, because writing to it is an error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            os.write(stream.fileno(), b"")
        except ValueError:  # not a file
            continue
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends or is killed; on Linux only.

    Use it for children that must not outlive their parent, also as ``preexec_fn`` of :class:`subprocess.Popen`.
    """
    if sys.platform == "linux":
        signal_at_parents_end(signal.SIGKILL)


def signal_at_parents_end(signum: int) -> None:
    """Let the kernel send ``signum`` to this process when its parent ends; it needs Linux."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, so that none is lost; it needs Linux."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def report_ranks() -> None:
    """Make this program, which starts ranks with torchrun, print one line per error instead of torchrun's report.

    The environment variable LOGLEVEL brings torchrun's messages back.
    """
    os.environ[_REPORTS] = "1"
    sys.excepthook = _report
    if "LOGLEVEL" not in os.environ:
        for name in _LOGGERS:
            logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(lambda record: False)


def tell_launcher(message: str) -> bool:
    """Leave ``message`` for the launcher to print, once for all ranks; return whether it will print it."""
    if _REPORTS not in os.environ or _FILE not in os.environ:
        return False
    report = {"message": message, "timestamp": int(time.time()), _REPORTS: True}
    with suppress(OSError), open(os.environ[_FILE], "w") as file:
        json.dump(report, file)
        return True
    return False


def _report(kind: type[BaseException], error: Any, traceback: Any) -> None:
    """Print an exception of torchrun as lines for the user; a hook of Python."""
    if kind.__name__ == "SignalException":  # the ranks have said how they stopped
        return
    if kind.__name__ in _NOT_MET:
        what = " ".join(str(error).split())
        print(
            f"error: the machines of this run did not meet: {what[:300]} {_HOW_TO_MEET}",
            file=sys.stderr,
        )
        return
    if kind.__name__ != "ChildFailedError":
        sys.__excepthook__(kind, error, traceback)
        return
    lines = []
    causes = []
    for rank, failure in sorted(error.failures.items()):
        causes.append(_cause(rank, failure.exitcode))
        if failure.error_file_data.get(_REPORTS):
            lines.append(failure.message)
    for line in dict.fromkeys(lines or causes):
        print(line, file=sys.stderr)


def _cause(rank: int, code: int) -> str:
    if code < 0:
        reason = "; the system may have run out of memory" if code == -9 else ""
        return f"error: rank {rank} was killed by {signal.Signals(-code).name}{reason}"
    if code - 128 in (signal.SIGINT, *stop_signals()):
        return f"rank {rank} was stopped by {signal.Signals(code - 128).name}"
    return f"error: rank {rank} ended with code {code}; see its messages above"
