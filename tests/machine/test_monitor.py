"""Counters of recorded machines, ``rocm-ext monitor``, and ``hardware.jsonl`` of real runs."""

import builtins
import json
import os
import re
import select
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rocm_ext.recipes import lora_finetune_rocm

from rocm_ext import cli
from rocm_ext.machine import counters
from rocm_ext.machine.counters import Counters, HardwareLog, recording
from rocm_ext.train import lifecycle
from tests.kit import sysfs
from tests.kit.damage import spoil_some
from tests.kit.forks import succeed
from tests.kit.lines import one_line_has
from tests.kit.sysfs import GIB
from tests.kit.tiny import run_config, write_model, write_rows, write_yaml

COMMAND = [sys.executable, "-m", "rocm_ext.cli", "monitor"]
THREAD = "hardware counters"
UNITS = {"id", "name", *counters._MOST}


def hwmon(root: Path) -> Path:
    """Return the folder with the only card's sensors."""
    return next(root.glob("sys/devices/pci*/*/hwmon/hwmon*"))


def gpus(root: Path) -> list[dict]:
    return Counters(root).read()["gpus"]


def monitor(capsys, *arguments: object) -> list[dict]:
    """Return the objects that ``rocm-ext monitor --json`` prints."""
    assert cli.main(["monitor", "--json", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return [json.loads(line) for line in out.splitlines()]


def read_lines(path: Path) -> list[dict]:
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


# -------------------------------------------------------------------------------------------------- AMD
def test_strix_halo(tmp_path, capsys):
    (reading,) = monitor(capsys, "--count", 1, "--root", sysfs.strix_halo(tmp_path))
    assert abs(reading["time"] - time.time()) < 5
    assert reading["gpus"] == [
        {"id": "0000:c3:00.0", "name": "Radeon 8060S Graphics", "busy": 97, "vram_used": GIB // 4,
         "vram_total": GIB // 2, "gtt_used": 61 * GIB, "gtt_total": 120 * GIB, "power": 120.021, "temperature": 97.375,
         "temperature_limit": 100.0, "clock": 2876.0}
    ]  # fmt: skip
    assert reading["host"] == {}, "this host is not the one whose files these are"


def test_eight_mi300x(tmp_path, capsys):
    (reading,) = monitor(capsys, "--count", 1, "--root", sysfs.mi300x(tmp_path))
    found = reading["gpus"]
    assert [gpu["id"] for gpu in found] == [f"0000:{slot}:00.0" for slot in sysfs.MI300X_SLOTS], (
        "PCI order, no others"
    )
    for number, gpu in enumerate(found):
        assert gpu["name"] == "AMD Instinct MI300X OAM"
        assert (gpu["busy"], gpu["vram_used"], gpu["vram_total"]) == (
            number * 10,
            number * GIB,
            192 * GIB,
        )
        assert (gpu["power"], gpu["temperature"], gpu["memory_temperature"]) == (
            140 + number,
            40 + number,
            30 + number,
        )
        assert (gpu["clock"], gpu["memory_clock"]) == (2100, 1300)
        assert "fan" not in gpu


def test_the_hottest_spot_is_the_temperature(tmp_path):
    (gpu,) = gpus(sysfs.mi50(tmp_path))
    assert (gpu["temperature"], gpu["memory_temperature"], gpu["fan"]) == (93, 88, 3321)
    limits = [gpu[f"{key}_limit"] for key in ("temperature", "memory_temperature", "power")]
    assert limits == [100, 94, 225]
    assert gpu["name"] == "AMD GPU 66A1", "no list of names there"
    assert not {"gtt_used", "gtt_total"} & set(gpu)
    (hwmon(tmp_path) / "temp2_crit").unlink()
    assert gpus(tmp_path)[0]["temperature_limit"] == 105, "the emergency's"
    (hwmon(tmp_path) / "temp2_input").unlink()
    assert gpus(tmp_path)[0]["temperature"] == 71, "the edge"
    junk = tmp_path / "sys/class/hwmon/hwmon0"
    sysfs.write(junk, {"name": "k10temp\n", "temp1_label": "Tctl\n", "temp1_input": "95000\n"})
    assert gpus(tmp_path)[0]["temperature"] == 95
    (hwmon(tmp_path) / "temp2_input").write_text("93000\n")
    assert gpus(tmp_path)[0]["temperature"] == 93, "the processor beside a card does not count"


def test_a_sleeping_gpu_is_left_asleep(tmp_path, monkeypatch):
    root = sysfs.strix_halo(tmp_path)
    (hwmon(root).parents[1] / "power/runtime_status").write_text("suspended\n")
    opened = []

    def noted(path, *args, **kwargs):
        opened.append(path)
        return builtins.open(path, *args, **kwargs)

    monkeypatch.setattr("rocm_ext.machine.sysfs.open", noted, raising=False)
    (gpu,) = gpus(root)
    assert gpu["gtt_total"] == 120 * GIB
    assert "busy" not in gpu
    assert not [path for path in opened if "hwmon" in str(path) or "busy" in str(path)]
    sysfs.mi50(root)
    (root / "sys/class/drm/card0/device/hwmon/hwmon2/temp2_input").unlink()
    awake, asleep = gpus(root)
    assert awake["temperature"] == 97.375, "the processor is as hot as the GPU with an edge alone"
    assert "temperature" not in asleep


def test_files_that_vanish_and_come_back(tmp_path):
    root = sysfs.strix_halo(tmp_path)
    open_counters = Counters(root)
    whole = open_counters.read()["gpus"]
    power = hwmon(root) / "power1_average"
    power.rename(power.with_name("gone"))
    without = open_counters.read()["gpus"][0]
    assert without == {key: value for key, value in whole[0].items() if key != "power"}
    power.with_name("gone").rename(power.with_name("power1_input"))
    assert open_counters.read()["gpus"] == whole
    (root / "sys/devices").rename(root / "sys/reset")
    assert open_counters.read()["gpus"] == [], "the driver is being loaded again"
    (root / "sys/reset").rename(root / "sys/devices")
    assert open_counters.read()["gpus"] == whole


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_junk(data):
    with tempfile.TemporaryDirectory() as folder:
        root = sysfs.mi50(Path(folder))
        spoil_some(data, sorted((root / "sys/devices").rglob("*")), 8)
        reading = json.loads(json.dumps(Counters(root).read(), allow_nan=False))
    for gpu in reading["gpus"]:
        assert gpu["id"]
        assert gpu["name"]
        assert set(gpu) <= UNITS
        assert all(0 <= gpu[key] <= most for key, most in counters._MOST.items() if key in gpu)


def test_the_host(monkeypatch, capsys):
    (reading,) = monitor(capsys, "--count", 1)
    host = reading["host"]
    assert 0 <= host["cpu"] <= 100
    assert 0 < host["memory_used"] < host["memory_total"]
    assert host["swap_used"] >= 0
    assert "process_memory" not in host, "the monitor's own means nothing"
    for name in ("cpu_percent", "virtual_memory", "swap_memory"):
        monkeypatch.setattr(
            f"psutil.{name}", lambda: (_ for _ in ()).throw(PermissionError("masked"))
        )
    (reading,) = monitor(capsys, "--count", 1)
    assert reading["host"] == {}


# ------------------------------------------------------------------------------------------------- NVIDIA
class NVMLError(Exception):
    pass


def fake_nvml(names: list = ["NVIDIA H200"], broken: tuple = ()) -> SimpleNamespace:  # noqa: B006
    """Make a pynvml with these GPUs; calls named in ``broken`` fail."""

    def call(name: str, function: Callable):
        def made(*args):
            if name in broken:
                raise NVMLError("Not Supported")
            return function(*args)

        return made

    functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: len(names),
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: names[handle],
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(
            busId=f"00000000:{0xF0 - handle:02X}:00.0"
        ),
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=99, memory=40),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(
            used=70 * GIB, total=141 * GIB, free=71 * GIB
        ),
        "nvmlDeviceGetPowerUsage": lambda handle: 612345,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 64,
        "nvmlDeviceGetClockInfo": lambda handle, kind: {1: 1980, 2: 3201}[kind],
    }
    constants = {
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVMLError": NVMLError,
    }
    return SimpleNamespace(
        **{name: call(name, function) for name, function in functions.items()}, **constants
    )


