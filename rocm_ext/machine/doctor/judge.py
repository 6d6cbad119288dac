"""The table of checks, and the verdict about a machine."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from rocm_ext.machine.doctor import hardware, software, strain
from rocm_ext.machine.doctor.facts import Facts
from rocm_ext.machine.doctor.recorded import Finding

CHECKS: dict[str, Callable[[Facts], Finding | Iterator[Finding] | None]] = {
    "platform": hardware.platform,
    "hardware profile": hardware.hardware_profile,
    "GPU driver": hardware.gpu_driver,
    "device files": hardware.device_files,
    "kernel": hardware.kernel,
    "kernel parameters": hardware.kernel_parameters,
    "firmware": hardware.firmware,
    "NUMA balancing": hardware.numa_balancing,
    "host memory": hardware.host_memory,
    "GPU memory": hardware.gpu_memory,
    "carve-out": hardware.carve_out,
    "memory budget": hardware.memory_budget,
    "memory in use": strain.memory_in_use,
    "power": strain.power,
    "temperature": strain.heat,
    "lockup timeout": strain.lockup_timeout,
    "copies to the GPU": hardware.copies,
    "torch": software.torch,
    "torch kernels": software.torch_kernels,
    "torch build": software.torch_build,
    "ROCm": software.rocm_version,
    "torch version": software.torch_version,
    "GPU count": hardware.count_gpus,
    "other GPUs": hardware.other_gpus,
    "torchtune, torchao": software.pins,
    "environment": software.environment,
    "canaries": software.canaries,
    "BLAS": software.blas,
    "other processes": strain.other_processes,
    "sandbox": software.sandbox,
    "C compiler": software.compiler,
    "disk": software.disk,
}


def judge(facts: Facts) -> list[Finding]:
    """The findings of all checks."""
    findings = []
    for name, check in CHECKS.items():
        outcome = check(facts)
        if isinstance(outcome, Finding):
            findings.append(replace(outcome, check=name))
        elif outcome is not None:
            findings += [replace(finding, check=finding.check or name) for finding in outcome]
    return findings


def exit_code(findings: list[Finding]) -> int:
    """0 without a problem, 1 with warnings, 2 if training will not work."""
    levels = {finding.level for finding in findings}
    if "error" in levels:
        return 2
    return 1 if "warning" in levels else 0


def verdict(facts: Facts, findings: list[Finding]) -> str:
    """The summary, one line."""
    levels = [finding.level for finding in findings]
    errors = levels.count("error")
    will = "this machine will train"
    if errors:
        will = "this machine will not train"
    elif facts.intended.backend == "cpu" or facts.machine.hidden_by:
        will += " on the CPU"
    if facts.recorded.torch is None and not errors:
        will = f"as far as recorded, {will}"
    counts = [_plural(errors, "error"), _plural(levels.count("warning"), "warning")]
    unknown = levels.count("not recorded")
    if unknown:
        counts.append(f"{unknown} not recorded")
    return f"{will}: {', '.join(counts)}"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
