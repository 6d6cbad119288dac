"""A user's agent as an environment: a program that requests the model's messages by OpenAI's API."""

import json
import os
import re
import secrets
import shutil
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rocm_ext.base.errors import UserError
from rocm_ext.base.types import Message, Row
from rocm_ext.environments.base import Ask, Environment
from rocm_ext.environments.endpoint import AtLimit, Endpoint, Exchange
from rocm_ext.sandbox import BOX, Limits, RunningProgram, Sandbox, interpreter
from rocm_ext.sandbox.children import readable, supervise
from rocm_ext.verifiers.base import Result, Verdict, error, short
from rocm_ext.verifiers.build import build

MOST_AT_ONCE = 64
MEMORY_MB = 1024  # the default
_START = 60.0  # seconds that the sandbox may take to start
_AT_LIMIT = AtLimit("the conversation is at a limit of the run")
_FOREVER = 1e9  # seconds; `verify_timeout` limits each wait for the program
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
# This runs in the sandbox: a socket belongs to the network in which it was made, so only programs there can connect.
_LAUNCH = """
import json, os, socket, sys
link, (command, variables) = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
server = socket.create_server(("127.0.0.1", 0), backlog=64)
socket.send_fds(link, [b"."], [server.fileno()])
variables["OPENAI_BASE_URL"] = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
link.close()
server.close()
try:
    os.execve(command[0], command, {**os.environ, **variables})
except OSError as problem:
    sys.exit(f"{command[0]} does not start: {problem}")
"""


