"""`rocm-ext bench`: its measurements, the settings they lead to, and measurements that fail."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from rocm_ext.recipes.lora_finetune_rocm import main as lora_main

from rocm_ext import config
from rocm_ext.base.log import log
from rocm_ext.bench import busy, child, link, runner, spec, summary
from rocm_ext.bench.busy import OtherPrograms
from rocm_ext.bench.context import Bench
from rocm_ext.bench.runner import Measurement
from rocm_ext.bench.spec import Item, Spec
from rocm_ext.bench.sweep import Sweep
from rocm_ext.cli import main
from rocm_ext.machine import bench_file, shared_records
from rocm_ext.machine.detect import Machine, detect
from rocm_ext.machine.profile import load_profile
from rocm_ext.plan.speeds import figures_for
from tests.forks import ForkedPopen, forked
from tests.test_plan import _without_search, as_configured  # noqa: F401
from tests.tiny import metrics

GIB = 2**30
# `runner` starts forks instead of programs, which take five seconds to import torch
FORKS = SimpleNamespace(PIPE=None, TimeoutExpired=subprocess.TimeoutExpired, Popen=partial(ForkedPopen, child.main))


def job(budget: int = 4 * GIB) -> Spec:
    return Spec("cpu_pocket", ("hardware=cpu",), budget, quick=True, seconds=0.01)


# ------------------------------------------------------------------------------------ probes that go wrong
@pytest.fixture(scope="module")
def misbehaving() -> tuple[list[Measurement], list[Measurement]]:
    """Return the measurements of :mod:`tests.probes`, at the end and as they came."""
    of_one = ("environment", "segfault", "hang", "noise", "raise", "out of memory", "exit", "fine")
    one, other = {"PROBED": "5"}, {"PROBED": "7"}
    items = [Item("tests.probes", {"how": how}, one) for how in of_one]
    items.insert(2, Item("tests.probes", {"how": "segfault"}, one, skip="locked here: hangs"))
    items.insert(0, Item("tests.probes", {"how": "environment"}, other))
    told: list[Measurement] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "subprocess", FORKS)
        return runner.run(job(), lambda done: [] if done else items, 2, told.append, {}), told


def test_a_crash_or_a_hang_is_a_row_and_the_rest_goes_on(misbehaving):
    rows, told = misbehaving
    ends = ["ok", "ok", "crashed", "skipped", "timeout", "ok", "failed", "out of memory", "crashed", "ok"]
    assert [row.status for row in rows] == ends
    assert rows[2].detail.startswith("signal 11")
    assert rows[4].detail == "no result within 2 s"
    assert rows[6].detail == "RuntimeError: HIP error: invalid device function Compile with TORCH_USE_HIP_DSA"
    assert rows[8].detail == "exit code 3: the driver is gone"
    assert sorted(map(str, told)) == sorted(map(str, rows))


def test_items_get_their_environment_and_a_reason_skips(misbehaving):
    rows, _ = misbehaving
    assert [row.result["value"] for row in rows[:2]] == [7.0, 5.0]
    assert rows[3].detail == "locked here: hangs"


def test_nothing_is_measured_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(log, "disabled", False)  # a child's logger is silent, and this is no child
    items = [
        Item("gemm", {"direction": "forward", "dtype": "fp32", "library": "default"}),
        Item("bandwidth", {"what": "device copy"}),
        Item("attention", {"backend": "math", "tokens": 512}),
        Item("training", {"rows": 4, "compile": False}),
        Item("decoding", {"slots": 64}),
    ]
    bench = Bench(job(budget=2**20))
    rows = [child.measure(bench, item.to_dict()) for item in items]
    assert [row["status"] for row in rows] == ["skipped"] * 5
    assert all("budget" in row["detail"] for row in rows)


def test_a_training_step_with_other_settings(monkeypatch):
    monkeypatch.setattr(log, "disabled", False)
    bench = Bench(job())
    common = {"rows": 1, "compile": False}
    eager = {**common, "enable_activation_checkpointing": True, "attention": "eager", "dtype": "bf16"}
    found = child.measure(bench, Item("training", eager).to_dict())
    assert found["status"] == "ok", found
    assert (found["result"]["checkpointed"], found["result"]["dtype"]) == (len(bench.shape.layers), "bf16")
    found = child.measure(bench, Item("training", {**common, "attention": "efficient"}).to_dict())
    assert found["status"] == "skipped"
    assert "torch has no efficient kernel" in found["detail"]


@pytest.mark.skipif(os.name == "nt", reason="Windows does not report the time of children")
def test_other_programs_are_noticed(monkeypatch):
    first = busy.seconds()
    code = "import time\nwhile time.process_time() < 1: pass\nprint('done', flush=True); input()"
    program = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    program.stdout.readline()
    running = busy.seconds()
    program.communicate(b"\n")
    ended = busy.seconds()
    assert running.all - first.all > 0.9, "whatever else runs, this program took a second"
    assert running.own - first.own < 0.9, "a child that runs counts as another program"
    assert ended.own - first.own > 0.9, "a child that has ended counts as our own"

    readings = iter([busy.Seconds(0, 100, 5), busy.Seconds(10, 125, 10), busy.Seconds(20, 115, 20)])
    monkeypatch.setattr(busy, "seconds", lambda: next(readings))
    others = OtherPrograms()
    assert others.cores() == 2.0, "25 s in 10 s, 5 of them our own"
    assert others.cores() == 0.0, "all 15 s were our own"


# ------------------------------------------------------------------------------------------- what is measured
def test_machines_get_their_own_measurements():
    halo = Machine("rocm", "Linux", "2.11.0+rocm7.2", "rocm", 120 * GIB, True, arch="gfx1151", unified=True)
    locked = load_profile("strix_halo").locked
    items = spec.items(halo, locked, quick=False)
    gemm = [item for item in items if item.probe == "gemm"]
    switches = ("ROCBLAS_USE_HIPBLASLT", "TORCH_BLAS_PREFER_HIPBLASLT")  # torch may choose without rocBLAS
    assert {(item.values["library"], *map(item.environ.get, switches)) for item in gemm} == {
        ("rocBLAS", "0", "0"),
        ("hipBLASLt", "1", "1"),
    }
    assert {item.values["dtype"] for item in gemm} == {"bf16", "fp16", "fp32"}
    skipped = [item.values for item in items if item.skip]
    assert {"num_workers": 2, "pin_memory": False} in skipped
    assert {"num_workers": 0, "pin_memory": False} not in skipped
    risky = spec.items(halo, {}, quick=False)
    assert not [item for item in risky if item.skip]
    assert not [item for item in risky if item.probe == "link"]
    eight = Machine("rocm", "Linux", "2.11.0", "rocm", 190 * GIB, True, arch="gfx942", gpu_count=8)
    links = [item.values for item in spec.items(eight, {}, quick=True) if item.probe == "link"]
    assert links == [{"what": "GPU to GPU"}, {"what": "all-reduce", "ranks": 8}]


def _check_runs(path: Path, settings: dict, model: Path, out: Path) -> None:
    """Run the config that bench wrote with `tune`'s recipe, for two steps."""
    written = yaml.safe_load(path.read_text())
    keys = settings.keys() & config.defaults("lora_finetune_rocm").keys()
    assert {key: written[key] for key in keys} == {key: settings[key] for key in keys}
    assert "batch_size" in keys
    path.write_text(path.read_text().replace("demo/pocket", str(model)))
    assert forked(lora_main, path, f"output_dir={out}", "max_steps_per_epoch=2", "epochs=1")[0] == 0
    assert len(metrics(out)) == 2


