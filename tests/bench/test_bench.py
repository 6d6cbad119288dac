"""`rocm-ext bench`: its measurements, the settings they lead to, and measurements that fail."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from rocm_ext import config
from rocm_ext.base.log import log
from rocm_ext.bench import child, probes, runner, summary
from rocm_ext.bench.probes import Bench
from rocm_ext.bench.sweep import FOUR_BITS, PROBES, Item, Measurement, Spec, Sweep, Winner
from rocm_ext.cli import main
from rocm_ext.machine import bench_file
from rocm_ext.machine.detect import Machine, detect
from rocm_ext.machine.profile import load_profile
from rocm_ext.model.download import use_shape
from rocm_ext.plan.speeds import figures_for
from rocm_ext.pocket import SHAPE
from tests.kit import probes as bad_probes
from tests.kit.lines import one_line_has
from tests.kit.plans import as_configured, plan
from tests.kit.programs import as_forks

GIB = 2**30
FORKS = as_forks(lambda _: child.main())  # `runner` starts forks instead of programs


def job(budget: int = 4 * GIB) -> Spec:
    return Spec("cpu_pocket", ("hardware=cpu",), budget, seconds=0.01)


# ------------------------------------------------------------------------------------ probes that go wrong
@pytest.mark.wide
def test_a_crash_or_a_hang_is_a_row_and_the_rest_goes_on(monkeypatch):
    """Of the measurements of :mod:`tests.kit.probes`."""
    of_one = ("environment", "segfault", "hang", "noise", "raise", "out of memory", "exit", "fine")
    one, other = {"PROBED": "5"}, {"PROBED": "7"}
    items = [Item("bad", {"how": how}, one) for how in of_one]
    items.insert(2, Item("bad", {"how": "segfault"}, one, skip="locked here: hangs"))
    items.insert(0, Item("bad", {"how": "environment"}, other))
    monkeypatch.setattr(runner, "subprocess", FORKS)
    monkeypatch.setitem(probes.PROBES, "bad", bad_probes.measure)
    with runner.children(job(), 2, {}) as measure:
        rows = [measure(item) for item in items]
    ends = [
        "ok",
        "ok",
        "crashed",
        "skipped",
        "timeout",
        "ok",
        "failed",
        "out of memory",
        "crashed",
        "ok",
    ]
    assert [row.status for row in rows] == ends
    assert rows[2].detail.startswith("signal 11")
    assert rows[4].detail == "no result within 2 s"
    assert (
        rows[6].detail
        == "RuntimeError: HIP error: invalid device function Compile with TORCH_USE_HIP_DSA"
    )
    assert rows[8].detail == "exit code 3: the driver is gone"
    assert [row.result["value"] for row in rows[:2]] == [7.0, 5.0], "of their environment"
    assert rows[3].detail == "locked here: hangs"


def test_nothing_is_measured_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(log, "disabled", False)  # a child's logger is silent, and this is no child
    items = [
        Item("gemm", {"direction": "forward", "dtype": "fp32", "library": "default"}),
        Item("bandwidth", {"what": "device copy"}),
        Item("training", {"rows": 4, "compile": False}),
        Item("decoding", {"slots": 64}),
    ]
    bench = Bench(job(budget=2**20))
    rows = [probes.measure(bench, item) for item in items]
    assert [row["status"] for row in rows] == ["skipped"] * 4
    assert all("budget" in row["detail"] for row in rows)


@pytest.fixture
def train(monkeypatch):
    """Measure a training step of one row, with settings of the probe and overrides of the config."""
    monkeypatch.setattr(log, "disabled", False)

    def train(*overrides: str, **values) -> dict:
        bench = Bench(Spec("cpu_pocket", ("hardware=cpu", *overrides), 4 * GIB, seconds=0.01))
        return probes.measure(bench, Item("training", {"rows": 1, "compile": False, **values}))

    return train


@pytest.mark.wide
def test_a_training_step_with_other_settings(train):
    found = train(enable_activation_checkpointing=True, attention="eager", dtype="bf16")
    assert found["status"] == "ok", found
    assert (found["result"]["checkpointed"], found["result"]["dtype"]) == (
        SHAPE["num_layers"],
        "bf16",
    )
    found = train(attention="efficient")
    assert (found["status"], "torch has no efficient kernel" in found["detail"]) == (
        "skipped",
        True,
    )
    whole, small = (
        train("model.target_modules=[q_proj]", **{FOUR_BITS: value}) for value in (False, True)
    )
    assert small["result"]["planned_memory"] < whole["result"]["planned_memory"]


# ------------------------------------------------------------------------------------------- what is measured
def test_machines_get_their_own_measurements():
    halo = Machine(
        "rocm", "Linux", "2.11.0+rocm7.2", "rocm", 120 * GIB, True, arch="gfx1151", unified=True
    )
    locked = load_profile("strix_halo").locked
    items = asked(sweep(halo, locked=locked, probes=PROBES))
    assert "training" not in {item.probe for item in items[:-5]}, "training comes last"
    gemm = [item for item in items if item.probe == "gemm"]
    switches = (
        "ROCBLAS_USE_HIPBLASLT",
        "TORCH_BLAS_PREFER_HIPBLASLT",
    )  # torch may choose without rocBLAS
    assert {(item.values["library"], *map(item.environ.get, switches)) for item in gemm} == {
        ("rocBLAS", "0", "0"),
        ("hipBLASLt", "1", "1"),
        ("TunableOp", None, None),
    }
    assert {item.values["dtype"] for item in gemm} == {"bf16", "fp16", "fp32"}
    assert {item.probe for item in items} == {*PROBES}
    assert [item.values["num_workers"] for item in items if item.probe == "loader"] == [0], (
        "workers are locked"
    )
    card = Machine("cuda", "Linux", "2.11.0", "cuda", 80 * GIB, True, arch="sm_90", gpu_count=1)
    copies = [
        [item.values["what"] for item in asked(sweep(machine, probes=("bandwidth",)))]
        for machine in (halo, card, replace(card, gpu_count=8))
    ]
    assert [len(each) for each in copies] == [4, 4, 5]
    assert {*copies[2]} - {*copies[1]} == {"to the next GPU"}


@pytest.mark.wide
def test_bench_from_end_to_end(tmp_path, monkeypatch, capsys):
    """Run all probes on this CPU; then plan uses the written file."""
    out = tmp_path / "bench.json"
    environ = {**os.environ, "ROCM_EXT_BENCH": str(out)}
    command = [sys.executable, "-m", "rocm_ext.cli", "bench", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300)
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    rows = content["rows"]
    assert {row["item"]["probe"] for row in rows} == {*PROBES}
    swept = {key: row["item"]["values"][key] for row in rows if row["item"]["probe"] == "training"
             for key in row["item"]["values"]}  # fmt: skip
    assert swept.keys() == {
        "rows",
        "compile",
        "dtype",
        "attention",
        "enable_activation_checkpointing",
    }
    assert [row["detail"] for row in rows if row["status"] != "ok"] == []
    assert all(
        0 < row["result"]["low"] <= row["result"]["value"] <= row["result"]["high"] for row in rows
    )
    for row in rows:
        if row["item"]["probe"] == "training":
            assert row["result"]["planned_memory"] == pytest.approx(
                row["result"]["peak_memory"], rel=0.1
            )
    assert f"wrote {out}" in done.stderr
    assert "# the fastest settings" in done.stdout
    monkeypatch.setenv("ROCM_EXT_BENCH", str(out))
    figures = figures_for(load_profile("cpu"), detect())
    assert figures.measured
    assert figures.flops == content["figures"]["flops"]
    # the plan of the measured step gives the measured speed
    plain = [row for row in rows if row["item"]["values"].keys() == {"rows", "compile"}]
    fastest = max(plain, key=lambda row: row["result"]["value"])
    size = fastest["item"]["values"]["rows"]
    overrides = [f"batch_size={size}", f"sequences_per_step={size}", "dtype=fp32"]
    monkeypatch.chdir(tmp_path)  # where no rows are, so that the plan takes the longest
    step = plan(capsys, "--config", "cpu_pocket", *overrides)["configured"]["step"]
    assert step["tokens_per_second"] == pytest.approx(fastest["result"]["value"], rel=1e-3)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write this machine's bench file, as ``hardware=auto`` reads it; return its path and whole content."""
    path = tmp_path / "bench.json"
    monkeypatch.setenv("ROCM_EXT_BENCH", str(path))
    for module in ("rocm_ext.machine.profile", "rocm_ext.config.layers"):
        monkeypatch.setattr(
            f"{module}.choose_profile", lambda machine: ("cpu", "chosen by the test")
        )
    content = {"date": "2026-11-20", "machine": bench_file.machine_key(detect()),
               "figures": {"flops": {"fp32": 1.0}, "bandwidth": 1.0}, "settings": {"compile": True}}  # fmt: skip
    return path, content


