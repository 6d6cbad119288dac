"""Processes that tests wait for."""

import time

import psutil


def wait_for_end(*pids: int, seconds: float = 30) -> None:
    """Return once the processes have ended, though perhaps nobody has asked for their exit codes."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if runs(pid)]:
        assert time.monotonic() < deadline, f"processes {left} go on"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
