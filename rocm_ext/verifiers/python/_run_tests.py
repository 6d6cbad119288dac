"""Runs the tests in their process and counts passes: statements and plain functions directly, the rest by pytest."""

import __future__

import ast
import builtins
import contextlib
import importlib
import inspect
import math
import os
import sys
import types
from functools import partial

import _vacuous
from _judge import CodeEnded, Judge, Unjudged
from _messages import Closed, Malformed, judge_channel
from _rewrite import NAMES, Checks, Full
from _source import Broken, Tests, is_test

MAIN = "__main__"  # unittest, dataclasses and pickle look for the tests' classes there
# Plugins of pytest, which are slow
PLUGINS = ("cacheprovider", "terminal", "faulthandler", "warnings", "doctest", "junitxml")
FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


class TestCounts:
    """Counts of passed and failed tests. ``with counts:`` watches an assert of the tests, and counts it.

    Attributes:
        go_on: whether to go on after a failure.
        passed, total, failures: numbers of units.
        detail: the first failure.
        ran: number of checks that ran.
        failed: the unit's last AssertionError in an assert, even if something caught it.
    """

    def __init__(self, judge, source, go_on):
        self.judge = judge
        self.lines = source.split("\n")
        self.go_on = go_on
        self.passed = self.total = self.failures = self.ran = 0
        self.detail = ""
        self.failed = None

    def __enter__(self):
        self.ran += 1

    def __exit__(self, kind, error, trace):
        if isinstance(error, Exception):
            error.__in_assert__ = True
        if isinstance(error, AssertionError) and not of_code(error):
            self.failed = error

    def count(self, value=None):
        """Count a check whose value is given, and return the value."""
        self.ran += 1
        return value

    @property
    def stopped(self):
        """Whether the rest need not run."""
        failed = self.failures and not self.go_on
        return bool(failed or self.judge.gone or self.judge.unjudged)

    @contextlib.contextmanager
    def must_check(self, holds_checks):
        """Raise AssertionError if what holds checks runs to its end, and none of them runs."""
        before = self.ran
        yield
        if holds_checks and self.ran == before:
            raise AssertionError("none of its checks ran")

    def unit(self, run, text, holds_checks=False):
        """Run a unit, which raises if it fails."""
        self.total += 1
        if self.stopped:
            return
        failures = self.failures
        self.failed = None
        try:
            with self.must_check(holds_checks):
                run()
            if self.failed is not None:
                raise self.failed
        except BaseException as error:
            # this name goes at the end: its traceback would keep the unit's objects
            self.note(error, text)
        if self.judge.gone and self.failures == failures:
            self.note(None, text)
        self.passed += self.failures == failures

    def note(self, error, text):
        """Record a failure; raises Broken if the tests cannot import a module."""
        if isinstance(error, ImportError) and not of_code(error) and error.name != "solution":
            raise Broken(f"{type(error).__name__}: {error}")
        self.failures += 1
        if self.detail:
            return
        line = ""
        trace = getattr(error, "__traceback__", None)
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "tests":
                lines = self.lines[trace.tb_lineno - 1 : trace.tb_lineno]
                line = "".join(lines).strip()[:150]
            trace = trace.tb_next
        parts = [text]
        if line not in text:
            parts.append(line)
        if error is not None and (said(error) or not isinstance(error, AssertionError)):
            in_tests = isinstance(error, MemoryError) and not of_code(error)
            where = " in the tests" if in_tests else ""
            parts.append(f"{type(error).__name__}{where}: {said(error)}")
        if self.judge.gone and self.judge.gone not in parts[-1]:
            parts.append(self.judge.gone)
        self.detail = ": ".join(filter(None, parts))


def of_code(error):
    """Whether an exception comes from the code's process."""
    return hasattr(error, "__number__")


def failure(error):
    """Mark an exception, or a class of it, that a check of the tests raises."""
    if isinstance(error, type):
        error = error()
    error.__in_assert__ = True
    return error


def described(error):
    """The class and the text of an exception."""
    return f"{type(error).__name__}: {said(error)}"


def said(error):
    """The text of an exception; empty if its class fails to give one."""
    try:
        return str(error)[:300]
    except BaseException:
        return ""


