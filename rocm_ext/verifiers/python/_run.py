"""Runs the tests in their process and counts what passes: statements and plain functions here, the rest by pytest."""

import __future__

import ast
import builtins
import importlib
import inspect
import json
import math
import os
import sys
import types
from functools import partial

import _tables
from _judge import Gone, Judge, Unjudged
from _source import RAN, SITE, Broken, Tests, is_test
from _wire import Closed, Malformed, judge_channel

MAIN = "__main__"  # where unittest, dataclasses and pickle look for the tests' classes


class Score:
    """What passed so far.

    Args:
        judge: the connection to the program.
        source: of the tests, for the details of failures.
        go_on: after a unit that fails, too.

    Attributes:
        passed, total: how many units passed, and ran; a unit that holds several checks counts as many.
        failures: how many failed.
        detail: the first failure.
        ran: how many asserts ran.
    """

    def __init__(self, judge, source, go_on):
        self.judge, self.lines, self.go_on = judge, source.split("\n"), go_on
        self.passed = self.total = self.failures = self.ran = self.right = 0
        self.detail = self.text = ""

    @property
    def stopped(self):
        """Whether the rest need not run."""
        return bool(self.judge.gone or self.judge.unjudged or (self.failures and not self.go_on))

    def unit(self, run, text, checks=1, asserts=False):
        """Run a unit.

        Args:
            run: a function without arguments that raises if the unit fails.
            text: what the detail of a failure calls it.
            checks: how many it counts for.
            asserts: it fails if none of its asserts runs.
        """
        if self.stopped:
            self.total += checks if self.go_on else 0
            return
        before, ran, self.right, self.text = self.failures, self.ran, 0, text
        try:
            run()
            if asserts and self.ran == ran:
                raise AssertionError("none of its asserts ran")
        except BaseException as error:
            self.note(error, text)
        if self.judge.gone and self.failures == before:
            self.note(None, text)
        self.total += checks
        self.passed += checks if self.failures == before else min(self.right, checks - 1)

    def note(self, error, text):
        """Record a failure; raises Broken if it is the tests' own."""
        if isinstance(error, Broken):
            raise error
        if isinstance(error, ImportError) and not hasattr(error, "__number__") and getattr(error, "name", "") != "solution":
            raise Broken(f"{type(error).__name__}: {error}")
        self.failures += 1
        if self.detail:
            return
        self.detail = text
        if error is not None:
            line, says = self._line(error.__traceback__), said(error)
            self.detail += f": {line}" if line and _squeezed(line) not in _squeezed(text) else ""
            if says or not isinstance(error, AssertionError):
                self.detail += f": {type(error).__name__}: {says}"
        if self.judge.gone and self.judge.gone not in self.detail:
            self.detail += f": {self.judge.gone}"

    def _line(self, trace):
        """The line of the tests that raised."""
        found = ""
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "tests" and 0 < trace.tb_lineno <= len(self.lines):
                found = self.lines[trace.tb_lineno - 1].strip()[:150]
            trace = trace.tb_next
        return found


class Site:
    """A check of a unit: the unit goes on if it fails."""

    def __init__(self, score):
        self.score = score

    def __enter__(self):
        self.before = self.score.failures

    def __exit__(self, kind, error, trace):
        score = self.score
        if error is None:
            score.right += not score.judge.gone and score.failures == self.before
            return False
        if isinstance(error, Exception):
            score.note(error, score.text)
        return isinstance(error, Exception)


def _squeezed(text):
    return "".join(text.split()).replace('"', "'")


def said(error):
    """The text of an exception, whatever its class does."""
    try:
        return str(error)[:300]
    except BaseException:
        return ""


