"""``rocm-ext bench``: measures this machine.

Measures matrix products by direction, dtype and library; memory bandwidth; the loader; decoding steps; and training
steps of a config's model with random weights, one setting after another around the fastest so far. It downloads
nothing. Each measurement runs in a child process within the memory budget; a crash or hang becomes a row of the table.
Writes bench.json, which plan and `hardware: auto` use, and prints the fastest settings as YAML.
"""

import json
import os
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf
from rich.markup import escape

from rocm_ext import config
from rocm_ext.base import registry
from rocm_ext.base.errors import UserError
from rocm_ext.base.files import replace_text
from rocm_ext.bench.sweep import PROBES, Item, Measurement, Spec, Sweep, Winner
from rocm_ext.cli._common import (
    add_force,
    add_json,
    add_overrides,
    check_new_file,
    console,
    number,
    options,
    print_json,
    refuse_first,
    table,
)
from rocm_ext.config.checks.training import check_values
from rocm_ext.machine.bench_file import bench_path, machine_key
from rocm_ext.machine.budget import gib, memory_budget
from rocm_ext.machine.detect import Machine, detect
from rocm_ext.machine.environment import environment_for
from rocm_ext.machine.profile import Profile, choose_profile, load_profile

_LOOK = 1.0  # seconds in which the load of other programs is measured
_UNITS = {"FLOP/s": (1e12, "TFLOP/s"), "B/s": (1e9, "GB/s"), "tokens/s": (1.0, "tokens/s")}


def add(parser: ArgumentParser) -> None:
    option = options(parser)
    option(
        "--config NAME", "config whose model is measured (default: the machine's, 7B or smaller)"
    )
    option("--quick", "fewer and shorter measurements: under two minutes on two CPU cores")
    option("--risky", "also measure what the profile locks because owners report hangs")
    option("--timeout S", "seconds per measurement (default: 300)", number(float, 0.1, 1e6), 300)
    only = f"measure only this one of {', '.join(PROBES)}; may be repeated, and writes to --output only"
    option("--only PROBE", only, choices=PROBES, action="append")
    option("--output FILE", "the file to write (default: where plan and recipes look)", Path)
    add_force(parser)
    add_json(parser)
    add_overrides(parser)


def run(args: Namespace) -> None:
    """Measure, print the measurements and the fastest settings, and write the file."""
    output = _output(args)
    probes = [override for override in args.overrides if override in PROBES]
    refuse_first(
        (
            args.only and probes,
            f"{' '.join(probes)} is no key=value; for more probes: --only A --only B",
        )
    )
    model = _model(args)
    budget, why = memory_budget(model.profile, model.machine)
    print(
        f"{model.machine}; model of {model.name}; budget {gib(budget)} ({why})",
        file=sys.stderr,
    )
    measured, of_training = _measure(model, budget, args)
    from rocm_ext.bench import summary

    winners = summary.winners(measured, of_training)
    content = {
        "date": date.today().isoformat(),
        "machine": machine_key(model.machine),
        "figures": _figures(model, measured),
        "settings": summary.settings(measured, winners, model.cfg.compile),
        "rows": [asdict(measurement) for measurement in measured],
        "config": model.name,
        "quick": args.quick,
    }
    if args.json:
        print_json(content)
    else:
        _show(measured, winners)
    if output is None:
        print(
            "bench.json was not written: it holds all probes. To keep these: --output FILE",
            file=sys.stderr,
        )
    elif content["figures"]:
        replace_text(output, json.dumps(content, indent=2) + "\n")
        print(_written(output), file=sys.stderr)
    else:
        print(f"{output} was not written: it needs gemm and bandwidth", file=sys.stderr)


@dataclass(frozen=True)
class _Model:
    """The config whose model is measured, with its overrides, on this machine."""

    name: str
    overrides: tuple[str, ...]
    cfg: DictConfig
    machine: Machine
    profile: Profile


def _model(args: Namespace) -> _Model:
    """Load the config, and check that bench.json may have the speeds of its device."""
    machine = detect()
    profile = load_profile(choose_profile(machine)[0])
    name = args.config or profile.bench_config
    # the machine's profile overrules a config for another machine
    overrides = (f"hardware={profile.name}", *args.overrides)
    recipe = config.recipe_of(name, args.overrides)
    registry.extended(recipe)
    cfg = OmegaConf.create(config.trainer_config(config.load(recipe, name, overrides)))
    check_values(cfg)
    if cfg.device == "cpu":  # even where there is a GPU: its speeds are not measured
        if machine.backend != "cpu" and not args.output:
            raise UserError(
                "hardware=cpu on a machine with a GPU: add --output FILE; bench.json is for the GPU"
            )
        machine = replace(machine, backend="cpu", arch=None, name=None, unified=False)
    return _Model(name, overrides, cfg, machine, load_profile(cfg.hardware))


