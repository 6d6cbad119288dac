"""Answers that verifiers accept and refuse, and a pool that survives failing verifiers."""

# ruff: noqa: E501 - rows of data sets are long lines

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest

from rocm_ext.base.errors import UserError
from rocm_ext.verifiers import (
    All,
    Command,
    Compile,
    ExactMatch,
    JsonSchema,
    Pool,
    Regex,
    Result,
    Run,
    Verdict,
    Weighted,
)
from rocm_ext.verifiers.base import short
from rocm_ext.verifiers.build import build
from rocm_ext.verifiers.extract import extract_code
from rocm_ext.verifiers.selfcheck import self_check, try_out
from tests.kit.processes import wait_for_end

HERE = "rocm_ext.verifiers."


def test_a_result_has_a_reward_in_its_range_and_one_short_line():
    for reward in (None, -0.1, 1.1, float("nan"), float("inf"), "1", True):
        with pytest.raises(ValueError, match="reward"):
            Result(Verdict.CORRECT, reward)
    with pytest.raises(ValueError, match="no reward"):
        Result(Verdict.ERROR, 0.0)
    result = Result("WRONG", 0, "a\nb" + "x" * 10**6 + "\x1b[0mend")
    assert str(result.verdict) == f"{result.verdict}" == "WRONG"
    assert (type(result.reward), result.reward) == (float, 0.0)
    assert len(result.detail) <= 300
    assert not {"\n", "\x1b"} & set(result.detail)
    assert short("a  b\tc") == "a b c"


NL = "\n"
P = "def f():\n    return 1"


@pytest.mark.parametrize(("text", "language", "expected"), [
    (f"```python\n{P}\n```", "python", P), (f"Sure!\n```py\n{P}\n```\nDone", "python", P),
    (f"~~~python\n{P}\n~~~", "python", P), (f"```python\r\n{P}\r\n```\r\n".replace("\n    ", "\r\n    "), "python", P),
    (f"```python\nx = 1\n```\nthen\n```python\n{P}\n```", "python", P),  # the last
    (f"```python\n{P}\n```\noutput:\n```\n1\n```", "python", P),  # tagged before untagged
    ("```bash\nls\n```", "python", None),
    (f"```python\n{P}", "python", P),  # cut off
    (f"```python\nx = 1\n```\n```python\n{P}", "python", "x = 1"),  # a whole one before one that is cut off
    (f"````python\n{P}\ns = '''\n```\n'''\n````", "python", f"{P}\ns = '''\n```\n'''"),
    (f"  ```python title=x\n{P}\n  ```", "python", P),
    (f"1. So:\n   ```python\n   {P.replace(NL, NL + '   ')}\n   ```\nDone", "python", P),  # in items of lists
    (f"- a\n    - b\n      ```py\n      {P.replace(NL, NL + '      ')}\n      ```", "python", P),
    (f'  ```\n  s = """\nx\n  y"""\n  {P.replace(NL, NL + "  ")}\n  ```', "python", f's = """\nx\ny"""\n{P}'),
    (f'```python\n{P}\ndef g():\n    """\n    ```\n    """\n```', "python", f'{P}\ndef g():\n    """\n    ```\n    """'),
    (f"<think>\n```python\nx = 1\n```\n</think>\n```python\n{P}\n```", "python", P),
    (f"x\n```python\nx = 1\n```\n</think>\n{P}", "python", P),  # the prompt opened the reasoning
    (f"<think>\n```python\n{P}\n```\n</think>\nI do not know.", "python", None),
    (f"<think>\n```python\n{P}\n```", "python", None),  # it was cut off
    (f"```python\n{P}\ns = '</think>'\n```", "python", f"{P}\ns = '</think>'"), (P, "python", P),
    ("", "python", None),
    ("int\nmain (void)\n{}", "c", "int\nmain (void)\n{}"), ("pub fn main() {}", "rust", "pub fn main() {}"),
    ("\n\n  static unsigned int f(void);", "c", "  static unsigned int f(void);"),
    ("  template <class T>\nT f();", "cpp", "  template <class T>\nT f();"),
    ("```python\n\n```", "python", None),
    ("#include <stdio.h>\nint main() {}", "c", "#include <stdio.h>\nint main() {}"),
    ("I would write a C program", "c", None),
    ('{"a": 1}', "json", '{"a": 1}'), ("(" * 100_000, "python", None),
])  # fmt: skip
def test_extract_code(text: str, language: str, expected: str | None):
    found = extract_code(text, language)
    assert (found and found.strip("\n")) == expected


