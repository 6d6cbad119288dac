"""What crosses between the tests and the code: honest code is right, wrong code is not; and what is not judged."""

# ruff: noqa: E501 - code in rows

import json
import re
import sys
import time
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from types import MappingProxyType
from urllib.parse import urlparse
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_ext.base.errors import UserError
from rocm_ext.verifiers import PythonTests, Result, Verdict
from rocm_ext.verifiers.python._messages import Malformed, Unsendable, Wire

HONEST = {  # code, how to make it wrong, tests, set-up
    "functions in containers": ("from functools import partial\nOPS = {'+': lambda a, b: a + b, 'len': len}\ndef powers(n): return [partial(pow, i) for i in range(n)]\ndef counter():\n    n = 0\n    def inc():\n        nonlocal n\n        n += 1\n        return n\n    return {'inc': inc, 'get': lambda: n}, [str.upper]", ("n += 1", "n += 2"), "assert OPS['+'](2, 3) == 5 and OPS['len']('ab') == 2 and len(OPS) == 2 and [p(2) for p in powers(4)] == [0, 1, 4, 9]\nc, (up,) = counter()\nc['inc']()\nassert c['inc']() == c['get']() == 2 and up('a') == 'A' and callable(up) and c['inc'] == c['inc'] != c['get']"),
    "matches": ("import re\ndef f(s): return re.search(r'(\\d+)-(?P<b>\\d+)', s)\ndef g(s): return re.finditer(r'(?<=<)\\w+|^\\d', s)\ndef h(s): return [re.fullmatch('a|ab', s), re.match('(a)?(b)?', s)]", ("(\\d+)-", "(\\d)-"), "import re\nm = f('a 12-34')\nassert m and isinstance(m, re.Match) and m[0] == '12-34' and m[1] == '12' and m['b'] == '34' and m.group(1, 2) == ('12', '34')\nassert m.span('b') == (5, 7) and m.end() == 7 and m.groupdict() == {'b': '34'} and m.string == 'a 12-34'\nassert [x.group() for x in g('1 <b')] == ['1', 'b'] and [x[0] for x in h('ab')] == ['ab', 'ab'] and h('b')[1].groups('z') == ('z', 'b')"),
    "iterators of classes that the tests do not name": ("import csv, io\nclass Down:\n    def __init__(self, n): self.n = n\n    def __iter__(self): return self\n    def __next__(self):\n        if self.n == 0: raise StopIteration\n        self.n -= 1\n        return self.n\nclass Twice:\n    def __init__(self, *x): self.x = x\n    def __iter__(self): return iter(self.x * 2)\ndef f(n): return Down(n), Twice(n)\ndef g(s): return csv.DictReader(io.StringIO(s))", ("== 0", "== 1"), "d, t = f(3)\nassert list(d) == [2, 1, 0] and list(d) == [] and [*t] == [3, 3] and next(f(1)[0]) == 0\nassert [r['a'] for r in g('a,b\\n1,2\\n')] == ['1']"),
    "classes as values": ("class Cat:\n    def speak(self): return 'mew'\nclass Bad(Exception): pass\nKINDS = {'cat': Cat}\ndef make(n):\n    class C:\n        def double(self): return 2 * n\n    return C\ndef f(x): return type(x)\ndef g(): return [Bad, int, ValueError]", ("2 * n", "3 * n"), "C = make(4)\nassert C().double() == 8 and isinstance(C(), C) and KINDS['cat']().speak() == 'mew' and f(KINDS['cat']()) is KINDS['cat'] != C\nassert f(1) is int and g()[1:] == [int, ValueError] and issubclass(g()[0], Exception)"),
    "truth of classes, and types in text": ("from enum import Enum\nfrom typing import Generic, TypeVar\nT = TypeVar('T')\nclass Stack(Generic[T]): pass\nclass Color(Enum): pass\ndef f(): return [int, str]", ("[int, str]", "[int, list]"), "assert Stack and Color\nassert str(f()) == \"[<class 'int'>, <class 'str'>]\""),
    "copies": ("class P:\n    def __init__(self, x): self.x = [x]\n    def __contains__(self, x): return x in self.x", ("[x]", "[x, 5]"), "import copy\np = P(1)\nq, r = copy.deepcopy(p), copy.copy(p)\nq.x.append(2)\nassert p.x == [1] and r.x == [1] and copy.deepcopy([p])[0].x == [1] and 1 in q and 5 not in r"),
    "collections' wrappers": ("from collections import ChainMap, UserDict, UserList, UserString\ndef f(): return ChainMap({'a': 1}, {'a': 2, 'b': 3}), UserDict(a=1), UserList([1, 2]), UserString('ab')", ("'a': 1}", "'a': 2}"), "c, d, l, s = f()\nassert c['a'] == 1 and dict(c) == {'a': 1, 'b': 3} and len(c) == 2\nassert d == {'a': 1} and l == [1, 2] and l[0] == 1 and s.upper() == 'AB'"),
    "arrays without elements": ("import numpy as np\ndef f(x): return [y for y in x if y > 2]\ndef g(x): return np.array(x)", ("> 2", "> 0"), "import numpy as np\nassert np.array_equal(f([1]), []) and np.array(f([1])).size == 0 and (np.array(f([1])) == np.array([])).all()\nassert len(np.append(f([1]), 5)) == 1 and np.reshape(f([1]), -1).shape == (0,) and np.sum(f([1])) == 0\na = g([1, 2])\nassert (a[a > 5] == 0).all() and np.all(np.equal(f([3, 4]), [3, 4])) and (a + 1 == [2, 3]).all() and isinstance(a, np.ndarray) and a.dtype == np.int64\nassert np.add.reduce(a) == 3 and np.vectorize(np.negative)(a).tolist() == [-1, -2] and list(map(np.sqrt, [4])) == [2]"),
    "printed to stderr": ("import sys\ndef f(): print('bad', file=sys.stderr)", ("file=sys.stderr", "end=''"), "import io\nfrom contextlib import redirect_stderr\nout = io.StringIO()\nwith redirect_stderr(out):\n    f()\nassert 'bad' in out.getvalue()"),
    "Path": ("from pathlib import Path\ndef f(p): return Path(p).parent / 'x.txt'", ("x.txt", "y.txt"), "from pathlib import Path\nassert f('/a/b') == Path('/a/x.txt')\nassert f(Path('c/d')).suffix == '.txt'"),
    "aware datetime": ("from datetime import datetime, timezone, timedelta\ndef f(d): return d.astimezone(timezone.utc)", ("timezone.utc", "timezone(timedelta(hours=1))"), "from datetime import datetime, timezone, timedelta\nd = datetime(2020, 1, 1, 5, tzinfo=timezone(timedelta(hours=2)))\nassert f(d).hour == 3\nassert f(d).tzinfo == timezone.utc\nassert f(d) == d"),
    "exception as a value": ("def f(x):\n    try: return int(x)\n    except ValueError as e: return e", ("return e", "return None"), "assert isinstance(f('a'), ValueError)\nassert 'invalid' in str(f('a'))\nassert f('1') == 1"),
    "exception with __str__": ("class E(Exception):\n    def __str__(self): return 'E:' + str(self.args[0])\ndef f(): raise E(4)", ("'E:'", "'F:'"), "try: f()\nexcept E as e: says = str(e)\nassert says == 'E:4'"),
    "library exception": ("import json\ndef f(s): return json.loads(s)", ("json.loads(s)", "eval(s)"), "import json\ntry:\n    f('{')\n    ok = False\nexcept json.JSONDecodeError as e:\n    ok = e.pos == 1\nassert ok"),
    "exceptions of builtin families": ("class NoFile(FileNotFoundError): pass\nclass Key(KeyError): pass\nclass Stop(StopIteration): pass\nclass Many(ExceptionGroup): pass\ndef f(n):\n    if n == 0: raise NoFile(2, 'gone', 'x.txt')\n    if n == 1: raise Key('k')\n    if n == 2: raise Many('many', [ValueError('v')])", ("'gone'", "'lost'"), "import pytest\ndef test_all():\n    with pytest.raises(FileNotFoundError) as e: f(0)\n    assert e.value.errno == 2 and e.value.strerror == 'gone' and e.value.filename == 'x.txt'\n    with pytest.raises(KeyError) as e: f(1)\n    assert e.value.args == ('k',) and type(e.value) is Key\n    with pytest.raises(ExceptionGroup) as e: f(2)\n    assert str(e.value.exceptions[0]) == 'v'"),
    "unequal to data": ("class A:\n    def v(self): return 1", ("return 1", "return 2"), "assert A() != 5\nassert A() != None\nassert (A() == 'x') is False\nassert A().v() == 1"),
    "callbacks with lists": ("def f(xs, key): return sorted(xs, key=key)", ("key=key", "key=str"), "xs = [[i, i * 7919 % 1500] for i in range(1500)]\nassert f(xs, lambda p: p[1]) == sorted(xs, key=lambda p: p[1])"),
    "bound methods as callbacks": ("class Event:\n    def __init__(self): self.all = []\n    def on(self, g): self.all.append(g)\n    def off(self, g): self.all.remove(g)", ("remove(g)", "pop().x"), "class Ear:\n    def hear(self): pass\near, e = Ear(), Event()\ne.on(ear.hear)\ne.off(ear.hear)\nassert e.all == []"),
    "memo": ("from functools import lru_cache\n@lru_cache(None)\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)", ("(None)", "(maxsize=1)"), "assert fib(20) == 6765\nassert fib.cache_info().hits > 5\nfib.cache_clear()\nassert fib.cache_info().currsize == 0"),
    "generator of the tests": ("def f(it):\n    for x in it:\n        if x > 2: return x", ("> 2", "> 3"), "def nat():\n    n = 0\n    while True:\n        yield n\n        n += 1\nassert f(nat()) == 3"),
    "objects passed between functions": ("class _Account:\n    def __init__(self): self.sum = 0\ndef create(): return _Account()\ndef deposit(a, x): a.sum += x\ndef balance(a): return a.sum", ("+= x", "= x"), "a = create()\ndeposit(a, 5)\ndeposit(a, 6)\nassert balance(a) == 11\nassert a is not None"),
    "missing special method": ("class A:\n    pass", ("pass", "def __len__(self): return 1"), "try:\n    len(A())\n    ok = False\nexcept TypeError:\n    ok = True\nassert ok\nassert not callable(A())"),
    "Solution returns data": ("class Solution:\n    def two(self, a, t):\n        d = {}\n        for i, x in enumerate(a):\n            if t - x in d: return [d[t - x], i]\n            d[x] = i", ("[d[t - x], i]", "[i, i]"), "s = Solution()\nassert s.two([2, 7], 9) == [0, 1]\nassert Solution().two([3, 3], 6) == [0, 1]"),
    "threads of the tests": ("import threading\nclass C:\n    def __init__(self): self.n, self.lock = 0, threading.Lock()\n    def inc(self):\n        with self.lock: self.n += 1", ("+= 1", "+= 2"), "import threading\nc = C()\ndef work():\n    for _ in range(50): c.inc()\nthreads = [threading.Thread(target=work) for _ in range(4)]\nfor t in threads: t.start()\nfor t in threads: t.join()\nassert c.n == 200"),
    "arguments": ("def f(*a, **k): return a, k", ("a, k", "k, a"), "assert f(1, *[2], b=3, **{'c': [4]}) == ((1, 2), {'b': 3, 'c': [4]})"),
    "keywords of any name": ("class School:\n    def __call__(self, self_, **k): return k\n    def add(self, name, o=0, op=1): return [name, o, op]\ndef f(f, op, function, cls=0): return [f, op, function, cls]", ("[name, o, op]", "[name, op, o]"), "import numpy as np\nassert f(f=1, op=2, function=3, cls=4) == [1, 2, 3, 4]\ns = School()\nassert s.add(name='Ann', o=2, op=3) == ['Ann', 2, 3]\nassert s(0, name=1, op=2, cls=3) == {'name': 1, 'op': 2, 'cls': 3}"),
    "identity of an argument": ("def f(x):\n    x.sort()\n    return x\ndef g(x): return sorted(x)", ("return x\n", "return list(x)\n"), "x = [2, 1]\nassert f(x) is x and x == [1, 2]\nassert g(x) is not x and g(x) == x"),
    "rare special methods": ("class N:\n    def __init__(self, v): self.v = v\n    def __add__(self, o): return N(self.v + o.v)\n    def __format__(self, spec): return f'<{self.v}|{spec}>'\n    def __call__(self, k): return self.v + k", ("self.v + o.v", "o.v"), "q = N(1)\nq += N(2)\nassert q.v == 3\nassert f'{q:z}' == '<3|z>' and q(5) == 8 and callable(q)"),
    "exceptions of the tests": ("def f(g):\n    try: return g()\n    except LookupError: return 'caught'", ("LookupError", "Exception"), "import pytest\nclass A(KeyError): pass\nclass B(Exception):\n    def __init__(self, a, b):\n        super().__init__(a)\n        self.b = b\ndef g(): raise A\ndef h(): raise B(1, 2)\ndef test_it():\n    assert f(g) == 'caught'\n    with pytest.raises(B) as e: f(h)\n    assert e.value.b == 2"),
    "a class of the set-up repeated": ("class Node:\n    def __init__(self, v): self.v = v\ndef f(v): return Node(v + 1)", ("v + 1", "v"), "assert f(2).v == 3", "class Node:\n    def __init__(self, v): self.v = v"),
    "objects of classes of the set-up": ("def f(head):\n    prev = None\n    while head: head.next, prev, head = prev, head, head.next\n    return prev", ("return prev", "return None"), "def values(n):\n    out = []\n    while n: out.append(n.val); n = n.next\n    return out\nhead = None\nfor i in range(500): head = ListNode(i, head)\nassert values(f(head)) == list(range(500))", "class ListNode:\n    def __init__(self, val=0, next=None): self.val, self.next = val, next"),
    "dict that keeps what is missing": ("class Memo(dict):\n    def __missing__(self, n):\n        self[n] = n if n < 2 else self[n - 1] + self[n - 2]\n        return self[n]\ndef make(): return Memo()", ("n < 2", "n < 3"), "m = make()\nassert m[10] == 55\nassert 10 in m and m[10] == 55 and len(make()) == 0"),
    "int enum": ("from enum import IntEnum\nclass P(IntEnum):\n    LOW = 1\n    HIGH = 3\ndef f(s): return P[s]", ("= 3", "= 4"), "assert f('LOW') == 1 and f('HIGH') == P.HIGH and f('HIGH') > 2 and f('LOW') < P.HIGH\nassert P.HIGH + 1 == 4 and [5, 6, 7, 8][f('HIGH')] == 8 and {3: 'x'}[f('HIGH')] == 'x'\nassert f('LOW').name == 'LOW' and f('LOW').value == 1 and isinstance(f('LOW'), int)\nassert sorted([P.HIGH, P.LOW]) == [1, 3] and f('LOW') in (1, 2)"),
    "int flag": ("from enum import IntFlag\nclass P(IntFlag):\n    R = 4\n    W = 2\ndef f(a): return P(a)", ("W = 2", "W = 1"), "assert P.R | P.W == 6 and f(6) & P.W == 2 and (P.R | P.W) == f(6)"),
    "named tuple with methods": ("from typing import NamedTuple\nclass Seg(NamedTuple):\n    a: int\n    b: int\n    def length(self): return self.b - self.a\ndef longest(xs): return max((Seg(*x) for x in xs), key=Seg.length)", ("self.b - self.a", "self.a"), "s = longest([(0, 2), (5, 9), (6, 7)])\nassert s == (5, 9) and s.b == 9 and s.length() == 4 and s[0] == 5 and len(s) == 2\na, b = s\nassert b == 9 and Seg(1, 4).length() == 3 and sorted([Seg(2, 1), Seg(1, 2)]) == [(1, 2), (2, 1)]\nassert Seg(1, 2) == Seg(1, 2) != Seg(1, 3) and Seg(1, 2)._replace(a=0) == (0, 2)"),
    "float with a unit": ("class Metres(float):\n    def feet(self): return self * 3.28\ndef f(x): return Metres(x)", ("3.28", "3.3"), "assert f(2) == 2.0 and abs(f(2) - 2) < 1e-9 and f(1).feet() == 3.28 and round(f(2.46), 1) == 2.5 and f(2) > 1\nimport math\nassert math.isclose(f(2), 2.0)"),
    "addition in place alone": ("class N:\n    v = 1\n    def __iadd__(self, o):\n        self.v += o\n        return self", ("+= o", "= o"), "n = m = N()\nn += 2\nassert n.v == 3 and m.v == 3 and n is m"),
    "cause": ("class ConfigError(Exception): pass\ndef f(s):\n    try: return int(s)\n    except ValueError as e: raise ConfigError('bad') from e", ("from e", "from None"), "import pytest\ndef test_a():\n    with pytest.raises(ConfigError) as info: f('x')\n    assert isinstance(info.value.__cause__, ValueError) and 'invalid' in str(info.value.__cause__)\n    assert info.value.__cause__.__cause__ is None"),
    "private slots": ("class P:\n    __slots__ = ('__x',)\n    def __init__(self, x): self.__x = x\n    def __eq__(self, o): return self.__x == o.__x", ("== o", "!= o"), "assert P(1) == P(1)"),
    "async generator": ("async def f(n):\n    for i in range(n): yield i", ("range(n)", "range(n + 1)"), "import asyncio\nasync def main(): return [x async for x in f(3)]\nassert asyncio.run(main()) == [0, 1, 2]"),
}  # fmt: skip


