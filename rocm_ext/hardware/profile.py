"""Profiles: what each machine needs, one YAML file of ``recipe_configs/hardware`` each."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rocm_ext.errors import UserError
from rocm_ext.hardware.machine import Machine, is_unified, parse_version

# When a profile's variable is set; rocm_ext.hardware.environment decides
_WHEN = ("always", "arch_missing", "several_ranks")
_NOT_RECIPE_KEYS = {"quantize_base"}  # what a lock may name besides recipe keys


@dataclass(frozen=True)
class Lock:
    value: Any
    reason: str
    also: tuple[Any, ...] = ()  # other values that work


@dataclass(frozen=True)
class Variable:
    value: str
    reason: str
    when: str = "always"  # one of _WHEN


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
        if unknown := {variable.when for variable in variables.values()} - set(_WHEN):
            raise UserError(f"hardware profile {name}: when is {' or '.join(_WHEN)}; found {unknown}")
        if profile.memory.get("of") not in ("host", "device", "unified"):
            raise UserError(f"hardware profile {name}: memory.of must be host, device or unified")
        return profile

    def is_for(self, arch: str | None) -> bool:
        """Whether the profile names this architecture, or names none."""
        return arch in self.match.get("arch", (arch,))

    def fits(self, machine: Machine) -> bool:
        return (
            self.match.get("backend", machine.backend) == machine.backend
            and self.is_for(machine.arch)
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


def intended_machine(machine: Machine) -> tuple[Machine, Profile | None]:
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
    usable, profile = intended_machine(machine)
    if profile is None or usable.backend == machine.backend:
        return None
    if machine.torch_build != "rocm":
        kind = {"cuda": "CUDA", "cpu": "CPU"}[machine.torch_build]
        return (
            f"found an AMD GPU ({usable.arch}), but torch {machine.torch} is a {kind} build; "
            f"install it with: {reinstall_command(profile, machine)}"
        )
    if machine.hidden_by:
        return f"{machine.hidden_by} hides the AMD GPU ({usable.arch})"
    return (
        f"found an AMD GPU ({usable.arch}), but torch {machine.torch} sees none: this user must be able to read "
        "and write /dev/kfd and /dev/dri/renderD* (groups render and video)"
    )


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
        hint = f"; install it with: {reinstall_command(profile, machine)}" if profile.install else ""
        warnings.append(f"torch {machine.torch} has no kernels for {machine.arch}{hint}")
    return warnings + [f"{found}: {fix}" for found, fix in below_floor(profile, machine).values()]


def reinstall_command(profile: Profile, machine: Machine) -> str:
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
        if not parse_version(have):
            continue
        patched = any(_is_newer_build(have, other) for other in limits.get("also", ()))
        if "min" in limits and parse_version(have) < parse_version(limits["min"]) and not patched:
            outside[what] = (f"{what} {have} is older than {limits['min']}", limits["fix"])
        if "below" in limits and parse_version(have) >= parse_version(limits["below"]):
            outside[what] = (f"{what} {have} is not below {limits['below']}", limits["fix"])
    return outside


def _is_newer_build(kernel: str, other: str) -> bool:
    """Whether a distribution's kernel, 6.14.0-1018-oem, is of the same flavour as ``other`` and not older."""
    builds = [re.fullmatch(r"([0-9.]{1,30})-([0-9]{1,9})-([a-z]+)", name) for name in (kernel, other)]
    have, least = ((parse_version(match[1]), int(match[2]), match[3]) if match else ((), 0, "") for match in builds)
    return bool(have[2]) and have[2] == least[2] and have >= least


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
