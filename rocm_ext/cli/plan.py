"""``rocm-ext plan``: estimate a run's memory, work and time before anything is downloaded.

Plans a run of any config on the machine that its `hardware` key names, this one or another. Prints parameters, memory
by part against the machine's budget, work per step, expected speed, and the settings that fit best. Needs no weights
and no data. Exits with 1 if the config does not fit.
"""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from rich.markup import escape

from rocm_ext import config
from rocm_ext.base import registry
from rocm_ext.base.errors import UserError
from rocm_ext.base.log import duration, log
from rocm_ext.base.types import Json
from rocm_ext.cli._common import (
    add_config,
    add_json,
    add_overrides,
    console,
    count,
    options,
    print_json,
    refuse_first,
    table,
)
from rocm_ext.config.algorithms import describe, filled
from rocm_ext.config.checks.rollouts import check_config
from rocm_ext.config.layers import by_key
from rocm_ext.machine.budget import readable
from rocm_ext.machine.detect import detect
from rocm_ext.machine.profile import find_chip, load_profile

if TYPE_CHECKING:
    from rocm_ext.plan.planner import Choice
    from rocm_ext.plan.run import RolloutPlan, RunPlan

_NAMES = {  # in the table
    "loss": "logits and loss",
    "kept_for_sampling": "kept for sampling",
    "other_adapters": "other adapters",
}
_WHOLE = "{:,.0f}".format
_Ways = dict[str, int]  # changes that make a run fit, with the peak in bytes


def add(parser: ArgumentParser) -> None:
    option = options(parser)
    add_config(parser)
    chip = "MI355X, W7900, RTX 4090, 'Strix Halo', gfx950 (default: the config's hardware)"
    option("--machine NAME", f"plan for a machine with this chip: {chip}")
    option("--ranks N", "processes that share the work (default: 1)", count, 1)
    rows = (
        "training rows (of DPO: pairs), or prompts of a cycle or step (default: counted if on disk)"
    )
    option("--rows N", rows, count)
    option("--row-tokens N", "mean tokens of a row or a prompt", count)
    option(
        "--answer-tokens N",
        "mean tokens of an answer that the model samples (default: max_new_tokens / 2)",
        count,
    )
    more = "adapters in training at once over the same weights, as with `serve --adapters` (default: 1)"
    option("--adapters N", more, count, 1)
    option("--bench FILE", "bench.json with speeds (default: this machine's, if it exists)", Path)
    add_json(parser)
    add_overrides(parser)


def run(args: Namespace) -> int:
    """Plan the run and print the plan; returns 0 if the config fits, else 1."""
    args.chip = None
    if args.machine is not None:
        hardware = by_key(args.overrides).get("hardware")
        profile, args.chip = find_chip(args.machine, hardware)
        args.overrides.insert(0, f"hardware={profile}")
    recipe = config.recipe_of(args.config, args.overrides)
    cfg = _load(args, recipe, args.overrides)
    if registry.extended(recipe) == registry.GRPO and not args.json:
        print(describe(filled(cfg)))
    plan = _plan(args, recipe, cfg, args.ranks)
    ways: _Ways = {}
    if not plan.fits and not _best_fits(plan):
        ways = _ways_to_fit(args, recipe, cfg, plan)
    if args.json:
        fits_with = [{"change": change, "peak": peak} for change, peak in ways.items()]
        print_json({**_content(plan), "fits_with": fits_with})
    else:
        _print(args.config, plan, ways)
    return 0 if plan.fits else 1


def _best_fits(plan: "RunPlan") -> bool:
    return plan.highest(plan.best) <= plan.target.budget[0]


def _load(args: Namespace, recipe: registry.Recipe, overrides: Sequence[str]) -> Any:
    """Load the config with ``overrides``, and check it."""
    cfg = config.load(recipe, args.config, overrides)
    system = load_profile(cfg.hardware).match.get("system", "")
    registry.check_system(recipe, system)
    check_config(cfg, registry.extended(recipe))
    _check_sizes(args, cfg)
    return cfg