def row(tests: str, entry: str = "", setup: str = "") -> dict:
    return {"tests": tests, "entry_point": entry, "test_setup": setup}


def is_right_and_its_mutant_is_not(
    verifier: PythonTests, code: str, change: tuple, tests: str, setup: str = ""
):
    assert change[0] in code
    fields = row(tests, setup=setup)
    verifier.check_row(fields)
    right = verifier(f"```python\n{code}\n```", fields)
    assert right.verdict is Verdict.CORRECT, right
    wrong = verifier(f"```python\n{code.replace(*change)}\n```", fields)
    assert wrong.verdict is Verdict.WRONG, wrong
    assert "cannot be judged" not in wrong.detail


@pytest.fixture(scope="module")
def apart() -> PythonTests:
    return PythonTests()


@pytest.fixture(scope="module")
def together() -> PythonTests:
    return PythonTests(isolation="same_process")


if sys.version_info < (3, 11):
    del HONEST["exceptions of builtin families"]  # one is ExceptionGroup


@pytest.mark.wide(always=15)
@pytest.mark.parametrize("name", HONEST)
def test_honest_code_is_right_and_wrong_code_is_not(apart: PythonTests, name: str):
    is_right_and_its_mutant_is_not(apart, *HONEST[name])


# in one process the tests have copies of the code's names
@pytest.mark.wide
@pytest.mark.parametrize("name", sorted(HONEST.keys() - {"a global that the code rebinds"}))
def test_one_process_says_the_same(together: PythonTests, name: str):
    is_right_and_its_mutant_is_not(together, *HONEST[name])


