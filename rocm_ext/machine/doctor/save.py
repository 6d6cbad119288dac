"""Record a machine for others to judge, without private data.

A recording holds only the files in ``_kept``, without serial numbers, unrelated kernel parameters, and other users and
groups. It calls the user "user".
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from rocm_ext.base.errors import UserError
from rocm_ext.machine.doctor.facts import Facts
from rocm_ext.machine.doctor.recorded import NAME, Recorded
from rocm_ext.machine.doctor.strain import NAMED
from rocm_ext.machine.doctor.system import POWER_MODES
from rocm_ext.machine.sysfs import k10temps, read_text

_PARAMETERS = (
    r"(amdgpu|ttm|amdttm|nvidia)[._].*|(amd_)?iommu=.*|numa_balancing=.*|nomodeset|mem=.*"
    r"|modprobe.blacklist=.*"
)
_CARD = (
    "vendor",
    "device",
    "vbios_version",
    "mem_info_gtt_total",
    "mem_info_vram_total",
    "mem_info_gtt_used",
    "mem_info_vram_used",
    "fw_version/mes_fw_version",
    "power_dpm_force_performance_level",
    "power/runtime_status",
    "hwmon/hwmon*/temp*_*",
    "hwmon/hwmon*/power1_cap*",
)

_TCTL = ("name", "temp1_label", "temp1_input")


def save(facts: Facts, root: Path, folder: Path) -> None:
    """Write the checks' input, with the files below ``root``, into ``folder``, for ``rocm-ext doctor --root``.

    Raises:
        UserError: ``folder`` is not empty, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"--save {folder} is not empty; name a new folder")
        empty = asdict(Recorded())
        recorded = asdict(_without_name(facts.recorded))
        known = {key: value for key, value in recorded.items() if value != empty[key]}
        if facts.machine.system == "Linux":
            _copy_files(facts, root, folder)
        text = json.dumps(known, indent=1)
        (folder / NAME).write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--save {folder}: {error.strerror or error}") from error


def _copy_files(facts: Facts, root: Path, folder: Path) -> None:
    for pattern, keep in _kept(facts, root).items():
        for path in root.glob(pattern):
            kept = keep(read_text(path))
            if kept:
                copy = folder / path.relative_to(root)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(kept + "\n", encoding="utf-8")


def _without_name(recorded: Recorded) -> Recorded:
    user = recorded.user
    nodes = recorded.device_nodes
    if not user or user.name == "root":
        return recorded
    if nodes is not None:
        nodes = dict(nodes)
        for path, node in nodes.items():
            if node.owner == user.name:
                nodes[path] = replace(node, owner="user")
    return replace(recorded, user=replace(user, name="user"), device_nodes=nodes)


def _kept(facts: Facts, root: Path) -> dict[str, Callable[[str], str]]:
    """The files that the checks read, and the functions that reduce them to the needed parts."""
    user = facts.recorded.user
    wanted = {"render", "video"}
    wanted.update(node.group for node in facts.gpu_nodes.values())

    def group(text: str) -> str:
        kept = []
        for line in text.splitlines():
            name, *fields = line.split(":")
            if name not in wanted or len(fields) != 3:
                continue
            _, number, members = fields
            member = ""
            if user and user.name in members.split(","):
                member = "root" if user.name == "root" else "user"
            kept.append(f"{name}:x:{number}:{member}")
        return "\n".join(kept)

    pci_files = {}
    for gpu in facts.files.displays:
        pci_files[f"sys/bus/pci/devices/{gpu}/class"] = str
        pci_files[f"sys/bus/pci/devices/{gpu}/vendor"] = str
    return {
        "proc/cmdline": _known_parameters,
        "proc/cpuinfo": _lines(r"(model name|flags|Features)\s*:.*"),
        "proc/meminfo": _lines(r"(MemTotal|MemAvailable):.*"),
        "proc/driver/nvidia/version": _lines("NVRM version.*"),
        "proc/sys/kernel/numa_balancing": str,
        "proc/sys/kernel/osrelease": str,
        **pci_files,
        **{f"sys/class/drm/card*/device/{file}": str for file in _CARD},
        "sys/class/kfd/kfd/topology/nodes/*/properties": _lines(r"(?!unique_id|hive_id).*"),
        "sys/class/kfd/kfd/proc/*/vram_*": str,
        **_processes(facts),
        **{f"sys/class/hwmon/{name}/{file}": str for name in k10temps(root) for file in _TCTL},
        **{f"{file}*": str for file in POWER_MODES},
        "sys/module/amdgpu/version": str,
        "sys/module/amdgpu/parameters/lockup_timeout": str,
        "sys/module/*ttm/parameters/pages_limit": str,
        "etc/os-release": str,
        "usr/lib/os-release": str,
        "etc/group": group,
        "opt/rocm/.info/version": str,
    }


def _processes(facts: Facts) -> dict[str, Callable[[str], str]]:
    """The memory of the GPU's processes. Only programs that compute or hold much keep their names."""
    kept: dict[str, Callable[[str], str]] = {}
    for process in facts.files.processes:
        kept[f"proc/{process.pid}/fdinfo/*"] = _lines(
            "drm-(driver|pdev|client-id|resident|memory).*"
        )
        if process.computes or process.memory >= NAMED:
            kept[f"proc/{process.pid}/comm"] = str
    return kept


def _known_parameters(text: str) -> str:
    known = re.compile(_PARAMETERS).fullmatch
    words = " ".join(filter(known, text.replace('"', "").split()))
    if text and not words:
        return "quiet"  # the recorded command line has a parameter, but none that matters
    return words


def _lines(pattern: str) -> Callable[[str], str]:
    """A function that keeps the matching lines."""

    def keep(text: str) -> str:
        return "\n".join(line for line in text.splitlines() if re.fullmatch(pattern, line))

    return keep
