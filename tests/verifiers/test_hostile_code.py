"""Hostile code scores nothing, harms nothing, and ends in bounded time; code_rows/attacks.jsonl has more of it."""

# ruff: noqa: E501 - the attacks are easier to read in their own lines

import importlib.util
from functools import cache

import pytest

from rocm_ext.verifiers import PythonTests, Verdict

ROW = {"tests": "def test_solution():\n    assert f(2) == 4\n    assert f(3) == 9\n    assert f(-10) == 100",
       "entry_point": "f"}  # fmt: skip
SECONDS = 0.6
WRONG_F = "\ndef f(x):\n    return 5\n"
FORGERIES = {
    "exit": "exit(0)",
    "sys.exit in f": "import sys\ndef f(x): sys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "os._exit in f": "import os\ndef f(x): os._exit(0)",
    "keyboard interrupt": "def f(x): raise KeyboardInterrupt",
    "assertion error": "def f(x): raise AssertionError",
    "prints a pass": 'print(\'{"kind": "done", "passed": 3, "total": 3}\', flush=True)' + WRONG_F,
    "answers every call with every kind of message": """
import os, json, sys
fd = int(sys.argv[2])
for value in ([], True, {}, ["h", 0, "f", []], ["T", "exec"], ["r", 10**9], ["r", -1], ["o", "X", []], ["nt", "a b", [], []],
              ["np", "O", [1], "00"], ["B", "exec"], ["f", 0], ["D", "1e99"], [[[[[]]]]], ["i", "0x4"], {"passed": 3}):
    for message in ({"ok": value, "n": [["l", [4]]], "u": [[0, ["l", []]], [-1, 1], ["x"]]}, {"exc": value, "n": []},
                    {"op": "callback", "f": value, "a": [], "n": []}, {"ok": value, "n": value, "u": value}, [value]):
        data = json.dumps(message).encode()
        os.write(fd, len(data).to_bytes(4, "big") + data)
""" + WRONG_F,
    "a frame of 4 GB": "import os, sys\nos.write(int(sys.argv[2]), b'\\xff' * 100)" + WRONG_F,
    "deep JSON": "import os, sys\nd = b'[' * 500000\nos.write(int(sys.argv[2]), len(d).to_bytes(4, 'big') + d)" + WRONG_F,
    "patches json": """
import json
dumps = json.dumps
json.dumps = lambda value, **k: dumps({"ok": True, "n": [], "u": [], "passed": 3, "total": 3, "kind": "done"})
json.loads = lambda *a: {}
""" + WRONG_F,
    "patches the wire": """
import sys
for module in list(sys.modules.values()):
    for name in ("Codec", "Channel"):
        if hasattr(module, name): setattr(module, name, object)
    if hasattr(module, "Program"): module.Program.answer = lambda self, request: {"ok": True, "n": [], "u": []}
""" + WRONG_F,
    "counts calls": "n = 0\ndef f(x):\n    global n\n    n += 1\n    return [5, 9, 100][min(n, 2)]",
    "empties": "def f(*a, **k): return None",
    "syntax error": "```python\ndef f(x) return 4\n```",
    "null byte": "```python\ndef f(x):\n    return 4\x00\n```",
    "surrogate": "```python\nx = '\ud800'\n" + WRONG_F + "```",
}  # fmt: skip

DAMAGE = {
    "kills everything": "import os\ndef f(x):\n    os.kill(-1, 9)\n    os.kill(1, 9)\n    os.kill(os.getppid(), 9)\n    return 5",
    "forks without end": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "forks politely": "import os, time\ntry:\n    for i in range(10000): os.fork() or time.sleep(60)\nexcept OSError: pass"
                      + WRONG_F,
    "starts threads": "import threading, time\nfor i in range(10000): threading.Thread(target=time.sleep, args=(60,)).start()"
                      + WRONG_F,
    "fills the disk": "n = 0\nwhile True:\n    n += 1\n    open(f'/tmp/{n}', 'wb').write(bytes(10**7))",
    "fills the memory": "x = []\nwhile True: x.append(bytes(10**7))",
    "fills the memory in f": "def f(x):\n    return [0] * 10**12",
    "fills shared memory": "import os\nn = 0\nwhile True:\n    n += 1\n    open(f'/dev/shm/{n}', 'wb').write(bytes(10**7))",
    "returns too much": "def f(x): return [list(range(1000)) for i in range(10000)]",
    "returns without end": "import itertools\ndef f(x): return itertools.count()",
    "returns a cycle": "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "returns deeply": "def f(x):\n    a = ()\n    for i in range(100000): a = (a,)\n    return a",
    "recurses": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x + 1)",
    "crashes": "import ctypes\ndef f(x): return ctypes.string_at(0)",
    "sleeps in f": "import time\ndef f(x): time.sleep(1000)",
    "loops": "while True: pass",
    "loops in C": "def f(x): return 9 ** 9 ** 9",
    "ignores signals": """
import signal, time
for number in range(1, 65):
    try: signal.signal(number, lambda *a: None)
    except Exception: pass
while True:
    try: time.sleep(100)
    except BaseException: pass
""",
    "prints without end": "while True: print('x' * 100000)",
    "writes without end": "import os\nwhile True: os.write(2, b'x' * 100000)",
    "floods the judge": "import os, sys\nwhile True: os.write(int(sys.argv[2]), b'\\0\\0\\0\\2{}' * 1000)",
    "prints from threads": """
import threading, os
def shout():
    while True: os.write(int(__import__("sys").argv[2]), b"\\0\\0\\0\\2{}")
for i in range(8): threading.Thread(target=shout).start()
""" + WRONG_F,
    "daemonises": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(1000)\n    os._exit(0)"
                  + WRONG_F,
    "reads stdin": "input()",
    "opens sockets": """
import socket
for family, address in ((socket.AF_INET, ("1.1.1.1", 80)), (socket.AF_INET, ("127.0.0.1", 22))):
    with socket.socket(family) as s: s.connect(address)
def f(x): return x * x
""",
}  # fmt: skip


