"""Rows that hold the judge of Python tests to account: honest classes with state, and attempts at a free reward."""

# ruff: noqa: E501 - rows are long lines

import json
from contextlib import suppress
from pathlib import Path

import pytest

from rocm_ext.verifiers import Pool, PythonTests, Verdict

ROWS = Path(__file__).parent / "code_rows"
STATEFUL, ATTACKS = (
    [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text().splitlines()]
    for name in ("stateful", "attacks")
)
PARTS = range(16)  # the first of them runs always


@pytest.fixture(scope="module")
def judge():
    verifier = PythonTests(timeout=20, memory_mb=4096, unjudged="error")

    def verdict(code: str, row: dict) -> Verdict | None:
        """None: the row is refused before anything is judged."""
        fields = {name: row[name] for name in ("tests", "entry_point", "test_setup") if name in row}
        try:
            verifier.check_row(fields)
        except ValueError:
            return None
        result = verifier(f"```python\n{code}\n```", fields)
        assert (result.verdict is Verdict.CORRECT) == (result.reward == 1), result
        return result.verdict

    return verdict


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("part", PARTS)
def test_classes_with_state_are_judged(judge, part: int):
    """A row with the field ``unjudged`` says why its right answer is no CORRECT; few have it."""
    assert sum("unjudged" in row for row in STATEFUL) <= 10
    assert {len(row["mutants"]) for row in STATEFUL} == {2}
    for row in STATEFUL[part::16]:
        right, *wrong = [judge(code, row) for code in (row["code"], *row["mutants"])]
        assert (right is Verdict.CORRECT) is ("unjudged" not in row), (row["id"], right)
        if right is Verdict.CORRECT:
            assert wrong == [Verdict.WRONG, Verdict.WRONG], row["id"]
        else:
            assert right in (Verdict.ERROR, None), (row["id"], right)
            assert Verdict.CORRECT not in wrong, row["id"]


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("part", PARTS)
def test_no_attack_is_right(part: int):
    """The verdict of an attack is WRONG or TIMEOUT, or its row is refused: no answer escapes its verdict."""
    config = {"_component_": "rocm_ext.verifiers.PythonTests", "timeout": 4, "memory_mb": 2048}
    verifier, judged = PythonTests(), []
    with Pool(config, workers=3, timeout=60) as pool:
        for row in ATTACKS[part::16]:
            fields = {name: value for name, value in row.items() if name not in ("id", "code")}
            with suppress(ValueError):
                verifier.check_row(fields)
                judged.append((row["id"], pool.submit(f"```python\n{row['code']}```", fields)))
        results = [(name, future.result()) for name, future in judged]
    assert len(judged) > 0.8 * len(ATTACKS[part::16]), "most rows are judged, not refused"
    failed = (Verdict.WRONG, Verdict.TIMEOUT)
    assert [found for found in results if found[1].verdict not in failed or found[1].reward] == []


