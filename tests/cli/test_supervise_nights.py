"""`rocm-ext supervise` at night: hours, a server beside the run, and heat. No night changes the adapter."""

import contextlib
import json
import os
import re
import signal
import time
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import rocm_ext.recipes.lora_finetune_rocm as sft
from safetensors.torch import load_file

from rocm_ext import cli
from rocm_ext.machine import budget, cooling
from rocm_ext.machine.sysfs import Sensor, temperatures
from rocm_ext.supervise import window
from rocm_ext.train import lifecycle
from tests.cli.test_supervise import command, run, start, trouble
from tests.kit import forks, sysfs
from tests.recipes.test_resume import (  # noqa: F401
    assert_equal,
    at,
    folder,
    make,
    reference,
    steps,
    wait_for,
)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="supervise needs Linux")
STUB = """#!/bin/sh
# systemctl: the user's systemd has the unit "llama.service", and the alias "llama" for it
case "$*" in
--user\\ show*LoadState\\ llama|--user\\ show*LoadState\\ llama.service) echo loaded ;;
*show*Id*) echo llama.service ;;
*show*LoadState*) echo not-found ;;
*show*ActiveState*) cat "{top}/state" ;;
*stop*) [ -e "{top}/stuck" ] && exit 5
    [ -e "{top}/slow" ] && sleep 60; echo inactive >"{top}/state"; echo stop >>"{top}/events" ;;
*start*) [ -e "{top}/broken" ] && exit 6; touch "{top}/starting"
    [ -e "{top}/lazy" ] && sleep 2; echo active >"{top}/state"; echo start >>"{top}/events" ;;
esac
"""


