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
from collections.abc import Callable, Sequence, Set
from functools import cached_property, lru_cache
from typing import Any

from rocm_ext.base.errors import UserError, require_known
from rocm_ext.base.types import Row
from rocm_ext.sandbox import BOX, Limits, Sandbox, check_limits, interpreter
from rocm_ext.sandbox.children import supervise
from rocm_ext.verifiers.base import (
    Result,
    Verdict,
    Verifier,
    correct,
    error,
    field,
    short,
    timeout,
    unparsed,
    wrong,
)
from rocm_ext.verifiers.cases import OutputRule, calls_of, cases_of, run_cases
from rocm_ext.verifiers.extract import answer_text, extract_code, fenced_code, parse_python
from rocm_ext.verifiers.python._source import Broken, Tests, names_in
from rocm_ext.verifiers.python.start import (
    JudgeEnded,
    Judges,
    JudgeTask,
    ProgramTask,
    WarmJudge,
    start,
)

log = logging.getLogger("rocm_ext")
JUDGE_MB = 1024  # the tests may need more memory than the code
REPORTS = 1 << 16  # bytes; more than all reports of a verdict
# A program that reads stdin
READS = re.compile(r"\binput *[(,)]|= *input\b|\bstdin\b|\bopen\(0|\bos\.read\b|\bfileinput\b")
BODY = re.compile(r"(?:[ \t]*\n)*[ \t]+\S")  # the body of a function without its head
ENDS = 2.0  # seconds that a sandbox may take to report how its program ended


