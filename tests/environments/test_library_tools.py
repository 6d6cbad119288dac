"""The tools that come with the library, and conversations that use them."""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_ext.base.errors import UserError
from rocm_ext.environments import Call, Environments, Fault, Python, ToolEnvironment, Tools
from rocm_ext.environments.base import Environment, tools_of
from rocm_ext.sandbox.children import descendants
from rocm_ext.verifiers import Sandbox, Verdict
from tests.kit.processes import wait_for_end

MATHS = {"_component_": "rocm_ext.verifiers.MathAnswer"}
LOST = "all names and files are lost"


# ---- Python

try:
    Sandbox("bubblewrap").check()
    WORKS = True
except UserError:
    WORKS = False
BOXED = pytest.param(
    "bubblewrap", marks=pytest.mark.skipif(not WORKS, reason="bubblewrap does not work here")
)


@pytest.fixture
def opened():
    """Return a function that makes the tool; at the end its interpreter is ended."""
    tools = []

    def opened(**arguments):
        tools.append(Python(memory_mb=256, **arguments))
        return tools[-1].python

    yield opened
    for tool in tools:
        if tool._running is not None:
            tool._running.close()


@pytest.fixture(params=["rlimits", BOXED])
def kind(request):
    return request.param


@pytest.fixture
def python(opened, kind):
    return opened(timeout=60, sandbox=kind)


@pytest.fixture
def boxed(opened):
    return opened(timeout=60)


needs_box = pytest.mark.skipif(not WORKS, reason="bubblewrap does not work here")


def test_names_last_from_call_to_call(python):
    assert python("x = 2\ndef f(y):\n    return x * y") == "(no output)"
    assert python("x += 1\nprint('a')\nf(7)") == "a\n21"
    assert python("_ + 1") == "22"
    assert python("import statistics\nstatistics.mean([1, 2, 6])") == "3"
    assert (
        python("class A:\n    pass\nimport pickle\ntype(pickle.loads(pickle.dumps(A()))) is A")
        == "True"
    )
    assert python("open('notes', 'w').write('hi')") == "2"
    assert python("open('notes').read()") == "'hi'"
    assert python("") == python("# nothing") == python("None") == "(no output)"


def test_errors_are_the_end_of_the_traceback(python):
    assert python("def f():\n    return 1 / 0") == "(no output)"
    said = python("print('before')\nf()")
    assert said.startswith("before\nTraceback")
    assert "in f\n    return 1 / 0" in said
    assert said.endswith("ZeroDivisionError: division by zero")
    assert "_interpreter" not in said
    assert python("1 +").splitlines()[0] == '  File "<call 3>", line 1'
    assert len(python("def g():\n    g()\ng()").splitlines()) <= 20
    said = python("class E(Exception):\n    def __str__(self): raise ValueError\nraise E")
    assert said.endswith(": <exception str() failed>")
    assert "MemoryError" in python("b'x' * (1 << 30)")
    assert python("x = 5\nexit()\n") == "(no output)", "the call ends, the interpreter stays"
    assert python("import sys\nsys.exit('bye')").endswith("SystemExit: bye")
    assert python("input()").endswith("EOFError: EOF when reading a line")
    assert python("x") == "5"


