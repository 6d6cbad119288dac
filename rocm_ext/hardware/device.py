"""Which machine this is, what it needs (a profile in ``recipe_configs/hardware``) and how much it may use.

A recipe calls ``detect``, ``choose_profile`` or ``load_profile``, ``check_profile``, ``start``,
``check_locked`` and ``open_device``, in this order. Reasons and warnings are returned, for the caller to log
once ``start`` has returned: it may begin the program anew.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from rocm_ext.errors import UserError
from rocm_ext.hardware.machine import Machine, host_memory, installed_gib, is_unified, shared_memory, ttm_module
from rocm_ext.hardware.machine import detect as detect

if TYPE_CHECKING:  # `rocm-ext doctor` reads profiles where torch does not import
    import torch

GIB = 2**30
# One setting under three names: HIP builds of torch read each of them
ALLOCATOR_VARIABLES = ("PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SET_BY_US = "ROCM_EXT_ENVIRONMENT"  # names we have set, comma separated: what `start` must not repeat


# ------------------------------------------------------------------------------------------------- profiles
@dataclass(frozen=True)
class Lock:
    value: Any
    reason: str
    also: tuple[Any, ...] = ()  # other values that work


@dataclass(frozen=True)
class Variable:
    value: str
    reason: str
    when: str = "always"  # a key of _CONDITIONS


def _is_for(profile: Profile, arch: str | None) -> bool:
    return arch in profile.match.get("arch", (arch,))


_CONDITIONS = {
    "always": lambda profile, machine, environ: True,
    # another chip that borrows the profile must not be told to be what it is not
    "arch_missing": lambda profile, machine, environ: not machine.has_kernels and _is_for(profile, machine.arch),
    "several_ranks": lambda profile, machine, environ: int(environ.get("WORLD_SIZE", 1)) > 1,
}
_NOT_RECIPE_KEYS = {"quantize_base"}  # what a lock may name besides recipe keys


@dataclass(frozen=True)
class Profile:
    """One file of ``recipe_configs/hardware``. ``settings`` holds the locked recipe keys too."""

    name: str
    title: str
    memory: dict[str, Any]
    match: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    locked: dict[str, Lock] = field(default_factory=dict)
    environment: dict[str, Variable] = field(default_factory=dict)
    floor: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)  # see rocm_ext.plan.speeds
    bench_config: str = ""  # whose model `rocm-ext bench` trains
    install: str = ""

    @classmethod
    def from_dict(cls, name: str, content: Mapping[str, Any]) -> Profile:
        """Raises :class:`UserError` for keys that a profile does not have, or lacks."""
        try:
            locked = {
                key: Lock(**{**lock, "also": tuple(lock.get("also", ()))})
                for key, lock in content.get("locked", {}).items()
            }
            variables = {key: Variable(**entry) for key, entry in content.get("environment", {}).items()}
            kept = {key: lock.value for key, lock in locked.items() if key not in _NOT_RECIPE_KEYS}
            settings = {**content.get("settings", {}), **kept}
            layers = {"settings": settings, "locked": locked, "environment": variables}
            profile = cls(name, **{**content, **layers})
        except (TypeError, AttributeError) as error:
            raise UserError(f"hardware profile {name}: {error}") from error
        if unknown := {variable.when for variable in variables.values()} - set(_CONDITIONS):
            raise UserError(f"hardware profile {name}: when is {' or '.join(_CONDITIONS)}; found {unknown}")
        if profile.memory.get("of") not in ("host", "device", "unified"):
            raise UserError(f"hardware profile {name}: memory.of must be host, device or unified")
        return profile

    def fits(self, machine: Machine) -> bool:
        return (
            self.match.get("backend", machine.backend) == machine.backend
            and _is_for(self, machine.arch)
            and self.match.get("system", machine.system) == machine.system
        )


@cache
def _folder() -> Path:
    try:
        return Path(str(files("rocm_ext.recipe_configs.hardware")))
    except ModuleNotFoundError:  # a checkout that is not installed
        return Path(__file__).parents[2] / "recipe_configs" / "hardware"


def profile_names() -> list[str]:
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def load_profile(name: str) -> Profile:
    """Read the profile called ``name``, or the file if ``name`` is the path of one that ends in ``.yaml``.

    Raises :class:`UserError` for an unknown name and for a file that is not a profile."""
    path = Path(name) if name.endswith(".yaml") else _folder() / f"{name}.yaml"
    if not path.is_file():
        near = difflib.get_close_matches(name, profile_names(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"hardware={name} is unknown; there are auto, {', '.join(profile_names())}{hint}")
    return Profile.from_dict(path.stem, OmegaConf.to_container(OmegaConf.load(path)))  # type: ignore[arg-type]


def choose_profile(machine: Machine) -> tuple[str, str]:
    """What ``hardware: auto`` means here, and why.

    Raises :class:`UserError` for an AMD GPU that has no profile or that torch cannot use."""
    problem = _unusable_gpu(machine)
    if problem and not machine.hidden_by:
        raise UserError(f"{problem}. To run without the GPU: hardware=cpu")
    if (own := _own_profile(machine)) is None:
        near = nearest_profile(machine)
        what = f"Name the nearest, as in hardware={near}, or" if near != "cpu" else "To run without the GPU:"
        raise UserError(f"found {machine}, for which there is no hardware profile. {what} hardware=cpu")
    if machine.backend != "cpu":
        return own.name, f"found {machine}"
    if machine.hidden_by:
        return own.name, f"{machine.hidden_by} hides all GPUs"
    if machine.amd_archs:  # an integrated GPU nobody trains on must not stop a CPU run
        return own.name, f"{', '.join(machine.amd_archs)} has no hardware profile, and torch cannot use it"
    return own.name, "no GPU found"


def _own_profile(machine: Machine) -> Profile | None:
    return next((profile for profile in map(load_profile, profile_names()) if profile.fits(machine)), None)


def has_profile(machine: Machine, arch: str) -> bool:
    """Whether there is a profile for another AMD GPU of ``machine``."""
    return _own_profile(replace(machine, arch=arch)) is not None


def intended(machine: Machine) -> tuple[Machine, Profile | None]:
    """``machine`` as it is once torch can use its GPU, and the profile that it has then.

    No profile: for the GPU that torch uses there is none."""
    if machine.backend == "cpu":
        for arch in machine.amd_archs:
            usable = replace(machine, backend="rocm", arch=arch, unified=is_unified(arch))
            if profile := _own_profile(usable):
                return usable, profile
    return machine, _own_profile(machine)


def nearest_profile(machine: Machine) -> str:
    if machine.unified and (machine.arch or "").startswith("gfx10"):  # two compute units and no bf16
        return "cpu"
    if machine.unified:
        return "strix_halo_windows" if machine.system == "Windows" else "strix_halo"
    if re.match(r"gfx1\d", machine.arch or ""):
        return "radeon"
    return "mi200" if machine.bf16 else "mi50"


def _unusable_gpu(machine: Machine) -> str | None:
    """The commonest install errors: an AMD GPU with a profile is here and torch computes on the CPU."""
    usable, profile = intended(machine)
    if profile is None or usable.backend == machine.backend:
        return None
    if machine.torch_build != "rocm":
        kind = {"cuda": "CUDA", "cpu": "CPU"}[machine.torch_build]
        return (
            f"found an AMD GPU ({usable.arch}), but torch {machine.torch} is a {kind} build; "
            f"install it with: {reinstall(profile, machine)}"
        )
    if machine.hidden_by:
        return f"{machine.hidden_by} hides the AMD GPU ({usable.arch})"
    return (
        f"found an AMD GPU ({usable.arch}), but torch {machine.torch} sees none: this user must be able to read "
        "and write /dev/kfd and /dev/dri/renderD* (groups render and video)"
    )


# --------------------------------------------------------------------------------------------------- checks
def check_profile(profile: Profile, machine: Machine, world_size: int = 1) -> list[str]:
    """Does ``profile`` describe this machine, and do ``world_size`` local ranks fit on it?

    Returns a line for each thing that is older than the profile's floor. Raises :class:`UserError` where the
    profile's GPU is not here, where there are more ranks than GPUs, and for several ranks on Windows."""
    if world_size > 1 and machine.system == "Windows":
        raise UserError(
            f"found {world_size} processes, but on Windows training runs in one process only: "
            "ROCm's builds there have no torch.distributed. Use WSL2 for several GPUs"
        )
    backend = profile.match.get("backend", machine.backend)
    if backend == "cpu":
        return []
    if machine.backend != backend:
        found = _unusable_gpu(machine) or f"found {machine}"
        raise UserError(f"hardware={profile.name} is for {profile.title}; {found}. To run anyway: hardware=cpu")
    if world_size > machine.gpu_count:
        raise UserError(
            f"{world_size} processes need {world_size} GPUs; found {machine}. Use --nproc_per_node {machine.gpu_count}"
        )
    warnings = []
    if not profile.fits(machine):
        if own := _own_profile(machine):
            raise UserError(
                f"hardware={profile.name} is for {profile.title}; found {machine}. "
                f"Use hardware=auto or hardware={own.name}; to run without the GPU: hardware=cpu"
            )
        warnings.append(f"{machine.arch} has no hardware profile of its own: running with {profile.name}'s")
    if not machine.has_kernels:
        hint = f"; install it with: {reinstall(profile, machine)}" if profile.install else ""
        warnings.append(f"torch {machine.torch} has no kernels for {machine.arch}{hint}")
    return warnings + [f"{found}: {fix}" for found, fix in below_floor(profile, machine).values()]