class Program(Environment):
    """A conversation with a program, such as an agent that you already have.

    The program runs in the sandbox of the verifiers, once for each conversation. Its input is a line of JSON, the
    prompt's row. ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, which OpenAI's client reads, name an endpoint at which the
    model in training answers chat completions, also with functions and as a stream; the program has no other network.
    The last line of its output is JSON: the reward from 0 to 1, or ``{"reward": 0.5, "detail": "a reason", "parts":
    {"tests": 3}}``. With a ``verifier``, it is the answer as a text, or ``{"answer": "..."}``.

    The program's requests are the conversation: the row's prompt reaches the model only if the program sends it.
    Requests are answered one at a time, over at most 60 connections. The run's sampling settings hold, not
    ``temperature`` and the like of a request; ``max_tokens`` does, and the response ends before a ``stop``. A request
    at a limit of the run gets status 400, and so does one with ``n``, ``logprobs`` or ``response_format``, and one that
    cannot be rendered. A program that fails after such a response has reward 0 if the model has spoken, else it is an
    ERROR.

    Args:
        row: the columns of the prompt's row.
        command: the program and its arguments. ``python`` stands for the argument ``python``; an argument that names a
            file becomes its path in the sandbox. A program outside /usr is shown with its folder.
        folder: a folder shown to the program, read-only; Python imports from it. By default it sees the files of
            ``command`` alone.
        verifier: the component that judges the answer. The program gets none of the columns that it needs but
            ``prompt``.
        memory_mb: memory of the program with all its processes, and address space per process: Node needs 16384.
        at_once: the most simultaneous programs of a rank; by default 4 per CPU thread of it, at most 64.
        sandbox: ``bubblewrap``, or ``rlimits`` if you trust program and model; see rocm_ext.sandbox.
        python: the interpreter, whose installed packages the program can import; by default this one.
    """

    def __init__(
        self,
        row: Row,
        command: Sequence[str],
        folder: str | None = None,
        verifier: Any = None,
        memory_mb: int = MEMORY_MB,
        at_once: int | None = None,
        sandbox: str = "bubblewrap",
        python: str | None = None,
    ) -> None:
        super().__init__(row)
        words = command if isinstance(command, (list, tuple)) else []
        if not words or not all(isinstance(word, str) for word in words):
            raise UserError(
                f"command: found {command!r}; expected a list such as [python, my_agent.py]"
            )
        if not (memory_mb >= 128 and (at_once is None or at_once >= 1)):
            raise UserError(
                f"Program needs memory_mb >= 128 and at_once >= 1, found {memory_mb} and {at_once}"
            )
        threads = len(os.sched_getaffinity(0))
        self.at_once = at_once or min(MOST_AT_ONCE, 4 * threads)
        self._limits = Limits(_FOREVER, 0, memory_mb, processes=128, open_files=512)
        if verifier is not None:
            self.judge_by(build(verifier))
        self._shown = interpreter(python or sys.executable)
        self._folder = None if folder is None else str(Path(folder).resolve())
        if self._folder is not None and not os.path.isdir(self._folder):
            raise UserError(f"folder: {folder} is not a folder")
        folders = list(self._shown.folders)
        program = self._shown.path
        if not _PYTHON.fullmatch(command[0]):
            path = shutil.which(command[0])
            if path is None:
                raise UserError(
                    f"command: {command[0]} is neither a program of the PATH nor an executable file"
                )
            file = Path(path).resolve()
            program = str(file)
            if not file.is_relative_to("/usr"):
                folders.append(str(file.parent))
        if self._folder is not None:
            folders.append(self._folder)
        self._files: dict[str, bytes] = {}
        self._command = [program, *map(self._argument, command[1:])]
        self._sandbox = Sandbox(sandbox, folders)
        self._asked: SimpleQueue[Exchange | None] = SimpleQueue()
        self._exchange: Exchange | None = None  # the request that waits for a message
        self._last: Message = {}  # the model's last message
        self._cut = False  # whether a limit ended the conversation
        self._heard = False  # whether the program has requested anything

    def _argument(self, word: str) -> str:
        """Return an argument, or the path in the sandbox if it names a file."""
        if not os.path.isfile(word):  # Path.is_file raises for code, which is too long for a name
            if word.endswith(".py"):
                raise UserError(f"command: there is no file {word}")
            return word
        file = Path(word)
        path = file.resolve()
        if self._folder is not None and path.is_relative_to(self._folder):
            return str(path)
        content = file.read_bytes()
        if self._files.setdefault(file.name, content) != content:
            raise UserError(
                f"command: two files are named {file.name}; rename one, or show both as a folder"
            )
        return f"{BOX}/{file.name}"

    def check(self) -> None:
        """Raise UserError if this machine cannot run the sandbox or the verifier, or the program sees no ``folder``."""
        self._sandbox.check()
        if self._folder is not None:
            look = [
                self._shown.path,
                "-I",
                "-S",
                "-c",
                "import os, sys; os.listdir(sys.argv[1])",
                self._folder,
            ]
            if self._sandbox.run(look).returncode:
                raise UserError(
                    f"folder: the sandbox runs as another user, who cannot read {self._folder}; "
                    f"allow it: chmod -R o+rX {self._folder}"
                )
        super().check()

    def begin(self) -> Ask | Result:
        self._running = self._start()
        threading.Thread(target=self._watch, daemon=True).start()
        return self._next()

    def reply(self, message: Message) -> Ask | Result:
        self._last = message
        return self._respond(message)

    def cut(self, message: Message) -> Result:
        """Answer with the model's last message, refuse all further requests, and wait for the result."""
        self._cut = True
        reply = self._respond(_AT_LIMIT if message == self._last else message)
        while isinstance(reply, Ask):
            reply = self._respond(_AT_LIMIT)
        return reply

    def refused(self, why: str) -> Ask | Result:
        """Answer the request with status 400; the program may send another one."""
        return self._respond(ValueError(why))

    def _respond(self, message: Message | Exception) -> Ask | Result:
        """Answer the program's request, and wait for the next one or the result."""
        assert self._exchange is not None
        self._exchange.answer(message)
        return self._next()

    def _start(self) -> RunningProgram:
        """Start the program and its endpoint."""
        python = self._shown.path
        key = secrets.token_hex(16)
        packages = list(self._shown.packages)
        if self._folder is not None:
            packages.insert(0, self._folder)
        variables = {
            "OPENAI_API_KEY": key,
            "PYTHONPATH": ":".join(packages),
            "PYTHONUNBUFFERED": "1",
        }
        task = json.dumps([self._command, variables])
        hidden = {*self.needs} - {"prompt"}
        shown = {name: value for name, value in self.row.items() if name not in hidden}
        row = json.dumps(shown, default=str).encode() + b"\n"
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                link = theirs.fileno()
                launch = [python, "-I", "-S", "-c", _LAUNCH, str(link), task]
                running = self._sandbox.start(
                    launch, self._files, row, self._limits, pass_fds=[link]
                )
            listening: list[int] = []
            if readable(ours.fileno(), _START):
                _, listening, *_ = socket.recv_fds(ours, 1, 1)
        if not listening:
            raise RuntimeError(f"the sandbox did not start: {short(running.last_words())}")
        server = socket.socket(fileno=listening[0])
        self._endpoint = Endpoint(server, key, self._asked)
        return running

    def _watch(self) -> None:
        supervise([self._running.child], _FOREVER)
        self._running.close()
        self._asked.put(None)

    def _next(self) -> Ask | Result:
        while True:
            self._exchange = exchange = self._asked.get()
            if exchange is None:
                return self._result()
            if self._running.child.returncode is None and not exchange.gone():
                self._heard = True
                return exchange.ask
            exchange.answer(BrokenPipeError())  # only the endpoint's thread waits

    def _result(self) -> Result:
        child = self._running.child
        if child.killed or child.returncode:
            refused = self._endpoint.refused
            why = f"the program {child.killed or f'ended with status {child.returncode}'}: {_last_line(child.stderr)}"
            if refused:
                why += f" (its last refused request: {refused})"
            models_fault = self._cut or (refused and self._last)  # many programs fail at a refusal
            return Result(Verdict.WRONG, 0.0, why) if models_fault else error(why)
        if not self._heard:
            return error(
                f"the program ended without a request to OPENAI_BASE_URL: {_last_line(child.stderr)}"
            )
        line = _last_line(child.stdout)
        printed = f"the program's last line: {short(line, 200)}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if self._judged_by is not None:
            answer: Any = line
            if isinstance(value, str):
                answer = value
            elif isinstance(value, dict):
                answer = value.get("answer")
            if not isinstance(answer, (str, int, float)):
                return error(f"the program's last line is {short(line, 100)!r}; expected an answer")
            result = self.judge(str(answer))
            return result if result.detail else replace(result, detail=printed)
        fields = value if isinstance(value, dict) else {"reward": value}
        reward = fields.get("reward")
        if not isinstance(reward, (int, float)):
            return error(
                f"the program's last line is {short(line, 100)!r}; expected a reward as JSON"
            )
        verdict = Verdict.CORRECT if reward == 1 else Verdict.WRONG
        detail = str(fields.get("detail", printed))
        return Result(verdict, float(reward), detail, fields.get("parts", {}))


def _last_line(output: bytearray) -> str:
    return output.decode("utf-8", "replace").strip().rpartition("\n")[2]
