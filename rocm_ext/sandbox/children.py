"""Child processes with limited output, time and memory."""

import contextlib
import os
import re
import select
import selectors
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MARK = "ROCM_EXT_RUN"  # an environment variable
DYING = 5.0  # seconds that killed processes may take to end
POLL = 0.05  # seconds between checks of the children's memory
CHUNK = 1 << 16
# in /proc/PID/status
HELD = re.compile(rb"^(?:VmRSS|VmSwap|VmPTE|HugetlbPages):\s*(\d+) kB$", re.MULTILINE)
MAP = 320  # bytes that the kernel keeps of a map
# in /proc/net/sockstat: sockets, and pages of the machine
SOCKETS = re.compile(rb"used (\d+)\nTCP:.* mem (\d+)\n")
SOCKET = 1 << 18  # bytes that a socket may hold: its default buffer, and a message beyond
TCP = 4096  # pages of the machine's TCP buffers, which grow by themselves, up to which no run's are counted
# in /proc/net/tcp: bytes to send, and received
QUEUES = re.compile(rb" ([0-9A-F]{8}):([0-9A-F]{8}) ")


@dataclass
class Child:
    """A started process: its input, its output so far, and its limits.

    Args:
        process: the leader of a process group; its stdin, stdout and stderr are binary pipes or None.
        feed: bytes for stdin, which is then closed.
        output_bytes: the most bytes of stdout, and of stderr; a process that prints more is killed.
        memory_mb, processes: limits of the process with all its descendants, checked every 50 ms; None sets none. In a
            sandbox, its sockets count as memory.
        inodes: limit of files, folders and links in its sandbox's /tmp and /dev/shm, checked likewise; None sets none.
        mark: the value of ``MARK`` in the process's environment. All processes with this mark end with it, in any
            process group or session. One that has lost its parent and cleared its environment lives on.

    Attributes:
        stdout, stderr: the output so far.
        killed: the limit for which we killed it; empty if we did not.
    """

    process: subprocess.Popen
    feed: bytes = b""
    output_bytes: int = 1 << 20
    memory_mb: int | None = None
    processes: int | None = None
    inodes: int | None = None
    mark: str = ""
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    killed: str = ""

    @property
    def returncode(self) -> int | None:
        """The exit status once the process is reaped; -n after signal n."""
        return self.process.returncode

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end of the process, at most so long, without reaping it; return whether it has ended."""
        end = os.pidfd_open(self.process.pid)
        try:
            return readable(end, seconds)
        finally:
            os.close(end)

    def kill(self, why: str = "") -> None:
        """Kill the process and its process group; a PID namespace below it dies with it.

        Once the process is reaped this does nothing: another process may have its number.
        """
        if self.process.returncode is None:
            self.killed = self.killed or why
            below = descendants(self.process.pid) if self.mark else []
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            kill(below)

    def close(self) -> None:
        """Kill the process if it still runs, and close its pipes."""
        self.kill()
        self.process.wait()
        deadline = time.monotonic() + DYING
        left = marked(self.mark) if self.mark else []
        while left and time.monotonic() < deadline:
            kill(left)
            time.sleep(0.001)
            left = marked(self.mark)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                _close(stream)


def supervise(
    children: Sequence[Child], seconds: float, end: int | None = None, others: Sequence[Child] = ()
) -> bool:
    """Feed, read and watch ``children`` until the first one ends; then close them all.

    Args:
        children: started processes.
        seconds: limit of wall time.
        end: a descriptor that becomes readable at the end; then the first child's end is ignored, and the caller closes
            the children.
        others: further processes whose limits are watched; they live on.

    Returns:
        Whether the end came in time.
    """
    deadline = time.monotonic() + seconds
    first = children[0] if end is None else None
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for child in children if first is not None else ():
            stack.callback(child.close)
        for child in children:
            process = child.process
            if process.stdin is not None:
                os.set_blocking(process.stdin.fileno(), False)
                if _write(child):
                    selector.register(process.stdin, selectors.EVENT_WRITE, (child, None))
                else:
                    _close(process.stdin)
            for stream, buffer in ((process.stdout, child.stdout), (process.stderr, child.stderr)):
                if stream is not None:
                    os.set_blocking(stream.fileno(), False)
                    selector.register(stream, selectors.EVENT_READ, (child, buffer))
        if first is not None:
            end = os.pidfd_open(first.process.pid)
            stack.callback(os.close, end)
        assert end is not None
        selector.register(end, selectors.EVENT_READ, None)
        next_look = time.monotonic() + POLL
        while True:
            now = time.monotonic()
            if now >= deadline:
                return False
            for key, _ in selector.select(min(deadline, next_look) - now):
                if key.data is None:
                    if first is not None:
                        _finish(first, selector)
                    return True
                child, buffer = key.data
                going_on = _write(child) if buffer is None else _read(key.fileobj, child, buffer)
                if not going_on:
                    selector.unregister(key.fileobj)
                    _close(key.fileobj)
            if time.monotonic() >= next_look:
                for child in (*children, *others):
                    _look(child)
                next_look = time.monotonic() + POLL


def readable(fd: int, seconds: float) -> bool:
    """Wait until a descriptor can be read or has no writer left; False if that takes too long."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def _finish(child: Child, selector: selectors.BaseSelector) -> None:
    """Kill what is left of the process group of a child that has ended, and read the rest of its output."""
    child.kill()
    child.process.wait()
    for other in list(selector.get_map().values()):
        owner, buffer = other.data or (None, None)
        if owner is child and buffer is not None:
            while _read(other.fileobj, child, buffer):
                pass


