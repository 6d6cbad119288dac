"""`rocm-ext doctor` on recorded machines, on the same machines with one broken part, and on this machine.

The files in tests/machine/trees have the kernel's layout and wording (kfd_topology.c, amdgpu_ucode.c, the amdgpu
documentation of sysfs) and values that owners published. They are not recordings of machines of ours. They omit PCI
addresses, because Windows cannot check out names with a colon.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_ext.base.errors import UserError
from rocm_ext.cli import main
from rocm_ext.machine.detect import VISIBLE_VARIABLES, ask_torch
from rocm_ext.machine.doctor import exit_code, judge, probe, this_machine, verdict
from rocm_ext.machine.doctor.facts import recorded_facts
from rocm_ext.machine.doctor.recorded import MARK, DeviceNode, User
from rocm_ext.machine.processes import gpu_memory_by_process
from rocm_ext.machine.sysfs import cpu_quota
from tests.kit.damage import spoil_some

TREES = Path(__file__).parent / "trees"
NAMES = sorted(tree.name for tree in TREES.iterdir())
GIB = 2**30
STRIX_TORCH = (
    'pip install --index-url https://stable.repo.amd.com/rocm/whl-next/ "torch[device-gfx1151]"'
)
JOIN = "sudo usermod -aG render,video $USER  # then log out and in"


def doctor(capsys, *arguments) -> tuple[int, dict[str, dict]]:
    """Run `rocm-ext doctor --json`; return its exit code and its rows by check."""
    code = main(["doctor", "--json", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert err == ""
    document = json.loads(out)
    assert document["exit_code"] == code
    return code, {row["check"]: row for row in document["rows"]}


def grubby(arguments: str) -> str:
    return f"sudo grubby --update-kernel=ALL {arguments}  # then reboot"


def after(fix: str, grub: Path, text: str) -> str:
    """What /etc/default/grub holds once a fix was carried out twice, without root."""
    grub.write_text(text)
    command = (
        fix.replace("sudo ", "")
        .replace("/etc/default/grub", str(grub))
        .replace("update-grub", "true")
    )
    for _ in range(2):
        subprocess.run(["bash", "-c", command], check=True, timeout=60)
    return grub.read_text()


def problems(rows: dict[str, dict]) -> dict[str, str]:
    return {check: row["level"] for check, row in rows.items() if row["level"] != "ok"}


class Tree:
    """A copy of a recorded machine that tests may change."""

    def __init__(self, name: str, root: Path) -> None:
        self.root = root / name
        shutil.copytree(TREES / name, self.root)

    def file(self, path: str, text: str) -> "Tree":
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)
        return self

    def swap(self, path: str, old: str, new: str) -> "Tree":
        text = (self.root / path).read_text()
        assert old in text
        return self.file(path, text.replace(old, new))

    def remove(self, path: str) -> "Tree":
        shutil.rmtree(self.root / path) if (self.root / path).is_dir() else (
            self.root / path
        ).unlink()
        return self

    def said(self) -> dict:
        return json.loads((self.root / "rocm-ext.json").read_text())

    def say(self, **parts: object) -> "Tree":
        """Change parts of rocm-ext.json, merging dicts."""
        said = self.said()
        for key, value in parts.items():
            said[key] = (
                {**said[key], **value}
                if isinstance(value, dict) and isinstance(said.get(key), dict)
                else value
            )
        return self.file("rocm-ext.json", json.dumps(said))


# ------------------------------------------------------------------------------------------ recorded machines
def doctor_twice(capsys, name: str, tmp_path: Path) -> tuple[int, dict[str, dict]]:
    """Judge a recorded machine, and what is saved of it, which must be judged the same."""
    found = doctor(capsys, "--root", TREES / name, "--save", tmp_path / "saved")
    assert doctor(capsys, "--root", tmp_path / "saved") == found
    return found


EVERYWHERE = {
    "platform",
    "host memory",
    "memory budget",
    "torch",
    "torchtune, torchao",
    "canary: allocator",
    "BLAS",
}


@pytest.mark.parametrize(
    ("name", "profile", "has", "has_not"),
    [
        ("strix_halo", "strix_halo", {"kernel parameters", "firmware", "carve-out", "HSA_ENABLE_SDMA",
          "power", "temperature", "memory in use", "lockup timeout"},
         {"NUMA balancing"}),
        ("mi300x", "mi300x", {"NUMA balancing", "GPU_MAX_HW_QUEUES", "ROCm", "power", "temperature"},
         {"carve-out", "kernel parameters"}),
        ("windows", "strix_halo_windows", {"torch version", "HIP_DISABLE_IPC"}, {"device files", "sandbox"}),
        ("wsl2", "radeon", {"device files", "sandbox", "ROCm"}, {"kernel", "GPU driver", "firmware"}),
        ("nvidia", "cuda", {"GPU driver", "GPU memory", "attention"}, {"device files", "firmware"}),
        ("cpu", "cpu", {"GOMP_SPINCOUNT"}, {"device files", "attention", "other processes", "power", "lockup timeout"}),
    ],
)  # fmt: skip
def test_sound_machines_pass(capsys, tmp_path, name, profile, has, has_not):
    code, rows = doctor_twice(capsys, name, tmp_path)
    assert (code, problems(rows)) == (0, {})
    assert rows["hardware profile"]["found"].startswith(f"{profile}: ")
    assert EVERYWHERE | has <= set(rows)
    assert not has_not & set(rows)


def test_the_fix_of_kernel_parameters_may_be_carried_out_twice(capsys, tmp_path):
    """An older value goes, and another module's stays."""
    tree = Tree("strix_halo", tmp_path)
    half_the_memory(tree)
    tree.file("etc/os-release", 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="26.04"\n')
    _, rows = doctor(capsys, "--root", tree.root)
    options = "quiet ttm.pages_limit=9 amdttm.pages_limit=7"
    text = f'GRUB_CMDLINE_LINUX_DEFAULT="{options}"\nGRUB_TIMEOUT=0\n'
    done = after(rows["kernel parameters"]["fix"], tmp_path / "grub", text)
    wanted = "quiet amdttm.pages_limit=7 ttm.pages_limit=33554432"
    assert done == text.replace(options, wanted)


def with_host_memory(tree: Tree, total: int, available: int) -> None:
    tree.swap("proc/meminfo", "131024388", str(total)).swap(
        "proc/meminfo", "126310544", str(available)
    )


def half_the_memory(tree: Tree) -> None:
    tree.swap("proc/cmdline", " ttm.pages_limit=33554432", "")
    tree.file("sys/module/ttm/parameters/pages_limit", "16378048\n")
    tree.file("sys/class/drm/card1/device/mem_info_gtt_total", "67084484608\n")
    change_gpu(tree, total_memory=67084484608)


def change_gpu(tree: Tree, **values: object) -> None:
    tree.say(torch={"gpus": [{**gpu, **values} for gpu in tree.said()["torch"]["gpus"]]})


def add_gpu(tree: Tree, arch: str, first: bool = False) -> None:
    gpus = tree.said()["torch"]["gpus"]
    other = [{"name": "another", "total_memory": 32 * GIB, "arch": arch}]
    tree.say(torch={"gpus": other + gpus if first else gpus + other})
    tree.file("sys/class/drm/card2/device/vendor", "0x1002\n").file(
        "sys/class/drm/card2/device/device", "0x7551\n"
    )
    tree.file("sys/class/drm/card2/device/mem_info_vram_total", f"{32 * GIB}\n")
    version = {"gfx1201": 120001, "gfx1036": 100306}[arch]
    tree.file(
        "sys/class/kfd/kfd/topology/nodes/2/properties",
        f"simd_count 128\ngfx_target_version {version}\n",
    )


def forget_sizes(tree: Tree) -> None:
    """Let the driver lack the fix for gfx1151's registers."""
    tree.swap(f"{NODE}/properties", "cwsr_size 19185664\nctl_stack_size 16384\n", "")


def client(number: int, gtt: str) -> str:
    """A DRM file as amdgpu describes it to /proc/PID/fdinfo."""
    return (
        f"pos:\t0\nino:\t1204\ndrm-driver:\tamdgpu\ndrm-client-id:\t{number}\ndrm-pdev:\t0000:c5:00.0\npasid:\t32785\n"
        f"drm-total-gtt:\t99 GiB\ndrm-memory-vram:\t544 KiB\ndrm-memory-gtt: \t{gtt}\ndrm-engine-gfx:\t39456116802 ns\n"
    )


def hide_gpu(tree: Tree) -> None:
    """Let torch see seven of eight GPUs."""
    tree.say(torch={"gpus": tree.said()["torch"]["gpus"][1:]})


def give_one(tree: Tree) -> None:
    said = tree.said()
    kept = {
        path: node
        for path, node in said["device_nodes"].items()
        if path in ("/dev/kfd", "/dev/dri/renderD128")
    }
    said |= {
        "container": True,
        "device_nodes": kept,
        "torch": {**said["torch"], "gpus": said["torch"]["gpus"][:1]},
    }
    tree.file("rocm-ext.json", json.dumps(said))


def without_kfd_and_driver(tree: Tree) -> None:
    tree.remove("sys/class/kfd").remove("sys/class/drm/card1").remove("sys/module/ttm")
    tree.swap("proc/cmdline", "quiet", "quiet nomodeset").say(torch={"gpus": []}, canaries=None)
    tree.file("rocm-ext.json", json.dumps({**tree.said(), "device_nodes": {}}))


def without_torch(tree: Tree) -> None:
    tree.say(**UNSAID, torch_error="ModuleNotFoundError: No module named 'torch'")


def nodes(**node: object) -> dict[str, object]:
    node = {"mode": "0660", "owner": "root", "group": "render", **node}
    return {"device_nodes": {"/dev/kfd": node, "/dev/dri/renderD128": node}}


def canary(check: str, level: str, found: str, fix: str):
    return lambda t: t.say(canaries=[{"check": check, "level": level, "found": found, "fix": fix}])


UNSAID = {"torch": None, "canaries": None, "blas": "", "hip_memory": None}
OTHER_KERNELS = {"kernels": ["gfx942", "gfx1100"]}
A_ROCM_BUILD = {"version": "2.12.0+rocm7.2", "hip": "7.2"}
NO_KERNELS = {
    "environment": "not recorded",
    "torch kernels": ("warning", "install a torch built for gfx1036"),
}


def kernel(version: str):
    return lambda t: t.file("proc/sys/kernel/osrelease", f"{version}\n")


def says(**parts: object):
    return lambda t: t.say(**parts)


def sets(**variables: str):
    return lambda t: t.say(environment=variables)


def renames(old: str, new: str):
    """Put another word in the recording."""
    return lambda t: t.swap("rocm-ext.json", old, new)


def on_the_bus(place: int, vendor: str):
    """Put a graphics card on the bus that has no driver."""
    device = f"sys/bus/pci/devices/{place}"
    return lambda t: t.file(f"{device}/class", "0x030000\n").file(f"{device}/vendor", f"{vendor}\n")


PARAMETER = grubby("--args='ttm.pages_limit=33554432'")
WITHOUT_GTTSIZE = grubby("--remove-args='amdgpu.gttsize' --args='ttm.pages_limit=33554432'")
OLD_KERNEL = grubby("--args='amd_iommu=off amdgpu.gttsize=131072 ttm.pages_limit=33554432'")
NO_TORCH = dict.fromkeys(
    ("torch", "GPU memory", "memory budget", "canaries", "BLAS"), "not recorded"
)
UPGRADE = "sudo dnf upgrade --refresh  # then reboot"
AGAIN = f"pip uninstall -y torch && {STRIX_TORCH}"
MISSING_GPU = {"GPU count": ("warning", "sudo dmesg | grep -i amdgpu")}
CPU_BUILD = {"version": "2.13.0+cpu", "hip": None, "gpus": [], "kernels": []}
CARD, NODE = "sys/class/drm/card1/device", "sys/class/kfd/kfd/topology/nodes/1"
FW = f"{CARD}/fw_version"

# (machine, what breaks): the change, and the level of each check that is then not ok, or (level, how its fix ends)
BREAKS = {
    ("mi300x", "no torch"): (without_torch, NO_TORCH | {
        "torch": ("error", "pip install torch --index-url https://download.pytorch.org/whl/rocm7.14")}),
    ("mi300x", "NUMA balancing"): (lambda t: t.file("proc/sys/kernel/numa_balancing", "1\n"),
        {"NUMA balancing": "warning"}),
    ("mi300x", "a power cap"): (
        lambda t: t.file("sys/class/drm/card1/device/hwmon/hwmon7/power1_cap", "500000000\n"),
        {"power": ("warning", "echo 750000000 | sudo tee /sys/class/drm/card1/device/hwmon/hwmon*/power1_cap")}),
    ("mi300x", "a GPU is missing"): (hide_gpu, MISSING_GPU),
    ("mi300x", "one that is not chosen"): (
        lambda t: (hide_gpu(t), t.say(environment={"ROCR_VISIBLE_DEVICES": "0,1,2,3,4,5,6"})), {}),
    ("mi300x", "a container that is given one"): (give_one, {}),
    ("mi300x", "no C compiler for Triton"): (says(commands=["bwrap"]), {"C compiler": "warning"}),
    ("strix_halo", "Ubuntu with its first kernel"): (
        lambda t: (t.file("etc/os-release", 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n'),
                   t.file("proc/sys/kernel/osrelease", "6.8.0-31-generic\n"), forget_sizes(t),
                   t.file("proc/cmdline", "quiet amd_iommu=off amdgpu.gttsize=131072 ttm.pages_limit=33554432\n")),
        {"kernel": ("warning", "sudo apt update && sudo apt install linux-generic-hwe-24.04  # then reboot")}),
    ("windows", "a build whose attention breaks what follows"): (says(torch={"version": "2.12.0+rocm7.14.1"}),
        {"torch build": "warning"}),
    ("nvidia", "a CPU torch"): (
        says(torch={"version": "2.13.0+cpu", "cuda": None, "gpus": []}, canaries=[], hip_memory=None),
        {"torch": ("warning", "pip uninstall -y torch && pip install torch")}),
    ("wsl2", "no /dev/dxg"): (renames("/dev/dxg", "/dev/other"), {"device files": ("error", "wsl --update")}),
    ("wsl2", "WSL1"): (kernel("4.4.0-26100-Microsoft"), {"platform": "error"}),
    ("windows", "pip's torch"): (
        says(torch=CPU_BUILD, canaries=[]), {"torch": ("error", f"pip uninstall -y torch; {STRIX_TORCH}")}),
    ("windows", "an older torch"): (says(torch={"version": "2.9.1+rocm7.1"}),
        {"torch version": ("warning", f"pip uninstall -y torch; {STRIX_TORCH}")}),
    ("cpu", "a ROCm torch"): (says(torch=A_ROCM_BUILD),
        {"torch": ("warning", "pip install torch --index-url https://download.pytorch.org/whl/cpu")}),
    ("cpu", "an NVIDIA GPU without a driver"): (on_the_bus(1, "0x10de"),
        {"GPU driver": ("warning", "install NVIDIA's driver; nvidia-smi then lists the GPU"),
         "torch": ("warning", "pip uninstall -y torch && pip install torch")}),
    ("cpu", "an AMD GPU without a driver"): (
        on_the_bus(3, "0x1002"), {"GPU driver": ("warning", "sudo modprobe amdgpu")}),
} | {("strix_halo", what): broken for what, broken in {
    "an old kernel": (lambda t: (kernel("6.14.11-300.fc42.x86_64")(t), forget_sizes(t)),
        {"kernel": ("warning", UPGRADE), "kernel parameters": ("warning", OLD_KERNEL)}),
    "an old kernel with the fix": (kernel("6.12.57+deb13-amd64"), {"kernel parameters": ("warning", OLD_KERNEL)}),
    "a driver that replaces the kernel's": (
        lambda t: (forget_sizes(t), t.file("sys/module/amdgpu/version", "6.16.13\n")),
        {"kernel": ("warning", "uninstall amdgpu-dkms, or install AMD's driver 31.20 or newer, and reboot")}),
    "sizes of fewer registers": (lambda t: t.swap(f"{NODE}/properties", "19185664", "13942784"), {"kernel": "warning"}),
    "a mode that saves power": (lambda t: t.file("sys/firmware/acpi/platform_profile", "balanced\n"),
        {"power": ("warning", "echo performance | sudo tee /sys/firmware/acpi/platform_profile")}),
    "a mini PC's button": (lambda t: t.file("sys/class/ec_su_axb35/apu/power_mode", "quiet\n"),
        {"power": ("warning", "echo performance | sudo tee /sys/class/ec_su_axb35/apu/power_mode")}),
    "clocks that are held low": (lambda t: t.file(f"{CARD}/power_dpm_force_performance_level", "low\n"),
        {"power": ("warning", f"echo auto | sudo tee /{CARD}/power_dpm_force_performance_level")}),
    "a processor at its limit, which performance would heat": (
        lambda t: (t.file("sys/class/hwmon/hwmon3/temp1_input", "98125\n"),
                   t.file("sys/firmware/acpi/platform_profile", "balanced\n")),
        {"temperature": "warning"}),
    "memory that nobody holds": (lambda t: t.file(f"{CARD}/mem_info_gtt_used", f"{43 * GIB}\n"),
        {"memory in use": ("warning", "sudo $(which rocm-ext) doctor; if nobody holds it, sudo reboot")}),
    "memory that a program holds": (
        lambda t: (t.file(f"{CARD}/mem_info_gtt_used", f"{43 * GIB}\n"),
                   t.file("proc/4711/fdinfo/7", client(1, "43008 MiB"))), {}),
    "a kernel that stalls on mapped files": (kernel("7.0.12-201.fc44.x86_64"), {"kernel": ("warning", UPGRADE)}),
    "copies from mapped files that stall": (says(copies={"mapped": 8.1}), {"copies to the GPU": "warning"}),
    "no ttm.pages_limit": (half_the_memory, {"kernel parameters": ("warning", PARAMETER)}),
    "amdgpu.gttsize on a new kernel": (lambda t: t.swap("proc/cmdline", "quiet", "quiet amdgpu.gttsize=131072"),
        {"kernel parameters": ("warning", WITHOUT_GTTSIZE)}),
    "bad firmware": (lambda t: t.file(f"{FW}/mes_fw_version", "0x00000083\n"), {"firmware": "error"}),
    "firmware that the kernel does not tell": (lambda t: t.remove(FW), {"firmware": "not recorded"}),
    "a large carve-out": (
        lambda t: (t.file(f"{CARD}/mem_info_vram_total", f"{64 * GIB}\n"), with_host_memory(t, 64886512, 61203988)),
        {"carve-out": "warning"}),
    "a torch that sees less than it may": (
        lambda t: change_gpu(t, total_memory=67084484608), {"GPU memory": ("warning", PARAMETER)}),
    "half the memory, with AMD's own driver": (
        lambda t: (half_the_memory(t), t.file("sys/module/amdttm/parameters/pages_limit", "16378048\n")),
        {"kernel parameters": ("warning", grubby("--args='amdttm.pages_limit=33554432'"))}),
    "no groups": (
        lambda t: t.say(user={"groups": []}).swap("etc/group", "105:user", "105:").swap("etc/group", "39:user", "39:"),
        {"device files": ("error", JOIN)}),
    "groups that need a new login": (says(user={"groups": []}), {"device files": ("error", "log out and in again")}),
    "device files for root alone": (
        says(**nodes(mode="0600", group="root")), {"device files": ("error", "sudo udevadm trigger")}),
    "groups that nobody wrote down": (says(user=None), {"device files": "not recorded"}),
    "no /dev/kfd": (lambda t: t.say(**nodes()).swap("rocm-ext.json", "/dev/kfd", "/dev/other"),
        {"device files": ("error", "sudo modprobe amdgpu")}),
    "no KFD": (lambda t: t.remove("sys/class/kfd").say(**UNSAID, cpu="AMD RYZEN AI MAX+ 395"),
        {**NO_TORCH, "GPU driver": ("error", "sudo dmesg | grep -i -e amdgpu -e kfd")}),
    "nomodeset": (without_kfd_and_driver,
        {"GPU driver": ("error", grubby("--remove-args='nomodeset'")),
         "device files": ("error", "sudo modprobe amdgpu"),
         "torch": ("error", 'AMD_LOG_LEVEL=3 python -c "import torch; torch.cuda.init()"'),
         **dict.fromkeys(("firmware", "GPU memory", "carve-out", "canaries"), "not recorded")}),
    "torch without the GPU's kernels": (
        lambda t: canary("copy", "error", "HIP error: invalid ...", "x")(t).say(torch=OTHER_KERNELS),
        {"torch kernels": ("error", AGAIN), "canary: copy": "error"}),
    "torch without the GPU's kernels that computes": (says(torch=OTHER_KERNELS), {"torch kernels": ("warning", AGAIN)}),
    "ROCm before gfx1151's registers were right": (
        says(torch={"version": "2.10.0+rocm7.1"}), {"ROCm": ("warning", AGAIN)}),
    "a torch that does not import": (
        says(**UNSAID, torch_error="ImportError: libamdhip64.so.7: cannot open shared object file"),
        NO_TORCH | {"torch": ("error", AGAIN)}),
    "torchao 0.19": (says(packages={"torchao": "0.19.0"}), {"torchtune, torchao": "error"}),
    "segments with a split size": (sets(PYTORCH_HIP_ALLOC_CONF="max_split_size_mb:256,expandable_segments:True"),
        {"PYTORCH_HIP_ALLOC_CONF": "error"}),
    "segments for which ROCm opens files": (
        says(torch={"version": "2.12.0+rocm7.14.0"},
             environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        {"PYTORCH_CUDA_ALLOC_CONF": ("warning", "unset PYTORCH_CUDA_ALLOC_CONF")}),
    "allocator variables that differ": (
        sets(PYTORCH_HIP_ALLOC_CONF="max_split_size_mb:1", PYTORCH_ALLOC_CONF="max_split_size_mb:2"),
        {"PYTORCH_ALLOC_CONF": "error"}),
    "an override that is not needed": (sets(HSA_OVERRIDE_GFX_VERSION="11.0.0"),
        {"HSA_OVERRIDE_GFX_VERSION": "warning"}),
    "both visible variables": (sets(ROCR_VISIBLE_DEVICES="0", HIP_VISIBLE_DEVICES="0"),
        {"HIP_VISIBLE_DEVICES": "warning"}),
    "a variable against the profile": (sets(ROCBLAS_USE_HIPBLASLT="0"), {"ROCBLAS_USE_HIPBLASLT": "warning"}),
    "hipBLASLt off in rocBLAS alone": (says(blas="hipBLASLt", environment={"ROCBLAS_USE_HIPBLASLT": "0"}),
        {"ROCBLAS_USE_HIPBLASLT": "warning",
         "BLAS": "warning"}),
    "a torch that ignores the switch": (says(blas="hipBLASLt", environment={"TORCH_BLAS_PREFER_HIPBLASLT": "0"}),
        {"BLAS": "warning"}),
    "debugging": (sets(HIP_LAUNCH_BLOCKING="1", AMD_SERIALIZE_KERNEL="0"), {"HIP_LAUNCH_BLOCKING": "warning"}),
    "hidden GPUs": (says(torch={"gpus": []}, canaries=None, environment={"HIP_VISIBLE_DEVICES": ""}),
        {"hardware profile": ("warning", "unset HIP_VISIBLE_DEVICES"), "canaries": "not recorded"}),
    "a GPU chosen that is not here": (says(torch={"gpus": []}, canaries=None, environment={"HIP_VISIBLE_DEVICES": "1"}),
        {"torch": ("error", "unset HIP_VISIBLE_DEVICES"), "canaries": "not recorded"}),
    "a damaged kernel version": (kernel("\0\1" * 900), {"kernel": "not recorded"}),
    "attention on the math path": (
        canary("fused attention", "warning", "slow math path", "torch 2.12"), {"attention": "warning"}),
    "wrong results": (canary("bf16 matmul", "error", "relative error 9.9e-01", "try another"),
        {"canary: bf16 matmul": "error"}),
    "somebody on the GPU": (
        lambda t: t.file("sys/class/kfd/kfd/proc/4711/vram_51238", f"{60 * GIB}\n").file("proc/4711/comm", "vllm\n"),
        {"other processes": ("warning", "wait for them, or: kill 4711")}),
    "no bubblewrap": (says(commands=["gcc"], sandbox=None), {"sandbox": "warning"}),
    "a sandbox that does not work": (
        says(sandbox={"works": False, "found": "no permission; user namespaces are off: `sudo sysctl x`"}),
        {"sandbox": "warning"}),
    "a full disk": (says(disk_free={"current folder": 2**29, "Hugging Face cache": 15 * GIB}),
        {"disk: current folder": "error",
         "disk: Hugging Face cache": "warning"}),
    "no memory left": (lambda t: t.swap("proc/meminfo", "126310544", "6310544"), {"memory budget": "error"}),
    "a container's limit": (says(memory_limit=32 * GIB), {"host memory": "warning"}),
    "a damaged file": (lambda t: t.file(f"{CARD}/mem_info_vram_total", "53687x91\n"),
        {"carve-out": "not recorded"}),
    "a GPU without a profile": (lambda t: (change_gpu(t, arch="gfx1150", name="AMD Radeon 890M Graphics"),
                   t.swap(f"{NODE}/properties", "110501", "110500"), t.say(torch={"kernels": ["gfx1150"]})),
        {"hardware profile": ("error", "hardware=strix_halo"), "environment": "not recorded"}),
    "an integrated GPU that is no relative": (
        lambda t: (change_gpu(t, arch="gfx1036", integrated=True), t.swap(f"{NODE}/properties", "110501", "100306")),
        {"hardware profile": ("error", "hardware=cpu"), **NO_KERNELS}),
    "another GPU beside it": (
        lambda t: add_gpu(t, "gfx1201"), {"other GPUs": ("warning", "export ROCR_VISIBLE_DEVICES=0")}),
    "a GPU without a profile before it": (lambda t: add_gpu(t, "gfx1036", first=True),
        {"hardware profile": ("error", "export ROCR_VISIBLE_DEVICES=1"), **NO_KERNELS}),
}.items()}  # fmt: skip


@pytest.mark.wide(always=30)
@pytest.mark.parametrize(("name", "what"), BREAKS)
def test_one_thing_that_breaks_shows_in_its_row_and_nowhere_else(capsys, tmp_path, name, what):
    tree = Tree(name, tmp_path)
    change, expected = BREAKS[name, what]
    change(tree)
    code, rows = doctor(capsys, "--root", tree.root)
    levels = {check: said if isinstance(said, str) else said[0] for check, said in expected.items()}
    assert problems(rows) == levels
    for check, level in levels.items():
        assert expected[check] == level or rows[check]["fix"].endswith(expected[check][1])
        assert bool(rows[check]["fix"]) == (level != "not recorded")
        assert rows[check]["why"] or level != "warning" or check.startswith(("canary", "attention"))
    assert code == (2 if "error" in levels.values() else 1 if "warning" in levels.values() else 0)


def test_who_holds_memory(capsys, tmp_path):
    """A client counts once, however many files and processes share it; small holders stay unnamed, also when saved."""
    tree = Tree("strix_halo", tmp_path)
    tree.file(f"{CARD}/mem_info_gtt_used", f"{90 * GIB}\n").file(
        "sys/module/amdgpu/parameters/lockup_timeout", "20000\n"
    )
    tree.file("proc/812/fdinfo/9", client(3, "307200 KiB")).file("proc/812/comm", "my-diary\n")
    tree.file("proc/4711/fdinfo/5", client(4, f"{40 * GIB}")).file(
        "proc/4711/fdinfo/6", client(4, f"{40 * GIB}")
    )
    tree.file("proc/4711/fdinfo/7", client(5, "1024 MiB")).file("proc/4711/comm", "llama-server\n")
    tree.file("proc/4712/fdinfo/5", client(4, f"{40 * GIB}")).file("proc/4712/comm", "its-child\n")
    tree.file(
        "proc/4713/fdinfo/5", "drm-driver:\ti915\ndrm-client-id:\t9\ndrm-memory-gtt:\t8 MiB\n"
    )
    tree.file("sys/class/kfd/kfd/proc/99/vram_51238", f"{12 * GIB}\n")  # of another user
    holders = gpu_memory_by_process(tree.root)
    assert [(process.pid, process.computes) for process in holders] == [
        (4711, False),
        (99, True),
        (812, False),
    ]
    assert holders[0].memory == 41 * GIB + 2 * 544 * 1024
    _, rows = doctor_twice(capsys, tree.root, tmp_path)
    found = rows["memory in use"]["found"]
    assert (
        found == "90.1 GiB: llama-server 41.0 GiB, 99 12.0 GiB; no process seen here holds 36.8 GiB"
    )
    assert rows["lockup timeout"]["found"] == "20000 ms"
    assert rows["temperature"]["found"] == "edge 41 of 100 °C, Tctl 45 of 100 °C"
    tree.say(user={"root": True})
    assert doctor(capsys, "--root", tree.root)[1]["memory in use"]["fix"] == "sudo reboot"
    tree.say(container=True)
    assert "on the host" in doctor(capsys, "--root", tree.root)[1]["memory in use"]["fix"]
    texts = [path.read_text() for path in (tmp_path / "saved/proc").rglob("*") if path.is_file()]
    assert not re.search("my-diary|its-child|i915|pasid", "".join(texts))


def test_in_a_container_the_fix_is_of_the_program_that_made_it(capsys, tmp_path, monkeypatch):
    tree = Tree("strix_halo", tmp_path)
    tree.say(container=True, user={"groups": []}, **nodes(group="992"))
    _, rows = doctor(capsys, "--root", tree.root)
    assert problems(rows) == {"device files": "error"}
    assert rows["device files"]["fix"].startswith(
        "docker run --device /dev/kfd --device /dev/dri --group-add video"
    )
    tree.say(rootless=True, **nodes(owner="nobody", group="nogroup"))
    _, rows = doctor(capsys, "--root", tree.root)
    assert rows["device files"]["fix"].startswith(
        "podman run --device /dev/kfd --device /dev/dri --group-add keep"
    )
    # names of groups are not enough there (kyuz0/amd-strix-halo-toolboxes#53)
    monkeypatch.setattr(this_machine, "ROOT", tree.root)
    monkeypatch.setattr(this_machine, "PROBE", ("-c", ""))
    monkeypatch.setattr(this_machine, "_sandbox", lambda: None)
    found = []
    for text in (
        None,
        'engine="podman-5.4.0"\nname="tune"\nrootless=1\n',
        "",
    ):  # the last: podman as root
        if text is not None:
            tree.file("run/.containerenv", text)
        said = this_machine.live_facts().recorded
        found.append((said.container, said.rootless))
    assert found == [(False, False), (True, True), (True, False)]


# ------------------------------------------------------------------------------------------- ways to record
def test_a_mere_copy_of_files_is_judged_as_far_as_it_goes(capsys, tmp_path):
    tree = Tree("strix_halo", tmp_path).remove("rocm-ext.json")
    code, rows = doctor(capsys, "--root", tree.root)
    assert code == 0
    assert set(problems(rows).values()) == {"not recorded"}
    assert {"kernel", "kernel parameters", "firmware", "carve-out"} <= rows.keys() - problems(
        rows
    ).keys()
    assert {"torch", "device files", "canaries", "sandbox", "disk", "environment"} <= problems(
        rows
    ).keys()
    (tmp_path / "rocm-ext.json").write_text((TREES / "mi300x/rocm-ext.json").read_text())
    assert doctor(capsys, "--root", tmp_path)[1]["GPU driver"]["found"] == "torch sees the GPU"
    assert main(["doctor", "--root", str(tree.root)]) == 0
    assert re.search(
        "as far as recorded, .* 0 errors, 0 warnings", capsys.readouterr().out.splitlines()[-1]
    )


def test_facts_win_over_files(capsys, tmp_path):
    _, rows = doctor(capsys, "--root", Tree("nvidia", tmp_path).remove("rocm-ext.json").root)
    assert rows["hardware profile"]["found"] == "cuda: an NVIDIA GPU"
    windows = (TREES / "windows/rocm-ext.json").read_text()
    tree = Tree("strix_halo", tmp_path).file("rocm-ext.json", windows)
    assert doctor(capsys, "--root", tree.root) == doctor(capsys, "--root", TREES / "windows")


def test_saving_leaves_out_what_is_nobody_s_business(capsys, tmp_path):
    tree = Tree("strix_halo", tmp_path)
    tree.say(user={"name": "alice"}, **nodes(owner="alice"))
    tree.file(
        "etc/group",
        "wheel:x:10:alice,bob\nvideo:x:39:bob,alice\nrender:x:105:alice\nsecret:x:7:alice\n",
    )
    tree.swap(
        "sys/class/kfd/kfd/topology/nodes/1/properties", "unique_id 0", "unique_id 4711081547110815"
    )
    tree.file("etc/passwd", "alice:x:1000:1000::/home/alice:/bin/sh\n")
    tree.swap("proc/cpuinfo", "model name", "Serial\t\t: 10000000deadbeef\nmodel name")
    assert doctor(capsys, "--root", tree.root, "--save", tmp_path / "saved")[0] == 0
    texts = "\n".join(
        path.read_text() for path in (tmp_path / "saved").rglob("*") if path.is_file()
    )
    for private in ("alice", "bob", "4711081547110815", "secret", "root=UUID", "deadbeef"):
        assert private not in texts
    assert "ttm.pages_limit=33554432" in texts
    assert not (tmp_path / "saved/etc/passwd").exists()


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_saving_where_nothing_may_be_written(capsys, tmp_path):
    tmp_path.chmod(0o500)
    assert main(["doctor", "--root", str(TREES / "cpu"), "--save", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# ------------------------------------------------------------------------------------------------ broken input
def test_folders_that_are_no_machine(capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "bare/proc").mkdir(parents=True)
    for root in ("empty", "file", "missing", "bare"):
        assert main(["doctor", "--root", str(tmp_path / root)]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: --root ")
        assert err.count("\n") == 1
    assert main(["doctor", "--root", str(TREES / "cpu"), "--save", str(TREES / "cpu")]) == 2
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"system": "Lin', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"sistem": "Linux"}', "unknown key 'sistem'; known: system"),
        ('{"torch": {"version": "2", "gpus": [{"name": "x", "total_memory": ""}]}}', r"gpus\[0\].total_memory is ''"),
        ('{"canaries": [{"check": "x", "level": "fine", "found": ""}]}', "level is 'fine', expected one of ok, warn"),
        ('{"disk_free": {"current folder": 1e999}}', "current folder is inf, expected int"),
    ],
)  # fmt: skip
def test_a_recording_that_is_torn_or_wrong_is_one_line(capsys, tmp_path, text, message):
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "rocm-ext.json").write_bytes(content)
    assert main(["doctor", "--root", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert str(tmp_path) in err
    assert "rocm-ext doctor --save" in err
    with pytest.raises(UserError, match=message):
        recorded_facts(tmp_path)


def whole(root: Path) -> None:
    """Judge, print and save the machine in ``root``; only a UserError may escape."""
    try:
        facts = recorded_facts(root)
    except UserError:
        return
    rows = judge(facts)
    assert json.dumps([vars(row) for row in rows])
    assert verdict(facts, rows).endswith(("errors", "error", "warnings", "warning", "not recorded"))
    assert main(["doctor", "--root", str(root)]) == exit_code(rows)
    assert main(
        ["doctor", "--json", "--root", str(root), "--save", str(root.parent / "saved")]
    ) in (0, 1, 2)
    shutil.rmtree(root.parent / "saved", ignore_errors=True)


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_random_damage_to_files_is_never_a_traceback(tmp_path_factory, data):
    root = Tree(data.draw(st.sampled_from(NAMES)), tmp_path_factory.mktemp("damage")).root
    spoil_some(data, sorted(path for path in root.rglob("*") if path.is_file()), 4)
    whole(root)


# ----------------------------------------------------------------------------------------------------- output
def test_output_for_people(capsys, tmp_path, monkeypatch):
    tree = Tree("strix_halo", tmp_path)
    tree.say(commands=["gcc"], sandbox=None, packages={"torchao": "0.19.0"})
    tree.swap("etc/os-release", "Fedora", "Fedora \x1b[31m [bold]x[/bold]")
    monkeypatch.setattr("rocm_ext.cli._common._PIPE_WIDTH", 80)
    assert main(["doctor", "--root", str(tree.root)]) == 2
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[-1] == "this machine will not train: 1 error, 1 warning"
    assert "  fix: sudo dnf install bubblewrap" in lines, "whole, to be copied"
    assert all(len(line) <= 80 for line in lines if not line.startswith("  fix: "))
    bad = [line.split()[0] for line in lines if line.startswith(("warning ", "error "))]
    assert bad[-1] == "error", "worst last"
    assert not any("\x1b" in line for line in lines)


# ------------------------------------------------------------------------------------------------ this machine
def test_this_machine(tmp_path, capsys):
    code, rows = doctor(capsys, "--save", tmp_path / "saved")
    assert code in (0, 1, 2)
    assert rows["torch"]["found"].startswith(ask_torch().version)
    assert {
        "platform",
        "host memory",
        "torchtune, torchao",
        "canary: copy",
        "canary: allocator",
        "BLAS",
    } <= rows.keys()
    assert rows["torchtune, torchao"]["level"] == "ok"
    assert doctor(capsys, "--root", tmp_path / "saved") == (code, rows)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise ImportError('libamdhip64.so.7: cannot open shared object file')", "libamdhip64.so.7"),
        ("import os, sys; print('Memory access fault by GPU node-1', file=sys.stderr, flush=True); os.abort()",
         "ended with status -6: Memory access fault by GPU node-1"),
        ("import time; time.sleep(60)", "no answer in 1 s"),
    ],
)  # fmt: skip
def test_a_torch_that_does_not_import_crashes_or_hangs_is_a_row(
    capsys, tmp_path, monkeypatch, code, why
):
    (tmp_path / "torch.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(this_machine, "PATIENCE", 1 if "sleep" in code else 60)
    exit_status, rows = doctor(capsys)
    assert exit_status == 2
    assert why in rows["torch"]["why"]
    assert rows["torch"]["fix"] == "pip install torch"


def test_a_machine_without_torch_gets_the_line_to_install_it(tmp_path):
    """Neither doctor nor its help imports torch; the check of a recording does not either."""
    (tmp_path / "torch.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    )
    code = f"""
import contextlib, sys
from pathlib import Path
from rocm_ext.cli import main
from rocm_ext.machine.doctor import this_machine
with contextlib.redirect_stdout(sys.stderr):
    with contextlib.suppress(SystemExit):
        main(["doctor", "--help"])
    assert main(["doctor", "--root", {str(TREES / "cpu")!r}]) == 0
this_machine.ROOT = Path({str(TREES / "strix_halo")!r})
sys.exit(main(["doctor", "--json"]))
"""
    environment = {
        name: value for name, value in os.environ.items() if name not in VISIBLE_VARIABLES
    } | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
                         env=environment)  # fmt: skip
    assert run.returncode == 2, run.stderr
    assert "0: fine, 1: warnings, 2: training will not work" in run.stderr
    rows = {row["check"]: row for row in json.loads(run.stdout)["rows"]}
    assert (rows["torch"]["found"], rows["torch"]["fix"]) == ("torch is not installed", STRIX_TORCH)
    assert rows["hardware profile"]["found"].startswith("strix_halo")


def test_who_may_open_a_device():
    node, group = DeviceNode("0660", "root", "render"), User("user", ("render",))
    users = (None, User("user"), group, User("user", ("video",)), User("root"))
    assert [node.allows(user) for user in users] == [None, None, True, False, True]
    for mode in ("0640", "torn"):  # reading is not enough
        assert DeviceNode(mode, "root", "render").allows(group) is False
    assert DeviceNode("0666", "root", "root").allows(None) is True


def test_both_copies_are_timed():
    times = probe._copies(torch.device("cpu"), size=2**20)
    assert times["size"] == 2**20
    assert 0 < times["mapped"] < 5
    assert 0 < times["read"] < 5


def test_a_crash_while_computing_keeps_what_torch_said(monkeypatch):
    told = json.dumps({"torch": {"version": "2.12.0+rocm7.2", "hip": "7.2"}})
    lines = f"{{not json}}\n{MARK}{told}\n{MARK}{{torn"
    monkeypatch.setattr(this_machine, "PROBE", ("-c", f"import sys; print({lines!r}); sys.exit(3)"))
    said = this_machine._ask_torch()
    assert said.torch.build == "rocm"
    (row,) = said.canaries
    assert (row.level, row.found) == ("error", "the test program ended with status 3")


def test_control_groups_of_both_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(this_machine, "ROOT", tmp_path)

    def quota() -> float | None:
        tightest = cpu_quota(tmp_path)
        return tightest and tightest.cpus

    assert (quota(), this_machine._memory_limit()) == (None, None)

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")

    write("proc/self/cgroup", "0::/system.slice/docker.scope")
    write("sys/fs/cgroup/system.slice/docker.scope/cpu.max", "max 100000")
    write("sys/fs/cgroup/system.slice/docker.scope/memory.max", str(8 * GIB))
    write("sys/fs/cgroup/system.slice/cpu.max", "250000 100000")  # the limit above applies
    write("sys/fs/cgroup/system.slice/memory.max", "max")
    assert (quota(), this_machine._memory_limit()) == (2.5, 8 * GIB)
    write("proc/self/cgroup", "4:cpu,cpuacct:/docker/7\n3:memory:/docker/7\nnonsense")
    write("sys/fs/cgroup/cpu/docker/7/cpu.cfs_quota_us", "150000")
    write("sys/fs/cgroup/cpu/docker/7/cpu.cfs_period_us", "100000")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    assert (quota(), this_machine._memory_limit()) == (1.5, None)
    assert cpu_quota(tmp_path).used() is None
    write("sys/fs/cgroup/cpu/docker/7/cpuacct.usage", "2500000000")
    assert cpu_quota(tmp_path).used() == 2.5
