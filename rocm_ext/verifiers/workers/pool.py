"""Verification in separate processes, at the same time as generation."""

import contextlib
import json
import math
import os
import queue
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rocm_ext.base.errors import UserError
from rocm_ext.base.importing import COMPONENT, Component, import_component
from rocm_ext.base.types import Row
from rocm_ext.sandbox.children import descendants, kill, readable
from rocm_ext.sandbox.sandbox import FOLDER, folder_of_runs
from rocm_ext.verifiers.base import Result, Verifier, done, error

START = 60.0  # seconds that a worker may take to build its verifier


class Pool:
    """Workers that verify completions; a context manager.

    The workers are new interpreters without torch, since a process that uses a GPU must not fork. A worker builds the
    verifier once. The pool replaces a worker that dies or hangs. An answer that :meth:`Verifier.at_once` judges needs
    no worker.

    A verifier with a ``batch_size`` gets several waiting answers in one call, answers to the same row first. If the
    call fails, the pool has them judged one by one. A verifier of groups gets all answers to a prompt in one call, from
    :meth:`submit_group`; if the call fails, all of them are ERROR.

    Args:
        verifier_config: the verifier, as for :func:`rocm_ext.verifiers.build`; JSON data.
        workers: number of processes.
        timeout: seconds of wall time for one call of the verifier; longer gives ERROR. It stops verifiers that hang;
            the time of a model's code is limited by the verifier.

    Attributes:
        batch_size: the verifier's batch size; 1 for a verifier of groups.
        groups: whether the verifier judges groups.

    Raises:
        UserError: on entering, if a worker cannot build the verifier.
    """

    def __init__(self, verifier_config: Component, workers: int, timeout: float) -> None:
        if not (workers >= 1 and timeout > 0):
            raise UserError(
                f"verification needs workers >= 1 and timeout > 0, found {workers} and {timeout}"
            )
        try:
            self._verifier_config = json.loads(json.dumps(verifier_config, default=_plain))
        except (TypeError, ValueError) as problem:
            raise UserError(f"a verifier's arguments must be plain data: {problem}") from problem
        self._timeout = timeout
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="verify")
        self._folder = folder_of_runs()
        self._all = [_Worker(self._verifier_config, self._folder) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._all:
            self._idle.put(worker)
        self._waiting: deque[_Request] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self.batch_size = 1
        self.groups = False
        self._at_once: Callable[..., Result | None] = Verifier().at_once

    def __enter__(self) -> "Pool":
        try:
            # our threads start the workers, since a worker ends with the thread that started it
            for worker in self._all:
                self._threads.submit(worker.start).result()
            deadline = time.monotonic() + START
            for worker in self._all:
                batch_size, self.groups = worker.ready(deadline)
                self.batch_size = 1 if self.groups else batch_size
            self._at_once = at_once(self._verifier_config)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers and all that they started: running verifications end as ERROR, waiting ones are dropped."""
        self._closed = True
        for worker in self._all:
            worker.close()
        with self._lock:
            for request in self._waiting:
                request.future.cancel()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._all:
            worker.release()
        shutil.rmtree(self._folder, ignore_errors=True)

    def submit(self, completion: str, row: Row, to_worker: bool = False) -> "Future[Result]":
        """A future for the result; no verifier makes it raise. A verifier of groups gets a group of one.

        ``to_worker``: a worker judges the answer even if this process could at once.
        """
        if not (self.groups or to_worker):
            with contextlib.suppress(Exception):  # a worker says what is wrong with the row
                result = self._at_once(completion, row)
                if result is not None:
                    return done(result)
        return self._enqueue(completion, row)

    def submit_group(self, completions: Sequence[str], row: Row) -> "Future[list[Result]]":
        """A future for the results on all answers to a prompt, for a verifier of groups; no verifier makes it raise."""
        return self._enqueue(list(completions), row)

    def _enqueue(self, answer: str | list[str], row: Row) -> Future:
        request = _Request(answer, row, Future())
        with self._lock:
            self._waiting.append(request)
        self._threads.submit(self._work)
        return request.future

    def _work(self) -> None:
        """Judge a batch of waiting requests, or none if other threads have taken them all."""
        worker = self._idle.get()  # never waits: there are as many workers as threads
        try:
            requests = self._take()
            results = self._verify(worker, requests)
        finally:
            self._idle.put(worker)
        for request, result in zip(requests, results, strict=True):
            request.future.set_result(result)

    def _take(self) -> "list[_Request]":
        """The first waiting request, then others to the same row, then others."""
        with self._lock:
            waiting = self._waiting
            if not waiting:
                return []
            share = math.ceil(len(waiting) / len(self._all))  # the rest is for the other workers
            count = min(self.batch_size, share)
            first = waiting.popleft()
            size = min(len(waiting), 4 * (count - 1))
            window = [waiting.popleft() for _ in range(size)]
            window.sort(key=lambda request: request.row is not first.row)
            waiting.extendleft(reversed(window[count - 1 :]))
        requests = [first, *window[: count - 1]]
        return [request for request in requests if request.future.set_running_or_notify_cancel()]

    def _verify(self, worker: "_Worker", requests: "list[_Request]") -> list[Any]:
        """The results of the requests: a Result, or for a group a list of Results."""
        if not requests:
            return []
        results = self._ask(worker, requests)
        answer = requests[0].answer
        is_group = isinstance(answer, list)  # a group has a call to itself
        if isinstance(results, list):
            return [results] if is_group else results
        if is_group:
            return [[error(results)] * len(answer)]
        if len(requests) == 1:
            return [error(results)]
        verified = []
        for request in requests:
            verified += self._verify(worker, [request])
        return verified

    def _ask(self, worker: "_Worker", requests: "list[_Request]") -> list[Result] | str:
        """The results, or why there are none."""
        try:
            first = requests[0]
            wire: Any
            if isinstance(first.answer, list):
                wire = {"completions": first.answer, "row": dict(first.row)}
            else:
                wire = []
                for request in requests:
                    wire.append({"completion": request.answer, "row": dict(request.row)})
            return worker.verify(json.dumps(wire, default=_plain), self._timeout)
        except (TypeError, ValueError, RecursionError) as problem:
            return f"the row cannot be sent to a worker: {problem}"
        except UserError as problem:
            return str(problem)
        except Exception as problem:
            if self._closed:
                return "verification was ended"
            return f"{type(problem).__name__}: {problem}"


def at_once(verifier_config: Component) -> Callable[..., Result | None]:
    """``at_once`` of a verifier of this library; for others, whose code runs only in workers, one that returns None."""
    path = verifier_config[COMPONENT]
    kind = import_component(path) if path.startswith("rocm_ext.verifiers.") else Verifier
    if getattr(kind, "at_once", Verifier.at_once) is Verifier.at_once:
        return Verifier().at_once
    arguments = {name: value for name, value in verifier_config.items() if name != COMPONENT}
    return kind(**arguments).at_once


@dataclass(frozen=True)
class _Request:
    answer: str | list[str]  # a list: a group, which has a call to itself
    row: Row
    future: Future


class _Worker:
    """One process and its pipes. One thread at a time uses it; any thread may call ``close``."""

    def __init__(self, verifier_config: Any, folder: str) -> None:
        self._verifier_config = verifier_config
        self._folder = folder
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._buffer = b""
        self._dead: list[subprocess.Popen] = []

    def start(self) -> None:
        # not -m: it puts the current directory first on sys.path, where a user's `json.py` may lie
        boot = "import json,sys;sys.path[:]=json.loads(sys.argv[1]);"
        boot += "from rocm_ext.verifiers.workers.worker import main;main()"
        argv = [sys.executable, "-c", boot, json.dumps(sys.path)]
        pipe = subprocess.PIPE
        env = os.environ | {"OMP_NUM_THREADS": "1", FOLDER: self._folder}
        with self._lock:
            if self._closed:
                raise UserError("verification was ended")
            self._process = subprocess.Popen(
                argv, stdin=pipe, stdout=pipe, start_new_session=True, bufsize=0, env=env
            )
            self._buffer = b""
        start = {"verifier": self._verifier_config, "parent": os.getpid()}
        with contextlib.suppress(BrokenPipeError):
            self._send(json.dumps(start), time.monotonic() + START)

    def ready(self, deadline: float) -> tuple[int, bool]:
        """Wait until the verifier is built: its batch size, and whether it judges groups."""
        line = self._line(deadline)
        message = json.loads(line) if line else {}
        if "ready" not in message:
            said = message.get("error")
            if said is None:
                ended = f"did not start within {START:g} s" if line is None else self._end()
                said = f"the worker {ended}"
            self.kill()
            raise UserError(f"the verifier cannot be built in a worker: {said}")
        return message["ready"], message["groups"]

    def verify(self, request: str, timeout: float) -> list[Result] | str:
        """The results, or why there are none."""
        if self._process is None:
            self.start()
            self.ready(time.monotonic() + START)
        deadline = time.monotonic() + timeout
        try:
            sent = self._send(request, deadline)
        except BrokenPipeError:
            sent = True  # the worker died; reading finds the end of its output
        line = self._line(deadline) if sent else None
        if line:
            answer = json.loads(line)
            if "error" in answer:
                return answer["error"]
            return [Result(*values) for values in answer["results"]]
        if line is None:
            ended = f"the verifier hung for {timeout:g} s"
        else:
            ended = f"the verifier's process {self._end()}"
        self.kill()
        return "verification was ended" if self._closed else ended

    def kill(self) -> None:
        """Kill the process, its group and all its descendants."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        below = []
        if process.returncode is None:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGSTOP)  # so that it starts no more processes
                below = descendants(process.pid)
                os.killpg(process.pid, signal.SIGKILL)
        kill(below)  # they may be in other process groups
        process.wait()
        self._dead.append(process)
        if not self._closed:
            self.release()

    def close(self) -> None:
        """Kill the process and start no other. Its pipes stay open, since another thread may be reading them."""
        self._closed = True
        self.kill()

    def release(self) -> None:
        """Close the pipes of killed processes."""
        while self._dead:
            process = self._dead.pop()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()

    def _end(self) -> str:
        """How the process ended or is about to end."""
        process = self._process
        if process is None:
            return "was ended"
        try:
            code = process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if code < 0:
            return f"died of signal {-code} ({signal.Signals(-code).name})"
        return f"exited with {code}"

    def _send(self, text: str, deadline: float) -> bool:
        """Send a line; False if the process has not read it before the deadline."""
        process = self._process
        if process is None or process.stdin is None:
            raise BrokenPipeError
        fd = process.stdin.fileno()
        os.set_blocking(fd, False)
        data = memoryview(text.encode() + b"\n")
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_WRITE)
            while data:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return False
                data = data[os.write(fd, data[: 1 << 16]) :]
        return True

    def _line(self, deadline: float) -> bytes | None:
        """The next line of the process's output; empty at its end, None at the deadline."""
        process = self._process
        if process is None or process.stdout is None:
            return b""
        fd = process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not readable(fd, deadline - time.monotonic()):
                return None
            data = os.read(fd, 1 << 16)
            if not data:
                return b""
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def _plain(value: Any) -> Any:
    """JSON for other values in rows of data sets: arrays, mappings, dates."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"a {type(value).__name__} is not JSON")