class PythonTests(Verifier):
    """Whether Python code passes the tests in its row.

    Row fields:

    - ``tests``: source with asserts at the top level, ``test_*`` functions, also async, ``check(candidate)``, and tests
      for pytest: fixtures, marks, ``Test*`` classes, ``TestCase`` classes of unittest; or a list of statements. Tests
      that are skipped, or may fail by ``xfail``, do not count
    - ``entry_point``: the name that the code must define, and the argument of ``check``; it may be an expression such
      as ``Solution().two_sum``. Without it the answer defines the names that the tests use and do not define, as
      ``from solution import f`` also says; names of builtins and of well-known modules stay the library's, unless the
      tests call just one of them and nothing else
    - ``test_setup``: imports and definitions for both sides; the model's code runs with them and can read them. Objects
      of its classes live with the code
    - ``code_prefix``: HumanEval's prompt, a signature with its docstring; it precedes code that does not define the
      entry point. Its helper functions are trusted: the tests use them
    - ``cases`` instead of ``tests``: a list of ``{input, output}`` for a program that reads stdin and writes stdout;
      ``tolerance`` and ``checker`` in the row take precedence over the arguments
    - ``cases`` as a list of ``{input: [arguments], output: value}`` for calls of ``entry_point``. A tuple counts as
      the list of its elements, and a number within ``tolerance`` as equal. With ``unwrap: true`` in a case, an expected
      list of one also stands for its element

    The code and the tests run in two processes, in separate sandboxes. The code's process gets the arguments of the
    calls that the tests make; it sees neither the tests' source nor the expected values. It returns plain data of exact
    library types, or handles on objects of the code, on which the tests may operate; ``_judge.py`` has the rule.
    Containers cross as copies; after a call, the tests' containers get the content that the code left in its copies. A
    failed assert is a failure, even if something catches its error. So is a test that ends before any of its checks has
    run, such as a loop over an empty list, and a ``zip`` of the tests that leaves out values of a list.

    ``check_row`` refuses rows that would not run, could not fail, or need one process. docs/verifiers.md lists tests
    that cannot be judged, and SECURITY.md the asserts that trust the code. Code that changes a class of the set-up
    cannot be judged, but it may add methods and an order.

    Args:
        timeout: seconds of wall time for one completion, all its tests together.
        memory_mb: memory for the code, at least 128, which numpy needs; the tests have 1,024 MB. With ``same_process``
            both share it.
        partial_credit: True: the reward is the share of tests that pass; else it is 1 or 0. Asserts and loops at the
            top level count as tests, and so do test functions and ``check``.
        sandbox: ``bubblewrap``, or ``rlimits`` for code that you trust; see rocm_ext.sandbox.
        isolation: ``two_processes``; or ``same_process``, which runs the code and the tests in one interpreter, in the
            sandbox, and judges all of Python. The code can then forge its verdict: use it for benchmarks of code that
            you trust, not for training.
        unjudged: the verdict of an answer that the tests cannot judge across the two processes, such as an object where
            they expect data: ``wrong``, so that no answer escapes its verdict; or ``error``, to find rows that need
            ``same_process``.
        python: the interpreter; the code can import its installed packages.
        tolerance, checker: the rule for right output of ``cases``; see :class:`rocm_ext.verifiers.cases.OutputRule`.
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
        check_limits("PythonTests", timeout, memory_mb)
        require_known("isolation", isolation, ("two_processes", "same_process"))
        require_known("unjudged", unjudged, ("wrong", "error"))
        self.isolation = isolation
        self.unjudged = unjudged
        self.limits = Limits(seconds=timeout, memory_mb=memory_mb)
        self.partial_credit = partial_credit
        self.kind = sandbox
        self.python = python or sys.executable
        self.comparison = OutputRule(tolerance, checker, sandbox, self.python)
        self._judges = Judges(JUDGE_MB if isolation == "two_processes" else memory_mb)

    @cached_property
    def _sandbox(self) -> Sandbox:
        return Sandbox(self.kind, interpreter(self.python).folders)

    def check(self) -> None:
        self._sandbox.check()
        path = interpreter(self.python).path
        argv = [path, "-s", "-S", "-c", "print(6 * 7)"]
        outcome = self._sandbox.run(argv, limits=Limits(seconds=20))
        if outcome.stdout.strip() != b"42":
            said = short(outcome.stderr.decode("utf-8", "replace"), 200)
            raise UserError(f"{path} does not run in the sandbox: {said}")
        if self.isolation == "same_process":
            log.warning(
                "PythonTests with isolation: same_process: code can forge its verdict; use it for code you trust"
            )

    def check_row(self, row: Row) -> None:
        if row.get("cases") is not None:
            self.comparison.check_row(row)
            if calls_of(row) is None:
                cases_of(row)
                return
            if row.get("checker") is not None:
                raise ValueError(
                    "field 'checker' judges what a program prints; these cases are calls"
                )
        for name in ("entry_point", "test_setup", "code_prefix"):
            if row.get(name) is not None:
                field(row, name, str)
        entry = row.get("entry_point") or ""
        tests = "" if row.get("cases") is not None else tests_of(row)
        sources = {"tests": tests, "test_setup": row.get("test_setup") or "", "entry_point": entry}
        for name, source in sources.items():
            try:
                parse_python(source)
            except (SyntaxError, ValueError) as error:
                raise ValueError(f"field {name!r} is not Python: {error}") from error
        try:
            if tests:
                Tests(tests, trusted_of(row), entry, self.isolation == "two_processes")
        except (Broken, SyntaxError, RecursionError) as error:
            raise ValueError(f"field 'tests': {error}") from error

    def __call__(self, completion: str, row: Row) -> Result:
        prefix = row.get("code_prefix") or ""
        entry = row.get("entry_point") or ""
        tests = ""
        calls = None
        try:
            if row.get("cases") is None:
                tests = tests_of(row)
            else:
                calls = calls_of(row)
        except ValueError as problem:
            return error(problem)
        trusted = trusted_of(row)
        lead = [re.split(r"\W", entry)[0]]  # what the answer must define
        if calls is not None:
            lead.append("Solution")
        is_program = not tests and calls is None  # the cases are input and output

        def names() -> Set[str]:
            return tested(tests, tuple(trusted), entry) if tests else frozenset(lead)

        code = code_in(completion, None if is_program else names, bool(tests), prefix)
        if not code.strip():
            return unparsed("no Python code")
        if is_program:
            return self._output(code, row)
        definition = rf"^[ \t]*(async[ \t]+)?(def|class)[ \t]+{re.escape(entry)}\b"
        if prefix and entry and not re.search(definition, code, re.M):
            code = prefix + ("" if prefix.endswith("\n") else "\n") + code
        shared = []
        methods = []
        for kind in classes_of(trusted):
            shared.append(kind.name)
            methods += [part.name for part in kind.body if isinstance(part, ast.FunctionDef)]
        forget = f"[globals().pop(name, None) for name in {lead!r}]"  # a definition in the set-up is not the answer
        _, packages, path = interpreter(self.python)
        setup = "\n".join([*trusted, forget])
        program: ProgramTask = {"setup": setup, "code": code, "path": list(packages)}
        task: JudgeTask = {
            "trusted": trusted,
            "tests": tests,
            "entry_point": entry,
            "functions": [] if entry.isidentifier() else re.findall(r"\w+", entry),
            "shared": shared,
            "methods": methods,
            "cases": calls,
            "tolerance": self.comparison.within(row),
            "all": self.partial_credit,
            "cpu": self.limits.resources(False)["CPU"],
            "program": program if self.isolation == "same_process" else None,
        }
        try:
            with self._judges.one(self._sandbox, path, packages) as judge:
                return self._judged(judge, task, program)
        except JudgeEnded as problem:
            return error(problem)

    def _output(self, code: str, row: Row) -> Result:
        """Run the code as a program on the row's cases, and return the verdict."""
        _, packages, path = interpreter(self.python)
        boot = f"import builtins,runpy,sys;sys.path+={list(packages)!r};builtins.exit=builtins.quit=sys.exit;"
        boot += (
            f"sys.argv=['solution.py'];runpy.run_path({BOX + '/solution.py'!r},run_name='__main__')"
        )
        argv = [path, "-s", "-S", "-c", boot]
        files = {"solution.py": code}
        credit = self.partial_credit
        results = run_cases(self._sandbox, argv, files, row, self.limits, credit, self.comparison)
        if isinstance(results, Result):
            return results
        return results.result(results.right / results.total if credit else 0.0)

    def _judged(self, judge: WarmJudge, task: JudgeTask, program: ProgramTask) -> Result:
        """Run the code and the tests, and return the verdict."""
        began = time.monotonic()
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            asked, ask = os.pipe()
            heard, answer = os.pipe()
            reports, report = os.pipe()
            for fd in (heard, reports):
                ours.callback(os.close, fd)
            for fd in (asked, ask, answer, report):
                theirs.callback(os.close, fd)
            running = None
            if task["program"] is None:
                path = interpreter(self.python).path
                fds = (asked, answer)
                running = start("program", self._sandbox, path, program, self.limits, fds)
                ours.callback(running.close)
            judge.give(task, heard, ask, report)
            theirs.close()
            child = running.child if running else judge.child
            seconds = self.limits.seconds - (time.monotonic() - began)
            children = [child] if running else []
            in_time = supervise(children, seconds, judge.fileno(), [judge.child])
            if running:
                hung_up = select.poll()
                hung_up.register(heard, 0)
                if in_time and hung_up.poll(0):
                    # the code has ended by itself; wait for the sandbox to report how
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.process.wait(ENDS)
                running.close()
            status = judge.finish()
            os.set_blocking(reports, False)
            said = b""
            with contextlib.suppress(BlockingIOError):
                said = os.read(reports, REPORTS)
        if not in_time:
            return timeout(f"still running after {self.limits.seconds:g} s")
        if child.killed:
            return wrong(f"the code {child.killed}")
        stderr = bytes(child.stderr).decode("utf-8", "replace")
        result = self._verdict(said, judge.child.killed, status, stderr)
        ends = (128 + signal.SIGXCPU, -signal.SIGXCPU, signal.SIGXCPU)
        ended = child.returncode if running else status
        if ended in ends and result.verdict is Verdict.WRONG:
            return timeout("used up its CPU time")
        return result

    def _verdict(self, said: bytes, killed: str, status: int | None, stderr: str) -> Result:
        """The verdict in the judge's reports, which the program cannot write to: "started", then the result."""
        reports: list[Any] = []
        with contextlib.suppress(ValueError):  # in the same process, the code can write anything
            reports.extend(map(json.loads, said.split(b"\n")[:-1]))
        started = "started" in reports
        last = reports[-1] if reports and isinstance(reports[-1], dict) else None
        if last is None and status is None and not killed:
            return error("the tests' process died")
        if last is None and started:
            return wrong(f"the tests {killed or 'crashed'} on what the code returned")
        if last is None or (last["kind"] == "gone" and not started):
            return error(f"the sandbox or the tests did not start: {stderr or killed}")
        detail = short(last["detail"])
        if re.search("MemoryError|map segment|allocate memory", detail):
            of_tests = "MemoryError in the tests" in detail and self.isolation == "two_processes"
            if of_tests:
                detail += f" (they have {JUDGE_MB} MB)"
            else:
                detail += f" (memory_mb is {self.limits.memory_mb})"
        if last["kind"] == "unjudged":
            judged = wrong if self.unjudged == "wrong" else error
            return judged(f"cannot be judged: {detail}")
        if last["kind"] == "broken":
            return error(detail)
        if last["kind"] != "done":
            return wrong(detail)
        passed, total = last["passed"], last["total"]
        if not last["failed"]:
            return correct(f"passed {total} of {total}")
        if not self.partial_credit:
            return wrong(f"failed: {detail}")
        share = passed / total if total else 0.0
        return wrong(f"passed {passed} of {total}; failed: {detail}", share)


