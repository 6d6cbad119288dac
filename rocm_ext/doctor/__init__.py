"""Is this machine fit to train? Facts, gathered once, live or from a recorded copy; and pure checks of them.

Nothing here imports torch but :mod:`rocm_ext.doctor.probe`, which runs in a process of its own.
"""

from rocm_ext.doctor import check_memory, check_system, check_tools, check_torch
from rocm_ext.doctor.facts import Facts
from rocm_ext.doctor.rows import Row

CHECKS = (*check_system.CHECKS, *check_memory.CHECKS, *check_torch.CHECKS, *check_tools.CHECKS)


def judge(facts: Facts) -> list[Row]:
    """What each check says of the machine."""
    return [row for check in CHECKS for row in check(facts)]


def exit_code(rows: list[Row]) -> int:
    """0: fine, 1: there are warnings, 2: training will not work."""
    levels = {row.level for row in rows}
    return 2 if "error" in levels else 1 if "warning" in levels else 0


def verdict(facts: Facts, rows: list[Row]) -> str:
    """The last line."""
    count = {level: sum(row.level == level for row in rows) for level in ("error", "warning", "not recorded")}
    told = [f"{count[level]} {level}{'s' * (count[level] != 1)}" for level in ("error", "warning")]
    told += [f"{count['not recorded']} not recorded"] if count["not recorded"] else []
    known = "as far as recorded, " if facts.said.torch is None and not count["error"] else ""
    where = " on the CPU" if facts.fit.backend == "cpu" or facts.machine.hidden_by else ""
    will = "will not train" if count["error"] else f"will train{where}"
    return f"{known}this machine {will}: {', '.join(told)}"
