"""Hardware profiles: the settings that a kind of machine needs. Their files are in ``recipe_configs/hardware``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf

from rocm_ext.base.errors import UserError, nearest, one_line
from rocm_ext.base.nested import parse
from rocm_ext.base.types import Config
from rocm_ext.machine.detect import UNIFIED, Machine, parse_version

# Values of the keys that choose among kernels
ATTENTION = ("auto", "flash", "efficient", "math", "eager")
# torch's mode max-autotune also captures CUDA graphs, which fail with checkpointed layers (pytorch#148829) and with
# gradient accumulation (pytorch#96693). Here it means max-autotune-no-cudagraphs.
COMPILE = (False, True, "max-autotune")

_NOT_RECIPE_KEYS = {"quantize_base"}  # keys that a profile may lock although no recipe has them
_MEMORY_KEYS = {"host": (), "device": ("fraction",), "unified": ("fraction", "host_gib", "host_fraction")}
_REACHED = ("compute", "bandwidth", "attention", "launch")
_MAKERS_WORDS = re.compile("(amd|nvidia|instinct|radeon|geforce|tesla|rtx|rx|ai|pro)+")
_SAYS_NOTHING = ("", "graphics", "unknown")  # "AMD Radeon Graphics" is any Radeon
# What torch adds to the name of a chip as sold: "H100 80GB HBM3", "MI250X/MI250", "MI300X VF"
_ADDED = r"(\d+gb|hbm\d?e?|sxm\d?|oam|pcie|vf|hf|mi\d+x?|graphics|dualslot|(workstation|server)edition)*"


@dataclass(frozen=True)
class Lock:
    """A setting that the user can change only with ``hardware_overrides``."""

    value: Any
    reason: str
    also: tuple[Any, ...] = ()  # other values that work


@dataclass(frozen=True)
class Variable:
    """An environment variable that the machine needs."""

    value: str
    reason: str
    when: Literal["always", "arch_missing", "several_ranks"] = "always"  # see rocm_ext.machine.environment


@dataclass(frozen=True)
class BadBuild:
    """A build of torch that is known to fail on the profile's machines.

    Attributes:
        torch: the version or its first parts, as in 2.12.0+rocm7.14.
        why: the failure and its source.
        fix: advice for the user.
        arch: architectures that fail; empty: all of the profile's.
    """

    torch: str
    why: str
    fix: str
    arch: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chip:
    """The data sheet of one GPU as sold.

    Attributes:
        arch: the architecture, as in :class:`rocm_ext.machine.detect.Machine`.
        memory: GiB.
        bandwidth: memory bandwidth, GB/s.
        fp32, fp16, bf16: TFLOPS of dense matrix products; None: not computed natively.
        link: GB/s that a GPU receives from the machine's other GPUs; None: unknown.
        also: further names, such as torch's.
        reached: shares of the data sheet where they differ from the profile's.
    """

    arch: str
    memory: float
    bandwidth: float
    fp32: float
    fp16: float | None = None
    bf16: float | None = None
    link: float | None = None
    also: tuple[str, ...] = ()
    reached: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """One file of ``recipe_configs/hardware``.

    Attributes:
        name: name of the file without ``.yaml``.
        title: description of the machines.
        memory: ``of`` names the memory that a run uses (host, device or unified), the other keys limit its use.
        match: backend, arch (a list) and system of the machines that get this profile from ``hardware: auto``.
        settings: recipe keys and their values, including the locked ones.
        locked: settings that other values would break.
        environment: variables to set before torch starts.
        floor: limits for the versions of torch, rocm and kernel: min, below, also and fix.
        bad_builds: builds of torch within these limits that fail here.
        chips: data sheets by the GPU's name; the first chip of an architecture represents it.
        reached: shares of a data sheet that :mod:`rocm_ext.plan.speeds` assumes: compute, bandwidth and attention (of
            compute); and launch, the microseconds in which the host starts a kernel.
        bench_config: the config whose model ``rocm-ext bench`` trains.
        install: the command that installs torch for this machine.
    """

    name: str
    title: str
    memory: Config
    match: Config = field(default_factory=dict)
    settings: Config = field(default_factory=dict)
    locked: dict[str, Lock] = field(default_factory=dict)
    environment: dict[str, Variable] = field(default_factory=dict)
    floor: dict[str, Config] = field(default_factory=dict)
    bad_builds: tuple[BadBuild, ...] = ()
    chips: dict[str, Chip] = field(default_factory=dict)
    reached: dict[str, float] = field(default_factory=dict)
    bench_config: str = ""
    install: str = ""

    @classmethod
    def from_dict(cls, name: str, content: Any) -> Profile:
        """Check the content of a profile's file.

        Raises:
            UserError: a key is unknown or missing, or a value has the wrong type.
        """
        where = f"hardware profile {name}"
        profile = parse(cls, {"name": name, **content} if isinstance(content, Mapping) else content, where)
        if (of := profile.memory.get("of")) not in tuple(_MEMORY_KEYS):
            raise UserError(f"{where}.memory.of is {of!r}, expected {' or '.join(_MEMORY_KEYS)}")
        for key in _MEMORY_KEYS[of]:
            parse(float, profile.memory.get(key), f"{where}.memory.{key}")
        for chip, sheet in profile.chips.items():
            if missing := [key for key in _REACHED if key not in profile.reached | sheet.reached]:
                raise UserError(f"{where}.reached lacks {', '.join(missing)}, which plans for {chip} need")
        locked = {key: lock.value for key, lock in profile.locked.items() if key not in _NOT_RECIPE_KEYS}
        return replace(profile, settings={**profile.settings, **locked})

    def is_for(self, arch: str | None) -> bool:
        """Whether the profile is for this architecture; without ``arch`` it is for all."""
        return arch in self.match.get("arch", (arch,))

    def fits(self, machine: Machine) -> bool:
        """Whether ``hardware: auto`` gives ``machine`` this profile."""
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
    """The names of this library's profiles, sorted."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def load_profile(name: str) -> Profile:
    """Read a profile.

    Args:
        name: name of a profile in ``recipe_configs/hardware``, or the path of a file that ends in ``.yaml``.

    Raises:
        UserError: the name is unknown, or the file is not a profile.
    """
    path = Path(name) if name.endswith(".yaml") else _folder() / f"{name}.yaml"
    if not path.is_file():
        near = difflib.get_close_matches(name, profile_names(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"hardware={name} is unknown; there are auto, {', '.join(profile_names())}{hint}")
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except yaml.YAMLError as error:
        raise UserError(f"hardware profile {path} is not YAML: {one_line(error)}") from error
    return Profile.from_dict(path.stem, content)


def choose_profile(machine: Machine) -> tuple[str, str]:
    """Choose the profile for ``hardware: auto``; return its name and the reason.

    Raises:
        UserError: the AMD GPU has no profile, or torch cannot use it.
    """
    problem = _unusable_gpu(machine)
    if problem and not machine.hidden_by:
        raise UserError(f"{problem}. To run without the GPU: hardware=cpu")
    if (profile := profile_of(machine)) is None:
        near = nearest_profile(machine)
        what = f"Name the nearest, as in hardware={near}, or" if near != "cpu" else "To run without the GPU:"
        raise UserError(f"found {machine}, for which there is no hardware profile. {what} hardware=cpu")
    if machine.backend != "cpu":
        return profile.name, f"found {machine}"
    if machine.hidden_by:
        return profile.name, f"{machine.hidden_by} hides all GPUs"
    if machine.amd_archs:  # such as a small integrated GPU
        return profile.name, f"{', '.join(machine.amd_archs)} has no hardware profile, and torch cannot use it"
    return profile.name, "no GPU found"


def profile_of(machine: Machine) -> Profile | None:
    """The profile that ``hardware: auto`` gives ``machine``; None: it has none."""
    return next((profile for profile in map(load_profile, profile_names()) if profile.fits(machine)), None)


def intended_machine(machine: Machine) -> tuple[Machine, Profile | None]:
    """The machine as it will be once torch can use its AMD GPU, and its profile; None: the GPU in use has none."""
    if machine.backend == "cpu":
        for arch in machine.amd_archs:
            usable = replace(machine, backend="rocm", arch=arch, unified=arch in UNIFIED)
            if profile := profile_of(usable):
                return usable, profile
    return machine, profile_of(machine)


def nearest_profile(machine: Machine) -> str:
    """The name of the profile to try on an AMD GPU without a profile."""
    if machine.unified and (machine.arch or "").startswith("gfx10"):  # two compute units and no bf16
        return "cpu"
    if machine.unified:
        return "strix_halo_windows" if machine.system == "Windows" else "strix_halo"
    if re.match(r"gfx125\d", machine.arch or ""):  # CDNA5: Instinct, in spite of its number
        return "mi300x"
    if re.match(r"gfx1\d", machine.arch or ""):
        return "radeon"
    return "mi200" if machine.bf16 else "mi50"


def _unusable_gpu(machine: Machine) -> str | None:
    """Why torch computes on the CPU although an AMD GPU with a profile is here: the commonest install errors."""
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
    """Check that ``profile`` describes this machine and that ``world_size`` local ranks fit on it.

    Returns:
        Warnings: a borrowed profile, missing kernels, and versions outside the profile's limits.

    Raises:
        UserError: the machine lacks the profile's GPU, has fewer GPUs than ranks, or runs several ranks on Windows.
    """
    backend, is_for = profile.match.get("backend", machine.backend), f"hardware={profile.name} is for {profile.title}"
    problem, warnings = "", list[str]()
    if world_size > 1 and machine.system == "Windows":
        problem = (
            f"found {world_size} processes, but on Windows training runs in one process only: "
            "ROCm's builds there have no torch.distributed. Use WSL2 for several GPUs"
        )
    elif backend == "cpu":
        return []
    elif machine.backend != backend:
        problem = f"{is_for}; {_unusable_gpu(machine) or f'found {machine}'}. To run anyway: hardware=cpu"
    elif world_size > machine.gpu_count:
        use = f"--nproc_per_node {machine.gpu_count}"
        problem = f"{world_size} processes need {world_size} GPUs; found {machine}. Use {use}"
    elif not profile.fits(machine) and (right := profile_of(machine)):
        use = f"hardware=auto or hardware={right.name}; to run without the GPU: hardware=cpu"
        problem = f"{is_for}; found {machine}. Use {use}"
    elif not profile.fits(machine):
        warnings.append(f"{machine.arch} has no hardware profile of its own: running with {profile.name}'s")
    if problem:
        raise UserError(problem)
    if not machine.has_kernels:
        hint = f"; install it with: {reinstall_command(profile, machine)}" if profile.install else ""
        warnings.append(f"torch {machine.torch} has no kernels for {machine.arch}{hint}")
    if bad := bad_build(profile, machine):
        warnings.append(f"torch {machine.torch}: {bad.why}. {bad.fix}")
    return warnings + [f"{problem}: {fix}" for problem, fix in below_floor(profile, machine).values()]


def reinstall_command(profile: Profile, machine: Machine) -> str:
    """The command that replaces torch. It uninstalls first: pip keeps an installed torch of any build."""
    then = ";" if machine.system == "Windows" else " &&"
    return f"pip uninstall -y torch{then} {profile.install}"


def below_floor(profile: Profile, machine: Machine) -> dict[str, tuple[str, str]]:
    """The versions outside the profile's limits: {"torch", "rocm" or "kernel": (problem, fix)}."""
    # Microsoft builds WSL's kernel, and the GPU's driver runs on Windows
    versions = {"torch": machine.torch, "rocm": machine.rocm, "kernel": "" if machine.wsl else machine.kernel}
    outside = {}
    for what, limits in profile.floor.items():
        have = versions[what] or ""
        if not parse_version(have):
            continue
        patched = any(_is_newer_build(have, other) for other in limits.get("also", ()))
        if "min" in limits and parse_version(have) < parse_version(limits["min"]) and not patched:
            outside[what] = (f"{what} {have} is older than {limits['min']}", limits["fix"])
        if "below" in limits and parse_version(have) >= parse_version(limits["below"]):
            outside[what] = (f"{what} {have} is not below {limits['below']}", limits["fix"])
    return outside


def bad_build(profile: Profile, machine: Machine) -> BadBuild | None:
    """The known failure of the machine's torch."""
    here = (bad for bad in profile.bad_builds if not bad.arch or machine.arch in bad.arch)
    return next((bad for bad in here if f"{machine.torch}.".startswith(f"{bad.torch}.")), None)


def _is_newer_build(kernel: str, other: str) -> bool:
    """Whether a distribution's kernel (6.14.0-1018-oem) has the flavour of ``other`` (oem) and is at least as new."""
    builds = [re.fullmatch(r"([0-9.]{1,30})-([0-9]{1,9})-([a-z]+)", name) for name in (kernel, other)]
    have, least = ((parse_version(match[1]), int(match[2]), match[3]) if match else ((), 0, "") for match in builds)
    return bool(have[2]) and have[2] == least[2] and have >= least


def check_locked(profile: Profile, settings: Config, overrides: list[str]) -> list[str]:
    """Check ``settings`` against the profile's locks.

    Args:
        profile: the machine's profile.
        settings: recipe keys and their values.
        overrides: keys in ``hardware_overrides``, on which the user insists.

    Returns:
        One line per override.

    Raises:
        UserError: a locked key has another value and is not in ``overrides``; the message names all of them.
    """
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
    needless = [key for key in overrides if key not in profile.locked]
    return lines + [f"hardware_overrides: {profile.name} does not lock {key}" for key in needless]


# ---------------------------------------------------------------------------------------------------- chips
def find_chip(name: str, hardware: str | None = None) -> tuple[str, str]:
    """Find the chip that a user means.

    Args:
        name: name of a chip or an architecture, in any spelling: "MI355X", "rx7900xtx", "AMD Radeon PRO W7900".
        hardware: the chip's profile; None: any.

    Returns:
        The names of the profile and of the chip; the first of several chips with this name.

    Raises:
        UserError: no profile has the chip, or ``hardware`` lacks it.
    """
    short, matches, known, near = _short(name), [], list[str](), []
    for profile in map(load_profile, profile_names()):
        for chip_name, chip in profile.chips.items():
            known += [chip_name, chip.arch]
            names = [_short(known_name) for known_name in (chip_name, *chip.also, chip.arch)]
            if short in names:
                matches.append((profile.name, chip_name))
            if short and any(short in known_name or known_name in short for known_name in names):
                near.append(chip_name)
    if not matches:
        guess = f"; did you mean {', '.join(near[:5])}?" if near else nearest(name, set(known))
        raise UserError(f"--machine {name} is unknown{guess}")
    fitting = [(profile, chip) for profile, chip in matches if hardware in (None, profile)]
    if not fitting:
        raise UserError(f"--machine {name} is hardware={matches[0][0]}, which contradicts hardware={hardware}")
    return fitting[0]


def chips_of(profile: Profile, arch: str | None, name: str | None, memory: int | None = None) -> list[str]:
    """The chips of a profile that a machine may have, the likeliest first.

    Args:
        profile: the machine's profile.
        arch: the machine's architecture.
        name: torch's name of the GPU; it may say no more than "AMD Radeon Graphics".
        memory: bytes of the GPU's memory, to distinguish chips of one name; None: unknown, or shared with the host.

    Returns:
        The chips whose name is in ``name``, else all of the architecture.
    """
    device = _joined(name or "")

    def known_letters(chip_name: str, chip: Chip) -> int:
        return max(len(known) if known in device else 0 for known in map(_short, (chip_name, *chip.also)))

    matched = {key: known_letters(key, chip) for key, chip in profile.chips.items() if chip.arch == arch}
    best = max(matched.values(), default=0)
    likely = [key for key, letters in matched.items() if letters == best]
    return sorted(likely, key=lambda key: abs(profile.chips[key].memory - memory / 2**30) if memory else 0)


def named_chips(profile: Profile, arch: str | None, name: str, memory: int | None = None) -> list[str]:
    """:func:`chips_of` without guesses: empty if ``name`` is another product's, such as "RTX 4090 Laptop GPU"."""
    may, short = chips_of(profile, arch, name, memory), _short(name)

    def has_name(chip_name: str) -> bool:
        names = map(_short, (chip_name, *profile.chips[chip_name].also))
        return any(re.fullmatch(re.escape(known) + _ADDED, short) for known in names)

    return may if short in _SAYS_NOTHING else list(filter(has_name, may))


def _joined(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _short(name: str) -> str:
    """The name without the maker's words before it: 7900xtx for "AMD Radeon RX 7900 XTX"."""
    joined = _joined(name)
    return joined[match.end() :] if (match := _MAKERS_WORDS.match(joined)) else joined
