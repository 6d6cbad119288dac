"""Try kernels once per machine: whether they end, are right and are faster on its GPU.

A child process tries them, because ROCm's wheels have kernels that crash or hang on GPUs they were not built for.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.files import read_json, replace_text
from rocm_ext.base.log import log
from rocm_ext.machine.bench_file import cache_folder, machine_key
from rocm_ext.machine.detect import detect

Call = Callable[[], Tensor]  # a call of a kernel or its reference
_TIMEOUT = 300  # seconds
# they would happen again
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGBUS, signal.SIGFPE)


@cache
def works(name: str, what: str, module: str, used: str, instead: str) -> bool:
    """Return whether this machine's GPU uses a kernel, and log ``used``, or ``instead`` and why.

    The cache folder keeps the result until GPU or torch change.

    Args:
        name: name of the file with the result.
        what: the kernel, for messages.
        module: module whose ``main`` calls :func:`main`.
        used, instead: lines for the log.
    """
    problem = failure(name, what, module)
    log.info("%s", f"{instead}, because {problem}" if problem else used)
    return not problem


def failure(name: str, what: str, module: str) -> str:
    """Return why this machine's GPU does not use a kernel, or ""; for arguments see :func:`works`."""
    folder = cache_folder()
    if folder is None:
        return _tried(what, module)[0]
    machine = machine_key(detect())
    file = folder / f"{name}.json"
    with suppress(UserError, KeyError):  # a damaged file is written again
        known = read_json(file)
        if known and known["machine"] == machine:
            return known["failure"]
    log.info("trying %s, for at most %d s", what, _TIMEOUT)
    problem, final = _tried(what, module)
    if final:
        # the cache folder cannot be written, or another rank writes to it
        with suppress(UserError):
            replace_text(file, json.dumps({"machine": machine, "failure": problem}))
    return problem


def _tried(what: str, module: str) -> tuple[str, bool]:
    """Return the failure in a child process, and whether another try would fail the same way."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    command = [sys.executable, "-m", module, str(device)]
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, text=True)
    try:
        output, _ = child.communicate(timeout=_TIMEOUT)
        result = json.loads(output.splitlines()[-1])
        return result["failure"], result["final"]
    except subprocess.TimeoutExpired:
        child.kill()  # nothing waits: a process that hangs in the driver does not die
        return f"{what} took longer than {_TIMEOUT} s", False
    except (ValueError, IndexError):
        status = child.returncode
        return f"a trial of {what} ended with status {status}", -status in _CRASHES


def main(trial: Callable[[torch.device], str]) -> None:
    """Run ``trial`` on a GPU; print the failure, and whether it would happen again."""
    final = True
    try:
        failure = trial(torch.device("cuda", int(sys.argv[1])))
    except Exception as error:
        failure = one_line(error)
        # memory may be full: the next process tries again
        always = (NotImplementedError, torch._dynamo.exc.TorchDynamoException)
        final = isinstance(error, always)
    print(json.dumps({"failure": failure, "final": final}))


def compare(what: str, pairs: list[tuple[Call, Call]], largest: float, repeats: bool = True) -> str:
    """Compare a kernel with its reference; return what is wrong or slower, or "".

    Args:
        what: the kernel, for messages.
        pairs: calls of the kernel and of the reference.
        largest: largest error in norm, as a share of the result.
        repeats: whether equal calls must give equal bits.
    """
    for kernel, reference in pairs:
        expected = reference()
        # fills the memory that the next call gets, which must write all of it
        torch.full_like(expected, torch.nan)
        actual = kernel()
        difference = actual.float() - expected.float()
        error = float(difference.norm() / expected.float().norm())
        if not error < largest:
            return f"{what} is wrong by {error:.1e} of its result"
        if repeats and not torch.equal(actual, kernel()):
            return f"{what} differs from call to call"

    references = _seconds([reference for _, reference in pairs])
    kernels = _seconds([kernel for kernel, _ in pairs])
    ratio = references / kernels
    return "" if ratio > 1 else f"{what} is {ratio:.2f} times as fast"


def _seconds(calls: list[Call]) -> float:
    """Seconds of the calls together, the least of five tries."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for call in calls:
            call().sum().item()
        times.append(time.perf_counter() - began)
    return min(times)
