"""What crosses between the tests and the code: honest code is right, lying objects are not, and the rest is ERROR."""

# ruff: noqa: E501 - code in rows

import pytest

from rocm_ext.errors import UserError
from rocm_ext.verifiers import PythonTests, Verdict

POINT = """
class Point:
    def __init__(self, x, y): self.x, self.y = x, y
    def __eq__(self, other): return isinstance(other, Point) and (self.x, self.y) == (other.x, other.y)
    def __hash__(self): return hash((self.x, self.y))
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)
    def __mul__(self, k): return Point(self.x * k, self.y * k)
    def __rmul__(self, k): return self * k
    def __neg__(self): return Point(-self.x, -self.y)
    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5
    def __lt__(self, other): return abs(self) < abs(other)
    def __repr__(self): return f"Point({self.x}, {self.y})"
    def __iter__(self): return iter((self.x, self.y))
    def __getitem__(self, i): return (self.x, self.y)[i]
    def __len__(self): return 2
    def __contains__(self, v): return v in (self.x, self.y)
    def __bool__(self): return bool(self.x or self.y)
    def __call__(self, k): return self.x + k
    def __format__(self, spec): return f"<{self.x}|{spec}>"
    def __iadd__(self, other):
        self.x += other.x
        return self
"""
# name: (right code, how to make it wrong, tests)
HONEST = {
    "dataclass with text annotations": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Item:\n    name: str\n    price: float = 1.0",
        ("= 1.0", "= 2.0"), "assert Item('a') == Item('a', 1.0)\nassert Item('a').price == 1.0\nassert Item('a') != Item('b')"),
    "dataclass order and hash": (
        "from dataclasses import dataclass\n@dataclass(order=True, frozen=True)\nclass V:\n    major: int\n    minor: int = 0",
        ("minor: int = 0", "minor: int = 7"), "assert V(1) < V(1, 2)\nassert {V(1): 'a'}[V(1, 0)] == 'a'\nassert len({V(1), V(1, 0)}) == 1\nassert max(V(1), V(2)) == V(2)"),
    "frozen dataclass raises": (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass V:\n    x: int",
        ("(frozen=True)", ""), "import dataclasses\nimport pytest\ndef test_frozen():\n    with pytest.raises(dataclasses.FrozenInstanceError):\n        V(1).x = 2"),
    "dataclass repr and asdict": (
        "from dataclasses import dataclass, field\n@dataclass\nclass V:\n    x: int\n    tags: list = field(default_factory=list)",
        ("tags: list", "tag: list"), "from dataclasses import asdict\nassert repr(V(1)) == 'V(x=1, tags=[])'\nassert asdict(V(2, ['a'])) == {'x': 2, 'tags': ['a']}"),
    "dataclass field left out of the comparison": (
        "from dataclasses import dataclass, field\n@dataclass\nclass V:\n    x: int\n    seen: int = field(default=0, compare=False)",
        (", compare=False", ""), "assert V(1, 2) == V(1, 3)"),
    "pickle of an object": (
        POINT, ("Point(self.x, self.y)", "Point"), ""),
    "enum": (
        "from enum import Enum\nclass Color(Enum):\n    RED = 1\n    BLUE = 2\ndef pick(n): return Color(n)",
        ("Color(n)", "Color.RED"), "assert pick(2) is Color.BLUE\nassert pick(2).name == 'BLUE'\nassert Color['RED'] == Color.RED\nassert len(Color) == 2\nassert [c.value for c in Color] == [1, 2]\nassert {Color.RED: 5}[Color.RED] == 5"),
    "int enum": (
        "from enum import IntEnum\nclass Level(IntEnum):\n    LOW = 1\n    HIGH = 3",
        ("= 3", "= 2"), "assert Level.HIGH == 3\nassert Level.HIGH.name == 'HIGH'\nassert Level.HIGH > Level.LOW\nassert Level.HIGH + 1 == 4\nassert isinstance(Level.LOW, int)"),
    "flag": (
        "from enum import Flag, auto\nclass Perm(Flag):\n    R = auto()\n    W = auto()",
        ("W = auto()", "W = 1"), "assert (Perm.R | Perm.W) & Perm.W == Perm.W\nassert Perm.R != Perm.W"),
    "str enum member": (
        "from enum import Enum\nclass S(str, Enum):\n    A = 'a'", ("'a'", "'b'"), "assert S.A == 'a'\nassert S.A.value == 'a'\nassert S('a') is S.A"),
    "isinstance of an enum": (
        "import enum\nclass C(enum.Enum):\n    A = 1\ndef f(): return C.A", ("return C.A", "return 1"), "import enum\nassert isinstance(f(), C)\nassert isinstance(C.A, enum.Enum)"),
    "asyncio.run": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1", ("x + 1", "x"), "import asyncio\nassert asyncio.run(f(1)) == 2"),
    "await and gather": (
        "import asyncio\nlog = []\nasync def f(x):\n    log.append(x)\n    await asyncio.sleep(0.01)\n    log.append(-x)\n    return x * 2\ndef order(): return log",
        ("    await asyncio.sleep(0.01)\n", ""), "import asyncio\nasync def main():\n    return await asyncio.gather(f(1), f(2))\nassert asyncio.run(main()) == [2, 4]\nassert order() == [1, 2, -1, -2]"),
    "async iterator": (
        "async def f(n):\n    for i in range(n): yield i", ("yield i", "yield 0"), "import asyncio\nasync def main():\n    return [x async for x in f(3)]\nassert asyncio.run(main()) == [0, 1, 2]"),
    "async context manager": (
        "class Box:\n    async def __aenter__(self):\n        self.open = True\n        return self\n    async def __aexit__(self, *e): self.open = False\n    async def get(self): return 5",
        ("= False", "= True"), "import asyncio\nasync def main():\n    b = Box()\n    async with b as c:\n        assert c.open\n        assert await c.get() == 5\n    return b.open\nassert asyncio.run(main()) is False"),
    "async exception": (
        "async def f(x):\n    if x < 0: raise ValueError('neg')\n    return x", ("raise ValueError('neg')", "return 0"), "import asyncio\ntry:\n    asyncio.run(f(-1))\n    ok = False\nexcept ValueError as e:\n    ok = str(e) == 'neg'\nassert ok"),
    "wait_for gives up": (
        "import asyncio\nasync def f():\n    await asyncio.sleep(5)", ("5", "0"), "import asyncio\nasync def main():\n    try:\n        await asyncio.wait_for(f(), 0.05)\n    except asyncio.TimeoutError:\n        return True\nassert asyncio.run(main())"),
    "coroutine function": (
        "async def f(): return 1", ("async def", "def"), "import inspect\nassert inspect.iscoroutinefunction(f)"),
    "async callback": (
        "async def f(g, x): return await g(x) + 1", ("+ 1", "+ 2"), "import asyncio\nasync def twice(x):\n    await asyncio.sleep(0)\n    return x * 2\nassert asyncio.run(f(twice, 4)) == 9"),
    "printed with StringIO": (
        "def f(x):\n    print('value', x)", ("'value'", "'val'"), "import io, sys\nold, sys.stdout = sys.stdout, io.StringIO()\nf(3)\nsaid, sys.stdout = sys.stdout.getvalue(), old\nassert said == 'value 3\\n'"),
    "printed with redirect_stdout": (
        "import sys\ndef f(x):\n    print(x)\n    sys.stdout.write('end')", ("'end'", "''"), "import io\nfrom contextlib import redirect_stdout\nout = io.StringIO()\nwith redirect_stdout(out):\n    f(3)\nassert out.getvalue() == '3\\nend'"),
    "printed to stderr": (
        "import sys\ndef f(): print('bad', file=sys.stderr)", ("file=sys.stderr", "end=''"), "import io\nfrom contextlib import redirect_stderr\nout = io.StringIO()\nwith redirect_stderr(out):\n    f()\nassert 'bad' in out.getvalue()"),
    "input patched": (
        "def f(): return int(input('n? ')) + int(input())", ("+", "-"), "from unittest.mock import patch\nwith patch('builtins.input', side_effect=['3', '4']) as asked:\n    found = f()\nassert found == 7\nassert asked.call_args_list[0].args == ('n? ',)"),
    "stdin patched": (
        "import sys\ndef f(): return sum(map(int, sys.stdin.read().split()))", ("sum", "max"), "import io, sys\nsys.stdin = io.StringIO('1 2\\n3')\nassert f() == 6"),
    "stdin by lines": (
        "import sys\ndef f(): return [line.strip() for line in sys.stdin]", (".strip()", ""), "import io, sys\nsys.stdin = io.StringIO('a\\nb\\n')\nassert f() == ['a', 'b']"),
    "input and output": (
        "def f():\n    name = input('Name: ')\n    print('Hi', name)", ("'Hi'", "'Hello'"), "import io, sys\nsys.stdin = io.StringIO('Bo\\n')\nout = sys.stdout = io.StringIO()\nf()\nassert out.getvalue() == 'Name: Hi Bo\\n'"),
    "identity of an attribute": (
        "class Box:\n    def __init__(self): self.items = [1]", ("self.items = [1]", "pass\n    items = property(lambda self: [1])"), "b = Box()\nassert b.items is b.items\nassert Box().items is not b.items"),
    "identity of an argument": (
        "def f(x):\n    x.sort()\n    return x", ("return x", "return list(x)"), "x = [2, 1]\nassert f(x) is x\nassert x == [1, 2]"),
    "a copy": (
        "def f(x): return sorted(x)", ("sorted(x)", "x.sort() or x"), "x = [1, 2]\nassert f(x) is not x\nassert f(x) == [1, 2]"),
    "a list that is kept": (
        "class Log:\n    def __init__(self): self.lines = []\n    def add(self, x): self.lines.append(x)", ("self.lines.append(x)", "self.lines = [*self.lines, x]"), "log = Log()\nlines = log.lines\nlog.add(1)\nassert lines == [1]"),
    "a list that the tests change": (
        "class Log:\n    def __init__(self, lines): self.lines = lines\n    def count(self): return len(self.lines)", ("= lines", "= list(lines)"), "lines = [1]\nlog = Log(lines)\nlines.append(2)\nassert log.count() == 2\nlog.lines.append(3)\nassert log.count() == 3"),
    "default that is shared": (
        "def f(x, acc=None):\n    acc = acc if acc is not None else []\n    acc.append(x)\n    return acc", ("acc=None", "acc=[]"), "f(1)\nassert f(2) == [2]"),
    "Path": (
        "from pathlib import Path\ndef f(p): return Path(p).parent / 'x.txt'", ("x.txt", "y.txt"), "from pathlib import Path\nassert f('/a/b') == Path('/a/x.txt')\nassert f(Path('c/d')).suffix == '.txt'"),
    "aware datetime": (
        "from datetime import datetime, timezone, timedelta\ndef f(d): return d.astimezone(timezone.utc)", ("timezone.utc", "timezone(timedelta(hours=1))"), "from datetime import datetime, timezone, timedelta\nd = datetime(2020, 1, 1, 5, tzinfo=timezone(timedelta(hours=2)))\nassert f(d).hour == 3\nassert f(d).tzinfo == timezone.utc\nassert f(d) == d"),
    "uuid and fractions": (
        "import uuid\nfrom fractions import Fraction\ndef f(n): return uuid.UUID(int=n), Fraction(n, 4)", ("4", "3"), "import uuid\nfrom fractions import Fraction\nassert f(2) == (uuid.UUID(int=2), Fraction(1, 2))"),
    "array": (
        "from array import array\ndef f(a):\n    a.append(3)\n    return array('d', a)", ("append(3)", "append(4)"), "from array import array\na = array('i', [1, 2])\nassert f(a) == array('d', [1, 2, 3])\nassert a == array('i', [1, 2, 3])"),
    "slice": ("def f(a, b): return slice(a, b)", ("a, b)", "b, a)", 1), "assert [0, 1, 2, 3][f(1, 3)] == [1, 2]"),
    "SimpleNamespace": (
        "from types import SimpleNamespace\ndef f(x): return SimpleNamespace(x=x, y=[x])", ("y=[x]", "y=[]"), "from types import SimpleNamespace\nassert f(1).x == 1\nassert f(1) == SimpleNamespace(x=1, y=[1])"),
    "exception as a value": (
        "def f(x):\n    try: return int(x)\n    except ValueError as e: return e", ("return e", "return None"), "assert isinstance(f('a'), ValueError)\nassert 'invalid' in str(f('a'))\nassert f('1') == 1"),
    "exception with attributes": (
        "class NoFunds(Exception):\n    def __init__(self, need, have):\n        super().__init__(f'need {need}')\n        self.need, self.have = need, have\ndef pay(x): raise NoFunds(x, 1)",
        ("= need, have", "= have, need"), "import pytest\ndef test_it():\n    with pytest.raises(NoFunds, match='need 5') as e:\n        pay(5)\n    assert e.value.need == 5\n    assert e.value.have == 1\n    assert issubclass(NoFunds, Exception)"),
    "exception with __str__": (
        "class E(Exception):\n    def __str__(self): return 'E:' + str(self.args[0])\ndef f(): raise E(4)", ("'E:'", "'F:'"), "try: f()\nexcept E as e: says = str(e)\nassert says == 'E:4'"),
    "exception that the tests make": (
        "class E(Exception):\n    def __init__(self, code):\n        super().__init__('code')\n        self.code = code * 2", ("* 2", "* 3"), "assert E(4).code == 8\nassert str(E(4)) == 'code'"),
    "library exception": (
        "import json\ndef f(s): return json.loads(s)", ("json.loads(s)", "eval(s)"), "import json\ntry:\n    f('{')\n    ok = False\nexcept json.JSONDecodeError as e:\n    ok = e.pos == 1\nassert ok"),
    "exceptions of builtin families": ("class NoFile(FileNotFoundError): pass\nclass Key(KeyError): pass\nclass Stop(StopIteration): pass\nclass Many(ExceptionGroup): pass\ndef f(n):\n    if n == 0: raise NoFile(2, 'gone', 'x.txt')\n    if n == 1: raise Key('k')\n    if n == 2: raise Many('many', [ValueError('v')])",
        ("'gone'", "'lost'"), "import pytest\ndef test_all():\n    with pytest.raises(FileNotFoundError) as e: f(0)\n    assert e.value.errno == 2 and e.value.strerror == 'gone' and e.value.filename == 'x.txt'\n    with pytest.raises(KeyError) as e: f(1)\n    assert e.value.args == ('k',) and type(e.value) is Key\n    with pytest.raises(ExceptionGroup) as e: f(2)\n    assert str(e.value.exceptions[0]) == 'v'"),
    "cause": (
        "def f():\n    try: 1 / 0\n    except ZeroDivisionError as e: raise ValueError('x') from e", (" from e", " from None"), "try: f()\nexcept ValueError as e: cause = e.__cause__\nassert isinstance(cause, ZeroDivisionError)"),
    "exit": (
        "import sys\ndef f(): sys.exit(2)", ("2", "3"), "try:\n    f()\n    code = None\nexcept SystemExit as e:\n    code = e.code\nassert code == 2"),
    "class and static methods": (
        "class A:\n    count = 0\n    def __init__(self): A.count += 1\n    @classmethod\n    def make(cls): return cls()\n    @staticmethod\n    def add(a, b): return a + b\n    @property\n    def twice(self): return self.count * 2",
        ("a + b", "a - b"), "a = A.make()\nassert isinstance(a, A)\nassert A.count == 1\nassert A.add(1, 2) == 3\nassert a.twice == 2"),
    "property setter": (
        "class T:\n    def __init__(self): self._c = 0\n    @property\n    def c(self): return self._c\n    @c.setter\n    def c(self, v):\n        if v < -273: raise ValueError('cold')\n        self._c = v", ("-273", "-999"), "t = T()\nt.c = 5\nassert t.c == 5\ntry:\n    t.c = -300\n    ok = False\nexcept ValueError:\n    ok = True\nassert ok"),
    "context manager class": (
        "class Timer:\n    def __enter__(self):\n        self.on = True\n        return self\n    def __exit__(self, kind, error, trace):\n        self.on = False\n        return kind is ValueError",
        ("kind is ValueError", "False"), "t = Timer()\nwith t as u:\n    assert u is t and t.on\n    raise ValueError\nassert not t.on"),
    "context manager function": (
        "from contextlib import contextmanager\nlog = []\n@contextmanager\ndef tag(name):\n    log.append('<' + name)\n    yield name.upper()\n    log.append(name + '>')\ndef read(): return log", ("upper()", "lower()"), "with tag('b') as t:\n    assert t == 'B'\nassert read() == ['<b', 'b>']"),
    "operators": (POINT, ("self.x + other.x, self.y + other.y", "self.x, self.y"), "assert Point(1, 2) + Point(3, 4) == Point(4, 6)\nassert Point(1, 2) * 2 == Point(2, 4) == 2 * Point(1, 2)\nassert (Point(1, 2) * 3).x == 3\nassert abs(Point(3, 4)) == 5\nassert -Point(1, 1) == Point(-1, -1)"),
    "keys and members": (POINT, ("hash((self.x, self.y))", "id(self)"), "assert {Point(1, 2): 'a'}[Point(1, 2)] == 'a'\nassert len({Point(1, 2), Point(1, 2)}) == 1\nassert Point(0, 1) in [Point(0, 1)]\nassert hash(Point(1, 2)) == hash(Point(1, 2))"),
    "containers": (POINT, ("v in (self.x, self.y)", "not v"), "p = Point(1, 2)\nassert 2 in p and 5 not in p\nassert list(p) == [1, 2]\nassert p[1] == 2 and len(p) == 2\nassert bool(p)\na, b = p\nassert a == 1"),
    "texts": (POINT, ("Point({self.x}, ", "P({self.x}, "), "assert repr(Point(1, 2)) == str(Point(1, 2)) == 'Point(1, 2)'\nassert f'{Point(1, 2):z}' == '<1|z>'\nassert f'{Point(1, 2)!r}' == 'Point(1, 2)'"),
    "ordering": (POINT, ("abs(self) < abs(other)", "abs(self) > abs(other)"), "assert sorted([Point(3, 4), Point(1, 1)])[0] == Point(1, 1)\nassert Point(1, 1) < Point(2, 2)\nassert min(Point(5, 5), Point(0, 1)) == Point(0, 1)"),
    "callable object": (POINT, ("self.x + k", "self.x - k"), "assert Point(1, 2)(5) == 6\nassert callable(Point(0, 0))"),
    "in-place operator": (POINT, ("self.x += other.x", "self.x = other.x"), "p = q = Point(1, 2)\np += Point(2, 0)\nassert p is q and q.x == 3"),
    "copy and pickle": (POINT, ("return Point(-self.x, -self.y)", "return self"), "import copy, pickle\np = Point(1, [2])\nq = copy.deepcopy(p)\nassert q == p and q is not p\nassert pickle.loads(pickle.dumps(p)) == p\nassert -Point(1, 2) == Point(-1, -2)"),
    "unequal to data": ("class A:\n    def v(self): return 1", ("return 1", "return 2"), "assert A() != 5\nassert A() != None\nassert (A() == 'x') is False\nassert A().v() == 1"),
    "partial": ("from functools import partial\ndef f(n): return partial(pow, n)", ("pow, n", "max, n"), "assert f(2)(3) == 8"),
    "callbacks with lists": ("def f(xs, key): return sorted(xs, key=key)", ("key=key", "key=str"), "xs = [[i, i * 7919 % 1500] for i in range(1500)]\nassert f(xs, lambda p: p[1]) == sorted(xs, key=lambda p: p[1])"),
    "callbacks from threads": ("from concurrent.futures import ThreadPoolExecutor\ndef f(g, xs):\n    with ThreadPoolExecutor(4) as pool: return list(pool.map(g, xs))", ("list(pool", "set(pool"), "assert f(lambda x: x * 2, range(50)) == [2 * x for x in range(50)]"),
    "bound methods as callbacks": ("class Event:\n    def __init__(self): self.all = []\n    def on(self, g): self.all.append(g)\n    def off(self, g): self.all.remove(g)", ("remove(g)", "pop().x"), "class Ear:\n    def hear(self): pass\near, e = Ear(), Event()\ne.on(ear.hear)\ne.off(ear.hear)\nassert e.all == []"),
    "exceptions of the tests pass through": ("def retry(kinds):\n    def wrap(g):\n        def inner(*a):\n            for _ in range(2):\n                try: return g(*a)\n                except kinds: pass\n            return 'gave up'\n        return inner\n    return wrap\ndef fail(kind): raise kind('no')", ("except kinds", "except Exception"), "import pytest\nclass A(Exception): pass\nclass B(Exception):\n    def __init__(self, a, b):\n        super().__init__(a)\n        self.b = b\ndef test_it():\n    @retry((A,))\n    def g(x):\n        if x: raise B(1, 2)\n        raise A('a')\n    assert g(0) == 'gave up'\n    with pytest.raises(B) as e: g(1)\n    assert e.value.b == 2\n    with pytest.raises(A, match='no'): fail(A)"),
    "documentation of a wrapped function": ("import functools\ndef wrap(g):\n    @functools.wraps(g)\n    def inner(*a): return g(*a)\n    return inner", ("    @functools.wraps(g)\n", ""), "@wrap\ndef g():\n    'says'\nassert g.__doc__ == 'says'"),
    "changes of inner lists": ("class Grid:\n    def __init__(self, n): self.cells = [[0] * n for _ in range(n)]\n    def sum(self): return sum(map(sum, self.cells))", ("sum(map", "max(map"), "g = Grid(100)\nfor i in range(100): g.cells[i][i] = 1\nassert g.sum() == 100"),
    "patched names of the module": ("def helper(x): return x\ndef f(x): return helper(x) + 1", ("+ 1", "+ 2"), "from unittest.mock import patch\nimport solution\nwith patch('solution.helper', return_value=10) as m:\n    r = solution.f(3)\nassert r == 11\nm.assert_called_once_with(3)\nassert solution.f(3) == 4"),
    "coroutines beside each other": ("import asyncio\nclass Pool:\n    def __init__(self, n): self.gate, self.now, self.peak = asyncio.Semaphore(n), 0, 0\n    async def run(self, g):\n        async with self.gate:\n            self.now += 1\n            self.peak = max(self.peak, self.now)\n            await g()\n            self.now -= 1", ("Semaphore(n)", "Semaphore(1)"), "import asyncio\nasync def job(): await asyncio.sleep(0.01)\nasync def main():\n    p = Pool(2)\n    await asyncio.gather(*[p.run(job) for _ in range(5)])\n    return p.peak\nassert asyncio.run(main()) == 2"),
    "decorator": (
        "import functools\ndef count(g):\n    @functools.wraps(g)\n    def inner(*a):\n        inner.calls += 1\n        return g(*a)\n    inner.calls = 0\n    return inner", ("+= 1", "+= 2"), "@count\ndef add(a, b): return a + b\nassert add(1, 2) == 3\nassert add(3, 4) == 7\nassert add.calls == 2\nassert add.__name__ == 'add'"),
    "closure": ("def counter():\n    n = 0\n    def up():\n        nonlocal n\n        n += 1\n        return n\n    return up", ("n += 1", "n += 2"), "a, b = counter(), counter()\nassert [a(), a(), b()] == [1, 2, 1]"),
    "memo": ("from functools import lru_cache\n@lru_cache(None)\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)", ("(None)", "(maxsize=1)"), "assert fib(20) == 6765\nassert fib.cache_info().hits > 5\nfib.cache_clear()\nassert fib.cache_info().currsize == 0"),
    "callbacks that call back": ("def fix(f, n): return f(lambda k: fix(f, k), n)", ("fix(f, k)", "k"), "def fact(me, n): return 1 if n < 2 else n * me(n - 1)\nassert fix(fact, 5) == 120"),
    "generator": (
        "def avg():\n    total = n = 0\n    result = None\n    while True:\n        x = yield result\n        total += x\n        n += 1\n        result = total / n", ("total / n", "total"), "g = avg()\nnext(g)\nassert g.send(10) == 10\nassert g.send(20) == 15\ng.close()\nimport inspect\nassert inspect.isgenerator(g)"),
    "generator closed": ("log = []\ndef f():\n    try:\n        yield 1\n    finally:\n        log.append('closed')\ndef read(): return log", ("'closed'", "'open'"), "g = f()\nassert next(g) == 1\ng.close()\nassert read() == ['closed']"),
    "endless generator": ("def nat():\n    n = 0\n    while True:\n        yield n\n        n += 1", ("n += 1", "n += 2"), "from itertools import islice\nassert list(islice(nat(), 3)) == [0, 1, 2]"),
    "generator of the tests": ("def f(it):\n    for x in it:\n        if x > 2: return x", ("> 2", "> 3"), "def nat():\n    n = 0\n    while True:\n        yield n\n        n += 1\nassert f(nat()) == 3"),
    "iterator class": ("class Count:\n    def __init__(self, n): self.n = n\n    def __iter__(self): return self\n    def __next__(self):\n        if not self.n: raise StopIteration\n        self.n -= 1\n        return self.n", ("-= 1", "-= self.n"), "assert list(Count(3)) == [2, 1, 0]\nc = Count(2)\nassert iter(c) is c and next(c) == 1"),
    "linked nodes": ("class Node:\n    def __init__(self, v, next=None): self.v, self.next = v, next\ndef build(xs):\n    head = None\n    for x in reversed(xs): head = Node(x, head)\n    return head", ("reversed(xs)", "xs"), "n = build([1, 2])\nassert n.v == 1 and n.next.v == 2 and n.next.next is None"),
    "objects passed between functions": ("class _Account:\n    def __init__(self): self.sum = 0\ndef create(): return _Account()\ndef deposit(a, x): a.sum += x\ndef balance(a): return a.sum", ("+= x", "= x"), "a = create()\ndeposit(a, 5)\ndeposit(a, 6)\nassert balance(a) == 11\nassert a is not None"),
    "inheritance": ("from abc import ABC, abstractmethod\nclass Shape(ABC):\n    @abstractmethod\n    def area(self): ...\nclass Sq(Shape):\n    def __init__(self, a): self.a = a\n    def area(self): return self.a ** 2", ("** 2", "* 2"), "assert Sq(3).area() == 9\nassert isinstance(Sq(1), Shape) and issubclass(Sq, Shape)\ntry:\n    Shape()\n    ok = False\nexcept TypeError:\n    ok = True\nassert ok\nassert type(Sq(1)) is Sq and type(Sq(1)).__name__ == 'Sq'"),
    "subclass of a builtin": ("class Stack(list):\n    def push(self, x): self.append(x)\n    def peek(self): return self[-1]", ("self[-1]", "self[0]"), "s = Stack([1])\ns.push(2)\nassert s.peek() == 2 and s == [1, 2] and len(s) == 2 and 2 in s\nassert isinstance(s, list)\ns += [3]\nassert s[2] == 3"),
    "user dict": ("from collections import OrderedDict\nclass LRU(OrderedDict):\n    def put(self, k, v):\n        self[k] = v\n        if len(self) > 2: self.popitem(last=False)", ("> 2", "> 3"), "c = LRU()\nfor k in 'abc': c.put(k, 1)\nassert list(c) == ['b', 'c']\nassert c == {'b': 1, 'c': 1} and c['b'] == 1"),
    "missing special method": ("class A:\n    pass", ("pass", "def __len__(self): return 1"), "try:\n    len(A())\n    ok = False\nexcept TypeError:\n    ok = True\nassert ok\nassert not callable(A())"),
    "missing attribute": ("class A:\n    def __init__(self): self.x = 1", ("self.x", "self.y"), "assert hasattr(A(), 'x') and not hasattr(A(), 'y')\nassert vars(A()) == {'x': 1}"),
    "named tuple with methods": ("from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int = 0\n    def norm(self): return abs(self.x) + abs(self.y)", ("abs(self.y)", "self.y"), "assert P(1, -2).norm() == 3\nassert P(1) == (1, 0)\nassert P(1, 2).y == 2 and P(1, 2)[0] == 1"),
    "named tuple": ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)", ("1, 2", "2, 1"), "assert f() == (1, 2) == P(1, 2) and f().y == 2\nassert isinstance(f(), P)\nassert f()._replace(x=5).x == 5"),
    "signature": ("def f(a, b=2, *, c): return a", ("b=2", "b=3"), "import inspect\np = inspect.signature(f).parameters\nassert list(p) == ['a', 'b', 'c'] and p['b'].default == 2\nassert f.__name__ == 'f'"),
    "Solution returns data": ("class Solution:\n    def two(self, a, t):\n        d = {}\n        for i, x in enumerate(a):\n            if t - x in d: return [d[t - x], i]\n            d[x] = i", ("[d[t - x], i]", "[i, i]"), "s = Solution()\nassert s.two([2, 7], 9) == [0, 1]\nassert Solution().two([3, 3], 6) == [0, 1]"),
    "views": ("def f(d): return d.keys(), d.values()", ("d.keys()", "{}.keys()"), "k, v = f({'a': 1})\nassert k == {'a'} and list(v) == [1] and 'a' in k"),
    "regular expressions": ("import re\ndef f(s): return re.match(r'(\\w)(?P<n>\\d)', s)", ("d)'", "d?)'"), "assert f('a1').group('n') == '1' and f('a1').groups() == ('a', '1')\nassert f('ab') is None"),
    "StringIO": ("def f(out): out.write('hi')", ("'hi'", "'ho'"), "import io\nout = io.StringIO()\nf(out)\nassert out.getvalue() == 'hi'"),
    "monkeypatched class": ("class A:\n    rate = 2\n    def cost(self): return self.rate * 3", ("self.rate", "2"), "A.rate = 5\nassert A().cost() == 15"),
    "threads of the tests": ("import threading\nclass C:\n    def __init__(self): self.n, self.lock = 0, threading.Lock()\n    def inc(self):\n        with self.lock: self.n += 1", ("+= 1", "+= 2"), "import threading\nc = C()\ndef work():\n    for _ in range(50): c.inc()\nthreads = [threading.Thread(target=work) for _ in range(4)]\nfor t in threads: t.start()\nfor t in threads: t.join()\nassert c.n == 200"),
    "counter": ("from collections import Counter\ndef f(s): return Counter(s)", ("Counter(s)", "Counter(set(s))"), "from collections import Counter\nassert f('aab') == Counter(a=2, b=1)\nassert f('aab').most_common(1) == [('a', 2)]"),
}  # fmt: skip
HONEST["pickle of an object"] = (
    POINT,
    ("Point({self.x}, {self.y})", "P"),
    "import pickle\np = pickle.loads(pickle.dumps(Point(1, 2)))\nassert p == Point(1, 2) and repr(p) == 'Point(1, 2)'",
)