def run(task, judge, namespace, report):
    """Run the tests in their namespace; the report for the verifier. Raises Broken if the tests do not work."""
    builtins.exit = builtins.quit = sys.exit  # `site` does this
    calls = task["cases"] is not None
    if calls:
        tests = Calls(task)
    else:
        tests = Tests(task["tests"], task["trusted"], task["entry_point"], False)
    judge.greeted()
    report("started")
    error = judge.loaded()
    if error:
        return {"kind": "failed", "detail": described(error)}
    defined = judge.names(sorted({*tests.wanted, *task["shared"]}))
    missing = tests.required - set(defined)
    if not missing and tests.own.isdisjoint(defined):
        missing = tests.own
    if missing:
        return {"kind": "failed", "detail": f"the code defines no {' or '.join(sorted(missing))}"}
    judge.live = tests.live
    score = TestCounts(judge, task["tests"], task["all"])
    prepare("\n".join([task["tests"], *task["trusted"]]), score)
    shared = set(task["shared"])  # these classes live with the code
    for name, value in defined.items():
        if name in shared:
            namespace[name] = value
    replacements = (score, score.count, failure, _vacuous.zipped, _vacuous.full)
    namespace.update(zip(NAMES, replacements, strict=True))
    checks = None if calls else Checks(tests)
    try:
        run_setup(task, tests, checks, namespace)
    except Exception as error:
        if not shared:
            raise
        problem = f"the set-up, with the code's objects: {described(error)}"
        return {"kind": "failed", "detail": problem}
    # the set-up may define the answer's name, such as a bare signature or what it imports
    answers = tests.required | tests.own if calls else tests.required
    for name in answers:
        namespace.pop(name, None)
    add_names(tests, defined, shared, namespace)
    if type(judge) is Judge:
        solution = sys.modules["solution"] = types.ModuleType("solution")
        solution.__dict__.update(defined)
    if calls:
        tests.take(namespace, score)
    else:
        take(tests, checks, namespace, score)
    if not score.total and not score.failures and not judge.unjudged:
        raise Broken("all of them are skipped")
    outcome = {"passed": score.passed, "total": score.total, "detail": score.detail}
    return {"kind": "done", **outcome, "failed": bool(score.failures or judge.gone)}


def run_setup(task, tests, checks, namespace):
    """Run the trusted sources, without the classes that live with the code."""
    shared = task["shared"]
    for source in task["trusted"]:
        tree = ast.parse(source)
        tree.body = [part for part in tree.body if getattr(part, "name", "") not in shared]
        if checks:
            checks.visit(tree)
            guard_numpy(tests, tree)
        exec(compile(tree, "setup", "exec", dont_inherit=True), namespace)


def add_names(tests, defined, shared, namespace):
    """Add the library's and the answer's names that the tests use, unless the set-up defines them."""
    given = set(namespace) - shared
    for name, (module, attribute) in tests.library.items():
        if name not in given:
            library = importlib.import_module(module)
            namespace[name] = getattr(library, attribute, library) if attribute else library
    for name, value in defined.items():
        if name in tests.wanted and name not in given:
            namespace[name] = value


def prepare(source, score):
    """Set the libraries up: ``pytest.main()`` does nothing, and comparisons with empty arrays fail."""
    for name in ("numpy", "pytest", "unittest", "random", "threading"):
        if name in source:
            importlib.import_module(name)
    if "random" in source:
        sys.modules["random"].seed(0)
    if "threading" in source:
        sys.modules["threading"].excepthook = lambda args: score.note(args.exc_value, "a thread")
    for name in {"pytest", "unittest"} & sys.modules.keys():  # the tests run anyway
        sys.modules[name].main = lambda *args, **keywords: 0
    _vacuous.guard()


def take(tests, checks, namespace, score):
    """Run the tests: the top level's statements in order, then the functions, then pytest."""
    called = set()  # what the top level calls by itself
    for statement in tests.body:
        match statement:
            case ast.stmt(value=ast.Call(func=ast.Name(id=name))):
                called.add(name)
    body, units = rewritten(tests, checks)
    counted = set(checks.counted(body))
    lines = {first_line(function) for function in checks.counted(checks.functions)}
    for statement in body:
        guard_numpy(tests, statement)
    code = compile("\n".join(tests.lines), "tests", "exec", dont_inherit=True)
    flags = code.co_flags & FUTURE
    for statement in body:
        if isinstance(statement, ast.ImportFrom) and statement.module != "solution":
            # the entry point stays the answer's
            kept = []
            for alias in statement.names:
                if (alias.asname or alias.name) not in tests.required:
                    kept.append(alias)
            if not kept:
                continue
            statement.names = kept
        work = partial(execute, statement, flags, namespace)
        text = tests.text(statement)
        if statement in units:
            score.unit(work, text, statement in counted)
        elif score.stopped:
            # what was not reached earns nothing
            score.total += getattr(statement, "name", "") in tests.simple
        else:
            try:
                work()
            except BaseException as error:
                score.note(error, text)
                for node in ast.walk(statement):  # later units may not use an older value
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                        namespace.pop(node.id, None)
    for name, value in list(namespace.items()):
        by_runner = tests.runner and name != "check"
        if by_runner or name in called or not inspect.isfunction(value):
            continue
        needs = inspect.signature(value).parameters
        # such as `test_a = make(1)`
        made = value.__globals__ is namespace and value.__name__ != "<lambda>" and not needs
        if name in tests.simple or (made and is_test(name) and name not in tests.defined):
            args = [tests.entry] if name == "check" and needs else []

            def work(value=value, args=args):
                finish(value(*(eval(arg, namespace) for arg in args)))

            score.unit(work, name, value.__code__.co_firstlineno in lines)
    if tests.runner and not score.stopped:
        by_pytest(tests, score, lines)


