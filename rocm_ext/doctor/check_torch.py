"""torch, what it stands on, and the environment it will run in."""

from collections.abc import Iterator, Mapping

from rocm_ext import registry
from rocm_ext.doctor.facts import Facts
from rocm_ext.doctor.rows import Row, unrecorded
from rocm_ext.doctor.system import AMD, NVIDIA
from rocm_ext.hardware.environment import ALLOCATOR_VARIABLES, environment_conflicts, environment_for
from rocm_ext.hardware.machine import VISIBLE_VARIABLES, Torch
from rocm_ext.hardware.profile import below_floor, reinstall_command

# What is good for finding errors and bad for speed
DEBUGGING = {
    "HIP_LAUNCH_BLOCKING": "every kernel waits for the one before",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before",
    "AMD_SERIALIZE_KERNEL": "every kernel waits for the one before",
    "AMD_SERIALIZE_COPY": "every copy waits for the one before",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor asks the driver for memory",
    "PYTORCH_NO_HIP_MEMORY_CACHING": "every tensor asks the driver for memory",
}


def torch_build(facts: Facts) -> Iterator[Row]:
    """The commonest install error is pip's CUDA or CPU wheel on an AMD machine."""
    name, torch, profile = "torch", facts.said.torch, facts.profile
    if facts.said.torch_error:
        install = reinstall_command(profile, facts.machine) if profile and profile.install else "pip install torch"
        yield Row(name, "error", "import torch fails", facts.said.torch_error, install)
        return
    if torch is None:
        yield unrecorded(name)
        return
    found = f"{torch.version}, a {_BUILDS[torch.build]} build"
    if torch.gpus:
        yield Row(name, "ok", f"{found}, {facts.machine.gpu_count} x {facts.machine.name}")
    elif facts.machine.hidden_by:
        yield Row(name, "ok", found)  # another row says that the GPUs are hidden
    else:
        yield _without_gpu(facts, torch, found)


_BUILDS = {"rocm": "ROCm", "cuda": "CUDA", "cpu": "CPU"}


def _without_gpu(facts: Facts, torch: Torch, found: str) -> Row:
    name, found_none = "torch", f"{found}, sees no GPU"
    if facts.amd and facts.profile and torch.build != "rocm":
        why = f"the GPU is an AMD {facts.fit.arch}: torch computes on the CPU"
        return Row(name, "error", found, why, reinstall_command(facts.profile, facts.machine))
    if torch.build == "rocm" and (facts.machine.wsl or facts.machine.system == "Windows"):
        fix = "install the current Adrenalin driver on Windows; in WSL2 also ROCm for WSL (rocm.docs.amd.com)"
        return Row(name, "error", found_none, "it reaches the GPU through Windows' driver", fix)
    chosen = [name for name in VISIBLE_VARIABLES if facts.environment.get(name)]
    if torch.build == "rocm" and chosen and facts.amd:
        told = ", ".join(f"{name}={facts.environment[name]}" for name in chosen)
        return Row(name, "error", found_none, f"{told} chooses GPUs that are not here", facts.unset(*chosen))
    if facts.amd:
        why = f"the {facts.fit.arch} is here: the rows on driver, device files and groups tell why, or HIP itself"
        return Row(name, "error", found_none, why, 'AMD_LOG_LEVEL=3 python -c "import torch; torch.cuda.init()"')
    if torch.build == "rocm" and AMD in facts.files.displays.values() and not facts.files.amd_gpus:
        why = "an AMD GPU is on the bus, but no driver shows it: training runs on the CPU"
        return Row(name, "warning", found_none, why, "see the row GPU driver")
    if torch.build == "rocm":
        cpu = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
        why = f"no AMD GPU {'with a profile ' if facts.files.amd_gpus else ''}is here: training runs on the CPU"
        return Row(name, "warning", found_none, why, f"pip uninstall -y torch && {cpu}")
    if facts.files.nvidia or NVIDIA in facts.files.displays.values():
        fix = "nvidia-smi" if torch.build == "cuda" else "pip uninstall -y torch && pip install torch"
        return Row(name, "warning", found_none, "an NVIDIA GPU is here, but torch computes on the CPU", fix)
    return Row(name, "ok", found)


def torch_kernels(facts: Facts) -> Iterator[Row]:
    """Without kernels for the GPU, HIP says: invalid device function."""
    name, machine, torch = "torch kernels", facts.machine, facts.said.torch
    if machine.backend != "rocm" or torch is None:
        return
    if not torch.kernels:
        yield unrecorded(name)
    elif machine.has_kernels:
        yield Row(name, "ok", f"for {machine.arch}")
    else:
        works = facts.said.canaries and all(row.level == "ok" for row in facts.said.canaries)
        fix = (
            reinstall_command(facts.profile, machine) if facts.profile else f"install a torch built for {machine.arch}"
        )
        yield Row(name, "warning" if works else "error", f"only for {', '.join(torch.kernels)}",
                  f"none for {machine.arch}", fix)  # fmt: skip


