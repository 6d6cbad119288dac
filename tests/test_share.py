"""Measurements that owners share: what a record holds, and how `rocm-ext plan` uses it."""

import copy
import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.bench.share import share
from rocm_ext.cli import main
from rocm_ext.machine import bench_file, shared_records
from rocm_ext.machine.profile import load_profile
from rocm_ext.machine.shared_records import SharedRecord
from rocm_ext.plan.planner import TrainingPlanner
from rocm_ext.plan.speeds import figures_for
from tests.test_device import CPU, GIB, MI300X, STRIX

FIGURES = {"flops": {"bf16": 5e14, "fp32": 5e13}, "bandwidth": 4e12, "efficiency": 0.6}
MI325X = {
    "format": shared_records.FORMAT,
    "date": "2026-11-20",
    "machine": {
        "backend": "rocm", "system": "Linux", "arch": "gfx942", "name": "AMD Instinct MI325X", "count": 8,
        "cores": None, "memory": 256.0,
    },
    "versions": {"torch": "2.11.0+rocm7.2", "rocm": "7.2", "kernel": "6.8.0"},
    "config": "mi300x_qwen7b",
    "model": "7616 million parameters",
    "quick": False,
    "cores_of_other_programs": 0.1,
    "figures": FIGURES,
    "settings": {"compile": True, "batch_size": 8},
    "probes": [{"probe": "gemm", "values": {"dtype": "bf16"}, "status": "ok", "value": 5e14, "low": 4e14, "high": 6e14,
                "unit": "FLOP/s"}],
}  # fmt: skip


def changed(**changes) -> dict:
    """The record, with these values for some of its keys or of its machine's."""
    record = copy.deepcopy(MI325X)
    for key, value in changes.items():
        (record["machine"] if key in record["machine"] else record)[key] = value
    return record


@pytest.fixture
def ship(tmp_path, monkeypatch):
    """Put records into the folder of those that the library brings, and have no measurement of this machine."""
    monkeypatch.setattr(shared_records, "folder", lambda: tmp_path)
    monkeypatch.setenv("ROCM_EXT_BENCH", str(tmp_path / "bench"))
    monkeypatch.setattr(TrainingPlanner, "fit", lambda self, budget: self.choice(self.rows.longest, [], budget))

    def write(*records: dict) -> None:
        for index, record in enumerate(records):
            (tmp_path / f"{index}.json").write_text(json.dumps(record))

    return write


