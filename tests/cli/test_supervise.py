"""`rocm-ext supervise`: whatever ends or hangs a run, the adapter is that of an undisturbed run, bit for bit.

The supervisor is a fork of this process, and so are its runs, which therefore start at once.
"""

import contextlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import rocm_ext.recipes.grpo_rocm as grpo
import rocm_ext.recipes.lora_finetune_rocm as sft
import rocm_ext.recipes.raft_rocm as raft
import torch

from rocm_ext import cli
from rocm_ext.base.process import signal_at_parents_end
from rocm_ext.runs.progress import slowest_step
from rocm_ext.supervise import attempt
from rocm_ext.train.learner import CausalLM
from tests.kit import forks, grpo_runs, raft_runs
from tests.kit.programs import as_forks
from tests.recipes.test_resume import assert_equal, at, make, reference, steps, wait_for  # noqa: F401
from tests.recipes.test_resume import folder as folder  # `make` needs it

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="supervise needs Linux")
MAINS = {"lora_finetune_rocm": sft.main, "grpo_rocm": grpo.main, "raft_rocm": raft.main}
RANKS = ("--nnodes", "1", "--nproc_per_node", "2")


class Trouble:
    """A metric logger that makes trouble right after steps, once at each.

    Args:
        at: what happens after a step: ``kill``, ``stop`` (SIGSTOP), ``pause`` (1 second), ``signal`` (the process
            waits for a signal to save), ``block`` (it waits) or ``full`` (files cannot grow).
        top: where to note what has happened.
    """

    def __init__(self, at: dict[int, str], top: str) -> None:
        self.at, self.top = at, Path(top)

    def log_dict(self, payload, step: int) -> None:
        done = self.top / f"trouble_{step}"
        if step not in self.at or done.exists():
            return
        done.touch()
        if self.at[step] == "block":
            threading.Event().wait(90)
            os._exit(1)  # no test leaves a process for longer
        elif self.at[step] == "pause":
            time.sleep(1)
        elif self.at[step] == "signal":
            end = time.monotonic() + 90
            while "stopping once the current" not in (self.top / "out/supervise.log").read_text():
                assert time.monotonic() < end
                time.sleep(0.02)
        elif self.at[step] == "full":
            size = (self.top / "out" / "metrics.jsonl").stat().st_size + 100
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.at[step] == "kill" else signal.SIGSTOP)

    def close(self) -> None:
        """Do nothing; no file is open."""


class Crash:
    """A metric logger that fails at the first step."""

    def log_dict(self, payload, step: int) -> None:
        raise RuntimeError("crash")

    def close(self) -> None:
        """Do nothing; no file is open."""


def trouble(top: Path, **at: str) -> dict:
    """The config of :class:`Trouble`: ``s3="kill"`` kills the run after step 3."""
    happens = {int(step[1:]): what for step, what in at.items()}
    return {"_component_": "tests.cli.test_supervise.Trouble", "at": happens, "top": str(top)}


CODE_0 = "TEST_SUPERVISE_CODE_0"  # environment variable: the run ends with code 0 whatever happened, as HIP can make it


def tune(arguments: list[str]) -> None:
    """Do what ``tune ARGUMENTS`` does: this process is the run, or starts its ranks."""
    if CODE_0 in os.environ:
        os._exit = partial(lambda leave, code: leave(0), os._exit)
    signal_at_parents_end(signal.SIGTERM)
    sys.stdout = sys.stderr
    place = next(i for i, word in enumerate(arguments) if word in MAINS)
    main, (path, *overrides) = MAINS[arguments[place]], arguments[place + 2 :]
    if place == 1:
        forks.run_and_exit(main, Path(path), tuple(overrides), None)
    sys.exit(launch(main, Path(path), tuple(overrides)))


