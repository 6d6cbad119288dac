"""Answers that verifiers accept and refuse, and a pool that survives failing verifiers."""

# ruff: noqa: E501 - rows of data sets are long lines

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_ext.errors import UserError
from rocm_ext.verifiers import (
    All,
    Command,
    Compile,
    ExactMatch,
    Pool,
    PythonTests,
    Regex,
    Result,
    Run,
    Verdict,
    Weighted,
    build,
    extract_code,
    python,
)
from rocm_ext.verifiers.base import short
from rocm_ext.verifiers.selfcheck import self_check

sys.path.append(str(Path(python.__file__).parent))  # as in the sandbox, where they are scripts
import _types  # noqa: F401 - _wire imports it late
import _wire

sys.path.pop()

DATA = Path(__file__).parents[2] / "shared" / "data"
MBPP = DATA / "mbpp_train.jsonl"
HERE = "rocm_ext.verifiers."


def rows(path: Path) -> list[dict]:
    if not path.exists():
        pytest.skip(f"needs {path}")
    return [json.loads(line) for line in path.read_text().splitlines()]


# Results


@pytest.mark.parametrize("reward", [None, -0.1, 1.1, float("nan"), float("inf"), "1", True])
def test_a_reward_is_in_the_range(reward):
    with pytest.raises(ValueError, match="reward"):
        Result(Verdict.CORRECT, reward)


def test_an_error_has_no_reward_and_a_detail_is_one_short_line():
    with pytest.raises(ValueError, match="no reward"):
        Result(Verdict.ERROR, 0.0)
    result = Result("WRONG", 0, "a\nb" + "x" * 10**6 + "\x1b[0mend")
    assert str(result.verdict) == f"{result.verdict}" == "WRONG"
    assert result.reward == 0.0
    assert len(result.detail) <= 300
    assert "\n" not in result.detail
    assert "\x1b" not in result.detail
    assert short("a  b\tc") == "a b c"


# Extraction

P = "def f():\n    return 1"


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        (f"```python\n{P}\n```", "python", P),
        (f"Sure!\n```py\n{P}\n```\nDone", "python", P),
        (f"~~~python\n{P}\n~~~", "python", P),
        (f"```python\r\n{P}\r\n```\r\n".replace("\n    ", "\r\n    "), "python", P),
        (f"```\n{P}\n```", "python", P),
        (f"```python\nx = 1\n```\nthen\n```python\n{P}\n```", "python", P),  # the last
        (f"```python\n{P}\n```\noutput:\n```\n1\n```", "python", P),  # tagged before untagged
        (f"```python\n{P}\n```\n```bash\npip install x\n```", "python", P),
        ("```bash\nls\n```", "python", None),
        (f"```python\n{P}", "python", P),  # cut off
        (f"```python\nx = 1\n```\n```python\n{P}", "python", "x = 1"),  # a whole one before one that is cut off
        (f"````python\n{P}\ns = '''\n```\n'''\n````", "python", f"{P}\ns = '''\n```\n'''"),
        (f"  ```python title=x\n{P}\n  ```", "python", P),
        (P, "python", P),
        ("The answer is 5.", "python", None),
        ("hello", "python", None),
        ("a, b", "python", None),
        ("", "python", None),
        ("```python\n\n```", "python", None),
        ("```c++\nint main() {}\n```", "cpp", "int main() {}"),
        ("#include <stdio.h>\nint main() {}", "c", "#include <stdio.h>\nint main() {}"),
        ("I would write a C program", "c", None),
        ("fn main() {}", "rust", "fn main() {}"),
        ('{"a": 1}', "json", '{"a": 1}'),
        ("-" * 10**6, "python", None),
        ("(" * 100_000, "python", None),
    ],
)
def test_extract_code(text: str, language: str, expected: str | None):
    found = extract_code(text, language)
    assert (found and found.strip("\n")) == expected


# Code and its tests