class Night:
    """A box at night: a clock that the test sets, a stub of systemd with a server, and the events in their order."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self.says("23:30")
        self.server("active")
        stub = top / "bin/systemctl"
        stub.parent.mkdir()
        stub.write_text(STUB.format(top=top))
        stub.chmod(0o755)
        tell = f'echo "$SUPERVISE_EVENT $SUPERVISE_STEP" >>{top}/events'
        self.options = ("--between", "23:00-07:00", "--pause", 0, "--notify", tell)
        self.beside = ("--beside", "llama.service", *self.options)

    def says(self, clock: str) -> None:
        """Set the clock."""
        aside = self._top / "clock.tmp"
        aside.write_text(clock)
        aside.rename(self._top / "clock")

    def now(self) -> datetime:
        return datetime.strptime((self._top / "clock").read_text(), "%H:%M")

    def server(self, state: str) -> None:
        (self._top / "state").write_text(state)

    @property
    def serves(self) -> bool:
        return (self._top / "state").read_text().strip() == "active"

    @property
    def events(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return (self._top / "events").read_text().splitlines()
        return []

    def wait_for(self, event: str, count: int = 1) -> None:
        """Wait until an event has come ``count`` times."""
        end = time.monotonic() + 120
        while sum(line.startswith(event) for line in self.events) < count:
            assert time.monotonic() < end, self.events
            time.sleep(0.02)


@pytest.fixture
def night(tmp_path, monkeypatch) -> Night:
    night = Night(tmp_path)
    monkeypatch.setattr(window, "datetime", night)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    return night


def records(top: Path) -> list[Path]:
    return list((top / "states/torchtune-rocm").glob("*.json"))


def await_records(top: Path, count: int) -> None:
    """Wait until so many servers are recorded as stopped."""
    end = time.monotonic() + 120
    while len(records(top)) != count:
        assert time.monotonic() < end
        time.sleep(0.02)


# ---- hours, and a server


def test_a_run_of_two_nights(make, reference, night, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    path = make(out, metric_logger=trouble(tmp_path, s4="signal", s7="kill"))
    night.says("22:59")
    pid, receive = start(*night.beside, *command(path))
    time.sleep(1)
    assert not (out / "metrics.jsonl").exists()
    assert night.serves
    night.says("23:00")
    wait_for(tmp_path / "trouble_4")
    assert not night.serves
    night.says("07:00")
    night.wait_for("paused")
    assert night.serves
    assert steps(out)[-1] == 5
    night.says("23:30")
    code, said = forks.wait(pid, receive)
    assert code == 0, said
    assert "paused: the run is saved at step 5; it goes on at 23:00" in said
    expected = ["stop", "start", "paused 5", "stop", "restarting 7", "finished 10", "start"]
    assert night.events == expected
    assert records(tmp_path) == []
    assert_equal(out, reference)


@pytest.mark.wide
@pytest.mark.parametrize("by_commands", [False, True])
def test_a_killed_supervisor_leaves_no_dead_server(
    make,  # noqa: F811
    reference,  # noqa: F811
    night,
    tmp_path,
    by_commands,
):
    out = tmp_path / "out"
    beside = night.beside
    if by_commands:
        events = tmp_path / "events"
        # as pkill, it fails where no server runs
        stop = f"grep -qx active {tmp_path}/state || exit 1; echo inactive >{tmp_path}/state; echo stop >>{events}"
        again = f'echo active >{tmp_path}/state; echo "start $SUPERVISE_ADAPTER" >>{events}'
        beside = ("--beside-stop", stop, "--beside-start", again, *night.options)
    path = make(out, metric_logger=trouble(tmp_path, s4="signal"))
    pid, receive = start(*beside, *command(path))
    wait_for(tmp_path / "trouble_4")
    assert not night.serves
    os.kill(pid, signal.SIGKILL)
    assert forks.wait(pid, receive)[0] == -signal.SIGKILL
    night.wait_for("start")
    assert night.serves
    assert steps(out)[-1] == 5, "it has saved first"
    await_records(tmp_path, 0)
    code, said = run(*beside, *command(path))
    assert code == 0, said
    assert night.serves
    assert_equal(out, reference)
    if by_commands:
        started = [line for line in night.events if line.startswith("start ")]
        assert started == [f"start {out / 'checkpoints/step_00000005'}", f"start {out / 'adapter'}"]


@pytest.mark.wide
def test_the_next_supervisor_starts_a_server_left_behind(make, night, tmp_path):  # noqa: F811
    """The process that starts the server is killed, too, as at the end of a systemd service."""
    path = make(tmp_path / "out", metric_logger=trouble(tmp_path, s4="signal"))
    pid, receive = start(*night.beside, *command(path))
    wait_for(tmp_path / "trouble_4")
    (record,) = records(tmp_path)
    for process in psutil.Process(pid).children():
        if str(record) in process.cmdline():
            process.kill()
    other = make(tmp_path / "other", epochs=1)
    alias = ("--beside", "llama", *night.options)
    second, said_there = start(*alias, *command(other))
    wait_for(tmp_path / "other")
    time.sleep(1)
    os.kill(second, signal.SIGTERM)
    code, said = forks.wait(second, said_there)
    assert code == 128 + signal.SIGTERM
    assert f"llama.service is stopped for {tmp_path / 'out'}" in said
    assert not (tmp_path / "other/metrics.jsonl").exists()
    os.kill(pid, signal.SIGKILL)
    forks.wait(pid, receive)
    assert not night.serves
    night.says("12:00")
    pid, receive = start(*night.beside, *command(other))
    night.wait_for("start")
    os.kill(pid, signal.SIGTERM)
    assert forks.wait(pid, receive)[0] == 128 + signal.SIGTERM
    assert night.serves
    assert records(tmp_path) == []
    night.says("23:00")
    night.server("inactive")
    code, said = run(*night.beside, *command(other))
    assert code == 0, said
    assert not night.serves, "it was found like that"


def test_a_server_that_does_not_stop_or_start(make, night, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    path = make(out, epochs=1)
    (tmp_path / "stuck").touch()
    code, said = run(*night.beside, *command(path))
    assert code == 1
    assert "llama.service did not stop: systemctl --user" in said.splitlines()[-1]
    assert not (out / "metrics.jsonl").exists()
    assert night.serves
    assert night.events == ["failed 0"], "a server that runs is not started"
    assert records(tmp_path) == []
    (tmp_path / "stuck").unlink()
    (tmp_path / "slow").touch()
    pid, receive = start(*night.beside, *command(path))
    await_records(tmp_path, 1)
    os.kill(pid, signal.SIGTERM)
    assert forks.wait(pid, receive)[0] == 128 + signal.SIGTERM
    assert records(tmp_path) == []
    (tmp_path / "slow").unlink()
    (tmp_path / "broken").touch()
    code, said = run(*night.beside, *command(path))
    assert "failed: llama.service did not start: systemctl --user" in said
    assert night.events == ["failed 0", "stop", "finished 5", "failed 5"]
    assert len(records(tmp_path)) == 1, "the next supervisor tries again"
    (tmp_path / "broken").unlink()
    assert run(*night.beside, *command(path))[0] == 0
    assert night.serves
    assert records(tmp_path) == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_while_the_server_starts(make, night, tmp_path, signum):  # noqa: F811
    path = make(tmp_path / "out", epochs=1)
    (tmp_path / "lazy").touch()
    pid, receive = start(*night.beside, *command(path))
    wait_for(tmp_path / "starting")
    os.kill(pid, signum)
    code, said = forks.wait(pid, receive)
    assert code == (0 if signum == signal.SIGTERM else -signum), said
    await_records(tmp_path, 0)
    assert night.serves


def test_a_stretch_of_hours(make, reference, monkeypatch, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    path = make(out, metric_logger=trouble(tmp_path, s3="signal"))
    clock = tmp_path / "clock"
    clock.write_text("0")
    monkeypatch.setattr(window, "_now", lambda: float(clock.read_text() or 0))
    pid, receive = start("--hours", "0.001", *command(path))
    wait_for(tmp_path / "trouble_3")
    clock.write_text("4")
    code, said = forks.wait(pid, receive)
    assert code == 0, said
    assert "paused: the run is saved at step" in said
    assert run(*command(path))[0] == 0
    assert_equal(out, reference)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--between", "23-7"), "'23-7' is no span of hours such as 23:00-07:00"),
        (("--between", "23:60-07:00"), "minute must be in 0..59"),
        (("--between", "07:00-07:00"), "begins and ends at the same time"),
        (("--between", "23:00-07:00", "--hours", 6), "name one"),
        (("--beside", "absent.service"), "found no such unit"),
        (("--beside", "llama.service", "--beside-stop", "true"), "not both"),
        (("--beside-stop", "true"), "--beside-stop and --beside-start need each other"),
        (("--cool", 200), "is not a number from 40 to 120"),
        (("--cool", 95), "pause_at_celsius is 95, and the kernel shows no temperature"),
    ],
)
def test_wrong_options_are_named(make, night, tmp_path, monkeypatch, options, expected):  # noqa: F811
    monkeypatch.setattr(cooling, "temperatures", lambda root: [])
    code, said = run(*options, *command(make(tmp_path / "out")))
    assert code in (1, 2)
    assert expected in said.splitlines()[-1], said
    assert night.events == []


# ---- heat


class Heat:
    """Fake time in which a hot Strix Halo box cools down by 2 °C a second of a pause, and warms up at each reading."""

    def __init__(self, top: Path) -> None:
        self.root = sysfs.strix_halo(top / "root")
        self._file = self.root / "sys/class/hwmon/hwmon3/temp1_input"
        self._celsius = 97.0
        self._seconds = 0.0
        self._looks = 0
        self.stop_at = 10**9  # seconds
        self.lost = range(0)  # looks without a sensor
        self.cools = True

    def monotonic(self) -> float:
        self._seconds += 3
        self._warm(+1)
        return self._seconds

    def sleep(self, seconds: float) -> None:
        self._seconds += seconds
        self._warm(-4 * seconds)
        if self._seconds > self.stop_at:
            self.stop_at = 10**9
            os.kill(os.getpid(), signal.SIGTERM)

    def read(self, root: Path) -> list[Sensor]:
        self._looks += 1
        return [] if self._looks in self.lost else temperatures(self.root)

    def _warm(self, by: float) -> None:
        self._celsius += max(by, 0) if not self.cools else by
        self._file.write_text(f"{self._celsius * 1000:.0f}\n")


@pytest.fixture
def heat(tmp_path, monkeypatch) -> Heat:
    heat = Heat(tmp_path)
    monkeypatch.setattr(cooling, "time", heat)
    monkeypatch.setattr(cooling, "temperatures", heat.read)
    return heat


def test_pauses_change_nothing_and_are_reported(make, reference, heat, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "out"
    said = forks.succeed(sft.main, make(out), "pause_at_celsius=95")
    assert re.search(r"cpu Tctl is at \d+ °C: the run pauses until 91 °C", said), said
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    pauses = [line["paused"] for line in lines if "paused" in line]
    assert len(pauses) > 1
    assert all(0 < pause < 60 for pause in pauses)
    name = "adapter/adapter_model.safetensors"
    assert (out / name).read_bytes() == (reference / name).read_bytes()
    page = tmp_path / "report.html"
    assert cli.main(["report", str(out), "--output", str(page)]) == 0
    assert "Pauses for heat" in page.read_text()


def test_a_signal_ends_a_pause(make, heat, tmp_path):  # noqa: F811
    heat.stop_at = 1
    out = tmp_path / "out"
    code, said = forks.forked(sft.main, make(out), "pause_at_celsius=41")
    assert code == 128 + signal.SIGTERM, said
    assert "all saved" in said
    assert load_file(out / f"checkpoints/step_0000000{steps(out)[-1]}/adapter_model.safetensors")


def test_a_run_without_sensors_goes_on(make, heat, tmp_path):  # noqa: F811
    """They vanish, as after a reset of the driver, and come back; then the box stays hot."""
    heat.lost = range(20, 24)
    heat.cools = False
    said = forks.succeed(sft.main, make(tmp_path / "out"), "pause_at_celsius=95")
    lost = said.index("no temperature can be read any more")
    assert said.index("temperatures can be read again") > lost
    assert said.count("after a pause of 5m00s. The run goes on, and does not pause for 30m00s") == 1


# ---- memory


def hold(root: Path, used: int, processes: int) -> None:
    """Set the GTT in use, and what a process holds of it."""
    (file,) = root.glob("sys/devices/*/*/mem_info_gtt_used")
    file.write_text(f"{used}\n")
    lines = ("drm-driver:\tamdgpu", "drm-client-id:\t7", f"drm-memory-gtt:\t{processes >> 10} KiB")
    sysfs.write(root, {"proc/4711/fdinfo/5": "\n".join(lines) + "\n", "proc/4711/comm": "llama\n"})


@pytest.mark.parametrize(
    ("living", "left", "frees", "seconds"),
    [
        (0, 61, lambda second: 10 / 60 * second, 300),  # slowly, for five minutes
        (0, 61, lambda second: 20 * max(0, second - 25), 30),  # it stalls before it begins
        (30, 61, lambda second: 4 * second, 9),  # a server stays
        (0, 61, lambda second: 0, 30),  # until a reboot
        (61, 61, lambda second: (second // 3) % 2 / 10, 0),  # it serves
        (0, 3, lambda second: 0, 0),  # a desktop
    ],
)
def test_memory_that_drains_is_awaited(tmp_path, monkeypatch, living, left, frees, seconds):
    root = sysfs.strix_halo(tmp_path)
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)

    def sleep(passing: float) -> None:
        clock.now += passing
        used = max(living * sysfs.GIB, int((left - frees(clock.now)) * sysfs.GIB))
        hold(root, used, living * sysfs.GIB)

    clock.sleep = sleep
    sleep(0)
    monkeypatch.setattr(budget, "time", clock)
    beats = []
    remains = budget.wait_while_freed(root, lambda: beats.append(clock.now))
    assert clock.now == pytest.approx(seconds, abs=3)
    assert len(beats) == clock.now / 3
    in_use = left - frees(clock.now) - living
    assert remains / sysfs.GIB == pytest.approx(max(0, in_use), abs=0.5)


@pytest.mark.wide
def test_memory_of_others_is_worth_another_try(make, tmp_path, monkeypatch):  # noqa: F811
    held = 3 * sysfs.GIB
    monkeypatch.setattr(lifecycle.Runtime, "held_by_others", lambda self: held)
    path = make(tmp_path / "out")
    for limited_by_it in (True, False):
        free = partial(budget_of, limited_by_it)
        monkeypatch.setattr(lifecycle, "memory_budget", free)
        code, said = run("--pause", 0, "--deaths", 2, *command(path))
        assert code == 1
        assert said.count("supervise: restarting") == limited_by_it, said
        others = "other processes hold 3.0 GiB, and without them it fits" in said.splitlines()[-1]
        assert others == limited_by_it


def budget_of(limited_by_memory: bool, *_: object, taken: int = 0) -> tuple[int, str]:
    return 2**20 + limited_by_memory * taken, "the test's"


@pytest.mark.wide
def test_a_night_with_less_memory_changes_nothing(make, tmp_path, monkeypatch):  # noqa: F811
    """Layers are recomputed, and micro-batches, which decide what dropout draws, stay as they are."""
    changes = {"tokens_per_micro_batch": "auto", "enable_activation_checkpointing": "auto"}
    whole, out = tmp_path / "whole", tmp_path / "out"
    said = forks.succeed(sft.main, make(whole, **changes))
    tokens = re.search(r"micro-batches: (\d+) tokens", said)[1]
    path = make(out, metric_logger=at(5, signal.SIGTERM), **changes)
    assert forks.forked(sft.main, path)[0] == 128 + signal.SIGTERM
    reason = "MemAvailable 3 GiB less 1 GiB"
    planned = json.loads((whole / "summary.json").read_text())["planned_memory"]
    monkeypatch.setattr(lifecycle, "memory_budget", lambda *a, **k: (planned - 1, reason))
    code, said = forks.forked(sft.main, path, forks.RESUME)
    assert code == 0, said
    assert f"micro-batches: {tokens} tokens, as before the run was resumed" in said
    (line,) = [line for line in said.splitlines() if line.startswith("the memory plan is another")]
    assert re.search(r"activation checkpointing of [12] layers \(was 0\)", line)
    assert reason in line
    name = "adapter/adapter_model.safetensors"
    assert (out / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.wide
def test_a_resumed_run_plans_anew_if_it_is_asked_to(make, tmp_path):  # noqa: F811
    fixed = {"tokens_per_micro_batch": 80, "metric_logger": at(5, signal.SIGTERM)}
    path = make(tmp_path / "out", **fixed)
    code, said = forks.forked(sft.main, path)
    assert code == 128 + signal.SIGTERM, said
    line = forks.refused(sft.main, path, forks.RESUME, "tokens_per_micro_batch=auto")
    assert "tokens_per_micro_batch, which dropout depends on: was 80" in line
