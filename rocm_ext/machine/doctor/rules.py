"""The table of checks: what doctor says about a machine.

The first rule that applies is a check's finding. Rules rely on the rules before them: after a test for a missing fact,
the fact exists. A rule without a level ends its check without a finding. Functions of
:mod:`rocm_ext.machine.doctor.checks` make the findings that need more computation.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rocm_ext.machine.budget import gib
from rocm_ext.machine.doctor import checks
from rocm_ext.machine.doctor.facts import Facts
from rocm_ext.machine.doctor.recorded import Finding, Level
from rocm_ext.machine.doctor.system import AMD, NVIDIA

# Kernels whose copies to the GPU from mapped files stall: they have Linux' c08972f55594 without 342981fff328. Ubuntu's
# 7.0.0-30 has both (ROCm#6523), other distributions' 7.0.12 has the first alone (ROCm#6358)
SLOW_MAPS = ("7.0.0-28-", "7.0.12-")
STALL = 0.25  # seconds of the mapped copy; a kernel that stalls takes a second and more
BAD_MES = 0x83  # of linux-firmware 20251125; 20260110 returned to an older version (ROCm#5724)
SMALL_CARVE_OUT = 4 * 2**30  # the smallest setting of some machines
_WINDOWS = (
    "training runs in one process, because ROCm's Windows builds have no torch.distributed; RAFT's sandbox needs "
    "Linux; WSL2 has both"
)
_CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
_HIP_LOG = 'AMD_LOG_LEVEL=3 python -c "import torch; torch.cuda.init()"'


class Rule(NamedTuple):
    """A row of the table. Functions take :class:`Facts`, as ``Any``: earlier rules have tested its optional parts."""

    level: Level | Callable[[Any], Level] | None
    when: Callable[[Any], object]
    found: str | Callable[[Any], str] = ""
    why: str | Callable[[Any], str] = ""
    fix: str | Callable[[Any], str] = ""


def always(facts: Facts) -> bool:
    """The condition of a check's last rule."""
    return True


def needed(facts: Facts) -> Level:
    """Error if the AMD GPU should train, else a warning."""
    return "error" if facts.amd else "warning"


def no_gpu(facts: Facts) -> str:
    """The finding of a torch that sees no GPU."""
    return f"{facts.torch_build}, sees no GPU"


def within_limits(name: str, version: Callable[[Any], str], fix: Callable[[Any], str]) -> tuple[Rule, ...]:
    """The rules for a version that the profile limits."""
    return (
        Rule(None, lambda f: name not in f.profile.floor),
        Rule("not recorded", lambda f: not version(f)),
        Rule("warning", lambda f: name in f.outside, version, lambda f: ": ".join(f.outside[name]), fix),
        Rule("ok", always, version),
    )