HUMAN_EVAL = [
    {
        "prompt": "from typing import List\n\n\ndef has_close_elements(numbers: List[float], threshold: float) -> bool:\n"
        '    """ Check if any two numbers are closer than threshold.\n'
        '    >>> has_close_elements([1.0, 2.0], 0.5)\n    False\n    """\n',
        "body": "    for i, a in enumerate(numbers):\n        for j, b in enumerate(numbers):\n"
        "            if i != j and abs(a - b) < threshold:\n                return True\n    return False\n",
        "test": "\n\nMETADATA = {'author': 'jt', 'dataset': 'test'}\n\n\ndef check(candidate):\n"
        "    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.3) == True\n    assert candidate([1.0, 2.0], 0.05) == False\n",
        "entry_point": "has_close_elements",
    },
    {
        "prompt": "import math\n\n\ndef poly(xs: list, x: float):\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n\n\n"
        'def find_zero(xs: list):\n    """ xs are coefficients; find x with poly(x) = 0. """\n',
        "body": "    lo, hi = -1.0, 1.0\n    while poly(xs, lo) * poly(xs, hi) > 0:\n        lo, hi = lo * 2, hi * 2\n"
        "    while hi - lo > 1e-10:\n        mid = (lo + hi) / 2\n        if poly(xs, mid) * poly(xs, lo) > 0:\n"
        "            lo = mid\n        else:\n            hi = mid\n    return lo\n",
        "test": "def check(candidate):\n    import copy, math, random\n    rng = random.Random(42)\n    for _ in range(20):\n"
        "        coeffs = [-rng.randint(1, 10), rng.randint(1, 10), 0, 1]\n"
        "        solution = candidate(copy.deepcopy(coeffs))\n"
        "        assert math.fabs(poly(coeffs, solution)) < 1e-4\n",
        "entry_point": "find_zero",
    },
    {
        "prompt": "def encode_shift(s: str):\n    return ''.join(chr((ord(c) + 5 - 97) % 26 + 97) for c in s)\n\n\n"
        "def decode_shift(s: str):\n    '''takes a string encoded with encode_shift, returns the decoded one.'''\n",
        "body": "    return ''.join(chr((ord(c) - 5 - 97) % 26 + 97) for c in s)\n",
        "test": "def check(candidate):\n    from random import randint\n    for _ in range(30):\n"
        "        s = ''.join(chr(randint(97, 122)) for i in range(randint(10, 20)))\n"
        "        encoded = encode_shift(s)\n        assert candidate(encoded) == s\n",
        "entry_point": "decode_shift",
    },
    {
        "prompt": "def below_zero(operations):\n    '''whether the balance falls below zero.'''\n",
        "body": "    balance = 0\n    for op in operations:\n        balance += op\n        if balance < 0:\n"
        "            return True\n    return False\n",
        "test": "def check(candidate):\n    assert not candidate([])\n    assert candidate([1, -4]) is True\n"
        "    assert candidate([1, 2]) is False, 'error'\n",
        "entry_point": "below_zero",
    },
    {
        "prompt": "def sort_third(l: list):\n    '''sorts every third element.'''\n",
        "body": "    l = list(l)\n    l[::3] = sorted(l[::3])\n    return l\n",
        "test": "def check(candidate):\n    a = [5, 6, 3, 4, 8, 9, 2]\n"
        "    assert tuple(candidate(a)) == tuple([2, 6, 3, 4, 8, 9, 5])\n    assert a == [5, 6, 3, 4, 8, 9, 2]\n\ncheck(sort_third)\n",
        "entry_point": "sort_third",
    },
    {
        "prompt": "def mean_absolute_deviation(numbers) -> float:\n    '''around the mean'''\n",
        "body": "    mean = sum(numbers) / len(numbers)\n    return sum(abs(x - mean) for x in numbers) / len(numbers)\n",
        "test": "def check(candidate):\n    assert abs(candidate([1.0, 2.0, 3.0]) - 2.0/3.0) < 1e-6\n"
        "    assert math.isclose(candidate([1.0, 2.0, 3.0, 4.0]), 1.0)\n",
        "entry_point": "mean_absolute_deviation",
    },
    {
        "prompt": "def parse_age(text):\n    '''int of text; ValueError if it is negative, TypeError if it is no str'''\n",
        "body": "    if not isinstance(text, str):\n        raise TypeError(type(text).__name__)\n    if int(text) < 0:\n"
        "        raise ValueError('negative')\n    return int(text)\n",
        "test": "def check(candidate):\n    assert candidate('5') == 5\n    for bad, kind in (('-1', ValueError), (5, TypeError)):\n"
        "        try:\n            candidate(bad)\n        except kind:\n            pass\n        else:\n            assert False\n"
        "    try:\n        candidate('-3')\n    except ValueError as e:\n        assert str(e) == 'negative'\n",
        "entry_point": "parse_age",
    },
]  # fmt: skip


@pytest.mark.parametrize("task", HUMAN_EVAL, ids=lambda task: task["entry_point"])
def test_human_eval_format(task: dict):
    row = {"tests": task["test"], "entry_point": task["entry_point"], "code_prefix": task["prompt"]}
    verifier = PythonTests()
    verifier.check_row(row)
    whole = task["prompt"] + task["body"]
    function = whole[whole.index(f"def {task['entry_point']}") :]
    for completion in (
        task["body"],
        f"```python\n{task['body']}```",
        f"```python\n{whole}```",
        f"Here:\n```\n{function}\n```",
    ):
        result = verifier(completion, row)
        assert result.verdict is Verdict.CORRECT, (result, completion)
    for wrong in ("    return None\n", f"```python\n{task['prompt']}    return -1\n```", "    return candidate\n"):
        assert verifier(wrong, row).reward == 0, wrong


def test_trusted_helpers_are_not_the_programs():
    """The prompt's own helper decides, even if the completion redefines it."""
    task = HUMAN_EVAL[1]
    row = {"tests": task["test"], "entry_point": task["entry_point"], "code_prefix": task["prompt"]}
    forged = "```python\ndef poly(xs, x):\n    return 0.0\n\ndef find_zero(xs):\n    return 1.0\n```"
    assert PythonTests()(forged, row).verdict is Verdict.WRONG


