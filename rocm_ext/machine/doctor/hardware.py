"""Checks of the machine: its system, kernel and firmware, GPUs and memory.

A check returns its finding; None, where it does not apply.
"""

from collections import Counter
from dataclasses import replace

from rocm_ext.base.errors import UserError
from rocm_ext.machine.budget import HostMemory, before_6_16, budget_from, gib
from rocm_ext.machine.detect import STRIX_HALO
from rocm_ext.machine.doctor.facts import ENOUGH, Facts
from rocm_ext.machine.doctor.recorded import Finding, error, ok, unrecorded, warning
from rocm_ext.machine.doctor.system import NVIDIA
from rocm_ext.machine.profile import below_floor, choose_profile, nearest_profile, profile_of
from rocm_ext.machine.sysfs import AMD

# Kernels whose copies to the GPU from mapped files stall: they have Linux' c08972f55594 without 342981fff328. Ubuntu's
# 7.0.0-30 has both (ROCm#6523), other distributions' 7.0.12 has the first alone (ROCm#6358)
SLOW_MAPS = ("7.0.0-28-", "7.0.12-")
STALL = 0.25  # seconds of the mapped copy; a kernel that stalls takes a second and more
# linux-firmware 20251125 has it; 20260110 returned to an older version (ROCm#5724)
BAD_MES = 0x83
SMALL_CARVE_OUT = 4 * 2**30  # the smallest setting of some machines
_WINDOWS = (
    "training runs in one process, because ROCm's Windows builds have no torch.distributed; RAFT's sandbox needs "
    "Linux; WSL2 has both"
)
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


def platform(facts: Facts) -> Finding:
    """The operating system."""
    machine = facts.machine
    if machine.system != "Linux":
        why = _WINDOWS if machine.system == "Windows" else "training runs on the CPU"
        return ok(f"{machine.system} {facts.recorded.release}".strip(), why)
    where = f", {facts.distribution.name}" if facts.distribution.name else ""
    if facts.recorded.container:
        where += ", in a container"
    if not machine.wsl:
        return ok(f"Linux {machine.kernel}".strip() + where)
    if "wsl2" in machine.kernel.lower():
        return ok(f"WSL2, Linux {machine.kernel}{where}", "Windows runs the GPU's driver")
    why = "WSL1 has no Linux kernel, so no GPU and no sandbox"
    return error(f"WSL1{where}", why, "wsl --set-version DISTRIBUTION 2")


def hardware_profile(facts: Facts) -> Finding | None:
    """Whether the machine has a hardware profile."""
    machine, intended = facts.machine, facts.intended
    if machine.hidden_by and (intended.backend != "cpu" or facts.nvidia):
        found = f"{machine.hidden_by} hides all GPUs"
        return warning(found, "training runs on the CPU", facts.unset(machine.hidden_by))
    if facts.profile:
        gpu = intended.name or intended.arch
        if not gpu:
            gpu = "an NVIDIA GPU" if intended.backend == "cuda" else choose_profile(machine)[1]
        return ok(f"{facts.profile.name}: {gpu}")
    fix = f"hardware={nearest_profile(machine)}"
    for kind in [gpu.kind for gpu in facts.torch.gpus]:
        if profile_of(replace(machine, arch=kind)):
            fix = facts.choose_gpus(kind)
            break
    try:
        choose_profile(machine)
    except UserError as refusal:
        return error(f"none for {machine.arch}", str(refusal), fix)
    return None