def test_what_is_printed_is_text_in_its_order(python):
    code = "import os, sys\nprint(1)\nos.system('echo 2; echo 3 >&2')\nprint(4, file=sys.stderr)\nos.write(1, b'5\\n')"
    assert python(code) == "1\n2\n3\n4\n5\n2"
    assert (
        python("print('a\\x1b[31m\\x00\\x08b\\x9b\\ud800\\tc')")
        == "a\ufffd[31m\ufffd\ufffdb\ufffd\\ud800\tc"
    )
    assert python("import os; os.write(1, b'\\xff\\xfe\\r\\n.'); None") == "\ufffd\ufffd\n."
    assert python('print(\'{"messages": []}\\n{"result": ["CORRECT", 1.0, ""]}\')').startswith(
        '{"messages"'
    )
    assert python("print('error: ' * 3)").startswith("error: error:")
    assert len(Tools([python])(Call("python", {"code": "print('y' * 1_000_000)"}))) < 20_100
    assert python("'still here'") == "'still here'"


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("code", [
    "while True: pass", "import time; time.sleep(9)", "import os; os.fork()\nwhile True: pass",
    "import signal\nfor s in (15, 18, 20): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
])  # fmt: skip
def test_a_call_that_takes_too_long_loses_its_state(opened, kind, code):
    hasty = opened(timeout=2, sandbox=kind)
    hasty("x = 1")
    began = time.monotonic()
    said = hasty(f"print('so far', flush=True)\n{code}")
    assert (
        said
        == f"so far\nerror: the code ran for more than 2 s; {LOST}, and the next call starts a new interpreter"
    )
    assert time.monotonic() - began < 20
    assert hasty("x").endswith("NameError: name 'x' is not defined")


FORKS = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""
MEMORY = """
import os, time
for _ in range(5):
    if not os.fork(): kept = b"1" * (99 << 20)
time.sleep(9)
"""


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os._exit(3)", "the interpreter ended"),
        ("import os; os.kill(os.getpid(), 9)", "the interpreter ended"),
        ("import ctypes; ctypes.string_at(0)", "the interpreter ended"),
        ("import os; os.closerange(0, 100)", "the interpreter ended|closed its output"),
        ("import sys; sys.stdout.close()", "the interpreter ended|closed its output"),
        ("while True: print('y' * 10_000)", "printed more than 1048576 bytes"),
        (MEMORY, "used more than 256 MB of memory"),
    ],
)  # fmt: skip
@needs_box
def test_an_interpreter_that_ends_is_replaced(boxed, code, why):
    boxed("x = 1")
    said = boxed(code)
    assert re.search(f"error: .*({why}).*{LOST}", said), said[-500:]
    assert boxed("1 + 1") == "2"


@pytest.mark.wide
@needs_box
def test_a_fork_bomb_ends(opened):
    """Without bubblewrap it makes thousands of processes before it is counted, and the machine waits for them."""
    hasty = opened(timeout=2)
    assert re.search(
        f"error: the code (ran for more than 2 s|(started|used) more than .*); {LOST}", hasty(FORKS)
    )
    assert hasty("1 + 1") == "2"


COUNTING = """
import subprocess, threading, time
p = subprocess.Popen(['sleep', '1000'])
n = 0
def count():
    global n
    while True:
        n += 1
threading.Thread(target=count, daemon=True).start()
p.poll()
"""


@needs_box
def test_what_a_call_leaves_running_stops_with_it(boxed):
    """Nothing of it computes while the model writes."""
    assert boxed(COUNTING) == "(no output)"
    tool = boxed.__self__
    time.sleep(0.1)
    before = status(tool._running._pids[-1])
    time.sleep(0.3)
    state, *rest = status(tool._running._pids[-1])
    assert state in "Tt"
    assert rest[10:12] == before[11:13], "it spends no time"
    assert boxed("p.wait()") == "-9"
    left = [pid for pid in descendants(tool._running._pids[0]) if pid not in tool._running._pids]
    assert left == []


def status(pid: int) -> list[str]:
    """Return what the kernel says of a process, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def test_code_that_finds_the_socket_ends_its_own_calls_too_early(python):
    """As it does: what it sends says nothing but that a call is over."""
    code = "import os\nfor fd in range(3, 20):\n  try: os.write(fd, b'CORRECT')\n  except OSError: pass"
    assert python(code) == "(no output)"
    for n in range(4):
        said = python(f"'call {n}'")
        assert all(line.startswith("'call ") or line == "(no output)" for line in said.splitlines())


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200))
def test_every_text_is_code(text):
    """One interpreter for all of them; it ends with this process."""
    if not hasattr(test_every_text_is_code, "tool"):
        test_every_text_is_code.tool = Python(timeout=60, sandbox="rlimits")
    said = test_every_text_is_code.tool.python(text)
    assert said.encode()


@pytest.mark.parametrize("code", ["1", "import time\ntime.sleep(1000)"])
def test_an_interpreter_ends_with_the_process_that_started_it(kind, code):
    script = f"""
