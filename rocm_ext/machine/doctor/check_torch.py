"""torch, the packages it needs, and its environment."""

from collections.abc import Iterator, Mapping

from rocm_ext.base.pins import wrong_pins
from rocm_ext.machine.detect import VISIBLE_VARIABLES, Torch
from rocm_ext.machine.doctor.facts import Facts
from rocm_ext.machine.doctor.recorded import Finding, unrecorded
from rocm_ext.machine.doctor.system import AMD, NVIDIA
from rocm_ext.machine.environment import ALLOCATOR_VARIABLES, environment_conflicts, environment_for
from rocm_ext.machine.profile import bad_build, below_floor, reinstall_command

# Variables that help to find errors and cost speed
DEBUGGING = {
    "HIP_LAUNCH_BLOCKING": "every kernel waits for the previous one",
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the previous one",
    "AMD_SERIALIZE_KERNEL": "every kernel waits for the previous one",
    "AMD_SERIALIZE_COPY": "every copy waits for the previous one",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor asks the driver for memory",
    "PYTORCH_NO_HIP_MEMORY_CACHING": "every tensor asks the driver for memory",
}

_BLAS_SWITCHES = ("ROCBLAS_USE_HIPBLASLT", "TORCH_BLAS_PREFER_HIPBLASLT")


def torch_build(facts: Facts) -> Iterator[Finding]:
    """The commonest install error is pip's CUDA or CPU wheel on an AMD machine."""
    name, torch, profile = "torch", facts.said.torch, facts.profile
    if "No module named 'torch'" in facts.said.torch_error:
        why = f"PyPI's torch cannot use the {facts.fit.arch}" if facts.amd else "training needs it"
        install = profile.install if profile and profile.install else "pip install torch"
        yield Finding(name, "error", "torch is not installed", why, install)
        return
    if facts.said.torch_error:
        install = reinstall_command(profile, facts.machine) if profile and profile.install else "pip install torch"
        yield Finding(name, "error", "import torch fails", facts.said.torch_error, install)
        return
    if torch is None:
        yield unrecorded(name)
        return
    found = f"{torch.version}, a {_BUILDS[torch.build]} build"
    if torch.gpus:
        yield Finding(name, "ok", f"{found}, {facts.machine.gpu_count} x {facts.machine.name}")
    elif facts.machine.hidden_by:
        yield Finding(name, "ok", found)  # hardware_profile says that the GPUs are hidden
    else:
        yield _without_gpu(facts, torch, found)


_BUILDS = {"rocm": "ROCm", "cuda": "CUDA", "cpu": "CPU"}


def _without_gpu(facts: Facts, torch: Torch, found: str) -> Finding:
    name, found_none = "torch", f"{found}, sees no GPU"
    if facts.amd and facts.profile and torch.build != "rocm":
        why = f"the GPU is an AMD {facts.fit.arch}: torch computes on the CPU"
        return Finding(name, "error", found, why, reinstall_command(facts.profile, facts.machine))
    if torch.build == "rocm" and (facts.machine.wsl or facts.machine.system == "Windows"):
        fix = "install the current Adrenalin driver on Windows; in WSL2 also ROCm for WSL (rocm.docs.amd.com)"
        return Finding(name, "error", found_none, "torch reaches the GPU through Windows' driver", fix)
    chosen = [name for name in VISIBLE_VARIABLES if facts.environment.get(name)]
    if torch.build == "rocm" and chosen and facts.amd:
        told = ", ".join(f"{name}={facts.environment[name]}" for name in chosen)
        return Finding(name, "error", found_none, f"{told} selects GPUs that are not here", facts.unset(*chosen))
    if facts.amd:
        why = f"the {facts.fit.arch} is here: see the rows GPU driver and device files, or ask HIP"
        return Finding(name, "error", found_none, why, 'AMD_LOG_LEVEL=3 python -c "import torch; torch.cuda.init()"')
    if torch.build == "rocm" and AMD in facts.files.displays.values() and not facts.files.amd_gpus:
        why = "an AMD GPU is on the bus, but no driver lists it: training runs on the CPU"
        return Finding(name, "warning", found_none, why, "see the row GPU driver")
    if torch.build == "rocm":
        cpu = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
        why = f"no AMD GPU {'with a profile ' if facts.files.amd_gpus else ''}is here: training runs on the CPU"
        return Finding(name, "warning", found_none, why, f"pip uninstall -y torch && {cpu}")
    if facts.files.nvidia or NVIDIA in facts.files.displays.values():
        fix = "nvidia-smi" if torch.build == "cuda" else "pip uninstall -y torch && pip install torch"
        return Finding(name, "warning", found_none, "an NVIDIA GPU is here, but torch computes on the CPU", fix)
    return Finding(name, "ok", found)