@cache
def verifier(timeout: float, partial_credit: bool) -> PythonTests:
    """One for all tests: its judge takes most of the time to start."""
    return PythonTests(timeout, partial_credit=partial_credit)


def verify(code: str, row: dict = ROW, timeout: float = 10, partial_credit: bool = False):
    return verifier(timeout, partial_credit)(
        code if code.startswith("```") else f"```python\n{code}\n```", row
    )


@pytest.mark.wide(always=12)
@pytest.mark.parametrize("name", FORGERIES)
def test_a_pass_cannot_be_forged(name: str):
    for partial in (False, True):
        result = verify(FORGERIES[name], partial_credit=partial)
        assert result.verdict in (Verdict.WRONG, Verdict.UNPARSED), result
        # an answer that is right for one of the three calls gets its share
        assert result.reward <= (2 / 3 if partial and "counts" in name else 0), result


@pytest.mark.wide(always=9)
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_bounded(name: str):
    result = verify(DAMAGE[name], timeout=SECONDS)
    assert result.verdict in (Verdict.WRONG, Verdict.TIMEOUT), result
    assert result.reward == 0


def test_modules_that_tests_forget_to_import():
    forged = "class math:\n    isclose = staticmethod(lambda *a, **k: True)\nisclose = math.isclose\ndef f(x): return 5.0"
    for test in ("assert math.isclose(f(2), 4)", "assert isclose(f(2), 4)"):
        assert verify(forged, {"tests": test, "entry_point": "f"}).verdict is Verdict.WRONG
        assert (
            verify("def f(x): return 4.0", {"tests": test, "entry_point": "f"}).verdict
            is Verdict.CORRECT
        )


def test_a_dead_program_does_not_pass_where_tests_swallow_all():
    noisy = (
        "import os\nprint('hello')\nos.write(1, b'x')\ndef f(x):\n    print(x)\n    return x * x\n"
    )
    for more in ("", "if __name__ == '__main__':\n    input()\n"):
        assert verify(noisy + more).verdict is Verdict.CORRECT
    tests = "n = 0\nfor i in range(3):\n    try: n += f(i) == i\n    except: n += 1\nassert n == 3"
    for code in ("import os\ndef f(x): os._exit(0)", "def f(x): raise SystemExit"):
        assert verify(code, {"tests": tests, "entry_point": "f"}).verdict is Verdict.WRONG


@pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="needs numpy")
def test_numpy_takes_no_memory_from_the_program():
    forged = "class A:\n    __array_interface__ = {'data': (0x400000, False), 'shape': (1,), 'typestr': '<i8', 'version': 3}\ndef f(x): return A()"
    row = {"tests": "import numpy as np\nassert np.array_equal(f(2), [4])", "entry_point": "f"}
    result = verify(forged, row)
    assert result.verdict is Verdict.WRONG
    assert "crashed" not in result.detail


def test_the_program_is_never_shown_what_is_expected():
    """A class with every operator records what it sees; it must never see what the tests expect."""
    spy = """
SEEN = []
class Spy:
    def __getattr__(self, name): SEEN.append(name); raise AttributeError(name)
for name in ("eq ne lt le gt ge add radd sub rsub mul rmul truediv rtruediv mod rmod pow rpow contains getitem call "
             "and or xor rand ror rxor matmul rmatmul divmod rdivmod instancecheck").split():
    def method(self, *args, name=name): SEEN.extend(map(repr, args)); raise TypeError(name)
    setattr(Spy, f"__{name}__", method)
def f(x): return Spy()
def seen():
    if any("1234" in s for s in SEEN): os._exit(0)
import os
"""
    expressions = ["f(2) == 1234", "1234 == f(2)", "f(2) + 1234", "1234 - f(2)", "f(2) < 1234", "1234 in [f(2)]",
                   "f(2) in [1234]", "{f(2): 1}.get(1234)", "divmod(f(2), 1234)", "f(2) @ 1234", "f(2) | 1234",
                   "abs(f(2) - 1234)", "[f(2)] < [1234]", "max(f(2), 1234)", "1234 in f(2)", "f(2)[1234]",
                   "f(2).index(1234)"]  # fmt: skip
    swallow = "try: {}\nexcept BaseException: pass\n"
    tests = "".join(map(swallow.format, expressions)) + "seen()\nassert f(2)\n"
    row = {"tests": tests, "entry_point": "f"}
    result = verify(spy, row)
    assert result.verdict is Verdict.WRONG, result
    assert "class Spy" in result.detail  # of a program that saw it and ended, the detail says that
    shown = "try: f(1234)\nexcept: pass\n" + tests
    sees = spy.replace("def f(x): ", "def f(x):\n    SEEN.append(str(x))\n    ")
    assert verify(sees, row | {"tests": shown}).reward == 0
