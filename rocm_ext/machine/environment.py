"""Environment variables: a profile sets some, and some of the user's do harm."""

import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata

from rocm_ext.base.errors import refuse
from rocm_ext.base.registry import DECIDED
from rocm_ext.machine.detect import Machine, parse_version
from rocm_ext.machine.profile import Profile, Variable

Environ = Mapping[str, str]
# Three names of one setting: HIP builds of torch read all of them
ALLOCATOR_VARIABLES = ("PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def _segments_measured(machine: Machine) -> bool:
    """Whether this build of torch is like the one with which expandable segments were measured on gfx1151."""
    return parse_version(machine.torch)[:2] == (2, 12) and "+rocm7.13" in machine.torch


_CONDITIONS = {  # keys are values of Variable.when
    "always": lambda profile, machine, environ: True,
    # a chip that borrows the profile would run kernels of another architecture
    "arch_missing": lambda profile, machine, environ: (
        not machine.has_kernels and profile.is_for(machine.arch)
    ),
    "several_ranks": lambda profile, machine, environ: int(environ.get("WORLD_SIZE", 1)) > 1,
    "segments_measured": lambda profile, machine, environ: _segments_measured(machine),
    "segments_not_measured": lambda profile, machine, environ: not _segments_measured(machine),
}


def environment_for(profile: Profile, machine: Machine, environ: Environ) -> dict[str, Variable]:
    """The variables that ``profile`` adds to the user's, by name.

    Raises:
        UserError: the allocator's variables contradict one another.
    """
    check_environment(profile, machine, environ)
    return _needed(profile, machine, environ)


def _needed(profile: Profile, machine: Machine, environ: Environ) -> dict[str, Variable]:
    needed = {}
    for name, variable in missing(profile, environ).items():
        if _CONDITIONS[variable.when](profile, machine, environ):
            needed[name] = variable
    return needed


def missing(profile: Profile, environ: Environ) -> dict[str, Variable]:
    """The profile's variables that the user has not set."""
    taken = set(environ)
    # the user configures the allocator under one of its names
    if not taken.isdisjoint(ALLOCATOR_VARIABLES):
        taken.update(ALLOCATOR_VARIABLES)
    return {name: variable for name, variable in profile.environment.items() if name not in taken}


def check_environment(profile: Profile, machine: Machine, environ: Environ) -> list[str]:
    """Warnings about variables in ``environ`` that are useless or harmful on an AMD machine.

    Raises:
        UserError: the allocator's variables contradict one another.
    """
    conflicts = list(environment_conflicts(profile, machine, environ))
    refuse(str(conflict) for conflict in conflicts if conflict.fatal)
    return [str(conflict) for conflict in conflicts]


@dataclass(frozen=True)
class Conflict:
    """Environment variables that are useless or harmful on this machine."""

    variables: tuple[str, ...]  # those to unset
    setting: str  # the variables with their values
    why: str
    fatal: bool = False  # training would fail or compute wrong results

    def __str__(self) -> str:
        return f"{self.setting}: {self.why}. Fix: unset {' '.join(self.variables)}"


def environment_conflicts(
    profile: Profile, machine: Machine, environ: Environ
) -> Iterator[Conflict]:
    """The variables in ``environ`` that contradict one another, do harm or do nothing on an AMD machine."""
    if machine.torch_build != "rocm" and profile.match.get("backend") != "rocm":
        return
    rocm = parse_version(machine.rocm or "")
    allocator = {name: environ[name] for name in ALLOCATOR_VARIABLES if environ.get(name)}
    if len(set(allocator.values())) > 1:
        settings = ", ".join(f"{name}={value}" for name, value in allocator.items())
        why = "they configure the same allocator and differ. Keep one"
        yield Conflict(tuple(allocator)[1:], settings, why, fatal=True)
    for name, value in allocator.items():
        if not re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE):
            continue
        if "max_split_size_mb" in value:
            why = "expandable_segments together with max_split_size_mb zeroes live buffers on ROCm (ROCm#6603)"
            yield Conflict((name,), f"{name}={value}", why, fatal=True)
        elif parse_version(machine.torch) < (2, 11):
            why = "expandable_segments has no effect on ROCm before torch 2.11"
            yield Conflict((name,), f"{name}={value}", why)
        elif (7, 14) <= rocm < (10,):
            why = "ROCm 7.14 opens a file for each 20 MiB of segments, up to `ulimit -n` (rocm-systems#10604)"
            yield Conflict((name,), f"{name}={value}", why)
    override = environ.get("HSA_OVERRIDE_GFX_VERSION")
    if override and machine.native_archs and machine.has_kernels:
        why = f"useless, and harmful at worst: torch has kernels for {machine.arch}"
        yield Conflict(("HSA_OVERRIDE_GFX_VERSION",), f"HSA_OVERRIDE_GFX_VERSION={override}", why)
    if environ.get("ROCR_VISIBLE_DEVICES") and environ.get("HIP_VISIBLE_DEVICES"):
        wanted, other = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
        if machine.system == "Windows":
            wanted, other = other, wanted
        why = f"HIP numbers the GPUs that ROCR leaves. Set {wanted} only"
        yield Conflict((other,), "ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES are both set", why)