TASK = "import asyncio\nasync def part(): assert f(1) == 2\nasync def test_a():\n    {}\n    assert f(2) == 4"
PATCH = "from unittest import mock\nimport {0}\nwith mock.patch.object({0}, '{1}'):\n    assert f(1) == 2"
NEIGHBOURS = {  # name -> (tests, the reason why they are refused, tests like them that are accepted)
    "after return": ("def test_a():\n    return\n    assert f(1) == 2", "never runs", "def test_a():\n    assert f(1)\n    return"),
    "after break": ("while f(1):\n    break\n    assert f(2)", "never runs", "while f(1):\n    assert f(2)\n    break"),
    "inner function": ("def test_a():\n    def g(): assert f(1)\n    assert f(2)", r"nothing calls g\(\)", "def test_a():\n    def g(): assert f(1)\n    g()"),
    "create_task": (TASK.format("asyncio.create_task(part())"), "nobody awaits", TASK.format("await part()")),
    "gather": (TASK.format("asyncio.gather(part(), part())"), "nobody awaits", TASK.format("await part()")),
    "a task named run": (TASK.replace("part", "run").format("run()"), "nobody awaits", TASK.replace("part", "run").format("await run()") + "\nasyncio.run(test_a())"),
    "exec": ("space = {}\nexec(f(1), space)\nassert space['x'] == 2", "would run what the answer returns", "assert f(1).eval(2) == 2"),
    "pickle": ("from pickle import loads as load\nassert load(f(1)) == 2", "would run what the answer returns", "from json import loads\nassert loads(f(1)) == 2"),
    "library": (PATCH.format("time", "sleep"), "does not reach the code", PATCH.format("sys", "stdout")),
    "set": ("import time\ntime.time = lambda: 0\nassert f(1) == 2", "does not reach the code", "class time: pass\ntime.time = lambda: 0\nassert f(1) == 2"),
    "not a patch": ("def test_a(monkeypatch):\n    monkeypatch.setenv('A', 'b')\n    assert f(1)", "does not reach the code", "client = f(1)\nassert client.patch('/x') == 2"),
    "fields": ("from dataclasses import fields\nassert len(fields(f(1))) == 2", "looks into the code's objects", "def fields(x): return x\nassert fields(f(1)) == 2"),
    "warnings": ("import pytest\nwith pytest.warns(UserWarning): f(1)", "objects, log or warnings", "import pytest\nwith pytest.raises(UserWarning): f(1)"),
    "skip": ("import pytest\ndef test_a():\n    if f(1) is None: pytest.skip('none')\n    assert f(1) == 2", "leaves tests out", "import pytest\ndef test_a():\n    if f(1) is None: pytest.fail('none')\n    assert f(1) == 2"),
    "skipif": ("import pytest\nr = f(0)\n@pytest.mark.skipif(r is None, reason='none')\ndef test_a(): assert f(1) == 2", "leaves tests out|decides what is tested", "import pytest, sys\n@pytest.mark.skipif(len(sys.path) > 999, reason='x')\ndef test_a(): assert f(1) == 2"),
    "skipif by a text": ("import pytest\nr = f(0)\n@pytest.mark.skipif('r is None')\ndef test_a(): assert f(1) == 2", "leaves tests out", "import pytest\n@pytest.mark.skip('none')\ndef test_b(): assert f(0)\ndef test_a(): assert f(1) == 2"),
    "files": ("def test_a(tmp_path):\n    assert f(tmp_path) == 2", "test_a.. takes tmp_path", "door = f(1)\nassert door.open() == 2"),
}  # fmt: skip