GOOD_TEXT = """
def f(a):
    a.sort()
--
x = [3, 1, 2]
assert f(x) is None
assert x == [1, 2, 3]
====
def f(a):
    a.append(a)
    return a
--
x = []
y = f(x)
assert y is x and x[0] is x
====
def f(d):
    d['k'] = {1}
    d.pop('z')
    return d
--
d = {'z': 1}
f(d)
assert d == {'k': {1}}
====
def f(n):
    for i in range(n):
        yield i
--
assert list(f(3)) == [0, 1, 2]
assert next(f(1)) == 0
assert sum(f(4)) == 6
====
def f(n):
    return map(str, range(n))
--
assert list(f(2)) == ['0', '1']
assert '1' in f(2)
====
def f(key, items):
    return sorted(items, key=key)
--
assert f(lambda x: -x, [1, 2]) == [2, 1]
assert f(len, ['aa', 'b']) == ['b', 'aa']
assert f(str.lower, ['B', 'a']) == ['a', 'B']
====
def f(x):
    raise ValueError('no')
--
import contextlib
def test_it():
    try:
        f(1)
        assert False
    except ValueError as e:
        assert e.args == ('no',)
====
class E(ValueError):
    pass

def f(x):
    raise E(x)
--
def test_it():
    try: f(3)
    except E as e: assert e.args == (3,)
    else: assert False
def test_base():
    try: f(3)
    except ValueError: return
    assert False
====
class P:

    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return self.x == other.x

    def double(self):
        return P(self.x * 2)

    def __len__(self):
        return 7

def f(x):
    return P(x)
--
assert f(3).x == 3
assert f(3).double().x == 6
assert isinstance(f(1), P)
assert f(2) == P(2)
assert f(2) != P(3)
assert len(f(1)) == 7
p = P(1)
p.x = 5
assert p.double().x == 10
assert not isinstance(3, P)
====
class S(list):

    def push(self, x):
        self.append(x)

def f():
    return S([1])
--
s = S()
s.push(4)
assert s == [4] and s[0] == 4 and len(s) == 1
assert f() == [1]
assert [1] == f()
====
from collections import namedtuple
P = namedtuple('P', 'x y')

def f():
    return P(1, 2)
--
assert f() == (1, 2)
assert f().y == 2
====
from enum import IntEnum, Enum

class C(Enum):
    R = 1

class I(IntEnum):
    R = 1

def f():
    return C.R
--
assert f() == C.R
assert f().value == 1
assert I.R == 1
====
from collections import *

def f():
    return (Counter('aab'), OrderedDict(a=1), deque([1]), defaultdict(int, b=2))
--
assert f() == (Counter('aab'), {'a': 1}, deque([1]), {'b': 2})
====
def f():
    return {1: (2, [3, {4}]), None: b'x', 2.5: 1j, 'r': range(3), 'f': frozenset([1])}
--
assert f() == {1: (2, [3, {4}]), None: b'x', 2.5: 1j, 'r': range(3), 'f': frozenset([1])}
====
import math

def f():
    return (10 ** 5000, -math.inf, math.nan, -0.0, 1e+308)
--
a, b, c, d, e = f()
assert a == 10**5000 and b == float('-inf') and c != c and str(d) == '-0.0' and e == 1e308
====
import datetime

def f(d):
    return d + datetime.timedelta(days=1)
--
import datetime
assert f(datetime.date(2020, 2, 28)) == datetime.date(2020, 2, 29)
====
def f(head):
    prev = None
    while head:
        head.next, prev, head = (prev, head, head.next)
    return prev
--
def values(n):
    out = []
    while n: out.append(n.val); n = n.next
    return out
head = None
for i in range(2000): head = ListNode(i, head)
assert values(f(head)) == list(range(2000))
--
class ListNode:
    def __init__(self, val=0, next=None):
        self.val, self.next = val, next
====
class Solution:

    def f(self, a):
        return [a]
--
def check(candidate):
    assert candidate(1) == [1]
--

--
Solution().f
====
def f(x):
    return x

def g(x):
    return f(x)
--
from solution import g as h, f
assert h(1) == f(1) == 1
====
def f(*a, **k):
    return (a, k)
--
assert f(1, *[2], b=3, **{'c': [4]}) == ((1, 2), {'b': 3, 'c': [4]})
====
def f(n):
    return lambda x: x + n
--
assert f(1)(2) == 3
assert list(map(f(1), [1, 2])) == [2, 3]
====
def f(x):
    return type(x)
--
assert f(1) is int
assert f('') == str
====
def f():
    return ({'a': 1}.keys(), {'b': 2}.items(), {'c': 3}.values())
--
k, i, v = f()
assert k == {'a'} and list(i) == [('b', 2)] and list(v) == [3]
====
import re

def f(s):
    return re.search('b+', s)
--
assert f('abb')
assert not f('x')
assert f('abb').group() == 'bb'
====
class V:

    def __init__(self, x):
        self.x = x

    def __add__(self, o):
        return V(self.x + o.x)

    def __str__(self):
        return f'<{self.x}>'

    def __lt__(self, o):
        return self.x < o.x

    def __enter__(self):
        return self

    def __exit__(self, *a):
        self.x = 0

def f(x):
    return V(x)
--
assert (f(1) + f(2)).x == 3
assert str(f(1)) == '<1>' == f'{f(1)}'
assert f(1) < f(2)
assert [v.x for v in sorted([f(2), f(1)])] == [1, 2]
v = f(5)
with v as w: assert w.x == 5
assert v.x == 0
====
def f(x): return eval(x)
--
def test_a():
    assert f('1+1') == 2

def test_b():
    'doc'
    x = f('2')
    assert x == 2
"""
GOOD = GOOD_TEXT.strip("\n").split("\n====\n")  # code, tests, set-up, entry point


