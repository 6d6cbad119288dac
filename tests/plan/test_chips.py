"""`rocm-ext plan --machine NAME`, and which data sheet a machine gets."""

import json
from dataclasses import replace

import pytest

from rocm_ext.base.errors import UserError
from rocm_ext.cli import main
from rocm_ext.machine.bench_file import machine_key
from rocm_ext.machine.detect import UNIFIED
from rocm_ext.machine.profile import chips_of, find_chip, load_profile, profile_names
from rocm_ext.plan.speeds import figures_for
from tests.kit.plans import plan
from tests.machine.test_device import CPU, GIB, H200, MI50, MI300X, STRIX

RADEON = replace(MI50, arch="gfx1100", bf16=True)
SAMPLE = ("--config", "cpu_pocket", "tokenizer.max_seq_len=64")


pytestmark = pytest.mark.usefixtures("as_configured")


@pytest.mark.wide
def test_data_sheets_are_whole():
    seen = set()
    for profile in map(load_profile, profile_names()):
        assert bool(profile.chips) == bool(profile.reached) == (profile.name != "cpu")
        assert profile.reached.keys() in ({"compute", "bandwidth", "attention", "launch"}, set())
        assert {chip.arch for chip in profile.chips.values()} >= set(profile.match.get("arch", ()))
        for name, chip in profile.chips.items():
            assert profile.is_for(chip.arch)
            assert 4 <= chip.memory <= 512
            assert chip.memory < chip.bandwidth < 10_000
            assert chip.fp32 <= (chip.bf16 or chip.fp16)
            assert bool(chip.bf16) == (chip.arch not in ("gfx906", "sm_70", "sm_75"))
            assert not (chip.link and chip.arch in UNIFIED)
            assert name not in seen
            assert find_chip(name) == (profile.name, name)
            seen.add(name)


@pytest.mark.parametrize(
    ("name", "profile", "chip"),
    [
        ("MI355X", "mi300x", "MI355X"), ("gfx950", "mi300x", "MI355X"),
        ("Radeon 8065S", "strix_halo", "Gorgon Halo 192 GB"), ("gfx1151", "strix_halo", "Strix Halo 128 GB"),
        ("9070 GRE", "radeon", "RX 9070 GRE"),
        ("7900 XTX", "radeon", "RX 7900 XTX"),
        ("MI50 16GB", "mi50", "MI50 16 GB"),
        ("rtx4090", "cuda", "RTX 4090"),
    ],
)  # fmt: skip
def test_a_chip_has_many_spellings(name, profile, chip):
    assert find_chip(name) == (profile, chip)
    assert find_chip(name.upper(), profile) == (profile, chip)


@pytest.mark.wide
def test_a_plan_for_a_chip_by_name(capsys):
    small, large = (plan(capsys, *SAMPLE, "--machine", name) for name in ("7900 XTX", "w7900"))
    assert small["machine"].startswith("RX 7900 XTX; this is another machine")
    assert "data sheet of RX 7900 XTX" in small["figures"]["source"]
    assert small["dtype"] == "bf16", "the machine's profile overrules the config's"
    assert [found["budget"] for found in (small, large)] == [
        int(0.9 * 24 * GIB),
        int(0.9 * 48 * GIB),
    ]
    assert large["figures"]["bandwidth"] < small["figures"]["bandwidth"]
    halo = plan(capsys, *SAMPLE, "--machine", "Strix Halo", "hardware=strix_halo_windows")
    assert "Windows" in halo["machine"]
    first = plan(capsys, *SAMPLE, "hardware=mi300x", "dtype=fp32")
    assert "data sheet of MI300X" in first["figures"]["source"], (
        "without --machine: the first chip of the profile"
    )


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--machine", "MI335X"], "--machine MI335X is unknown; did you mean MI355X"),
        (["--machine", "7900"], "did you mean RX 7900 XTX, RX 7900 XT, RX 7900 GRE, PRO W7900?"),
        (
            ["--machine", "MI355X", "hardware=radeon"],
            "is hardware=mi300x, which contradicts hardware=radeon",
        ),
        (
            ["--machine", "W7900", "--bench", "{bench}"],
            "was measured on RX 7900 XTX, but --machine is PRO W7900",
        ),
        (["--machine", "MI300X", "--bench", "{bench}"], "hardware=mi300x is AMD Instinct"),
    ],
)
def test_wrong_machines_are_one_line(arguments, found, capsys, bench):
    assert main(["plan", *SAMPLE, *[argument.format(bench=bench) for argument in arguments]]) == 1
    said = capsys.readouterr().err
    assert found in said
    assert len(said.splitlines()) == 1