def gpu_driver(facts: Facts) -> Finding | None:
    """ROCm can use an AMD GPU once amdgpu lists it in /sys/class/drm and in KFD's topology."""
    files = facts.files
    if not facts.linux:
        return None
    if files.amd_gpus:
        counts = [f"{count} x {arch}" for arch, count in Counter(files.amd_gpus).items()]
        driver = f"amdgpu {files.driver} (DKMS)" if files.driver else "amdgpu"
        return ok(f"{driver}, KFD lists {', '.join(counts)}")
    if facts.machine.backend == "rocm":
        return ok("torch sees the GPU")
    problem = error if facts.amd else warning
    may_train = facts.amd or facts.intended.backend != "cuda"
    if may_train and any(card.is_amd for card in files.cards):
        return problem(
            "amdgpu shows the AMD GPU, but KFD does not list it",
            "ROCm computes through KFD: the kernel lacks CONFIG_HSA_AMD, or a container hides /sys/class/kfd",
            _in_container(facts, "sudo dmesg | grep -i -e amdgpu -e kfd"),
        )
    blocked = "nomodeset" in (files.parameters or {})
    on_bus = AMD in files.displays.values()
    if facts.amd and not blocked and not on_bus:
        return unrecorded()
    if facts.amd or (may_train and on_bus):
        why = "ROCm needs it"
        fix = "sudo modprobe amdgpu"
        if blocked:
            why = "nomodeset on the kernel command line blocks it"
            fix = facts.distribution.boot(remove="nomodeset")
        return problem("an AMD GPU is here, but the amdgpu driver is not loaded", why, fix)
    if files.nvidia:
        return ok(f"NVIDIA {files.nvidia}")
    if NVIDIA in files.displays.values():
        fix = "install NVIDIA's driver; nvidia-smi then lists the GPU"
        return warning("an NVIDIA GPU is here, but not NVIDIA's driver", "CUDA needs it", fix)
    return None


def device_files(facts: Facts) -> Finding | None:
    """Whether the user can open the GPU's files in /dev."""
    if not facts.amd or facts.machine.system != "Linux":
        return None
    if facts.recorded.device_nodes is None:
        return unrecorded()
    if "/dev/dxg" in facts.recorded.device_nodes:  # only WSL has it
        return ok("/dev/dxg")
    if facts.machine.wsl:
        return error("/dev/dxg is missing", "WSL reaches the GPU through it", "wsl --update")
    missing = []
    if "/dev/kfd" not in facts.gpu_nodes:
        missing.append("/dev/kfd")
    if facts.render_nodes == 0:
        missing.append("/dev/dri/renderD*")
    if missing:
        fix = _in_container(facts, "sudo modprobe amdgpu")
        return error(f"{' and '.join(missing)} missing", "ROCm reaches the GPU through them", fix)
    user = facts.recorded.user
    access = {path: node.allows(user) for path, node in facts.gpu_nodes.items()}
    closed = [path for path, can_open in access.items() if can_open is False]
    if closed:
        why, fix = _no_access(facts, closed)
        return error(_permissions(facts), why, _in_container(facts, fix))
    if None in access.values():
        return unrecorded(f"{_permissions(facts)}; the user is not recorded")
    return ok(_permissions(facts))


def _permissions(facts: Facts) -> str:
    """``/dev/kfd, 8 render nodes: root:render 0660``."""
    groups: dict[str, list[str]] = {}
    for path, node in facts.gpu_nodes.items():
        groups.setdefault(f"{node.owner}:{node.group} {node.mode}", []).append(path)
    texts = []
    for permission, paths in groups.items():
        render = [path for path in paths if "renderD" in path]
        names = [path for path in paths if path not in render]
        names += render if len(render) < 2 else [f"{len(render)} render nodes"]
        texts.append(f"{', '.join(names)}: {permission}")
    return "; ".join(texts)


def _in_container(facts: Facts, outside: str) -> str:
    """The command for a container that reaches the GPU, or ``outside`` on a host.

    Rootless podman renumbers groups unless it keeps the user's.
    """
    if not facts.recorded.container:
        return outside
    return _PODMAN if facts.recorded.rootless else _DOCKER


