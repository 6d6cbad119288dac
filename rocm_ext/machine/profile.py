"""Hardware profiles: the settings that a kind of machine needs. Their files are in ``recipe_configs/hardware``."""

from __future__ import annotations

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
from rocm_ext.base.structure import parse
from rocm_ext.base.types import Config
from rocm_ext.machine.detect import UNIFIED, Machine, parse_version

# Values of the keys that choose among kernels
ATTENTION = ("auto", "flash", "efficient", "math", "eager")
# torch's mode max-autotune also captures CUDA graphs, which fail with checkpointed layers (pytorch#148829) and with
# gradient accumulation (pytorch#96693). Here it means max-autotune-no-cudagraphs.
COMPILE = (False, True, "max-autotune")

_NOT_RECIPE_KEYS = {"quantize_base"}  # keys that a profile may lock although no recipe has them
_MEMORY_KEYS = {
    "host": (),
    "device": ("fraction",),
    "unified": ("fraction", "host_gib", "host_fraction"),
}
_REACHED = ("compute", "bandwidth", "attention", "launch")
_MAKERS_WORDS = "(amd|nvidia|instinct|radeon|geforce|tesla|rtx|rx|ai|pro)+"
_SAYS_NOTHING = ("", "graphics", "unknown")  # "AMD Radeon Graphics" is any Radeon
# What torch adds to the name of a chip as sold: "H100 80GB HBM3", "MI250X/MI250", "MI300X VF"
_ADDED = (
    r"(\d+gb|hbm\d?e?|sxm\d?|oam|pcie|vf|hf|mi\d+x?|graphics|dualslot|(workstation|server)edition)*"
)


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
    # see rocm_ext.machine.environment
    when: Literal[
        "always", "arch_missing", "several_ranks", "segments_measured", "segments_not_measured"
    ] = "always"


