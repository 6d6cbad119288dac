"""Python code, judged by tests that it cannot see."""

import ast
import contextlib
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from rocm_ext.errors import UserError, nearest
from rocm_ext.verifiers.base import Result, Verdict, Verifier, correct, error, field, short, timeout, unparsed, wrong
from rocm_ext.verifiers.cases import Comparison, calls_of, cases_of, run_cases
from rocm_ext.verifiers.extract import extract_code, parse_python
from rocm_ext.verifiers.python._source import Broken, Tests
from rocm_ext.verifiers.python.start import PROGRAM, Gone, Judges, WarmJudge, start
from rocm_ext.verifiers.sandbox import BOX, Limits, Sandbox, interpreter
from rocm_ext.verifiers.sandbox.process import supervise

log = logging.getLogger("rocm_ext")
REPORTS = 1 << 16  # bytes; the judge's reports are far shorter
ISOLATIONS = ("two_processes", "same_process")
UNJUDGED = ("wrong", "error")
ENDS = 2.0  # seconds that a sandbox may take to report how its program ended


class PythonTests(Verifier):
    """Whether Python code passes the tests in its row.

    Row fields:

    - ``tests``: source with asserts at the top level, ``test_*`` functions, also async, ``check(candidate)``, and
      whatever pytest runs: fixtures, marks, ``Test*`` classes, ``TestCase`` classes of unittest; or a list of
      statements. Tests that are skipped, or may fail by ``xfail``, do not count
    - ``entry_point``: the name that the code must define and that ``check`` is called with; it may be an expression
      such as ``Solution().two_sum``. Without it the answer defines the names that the tests use and do not define, as
      ``from solution import f`` also says; names of builtins and of well-known modules stay the library's, unless the
      tests call just one of them and nothing else
    - ``test_setup``: imports and definitions for both sides; the model's code runs with them and can read them. Objects
      of its classes live with the code
    - ``code_prefix``: HumanEval's prompt, a signature with its docstring; it precedes code that does not define the
      entry point itself. Its helper functions are trusted: the tests use them
    - ``cases`` instead of ``tests``: a list of ``{input, output}`` for a program that reads stdin and writes stdout;
      ``tolerance`` and ``checker`` in the row take precedence over the arguments
    - ``cases`` as a list of ``{input: [arguments], output: value}`` for calls of ``entry_point``. A tuple counts as
      the list of its elements, and a number within ``tolerance`` as equal. With ``unwrap: true`` in a case, an expected
      list of one also stands for its element

    The code and the tests run in two processes, each in its own sandbox. The code's process gets the arguments of the
    calls that the tests make; it sees neither the tests' source nor the expected values. What comes back is plain data
    of exact library types, or a handle on an object of the code, on which the tests may operate; ``_judge.py`` has the
    rule. Containers cross as copies; after a call, the tests' own have the content that the code left in them.

    ``check_row`` refuses rows that would not run, could not fail, or need one process: those that patch a library, use
    files, look into the answer's objects, derive classes from the answer's, or run text.

    These asserts trust the code: one that compares with a value that the code's own classes or helper functions
    compute; one that computes the expected value from an argument after the call, which may have changed it; and one
    that asks an object that it made by calling a class of the code.

    Args:
        timeout: seconds of wall time for one completion, all its tests together.
        memory_mb: for the code. With ``same_process`` the code and the tests share 1,024 MB instead.
        partial_credit: the reward is the share of tests that pass; else it is 1 or 0. Each check of a plain test
            function or of ``check`` counts as a test; a loop and a function with fixtures count as one.
        sandbox: ``bubblewrap``, or ``rlimits`` for code that you trust; see rocm_ext.verifiers.sandbox.
        isolation: ``two_processes``; or ``same_process``, which runs the code and the tests in one interpreter, in the
            sandbox, and judges all that Python can. The code can then read the tests and forge its verdict: it is for
            benchmarks of code that you trust, not for training.
        unjudged: the verdict of an answer that gives what the tests cannot judge across the two processes, such as an
            object where they take data: ``wrong``, so that no answer escapes its verdict; or ``error``, to look for
            rows that need ``same_process``.
        python: the interpreter; the code can import its installed packages.
        tolerance, checker: what counts as the right output of ``cases``; see
            :class:`rocm_ext.verifiers.cases.Comparison`.
    """

    def __init__(
        self,
        timeout: float = 10.0,
        memory_mb: int = 512,
        partial_credit: bool = False,
        sandbox: str = "bubblewrap",
        isolation: str = "two_processes",
        unjudged: str = "wrong",
        python: str | None = None,
        tolerance: float | None = None,
        checker: str | None = None,
    ) -> None:
        if timeout <= 0 or memory_mb < 64:
            raise UserError(f"PythonTests needs timeout > 0 and memory_mb >= 64, found {timeout} and {memory_mb}")
        if isolation not in ISOLATIONS:
            raise UserError(f"isolation {isolation!r} is unknown{nearest(isolation, ISOLATIONS)}")
        if unjudged not in UNJUDGED:
            raise UserError(f"unjudged {unjudged!r} is unknown{nearest(unjudged, UNJUDGED)}")
        self.isolation, self.unjudged = isolation, unjudged
        self.limits = Limits(seconds=timeout, memory_mb=memory_mb)
        self.partial_credit, self.kind, self.python = partial_credit, sandbox, python or sys.executable
        self.comparison = Comparison(tolerance, checker, sandbox, self.python)
        self._judges = Judges()

    @cached_property
    def _sandbox(self) -> Sandbox:
        return Sandbox(self.kind, interpreter(self.python)[0])

    def check(self) -> None:
        self._sandbox.check()
        outcome = self._sandbox.run([self.python, "-s", "-S", "-c", "print(6 * 7)"], limits=Limits(seconds=20))
        if outcome.stdout.strip() != b"42":
            raise UserError(f"{self.python} does not run in the sandbox: {short(outcome.stderr.decode(), 200)}")
        if self.isolation == "same_process":
            log.warning(
                "PythonTests with isolation: same_process: code can forge its verdict; use it for code you trust"
            )

    def check_row(self, row: Mapping[str, Any]) -> None:
        if row.get("cases") is not None:
            self.comparison.check_row(row)
            if calls_of(row) is None:
                cases_of(row)
                return
            if row.get("checker") is not None:
                raise ValueError("field 'checker' judges what a program prints; these cases are calls")
        for name in ("entry_point", "test_setup", "code_prefix"):
            if row.get(name) is not None:
                field(row, name, str)
        entry = row.get("entry_point") or ""
        tests = "" if row.get("cases") is not None else tests_of(row)
        for name, source in (("tests", tests), ("test_setup", row.get("test_setup") or ""), ("entry_point", entry)):
            try:
                parse_python(source)
            except (SyntaxError, ValueError) as error:
                raise ValueError(f"field {name!r} is not Python: {error}") from error
        try:
            if tests:
                Tests(tests, self._trusted(row), entry, self.isolation == "two_processes")
        except (Broken, SyntaxError, RecursionError) as error:
            raise ValueError(f"field 'tests': {error}") from error

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Result:
        code = extract_code(completion, "python")
        prefix = row.get("code_prefix") or ""
        entry = row.get("entry_point") or ""
        if code is None and prefix and "```" not in completion and completion.strip():
            code = completion.replace("\r\n", "\n")  # the body alone, without a fence
        if code is None:
            return unparsed("no Python code")
        if row.get("cases") is not None and calls_of(row) is None:
            return self._cases(code, row)
        definition = rf"^[ \t]*(async[ \t]+)?(def|class)[ \t]+{re.escape(entry)}\b"
        if prefix and entry and not re.search(definition, code, re.M):
            code = prefix + ("" if prefix.endswith("\n") else "\n") + code
        return self._tests(code, prefix, entry, row)

    def _cases(self, code: str, row: Mapping[str, Any]) -> Result:
        boot = f"import builtins,runpy,sys;sys.path+={list(self._packages)!r};builtins.exit=builtins.quit=sys.exit;"
        boot += f"sys.argv=['solution.py'];runpy.run_path({BOX + '/solution.py'!r},run_name='__main__')"
        argv = [self.python, "-s", "-S", "-c", boot]
        results = run_cases(self._sandbox, argv, {"solution.py": code}, row, self.limits, self.partial_credit,
                            self.comparison)  # fmt: skip
        return results.result(self.partial_credit)

    @property
    def _packages(self) -> tuple[str, ...]:
        return interpreter(self.python)[1]

    def _tests(self, code: str, prefix: str, entry: str, row: Mapping[str, Any]) -> Result:
        trusted = self._trusted(row)
        shared, methods = _classes(trusted)
        tests, cases = "", None
        try:
            if row.get("cases") is not None:
                cases = calls_of(row)
            else:
                tests = tests_of(row)
        except ValueError as problem:
            return error(problem)
        tested = [re.split(r"\W", entry)[0]] + ["Solution"] * (cases is not None)
        forget = f"[globals().pop(name, None) for name in {tested!r}]"  # those of the set-up are not the answer's
        program = {"setup": "\n".join([*trusted, forget]), "code": code, "path": list(self._packages)}
        holders = [] if entry.isidentifier() else re.findall(r"\w+", entry)  # classes that only hold the function
        task: dict[str, Any] = {
            **{"trusted": trusted, "tests": tests, "entry_point": entry, "functions": holders},
            **{"shared": shared, "methods": methods, "cases": cases, "tolerance": self.comparison.within(row)},
            **{"all": self.partial_credit, "cpu": self.limits.resources(False)["CPU"]},
        }
        if self.isolation == "same_process":
            task["program"] = program
        try:
            with self._judges.one(self._sandbox, self.python, self._packages) as judge:
                return self._judged(judge, task, program)
        except Gone as problem:
            return error(problem)

    def _judged(self, judge: WarmJudge, task: dict, program: dict) -> Result:
        """Run the code and the tests, and return the verdict."""
        began = time.monotonic()
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            (asked, ask), (heard, answer), (told, tell) = os.pipe(), os.pipe(), os.pipe()
            for fd in (heard, told):
                ours.callback(os.close, fd)
            for fd in (asked, ask, answer, tell):
                theirs.callback(os.close, fd)
            running = None
            if "program" not in task:
                fds = (asked, answer)
                running = start(self._sandbox, self.python, PROGRAM, program, self.limits, fds, fds)
                ours.callback(running.close)
            judge.give(task, heard, ask, tell)
            theirs.close()
            child = running.child if running else judge.child
            seconds = self.limits.seconds - (time.monotonic() - began)
            in_time = supervise([child] if running else [], seconds, judge.fileno(), [judge.child])
            if running:
                if in_time and _has_no_writer(heard):  # the code has ended by itself; the sandbox will tell how
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.process.wait(ENDS)
                running.close()
            status = judge.finish()
            os.set_blocking(told, False)
            said = b""
            with contextlib.suppress(BlockingIOError):
                said = os.read(told, REPORTS)
        if not in_time:
            return timeout(f"still running after {self.limits.seconds:g} s")
        if child.killed:
            return wrong(f"the code {child.killed}")
        result = self._result(said, judge, status, bytes(child.stderr).decode("utf-8", "replace"))
        ends = (128 + signal.SIGXCPU, -signal.SIGXCPU, signal.SIGXCPU)
        spent = (child.returncode if running else status) in ends
        return timeout("used up its CPU time") if spent and result.verdict is Verdict.WRONG else result

    @staticmethod
    def _trusted(row: Mapping[str, Any]) -> list[str]:
        """The sources that run on both sides."""
        found = (row.get("test_setup") or "", row.get("code_prefix") or "")
        return [source for source in found if source and _parses(source)]

    def _result(self, said: bytes, judge: WarmJudge, status: int | None, stderr: str) -> Result:
        """The verdict in the judge's output, which the program cannot write to."""
        started, last = _reports(said)
        if last is None and status is None and not judge.child.killed:
            return error("the tests' process died")
        if last is None and started:
            return wrong(f"the tests {judge.child.killed or 'crashed'} on what the code returned")
        if last is None or (last["kind"] == "gone" and not started):
            return error(f"the sandbox or the tests did not start: {stderr or judge.child.killed}")
        return self._verdict(last)

    def _verdict(self, last: dict[str, Any]) -> Result:
        """The verdict of the last report."""
        detail = short(last.get("detail", ""))
        if last["kind"] == "broken":
            return error(detail)
        if last["kind"] == "unjudged":
            return (wrong if self.unjudged == "wrong" else error)(f"cannot be judged: {detail}")
        if last["kind"] == "gone":
            return wrong(detail)
        if re.search("MemoryError|map segment|allocate memory", detail):
            detail += f" (memory_mb is {self.limits.memory_mb})"
        if last["kind"] == "failed":
            return wrong(f"failed: {detail}")
        passed, total = last["passed"], last["total"]
        if not last["failed"]:
            return correct(f"passed {total} of {total}")
        if not self.partial_credit:
            return wrong(f"failed: {detail}")
        return wrong(f"passed {passed:.4g} of {total}; failed: {detail}", passed / total if total else 0.0)