def launch(main, path: Path, overrides: tuple[str, ...]) -> int:
    """Do as torchrun does: hand SIGTERM on, and end all ranks where one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    meeting |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test"}
    places = [{**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    ranks = {
        forks.start(main, path, overrides, partial(os.environ.update, place))[0] for place in places
    }
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(rank, signal.SIGTERM) for rank in ranks])
    codes = []
    while ranks:
        rank, status = os.waitpid(-1, 0)
        ranks.discard(rank)
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1]:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return int(any(codes))


def start(*arguments: object) -> tuple[int, int]:
    """Start `rocm-ext supervise ARGUMENTS` in a fork; see :func:`forks.start`."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid:
        os.close(send)
        return pid, receive
    code = 70
    try:
        sys.stdout = sys.stderr = os.fdopen(send, "w", buffering=1)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(
                signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
            )
        signal_at_parents_end(signal.SIGTERM)
        attempt.subprocess = SimpleNamespace(**vars(as_forks(tune)), run=subprocess.run)
        code = cli.main(["supervise", *map(str, arguments)])
    except SystemExit as leaving:  # argparse's
        code = leaving.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def run(*arguments: object) -> tuple[int, str]:
    return forks.wait(*start(*arguments))


def command(
    path: Path, recipe: str = "lora_finetune_rocm", ranks: tuple[str, ...] = ()
) -> list[str]:
    return ["--", "tune", "run", *ranks, recipe, "--config", str(path)]


def process_of(out: Path) -> int | None:
    """Process id of the run, as the supervisor has noted it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return json.loads((out / ".supervised").read_text().splitlines()[0])["pid"]
    return None


PATIENT = ("--pause", 0, "--deaths", 99)
EAGER = (*PATIENT, "--hung-after", 1)


@pytest.mark.wide
def test_kills_and_hangs_change_nothing(make, reference, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    events = tmp_path / "events"
    path = make(out, metric_logger=trouble(tmp_path, s3="kill", s5="stop", s8="block"))
    code, said = run(
        *EAGER, "--notify", f'echo "$SUPERVISE_EVENT $SUPERVISE_STEP" >> {events}', *command(path)
    )
    assert code == 0, said
    assert_equal(out, reference)
    assert len(list(tmp_path.glob("trouble_*"))) == 3
    assert "at step 3: killed by SIGKILL" in said
    assert said.count("supervise: it hung for 1s") >= 2, said  # on a busy machine perhaps more
    told = events.read_text().splitlines()
    # the stopped process goes on to save, the blocked one cannot
    assert {"restarting 3", "restarting 6", "restarting 8"} <= set(told)
    assert told[-1] == "finished 10"
    assert all(line in said for line in (out / "supervise.log").read_text().splitlines())


@pytest.mark.wide
@forks.several_ranks
def test_a_stuck_collective(make, tmp_path):  # noqa: F811
    """The main rank waits for ever, and the other one for the main rank."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert all(code == 0 for code, _ in forks.forked_ranks(sft.main, make(whole)))
    path = make(out, metric_logger=trouble(tmp_path, s6="block"))
    code, said = run(*EAGER, *command(path, ranks=RANKS))
    assert code == 0, said
    assert "at step 6: it hung" in said
    assert_equal(out, whole)


@pytest.mark.wide
def test_the_same_step_dies_three_times(make, tmp_path):  # noqa: F811
    out, events = tmp_path / "out", tmp_path / "events"
    tell = f'echo "$SUPERVISE_EVENT: $SUPERVISE_WHY ($SUPERVISE_LOG)" | tr "\\n" " " >> {events}; echo >> {events}'
    path = make(out, metric_logger=at(4, signal.SIGKILL))
    code, said = run("--pause", 0.6, "--notify", tell, *command(path))
    assert code == 1
    last = said.splitlines()[-1]
    assert last.startswith(
        "error: the run died 3 times without progress, at step 4: killed by SIGKILL; its last line"
    )
    assert last.endswith(f"{out / 'supervise.log'} has its output")
    restarts = [line for line in said.splitlines() if line.startswith("supervise: restarting")]
    assert [line.rpartition(" in ")[2] for line in restarts] == ["1s", "2s"]
    told = events.read_text().splitlines()
    assert [line.partition(":")[0] for line in told] == ["restarting", "restarting", "failed"]
    assert all("steps per epoch" in line for line in told)  # of the run's log