def compiles(*overrides: str) -> bool:
    return config.load("lora_finetune_rocm", "cpu_pocket", overrides).compile


def test_auto_takes_measured_settings(written, monkeypatch, messages):
    path, content = written
    settings = {"compile": True, "batch_size": 64, "engine.slots": 16}
    path.write_text(json.dumps({**content, "settings": settings}))
    monkeypatch.setattr("rocm_ext.config.layers.log.isEnabledFor", lambda level: True)
    cfg = config.load("lora_finetune_rocm", "cpu_pocket", ["hardware=auto"])
    assert (cfg.compile, cfg.batch_size) == (True, 8)  # the sizes belong to another config
    assert one_line_has(messages, "measured 2026-11-20 by rocm-ext bench")
    assert not compiles("hardware=auto", "compile=False")
    assert not compiles("hardware=cpu")
    path.write_text(json.dumps({**content, "machine": {**content["machine"], "torch": "2.0"}}))
    assert not compiles("hardware=auto")


@pytest.mark.parametrize(
    "damaged",
    [
        "", '{"date": 1}', {"figures": {"flops": "fast", "bandwidth": 1}},
        {"figures": {"flops": {"fp32": 0}, "bandwidth": 1}}, {"settings": {"compile": "two"}},
    ],
)  # fmt: skip
def test_a_damaged_file_is_told_and_not_used(damaged, written, messages, capsys):
    path, content = written
    path.write_text(damaged if isinstance(damaged, str) else json.dumps({**content, **damaged}))
    assert not compiles("hardware=auto")
    assert any("measure again: rocm-ext bench" in line for line in messages)
    assert main(["plan", "--config", "cpu_pocket", "--bench", str(path)]) == 1
    assert "as a file of `rocm-ext bench`" in capsys.readouterr().err


