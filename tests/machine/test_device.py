"""Profiles, detection from recorded sysfs trees, checks, and HIP's environment."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.base.registry import DECIDED
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.machine import bench_file, trials
from rocm_ext.machine.budget import memory_budget, nominal_budget, open_device
from rocm_ext.machine.detect import Machine, detect
from rocm_ext.machine.environment import (
    ALLOCATOR_VARIABLES,
    apply_environment,
    check_environment,
    environment_for,
    preset,
)
from rocm_ext.machine.profile import (
    check_locked,
    check_profile,
    choose_profile,
    load_profile,
    profile_names,
)
from rocm_ext.model import compiling
from rocm_ext.rl.engines import free_memory
from rocm_ext.train.lifecycle import Runtime

REPO = Path(__file__).parents[2]
GIB = 2**30
STRIX = Machine(
    "rocm", "Linux", "2.12.0+rocm7.2", "rocm", 120 * GIB, True, "gfx1151", "Radeon 8060S", 1, True,
    kernel="6.18.9", rocm="7.2", native_archs=("gfx942", "gfx1151"), amd_archs=("gfx1151",),
)  # fmt: skip
MI300X = replace(
    STRIX, arch="gfx942", name="MI300X", gpu_count=8, unified=False, total_memory=192 * GIB
)
MI50 = replace(STRIX, arch="gfx906", name="MI50", unified=False, bf16=False, torch="2.9.1+rocm6.3",
               rocm="6.3", native_archs=("gfx906",), total_memory=32 * GIB)  # fmt: skip
CPU = Machine("cpu", "Linux", "2.13.0+cpu", "cpu", 16 * GIB, False)
H200 = replace(CPU, backend="cuda", torch_build="cuda", arch="sm_90", gpu_count=1, bf16=True)


# ------------------------------------------------------------------------------------------ recorded machines
def record(root: Path, archs: list, kernel: str = "6.18.9-arch1", gtt: int | None = None) -> Path:
    """Write a sysfs and procfs tree with one CPU node and these (gfx_target_version, simd_count) GPU nodes."""

    def write(path: str, text: str) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text + "\n")

    for node, (version, simds) in enumerate([(0, 0), *archs]):
        path = f"sys/class/kfd/kfd/topology/nodes/{node}/properties"
        write(path, f"cpu_cores_count 0\nsimd_count {simds}\ngfx_target_version {version}\nname")
    if gtt is not None:
        write("sys/class/drm/card1/device/mem_info_gtt_total", str(gtt))
    write("proc/sys/kernel/osrelease", kernel)
    write(
        "proc/meminfo",
        f"MemTotal:  {124 * 2**20} kB\nMemFree: 1 kB\nMemAvailable:  {118 * 2**20} kB",
    )
    write("proc/cpuinfo", "flags : fpu avx2 avx512f")
    return root


@pytest.fixture
def fake_torch(monkeypatch):
    """Make torch look like a build that sees `count` GPUs with these properties."""

    def fake(version="2.12.0+rocm7.2", hip="7.2.1", cuda=None, count=1, archs=(), **properties):
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(archs))
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties)
        )

    monkeypatch.setattr("platform.system", lambda: "Linux")
    for name in (
        "HSA_OVERRIDE_GFX_VERSION",
        *(f"{api}_VISIBLE_DEVICES" for api in ("HIP", "ROCR", "CUDA")),
    ):
        monkeypatch.delenv(name, raising=False)
    return fake


@pytest.mark.parametrize(("gcn", "node", "unified", "bf16", "profile"), [
    ("gfx1151", 110501, True, True, "strix_halo"), ("gfx942:sramecc+:xnack-", 90402, False, True, "mi300x"),
    ("gfx906:sramecc-:xnack-", 90006, False, False, "mi50"), ("gfx1201", 120001, False, True, "radeon"),
])  # fmt: skip
def test_amd_gpus_are_found_and_get_their_profile(
    fake_torch, tmp_path, gcn, node, unified, bf16, profile
):
    fake_torch(gcnArchName=gcn, name="a GPU", total_memory=32 * GIB)
    machine = detect(record(tmp_path, [(node, 80)]))
    assert machine.arch == gcn.split(":")[0] == machine.amd_archs[0]
    assert (machine.backend, machine.unified, machine.bf16, machine.rocm) == (
        "rocm",
        unified,
        bf16,
        "7.2",
    )
    name, reason = choose_profile(machine)
    assert (name, machine.arch in reason) == (profile, True)
    check_profile(load_profile(name), machine)


def test_sysfs_says_the_arch_where_torch_does_not(fake_torch, tmp_path, monkeypatch):
    root = record(tmp_path, [(100306, 4), (110501, 80)])
    fake_torch(name="a GPU", total_memory=GIB)  # no gcnArchName on some wheels
    assert detect(root).arch == "gfx1151", "the largest GPU, not the first"
    fake_torch(gcnArchName="gfx1100", name="a GPU", total_memory=GIB)
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "11.0.0")
    assert detect(root).arch == "gfx1151"


@pytest.mark.parametrize(
    ("version", "cuda", "kind"), [("2.13.0+cu130", "13.0", "CUDA"), ("2.13.0+cpu", None, "CPU")]
)
def test_the_wrong_torch_on_an_amd_machine_is_named(fake_torch, tmp_path, version, cuda, kind):
    fake_torch(version=version, hip=None, cuda=cuda, count=0)
    machine = detect(record(tmp_path, [(90006, 240)]))
    wanted = rf"gfx906.*{kind} build; install .*rocm6\.3"
    with pytest.raises(UserError, match=wanted):
        choose_profile(machine)
    with pytest.raises(UserError, match=wanted):
        check_profile(load_profile("mi50"), machine)
    assert check_profile(load_profile("cpu"), machine) == []


def test_machines_without_a_gpu_to_train_on_use_the_cpu(fake_torch, tmp_path, monkeypatch):
    fake_torch(version="2.13.0+cpu", hip=None, count=0)
    assert choose_profile(detect(record(tmp_path / "none", []))) == ("cpu", "no GPU found")
    name, reason = choose_profile(detect(record(tmp_path / "small", [(100306, 4)])))
    assert name == "cpu"
    assert "gfx1036" in reason
    assert choose_profile(H200)[0] == "cuda"
    fake_torch(count=0)
    root = record(tmp_path, [(110501, 80)])
    with pytest.raises(UserError, match="/dev/kfd"):
        choose_profile(detect(root))
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "-1")  # hidden on purpose
    assert choose_profile(detect(root)) == ("cpu", "HIP_VISIBLE_DEVICES hides all GPUs")


def test_wsl_is_recognised_and_its_kernel_not_judged(fake_torch, tmp_path):
    fake_torch(gcnArchName="gfx1151", name="a GPU", total_memory=GIB)
    machine = detect(record(tmp_path, [], kernel="6.6.87.2-microsoft-standard-WSL2"))
    assert machine.wsl
    assert check_profile(load_profile("strix_halo"), machine) == []


# --------------------------------------------------------------------------------------------------- profiles
@pytest.mark.parametrize("name", profile_names())
def test_profiles_are_whole(name):
    defaults = OmegaConf.create(config.defaults("lora_finetune_rocm"))
    profile = load_profile(name)
    assert set(profile.settings) <= set(defaults), (
        "a profile may only set keys that the recipe reads"
    )
    assert {"device", "dtype", "num_workers", "pin_memory"} <= set(profile.settings)
    assert all(lock.reason for lock in profile.locked.values())
    for variable in profile.environment.values():
        assert variable.reason
        assert isinstance(variable.value, str)
    assert all(limits["fix"] for limits in profile.floor.values())
    assert bool(profile.install) == (profile.match["backend"] == "rocm")
    assert check_locked(profile, profile.settings, []) == []
    for user in ({}, {"WORLD_SIZE": "8"}):
        ours = {name: new.value for name, new in environment_for(profile, STRIX, user).items()}
        check_environment(profile, STRIX, ours)  # does not contradict itself


def test_unknown_names_and_broken_files(tmp_path):
    with pytest.raises(UserError, match="did you mean strix_halo"):
        load_profile("strix_hallo")
    own = tmp_path / "own.yaml"
    own.write_text("title: mine\nmemory: {of: host}\nsettings: {device: cpu}\n")
    assert load_profile(str(own)).title == "mine"
    host = "memory: {of: host}\n"
    for broken, told in (
        ("memory: host", "memory is 'host', expected an object"),
        ("memory: {of: device}", "memory.fraction is None, expected float"),
        (host + "locked: {compile: {value: 1}}", "locked.compile lacks 'reason'"),
        (
            host + "environment: {A: {value: 1, reason: r}}",
            "environment.A.value is 1, expected str",
        ),
        (
            host + "chips: {X: {arch: a, memory: 8, bandwidth: 9, fp32: 1}}\nreached: {compute: 1}",
            "reached lacks band",
        ),
        ("memory: {of", "is not YAML"),
    ):
        own.write_text("title: mine\n" + broken)
        with pytest.raises(UserError, match=f"hardware profile .*own.*{re.escape(told)}"):
            load_profile(str(own))


def test_an_arch_without_profile_is_named_and_may_borrow_one():
    strix_point = replace(STRIX, arch="gfx1150", name="Radeon 890M")
    with pytest.raises(UserError, match=r"gfx1150.*hardware=strix_halo"):
        choose_profile(strix_point)
    (line, *_) = check_profile(load_profile("strix_halo"), strix_point)
    assert "gfx1150" in line


@pytest.mark.parametrize(
    ("arch", "unified", "near"),
    [("gfx1250", False, "mi300x"), ("gfx1030", False, "radeon"),
     ("gfx1153", True, "strix_halo")],
)  # fmt: skip
def test_the_nearest_profile_is_of_the_same_family(fake_torch, tmp_path, arch, unified, near):
    """gfx125x is CDNA5, an Instinct, in spite of its number (bitsandbytes#2023)."""
    fake_torch(gcnArchName=arch, name="a GPU", total_memory=32 * GIB)
    machine = detect(record(tmp_path, []))
    assert machine.unified == unified
    with pytest.raises(UserError, match=f"{arch}.*Name the nearest, as in hardware={near},"):
        choose_profile(machine)


@pytest.mark.parametrize(("profile", "machine", "world", "message"), [
    ("mi300x", CPU, 1, "MI300X.*found Linux without a GPU.*hardware=cpu"),
    ("strix_halo", replace(STRIX, system="Windows"), 1, "hardware=strix_halo_windows"),
    ("mi300x", MI300X, 9, "9 processes need 9 GPUs.*--nproc_per_node 8"),
    ("strix_halo_windows", replace(STRIX, system="Windows"), 2, "one process only"),
])  # fmt: skip
def test_profiles_that_do_not_describe_this_machine(profile, machine, world, message):
    with pytest.raises(UserError, match=message):
        check_profile(load_profile(profile), machine, world)


def test_ranks_and_floors():
    assert check_profile(load_profile("mi300x"), MI300X, 8) == []
    assert check_profile(load_profile("cpu"), CPU, 4) == []
    old = replace(STRIX, kernel="6.14.0-37-generic", rocm="6.4")
    kernel, rocm = check_profile(load_profile("strix_halo"), old)
    assert kernel.startswith("kernel 6.14.0-37-generic is older than 6.18.4: ")
    for patched in ("6.14.0-1018-oem", "6.17.0-1012-oem", "6.17.0-19-generic"):
        assert check_profile(load_profile("strix_halo"), replace(STRIX, kernel=patched)) == []
    for older in ("6.14.0-1017-oem", "6.17.0-18-generic", "6.17.0-19-lowlatency", "6.17.9"):
        assert len(check_profile(load_profile("strix_halo"), replace(STRIX, kernel=older))) == 1
    assert rocm.startswith("rocm 6.4 is older than 7.2: ")
    backported = replace(STRIX, kernel="6.12.57+deb13-amd64", saves_registers=True)
    assert check_profile(load_profile("strix_halo"), backported) == []
    replaced = replace(STRIX, kernel="7.0.0-31-generic", saves_registers=False)
    (line,) = check_profile(load_profile("strix_halo"), replaced)
    assert "uninstall amdgpu-dkms" in line
    own = replace(load_profile("strix_halo"), floor={"kernel": {"min": "7.1", "fix": "upgrade"}})
    assert len(check_profile(own, replace(replaced, saves_registers=True))) == 1, (
        "a floor without the property"
    )
    (line,) = check_profile(load_profile("mi50"), replace(MI50, torch="2.10.0+rocm7.0"))
    assert "not below 2.10" in line
    (line,) = check_profile(load_profile("mi50"), replace(MI50, native_archs=("gfx942",)))
    assert "no kernels for gfx906; install" in line


def test_locked_settings():
    profile = load_profile("strix_halo")
    settings = {**profile.settings, "num_workers": 4, "pin_memory": True, "quantize_base": True}
    with pytest.raises(
        UserError, match=r"num_workers=4.*wants 0: .*pin_memory=True.*NF4.*_overrides: \[num"
    ):
        check_locked(profile, settings, [])
    lines = check_locked(profile, settings, ["num_workers", "pin_memory", "quantize_base"])
    assert [line.split("=")[0] for line in lines] == ["num_workers", "pin_memory", "quantize_base"]
    mi50 = load_profile("mi50")
    assert mi50.settings["dtype"] == "fp32"
    for allowed in ("fp32", "fp16", "auto"):
        assert check_locked(mi50, {"dtype": allowed}, []) == []
    with pytest.raises(
        UserError, match="dtype=bf16 on mi50, which wants fp32 or fp16 or auto: gfx906"
    ):
        check_locked(mi50, {"dtype": "bf16"}, [])
    (line,) = check_locked(mi50, {}, ["num_workers"])
    assert "does not lock num_workers" in line


# ---------------------------------------------------------------------------------------------- compile: auto
@pytest.fixture
def choose(tmp_path, monkeypatch):
    """``choose(machine, program)``: what ``compile: auto`` chooses if the trial's child process is this program."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("ROCM_EXT_BENCH", str(tmp_path / "bench.json"))
    started, commands = subprocess.Popen, []

    def choose(machine=STRIX, program="never", profile="strix_halo", **keys):
        def instead(command, **kwargs):
            commands.append(command)
            return started([sys.executable, "-c", program], **kwargs)

        monkeypatch.setattr(trials.subprocess, "Popen", instead)
        cfg = OmegaConf.create({"device": "cuda", "hardware_overrides": [], **keys})
        return compiling.choose_compile(cfg, load_profile(profile), machine)

    choose.commands = commands
    return choose


def test_compile_auto_needs_no_trial_where_the_answer_is_known(choose, tmp_path):
    old = replace(STRIX, torch="2.10.0+rocm7.2")
    assert choose(old) == (False, "it froze gfx1151 before torch 2.11, and this is 2.10.0+rocm7.2")
    assert choose(device="cpu") == (False, "the device is a CPU")
    assert choose(router_replay=True)[0] is False
    locked = load_profile("mi50").locked["compile"]
    assert choose(MI50, profile="mi50") == (False, locked.reason)
    opened = {"hardware_overrides": ["compile"], "device": "cpu"}
    assert choose(MI50, profile="mi50", **opened) == (False, "the device is a CPU")
    assert check_locked(load_profile("mi50"), {"compile": "auto"}, []) == []
    measured = {"date": "2026-11-20", "machine": bench_file.machine_key(STRIX), "settings": {"compile": True},
                "figures": {"flops": {"bf16": 1.0}, "bandwidth": 1.0}}  # fmt: skip
    (tmp_path / "bench.json").write_text(json.dumps(measured))
    assert choose() == (True, "measured 2026-11-20 by rocm-ext bench")
    assert not choose.commands


@pytest.mark.parametrize(("program", "reason"), [
    ('print(\'{"failure": "", "final": true}\')', "a compiled layer was right and faster in a trial"),
    ("import os; os.abort()", "a trial of a compiled layer ended with status -6"),
    ("import time; time.sleep(60)", "a compiled layer took longer than 5 s"),
], ids=["right", "crash", "hang"])  # fmt: skip
def test_compile_auto_survives_its_trial(choose, monkeypatch, program, reason):
    monkeypatch.setattr(trials, "_TIMEOUT", 5)
    value, why = choose(program=program)
    assert (value, why) == (reason.endswith("faster in a trial"), reason)
    assert choose.commands == [[sys.executable, "-m", "rocm_ext.model.compiling", "0"]]
    assert compiling.in_words(value, why) == (
        f"compile True ({why})" if value else f"compile off: {why}"
    )


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        (lambda x, out: x + (out - x).detach(), r"wrong by 9\.\de-01"),  # as torch 2.11 compiled
        (lambda x, out: 1.2 * out, r"wrong by 2\.0e-01"),
        (lambda x, out: out, "times as fast|^$"),
    ],
    ids=["no gradient", "wrong", "right"],
)
def test_the_trial_of_compile_compares_gradients(monkeypatch, change, failure):
    monkeypatch.setattr(compiling, "_SHAPE", compiling._SHAPE.parents[1] / "demo" / "pocket")
    monkeypatch.setattr(compiling, "_ROWS", ((20, 12), (30, 10)))

    def compile_layer(layer, dynamic):
        return lambda x, **arguments: change(x, layer(x, **arguments))

    monkeypatch.setattr(torch, "compile", compile_layer)
    assert re.search(failure, compiling.trial(torch.device("cpu")))


def test_a_run_records_its_choice_of_compile_and_resumes_with_it(tmp_path, caplog):
    caplog.set_level("INFO")

    def opened(*overrides):
        changes = ["compile=auto", f"output_dir={tmp_path}", *overrides]
        cfg = config.load("lora_finetune_rocm", "cpu_pocket", changes)
        whole = OmegaConf.create(cfg)
        Runtime.open(cfg, whole).ranks.close()
        assert cfg.compile == whole.compile
        return cfg.compile

    assert opened() is False
    assert "compile off: the device is a CPU" in caplog.text
    (tmp_path / "config.yaml").write_text("compile: True")
    assert opened() is False
    assert opened("resume_from_checkpoint=True") is True
    assert "compile True (as the run began)" in caplog.text


# ------------------------------------------------------------------------------------------------ environment
def test_the_user_s_environment_comes_first():
    profile = load_profile("strix_halo")
    ours = environment_for(profile, STRIX, {})
    assert ours["HSA_ENABLE_SDMA"].value == "0"
    assert "unproven" in ours["HSA_ENABLE_SDMA"].reason
    assert "HSA_OVERRIDE_GFX_VERSION" not in ours, "harmful where torch has kernels"
    foreign = replace(STRIX, native_archs=("gfx942",))
    assert "HSA_OVERRIDE_GFX_VERSION" in environment_for(profile, foreign, {})
    other = replace(foreign, arch="gfx1150")
    assert "HSA_OVERRIDE_GFX_VERSION" not in environment_for(profile, other, {}), "it is no gfx1151"
    assert "HSA_ENABLE_SDMA" not in environment_for(profile, STRIX, {"HSA_ENABLE_SDMA": "1"})
    several = environment_for(load_profile("mi300x"), MI300X, {"WORLD_SIZE": "8"})
    assert several["GPU_MAX_HW_QUEUES"].value == "2"
    assert environment_for(load_profile("mi300x"), MI300X, {}) == {}
    cpu = {"GOMP_SPINCOUNT", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"}
    assert set(environment_for(load_profile("cpu"), CPU, {})) == cpu


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
@pytest.mark.parametrize("profile", ["strix_halo", "mi300x"])
def test_the_combination_that_zeroes_buffers_is_refused(name, profile):
    user = {name: "max_split_size_mb:512,expandable_segments: true"}
    with pytest.raises(UserError, match="zeroes live buffers"):
        environment_for(load_profile(profile), MI300X, user)
    for safe in ("max_split_size_mb:512,expandable_segments:False", "expandable_segments:True"):
        ours = environment_for(load_profile(profile), MI300X, {name: safe})
        assert not set(ours) & set(ALLOCATOR_VARIABLES), (
            "the user's settings are never mixed with ours"
        )
    assert environment_for(load_profile("cuda"), H200, user) == {}, "NVIDIA is not affected"


MEASURED = replace(STRIX, torch="2.12.0a0+rocm7.13.0a20260411", rocm="7.13")
SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_the_measured_allocator_is_set_where_it_was_measured():
    profile = load_profile("strix_halo")

    def allocator(machine, **user):
        ours = environment_for(profile, machine, user)
        names = {*ALLOCATOR_VARIABLES, "HIP_FORCE_DEV_KERNARG"}
        return {name: ours[name].value for name in names.intersection(ours)}

    assert allocator(MEASURED) == {**SEGMENTS, "HIP_FORCE_DEV_KERNARG": "1"}
    old = {"PYTORCH_HIP_ALLOC_CONF": "garbage_collection_threshold:0.8,max_split_size_mb:512"}
    for torch_version in (
        "2.11.0+rocm7.13.0",
        "2.12.0+rocm7.2",
        "2.12.0+rocm7.14.0",
        "2.14.0+rocm10.1.0",
    ):
        assert allocator(replace(STRIX, torch=torch_version)) == old
    for name in ALLOCATOR_VARIABLES:
        own = {name: "max_split_size_mb:512"}
        assert allocator(MEASURED, **own, HIP_FORCE_DEV_KERNARG="0") == {}


def test_the_torch_build_is_known_before_hip_starts(monkeypatch):
    for name in (DECIDED, *ALLOCATOR_VARIABLES, *load_profile("strix_halo").environment):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    monkeypatch.setattr("importlib.metadata.version", {"torch": MEASURED.torch}.get)
    preset(load_profile("strix_halo"))
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_HIP_ALLOC_CONF" not in os.environ
    assert "HSA_OVERRIDE_GFX_VERSION" not in os.environ, "that depends on the GPU"
    assert set(environment_for(load_profile("strix_halo"), MEASURED, os.environ)) == set()


def test_segments_that_fail_with_a_version_of_rocm_are_told():
    profile = load_profile("strix_halo")
    torch_7_14 = replace(STRIX, torch="2.12.0+rocm7.14.0", rocm="7.14")
    (files,) = check_environment(profile, torch_7_14, SEGMENTS)
    assert "a file for each 20 MiB" in files
    torch_10 = replace(STRIX, torch="2.14.0+rocm10.1.0", rocm="10.1")
    for fine in (torch_10, MEASURED, replace(MEASURED, kernel="6.14.0-1018-oem")):
        assert check_environment(profile, fine, SEGMENTS) == []


def test_other_contradictions_and_warnings():
    profile = load_profile("mi300x")
    two = {
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:1",
        "PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:2",
    }
    with pytest.raises(UserError, match=r"differ.*Keep one"):
        environment_for(profile, MI300X, two)
    user = {"HSA_OVERRIDE_GFX_VERSION": "9.4.2", "ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0",
            "PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # fmt: skip
    old = replace(MI300X, torch="2.9.1+rocm7.0")
    segments, override, visible = check_environment(profile, old, user)
    assert "before torch 2.11" in segments
    assert "torch has kernels for gfx942" in override
    assert "Set ROCR_VISIBLE_DEVICES only" in visible
    assert check_environment(profile, MI300X, {}) == []


SCRIPT = """
import os, sys
from rocm_ext.machine.environment import apply_environment
from rocm_ext.machine.detect import Machine
from rocm_ext.machine.profile import load_profile
print("start", os.getpid(), flush=True)
profile = load_profile(sys.argv[1])
machine = Machine("cpu", "Linux", "2.13", "cpu", 0, False)
lines = apply_environment(profile, machine, restart=True)
print("ran", os.getpid(), os.environ["FAKE_HIP"], sys.argv[2:], lines, flush=True)
"""


@pytest.mark.parametrize("how", ["file", "-c", "stdin"])
def test_start_runs_the_command_again_with_variables_set(tmp_path, how):
    own = "title: t\nmemory: {of: host}\nenvironment: {FAKE_HIP: {value: '7', reason: why}}"
    (tmp_path / "own.yaml").write_text(own)
    (tmp_path / "script.py").write_text(SCRIPT)
    head = {"file": ["script.py"], "-c": ["-c", SCRIPT], "stdin": ["-"]}[how]
    environ = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", *head, "own.yaml", "a b", "--x=1"], cwd=tmp_path, env=environ,
        input=SCRIPT if how == "stdin" else None, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    *starts, ran = run.stdout.splitlines()
    pids = {line.split()[1] for line in [*starts, ran]}
    assert len(pids) == 1, "exec keeps the process"
    assert len(starts) == (1 if how == "stdin" else 2), "stdin is used up and cannot run again"
    assert (
        ran.split(maxsplit=2)[2]
        == "7 ['a b', '--x=1'] ['environment: FAKE_HIP=7 (`rocm-ext doctor` says why)']"
    )


def test_programs_not_replaced_are_told_what_came_too_late(monkeypatch):
    for name in ("ROCM_EXT_ENVIRONMENT", "GPU_MAX_HW_QUEUES"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    said, late = apply_environment(load_profile("mi300x"), MI300X)
    assert os.environ["GPU_MAX_HW_QUEUES"] == "2"
    assert said.startswith("environment: GPU_MAX_HW_QUEUES=2 (")
    assert late.endswith("export GPU_MAX_HW_QUEUES=2")


# ----------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("total", "available", "budget"),
    # the host keeps 16 GiB, its desktop's 6 included; one that uses 34 gets 8 more; smaller machines keep a fifth;
    # and never more than 0.9 of the memory
    [(124, 118, 108), (62, 57, 49.6), (62, 40, 33.8)],
)
def test_the_host_s_share_of_unified_memory(tmp_path, total, available, budget):
    root = record(tmp_path, [(110501, 80)], gtt=total * GIB)
    meminfo = f"MemTotal: {total * 2**20} kB\nMemAvailable: {available * 2**20} kB"
    (root / "proc/meminfo").write_text(meminfo)
    machine, profile = replace(STRIX, total_memory=total * GIB), load_profile("strix_halo")
    assert memory_budget(profile, machine, root)[0] == pytest.approx(budget * GIB, abs=2)
    if available > total - 16:  # what a plan for such a machine says
        assert nominal_budget(profile, total * GIB)[0] == pytest.approx(budget * GIB, abs=2)
    for taken in (2, 20):  # the budget stays the same while the process takes its memory
        (root / "proc/meminfo").write_text(
            meminfo.replace(f"{available * 2**20}", f"{(available - taken) * 2**20}")
        )
        assert memory_budget(profile, machine, root, taken * GIB)[0] == pytest.approx(
            budget * GIB, abs=2
        )
    (root / "proc/meminfo").write_text(meminfo.replace(f"{available * 2**20}", f"{3 * 2**20}"))
    with pytest.raises(
        UserError, match=r"MemAvailable is 3\.0 GiB, the host keeps .*Free host memory"
    ):
        memory_budget(profile, machine, root)


def test_a_carve_out_larger_than_gtt_is_the_budget(tmp_path):
    root = record(tmp_path, [(110501, 80)], gtt=15 * GIB)
    (root / "sys/class/drm/card1/device/mem_info_vram_total").write_text(f"{96 * GIB}\n")
    machine, profile = replace(STRIX, total_memory=96 * GIB), load_profile("strix_halo")
    assert memory_budget(profile, machine, root) == (
        int(96 * GIB * 0.95),
        "95% of the carve-out's 96.0 GiB",
    )
    discrete = root / "sys/class/drm/card2/device"  # beside an integrated GPU that maps host memory
    discrete.mkdir(parents=True)
    (discrete / "mem_info_vram_total").write_text(f"{96 * GIB}\n")
    (root / "sys/class/drm/card1/device/mem_info_vram_total").write_text(f"{GIB}\n")
    (root / "sys/class/drm/card1/device/device").write_text("0x1586\n")
    assert memory_budget(profile, machine, root)[0] == int(0.9 * 15 * GIB)


def test_other_memory_budgets(tmp_path):
    wsl = memory_budget(
        load_profile("strix_halo"), replace(STRIX, total_memory=100 * GIB), record(tmp_path, [])
    )
    assert wsl[0] == pytest.approx(90 * GIB, abs=2), "there is no file that says GTT"
    root = record(tmp_path, [], gtt=128 * GIB)
    assert memory_budget(load_profile("mi50"), MI50, root)[0] == int(32 * GIB * 0.9)
    assert memory_budget(load_profile("cpu"), CPU, root)[0] == 118 * GIB


def test_open_device_caps_unified_memory_and_what_the_user_says(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: calls.append(index))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *args: calls.append(args)
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 240 * GIB))
    monkeypatch.setattr("rocm_ext.machine.budget.memory_budget", lambda *args: (60 * GIB, ""))
    strix, mi300x = load_profile("strix_halo"), load_profile("mi300x")
    assert open_device(strix, STRIX) == torch.device("cuda", 0)
    open_device(strix, replace(STRIX, torch="2.9.1+rocm7.0"))
    open_device(mi300x, MI300X, local_rank=3)
    open_device(mi300x, MI300X, local_rank=3, memory_fraction=0.5)
    assert calls == [0, (0.5, 0), 0, (0.25, 0), 3, 3, (0.5, 3)]
    assert open_device(strix, STRIX, device="cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="local rank 8"):
        open_device(mi300x, MI300X, local_rank=8)
    with pytest.raises(UserError, match="memory_fraction"):
        open_device(load_profile("cpu"), CPU, memory_fraction=0.5)


# the host's share counts once, whoever has taken the rest; the GPU may map half, and this process has most of that
@pytest.mark.parametrize(("total", "taken", "free"), [(124, 40, 68), (62, 40, 0.9 * 62 - 40)])
def test_what_is_left_of_unified_memory_for_sampling(total, taken, free, monkeypatch):
    available = {"MemTotal": 124 * GIB, "MemAvailable": (118 - taken) * GIB}
    monkeypatch.setattr("rocm_ext.machine.budget.host_memory", lambda root, key: available[key])
    monkeypatch.setattr("rocm_ext.machine.budget.shared_memory", lambda root: (total * GIB, None))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: taken * GIB)
    machine, ranks = replace(STRIX, total_memory=total * GIB), Ranks(torch.device("cpu"))
    runtime = Runtime(
        load_profile("strix_halo"), machine, torch.device("cuda"), torch.bfloat16, ranks
    )
    cfg = OmegaConf.create({"memory_fraction": None})
    assert free_memory(cfg, SimpleNamespace(runtime=runtime)) == pytest.approx(free * GIB, abs=2)