@pytest.mark.slow
def test_bench_from_end_to_end(tmp_path, monkeypatch, capsys, pocket_dir):
    """Run all probes on this CPU; then plan, hardware: auto and the recipe use the written files."""
    out = tmp_path / "bench.json"
    environ = {**os.environ, "ROCM_EXT_BENCH": str(out)}
    command = [sys.executable, "-m", "rocm_ext.cli", "bench", "--quick", "--share", str(tmp_path / "cpu.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300)
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    rows = content["rows"]
    assert {row["item"]["probe"] for row in rows} == {*spec.PROBES} - {"link"}
    swept = {key: row["item"]["values"][key] for row in rows if row["item"]["probe"] == "training"
             for key in row["item"]["values"]}  # fmt: skip
    assert swept.keys() == {"rows", "compile", "dtype", "attention", "enable_activation_checkpointing"}
    assert [row["detail"] for row in rows if row["status"] != "ok"] == []
    assert all(0 < row["result"]["low"] <= row["result"]["value"] <= row["result"]["high"] for row in rows)
    for row in rows:
        if row["item"]["probe"] == "training":
            assert row["result"]["planned_memory"] == pytest.approx(row["result"]["peak_memory"], rel=0.1)
    assert f"wrote {out}" in done.stdout
    _check_runs(out.with_suffix(".yaml"), content["settings"], pocket_dir, tmp_path / "run")
    assert "# the fastest settings" in done.stdout
    monkeypatch.setenv("ROCM_EXT_BENCH", str(out))
    figures = figures_for(load_profile("cpu"), detect())
    assert figures.measured
    assert figures.flops == content["figures"]["flops"]
    # the plan of the measured step gives the measured speed
    plain = [row for row in rows if row["item"]["values"].keys() == {"rows", "compile"}]
    fastest = max(plain, key=lambda row: row["result"]["value"])
    size = fastest["item"]["values"]["rows"]
    overrides = [f"batch_size={size}", f"sequences_per_step={size}", "dtype=fp32", "pocket=nowhere"]
    assert main(["plan", "--config", "cpu_pocket", "--json", *overrides]) == 0
    step = json.loads(capsys.readouterr().out)["configured"]["step"]
    assert step["tokens_per_second"] == pytest.approx(fastest["result"]["value"], rel=1e-3)
    # and so it does for others, once a later version brings the record
    assert "attach it to an issue" in done.stdout
    monkeypatch.setenv("ROCM_EXT_BENCH", str(tmp_path / "none.json"))
    monkeypatch.setattr(shared_records, "folder", lambda: tmp_path)
    out.unlink()
    record = shared_records.read(tmp_path / "cpu.json")
    assert (record.config, record.quick, record.figures) == ("cpu_pocket", True, content["figures"])
    assert len(record.probes) == len(rows)
    for arguments in (["--machine", record.machine.name], []):
        assert main(["plan", "--config", "cpu_pocket", "--json", *arguments, *overrides]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["figures"]["source"].startswith(f"measured by another owner, {record.date}, torch ")
        assert found["configured"]["step"] == step


def test_auto_takes_measured_settings(tmp_path, monkeypatch, messages, capsys):
    path = tmp_path / "bench.json"
    monkeypatch.setenv("ROCM_EXT_BENCH", str(path))
    machine = bench_file.machine_key(detect())
    settings = {"num_workers": 2, "compile": True, "batch_size": 64, "engine.slots": 16}
    figures = {"flops": {"fp32": 1.0}, "bandwidth": 1.0}
    content = {"date": "2026-11-20", "machine": machine, "figures": figures, "settings": settings}
    path.write_text(json.dumps(content))
    for module in ("rocm_ext.machine.profile", "rocm_ext.config.layers"):
        monkeypatch.setattr(f"{module}.choose_profile", lambda machine: ("cpu", "chosen by the test"))
    monkeypatch.setattr("rocm_ext.config.layers.log.isEnabledFor", lambda level: True)
    cfg = config.load("lora_finetune_rocm", "cpu_pocket", ["hardware=auto"])
    assert (cfg.num_workers, cfg.compile, cfg.batch_size) == (2, True, 8)  # the sizes belong to another config
    assert any("(measured 2026-11-20 by rocm-ext bench)" in line for line in messages)
    assert config.load("lora_finetune_rocm", "cpu_pocket", ["hardware=auto", "compile=False"]).compile is False
    assert config.load("lora_finetune_rocm", "cpu_pocket", ["hardware=cpu"]).num_workers == 0
    path.write_text(json.dumps({**content, "machine": {**machine, "torch": "2.0"}}))
    assert config.load("lora_finetune_rocm", "cpu_pocket", ["hardware=auto"]).num_workers == 0


@pytest.mark.parametrize(
    "damaged",
    [
        "", "{", "[]", "null", '{"date": 1}', "\0\1", {"figures": {}}, {"figures": {"flops": "fast", "bandwidth": 1}},
        {"figures": {"flops": {"fp32": 0}, "bandwidth": 1}}, {"settings": 3}, {"settings": {"num_workers": "two"}},
        {"settings": {"compile": 1}}, {"machine": 3},
    ],
)  # fmt: skip
def test_a_damaged_file_is_told_and_not_used(damaged, tmp_path, monkeypatch, messages, capsys):
    path = tmp_path / "bench.json"
    monkeypatch.setenv("ROCM_EXT_BENCH", str(path))
    figures = {"flops": {"fp32": 1.0}, "bandwidth": 1.0}
    machine = bench_file.machine_key(detect())
    whole = {"date": "2026-11-20", "machine": machine, "figures": figures, "settings": {"num_workers": 2}}
    path.write_text(damaged if isinstance(damaged, str) else json.dumps({**whole, **damaged}))
    for module in ("rocm_ext.machine.profile", "rocm_ext.config.layers"):
        monkeypatch.setattr(f"{module}.choose_profile", lambda machine: ("cpu", "chosen by the test"))
    assert config.load("lora_finetune_rocm", "cpu_pocket", ["hardware=auto"]).num_workers == 0
    assert any("measure again: rocm-ext bench" in line for line in messages)
    assert main(["plan", "--config", "cpu_pocket", "--bench", str(path)]) == 1
    assert "as a file of `rocm-ext bench`" in capsys.readouterr().err


@as_configured
def test_plan_takes_a_file_of_such_a_machine(tmp_path, capsys):
    path = tmp_path / "halo.json"
    machine = {"backend": "rocm", "arch": "gfx1151", "name": "Radeon 8060S", "torch": "2.11.0+rocm7.2", "cores": None}
    figures = {"flops": {"bf16": 30e12, "fp32": 3e12}, "bandwidth": 200e9, "efficiency": 0.8}
    path.write_text(json.dumps({"date": "2026-11-20", "machine": machine, "figures": figures, "settings": {}}))
    assert main(["plan", "--config", "strix_halo_qwen0_5b", "--bench", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["figures"]["measured"]
    assert found["figures"]["efficiency"] == 0.8
    assert (found["published"], found["configured"]["step"]["tokens_per_second_published"]) == (None, None)
    assert found["budget"] == 109 * GIB
    sheet = figures_for(load_profile("mi300x"), detect())  # values that bench does not measure come from the data sheet
    server = {"date": "", "machine": {"backend": "rocm", "arch": "gfx942"}, "figures": figures, "settings": {}}
    (tmp_path / "server.json").write_text(json.dumps(server))
    assert figures_for(load_profile("mi300x"), detect(), tmp_path / "server.json").link == sheet.link > 1e11
    assert main(["plan", "--config", "mi300x_qwen7b", "--bench", str(path)]) == 1
    assert "hardware=mi300x is AMD Instinct" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- what won
def row(probe: str, value: float, spread: float = 0.01, environ: dict | None = None, **values) -> Measurement:
    result = {"value": value, "low": value * (1 - spread), "high": value * (1 + spread), "unit": "tokens/s"}
    return Measurement(Item(probe, values, environ or {}), "ok", result)


def training(rows: int, value: float, spread: float = 0.01, environ: dict | None = None, **values) -> Measurement:
    return row("training", value, spread, environ, **{"rows": rows, "compile": False, **values})


def sweep(machine: Machine | None = None, quick: bool = False, locked: dict | None = None, **changes) -> Sweep:
    cfg = config.load("lora_finetune_rocm", "cpu_pocket", ["hardware=cpu"])
    cfg.update(changes)
    return Sweep(cfg, machine or detect(), locked or {}, quick)


def won(*rows: Measurement, **changes) -> dict:
    cfg = config.load("lora_finetune_rocm", "cpu_pocket", ["hardware=cpu"])
    return {winner.key: winner.value for winner in summary.winners(rows, cfg, sweep(**changes))}


def test_the_smallest_of_equally_fast_sizes_wins():
    assert won(training(1, 50), training(2, 99), training(4, 100), training(8, 101)) == {"batch_size": 2}
    assert won(training(1, 50), training(8, 101)) == {"batch_size": 8}
    assert won(training(1, 50)) == {}
    assert won(row("decoding", 10, slots=16), row("decoding", 30, slots=64)) == {"engine.slots": 64}


def test_compile_wins_only_beyond_noise():
    assert won(training(4, 100), training(4, 150, compile=True)) == {"compile": True}
    assert won(training(4, 100), training(4, 150, compile=True), training(4, 170, compile="max-autotune")) == {
        "compile": "max-autotune"
    }
    assert won(training(4, 150), training(4, 100, compile=True)) == {}
    assert won(training(4, 150), training(4, 100, compile=True), compile=True) == {"compile": False}
    assert won(training(4, 100), training(4, 100, compile=True), compile=True) == {}
    assert won(training(4, 100, spread=0.3), training(4, 110, compile=True, spread=0.3)) == {}
    assert won(training(2, 100), training(4, 150, compile=True)) == {}


def test_a_loader_matters_only_where_it_is_slow():
    slow = row("loader", 1000, num_workers=0, pin_memory=False)
    fast = row("loader", 4000, num_workers=4, pin_memory=True)
    assert won(slow, fast, training(4, 500)) == {"num_workers": 4, "pin_memory": True}
    assert won(slow, fast, training(4, 20)) == {}


def test_the_library_that_is_faster_without_wgrad_wins():
    rows = [
        row(
            "gemm",
            speed,
            environ={"ROCBLAS_USE_HIPBLASLT": on, "TORCH_BLAS_PREFER_HIPBLASLT": on},
            direction=direction,
            dtype="bf16",
            library=library,
        )
        for library, on, speeds in (("rocBLAS", "0", (20, 20, 40)), ("hipBLASLt", "1", (30, 30, 16)))
        for direction, speed in zip(("forward", "dgrad", "wgrad"), speeds, strict=True)
    ]
    assert won(*rows) == {"ROCBLAS_USE_HIPBLASLT": "1", "TORCH_BLAS_PREFER_HIPBLASLT": "1"}
    assert won(*rows[:3]) == {}


def test_without_gemm_or_copies_there_are_no_figures():
    cfg = config.load("lora_finetune_rocm", "cpu_pocket", ["hardware=cpu"])
    rows = [training(1, 50), row("bandwidth", 1e9, what="device copy")]
    assert summary.figures(rows, cfg, torch.float32, torch.device("cpu")) == {}


def test_links_are_measured_and_planned_with(monkeypatch):
    monkeypatch.setattr(link, "_START", "fork")  # a new interpreter takes five seconds to import torch
    bench = Bench(job())
    for values in ({"what": "GPU to GPU"}, {"what": "all-reduce", "ranks": 2}):
        found = child.measure(bench, Item("link", values).to_dict())
        assert found["status"] == "ok", found
        assert 0 < found["result"]["low"] <= found["result"]["value"] <= found["result"]["high"]
    rows = [
        row("gemm", 1e12, direction=direction, dtype="fp32", library="default") for direction in ("forward", "dgrad")
    ]
    rows += [row("bandwidth", 1e10, what="device copy"), row("link", 3e10, what="all-reduce", ranks=2)]
    known = summary.figures(rows, bench.cfg, torch.float32, torch.device("cpu"))
    assert known["link"] == 3e10


@as_configured
def test_a_plan_takes_as_long_as_the_measured_step(tmp_path, capsys):
    """What plans assume beside the measured speeds is fitted to the measured step, and kept in the file."""
    changes = ["hardware=strix_halo", "dtype=bf16", "compile=False", "enable_activation_checkpointing=False"]
    cfg = config.load("lora_finetune_rocm", "cpu_pocket", changes)
    rows = [row("gemm", 3e13, dtype="bf16", direction=direction) for direction in ("forward", "dgrad")]
    rows += [row("bandwidth", 2e11, what="device copy"), training(8, 50)]
    rows[-1].result.update(seconds=0.25, checkpointed=0)
    found = summary.figures(rows, cfg, torch.bfloat16, torch.device("cuda"))
    assert found["launch"] == pytest.approx(20e-6)
    machine = {"backend": "rocm", "arch": "gfx1151"}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"date": "", "machine": machine, "figures": found, "settings": {}}))
    sizes = ["batch_size=8", "sequences_per_step=8", "num_workers=0"]
    assert main(["plan", "--json", "--config", "cpu_pocket", "--bench", str(path), *changes, *sizes]) == 0
    assert json.loads(capsys.readouterr().out)["configured"]["step"]["seconds"] == pytest.approx(0.25, rel=0.02)


# --------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--only", "gem"], "--only gem is not a probe; expected some of gemm, bandwidth"),
        (["--config", "cpu_pockt"], "did you mean cpu_pocket"),
        (["--output", "/"], "is a folder; name a file"),
        (["--only", "gemm", "--output", "/proc/b.json"], "cannot write /proc/b.json"),
        (["--output", "{tmp}/b", "--share", "{tmp}/./b"], "--output and --share are the same file"),
        (["nonsense=1", "--only", "gemm"], "unknown key nonsense"),
        (["model.lora_rank=0", "--only", "gemm", "--output", "{tmp}/b.json"], "model.lora_rank is 0; expected"),
    ],
)
def test_bad_input_is_one_line(arguments, found, capsys, tmp_path):
    assert main(["bench", "--quick", *[argument.format(tmp=tmp_path) for argument in arguments]]) != 0
    captured = capsys.readouterr()
    assert found in captured.err
    assert "Traceback" not in captured.err


