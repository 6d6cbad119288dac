"""The operating system, and whether this user can reach the GPU."""

from collections.abc import Iterator, Mapping

from rocm_ext.base.errors import UserError
from rocm_ext.machine.budget import before_6_16
from rocm_ext.machine.detect import STRIX_HALO
from rocm_ext.machine.doctor.facts import Facts
from rocm_ext.machine.doctor.recorded import DeviceNode, Finding, gib, unrecorded
from rocm_ext.machine.doctor.system import AMD, NVIDIA, Card
from rocm_ext.machine.profile import below_floor, choose_profile, has_profile, nearest_profile

# Kernels whose copies to the GPU from mapped files stall: they have Linux' c08972f55594 without 342981fff328. Ubuntu's
# 7.0.0-30 has both (ROCm#6523), other distributions' 7.0.12 has the first alone (ROCm#6358)
SLOW_MAPS = ("7.0.0-28-", "7.0.12-")
# of linux-firmware 20251125; 20260110 returned to an older version (ROCm#5724)
BAD_MES = 0x83

UDEV_RULES = (
    'SUBSYSTEM=="kfd", GROUP="render", MODE="0666"\\n'
    'SUBSYSTEM=="drm", KERNEL=="renderD*", GROUP="render", MODE="0666"\\n'
)
_ADD_RULES = (
    f"printf '{UDEV_RULES}' | sudo tee /etc/udev/rules.d/70-amdgpu.rules && "
    "sudo udevadm control --reload && sudo udevadm trigger"
)
_DOCKER = (
    "docker run --device /dev/kfd --device /dev/dri --group-add video "
    "--group-add $(getent group render | cut -d: -f3) IMAGE"
)
_PODMAN = "podman run --device /dev/kfd --device /dev/dri --group-add keep-groups IMAGE"
_ANEW = "log out and in again"
_JOIN = "sudo usermod -aG render,video $USER  # then log out and in"


def platform(facts: Facts) -> Iterator[Finding]:
    """The operating system, and what it cannot do."""
    name = "platform"
    distribution = facts.files.distribution.get("PRETTY_NAME", "")
    where = ", ".join(filter(None, [distribution, "in a container" if facts.said.container else ""]))
    where = f", {where}" if where else ""
    machine = facts.machine
    if machine.system == "Windows":
        yield Finding(name, "ok", f"Windows {facts.said.release}".strip(),
                      "training runs in one process, because ROCm's Windows builds have no torch.distributed; "
                      "RAFT's sandbox needs Linux; WSL2 has both")  # fmt: skip
    elif machine.system != "Linux":
        yield Finding(name, "ok", f"{machine.system} {facts.said.release}".strip(), "training runs on the CPU")
    elif machine.wsl and "wsl2" not in machine.kernel.lower():
        yield Finding(name, "error", f"WSL1{where}", "WSL1 has no Linux kernel, so no GPU and no sandbox",
                      "wsl --set-version DISTRIBUTION 2")  # fmt: skip
    elif machine.wsl:
        yield Finding(name, "ok", f"WSL2, Linux {machine.kernel}{where}", "Windows runs the GPU's driver")
    else:
        yield Finding(name, "ok", f"Linux {machine.kernel}".strip() + where)


def hardware_profile(facts: Facts) -> Iterator[Finding]:
    """Whether the machine has a hardware profile."""
    name, machine = "hardware profile", facts.machine
    if machine.hidden_by and facts.has_gpu:
        yield Finding(name, "warning", f"{machine.hidden_by} hides all GPUs", "training runs on the CPU",
                      facts.unset(machine.hidden_by))  # fmt: skip
    elif facts.profile is None:
        try:
            choose_profile(machine)
        except UserError as error:
            fix = f"hardware={nearest_profile(machine)}"
            gpus = facts.said.torch.gpus if facts.said.torch else ()
            if better := next((gpu.kind for gpu in gpus if has_profile(machine, gpu.kind)), None):
                fix = facts.choose_gpus(better)
            yield Finding(name, "error", f"none for {machine.arch}", str(error), fix)
    else:
        known = facts.fit.name or facts.fit.arch
        gpu = known or ("an NVIDIA GPU" if facts.fit.backend == "cuda" else choose_profile(machine)[1])
        yield Finding(name, "ok", f"{facts.profile.name}: {gpu}")