@pytest.mark.parametrize("case", GOOD, ids=range(len(GOOD)))
def test_values_objects_and_exceptions_cross(case: str):
    code, tests, setup, entry = [*case.split("\n--\n"), "", ""][:4]
    row = {"tests": tests, "entry_point": entry.strip() or "f", "test_setup": setup}
    for partial in (False, True):
        verifier = PythonTests(partial_credit=partial)
        verifier.check_row(row)
        assert verifier(f"```python\n{code}\n```", row) == Result(Verdict.CORRECT, 1.0, verifier(code, row).detail)


def test_numpy_arrays_cross():
    pytest.importorskip("numpy")
    code = "import numpy as np\ndef f(a): return a * 2, a.sum(), a.mean()"
    tests = ["import numpy as np", "b, s, m = f(np.array([[1.5, 2.5]]))",
             "assert np.array_equal(b, np.array([[3.0, 5.0]])) and s == 4 and m == 2", "np.testing.assert_allclose(b, [[3, 5]])"]  # fmt: skip
    result = PythonTests(memory_mb=2048)(code, {"tests": tests, "entry_point": "f"})
    assert result.verdict is Verdict.CORRECT, result


def test_partial_credit_counts_asserts():
    row = {"tests": "def test_solution():\n    assert f(1) == 1\n    assert f(2) == 4\n    assert f(3) == 9\n    assert f(0) == 0",
           "entry_point": "f"}  # fmt: skip
    half = PythonTests(partial_credit=True)("def f(x): return x", row)
    assert (half.verdict, half.reward) == (Verdict.WRONG, 0.5)
    assert "f(2) == 4" in half.detail
    assert PythonTests()("def f(x): return x", row).reward == 0
    as_list = row | {"tests": [f"assert f({i}) == {i * i}" for i in range(4)]}
    assert PythonTests(partial_credit=True)("def f(x): return x", as_list).reward == 0.5
    dies = "import os\ndef f(x):\n    if x == 3: os._exit(0)\n    return x * x"
    assert PythonTests(partial_credit=True)(dies, row).reward == 0.5
    last = "def f(x):\n    if x == 0: raise KeyError\n    return x * x"
    assert PythonTests(partial_credit=True)(last, row).reward == 0.75


@pytest.mark.parametrize(
    ("completion", "verdict", "detail"),
    [
        ("I cannot do that.", "UNPARSED", "no Python"),
        ("```python\ndef g(x): return x\n```", "WRONG", "no f"),
        ("```python\ndef f(x) return x\n```", "WRONG", "SyntaxError"),
        ("```python\nimport no_such_module\n```", "WRONG", "no_such_module"),
        ("def f(x): return 1 / 0", "WRONG", "ZeroDivisionError"),
        ("def f(x): return f(x)", "WRONG", "RecursionError"),
        ("def f(x):\n    while True: pass", "TIMEOUT", "1 s"),
        ("x = bytes(10**10)", "WRONG", "MemoryError"),
        ("import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGXCPU)", "TIMEOUT", "CPU"),
    ],
)
def test_verdicts_say_why(completion: str, verdict: str, detail: str):
    result = PythonTests(timeout=1.0)(completion, {"tests": "assert f(1) == 1", "entry_point": "f"})
    assert str(result.verdict) == verdict
    assert detail in result.detail


def test_broken_tests_are_errors():
    verifier, code = PythonTests(), "def f(x): return x"
    for tests in ("assert f(1) ==", "import no_such_module\nassert f(1) == 1", "x = 1",
                  "def test_x(tmp_path):\n    assert f(1) == 1", "assert f(open('/dev/null')) == 1"):  # fmt: skip
        result = verifier(code, {"tests": tests, "entry_point": "f"})
        assert (result.verdict, result.reward) == (Verdict.ERROR, None), (tests, result)
    for row in ({}, {"tests": ""}, {"tests": []}, {"tests": 5}, {"tests": "assert f("}, {"cases": []}, {"cases": [{"input": 1}]},
                {"tests": "assert f", "test_setup": "import"}, {"tests": "assert f", "entry_point": 3}):  # fmt: skip
        with pytest.raises(ValueError, match=r"tests|cases|test_setup|entry_point"):
            verifier.check_row(row)


