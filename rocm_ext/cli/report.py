"""``rocm-ext report``: shows runs as one HTML page.

Writes one HTML file of one run, or of several in the same charts. Runs may be of any recipe and need not be finished.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rocm_ext.cli._common import add_force, check_new_file, options
from rocm_ext.report import write


def add(parser: ArgumentParser) -> None:
    option = options(parser)
    option("dirs RUN", "output_dir of a run", Path, nargs="+")
    output = (
        "the file to write (default: report.html in RUN, or in the current folder for several runs)"
    )
    option("--output -o FILE", f"{output}; an earlier .html is replaced", Path)
    add_force(parser)


def run(args: Namespace) -> None:
    """Write the page and print its path."""
    if args.output:
        check_new_file(args.output, args.force or args.output.suffix == ".html")
    print(write(args.dirs, args.output))