def reinstall(profile: Profile, machine: Machine) -> str:
    """The command that replaces torch. pip alone keeps an installed one, whatever it was built for."""
    then = ";" if machine.system == "Windows" else " &&"
    return f"pip uninstall -y torch{then} {profile.install}"


def below_floor(profile: Profile, machine: Machine) -> dict[str, tuple[str, str]]:
    """What is outside the profile's limits: {"torch", "rocm" or "kernel": (what was found, what to do)}."""
    # WSL's kernel is Microsoft's, and the GPU's driver is on the Windows side
    found = {"torch": machine.torch, "rocm": machine.rocm, "kernel": "" if machine.wsl else machine.kernel}
    outside = {}
    for what, limits in profile.floor.items():
        have = found[what] or ""
        if not version(have):
            continue
        patched = any(_is_newer_build(have, other) for other in limits.get("also", ()))
        if "min" in limits and version(have) < version(limits["min"]) and not patched:
            outside[what] = (f"{what} {have} is older than {limits['min']}", limits["fix"])
        if "below" in limits and version(have) >= version(limits["below"]):
            outside[what] = (f"{what} {have} is not below {limits['below']}", limits["fix"])
    return outside


def _is_newer_build(kernel: str, other: str) -> bool:
    """Whether a distribution's kernel, 6.14.0-1018-oem, is of the same flavour as ``other`` and not older."""
    builds = [re.fullmatch(r"([0-9.]{1,30})-([0-9]{1,9})-([a-z]+)", name) for name in (kernel, other)]
    have, least = ((version(match[1]), int(match[2]), match[3]) if match else ((), 0, "") for match in builds)
    return bool(have[2]) and have[2] == least[2] and have >= least