def rewritten(tests, checks):
    """The top level's statements, rewritten, and those of them that pass or fail."""
    body = []
    units = set()
    for statement in tests.body:
        now = checks.visit(statement)
        parts = now if isinstance(now, list) else [now]
        body += parts
        if statement in tests.units:
            units.update(parts)
    return body, units


def guard_numpy(tests, tree):
    """Have comparisons in a tree fail that hold for empty arrays, if the tests use numpy."""
    if tests.uses_numpy():
        Full(tests.name).visit(tree)


def first_line(function):
    """The line where Python says that a function begins, which is its first decorator's."""
    return min(node.lineno for node in (function, *function.decorator_list))


def execute(statement, flags, namespace):
    """Run a statement of the tests, which may call ``sys.exit(0)``."""
    try:
        tree = ast.Module([statement], [])
        exec(compile(tree, "tests", "exec", flags, dont_inherit=True), namespace)
    except SystemExit as error:
        trace = error.__traceback__
        while trace.tb_next is not None:
            trace = trace.tb_next
        if error.code or trace.tb_frame.f_code.co_filename != "tests":
            raise


def finish(result):
    """Await an async test's coroutine; fail a test that returns False."""
    if inspect.iscoroutine(result):
        import asyncio

        result = asyncio.run(result)
    if result is False:
        raise AssertionError("returned False")


def by_pytest(tests, score, lines):
    """Have pytest run the test functions and classes of ``__main__``, also unittest's."""
    import pytest
    from _pytest.config import main

    broken = []
    outcomes = {}  # test -> whether it passed

    class Module(pytest.Module):
        def _getobj(self):
            return sys.modules[MAIN]

    class Plugin:
        def pytest_collect_file(self, file_path, parent):
            return Module.from_parent(parent, path=file_path)

        def pytest_pycollect_makeitem(self, name, obj):
            return [] if name in tests.helpers or name in tests.wanted else None

        def pytest_pyfunc_call(self, pyfuncitem):
            names = pyfuncitem._fixtureinfo.argnames
            arguments = {name: pyfuncitem.funcargs[name] for name in names}
            finish(pyfuncitem.obj(**arguments))
            return True

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_call(self, item):
            code = getattr(inspect.unwrap(item.obj), "__code__", None)
            with score.must_check(getattr(code, "co_firstlineno", 0) in lines):
                return (yield)

        def pytest_runtest_setup(self, item):
            score.failed = None

        def pytest_exception_interact(self, node, call, report):
            error = call.excinfo.value
            if isinstance(error, Unjudged):
                return
            by_tests = not (isinstance(error, CodeEnded) or of_code(error))
            lookup = type(error).__name__ == "FixtureLookupError"
            if by_tests and (report.when == "collect" or lookup):
                broken.append(" ".join(said(error).split()) or type(error).__name__)
            elif by_tests and isinstance(error, ImportError):
                broken.append(described(error))
            else:
                score.note(error, node.name)

        def pytest_runtest_logreport(self, report):
            if report.failed:
                outcomes[report.nodeid] = False
            elif report.passed and report.when == "call" and not hasattr(report, "wasxfail"):
                outcomes.setdefault(report.nodeid, not (score.judge.gone or score.failed))
                if score.failed:
                    score.note(score.failed, report.nodeid.split("::")[-1])

    failures = score.failures
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-c", os.devnull, "--rootdir", os.getcwd(), "--noconftest", "--assert=plain", "-s"]
    options += ["test_row.py", *(f"-pno:{name}" for name in PLUGINS)]
    if not score.go_on:
        options.append("-x")
    with open("test_row.py", "w") as file:  # pytest collects a file; the plugin gives its content
        path = os.path.abspath(file.name)
        status = main(options, [Plugin()])
    os.unlink(path)
    if broken:
        raise Broken(broken[0])
    score.total += len(outcomes)
    score.passed += sum(outcomes.values())
    failed = status not in (0, 5) or not all(outcomes.values())
    if failed and score.failures == failures:
        score.note(None, f"pytest ended with status {int(status)}")


