"""Measure the cost of watching the hardware, as a share of one core.

    python -m tools.benchmarks.monitor                # this machine
    python -m tools.benchmarks.monitor --tree mi300x  # a copy of a server's files

The recorder runs as in the recipes. Its cost is its thread's processor time, by the thread's clock, over wall
time, including its start. The command runs in a pseudo-terminal. Its cost is the process's processor time, without
its start. A copy lacks the kernel's work: on a real GPU a reading asks the firmware for power and load.
"""

import argparse
import fcntl
import os
import pty
import resource
import signal
import struct
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

from rocm_ext.machine.counters import HARDWARE_LOG, recording
from tests.kit import sysfs


def main() -> None:
    """Measure the recorder at two intervals and the command, and print their shares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    copies = ("strix_halo", "mi300x", "mi50")
    parser.add_argument(
        "--tree", choices=copies, help="measure on this copy instead of this machine"
    )
    parser.add_argument(
        "--seconds", type=float, default=60, help="duration of each measurement (default: 60)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = getattr(sysfs, args.tree)(Path(folder) / "root") if args.tree else Path("/")
        for interval in (5.0, 1.0):
            share, lines = recorder(Path(folder), root, interval, args.seconds)
            print(f"recorder, every {interval:g} s: {share:.3%} of a core, {lines} readings")
        print(f"rocm-ext monitor, every 2 s: {command(root, args.seconds):.3%} of a core")


def recorder(folder: Path, root: Path, interval: float, seconds: float) -> tuple[float, int]:
    """Measure the recorder's share of a core; return it and the number of readings."""
    path = folder / HARDWARE_LOG
    path.unlink(missing_ok=True)
    with recording(folder, interval, root):
        (thread,) = (t for t in threading.enumerate() if t.name == "hardware counters")
        time.sleep(seconds)
        spent = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return spent / seconds, path.read_text().count("\n")


def command(root: Path, seconds: float) -> float:
    """Measure the live table's share of a core, without its start."""
    return max(0.0, _lifetime(root, seconds) - _lifetime(root, 1)) / (seconds - 1)


def _lifetime(root: Path, seconds: float) -> float:
    """Run ``rocm-ext monitor`` for ``seconds`` and return its processor time."""
    before = _children()
    pid, terminal = pty.fork()
    if pid == 0:
        command = [sys.executable, "-m", "rocm_ext.cli", "monitor", "--root", str(root)]
        os.execve(sys.executable, command, {**os.environ, "TERM": "xterm", "COLUMNS": ""})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    threading.Thread(target=_drain, args=(terminal,), daemon=True).start()
    time.sleep(seconds)
    os.kill(pid, signal.SIGINT)
    os.waitpid(pid, 0)
    os.close(terminal)
    return _children() - before


def _drain(terminal: int) -> None:
    try:
        while os.read(terminal, 1 << 16):
            pass
    except OSError:  # closed
        pass


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