def _reports(said: bytes) -> tuple[bool, dict[str, Any] | None]:
    """Whether the tests started, and the last report, if it is one."""
    reports = []
    for line in said.split(b"\n")[:-1]:  # whole lines only
        with contextlib.suppress(ValueError):
            reports.append(json.loads(line))
    return "started" in reports, reports[-1] if reports and isinstance(reports[-1], dict) else None


def _has_no_writer(reader: int) -> bool:
    poll = select.poll()
    poll.register(reader, 0)
    return bool(poll.poll(0))


def tests_of(row: Mapping[str, Any]) -> str:
    """The source of a row's tests.

    Raises:
        ValueError: the row has none.
    """
    tests = field(row, "tests", (str, list, tuple))
    source = tests if isinstance(tests, str) else "\n".join(map(str, tests))
    if not source.strip():
        raise ValueError("field 'tests' is empty")
    return source.replace("\r\n", "\n")


def _parses(source: str) -> bool:
    try:
        parse_python(source)
    except (SyntaxError, ValueError):
        return False
    return True


def _classes(sources: list[str]) -> tuple[list[str], list[str]]:
    """The classes of trusted sources whose objects live with the code, and their methods: all but those of unittest."""
    nodes = [node for source in sources for node in parse_python(source).body if isinstance(node, ast.ClassDef)]
    nodes = [node for node in nodes if not any("TestCase" in ast.unparse(base) for base in node.bases)]
    methods = {n.name for node in nodes for n in node.body if isinstance(n, ast.FunctionDef)}
    return [node.name for node in nodes], sorted(methods)