def gpu_driver(facts: Facts) -> Iterator[Finding]:
    """ROCm can use an AMD GPU once amdgpu lists it in /sys/class/drm and in KFD's topology."""
    name, files = "GPU driver", facts.files
    if not facts.linux:
        return
    blocked = "nomodeset" in (files.parameters or {})
    if files.amd_gpus:
        count = [f"{files.amd_gpus.count(arch)} x {arch}" for arch in dict.fromkeys(files.amd_gpus)]
        yield Finding(name, "ok", f"amdgpu, KFD lists {', '.join(count)}")
    elif facts.machine.backend == "rocm":
        yield Finding(name, "ok", "torch sees the GPU")
    elif any(card.is_amd for card in files.cards) and (facts.amd or facts.fit.backend != "cuda"):
        yield Finding(name, "error" if facts.amd else "warning", "amdgpu shows the AMD GPU, but KFD does not list it",
                      "ROCm computes through KFD: the kernel lacks CONFIG_HSA_AMD, or a container hides /sys/class/kfd",
                      _container(facts, "sudo dmesg | grep -i -e amdgpu -e kfd"))  # fmt: skip
    elif facts.amd and not (blocked or AMD in files.displays.values()):
        yield unrecorded(name)
    elif facts.amd or (AMD in files.displays.values() and facts.fit.backend != "cuda"):
        yield Finding(name, "error" if facts.amd else "warning",
                      "an AMD GPU is here, but the amdgpu driver is not loaded",
                      "nomodeset on the kernel command line blocks it" if blocked else "ROCm needs it",
                      facts.boot(remove="nomodeset") if blocked else "sudo modprobe amdgpu")  # fmt: skip
    elif files.nvidia:
        yield Finding(name, "ok", f"NVIDIA {files.nvidia}")
    elif NVIDIA in files.displays.values():
        yield Finding(name, "warning", "an NVIDIA GPU is here, but not NVIDIA's driver", "CUDA needs it",
                      "install NVIDIA's driver; nvidia-smi then lists the GPU")  # fmt: skip


def device_files(facts: Facts) -> Iterator[Finding]:
    """Whether this user may open the files through which ROCm reaches the GPU."""
    name = "device files"
    if not facts.amd or facts.machine.system != "Linux":
        return
    if facts.said.device_nodes is None:
        yield unrecorded(name)
        return
    there = "/dev/dxg" in facts.said.device_nodes
    if facts.machine.wsl or there:  # where the kernel's name is missing, the device alone shows that this is WSL
        yield Finding(name, "ok" if there else "error", "/dev/dxg" if there else "/dev/dxg is missing",
                      "" if there else "WSL reaches the GPU through it", "" if there else "wsl --update")  # fmt: skip
        return
    nodes = facts.gpu_nodes
    wanted = {"/dev/kfd": "/dev/kfd" in nodes, "/dev/dri/renderD*": any("renderD" in path for path in nodes)}
    if missing := [path for path, there in wanted.items() if not there]:
        yield Finding(name, "error", f"{' and '.join(missing)} missing", "ROCm reaches the GPU through them",
                      _container(facts, "sudo modprobe amdgpu"))  # fmt: skip
        return
    access = {path: facts.access(node) for path, node in nodes.items()}
    told = _permissions(nodes)
    if closed := [path for path, open in access.items() if open is False]:
        why, fix = _membership(facts)
        why = f"this user cannot read and write {', '.join(closed)}" + (f": {why}" if why else "")
        yield Finding(name, "error", told, why, _container(facts, fix or _ADD_RULES))
    elif None in access.values():
        yield unrecorded(name, f"{told}; the user is not recorded")
    else:
        yield Finding(name, "ok", told)


def _permissions(nodes: Mapping[str, DeviceNode]) -> str:
    """``/dev/kfd, 8 render nodes: root:render 0660``."""
    groups: dict[str, list[str]] = {}
    for path, node in nodes.items():
        groups.setdefault(f"{node.owner}:{node.group} {node.mode}", []).append(path)
    told = []
    for permission, paths in groups.items():
        render = [path for path in paths if "renderD" in path]
        names = [
            *(path for path in paths if path not in render),
            *([f"{len(render)} render nodes"] if render[1:] else render),
        ]
        told.append(f"{', '.join(names)}: {permission}")
    return "; ".join(told)


def _container(facts: Facts, outside: str) -> str:
    """How to start a container that reaches the GPU, or ``outside`` on a host.

    Rootless podman renumbers groups unless it keeps the user's.
    """
    if not facts.said.container:
        return outside
    return _PODMAN if facts.said.rootless else _DOCKER


def _membership(facts: Facts) -> tuple[str, str]:
    """What is wrong with the user's groups, and the fix; both empty where nothing is, or root alone has access."""
    user = facts.said.user
    wanted = sorted({node.group for node in facts.gpu_nodes.values()} - {"root"})
    missing = [group for group in wanted if user and user.groups is not None and group not in user.groups]
    if user is None or not missing:
        return "", ""
    members = facts.files.groups or {}
    if all(user.name in members.get(group, ()) for group in missing):
        return f"in {' and '.join(missing)} according to /etc/group, but not in this session", _ANEW
    return f"it is not in {' and '.join(missing)}", _JOIN