def _no_access(facts: Facts, closed: list[str]) -> tuple[str, str]:
    """Why the user cannot open the ``closed`` device files, and the fix."""
    why = f"this user cannot read and write {', '.join(closed)}"
    user = facts.recorded.user
    if user is None or user.groups is None:
        return why, _ADD_RULES
    wanted = {node.group for node in facts.gpu_nodes.values()} - {"root"}
    missing = sorted(wanted.difference(user.groups))
    if not missing:
        return why, _ADD_RULES
    names = " and ".join(missing)
    members = facts.files.groups or {}
    if all(user.name in members.get(group, ()) for group in missing):
        return (
            f"{why}: in {names} according to /etc/group, but not in this session",
            "log out and in again",
        )
    return (
        f"{why}: it is not in {names}",
        "sudo usermod -aG render,video $USER  # then log out and in",
    )


def within_limits(facts: Facts, name: str, version: str | None, fix: str) -> Finding | None:
    """The check of a version that the profile limits: torch, rocm or kernel."""
    profile = facts.profile
    if profile is None or name not in profile.floor:
        return None
    if not version:
        return unrecorded()
    problems = below_floor(profile, facts.machine)
    if name in problems:
        problem, advice = problems[name]
        return warning(version, problem if fix == advice else f"{problem}: {advice}", fix)
    return ok(version)


def kernel(facts: Facts) -> Finding | None:
    """Whether the kernel has known faults."""
    release = facts.machine.kernel
    if not facts.linux or facts.profile is None:
        return None
    if facts.amd and release.startswith(SLOW_MAPS):
        why = (
            "copies to the GPU from mapped files stall, a second at a time (ROCm#6523, ROCm#6358): programs that map "
            "their weights load slowly, this library reads them"
        )
        return warning(release, why, facts.distribution.upgrade)
    fix = facts.distribution.newer_kernel
    if facts.files.driver:
        fix = facts.profile.floor.get("kernel", {}).get("fix_replaced", fix)
    return within_limits(facts, "kernel", release, fix)


def kernel_parameters(facts: Facts) -> Finding | None:
    """Whether the GPU may map the unified memory: ttm.pages_limit decides, wherever it is set."""
    files = facts.files
    if not facts.amd_linux or not facts.unified:
        return None
    given = files.parameters or {}
    ours = ("ttm.pages_limit", "amdttm.pages_limit", "amdgpu.gttsize", "amd_iommu")
    settings = [f"{key}={given[key]}" for key in ours if key in given]
    if files.pages_limit is not None:
        settings.append(
            f"{files.ttm}.pages_limit in effect: {files.pages_limit} ({gib(files.pages_limit * 4096)})"
        )
    shown = ", ".join(settings)
    old = before_6_16(facts.machine.kernel)
    gttsize = "amdgpu.gttsize" in given
    limited = files.pages_limit is not None or facts.pages_by_hand is not None
    problems = []
    if facts.too_little:
        problems.append(facts.too_little)
    if gttsize and not (old and limited):
        problems.append(
            "amdgpu.gttsize is deprecated and does not raise the deciding limit, ttm.pages_limit"
        )
    if old and given and given.get("amd_iommu") != "off":
        problems.append("kernels before 6.16 need amd_iommu=off")
    if problems:
        remove = "amdgpu.gttsize" if gttsize and not old else ""
        fix = facts.distribution.boot(facts.memory_parameters, remove)
        return warning(shown or "none", "; ".join(problems), fix)
    if facts.mappable is None or facts.installed_gib is None:
        return unrecorded(shown)
    return ok(shown or "none that matters here")


