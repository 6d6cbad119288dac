"""Checks of the software: torch, packages, variables, canaries, sandbox and disk.

A check returns its finding; None, where it does not apply. A check of several things yields its findings.
"""

from collections.abc import Iterator

from rocm_ext.base.packages import wrong_pins
from rocm_ext.machine.budget import gib
from rocm_ext.machine.doctor.facts import Facts
from rocm_ext.machine.doctor.hardware import within_limits
from rocm_ext.machine.doctor.recorded import Finding, Level, error, ok, unrecorded, warning
from rocm_ext.machine.environment import (
    ALLOCATOR_VARIABLES,
    environment_conflicts,
    environment_for,
    missing,
)
from rocm_ext.machine.profile import bad_build
from rocm_ext.machine.sysfs import AMD

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
_CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
_HIP_LOG = 'AMD_LOG_LEVEL=3 python -c "import torch; torch.cuda.init()"'


def torch(facts: Facts) -> Finding:
    """Whether torch can use the GPU: the commonest install error is pip's CUDA or CPU wheel on an AMD machine."""
    recorded, profile = facts.recorded, facts.profile
    if "No module named 'torch'" in recorded.torch_error:
        why = "training needs it"
        if facts.amd:
            why = f"PyPI's torch cannot use the {facts.intended.arch}"
        fix = profile.install if profile and profile.install else "pip install torch"
        return error("torch is not installed", why, fix)
    if recorded.torch_error:
        return error("import torch fails", recorded.torch_error, facts.reinstall)
    if recorded.torch is None:
        return unrecorded()
    if facts.torch.gpus:
        return ok(f"{facts.torch_build}, {facts.machine.gpu_count} x {facts.machine.name}")
    if facts.machine.hidden_by:  # the check of the profile says by what
        return ok(facts.torch_build)
    if facts.amd and profile and not facts.rocm_torch:
        why = f"the GPU is an AMD {facts.intended.arch}: torch computes on the CPU"
        return error(facts.torch_build, why, facts.reinstall)
    return _torch_without_gpu(facts)


def _torch_without_gpu(facts: Facts) -> Finding:
    """The finding of a torch that sees no GPU, although its build could use the machine's."""
    found = f"{facts.torch_build}, sees no GPU"
    if facts.rocm_torch and (facts.machine.wsl or facts.machine.system == "Windows"):
        fix = "install the current Adrenalin driver on Windows; in WSL2 also ROCm for WSL (rocm.docs.amd.com)"
        return error(found, "torch reaches the GPU through Windows' driver", fix)
    if facts.rocm_torch and facts.visible_by and facts.amd:
        settings = ", ".join(f"{name}={facts.environment[name]}" for name in facts.visible_by)
        return error(
            found, f"{settings} selects GPUs that are not here", facts.unset(*facts.visible_by)
        )
    if facts.amd:
        why = f"the {facts.intended.arch} is here: see the rows GPU driver and device files, or ask HIP"
        return error(found, why, _HIP_LOG)
    listed = facts.files.amd_gpus
    if facts.rocm_torch and AMD in facts.files.displays.values() and not listed:
        why = "an AMD GPU is on the bus, but no driver lists it: training runs on the CPU"
        return warning(found, why, "see the row GPU driver")
    if facts.rocm_torch:
        kind = "AMD GPU with a profile" if listed else "AMD GPU"
        return warning(
            found,
            f"no {kind} is here: training runs on the CPU",
            f"pip uninstall -y torch && {_CPU_TORCH}",
        )
    if facts.nvidia:
        fix = "pip uninstall -y torch && pip install torch"
        if facts.torch.build == "cuda":
            fix = "nvidia-smi"
        return warning(found, "an NVIDIA GPU is here, but torch computes on the CPU", fix)
    return ok(facts.torch_build)


def torch_kernels(facts: Facts) -> Finding | None:
    """Whether torch has kernels for the GPU; without them HIP fails with "invalid device function"."""
    machine = facts.machine
    if machine.backend != "rocm":
        return None
    if not machine.native_archs:
        return unrecorded()
    if machine.has_kernels:
        return ok(f"for {machine.arch}")
    levels = {canary.level for canary in facts.recorded.canaries or ()}
    problem = warning if levels == {"ok"} else error
    fix = facts.reinstall if facts.profile else f"install a torch built for {machine.arch}"
    return problem(f"only for {', '.join(machine.native_archs)}", f"none for {machine.arch}", fix)


def torch_build(facts: Facts) -> Finding | None:
    """Whether this build of torch is known to fail."""
    if not facts.rocm_torch or not facts.profile:
        return None
    bad = bad_build(facts.profile, facts.machine)
    if bad is None:
        return None
    return warning(facts.machine.torch, bad.why, bad.fix)


def rocm_version(facts: Facts) -> Finding | None:
    """Whether the profile allows this version of ROCm."""
    if not facts.rocm_torch:
        return None
    return within_limits(facts, "rocm", facts.machine.rocm, facts.reinstall)


def torch_version(facts: Facts) -> Finding | None:
    """Whether the profile allows this version of torch."""
    if not facts.rocm_torch:
        return None
    return within_limits(facts, "torch", facts.machine.torch, facts.reinstall)


def pins(facts: Facts) -> Finding:
    """Whether torchtune and torchao have versions that work together."""
    packages = facts.recorded.packages
    if packages is None or not {"torchtune", "torchao"} <= packages.keys():
        return unrecorded()
    versions = f"{packages['torchtune'] or 'none'}, {packages['torchao'] or 'none'}"
    problem = wrong_pins(packages)
    if not problem:
        return ok(versions)
    why, _, fix = problem.partition(" Fix: ")
    return error(versions, why, fix)


