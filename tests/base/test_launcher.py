"""What `tune` prints when ranks fail: torchrun's report becomes a line."""

import os
import signal
import sys

import pytest
from torch.distributed import DistStoreError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from rocm_ext import config
from rocm_ext.base import process
from rocm_ext.base.errors import UserError


@pytest.fixture
def fail(tmp_path, monkeypatch, capsys):
    """``fail(action, …)``: run an action per rank in :func:`guarded`; return exit codes and what the launcher prints.

    A number instead of an action is the exit code of a rank that said nothing.
    """
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("LOGLEVEL", "")  # leaves torchrun's loggers alone
    monkeypatch.setenv("ROCM_EXT_REPORTS", "")
    process.report_ranks()

    def fail(*actions) -> tuple[list[int], str]:
        failures = {}
        for rank, action in enumerate(actions):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}.json"))
            code = action if isinstance(action, int) else config.guarded(action)
            failures[rank] = ProcessFailure(rank, os.getpid(), code, str(tmp_path / f"{rank}.json"))
        assert capsys.readouterr().err == ""
        error = ChildFailedError("tune", failures)
        sys.excepthook(type(error), error, None)
        return [failure.exitcode for failure in failures.values()], capsys.readouterr().err

    return fail


def raising(message: str, code: int = 1):
    def action() -> None:
        raise UserError(message, code)

    return action


def test_errors_of_ranks_are_said_once(fail):
    assert fail(raising("no rows"), raising("no rows"), -9) == ([1, 1, -9], "error: no rows\n")
    assert fail(raising("a", 2), raising("b")) == ([2, 1], "error: a\nerror: b\n")


def test_ranks_that_said_nothing(fail):
    lines = "error: rank 0 was killed by SIGKILL; the system may have run out of memory\n"
    lines += (
        "error: rank 1 ended with code 1; see its messages above\nrank 2 was stopped by SIGTERM\n"
    )
    assert fail(-signal.SIGKILL, 1, 128 + signal.SIGTERM) == ([-9, 1, 143], lines)


def test_a_stopped_launcher_is_silent_and_other_errors_are_not(fail, capsys):
    def said(error: BaseException) -> str:
        sys.excepthook(type(error), error, None)
        return capsys.readouterr().err

    assert said(SignalException("Process 7 got signal: 2", signal.SIGINT)) == ""
    assert said(ValueError("else")) == "ValueError: else\n"
    apart = said(
        DistStoreError("Timed out after 601 seconds waiting for clients. 1/2 clients joined.")
    )
    assert apart.startswith(
        "error: the machines of this run did not meet: Timed out after 601 seconds"
    )
    assert "1/2 clients joined. Start the same command on every machine" in apart
    assert apart.count("\n") == 1


def test_without_our_launcher_each_rank_says_it(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("ROCM_EXT_REPORTS", raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert config.guarded(raising("no rows")) == 1
    assert capsys.readouterr().err == "[rank 1] error: no rows\n"
    assert not os.listdir(tmp_path)
