"""A run's output folder: one run at a time uses it, and checkpoints that cannot be read are named and kept."""

import contextlib
import errno
import json
import os
import platform
import random
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from rocm_ext.recipes.lora_finetune_rocm import main

from rocm_ext.base.errors import UserError
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.train import output_dir
from rocm_ext.train.checkpoint import Checkpoints, rng_state, set_rng_state
from rocm_ext.train.output_dir import hold
from tests.kit import forks
from tests.kit.lines import one_line_has
from tests.kit.tiny import run_config, tune, write_model, write_rows, write_yaml
from tests.recipes.test_resume import assert_one_line, at, outcome, pause, tree, wait_for

pytest.importorskip("fcntl", reason="forks and POSIX signals")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a base model and rows for 6 steps."""
    top = tmp_path_factory.mktemp("lock")
    write_model(top / "base")
    write_rows(top / "rows.jsonl", 24)
    return top


@pytest.fixture
def make(folder, tmp_path):
    """Write the YAML of a run of 6 steps into ``tmp_path / "out"``."""

    def make(**changes):
        options = {"epochs": 2, "save_every_n_steps": 1, **changes}
        cfg = run_config(folder / "base", folder / "rows.jsonl", tmp_path / "out", **options)
        return write_yaml(tmp_path / f"{len(os.listdir(tmp_path))}.yaml", cfg)

    return make


def without_counters(out):
    return {name: content for name, content in tree(out).items() if name != "hardware.jsonl"}


@pytest.mark.wide
def test_the_second_start_says_who_holds_the_folder(make, tmp_path):
    out, go = tmp_path / "out", tmp_path / "go"
    path = make(metric_logger=at(3, pause, go), num_workers=1)
    pid, receive = forks.start(main, path, (), None)
    wait_for(go.with_suffix(".waiting"))
    before = without_counters(out)
    for override in ("overwrite_output_dir=True", forks.RESUME):
        line = forks.refused(main, make(), override)
        assert one_line_has(
            line, f"{out} is in use by process {pid} on ", "started 20", f"--config {path}"
        )
    assert without_counters(out) == before

    os.kill(pid, signal.SIGKILL)  # its loader process lives on for a while
    assert forks.wait(pid, receive)[0] == -signal.SIGKILL
    assert "resumed from" in forks.succeed(main, make(), forks.RESUME)
    assert [line["step"] for line in outcome(out)[1]] == [1, 2, 3, 4, 5, 6]
    assert not list(out.glob(".lock*"))


def test_of_many_starts_at_once_one_runs(make, tmp_path):
    started = [forks.start(main, make(), (), None) for _ in range(4)]
    ended = [forks.wait(*each) for each in started]
    assert sorted(code for code, _ in ended) == [0, 1, 1, 1], ended
    assert [line["step"] for line in outcome(tmp_path / "out")[1]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.skipif(
    sys.platform != "linux", reason="Linux ends the children of a dead process on request"
)
def test_ranks_end_with_their_launcher(make, tmp_path):
    out, go = tmp_path / "out", tmp_path / "go"
    path = make(metric_logger=at(3, pause, go))
    launcher = os.fork()
    if not launcher:
        os.environ["TORCHELASTIC_RUN_ID"] = "test"
        forks.start(main, path, (), None)
        signal.pause()
    wait_for(go.with_suffix(".waiting"))
    rank = psutil.Process(json.loads((out / ".lock.json").read_text())["pid"])
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    while (
        rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE
    ):  # a rank that lives on fails by pytest's timeout
        time.sleep(0.01)
    assert "resumed from" in forks.succeed(main, make(), forks.RESUME)


class WithoutLocks:
    """filelock on a file system without locks."""

    def __init__(self, path, **settings) -> None:
        self.path = path

    def acquire(self, **settings) -> None:
        raise NotImplementedError


def start_holding(folder, host=None) -> int:
    """Hold a folder in a fork, perhaps of another host, until it is killed; return its id."""
    pid = os.fork()
    if not pid:
        if host is not None:
            socket.gethostname = platform.node = lambda: host
        try:
            with hold(folder):
                signal.pause()
        finally:
            os._exit(1)
    wait_for(folder / ".lock.json")
    return pid


def in_use(folder) -> str:
    with pytest.raises(UserError, match="is in use by") as error, hold(folder):
        pass
    return str(error.value)


def test_without_locks_a_running_process_holds_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(output_dir, "FileLock", WithoutLocks)
    pid = start_holding(tmp_path)
    said = in_use(tmp_path)
    assert f"in use by process {pid} on {platform.node()}, started 20" in said
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with hold(tmp_path):
        assert json.loads((tmp_path / ".lock.json").read_text())["pid"] == os.getpid()
    assert not os.listdir(tmp_path)


def test_without_locks_a_process_of_another_host_may_run(tmp_path, monkeypatch):
    monkeypatch.setattr(output_dir, "FileLock", WithoutLocks)
    pid = start_holding(tmp_path, "node7")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    said = in_use(tmp_path)
    assert f"process {pid} on node7" in said
    assert said.endswith(f"; if it no longer runs, delete {tmp_path / '.lock.pid'}")
    (tmp_path / ".lock.pid").unlink()  # as the message says
    with hold(tmp_path):
        pass


@pytest.mark.wide
@pytest.mark.parametrize("who", ["every rank", "the main rank"])
def test_under_torchrun_an_error_is_one_line(make, tmp_path, who):
    main_alone = who == "the main rank"
    path = make() if main_alone else make(dataset={"_component_": "rocm_ext.data.sft_dataset"})
    with hold(tmp_path / "out") if main_alone else contextlib.nullcontext():
        ended = tune(
            "run", "--nnodes", "1", "--nproc_per_node", "2", "lora_finetune_rocm", "--config", path
        )
    assert ended.returncode != 0
    assert_one_line(ended.stderr, f"in use by process {os.getpid()}" if main_alone else "dataset")
    assert ended.stderr.count("error: ") == 1, ended.stderr
    assert "ChildFailedError" not in ended.stderr


# ---- checkpoints that cannot be read: they are noticed, named and kept

RANKS = Ranks(torch.device("cpu"))


def saved(folder: Path, *steps: int, keep: int = 9) -> Checkpoints:
    """Checkpoints with a tensor each, and an adapter file beside it."""
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        checkpoints.save(
            step, {"step": step, "adapter": {"a": torch.arange(9.0) + step}}, write_adapter
        )
    return checkpoints


def write_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"r": 4}')
    (folder / "adapter_model.safetensors").write_bytes(bytes(range(256)))


def newest_step(checkpoints: Checkpoints) -> int:
    found = checkpoints.newest(RANKS)
    assert found is not None
    assert found[0].name == f"step_{found[1]['step']:08d}"
    return found[1]["step"]


def test_every_random_generator_goes_on_where_it_was(tmp_path):
    def draw() -> list[float]:
        return [
            random.random(),
            np.random.rand(),
            torch.rand(()).item(),
            random.gauss(),
            np.random.randn(),
        ]

    torch.save({"rng": rng_state(RANKS.device)}, tmp_path / "state.pt")
    drawn = draw()
    set_rng_state(torch.load(tmp_path / "state.pt")["rng"], RANKS.device)
    assert draw() == drawn


@pytest.mark.parametrize(
    "name", ["state.pt", "adapter_model.safetensors", "adapter_config.json", "SHA256SUMS"]
)
def test_a_flipped_bit_is_noticed(tmp_path, name):
    checkpoints, path = saved(tmp_path, 8), tmp_path / "step_00000008" / name
    whole = path.read_bytes()
    for bit in random.Random(name).sample(range(8 * len(whole)), k=16):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="step_00000008"):
            checkpoints.newest(RANKS)
    path.write_bytes(whole)
    assert newest_step(checkpoints) == 8
    if shutil.which("sha256sum"):  # which anybody has
        assert os.system(f"cd {path.parent} && sha256sum --check --strict --quiet SHA256SUMS") == 0


def test_where_none_can_be_read_nothing_is_deleted(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, 2, 4, 6)
    (tmp_path / "step_00000002" / "state.pt").write_bytes(b"torn")
    (tmp_path / "step_00000004" / "state.pt").unlink()
    before, whole = tree(tmp_path), Path.open

    def broken(path, *args, **kwargs):
        if path.match("step_00000006/*"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return whole(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", broken)
    monkeypatch.setattr(Path, "read_bytes", lambda path: path.open("rb").read())
    with pytest.raises(UserError, match="no checkpoint can be read") as error:
        checkpoints.newest(RANKS)
    facts = (
        "step_00000006: [Errno 5]",
        "step_00000004: [Errno 2]",
        "step_00000002: the checksum of state.pt",
    )
    assert one_line_has(str(error.value), *facts)
    monkeypatch.undo()
    assert tree(tmp_path) == before


def test_what_was_passed_over_stays(tmp_path, messages):
    checkpoints, damaged = saved(tmp_path, 2, 4, 6, keep=1), b"torn"
    saved(tmp_path, 4, keep=9)
    for attempt in range(2):
        (tmp_path / "step_00000006" / "state.pt").write_bytes(damaged)
        assert newest_step(checkpoints) == 4
        assert one_line_has(messages[-1], "step_00000006", "skipped", "checksum of state.pt")
        checkpoints.sweep(4)
        assert messages[-1].endswith("is kept as step_00000006.unreadable" + "1" * attempt)
        saved(tmp_path, 6, keep=2)
    saved(tmp_path, 8, 10, keep=1)
    kept = {"step_00000006.unreadable", "step_00000006.unreadable1"}
    assert set(os.listdir(tmp_path)) == {"step_00000010"} | kept
    assert all((tmp_path / name / "state.pt").read_bytes() == damaged for name in kept)
