"""Gather the facts of this machine. It changes nothing and needs no root."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from rocm_ext.base import pins
from rocm_ext.base.errors import UserError
from rocm_ext.base.nested import parse
from rocm_ext.base.types import Json
from rocm_ext.machine.detect import VISIBLE_VARIABLES
from rocm_ext.machine.doctor.facts import Facts
from rocm_ext.machine.doctor.recorded import MARK, DeviceNode, Finding, Memory, Recorded, SandboxState, User
from rocm_ext.machine.doctor.software import COMPILERS, DEBUGGING
from rocm_ext.machine.doctor.system import read_system
from rocm_ext.machine.environment import ALLOCATOR_VARIABLES
from rocm_ext.machine.profile import load_profile, profile_names
from rocm_ext.machine.sysfs import cgroups, listing, read_number, read_text

ROOT = Path("/")
PROBE = ("-m", "rocm_ext.machine.doctor.probe")
PATIENCE = 180  # seconds for the probe; the first import of torch from a cold disk takes most of a minute
_GROUPS = ("render", "video")


def live_facts() -> Facts:
    """The facts of this machine."""
    # read the files first: later, the probe is among the processes on the GPU
    files, linux = read_system(ROOT), platform.system() == "Linux"
    nodes = _device_nodes() if linux else {}
    user = _user([node.group for node in nodes.values()]) if linux else None
    sandbox, host = _sandbox() if linux else None, psutil.virtual_memory()
    said = replace(
        _ask_torch(),
        system=platform.system(),
        release="" if linux else platform.version(),
        cpu="" if linux else platform.processor(),
        container=any((ROOT / path).exists() for path in (".dockerenv", "run/.containerenv")),
        rootless="rootless=1" in read_text(ROOT / "run/.containerenv").split(),
        environment={name: os.environ[name] for name in _variables() if name in os.environ},
        user=user,
        device_nodes={path: _with_access(path, node, user) for path, node in nodes.items()} if linux else None,
        packages=pins.installed(),
        commands=(*(["bwrap"] if sandbox else []), *filter(shutil.which, COMPILERS)),
        sandbox=sandbox,
        disk_free=_disk_free(),
        memory_limit=_memory_limit(),
        host_memory=None if files.memory else Memory(host.total, host.available),
    )
    return Facts(said, files, ROOT)


def _variables() -> list[str]:
    """The environment variables that matter; nothing reads the others."""
    profiles = [name for profile in profile_names() for name in load_profile(profile).environment]
    others = ["HSA_ENABLE_INTERRUPT", "TORCH_BLAS_PREFER_HIPBLASLT", "PYTORCH_TUNABLEOP_ENABLED", "OMP_NUM_THREADS",
              "OMP_WAIT_POLICY", "GPU_MAX_HW_QUEUES"]  # fmt: skip
    return sorted({*profiles, *others, *ALLOCATOR_VARIABLES, *VISIBLE_VARIABLES, *DEBUGGING})


def _device_nodes() -> dict[str, DeviceNode]:
    import grp
    import pwd

    nodes = {}
    render = [f"/dev/dri/{name}" for name in listing(Path("/dev/dri")) if name.startswith("renderD")]
    for path in ("/dev/kfd", *render, "/dev/dxg"):
        try:
            status = os.stat(path)
        except OSError:
            continue
        owner, group = _name(pwd.getpwuid, status.st_uid), _name(grp.getgrgid, status.st_gid)
        nodes[path] = DeviceNode(f"{status.st_mode & 0o777:04o}", owner, group)
    return nodes


def _name(find: Callable[[int], Sequence], number: int) -> str:
    try:
        return find(number)[0]
    except KeyError:  # a user or group of the host that the container does not know
        return str(number)


def _with_access(path: str, node: DeviceNode, user: User | None) -> DeviceNode:
    """Record the user's access if mode and groups say otherwise."""
    access = os.access(path, os.R_OK | os.W_OK)
    return node if node.allows(user) == access else replace(node, access=access)


def _user(of_devices: list[str]) -> User:
    import grp
    import pwd

    wanted = {*_GROUPS, *of_devices}
    names = {_name(grp.getgrgid, number) for number in (*os.getgroups(), os.getegid())}
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        name = "user"
    return User(name, tuple(sorted(names & wanted)), os.geteuid() == 0)


def _sandbox() -> SandboxState | None:
    from rocm_ext.sandbox import Sandbox, bubblewrap, seccomp

    try:
        _, version = bubblewrap.bwrap()
    except UserError:
        return None
    try:
        Sandbox("bubblewrap").check()
    except (UserError, OSError) as error:
        return SandboxState(False, str(error))
    return SandboxState(True, " ".join(filter(None, (version, seccomp.missing()))))


def _disk_free() -> dict[str, int]:
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    folders = {"current folder": Path.cwd(), "Hugging Face cache": Path(os.environ.get("HF_HUB_CACHE") or home)}
    free = {}
    for name, path in folders.items():
        path = path.expanduser().absolute()
        while not path.exists() and path != path.parent:
            path = path.parent
        free[name] = shutil.disk_usage(path).free
    return free


def _memory_limit() -> int | None:
    files = {"": "memory.max", "memory": "memory.limit_in_bytes"}
    limits = [read_number(folder / files[name]) for name, folder in cgroups(ROOT) if name in files]
    # version 1 writes "no limit" as a huge number
    return min((limit for limit in limits if limit is not None and limit < 2**60), default=None)


def _ask_torch() -> Recorded:
    """Run the probe; return its facts alone, also if it crashed or hung later."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+", errors="replace") as complaints:
        probe = subprocess.Popen([sys.executable, *PROBE], stdin=subprocess.DEVNULL,
                                 stdout=output, stderr=complaints)  # fmt: skip
        try:
            status: int | None = probe.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            probe.kill()  # without waiting: a process that hangs in the driver does not die
            status = None
        output.seek(0)
        complaints.seek(0)
        said = _said(output.read())
        last = next((line for line in reversed(complaints.read().splitlines()) if line.strip()), "")
    if status != 0 and said.canaries is None and not said.torch_error:
        failure = f"no answer in {PATIENCE} s" if status is None else f"the test program ended with status {status}"
        last = re.sub(re.escape(str(Path.home())) + r"(?=/|$)", "~", last)
        canary = Finding("canaries", "error", failure, last, "sudo dmesg | grep -i -e amdgpu -e nvrm")
        return replace(said, canaries=(canary,)) if said.torch else replace(said, torch_error=f"{failure}: {last}")
    return said


def _said(text: str) -> Recorded:
    """The facts in the probe's lines; libraries may print other lines."""
    parts: Json = {}
    for line in text.splitlines():
        if line.startswith(MARK):
            try:
                parts |= json.loads(line.removeprefix(MARK))
            except ValueError:  # cut off by a crash
                continue
    return parse(Recorded, parts, "probe")