LIMITS = {
    # refused before the run: the tests look into the answer, or change what only they would see
    "signature": ("refused", "def f(a, b=2): return a", "import inspect\nassert list(inspect.signature(f).parameters) == ['a', 'b'] and f(1) == 1"),
    "a class of the tests inherits": ("refused", "class Point:\n    def __init__(self, x, y): self.x, self.y = x, y\n    def __len__(self): return 2", "class P3(Point):\n    def __len__(self): return super().__len__() + 1\nassert len(P3(1, 2)) == 3"),
    "print patched": ("refused", "def f(): print('hi')", "from unittest.mock import patch\nwith patch('builtins.print') as p: f()\np.assert_called_once_with('hi')"),
    "logs": ("refused", "import logging\ndef f(): logging.warning('hey')", "import unittest\nclass TestF(unittest.TestCase):\n    def test_f(self):\n        with self.assertLogs(): f()"),
    "files": ("refused", "def f(path):\n    with open(path, 'w') as file: file.write('x')", "import tempfile, os\npath = os.path.join(tempfile.mkdtemp(), 'x')\nf(path)\nassert open(path).read() == 'x'"),
    "coroutines that take turns": ("refused", "import asyncio\nlog = []\nasync def f(x):\n    log.append(x)\n    await asyncio.sleep(0.01)\n    log.append(-x)\n    return x * 2\ndef order(): return log", "import asyncio\nasync def main():\n    return await asyncio.gather(f(1), f(2))\nassert asyncio.run(main()) == [2, 4]\nassert order() == [1, 2, -1, -2]"),
    "a patched answer": ("refused", "def helper(x): return x\ndef f(x): return helper(x) + 1", "from unittest.mock import patch\nimport solution\nwith patch('solution.helper', return_value=10): assert solution.f(3) == 11"),
    "a mock as an argument": ("refused", "def f(dog): return dog.speak()", "from unittest.mock import Mock\nassert f(Mock(speak=lambda: 'mew')) == 'mew'"),
    "a table": ("refused", "def f(s): return s[s > 1]", "import pandas as pd\nassert f(pd.Series([1, 2, 3])).tolist() == [2, 3]"),
    # found in the run: an object of the answer stands in the place of data, or the answer gives what may not cross
    "an object as data": ("unjudged", "class N:\n    def __init__(self, v): self.v = v\n    def __len__(self): return self.v\ndef f(): return N(3)", "assert len(f()) == 3"),
    "an order with data": ("unjudged", "class N:\n    def __init__(self, v): self.v = v\n    def __lt__(self, o): return self.v < o", "assert N(3) < 4"),
    "a class whose __eq__ takes data": ("unjudged", "class M:\n    def __init__(self, v): self.v = v\n    def __eq__(self, o): return self.v == (o.v if isinstance(o, M) else o)", "assert M(5) == 5"),
    "an equality that leaves out an attribute": ("unjudged", "import itertools\nN = itertools.count()\nclass A:\n    def __init__(self, v): self.v, self.id = v, next(N)\n    def __eq__(self, o): return self.v == o.v", "assert A(1) == A(1)"),
    "a namespace": ("unjudged", "from types import SimpleNamespace\ndef f(x): return SimpleNamespace(x=x)", "from types import SimpleNamespace\nassert f(1) == SimpleNamespace(x=1)"),
    "a predicate in a list": ("unjudged", "def f(): return [str.isdigit]", "assert f()[0]('1')"),
    "an object in a list that can be called": ("unjudged", "class Add:\n    def __call__(self, x): return x + 1\ndef f(): return [Add()]", "assert f()[0](1) == 2"),
    "a function in a field": ("unjudged", "from collections import namedtuple\nP = namedtuple('P', 'get kind')\ndef f(): return P(lambda: 1, int)", "assert f().get() == 1"),
    "the length of a class": ("unjudged", "from enum import Enum\nclass E(Enum):\n    A = 1\ndef f(): return E", "assert len(f()) == 1"),
    "the length of what is iterated": ("unjudged", "class L:\n    def __iter__(self): return iter([1])\n    def __len__(self): return 1\ndef f(): return L()", "assert len(f()) == 1"),
    "a list that holds itself": ("unjudged", "def f(x):\n    x.append(x)\n    return x", "x = []\nassert f(x)[0] is x"),
    "an object of the tests": ("unjudged", "def f(dog): return dog.speak()", "class Dog:\n    def speak(self): return 'wuff'\nassert f(Dog()) == 'wuff'"),
    "a class of the tests": ("unjudged", "def f(kind): return kind()", "class A: pass\nassert isinstance(f(A), A)"),
    "a coroutine function of the tests": ("unjudged", "async def f(g, x): return await g(x) + 1", "import asyncio\nasync def twice(x): return x * 2\nassert asyncio.run(f(twice, 4)) == 9"),
    "a stream of the tests": ("unjudged", "def f(out): out.write('hi')", "import io\nout = io.StringIO()\nf(out)\nassert out.getvalue() == 'hi'"),
    # not found: containers are copies, and calls end before they return
    "a list that is kept": ("wrong", "class Log:\n    def __init__(self): self.lines = []\n    def add(self, x): self.lines.append(x)", "log = Log()\nlines = log.lines\nlog.add(1)\nassert lines == [1]"),
    "an attribute that stays the same": ("wrong", "class Box:\n    def __init__(self): self.items = [1]", "b = Box()\nassert b.items is b.items"),
    "an exception class of the tests that the answer raises": ("unjudged", "def fail(kind): raise kind('no')", "import pytest\nclass Own(Exception): pass\ndef test_f():\n    with pytest.raises(Own): fail(Own)"),
    "the text of a wrapped function": ("wrong", "import functools\ndef wrap(g):\n    @functools.wraps(g)\n    def inner(*a): return g(*a)\n    return inner", "@wrap\ndef g():\n    'says'\nassert g.__doc__ == 'says'"),
    "a generator that is closed": ("wrong", "log = []\ndef f():\n    try: yield 1\n    finally: log.append('closed')\ndef read(): return log", "g = f()\nassert next(g) == 1\ng.close()\nassert read() == ['closed']"),
    "a seed": ("wrong", "import random\ndef f(): return random.random()", "import random\nrandom.seed(1)\na = f()\nrandom.seed(1)\nassert a == f()"),
    "a timer": ("wrong", "import threading\ndef f(g): threading.Timer(0.05, g).start()", "import time\nlog = []\nf(lambda: log.append(1))\ntime.sleep(0.3)\nassert log == [1]"),
}  # fmt: skip