class Calls:
    """Cases that are calls of the answer, with the values that it must return; names as in :class:`_source.Tests`."""

    def __init__(self, task):
        self.cases = task["cases"]
        self.entry = task["entry_point"]
        self.tolerance = task["tolerance"]
        self.lead = self.entry.split(".")[0].split("(")[0]
        self.required = self.live = frozenset()
        self.library = {}
        self.own = self.wanted = {self.lead, "Solution"}

    def take(self, namespace, score):
        if self.lead == self.entry and self.entry not in namespace and "Solution" in namespace:
            self.entry = f"Solution().{self.entry}"  # LeetCode's form
        for args, expected, unwrap in self.cases:
            text = f"{self.entry}({', '.join(map(repr, args))[:150]})"
            score.unit(partial(self._call, namespace, args, expected, unwrap), text)

    def _call(self, namespace, args, expected, unwrap):
        result = eval(self.entry, namespace)(*args)
        accepted = [expected]
        if unwrap and isinstance(expected, list) and len(expected) == 1:
            accepted += expected
        if not any(self.equal(result, value) for value in accepted):
            raise AssertionError(f"returned {result!r:.150}")

    def equal(self, result, expected):
        """Whether a value is the expected one; tuples count as lists, and the keys of JSON's dicts are text."""
        if isinstance(expected, (list, tuple)):
            same_length = isinstance(result, (list, tuple)) and len(result) == len(expected)
            return same_length and all(map(self.equal, result, expected))
        if isinstance(expected, dict):
            if not isinstance(result, dict):
                return False
            by_text = {str(key): value for key, value in result.items()}
            if by_text.keys() != expected.keys():
                return False
            return all(self.equal(by_text[key], value) for key, value in expected.items())
        if result == expected:
            return True
        numbers = type(result) is float and type(expected) in (int, float)
        if numbers and self.tolerance is not None:
            near = abs(result - expected) <= self.tolerance * max(1.0, abs(expected))
            return math.isfinite(result) and near
        return False


class Local:
    """Replaces the connection to the program if the code runs in this process."""

    gone = unjudged = ""

    def __init__(self, program):
        self.program = program
        self.module = types.ModuleType("solution")

    def greeted(self):
        """Nothing: this process has started."""

    def loaded(self):
        """Run the set-up and the code; the error that ended them, or None."""
        sys.modules["solution"] = self.module
        try:
            for source in ("setup", "code"):
                code = compile(self.program[source], "solution", "exec", dont_inherit=True)
                exec(code, vars(self.module))
        except BaseException as error:
            return error

    def names(self, names):
        """name -> value, for the names that the code defines."""
        defined = vars(self.module)
        return {name: defined[name] for name in names if name in defined}


def judge(task, hears, asks, report):
    """Judge the verifier's task; if it has a ``program``, the code runs in this process, too.

    ``hears`` and ``asks`` are the ends of the pipes from and to the program; ``report`` writes a line for the verifier.
    """
    module = sys.modules[MAIN] = types.ModuleType(MAIN)
    module.__dict__.update({"__builtins__": builtins, "__file__": "tests.py"})
    if task["program"]:
        program = Local(task["program"])
    else:
        program = Judge(judge_channel(hears, asks), task, vars(module))
    try:
        outcome = run(task, program, vars(module), report)
    except Unjudged:
        outcome = {}
    except (Closed, Malformed, CodeEnded) as error:
        ended = f"the program ended while it was loaded {said(error)}"
        outcome = {"kind": "gone", "detail": program.gone or ended}
    except Broken as error:
        outcome = {"kind": "broken", "detail": f"the tests do not work: {said(error)}"}
    except Exception as error:  # the tests or the set-up failed, or code that the set-up uses
        says = f"{type(error).__name__[:100]}: {said(error)}"
        if of_code(error):
            return report({"kind": "failed", "detail": says})
        outcome = {"kind": "broken", "detail": f"the tests do not work: {says}"}
    outcome["detail"] = str(outcome.get("detail", ""))[:1000]  # a report fits into its pipe
    if program.unjudged and not program.gone and outcome.get("kind") != "broken":
        outcome = {"kind": "unjudged", "detail": program.unjudged[:1000]}
    report(outcome)