def tests_of(row: Row) -> str:
    """The source of a row's tests; raises ValueError if the row has none."""
    tests = field(row, "tests", (str, list, tuple))
    source = tests if isinstance(tests, str) else "\n".join(map(str, tests))
    if not source.strip():
        raise ValueError("field 'tests' is empty")
    return source.replace("\r\n", "\n")


@lru_cache(maxsize=16)  # the answers to a prompt come one after the other
def tested(tests: str, trusted: tuple[str, ...], entry: str) -> Set[str]:
    """The names that an answer must or may define for its tests."""
    try:
        names = Tests(tests, trusted, entry, False)
    except (Broken, SyntaxError, RecursionError):
        return frozenset()
    return names.required | names.own | names.live or names.wanted


def code_in(completion: str, names: Callable[[], Set[str]] | None, every: bool, prefix: str) -> str:
    """The code in a completion, or an empty text.

    Args:
        completion: the answer.
        names: finds the names that the tests use, which several blocks need. None if the code is a program that reads
            stdin.
        every: whether the tests use all the names, or one of them.
        prefix: the beginning of the code, which may lack the body of its function.
    """
    groups = fenced_code(completion, "python")[0]
    code = None
    if sum(map(len, groups)) < 2:
        code = extract_code(completion, "python")
    elif names is None:
        code = extract_code(completion, "python", READS.search)
    else:
        used = names()
        for blocks in groups:
            code = code or defining(blocks, used, every)
        code = code or extract_code(completion, "python", BODY.match if prefix else bool)
    if code is None and prefix and "```" not in completion:
        code = answer_text(completion)  # the body alone, without a fence
    return code or ""