def torch_kernels(facts: Facts) -> Iterator[Finding]:
    """Whether torch has kernels for the GPU; without them HIP fails with "invalid device function"."""
    name, machine, torch = "torch kernels", facts.machine, facts.said.torch
    if machine.backend != "rocm" or torch is None:
        return
    if not torch.kernels:
        yield unrecorded(name)
    elif machine.has_kernels:
        yield Finding(name, "ok", f"for {machine.arch}")
    else:
        works = facts.said.canaries and all(canary.level == "ok" for canary in facts.said.canaries)
        fix = f"install a torch built for {machine.arch}"
        if facts.profile:
            fix = reinstall_command(facts.profile, machine)
        yield Finding(name, "warning" if works else "error", f"only for {', '.join(torch.kernels)}",
                      f"none for {machine.arch}", fix)  # fmt: skip


def limits(facts: Facts) -> Iterator[Finding]:
    """The profile's limits for the versions of torch and ROCm."""
    machine, profile = facts.machine, facts.profile
    if profile is None or facts.said.torch is None or machine.torch_build != "rocm":
        return
    if bad := bad_build(profile, machine):
        yield Finding("torch build", "warning", machine.torch, bad.why, bad.fix)
    outside = below_floor(profile, machine)
    for what, found, name in (("rocm", machine.rocm, "ROCm"), ("torch", machine.torch, "torch version")):
        if what not in profile.floor:
            continue
        if not found:
            yield unrecorded(name)
        elif what in outside:
            yield Finding(name, "warning", found, ": ".join(outside[what]), reinstall_command(profile, machine))
        else:
            yield Finding(name, "ok", found)


def missing_gpus(facts: Facts) -> Iterator[Finding]:
    """Whether KFD or torch lists fewer GPUs than /sys/class/drm or the bus."""
    name, listed, here = "GPU count", facts.files.amd_gpus.count(facts.fit.arch or ""), facts.installed_gpus
    seen = facts.machine.gpu_count if facts.machine.backend == "rocm" else listed
    chosen = [name for name in VISIBLE_VARIABLES if facts.environment.get(name)]
    if not facts.amd or not 0 < seen < here:
        return
    if seen == listed or not chosen:
        what = "torch sees" if facts.machine.backend == "rocm" else "KFD lists"
        why = "a GPU has failed, or this user cannot open its device file"
        yield Finding(name, "warning", f"{what} {seen} of {here}", why, "sudo dmesg | grep -i amdgpu")
    else:
        yield Finding(name, "ok", f"torch sees {seen} of {here}", f"{chosen[0]} selects them")


def unlike_gpus(facts: Facts) -> Iterator[Finding]:
    """GPUs of other kinds: ranks cannot mix them, and AMD's notes on Radeon report crashes beside an integrated GPU."""
    kinds = [gpu.kind for gpu in facts.said.torch.gpus] if facts.said.torch else []
    others = [kind for kind in kinds if kind != kinds[0]]
    if facts.machine.backend == "rocm" and facts.profile and others:  # without a profile, hardware_profile says it
        why = "ranks cannot use different GPUs together, and ROCm is known to crash beside an integrated one"
        yield Finding("other GPUs", "warning", f"torch also sees {', '.join(others)}", why, facts.choose_gpus(kinds[0]))


