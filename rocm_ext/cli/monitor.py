"""``rocm-ext monitor``: shows the counters of the GPUs and the host, and runs, in a terminal or a browser.

Shows the counters until Ctrl-C: a live table on a terminal, a line per reading elsewhere. It reads AMD GPUs from sysfs
and NVIDIA's through nvidia-ml-py, and needs no root. A missing field is a counter that this machine does not have.
"""

import contextlib
import io
import json
import signal
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import disk_errors
from rocm_ext.base.log import duration
from rocm_ext.base.process import handled
from rocm_ext.cli._common import console, count, number, options, refuse_first, table
from rocm_ext.machine.counters import Counters, HardwareLog, Reading
from rocm_ext.report import hardware
from rocm_ext.runs.progress import progress
from rocm_ext.runs.records import of_sets

_Run = Mapping[str, Any]  # the progress of a run, see rocm_ext.runs.progress
_Show = Callable[[Reading, _Run | None], None]
_VALUES = {  # format of a value in a run's progress
    "cycle": "cycle {:.0f}",
    "phase": "{}",
    "step": "step {:.0f}",
    "epoch": "epoch {:.0f}",
    "loss": "loss {:.4f}",
    "margin": "margin {:.3f}",
    "accuracy": "accuracy {:.1%}",
    "val_loss": "validation loss {:.4f}",
    "val_margin": "validation margin {:.3f}",
    "val_accuracy": "validation accuracy {:.1%}",
    "tokens_per_second": "{:,.0f} tok/s",
    "reward": "reward {:.3f}",
    "held_out": "held-out {:.1%}",
    "flat": "{:.0%} of groups flat",
    "entropy": "entropy {:.2f}",
    "seconds": "{:.3g} s a {unit}",
}


def add(parser: ArgumentParser) -> None:
    option = options(parser)
    option("--interval S", "seconds between readings (default: 2)", number(float, 0.1, 86400), 2.0)
    option("--count N", "stop after N readings (default: at Ctrl-C)", count)
    runs = "also show the progress of this run, or of several with --web; they need not have begun"
    option("out RUN", runs, Path, nargs="*")
    option("--run RUN", "the same", Path, [], nargs="+")
    option("--log FILE", "also append the readings to FILE, as in a run's hardware.jsonl", Path)
    option("--json", "print a JSON object per reading, as in a run's hardware.jsonl")
    option("--root DIR", "read AMD GPUs from DIR/sys, such as a copy of /sys", Path, Path("/"))
    option = options(parser.add_argument_group("in a browser"))
    option("--web", "serve the page of `rocm-ext report` and the counters; it follows the runs")
    option(
        "--port N",
        "listen at this port of 127.0.0.1 (default: 8642, or a free one)",
        number(int, 0, 65535),
    )


def run(args: Namespace) -> None:
    """Show readings until ``--count`` of them or Ctrl-C."""
    args.out += args.run
    runs = len(args.out)
    refuse_first(
        (args.web and args.json, "--web and --json do not go together; choose one"),
        (not args.web and args.port is not None, "--port is for --web; add it"),
        (
            not args.web and runs > 1,
            f"--run takes one folder, not {runs}; add --web to follow several",
        ),
        (
            not args.root.is_dir(),
            f"--root {args.root} is not a folder; expected one that holds sys/class/drm",
        ),
    )
    counters = Counters(args.root)
    for note in counters.notes:
        print(note, file=sys.stderr)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack °
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):  # the usual end
        if args.log:
            try:
                log = stack.enter_context(HardwareLog(args.log))
            except OSError as error:
                raise UserError(
                    f"cannot write {args.log}: {error.strerror}; name another --log"
                ) from error
        screen = _browser(args, counters.notes) if args.web else _terminal(args)
        show = stack.enter_context(screen)
        # the first processor load covers the time since the counters were opened
        due = time.monotonic() + 0.1
        for _ in range(args.count or sys.maxsize):
            time.sleep(max(0.0, due - time.monotonic()))
            due = max(due + args.interval, time.monotonic())
            reading = counters.read()
            if args.log:
                with disk_errors(args.log):
                    log.write(reading)
            shows_run = args.out and not args.web
            show(reading, progress(args.out[0]) if shows_run else None)