def plan(capsys, *arguments: str) -> dict:
    assert main(["plan", "--json", "--config", "cpu_pocket", "tokenizer.max_seq_len=64", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_records_that_are_shipped_are_whole():
    assert shared_records.folder() == Path(__file__).parents[1] / "recipe_configs/measured"
    for record in shared_records.shared_records():
        assert any(record.chips(load_profile(name)) for name in ("cpu", "cuda", "mi200", "mi300x", "mi50", "radeon",
                                                                 "strix_halo", "strix_halo_windows"))  # fmt: skip


def test_plan_uses_the_record_of_a_chip(ship, capsys):
    ship(MI325X)
    found = plan(capsys, "--machine", "mi325x")
    assert found["figures"]["source"] == "measured by another owner, 2026-11-20, torch 2.11.0+rocm7.2, rocm 7.2"
    assert found["figures"]["measured"]
    assert found["figures"]["flops"] == FIGURES["flops"]
    assert found["figures"]["link"] > 1e11, "bench does not measure it: the data sheet's"
    assert found["budget"] == int(0.9 * 256 * GIB)
    assert "data sheet of MI300X" in plan(capsys, "--machine", "MI300X")["figures"]["source"]
    assert "data sheet of MI300X" in plan(capsys, "hardware=mi300x")["figures"]["source"]


def test_a_machine_without_a_data_sheet_is_known_by_its_record(ship, capsys):
    ship(changed(backend="cuda", arch="sm_89", name="NVIDIA GeForce RTX 4070", memory=11.6, versions={"torch": "2.11"}))
    assert main(["plan", "--config", "cpu_pocket", "--machine", "RTX 4071"]) == 1
    assert "did you mean" in capsys.readouterr().err
    cpu = changed(backend="cpu", arch=None, name="Intel(R) Xeon(R) @ 2.00GHz", cores=4, memory=7.5)
    ship(changed(backend="cuda", arch="sm_62", name="NVIDIA Jetson", memory=7.4), cpu)
    jetson = plan(capsys, "--machine", "jetson")
    assert jetson["figures"]["source"].startswith("measured by another owner")
    assert jetson["budget"] == int(0.9 * int(7.4 * GIB))
    xeon = plan(capsys, "--machine", "intel(r) xeon(r) 2.00GHz")
    assert xeon["budget"] == int(7.5 * GIB)
    assert xeon["dtype"] == "fp32"


@pytest.mark.parametrize(
    ("backend", "arch", "name", "memory", "chip"),
    [
        ("cuda", "sm_89", "NVIDIA L4", 22.0, None),
        ("cuda", "sm_89", "NVIDIA GeForce RTX 4090 Laptop GPU", 15.7, None),
        ("cuda", "sm_90", "NVIDIA GH200 480GB", 94.5, None),
        ("rocm", "gfx906", "AMD Radeon VII", 16.0, None),
        ("rocm", "gfx942", "AMD Instinct MI308X", 192.0, None),
        ("rocm", "gfx1100", "AMD Radeon Graphics", 48.0, "PRO W7900"),
        ("rocm", "gfx942", "AMD Instinct MI300X VF", 192.0, "MI300X"),
        ("rocm", "gfx906", "AMD Instinct MI50/MI60", 16.0, "MI50 16 GB"),
        ("cuda", "sm_90", "NVIDIA H100 80GB HBM3", 79.1, "H100 SXM"),
        ("cuda", "sm_80", "NVIDIA A100-SXM4-40GB", 39.4, "A100 40 GB"),
    ],
)
def test_a_record_is_of_the_product_that_was_measured(ship, backend, arch, name, memory, chip):
    ship(changed(backend=backend, arch=arch, name=name, memory=memory))
    (found,) = set(shared_records.recorded_machines().values())
    assert found[1] == (chip or name)


def test_this_machine_uses_the_record_of_its_chip_until_it_is_measured(ship, tmp_path):
    quick = changed(quick=True, date="2026-12-24", figures={**FIGURES, "efficiency": 0.1})
    ship(MI325X, quick, changed(date="2026-01-01", figures={**FIGURES, "efficiency": 0.2}))
    profile, machine = load_profile("mi300x"), replace(MI300X, name="AMD Instinct MI325X", total_memory=256 * GIB)
    assert figures_for(profile, machine).efficiency == 0.6, "the newest of the whole records"
    assert not figures_for(profile, MI300X).measured
    own = {"date": "2026-11-21", "machine": bench_file.machine_key(machine), "settings": {}}
    (tmp_path / "bench").write_text(json.dumps({**own, "figures": {**FIGURES, "efficiency": 0.9}}))
    assert figures_for(profile, machine).efficiency == 0.9
    assert figures_for(profile, machine, chip="MI325X").efficiency == 0.9
    assert "data sheet" in figures_for(profile, machine, chip="MI300X").source


def test_a_record_of_another_system_or_cpu_is_not_taken(ship):
    halo = changed(arch="gfx1151", name="AMD Radeon 8060S", memory=62.0, system="Windows")
    xeon = changed(backend="cpu", arch=None, name="Some other CPU", cores=4)
    ship(halo, xeon)
    assert "data sheet" in figures_for(load_profile("strix_halo"), STRIX).source
    assert figures_for(load_profile("strix_halo_windows"), replace(STRIX, system="Windows")).measured
    assert not figures_for(load_profile("cpu"), CPU).measured


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"hostname": "zaphods-box"}, "unknown key 'hostname'"),
        ({"name": "/home/zaphod"}, "may be private"),
        ({"model": r"C:\Users\zaphod"}, "may be private"),
        ({"versions": {"torch": "zaphod@example.org"}}, "may be private"),
        ({"settings": {"path": "~/models"}}, "may be private"),
        ({"config": "work/runs/mine.yaml"}, "may be private"),
        ({"figures": {"flops": {"fp32": 1.0}}}, "figures: KeyError: 'bandwidth'"),
        ({"figures": {"flops": {"fp32": -1.0}, "bandwidth": 1}}, "not a number above 0"),
        ({"probes": [{"probe": "gemm"}]}, "lacks 'values'"),
        ({"format": "2"}, "format"),
        ({"memory": None}, "memory"),
    ],
)
def test_damaged_and_private_records_are_refused(changes, found, ship, capsys):
    with pytest.raises(UserError, match="a record") as error:
        SharedRecord.from_dict(changed(**changes), "a record")
    assert found in str(error.value)
    ship(changed(**changes))
    assert main(["plan", "--config", "cpu_pocket", "--machine", "MI325X"]) == 1
    assert "0.json" in capsys.readouterr().err


def test_a_record_holds_nothing_private(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "zaphods-box")
    for name in ("HOME", "USER", "LOGNAME", "HOSTNAME"):
        monkeypatch.setenv(name, "/home/zaphod")
    folder = tmp_path / "zaphod"
    folder.mkdir()
    monkeypatch.chdir(folder)
    cfg = config.load("lora_finetune_rocm", "cpu_pocket", ["hardware=cpu", f"output_dir={folder}"])
    row = {"item": {"probe": "training", "values": {"rows": 4}, "environ": {"HF_HOME": "/home/zaphod"}, "skip": ""}}
    rows = [{**row, "status": "failed", "result": {}, "detail": "cannot read /home/zaphod/model"},
            {**row, "status": "ok", "result": {"value": 2.0, "low": 1.0, "high": 3.0, "unit": "tokens/s",
                                               "file": "/home/zaphod"}, "detail": ""}]  # fmt: skip
    content = {"date": "2026-11-20", "machine": {}, "config": str(folder / "zaphod.yaml"), "quick": True,
               "cores_of_other_programs": 0.0, "figures": FIGURES, "settings": {"rows": 4}, "rows": rows}  # fmt: skip
    machine = replace(MI300X, kernel="6.18.4-zaphod", torch="2.11.0+zaphod")
    said = share(content, cfg, machine, folder / "record.json")
    text = (folder / "record.json").read_text()
    for private in ("zaphod", "/home", str(tmp_path), str(Path.home()), "record.json"):
        assert private not in text
    assert "Nothing was uploaded" in said
    record = shared_records.read(folder / "record.json")
    assert record.versions["kernel"] == "6.18.4"
    assert (record.config, record.probes[1].low, record.probes[0].value) == (None, 1.0, None)
    assert record.model == "1 million parameters, 4 layers of width 128, 320 tokens"
    ubuntu = share(content, cfg, replace(machine, kernel="6.14.0-1018-oem"), folder / "ubuntu.json")
    assert "kernel 6.14.0-1018-oem" in ubuntu