def preset(profile: Profile) -> list[str]:
    """Set the variables that do not depend on the GPU. Call this before ``detect``, which starts HIP, and if possible
    before importing torch.

    Returns:
        A line about variables that came after the import of torch, which reads some of them.
    """
    build = metadata.version("torch")
    without_gpu = Machine("cpu", platform.system(), build, "cpu", total_memory=0, bf16=False)
    added = _needed(profile, without_gpu, os.environ)
    put(added)
    if not added or "torch" not in sys.modules:
        return []
    return [
        f"torch was imported before these variables were set; `tune run` sets them in time, or: {_export(added)}"
    ]


def _export(added: Mapping[str, Variable]) -> str:
    settings = [f"{name}={variable.value}" for name, variable in added.items()]
    return f"export {' '.join(settings)}"


def put(added: Mapping[str, Variable]) -> None:
    """Set variables and list them as this library's."""
    for name, variable in added.items():
        os.environ[name] = variable.value
    if added:
        os.environ[DECIDED] = ",".join(sorted(_ours().union(added)))


def _ours() -> set[str]:
    """The variables that this library has set, in this process or in one before it."""
    return set(filter(None, os.environ.get(DECIDED, "").split(",")))


def apply_environment(profile: Profile, machine: Machine, restart: bool = False) -> list[str]:
    """Set the profile's environment.

    Without a restart, for notebooks and other programs that must go on, the variables may come too late: if HIP has
    already started (:func:`rocm_ext.machine.detect.detect` starts it), the last line holds the export to run before
    Python. Child processes inherit the variables in any case.

    Args:
        profile: the machine's profile.
        machine: this machine.
        restart: whether to replace the process by the same command, once, if a variable was missing. HIP and torch
            have read their variables by now. Under torchrun the process id stays. Call this first in a program.

    Returns:
        Lines to log: the variables, and warnings.

    Raises:
        UserError: the allocator's variables contradict one another.
    """
    before = _ours()
    added = environment_for(profile, machine, os.environ)
    put(added)
    ours = before | set(added)
    interactive = len(sys.orig_argv) < 2
    from_stdin = sys.argv[:1] in ([""], ["-"])
    if restart and added.keys() - before and not interactive and not from_stdin:
        replace_process(this_command())
    lines = check_environment(profile, machine, os.environ)
    settings = [
        f"{name}={os.environ[name]}"
        for name in profile.environment
        if name in ours and name in os.environ
    ]
    if settings:
        lines.append(f"environment: {' '.join(settings)} (`rocm-ext doctor` says why)")
    if added and "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        lines.append(
            f"HIP has already started without these; before starting Python: {_export(added)}"
        )
    return lines


def this_command() -> list[str]:
    """The command that started this process."""
    return [sys.executable, *sys.orig_argv[1:]]


def replace_process(command: list[str]) -> None:
    """Run ``command`` instead of this program, in the same process if the system can do that."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name == "nt":  # Windows' exec starts a second process, and the shell does not wait for it
        process = subprocess.Popen(command)
        # Ctrl-C reaches both; the program decides when it ends
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.exit(process.wait())
    os.execve(sys.executable, command, os.environ)
