"""`rocm-ext doctor`: is this machine fit to train?"""

import argparse
import json
from pathlib import Path

from rocm_ext.cli._text import printable

_DESCRIPTION = """\
Look at everything a training here depends on: system, device files, kernel parameters, firmware, memory, torch,
environment, arithmetic (small computations whose results are known), sandbox, disk. Each row says what was found;
where something is not right for this machine also why, and the line that mends it. Nothing is changed, nothing
needs root. Exit code 0: fine, 1: warnings, 2: training will not work, or --root is no machine."""


def add(commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check whether this machine is fit to train, and how to mend it",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("--root", type=Path, metavar="DIR", help="judge another machine: a folder made with --save, or a copy of "
           "its /proc, /sys and /etc files; what it lacks is \"not recorded\" and counts for nothing")  # fmt: skip
    option("--save", type=Path, metavar="DIR", help="also write what was looked at into a new folder, to send along "
           "with a report: no serial numbers, no users' names, only variables and parameters that matter")  # fmt: skip
    option("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rocm_ext.doctor import exit_code, judge
    from rocm_ext.doctor.facts import recorded_facts
    from rocm_ext.doctor.live import ROOT, live_facts
    from rocm_ext.doctor.save import save
    from rocm_ext.errors import UserError

    try:
        facts = live_facts() if args.root is None else recorded_facts(args.root)
        if args.save is not None:  # and judge what was saved: who gets it sees these rows
            save(facts, args.root or ROOT, args.save)
            facts = recorded_facts(args.save)
    except UserError as error:
        raise UserError(str(error), code=2) from error  # 1 would say that there are warnings only
    rows = judge(facts)
    if args.json:
        print(json.dumps(_document(facts, rows)))
    else:
        _print(facts, rows)
    return exit_code(rows)


def _document(facts, rows) -> dict[str, object]:
    from dataclasses import asdict

    from rocm_ext.doctor import exit_code, verdict

    return {
        "machine": facts.title,
        "profile": facts.profile and facts.profile.name,
        "exit_code": exit_code(rows),
        "verdict": verdict(facts, rows),
        "rows": [asdict(row) for row in rows],
    }


_STYLES = {"ok": "green", "warning": "yellow", "error": "red", "not recorded": "dim"}


def _print(facts, rows) -> None:
    from rich.padding import Padding
    from rich.text import Text

    from rocm_ext.cli._tables import console, table
    from rocm_ext.doctor import verdict

    screen = console()
    shown = table(printable(facts.title), "", "check", "found")
    for row in rows:
        found = Text(printable(row.found))
        if row.why and row.level in ("ok", "not recorded"):
            found.append(f" ({printable(row.why)})", "dim")
        shown.add_row(Text(row.level, _STYLES[row.level]), Text(printable(row.check)), found)
    screen.print(shown)
    for row in sorted((row for row in rows if row.level in ("warning", "error")), key=lambda row: row.level == "error"):
        screen.print(
            Text.assemble("\n", (row.level, _STYLES[row.level]), f" {printable(row.check)}: ", printable(row.found))
        )
        if row.why:
            screen.print(Padding(Text(printable(row.why)), (0, 0, 0, 2), expand=False))
        # never broken into lines, so that it can be copied
        screen.print(Text(f"  fix: {printable(row.fix)}", "bold"), soft_wrap=True)
    screen.print(Text("\n" + verdict(facts, rows), "bold"))
