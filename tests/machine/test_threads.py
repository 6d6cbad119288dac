"""A run on a CPU takes as many threads as other programs leave cores, decides once, and resumes with that number."""

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from rocm_ext.recipes import lora_finetune_rocm

from rocm_ext.config import load
from rocm_ext.machine import threads
from rocm_ext.machine.sysfs import cpu_quota
from rocm_ext.train.lifecycle import Runtime
from tests.kit.forks import forked
from tests.kit.tiny import metrics, run_config, write_model, write_rows, write_yaml


class Machine:
    """Stands in for the clocks: other programs keep ``others`` cores busy, one number for each look, and this waits.

    Args:
        others: cores; the last number stays.
        cores: of the machine.
    """

    def __init__(self, others: Sequence[float], cores: int = 2) -> None:
        self._others, self._cores = list(others), cores
        self.now = self.idle = self.used = 0.0

    def sleep(self, seconds: float) -> None:
        busy = self._others.pop(0) if len(self._others) > 1 else self._others[0]
        self.now += seconds
        self.idle += seconds * (self._cores - busy)
        self.used += seconds * busy

    def install(self, set_attribute=setattr) -> "Machine":
        clock = SimpleNamespace(
            monotonic=lambda: self.now, process_time=lambda: 0.0, sleep=self.sleep
        )
        cpus = lambda percpu: [SimpleNamespace(idle=self.idle / self._cores)] * self._cores  # noqa: E731
        for name, value in {
            "time": clock,
            "psutil": SimpleNamespace(cpu_times=cpus),
            "os": SimpleNamespace(cpu_count=lambda: self._cores),  # no affinity
            "cpu_quota": lambda: None,
            "_TORCHS": self._cores,
        }.items():
            set_attribute(threads, name, value)
        return self