SQUARE = {
    "c": "#include <stdio.h>\nint main(void) { int n; scanf(\"%d\", &n); printf(\"%d\\n\", n * n); return 0; }",
    "cpp": "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << n * n << std::endl; }",
    "rust": "use std::io::*;\nfn main() { let mut s = String::new(); stdin().read_line(&mut s).unwrap();\n"
            "let n: i64 = s.trim().parse().unwrap(); println!(\"{}\", n * n); }",
}  # fmt: skip


@pytest.mark.wide(always=1)
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
    assert run(f"{code}\nIn short:\n```{language}\nn * n\n```", row).verdict is Verdict.CORRECT
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


@pytest.mark.parametrize(("settings", "completion", "verdict"), [
    ({}, " Paris\n", "CORRECT"), ({}, "paris", "WRONG"), ({"ignore_case": True}, "PARIS", "CORRECT"),
    ({"strip": False}, "Paris ", "WRONG"), ({}, " ", "UNPARSED"),
])  # fmt: skip
def test_exact_match(settings: dict, completion: str, verdict: str):
    assert str(ExactMatch(**settings)(completion, {"answer": "Paris"}).verdict) == verdict
    with pytest.raises(ValueError, match="'gold' is missing; the row has 'answer'"):
        ExactMatch("gold").check_row({"answer": "Paris"})


def test_regex_is_bounded_in_time():
    assert Regex(r"\d+")("abc 12", {}).reward == 1
    assert Regex(r"\d+", full=True)("abc 12", {}).reward == 0
    assert Regex(field="p")("yes", {"p": "^y"}).reward == 1
    started = time.monotonic()
    assert Regex(r"^(a|a)*(b|b)*$", timeout=0.3)("a" * 40 + "c" * 40, {}).verdict in (
        Verdict.TIMEOUT,
        Verdict.WRONG,
    )
    assert Regex(r"(a|aa)+$", timeout=0.3)("a" * 100 + "c", {}).verdict is Verdict.TIMEOUT
    assert time.monotonic() - started < 20
    with pytest.raises(UserError, match="not a regular expression"):
        Regex("(")
    with pytest.raises(ValueError, match="'p'"):
        Regex(field="p").check_row({"p": "("})
    for both_or_none in ({}, {"pattern": "a", "field": "p"}):
        with pytest.raises(UserError, match="either"):
            Regex(**both_or_none)
    with pytest.raises(UserError, match="either"):
        JsonSchema({"type": "object"}, field="p")


def test_command(tmp_path: Path):
    def program(code: str, timeout: float = 20) -> Command:
        return Command([sys.executable, "-S", "-c", code], timeout=timeout)

    answer = "import json, sys; r = json.load(sys.stdin); print(json.dumps({'verdict': 'WRONG', 'reward': r['row']['x'], 'detail': r['completion']}))"
    assert program(answer)("hi\n" * 50_000, {"x": 0.25}) == Result(
        Verdict.WRONG, 0.25, "hi\n" * 50_000
    )
    parted = answer.replace("'detail'", "'parts': {'form': 1, 'sum': 0.5}, 'detail'")
    assert program(parted)("hi", {"x": 0.25}) == Result(
        Verdict.WRONG, 0.25, "hi", {"form": 1, "sum": 0.5}
    )
    for code in (answer.replace("'detail'", "'parts': {'form': 'a'}, 'detail'"), "exit(3)", "print('rubbish')", "print('[1]')", "print('{\"verdict\": \"MAYBE\", \"reward\": 1}')",
                 "print('{\"verdict\": \"CORRECT\", \"reward\": 7}')", "print('{\"verdict\": \"WRONG\", \"reward\": NaN}')", "while True: print('x' * 10**6)"):  # fmt: skip
        result = program(code)("x", {"x": 0.25})
        assert (result.verdict, result.reward) == (Verdict.ERROR, None), code
    started, pid = time.monotonic(), tmp_path / "pid"
    starts = (
        f"import subprocess as s; open({str(pid)!r}, 'w').write(str(s.Popen(['sleep', '100']).pid))"
    )
    assert "2 s" in program(f"{starts}; import time; time.sleep(100)", timeout=2)("x", {}).detail
    assert time.monotonic() - started < 20
    wait_for_end(int(pid.read_text()))
    with pytest.raises(UserError, match="no-such-program"):
        Command(["no-such-program"]).check()
    assert Command(["no-such-program"])("x", {}).verdict is Verdict.ERROR
    with pytest.raises(UserError, match="list of strings"):
        Command("ls -l")