def run(task, judge, namespace, report):
    """Run the tests; the report for the verifier.

    Args:
        task: what the verifier sent.
        judge: the connection to the program.
        namespace: of the tests.
        report: writes a line for the verifier.
    """
    builtins.exit = builtins.quit = sys.exit  # as `site` does
    try:
        tests = Calls(task) if task["cases"] is not None else Tests(task["tests"], task["trusted"], task["entry_point"], False)
        trusted = [_without(source, task["shared"]) for source in task["trusted"]]
        if "hello" not in judge.channel.receive():
            raise Malformed("no greeting")
        report("started")
        loaded = judge.channel.receive()
        if loaded.get("ready") is not True:
            error = judge.decode(loaded["x"])
            return {"kind": "failed", "detail": f"{type(error).__name__}: {said(error)}"}
        found = judge.names(sorted({*tests.wanted, *task["shared"]} - set(namespace)))
        namespace.update((name, value) for name, value in found.items() if name in task["shared"])
        for tree in trusted:
            exec(compile(tree, "setup", "exec", dont_inherit=True), namespace)
        library = {n: _library(*where) for n, where in tests.library.items() if n not in namespace}
        if "random" in task["tests"]:
            importlib.import_module("random").seed(0)
        if type(judge) is Judge:
            sys.modules["solution"] = Solution(judge)
    except (Closed, Malformed, Gone, Unjudged):
        raise
    except Exception as error:
        return _broken(error)
    missing = tests.required - set(found) or (tests.own if tests.own.isdisjoint(found) else ())
    if missing:
        return {"kind": "failed", "detail": f"the code defines no {' or '.join(sorted(missing))}"}
    for name in tests.required | (tests.own if task["cases"] is not None else set()):
        namespace.pop(name, None)  # the set-up may define it, such as a bare signature or what it imports
    namespace.update(library)
    namespace.update({name: value for name, value in found.items() if name in tests.wanted})
    score = Score(judge, task["tests"], task["all"])
    _quiet("\n".join([task["tests"], *task["trusted"]]), score)
    if "threading" in task["tests"]:
        importlib.import_module("threading").excepthook = lambda args: score.note(args.exc_value, "a thread")
    try:
        tests.take(namespace, score) if task["cases"] is not None else take(tests, namespace, score)
    except Broken as error:
        return _broken(error)
    if not score.total and not score.failures and not judge.unjudged:
        return _broken(Broken("all of them are skipped"))
    return {"kind": "done", "passed": score.passed, "total": score.total, "detail": score.detail,
            "failed": bool(score.failures or judge.gone)}  # fmt: skip


def _quiet(source, score):
    """Have the ends of test files, such as ``unittest.main()``, do nothing: the tests run anyway."""
    for name in ("pytest", "unittest"):
        if name in source:
            module = importlib.import_module(name)
            module.main = lambda *args, **keywords: 0
    if "TextTestRunner" in source:
        runs = module.TextTestRunner.run

        def run_suite(runner, suite):
            result = runs(runner, suite)
            if not result.wasSuccessful():
                score.note(None, f"{len(result.failures + result.errors)} of {result.testsRun} tests of a suite")
            return result

        module.TextTestRunner.run = run_suite
    if any(name in source for name in ("numpy", "pandas", "pytest")):
        for name in ("numpy", "pandas"):
            if name in source:
                importlib.import_module(name)
        _tables.guard()


def _broken(error):
    name = "" if type(error) is Broken else f"{type(error).__name__}: "
    return {"kind": "broken", "detail": f"the tests do not work: {name}{said(error)}"}


def _without(source, classes):
    """A trusted source without those classes, whose objects live with the code."""
    tree = ast.parse(source)
    tree.body = [s for s in tree.body if not (isinstance(s, ast.ClassDef) and s.name in classes)]
    return tree


def _library(module, name):
    """A module of the library, or what it holds of that name."""
    found = importlib.import_module(module)
    return getattr(found, name, found) if name else found


class Solution(types.ModuleType):
    """The module ``solution``: the answer's names."""

    def __init__(self, judge):
        super().__init__("solution")
        self.__dict__["_judge"] = judge

    def __getattr__(self, name):
        found = {} if name.startswith("__") else self._judge.names([name])
        if name not in found:
            raise AttributeError(f"the code defines no {name}")
        return found[name]

    def __setattr__(self, name, value):
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            self._judge.request("define", name, value)

    def __delattr__(self, name):
        self._judge.request("define", name)


def take(tests, namespace, score):
    """Run the tests.

    Args:
        tests: the tests.
        namespace: of the tests, with the answer's names.
        score: counts them.
    """
    lines = tests.watched()
    score.judge.asserts = tests.asserts
    sites = tests.counted() if score.go_on and not tests.runner else {}

    def ran():
        score.ran += 1

    namespace[SITE], namespace[RAN] = lambda index: Site(score), ran
    flags = 0
    for statement, text in tests.steps:
        imported = isinstance(statement, ast.ImportFrom)
        if imported and statement.module == "__future__":
            flags |= sum(getattr(__future__, alias.name).compiler_flag for alias in statement.names)
        if imported and statement.module != "solution":  # the entry point stays the answer's
            statement.names = [a for a in statement.names if (a.asname or a.name) not in tests.required]
            if not statement.names:
                continue
        held = [_ran_first(statement), statement] if isinstance(statement, ast.Assert) else [statement]
        work = partial(_execute, ast.Module(held, []), flags, namespace)
        if text is not None:
            loops = isinstance(statement, (ast.For, ast.While)) and any(isinstance(n, ast.Assert) for n in ast.walk(statement))
            call = getattr(getattr(getattr(statement, "value", None), "func", None), "id", "")
            score.unit(partial(_until_exit, work), text, max(1, sites.get(call, 0)), loops)
            continue
        try:
            work()
        except BaseException as error:
            score.note(error, tests.text(statement))
            for node in ast.walk(statement):  # later units may not use an older value
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    namespace.pop(node.id, None)
            score.total += isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if score.stopped:
            return
    _functions(tests, namespace, score, sites, lines)
    if tests.runner and not score.stopped:
        by_pytest(tests, namespace, score, lines)