# ---------------------------------------------------------------------------------------------------- runs
@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a base model and rows."""
    top = tmp_path_factory.mktemp("threads")
    write_model(top / "base")
    write_rows(top / "rows.jsonl", 16)
    return top


def train(
    folder: Path,
    out: Path,
    *overrides: str,
    others: float = 0,
    cores: int = 2,
    environ: dict[str, str] | None = None,
) -> tuple[int, str]:
    """Train two steps an epoch, for one epoch, beside programs that keep ``others`` of ``cores`` cores busy."""
    cfg = run_config(folder / "base", folder / "rows.jsonl", out, epochs=1, startup_checks=False)
    path = write_yaml(out.with_suffix(".yaml"), {**cfg, "batch_size": 2, "sequences_per_step": 8})

    def prepare() -> None:
        for name in threads.USERS:
            os.environ.pop(name, None)
        os.environ.update(environ or {})
        Machine([others], cores).install()

    return forked(lora_finetune_rocm.main, path, *overrides, prepare=prepare)


def recorded(out: Path) -> int | str:
    return yaml.safe_load((out / "config.yaml").read_text())["cpu_threads"]


@pytest.mark.wide
def test_a_run_leaves_cores_to_other_programs(folder, tmp_path):
    out, resumed = tmp_path / "out", "resume_from_checkpoint=True"
    for overrides, machine, number, says in (
        (
            ["max_steps_per_epoch=1"],
            {"others": 1},
            1,
            "cpu_threads 1 (other programs leave 1.0 cores)",
        ),
        ([resumed], {}, 1, "cpu_threads 1 (as the run began)"),
        (["overwrite_output_dir=True"], {}, 2, "cpu_threads 2"),
        ([resumed], {"cores": 1}, 2, "cpu_threads=1 is faster"),
        ([resumed, "cpu_threads=1"], {}, 1, ""),
    ):
        code, messages = train(folder, out, *overrides, **machine)
        assert (code, recorded(out)) == (0, number), messages
        assert says in messages
        assert len(metrics(out)) == (1 if machine == {"others": 1} else 2)
    (out / "config.yaml").write_text("]")  # damaged: the run says so and decides anew
    code, messages = train(folder, out, resumed)
    assert (code, recorded(out)) == (0, 2), messages
    assert "config.yaml holds no YAML mapping" in messages


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(("overrides", "environ", "reason"), [
    (["cpu_threads=2"], {}, "as the config says"),
    ([], {"OMP_NUM_THREADS": "2"}, "OMP_NUM_THREADS is set"),
])  # fmt: skip
def test_a_number_that_the_user_chose_stays(folder, tmp_path, overrides, environ, reason):
    code, messages = train(folder, tmp_path / "out", *overrides, others=2, environ=environ)
    assert (code, recorded(tmp_path / "out")) == (0, 2), messages
    assert f"cpu_threads 2 ({reason}" in messages


def test_a_recipe_that_samples_records_the_number_too(folder, tmp_path, monkeypatch):
    """Its learner has a config of its own, which is made anew for each training."""
    own = load("lora_finetune_rocm", str(write_yaml(tmp_path / "run.yaml", run_config(
        folder / "base", folder / "rows.jsonl", tmp_path / "out"))), [])  # fmt: skip
    whole = OmegaConf.create({**own, "cycles": 3})
    for name in threads.USERS:
        monkeypatch.delenv(name, raising=False)
    Machine([1]).install(monkeypatch.setattr)
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    Runtime.open(own, whole).ranks.close()
    assert (own.cpu_threads, whole.cpu_threads, chosen) == (1, 1, [1])


# ---------------------------------------------------------------------------------------------------- the choice
@pytest.mark.parametrize(("cores", "others", "expected"), [
    (2, 0.3, 2), (2, 2, 1), (1, 1, 1), (8, 0.6, 7), (8, 8, 1),
])  # fmt: skip
def test_threads_beside_busy_programs(monkeypatch, cores, others, expected):
    Machine([others], cores).install(monkeypatch.setattr)
    assert threads.choose_threads({})[0] == expected


def test_a_program_that_ends_meanwhile_costs_no_thread(monkeypatch):
    Machine([2, 2, 0]).install(monkeypatch.setattr)
    assert threads.choose_threads({})[0] == 2
    Machine([0, 0, 2]).install(monkeypatch.setattr)
    assert threads.choose_threads({})[0] == 1


def test_a_quota_limits_the_threads_and_other_programs_share_it(tmp_path, monkeypatch):
    group = tmp_path / "sys/fs/cgroup/box"
    for path, text in (
        ("proc/self/cgroup", "0::/box"),
        ("sys/fs/cgroup/box/cpu.max", "350000 100000"),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    for inside, expected in ((0, 3), (2, 2), (3.5, 1)):
        machine = Machine([0], cores=8).install(monkeypatch.setattr)

        def used(machine=machine, inside=inside):
            (group / "cpu.stat").write_text(f"usage_usec {int(1e6 * inside * machine.now)}\nnr 1\n")
            return cpu_quota(tmp_path).used()

        monkeypatch.setattr(
            threads, "cpu_quota", lambda used=used: SimpleNamespace(cpus=3.5, used=used)
        )
        assert cpu_quota(tmp_path).cpus == 3.5
        assert threads.cores() == 3.5
        assert threads.choose_threads({})[0] == expected, inside


def test_only_the_cpus_of_this_process_count(monkeypatch):
    idle = [SimpleNamespace(idle=float(10**number), iowait=2.0) for number in range(4)]
    monkeypatch.setattr(threads, "psutil", SimpleNamespace(cpu_times=lambda percpu: idle))
    monkeypatch.setattr(threads, "os", SimpleNamespace(sched_getaffinity=lambda pid: {1, 3}))
    monkeypatch.setattr(threads, "cpu_quota", lambda: None)
    assert threads.Clocks.read(None).idle == 10 + 1000 + 4
    assert threads.cores() == 2