def firmware(facts: Facts) -> Finding | None:
    """Whether the GPU's firmware has known faults."""
    if not facts.amd_linux:
        return None
    amd_cards = [card for card in facts.files.cards if card.is_amd]
    may_be_strix = [card for card in amd_cards if card.device in (STRIX_HALO, "")]
    may_be_strix = may_be_strix or amd_cards  # or Gorgon Halo
    descriptions = []
    for card in amd_cards:
        versions = []
        if card.mes is not None:
            versions.append(f"MES 0x{card.mes:x}")
        if card.vbios:
            versions.append(f"VBIOS {card.vbios}")
        if versions:
            descriptions.append(", ".join(versions))
    found = "; ".join(dict.fromkeys(descriptions))
    strix = facts.intended.arch == "gfx1151"
    if strix and any(card.mes == BAD_MES for card in may_be_strix):
        why = (
            f"MES 0x{BAD_MES:x} of linux-firmware 20251125 hangs the GPU or ends runs with memory access faults "
            "(ROCm#5724); 20260110 works"
        )
        return error(found, why, facts.distribution.upgrade)
    if not found:
        return unrecorded()
    if strix and all(card.mes is None for card in may_be_strix):
        return unrecorded(f"{found}; the kernel does not report MES's version")
    return ok(found)


def numa_balancing(facts: Facts) -> Finding | None:
    """Whether the kernel moves pages between sockets."""
    if not facts.amd_linux or facts.gpu_count < 2 or facts.unified:
        return None
    if facts.files.numa_balancing is None:
        return unrecorded()
    if facts.files.numa_balancing:
        why = "the kernel moves pages between sockets while several GPUs use them"
        return warning("on", why, "sudo sysctl kernel.numa_balancing=0")
    return ok("off")


def host_memory(facts: Facts) -> Finding:
    """The host's memory, and a limit on it."""
    if facts.host_total is None:
        return unrecorded()
    found = gib(facts.host_total)
    if facts.available is not None:
        found += f", {gib(facts.available)} available"
    limit = facts.recorded.memory_limit
    if limit is not None and limit < facts.host_total:
        return warning(
            f"{found}, {gib(limit)} for this container or session",
            "a cgroup kills processes that take more, and the memory budget ignores its limit",
            "raise the limit: docker run --memory, or MemoryMax= in systemd",
        )
    return ok(found)


def gpu_memory(facts: Facts) -> Finding | None:
    """The GPUs' memory, as the kernel, torch and HIP report it. On unified memory, training uses GTT."""
    gpus = facts.torch.gpus
    known = facts.recorded.torch is not None
    if facts.intended.backend == "cpu" or not (gpus or facts.amd_linux or not known):
        return None
    texts = []
    cards = _memory_of_cards(facts) if facts.amd_linux else []
    if any(cards):
        texts.append(_counted(cards))
    if gpus:
        texts.append(f"torch: {_counted([gib(gpu.total_memory) for gpu in gpus])}")
    if facts.recorded.hip_memory:
        texts.append(f"{gib(facts.recorded.hip_memory.available)} free")
    found = "; ".join(texts)
    if not known or (facts.amd_linux and not any(cards)):
        return unrecorded(found)
    if not facts.unified:
        return ok(found)
    total = facts.installed_gib
    cause_warns = facts.too_little or facts.in_carve_out
    if facts.linux and gpus and total and not cause_warns:
        seen = gpus[0].total_memory
        if seen < ENOUGH * total * 2**30:
            fix = facts.distribution.boot(facts.memory_parameters)
            return warning(found, f"of {total} GiB torch sees {gib(seen)}", fix)
    return ok(found, facts.too_little)


def _memory_of_cards(facts: Facts) -> list[str]:
    texts = []
    for card in facts.cards:
        sizes = []
        if card.vram is not None:
            sizes.append(f"VRAM {gib(card.vram)}")
        if card.gtt is not None:
            sizes.append(f"GTT {gib(card.gtt)}")
        texts.append(", ".join(sizes))
    return texts


def _counted(texts: list[str]) -> str:
    """``8 x 191.7 GiB`` for eight equal GPUs."""
    groups = []
    for text, count in Counter(filter(None, texts)).items():
        groups.append(f"{count} x {text}" if count > 1 else text)
    return "; ".join(groups)