# fmt: off
CHECKS: Mapping[str, Sequence[Rule] | Callable[[Facts], Iterator[Finding]]] = {
    "platform": (
        Rule("ok", lambda f: f.machine.system != "Linux", lambda f: f"{f.machine.system} {f.said.release}".strip(),
             lambda f: _WINDOWS if f.machine.system == "Windows" else "training runs on the CPU"),
        Rule("error", lambda f: f.machine.wsl and "wsl2" not in f.machine.kernel.lower(), lambda f: f"WSL1{f.where}",
             "WSL1 has no Linux kernel, so no GPU and no sandbox", "wsl --set-version DISTRIBUTION 2"),
        Rule("ok", lambda f: f.machine.wsl, lambda f: f"WSL2, Linux {f.machine.kernel}{f.where}",
             "Windows runs the GPU's driver"),
        Rule("ok", always, lambda f: f"Linux {f.machine.kernel}".strip() + f.where),
    ),
    "hardware profile": checks.hardware_profile,
    # ROCm can use an AMD GPU once amdgpu lists it in /sys/class/drm and in KFD's topology
    "GPU driver": (
        Rule(None, lambda f: not f.linux),
        Rule("ok", lambda f: f.files.amd_gpus, lambda f: "amdgpu, KFD lists " +
             ", ".join(f"{count} x {arch}" for arch, count in Counter(f.files.amd_gpus).items())),
        Rule("ok", lambda f: f.machine.backend == "rocm", "torch sees the GPU"),
        Rule(needed, lambda f: any(card.is_amd for card in f.files.cards) and (f.amd or f.fit.backend != "cuda"),
             "amdgpu shows the AMD GPU, but KFD does not list it",
             "ROCm computes through KFD: the kernel lacks CONFIG_HSA_AMD, or a container hides /sys/class/kfd",
             lambda f: checks.container(f, "sudo dmesg | grep -i -e amdgpu -e kfd")),
        Rule("not recorded", lambda f: f.amd and not (f.nomodeset or AMD in f.files.displays.values())),
        Rule(needed, lambda f: f.amd or (AMD in f.files.displays.values() and f.fit.backend != "cuda"),
             "an AMD GPU is here, but the amdgpu driver is not loaded",
             lambda f: "nomodeset on the kernel command line blocks it" if f.nomodeset else "ROCm needs it",
             lambda f: f.boot(remove="nomodeset") if f.nomodeset else "sudo modprobe amdgpu"),
        Rule("ok", lambda f: f.files.nvidia, lambda f: f"NVIDIA {f.files.nvidia}"),
        Rule("warning", lambda f: NVIDIA in f.files.displays.values(), "an NVIDIA GPU is here, but not NVIDIA's driver",
             "CUDA needs it", "install NVIDIA's driver; nvidia-smi then lists the GPU"),
    ),
    "device files": (
        Rule(None, lambda f: not f.amd or f.machine.system != "Linux"),
        Rule("not recorded", lambda f: f.said.device_nodes is None),
        Rule("ok", lambda f: "/dev/dxg" in f.said.device_nodes, "/dev/dxg"),  # only WSL has it
        Rule("error", lambda f: f.machine.wsl, "/dev/dxg is missing", "WSL reaches the GPU through it", "wsl --update"),
        Rule("error", lambda f: f.missing_nodes, lambda f: f"{' and '.join(f.missing_nodes)} missing",
             "ROCm reaches the GPU through them", lambda f: checks.container(f, "sudo modprobe amdgpu")),
        Rule("error", lambda f: False in f.access.values(), checks.permissions, lambda f: checks.no_access(f)[0],
             lambda f: checks.container(f, checks.no_access(f)[1])),
        Rule("not recorded", lambda f: None in f.access.values(),
             lambda f: f"{checks.permissions(f)}; the user is not recorded"),
        Rule("ok", always, checks.permissions),
    ),
    "kernel": (
        Rule(None, lambda f: not f.linux or f.profile is None),
        Rule("warning", lambda f: f.amd and f.machine.kernel.startswith(SLOW_MAPS), lambda f: f.machine.kernel,
             "copies to the GPU from mapped files stall, a second at a time (ROCm#6523, ROCm#6358): programs that map "
             "their weights load slowly, this library reads them", lambda f: f.upgrade),
        *within_limits("kernel", lambda f: f.machine.kernel, lambda f: f.newer_kernel),
    ),
    "kernel parameters": checks.kernel_parameters,
    "firmware": (
        Rule(None, lambda f: not f.amd_linux),
        Rule("error", lambda f: any(mes == BAD_MES for mes in f.strix_mes), checks.firmware,
             f"MES 0x{BAD_MES:x} of linux-firmware 20251125 hangs the GPU or ends runs with memory access faults "
             "(ROCm#5724); 20260110 works", lambda f: f.upgrade),
        Rule("not recorded", lambda f: not checks.firmware(f)),
        Rule("not recorded", lambda f: f.fit.arch == "gfx1151" and all(mes is None for mes in f.strix_mes),
             lambda f: f"{checks.firmware(f)}; the kernel does not report MES's version"),
        Rule("ok", always, checks.firmware),
    ),
    "NUMA balancing": (
        Rule(None, lambda f: not f.amd_linux or f.gpu_count < 2 or f.unified),
        Rule("not recorded", lambda f: f.files.numa_balancing is None),
        Rule("warning", lambda f: f.files.numa_balancing, "on", "the kernel moves pages between sockets while several "
             "GPUs use them", "sudo sysctl kernel.numa_balancing=0"),
        Rule("ok", always, "off"),
    ),
    "system files": (
        Rule("warning", lambda f: f.files.unreadable, lambda f: f"cannot read {', '.join(f.files.unreadable)}",
             "the copy may be incomplete or changed; the checks above ignore these files",
             "record it again: rocm-ext doctor --save DIR"),
    ),
    "host memory": (
        Rule("not recorded", lambda f: f.host_total is None),
        Rule("warning", lambda f: f.said.memory_limit is not None and f.said.memory_limit < f.host_total,
             lambda f: f"{checks.host_memory(f)}, {gib(f.said.memory_limit)} for this container or session",
             "a cgroup kills processes that take more, and the memory budget ignores its limit",
             "raise the limit: docker run --memory, or MemoryMax= in systemd"),
        Rule("ok", always, checks.host_memory),
    ),
    "GPU memory": checks.gpu_memory,
    "carve-out": (
        Rule(None, lambda f: not f.amd_linux or not f.unified),
        Rule("not recorded", lambda f: f.carve_out is None),
        Rule("ok", lambda f: f.carve_out <= SMALL_CARVE_OUT,
             lambda f: f"{gib(f.carve_out)}; small is right on unified memory"),
        # in the carve-out, pages_limit alone would move the GPU to the little memory that the host has left
        Rule("warning", always, lambda f: f"the BIOS reserves {gib(f.carve_out)} for the GPU",
             lambda f: "the GPU uses this memory only, and the host cannot use it" if f.in_carve_out else
             "the GPU maps host memory, which is larger, so neither it nor the host uses the carve-out",
             lambda f: "BIOS: UMA frame buffer (dedicated graphics memory) 512 MB, or the smallest" +
             (f"; only then boot with {f.memory_parameters}" if f.in_carve_out else "")),
    ),
    "memory budget": checks.budget,
    # most programs load their weights from mapped files
    "copies to the GPU": (
        Rule(None, lambda f: f.said.copies is None and f.machine.arch is None),
        Rule("not recorded", lambda f: f.said.copies is None),
        Rule("warning", lambda f: f.said.copies.mapped > max(STALL, 5 * f.said.copies.read), checks.copies,
             "the kernel stalls on mapped files; this library reads its weights, programs that map theirs load slowly",
             lambda f: f.upgrade),
        Rule("ok", always, checks.copies),
    ),
    "torch": (  # the commonest install error is pip's CUDA or CPU wheel on an AMD machine
        Rule("error", lambda f: "No module named 'torch'" in f.said.torch_error, "torch is not installed",
             lambda f: f"PyPI's torch cannot use the {f.fit.arch}" if f.amd else "training needs it",
             lambda f: (f.profile and f.profile.install) or "pip install torch"),
        Rule("error", lambda f: f.said.torch_error, "import torch fails", lambda f: f.said.torch_error,
             lambda f: f.reinstall),
        Rule("not recorded", lambda f: f.said.torch is None),
        Rule("ok", lambda f: f.torch_gpus, lambda f: f"{f.torch_build}, {f.machine.gpu_count} x {f.machine.name}"),
        Rule("ok", lambda f: f.machine.hidden_by, lambda f: f.torch_build),  # the row hardware profile says by what
        Rule("error", lambda f: f.amd and f.profile and not f.rocm_torch, lambda f: f.torch_build,
             lambda f: f"the GPU is an AMD {f.fit.arch}: torch computes on the CPU", lambda f: f.reinstall),
        Rule("error", lambda f: f.rocm_torch and (f.machine.wsl or f.machine.system == "Windows"), no_gpu,
             "torch reaches the GPU through Windows' driver",
             "install the current Adrenalin driver on Windows; in WSL2 also ROCm for WSL (rocm.docs.amd.com)"),
        Rule("error", lambda f: f.rocm_torch and f.chosen and f.amd, no_gpu,
             lambda f: f"{', '.join(f'{name}={f.environment[name]}' for name in f.chosen)} selects GPUs that are "
             "not here",
             lambda f: f.unset(*f.chosen)),
        Rule("error", lambda f: f.amd, no_gpu,
             lambda f: f"the {f.fit.arch} is here: see the rows GPU driver and device files, or ask HIP", _HIP_LOG),
        Rule("warning", lambda f: f.rocm_torch and AMD in f.files.displays.values() and not f.files.amd_gpus, no_gpu,
             "an AMD GPU is on the bus, but no driver lists it: training runs on the CPU", "see the row GPU driver"),
        Rule("warning", lambda f: f.rocm_torch, no_gpu,
             lambda f: f"no AMD GPU {'with a profile ' if f.files.amd_gpus else ''}is here: training runs on the CPU",
             f"pip uninstall -y torch && {_CPU_TORCH}"),
        Rule("warning", lambda f: f.files.nvidia or NVIDIA in f.files.displays.values(), no_gpu,
             "an NVIDIA GPU is here, but torch computes on the CPU", lambda f: "nvidia-smi"
             if f.machine.torch_build == "cuda" else "pip uninstall -y torch && pip install torch"),
        Rule("ok", always, lambda f: f.torch_build),
    ),
    "torch kernels": (  # without them HIP fails with "invalid device function"
        Rule(None, lambda f: f.machine.backend != "rocm"),
        Rule("not recorded", lambda f: not f.machine.native_archs),
        Rule("ok", lambda f: f.machine.has_kernels, lambda f: f"for {f.machine.arch}"),
        Rule(lambda f: "warning" if {c.level for c in f.said.canaries or ()} == {"ok"} else "error", always,
             lambda f: f"only for {', '.join(f.machine.native_archs)}", lambda f: f"none for {f.machine.arch}",
             lambda f: f.reinstall if f.profile else f"install a torch built for {f.machine.arch}"),
    ),
    "torch build": (
        Rule(None, lambda f: not (f.rocm_torch and f.profile)),
        Rule("warning", lambda f: f.bad_build, lambda f: f.machine.torch, lambda f: f.bad_build.why,
             lambda f: f.bad_build.fix),
    ),
    "ROCm": (
        Rule(None, lambda f: not (f.rocm_torch and f.profile)),
        *within_limits("rocm", lambda f: f.machine.rocm, lambda f: f.reinstall),
    ),
    "torch version": (
        Rule(None, lambda f: not (f.rocm_torch and f.profile)),
        *within_limits("torch", lambda f: f.machine.torch, lambda f: f.reinstall),
    ),
    "GPU count": (  # KFD or torch may list fewer GPUs than /sys/class/drm or the bus
        Rule(None, lambda f: not f.amd or not 0 < f.seen_gpus < f.installed_gpus),
        Rule("warning", lambda f: f.seen_gpus == f.listed_gpus or not f.chosen,
             lambda f: f"{f.seen_by} {f.seen_gpus} of {f.installed_gpus}",
             "a GPU has failed, or this user cannot open its device file", "sudo dmesg | grep -i amdgpu"),
        Rule("ok", always, lambda f: f"{f.seen_by} {f.seen_gpus} of {f.installed_gpus}",
             lambda f: f"{f.chosen[0]} selects them"),
    ),
    "other GPUs": (  # AMD's notes on Radeon report the crashes; without a profile, the row hardware profile has the fix
        Rule("warning", lambda f: f.machine.backend == "rocm" and f.profile and f.other_gpus,
             lambda f: f"torch also sees {', '.join(f.other_gpus)}",
             "ranks cannot use different GPUs together, and ROCm is known to crash beside an integrated one",
             lambda f: f.choose_gpus(f.torch_gpus[0].kind)),
    ),
    "torchtune, torchao": checks.pins,
    "environment": checks.environment,
    "canaries": checks.numerics,
    # torch and rocBLAS choose between rocBLAS and hipBLASLt, independently
    "BLAS": (
        Rule("not recorded", lambda f: not f.said.blas),
        Rule("ok", lambda f: f.said.blas != "hipBLASLt", lambda f: f.said.blas),
        Rule("warning", lambda f: f.environment.get("TORCH_BLAS_PREFER_HIPBLASLT") == "0", "hipBLASLt",
             "this torch ignores TORCH_BLAS_PREFER_HIPBLASLT=0 (pytorch#174377)",
             'install a newer torch, or call torch.backends.cuda.preferred_blas_library("cublas") first'),
        Rule("warning", lambda f: f.environment.get("ROCBLAS_USE_HIPBLASLT") == "0", "hipBLASLt",
             "ROCBLAS_USE_HIPBLASLT=0 tells rocBLAS only, and torch does not ask rocBLAS",
             lambda f: f.export("TORCH_BLAS_PREFER_HIPBLASLT", "0")),
        Rule("ok", always, "hipBLASLt"),
    ),
    "other processes": (  # the kernel lists those on AMD's GPUs
        Rule(None, lambda f: not f.amd_linux),
        Rule("ok", lambda f: not f.files.processes, "none on the GPU"),
        Rule("warning", always, checks.processes, lambda f: "they take the GPU's memory and time" +
             ("; overcommitting memory tends to hang the driver" if f.fit.unified else ""),
             lambda f: f"wait for them, or: kill {' '.join(str(process.pid) for process in f.files.processes)}"),
    ),
    "sandbox": (
        Rule(None, lambda f: f.machine.system != "Linux"),
        Rule("warning", lambda f: f.said.commands is not None and "bwrap" not in f.said.commands,
             "bubblewrap is not installed", "RAFT runs model-written code in it", lambda f: f.install("bubblewrap")),
        Rule("not recorded", lambda f: f.said.sandbox is None),
        Rule("ok", lambda f: f.said.sandbox.works,
             lambda f: ": ".join(filter(None, ("bubblewrap works", f.said.sandbox.found)))),
        Rule("warning", always, "bubblewrap does not work here",
             lambda f: f"{f.said.sandbox.found.partition('; ')[0]}. RAFT runs model-written code in it",
             lambda f: f.said.sandbox.found.partition("; ")[2]),
    ),
    "C compiler": (  # verifiers of compiled languages name theirs themselves
        Rule(None, lambda f: not f.profile or f.profile.settings.get("compile") is not True),
        Rule("not recorded", lambda f: f.said.commands is None),
        Rule("ok", lambda f: {*checks.COMPILERS} & {*f.said.commands},
             lambda f: ", ".join(name for name in checks.COMPILERS if name in f.said.commands)),
        Rule("warning", always, "none", lambda f: f"{f.profile.name} sets compile: True, and Triton needs one",
             lambda f: f.install("gcc")),
    ),
    "disk": checks.disk,
}
# fmt: on