@pytest.fixture
def nvidia(tmp_path, monkeypatch) -> Callable[..., None]:
    """Give this machine NVIDIA's driver and a ``pynvml``, and no AMD GPU."""
    driver = tmp_path / "version"
    driver.touch()
    monkeypatch.setattr(counters, "_NVIDIA", (str(driver),))
    monkeypatch.setattr(counters, "cards", lambda root: [])
    return lambda pynvml: monkeypatch.setitem(sys.modules, "pynvml", pynvml)


def test_nvidia(nvidia, capsys):
    """Its GPUs, counters that one does not support, and a GPU that is lost."""
    nvidia(fake_nvml(["NVIDIA H200", b"NVIDIA H100"]))
    (reading,) = monitor(capsys, "--count", 1)
    first, second = reading["gpus"]
    assert (first["id"], first["name"], second["id"]) == (
        "0000:ef:00.0",
        "NVIDIA H100",
        "0000:f0:00.0",
    )
    assert {k: v for k, v in second.items() if k not in ("id", "name")} == {
        "busy": 99, "vram_used": 70 * GIB, "vram_total": 141 * GIB, "power": 612.345, "temperature": 64,
        "clock": 1980, "memory_clock": 3201,
    }  # fmt: skip
    nvidia(
        fake_nvml(
            broken=(
                "nvmlDeviceGetUtilizationRates",
                "nvmlDeviceGetMemoryInfo",
                "nvmlDeviceGetPowerUsage",
            )
        )
    )
    (gpu,) = gpus(Path("/"))
    assert set(gpu) == {"id", "name", "temperature", "clock", "memory_clock"}
    nvml = fake_nvml(["NVIDIA H200"] * 3)
    handle = nvml.nvmlDeviceGetHandleByIndex
    nvml.nvmlDeviceGetHandleByIndex = lambda index: handle(index) if index != 1 else 1 / 0
    nvidia(nvml)
    open_counters = Counters()
    assert [gpu["id"] for gpu in open_counters.read()["gpus"]] == ["0000:ee:00.0", "0000:f0:00.0"]
    assert open_counters.notes == ["NVIDIA GPU 1 does not answer"]


