"""``rocm-ext plan``: estimate a run's memory, work and time before anything is downloaded.

Plans a run of any config on the machine that its `hardware` key names, this one or another. Prints parameters, memory
by part against the machine's budget, work per step, expected speed, and the settings that fit best. Needs no weights
and no data. Exits with 1 if the config does not fit.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
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
    from rocm_ext.plan.planner import Choice, StepWork
    from rocm_ext.plan.run import RolloutPlan, RunPlan

_NAMES = {  # names in the table that differ from _memory's
    "activations_without_checkpointing": "  none checkpointed",
    "activations_with_checkpointing": "  all checkpointed",
    "loss": "logits and loss",
    "kept_for_sampling": "kept for sampling",
}
Rows = list[tuple[str, list[str]]]  # a table's rows: a name, and a value for each column
Ways = list[tuple[str, int]]  # changes that make a run fit, and the peak in bytes with each
# Computes a figure from the shares of their computed speeds at which training and sampling run
Figure = Callable[[float, float], float]


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
    ways: Ways = []
    if not plan.fits and not _best_fits(plan):
        ways = _ways_to_fit(args, recipe, cfg, plan)
    if args.json:
        fits_with = [{"change": change, "peak": peak} for change, peak in ways]
        print_json(_content(plan) | {"fits_with": fits_with})
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
        cfg, detect(), family=family, bench=args.bench, ranks=ranks, known=known, chip=args.chip
    )


def _ways_to_fit(args: Namespace, recipe: registry.Recipe, cfg: Any, plan: "RunPlan") -> Ways:
    """Return the first two changes that make the run fit: keys of the config, or more ranks."""
    log.info("does not fit; planning other settings ...")
    changes: list[tuple[str, int]] = []
    if plan.target.dtype_name == "fp32":
        dtype = "bf16" if "bf16" in plan.target.figures.flops else "fp16"
        changes.append((f"dtype={dtype}", 1))
    if "quantize_base" not in cfg.model:
        changes.append(("model.quantize_base=nf4", 1))
    if plan.teacher and cfg.get("teacher_quantize_base") is False:
        changes.append(("teacher_quantize_base=nf4", 1))
    for key in ("tokenizer.max_seq_len", "max_new_tokens"):
        length = OmegaConf.select(cfg, key)
        if isinstance(length, int):
            changes.append((f"{key}={length // 2}", 1))
    changes += [("", 2), ("", 4), ("", 8)]
    ways: Ways = []
    for change, times in changes:
        ranks = times * args.ranks
        overrides = [*args.overrides, change] if change else args.overrides
        try:
            other = _plan(args, recipe, _load(args, recipe, overrides), ranks)
        except UserError:  # this machine or this model does not allow it
            continue
        peak = other.highest(other.now if other.fits else other.best)
        if peak > other.target.budget[0]:
            continue
        name = change or f"--ranks {ranks}"
        if not other.fits:
            name += "".join(f" {key}={value}" for key, value in other.changes().items())
        ways.append((name, peak))
        if len(ways) == 2:
            break
    return ways


def _check_sizes(args: Namespace, cfg: Any) -> None:
    """Refuse sizes above the config's limits."""
    answers = (
        cfg.max_new_tokens if "prompts" in cfg else None
    )  # evaluations of SFT and DPO are not planned
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


def _print(name: str, plan: "RunPlan", ways: Ways) -> None:
    out = console()
    figures = plan.target.figures
    total, trainable = plan.parameters
    out.print(f"[bold]{escape(name)}[/] on {escape(plan.target.name)}")
    size = f"{total / 1e6:,.1f} million parameters, {trainable / 1e6:,.1f} million of them trained"
    out.print(f"{size}, {plan.target.dtype_name}")
    if plan.shape:
        out.print(escape(plan.shape))
    if plan.teacher:
        out.print(f"a teacher of {plan.teacher.parameters / 1e6:,.1f} million parameters")
    rows = f"rows of {plan.rows.mean:,.0f} tokens, at most {plan.rows.longest:,} ({escape(plan.rows.source)})"
    out.print(f"{plan.ranks} rank(s); {rows}\n")
    choices = {"as configured": plan.now}
    if plan.best != plan.now:
        choices["best fit"] = plan.best
    columns = list(choices)
    _print_table(
        out, "Memory per rank while training", columns, _memory_rows(plan, choices.values())
    )
    budget, reason = plan.target.budget
    out.print(f"budget {readable(budget)}: {escape(reason)}\n")
    _print_table(out, "An optimiser step per rank", columns, _step_rows(plan, choices.values()))
    out.print(f"speeds: {escape(figures.source)}")
    if figures.published:
        reached = " and ".join(
            f"{low} to {high} in {what}" for what, (low, high) in figures.published.items()
        )
        out.print(
            f"[yellow]computed, not measured. Published runs reach {reached} of such figures: hence the ranges[/]"
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
        _print_table(out, title, [" "], _rollout_rows(plan, plan.rollout))
    _print_verdict(out, plan, ways)


def _print_table(out: Any, title: str, columns: list[str], rows: Rows) -> None:
    lines = table(title, "", *columns, right=tuple(columns))
    lines.show_header = columns != [" "]
    for name, values in rows:
        style = "bold" if name in ("peak", "tokens/s", "a step", "a cycle") else ""
        lines.add_row(name, *values, style=style)
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
        "activations_without_checkpointing": memory.activations(()),
        "activations_with_checkpointing": memory.activations(range(memory.layers)),
        "loss": memory.loss.working,
        "kept_for_sampling": plan.kept(choice),
        "teacher": plan.beside,
        "peak": plan.peak(choice),
    }


