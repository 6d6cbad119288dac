"""Checks that compute more than a rule of the table can say, and texts of its findings."""

from collections.abc import Iterator
from dataclasses import replace

from rocm_ext.base.errors import UserError
from rocm_ext.base.pins import wrong_pins
from rocm_ext.machine.budget import HostMemory, before_6_16, budget_from, gib
from rocm_ext.machine.doctor.facts import ENOUGH, Facts
from rocm_ext.machine.doctor.recorded import Finding, unrecorded
from rocm_ext.machine.environment import ALLOCATOR_VARIABLES, environment_conflicts, environment_for
from rocm_ext.machine.profile import choose_profile, nearest_profile, profile_of

COMPILERS = ("gcc", "clang")
# Variables that help to find errors and cost speed
DEBUGGING = {
    "HIP_LAUNCH_BLOCKING": "every kernel waits for the previous one",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the previous one",
    "AMD_SERIALIZE_KERNEL": "every kernel waits for the previous one",
    "AMD_SERIALIZE_COPY": "every copy waits for the previous one",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor asks the driver for memory",
    "PYTORCH_NO_HIP_MEMORY_CACHING": "every tensor asks the driver for memory",
}
# free bytes: fewer than the first warn, fewer than the second are an error
DISK = {"current folder": (10 * 2**30, 2**30), "Hugging Face cache": (20 * 2**30, 0)}

_UDEV_RULES = (
    'SUBSYSTEM=="kfd", GROUP="render", MODE="0666"\\n'
    'SUBSYSTEM=="drm", KERNEL=="renderD*", GROUP="render", MODE="0666"\\n'
)
_ADD_RULES = (
    f"printf '{_UDEV_RULES}' | sudo tee /etc/udev/rules.d/70-amdgpu.rules && "
    "sudo udevadm control --reload && sudo udevadm trigger"
)
_DOCKER = (
    "docker run --device /dev/kfd --device /dev/dri --group-add video "
    "--group-add $(getent group render | cut -d: -f3) IMAGE"
)
_PODMAN = "podman run --device /dev/kfd --device /dev/dri --group-add keep-groups IMAGE"


# ------------------------------------------------------------------------------------------------------ checks
def hardware_profile(facts: Facts) -> Iterator[Finding]:
    """Whether the machine has a hardware profile."""
    name, machine = "hardware profile", facts.machine
    if machine.hidden_by and facts.has_gpu:
        found, fix = f"{machine.hidden_by} hides all GPUs", facts.unset(machine.hidden_by)
        yield Finding(name, "warning", found, "training runs on the CPU", fix)
    elif facts.profile:
        gpu = facts.fit.name or facts.fit.arch
        gpu = gpu or ("an NVIDIA GPU" if facts.fit.backend == "cuda" else choose_profile(machine)[1])
        yield Finding(name, "ok", f"{facts.profile.name}: {gpu}")
    else:
        try:
            choose_profile(machine)
        except UserError as error:
            kinds = (gpu.kind for gpu in facts.torch_gpus)
            better = next((kind for kind in kinds if profile_of(replace(machine, arch=kind))), None)
            fix = facts.choose_gpus(better) if better else f"hardware={nearest_profile(machine)}"
            yield Finding(name, "error", f"none for {machine.arch}", str(error), fix)


def kernel_parameters(facts: Facts) -> Iterator[Finding]:
    """Whether the GPU may map the unified memory: ttm.pages_limit decides, wherever it is set."""
    name, files = "kernel parameters", facts.files
    if not facts.amd_linux or not facts.unified:
        return
    given = files.parameters or {}
    ours = ("ttm.pages_limit", "amdttm.pages_limit", "amdgpu.gttsize", "amd_iommu")
    settings = [f"{key}={given[key]}" for key in ours if key in given]
    if files.pages_limit is not None:
        settings.append(f"{files.ttm}.pages_limit in effect: {files.pages_limit} ({gib(files.pages_limit * 4096)})")
    old = before_6_16(facts.machine.kernel)
    problems = [facts.too_little] if facts.too_little else []
    if "amdgpu.gttsize" in given and (not old or files.pages_limit is None is facts.pages_by_hand):
        problems.append("amdgpu.gttsize is deprecated and does not raise the deciding limit, ttm.pages_limit")
    if old and given and given.get("amd_iommu") != "off":
        problems.append("kernels before 6.16 need amd_iommu=off")
    if problems:
        fix = facts.boot(facts.memory_parameters, "amdgpu.gttsize" if "amdgpu.gttsize" in given and not old else "")
        yield Finding(name, "warning", ", ".join(settings) or "none", "; ".join(problems), fix)
    elif facts.mappable is None or facts.installed_gib is None:
        yield unrecorded(name, ", ".join(settings))
    else:
        yield Finding(name, "ok", ", ".join(settings) or "none that matters here")