@as_configured
def test_plan_takes_a_file_of_such_a_machine(tmp_path, capsys):
    path = tmp_path / "halo.json"
    machine = {
        "backend": "rocm",
        "arch": "gfx1151",
        "name": "Radeon 8060S",
        "torch": "2.11.0+rocm7.2",
        "cores": None,
    }
    figures = {"flops": {"bf16": 30e12, "fp32": 3e12}, "bandwidth": 200e9, "efficiency": 0.8}
    path.write_text(
        json.dumps({"date": "2026-11-20", "machine": machine, "figures": figures, "settings": {}})
    )
    found = plan(capsys, "--config", "strix_halo_qwen0_5b", "--bench", path)
    assert found["figures"]["measured"]
    assert found["figures"]["efficiency"] == 0.8
    assert found["published"] is None
    assert found["budget"] == 109 * GIB
    sheet = figures_for(
        load_profile("mi300x"), detect()
    )  # values that bench does not measure come from the data sheet
    server = {
        "date": "",
        "machine": {"backend": "rocm", "arch": "gfx942"},
        "figures": figures,
        "settings": {},
    }
    (tmp_path / "server.json").write_text(json.dumps(server))
    assert (
        figures_for(load_profile("mi300x"), detect(), tmp_path / "server.json").link
        == sheet.link
        > 1e11
    )
    assert main(["plan", "--config", "mi300x_qwen7b", "--bench", str(path)]) == 1
    assert "hardware=mi300x is AMD Instinct" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- what won
