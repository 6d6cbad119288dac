"""``rocm-ext bench``: measures this machine."""

import argparse
import json
import os
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_ext.cli._options import add_overrides
from rocm_ext.errors import UserError

if TYPE_CHECKING:
    from rocm_ext.bench.runner import Measurement
    from rocm_ext.bench.summary import Winner

_UNITS = {"FLOP/s": (1e12, "TFLOP/s"), "B/s": (1e9, "GB/s"), "tokens/s": (1.0, "tokens/s")}


def add(commands) -> None:
    """Add the parser of ``bench``."""
    parser = commands.add_parser(
        "bench",
        help="measure this machine, for `rocm-ext plan` and `hardware: auto`",
        description="Measure matrix products by direction, dtype and library; memory bandwidth; attention kernels; the "
        "loader; and training and decoding steps of a config's model with random weights. It downloads nothing. Each "
        "measurement runs in a child process within the memory budget; a crash or hang becomes a row of the table. "
        "Writes bench.json and prints the fastest settings as YAML.",
    )
    option = parser.add_argument
    option(
        "--config",
        metavar="NAME",
        help="whose model trains and decodes (default: the machine's own, 7B or smaller)",
    )
    option("--quick", action="store_true", help="fewer and shorter measurements: under two minutes on two CPU cores")
    option("--risky", action="store_true", help="also measure what the profile locks because owners report hangs")
    option(
        "--timeout",
        type=_seconds,
        default=300,
        metavar="S",
        help="seconds per measurement, at most (default: 300)",
    )
    option(
        "--only",
        nargs="+",
        metavar="PROBE",
        help="measure only these: gemm, bandwidth, attention, loader, training, decoding; "
        "needs --output to write a file, because plan and recipes use a file with all of them",
    )
    option(
        "--output",
        type=Path,
        metavar="FILE",
        help="the file to write (default: where plan and recipes look)",
    )
    option(
        "--share",
        type=Path,
        metavar="FILE",
        help="also write an anonymous record (machine, versions, speeds) to attach to an issue",
    )
    option("--json", action="store_true", help="print the content of bench.json instead of tables")
    add_overrides(parser)
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    if not 0 < (value := float(text)) < 1e6:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def run(args: argparse.Namespace) -> None:
    """Measure, print the measurements and the fastest settings, and write the file."""
    from omegaconf import OmegaConf

    from rocm_ext import config, registry
    from rocm_ext.bench import runner, spec
    from rocm_ext.bench.busy import OtherPrograms
    from rocm_ext.config.checks import check_values
    from rocm_ext.hardware.bench_file import bench_path
    from rocm_ext.hardware.budget import memory_budget
    from rocm_ext.hardware.environment import environment_for
    from rocm_ext.hardware.machine import detect
    from rocm_ext.hardware.profile import choose_profile, load_profile

    machine = detect()
    args.overrides += [word for word in args.only or () if "=" in word]  # argparse reads them as arguments of --only
    only = [word for word in args.only or () if "=" not in word]
    if strange := [name for name in only if name not in spec.PROBES]:
        raise UserError(f"--only {strange[0]} is not a probe; expected some of {', '.join(spec.PROBES)}", code=2)
    profile = load_profile(choose_profile(machine)[0])
    name = args.config or profile.bench_config
    # the machine's profile overrules a config for another machine
    overrides = [f"hardware={profile.name}", *args.overrides]
    recipe = config.recipe_of(name, args.overrides)
    registry.extended(recipe)
    cfg = OmegaConf.create(config.trainer_config(config.load(recipe, name, overrides)))
    check_values(cfg)
    if cfg.device == "cpu":  # even where there is a GPU: its speeds are not measured
        if machine.backend != "cpu" and not args.output:
            raise UserError("hardware=cpu on a machine with a GPU: add --output FILE; bench.json is for the GPU")
        machine = replace(machine, backend="cpu", arch=None, name=None, unified=False)
    profile = load_profile(cfg.hardware)
    budget, why = memory_budget(profile, machine)
    seconds = 0.3 if args.quick else 1.0
    job = spec.Spec(name, tuple(overrides), budget, args.quick, seconds)
    items = [item for item in spec.items(cfg, machine, profile, args.quick, args.risky)
             if not only or item.probe in only]  # fmt: skip
    output = args.output or (None if only else bench_path())
    if args.share:
        if only:
            raise UserError("--share needs all measurements; leave --only out", code=2)
        _check_writable(args.share, "--share")
    if output is not None:
        _check_writable(output)
    elif not only:
        raise UserError("this user has no home folder; add --output FILE, and set ROCM_EXT_BENCH=FILE for plan")
    progress = _Progress(len(items), quiet=args.json)
    progress.say(f"{machine}; model of {name}; budget {budget / 2**30:.1f} GiB ({why})")
    environ = {key: value for key, (value, _) in environment_for(profile, machine, os.environ).items()}
    others = OtherPrograms()
    measurements = runner.run(job, items, args.timeout, progress.tell, environ)
    busy = others.cores()
    _finish(args, output, measurements, cfg, machine, job, busy)
    if busy > others.WORTH_TELLING:
        progress.say(f"warning: other programs used {busy:.1f} cores, so these speeds are too low. End them and "
                     "measure again")  # fmt: skip