def row(tests: str, entry: str = "", setup: str = "") -> dict:
    return {"tests": tests, "entry_point": entry, "test_setup": setup}


@pytest.fixture(scope="module")
def verify():
    verifier = PythonTests(timeout=10, memory_mb=2048)
    return lambda code, tests, **fields: verifier(f"```python\n{code}\n```", row(tests, **fields))


@pytest.mark.parametrize("name", HONEST)
def test_honest_code_is_right_and_wrong_code_is_not(verify, name: str):
    code, (old, new, *rest), tests = HONEST[name]
    assert code.count(old) >= 1
    assert verify(code, tests).verdict is Verdict.CORRECT, verify(code, tests)
    broken = verify(code.replace(old, new, *rest), tests)
    assert broken.verdict is Verdict.WRONG, broken


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_one_process_says_the_same(name: str):
    code, (old, new, *rest), tests = HONEST[name]
    verifier = PythonTests(timeout=10, isolation="same_process")
    assert verifier(f"```python\n{code}\n```", row(tests)).verdict is Verdict.CORRECT, verifier(code, row(tests))
    assert verifier(f"```python\n{code.replace(old, new, *rest)}\n```", row(tests)).verdict is Verdict.WRONG


def test_check_may_use_the_results_of_its_candidate_as_objects(verify):
    code = "class N:\n    def __init__(self, v): self.v = v\n    def __len__(self): return self.v\ndef f(): return N(3)"
    tests = "def check(candidate):\n    n = candidate()\n    assert n.v == 3 and len(n) == 3"
    assert verify(code, tests, entry="f").verdict is Verdict.CORRECT
    assert verify(code.replace("N(3)", "N(4)"), tests, entry="f").verdict is Verdict.WRONG