@pytest.mark.wide
def test_set_up_that_waits_has_hung(
    make,  # noqa: F811
    reference,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    forward, waited, done = CausalLM.forward, tmp_path / "waited", tmp_path / "done"

    def forward_(self, batch):
        if not waited.exists():
            waited.touch()
            threading.Event().wait(90)
        elif not done.exists():
            done.touch()
            end = time.process_time() + 3
            while time.process_time() < end:
                pass
            raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, batch)

    monkeypatch.setattr(CausalLM, "forward", forward_)
    code, said = run(*PATIENT, "--hung-after", 1, *command(make(tmp_path / "out")))
    assert code == 0, said
    restarts = [
        line.partition(" it died ")[2] for line in said.splitlines() if "restarting" in line
    ]
    assert "at step 0: it hung for " in restarts[0]
    assert "at step 0: out of memory at " in restarts[1]  # which is tried again
    assert_equal(tmp_path / "out", reference)


@pytest.mark.parametrize("honest", [True, False])
def test_a_user_s_error_ends_it(make, tmp_path, monkeypatch, honest):  # noqa: F811
    path = make(tmp_path / "out")
    if not honest:
        monkeypatch.setenv(CODE_0, "1")
    code, said = run(*command(path), "optimizer.lr=-1")
    assert code == 1
    assert said.splitlines()[-1] == (
        "error: the run ended at step 0: optimizer.lr is -1; expected a number above 0. Starting it again does not help"
    )
    assert "supervise: failed" in said
    assert "restarting" not in said
    if not honest:
        crash = {"_component_": "tests.cli.test_supervise.Crash"}
        code, said = run(
            "--pause", 0, "--deaths", 1, *command(make(tmp_path / "crashed", metric_logger=crash))
        )
        assert code == 1
        assert (
            "ended with code 0, but it is not complete; its last line: RuntimeError: crash" in said
        )
        return
    for arguments, expected in (
        (["--", "tune", "run", "nothing"], "name the run after --"),
        ([*command(path), "overwrite_output_dir=True"], "drop overwrite_output_dir"),
        (["--deaths", "0", *command(path)], "--deaths"),
        (command(Path("absent.yaml")), "absent.yaml"),
    ):
        code, said = run(*arguments)
        assert code in (1, 2)
        assert expected in said.splitlines()[-1], said


