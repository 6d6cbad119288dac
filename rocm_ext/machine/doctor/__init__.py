"""``rocm-ext doctor``: is this machine fit to train?

It gathers facts once, from this machine or from a recorded copy, and judges them with pure functions. Only
:mod:`rocm_ext.machine.doctor.probe` imports torch, in a separate process.
"""

from rocm_ext.machine.doctor.facts import Facts
from rocm_ext.machine.doctor.recorded import Finding
from rocm_ext.machine.doctor.rules import judge

__all__ = ["exit_code", "judge", "verdict"]


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
