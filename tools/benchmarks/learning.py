"""Held-out accuracy against samples drawn, for RAFT and policy gradients: ``python -m tools.benchmarks.learning``.

Every method starts from the same pocket model and draws the same number of samples for training, with each seed. Its
settings are those of ``cpu_pocket_raft`` or ``cpu_pocket_grpo`` with the changes in :data:`METHODS`. A RAFT cycle draws
as many samples as a whole number of policy-gradient steps, and evaluations fall on the same counts.

Each run has a process and one thread. Finished runs are not repeated, and interrupted ones go on. The output folder
gets ``learning.json`` (all points), ``learning.md`` (tables), ``learning.svg`` and ``collapse.svg``.
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
from rocm_ext.base.files import read_lines
from rocm_ext.config.checks import updates_of_pass
from rocm_ext.report.charts import Line
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.held_out import held_out
from tools.benchmarks.picture import write_picture

RAFT, GRPO = "raft_rocm", "grpo_rocm"
CONFIGS = {RAFT: "cpu_pocket_raft", GRPO: "cpu_pocket_grpo"}
TARGET = 0.85  # held-out accuracy of the column "samples to"
PARTS = 4  # evaluations of a policy-gradient run in the time of a RAFT cycle
HOT = 30  # the collapsing run's learning rate, relative to the config's
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # Student's two-sided 95 % quantiles, by degrees of freedom
# what a collapsing run is watched by
SIGNS = {
    "entropy": "entropy, nats per token",
    "flat": "share of flat groups",
    "clipped": "share of clipped tokens",
    "mismatch_kl": "KL of sampler and trainer",
    "grad_norm": "gradient norm",
    "mean_tokens": "tokens per answer",
}


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        name: in tables.
        recipe: that runs it.
        changes: to the recipe's config.
        on_policy: it has no ratio, so a step has one update. Where the config's steps have several, its own are as
            many times smaller and more.
    """

    name: str
    recipe: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    on_policy: bool = False


METHODS = {
    "raft": Method("RAFT", RAFT),
    "raft++": Method("RAFT++", RAFT, {"objective": "raft++"}),
    "grpo": Method("GRPO", GRPO, {"loss": "grpo"}),
    "dr_grpo": Method("Dr. GRPO", GRPO, {"loss": "dr_grpo"}),
    "rloo": Method("RLOO", GRPO, {"loss": "rloo"}, on_policy=True),
    "cispo": Method("CISPO", GRPO, {"loss": "cispo"}),
}


@dataclass(frozen=True)
class Budget:
    """How many samples every run draws.

    Attributes:
        steps: of a policy-gradient run.
        every: steps between two evaluations.
        cycles: of a RAFT run.
        prompts: of a cycle.
        samples: of a run.
    """

    steps: int
    every: int
    cycles: int
    prompts: int
    samples: int


