"""Runs the user's tests in the judge's process and counts what passes."""

import ast
import builtins
import contextlib
import importlib

from _channel import Malformed, TooMuch, Unsendable
from _units import Tests
from _wire import plain_classes

MODULES = {"np": "numpy", "pd": "pandas"}
for _name in (
    *("bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools"),
    *("json", "math", "numpy", "operator", "os", "pandas", "pytest", "random", "re", "statistics", "string", "sys"),
    *("time", "unittest"),
):
    MODULES[_name] = _name
COMMON = {
    **dict.fromkeys(("isclose", "sqrt", "pi", "inf", "nan"), "math"),
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"), "collections"),
    **{"Decimal": "decimal", "Fraction": "fractions"},
}


def ours(name):
    """The library function or module of a name that the tests did not import; the program's could be anything."""
    if name in COMMON:
        return getattr(importlib.import_module(COMMON[name]), name)
    return importlib.import_module(MODULES[name]) if name in MODULES else None


def run(task, judge, report):
    """Run the tests and return the report for the verifier.

    Args:
        task: what the verifier sent.
        judge: the connection to the program.
        report: writes a line for the verifier.
    """
    namespace = {"__name__": "tests", "__builtins__": builtins}
    try:
        for source in task["trusted"]:
            exec(compile(source, "setup", "exec", dont_inherit=True), namespace)
        tests = Tests(task["tests"], task["entry_point"])
    except Exception as error:
        return {"kind": "broken", "detail": f"the tests do not work: {type(error).__name__}: {error}"}
    if "random" in task["tests"]:
        importlib.import_module("random").seed(0)
    entry = task["entry_point"]
    namespace.pop(entry, None)  # the set-up may define it as a bare signature
    judge.shared = {n: k for n, k in plain_classes(namespace).items() if n in task["shared"]}
    judge.shared_exceptions = {
        n: k for n, k in namespace.items() if isinstance(k, type) and issubclass(k, BaseException)
    }
    hello = judge.channel.receive()  # before any of the program's code runs
    if "hello" not in hello:
        raise Malformed("no greeting")
    report("started")
    loaded = judge.channel.receive()
    if loaded.get("ready") is not True:
        if type(loaded.get("exc")) is not list or not loaded["exc"]:
            raise Malformed("neither ready nor failed")
        names = loaded["exc"]
        return {"kind": "failed", "detail": f"{names[0]}: {loaded.get('text')}", "passed": 0, "total": tests.total}
    wanted = tests.names() - tests.defined() - set(namespace) - set(dir(builtins)) - set(tests.imported)
    for name in sorted(wanted - {entry}):
        with contextlib.suppress(ImportError):
            if (value := ours(name)) is not None:
                namespace[name] = value
                wanted.remove(name)
    wanted |= set(tests.imported.values()) | ({entry.split(".")[0].split("(")[0]} if entry else set())
    wanted = sorted(wanted)
    found = judge.ask("names", wanted)
    if type(found) is not dict:
        raise Malformed("no names")
    namespace.update({name: value for name, value in found.items() if name in wanted})
    namespace.update({alias: found[name] for alias, name in tests.imported.items() if name in found})
    if entry and entry.isidentifier() and entry not in found:
        return {"kind": "failed", "detail": f"the code defines no {entry}", "passed": 0, "total": tests.total}
    return take(tests, namespace, judge, task["all"])


def take(tests, namespace, judge, go_on):
    """Run the tests' statements and return the report; ``go_on``: after a unit that fails, too."""
    passed, detail = 0, ""
    for statements, reads in tests.steps:
        try:
            exec(compile(ast.Module(statements, []), "tests", "exec", dont_inherit=True), namespace)
            passed += reads is not None
        except BaseException as error:
            ours_alone = isinstance(error, (Unsendable, ImportError)) and not isinstance(error, TooMuch)
            if ours_alone and not getattr(error, "from_program", False):
                return {"kind": "broken", "detail": f"the tests do not work: {type(error).__name__}: {error}"}
            if not detail:
                detail = f"{reads or ast.unparse(statements[0])[:100]}"
                if not (isinstance(error, AssertionError) and not str(error)):
                    detail += f": {type(error).__name__}: {str(error)[:300]}"
            if judge.gone or reads is None or not go_on:
                break
        if judge.gone:
            break
    if judge.gone and judge.gone not in detail:
        detail = f"{detail}: {judge.gone}" if detail else judge.gone
    if detail:
        passed = min(passed, tests.total - 1)
    return {"kind": "done", "passed": passed, "total": tests.total, "detail": detail}
