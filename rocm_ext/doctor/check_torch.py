"""torch, what it stands on, and the environment it will run in."""

from collections.abc import Iterator

from rocm_ext import device, registry
from rocm_ext.device import ALLOCATOR_VARIABLES
from rocm_ext.doctor.facts import Facts
from rocm_ext.doctor.rows import Row, unrecorded
from rocm_ext.doctor.system import NVIDIA
from rocm_ext.machine import VISIBLE_VARIABLES

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
    name, torch, profile = "torch", facts.said.torch, facts.profile
    install = (profile.install if profile else "") or "pip install torch"
    if facts.said.torch_error:
        yield Row(name, "error", "import torch fails", facts.said.torch_error, install)
    elif torch is None:
        yield unrecorded(name)
    elif facts.machine.hidden_by and facts.has_gpu:
        yield Row(name, "ok", f"{torch.version}, a {_BUILDS[torch.build]} build")  # "hardware profile" says the rest
    elif facts.amd and torch.build != "rocm":
        yield Row(name, "error", f"{torch.version}, a {_BUILDS[torch.build]} build",
                  f"the GPU is an AMD {facts.fit.arch}: torch computes on the CPU", install)  # fmt: skip
    elif facts.amd and not torch.gpus:
        yield Row(name, "error", f"{torch.version} sees no GPU",
                  f"the {facts.fit.arch} is here: the rows on driver, device files and groups tell why, or HIP itself",
                  'AMD_LOG_LEVEL=3 python -c "import torch; torch.cuda.init()"')  # fmt: skip
    elif torch.build == "rocm" and not torch.gpus:
        yield Row(name, "warning", f"{torch.version}, a ROCm build", "no AMD GPU is here: training runs on the CPU",
                  "pip install torch --index-url https://download.pytorch.org/whl/cpu")  # fmt: skip
    elif not torch.gpus and (facts.files.nvidia or NVIDIA in facts.files.displays.values()):
        why = "an NVIDIA GPU is here, but torch computes on the CPU"
        fix = "nvidia-smi" if torch.build == "cuda" else "pip install --force-reinstall torch"
        yield Row(name, "warning", f"{torch.version}, a {_BUILDS[torch.build]} build", why, fix)
    else:
        gpus = f", {facts.machine.gpu_count} x {facts.machine.name}" if torch.gpus else ""
        yield Row(name, "ok", f"{torch.version}, a {_BUILDS[torch.build]} build{gpus}")


_BUILDS = {"rocm": "ROCm", "cuda": "CUDA", "cpu": "CPU"}


def torch_kernels(facts: Facts) -> Iterator[Row]:
    """Without kernels for the GPU, HIP says: invalid device function."""
    name, machine, torch = "torch kernels", facts.machine, facts.said.torch
    if machine.backend != "rocm" or torch is None or facts.profile is None:
        return
    if not torch.kernels:
        yield unrecorded(name)
    elif machine.has_kernels:
        yield Row(name, "ok", f"for {machine.arch}")
    else:
        works = facts.said.canaries and all(row.level == "ok" for row in facts.said.canaries)
        yield Row(name, "warning" if works else "error", f"only for {', '.join(torch.kernels)}",
                  f"none for {machine.arch}", facts.profile.install)  # fmt: skip


def limits(facts: Facts) -> Iterator[Row]:
    """The profile's floors and ceilings for torch and ROCm."""
    machine, profile = facts.machine, facts.profile
    if profile is None or facts.said.torch is None or machine.torch_build != "rocm":
        return
    outside = device.below_floor(profile, machine)
    for what, found, name in (("rocm", machine.rocm, "ROCm"), ("torch", machine.torch, "torch version")):
        if what not in profile.floor:
            continue
        if not found:
            yield unrecorded(name)
        elif what in outside:
            yield Row(name, "warning", found, ": ".join(outside[what]), profile.install)
        else:
            yield Row(name, "ok", found)


def missing_gpus(facts: Facts) -> Iterator[Row]:
    listed = facts.files.amd_gpus.count(facts.fit.arch or "")
    chosen = [name for name in VISIBLE_VARIABLES if facts.environment.get(name)]
    if facts.machine.backend == "rocm" and facts.machine.gpu_count < listed:
        yield Row("GPU count", "ok" if chosen else "warning", f"torch sees {facts.machine.gpu_count} of {listed}",
                  f"{chosen[0]} chooses them" if chosen else "one has failed, or its device file is closed",
                  "" if chosen else "sudo dmesg | grep -i amdgpu")  # fmt: skip


def pins(facts: Facts) -> Iterator[Row]:
    name, packages = "torchtune, torchao", facts.said.packages
    if packages is None:
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
    conflicts = device.environment_conflicts(profile, facts.fit, environ)
    named = {name for conflict in conflicts for name in conflict.variables}
    for conflict in conflicts:
        yield Row(" ".join(conflict.variables), "error" if conflict.fatal else "warning", conflict.found,
                  conflict.why, facts.unset(*conflict.variables))  # fmt: skip
    ranks = {"WORLD_SIZE": str(facts.gpu_count)}
    ours = {} if any(c.fatal for c in conflicts) else device.environment(profile, facts.fit, {**environ, **ranks})
    for name, (value, why) in ours.items():
        yield Row(name, "ok", f"not set; the recipe sets {value}", why)
    for name in sorted(environ.keys() - named):
        yield from _variable(facts, name, environ[name])


def _variable(facts: Facts, name: str, value: str) -> Iterator[Row]:
    assert facts.profile
    wanted = facts.profile.environment.get(name)
    if wanted and value != wanted.value and name not in ALLOCATOR_VARIABLES:
        yield Row(name, "warning", f"{value}; the recipe would set {wanted.value}", wanted.reason, facts.unset(name))
    elif name in DEBUGGING and value not in ("", "0"):
        yield Row(name, "warning", value, f"slow: {DEBUGGING[name]}", facts.unset(name))
    elif name == "PYTORCH_TUNABLEOP_ENABLED" and value == "1" and facts.profile.name != "mi300x":
        why = "pays where shapes are fixed; with rows of all lengths it tunes all the time"
        yield Row(name, "warning", value, why, facts.unset(name))
    else:
        yield Row(name, "ok", value or "empty")


def numerics(facts: Facts) -> Iterator[Row]:
    """The canaries, among them which attention kernels answer; and the BLAS library."""
    if facts.said.torch is None and not facts.said.canaries:
        yield unrecorded("canaries")
        return
    if facts.said.canaries is None:
        yield unrecorded("canaries")
    for row in facts.said.canaries or ():
        yield Row(f"canary: {row.check}", row.level, row.found, row.why, row.fix)
    yield Row("BLAS", "ok", facts.said.blas) if facts.said.blas else unrecorded("BLAS")


CHECKS = (torch_build, torch_kernels, limits, missing_gpus, pins, environment, numerics)