def carve_out(facts: Facts) -> Finding | None:
    """Whether the BIOS reserves more memory for the GPU than it needs."""
    if not facts.amd_linux or not facts.unified:
        return None
    if facts.carve_out is None:
        return unrecorded()
    if facts.carve_out <= SMALL_CARVE_OUT:
        return ok(f"{gib(facts.carve_out)}; small is right on unified memory")
    why = "the GPU maps host memory, which is larger, so neither it nor the host uses the carve-out"
    fix = "BIOS: UMA frame buffer (dedicated graphics memory) 512 MB, or the smallest"
    # pages_limit alone would move the GPU to the little memory that the host has left
    if facts.in_carve_out:
        why = "the GPU uses this memory only, and the host cannot use it"
        fix += f"; only then boot with {facts.memory_parameters}"
    return warning(f"the BIOS reserves {gib(facts.carve_out)} for the GPU", why, fix)


def memory_budget(facts: Facts) -> Finding | None:
    """The memory of a run, computed as the recipes do."""
    profile = facts.profile
    if profile is None:
        return None
    unknown = facts.recorded.torch is None and profile.memory["of"] != "host"
    if facts.available is None or facts.host_total is None or unknown:
        return unrecorded()
    if facts.machine.backend != profile.match.get("backend"):
        return None
    host = HostMemory(facts.host_total, facts.available, facts.gtt, facts.carve_out)
    try:
        size, why = budget_from(profile, facts.machine, host)
    except UserError as refusal:
        what, _, fix = str(refusal).partition(". ")
        return error("nothing is left for training", what, fix)
    return ok(f"{gib(size)} for training: {why}")


def copies(facts: Facts) -> Finding | None:
    """Whether copies from mapped files stall: most programs load their weights from mapped files."""
    took = facts.recorded.copies
    if took is None:
        return unrecorded() if facts.machine.arch else None
    times = f"in {took.mapped:.3g} s from a mapped file, in {took.read:.3g} s if read first"
    found = f"{took.size / 2**20:.0f} MiB {times}"
    if took.mapped > max(STALL, 5 * took.read):
        why = "the kernel stalls on mapped files; this library reads its weights, programs that map theirs load slowly"
        return warning(found, why, facts.distribution.upgrade)
    return ok(found)


def count_gpus(facts: Facts) -> Finding | None:
    """Whether KFD or torch list fewer GPUs than /sys/class/drm or the bus."""
    count = facts.listed_gpus
    source = "KFD lists"
    if facts.machine.backend == "rocm":
        count = facts.machine.gpu_count
        source = "torch sees"
    installed = _installed_gpus(facts)
    if not facts.amd or not 0 < count < installed:
        return None
    found = f"{source} {count} of {installed}"
    if count == facts.listed_gpus or not facts.visible_by:
        why = "a GPU has failed, or this user cannot open its device file"
        return warning(found, why, "sudo dmesg | grep -i amdgpu")
    return ok(found, f"{facts.visible_by[0]} selects them")


def _installed_gpus(facts: Facts) -> int:
    """The GPUs like the one that trains that are here, or that were given to the container."""
    largest = max(facts.cards, key=lambda card: card.vram or 0, default=None)
    equal = 0
    if largest and largest.device:
        equal = sum(card.device == largest.device for card in facts.cards)
    installed = max(facts.listed_gpus, equal, facts.files.accelerators)
    if facts.recorded.container and facts.render_nodes:
        return min(installed, facts.render_nodes)
    return installed


def other_gpus(facts: Facts) -> Finding | None:
    """Whether torch sees GPUs of several kinds; without a profile, the check of the profile has the fix.

    AMD's notes on Radeon report the crashes.
    """
    gpus = facts.torch.gpus
    others = [gpu.kind for gpu in gpus if gpu.kind != gpus[0].kind]
    if facts.machine.backend != "rocm" or not facts.profile or not others:
        return None
    why = "ranks cannot use different GPUs together, and ROCm is known to crash beside an integrated one"
    return warning(f"torch also sees {', '.join(others)}", why, facts.choose_gpus(gpus[0].kind))