@pytest.fixture
def loader_alone(monkeypatch) -> list[Item]:
    """Answer measurements of the loader with a figure; the list gets what was to be measured."""
    asked: list[Item] = []

    def run(job, following, timeout, tell, environ):
        asked.extend(following([]))
        rows = [row(item.probe, 1000, **item.values) for item in asked]
        for each in rows:
            tell(each)
        return rows

    monkeypatch.setattr(runner, "run", run)
    return asked


def test_an_older_file_survives_a_bench_without_figures(tmp_path, loader_alone, capsys):
    path = tmp_path / "bench.json"
    path.write_text("precious")
    assert main(["bench", "--quick", "--only", "loader", "--output", str(path)]) == 0
    assert {item.probe for item in loader_alone} == {"loader"}
    assert path.read_text() == "precious"
    assert f"{path} was not written: it needs gemm and bandwidth" in capsys.readouterr().out


def test_a_part_replaces_no_whole_file(tmp_path, loader_alone, monkeypatch, capsys):
    monkeypatch.setenv("ROCM_EXT_BENCH", str(tmp_path / "bench.json"))
    (tmp_path / "bench.json").write_text("precious")
    assert main(["bench", "--quick", "--only", "loader", "epochs=1"]) == 0
    assert {item.probe for item in loader_alone} == {"loader"}
    assert (tmp_path / "bench.json").read_text() == "precious"
    assert "To keep these: --output FILE" in capsys.readouterr().out


def test_nothing_is_left_in_the_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "subprocess", FORKS)
    main(["bench", "--quick", "--only", "bandwidth", "gemm", "--output", "b.json", "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads(Path("b.json").read_text())
    assert os.listdir() == ["b.json"]
