"""``rocm-ext bench``: measures this machine."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.base import registry
from rocm_ext.base.errors import UserError
from rocm_ext.base.files import disk_errors, replace_text
from rocm_ext.base.registry import Recipe
from rocm_ext.bench.busy import OtherPrograms
from rocm_ext.bench.spec import PROBES
from rocm_ext.cli._options import add_overrides
from rocm_ext.cli._tables import console, table
from rocm_ext.config import startable
from rocm_ext.config.checks import check_values
from rocm_ext.machine.bench_file import bench_path, machine_key
from rocm_ext.machine.budget import memory_budget
from rocm_ext.machine.detect import Machine, detect
from rocm_ext.machine.environment import environment_for
from rocm_ext.machine.profile import Profile, choose_profile, load_profile

if TYPE_CHECKING:
    from rocm_ext.bench.runner import Measurement
    from rocm_ext.bench.sweep import Sweep, Winner

_UNITS = {"FLOP/s": (1e12, "TFLOP/s"), "B/s": (1e9, "GB/s"), "tokens/s": (1.0, "tokens/s")}


@dataclass(frozen=True)
class BenchSubject:
    """What is measured: a config on a machine.

    Attributes:
        recipe: recipe that runs the config.
        name: name of the config.
        run_cfg: the config.
        training: the part of it that trains.
        machine: machine to measure.
        profile: the machine's profile.
        sweep: sweep of training settings.
    """

    recipe: Recipe
    name: str
    run_cfg: DictConfig
    training: DictConfig
    machine: Machine
    profile: Profile
    sweep: "Sweep"


def add(commands) -> None:
    """Add the parser of ``bench``."""
    parser = commands.add_parser(
        "bench",
        description="Measure matrix products by direction, dtype and library; memory bandwidth; attention kernels; the "
        "links between GPUs; the loader; training steps of a config's model with random weights, one setting after "
        "another around the fastest so far; and decoding steps. It downloads nothing. Each measurement runs in a child "
        "process within the memory budget; a crash or hang becomes a row of the table. Writes bench.json, prints the "
        "fastest settings as YAML, and writes a config that has them.",
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
        help="measure only these: gemm, bandwidth, link, attention, loader, training, decoding; "
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
    option(
        "--yaml",
        type=Path,
        metavar="FILE",
        help="write the config with the fastest settings to this file (default: bench.yaml beside bench.json)",
    )
    option("--json", action="store_true", help="print the content of bench.json instead of tables")
    add_overrides(parser)
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    if not 0 < (value := float(text)) < 1e6:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def run(args: argparse.Namespace) -> None:
    """Measure, print the measurements and the fastest settings, and write the files."""
    from rocm_ext.bench import runner, spec
    from rocm_ext.bench.sweep import Sweep

    machine = detect()
    only = _only(args)
    profile = load_profile(choose_profile(machine)[0])
    name = args.config or profile.bench_config
    # the machine's profile overrules a config for another machine
    overrides = [f"hardware={profile.name}", *args.overrides]
    recipe = config.recipe_of(name, args.overrides)
    registry.extended(recipe)
    run_cfg = config.load(recipe, name, overrides)
    cfg = OmegaConf.create(config.trainer_config(run_cfg))
    check_values(cfg)
    if cfg.device == "cpu":  # even where there is a GPU: its speeds are not measured
        if machine.backend != "cpu" and not args.output:
            raise UserError("hardware=cpu on a machine with a GPU: add --output FILE; bench.json is for the GPU")
        machine = replace(machine, backend="cpu", arch=None, name=None, unified=False)
    profile = load_profile(cfg.hardware)
    budget, why = memory_budget(profile, machine)
    locked = {} if args.risky else profile.locked
    first = [item for item in spec.items(machine, locked, args.quick) if not only or item.probe in only]
    sweep = Sweep(cfg, machine, locked, args.quick)
    trains = not only or "training" in only
    measured = BenchSubject(recipe, name, run_cfg, cfg, machine, profile, sweep)
    args.output, args.yaml = _files(args, only)
    progress = _Progress(len(first) + sweep.most * trains, quiet=args.json)
    progress.say(f"{machine}; model of {name}; budget {budget / 2**30:.1f} GiB ({why})")
    job = spec.Spec(name, tuple(overrides), budget, args.quick, 0.3 if args.quick else 1.0)
    others = OtherPrograms()
    with _environment(profile, machine) as environ:
        measurements = runner.run(
            job,
            lambda done: first if not done and first else sweep.following(done) if trains else [],
            args.timeout,
            progress.tell,
            environ,
        )
    busy = others.cores()
    _finish(args, measurements, measured, busy)
    if busy > others.WORTH_TELLING:
        progress.say(
            f"warning: other programs used {busy:.1f} cores, so these speeds are too low. End them and measure again"
        )


def _only(args: argparse.Namespace) -> list[str]:
    """The probes of ``--only``. argparse reads overrides as its arguments, too; these move to ``args.overrides``."""
    args.overrides += [word for word in args.only or () if "=" in word]
    only = [word for word in args.only or () if "=" not in word]
    if strange := [name for name in only if name not in PROBES]:
        raise UserError(f"--only {strange[0]} is not a probe; expected some of {', '.join(PROBES)}", code=2)
    return only


def _files(args: argparse.Namespace, only: list[str]) -> tuple[Path | None, Path | None]:
    """The files to write: the measurements, and the config with the fastest settings."""
    output = args.output or (None if only else bench_path())
    if output is None and not only:
        raise UserError("this user has no home folder; add --output FILE, and set ROCM_EXT_BENCH=FILE for plan")
    beside = output.with_suffix(".yaml") if output and not args.output else None
    if args.share and only:
        raise UserError("--share needs all measurements; leave --only out", code=2)
    files = {"--output": output, "--yaml": args.yaml or beside, "--share": args.share}
    options: dict[Path, str] = {}
    for option, path in files.items():
        if path is not None:
            _check_writable(option, path)
            if (other := options.setdefault(path.resolve(), option)) != option:
                raise UserError(f"{other} and {option} are the same file, {path}", code=2)
    return output, files["--yaml"]


@contextmanager
def _environment(profile: Any, machine: Any) -> Iterator[dict[str, str]]:
    """The environment of all measurements."""
    environ = {key: value for key, (value, _) in environment_for(profile, machine, os.environ).items()}
    with TemporaryDirectory() as folder:
        yield {**environ, "PYTORCH_TUNABLEOP_FILENAME": f"{folder}/tunableop.csv"}  # else in the current folder


def _check_writable(option: str, path: Path) -> None:

    if path.is_dir():
        raise UserError(f"{option} {path} is a folder; name a file")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path.parent).close()


def _finish(args: argparse.Namespace, measurements: "list[Measurement]", measured: BenchSubject, busy: float) -> None:
    import torch

    from rocm_ext.bench import summary
    from rocm_ext.bench.run_config import run_config
    from rocm_ext.bench.share import share
    from rocm_ext.machine.numerics import pick_dtype
    from rocm_ext.model.download import use_shape

    cfg, machine = measured.training, measured.machine
    shape = use_shape(cfg)
    target = torch.device("cpu" if cfg.device == "cpu" else "cuda")
    won = summary.winners(measurements, cfg, measured.sweep)
    known = summary.figures(measurements, cfg, pick_dtype(cfg.dtype, machine)[0], target)
    content = {
        "date": date.today().isoformat(),
        "machine": machine_key(machine),
        "config": measured.name,
        "quick": args.quick,
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
    if args.output is None:
        said = "bench.json was not written: it holds all probes. To keep these: --output FILE"
    elif known:
        replace_text(args.output, json.dumps(content, indent=2) + "\n")
        said = f"wrote {args.output}; `rocm-ext plan` and `hardware: auto` use it"
    else:
        said = f"{args.output} was not written: it needs gemm and bandwidth"
    if args.yaml is not None:
        text = run_config(measured.run_cfg, measured.recipe, measured.name, args.yaml, won, measured.profile, machine)
        replace_text(args.yaml, text)
        said += f"\nwrote {args.yaml}: {measured.name} with these settings; {_start(measured.recipe, args.yaml)}"
    if args.share:
        said += "\n" + share(content, cfg, machine, args.share)
    if not args.json:
        print(said)


def _start(recipe: Any, path: Path) -> str:

    return f"`tune run {startable(recipe)} --config {path}`"


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
    """``forward, fp32, rocBLAS``; numbers, switches and settings of training with their names."""
    item = measurement.item
    plain = item.probe != "training"
    named = [value if isinstance(value, str) and plain else f"{key} {value}" for key, value in item.values.items()]
    return ", ".join([*named, *(f"{key}={value}" for key, value in item.environ.items() if not plain)])


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