def _memory_rows(plan: "RunPlan", choices: Iterable["Choice"]) -> Rows:
    columns = [_memory(plan, choice) for choice in choices]
    rows: Rows = []
    for part in columns[0]:
        sizes = [column[part] for column in columns]
        if any(sizes):
            name = _NAMES.get(part, part)
            rows.append((name, [readable(size) for size in sizes]))
    return rows


def _step_rows(plan: "RunPlan", choices: Iterable["Choice"]) -> Rows:
    rows: Rows = []

    def add(name: str, cell: Callable[["Choice"], str]) -> None:
        rows.append((name, [cell(choice) for choice in choices]))

    def add_time(name: str, seconds: Callable[["StepWork"], float]) -> None:
        add(name, lambda choice: _told(plan, _training_time(seconds(choice.step))))

    add("tokens", lambda choice: f"{choice.step.tokens:,.0f}")
    add(
        "micro-batches of at most",
        lambda choice: f"{choice.step.micro_batches} x {choice.micro_batch:,}",
    )
    add(
        "layers checkpointed",
        lambda choice: f"{len(choice.checkpointed)} of {choice.memory.layers}",
    )
    add("work", lambda choice: f"{choice.step.flops / 1e12:,.1f} TFLOP")
    add("read and written", lambda choice: f"{choice.step.bytes / 1e9:,.0f} GB")
    add_time("time", lambda step: step.seconds)
    add("tokens/s", lambda choice: _speed(plan, choice.step.tokens_per_second, 0))
    steps = plan.steps
    if steps is None:
        tokens = 1e4 * plan.rows.mean / plan.ranks
        add_time("per 10,000 rows", lambda step: tokens / step.tokens_per_second)
    elif not plan.rollout:  # its own table says more
        add_time(f"all epochs, {steps} steps", lambda step: steps * step.seconds)
    if plan.reference is not None:
        forward = (
            plan.reference / plan.now.step.forward_seconds
        )  # the reference's share of a forward pass
        add_time("before, the reference's log-probs", lambda step: forward * step.forward_seconds)
    return rows


def _rollout_rows(plan: "RunPlan", rollout: "RolloutPlan") -> Rows:
    rows: Rows = []

    def add(name: str, value: str) -> None:
        rows.append((name, [value]))

    def add_time(name: str, key: str, unknown: str = "--rows") -> None:
        if getattr(rollout, key) is None:
            add(name, f"unknown: set {unknown}")
        else:
            add(name, _told(plan, lambda *shares: getattr(rollout.at(*shares), key)))

    asked, sampling = rollout.asked, rollout.sampling
    prompts = f"{asked.prompts} prompts" if asked.prompts else "prompts"
    add("answers", f"of {asked.answer:,.0f} tokens to {prompts} of {asked.mean:,.0f}")
    if rollout.servers:
        add("servers", f"{rollout.servers}, each assumed to be one more GPU of this kind")
    add("slots", f"{sampling.slots}")
    if not rollout.servers:
        add("weights that sampling copies", readable(sampling.layout))
        add("keys and values", readable(sampling.cache))
        add("peak while sampling", readable(plan.beside + rollout.peak))
    if plan.programs:
        add("programs of conversations, beside it", f"at most {readable(plan.programs)}")
    if sampling.launches:
        add("kernels of a decoding step, without graphs", f"{sampling.launches:,}")
    add("answer tokens/s", _speed(plan, sampling.tokens_per_second, 1))
    add_time("sampling", "sampling_seconds")
    if rollout.scoring_seconds:
        add_time("log-probs before the updates", "scoring_seconds")
    add_time(
        "1 update" if plan.steps == 1 else f"{plan.steps or ''} updates".strip(), "updates_seconds"
    )
    if plan.teacher:
        add("the teacher's part of an update", _told(plan, _training_time(plan.teacher.seconds)))
    if rollout.waiting:
        side, ahead = rollout.waiting
        add(f"{side} wait", _duration(ahead))
    add_time(f"a {plan.step_name}", "step_seconds")
    if rollout.evaluations:
        add_time("an evaluation", "evaluation_seconds", "eval_prompts to a file")
    if rollout.run_seconds is not None:
        add_time(
            f"{rollout.steps} {plan.step_name}s and {rollout.evaluations} evaluations",
            "run_seconds",
        )
    return rows


def _print_verdict(out: Any, plan: "RunPlan", ways: Ways) -> None:
    budget = plan.target.budget[0]
    best_fits = _best_fits(plan)
    if not plan.fits:
        how = ""
        if ways:
            how = ": it fits with " + " or ".join(
                f"{change} (plans {readable(peak)})" for change, peak in ways
            )
        elif not best_fits:
            how = ": neither 16 nor 4 bits, half the length nor 8 times the ranks make it fit; use a smaller model"
        out.print(f"\n[red]does not fit[/] into {readable(budget)}{how}")
    changes = plan.changes()
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


def _told(plan: "RunPlan", figure: Figure, text_of: Callable[[float], str] = _duration) -> str:
    """Format a figure; a computed one becomes the range at the shares that published runs reach."""
    shares = [(1.0, 1.0)]
    published = plan.target.figures.published
    if published:
        shares = list(zip(*published.values(), strict=True))
    values = sorted(figure(training, sampling) for training, sampling in shares)
    texts = dict.fromkeys(text_of(value) for value in values)  # equal texts once
    return " to ".join(texts)


def _training_time(seconds: float) -> Figure:
    return lambda share, _: seconds / share


def _speed(plan: "RunPlan", speed: float, kind: int) -> str:
    """Tokens per second of training (kind 0) or sampling (1)."""
    return _told(plan, lambda *shares: speed * shares[kind], "{:,.0f}".format)


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