def _plan(args: Namespace, recipe: registry.Recipe, cfg: Any, ranks: int) -> "RunPlan":
    """Plan the run of a config on so many ranks."""
    from rocm_ext.plan.run import plan_run
    from rocm_ext.plan.workload import Known

    family = registry.extended(recipe)
    if family in registry.BY_STEP:
        from rocm_ext.losses import distillation, policy_gradient

        losses = distillation if family == registry.DISTIL else policy_gradient
        cfg.loss = losses.loss_config(cfg)
    known = Known(args.rows, args.row_tokens, args.answer_tokens)
    return plan_run(
        cfg,
        detect(),
        family=family,
        bench=args.bench,
        ranks=ranks,
        known=known,
        chip=args.chip,
        adapters=args.adapters,
    )


def _ways_to_fit(args: Namespace, recipe: registry.Recipe, cfg: Any, plan: "RunPlan") -> _Ways:
    """Return the first two changes that make the run fit: keys of the config, or more ranks."""
    log.info("does not fit; planning other settings ...")
    overrides = []
    if plan.target.dtype_name == "fp32":
        overrides.append("dtype=bf16" if "bf16" in plan.target.figures.flops else "dtype=fp16")
    if "quantize_base" not in cfg.model:
        overrides.append("model.quantize_base=nf4")
    if plan.teacher and cfg.get("teacher_quantize_base") is False:
        overrides.append("teacher_quantize_base=nf4")
    for key in ("tokenizer.max_seq_len", "max_new_tokens"):
        length = OmegaConf.select(cfg, key)
        if isinstance(length, int):
            overrides.append(f"{key}={length // 2}")
    changes = [(override, [override], args.ranks) for override in overrides]
    for ranks in (2 * args.ranks, 4 * args.ranks, 8 * args.ranks):
        changes.append((f"--ranks {ranks}", [], ranks))
    ways: _Ways = {}
    for name, more, ranks in changes:
        try:
            changed = _load(args, recipe, [*args.overrides, *more])
            other = _plan(args, recipe, changed, ranks)
        except UserError:  # this machine or this model does not allow it
            continue
        if not _best_fits(other):
            continue
        choice = other.now
        if not other.fits:
            choice = other.best
            name += "".join(f" {key}={value}" for key, value in other.changes().items())
        ways[name] = other.highest(choice)
        if len(ways) == 2:
            break
    return ways


def _check_sizes(args: Namespace, cfg: Any) -> None:
    """Refuse sizes above the config's limits."""
    # evaluations of SFT and DPO are not planned
    answers = cfg.max_new_tokens if "prompts" in cfg else None
    useless = f"--answer-tokens is for recipes that sample; {args.config} samples no answers"
    refuse_first((args.answer_tokens and not answers, useless))
    limits = (
        ("answer-tokens", args.answer_tokens, "max_new_tokens", answers),
        ("row-tokens", args.row_tokens, "tokenizer.max_seq_len", cfg.tokenizer.get("max_seq_len")),
    )
    for option, given, key, most in limits:
        above = given is not None and isinstance(most, int) and given > most
        refuse_first(
            (above, f"--{option} {given} is above {key}={most}; also raise the latter"), code=1
        )


def _print(name: str, plan: "RunPlan", ways: _Ways) -> None:
    out = console()
    figures = plan.target.figures
    total, trainable = plan.parameters
    out.print(f"[bold]{escape(name)}[/] on {escape(plan.target.name)}")
    size = f"{total / 1e6:,.1f} million parameters, {trainable / 1e6:,.1f} million of them trained"
    out.print(f"{size}, {plan.target.dtype_name}")
    if plan.shape:
        out.print(escape(plan.shape))
    if plan.compiled:
        out.print(escape(plan.compiled))
    if plan.teacher:
        out.print(f"a teacher of {plan.teacher.parameters / 1e6:,.1f} million parameters")
    rows = f"rows of {plan.rows.mean:,.0f} tokens, at most {plan.rows.longest:,} ({escape(plan.rows.source)})"
    out.print(f"{plan.ranks} rank(s); {rows}\n")
    choices = {"as configured": plan.now}
    if plan.best != plan.now:
        choices["best fit"] = plan.best
    memory = {name: _memory(plan, choice) for name, choice in choices.items()}
    used = [
        part for part in memory["as configured"] if any(sizes[part] for sizes in memory.values())
    ]
    columns = {}
    for name, sizes in memory.items():
        columns[name] = {_NAMES.get(part, part): readable(sizes[part]) for part in used}
    _print_table(out, "Memory per rank while training", columns)
    budget, reason = plan.target.budget
    out.print(f"budget {readable(budget)}: {escape(reason)}\n")
    steps = {name: dict(_step_cells(plan, choice)) for name, choice in choices.items()}
    _print_table(out, "An optimiser step per rank", steps)
    out.print(f"speeds: {escape(figures.source)}")
    if figures.published:
        reached = [f"{low} to {high} in {what}" for what, (low, high) in figures.published.items()]
        out.print(
            f"[yellow]computed, not measured. Published runs reach {' and '.join(reached)} of such figures: "
            "hence the ranges[/]"
        )
    if not figures.measured:
        out.print("[yellow]To measure: `rocm-ext bench` on that machine[/]")
    out.print()
    if plan.rollout:
        titles = {
            registry.RAFT: "A RAFT cycle",
            registry.GRPO: "A GRPO step, if no group has equal rewards",
        }
        title = titles.get(plan.family, "A step")
        _print_table(out, title, {" ": dict(_rollout_cells(plan, plan.rollout))})
    _print_verdict(out, plan, ways)


