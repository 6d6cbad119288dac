"""A run on a CPU takes as many threads as other programs leave cores, and no number when the user says one."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rocm_ext.recipes import lora_finetune_rocm

from rocm_ext.generation import LocalEngine, Sampling
from rocm_ext.hardware import threads
from rocm_ext.hardware.cgroups import cpu_quota
from tests.forks import forked
from tests.test_generation import Words, ask, model, prompts
from tests.tiny import metrics, run_config, write_model, write_rows, write_yaml

CPU = torch.device("cpu")


class Machine:
    """Eight cores, on which each look at the clock takes three seconds and other programs want ``others()`` cores.

    It stands in for the clocks and for torch's threads, of which the process keeps each one busy.

    Args:
        others: gives the cores that other programs want, for each three seconds.
    """

    def __init__(self, others: Callable[[], float], cores: int = 8) -> None:
        self._others, self._cores = others, cores
        self.now = self.own = self.idle = self.used = 0.0
        self.threads, self.chosen = cores, []

    def monotonic(self) -> float:
        others = self._others()
        # the kernel shares the cores: both sides get what they want, or a part of it
        part = min(1.0, self._cores / (self.threads + others))
        self.now += 3
        self.own += 3 * self.threads * part
        self.used += 3 * (self.threads + others) * part
        self.idle += 3 * (self._cores - (self.threads + others) * part)
        return self.now

    def set_threads(self, count: int) -> None:
        self.threads = count
        self.chosen.append(count)

    def install(self, set_attribute=setattr) -> None:
        set_attribute(threads, "time", SimpleNamespace(monotonic=self.monotonic, process_time=lambda: self.own))
        each = lambda percpu: [SimpleNamespace(idle=self.idle / self._cores)] * self._cores  # noqa: E731
        set_attribute(threads, "psutil", SimpleNamespace(cpu_times=each))
        set_attribute(threads, "os", SimpleNamespace())  # no affinity
        set_attribute(threads, "cpu_quota", lambda: None)
        set_attribute(torch, "get_num_threads", lambda: self.threads)
        set_attribute(torch, "set_num_threads", self.set_threads)


def wants(*phases: tuple[int, float]) -> Callable[[], float]:
    """Cores that other programs want: (times, cores), … and the last for ever."""
    times = iter([cores for count, cores in phases for _ in range(count)])
    return lambda: next(times, phases[-1][1])


@pytest.fixture(autouse=True)
def _no_policy_stays(monkeypatch):
    monkeypatch.setattr(threads, "_threads", None)


# ---------------------------------------------------------------------------------------------------- runs
@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a base model and rows."""
    top = tmp_path_factory.mktemp("threads")
    write_model(top / "base")
    write_rows(top / "rows.jsonl", 32)
    return top


def train(folder: Path, out: Path, *overrides: str, environ: dict[str, str] | None = None) -> tuple[int, str]:
    """Train 8 steps of 4 micro-batches beside programs that want 5 of 8 cores for a while."""
    cfg = run_config(folder / "base", folder / "rows.jsonl", out, epochs=2, startup_checks=False)
    path = write_yaml(out.with_suffix(".yaml"), {**cfg, "batch_size": 2, "sequences_per_step": 8})

    def prepare() -> None:
        for name in threads.USERS:
            os.environ.pop(name, None)
        os.environ.update(environ or {})
        Machine(wants((6, 0), (12, 5), (1, 0))).install()

    return forked(lora_finetune_rocm.main, path, *overrides, prepare=prepare)


def changes(messages: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in re.findall(r"cpu_threads: (\d+) of (\d+), because other programs", messages)]


def test_training_leaves_cores_that_others_use_and_takes_them_back(folder, tmp_path):
    code, messages = train(folder, tmp_path / "out")
    assert code == 0, messages
    found = changes(messages)
    assert found[0][0] < 8, messages
    assert min(found)[0] == 4, messages
    assert found[-1] == (8, 8), messages
    assert len(found) <= 5, "one line for each change"


@pytest.mark.parametrize(
    ("overrides", "environ"),
    [
        (["cpu_threads=8"], {}),
        (["cudnn_deterministic_mode=True"], {}),
        ([], {"OMP_NUM_THREADS": "8"}),
        ([], {"MKL_NUM_THREADS": "8"}),
    ],
)
def test_a_number_that_the_user_chose_stays(folder, tmp_path, overrides, environ):
    code, messages = train(folder, tmp_path / "out", *overrides, environ=environ)
    assert (code, changes(messages)) == (0, []), messages


def test_a_run_goes_on_with_another_number(folder, tmp_path):
    out = tmp_path / "out"
    assert train(folder, out, "cpu_threads=2", "max_steps_per_epoch=2", "epochs=1")[0] == 0
    code, messages = train(folder, out, "resume_from_checkpoint=True", "max_steps_per_epoch=2")
    assert code == 0, messages
    assert len(metrics(out)) == 4


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", "null", "True"])
def test_other_values_are_refused(folder, tmp_path, value):
    code, messages = train(folder, tmp_path / "out", f"cpu_threads={value}")
    assert code == 1
    assert re.search(r"error: cpu_threads is .*; expected a whole number of at least 1, or auto", messages), messages


