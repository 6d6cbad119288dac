"""Conversations with environments, in separate processes.

One process without threads and without torch imports the environment's module and forks a child for each conversation.
A child that raises, hangs or dies costs only its conversation.
"""

import contextlib
import gc
import inspect
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rocm_ext.base.errors import UserError
from rocm_ext.base.importing import COMPONENT, Component, import_component
from rocm_ext.base.types import Json, Message, Row
from rocm_ext.environments.base import Ask, Environment, Reply, checked_reply, now, tools_of
from rocm_ext.sandbox import helper
from rocm_ext.sandbox.children import descendants, kill
from rocm_ext.sandbox.sandbox import FOLDER, folder_of_runs
from rocm_ext.verifiers.base import Result, done, error

_START = 60.0  # seconds that the environment's module may take to import
_CHUNK = 1 << 16
_LOOK = 0.1  # seconds between looks for environments that hang, and for conversations to end
Key = tuple[str, int]


class Environments:
    """Conversations with environments; a context manager.

    No environment makes a method raise: its faults are ERRORs.

    Args:
        environment: the component, ``{_component_: my_env.Game, ...}``; JSON data.
        timeout: seconds of wall time for one answer of an environment.

    Attributes:
        tools: JSON schemas of the tools that the model may call.
        at_once: see :class:`rocm_ext.environments.Environment`.

    Raises:
        UserError: on entering, if the environment cannot be imported.
    """

    def __init__(self, environment: Component, timeout: float) -> None:
        self.tools: list[Json] = []
        self._environment = dict(environment)
        self._timeout = timeout
        self._open: dict[Key, _Talk] = {}
        self._ending: deque[tuple[_Talk, str]] = deque()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closed = False
        self._folder = folder_of_runs()

    def __enter__(self) -> "Environments":
        boot = (
            "import json,sys;sys.path[:]=json.loads(sys.argv[2]);"
            "from rocm_ext.environments.processes import main;main(int(sys.argv[1]))"
        )
        self._link, theirs = socket.socketpair()
        with theirs:
            self._host = subprocess.Popen(
                [sys.executable, "-c", boot, str(theirs.fileno()), json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
                env=os.environ | {FOLDER: self._folder},
            )
        self._thread = threading.Thread(target=self._listen, name="environments", daemon=True)
        self._thread.start()
        try:
            start = {"environment": self._environment, "parent": os.getpid()}
            self._link.sendall(_line(start))
            self._link.settimeout(_START)
            answer = _read_line(self._link)
        except OSError:
            answer = {"error": f"its module did not import within {_START:g} s"}
        if "tools" not in answer:
            self.close()
            raise UserError(
                f"the environment cannot be used: {answer.get('error') or 'its process ended'}"
            )
        self.tools, self.at_once = answer["tools"], answer["at_once"]
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes; unfinished answers end as ERROR."""
        self._closed = True
        for key in list(self._open):
            self.end(key)
        os.write(self._wake, b".")
        self._thread.join()
        self._end_talks()
        kill([*descendants(self._host.pid), self._host.pid])
        self._host.wait()
        self._link.close()
        self._selector.close()
        for fd in (self._woken, self._wake):
            os.close(fd)
        shutil.rmtree(self._folder, ignore_errors=True)

    def begin(self, key: Key, row: Row) -> "Future[Reply]":
        """Begin a conversation: a future for the messages that follow the prompt's."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._link, [b"+"], [theirs.fileno()])
            except OSError:
                ours.close()
                return done(error("the environment's process died"))
        ours.settimeout(self._timeout)
        with self._lock:
            self._open[key] = _Talk(ours)
        return self._ask(key, {"row": dict(row)})

    def say(self, key: Key, message: Message) -> "Future[Reply]":
        """Send the model's message: a future for the messages that follow, or for the result."""
        return self._ask(key, {"reply": dict(message)})

    def refuse(self, key: Key, why: str) -> "Future[Reply]":
        """Refuse the request of an Ask: a future for the next one, or for the result."""
        return self._ask(key, {"refused": why})

    def cut(self, key: Key, message: Message) -> "Future[Reply]":
        """Judge a conversation that a limit ends: a future for the result."""
        return self._ask(key, {"cut": dict(message)})

    def end(self, key: Key, why: str = "the conversation was ended") -> None:
        """End a conversation and all processes that it started; a waiting answer is an ERROR that says why."""
        with self._lock:
            talk = self._open.pop(key, None)
        if talk is not None:
            self._ending.append((talk, why))  # the thread ends it, which takes as long as an answer

    def _ask(self, key: Key, content: Json) -> "Future[Reply]":
        try:
            text = _line(content)
        except (TypeError, ValueError, RecursionError) as problem:
            self.end(key)
            return done(error(f"the row cannot be sent to the environment: {problem}"))
        future: Future[Reply] = Future()
        with self._lock:  # whatever ends the conversation from now on resolves this future
            talk = self._open.get(key)
            if talk is None:
                return done(error("the conversation has ended"))
            # before the future: _listen reads them in reverse
            talk.deadline = time.monotonic() + self._timeout
            talk.future = future
            if not talk.registered:
                self._selector.register(talk.socket, selectors.EVENT_READ, key)
                talk.registered = True
        with contextlib.suppress(OSError):  # reading finds the end
            talk.socket.sendall(text)
        return future

    def _listen(self) -> None:
        """Resolve futures with answers, and end conversations that hang or die; a thread."""
        looked = time.monotonic()
        while not self._closed:
            for event, _ in self._selector.select(_LOOK):
                talk = self._open.get(event.data)
                if event.fd == self._woken:
                    os.read(self._woken, _CHUNK)
                elif talk is not None and not talk.read():
                    self.end(event.data, "the environment's process died")
            now = time.monotonic()
            if now >= looked + _LOOK:
                looked = now
                for key, talk in list(self._open.items()):
                    if talk.waits() and now > talk.deadline:
                        self.end(key, f"the environment hung for {self._timeout:g} s")
            self._end_talks()

    def _end_talks(self) -> None:
        while self._ending:
            talk, why = self._ending.popleft()
            talk.end(why, self._selector)


@dataclass
class _Talk:
    """The connection to a conversation's process."""

    socket: socket.socket
    future: "Future[Reply] | None" = None
    deadline: float = 0.0
    pid: int = 0
    buffer: bytes = b""
    registered: bool = False

    def waits(self) -> bool:
        """Whether an answer is missing."""
        return self.future is not None and not self.future.done()

    def resolve(self, reply: Reply) -> None:
        """Give a waiting future its answer."""
        if self.future is not None and not self.future.done():
            self.future.set_result(reply)

    def read(self) -> bool:
        """Read without waiting; False at the end."""
        try:
            data = self.socket.recv(_CHUNK)
        except OSError:
            return False
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            ((kind, value),) = json.loads(line).items()
            if kind == "pid":
                self.pid = value
            else:
                self.resolve(_REPLIES[kind](value))
        return bool(data)

    def end(self, why: str, selector: selectors.BaseSelector) -> None:
        """Kill the process with its descendants, and resolve a waiting future with an ERROR."""
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(self.socket)
        # before the socket closes: then the process ends, and its children get another parent
        if self.pid:
            below = descendants(self.pid)
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            kill(below)
        self.socket.close()
        self.resolve(error(why))


_REPLIES: dict[str, Callable[[Any], Reply]] = {
    "messages": list,
    "ask": lambda value: Ask(**value),
    "result": lambda value: Result(*value),
}


def _line(content: Json) -> bytes:
    return json.dumps(content, default=str).encode() + b"\n"


def _read_line(link: socket.socket) -> Json:
    """Read a line from a socket; {} at its end."""
    line = b""
    while not line.endswith(b"\n"):
        data = link.recv(_CHUNK)
        if not data:
            return {}
        line += data
    return json.loads(line)


# ---- the process that forks, and its children


def main(fd: int) -> None:
    """Serve the :class:`Environments` at the other end of the socket ``fd``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    link = socket.socket(fileno=fd)
    start = _read_line(link)
    helper.serve(start["parent"])
    arguments = start["environment"]
    try:
        component = import_component(arguments.pop(COMPONENT))
        if not (inspect.isclass(component) and issubclass(component, Environment)):
            name = getattr(component, "__name__", component)
            raise UserError(
                f"environment {name} is not derived from rocm_ext.environments.Environment"
            )
        helper.RUNNING = True  # in the children, too
        example = component({}, **arguments)
        example.check()  # children inherit its imports
        tools = tools_of(example).schemas
        if tools:
            import jsonschema  # noqa: F401 - once, for all children
    except UserError as problem:
        link.sendall(_line({"error": str(problem)}))
        return
    except BaseException as problem:
        link.sendall(_line({"error": helper.blame(problem)}))
        return
    link.sendall(_line({"tools": tools, "at_once": example.at_once}))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    gc.freeze()  # shared memory stays shared
    while True:
        asked, fds, *_ = socket.recv_fds(link, 1, 1)
        if not asked:
            return
        if os.fork() == 0:
            try:
                link.close()
                _converse(socket.socket(fileno=fds[0]), component, arguments)
            finally:
                os._exit(0)
        os.close(fds[0])


def _converse(ours: socket.socket, component: Any, arguments: Mapping[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    helper.die_with(os.getppid())
    ours.sendall(_line({"pid": os.getpid()}))
    environment: Any = None
    while True:
        request = _read_line(ours)
        if not request:
            return
        ((method, content),) = request.items()
        try:
            if method == "row":
                environment = component(content, **arguments)
                value = environment.begin()
            else:
                value = getattr(environment, method)(content)
            reply = checked_reply(environment, now(value))
            if isinstance(reply, Result):
                answer = _line({"result": reply.values()})
            elif isinstance(reply, Ask):
                answer = _line({"ask": vars(reply)})
            else:
                answer = _line({"messages": reply})
        except BaseException as problem:  # SystemExit, too
            result = error(helper.blame(problem))
            answer = _line({"result": result.values()})
        ours.sendall(answer)
