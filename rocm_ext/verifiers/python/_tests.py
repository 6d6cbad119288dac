"""Runs the user's tests in the judge's process and counts what passes."""

import __future__

import ast
import builtins
import importlib
import inspect
import sys
import types
from functools import partial

import _standin
from _calls import Calls
from _channel import Malformed, TooMuch, Unsendable
from _runner import Runner, awaited
from _units import ITERATION, SITE, Broken, Tests, is_test, is_test_class
from _wire import plain_classes


class Score:
    """What passed so far.

    Args:
        judge: the connection to the program.
        source: of the tests, for the details of failures.
        go_on: after a unit that fails, too.

    Attributes:
        passed, total: how many units passed, and ran; a unit that holds several checks counts as many.
        detail: the first failure.
        stopped: it failed, and the rest need not run.
    """

    def __init__(self, judge, source, go_on):
        self.judge, self.lines, self.go_on = judge, source.split("\n"), go_on
        self.passed, self.total, self.detail = 0, 0, ""
        self.failures, self.marks, self.text, self.skips, self.cases = 0, {}, "", (), None

    @property
    def stopped(self):
        return bool(self.failures) and not self.go_on

    def unit(self, run, sites, text):
        """Run a unit.

        Args:
            run: a function without arguments that raises if the unit fails.
            sites: the number of checks in the unit that count by themselves; 0: it counts as one.
            text: what the detail of a failure calls it.
        """
        if self.stopped:
            return
        before, self.marks, self.text, escaped = self.failures, {}, text, 0
        gone = bool(self.judge.gone)
        try:
            run()
        except self.skips:
            return
        except BaseException as error:
            self.note(error, text)
            escaped = 1
        if self.judge.gone and self.failures == before:
            self.note(None, text)
        weight = max(1, sites)
        self.total += weight
        if self.failures == before:
            self.passed += weight
        elif not gone:
            shares = sum(passed / ran for passed, ran in self.marks.values())
            if not sites and self.marks:  # the checks of functions that the unit calls
                shares /= len(self.marks)
            self.passed += max(0, min(shares, weight - escaped) if shares < weight else weight - 1)

    def prepared(self, run, text):
        """Run what only prepares; whether it worked."""
        try:
            run()
        except BaseException as error:
            self.note(error, text)
            return False
        return True

    def note(self, error, text):
        """Record a failure; raises Broken if it is the tests' own."""
        if error is not None and not getattr(error, "from_program", False):
            theirs = isinstance(error, TooMuch) or getattr(error, "name", None) == "solution"
            if isinstance(error, Broken) or (isinstance(error, (Unsendable, ImportError)) and not theirs):
                raise Broken(str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}")
        self.failures += 1
        if self.detail:
            return
        self.detail = text
        if error is not None:
            line = self._line(error.__traceback__)
            self.detail += f": {line}" if line and _squeezed(line) not in _squeezed(text) else ""
            if not (isinstance(error, AssertionError) and not str(error)):
                self.detail += f": {type(error).__name__}: {str(error)[:300]}"
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


def _squeezed(text):
    return "".join(text.split()).replace('"', "'")


class Site:
    """A check of a unit, or one iteration of a loop that holds checks: the unit goes on if it fails."""

    def __init__(self, score, index):
        self.score, self.index = score, index

    def __enter__(self):
        self.before = self.score.failures
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, (*self.score.skips, KeyboardInterrupt, GeneratorExit)):
            return False
        mark = self.score.marks.setdefault(self.index, [0, 0])
        mark[1] += 1
        if error is None:
            mark[0] += not self.score.judge.gone and self.score.failures == self.before
        else:
            self.score.note(error, self.score.text)
        return True