def test_nvidia_without_its_package(nvidia, capsys):
    nvidia(None)
    assert cli.main(["monitor", "--json", "--count", "2", "--interval", "0.1"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert err.count("pip install nvidia-ml-py") == 1


def test_where_nvidias_driver_fails_or_is_missing(nvidia, tmp_path, capsys, monkeypatch):
    nvidia(fake_nvml(broken=("nvmlInit",)))
    assert cli.main(["monitor", "--json", "--count", "1"]) == 0
    assert "NVML" in capsys.readouterr().err
    nvidia(fake_nvml())
    assert gpus(tmp_path) == [], "a copy is not this machine"
    monkeypatch.setattr(counters, "_NVIDIA", ())
    nvidia(fake_nvml(broken=("nvmlInit",)))
    assert Counters().notes == []


# ---------------------------------------------------------------------------------------------- the command
def test_lines_where_there_is_no_terminal(tmp_path, capsys):
    root, log = sysfs.strix_halo(tmp_path / "root"), tmp_path / "log.jsonl"
    log.write_text('{"time": 1, "gpus": []}\n{"time": 2, "gp')
    printed = monitor(capsys, "--count", 2, "--interval", 0.1, "--root", root, "--log", log)
    assert read_lines(log) == [{"time": 1, "gpus": []}, *printed]
    assert cli.main(["monitor", "--count", "1", "--root", str(root)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(
        "GPU 0: load 97 %, memory 0.2 of 0.5 GiB, GTT 61.0 of 120 GiB, power 120 W, temperature 97 of 100 °C, "
        "clock 2876 MHz"
    )
    assert cli.main(["monitor", "--count", "1"]) == 0
    assert re.search(
        r"Host: load \d+ %, memory \d+\.\d of \d+(\.\d)? GiB$", capsys.readouterr().out.strip()
    )


@pytest.mark.parametrize(("arguments", "message", "code"), [
    (["--log", "{}/none/log.jsonl"], "cannot write .*log.jsonl: No such file or directory", 1),
    (["--root", "{}/none"], "--root .*none is not a folder", 2),
    (["--interval", "0"], "--interval: '0' is not a number from 0.1 to 86,400", 2),
])  # fmt: skip
def test_bad_arguments(tmp_path, capsys, arguments, message, code):
    argv = ["monitor", "--count", "1", *(text.format(tmp_path) for text in arguments)]
    try:
        got = cli.main(argv)
    except SystemExit as leaving:
        got = leaving.code
    assert got == code
    err = capsys.readouterr().err
    assert re.search(message, err)
    assert "Traceback" not in err


class Terminal:
    """``rocm-ext monitor`` in a pseudo-terminal of 90 columns."""

    def __init__(self, *arguments: object) -> None:
        pty, fcntl, termios = (pytest.importorskip(name) for name in ("pty", "fcntl", "termios"))
        self.shown = b""
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            whole = {**os.environ, "TERM": "xterm", "COLUMNS": ""}
            os.execve(sys.executable, [*COMMAND, *map(str, arguments)], whole)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, b"\x28\0\x5a\0\0\0\0\0")

    def wait_for(self, *texts: str) -> None:
        """Wait until the terminal has shown all ``texts``."""
        deadline = time.monotonic() + 30
        while not all(text.encode() in self.shown for text in texts):
            assert time.monotonic() < deadline, self.shown.decode()
            self._read()

    def _read(self) -> bool:
        if select.select([self._master], [], [], 0.2)[0]:
            try:
                more = os.read(self._master, 65536)
            except OSError:  # the other end is closed
                return False
            self.shown += more
            return bool(more)
        return True

    def press_ctrl_c(self) -> None:
        os.write(self._master, b"\x03")

    def end(self) -> int:
        """Wait for the end and return the exit code."""
        while self._read():
            pass
        os.close(self._master)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_live_until_it_is_stopped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 7, "epoch": 1, "loss": 0.5, "tokens_per_second": 1234}\n'
    )
    root = sysfs.strix_halo(tmp_path / "root")
    terminal = Terminal("--root", root, "--interval", 0.1, "--run", tmp_path)
    terminal.wait_for("GPU 0: Radeon 8060S Graphics", "97 %", "61.0 of 120", "120", "2876")
    terminal.wait_for("run: step 7, epoch 1, loss 0.5000, 1,234 tok/s, ")
    terminal.press_ctrl_c()
    assert terminal.end() == 0
    shown = terminal.shown.decode()
    assert "\x1b[?25l" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is back"
    assert "Traceback" not in shown
    assert "interrupted" not in shown


# -------------------------------------------------------------------------------------------- how far a run is
def run_of(capsys, out: Path) -> dict:
    return monitor(capsys, "--count", 1, "--root", out.parent, "--run", out)[0]["run"]


def test_progress_of_sft(tmp_path, capsys):
    assert run_of(capsys, tmp_path) == {"problem": f"no run in {tmp_path}"}
    assert run_of(capsys, tmp_path / "nosuch") == {
        "problem": f"{tmp_path / 'nosuch'} does not exist"
    }
    lines = [{"step": 1, "epoch": 1, "loss": 2.5, "lr": 1e-3, "tokens_per_second": 10.0}]
    lines += [
        {"step": 1, "epoch": 1, "val_loss": 2.25, "val_tokens": 9},
        {**lines[0], "step": 2, "loss": 2.0},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 3, "loss": 1.')
    run = run_of(capsys, tmp_path)
    assert 0 <= run.pop("seconds_ago") < 60
    speed, loss = {"tokens_per_second": 10.0}, {"loss": 2.0, "val_loss": 2.25}
    assert run == {"step": 2, "epoch": 1, **speed, **loss, "finished": False}
    (tmp_path / "adapter").mkdir()  # of an earlier, shorter run
    assert run_of(capsys, tmp_path)["finished"] is False
    (tmp_path / "summary.json").write_text('{"steps": 2}')
    assert run_of(capsys, tmp_path)["finished"] is True


def test_progress_of_raft(tmp_path, capsys):
    now = time.time()

    def touch(name: str, age: float, text: str = "{}\n") -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, (now - age, now - age))

    touch("config.yaml", 950, "cycles: 11\nprompts: x\n")
    touch("samples.jsonl", 600, '{"step": 0, "phase": "eval"}\n')
    touch("verdicts.jsonl", 600, '{"step": 0, "phase": "eval"}\n')
    assert run_of(capsys, tmp_path)["phase"] == "evaluating"
    (tmp_path / "cycle_9").mkdir()
    touch("verdicts.jsonl", 300, '{"step": 10, "phase": "sample"}\n')
    assert run_of(capsys, tmp_path)["phase"] == "sampling"
    touch("cycle_10/kept.jsonl", 200)
    assert run_of(capsys, tmp_path)["phase"] == "training"
    touch("cycle_10/metrics.jsonl", 100, '{"step": 3, "epoch": 1, "loss": 0.25}\n')
    run = run_of(capsys, tmp_path)
    assert (run["cycle"], run["phase"], run["step"], run["loss"]) == (10, "training", 3, 0.25)
    assert 99 < run["seconds_ago"] < 200
    touch("verdicts.jsonl", 50, '{"step": 10, "phase": "eval"}\n')
    assert run_of(capsys, tmp_path)["phase"] == "evaluating"
    touch("metrics.jsonl", 40, '{"step": 10, "reward": 0.5, "updates": 3, "seconds": 60}\n')
    run = run_of(capsys, tmp_path)
    assert (run["cycle"], run["seconds_left"], run["finished"]) == (10, 60.0, False)
    assert "phase" not in run
    touch("summary.json", 30, '{"steps": 10, "stopped": null}')
    assert run_of(capsys, tmp_path)["finished"] is False
    touch("config.yaml", 900, "cycles: 10\n")
    assert run_of(capsys, tmp_path)["finished"] is True


# -------------------------------------------------------------------------------------------------- the recorder
def wait_for_lines(path: Path, count: int) -> None:
    deadline = time.monotonic() + 20
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def no_thread() -> bool:
    return THREAD not in [thread.name for thread in threading.enumerate()]


def test_recording(tmp_path):
    """Of a machine's files, and of this process."""
    root, path = sysfs.strix_halo(tmp_path / "root"), tmp_path / "hardware.jsonl"
    path.write_text('{"time": 1}\n{"time": 2, "gpus": [')
    with recording(tmp_path, 0.1, root):
        wait_for_lines(path, 4)
    assert no_thread()
    lines = read_lines(path)
    assert lines[0] == {"time": 1}
    assert all(line["gpus"][0]["power"] == 120.021 for line in lines[1:])
    times = [line["time"] for line in lines]
    assert times == sorted(times)
    (tmp_path / "own").mkdir()
    with recording(tmp_path / "own", 0.1):
        wait_for_lines(tmp_path / "own/hardware.jsonl", 3)
    own = [line["host"] for line in read_lines(tmp_path / "own/hardware.jsonl")]
    assert all(host["process_memory"] > 1 << 20 for host in own)
    assert "cpu" not in own[0], "there is nothing it could be the load since"
    assert all(0 <= host["cpu"] <= 100 for host in own[1:])


def test_recording_nothing_and_a_run_that_ends(tmp_path):
    with recording(tmp_path, None):
        assert no_thread()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), recording(tmp_path, 0.1):
        raise KeyboardInterrupt
    assert no_thread()