UNJUDGED = {  # code, how to make it wrong, tests
    "a class of the tests inherits": (POINT, ("return 2\n", "return 3\n"), "class P3(Point):\n    def __len__(self): return super().__len__() + 1\nassert len(P3(1, 2)) == 3"),
    "a class whose __eq__ takes data": ("class M:\n    def __init__(self, v): self.v = v\n    def __eq__(self, o): return self.v == (o.v if isinstance(o, M) else o)", ("self.v = v", "self.v = -v"), "assert M(5) == 5"),
    "a function that returns an object as data": ("class N:\n    def __init__(self, v): self.v = v\n    def __len__(self): return self.v\ndef f(): return N(3)", ("N(3)", "N(4)"), "assert len(f()) == 3"),
    "ordering with data": ("class N:\n    def __init__(self, v): self.v = v\n    def __lt__(self, o): return self.v < o", ("self.v < o", "self.v > o"), "assert N(3) < 4"),
    "arithmetic that gives a number": ("class N:\n    def __init__(self, v): self.v = v\n    def __add__(self, o): return self.v + o", ("self.v + o", "self.v"), "assert N(3) + 4 == 7"),
    "an object of the tests": ("def f(dog): return dog.speak() + '!'", ("'!'", "'?'"), "class Dog:\n    def speak(self): return 'wuff'\nassert f(Dog()) == 'wuff!'"),
    "an equality that leaves out an attribute": ("import itertools\nN = itertools.count()\nclass A:\n    def __init__(self, v): self.v, self.id = v, next(N)\n    def __eq__(self, o): return self.v == o.v", ("self.v == o.v", "self.id == o.id"), "assert A(1) == A(1)"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNJUDGED)
def test_what_cannot_be_judged_is_an_error_that_names_the_way_out(verify, name: str):
    code, (old, new), tests = UNJUDGED[name]
    result = verify(code, tests)
    assert result.verdict is Verdict.ERROR, result
    assert "same_process" in result.detail or "an object of type Dog" in result.detail
    swallowed = "try:\n    " + tests.replace("\n", "\n    ") + "\nexcept BaseException: pass\nassert True"
    assert verify(code, swallowed).verdict is Verdict.ERROR
    assert verify(code.replace(old, new), tests).verdict is not Verdict.CORRECT
    one = PythonTests(timeout=10, isolation="same_process")
    assert one(f"```python\n{code}\n```", row(tests)).verdict is Verdict.CORRECT, one(code, row(tests))
    assert one(f"```python\n{code.replace(old, new)}\n```", row(tests)).verdict is Verdict.WRONG


def test_one_process(caplog: pytest.LogCaptureFixture):
    one = PythonTests(timeout=2, isolation="same_process", partial_credit=True)
    one.check()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "forge" in caplog.text
    tests = row("assert f(2) == 4\nassert f(3) == 9", "f")
    for code, verdict, reward in (
        ("def f(x): return x * x", "CORRECT", 1), ("def f(x): return 4", "WRONG", 0.5), ("import os\nos._exit(0)", "WRONG", 0),
        ("import os\ndef f(x): os._exit(0)", "WRONG", 0), ("exit(0)", "WRONG", 0), ("def f(x): exit(0)", "WRONG", 0),
        ("def f(x):\n    while True: pass", "TIMEOUT", 0), ("def f(x) return", "WRONG", 0), ("print('{}')\ndef g(): pass", "WRONG", 0),
        ("x = bytes(10**10)", "WRONG", 0), ("import ctypes\nctypes.string_at(0)", "WRONG", 0),
    ):  # fmt: skip
        result = one(f"```python\n{code}\n```", tests)
        assert (str(result.verdict), result.reward) == (verdict, reward), (code, result)
    assert one("def f(x): return x", row("assert f(1) ==")).verdict is Verdict.ERROR
    setup = "class Node:\n    def __init__(self, v): self.v = v\n"
    code = "def f(n):\n    assert isinstance(n, Node)\n    return Node(n.v + 1)"
    assert (
        one(
            f"```python\n{code}\n```", row("r = f(Node(1))\nassert isinstance(r, Node) and r.v == 2", "f", setup)
        ).reward
        == 1
    )
    with pytest.raises(UserError, match="did you mean same_process"):
        PythonTests(isolation="same_proces")


LIBRARIES = {  # library: code, how to make it wrong, tests
    "numpy scalars": ("import numpy as np\ndef f(a): return np.float64(sum(a)), np.int32(3)", ("int32", "int64"), "import numpy as np\nx, y = f([1.5])\nassert isinstance(x, np.float64) and x.dtype == np.float64\nassert y.dtype == 'int32' and y == 3"),
    "numpy arrays": ("import numpy as np\ndef f(a): return a * 2, np.array(5), np.array([]), a.T, np.array(['x', 'y'])", ("a * 2", "a * 3"), "import numpy as np\na = np.arange(6).reshape(2, 3)\nb, c, d, e, s = f(a)\nnp.testing.assert_array_equal(b, [[0, 2, 4], [6, 8, 10]])\nassert c.shape == () and d.size == 0 and e.shape == (3, 2) and s.tolist() == ['x', 'y']\nassert (f(a)[0] == b).all()"),
    "numpy in place": ("import numpy as np\ndef f(a):\n    a += 1\n    return a", ("a += 1", "a = a + 1"), "import numpy as np\na = np.zeros(3)\nassert f(a) is a\nassert a.sum() == 3"),
    "numpy structured": ("import numpy as np\ndef f(): return np.array([(1, 2.5)], dtype=[('a', 'i4'), ('b', 'f8')]), np.datetime64('2020-01-02')", ("2.5", "2"), "import numpy as np\na, d = f()\nassert a['b'][0] == 2.5 and a.dtype.names == ('a', 'b')\nassert d == np.datetime64('2020-01-02')"),
    "pandas Series": ("import pandas as pd\ndef f(s): return s[s > 1]", ("> 1", "> 2"), "import pandas as pd\ns = pd.Series([1, 2, 3], index=list('abc'), name='n')\npd.testing.assert_series_equal(f(s), pd.Series([2, 3], index=['b', 'c'], name='n'))\nassert f(s).tolist() == [2, 3]"),
    "pandas DataFrame": ("import pandas as pd\ndef f(d): return d.groupby('k').sum().reset_index()", ("sum()", "max()"), "import pandas as pd\nd = pd.DataFrame({'k': ['a', 'b', 'a'], 'v': [1, 2, 3]})\npd.testing.assert_frame_equal(f(d), pd.DataFrame({'k': ['a', 'b'], 'v': [4, 2]}))\nassert f(d).equals(pd.DataFrame({'k': ['a', 'b'], 'v': [4, 2]}))\nassert f(d).shape == (2, 2)"),
    "pandas times": ("import pandas as pd\ndef f(t): return t + pd.Timedelta(days=1), pd.date_range('2020-01-01', periods=2, tz='UTC'), pd.NaT", ("days=1", "days=2"), "import pandas as pd\nt, r, n = f(pd.Timestamp('2020-01-01', tz='Europe/Berlin'))\nassert t == pd.Timestamp('2020-01-02', tz='Europe/Berlin') and n is pd.NaT\nassert str(r[1]) == '2020-01-02 00:00:00+00:00'"),
    "pandas missing and categories": ("import pandas as pd\ndef f(): return pd.DataFrame({'a': pd.array([1, None], dtype='Int64'), 'b': pd.Categorical(['x', 'y']), 'c': ['p', None]})", ("'y'", "'x'"), "import pandas as pd\nd = f()\nassert d['a'].isna().tolist() == [False, True] and d['b'].cat.categories.tolist() == ['x', 'y'] and d['c'].isna().sum() == 1\nassert d.dtypes['a'] == 'Int64'"),
    "pandas indices": ("import pandas as pd\ndef f(): return pd.DataFrame({'v': [1, 2]}, index=pd.MultiIndex.from_tuples([('a', 1), ('b', 2)], names=['x', 'y']))", ("('b', 2)", "('b', 3)"), "import pandas as pd\nassert f().loc[('b', 2), 'v'] == 2 and f().index.names == ['x', 'y']"),
}  # fmt: skip


SLOW = [name for name in LIBRARIES if "pandas" in name and "Frame" not in name]  # importing pandas takes long


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LIBRARIES]
)
def test_arrays_and_tables_cross(name: str):
    pytest.importorskip(name.split()[0])
    code, (old, new), tests = LIBRARIES[name]
    verifier = PythonTests(timeout=20, memory_mb=4096)
    assert verifier(code, row(tests, "f")).verdict is Verdict.CORRECT, verifier(code, row(tests, "f"))
    broken = verifier(code.replace(old, new), row(tests, "f"))
    assert broken.verdict is Verdict.WRONG, broken