def gpu_memory(facts: Facts) -> Iterator[Finding]:
    """The GPUs' memory, as the kernel, torch and HIP report it. On unified memory, training uses GTT."""
    name, total, torch = "GPU memory", facts.installed_gib, facts.torch_gpus
    if facts.fit.backend == "cpu" or not (torch or facts.amd_linux or facts.said.torch is None):
        return
    sizes = [{"VRAM": card.vram, "GTT": card.gtt} for card in facts.cards] if facts.amd_linux else []
    cards = [", ".join(f"{label} {gib(size)}" for label, size in both.items() if size is not None) for both in sizes]
    parts = [_counted(cards), f"torch: {_counted([gib(gpu.total_memory) for gpu in torch])}" if torch else ""]
    if hip := facts.said.hip_memory:
        parts.append(f"{gib(hip.available)} free")
    text = "; ".join(filter(None, parts))
    if facts.said.torch is None or (facts.amd_linux and not any(cards)):
        yield unrecorded(name, text)
        return
    little = facts.unified and facts.linux and torch and total and torch[0].total_memory < ENOUGH * total * 2**30
    if little and not (facts.too_little or facts.in_carve_out):  # otherwise the check of the cause warns
        why = f"of {total} GiB torch sees {gib(torch[0].total_memory)}"
        yield Finding(name, "warning", text, why, facts.boot(facts.memory_parameters))
    else:
        yield Finding(name, "ok", text, facts.too_little if facts.unified else "")


def _counted(texts: list[str]) -> str:
    """``8 x 191.7 GiB`` for eight equal GPUs."""
    counts = {text: texts.count(text) for text in texts if text}
    return "; ".join(f"{count} x {text}" if count > 1 else text for text, count in counts.items())


def budget(facts: Facts) -> Iterator[Finding]:
    """The memory of a run, computed as the recipes do."""
    name, profile = "memory budget", facts.profile
    if profile is None:
        return
    unknown = facts.said.torch is None and profile.memory["of"] != "host"
    if facts.available is None or facts.host_total is None or unknown:
        yield unrecorded(name)
    elif facts.machine.backend == profile.match.get("backend"):
        try:
            host = HostMemory(facts.host_total, facts.available, facts.gtt, facts.carve_out)
            size, why = budget_from(profile, facts.machine, host)
            yield Finding(name, "ok", f"{gib(size)} for training: {why}")
        except UserError as error:
            what, _, fix = str(error).partition(". ")
            yield Finding(name, "error", "nothing is left for training", what, fix)


def pins(facts: Facts) -> Iterator[Finding]:
    """Whether torchtune and torchao have versions that work together."""
    name, packages = "torchtune, torchao", facts.said.packages
    if packages is None or not {"torchtune", "torchao"} <= packages.keys():
        yield unrecorded(name)
        return
    why, _, fix = (wrong_pins(packages) or "").partition(" Fix: ")
    versions = f"{packages['torchtune'] or 'none'}, {packages['torchao'] or 'none'}"
    yield Finding(name, "error" if why else "ok", versions, why, fix)


def environment(facts: Facts) -> Iterator[Finding]:
    """The profile's variables, and the user's that conflict with it or cost speed."""
    profile, environ = facts.profile, facts.environment
    if facts.said.environment is None or profile is None:
        yield unrecorded("environment")
        return
    conflicts = list(environment_conflicts(profile, facts.fit, environ))
    for conflict in conflicts:
        name, fix = " ".join(conflict.variables), facts.unset(*conflict.variables)
        yield Finding(name, "error" if conflict.fatal else "warning", conflict.setting, conflict.why, fix)
    alone = environment_for(profile, facts.fit, {"WORLD_SIZE": str(facts.gpu_count)})  # nothing set by the user
    taken = {*environ, *(ALLOCATOR_VARIABLES if environ.keys() & set(ALLOCATOR_VARIABLES) else ())}
    for name, ours in alone.items():
        if name not in taken:
            yield Finding(name, "ok", f"not set; the recipe sets {ours.value}", ours.reason)
    for name in sorted(environ.keys() - {name for conflict in conflicts for name in conflict.variables}):
        value, why = environ[name], ""
        found = value or "empty"
        if name in alone and value != alone[name].value and name not in ALLOCATOR_VARIABLES:
            found, why = f"{value}; the recipe would set {alone[name].value}", alone[name].reason
        elif name in DEBUGGING and value not in ("", "0"):
            why = f"slow: {DEBUGGING[name]}"
        elif name == "PYTORCH_TUNABLEOP_ENABLED" and value == "1" and profile.name != "mi300x":
            why = "it helps where shapes are fixed; rows of all lengths make it tune all the time"
        yield Finding(name, "warning", found, why, facts.unset(name)) if why else Finding(name, "ok", found)
    if not (alone or environ):
        yield Finding("environment", "ok", "no variable that matters is set")