def limits(facts: Facts) -> Iterator[Row]:
    """The profile's floors and ceilings for torch and ROCm."""
    machine, profile = facts.machine, facts.profile
    if profile is None or facts.said.torch is None or machine.torch_build != "rocm":
        return
    outside = below_floor(profile, machine)
    for what, found, name in (("rocm", machine.rocm, "ROCm"), ("torch", machine.torch, "torch version")):
        if what not in profile.floor:
            continue
        if not found:
            yield unrecorded(name)
        elif what in outside:
            yield Row(name, "warning", found, ": ".join(outside[what]), reinstall_command(profile, machine))
        else:
            yield Row(name, "ok", found)


def missing_gpus(facts: Facts) -> Iterator[Row]:
    """Fewer in KFD or torch than in /sys/class/drm or on the bus."""
    name, listed, here = "GPU count", facts.files.amd_gpus.count(facts.fit.arch or ""), facts.installed_gpus
    seen = facts.machine.gpu_count if facts.machine.backend == "rocm" else listed
    chosen = [name for name in VISIBLE_VARIABLES if facts.environment.get(name)]
    if not facts.amd or not 0 < seen < here:
        return
    if seen == listed or not chosen:
        what = "torch sees" if facts.machine.backend == "rocm" else "KFD lists"
        yield Row(name, "warning", f"{what} {seen} of {here}", "one has failed, or its device file is closed",
                  "sudo dmesg | grep -i amdgpu")  # fmt: skip
    else:
        yield Row(name, "ok", f"torch sees {seen} of {here}", f"{chosen[0]} chooses them")


def unlike_gpus(facts: Facts) -> Iterator[Row]:
    """Ranks cannot mix them, and AMD's notes on Radeon tell of crashes beside an integrated GPU."""
    kinds = [gpu.kind for gpu in facts.said.torch.gpus] if facts.said.torch else []
    others = [kind for kind in kinds if kind != kinds[0]]
    if facts.machine.backend == "rocm" and facts.profile and others:  # without a profile another row says it
        yield Row("other GPUs", "warning", f"torch also sees {', '.join(others)}", "processes cannot share out unlike "
                  "GPUs, and ROCm is known to crash beside an integrated one", facts.choose_gpus(kinds[0]))  # fmt: skip


def pins(facts: Facts) -> Iterator[Row]:
    name, packages = "torchtune, torchao", facts.said.packages
    if packages is None or not {"torchtune", "torchao"} <= packages.keys():
        yield unrecorded(name)
        return
    found = ", ".join(packages.get(name) or "none" for name in ("torchtune", "torchao"))
    if problem := registry.wrong_pins(packages):
        why, _, fix = problem.partition(" Fix: ")
        yield Row(name, "error", found, why, fix)
    else:
        yield Row(name, "ok", found)


def environment(facts: Facts) -> Iterator[Row]:
    profile, environ = facts.profile, facts.environment
    if facts.said.environment is None or profile is None:
        yield unrecorded("environment")
        return
    conflicts = environment_conflicts(profile, facts.fit, environ)
    named = {name for conflict in conflicts for name in conflict.variables}
    for conflict in conflicts:
        yield Row(" ".join(conflict.variables), "error" if conflict.fatal else "warning", conflict.found,
                  conflict.why, facts.unset(*conflict.variables))  # fmt: skip
    alone = environment_for(profile, facts.fit, {"WORLD_SIZE": str(facts.gpu_count)})  # nothing set by the user
    taken = {*environ, *(ALLOCATOR_VARIABLES if environ.keys() & set(ALLOCATOR_VARIABLES) else ())}
    for name, (value, why) in alone.items():
        if name not in taken:
            yield Row(name, "ok", f"not set; the recipe sets {value}", why)
    for name in sorted(environ.keys() - named):
        yield _variable(facts, name, environ[name], alone)
    if not (alone or environ):
        yield Row("environment", "ok", "nothing is set that matters here")


def _variable(facts: Facts, name: str, value: str, alone: Mapping[str, tuple[str, str]]) -> Row:
    wanted, why = alone.get(name, (value, ""))
    if value != wanted and name not in ALLOCATOR_VARIABLES:
        return Row(name, "warning", f"{value}; the recipe would set {wanted}", why, facts.unset(name))
    if name in DEBUGGING and value not in ("", "0"):
        return Row(name, "warning", value, f"slow: {DEBUGGING[name]}", facts.unset(name))
    if name == "PYTORCH_TUNABLEOP_ENABLED" and value == "1" and facts.profile and facts.profile.name != "mi300x":
        why = "pays where shapes are fixed; with rows of all lengths it tunes all the time"
        return Row(name, "warning", value, why, facts.unset(name))
    return Row(name, "ok", value or "empty")


def numerics(facts: Facts) -> Iterator[Row]:
    """The canaries, among them which attention kernels answer; and the BLAS library."""
    if facts.said.canaries is None:
        yield unrecorded("canaries", "torch cannot use the GPU" if facts.said.torch and not facts.machine.arch else "")
    for row in facts.said.canaries or ():
        own = row.check.replace("fused attention", "attention")
        name = own if own.startswith(("attention", "canaries")) else f"canary: {own}"
        yield Row(name, row.level, row.found, row.why, row.fix)
    yield Row("BLAS", "ok", facts.said.blas) if facts.said.blas else unrecorded("BLAS")


CHECKS = (torch_build, torch_kernels, limits, missing_gpus, unlike_gpus, pins, environment, numerics)