@pytest.mark.parametrize("content", [b"\xff\0" * 1_500_000, b"{}\n" * 600_000])
def test_what_is_torn_goes(tmp_path, content):
    path = tmp_path / "hardware.jsonl"
    path.write_bytes(content)
    with HardwareLog(path) as file:
        file.write({"time": 3})
    whole = path.read_bytes()
    assert whole.endswith(b'{"time": 3}\n')
    kept = whole.removesuffix(b'{"time": 3}\n')
    assert content.startswith(kept)
    assert content == kept or not content.endswith(b"\n")


def test_a_file_that_cannot_be_written(tmp_path, messages):
    (tmp_path / "hardware.jsonl").mkdir()
    with recording(tmp_path, 0.1):
        while not messages:
            time.sleep(0.02)
        time.sleep(0.2)
    assert len(messages) == 1
    assert one_line_has(messages, "hardware.jsonl: Is a directory", "the run continues")


@pytest.mark.wide
def test_a_gpu_that_hangs_does_not_hold_the_run(tmp_path, monkeypatch):
    hang = threading.Event()
    monkeypatch.setattr(counters, "cards", lambda root: [hang.wait()][:0])
    with recording(tmp_path, 0.1):
        time.sleep(0.1)
    hang.set()  # a run that waits for the GPU never comes here


