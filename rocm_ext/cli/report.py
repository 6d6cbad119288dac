"""`rocm-ext report`: runs as one HTML page."""

import argparse
from pathlib import Path


def add(commands) -> None:
    parser = commands.add_parser(
        "report",
        help="show runs in one HTML file: curves, hardware, RAFT's scores and samples",
        description="Write one HTML file, which needs no network and no script, of one run, or of several overlaid. "
        "Runs may be of either recipe, and need not be finished.",
    )
    parser.add_argument("dirs", type=Path, nargs="+", metavar="OUTPUT_DIR", help="output_dir of a run")
    parser.add_argument(
        "--output", "-o", type=Path, metavar="FILE",
        help="the file to write (default: report.html in OUTPUT_DIR; of several runs, in the current folder)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from rocm_ext.report import write

    print(write(args.dirs, args.output))