def test_programs_of_stdin_and_stdout():
    row = {"cases": [{"input": f"{i}\n", "output": f"{i * 2}\nend\n"} for i in range(4)]}
    verifier, partial = PythonTests(timeout=5), PythonTests(timeout=5, partial_credit=True)
    verifier.check_row(row)
    assert (
        verifier("```python\nprint(int(input()) * 2, ' ')\nprint('end')\nexit()\n```", row).verdict is Verdict.CORRECT
    )
    some = partial("```python\nn = int(input())\nprint(n * 2 if n else 7)\nprint('end')\n```", row)
    assert (some.verdict, some.reward) == (Verdict.WRONG, 0.75)
    crash = verifier("```python\nprint(int(input()) * 2)\nprint('end')\nraise SystemExit(3)\n```", row)
    assert crash.verdict is Verdict.WRONG
    assert "exit status 3" in crash.detail
    assert PythonTests(timeout=1)("```python\nwhile True: pass\n```", row).verdict is Verdict.TIMEOUT
    assert verifier("just words", row).verdict is Verdict.UNPARSED


def mbpp(count: int | None, partial: bool) -> list:
    verifier = PythonTests(partial_credit=partial)
    found = []
    for row in rows(MBPP)[:: 374 // count if count else 1]:
        verifier.check_row(row)
        result = verifier(row["solution"], row)
        if result.verdict is not Verdict.CORRECT:
            found.append((row["task_id"], result))
    return found


@pytest.mark.parametrize("partial", [False, True])
def test_mbpp_solutions_pass(partial: bool):
    assert mbpp(40, partial) == []


@pytest.mark.slow
@pytest.mark.parametrize("partial", [False, True])
def test_all_mbpp_solutions_pass(partial: bool):
    failed = mbpp(None, partial)
    assert [task for task, _ in failed] == [927]  # broken upstream: its tests use an undefined name


# The wire

SCALARS = (st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
           | st.complex_numbers(allow_nan=False) | st.decimals(allow_nan=False) | st.fractions() | st.dates()
           | st.datetimes() | st.timedeltas() | st.integers(-(10**400), 10**400))  # fmt: skip
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=6)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(HASHABLE, inner, max_size=3)
    | st.sets(HASHABLE, max_size=3) | st.lists(inner, max_size=3).map(deque),
    max_leaves=12,
)  # fmt: skip


def over(codec: _wire.Codec, value: object) -> object:
    encoded, nodes = json.loads(json.dumps(codec.encode([value])))
    return type(codec)().decode(encoded, nodes)[0]


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_values_survive_the_wire(value):
    found = over(_wire.Codec(), value)
    assert found == value
    assert type(found) is type(value)
    if not isinstance(value, datetime):  # `fold` is left out
        assert repr(found) == repr(value) or isinstance(value, (set, frozenset, dict, list, tuple, deque))


def test_the_wire_keeps_sharing_and_types():
    inner = [1]
    for value in ([inner, inner], OrderedDict(b=1, a=2), Counter("aab"), defaultdict(list, a=[1]), bytearray(b"x"),
                  deque([1, 2], maxlen=2), range(1, 9, 3), Decimal("1.10"), Fraction(1, 3), date(2020, 1, 2),
                  datetime(2020, 1, 2, 3, 4, 5, 6), timedelta(1, 2, 3), Ellipsis, int, ValueError, "\ud800"):  # fmt: skip
        found = over(_wire.Codec(), value)
        assert found == value
        assert type(found) is type(value)
    a, b = over(_wire.Codec(), [inner, inner])
    assert a is b


@pytest.mark.parametrize(
    "value",
    [["T", "exec"], ["T", "Codec"], ["B", "eval"], ["h", 0, "x", []], ["r", 0], ["r", True], ["i", 4], ["i", "zz"], [], {}, ["x"],
     ["nt", "a b", [], []], ["nt", "X", ["import"], [1]], ["np", "O", [1], "00"], ["np", "|V8", [1], "00"], ["D", 1.5], ["F", [1, 0]],
     ["t", 5], ["z", [["r", 0]]], ["dt", "object", []], ["g", [1, 2, 0]], ["b", "zz"], [["t"], 1], ["c", "x", 1]],
)  # fmt: skip
def test_nonsense_on_the_wire_is_refused(value):
    with pytest.raises(_wire.Malformed):
        _wire.Codec().decode([value], [])
    deep: list = []
    for _ in range(5000):
        deep = ["t", [deep]]
    with pytest.raises(_wire.Malformed):
        _wire.Codec().decode([deep], [])


# Compiled languages