def version(text: str) -> tuple[int, ...]:
    """``6.18.4-arch1-1`` -> (6, 18, 4); () where there is no number."""
    match = re.match(r"[0-9]{1,9}(\.[0-9]{1,9})*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def check_locked(profile: Profile, settings: Mapping[str, Any], overrides: list[str]) -> list[str]:
    """Refuse ``settings`` that the machine cannot bear, unless the user insists with ``hardware_overrides``.

    Returns a line for each override. Raises :class:`UserError` that names every other offence."""
    refused: list[str] = []
    lines: list[str] = []
    for key, lock in profile.locked.items():
        if key not in settings or settings[key] in (lock.value, *lock.also):
            continue
        wanted = " or ".join(str(value) for value in (lock.value, *lock.also))
        line = f"{key}={settings[key]} on {profile.name}, which wants {wanted}: {lock.reason}"
        (lines if key in overrides else refused).append(line)
    if refused:
        keys = [line.split("=")[0] for line in refused]
        raise UserError(f"{'; '.join(refused)}. To insist: hardware_overrides: [{', '.join(keys)}]")
    lines += [
        f"hardware_overrides: {profile.name} does not lock {key}" for key in overrides if key not in profile.locked
    ]
    return lines


# ---------------------------------------------------------------------------------------------- environment
def environment(profile: Profile, machine: Machine, environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The variables to add to ``environ``: {name: (value, reason)}. What the user has set stays.

    Raises :class:`UserError` where the allocator's variables contradict each other."""
    check_environment(profile, machine, environ)
    taken = set(environ)
    if taken & set(ALLOCATOR_VARIABLES):  # the user configures the allocator, under whichever name
        taken.update(ALLOCATOR_VARIABLES)
    return {
        name: (variable.value, variable.reason)
        for name, variable in profile.environment.items()
        if name not in taken and _CONDITIONS[variable.when](profile, machine, environ)
    }


def check_environment(profile: Profile, machine: Machine, environ: Mapping[str, str]) -> list[str]:
    """Lines about variables in ``environ`` that do no good on an AMD machine.

    Raises :class:`UserError` where the allocator's variables contradict each other."""
    found = environment_conflicts(profile, machine, environ)
    if fatal := next((conflict for conflict in found if conflict.fatal), None):
        raise UserError(str(fatal))
    return [str(conflict) for conflict in found]


@dataclass(frozen=True)
class Conflict:
    """Environment variables that do no good here."""

    variables: tuple[str, ...]  # the ones to unset
    found: str
    why: str
    fatal: bool = False

    def __str__(self) -> str:
        return f"{self.found}: {self.why}. Fix: unset {' '.join(self.variables)}"


def environment_conflicts(profile: Profile, machine: Machine, environ: Mapping[str, str]) -> list[Conflict]:
    """What in ``environ`` is contradictory, dangerous or useless on an AMD machine."""
    if machine.torch_build != "rocm" and profile.match.get("backend") != "rocm":
        return []
    found = _allocator_conflicts(machine, environ)
    override = environ.get("HSA_OVERRIDE_GFX_VERSION")
    if override and machine.native_archs and machine.has_kernels:
        found.append(
            Conflict(
                ("HSA_OVERRIDE_GFX_VERSION",),
                f"HSA_OVERRIDE_GFX_VERSION={override}",
                f"useless at best, as torch has kernels for {machine.arch}",
            )
        )
    if environ.get("ROCR_VISIBLE_DEVICES") and environ.get("HIP_VISIBLE_DEVICES"):
        wanted, other = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
        if machine.system == "Windows":
            wanted, other = other, wanted
        found.append(
            Conflict(
                (other,),
                "ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES are both set",
                f"HIP's numbers count what ROCR left. Set {wanted} only",
            )
        )
    return found


def _allocator_conflicts(machine: Machine, environ: Mapping[str, str]) -> list[Conflict]:
    allocator = {name: environ[name] for name in ALLOCATOR_VARIABLES if environ.get(name)}
    found = []
    if len(set(allocator.values())) > 1:
        what = ", ".join(f"{name}={value}" for name, value in allocator.items())
        why = "they configure the same allocator and differ. Keep one"
        found.append(Conflict(tuple(allocator)[1:], what, why, fatal=True))
    for name, value in allocator.items():
        if not re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE):
            continue
        if "max_split_size_mb" in value:
            found.append(
                Conflict(
                    (name,),
                    f"{name}={value}",
                    "expandable_segments together with max_split_size_mb zeroes live buffers on ROCm (ROCm#6603)",
                    fatal=True,
                )
            )
        elif version(machine.torch) < (2, 11):
            found.append(
                Conflict((name,), f"{name}={value}", "expandable_segments has no effect on ROCm before torch 2.11")
            )
    return found


def start(profile: Profile, machine: Machine) -> list[str]:
    """Call this first in a program: put the profile's environment in place before HIP and torch read theirs.

    They have read it by now, so where a variable has to be added this process is replaced by the very same
    command, once; under torchrun its process id stays. Returns what was set and why, and warnings.
    Raises what :func:`environment` raises."""
    return apply_environment(profile, machine, reexec=True)


def apply_environment(profile: Profile, machine: Machine, reexec: bool = False) -> list[str]:
    """:func:`start` for programs that must not be replaced, such as notebooks.

    Where HIP has already started (:func:`detect` starts it), the returned lines end with the export to run
    before Python. Processes started from here on inherit the variables in any case."""
    before = {name for name in os.environ.get(_SET_BY_US, "").split(",") if name}
    added = environment(profile, machine, os.environ)
    os.environ.update({name: value for name, (value, _) in added.items()})
    ours = before | set(added)
    if added:
        os.environ[_SET_BY_US] = ",".join(sorted(ours))
    if reexec and added.keys() - before and _can_repeat():
        _repeat_command()
    lines = check_environment(profile, machine, os.environ)
    lines += [
        f"{name}={os.environ[name]} ({variable.reason})"
        for name, variable in profile.environment.items()
        if name in ours & set(os.environ)
    ]
    if added and "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        exports = " ".join(f"{name}={value}" for name, (value, _) in added.items())
        lines.append(f"HIP has already started without these; before starting Python: export {exports}")
    return lines


def _can_repeat() -> bool:
    # an interactive session, or a script that came through stdin and is used up, cannot run again
    return sys.argv[:1] not in ([""], ["-"]) and len(sys.orig_argv) > 1


def _repeat_command() -> None:
    command = [sys.executable, *sys.orig_argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "nt":  # there, exec starts a second process and the shell goes on without waiting
        sys.exit(subprocess.call(command))
    os.execve(sys.executable, command, os.environ)


# --------------------------------------------------------------------------------------------------- memory
def memory_budget(profile: Profile, machine: Machine, root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that one process may take on its device, and why.

    Raises :class:`UserError` where unified memory leaves nothing after the host's share."""
    gtt, vram = shared_memory(root)
    parameters = memory_parameters(machine.kernel, installed_gib(host_memory(root, "MemTotal"), vram), ttm_module(root))
    return budget(profile, machine, host_memory(root, "MemAvailable"), gtt, vram, parameters)


def uses_carve_out(gtt: int | None, vram: int | None) -> bool:
    """Whether an integrated GPU allocates in its carve-out: amdgpu prefers GTT only where that is the larger
    (apu_prefer_gtt; ROCm#6050)."""
    return gtt is not None and vram is not None and vram >= gtt


def budget(
    profile: Profile, machine: Machine, available: int, gtt: int | None, vram: int | None, parameters: str
) -> tuple[int, str]:
    """:func:`memory_budget` with these bytes of available host memory, of host memory that the GPU may map and of its
    carve-out; ``parameters`` are the kernel's that let it map more."""
    kind = profile.memory["of"]
    if kind == "host":
        return available, f"{_gib(available)} of host memory are available"
    if kind == "device":
        fraction = profile.memory["fraction"]
        total = machine.total_memory
        return int(total * fraction), f"{fraction:.0%} of the GPU's {_gib(total)}"

    if uses_carve_out(gtt, vram):  # none of the host's
        return int(0.95 * machine.total_memory), f"95% of the carve-out's {_gib(machine.total_memory)}"
    limits = {"total_memory": machine.total_memory, "MemAvailable": available}
    if gtt is not None:
        limits["GTT"] = gtt
    tightest = min(limits, key=lambda name: limits[name])
    limit = limits[tightest]
    reserve = _host_share(profile, limit)
    if limit <= reserve:
        fix = "Free host memory" if tightest == "MemAvailable" else f"Boot with {parameters}"
        raise UserError(f"unified memory: {tightest} is {_gib(limit)}, the host keeps {_gib(reserve)}. {fix}")
    found = ", ".join(f"{name} {_gib(value)}" for name, value in limits.items())
    return limit - reserve, f"the least of {found}, less {_gib(reserve)} for the host"


def nominal_budget(profile: Profile, memory: int) -> tuple[int, str]:
    """The same for a machine that is not this one, with ``memory`` bytes on its device."""
    if profile.memory["of"] == "device":
        fraction = profile.memory["fraction"]
        return int(memory * fraction), f"{fraction:.0%} of {_gib(memory)}"
    reserve = _host_share(profile, memory)
    return memory - reserve, f"{_gib(memory)} less {_gib(reserve)} for the host"


def _host_share(profile: Profile, memory: int) -> int:
    return int(max(profile.memory["reserve_fraction"] * memory, profile.memory["reserve_gib"] * GIB))


def memory_parameters(kernel: str, gib: int, ttm: str = "ttm") -> str:
    """The kernel parameters that let the GPU of a machine with ``gib`` GiB of unified memory map all of it.
    ``ttm``: :func:`rocm_ext.hardware.machine.ttm_module`.

    Without them it is half (ROCm#5444, ROCm#6004). amdgpu.gttsize is deprecated since 6.16."""
    limit = f"{ttm}.pages_limit={gib * 2**18}"  # of 4 KiB
    if not before_6_16(kernel):
        return limit
    return f"amd_iommu=off amdgpu.gttsize={gib * 1024} {limit}"  # MiB


def before_6_16(kernel: str) -> bool:
    """Whether this kernel wants amd_iommu=off and amdgpu.gttsize; one that is not known is taken for newer."""
    return () < version(kernel) < (6, 16)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def open_device(
    profile: Profile,
    machine: Machine,
    local_rank: int = 0,
    memory_fraction: float | None = None,
    device: str | None = None,
) -> torch.device:
    """The device of this rank, made current and, where that helps, capped.

    ``memory_fraction`` (0 to 1) of the device's memory is the cap. None caps unified memory at
    :func:`memory_budget`, because overcommitting it tends to hang the driver, and leaves discrete memory to
    raise torch's own error. ``device``: "cpu" or "cuda"; None is the profile's.
    Raises :class:`UserError` for a device that is not here and for a fraction that cannot be applied."""
    import torch

    kind = device or profile.settings.get("device", "cpu")
    if memory_fraction is not None and not 0 < memory_fraction <= 1:
        raise UserError(f"memory_fraction={memory_fraction} is not a share: above 0, at most 1")
    if kind == "cpu":
        if memory_fraction is not None:
            raise UserError("memory_fraction caps a GPU's memory; on the CPU leave it null")
        return torch.device("cpu")
    if kind != "cuda" or local_rank >= machine.gpu_count:
        raise UserError(
            f'device={kind} for local rank {local_rank}: found {machine}. "cuda" is any GPU; "cpu" runs everywhere'
        )
    torch.cuda.set_device(local_rank)
    if memory_fraction is None and machine.unified:
        # torch multiplies the fraction with total_memory from 2.10 on, before with what the driver reports
        total = machine.total_memory if version(machine.torch) >= (2, 10) else torch.cuda.mem_get_info()[1]
        memory_fraction = min(1.0, memory_budget(profile, machine)[0] / total)
    if memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(float(memory_fraction), local_rank)
    return torch.device("cuda", local_rank)