RUN = [  # statements that may run the text t that the answer returns
    "list(map(eval, [t]))", "e = eval\ne(t)", "eval = eval\neval(t)", "partial(eval)(t)", "for e in (eval,):\n    e(t)",
    "(lambda s, e=exec: e(s))(t)", "eval('eval')(t)", "eval('lambda s: ev' + 'al(s)')(t)",
    "exec('from builtins import eval as e')", "exec('x = ' + t)", "eval(compile(t, 'x', 'eval'))",
    "__import__('os').system(t)", "breakpoint()", "__builtins__['eval'](t)", "globals()['__builtins__']['eval'](t)",
    "(lambda: 0).__globals__['x']", "object.__subclasses__()", "print.__self__.eval(t)",
    *(f"import {module}\n{use}" for module, use in [
        ("builtins", "getattr(builtins, 'eval')(t)"), ("builtins as b", "vars(b)['eval'](t)"),
        ("timeit", "timeit.timeit(t)"), ("timeit", "timeit.Timer(stmt=t).timeit(1)"),
        ("code", "code.InteractiveInterpreter().runsource(t)"), ("code", "code.InteractiveConsole('x').push(t)"),
        ("sys", "sys.modules['builtins'].eval(t)"), ("sys", "vars(sys)['modules']['builtins'].eval(t)"),
        ("sys", "sys.__dict__['modules']['builtins'].eval(t)"), ("sys as s", "m = s\nm.modules['builtins'].eval(t)"),
        ("os", "getattr(os, 'sys').modules['builtins'].eval(t)"), ("enum", "enum.bltns.eval(t)"),
        ("runpy", "runpy.run_path(t)"), ("importlib", "importlib.import_module('builtins').eval(t)"),
        ("pickle", "pickle.Unpickler(t)"), ("sympy", "sympy.sympify(t)"), ("os", "os.spawnl(0, '/bin/sh', t)"),
        ("doctest", "doctest.run_docstring_examples(f, {})"), ("functools", "functools.__builtins__['eval'](t)"),
        ("collections", "collections._sys.modules['builtins'].eval(t)"), ("unittest.mock as m", "m.builtins.eval(t)"),
        ("random", "random._os.system(t)"),
    ]),
    "from timeit import *\ntimeit(t)", "from os import popen as p\np(t)",
    "from typing import ForwardRef\nForwardRef(t)",
]  # fmt: skip
MAY = [
    "import timeit\nassert timeit.timeit(lambda: f(1), number=3) < 1",
    "import timeit\nassert timeit.timeit('f(1)', globals=globals(), number=1) < 1",
    "import re\nassert re.compile('a').match(f(1))", "code, profile = f(1), f(2)\nassert code.eval(profile) == 2",
    "import importlib\nassert f(1) and importlib.import_module('solution').f(1) == 2",
    "def compile(x): return x\nassert compile(f(1)) == 2", "import numpy as np\nassert np.trace(f(1)) == 2",
    "import pickle\nassert f(1) == 2",
    "import sys, solution\nassert f(sys.maxsize) == 2 and hasattr(solution, 'f') and hasattr(sys, 'path') and solution.eval(1) == 2",
]  # fmt: skip


@pytest.mark.parametrize("statement", RUN)
def test_rows_that_could_run_the_answers_text_are_refused(statement: str):
    rows = [{"tests": f"from functools import partial\nt = f(1)\n{statement}\nassert t == 24"}]
    if "exec('from" not in statement and "breakpoint" not in statement:
        setup = f"from functools import partial\nt = 0\n{statement}\ndef run(t): return t"
        rows.append({"tests": "assert run(f(1)) == 24", "test_setup": setup})
    for row in rows:
        with pytest.raises(ValueError, match="would run what the answer returns"):
            PythonTests().check_row(row)


def test_other_rows_of_their_kind_are_not():
    for tests in MAY:
        PythonTests().check_row({"tests": tests})
    named = "assert eval('1 + 1') == 2\nassert compile(f(1)) == 2"  # may be the answer's
    PythonTests().check_row({"tests": named, "entry_point": "compile"})


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_what_could_not_fail_or_not_be_judged_is_refused(name: str):
    refused, reason, accepted = NEIGHBOURS[name]
    with pytest.raises(ValueError, match=reason):
        PythonTests().check_row({"tests": refused})
    PythonTests().check_row({"tests": accepted})