def budget(samples: int, step: int, each: int, prompts: int) -> Budget:
    """Return the budget next to ``samples`` that cycles and policy-gradient steps share.

    Args:
        samples: that a run draws, about.
        step: samples of a policy-gradient step.
        each: answers to a prompt of a RAFT cycle.
        prompts: that there are.
    """
    longest = max(1, prompts * each // step // PARTS * PARTS)  # steps that draw as much as the longest cycle
    cycles = max(1, round(samples / (longest * step)))
    steps = min(longest, max(1, round(samples / cycles / step)))
    steps -= steps % PARTS if steps > PARTS else 0
    return Budget(cycles * steps, max(1, steps // PARTS), cycles, steps * step // each, cycles * steps * step)


def configs() -> tuple[Any, Any]:
    """Return the configs of RAFT and of policy gradients."""
    return tuple(config.load(recipe, name, []) for recipe, name in CONFIGS.items())  # type: ignore[return-value]


# ---- runs


@dataclass(frozen=True)
class Job:
    """A run: its folder, its recipe and the changes to the recipe's config."""

    folder: Path
    recipe: str
    changes: Mapping[str, Any]

    @property
    def done(self) -> bool:
        """Whether the run has ended with all its steps or cycles."""
        return (self.folder / "config.yaml").exists() and RunFolder(self.folder).finished


def job(method: str, seed: int, spent: Budget, out: Path, pocket: Path, grpo: Any) -> Job:
    """Describe a run.

    Args:
        method: of :data:`METHODS`, or ``collapse``: GRPO with :data:`HOT` times the rate.
        seed: of the run.
        spent: samples that it draws.
        out: folder of all runs.
        pocket: folder of the model.
        grpo: config of policy gradients.
    """
    chosen = METHODS["grpo" if method == "collapse" else method]
    folder = out / "runs" / f"{method}_{seed}"
    changes: dict[str, Any] = {**chosen.changes, "seed": seed, "pocket": pocket, "output_dir": folder,
                               "verify_workers": 1, "resume_from_checkpoint": True}  # fmt: skip
    if chosen.recipe == RAFT:
        return Job(folder, RAFT, {**changes, "cycles": spent.cycles, "prompts_per_cycle": spent.prompts})
    parts = 1
    if chosen.on_policy:
        parts = math.gcd(updates_of_pass(grpo), grpo.prompts_per_step)
        changes |= {
            "updates_per_step": 1,
            "groups_per_update": "null",
            "prompts_per_step": grpo.prompts_per_step // parts,
        }
    if method == "collapse":
        changes["optimizer.lr"] = HOT * grpo.optimizer.lr
    # however few groups teach: a collapsed run goes on, and so does one that has nothing more to learn
    changes |= {"steps": parts * spent.steps, "max_flat_steps": parts * spent.steps}
    changes |= dict.fromkeys(["eval_every_n_steps", "save_every_n_steps"], parts * spent.every)
    return Job(folder, GRPO, changes)


def complete(task: Job) -> str | None:
    """Do a run, or what an interrupted process left of it.

    Returns:
        The end of its output if it failed, else None.
    """
    if task.done:
        return None
    task.folder.parent.mkdir(parents=True, exist_ok=True)
    overrides = [f"{key}={value}" for key, value in task.changes.items()]
    command = [sys.executable, "-m", f"rocm_ext.recipes.{task.recipe}", "--config", CONFIGS[task.recipe], *overrides]
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with task.folder.with_suffix(".log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **one}).returncode
    print(f"{task.folder.name}: {'done' if code == 0 else f'exit {code}'}", file=sys.stderr, flush=True)
    return task.folder.with_suffix(".log").read_text()[-2000:] if code else None


# ---- results


def points(folder: Path, first: float) -> list[tuple[int, float]]:
    """Read a run's samples drawn and held-out accuracies; ``first`` is that of the base model."""
    found = {0: first} | {each.answers: each.scores["correct"] / each.scores["prompts"]
                          for each in held_out(RunFolder(folder))}  # fmt: skip
    return sorted(found.items())


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
            return before[0] + (point[0] - before[0]) * ((target - before[1]) / rise if rise else 0.0)
        before = point
    return math.inf


def mean_accuracy(curve: Sequence[tuple[int, float]]) -> float:
    """Return the mean accuracy over the samples drawn (trapezoids)."""
    x, y = np.array(curve, dtype=float).T
    return float(np.trapezoid(y, x) / (x[-1] - x[0])) if len(x) > 1 else float(y[0])


def table(curves: Mapping[str, Mapping[int, Sequence[tuple[int, float]]]]) -> str:
    """Format a line per method.

    Args:
        curves: for each method and seed, the points of :func:`points`.
    """
    columns = ("method", "held-out accuracy at the end", "each seed", "minus RAFT's, same seeds",
               "mean accuracy over the run", f"samples to {TARGET:.0%}, median seed")  # fmt: skip
    rows = [columns, ("---",) * len(columns)]
    for method, seeds in curves.items():
        last = {seed: curve[-1][1] for seed, curve in seeds.items()}
        raft = {seed: curve[-1][1] for seed, curve in curves.get("raft", {}).items()}
        gains = [last[seed] - raft[seed] for seed in last if seed in raft]
        needed = median(samples_to(curve, TARGET) for curve in seeds.values())
        rows.append(
            (
                METHODS[method].name,
                _percent(mean_interval(list(last.values()))),
                ", ".join(f"{100 * value:.1f}" for value in last.values()),
                _percent(mean_interval(gains), "+") if gains and method != "raft" else "",
                _percent(mean_interval([mean_accuracy(curve) for curve in seeds.values()])),
                f"{needed:,.0f}" if math.isfinite(needed) else "not reached",
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _percent(values: tuple[float, float, float], sign: str = "") -> str:
    mean, low, high = (100 * value for value in values)
    between = "" if math.isnan(low) else f" ({low:{sign}.1f} to {high:{sign}.1f})"
    return f"{mean:{sign}.1f} %{between}"


def draw(path: Path, curves: Mapping[str, Mapping[int, Sequence[tuple[int, float]]]]) -> None:
    """Draw the mean of each method over its seeds, with the seeds in the background."""
    lines = []
    for place, (method, seeds) in enumerate(curves.items()):
        common = sorted(set.intersection(*({x for x, _ in curve} for curve in seeds.values())))
        each = [[100 * dict(curve)[x] for x in common] for curve in seeds.values()]
        x, name = np.array(common, dtype=float), METHODS[method].name
        lines += [Line(name, x, np.array(values), place, faint=True) for values in each if len(each) > 1]
        lines.append(Line(name, x, np.mean(each, axis=0), place))
    write_picture(path, {"Held-out sums right, %": lines}, x_title="samples drawn")


# ---- the collapse


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """Read the steps of a policy-gradient run, with the clipped tokens of both sides as one share."""
    lines = [line for line in read_lines(folder / "metrics.jsonl") if "eval" not in line]
    for line in lines:
        line["clipped"] = line.get("clipped_low", math.nan) + line.get("clipped_high", math.nan)
    return lines


def values(lines: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Return one measurement of all steps; NaN where a step has none."""
    return np.array([math.nan if line.get(name) is None else line[name] for line in lines], dtype=float)


def warns_at(hot: np.ndarray, healthy: np.ndarray) -> int | None:
    """Return the first step, from 1, at which a measurement leaves what the healthy run shows, and by a factor of 2.

    Args:
        hot: values of the collapsing run, by step.
        healthy: values of the healthy one.
    """
    low, high = np.nanmin(healthy), np.nanmax(healthy)
    outside = np.flatnonzero((hot > 2 * high) | (hot < low / 2))
    return int(outside[0]) + 1 if len(outside) else None


def fell_at(reward: np.ndarray) -> int | None:
    """Return the first step, from 1, whose reward is below half of the first step's; None without such a step."""
    fallen = np.flatnonzero(reward < reward[0] / 2)
    return int(fallen[0]) + 1 if len(fallen) else None


def collapse(hot: Path, healthy: Path, rate: float, picture: Path) -> str:
    """Draw the collapsing run beside the healthy one of the same seed; return what warned of it, in Markdown."""
    a, b = steps_of(hot), steps_of(healthy)
    charts = {}
    labels = f"learning rate {HOT * rate:g}", f"learning rate {rate:g}"
    for name, title in {"reward": "mean reward", **SIGNS}.items():
        x = [np.arange(1.0, len(lines) + 1) for lines in (a, b)]
        lines = [Line(labels[0], x[0], values(a, name), 1), Line(labels[1], x[1], values(b, name), 0)]
        if all(np.isfinite(line.y).any() for line in lines):
            charts[title] = lines
    write_picture(picture, charts, columns=2)
    fell = fell_at(values(a, "reward"))
    told = f"The reward falls below half of the first step's at step {fell}." if fell else "The reward does not fall."
    rows = ["| measurement | first step outside of twice the healthy run's range |", "| --- | --- |"]
    for name, title in SIGNS.items():
        found, normal = values(a, name), values(b, name)
        if np.isfinite(found).any() and np.isfinite(normal).any():
            rows.append(f"| {title} (`{name}`) | {warns_at(found, normal) or 'none'} |")
    return f"GRPO at {HOT} times the learning rate, {HOT * rate:g}. {told}\n\n" + "\n".join(rows)


# ---- the command


def main() -> None:
    """Do the runs that are missing, and write the results; exit with 1 if a run failed."""
    args = parse()
    raft, grpo = configs()
    pocket = (args.pocket or args.out / "pocket").resolve()
    subprocess.run([sys.executable, "-m", "rocm_ext.cli", "pocket", str(pocket)], check=True)
    card = json.loads((pocket / "pocket.json").read_text())
    with (pocket / "train.jsonl").open() as file:
        prompts = sum(1 for _ in file)
    spent = budget(args.samples, grpo.prompts_per_step * grpo.samples_per_prompt, raft.samples_per_prompt, prompts)
    names = [(method, seed) for seed in args.seeds for method in args.methods]
    names += [("collapse", args.seeds[0])] * ("grpo" in args.methods)
    rate, out = grpo.optimizer.lr, args.out.resolve()
    jobs = {name: job(*name, spent, out, pocket, grpo) for name in names}
    with ThreadPoolExecutor(args.processes) as pool:
        ends = dict(zip(jobs, pool.map(complete, jobs.values()), strict=True))
    for (method, seed), end in ends.items():
        if end is not None:
            print(f"{method}, seed {seed}, failed:\n{end}", file=sys.stderr)
    if any(ends.values()):
        sys.exit(1)
    first = card["correct"] / card["total"]
    curves = {m: {s: points(jobs[m, s].folder, first) for s in args.seeds} for m in args.methods}
    content = {"samples": spent.samples, "held_out": card["total"], "curves": curves}
    (out / "learning.json").write_text(json.dumps(content, indent=1) + "\n")
    draw(out / "learning.svg", curves)
    parts = [f"{spent.samples:,} samples a run, {card['total']} held-out sums, seeds {_listed(args.seeds)}. "
             "Brackets: 95 % intervals over the seeds.", table(curves)]  # fmt: skip
    if (hot := jobs.get(("collapse", args.seeds[0]))) is not None:
        healthy = jobs["grpo", args.seeds[0]]
        parts.append(collapse(hot.folder, healthy.folder, rate, out / "collapse.svg"))
    (out / "learning.md").write_text("\n\n".join(parts) + "\n")
    print("\n\n".join(parts))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.learning", description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("--out", type=Path, required=True, help="folder for runs and results")
    option("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    option("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    option("--samples", type=int, default=40960, help="samples that a run draws, rounded to whole cycles")
    option("--pocket", type=Path, help="folder of a pocket model (default: one made in OUT)")
    option("--processes", type=int, default=2, help="runs at a time, one thread each (default: 2)")
    return parser.parse_args()


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


if __name__ == "__main__":
    main()