from rocm_ext.environments import Python
tool = Python(timeout=1000, sandbox={kind!r})
tool.python("1")
print(tool._running._pids[-1], flush=True)
tool.python({code!r})
print("done", flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=-1, stdout=-1, text=True
    ) as process:
        pid = int(process.stdout.readline())
        if code == "1":
            process.stdout.readline()
        process.kill()
    wait_for_end(pid)


@needs_box
def test_the_sandbox_hides_the_machine(boxed, tmp_path, monkeypatch):
    """The probes of the verifiers' containment, at this door."""
    (tmp_path / "secret").write_text("secret")
    monkeypatch.setenv("ROCM_EXT_TEST_SECRET", "secret")
    paths = [str(tmp_path / "secret"), __file__, "/etc/passwd", str(Path.home() / ".ssh")]
    code = f"""
import os, socket, ctypes
seen = [p for p in {paths!r} if os.path.exists(p)]
for folder in ["/", "/usr", "/etc", "/box", "/root", "/var", {sys.prefix!r}]:
    try: open(folder + "/x", "w"); seen.append(folder)
    except OSError: pass
try: socket.create_connection(("1.1.1.1", 53), 1); seen.append("network")
except OSError: pass
try: os.setxattr("/tmp", "user.x", b"x"); seen.append("xattr")
except OSError: pass
libc = ctypes.CDLL(None)
seen += [n for n, r in {{"setuid": libc.setuid(0), "ptrace": libc.ptrace(16, os.getppid(), 0, 0), "memfd": libc.memfd_create(b"x", 0)}}.items() if r != -1]
seen += [k for k in os.environ if "ROCM" in k]
seen
"""  # noqa: E501
    assert boxed(code) == "[]"
    assert "No space left" in boxed(
        "for i in range(9):\n  open(f'f{i}', 'wb').write(bytes(20 << 20))"
    )
    names = "import os, time\nfor i in range(30_000): os.symlink('y', f'l{i}')\ntime.sleep(.2)"
    assert "made more than 20000 files" in boxed(names)


def test_a_sandbox_that_does_not_start_is_not_the_models_fault(monkeypatch):
    monkeypatch.setattr(
        "rocm_ext.environments.python._sandbox", lambda *_: (Sandbox("rlimits"), "/bin/false", ())
    )
    monkeypatch.setattr("rocm_ext.verifiers.python.start.compiled", lambda _: {"_interpreter": b""})
    tool = Python(sandbox="rlimits", timeout=2)
    with pytest.raises(Fault, match="did not start"):
        Tools([tool.python])(Call("python", {"code": "1"}))


# ---- tools in conversations


class Notes:
    """A tool with state."""

    def __init__(self, first: str = "") -> None:
        self.kept = [first]

    def add(self, note: str) -> list:
        """Keep a note."""
        self.kept.append(note)
        return self.kept

    def _private(self) -> None:
        raise AssertionError


class Empty:
    pass


def half(number: int) -> int:
    """Halve a number.

    Args:
        number: an even one.
    """
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


HERE = __name__
HALF = f"{HERE}.half"
TOOLS = [HALF, {"_component_": f"{HERE}.Notes", "first": "one"}]


