"""`python -m tools.gpu`: its runner keeps what parts found, however they end; its parts exist; its files are whole."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.kit.processes import runs
from tools.benchmarks import dpo, sampling, sft
from tools.gpu import __main__ as command
from tools.gpu.here import Skipped, check, speed
from tools.gpu.parts import PARTS, Part
from tools.gpu.runner import Runner

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="parts are forks here")


# ---- parts for the tests
def good(here, **_):
    yield check("two and two", 2 + 2 == 4, "4")
    yield speed("tokens", 1234.5, "tokens/s", "a note", seconds=2.0)


def after(here):
    yield check("the earlier part's value", here.of("good", "seconds") == 2.0, "read")


def wrong(here):
    yield check("a first thing", True, "right")
    yield check("a | second thing", False, "off by\ntwo")


def raises(here):
    yield check("before the end", True, "kept")
    raise ValueError("torn")


def skips(here):
    raise Skipped("no such thing here")
    yield


def no_memory(here):
    yield check("before the end", True, "kept")
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def crashes(here):
    yield check("before the end", True, "kept")
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(here):
    program = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True
    )
    yield speed("process", program.pid, "", program=program.pid)
    time.sleep(60)


def part(function: str, **changes) -> Part:
    component = f"tests.tools.test_gpu_command:{function}"
    return Part(
        **{"name": function, "kind": "check", "function": component, "seconds": 60, **changes}
    )


@pytest.fixture
def runner(tmp_path, monkeypatch) -> Runner:
    """A runner whose parts are forks of this process."""
    made = Runner("cpu", True, tmp_path, 10)
    monkeypatch.setattr(made, "_processes", multiprocessing.get_context("fork"))
    return made


# ---- the runner
def test_rows_and_values_reach_the_results_and_later_parts(runner):
    result = runner.run(part("good"))
    assert (result["status"], result["name"], len(result["rows"])) == ("ok", "good", 2)
    assert runner.run(part("after"))["status"] == "ok"


@pytest.mark.parametrize(("name", "status", "detail", "rows"), [
    ("wrong", "failed", "does not hold: a | second thing", 2), ("raises", "failed", "ValueError: torn", 1),
    ("skips", "skipped", "no such thing here", 0), ("no_memory", "out of memory", "Tried to allocate 2 GiB", 1),
    ("crashes", "crashed", "signal 11", 1),
])  # fmt: skip
def test_a_part_that_ends_early_keeps_its_rows(runner, name, status, detail, rows):
    result = runner.run(part(name))
    assert (result["status"], len(result["rows"])) == (status, rows)
    assert detail in result["detail"]


def test_a_part_that_hangs_ends_with_all_its_programs(runner):
    result = runner.run(part("hangs", seconds=1.5))
    assert result["status"] == "timeout"
    (row,) = result["rows"]
    assert not runs(row["program"])


def test_a_part_that_cannot_run_here_is_skipped(runner, tmp_path):
    assert (
        runner.run(part("good", needs=("json", "no_such_package")))["detail"]
        == "not installed: no_such_package"
    )
    assert (
        runner.run(part("good", cpu=False))["detail"] == "needs a GPU, or takes minutes without one"
    )
    assert Runner("cpu", True, tmp_path, 0.01).run(part("good"))["status"] == "out of time"


# ---- the command
@pytest.mark.wide
def test_both_files_hold_everything(runner, tmp_path, capsys):
    output = tmp_path / "found.md"
    parts = [
        part("good"),
        part("wrong"),
        part("crashes"),
        part("good", name="other", needs=("no_such_package",)),
    ]
    assert command.run(runner, parts, output) == 1
    content = json.loads(output.with_suffix(".json").read_text())
    assert [each["status"] for each in content["parts"]] == ["ok", "failed", "crashed", "skipped"]
    assert content["date"] in output.read_text()
    text = output.read_text()
    for line in ("| tokens | 1,234 tokens/s | a note |", "| a \\| second thing | **does not hold** | off by two |",
                 "| other | not installed: no_such_package |", "| two and two | holds | 4 |"):  # fmt: skip
        assert line in text.splitlines()
    assert f"torch {torch.__version__}" in text
    assert "4 parts: 1 ok, 1 failed, 1 crashed, 1 skipped; 3 checks hold" in capsys.readouterr().err
    assert command.run(runner, [part("good")], output) == 0
    assert not list(tmp_path.glob("*.new"))


def test_without_a_gpu_the_command_says_what_it_needs(runner, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner, "_here", ("cuda", False, tmp_path))
    assert command.run(runner, [part("good")], tmp_path / "found.md") == 1
    assert "sees no GPU" in capsys.readouterr().err
    assert not (tmp_path / "found.md").exists()


@pytest.mark.parametrize(("options", "message"), [
    (["--device", "cpu"], "add --tiny"), (["--parts", "sft-7b", "nothing"], "--parts nothing names none of"),
])  # fmt: skip
def test_a_wrong_option_is_told(monkeypatch, capsys, options, message):
    monkeypatch.setattr(sys, "argv", ["gpu", *options])
    with pytest.raises(SystemExit) as left:
        command.main()
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_stopped_command_ends_its_part_and_removes_its_files(tmp_path):
    pid = os.fork()
    if not pid:
        try:
            options = {
                "device": "cpu",
                "tiny": True,
                "minutes": 10,
                "folder": tmp_path,
                "output": tmp_path / "gpu.md",
            }
            command.parse = lambda: SimpleNamespace(chosen=[], list=False, **options)
            multiprocessing.get_context = lambda _: multiprocessing.context.ForkContext()
            command.IDENTIFY = part("hangs")
            command.main()
        except SystemExit as left:
            os._exit(left.code)
        finally:
            os._exit(77)
    rows = None
    end = time.monotonic() + 60
    while not (rows and rows.read_text()) and time.monotonic() < end:
        rows = next(tmp_path.glob("*/hangs.rows"), None)
        time.sleep(0.02)
    (row,) = map(json.loads, rows.read_text().splitlines())
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 143
    assert not runs(row["program"])
    assert not list(tmp_path.glob("torchtune-rocm-gpu-*"))


def test_every_part_has_its_function_and_its_peer():
    assert len({each.name for each in PARTS}) == len(PARTS)
    peers = {"sides:sample": sampling.PEERS}
    for each in PARTS:
        module, name = each.function.split(":")
        assert callable(getattr(import_module(f"tools.gpu.{module}"), name))
        trained = {"sft": sft.WORK, "dpo": dpo.WORK}.get(each.arguments.get("work", ""))
        work = trained.peers if trained else peers.get(each.function, {})
        assert each.arguments.get("peer") in {None, *work}, each.name


def test_no_command_outside_starts_a_gpu():
    """Listing parts imports no torch, so that it takes no GPU's memory."""
    done = subprocess.run([sys.executable, "-c", "import sys, tools.gpu.__main__; print('torch' in sys.modules)"],
                          capture_output=True, text=True, cwd=Path(__file__).parents[2])  # fmt: skip
    assert done.stdout.strip() == "False", done.stderr