@pytest.fixture
def bench(tmp_path):
    """A file that `rocm-ext bench` wrote on an RX 7900 XTX."""
    machine = {
        "backend": "rocm",
        "arch": "gfx1100",
        "name": "AMD Radeon RX 7900 XTX",
        "torch": "2.11.0",
        "cores": None,
    }
    figures = {"flops": {"bf16": 6e13}, "bandwidth": 7e11, "efficiency": 0.5}
    path = tmp_path / "bench.json"
    path.write_text(
        json.dumps({"date": "2026-11-20", "machine": machine, "figures": figures, "settings": {}})
    )
    return path


def test_measured_speeds_with_the_memory_of_the_chip(bench, capsys):
    found = plan(capsys, *SAMPLE, "--machine", "gfx1100", "--bench", str(bench))
    assert found["figures"]["measured"]
    assert found["figures"]["bandwidth"] == 7e11
    assert found["budget"] == int(0.9 * 24 * GIB)


@pytest.mark.parametrize(
    ("machine", "profile", "chip"),
    [
        (MI300X, "mi300x", "MI300X"),
        (replace(MI300X, name="AMD Radeon Graphics", total_memory=256 * GIB), "mi300x", "MI325X"),
        (replace(RADEON, name="AMD Radeon Graphics", total_memory=48 * GIB), "radeon", "PRO W7900"),
        (replace(MI50, name="AMD Instinct MI50/MI60", total_memory=16 * GIB), "mi50", "MI50 16 GB"),
        (
            replace(STRIX, total_memory=62 * GIB),
            "strix_halo",
            "Strix Halo 128 GB",
        ),  # GTT is half of the memory
        (replace(H200, arch="sm_80", name="NVIDIA A100-SXM4-40GB"), "cuda", "A100 40 GB"),
    ],
)
def test_this_machine_gets_its_own_chip(machine, profile, chip):
    assert f"data sheet of {chip}, assuming" in figures_for(load_profile(profile), machine).source


def test_a_chip_without_a_data_sheet_is_told():
    cuda = load_profile("cuda")
    volta = replace(H200, arch="sm_62", name="NVIDIA Jetson")
    assert "data sheet of H100 SXM; NVIDIA Jetson has none here" in figures_for(cuda, volta).source
    assert chips_of(cuda, "sm_62", "NVIDIA Jetson") == []
    small = replace(H200, arch="sm_89", name="NVIDIA L4")
    assert "data sheet of RTX 4090; NVIDIA L4 has none here" in figures_for(cuda, small).source
    assert "has none here" not in figures_for(cuda, CPU).source


def test_a_measurement_stands_for_no_other_product(tmp_path, monkeypatch):
    machine, profile = replace(H200, arch="sm_89", name="NVIDIA L4"), load_profile("cuda")
    measured = {"flops": {"bf16": 6e13}, "bandwidth": 2.4e11}
    path = tmp_path / "bench.json"
    content = {
        "date": "2026-11-20",
        "machine": machine_key(machine),
        "figures": measured,
        "settings": {},
    }
    path.write_text(json.dumps(content))
    monkeypatch.setenv("ROCM_EXT_BENCH", str(path))
    assert figures_for(profile, machine).bandwidth == 2.4e11
    assert not figures_for(profile, machine, chip="RTX 4090").measured
    with pytest.raises(UserError, match="was measured on NVIDIA L4, but --machine is RTX 4090"):
        figures_for(profile, machine, path, "RTX 4090")