@contextlib.contextmanager
def _browser(args: Namespace, notes: Sequence[str]) -> Iterator[_Show]:
    """Serve a page and its readings in threads."""
    from rocm_ext.report.live import LivePage, PageServer

    page = LivePage(args.out or (), args.interval, notes)
    with _ended_by_sigterm(), PageServer(page, args.port) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"http://127.0.0.1:{server.server_port}/  (Ctrl-C ends)", flush=True)
        try:
            yield lambda reading, run: page.take(reading)
        finally:
            server.shutdown()


@contextlib.contextmanager
def _terminal(args: Namespace) -> Iterator[_Show]:
    if args.json:
        yield _print_json
    elif not sys.stdout.isatty():
        yield lambda reading, run: print(_line(reading, run), flush=True)
    else:
        # Live restores the cursor
        with _ended_by_sigterm(), Live(console=console(), auto_refresh=False) as live:
            yield lambda reading, run: live.update(
                _screen(reading, run, args.interval), refresh=True
            )


def _print_json(reading: Reading, run: _Run | None) -> None:
    content: dict[str, Any] = dict(reading)
    if run is not None:
        content["run"] = run
    print(json.dumps(content), flush=True)


def _ended_by_sigterm() -> contextlib.AbstractContextManager[None]:
    """Context that ends with SIGTERM, by `timeout 60 rocm-ext monitor`, say, as it does with an exception."""
    return handled(lambda signum, frame: sys.exit(128 + signum), signal.SIGTERM)


def _line(reading: Reading, run: _Run | None) -> str:
    """A reading as one line of text."""
    columns, rows, _ = hardware.table(reading)
    words = [time.strftime("%H:%M:%S", time.localtime(reading["time"]))]
    if not reading["gpus"]:
        words.append("no GPU")
    for name, *cells in rows:
        known = [f"{column} {cell}" for column, cell in zip(columns, cells, strict=True) if cell]
        words.append(f"{name}: {', '.join(known)}")
    if run is not None:
        words.append(f"run: {run_text(run)}")
    return "  ".join(words)


def _screen(reading: Reading, run: _Run | None, interval: float) -> Group:
    """Draw a reading: a table of the GPUs and the host, and the progress of the run."""
    now = time.strftime("%H:%M:%S", time.localtime(reading["time"]))
    columns, rows, names = hardware.table(reading)
    counters = table("", "", *columns, right=tuple(columns))
    for row in rows:
        counters.add_row(*row)
    if not reading["gpus"]:
        names.append("no GPU with readable counters: AMD's need Linux and the amdgpu driver")
    screen: list[Any] = [Text(f"{now}, every {interval:g} s; Ctrl-C ends", style="dim"), counters]
    for name in names:
        screen.append(Text(name, style="dim"))
    if run is not None:
        screen += ["", Text(f"run: {run_text(run)}")]
    return Group(*screen)


def run_text(run: _Run) -> str:
    """Put the result of :func:`rocm_ext.runs.progress.progress` into words."""
    if "problem" in run:
        return run["problem"]
    unit = "cycle" if "cycle" in run else "step"
    words = []
    forms = dict(_VALUES)
    for column, title in of_sets([run]).items():
        forms[column] = f"{title} {{:.4f}}"
    for column, title in of_sets([run], "held_out", "held-out").items():
        forms[column] = f"{title} {{:.1%}}"
    for key, form in forms.items():
        if key in run:
            value = form.format(run[key], unit=unit).replace("%", " %")
            if key == unit and f"{unit}s" in run:
                value += f" of {run[f'{unit}s']:.0f}"
            words.append(value)
    if "seconds_left" in run:
        words.append(f"{duration(run['seconds_left'])} left")
    if not words:
        return "nothing written yet"
    if "seconds_ago" in run:
        words.append("finished" if run["finished"] else f"{run['seconds_ago']:.0f} s ago")
    return ", ".join(words)
