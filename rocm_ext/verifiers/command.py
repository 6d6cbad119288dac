"""A program of the user's as the verifier."""

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from rocm_ext.errors import UserError
from rocm_ext.verifiers.base import Result, Verdict, Verifier, error, short
from rocm_ext.verifiers.sandbox.process import MARK, Child, supervise


class Command(Verifier):
    """Asks any program: JSON ``{"completion", "row"}`` on its stdin, ``{"verdict", "reward", "detail"}`` on its stdout.

    The program is trusted: it runs as you, in the current directory, without a sandbox. If it fails, hangs or answers
    anything else, the verdict is ERROR. In the end it is killed with all processes that it started; one that has lost
    its parent and cleared its environment is not found.

    Args:
        command: program and arguments, run without a shell.
        timeout: seconds of wall time.
    """

    def __init__(self, command: Sequence[str], timeout: float = 30.0) -> None:
        if isinstance(command, str) or not command or not all(isinstance(part, str) for part in command):
            raise UserError(f"Command: command must be a list of strings, [program, argument, ...], found {command!r}")
        if timeout <= 0:
            raise UserError(f"Command: timeout must be positive, found {timeout}")
        self.command, self.timeout = list(command), timeout

    def check(self) -> None:
        if shutil.which(self.command[0]) is None:
            raise UserError(f"Command: there is no program {self.command[0]!r} here or in PATH (in {os.getcwd()})")

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Result:
        request = json.dumps({"completion": completion, "row": dict(row)}).encode()
        pipe = subprocess.PIPE
        try:
            environment = os.environ | {MARK: (mark := uuid.uuid4().hex)}
            process = subprocess.Popen(
                self.command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
                bufsize=0,
                env=environment,
            )
        except OSError as problem:
            return error(f"{self.command[0]} cannot be run: {problem}")
        child = Child(process, request, mark=mark)
        if not supervise([child], self.timeout):
            return error(f"{self.command[0]} was still running after {self.timeout:g} s")
        if child.killed:
            return error(f"{self.command[0]} {child.killed}")
        if child.returncode != 0:
            said = bytes(child.stderr).decode("utf-8", "replace")
            return error(f"{self.command[0]} ended with {child.returncode}: {short(said, 200)}")
        said = bytes(child.stdout).decode("utf-8", "replace")
        try:
            answer = json.loads(said)
            return Result(Verdict(answer["verdict"]), answer["reward"], str(answer.get("detail", "")))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as problem:
            expected = '{"verdict": "CORRECT", "reward": 1.0, "detail": ""}'
            return error(f"{self.command[0]} must answer like {expected}, found {short(said, 80)!r}: {problem}")