@dataclass(frozen=True)
class BadBuild:
    """A build of torch that is known to fail on the profile's machines.

    Attributes:
        torch: the version or its first parts, as in 2.12.0+rocm7.14.
        why: the failure and its source.
        fix: advice for the user.
        arch: architectures that fail. Without any, all of the profile's.
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
        fp32, fp16, bf16: TFLOPS of dense matrix products, where they are computed natively.
        link: GB/s that a GPU receives from the machine's other GPUs, if they are known.
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
        floor: limits for the versions of torch, rocm and kernel: min, below, also and fix. replaced is the problem of a
            new kernel whose driver lacks gfx1151's fix; with it, the driver decides over the kernel's version.
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
        if isinstance(content, Mapping):
            content = {"name": name, **content}
        profile = parse(cls, content, where)
        kind = profile.memory.get("of")
        if kind not in tuple(_MEMORY_KEYS):
            raise UserError(f"{where}.memory.of is {kind!r}, expected {' or '.join(_MEMORY_KEYS)}")
        for key in _MEMORY_KEYS[kind]:
            parse(float, profile.memory.get(key), f"{where}.memory.{key}")
        for chip, sheet in profile.chips.items():
            missing = [
                key for key in _REACHED if key not in profile.reached and key not in sheet.reached
            ]
            if missing:
                raise UserError(
                    f"{where}.reached lacks {', '.join(missing)}, which plans for {chip} need"
                )
        settings = dict(profile.settings)
        for key, lock in profile.locked.items():
            if key not in _NOT_RECIPE_KEYS:
                settings[key] = lock.value
        return replace(profile, settings=settings)

    def is_for(self, arch: str | None) -> bool:
        """Whether the profile is for this architecture; without ``arch`` it is for all."""
        return arch in self.match.get("arch", (arch,))

    def fits(self, machine: Machine) -> bool:
        """Whether ``hardware: auto`` gives ``machine`` this profile."""
        backend = self.match.get("backend", machine.backend)
        system = self.match.get("system", machine.system)
        on_its_system = (backend, system) == (machine.backend, machine.system)
        return on_its_system and self.is_for(machine.arch)


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
    own = name.endswith(".yaml")
    path = Path(name) if own else _folder() / f"{name}.yaml"
    if not path.is_file():
        raise UserError(f"hardware={name} is unknown{nearest(name, ['auto', *profile_names()])}")
    return _read(path) if own else _shipped(path)


def _read(path: Path) -> Profile:
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except yaml.YAMLError as error:
        raise UserError(f"hardware profile {path} is not YAML: {one_line(error)}") from error
    return Profile.from_dict(path.stem, content)


# the choice of a profile reads all of them, and a start chooses more than once
_shipped = cache(_read)


def choose_profile(machine: Machine) -> tuple[str, str]:
    """Choose the profile for ``hardware: auto``; return its name and the reason.

    Raises:
        UserError: the AMD GPU has no profile, or torch cannot use it.
    """
    problem = _unusable_gpu(machine)
    if problem and not machine.hidden_by:
        raise UserError(f"{problem}. To run without the GPU: hardware=cpu")
    profile = profile_of(machine)
    if profile is None:
        near = nearest_profile(machine)
        advice = "To run without the GPU:"
        if near != "cpu":
            advice = f"Name the nearest, as in hardware={near}, or"
        raise UserError(
            f"found {machine}, for which there is no hardware profile. {advice} hardware=cpu"
        )
    if machine.backend != "cpu":
        return profile.name, f"found {machine}"
    if machine.hidden_by:
        return profile.name, f"{machine.hidden_by} hides all GPUs"
    if machine.amd_archs:  # such as a small integrated GPU
        return (
            profile.name,
            f"{', '.join(machine.amd_archs)} has no hardware profile, and torch cannot use it",
        )
    return profile.name, "no GPU found"


def profile_of(machine: Machine) -> Profile | None:
    """The profile that ``hardware: auto`` gives ``machine``, if there is one."""
    for name in profile_names():
        profile = load_profile(name)
        if profile.fits(machine):
            return profile
    return None


def intended_machine(machine: Machine) -> tuple[Machine, Profile | None]:
    """The machine as it will be once torch can use its AMD GPU, and its profile, if there is one."""
    if machine.backend == "cpu":
        for arch in machine.amd_archs:
            usable = replace(machine, backend="rocm", arch=arch, unified=arch in UNIFIED)
            profile = profile_of(usable)
            if profile:
                return usable, profile
    return machine, profile_of(machine)


def nearest_profile(machine: Machine) -> str:
    """The name of the profile to try on an AMD GPU without a profile."""
    # two compute units and no bf16
    if machine.unified and (machine.arch or "").startswith("gfx10"):
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
    if world_size > 1 and machine.system == "Windows":
        raise UserError(
            f"found {world_size} processes, but on Windows training runs in one process only: "
            "ROCm's builds there have no torch.distributed. Use WSL2 for several GPUs"
        )
    backend = profile.match.get("backend", machine.backend)
    if backend == "cpu":
        return []
    is_for = f"hardware={profile.name} is for {profile.title}"
    if machine.backend != backend:
        raise UserError(
            f"{is_for}; {_unusable_gpu(machine) or f'found {machine}'}. To run anyway: hardware=cpu"
        )
    if world_size > machine.gpu_count:
        advice = f"Use --nproc_per_node {machine.gpu_count}"
        raise UserError(f"{world_size} processes need {world_size} GPUs; found {machine}. {advice}")
    warnings = []
    if not profile.fits(machine):
        right = profile_of(machine)
        if right:
            advice = (
                f"Use hardware=auto or hardware={right.name}; to run without the GPU: hardware=cpu"
            )
            raise UserError(f"{is_for}; found {machine}. {advice}")
        warnings.append(
            f"{machine.arch} has no hardware profile of its own: running with {profile.name}'s"
        )
    if not machine.has_kernels:
        hint = (
            f"; install it with: {reinstall_command(profile, machine)}" if profile.install else ""
        )
        warnings.append(f"torch {machine.torch} has no kernels for {machine.arch}{hint}")
    bad = bad_build(profile, machine)
    if bad:
        warnings.append(f"torch {machine.torch}: {bad.why}. {bad.fix}")
    for problem, fix in below_floor(profile, machine).values():
        warnings.append(f"{problem}: {fix}")
    return warnings


def reinstall_command(profile: Profile, machine: Machine) -> str:
    """The command that replaces torch. It uninstalls first: pip keeps an installed torch of any build."""
    then = ";" if machine.system == "Windows" else " &&"
    return f"pip uninstall -y torch{then} {profile.install}"


def below_floor(profile: Profile, machine: Machine) -> dict[str, tuple[str, str]]:
    """The versions outside the profile's limits: {"torch", "rocm" or "kernel": (problem, fix)}.

    Where KFD shows what a gfx1151 saves, this decides about the kernel instead of its version: distributions backport
    the fix, and AMD's DKMS package may replace a good kernel's driver by an older one.
    """
    # Microsoft builds WSL's kernel, and the GPU's driver runs on Windows
    kernel = "" if machine.wsl else machine.kernel
    versions = {"torch": machine.torch, "rocm": machine.rocm or "", "kernel": kernel}
    outside = {}
    for what, limits in profile.floor.items():
        text = versions[what]
        version = parse_version(text)
        if not version:
            continue
        patched = any(_is_newer_build(text, other) for other in limits.get("also", ()))
        old = "min" in limits and version < parse_version(limits["min"]) and not patched
        decided = machine.saves_registers if "replaced" in limits else None
        if decided:
            continue
        if old:
            outside[what] = (f"{what} {text} is older than {limits['min']}", limits["fix"])
        elif decided is False:
            outside[what] = (limits["replaced"], limits["fix_replaced"])
        if "below" in limits and version >= parse_version(limits["below"]):
            outside[what] = (f"{what} {text} is not below {limits['below']}", limits["fix"])
    return outside


def bad_build(profile: Profile, machine: Machine) -> BadBuild | None:
    """The known failure of the machine's torch."""
    for bad in profile.bad_builds:
        here = not bad.arch or machine.arch in bad.arch
        if here and f"{machine.torch}.".startswith(f"{bad.torch}."):
            return bad
    return None