def _print_table(out: Any, title: str, columns: Mapping[str, Mapping[str, str]]) -> None:
    """Print columns of cells, by the names of the rows."""
    lines = table(title, "", *columns, right=tuple(columns))
    lines.show_header = " " not in columns
    cells = list(columns.values())
    for name in cells[0]:
        style = "bold" if name in ("peak", "tokens/s", "a step", "a cycle") else ""
        lines.add_row(name, *[column[name] for column in cells], style=style)
    out.print(lines)


def _memory(plan: "RunPlan", choice: "Choice") -> dict[str, int]:
    """Return a choice's memory in bytes, by part, with its peak."""
    memory = choice.memory
    return {
        "weights": memory.weights,
        "gathered": memory.gathered,
        "adapter": memory.adapter,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations(choice.checkpointed),
        "loss": memory.loss.working,
        "kept_for_sampling": plan.kept(choice),
        "teacher": plan.teacher.weights if plan.teacher else 0,
        "other_adapters": plan.other_adapters,
        "peak": plan.peak(choice),
    }


def _step_cells(plan: "RunPlan", choice: "Choice") -> Iterator[tuple[str, str]]:
    """Yield the rows of an optimiser step."""
    step = choice.step
    yield "tokens", f"{step.tokens:,.0f}"
    yield "micro-batches of at most", f"{step.micro_batches} x {choice.micro_batch:,}"
    yield "layers checkpointed", f"{len(choice.checkpointed)} of {choice.memory.layers}"
    yield "work", f"{step.flops / 1e12:,.1f} TFLOP"
    times = {"time": step.seconds}
    if plan.steps is None:
        tokens = 1e4 * plan.rows.mean / plan.ranks
        times["per 10,000 rows"] = tokens / step.tokens_per_second
    elif not plan.rollout:  # its own table says more
        times[f"all epochs, {plan.steps} steps"] = plan.steps * step.seconds
    if plan.reference is not None:
        # the reference's share of a forward pass
        forward = plan.reference / plan.now.step.forward_seconds
        times["before, the reference's log-probs"] = forward * step.forward_seconds
    shares = [training for training, _ in _shares(plan)]
    yield "tokens/s", _range([step.tokens_per_second * share for share in shares], _WHOLE)
    for name, seconds in times.items():
        yield name, _range([seconds / share for share in shares])