def _ran_first(statement):
    return ast.copy_location(ast.Expr(ast.Call(ast.Name(RAN, ast.Load()), [], [])), statement)


def _functions(tests, namespace, score, sites, lines):
    """Run the plain test functions, also those that code of the tests made, as in ``test_a = make(1)``."""
    called = {s.value.func.id for s, _ in tests.steps if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)
              and isinstance(s.value.func, ast.Name)}  # fmt: skip
    for name, value in list(namespace.items()):
        made = name not in tests.defined and is_test(name) and inspect.isfunction(value) and value.__globals__ is namespace
        runs = name in tests.simple or (made and value.__name__ != "<lambda>" and not inspect.signature(value).parameters)
        if not runs or name in called or (tests.runner and name != "check") or not inspect.isfunction(value):
            continue
        args = [tests.entry] if name == "check" and inspect.signature(value).parameters else []
        work = lambda value=value, args=args: finish(value(*(eval(arg, namespace) for arg in args)))  # noqa: E731
        score.unit(work, name, max(1, sites.get(name, 0)), value.__code__.co_firstlineno in lines)


def _until_exit(work):
    """Run a statement of the tests, which may end in ``sys.exit(0)``."""
    try:
        work()
    except SystemExit as error:
        if error.code or hasattr(error, "__number__"):
            raise


def _execute(module, flags, namespace):
    exec(compile(ast.fix_missing_locations(module), "tests", "exec", flags, dont_inherit=True), namespace)


def finish(found):
    """Await what an async test returned; a test fails that returns False."""
    if inspect.iscoroutine(found):
        import asyncio

        found = asyncio.run(found)
    if found is False:
        raise AssertionError("returned False")