def _is_newer_build(kernel: str, other: str) -> bool:
    """Whether a distribution's kernel (6.14.0-1018-oem) has the flavour of ``other`` (oem) and is at least as new."""
    form = re.compile(r"([0-9.]{1,30})-([0-9]{1,9})-([a-z]+)")
    build = form.fullmatch(kernel)
    least = form.fullmatch(other)
    if not build or not least or build[3] != least[3]:
        return False
    version = parse_version(build[1])
    least_version = parse_version(least[1])
    return (version, int(build[2])) >= (least_version, int(least[2]))


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
    refused = {}
    lines = []
    for key, lock in profile.locked.items():
        allowed = (lock.value, *lock.also)
        if key not in settings or settings[key] in allowed:
            continue
        wanted = " or ".join(map(str, allowed))
        line = f"{key}={settings[key]} on {profile.name}, which wants {wanted}: {lock.reason}"
        if key in overrides:
            lines.append(line)
        else:
            refused[key] = line
    if refused:
        raise UserError(
            f"{'; '.join(refused.values())}. To insist: hardware_overrides: [{', '.join(refused)}]"
        )
    for key in overrides:
        if key not in profile.locked:
            lines.append(f"hardware_overrides: {profile.name} does not lock {key}")
    return lines


# ---------------------------------------------------------------------------------------------------- chips
def find_chip(name: str, hardware: str | None = None) -> tuple[str, str]:
    """Find the chip that a user means.

    Args:
        name: name of a chip or an architecture, in any spelling: "MI355X", "rx7900xtx", "AMD Radeon PRO W7900".
        hardware: the chip's profile. Without it, any.

    Returns:
        The names of the profile and of the chip; the first of several chips with this name.

    Raises:
        UserError: no profile has the chip, or ``hardware`` lacks it.
    """
    wanted = _short(name)
    matches = []  # profiles and chips of this name
    similar = []
    known: set[str] = set()
    for profile in map(load_profile, profile_names()):
        for chip_name, chip in profile.chips.items():
            known.update((chip_name, chip.arch))
            names = list(map(_short, (chip_name, *chip.also, chip.arch)))
            if wanted in names:
                matches.append((profile.name, chip_name))
            if wanted and any(wanted in known_name or known_name in wanted for known_name in names):
                similar.append(chip_name)
    if not matches:
        guess = f"; did you mean {', '.join(similar[:5])}?" if similar else nearest(name, known)
        raise UserError(f"--machine {name} is unknown{guess}")
    for profile_name, chip_name in matches:
        if hardware in (None, profile_name):
            return profile_name, chip_name
    raise UserError(
        f"--machine {name} is hardware={matches[0][0]}, which contradicts hardware={hardware}"
    )


def chips_of(
    profile: Profile, arch: str | None, name: str | None, memory: int | None = None
) -> list[str]:
    """The chips of a profile that a machine may have, the likeliest first.

    Args:
        profile: the machine's profile.
        arch: the machine's architecture.
        name: torch's name of the GPU; it may say no more than "AMD Radeon Graphics".
        memory: bytes of the GPU's own memory, to distinguish chips of one name.

    Returns:
        The chips whose name is in ``name``, else all of the architecture.
    """
    device = _joined(name or "")
    matching_letters = {}  # of a chip's name, by chip
    for chip_name, chip in profile.chips.items():
        if chip.arch == arch:
            known = map(_short, (chip_name, *chip.also))
            matching = [len(text) for text in known if text in device]
            matching_letters[chip_name] = max(matching, default=0)
    most = max(matching_letters.values(), default=0)
    likely = [chip_name for chip_name, letters in matching_letters.items() if letters == most]
    if memory:
        size = memory / 2**30
        likely.sort(key=lambda chip_name: abs(profile.chips[chip_name].memory - size))
    return likely


def named_chips(
    profile: Profile, arch: str | None, name: str, memory: int | None = None
) -> list[str]:
    """:func:`chips_of` without guesses: empty if ``name`` is another product's, such as "RTX 4090 Laptop GPU"."""
    likely = chips_of(profile, arch, name, memory)
    device = _short(name)
    if device in _SAYS_NOTHING:
        return likely
    named = []
    for chip_name in likely:
        names = map(_short, (chip_name, *profile.chips[chip_name].also))
        if any(re.fullmatch(re.escape(known) + _ADDED, device) for known in names):
            named.append(chip_name)
    return named


def _joined(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def _short(name: str) -> str:
    """The name without the maker's words before it: 7900xtx for "AMD Radeon RX 7900 XTX"."""
    return re.sub(f"^{_MAKERS_WORDS}", "", _joined(name))