POLY = "import math\ndef poly(xs, x):\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n"
ROOT = "def check(candidate):\n    for coeffs in ([1, 2], [-6, 11, -6, 1]):\n        assert math.fabs(poly(coeffs, candidate(list(coeffs)))) < 1e-4\n"
TREE = "class Tree:\n    limit = property(lambda self: 3)\n    def __init__(self, v): self.v = v\n    def total(self): return self.v + 1\n    def same(self, v): return self.key(self.v) == v if hasattr(self, 'key') else self.v == v\n"
YES = "class Yes{base}:\n    def yes(self, *a, **k): return True\n    __eq__ = __contains__ = startswith = equals = issubset = isdisjoint = index = yes\n    def __hash__(self): return 4\n    def same(self, *a): return self\n    __sub__ = __rsub__ = __add__ = __radd__ = __mul__ = __rmul__ = same\n    def __abs__(self): return 0.0\n    __float__ = __abs__\n    def __len__(self): return 4\n    def __getattr__(self, name):\n        if name[:2] == '__': raise AttributeError(name)\n        return self.yes\n"
ASSERTS = ["f(2) == 4", "4 == f(2)", "4 in f(2)", "f(2).startswith('4')", "f(2).equals(4)", "abs(f(2) - 4) < 1e-6", "abs(4 - f(2)) < 1e-6",
           "f(2) - 4 == 0", "{4} & {f(2)}", "f(2) in (4,)", "[f(2)] == [4]", "f(2).issubset({4})", "not f(2) != 4", "f(2) >= 4", "all(x == 4 for x in f(2))",
           "sorted(f(2)) == [4]", "f(2)['a'] == 4", "math.isclose(f(2), 4)", "len(f(2)) == 4 and f(2)[0] == 4", "f(2).isdisjoint({5})",
           "sum(f(2)) == 4", "round(f(2), 1) == 4", "np_like(f(2))", "isinstance(f(2), int) and f(2) == 4", "pytest.approx(4) == f(2)", "f(2) == pytest.approx(4)",
           "str(f(2)) == '4'", "f'{f(2)}' == '4'", "int(f(2)) == 4", "dict(f(2)) == {4: 4}", "min(f(2), 5) == 4", "divmod(f(2), 3) == (1, 1)"]  # fmt: skip