def _measure(model: _Model, budget: int, args: Namespace) -> tuple[list[Measurement], list[Winner]]:
    """Run the sweep in child processes, with progress; return its measurements and the best of training."""
    locked = {} if args.risky else model.profile.locked
    sweep = Sweep(model.cfg, model.machine, locked, args.quick, args.only or PROBES)
    from rocm_ext.bench import runner

    _warn_of_load()
    measured: list[Measurement] = []
    spec = Spec(model.name, model.overrides, budget, 0.3 if args.quick else 1.0)
    variables = environment_for(model.profile, model.machine, os.environ)
    environ = {name: variable.value for name, variable in variables.items()}
    with TemporaryDirectory() as folder:
        # else in the current folder
        environ["PYTORCH_TUNABLEOP_FILENAME"] = f"{folder}/tunableop.csv"
        with runner.children(spec, args.timeout, environ) as measure_in_child:

            def measure(item: Item) -> Measurement:
                measurement = measure_in_child(item)
                measured.append(measurement)
                outcome = f"{item.probe} {_describe(measurement)}: {_outcome(measurement)}"
                print(f"[{len(measured)}/{sweep.most}] {outcome}", file=sys.stderr, flush=True)
                return measurement

            of_training = sweep.run(measure)
    return measured, of_training


def _warn_of_load() -> None:
    """Warn if other programs use cores.

    One busy core of two makes small steps ten times slower when threads wait for one another (measured), and so evenly
    that quartiles do not show it.
    """
    busy = psutil.cpu_percent(_LOOK) / 100 * psutil.cpu_count()
    if busy > 0.1:
        slow = (
            f"other programs use {busy:.1f} cores, so these speeds will be too low; better end them"
        )
        print(f"warning: {slow}", file=sys.stderr)


def _figures(model: _Model, measured: Sequence[Measurement]) -> dict[str, Any]:
    """Return the speeds that plan uses, for the dtype and device of the config."""
    import torch

    from rocm_ext.bench import summary
    from rocm_ext.machine.numerics import pick_dtype
    from rocm_ext.model.download import use_shape

    use_shape(model.cfg)
    dtype, _ = pick_dtype(model.cfg.dtype, model.machine)
    device = torch.device("cpu" if model.cfg.device == "cpu" else "cuda")
    return summary.figures(measured, model.cfg, dtype, device)


def _written(output: Path) -> str:
    """Say who reads the file: plan and ``hardware: auto`` look at one path only."""
    path = bench_path()
    if path is not None and output.absolute() == path.absolute():
        return f"wrote {output}; `rocm-ext plan` and `hardware: auto` use it"
    file = shlex.quote(str(output.absolute()))
    return f"wrote {output}; for `rocm-ext plan` and `hardware: auto`: export ROCM_EXT_BENCH={file}"


def _output(args: Namespace) -> Path | None:
    """Return the file to write; the default one is replaced, since plan needs the newest speeds."""
    if args.output:
        return check_new_file(args.output, args.force)
    if args.only:
        return None
    path = bench_path()
    if path is None:
        raise UserError(
            "this user has no home folder; add --output FILE, and set ROCM_EXT_BENCH=FILE for plan"
        )
    return check_new_file(path, force=True)


def _describe(measurement: Measurement) -> str:
    """``forward, fp32, rocBLAS``; numbers and settings of training with their names."""
    words = []
    for key, value in measurement.item.values.items():
        named = measurement.item.probe == "training" or not isinstance(value, str)
        words.append(f"{key} {value}" if named else value)
    return ", ".join(words)


def _outcome(measurement: Measurement) -> str:
    if measurement.status != "ok":
        return f"{measurement.status} ({measurement.detail})"
    scale, unit = _UNITS[measurement.result["unit"]]
    speeds = []
    for name in ("value", "low", "high"):
        speed = measurement.result[name] / scale
        speeds.append(f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}")
    return f"{speeds[0]} {unit} ({speeds[1]}-{speeds[2]})"


def _show(measured: Sequence[Measurement], winners: Sequence[Winner]) -> None:
    out = console()
    for probe in PROBES:
        of_probe = [measurement for measurement in measured if measurement.item.probe == probe]
        if not of_probe:
            continue
        results = table(probe, "what", "median (quartiles)")
        for measurement in of_probe:
            style = {"ok": "", "skipped": "dim"}.get(measurement.status, "red")
            results.add_row(
                escape(_describe(measurement)), escape(_outcome(measurement)), style=style
            )
        out.print(results, "")
    print("# the fastest settings; the other keys stay as configured")
    for winner in winners:
        if winner.key.isupper():
            print(f"# export {winner.key}={winner.value}  # {winner.reason}")
        elif "." in winner.key:
            where = "in RAFT and GRPO: " if winner.key.startswith("engine.") else ""
            print(f"# {where}{winner.key}={winner.value} on the command line  # {winner.reason}")
        else:
            print(f"{winner.key}: {winner.value}  # {winner.reason}")
