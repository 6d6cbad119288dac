"""A judge that stays warm: each verdict begins afresh, and whatever happens to one does not reach the next."""

# ruff: noqa: E501 - code in strings is easier to read in its own lines

import os
import signal
import time
from pathlib import Path

import pytest

from rocm_ext.sandbox.children import children_of, descendants
from rocm_ext.verifiers import Pool, PythonTests, Verdict
from tests.kit.processes import wait_for_end

SQUARE = "def f(x): return x * x"
ROW = {"tests": "assert f(3) == 9", "entry_point": "f"}
NODE = {"_component_": "rocm_ext.verifiers.PythonTests", "timeout": 5}


def row(tests: str) -> dict[str, str]:
    return {"tests": tests, "entry_point": "f"}


@pytest.fixture
def verifier() -> PythonTests:
    return PythonTests(timeout=5)


@pytest.mark.parametrize("sandbox", ["bubblewrap", "rlimits"])
def test_tests_leave_nothing_to_the_next(sandbox: str):
    verifier = PythonTests(timeout=5, sandbox=sandbox)
    leave = """
import decimal, math, os, sys, time
math.pi, sys.marked, os.environ["MARKED"] = 3, True, "1"
decimal.getcontext().prec = 3
sys.setrecursionlimit(500)
sys.path.append("/marked")
sys.meta_path.append("marked")
for folder in {os.getcwd(), "/dev/shm" if os.getcwd() == "/tmp" else os.getcwd()}:
    os.mkdir(folder + "/marked")
    open(folder + "/marked/file", "w").close()
    os.chmod(folder + "/marked", 0)
os.umask(0o777)
if os.fork() == 0:
    if os.getcwd() == "/tmp": os.setsid()
    time.sleep(1000)
os.chdir("/usr")
assert f(3) == 9
"""
    look = """
import decimal, math, os, sys
assert not hasattr(sys, "marked") and math.pi > 3.1 and "marked" not in sys.meta_path
assert "MARKED" not in os.environ
assert decimal.getcontext().prec == 28 and sys.getrecursionlimit() > 500 and "/marked" not in sys.path
assert not any("marked" in name for name in os.listdir(os.getcwd())) and os.getcwd() != "/usr" and os.umask(0) != 0o777
assert os.getcwd() != "/tmp" or not os.path.exists("/dev/shm") or os.listdir("/dev/shm") == []
assert os.getcwd() != "/tmp" or len([p for p in os.listdir("/proc") if p.isdigit()]) == 3
assert f(3) == 9
"""
    for tests in (look, leave, look, leave, look):
        result = verifier(SQUARE, row(tests))
        assert result.verdict is Verdict.CORRECT, result


@pytest.mark.wide(always=2)
@pytest.mark.parametrize("tests", [
    "import os, time\nos.kill(os.getppid(), 9)\ntime.sleep(60)\nassert f(3) == 9",
    "import os\nf(3)\nos.kill(os.getpid(), 11)\nassert f(3) == 9",
    "import os, time\nos.kill(os.getppid(), 19)\nassert f(3) == 9\ntime.sleep(60)",
    "assert f(3) == 9\nwhile True: pass",
    "x = []\nwhile f(3): x.append(bytes(10**7))\nassert f(3) == 9",
    "import os, time\nfor i in range(7):\n    if os.fork() == 0:\n        x = b'x' * (200 << 20)\n        time.sleep(60)\n"
    "time.sleep(60)\nassert f(3) == 9",
], ids=["kills the judge", "crashes", "stops the judge", "loops", "fills its memory", "fills all memory"])  # fmt: skip
def test_a_judge_that_ends_costs_one_verdict(tests: str):
    verifier = PythonTests(timeout=1.5)
    result = verifier(SQUARE, row(tests))
    assert result.verdict in (Verdict.ERROR, Verdict.TIMEOUT, Verdict.WRONG), result
    assert not result.reward
    assert result.detail
    assert verifier(SQUARE, ROW).verdict is Verdict.CORRECT