def kernel(facts: Facts) -> Iterator[Finding]:
    """Whether the kernel is as new as the profile asks, and copies from mapped files at full speed."""
    name, release = "kernel", facts.machine.kernel
    if not facts.linux or facts.profile is None:
        return
    if facts.amd and release.startswith(SLOW_MAPS):
        why = "copies to the GPU from mapped files stall, a second at a time (ROCm#6523, ROCm#6358): programs that map "
        why += "their weights load slowly, this library reads them"
        yield Finding(name, "warning", release, why, facts.upgrade)
    elif "kernel" not in facts.profile.floor:
        return
    elif not release:
        yield unrecorded(name)
    elif outside := below_floor(facts.profile, facts.machine).get(name):
        yield Finding(name, "warning", release, f"{outside[0]}: {outside[1]}", facts.newer_kernel)
    else:
        yield Finding(name, "ok", release)


def kernel_parameters(facts: Facts) -> Iterator[Finding]:
    """Whether the GPU may map the unified memory: ttm.pages_limit decides, wherever it is set."""
    name, files = "kernel parameters", facts.files
    if not facts.amd_linux or not facts.unified:
        return
    given = files.parameters or {}
    ours = ("ttm.pages_limit", "amdttm.pages_limit", "amdgpu.gttsize", "amd_iommu")
    told = [f"{key}={given[key]}" for key in ours if key in given]
    if files.pages_limit is not None:
        told.append(f"{files.ttm}.pages_limit in effect: {files.pages_limit} ({gib(files.pages_limit * 4096)})")
    by_hand, old = facts.pages_by_hand, before_6_16(facts.machine.kernel)
    problems = list(filter(None, [facts.too_little]))
    if "amdgpu.gttsize" in given and (not old or files.pages_limit is None is by_hand):
        problems.append("amdgpu.gttsize is deprecated and does not raise the deciding limit, ttm.pages_limit")
    if old and given and given.get("amd_iommu") != "off":
        problems.append("kernels before 6.16 need amd_iommu=off")
    if problems:
        drop = "amdgpu.gttsize" if "amdgpu.gttsize" in given and not old else ""
        fix = facts.boot(facts.memory_parameters, drop)
        yield Finding(name, "warning", ", ".join(told) or "none", "; ".join(problems), fix)
    elif facts.mappable is None or facts.installed_gib is None:
        yield unrecorded(name, ", ".join(told))
    else:
        yield Finding(name, "ok", ", ".join(told) or "none that matters here")


def firmware(facts: Facts) -> Iterator[Finding]:
    """The firmware's versions; one of them hangs Strix Halo."""
    name = "firmware"
    cards = [card for card in facts.files.cards if card.is_amd]
    if not facts.amd_linux:
        return
    told = list(dict.fromkeys(filter(None, map(_versions, cards))))
    strix = [card for card in cards if card.device in (STRIX_HALO, "")] or cards  # Gorgon Halo is gfx1151, too
    if facts.fit.arch == "gfx1151" and any(card.mes == BAD_MES for card in strix):
        yield Finding(name, "error", "; ".join(told),
                      f"MES 0x{BAD_MES:x} of linux-firmware 20251125 hangs the GPU or ends runs with memory access "
                      "faults (ROCm#5724); 20260110 works",
                      facts.upgrade)  # fmt: skip
    elif not told:
        yield unrecorded(name)
    elif facts.fit.arch == "gfx1151" and all(card.mes is None for card in strix):
        yield unrecorded(name, "; ".join([*told, "the kernel does not report MES's version"]))
    else:
        yield Finding(name, "ok", "; ".join(told))


def _versions(card: Card) -> str:
    mes = "" if card.mes is None else f"MES 0x{card.mes:x}"
    return ", ".join(filter(None, [mes, f"VBIOS {card.vbios}" if card.vbios else ""]))


def numa_balancing(facts: Facts) -> Iterator[Finding]:
    """Whether the kernel moves pages between sockets, which slows several GPUs."""
    name, value = "NUMA balancing", facts.files.numa_balancing
    if not facts.amd_linux or facts.gpu_count < 2 or facts.unified:
        return
    if value is None:
        yield unrecorded(name)
    elif value:
        yield Finding(name, "warning", "on", "the kernel moves pages between sockets while several GPUs use them",
                      "sudo sysctl kernel.numa_balancing=0")  # fmt: skip
    else:
        yield Finding(name, "ok", "off")


def system_files(facts: Facts) -> Iterator[Finding]:
    """Files with unexpected content."""
    if facts.files.unreadable:
        yield Finding("system files", "warning", f"cannot read {', '.join(facts.files.unreadable)}",
                      "the copy may be incomplete or changed; the checks above ignore these files",
                      "record it again: rocm-ext doctor --save DIR")  # fmt: skip


CHECKS = (platform, hardware_profile, gpu_driver, device_files, kernel, kernel_parameters, firmware, numa_balancing,
          system_files)  # fmt: skip
