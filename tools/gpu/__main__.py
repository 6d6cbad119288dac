"""Check and measure this machine's GPU: ``python -m tools.gpu``. It takes at most 25 minutes, and no network."""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rocm_ext.base.files import replace_text
from tools.gpu.parts import PARTS, Part, chosen
from tools.gpu.runner import Runner
from tools.gpu.table import line, markdown, summary

IDENTIFY = Part("identify", "check", "identify:identify", 120)
# Nothing downloads, and this machine's bench file changes no run.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "ROCM_EXT_BENCH": os.devnull,
               "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}  # fmt: skip
HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def main() -> None:
    """Run the parts, write the results after every part, and exit with 1 if one failed."""
    args = parse()
    if args.list:
        for part in args.chosen:
            print(f"{part.name:26} {part.kind:6} {part.seconds:4.0f} s  {part.function}")
        return
    os.environ.update(ENVIRONMENT)
    # Python's tracker of semaphores complains about a process that a limit killed
    sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
    if args.device == "cpu":
        os.environ.update(dict.fromkeys(HIDDEN, ""))
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running part ends, too
    try:
        with tempfile.TemporaryDirectory(prefix="torchtune-rocm-gpu-", dir=args.folder) as folder:
            runner = Runner(args.device, args.tiny, Path(folder), args.minutes)
            sys.exit(run(runner, args.chosen, args.output))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def run(runner: Runner, parts: Sequence[Part], output: Path) -> int:
    """Identify the machine, run the parts, and return the exit code.

    Args:
        runner: runs them.
        parts: in their order.
        output: path of the Markdown file; the JSON file lies beside it.
    """
    known = runner.run(IDENTIFY)
    if known["status"] != "ok":
        print(f"error: {known['detail']}", file=sys.stderr)
        return 1
    (machine,) = known["rows"]
    runner.set_environment(machine["environment"])
    machine = {**machine, "date": str(date.today())}
    print(f"{machine['machine']}: {len(parts)} parts", file=sys.stderr, flush=True)
    done: list[Mapping[str, Any]] = []
    for number, part in enumerate(parts, 1):
        done.append(runner.run(part))
        write(output, machine, done)
        print(f"[{number}/{len(parts)}] {line(done[-1])}", file=sys.stderr, flush=True)
    print(f"{summary(done)}. Wrote {output} and {output.with_suffix('.json')}", file=sys.stderr)
    return (
        1 if any(result["status"] not in ("ok", "skipped", "out of time") for result in done) else 0
    )


def write(output: Path, machine: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
    """Write both files; they appear by rename."""
    texts = {
        ".md": markdown(machine, results),
        ".json": json.dumps({**machine, "parts": results}, indent=1) + "\n",
    }
    for suffix, text in texts.items():
        replace_text(output.with_suffix(suffix), text)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__)
    option = parser.add_argument
    option("--minutes", type=float, default=25, help="for all parts together (default: 25)")
    option("--parts", nargs="+", default=[], metavar="PART",
           help="run these parts: names, first words of names, patterns with *, or `checks` and `speed`")  # fmt: skip
    option("--list", action="store_true", help="list the parts, and run none")
    option(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cuda is any GPU, AMD's too (default)",
    )
    option("--tiny", action="store_true", help="small models: a few minutes")
    option("--output", type=Path, default=Path("gpu.md"),
           help="the table to write, with a .json file beside it (default: gpu.md)")  # fmt: skip
    option(
        "--folder",
        type=Path,
        help="where to put models, up to 20 GB while it runs (default: the temporary folder)",
    )
    args = parser.parse_args()
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu takes hours with full-size models; add --tiny")
    if not args.minutes > 0:
        parser.error("--minutes must be above 0")
    if args.output.suffix not in (".md", ".json"):
        args.output = args.output.with_name(f"{args.output.name}.md")
    args.output = args.output.with_suffix(".md")
    for name, folder in (("output", args.output.resolve().parent), ("folder", args.folder)):
        if folder is not None and not folder.is_dir():
            parser.error(f"--{name}: there is no folder {folder}")
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            parser.error(f"--{name}: {error.strerror or error}: {folder or tempfile.gettempdir()}")
    try:
        args.chosen = chosen(args.parts)
    except KeyError as error:
        parser.error(
            f"--parts {error.args[0]} names none of {', '.join(part.name for part in PARTS)}"
        )
    return args


if __name__ == "__main__":
    main()