@pytest.mark.wide(always=10)
@pytest.mark.parametrize("name", LIMITS)
def test_what_is_not_judged_is_never_right(apart: PythonTests, together: PythonTests, name: str):
    how, code, tests = LIMITS[name]
    assert together(f"```python\n{code}\n```", row(tests)).verdict is Verdict.CORRECT, together(
        code, row(tests)
    )
    if how == "refused":
        with pytest.raises(ValueError, match="same_process"):
            apart.check_row(row(tests))
        return
    apart.check_row(row(tests))
    result = apart(f"```python\n{code}\n```", row(tests))
    assert (result.verdict, result.reward) == (Verdict.WRONG, 0), result
    assert ("cannot be judged: " in result.detail) is (how == "unjudged"), result


def test_the_verdict_of_what_cannot_be_judged_is_a_choice(apart: PythonTests):
    code = "class Box:\n    def __lt__(self, other): return True\ndef f(): return Box()"
    tests = row("assert f() < 5")
    named = PythonTests(unjudged="error")(code, tests)
    assert named == Result(Verdict.ERROR, None, apart(code, tests).detail)
    swallowed = row("try:\n    ok = f() < 5\nexcept BaseException:\n    ok = True\nassert ok")
    assert PythonTests(unjudged="error")(code, swallowed).verdict is Verdict.ERROR
    with pytest.raises(UserError, match="did you mean error"):
        PythonTests(unjudged="errors")