def defining(blocks: Sequence[str], names: Set[str], every: bool) -> str | None:
    """The last block that defines a name for the tests, after earlier blocks that define other names or its needs.

    Other blocks, such as examples of use, are left out. The result is None if no block defines a name. The tests use
    ``every`` name, or one of them.
    """
    known = [(block, *names_in(block)) for block in blocks]
    defined = set()
    for _, defines, _, _ in known:
        defined |= defines
    picked: list[str] = []
    left = names
    for block, defines, imported, read in reversed(known):
        binds = defines | imported - defined  # `from solution import f` is an example of use
        if binds & left:
            picked.insert(0, block)
            satisfied = binds if every else binds | names
            left = read | (left - satisfied)
    return "\n".join(picked) or None


def classes_of(trusted: Sequence[str]) -> list[ast.ClassDef]:
    """The classes at the top of the trusted sources, without unittest's."""
    classes = []
    for source in trusted:
        for node in parse_python(source).body:
            if not isinstance(node, ast.ClassDef):
                continue
            if not any("TestCase" in ast.unparse(base) for base in node.bases):
                classes.append(node)
    return classes


def trusted_of(row: Row) -> list[str]:
    """The sources that run on both sides: the set-up, and the code's prefix if it parses by itself."""
    sources = []
    for source in (row.get("test_setup") or "", row.get("code_prefix") or ""):
        with contextlib.suppress(SyntaxError, ValueError):
            parse_python(source)
            sources.append(source)
    return sources