def test_sampling_leaves_cores_that_others_use(monkeypatch):
    machine = Machine(wants((2, 0), (1, 7)))
    machine.install(monkeypatch.setattr)
    threads.use_threads("auto", CPU, {})
    engine = LocalEngine(decoder=model(), tokenizer=Words(), free_memory=lambda: 2**30)
    with engine.session() as session:
        done = list(session.generate(ask(prompts(2, 4)), Sampling(12)))
    assert len(done) >= 2
    assert machine.threads <= 2


# ---------------------------------------------------------------------------------------------------- the choice
@pytest.fixture
def follow(monkeypatch) -> Callable[..., list[int]]:
    """Threads after each of ``times`` measurements beside ``others``."""

    def follow(others: Callable[[], float], times: int, cores: int = 8) -> list[int]:
        machine = Machine(others, cores)
        machine.install(monkeypatch.setattr)
        threads.use_threads("auto", CPU, {})
        found = []
        for _ in range(times):
            threads.follow_free_cores()
            found.append(machine.threads)
        return found

    return follow


def test_two_cores_beside_busy_programs_compute_with_one_thread(follow):
    for others in (1, 2, 10):
        assert set(follow(lambda others=others: others, 20, cores=2)) == {1}
    assert set(follow(lambda: 0.3, 20, cores=2)) == {2}, "a little work of others costs less than a thread"


@pytest.mark.parametrize(
    ("others", "expected"),
    [(0, 8), (0.4, 8), (0.6, 7), (1, 7), (1.5, 7), (2.3, 6), (4, 4), (8, 2), (40, 1)],
)
def test_an_even_load_does_not_make_the_number_swing(follow, others, expected):
    assert follow(lambda: others, 60)[20:] == [expected] * 40


def test_a_short_pause_of_others_brings_no_thread_back(follow):
    phases = [(6, 6.0), (3, 0.0)] * 10
    found = follow(wants(*phases), 40)
    assert found[5:] == [found[5]] * 35
    assert found[5] <= 3


def test_a_thread_of_python_gets_the_present_number(follow):
    assert follow(lambda: 7, 10)[-1] <= 2
    torch.set_num_threads(8)  # as a new thread of Python begins
    threads.follow_free_cores()
    assert torch.get_num_threads() <= 2


def test_another_run_in_this_process_begins_with_all(follow, monkeypatch):
    machine = Machine(lambda: 7)
    machine.install(monkeypatch.setattr)
    threads.use_threads("auto", CPU, {})
    for _ in range(4):
        threads.follow_free_cores()
    assert machine.threads < 8
    threads.use_threads("auto", CPU, {"OMP_NUM_THREADS": "8"})
    assert machine.threads == 8
    threads.use_threads("auto", torch.device("cuda"), {})
    threads.follow_free_cores()
    assert machine.threads == 8


# ---------------------------------------------------------------------------------------------------- limits
def test_a_quota_limits_the_threads_and_other_programs_share_it(tmp_path, monkeypatch):
    machine = Machine(lambda: 0)
    machine.install(monkeypatch.setattr)
    monkeypatch.setattr(threads, "cpu_quota", lambda: cpu_quota(tmp_path))
    group = tmp_path / "sys/fs/cgroup/box"
    for path, text in (("proc/self/cgroup", "0::/box"), ("sys/fs/cgroup/box/cpu.max", "350000 100000")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    threads.use_threads("auto", CPU, {})
    assert machine.threads == 3
    for others, expected in ((0, 3), (2, 1)):
        for _ in range(6):
            (group / "cpu.stat").write_text(f"usage_usec {int(1e6 * machine.own + 1e6 * others * machine.now)}\nnr 1\n")
            threads.follow_free_cores()
        assert machine.threads == expected, others


def test_the_quota_of_version_1_counts_nanoseconds(tmp_path):
    assert cpu_quota(tmp_path) is None
    group = tmp_path / "sys/fs/cgroup/cpu/box"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,cpuacct:/box\n")
    for name, value in (("cpu.cfs_quota_us", 150000), ("cpu.cfs_period_us", 100000)):
        (group / name).write_text(f"{value}\n")
    quota = cpu_quota(tmp_path)
    assert (quota.cpus, quota.used()) == (1.5, None)
    (group / "cpuacct.usage").write_text("2500000000\n")
    assert quota.used() == 2.5


def test_only_the_cpus_of_this_process_count(monkeypatch):
    idle = [SimpleNamespace(idle=float(10**number), iowait=2.0) for number in range(4)]
    monkeypatch.setattr(threads, "psutil", SimpleNamespace(cpu_times=lambda percpu: idle))
    monkeypatch.setattr(threads, "os", SimpleNamespace(sched_getaffinity=lambda pid: {1, 3}))
    assert threads.Clocks.read(None).idle == 10 + 1000 + 4


def test_the_kernel_counts_what_this_process_uses():
    before = threads.Clocks.read(None)
    while threads.Clocks.read(None).own - before.own < 0.1:
        pass
    after = threads.Clocks.read(None)
    assert after.now - before.now >= 0.1 - 0.01
    assert 0 <= after.idle - before.idle <= (after.now - before.now) * os.cpu_count() + 0.1