SQUARE = {
    "c": "#include <stdio.h>\nint main(void) { int n; scanf(\"%d\", &n); printf(\"%d\\n\", n * n); return 0; }",
    "cpp": "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << n * n << std::endl; }",
    "rust": "use std::io::*;\nfn main() { let mut s = String::new(); stdin().read_line(&mut s).unwrap();\n"
            "let n: i64 = s.trim().parse().unwrap(); println!(\"{}\", n * n); }",
}  # fmt: skip


@pytest.mark.parametrize("language", SQUARE)
def test_compiled_languages(language: str):
    run = Run(language, timeout=5)
    try:
        run.check()
    except UserError as error:
        pytest.skip(str(error))
    row = {"cases": [{"input": "3", "output": "9"}, {"input": "-4", "output": "16"}]}
    code = f"```{language}\n{SQUARE[language]}\n```"
    assert run(code, row) == Result(Verdict.CORRECT, 1.0, "passed 2 of 2")
    half = run(code.replace("n * n", "n * 3"), row)
    assert (half.verdict, round(half.reward, 6)) == (Verdict.WRONG, 0.75)
    assert round(run(code.replace("n * n", "7"), row).reward, 6) == 0.5
    assert Compile(language)(code, {}).verdict is Verdict.CORRECT
    broken = run(code.replace("main", "mian("), row)
    assert (broken.verdict, broken.reward) == (Verdict.WRONG, 0.0)
    assert "error" in broken.detail


def test_a_missing_compiler_is_one_line():
    if shutil.which("go"):
        pytest.skip("go is installed")
    with pytest.raises(UserError, match="apt install golang-go"):
        Compile("go").check()
    with pytest.raises(UserError, match="did you mean rust"):
        Compile("ruts")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_crash_earns_what_it_compiled_for():
    row = {"cases": [{"input": "", "output": "4"}]}
    crash = Run("c")("```c\nint main(void) { int *p = 0; *p = 1; return 0; }\n```", row)
    assert (crash.verdict, crash.reward) == (Verdict.WRONG, 0.2)
    assert Run("c", timeout=0.5)("```c\nint main(void) { for (;;); }\n```", row).verdict is Verdict.TIMEOUT


# Text


def test_exact_match():
    row = {"answer": "Paris"}
    assert ExactMatch()(" Paris\n", row).reward == 1
    assert ExactMatch()("paris", row).verdict is Verdict.WRONG
    assert ExactMatch(ignore_case=True)("PARIS", row).reward == 1
    assert ExactMatch(strip=False)("Paris ", row).reward == 0
    assert ExactMatch()(" ", row).verdict is Verdict.UNPARSED
    with pytest.raises(ValueError, match="'gold' is missing; the row has 'answer'"):
        ExactMatch("gold").check_row(row)


def test_regex_is_bounded_in_time():
    assert Regex(r"\d+")("abc 12", {}).reward == 1
    assert Regex(r"\d+", full=True)("abc 12", {}).reward == 0
    assert Regex(field="p")("yes", {"p": "^y"}).reward == 1
    started = time.monotonic()
    assert Regex(r"^(a|a)*(b|b)*$", timeout=0.3)("a" * 40 + "c" * 40, {}).verdict in (Verdict.TIMEOUT, Verdict.WRONG)
    assert Regex(r"(a|aa)+$", timeout=0.3)("a" * 100 + "c", {}).verdict is Verdict.TIMEOUT
    assert time.monotonic() - started < 3
    with pytest.raises(UserError, match="not a regular expression"):
        Regex("(")
    with pytest.raises(ValueError, match="'p'"):
        Regex(field="p").check_row({"p": "("})
    with pytest.raises(UserError, match="either"):
        Regex()


def _runs(pid: str) -> bool:
    try:
        return b"sleep" in Path("/proc", pid, "cmdline").read_bytes()
    except OSError:
        return False


def test_command(tmp_path: Path):
    def program(code: str, timeout: float = 20) -> Command:
        return Command([sys.executable, "-S", "-c", code], timeout=timeout)

    answer = "import json, sys; r = json.load(sys.stdin); print(json.dumps({'verdict': 'WRONG', 'reward': r['row']['x'], 'detail': r['completion']}))"
    assert program(answer)("hi\n" * 50_000, {"x": 0.25}) == Result(Verdict.WRONG, 0.25, "hi\n" * 50_000)
    for code in ("exit(3)", "print('rubbish')", "print('[1]')", "print('{\"verdict\": \"MAYBE\", \"reward\": 1}')",
                 "print('{\"verdict\": \"CORRECT\", \"reward\": 7}')", "print('{\"verdict\": \"WRONG\", \"reward\": NaN}')", "while True: print('x' * 10**6)"):  # fmt: skip
        result = program(code)("x", {})
        assert (result.verdict, result.reward) == (Verdict.ERROR, None), code
    started, pid = time.monotonic(), tmp_path / "pid"
    hangs = (
        f"import subprocess, time; p = subprocess.Popen(['sleep', '100']); open({str(pid)!r}, 'w').write(str(p.pid))"
    )
    assert "3 s" in program(f"{hangs}; time.sleep(100)", timeout=3)("x", {}).detail
    assert time.monotonic() - started < 20
    while _runs(pid.read_text()) and time.monotonic() - started < 20:
        time.sleep(0.02)
    assert not _runs(pid.read_text())
    with pytest.raises(UserError, match="no-such-program"):
        Command(["no-such-program"]).check()
    assert Command(["no-such-program"])("x", {}).verdict is Verdict.ERROR
    with pytest.raises(UserError, match="list of strings"):
        Command("ls -l")