EXACT = {"_component_": HERE + "ExactMatch"}
DIGIT = {"_component_": HERE + "Regex", "pattern": r"\d"}
FAILS = {"_component_": HERE + "Command", "command": ["false"]}


def test_verifiers_are_combined():
    verifier = build({"_component_": HERE + "All", "verifiers": [DIGIT, EXACT]})
    assert isinstance(verifier, All)
    assert verifier.needs == ("answer",)
    assert verifier("7", {"answer": "7"}).verdict is Verdict.CORRECT
    assert verifier("8", {"answer": "7"}).verdict is Verdict.WRONG
    assert verifier("x", {"answer": "x"}) == Result(
        Verdict.WRONG, 0.0, "Regex: no match", {"Regex": 0}
    )
    with pytest.raises(ValueError, match="answer"):
        verifier.check_row({})
    assert (
        build({"_component_": HERE + "All", "verifiers": [DIGIT, FAILS]})("7", {}).verdict
        is Verdict.ERROR
    )
    verifier = Weighted([DIGIT, EXACT], [1, 3])
    detail = "Regex 1 (found '7'); ExactMatch 1"
    assert verifier("7", {"answer": "7"}) == Result(
        Verdict.CORRECT, 1.0, detail, {"Regex": 1, "ExactMatch": 1}
    )
    quarter = verifier("8", {"answer": "7"})
    assert (quarter.verdict, quarter.reward) == (Verdict.WRONG, 0.25)
    assert quarter.parts == {"Regex": 1, "ExactMatch": 0}
    node = {"_component_": HERE + "Weighted", "verifiers": [DIGIT, EXACT], "weights": [1, 3]}
    partly = build({"_component_": HERE + "All", "verifiers": [{**node, "threshold": 0.25}, DIGIT]})
    least = partly("8", {"answer": "7"})
    assert (least.verdict, least.reward) == (Verdict.CORRECT, 0.25), (
        "the least reward, not the last"
    )
    assert Weighted([node, DIGIT, DIGIT], [1, 1, 0])("8", {"answer": "7"}).parts == {
        "Weighted": 0.25, "Weighted/Regex": 1, "Weighted/ExactMatch": 0, "Regex 2": 1, "Regex 3": 1
    }  # fmt: skip
    assert (
        Weighted([DIGIT, EXACT], [1, 3], threshold=0.25)("8", {"answer": "7"}).verdict
        is Verdict.CORRECT
    )
    assert Weighted([DIGIT, FAILS], [1, 1])("8", {}).verdict is Verdict.ERROR
    for weights in (
        [1],
        [0, 0],
        [1, -1],
        [1, float("nan")],
        [1, float("inf")],
        [1, "1"],
        [1e308, 1e308],
        2,
    ):
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


@pytest.mark.parametrize(("node", "says"), [
    ({"_component_": HERE + "MathAnswr"}, "did you mean MathAnswer"),
    ({"_component_": HERE + "Compile"}, "language"), ({"_component_": "no_module.X"}, "no module 'no_module'"),
    ({"_component_": "my_broken.X"}, "no_such_thing"),
    ({"_component_": "my_verifiers.Fails"}, "RuntimeError: cannot"),
    ({"_component_": "my_verifiers.CONSTANT"}, "expected a function or class"),
    ({"_component_": HERE + "All", "verifiers": [{"_component_": HERE + "Regex"}]}, "pattern or field"),
    ("MathAnswer", "mapping"),
])  # fmt: skip
def test_what_cannot_be_built_is_one_line(mine: Path, node: object, says: str):
    with pytest.raises(UserError) as caught:
        build(node)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.wide