@pytest.mark.wide
def test_a_judge_outlives_programs_that_hang():
    verifier = PythonTests(timeout=0.7)
    for _ in range(2):
        before = set(children_of(os.getpid()))
        assert verifier(SQUARE, ROW).verdict is Verdict.CORRECT
        judge = set(children_of(os.getpid())) - before
        for hangs in ("def f(x):\n    while True: pass", "while True: pass"):
            assert verifier(hangs, ROW).verdict is Verdict.TIMEOUT
        assert verifier(SQUARE, ROW).verdict is Verdict.CORRECT
        assert judge
        assert judge <= set(children_of(os.getpid()))
        for pid in judge:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)


def test_the_program_gets_its_pipes_and_nothing_else(verifier: PythonTests):
    spy = """
import os, sys
FDS = [(int(n), os.readlink(f"/proc/self/fd/{n}")) for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]
PIPES = [int(n) for n in sys.argv[1:3]]
def f(x): return [n for n, to in FDS if n not in PIPES and to != "/dev/null"], [to.split(":")[0] for n, to in FDS if n in PIPES]
"""
    assert (
        verifier(f"```python\n{spy}```", row('assert f(0) == ([], ["pipe", "pipe"])')).verdict
        is Verdict.CORRECT
    )


def test_the_program_starts_without_imports(verifier: PythonTests):
    """Each of these modules takes from a tenth to twice the time in which the interpreter starts."""
    slow = "collections contextlib datetime enum functools inspect json os re types typing"
    code = f"import sys\nFOUND = [name for name in {slow!r}.split() if name in sys.modules]\ndef f(): return FOUND"
    result = verifier(code, row("assert f() == []"))
    assert result.verdict is Verdict.CORRECT, result


def test_the_program_and_the_tests_have_no_privileges(verifier: PythonTests):
    look = """
import os
def tries(call, *args):
    try: call(*args)
    except OSError: return "refused"
def privileges():
    status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
    caps = [int(status[name], 16) for name in ("CapEff", "CapPrm", "CapAmb")]
    ids = {*os.getresuid(), *os.getresgid(), *os.getgroups()}
    return caps, status["NoNewPrivs"].strip(), len(ids), 0 in ids, tries(os.setuid, 0), tries(os.setgroups, [0]), tries(os.chown, "/tmp", 0, 0)
"""
    wanted = ([0, 0, 0], "1", 1, False, "refused", "refused", "refused")
    tests = look.replace("privileges", "ours") + f"\nassert privileges() == ours() == {wanted!r}"
    result = verifier(f"```python\n{look}```", {"tests": tests})
    assert result.verdict is Verdict.CORRECT, result


@pytest.mark.wide
def test_many_verdicts_leave_no_descriptors_processes_or_memory(verifier: PythonTests):
    def judge_memory() -> int:
        pids = [pid for child in children_of(os.getpid()) for pid in descendants(child)]
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)

    for _ in range(5):
        verifier(SQUARE, ROW)
    time.sleep(0.2)
    before, memory = len(os.listdir("/proc/self/fd")), judge_memory()
    ends = "import os\nos._exit(0)", "syntax error", "def f(x): raise SystemExit"
    for code in (SQUARE, "def f(x): return 1", *ends) * 8:
        verifier(f"```python\n{code}\n```", ROW)
    time.sleep(0.2)
    assert len(os.listdir("/proc/self/fd")) == before
    assert judge_memory() < memory * 1.1
    verifiers = [PythonTests() for _ in range(3)]
    assert all(each(SQUARE, ROW).verdict is Verdict.CORRECT for each in verifiers)
    children = len(children_of(os.getpid()))
    del verifiers[:]
    assert len(children_of(os.getpid())) == children - 3


def test_nothing_outlives_a_killed_worker():
    before = set(children_of(os.getpid()))
    with Pool(NODE, workers=1, timeout=60) as pool:
        assert pool.submit(SQUARE, ROW).result().verdict is Verdict.CORRECT
        [worker] = set(children_of(os.getpid())) - before
        hanging = pool.submit("def f(x):\n    while True: pass", ROW)
        deadline = time.monotonic() + 10
        while (
            len(below := descendants(worker)) < 6 and time.monotonic() < deadline
        ):  # the judge's and the program's
            time.sleep(0.02)
        os.kill(worker, signal.SIGKILL)
        assert hanging.result().verdict is Verdict.ERROR
        wait_for_end(*below)
        assert pool.submit(SQUARE, ROW).result().verdict is Verdict.CORRECT