def environment(facts: Facts) -> Iterator[Finding]:
    """The profile's variables, and the user's that conflict with it or cost speed."""
    profile = facts.profile
    environ = facts.environment
    if facts.recorded.environment is None or profile is None:
        yield unrecorded()
        return
    unjudged = set(environ)
    for conflict in environment_conflicts(profile, facts.intended, environ):
        unjudged.difference_update(conflict.variables)
        level: Level = "error" if conflict.fatal else "warning"
        fix = facts.unset(*conflict.variables)
        yield Finding(" ".join(conflict.variables), level, conflict.setting, conflict.why, fix)
    # nothing set by the user
    ours = environment_for(profile, facts.intended, {"WORLD_SIZE": str(facts.gpu_count)})
    unset = missing(profile, environ)
    for name, variable in ours.items():
        if name in unset:
            yield Finding(name, "ok", f"not set; the recipe sets {variable.value}", variable.reason)
    for name in sorted(unjudged):
        value = environ[name]
        if name in ours and value != ours[name].value and name not in ALLOCATOR_VARIABLES:
            found = f"{value or 'empty'}; the recipe would set {ours[name].value}"
            yield Finding(name, "warning", found, ours[name].reason, facts.unset(name))
        elif why := _cost_of_variable(name, value, profile.name):
            yield Finding(name, "warning", value, why, facts.unset(name))
        else:
            yield Finding(name, "ok", value or "empty")
    if not ours and not environ:
        yield ok("no variable that matters is set")


def _cost_of_variable(name: str, value: str, profile: str) -> str:
    """How a user's variable makes runs slow; empty if it does not."""
    if name in DEBUGGING and value not in ("", "0"):
        return f"slow: {DEBUGGING[name]}"
    if name == "PYTORCH_TUNABLEOP_ENABLED" and value == "1" and profile != "mi300x":
        return "it helps where shapes are fixed; rows of all lengths make it tune all the time"
    return ""


def canaries(facts: Facts) -> Iterator[Finding]:
    """The canaries of :mod:`rocm_ext.machine.numerics`."""
    if facts.recorded.canaries is None:
        unusable = facts.recorded.torch and not facts.machine.arch
        yield unrecorded("torch cannot use the GPU" if unusable else "")
        return
    for canary in facts.recorded.canaries:
        name = canary.check.replace("fused attention", "attention")
        if not name.startswith(("attention", "canaries")):
            name = f"canary: {name}"
        yield Finding(name, canary.level, canary.found, canary.why, canary.fix)


def blas(facts: Facts) -> Finding:
    """The library of matrix products: torch and rocBLAS choose between rocBLAS and hipBLASLt, independently."""
    library = facts.recorded.blas
    if not library:
        return unrecorded()
    if library != "hipBLASLt":
        return ok(library)
    if facts.environment.get("TORCH_BLAS_PREFER_HIPBLASLT") == "0":
        why = "this torch ignores TORCH_BLAS_PREFER_HIPBLASLT=0 (pytorch#174377)"
        fix = 'install a newer torch, or call torch.backends.cuda.preferred_blas_library("cublas") first'
        return warning(library, why, fix)
    if facts.environment.get("ROCBLAS_USE_HIPBLASLT") == "0":
        why = "ROCBLAS_USE_HIPBLASLT=0 tells rocBLAS only, and torch does not ask rocBLAS"
        return warning(library, why, facts.export("TORCH_BLAS_PREFER_HIPBLASLT", "0"))
    return ok(library)


def sandbox(facts: Facts) -> Finding | None:
    """Whether bubblewrap works."""
    recorded = facts.recorded
    if facts.machine.system != "Linux":
        return None
    if recorded.commands is not None and "bwrap" not in recorded.commands:
        fix = facts.distribution.install("bubblewrap")
        return warning("bubblewrap is not installed", "RAFT runs model-written code in it", fix)
    if recorded.sandbox is None:
        return unrecorded()
    if not recorded.sandbox.works:
        why, _, fix = recorded.sandbox.found.partition("; ")
        return warning(
            "bubblewrap does not work here", f"{why}. RAFT runs model-written code in it", fix
        )
    if recorded.sandbox.found:
        return ok(f"bubblewrap works: {recorded.sandbox.found}")
    return ok("bubblewrap works")


def compiler(facts: Facts) -> Finding | None:
    """Whether Triton has a C compiler; verifiers of compiled languages name theirs themselves."""
    profile = facts.profile
    commands = facts.recorded.commands
    if not profile or profile.settings.get("compile") is not True:
        return None
    if commands is None:
        return unrecorded()
    installed = [name for name in COMPILERS if name in commands]
    if installed:
        return ok(", ".join(installed))
    why = f"{profile.name} sets compile: True, and Triton needs one"
    return warning("none", why, facts.distribution.install("gcc"))


def disk(facts: Facts) -> Iterator[Finding]:
    """Free space for outputs and downloads."""
    if facts.recorded.disk_free is None:
        yield unrecorded()
        return
    for folder, free in facts.recorded.disk_free.items():
        name = f"disk: {folder}"
        found = f"{gib(free)} free"
        enough, least = DISK.get(folder, (0, 0))
        if free >= enough:
            yield Finding(name, "ok", found)
            continue
        level: Level = "error" if free < least else "warning"
        fix = "output_dir=/a/larger/disk"
        if folder != "current folder":
            fix = facts.export("HF_HOME", "/a/larger/disk")
        yield Finding(name, level, found, "a 7B model in bf16 takes 15 GB", fix)