THING = "class Thing: pass\ndef f(x): return Thing()"
UNHASHABLE = "class Thing:\n    __hash__ = None\ndef f(x): return Thing()"
BOX = "class Box:\n    v = 1\n    def __enter__(self): return self\n    def __exit__(self, *error): return True"
THROWN = "g = f(1)\nnext(g)\n"
RAISED = f"{THROWN}try: g.throw(ValueError); raised = False\nexcept ValueError: raised = True\nassert raised"
OBJECTS = {  # name -> (code, tests, whether Python passes the tests)
    **{f"isinstance of {name}": (THING, f"from {module} import {name}\nassert isinstance(f(1), {name})", False)
       for module, names in (("collections.abc", "Iterator Sized Iterable Container Collection Reversible AsyncIterator"),
                             ("typing", "SupportsInt SupportsIndex"), ("contextlib", "AbstractContextManager"))
       for name in names.split()},
    "isinstance of Hashable": (UNHASHABLE, "from collections.abc import Hashable\nassert isinstance(f(1), Hashable)", False),
    "no Iterator": (THING, "from collections.abc import Iterator\nassert not isinstance(f(1), Iterator)", True),
    **{f"hasattr {name}": (THING, f"assert hasattr(f(1), '{name}')", False)
       for name in ("__len__", "__iter__", "__next__", "__getitem__", "__enter__")},
    "hasattr of a class": (THING, "assert hasattr(Thing, '__len__')", False),
    "hasattr of an object that the tests make": (THING, "assert hasattr(Thing(), '__len__')", False),
    "not hasattr": (THING, "assert not hasattr(f(1), '__len__')", True),
    "not hasattr of an object that the tests make": (THING, "assert not hasattr(Thing(), '__len__')", True),
    "throw that the code handles": ("def f(x):\n    while True:\n        try: yield x\n        except ValueError: pass", RAISED, False),
    "throw that the code answers": ("def f(x):\n    try: yield x\n    except ValueError: yield 2", f"{THROWN}assert g.throw(ValueError) == 2", True),
    "__exit__ that swallows the tests' raise": (BOX, "with Box() as b:\n    if b.v != 5: raise ValueError", False),
    "the tests' own exception class": ("class Own(Exception): pass\nOwn.__module__ = '__main__'\ndef f(x): raise Own", "import pytest\nclass Own(Exception): pass\nwith pytest.raises(Own): f(1)\nassert True", False),
    "the tests' own exception class through the code": ("def f(g): return g()", "import pytest\nclass Own(Exception): pass\ndef g(): raise Own\nwith pytest.raises(Own): f(g)\nassert True", True),
    # Python passes these, but a function inside data may not say yes, and neither may a class
    "a class inside data says yes": ("def f(x): return {'fits': bool}", "assert f(1)['fits'](5)", False),
    "a class inside data gives the expected value": ("def f(x): return [str]", "assert f(1)[0]('abc') == 'abc'", False),
}  # fmt: skip
CASE = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        "
EACH = "for a, b in zip(f(3), [1, 2, 3]): "
EQUAL = "a == b for a, b in zip(f(3), [1, 2, 3])"
NOTHING = {  # name -> tests that check nothing if f returns []
    "assertEqual": f"{CASE}{EACH}self.assertEqual(a, b)",
    "assertTrue of all": f"{CASE}self.assertTrue(all({EQUAL}))",
    "assertEqual in a list": f"{CASE}[self.assertEqual(a, b) for a, b in zip(f(3), [1, 2, 3])]",
    "numpy's assert_allclose": f"import numpy as np\ndef test_a():\n    {EACH}np.testing.assert_allclose(a, b)",
    "raise": f"def test_a():\n    {EACH}\n        if a != b: raise AssertionError('other')",
    "helper with the loop": "def same(x):\n    for a, b in zip(x, [1, 2]): assert a == b\ndef test_a(): same(f(3))",
    "np.all": f"import numpy as np\nassert np.all([{EQUAL}])",
    "all": f"assert all({EQUAL})",
    "not any": "assert not any(a != b for a, b in zip(f(3), [1, 2, 3]))",
}


@pytest.mark.wide(always=6)
@pytest.mark.parametrize("name", NOTHING)
def test_a_loop_over_nothing_checks_nothing(judge, name: str):
    for answer in ("[]", "[1]"):
        if answer == "[]" or "zip" in NOTHING[name]:
            assert judge(f"def f(x): return {answer}", {"tests": NOTHING[name]}) is Verdict.WRONG, (
                answer
            )
    code = "def f(x): return [1, 2]" if "[1, 2])" in NOTHING[name] else "def f(x): return [1, 2, 3]"
    assert judge(code, {"tests": NOTHING[name]}) is Verdict.CORRECT


