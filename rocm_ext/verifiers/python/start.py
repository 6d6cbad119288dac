"""Start the scripts in their sandboxes: compiled once, with judges that stay warm."""

import contextlib
import itertools
import json
import marshal
import os
import socket
import subprocess
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from rocm_ext.base.errors import UserError
from rocm_ext.sandbox import USER, Limits, RunningProgram, Sandbox
from rocm_ext.sandbox.children import readable
from rocm_ext.verifiers.base import short

PATIENCE = 60.0  # seconds that a judge may take to start
GRACE = 1.0  # seconds that a judge may take to end a verdict whose program was killed
SCRIPTS = {  # script -> its modules in the order of their imports; the last has the `main`
    "judge": (
        "_vacuous",
        "_messages",
        "_source",
        "_rewrite",
        "_judge",
        "_run_tests",
        "_judge_server",
    ),
    "program": ("_messages", "_program"),
    "interpreter": ("_interpreter",),
}
PRELOADED = ("pytest", "numpy", "unittest")  # judges import these once, for all verdicts

# This runs in the sandbox. `-c` saves the search for a file's importer, `_exit` the freeing of memory.
BOOT = """
import marshal, posix, sys
del sys.path[0]
if user := sys.argv.pop():
    posix.setgroups([])
    posix.setresgid(*[int(user)] * 3)
    posix.setresuid(*[int(user)] * 3)
modules, task = marshal.loads(open(0, "rb", closefd=False).read())
for name, code in modules:
    module = sys.modules[name] = type(sys)(name)
    exec(marshal.loads(code), vars(module))
module.main(task)
posix._exit(0)
"""
COMPILE = """
import json, marshal, sys
sources = json.load(sys.stdin)
modules = {}
for name, text in sources.items():
    modules[name] = marshal.dumps(compile(text, name + ".py", "exec", dont_inherit=True))
sys.stdout.buffer.write(marshal.dumps(modules, 4))
"""


class ProgramTask(TypedDict):
    """What the code's process runs."""

    setup: str
    code: str
    path: list[str]  # folders with the installed packages


class JudgeTask(TypedDict):
    """What the tests' process runs."""

    trusted: list[str]  # sources that run on both sides
    tests: str
    entry_point: str
    functions: list[str]  # classes that only hold the entry point
    shared: list[str]  # classes of the trusted sources, whose objects live with the code
    methods: list[str]  # names of these classes' methods
    cases: list[tuple[list[Any], Any, bool]] | None  # calls: arguments, expected value, unwrap
    tolerance: float | None
    all: bool  # whether to go on after a test that fails
    cpu: tuple[int, int]  # the soft and the hard limit, in seconds
    program: ProgramTask | None  # if it runs in the same process


@cache
def compiled(python: str) -> dict[str, bytes]:
    """The scripts' modules by name, compiled by the interpreter that will run them."""
    sources = {}
    for name in itertools.chain.from_iterable(SCRIPTS.values()):
        sources[name] = Path(__file__).with_name(f"{name}.py").read_text()
    argv = [python, "-I", "-S", "-c", COMPILE]
    stdin = json.dumps(sources).encode()
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"python {python!r} does not run: {error}") from error
    modules: dict[str, bytes] = marshal.loads(done.stdout)
    return modules


def start(script: str, sandbox: Sandbox, python: str, task: Mapping[str, object], limits: Limits,
          fds: Sequence[int], *arguments: str) -> RunningProgram:  # fmt: skip
    """Start a script, such as ``judge``, in a sandbox; ``task`` is the argument of its ``main``.

    It inherits ``fds``; their numbers and then ``arguments`` are its command line.
    """
    modules = [(name, compiled(python)[name]) for name in SCRIPTS[script]]
    argv = [python, "-s", "-S", "-c", BOOT, *map(str, fds), *arguments, USER]
    stdin = marshal.dumps((modules, dict(task)), 4)
    return sandbox.start(argv, stdin=stdin, limits=limits, pass_fds=fds)


class JudgeEnded(Exception):
    """The judge's process has died; the message says why."""


class WarmJudge:
    """A judge's sandbox, in which ``_judge_server.py`` runs; raises JudgeEnded if it did not start.

    It serves one verdict at a time.
    """

    def __init__(self, sandbox: Sandbox, python: str, path: Sequence[str], memory_mb: int) -> None:
        self.owner = os.getpid()
        self._link, theirs = socket.socketpair()
        # becomes readable when the verdict is over or the judge dies
        self.fileno = self._link.fileno
        with theirs:
            limits = Limits(cpu_seconds=0, memory_mb=memory_mb)
            boxed = "boxed" if sandbox.kind == "bubblewrap" else "unboxed"
            start_task = {"path": list(path)}
            fds = [theirs.fileno()]
            running = start("judge", sandbox, python, start_task, limits, fds, boxed)
        self.child = running.child
        self.close = weakref.finalize(self, _end, self.owner, self._link, running)
        if not self._heard(PATIENCE):
            said = running.last_words()
            self.close()
            raise JudgeEnded(f"the judge did not start: {short(said)}")

    def alive(self) -> bool:
        """Whether it can take a task; False in forks of the process that started it."""
        if self.owner != os.getpid() or not self.close.alive:
            return False
        return not readable(self._link.fileno(), 0)

    def give(self, task: JudgeTask, hears: int, asks: int, tells: int) -> None:
        """Start a verdict; arguments as for ``_run_tests.judge``, with the pipe ``tells`` for its reports."""
        fd = os.memfd_create("task")
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(marshal.dumps(dict(task), 4))
            os.lseek(fd, 0, os.SEEK_SET)
            text = "\n".join([task["tests"], *task["trusted"]])
            modules = " ".join(name for name in PRELOADED if name in text)
            request = modules.encode() or b" "
            socket.send_fds(self._link, [request], [hears, asks, tells, fd])
        except OSError as error:
            self.close()
            raise JudgeEnded(f"the judge's process has died: {error}") from error
        finally:
            os.close(fd)

    def finish(self) -> int | None:
        """End the verdict: the wait status of the judge's child; None if the judge died or had to be killed."""
        status, _, clean = self._heard(GRACE).partition(b" ")
        if clean != b"1\n":
            self.close()
        return int(status) if clean else None

    def _heard(self, seconds: float) -> bytes:
        """The judge's next message; empty if it has died or is silent for so long."""
        if not readable(self._link.fileno(), seconds):
            return b""
        with contextlib.suppress(OSError):
            return self._link.recv(64)
        return b""


def _end(owner: int, link: socket.socket, running: RunningProgram) -> None:
    link.close()
    if owner == os.getpid():
        running.close()


class Judges:
    """The warm judges that wait for their next verdict: one per thread, since bwrap ends with its thread.

    Copies and forks start other judges.
    """

    def __init__(self, memory_mb: int) -> None:
        self.memory_mb = memory_mb
        self._idle = threading.local()

    def __reduce__(self) -> tuple[type["Judges"], tuple[int]]:
        return Judges, (self.memory_mb,)

    @contextlib.contextmanager
    def one(self, sandbox: Sandbox, python: str, path: Sequence[str]) -> Iterator[WarmJudge]:
        """A judge for one verdict; raises JudgeEnded if none can be started."""
        judge: WarmJudge | None = self._idle.__dict__.pop("judge", None)
        if judge is None or not judge.alive():
            judge = WarmJudge(sandbox, python, path, self.memory_mb)
        try:
            yield judge
        except BaseException:
            judge.close()
            raise
        if judge.alive():
            self._idle.judge = judge