def by_pytest(tests, namespace, score, lines):
    """Have pytest run the test functions and classes of the namespace, also unittest's."""
    import pytest
    from _pytest.config import main as run_pytest

    module = sys.modules[MAIN]

    class Module(pytest.Module):
        def _getobj(self):
            return module

    class Plugin:
        outcomes: dict = {}

        def pytest_collect_file(self, file_path, parent):
            return Module.from_parent(parent, path=file_path)

        def pytest_pycollect_makeitem(self, name, obj):
            return [] if name in tests.helpers or name in tests.wanted else None

        def pytest_pyfunc_call(self, pyfuncitem):
            ran, function = score.ran, pyfuncitem.obj
            finish(function(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
            line = getattr(getattr(function, "__code__", None), "co_firstlineno", 0)
            if line in lines and score.ran == ran:
                raise AssertionError("none of its asserts ran")
            return True

        def pytest_exception_interact(self, node, call, report):
            error = call.excinfo.value
            ours = isinstance(error, (Gone, Unjudged)) or hasattr(error, "__number__")
            if not ours and (report.when == "collect" or type(error).__name__ == "FixtureLookupError"):
                self.broken = Broken(" ".join(said(error).split()) or type(error).__name__)
            elif not ours and isinstance(error, ImportError):
                self.broken = Broken(f"{type(error).__name__}: {said(error)}")
            elif not isinstance(error, Unjudged):
                score.note(error, node.name)

        def pytest_runtest_logreport(self, report):
            if report.failed:
                self.outcomes[report.nodeid] = False
            elif report.passed and report.when == "call" and not hasattr(report, "wasxfail"):
                self.outcomes.setdefault(report.nodeid, not score.judge.gone)

        broken = None

    plugin, failures = Plugin(), score.failures
    with open("test_row.py", "w"):
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    off = [part for name in ("cacheprovider", "terminal", "faulthandler", "warnings", "doctest", "junitxml") for part in ("-p", f"no:{name}")]
    status = run_pytest([*off, "-c", os.devnull, "--rootdir", os.getcwd(), "--noconftest", "--assert=plain", "-s",
                          *([] if score.go_on else ["-x"]), "test_row.py"], [plugin])  # fmt: skip
    if plugin.broken is not None:
        raise plugin.broken
    score.total += len(plugin.outcomes)
    score.passed += sum(plugin.outcomes.values())
    if (status not in (0, 5) or not all(plugin.outcomes.values())) and score.failures == failures:
        score.note(None, f"pytest ended with status {int(status)}")


class Calls:
    """Cases that are calls: arguments, and the value that the answer must return. They run no code of tests.

    Attributes:
        required, own, wanted, library: the names that calling needs, as of :class:`_source.Tests`.
    """

    def __init__(self, task):
        self.cases, self.entry, self.tolerance = task["cases"], task["entry_point"], task["tolerance"]
        self.lead = self.entry.split(".")[0].split("(")[0]
        self.required, self.library = set(), {}
        self.own = self.wanted = {self.lead, "Solution"}

    def take(self, namespace, score):
        """Make the calls; each is a unit."""
        for args, expected, unwrap in self.cases:
            text = f"{self.entry}({', '.join(map(repr, args))[:150]})"
            score.unit(partial(self._call, namespace, args, expected, unwrap), text)

    def _call(self, namespace, args, expected, unwrap):
        entry = self.entry
        if self.lead == entry and entry not in namespace and "Solution" in namespace:
            entry = f"Solution().{entry}"  # as LeetCode has it
        if self.lead not in namespace and entry == self.entry:
            raise NameError(f"the code defines no {self.lead}")
        found = eval(entry, namespace)(*args)
        alone = unwrap and isinstance(expected, list) and len(expected) == 1
        if not (self.equal(found, expected) or (alone and self.equal(found, expected[0]))):
            raise AssertionError(f"returned {found!r:.150}")

    def equal(self, found, expected):
        """Whether a value is the expected one; tuples count as lists, and the keys of JSON's dicts are text."""
        if isinstance(expected, (list, tuple)):
            return (isinstance(found, (list, tuple)) and len(found) == len(expected)
                    and all(map(self.equal, found, expected)))  # fmt: skip
        if isinstance(expected, dict):
            if not isinstance(found, dict):
                return False
            found = {str(key): value for key, value in found.items()}
            return found.keys() == expected.keys() and all(self.equal(found[k], expected[k]) for k in expected)
        if type(found) is float and type(expected) in (int, float) and self.tolerance is not None:
            near = abs(found - expected) <= self.tolerance * max(1.0, abs(expected))
            return found == expected or (math.isfinite(found) and near)
        return bool(found == expected)


def main_module():
    """A new ``__main__`` for the tests; its namespace."""
    module = sys.modules[MAIN] = types.ModuleType(MAIN)
    module.__dict__.update({"__builtins__": builtins, "__file__": "tests.py"})
    return module.__dict__


def judge(task, hears, asks, report):
    """Judge one task.

    Args:
        task: what the verifier sent.
        hears, asks: the ends of the pipes from and to the program.
        report: writes a line for the verifier.
    """
    namespace = main_module()
    connection = Judge(judge_channel(hears, asks), "\n".join([task["tests"], *task["trusted"]]), namespace)
    connection.of_setup = task["methods"]
    connection.bare |= {node.id for node in ast.walk(ast.parse(task["entry_point"] or "0")) if isinstance(node, ast.Name)}
    try:
        found = run(task, connection, namespace, report)
    except Unjudged:
        found = {}
    except (Closed, Malformed, Gone) as error:
        found = {"kind": "gone", "detail": connection.gone or f"the program ended while it was loaded {said(error)}"}
    if connection.unjudged and not connection.gone and found.get("kind") != "broken":
        found = {"kind": "unjudged", "detail": connection.unjudged}
    report(found)


class Local:
    """What the connection to the program is where the code runs with its tests: the names are the code's own."""

    gone = unjudged = ""

    def __init__(self, program, namespace):
        self.program, self.namespace, self.channel = program, namespace, self
        self.messages = iter((lambda: {"hello": True}, self.load))
        self.module = sys.modules["solution"] = types.ModuleType("solution")

    def receive(self):
        """The next of the program's first two messages."""
        return next(self.messages)()

    def load(self):
        """Run the set-up and the code."""
        names = vars(self.module)
        names["__builtins__"] = builtins
        try:
            for source in ("setup", "code"):
                exec(compile(self.program[source], "solution", "exec", dont_inherit=True), names)
        except BaseException as error:
            return {"x": error}
        return {"ready": True}

    def decode(self, error):
        """The error."""
        return error

    def names(self, names):
        """The values of those names that the code defines."""
        return {name: vars(self.module)[name] for name in names if name in vars(self.module)}


def main(task):
    """Judge a task whose code runs in this process, too, and report to the descriptor argv[1]."""
    tells = int(sys.argv[1])

    def report(what):
        os.write(tells, json.dumps(what).encode() + b"\n")

    sys.path += task["path"]
    silence = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(silence, fd)
    namespace = main_module()
    report(run(task, Local(task["program"], namespace), namespace, report))