def _check_writable(path: Path, option: str = "--output") -> None:
    from rocm_ext.files import disk_errors

    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; name a file")


def _finish(
    args: argparse.Namespace,
    output: Path | None,
    measurements: "list[Measurement]",
    cfg: Any,
    machine: Any,
    job: Any,
    busy: float,
) -> None:
    import torch

    from rocm_ext.bench import summary
    from rocm_ext.bench.share import share
    from rocm_ext.files import replace_text
    from rocm_ext.hardware.bench_file import machine_key
    from rocm_ext.hardware.numerics import pick_dtype
    from rocm_ext.model.download import use_shape

    shape = use_shape(cfg)
    target = torch.device("cpu" if cfg.device == "cpu" else "cuda")
    won = summary.winners(measurements, cfg)
    known = summary.figures(measurements, cfg, pick_dtype(cfg.dtype, machine)[0], target)
    content = {
        "date": date.today().isoformat(),
        "machine": machine_key(machine),
        "config": job.config,
        "quick": job.quick,
        "cores_of_other_programs": round(busy, 2),
        "figures": known,
        "settings": {winner.key: winner.value for winner in won},
        "rows": [each.to_dict() for each in measurements],
    }
    if args.json:
        print(json.dumps(content))
    else:
        _print_measurements(measurements)
        if shape:
            print(shape)
        _print_winners(won)
    if output is None:
        said = "nothing was written: bench.json holds all probes. To keep these: --output FILE"
    elif known:
        replace_text(output, json.dumps(content, indent=2) + "\n")
        said = f"wrote {output}; `rocm-ext plan` and `hardware: auto` use it"
    else:
        said = "nothing was written: bench.json needs gemm and bandwidth"
    if args.share:
        said += "\n" + share(content, cfg, machine, args.share)
    if not args.json:
        print(said)


class _Progress:
    """Prints to stderr what was measured."""

    def __init__(self, total: int, quiet: bool) -> None:
        self._total, self._done, self._quiet = total, 0, quiet

    def say(self, text: str) -> None:
        """Print a line, unless quiet."""
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def tell(self, measurement: "Measurement") -> None:
        """Print one more measurement."""
        self._done += 1
        self.say(
            f"[{self._done}/{self._total}] {measurement.item.probe} {_describe(measurement)}: {_outcome(measurement)}"
        )


def _describe(measurement: "Measurement") -> str:
    """``forward, fp32, rocBLAS``; numbers and switches with their names."""
    named = (value if isinstance(value, str) else f"{key} {value}" for key, value in measurement.item.values.items())
    return ", ".join(named)


def _outcome(measurement: "Measurement") -> str:
    if measurement.status != "ok":
        return f"{measurement.status} ({measurement.detail})"
    scale, unit = _UNITS[measurement.result["unit"]]
    value, low, high = (_number(measurement.result[name] / scale) for name in ("value", "low", "high"))
    return f"{value} {unit} ({low}-{high})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _print_measurements(measurements: "list[Measurement]") -> None:
    from rich.markup import escape

    from rocm_ext.bench.spec import PROBES
    from rocm_ext.cli._tables import console, table
    from rocm_ext.plan.memory import readable

    out = console()
    for probe in PROBES:
        of_probe = [each for each in measurements if each.item.probe == probe]
        if not of_probe:
            continue
        made = table(probe, "what", "median (quartiles)", "memory", right=("memory",))
        for each in of_probe:
            memory = readable(each.result["peak_memory"]) if "peak_memory" in each.result else ""
            style = "" if each.status == "ok" else "dim" if each.status == "skipped" else "red"
            made.add_row(escape(_describe(each)), escape(_outcome(each)), memory, style=style)
        out.print(made)
        out.print()


def _print_winners(won: "list[Winner]") -> None:
    print("# the fastest settings; the other keys stay as configured")
    for winner in won:
        if winner.key.isupper():
            print(f"# export {winner.key}={winner.value}  # {winner.reason}")
        elif "." in winner.key:
            print(f"# in RAFT and GRPO: {winner.key}={winner.value} on the command line  # {winner.reason}")
        else:
            print(f"{winner.key}: {winner.value}  # {winner.reason}")