def pins(facts: Facts) -> Iterator[Finding]:
    """Whether torchtune and torchao have versions that work together."""
    name, packages = "torchtune, torchao", facts.said.packages
    if packages is None or not {"torchtune", "torchao"} <= packages.keys():
        yield unrecorded(name)
        return
    found = ", ".join(packages.get(name) or "none" for name in ("torchtune", "torchao"))
    if problem := wrong_pins(packages):
        why, _, fix = problem.partition(" Fix: ")
        yield Finding(name, "error", found, why, fix)
    else:
        yield Finding(name, "ok", found)


def environment(facts: Facts) -> Iterator[Finding]:
    """The profile's variables, and the user's that conflict with it or cost speed."""
    profile, environ = facts.profile, facts.environment
    if facts.said.environment is None or profile is None:
        yield unrecorded("environment")
        return
    conflicts = list(environment_conflicts(profile, facts.fit, environ))
    named = {name for conflict in conflicts for name in conflict.variables}
    for conflict in conflicts:
        yield Finding(" ".join(conflict.variables), "error" if conflict.fatal else "warning", conflict.setting,
                      conflict.why, facts.unset(*conflict.variables))  # fmt: skip
    alone = environment_for(profile, facts.fit, {"WORLD_SIZE": str(facts.gpu_count)})  # nothing set by the user
    taken = {*environ, *(ALLOCATOR_VARIABLES if environ.keys() & set(ALLOCATOR_VARIABLES) else ())}
    for name, (value, why) in alone.items():
        if name not in taken:
            yield Finding(name, "ok", f"not set; the recipe sets {value}", why)
    for name in sorted(environ.keys() - named):
        yield _variable(facts, name, environ[name], alone)
    if not (alone or environ):
        yield Finding("environment", "ok", "no variable that matters is set")


def _variable(facts: Facts, name: str, value: str, alone: Mapping[str, tuple[str, str]]) -> Finding:
    wanted, why = alone.get(name, (value, ""))
    if value != wanted and name not in ALLOCATOR_VARIABLES:
        return Finding(name, "warning", f"{value}; the recipe would set {wanted}", why, facts.unset(name))
    if name in DEBUGGING and value not in ("", "0"):
        return Finding(name, "warning", value, f"slow: {DEBUGGING[name]}", facts.unset(name))
    if name == "PYTORCH_TUNABLEOP_ENABLED" and value == "1" and facts.profile and facts.profile.name != "mi300x":
        why = "it helps where shapes are fixed; rows of all lengths make it tune all the time"
        return Finding(name, "warning", value, why, facts.unset(name))
    return Finding(name, "ok", value or "empty")


def numerics(facts: Facts) -> Iterator[Finding]:
    """The canaries of :mod:`rocm_ext.machine.numerics`."""
    if facts.said.canaries is None:
        yield unrecorded("canaries", "torch cannot use the GPU" if facts.said.torch and not facts.machine.arch else "")
    for canary in facts.said.canaries or ():
        own = canary.check.replace("fused attention", "attention")
        name = own if own.startswith(("attention", "canaries")) else f"canary: {own}"
        yield Finding(name, canary.level, canary.found, canary.why, canary.fix)


def blas(facts: Facts) -> Iterator[Finding]:
    """The library that torch asks for matrix products. torch and rocBLAS each choose between theirs and hipBLASLt."""
    name, chosen, environ = "BLAS", facts.said.blas, facts.environment
    off = [variable for variable in _BLAS_SWITCHES if environ.get(variable) == "0"]
    if not chosen:
        yield unrecorded(name)
    elif chosen == "hipBLASLt" and _BLAS_SWITCHES[1] in off:
        fix = 'install a newer torch, or call torch.backends.cuda.preferred_blas_library("cublas") first'
        yield Finding(name, "warning", chosen, f"this torch ignores {_BLAS_SWITCHES[1]}=0 (pytorch#174377)", fix)
    elif chosen == "hipBLASLt" and off:
        yield Finding(name, "warning", chosen, f"{off[0]}=0 tells rocBLAS only, and torch does not ask rocBLAS",
                      facts.export(_BLAS_SWITCHES[1], "0"))  # fmt: skip
    else:
        yield Finding(name, "ok", chosen)


CHECKS = (torch_build, torch_kernels, limits, missing_gpus, unlike_gpus, pins, environment, numerics, blas)