def row(
    probe: str, value: float, spread: float = 0.01, environ: dict | None = None, **values
) -> Measurement:
    result = {
        "value": value,
        "low": value * (1 - spread),
        "high": value * (1 + spread),
        "unit": "tokens/s",
    }
    return Measurement(Item(probe, values, environ or {}), "ok", result)


def training(
    rows: int, value: float, spread: float = 0.01, environ: dict | None = None, **values
) -> Measurement:
    return row("training", value, spread, environ, **{"rows": rows, "compile": False, **values})


def sweep(machine=None, quick=False, locked=None, probes=("training",), **changes) -> Sweep:
    cfg = config.load("lora_finetune_rocm", "cpu_pocket", ["hardware=cpu"])
    cfg.update(changes)
    return Sweep(cfg, machine or detect(), locked or {}, quick, probes)


def asked(swept: Sweep) -> list[Item]:
    """The items of a sweep whose measurements all fail."""
    items: list[Item] = []

    def measure(item: Item) -> Measurement:
        items.append(item)
        return Measurement(item, "failed", {})

    swept.run(measure)
    return items


def won(*rows: Measurement, **changes) -> dict:
    """The settings that win by these measurements; the others fail."""

    measured = []

    def measure(item: Item) -> Measurement:
        for row in rows:
            if (row.item.probe, row.item.values) == (item.probe, item.values):
                measured.append(row)
                return row
        return Measurement(item, "failed", {})

    of_training = sweep(**changes).run(measure)
    winners = summary.winners(rows, of_training)
    configured = changes.get("compile", False)
    return summary.settings(measured, winners, configured)


def test_the_smallest_of_equally_fast_sizes_wins():
    assert won(training(1, 50), training(2, 99), training(4, 100), training(8, 101)) == {
        "batch_size": 2
    }
    assert won(training(1, 50), training(8, 101)) == {"batch_size": 8}
    assert won(training(1, 50)) == {}
    assert won(row("decoding", 10, slots=16), row("decoding", 30, slots=64)) == {"engine.slots": 64}


def test_compile_wins_only_beyond_noise():
    assert won(training(4, 100), training(4, 150, compile=True)) == {"compile": True}
    assert won(training(4, 100), training(4, 101, compile=True)) == {"compile": False}
    failed = Measurement(Item("training", {"rows": 4, "compile": True}, {}), "crashed", {})
    assert won(training(4, 100), failed) == {"compile": False}
    assert won(training(4, 100), failed, compile=True) == {"compile": False}
    three = (
        training(4, 100),
        training(4, 150, compile=True),
        training(4, 170, compile="max-autotune"),
    )
    assert won(*three) == {"compile": "max-autotune"}
    assert won(training(4, 150), training(4, 100, compile=True), compile=True) == {"compile": False}
    assert won(training(4, 100), training(4, 150, compile=True), compile="auto") == {
        "compile": True
    }
    noisy = training(4, 100, spread=0.3), training(4, 110, compile=True, spread=0.3)
    assert won(*noisy) == {"compile": False}
    assert won(training(2, 100), training(4, 150, compile=True)) == {}


def test_the_faster_library_wins():
    rows = []
    for library, on, speeds in (("rocBLAS", "0", (20, 20)), ("hipBLASLt", "1", (30, 18))):
        environ = {"ROCBLAS_USE_HIPBLASLT": on, "TORCH_BLAS_PREFER_HIPBLASLT": on}
        for direction, speed in zip(("forward", "dgrad"), speeds, strict=True):
            rows.append(
                row(
                    "gemm",
                    speed,
                    environ=environ,
                    direction=direction,
                    dtype="bf16",
                    library=library,
                )
            )
    assert won(*rows) == {"ROCBLAS_USE_HIPBLASLT": "1", "TORCH_BLAS_PREFER_HIPBLASLT": "1"}
    assert won(*rows[:2]) == {}