# ---------------------------------------------------------------------------------------------- inside the recipes
@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a base model and rows."""
    top = tmp_path_factory.mktemp("monitor")
    write_model(top / "base")
    write_rows(top / "rows.jsonl", 32)
    return top


@pytest.fixture
def make(folder, tmp_path) -> Callable[..., Path]:
    """Write the YAML of a run of 8 steps into ``tmp_path / "out"``."""

    def make(**changes) -> Path:
        cfg = run_config(
            folder / "base", folder / "rows.jsonl", tmp_path / "out", epochs=2, startup_checks=False
        )
        return write_yaml(tmp_path / "run.yaml", {**cfg, "sequences_per_step": 8, **changes})

    return make


sft = partial(succeed, lora_finetune_rocm.main)


@pytest.mark.parametrize("main", [True, False])
def test_one_rank_of_a_machine_records(tmp_path, main):
    cfg = SimpleNamespace(output_dir=str(tmp_path), hardware_log_seconds=0.1)
    with lifecycle._recording(cfg, SimpleNamespace(is_main=main)):
        assert no_thread() is not main


@pytest.mark.wide
def test_a_run_writes_its_hardware_and_computes_the_same(make, tmp_path):
    path, out = make(hardware_log_seconds=0.1), tmp_path / "out"
    sft(path)
    first, adapter = (
        read_lines(out / "hardware.jsonl"),
        (out / "adapter/adapter_model.safetensors").read_bytes(),
    )
    assert first
    assert all(set(line) == {"time", "gpus", "host"} for line in first)
    assert first[0]["host"]["process_memory"] > 50 * 2**20, "the process that trains"
    with (out / "hardware.jsonl").open("a") as file:
        file.write('{"time": 1, "gp')  # a kill
    sft(path, "resume_from_checkpoint=True", "hardware_log_seconds=0.2")
    second = read_lines(out / "hardware.jsonl")
    assert second[: len(first)] == first
    assert len(second) > len(first)
    assert second[len(first)]["time"] >= first[-1]["time"]
    sft(make(), "overwrite_output_dir=True")
    assert read_lines(out / "hardware.jsonl")[0]["time"] > second[-1]["time"], (
        "begun anew, and by default"
    )
    sft(path, "overwrite_output_dir=True", "hardware_log_seconds=null")
    assert not (out / "hardware.jsonl").exists(), "the file of another run would mislead"
    assert (out / "adapter/adapter_model.safetensors").read_bytes() == adapter
