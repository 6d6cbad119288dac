"""``rocm-ext doctor``: is this machine fit to train?

Checks what training depends on: system, device files, kernel parameters, firmware, memory, torch, environment,
arithmetic (small computations with known results), sandbox, disk. A row shows a check's result. A problem comes with
its reason and a line that fixes it. The command changes nothing and needs no root.
Exit code 0: fine, 1: warnings, 2: training will not work, or --root holds no machine.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from rich.padding import Padding
from rich.text import Text

from rocm_ext.cli._common import (
    add_json,
    console,
    exits_with,
    options,
    print_json,
    printable,
    table,
)
from rocm_ext.machine.doctor import exit_code, judge, verdict
from rocm_ext.machine.doctor.facts import Facts, recorded_facts
from rocm_ext.machine.doctor.recorded import Finding
from rocm_ext.machine.doctor.save import save

_STYLES = {"ok": "green", "warning": "yellow", "error": "red", "not recorded": "dim"}


def add(parser: ArgumentParser) -> None:
    option = options(parser)
    root = (
        "judge another machine: a folder made with --save, or a copy of its /proc, /sys and /etc files; "
        'missing facts are "not recorded" and do not count'
    )
    option("--root DIR", root, Path)
    keep = (
        "also write the facts that the checks read into a new folder, to attach to a report: no serial numbers, no "
        "users' names, only variables and parameters that matter"
    )
    option("--save DIR", keep, Path)
    add_json(parser)


def run(args: Namespace) -> int:
    """Print the findings; return the exit code of the worst one."""
    from rocm_ext.machine.doctor.this_machine import ROOT, live_facts

    with exits_with(2):  # 1 means: warnings only
        facts = live_facts() if args.root is None else recorded_facts(args.root)
        if args.save is not None:  # judge the saved copy: its readers see these rows
            save(facts, args.root or ROOT, args.save)
            facts = recorded_facts(args.save)
    findings = judge(facts)
    code = exit_code(findings)
    if args.json:
        content = {
            "machine": facts.title,
            "profile": facts.profile and facts.profile.name,
            "exit_code": code,
            "verdict": verdict(facts, findings),
            "rows": [asdict(finding) for finding in findings],
        }
        print_json(content)
    else:
        _print(facts, findings)
    return code


def _print(facts: Facts, findings: list[Finding]) -> None:
    screen = console()
    rows = table(printable(facts.title), "", "check", "found")
    warnings, errors = [], []
    for finding in findings:
        level = Text(finding.level, _STYLES[finding.level])
        found = Text(printable(finding.found))
        if finding.level == "warning":
            warnings.append(finding)
        elif finding.level == "error":
            errors.append(finding)
        elif finding.why:
            found.append(f" ({printable(finding.why)})", "dim")
        rows.add_row(level, Text(printable(finding.check)), found)
    screen.print(rows)
    for finding in (*warnings, *errors):  # the worst last: readers look there
        level = Text(finding.level, _STYLES[finding.level])
        screen.print(
            Text.assemble("\n", level, f" {printable(finding.check)}: ", printable(finding.found))
        )
        if finding.why:
            why = Text(printable(finding.why))
            screen.print(Padding(why, (0, 0, 0, 2), expand=False))
        fix = Text(f"  fix: {printable(finding.fix)}", "bold")
        screen.print(fix, soft_wrap=True)  # one line, so that it can be copied
    screen.print(Text("\n" + verdict(facts, findings), "bold"))