def _rollout_cells(plan: "RunPlan", rollout: "RolloutPlan") -> Iterator[tuple[str, str]]:
    """Yield the rows of a step of a recipe that samples."""
    shares = _shares(plan)
    plans = [rollout.at(training, sampling) for training, sampling in shares]

    def time(key: str, unknown: str = "--rows") -> str:
        seconds = [getattr(other, key) for other in plans]
        return f"unknown: set {unknown}" if math.isnan(seconds[0]) else _range(seconds)

    asked, sampling = rollout.asked, rollout.sampling
    prompts = f"{asked.prompts} prompts" if asked.prompts else "prompts"
    yield "answers", f"of {asked.answer:,.0f} tokens to {prompts} of {asked.mean:,.0f}"
    if rollout.servers:
        yield "servers", f"{rollout.servers}, each assumed to be one more GPU of this kind"
    yield "slots", f"{sampling.slots}"
    if not rollout.servers:
        yield "keys and values", readable(sampling.cache)
        yield "peak while sampling", readable(plan.beside + rollout.peak)
    if plan.programs:
        yield "programs of conversations, beside it", f"at most {readable(plan.programs)}"
    speeds = [sampling.tokens_per_second * share for _, share in shares]
    yield "answer tokens/s", _range(speeds, _WHOLE)
    yield "sampling", time("sampling_seconds")
    if rollout.scoring_seconds:
        yield "log-probs before the updates", time("scoring_seconds")
    yield f"{plan.steps or 'all'} update(s)", time("updates_seconds")
    if plan.teacher:
        seconds = [plan.teacher.seconds / training for training, _ in shares]
        yield "the teacher's part of an update", _range(seconds)
    if rollout.waiting:
        side, ahead = rollout.waiting
        yield f"{side} wait", _duration(ahead)
    yield f"a {plan.step_name}", time("step_seconds")
    if rollout.evaluations:
        yield "an evaluation", time("evaluation_seconds", "eval_prompts to a file")
    if not math.isnan(rollout.run_seconds):
        whole = f"{rollout.steps} {plan.step_name}s and {rollout.evaluations} evaluations"
        yield whole, time("run_seconds")


def _print_verdict(out: Any, plan: "RunPlan", ways: _Ways) -> None:
    budget = plan.target.budget[0]
    changes = plan.changes()
    best_fits = _best_fits(plan)
    if not plan.fits:
        how = ""
        if ways:
            sizes = [f"{change} (plans {readable(peak)})" for change, peak in ways.items()]
            how = f": it fits with {' or '.join(sizes)}"
        elif not best_fits:
            how = ": neither 16 nor 4 bits, half the length nor 8 times the ranks make it fit; use a smaller model"
        out.print(f"\n[red]does not fit[/] into {readable(budget)}{how}")
    if changes and best_fits:
        gain = plan.now.step.seconds / plan.best.step.seconds
        keys = ", ".join(f"{key}: {value}" for key, value in changes.items())
        out.print(
            f"\nbest fit ({gain:.2f} times as fast, {readable(plan.peak(plan.best))}): {keys}"
        )
    elif plan.fits:
        out.print("\nfits; no setting is expected to be faster")


def _duration(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


def _shares(plan: "RunPlan") -> list[tuple[float, float]]:
    """The least and the largest shares of computed speeds that training and sampling may reach; 1 of measured ones."""
    published = plan.target.figures.published
    return [(1.0, 1.0)] if published is None else list(zip(*published.values(), strict=True))


def _range(values: Iterable[float], text_of: Callable[[float], str] = _duration) -> str:
    texts = dict.fromkeys(text_of(value) for value in sorted(values))  # equal texts once
    return " to ".join(texts)


def _content(plan: "RunPlan") -> Json:
    """Return the plan for JSON; speeds and times are computed, ``published`` has the shares that runs reach."""
    target = plan.target
    return {
        "machine": target.name,
        "here": target.here,
        "dtype": target.dtype_name,
        "ranks": plan.ranks,
        "parameters": plan.parameters[0],
        "trainable_parameters": plan.parameters[1],
        "shape": plan.shape,
        "compile": plan.compiled,
        "budget": target.budget[0],
        "budget_reason": target.budget[1],
        "fits": plan.fits,
        "figures": vars(target.figures),
        "published": target.figures.published,
        "rows": vars(plan.rows),
        "configured": _choice_content(plan, plan.now),
        "best": _choice_content(plan, plan.best),
        "changes": plan.changes(),
        "steps": plan.steps,
        "training_seconds": plan.training_seconds,
        "reference_seconds": plan.reference,
        "teacher": plan.teacher and vars(plan.teacher),
        "programs": plan.programs,
        "rollout": plan.rollout and plan.rollout.content(),
    }


def _choice_content(plan: "RunPlan", choice: "Choice") -> Json:
    return {
        "tokens_per_micro_batch": choice.micro_batch,
        "checkpointed_layers": len(choice.checkpointed),
        "memory": _memory(plan, choice),
        "step": {**vars(choice.step), "tokens_per_second": choice.step.tokens_per_second},
    }