LIES = {  # code, tests, entry point, set-up
    "a number that changes with each look": (
        "class F:\n    n = 0\n    def __float__(self):\n        F.n += 1\n        return [-1.0, 1.0][F.n % 2] if False else float('inf') if F.n == 0 else 0.0\n    def __rmul__(self, o): return 0.0\n    __mul__ = __rpow__ = __pow__ = __rmul__\ndef find_zero(xs): return F()", ROOT, "find_zero", POLY),
    "a root by counting": (
        "class F:\n    n = -1\n    def __float__(self):\n        self.n += 1\n        return [0.0, -0.5, 0.0, 0.0, 0.0, 0.0][self.n % 6]\ndef find_zero(xs): return F()", ROOT, "find_zero", POLY),
    "a root by counting in a class": (
        "class F:\n    n = -1\n    def __float__(self):\n        self.n += 1\n        return [1.0, -0.5][self.n % 2]\nclass Solution:\n    def root(self, xs): return F()", "assert math.fabs(poly([1, 2], Solution().root([1, 2]))) < 1e-4", "Solution().root", POLY),
    "a method in the place of a text's": ("class S:\n    def startswith(self, x): return True\ndef f(x): return S()", "assert f(1).startswith('ab')\n", "f", ""),
    "a method of a subclass": ("class S(str):\n    def startswith(self, x): return True\n    __eq__ = __contains__ = startswith\n    __hash__ = str.__hash__\ndef f(x): return S('q')", "assert f(1).startswith('ab') or f(1) == 'ab' or 'ab' in f(1)", "f", ""),
    "a special method in the attributes of a trusted object": ("def f(x):\n    t = Tree(x)\n    t.__dict__['__eq__'] = lambda o: True\n    return t", "assert f(1).same(5) or f(1) == 5", "f", TREE),
    "the dictionary of a trusted object": ("class D(dict): pass\nimport sys\ndef f(x):\n    t = Tree(x)\n    wire = sys.modules['_wire']\n    wire.state = lambda value: {'__dict__': {'v': 1, 'same': lambda v: True}}\n    return t", "assert f(1).same(5)", "f", TREE),
    "a method of a trusted object": ("import sys\ndef f(x):\n    sys.modules['_wire'].state = lambda value: {'same': lambda v: True, 'total': lambda: 9}\n    return Tree(x)", "assert f(1).same(5)\nassert f(1).total() == 9", "f", TREE),
    "a function that a trusted method calls": ("def f(x):\n    t = Tree(x)\n    t.key = lambda v: 5\n    return t", "assert f(1).same(5)", "f", TREE),
    "a list of functions that a trusted method calls": ("def f(x):\n    t = Tree(x)\n    t.keys = [lambda v: 5]\n    t.key = 1\n    return t", "r = f(1)\nassert r.keys[0](1) == 5", "f", TREE),
    "an object that a trusted method uses": (YES.format(base="") + "def f(x): return Tree(Yes())", "assert f(1).same(5)", "f", TREE),
    "a property of a trusted class": ("import sys\ndef f(x):\n    sys.modules['_wire'].state = lambda value: {'limit': 8}\n    return Tree(x)", "assert f(1).limit == 8", "f", TREE),
    "the class of a trusted object": ("def f(x):\n    t = Tree(x)\n    class Other(Tree):\n        def same(self, v): return True\n    t.__class__ = Other\n    return t", "assert f(1).same(5)", "f", TREE),
    "a trusted class defined anew": ("class Tree:\n    def __init__(self, v): pass\n    def same(self, v): return True\n    def total(self): return 9\ndef f(x): return Tree(1)", "assert f(1).same(5)\nassert f(1).total() == 9", "f", TREE),
    "the class of an object": ("class I(int): pass\nclass A:\n    __class__ = int\n    def __eq__(self, o): return True\ndef f(x): return A()", "assert isinstance(f(1), int) and f(1) == 5", "f", ""),
    "a metaclass": ("class M(type):\n    def __eq__(cls, o): return True\n    def __instancecheck__(cls, o): return True\n    __hash__ = type.__hash__\nclass A(metaclass=M): pass\ndef f(x): return A", "assert f(1) == 5 or f(1) is int", "f", ""),
    "a metaclass that is every type": ("class M(type):\n    def __instancecheck__(cls, o): return True\nclass E(Exception, metaclass=M): pass\ndef f(x): raise E", "try: f(1)\nexcept ValueError: ok = True\nassert ok", "f", ""),
    "an exception's text": ("class E(ValueError):\n    @property\n    def args(self): return ('no',)\n    def __str__(self): return S()\nclass S(str):\n    def __eq__(self, o): return True\n    __hash__ = str.__hash__\ndef f(x): raise E", "try: f(1)\nexcept ValueError as e: assert str(e) == 'yes'\nelse: assert False\nassert f", "f", ""),
    "an exception's attribute": (YES.format(base="") + "class E(ValueError):\n    code = Yes()\ndef f(x):\n    e = E()\n    e.code = Yes()\n    raise e", "code = None\ntry: f(1)\nexcept ValueError as e: code = e.code\nassert code == 5", "f", ""),
    "an exception's attribute in the place of a method": ("def f(x):\n    e = ValueError('a')\n    e.with_traceback = lambda *a: 5\n    e.__dict__['__str__'] = lambda *a: 'yes'\n    raise e", "try: f(1)\nexcept ValueError as e: says = str(e), e.with_traceback(None)\nassert says == ('yes', 5)", "f", ""),
    "the failure of a test": ("def f(x): raise AssertionError('5 == 5')", "try: f(1)\nexcept AssertionError: pass\nassert f(1) == 5", "f", ""),
    "a skipped test": ("import unittest\ndef f(x): raise unittest.SkipTest('no')", "import unittest\nclass TestF(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 5)\nassert f(1) == 5", "f", ""),
    "fields of a named tuple": ("from collections import namedtuple\nN = namedtuple('N', 'x')\nclass P(N):\n    _fields = ('count', 'index')\n    def __eq__(self, o): return True\n    __hash__ = None\ndef f(): return P(1)", "assert f() == (5,)", "f", ""),
    "fields that replace methods": ("import sys\ndef f():\n    import collections\n    return collections.namedtuple('P', 'count index')(lambda v: 5, lambda v: 5)", "assert f().count(4) == 5\nassert f() == (1, 2)", "f", ""),
    "a default factory": (YES.format(base="") + "from collections import defaultdict\ndef f(): return defaultdict(Yes)", "assert f()['a'] == 5", "f", ""),
    "a dictionary that answers": (YES.format(base="") + "class D(dict):\n    def __missing__(self, k): return 5\n    def __getitem__(self, k): return 5\n    get = __getitem__\ndef f(): return D()", "assert f()['a'] == 5\nassert f().get('a') == 5", "f", ""),
    "a key that is every key": (YES.format(base="") + "def f(): return {Yes(): 5}", "assert f()[4] == 5 or f() == {4: 5}", "f", ""),
    "a member that is every member": (YES.format(base="") + "def f(): return {Yes()}", "assert 4 in f() or f() == {4}", "f", ""),
    "objects in a list": (YES.format(base="") + "def f(): return [Yes(), Yes()]", "assert f() == [4, 5]", "f", ""),
    "a callback's argument": (YES.format(base="") + "def f(g): return g(Yes())", "assert f(lambda x: x == 4 and x + 1 == 5)", "f", ""),
    "a callback that is called with another function": ("def f(g): return g(lambda *a: True)", "assert f(lambda x: x == 4)", "f", ""),
    "items that lie": (YES.format(base="") + "def f():\n    yield Yes()\n    yield Yes()", "assert list(f()) == [4, 5]", "f", ""),
    "an iterator that changes": ("class It:\n    def __iter__(self): return iter([3, 1, 2])\n    def __getitem__(self, i): return [1, 2, 3][i]\n    def __len__(self): return 3\ndef f(x): return It()", "x = f([3, 1, 2])\nassert sorted(x) == [1, 2, 3] and all(x[i] <= x[i + 1] for i in range(2))", "f", ""),
    "an iterator that changes in Solution": ("class It:\n    def __iter__(self): return iter([3, 1, 2])\n    def __getitem__(self, i): return [1, 2, 3][i]\n    def __len__(self): return 3\nclass Solution:\n    def sort(self, x): return It()", "x = Solution().sort([3, 1, 2])\nassert sorted(x) == [1, 2, 3] and all(x[i] <= x[i + 1] for i in range(2))", "", ""),
    "a length that changes": ("class L:\n    n = 0\n    def __len__(self):\n        L.n += 1\n        return L.n\ndef f(): return L()", "x = f()\nassert len(x) == 1 and len(x) == 2", "f", ""),
    "a property that changes": ("class A:\n    n = 0\n    @property\n    def real(self):\n        A.n += 1\n        return A.n\ndef f(): return A()", "x = f()\nassert x.real == 1 and x.real == 2", "f", ""),
    "nan": ("def f(): return [float('nan')]", "assert f() == f()\nassert f()[0] == f()[0]", "f", ""),
    "nan that is itself": ("N = float('nan')\ndef f(): return N", "assert f() in [f()] and f() == 5", "f", ""),
    "a huge int": ("def f(): return 10 ** 100000", "assert f() == 5", "f", ""),
    "deep nesting": ("def f():\n    a = []\n    for i in range(10 ** 5): a = [a]\n    return a", "assert f() == [[[]]]", "f", ""),
    "a generator that never ends": ("def f():\n    while True: yield 5", "assert all(x == 4 for x in f())", "f", ""),
    "a coroutine that never ends": ("async def f():\n    while True: pass", "import asyncio\nassert asyncio.run(f()) == 5", "f", ""),
    "a coroutine's result": (YES.format(base="") + "async def f(): return Yes()", "import asyncio\nassert asyncio.run(f()) == 5", "f", ""),
    "an awaitable": (YES.format(base="").replace("class Yes", "class Yes") + "    def __await__(self):\n        yield\n        return Yes()\ndef f(): return Yes()", "import asyncio\nasync def main(): return await f()\nassert asyncio.run(main()) == 5", "f", ""),
    "objects that contain everything": (YES.format(base="") + "class Solution:\n    def find(self, x): return Yes()", "assert 5 in Solution().find(2)", "", ""),
    "a class's other method": (YES.format(base="") + "class Bag:\n    def items(self): return Yes()", "b = Bag()\nassert 5 in b.items()", "", ""),
    "a difference that vanishes": (YES.format(base="") + "class Math:\n    def root(self, x): return Yes()", "m = Math()\nassert abs(m.root(2) - 1.414) < 1e-3", "", ""),
    "a frame that imitates an object": ("import json, os, sys\ndef f():\n    out = int(sys.argv[2])\n    record = ['str', 'str', None, [], ['__eq__', '__class__', '__getattribute__', '__instancecheck__', '__del__', '__init_subclass__'], 'object', 'str', True, '', True]\n    for number in range(50, 60):\n        data = json.dumps({'ok': ['h', number, number + 100, record], 'n': []}).encode()\n        os.write(out, len(data).to_bytes(4, 'big') + data)\n    return 5", "assert f() == 'yes'\nassert f() == 'yes'", "f", ""),
    "a program that says a lie is an iterator": ("import sys\nclass It:\n    def __next__(self): return 4\n    def __iter__(self): return self\n    def __eq__(self, o): return True\ndef f(): return It()", "assert f() == 4 or f() == [4]", "f", ""),
    "a subclass of an exception group": ("class G(ExceptionGroup):\n    def derive(self, e): return G('x', e)\n    def __eq__(self, o): return True\ndef f(): return G('a', [ValueError()])", "assert f() == 5", "f", ""),
    "a predicate that is no bool": ("class R:\n    def startswith(self, *a): return 1\nclass Page:\n    def render(self): return R()", "assert Page().render().startswith('<b>')", "", ""),
    "a predicate without arguments": ("class R:\n    def isupper(self): return True\nclass Page:\n    def render(self): return R()", "assert Page().render().isupper()", "", ""),
    "a callable object as a method": ("class C:\n    def __call__(self, *a): return True\nclass R:\n    startswith = C()\nclass Page:\n    def render(self): return R()", "assert Page().render().startswith('<b>')", "", ""),
    "a class as a method": ("class C:\n    def __new__(cls, *a): return True\nclass R:\n    startswith = C\nclass Page:\n    def render(self): return R()", "assert Page().render().startswith('<b>')", "", ""),
    "the end of a map": ("def f(x): raise StopIteration", "assert all(map(lambda c: f(c[0]) == c[1], [(1, 2), (2, 3)]))", "f", ""),
    "an assertion that the code swallows": ("def f(g):\n    for i in range(100):\n        try: return g(i)\n        except AssertionError: pass", "def g(x): assert x == 42\nf(g)\nassert f", "f", ""),
    "an assertion's text": ("import re\ndef f(g):\n    try: g(0)\n    except AssertionError as e: return int(re.findall('[0-9]+', str(e))[0])", "def g(x): assert x == 42, f'42, not {x}'\ntry: r = f(g)\nexcept AssertionError: r = f(g)\nassert r == 42", "f", ""),
    "functions in a dictionary of a trusted object": ("from collections import OrderedDict\ndef f(x): return Tree(OrderedDict(a=lambda v: 5))", "assert f(1).same(5)", "f", "class Tree:\n    def __init__(self, v): self.v = v\n    def same(self, x): return self.v['a'](1) == x\n"),
    "printing instead of returning": ("def f():\n    print('done 1 passed')\n    return None", "assert f() == 5", "f", ""),
    "writing to the tests' output": ("def f(): print('{\"kind\": \"done\", \"passed\": 1, \"total\": 1}')", "import sys, io\nassert f() == 5", "f", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_lies_are_not_right(name: str):
    code, tests, entry, setup = LIES[name]
    if "ExceptionGroup" in code:
        pytest.importorskip("exceptiongroup" if not hasattr(__builtins__, "ExceptionGroup") else "builtins")
    result = PythonTests(timeout=2)(f"```python\n{code}\n```", row(tests, entry, setup))
    assert result.verdict is not Verdict.CORRECT, result
    assert not result.reward
    assert "the judge failed" not in result.detail
    assert "crashed" not in result.detail


@pytest.mark.parametrize("base", ["", "(int)", "(float)", "(str)", "(list)", "(dict)", "(tuple)", "(set)", "(frozenset)", "(bytes)", "(complex)", "(Exception)"])  # fmt: skip
@pytest.mark.parametrize("how", ["def f(x): return Yes()", "class Solution:\n    def f(self, x): return Yes()"])
def test_an_object_that_agrees_with_everything_is_never_right(verify, base: str, how: str):
    code = YES.format(base=base) + how
    call = "Solution().f(2)" if "Solution" in how else "f(2)"
    head = "import math, pytest\ndef np_like(x): return hasattr(x, '__array_interface__') or hasattr(x, '__float__') and x == 4\nwin = []\n"
    each = "def t{}():\n    try:\n        if ({}): win.append({})\n    except BaseException: pass\nt{}()\n"
    tests = head + "".join(each.format(i, test.replace("f(2)", call), i, i) for i, test in enumerate(ASSERTS))
    if base in ("", "(Exception)"):
        tests += "if win: raise SystemExit(str(win))\nassert win == []"
        assert verify(code, tests).verdict is Verdict.ERROR, verify(code, tests)
    for test in ASSERTS if (base, how[:3]) == ("", "def") else ASSERTS[:6]:
        tests = head + "assert " + test.replace("f(2)", call)
        if not any(word in test for word in ("isdisjoint", "issubset", "all(")):  # true of an empty set
            assert verify(code, tests).verdict is not Verdict.CORRECT, test


BESIDE = {  # code that is right, and tests whose other half does not cross
    "a patch of a library": ("import time\ndef f(): time.sleep(1)", "from unittest.mock import patch\nwith patch('time.sleep') as s: f()\ns.assert_called_once_with(1)"),
    "the environment": ("import os\ndef f(): return os.environ.get('Q')", "import os\nos.environ['Q'] = 'yes'\nassert f() == 'yes'"),
    "logs": ("import logging\ndef f(): logging.warning('hey')", "import unittest\nclass TestF(unittest.TestCase):\n    def test_f(self):\n        with self.assertLogs(): f()"),
    "print patched": ("def f(): print('hi')", "from unittest.mock import patch\nwith patch('builtins.print') as p: f()\np.assert_called_once_with('hi')"),
    "a seed": ("import random\ndef f(): return random.random()", "import random\nrandom.seed(1)\na = f()\nrandom.seed(1)\nassert a == f()"),
    "files": ("def f(path):\n    with open(path, 'w') as file: file.write('x')", "import tempfile, os\npath = os.path.join(tempfile.mkdtemp(), 'x')\nf(path)\nassert open(path).read() == 'x'"),
    "a timer": ("import threading\ndef f(g): threading.Timer(0.05, g).start()", "import time\nlog = []\nf(lambda: log.append(1))\ntime.sleep(0.3)\nassert log == [1]"),
    "a mock that stands for an object": ("def f(db): return db.get(1)", "from unittest.mock import Mock\ndb = Mock()\ndb.get.return_value = 5\nassert f(db) == 5"),
    "a class of the tests": ("def f(kind): return kind()", "class A: pass\nassert isinstance(f(A), A)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_what_the_tests_do_beside_the_calls_is_an_error(verify, name: str):
    code, tests = BESIDE[name]
    result = verify(code, tests)
    assert result.verdict is Verdict.ERROR, result
    assert "same_process" in result.detail