def judge(facts: Facts) -> list[Finding]:
    """The findings of all checks."""
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        if callable(check):
            findings += check(facts)
        elif (rule := next((rule for rule in check if rule.when(facts)), None)) and rule.level:
            parts: Iterable[Any] = (rule.level, rule.found, rule.why, rule.fix)
            level, found, why, fix = (part(facts) if callable(part) else part for part in parts)
            findings.append(Finding(name, level, found or level, why, fix))
    return findings


def exit_code(findings: list[Finding]) -> int:
    """0: no problem, 1: warnings, 2: training will not work."""
    levels = {finding.level for finding in findings}
    return 2 if "error" in levels else 1 if "warning" in levels else 0


def verdict(facts: Facts, findings: list[Finding]) -> str:
    """The summary, one line."""
    levels = [finding.level for finding in findings]
    count = {level: levels.count(level) for level in ("error", "warning", "not recorded")}
    counts = [f"{count[level]} {level}{'s' * (count[level] != 1)}" for level in ("error", "warning")]
    counts += [f"{count['not recorded']} not recorded"] if count["not recorded"] else []
    known = "as far as recorded, " if facts.said.torch is None and not count["error"] else ""
    where = " on the CPU" if facts.fit.backend == "cpu" or facts.machine.hidden_by else ""
    will = "will not train" if count["error"] else f"will train{where}"
    return f"{known}this machine {will}: {', '.join(counts)}"
