"""The judge's sandbox: one process that imports the judge's modules and forks a child for each verdict.

All children begin with the same state: nothing that the tests of a verdict import, change, start or write lasts until
the next.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import marshal
import os
import resource
import signal
import socket
import sys
import time

from _run_tests import judge

PR_SET_DUMPABLE = 4


def main(task):
    """Serve the verifier at the other end of the socket argv[1]; argv[2] is "boxed" in a separate PID namespace.

    A request is a line of modules to import, which all later children have, with four descriptors: the judge's ends of
    the two pipes to the program, the pipe for its reports, and a file with the task. The answer is a line: the child's
    wait status, and 1, or 0 if this process ends because it could not clear up after the child.
    """
    link = socket.socket(fileno=int(sys.argv[1]))
    boxed = sys.argv[2] == "boxed" and os.getpid() == 2  # bwrap's first process has number 1
    # with an interpreter below /tmp, its folder is there
    folders = {os.getcwd(): frozenset(os.listdir())}
    if boxed and os.path.isdir("/dev/shm"):
        folders["/dev/shm"] = frozenset(os.listdir("/dev/shm"))
    prctl = ctypes.CDLL(None).prctl
    silence = os.open(os.devnull, os.O_RDWR)
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no child can read or write this process's memory
    gc.freeze()
    sys.path += task["path"]
    link.send(b"r")
    while True:
        asked, fds, *_ = socket.recv_fds(link, 256, 4)
        if not asked:
            return
        for name in asked.decode().split():
            if name not in sys.modules:
                with contextlib.suppress(Exception):  # the tests will say what is missing
                    importlib.import_module(name)
                    gc.freeze()
        pid = os.fork()
        if pid == 0:
            try:
                link.close()
                os.setsid()
                prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
                for fd in range(3):
                    os.dup2(silence, fd)
                child(*fds)
            finally:
                os._exit(0)
        for fd in fds:
            os.close(fd)
        _, status = os.waitpid(pid, 0)
        clean = tidy(pid, boxed, folders)
        link.send(b"%d %d\n" % (status, clean))
        if not clean:
            return


def child(hears, asks, tells, tasks):
    """Judge one task."""

    def report(what):
        os.write(tells, json.dumps(what).encode() + b"\n")

    try:
        with open(tasks, "rb") as file:
            task = marshal.load(file)
        resource.setrlimit(resource.RLIMIT_CPU, tuple(task["cpu"]))
        judge(task, hears, asks, report)
    except BaseException as error:  # SystemExit too
        problem = f"the judge failed: {type(error).__name__}: {error}"
        report({"kind": "broken", "detail": problem[:1000]})


def tidy(pid, boxed, folders):
    """Kill the processes that the child left; whether no process and no file of it is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if boxed and not alone():
        return False
    for folder, names in folders.items():
        if names != frozenset(os.listdir(folder)):
            return False
        if any(os.access(f"{folder}/{name}", os.W_OK) for name in names):
            return False
    return True


def alone():
    """Kill all in this PID namespace but its first process and this one; whether they ended."""
    for _ in range(1000):
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return True
        time.sleep(0.001)
    return False
