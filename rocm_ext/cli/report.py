"""``rocm-ext report``: shows runs as one HTML page."""

import argparse
from pathlib import Path

from rocm_ext.report import write


def add(commands) -> None:
    """Add the parser of ``report``."""
    parser = commands.add_parser(
        "report",
        description="Write one HTML file of one run, or of several in the same charts. The page needs no network. Runs "
        "may be of any recipe and need not be finished.",
    )
    parser.add_argument("dirs", type=Path, nargs="+", metavar="OUTPUT_DIR", help="output_dir of a run")
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="FILE",
        help="the file to write (default: report.html in OUTPUT_DIR, or in the current folder for several runs)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write the page and print its path."""
    print(write(args.dirs, args.output))