# Combinations and building

EXACT = {"_component_": HERE + "ExactMatch"}
DIGIT = {"_component_": HERE + "Regex", "pattern": r"\d"}
FAILS = {"_component_": HERE + "Command", "command": ["false"]}


def test_all():
    verifier = build({"_component_": HERE + "All", "verifiers": [DIGIT, EXACT]})
    assert isinstance(verifier, All)
    assert verifier.needs == ("answer",)
    assert verifier("7", {"answer": "7"}).verdict is Verdict.CORRECT
    assert verifier("8", {"answer": "7"}).verdict is Verdict.WRONG
    assert verifier("x", {"answer": "x"}).detail == "Regex: no match"
    with pytest.raises(ValueError, match="answer"):
        verifier.check_row({})
    assert build({"_component_": HERE + "All", "verifiers": [DIGIT, FAILS]})("7", {}).verdict is Verdict.ERROR


def test_weighted():
    verifier = Weighted([DIGIT, EXACT], [1, 3])
    assert verifier("7", {"answer": "7"}) == Result(Verdict.CORRECT, 1.0, "Regex 1 (found '7'); ExactMatch 1")
    quarter = verifier("8", {"answer": "7"})
    assert (quarter.verdict, quarter.reward) == (Verdict.WRONG, 0.25)
    assert Weighted([DIGIT, EXACT], [1, 3], threshold=0.25)("8", {"answer": "7"}).verdict is Verdict.CORRECT
    assert Weighted([DIGIT, FAILS], [1, 1])("8", {}).verdict is Verdict.ERROR
    for weights in ([1], [0, 0], [1, -1], [1, float("nan")], [1, float("inf")], [1, "1"], 2):
        with pytest.raises(UserError, match="weight"):
            Weighted([DIGIT, EXACT], weights)


MINE = """
import os, sys, time
from rocm_ext.verifiers import Result, Verdict
print("import noise")
class Mine:
    def __init__(self, how="good"): self.how = how
    def __call__(self, completion, row):
        print("noise", flush=True)
        os.write(1, b"more noise\\n")
        os.system("echo child noise")
        if completion == "raise": raise KeyError("oh no")
        if completion == "exit": sys.exit(3)
        if completion == "die": os._exit(7)
        if completion == "crash": import ctypes; ctypes.string_at(0)
        if completion == "hang": time.sleep(1000)
        if completion == "child": os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "987"); time.sleep(1000)
        if completion == "none": return None
        if completion == "odd": r = Result(Verdict.CORRECT, 1.0); object.__setattr__(r, "reward", float("nan")); return r
        if completion == "env": return Result(Verdict.CORRECT, 1.0, f"{os.getpid()} {os.nice(0)} {'torch' in sys.modules}")
        return Result(Verdict.CORRECT, 1.0, completion)
class Fails:
    def __init__(self): raise RuntimeError("cannot")
CONSTANT = 5
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_verifiers.py").write_text(MINE)
    (tmp_path / "my_broken.py").write_text("import no_such_thing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("my_verifiers", "my_broken"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({"_component_": HERE + "MathAnswr"}, "did you mean MathAnswer"),
        ({"_component_": HERE + "MathAnswer", "feild": "x"}, "did you mean field"),
        ({"_component_": HERE + "Compile"}, "language"),
        ({"_component_": "no_module.X"}, "no module 'no_module'"),
        ({"_component_": "MathAnswer"}, "module.Class"),
        ({"_component_": "my_broken.X"}, "no_such_thing"),
        ({"_component_": "my_verifiers.Fails"}, "RuntimeError: cannot"),
        ({"_component_": "my_verifiers.CONSTANT"}, "expected a function or class"),
        ({"_component_": "my_verifiers.Mien"}, "did you mean Mine"),
        ({"_component_": HERE + "All", "verifiers": [{"_component_": HERE + "Regex"}]}, "pattern or field"),
        ({"_component_": HERE + "All", "verifiers": []}, "list of verifiers"),
        ({"component": "x"}, "_component_"),
        ("MathAnswer", "mapping"),
    ],
)
def test_what_cannot_be_built_is_one_line(mine: Path, node: object, says: str):
    with pytest.raises(UserError) as caught:
        build(node)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_class_of_ones_own_needs_only_call(mine: Path):
    verifier = build({"_component_": "my_verifiers.Mine", "how": "well"})
    verifier.check()
    verifier.check_row({})
    assert verifier("x", {}).detail == "x"


# The pool


def test_a_pool_survives_its_verifiers(mine: Path):
    with Pool({"_component_": "my_verifiers.Mine"}, workers=2, timeout=1.5) as pool:
        for what, says in (("raise", "KeyError: 'oh no' (my_verifiers.py:"), ("exit", "SystemExit: 3"), ("die", "exited with 7"),
                           ("crash", "SIGSEGV"), ("hang", "hung for 1.5 s"), ("none", "NoneType, not a Result"),
                           ("odd", "reward")):  # fmt: skip
            result = pool.submit(what, {}).result(timeout=30)
            assert (result.verdict, result.reward) == (Verdict.ERROR, None)
            assert says in result.detail, result.detail
            assert pool.submit("fine \u2028 \ud800 text\n", {"a": [1]}).result(timeout=30).reward == 1
        many = [pool.submit(f"text {i} " + "x" * 100_000, {"i": i}) for i in range(40)]
        assert [f.result(timeout=30).detail.split()[1] for f in many] == [str(i) for i in range(40)]
        assert pool.submit("x", {"row": SimpleNamespace()}).result(timeout=30).verdict is Verdict.ERROR
        pid, nice, torch = pool.submit("env", {}).result(timeout=30).detail.split()
        assert int(pid) != os.getpid()
        assert int(nice) >= os.nice(0) + 5
        assert torch == "False"


def test_a_pool_ends_at_once_with_all_it_started(mine: Path):
    def sleepers() -> int:
        found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        return sum(line == "sleep 987" for line in found.splitlines())

    started = time.monotonic()
    futures = []
    with contextlib.suppress(ZeroDivisionError), Pool({"_component_": "my_verifiers.Mine"}, 2, 100) as pool:
        futures += [pool.submit("child", {}) for _ in range(4)]
        while sleepers() < 2 and time.monotonic() - started < 20:
            time.sleep(0.05)
        assert sleepers() == 2
        stopped = time.monotonic()
        raise ZeroDivisionError
    assert time.monotonic() - stopped < 5
    assert sleepers() == 0
    assert len(futures) == 4
    assert all(f.done() for f in futures)
    assert all(f.cancelled() or f.result().verdict is Verdict.ERROR for f in futures)


def test_workers_die_with_their_parent(mine: Path):
    code = """