def test_tools_and_a_verifier_make_an_environment():
    environment = ToolEnvironment({"answer": "42"}, TOOLS, MATHS)
    assert [schema["function"]["name"] for schema in tools_of(environment).schemas] == [
        "half",
        "add",
    ]
    assert environment.needs == ("answer",)
    for name, arguments, result in (
        ("half", {"number": 84}, "42"),
        ("half", {"number": 1}, "error: ValueError: 1 is odd"),
        ("add", {"note": "two"}, '["one", "two"]'),
        ("add", {"note": "three"}, '["one", "two", "three"]'),
    ):
        (reply,) = environment.reply(
            {"content": "", "tool_calls": [Call(name, arguments).message(0)]}
        )
        assert reply["content"] == result
    assert environment.reply({"content": "It is \\boxed{42}."}).verdict is Verdict.CORRECT
    assert environment.reply({"content": "It is \\boxed{41}."}).verdict is Verdict.WRONG
    environment.check()
    environment.check_row({"answer": "1"})
    with pytest.raises((UserError, ValueError), match="answer"):
        environment.check_row({"question": "1"})
    environment = Environment({})
    environment.needs = ("question",)
    with pytest.raises((UserError, ValueError), match="question"):
        environment.check_row({"answer": "1"})


@pytest.mark.parametrize(
    ("tools", "verifier", "problem"),
    [
        ([], MATHS, "expected a list"), (HALF, MATHS, "expected a list"),
        ([3], MATHS, "found 3"), ([{"first": "x"}], MATHS, "_component_"),
        ([f"{HERE}.halve"], MATHS, "half"), (["no_such.tool"], MATHS, "no_such"),
        ([{"_component_": HALF, "digits": 3}], MATHS, "no argument 'digits'"),
        ([{"_component_": f"{HERE}.Notes", "last": "x"}], MATHS, "last"), ([f"{HERE}.Empty"], MATHS, "no public"),
        (TOOLS, {"_component_": "rocm_ext.verifiers.MathAnswers"}, "MathAnswer"),
        (TOOLS, {"_component_": "rocm_ext.verifiers.MajorityAnswer"}, "group"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_config_is_one_line(tools, verifier, problem):
    with pytest.raises(UserError, match=problem) as caught:
        ToolEnvironment({}, tools, verifier)
    assert "\n" not in str(caught.value)


@pytest.mark.wide
def test_conversations_use_them_in_their_own_processes(kind, tmp_path, monkeypatch):
    """State belongs to a conversation, and its interpreter ends with it; its files end with the run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tools = [*TOOLS, {"_component_": "rocm_ext.environments.Python", "sandbox": kind, "timeout": 5}]
    node = {
        "_component_": "rocm_ext.environments.ToolEnvironment",
        "tools": tools,
        "verifier": MATHS,
    }

    def message(name, **arguments):
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [Call(name, arguments).message(0)],
        }

    with Environments(node, timeout=60) as environments:
        assert [schema["function"]["name"] for schema in environments.tools] == [
            "half",
            "add",
            "python",
        ]
        before = set(descendants(environments._host.pid))  # zombies of the host's own checks
        keys = [("p", 0), ("p", 1)]
        for key in keys:
            assert environments.begin(key, {"answer": "42"}).result() == []
            environments.say(key, message("python", code=f"x = {key[1] + 40}")).result()
        values = [
            environments.say(key, message("python", code="x + 1")).result()[0]["content"]
            for key in keys
        ]
        assert values == ["41", "42"]
        assert (
            environments.say(keys[0], message("add", note="n")).result()[0]["content"]
            == '["one", "n"]'
        )
        (lost,) = environments.say(keys[0], message("python", code="while True: pass")).result()
        assert LOST in lost["content"]
        assert (
            environments.say(keys[1], {"role": "assistant", "content": "\\boxed{42}"})
            .result()
            .reward
            == 1
        )
        for key in keys:
            environments.end(key)
        deadline = time.monotonic() + 30
        while (
            left := set(descendants(environments._host.pid)) - before
        ) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left
    assert not os.listdir(tmp_path)