def test_one_process_shares_its_memory():
    code = "def f(x):\n    return len(bytes(600 << 20)) >> 20"
    for memory_mb, verdict in ((2048, Verdict.CORRECT), (512, Verdict.WRONG)):
        result = PythonTests(isolation="same_process", memory_mb=memory_mb)(
            code, row("assert f(1) == 600")
        )
        assert result.verdict is verdict, result
    assert "MemoryError" in result.detail
    assert "memory_mb is 512" in result.detail


@pytest.mark.wide
def test_one_process(caplog: pytest.LogCaptureFixture):
    one = PythonTests(timeout=2, isolation="same_process", partial_credit=True)
    one.check()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "forge" in caplog.text
    tests = row("assert f(2) == 4\nassert f(3) == 9", "f")
    for code, verdict, reward in (
        ("def f(x): return x * x", "CORRECT", 1), ("def f(x): return 4", "WRONG", 0.5), ("def f(x) return", "WRONG", 0),
        ("import os\nos._exit(0)", "WRONG", 0), ("def f(x): exit(0)", "WRONG", 0), ("print('{}')", "WRONG", 0),
        ("def f(x):\n    while True: pass", "TIMEOUT", 0), ("import ctypes\nctypes.string_at(0)", "WRONG", 0),
    ):  # fmt: skip
        result = one(f"```python\n{code}\n```", tests)
        assert (str(result.verdict), result.reward) == (verdict, reward), (code, result)
    assert one("def f(x): return x", row("assert f(1) ==")).verdict is Verdict.ERROR
    code = "def f(n):\n    assert isinstance(n, Node)\n    return Node(n.v + 1)"
    setup = "class Node:\n    def __init__(self, v): self.v = v\n"
    tests = row("r = f(Node(1))\nassert isinstance(r, Node) and r.v == 2", "f", setup)
    assert one(f"```python\n{code}\n```", tests).verdict is Verdict.CORRECT
    with pytest.raises(UserError, match="did you mean same_process"):
        PythonTests(isolation="same_proces")