# ----------------------------------------------------------------------- the sweep of training settings
def speed_of(values: dict, four_bits: float) -> float:
    """A machine where eager attention and fp16 are fast, compilation only together with them, and 4 rows suffice."""
    speed = {1: 60, 2: 90, 4: 100, 8: 101, 16: 102}[values["rows"]]
    speed *= {"fp16": 2.0, "fp32": 1.0, "bf16": 0.5}[values.get("dtype", "fp32")]
    speed *= {"eager": 1.5, "math": 0.7}.get(values.get("attention", "auto"), 1.0)
    speed *= {True: 0.6}.get(values.get("enable_activation_checkpointing", "auto"), 1.0)
    speed *= four_bits if values.get(FOUR_BITS) else 1.0
    together = values.get("attention") == "eager" and values.get("dtype") == "fp16"
    return speed * ({True: 1.2, "max-autotune": 1.3} if together else {}).get(
        values["compile"], 1.0
    )


def simulate(
    swept: Sweep, fails: tuple = (), four_bits: float = 0.5
) -> tuple[list[Measurement], dict[str, Winner]]:
    """The measurements and winners of a whole sweep on this machine; the values in ``fails`` crash."""
    done: list[Measurement] = []

    def measure(item: Item) -> Measurement:
        if item.skip:
            done.append(Measurement(item, "skipped", {}, item.skip))
        elif set(fails) & set(item.values.values()):
            done.append(Measurement(item, "crashed", {}, "signal 11"))
        else:
            speed = speed_of(item.values, four_bits)
            done.append(row("training", speed, environ=item.environ, **item.values))
            done[-1].result["dtype"] = item.values.get("dtype", "fp32")
        return done[-1]

    winners = swept.run(measure)
    assert len(done) <= swept.most
    return done, {winner.key: winner for winner in winners}


def test_each_key_is_varied_around_the_fastest_so_far():
    mi300 = Machine("rocm", "Linux", "2.11.0", "rocm", 190 * GIB, True, arch="gfx942")
    done, winners = simulate(sweep(mi300))
    assert len(done) < 25, "all combinations would be hundreds"
    few, _ = simulate(sweep(mi300, quick=True, batch_size=2))
    sizes = [each.item.values["rows"] for each in few]
    assert sizes[:3] == [1, 2, 4], "the configured size is measured, too"
    fastest = {"batch_size": 4, "dtype": "fp16", "attention": "eager", "compile": "max-autotune"}
    assert {key: winner.value for key, winner in winners.items()} == fastest


def test_a_sweep_goes_on_past_what_is_locked_or_crashes():
    mi50 = Machine("rocm", "Linux", "2.9.1", "rocm", 30 * GIB, False, arch="gfx906")
    swept = sweep(mi50, locked=load_profile("mi50").locked)
    done, winners = simulate(swept, fails=("flash", "efficient", 16))
    assert {each.item.values["compile"] for each in done if each.status == "skipped"} == {
        True,
        "max-autotune",
    }
    fastest = {"batch_size": 4, "dtype": "fp16", "attention": "eager"}
    assert {key: winner.value for key, winner in winners.items()} == fastest
    done, winners = simulate(swept, fails=(1, 2, 4, 8, 16))
    assert (done[-1].item.values, winners) == ({"rows": 16, "compile": False}, {})


def test_four_bits_are_measured_where_they_are_locked():
    halo = Machine("rocm", "Linux", "2.11.0", "rocm", 120 * GIB, True, arch="gfx1151")
    swept = sweep(halo, locked=load_profile("strix_halo").locked)
    done, winners = simulate(swept, four_bits=1.2)
    (measured,) = [
        each
        for each in done
        if FOUR_BITS in each.item.values and each.item.values["compile"] is False
    ]
    assert (measured.status, measured.item.values["rows"]) == ("ok", 4)
    assert winners[FOUR_BITS].value is True
    assert winners[FOUR_BITS].reason.endswith("hardware_overrides=[quantize_base]")