def run(task, judge, report):
    """Run the tests and return the report for the verifier.

    Args:
        task: what the verifier sent.
        judge: the connection to the program.
        report: writes a line for the verifier.
    """
    main = types.ModuleType("__main__")
    namespace = main.__dict__
    namespace.update({"__builtins__": builtins, "__file__": "tests.py"})
    builtins.exit = builtins.quit = sys.exit  # as `site` does
    entry = task["entry_point"]
    try:
        sys.modules["__main__"] = main  # where unittest, dataclasses and pickle look for the tests' classes
        skips = _replace(task, judge)
        for source in task["trusted"]:
            exec(compile(source, "setup", "exec", dont_inherit=True), namespace)
        tests = Tests(task["tests"], task["trusted"], entry) if task["cases"] is None else Calls(task)
        library = {n: _library(*where) for n, where in tests.library.items() if n not in namespace}
    except Exception as error:
        return _broken(error)
    if "random" in task["tests"]:
        importlib.import_module("random").seed(0)
    for name in tests.required | (tests.own if task["cases"] is not None else set()):
        # the set-up may define it, such as a bare signature or what it imports
        namespace.pop(name, None)
    judge.shared = {n: k for n, k in plain_classes(namespace).items() if n in task["shared"]}
    judge.shared_exceptions = {
        n: k
        for n, k in namespace.items()
        if isinstance(k, type) and issubclass(k, BaseException) and not issubclass(k, skips)
    }
    hello = judge.channel.receive()  # before any of the program's code runs
    if "hello" not in hello:
        raise Malformed("no greeting")
    report("started")
    loaded = judge.channel.receive()
    if loaded.get("ready") is not True:
        if type(loaded.get("exc")) is not list or not loaded["exc"]:
            raise Malformed("neither ready nor failed")
        return {"kind": "failed", "detail": f"{loaded['exc'][0]}: {loaded.get('text')}"}
    found = judge.ask("names", sorted(tests.wanted - set(namespace)))
    if type(found) is not dict:
        raise Malformed("no names")
    missing = tests.required - set(found) or (tests.own if tests.own.isdisjoint(found) else ())
    if missing:
        return {"kind": "failed", "detail": f"the code defines no {' or '.join(sorted(missing))}"}
    namespace.update(library)
    namespace.update({name: value for name, value in found.items() if name in tests.wanted})
    score = Score(judge, task["tests"], task["all"])
    score.skips = skips
    if "unittest" in "\n".join([task["tests"], *task["trusted"]]):
        score.cases = Cases(score)
    if "threading" in task["tests"]:
        importlib.import_module("threading").excepthook = lambda args: score.note(args.exc_value, "a thread")
    try:
        tests.take(namespace, score) if task["cases"] is not None else take(tests, namespace, score)
    except Broken as error:
        return _broken(error)
    if not score.total and not score.failures:
        return _broken(Broken("all of them are skipped"))
    return {"kind": "done", "passed": score.passed, "total": score.total, "detail": score.detail,
            "failed": bool(score.failures or judge.gone)}  # fmt: skip


def _broken(error):
    name = "" if type(error) is Broken else f"{type(error).__name__}: "
    return {"kind": "broken", "detail": f"the tests do not work: {name}{error}"}


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
        if name.startswith("__"):
            raise AttributeError(name)
        found = self._judge.ask("names", [name])
        if type(found) is not dict or name not in found:
            raise AttributeError(f"the code defines no {name}")
        return found[name]

    def __setattr__(self, name, value):
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            self._judge.request(False, "define", (name, value))

    def __delattr__(self, name):
        self._judge.request(False, "define", (name,))


def _replace(task, judge):
    """Put our modules in place of ``solution`` and pytest; returns the exceptions that skip a unit."""
    texts = "\n".join([task["tests"], *task["trusted"]])
    skips = []
    if "solution" in texts:
        sys.modules["solution"] = Solution(judge)
    if "pytest" in texts:
        sys.modules["pytest"] = _standin.module()
        skips.append(_standin.Skipped)
    if "unittest" in texts:
        import unittest

        skips.append(unittest.SkipTest)
    return tuple(skips)


def take(tests, namespace, score):
    """Run the tests.

    Args:
        tests: the tests.
        namespace: of the tests, with the answer's names.
        score: counts them.
    """
    sites = tests.counted() if score.go_on else {}
    namespace[SITE] = namespace[ITERATION] = lambda index: Site(score, index)
    flags = 0
    for statement, text in tests.steps:
        imported = isinstance(statement, ast.ImportFrom)
        if imported and statement.module == "__future__":
            flags |= sum(getattr(__future__, alias.name).compiler_flag for alias in statement.names)
        if imported and statement.module != "solution":  # the entry point stays the answer's
            statement.names = [a for a in statement.names if (a.asname or a.name) not in tests.required]
            if not statement.names:
                continue
        work = partial(_execute, ast.Module([statement], []), flags, namespace)
        if text is not None:
            call = statement.value if isinstance(statement, ast.Expr) else None
            name = getattr(getattr(call, "func", None), "id", None)
            score.unit(lambda work=work: _until_exit(work), sites.get(name, 0), text)
        elif not score.prepared(work, tests.text(statement)):
            for node in ast.walk(statement):  # later units may not use an older value
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    namespace.pop(node.id, None)
            score.total += isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if score.stopped:
            return
    _collected(tests, namespace, score, sites)


def _until_exit(work):
    """Run a statement of the tests, which may end in ``sys.exit(0)``."""
    try:
        work()
    except SystemExit as error:
        trace, files = error.__traceback__, set()
        while trace is not None:
            files.add(trace.tb_frame.f_code.co_filename)
            trace = trace.tb_next
        if error.code or getattr(error, "from_program", False) or "solution" in files:
            raise


def _execute(module, flags, namespace):
    exec(compile(module, "tests", "exec", flags, dont_inherit=True), namespace)