import os, sys, time
sys.path.insert(0, os.getcwd())
from rocm_ext.verifiers import Pool
pool = Pool({"_component_": "my_verifiers.Mine"}, 1, 100).__enter__()
print(pool.submit("env", {}).result().detail.split()[0], flush=True)
pool.submit("hang", {})
time.sleep(100)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()


def test_a_pool_that_cannot_start_says_why(mine: Path):
    for node, says in (
        ({"_component_": "my_verifiers.Fails"}, "cannot"),
        ({"_component_": HERE + "Nothing"}, "no 'Nothing'"),
    ):
        with pytest.raises(UserError, match=says), Pool(node, 1, 10):
            pass
    with pytest.raises(UserError, match="plain data"):
        Pool({"_component_": "x", "y": object()}, 1, 10)
    with pytest.raises(UserError, match="workers"):
        Pool({"_component_": "x"}, 0, 10)


def test_workers_are_free_of_torch():
    code = "import sys, rocm_ext.verifiers, rocm_ext.verifiers.workers.worker, rocm_ext.verifiers.selfcheck\n"
    code += "print([m for m in ('torch', 'torchtune', 'omegaconf', 'numpy', 'sympy', 'datasets') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# The self-check


def test_self_check_counts_and_shows_failures(tmp_path: Path):
    data = [
        ("d.jsonl:1", {"answer": "7"}),
        ("d.jsonl:2", {"answer": "x"}),
        ("d.jsonl:3", {"answer": "8", "solution": "9"}),
    ]
    both = {"_component_": HERE + "Weighted", "verifiers": [EXACT, DIGIT], "weights": [1, 1]}
    summary = self_check(both, data, None, 2, None)
    assert summary.rows == 3
    assert summary.verdicts == {Verdict.CORRECT: 1, Verdict.WRONG: 2}
    assert summary.mean_reward == pytest.approx(2 / 3)
    assert [origin for origin, _ in summary.failures] == ["d.jsonl:2", "d.jsonl:3"]
    assert self_check(both, data, "answer", 1, 1).rows == 1
    with pytest.raises(UserError, match=r"d\.jsonl:4.*answer"):
        self_check(both, [("d.jsonl:4", {"solution": "7"})])
    with pytest.raises(UserError, match=r"d\.jsonl:1.*gold answer in nothing"):
        self_check(both, data, "nothing")
    with pytest.raises(UserError, match="no rows"):
        self_check(both, [])


def test_self_check_of_code(tmp_path: Path):
    data = [(f"mbpp:{i}", row) for i, row in enumerate(rows(MBPP)[:6], 1)]
    summary = self_check({"_component_": HERE + "PythonTests"}, data, None, 2, None)
    assert summary.verdicts == {Verdict.CORRECT: 6}
    assert summary.mean_reward == 1