LIBRARIES = {  # library: code, how to make it wrong, tests
    "numpy scalars": ("import numpy as np\ndef f(a): return np.float64(sum(a)), np.int32(3), np.datetime64('2020-01-02')", ("int32", "int64"), "import numpy as np\nx, y, z = f([1.5])\nassert isinstance(x, np.float64) and x.dtype == np.float64\nassert y.dtype == 'int32' and y == 3 and z == np.datetime64('2020-01-02')"),
    "numpy arrays": ("import numpy as np\ndef f(a): return a * 2, np.array(5), np.array([]), a.T, np.array(['x', 'y'])", ("a * 2", "a * 3"), "import numpy as np\na = np.arange(6).reshape(2, 3)\nb, c, d, e, s = f(a)\nnp.testing.assert_array_equal(b, [[0, 2, 4], [6, 8, 10]])\nassert c.shape == () and d.size == 0 and e.shape == (3, 2) and s.tolist() == ['x', 'y']\nassert (f(a)[0] == b).all()"),
    "numpy in place": ("import numpy as np\ndef f(a):\n    a += 1\n    return a", ("a += 1", "a = a + 1"), "import numpy as np\na = np.zeros(3)\nassert f(a) is a\nassert a.sum() == 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIBRARIES)
def test_arrays_cross(name: str):
    pytest.importorskip(name.split()[0])
    is_right_and_its_mutant_is_not(PythonTests(timeout=20, memory_mb=4096), *LIBRARIES[name])


SCALARS = (st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
           | st.complex_numbers(allow_nan=False) | st.decimals(allow_nan=False) | st.fractions() | st.dates()
           | st.datetimes() | st.timedeltas() | st.integers(-(10**400), 10**400))  # fmt: skip
HASHABLE = st.recursive(
    SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=6
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(HASHABLE, inner, max_size=3)
    | st.sets(HASHABLE, max_size=3) | st.lists(inner, max_size=3).map(deque),
    max_leaves=12,
)  # fmt: skip


def across(value: object) -> object:
    return Wire().decode(json.loads(json.dumps(Wire().encode(value))))


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_plain_data_survives_the_wire(value):
    found = across(value)
    assert found == value
    assert type(found) is type(value)


EAST = timezone(timedelta(hours=2), "EAST")


@pytest.mark.parametrize("value", [
    OrderedDict(b=1, a=2), Counter("aab"), defaultdict(list, a=[1]), defaultdict(None, a=1), bytearray(b"x"),
    deque([1, 2], maxlen=2), range(1, 9, 3), slice(1, None), Decimal("1.10"), Fraction(1, 3), date(2020, 1, 2),
    datetime(2020, 1, 2, 3, tzinfo=EAST), EAST, PurePosixPath("a/b"), UUID(int=5), Ellipsis,
    MappingProxyType({"a": [1]}), time.gmtime(0), urlparse("http://a/b?c"), re.search("(?P<b>b)|c", "abc"),
    array("d", [1.5]), "\ud800", "\ud83d\ude00", -0.0, float("nan"), float("inf"), {True: 1, 2: (3,)}.keys(),
])  # fmt: skip
def test_library_types_survive_the_wire(value):
    found = across(value)
    assert type(found) is type(value)
    assert repr(found) == repr(value)


class Mine(int):
    pass


@pytest.mark.parametrize("value", [
    Mine(1), [Mine(1)], int, len, ValueError("x"), json, object(), iter([]), {"a": {Mine(1)}},
])  # fmt: skip
def test_other_types_do_not_cross(value):
    with pytest.raises(Unsendable):
        Wire().encode(value)
    with pytest.raises(Unsendable):
        Wire().encode([[value]])


TAGS = st.sampled_from([
    "OD", "dk", "di", "dv", "mp", "mv", "DD", "ba", "range", "slice", "nt", "numpy", *"ltszduiqbcehkfxXyB", "datetime.date",
    "decimal.Decimal", "array.array", "re.Match", "time.struct_time", "collections.Counter", "os.system", "builtins.eval",
])  # fmt: skip
NAMES = st.sampled_from(["int", "float64", "<f8", "list", ""])
NONSENSE = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=3) | NAMES,
    lambda inner: st.tuples(TAGS, inner, inner).map(list) | st.tuples(TAGS, inner).map(list) | st.lists(inner, max_size=2)
    | st.dictionaries(st.text(max_size=2), inner, max_size=1),
    max_leaves=8,
)  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(NONSENSE)
def test_nonsense_is_malformed_or_plain_data(message):
    try:
        found = Wire().decode(message)
    except Malformed:
        return
    Wire().encode(found)


def test_endless_nesting_is_malformed():
    deep: list = []
    for _ in range(5000):
        deep = ["t", deep]
    with pytest.raises(Malformed):
        Wire().decode(deep)