def _collected(tests, namespace, score, sites):
    """Run the test functions and classes that the tests define."""
    entry = tests.entry
    found = [(n, v) for n, v in namespace.items() if n not in tests.called and callable(v)
             and (n in tests.defined or _made(n, v, namespace))]  # fmt: skip
    runner = None
    if any(inspect.isclass(v) or _special(v, n) for n, v in found) or "pytestmark" in namespace:
        runner = Runner(namespace, score.unit, sites)
    if "setup_module" in namespace:
        score.prepared(lambda: _hook(namespace["setup_module"]), "setup_module")
    for name, value in found:
        if score.stopped:
            break
        if inspect.isclass(value):
            if score.cases is not None and issubclass(value, score.cases.kind):
                score.cases.run(value)
            elif is_test_class(name):
                runner.run_class(value)
            elif name in tests.cases:
                raise Broken(f"class {name} does not run: it derives from no TestCase of unittest")
        elif is_test(name) and not hasattr(value, "_fixture"):
            if name == "check" and entry and _needed(value):
                score.unit(lambda value=value: _finished(value(eval(entry, namespace))), sites.get(name, 0), name)
            elif runner is not None:
                runner.function(name, value)
            else:
                score.unit(lambda value=value: _finished(value()), sites.get(name, 0), name)
    if runner is not None:
        score.prepared(runner.close, "the fixtures' tear-down")
    if "teardown_module" in namespace:
        score.prepared(lambda: _hook(namespace["teardown_module"]), "teardown_module")


def _made(name, value, namespace):
    """Whether a value is a test function that code of the tests made, as in ``test_a = make(1)``."""
    return (is_test(name) and inspect.isfunction(value) and value.__globals__ is namespace
            and value.__name__ != "<lambda>" and not _needed(value))  # fmt: skip


def _hook(function):
    function(*[None][: _needed(function)])


def _special(function, name):
    """Whether a function needs what pytest does: it has marks or arguments, or is a fixture."""
    marked = hasattr(function, "_fixture") or getattr(function, "_marks", ())
    return bool(marked) or (is_test(name) and name != "check" and _needed(function) > 0) or name.startswith("setup_")


def _needed(function):
    """The number of arguments that a function must get."""
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
               for p in inspect.signature(function).parameters.values())  # fmt: skip


def _finished(found):
    """Await what an async test returned; a test fails that returns False."""
    if awaited(found) is False:
        raise AssertionError("returned False")


class Cases:
    """Runs classes of unittest, each of their methods a unit. ``unittest.main()`` in the tests does nothing more."""

    def __init__(self, score):
        import unittest

        self.unittest, self.kind, self.score, self.done = unittest, unittest.TestCase, score, set()
        finished = unittest.TestResult()
        ended = types.SimpleNamespace(result=finished)
        unittest.main = lambda *args, **keywords: ended
        unittest.TextTestRunner.run = lambda runner, suite: self._asked(suite)

    def run(self, kind):
        """Run the test methods of a class, unless the tests did."""
        if kind in self.done:
            return
        names = self.unittest.defaultTestLoader.getTestCaseNames(kind)
        if not names and hasattr(kind, "runTest"):
            names = ["runTest"]
        for name in names:
            if inspect.iscoroutinefunction(getattr(kind, name)) and not hasattr(kind, "asyncSetUp"):
                raise Broken(f"{kind.__name__}.{name} is async: derive the class from IsolatedAsyncioTestCase")
        result = self._result(self.unittest.TestSuite(map(kind, names)))
        if result.all_skipped:
            return
        self.score.total += len(names) - len(result.skipped)
        self.score.passed += 0 if self.score.judge.gone and not result.right else len(result.right)

    def _asked(self, suite):
        """Run the suite that the tests made themselves; its failures are those of the present unit."""
        self.done |= {type(case) for case in _flat(suite)}
        return self._result(suite)

    def _result(self, suite):
        score = self.score

        class Result(self.unittest.TestResult):
            right = frozenset()
            wrong = frozenset()
            all_skipped = False

            def addSuccess(self, test):
                if not score.judge.gone:
                    self.right |= {test.id()}

            def addError(self, test, error):
                super().addError(test, error)
                self.wrong |= {test.id()}
                score.note(error[1], _label(test))

            def addFailure(self, test, error):
                super().addFailure(test, error)
                self.wrong |= {test.id()}
                score.note(error[1], _label(test))

            def addSubTest(self, test, subtest, error):
                super().addSubTest(test, subtest, error)
                if error is not None:
                    self.wrong |= {test.id()}
                    score.note(error[1], _label(subtest))

            def addUnexpectedSuccess(self, test):
                super().addUnexpectedSuccess(test)
                score.note(None, f"{_label(test)}: passes, though expectedFailure says that it fails")

            def addSkip(self, test, reason):
                super().addSkip(test, reason)
                self.all_skipped |= not hasattr(test, "run")

            def addExpectedFailure(self, test, error):
                self.addSuccess(test)

        result = Result()
        result.failfast = not score.go_on
        try:
            suite.run(result)
        except KeyboardInterrupt as error:  # unittest catches all but this
            score.note(error, "unittest")
        result.right -= result.wrong
        return result


def _flat(suite):
    for each in suite:
        if hasattr(each, "__iter__"):
            yield from _flat(each)
        else:
            yield each


def _label(test):
    return str(test.id()).replace("__main__.", "", 1)