def test_a_class_of_ones_own_needs_only_call(mine: Path):
    verifier = build({"_component_": "my_verifiers.Mine", "how": "well"})
    verifier.check()
    verifier.check_row({})
    assert verifier("x", {}).detail == "x"
    with Pool({"_component_": "my_verifiers.Mine"}, workers=2, timeout=1.5) as pool:
        for what, says in (("raise", "KeyError: 'oh no' (my_verifiers.py:"), ("exit", "SystemExit: 3"), ("die", "exited with 7"),
                           ("crash", "SIGSEGV"), ("hang", "hung for 1.5 s"), ("none", "NoneType, not a Result"),
                           ("odd", "reward")):  # fmt: skip
            result = pool.submit(what, {}).result(timeout=30)
            assert (result.verdict, result.reward) == (Verdict.ERROR, None)
            assert says in result.detail, result.detail
            assert (
                pool.submit("fine \u2028 \ud800 text\n", {"a": [1]}).result(timeout=30).reward == 1
            )
        many = [pool.submit(f"text {i} " + "x" * 100_000, {"i": i}) for i in range(40)]
        assert [f.result(timeout=30).detail.split()[1] for f in many] == [str(i) for i in range(40)]
        assert (
            pool.submit("x", {"row": SimpleNamespace()}).result(timeout=30).verdict is Verdict.ERROR
        )
        pid, nice, torch = pool.submit("env", {}).result(timeout=30).detail.split()
        assert int(pid) != os.getpid()
        assert int(nice) >= os.nice(0) + 5
        assert torch == "False"


def test_a_pool_ends_at_once_with_all_it_started(mine: Path):
    def sleepers() -> int:
        found = subprocess.run(
            ["ps", "-eo", "args"], capture_output=True, text=True, check=True
        ).stdout
        return sum(line == "sleep 987" for line in found.splitlines())

    started, futures = time.monotonic(), []
    with (
        contextlib.suppress(ZeroDivisionError),
        Pool({"_component_": "my_verifiers.Mine"}, 2, 100) as pool,
    ):
        futures += [pool.submit("child", {}) for _ in range(4)]
        while sleepers() < 2 and time.monotonic() - started < 20:
            time.sleep(0.05)
        assert sleepers() == 2
        stopped = time.monotonic()
        raise ZeroDivisionError
    while (
        sleepers() and time.monotonic() - stopped < 30
    ):  # a process that was killed is listed until it has ended
        time.sleep(0.05)
    assert sleepers() == 0
    assert [
        f.done() and (f.cancelled() or f.result().verdict is Verdict.ERROR) for f in futures
    ] == [True] * 4


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
    wait_for_end(worker, seconds=5)


def test_a_pool_that_cannot_start_says_why(mine: Path):
    for node, workers, says in (
        ({"_component_": "my_verifiers.Fails"}, 1, "cannot"), ({"_component_": HERE + "Nothing"}, 1, "no 'Nothing'"),
        ({"_component_": "x", "y": object()}, 1, "plain data"), ({"_component_": "x"}, 0, "workers"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=says), Pool(node, workers, 10):
            pass


def test_workers_are_free_of_torch():
    code = "import sys, rocm_ext.environments\nassert 'rocm_ext.verifiers' not in sys.modules\n"
    code += "import rocm_ext.verifiers, rocm_ext.verifiers.workers.worker, rocm_ext.verifiers.selfcheck\n"
    code += "print([m for m in ('torch', 'torchtune', 'omegaconf', 'numpy', 'sympy', 'datasets') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_self_check_counts_and_shows_failures(tmp_path: Path):
    data = [
        ("d.jsonl:1", {"answer": "7"}), ("d.jsonl:2", {"answer": "x"}), ("d.jsonl:3", {"answer": "8", "solution": "9"}),
    ]  # fmt: skip
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


def test_a_trial_shows_rows_that_no_worker_can_read():
    rows = [{"answer": "#### 72", "price": Decimal("1.5")}]
    with pytest.raises(UserError, match=r"fails on a trial answer: .*Decimal"):
        try_out({"_component_": "rocm_ext.verifiers.MathAnswer"}, rows, timeout=30.0)
