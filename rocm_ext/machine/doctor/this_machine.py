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

from rocm_ext.base import packages
from rocm_ext.base.errors import UserError
from rocm_ext.base.structure import parse
from rocm_ext.base.types import Json
from rocm_ext.machine.detect import VISIBLE_VARIABLES
from rocm_ext.machine.doctor.facts import Facts
from rocm_ext.machine.doctor.recorded import (
    MARK,
    DeviceNode,
    Finding,
    Memory,
    Recorded,
    SandboxState,
    User,
)
from rocm_ext.machine.doctor.software import COMPILERS, DEBUGGING
from rocm_ext.machine.doctor.system import read_system
from rocm_ext.machine.environment import ALLOCATOR_VARIABLES
from rocm_ext.machine.profile import load_profile, profile_names
from rocm_ext.machine.sysfs import cgroups, listing, read_number, read_text

ROOT = Path("/")
PROBE = ("-m", "rocm_ext.machine.doctor.probe")
# seconds for the probe; the first import of torch from a cold disk takes most of a minute
PATIENCE = 180
_GROUPS = ("render", "video")
_VARIABLES = (
    "HSA_ENABLE_INTERRUPT",
    "TORCH_BLAS_PREFER_HIPBLASLT",
    "PYTORCH_TUNABLEOP_ENABLED",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GPU_MAX_HW_QUEUES",
)


def live_facts() -> Facts:
    """The facts of this machine."""
    files = read_system(ROOT)  # before the probe, which would be among the processes on the GPU
    system = platform.system()
    recorded = replace(
        _ask_torch(),
        system=system,
        container=any((ROOT / path).exists() for path in (".dockerenv", "run/.containerenv")),
        rootless="rootless=1" in read_text(ROOT / "run/.containerenv").split(),
        environment=_environment(),
        packages=packages.installed(),
        commands=tuple(filter(shutil.which, COMPILERS)),
        disk_free=_disk_free(),
        memory_limit=_memory_limit(),
    )
    if not files.memory:
        host = psutil.virtual_memory()
        recorded = replace(recorded, host_memory=Memory(host.total, host.available))
    if system != "Linux":
        recorded = replace(recorded, release=platform.version(), cpu=platform.processor())
        return Facts(recorded, files, ROOT)
    nodes = _device_nodes()
    user = _user([node.group for node in nodes.values()])
    for path, node in nodes.items():
        can_open = os.access(path, os.R_OK | os.W_OK)
        if node.allows(user) != can_open:  # an ACL decides
            nodes[path] = replace(node, access=can_open)
    recorded = replace(recorded, user=user, device_nodes=nodes, sandbox=_sandbox())
    if recorded.sandbox:
        recorded = replace(recorded, commands=("bwrap", *(recorded.commands or ())))
    return Facts(recorded, files, ROOT)


def _environment() -> dict[str, str]:
    """The set environment variables that matter; nothing reads the others."""
    names = {*_VARIABLES, *ALLOCATOR_VARIABLES, *VISIBLE_VARIABLES, *DEBUGGING}
    for profile in profile_names():
        names.update(load_profile(profile).environment)
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def _device_nodes() -> dict[str, DeviceNode]:
    import grp
    import pwd

    nodes = {}
    render = [
        f"/dev/dri/{name}" for name in listing(Path("/dev/dri")) if name.startswith("renderD")
    ]
    for path in ("/dev/kfd", *render, "/dev/dxg"):
        try:
            status = os.stat(path)
        except OSError:
            continue
        nodes[path] = DeviceNode(
            mode=f"{status.st_mode & 0o777:04o}",
            owner=_name(pwd.getpwuid, status.st_uid),
            group=_name(grp.getgrgid, status.st_gid),
        )
    return nodes


def _name(find: Callable[[int], Sequence], number: int) -> str:
    try:
        return find(number)[0]
    except KeyError:  # a user or group of the host that the container does not know
        return str(number)


def _user(device_groups: list[str]) -> User:
    import grp
    import pwd

    numbers = {*os.getgroups(), os.getegid()}
    groups = {_name(grp.getgrgid, number) for number in numbers}
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        name = "user"
    groups &= {*_GROUPS, *device_groups}
    return User(name, tuple(sorted(groups)), root=os.geteuid() == 0)


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
    return SandboxState(True, f"{version} {seccomp.missing()}".strip())


def _disk_free() -> dict[str, int]:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    folders = {"current folder": ".", "Hugging Face cache": os.environ.get("HF_HUB_CACHE") or home}
    free = {}
    for name, folder in folders.items():
        path = Path(folder).expanduser().absolute()
        while not path.exists() and path != path.parent:
            path = path.parent
        free[name] = shutil.disk_usage(path).free
    return free


def _memory_limit() -> int | None:
    files = {"": "memory.max", "memory": "memory.limit_in_bytes"}
    limits = []
    for controller, folder in cgroups(ROOT):
        limit = read_number(folder / files[controller]) if controller in files else None
        if limit is not None and limit < 2**60:  # version 1 writes "no limit" as a huge number
            limits.append(limit)
    return min(limits, default=None)


def _ask_torch() -> Recorded:
    """Run the probe; return its facts alone, also if it crashed or hung later."""
    with (
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+", errors="replace") as complaints,
    ):
        command = [sys.executable, *PROBE]
        probe = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=complaints
        )
        try:
            status = probe.wait(PATIENCE)
            failure = f"the test program ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            probe.kill()  # nothing waits: a process that hangs in the driver does not die
            failure = f"no answer in {PATIENCE} s"
        output.seek(0)
        recorded = _parse_answer(output.read())
        complaints.seek(0)
        lines = [line for line in complaints.read().splitlines() if line.strip()]
    if not failure or recorded.canaries is not None or recorded.torch_error:
        return recorded
    home = re.escape(str(Path.home()))
    last = re.sub(rf"{home}(?=/|$)", "~", lines[-1]) if lines else ""
    if recorded.torch is None:
        return replace(recorded, torch_error=f"{failure}: {last}")
    canary = Finding("canaries", "error", failure, last, "sudo dmesg | grep -i -e amdgpu -e nvrm")
    return replace(recorded, canaries=(canary,))


def _parse_answer(text: str) -> Recorded:
    """The facts in the probe's lines; libraries may print other lines."""
    facts: Json = {}
    for line in text.splitlines():
        if line.startswith(MARK):
            try:
                facts |= json.loads(line.removeprefix(MARK))
            except ValueError:  # cut off by a crash
                continue
    return parse(Recorded, facts, "probe")