def _read(stream: Any, child: Child, buffer: bytearray) -> bool:
    """Read from the pipe without waiting; False at its end."""
    try:
        data = os.read(stream.fileno(), CHUNK)
    except BlockingIOError:
        return child.process.returncode is None
    room = child.output_bytes - len(buffer)
    buffer += data[:room]
    if len(data) > room:
        child.kill(f"printed more than {child.output_bytes} bytes")
        return False
    return bool(data)


def _write(child: Child) -> bool:
    """Write as much as the pipe takes; False when all is written or nobody reads."""
    assert child.process.stdin is not None
    try:
        count = os.write(child.process.stdin.fileno(), child.feed[:CHUNK])
    except BlockingIOError:
        return True
    except OSError:
        return False
    child.feed = child.feed[count:]
    return bool(child.feed)


def _close(stream: Any) -> None:
    with contextlib.suppress(OSError):  # a broken pipe
        stream.close()


def _look(child: Child) -> None:
    if child.memory_mb is None and child.processes is None:
        return
    pids = descendants(child.process.pid)
    if child.processes is not None and len(pids) > child.processes:
        child.kill(f"started more than {child.processes} processes")
    used = sum(map(held, pids))
    if child.inodes is not None and pids:
        used += _socket_memory(pids[0])
        if _inodes(f"/proc/{pids[0]}/root") > child.inodes:
            child.kill(f"made more than {child.inodes} files")
    if child.memory_mb is not None and used > child.memory_mb << 20:
        child.kill(f"used more than {child.memory_mb} MB of memory")


def held(pid: int) -> int:
    """The bytes that a process holds in memory, in swap, in page tables and as maps; 0 if it has ended."""
    sizes: list[bytes] = []
    maps = 0
    with contextlib.suppress(OSError):  # it ends
        for task in Path(f"/proc/{pid}/task").iterdir():
            # a thread that has ended shows none
            sizes = sizes or HELD.findall(_content(task / "status"))
            maps = maps or _content(task / "maps").count(b"\n")
    return (sum(map(int, sizes)) << 10) + maps * MAP


def _socket_memory(pid: int) -> int:
    """The most bytes that the sockets in a process's network can hold, also those that no process has open."""
    folder = Path(f"/proc/{pid}/net")
    total = 0
    for count, pages in SOCKETS.findall(_content(folder / "sockstat")):
        total = int(count) * SOCKET
        if int(pages) > TCP:
            rows = _content(folder / "tcp") + _content(folder / "tcp6")  # this takes milliseconds
            queues = QUEUES.findall(rows)
            total += sum(int(size, 16) for pair in queues for size in pair)
    return total


def _content(path: Path) -> bytes:
    """The content of a file in /proc; empty if its process has ended."""
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


def _inodes(root: str) -> int:
    """The number of inodes in use in the sandbox with this root; 0 until the sandbox has changed its root."""
    with contextlib.suppress(OSError):
        if os.stat(root).st_dev != os.stat("/").st_dev:
            disks = [os.statvfs(f"{root}/{folder}") for folder in ("tmp", "dev/shm")]
            return sum(disk.f_files - disk.f_ffree for disk in disks)
    return 0


def kill(pids: Iterable[int]) -> None:
    """Kill processes that may have ended."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Our running processes that were started with this mark in their environment; none without /proc."""
    pids: list[int] = []
    if not os.path.isdir("/proc"):
        return pids
    wanted = f"{MARK}={mark}\0".encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            if wanted in Path(f"/proc/{pid}/environ").read_bytes():
                pids.append(int(pid))
    return pids


def descendants(pid: int) -> list[int]:
    """The running descendants of process ``pid``; none without /proc."""
    pids = []
    todo = [pid]
    while todo:
        children = children_of(todo.pop())
        todo += children
        pids += children
    return pids


def children_of(pid: int) -> list[int]:
    """The running children of process ``pid``."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                pids += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return pids