@pytest.mark.wide
def test_a_full_disk_ends_it_and_the_same_command_goes_on(make, reference, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    path = make(out, metric_logger=trouble(tmp_path, s6="full"), save_every_n_steps=None)
    code, said = run(*PATIENT, *command(path))
    assert code == 1
    assert "no space left to write" in said.splitlines()[-1], said
    path = make(out, metric_logger=trouble(tmp_path, s6="full"), save_every_n_steps=2)
    assert run(*PATIENT, *command(path))[0] == 0
    assert_equal(out, reference)


@pytest.mark.wide
@pytest.mark.parametrize("reboot", [True, False], ids=["a reboot", "the supervisor alone"])
def test_the_same_command_goes_on_after_its_own_death(make, reference, tmp_path, reboot):  # noqa: F811
    out = tmp_path / "out"
    arguments = (*PATIENT, *command(make(out, metric_logger=trouble(tmp_path, s4="pause"))))
    pid, receive = start(*arguments)
    wait_for(tmp_path / "trouble_4")
    left = psutil.Process(process_of(out))
    os.kill(pid, signal.SIGKILL)
    if reboot:
        left.kill()
    assert forks.wait(pid, receive)[0] == -signal.SIGKILL
    code, said = run(*arguments)
    assert code == 0, said
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
    assert_equal(out, reference)


@pytest.mark.wide
def test_ctrl_c_saves_and_a_second_one_kills(make, reference, tmp_path):  # noqa: F811
    """Another supervisor is refused meanwhile."""
    out = tmp_path / "out"
    arguments = (
        "--pause",
        0,
        *command(make(out, metric_logger=trouble(tmp_path, s3="pause", s7="block"))),
    )
    pid, receive = start(*arguments)
    wait_for(tmp_path / "trouble_3")
    os.kill(pid, signal.SIGINT)
    code, said = forks.wait(pid, receive)
    assert code == 130, said
    assert "all saved" in said
    assert steps(out)[-1] == 4

    pid, receive = start(*arguments)
    wait_for(tmp_path / "trouble_7")
    assert run(*arguments) == (1, f"error: another process supervises {out}; stop it first\n")
    left = psutil.Process(process_of(out))
    os.kill(pid, signal.SIGINT)
    time.sleep(0.5)
    assert left.is_running()  # it cannot save
    os.kill(pid, signal.SIGINT)
    assert forks.wait(pid, receive)[0] == 130
    assert not left.is_running()
    assert run(*arguments)[0] == 0
    assert_equal(out, reference)


def test_systemd_hears_that_it_lives(make, tmp_path, monkeypatch):  # noqa: F811
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        started, heard = start(*command(make(tmp_path / "out", epochs=1))), [""]
        while not heard[-1].startswith("STATUS="):
            heard.append(channel.recv(4096).decode())
        assert forks.wait(*started)[0] == 0
    assert heard[1] == "READY=1\nWATCHDOG=1"
    assert heard[-1] == "STATUS=finished: the run is done"


@pytest.mark.wide
def test_validation_apart(make, reference, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    code, said = run("--evaluate-apart", "--pause", 60, *command(make(out)))
    assert code == 0, said
    assert_equal(out, reference)
    stops = [
        line.partition(" stopped ")[2].partition(";")[0]
        for line in said.splitlines()
        if "goes on" in line
    ]
    assert stops == [f"{when} the validation of step {step}" for when, step in
                     (("before", 5), ("after", 5), ("before", 10))]  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return raft_runs.write_world(tmp_path_factory.mktemp("world"))


@pytest.mark.wide
@pytest.mark.parametrize(("recipe", "runs"), [("grpo_rocm", grpo_runs), ("raft_rocm", raft_runs)])
def test_evaluation_apart(world, tmp_path, recipe, runs):
    whole, out = tmp_path / "whole", tmp_path / "out"
    forks.succeed(MAINS[recipe], runs.write_run(world, whole))
    code, said = run(
        "--evaluate-apart", "--pause", 60, *command(runs.write_run(world, out), recipe)
    )
    assert code == 0, said
    runs.assert_equal(out, whole)
    unit, last = ("step", 4) if recipe == "grpo_rocm" else ("cycle", 2)
    assert f"stopped after the evaluation at {unit} 0" in said
    assert f"stopped before the evaluation at {unit} {last}" in said


def test_a_slow_run_has_more_time(tmp_path):
    def write(path: Path, lines: list[dict]) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    assert slowest_step(tmp_path) == 0
    write(
        tmp_path / "metrics.jsonl",
        [{"step": n, "loss": 1.0, "seconds": 60.0 + n} for n in range(30)],
    )
    assert slowest_step(tmp_path) == 89
    raft = tmp_path / "raft"
    raft.mkdir()
    write(raft / "cycle_1" / "metrics.jsonl", [{"step": 1, "loss": 1.0, "seconds": 7.0}])
    write(raft / "metrics.jsonl", [{"step": 1, "loss": 1.0, "seconds": 9000.0}])
    assert slowest_step(raft) == 7


@pytest.mark.nightly
def test_thirty_random_kills_and_ten_hangs(make, tmp_path):  # noqa: F811
    whole, out = tmp_path / "whole", tmp_path / "out"
    many = {"epochs": 150, "lr_scheduler": None}
    assert forks.forked(sft.main, make(whole, **many))[0] == 0
    pid, receive = start(
        "--pause", 0, "--deaths", 999, "--hung-after", 4, *command(make(out, **many))
    )
    drawn, seen, done = random.Random(0), None, []
    while len(done) < 40:
        while (now := process_of(out)) in (None, seen):
            assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE, done
            time.sleep(0.005)
        seen = now
        time.sleep(drawn.uniform(0, 0.8))  # during set-up and during steps
        signum = signal.SIGSTOP if len(done) % 4 == 3 else signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            os.kill(now, signum)
            done.append(signum)
    code, said = forks.wait(pid, receive)
    assert code == 0, said[-3000:]
    assert said.count("it hung for") >= 8
    assert_equal(out, whole)