EXPECTED = "def f(x):\n    if x < 0: raise ValueError(x)\n    return list(range(x))"
CHECKED = {  # name -> tests that EXPECTED passes, though a check of them does not run
    "try, else": "def test_a():\n    try: f(-1)\n    except ValueError: pass\n    else: assert False",
    "try with a failure": "import pytest\ndef test_a():\n    try:\n        f(-1)\n        pytest.fail('no error')\n    except ValueError: return",
    "handler that fails": "import pytest\ndef test_a():\n    try: f(1)\n    except ValueError: pytest.fail('error')\ndef test_b(): assert f(1) == [0]",
    "handler at the top": "try: f(1)\nexcept ValueError as error:\n    if error: raise\nassert f(1) == [0]",
    "or": "import pytest\ndef test_a():\n    f(2) == [0, 1] or pytest.fail('other')",
    "loop with else": "def test_a():\n    for x in f(3):\n        if x == 2: break\n    else: raise AssertionError('no 2')",
    "nothing but no error": "def test_a(): f(2)\ndef test_b(): assert f(2) == [0, 1]",
    "neighbours": "def test_a(): assert all(a < b for a, b in zip(f(3), f(3)[1:]))\nx = f(4)\nassert all(a < b for a, b in zip(x, x[1:]))",
    "a beginning": "assert all(a == b for a, b in zip(f(9), [0, 1, 2]))",
    "a range": "for a, b in zip(range(2), f(9)): assert a == b",
    "a generator": "import itertools\nfor a, b in zip(f(2), itertools.count()): assert a == b",
    "zip of one's own": "def zip(a, b): return [(a[0], b[0])]\nfor a, b in zip(f(2), [0, 1, 2]): assert a == b",
    "pairs": "x = iter(f(5))\nfor a, b in zip(x, x): assert b - a == 1",
    "a transposed list": "assert list(zip(*[f(2), f(2)])) == [(0, 0), (1, 1)]",
    "expected failure": "import unittest\nclass T(unittest.TestCase):\n    @unittest.expectedFailure\n    def test_a(self): self.assertEqual(f(1), 5)\n    def test_b(self): self.assertEqual(f(1), [0])",
    "a function that fails at first": "import pytest\nn = []\ndef g():\n    n.append(1)\n    if len(n) < 3: raise KeyError\nwith pytest.raises(KeyError): g()\nassert f(2) == [0, 1]",
    "helper of a class": "import unittest\nclass T(unittest.TestCase):\n    def same(self, x):\n        for a in x: self.assertLess(a, 3)\n    def test_a(self): self.same(f(3))",
    "helper of the set-up": "def test_a(): same(f(2), [0, 1])",
}  # fmt: skip
SAME = "def same(a, b):\n    for x, y in zip(a, b): assert x == y"


@pytest.mark.wide(always=6)
@pytest.mark.parametrize("name", CHECKED)
def test_checks_that_a_right_answer_need_not_reach(judge, name: str):
    row = {"tests": CHECKED[name], "test_setup": SAME if "set-up" in name else ""}
    assert judge(EXPECTED, row) is Verdict.CORRECT


def test_what_checks_must_run_in_helpers_too(judge):
    assert judge("def f(x): return []", {"tests": CHECKED["helper of a class"]}) is Verdict.WRONG
    assert (
        judge("def f(x): return []", {"tests": CHECKED["helper of the set-up"], "test_setup": SAME})
        is Verdict.WRONG
    )
    for name in ("try, else", "try with a failure", "loop with else", "or"):
        assert judge("def f(x): return []", {"tests": CHECKED[name]}) is Verdict.WRONG, name


@pytest.mark.wide(always=12)
@pytest.mark.parametrize("name", OBJECTS)
def test_objects_have_their_own_protocols(judge, name: str):
    code, tests, passes = OBJECTS[name]
    assert (judge(code, {"tests": tests}) is Verdict.CORRECT) is passes