@as_configured
def test_a_plan_takes_as_long_as_the_measured_step(tmp_path, capsys):
    """What plans assume beside the measured speeds is fitted to the measured step, and kept in the file."""
    changes = [
        "hardware=strix_halo",
        "dtype=bf16",
        "compile=False",
        "enable_activation_checkpointing=False",
    ]
    cfg = config.load("lora_finetune_rocm", "cpu_pocket", changes)
    use_shape(cfg)
    products = {"dtype": "bf16", "library": "default"}
    rows = [
        row("gemm", 3e13, **products, direction=direction) for direction in ("forward", "dgrad")
    ]
    rows += [row("gemm", 9e13, dtype="bf16", direction="forward", library="TunableOp")]
    rows += [
        row("bandwidth", 1e9, what="to the GPU"),
        row("bandwidth", 2e11, what="device copy"),
        training(8, 50),
    ]
    rows[-1].result.update(seconds=0.25, checkpointed=0)
    assert summary.figures(rows[3:], cfg, torch.bfloat16, torch.device("cuda")) == {}, (
        "without products"
    )
    found = summary.figures(rows, cfg, torch.bfloat16, torch.device("cuda"))
    assert found["launch"] == pytest.approx(20e-6)
    machine = {"backend": "rocm", "arch": "gfx1151"}
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"date": "", "machine": machine, "figures": found, "settings": {}}))
    sizes = ["batch_size=8", "sequences_per_step=8", "num_workers=0"]
    found = plan(capsys, "--config", "cpu_pocket", "--bench", path, *changes, *sizes)
    assert found["configured"]["step"]["seconds"] == pytest.approx(0.25, rel=0.02)


# --------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--output", "/"], "is a folder; name a file"),
        (["--only", "gemm", "bandwidth"], "for more probes: --only A --only B"),
        (["--only", "gemm", "--output", "/proc/b.json"], "cannot write /proc/b.json"),
        (["--output", "{tmp}/old.json"], "old.json exists; name another file, or add --force"),
        (
            ["model.lora_rank=0", "--only", "gemm", "--output", "{tmp}/b.json"],
            "model.lora_rank is 0; expected",
        ),
    ],
)
def test_bad_input_is_one_line(arguments, found, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("ROCM_EXT_BENCH", str(tmp_path / "bench.json"))
    (tmp_path / "old.json").write_text("precious")
    assert (
        main(["bench", "--quick", *[argument.format(tmp=tmp_path) for argument in arguments]]) != 0
    )
    captured = capsys.readouterr()
    assert found in captured.err
    assert "Traceback" not in captured.err


@pytest.fixture
def copies_alone(monkeypatch) -> list[Item]:
    """Answer measurements of copies with a figure; the list gets what was to be measured."""
    items: list[Item] = []

    def measure(item: Item) -> Measurement:
        items.append(item)
        return row(item.probe, 1000, **item.values)

    monkeypatch.setattr(runner, "children", lambda *_: nullcontext(measure))
    return items


def test_a_bench_without_figures_replaces_no_file(tmp_path, copies_alone, monkeypatch, capsys):
    path = tmp_path / "bench.json"
    path.write_text("precious")
    assert main(["bench", "--quick", "--only", "bandwidth", "--output", str(path), "--force"]) == 0
    assert f"{path} was not written: it needs gemm and bandwidth" in capsys.readouterr().err
    monkeypatch.setenv("ROCM_EXT_BENCH", str(path))
    assert main(["bench", "--quick", "--only", "bandwidth", "epochs=1"]) == 0
    assert "To keep these: --output FILE" in capsys.readouterr().err
    assert {item.probe for item in copies_alone} == {"bandwidth"}
    assert path.read_text() == "precious"