def numerics(facts: Facts) -> Iterator[Finding]:
    """The canaries of :mod:`rocm_ext.machine.numerics`."""
    if facts.said.canaries is None:
        yield unrecorded("canaries", "torch cannot use the GPU" if facts.said.torch and not facts.machine.arch else "")
    for canary in facts.said.canaries or ():
        name = canary.check.replace("fused attention", "attention")
        name = name if name.startswith(("attention", "canaries")) else f"canary: {name}"
        yield Finding(name, canary.level, canary.found, canary.why, canary.fix)


def disk(facts: Facts) -> Iterator[Finding]:
    """Free space for outputs and downloads."""
    if facts.said.disk_free is None:
        yield unrecorded("disk")
    for folder, free in (facts.said.disk_free or {}).items():
        low, least = DISK.get(folder, (0, 0))
        if free >= low:
            yield Finding(f"disk: {folder}", "ok", f"{gib(free)} free")
            continue
        fix = "output_dir=/a/larger/disk" if folder == "current folder" else facts.export("HF_HOME", "/a/larger/disk")
        why = "a 7B model in bf16 takes 15 GB"
        yield Finding(f"disk: {folder}", "error" if free < least else "warning", f"{gib(free)} free", why, fix)


# ------------------------------------------------------------------------------------------ texts of the table
def permissions(facts: Facts) -> str:
    """``/dev/kfd, 8 render nodes: root:render 0660``."""
    groups: dict[str, list[str]] = {}
    for path, node in facts.gpu_nodes.items():
        groups.setdefault(f"{node.owner}:{node.group} {node.mode}", []).append(path)
    texts = []
    for permission, paths in groups.items():
        render = [path for path in paths if "renderD" in path]
        others = [path for path in paths if path not in render]
        names = [*others, f"{len(render)} render nodes"] if render[1:] else [*others, *render]
        texts.append(f"{', '.join(names)}: {permission}")
    return "; ".join(texts)


def container(facts: Facts, outside: str) -> str:
    """The command for a container that reaches the GPU, or ``outside`` on a host.

    Rootless podman renumbers groups unless it keeps the user's.
    """
    if not facts.said.container:
        return outside
    return _PODMAN if facts.said.rootless else _DOCKER


def no_access(facts: Facts) -> tuple[str, str]:
    """Why the user cannot open the GPU's device files, and the fix."""
    closed = ", ".join(path for path, access in facts.access.items() if access is False)
    why, user = f"this user cannot read and write {closed}", facts.said.user
    wanted = sorted({node.group for node in facts.gpu_nodes.values()} - {"root"})
    missing = [group for group in wanted if user and user.groups is not None and group not in user.groups]
    if user is None or not missing:
        return why, _ADD_RULES
    members, names = facts.files.groups or {}, " and ".join(missing)
    if all(user.name in members.get(group, ()) for group in missing):
        return f"{why}: in {names} according to /etc/group, but not in this session", "log out and in again"
    return f"{why}: it is not in {names}", "sudo usermod -aG render,video $USER  # then log out and in"


def firmware(facts: Facts) -> str:
    """The versions of the GPUs' firmware."""
    versions = []
    for card in facts.files.cards:
        mes = f"MES 0x{card.mes:x}" if card.is_amd and card.mes is not None else ""
        versions.append(", ".join(filter(None, [mes, f"VBIOS {card.vbios}" if card.is_amd and card.vbios else ""])))
    return "; ".join(dict.fromkeys(filter(None, versions)))


def host_memory(facts: Facts) -> str:
    """The host's total and available memory."""
    return gib(facts.host_total or 0) + ("" if facts.available is None else f", {gib(facts.available)} available")


def copies(facts: Facts) -> str:
    """The times of two copies to the GPU."""
    if (took := facts.said.copies) is None:
        return ""
    times = f"in {took.mapped:.3g} s from a mapped file, in {took.read:.3g} s if read first"
    return f"{took.size / 2**20:.0f} MiB {times}"


def processes(facts: Facts) -> str:
    """The programs on the GPU, with their memory."""
    memory = {process: f": {gib(process.memory)}" if process.memory else "" for process in facts.files.processes}
    return ", ".join(f"{process.pid} {process.name}".strip() + size for process, size in memory.items())
