"""`rocm-ext plan`: estimate a run's memory, work and time before anything is downloaded."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from rocm_ext import config
from rocm_ext.base import registry
from rocm_ext.base.errors import UserError
from rocm_ext.base.log import duration
from rocm_ext.cli._options import add_overrides, count
from rocm_ext.cli._tables import console, table
from rocm_ext.config.checks import check_grpo_values, check_raft_values, check_values
from rocm_ext.machine.chips import find_chip
from rocm_ext.machine.detect import detect
from rocm_ext.machine.profile import load_profile
from rocm_ext.machine.shared_records import recorded_machines
from rocm_ext.plan import reach
from rocm_ext.plan.reach import DECODING, TRAINING

if TYPE_CHECKING:
    from rocm_ext.plan.planner import Choice, SamplingPlan, Step
    from rocm_ext.plan.policy import PolicyPlan
    from rocm_ext.plan.run import CyclePlan, RunPlan


def add(commands) -> None:
    """Add the command's parser to argparse's subparsers."""
    parser = commands.add_parser(
        "plan",
        description="Plan a run of any config on the machine that its `hardware` key names, this one or another. "
        "Prints parameters, memory by part against the machine's budget, work per step, expected speed, and the "
        "settings that fit best. Needs no weights and no data. Exits with 1 if the config does not fit.",
    )
    option = parser.add_argument
    option("--config", required=True, metavar="NAME", help="config of any recipe: a name or a file")
    option(
        "--machine",
        metavar="NAME",
        help="plan for a machine with this chip: MI355X, W7900, RTX 4090, 'Strix Halo', gfx950 (default: the config's "
        "hardware)",
    )
    option("--ranks", type=count, default=1, metavar="N", help="processes that share the work (default: 1)")
    option(
        "--rows",
        type=count,
        metavar="N",
        help="training rows (of DPO: pairs), in RAFT prompts per cycle, in GRPO per step (default: counted if on disk)",
    )
    option("--row-tokens", type=count, metavar="N", help="mean tokens of a row, in RAFT and GRPO of a prompt")
    option(
        "--answer-tokens",
        type=count,
        metavar="N",
        help="RAFT and GRPO: mean tokens of an answer (default: max_new_tokens / 2)",
    )
    option("--bench", type=Path, metavar="FILE", help="bench.json with speeds (default: this machine's, if it exists)")
    option("--fit", action="store_true", help="print only the YAML keys to change for the best fit")
    option("--json", action="store_true", help="print one JSON object instead of text")
    add_overrides(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan the run and print the plan.

    Returns:
        Exit code: 0 if the config fits, else 1.
    """
    from rocm_ext.plan.run import plan_run
    from rocm_ext.plan.workload import Known
    from rocm_ext.rl import objective

    chip = _take_machine(args)
    recipe = config.recipe_of(args.config, args.overrides)
    family = registry.extended(recipe)
    cfg = config.load(recipe, args.config, args.overrides)
    registry.check_system(recipe, load_profile(cfg.hardware).match.get("system", ""))
    check_values(OmegaConf.create(config.trainer_config(cfg)))
    if family == registry.RAFT:
        check_raft_values(cfg)
    if family == registry.GRPO:
        check_grpo_values(cfg)
        cfg.loss = objective.loss_config(cfg)
    known = Known(args.rows, args.row_tokens, args.answer_tokens)
    plan = plan_run(cfg, detect(), family=family, bench=args.bench, ranks=args.ranks, known=known, chip=chip)
    if args.fit:
        _print_fit(plan)
    elif args.json:
        print(json.dumps(_content(plan), indent=2))
    else:
        _print(args.config, plan)
    return 0 if plan.fits else 1


def _take_machine(args: argparse.Namespace) -> str | None:
    """Turn ``--machine`` into ``hardware=…``; return the chip's name."""
    if args.machine is None:
        return None
    hardware = [override.partition("=")[2] for override in args.overrides if override.startswith("hardware=")]
    profile, chip = find_chip(args.machine, hardware[-1] if hardware else None, recorded_machines())
    args.overrides = [f"hardware={profile}", *args.overrides]
    return chip


def _print_fit(plan: "RunPlan") -> None:
    changes = plan.changes()
    if plan.peak(plan.best) > plan.target.budget[0]:
        raise UserError("nothing fits: use a smaller model, shorter rows or more ranks")
    if not changes:
        print("# the plan finds no better settings than the config's")
    for key, value in changes.items():
        print(f"{key}: {value}")


def _print(name: str, plan: "RunPlan") -> None:
    from rich.markup import escape

    from rocm_ext.plan.memory import readable
    from rocm_ext.plan.planner import dtype_name

    out = console()
    total, trainable = plan.parameters
    out.print(f"[bold]{escape(name)}[/] on {escape(plan.target.name)}")
    dtype = dtype_name(plan.target.dtype)
    out.print(f"{total / 1e6:,.1f} million parameters, {trainable / 1e6:,.1f} million of them trained, {dtype}")
    if plan.shape:
        out.print(escape(plan.shape))
    out.print(
        f"{plan.ranks} rank(s); rows of {plan.rows.mean:,.0f} tokens, at most {plan.rows.longest:,} "
        f"({escape(plan.rows.source)})\n"
    )
    out.print(_memory_table(plan))
    out.print(f"budget {readable(plan.target.budget[0])}: {escape(plan.target.budget[1])}\n")
    out.print(_step_table(plan))
    out.print(f"speeds: {escape(plan.target.figures.source)}")
    if not plan.target.figures.measured:
        chip = plan.target.figures.sheet
        near = f": {reach.said(chip)}. In brackets: what that makes of the figure before" if chip else ""
        out.print(f"[yellow]computed, not measured{near}. To measure: `rocm-ext bench` on that machine[/]")
    out.print()
    if plan.cycle:
        out.print(_cycle_table(plan))
    if plan.policy:
        out.print(_policy_table(plan, plan.policy))
    _print_verdict(out, plan)


def _choices(plan: "RunPlan") -> list[tuple[str, "Choice"]]:
    same = plan.best == plan.now
    return [("as configured", plan.now)] if same else [("as configured", plan.now), ("best fit", plan.best)]


def _memory_table(plan: "RunPlan") -> Any:
    from rocm_ext.plan.memory import readable

    choices = _choices(plan)
    titles = [title for title, _ in choices]
    made = table("Memory per rank while training", "", *titles, right=tuple(titles))

    def row(name: str, values: list[str], style: str = "") -> None:
        made.add_row(name, *values, style=style)

    parts = ["weights", "gathered", "adapter", "gradients", "optimizer"]
    for part in parts:
        if any(getattr(choice.memory, part) for _, choice in choices):
            row(part, [readable(getattr(choice.memory, part)) for _, choice in choices])
    row("activations", [readable(choice.memory.activations(choice.checkpointed)) for _, choice in choices])
    every = [(choice, range(choice.memory.layers)) for _, choice in choices]
    row("  none checkpointed", [readable(choice.memory.activations(())) for choice, _ in every], "dim")
    row("  all checkpointed", [readable(choice.memory.activations(layers)) for choice, layers in every], "dim")
    row("logits and loss", [readable(choice.memory.loss.working) for _, choice in choices])
    if any(plan.kept(choice) for _, choice in choices):
        row("kept for sampling", [readable(plan.kept(choice)) for _, choice in choices])
    row("peak", [readable(plan.peak(choice)) for _, choice in choices], "bold")
    return made


def _step_table(plan: "RunPlan") -> Any:

    choices = _choices(plan)
    titles = [title for title, _ in choices]
    made = table("An optimiser step per rank", "", *titles, right=tuple(titles))
    steps = [choice.step for _, choice in choices]
    made.add_row("tokens", *[f"{step.tokens:,.0f}" for step in steps])
    made.add_row("micro-batches of at most", *[f"{c.step.micro_batches} x {c.micro_batch:,}" for _, c in choices])
    made.add_row("layers checkpointed", *[f"{len(c.checkpointed)} of {c.memory.layers}" for _, c in choices])
    made.add_row("work", *[f"{step.flops / 1e12:,.1f} TFLOP" for step in steps])
    made.add_row("read and written", *[f"{step.bytes / 1e9:,.0f} GB" for step in steps])

    def time(seconds: float) -> str:
        return _told(plan, _time(seconds))

    def speed(step: "Step") -> str:
        return _told(plan, lambda training, _: step.tokens_per_second * training, "{:,.0f}".format)

    made.add_row("time", *[time(step.seconds) for step in steps])
    made.add_row("tokens/s", *map(speed, steps), style="bold")
    if plan.steps is None:
        made.add_row("per 10,000 rows", *[time(1e4 * plan.rows.mean / plan.ranks / s.tokens_per_second) for s in steps])
    elif not plan.policy:  # its own table says more
        what = "training in a cycle" if plan.cycle else "all epochs"
        made.add_row(f"{what}, {plan.steps} steps", *[time(plan.steps * step.seconds) for step in steps])
    if plan.reference is not None:
        before = [plan.reference * step.forward_seconds / plan.now.step.forward_seconds for step in steps]
        made.add_row("before, the reference's log-probs", *map(time, before))
    return made


def _cycle_table(plan: "RunPlan") -> Any:
    from rocm_ext.plan.memory import readable

    assert plan.cycle is not None
    cycle, sampling = plan.cycle, plan.cycle.sampling
    made = table("A RAFT cycle", "", " ", right=(" ",))
    made.show_header = False
    made.add_row("answers", f"of {cycle.asked.answer:,.0f} tokens to prompts of {cycle.asked.mean:,.0f}")
    made.add_row("slots", f"{sampling.slots}")
    made.add_row("the sampler's layout of the weights", readable(sampling.layout))
    made.add_row("keys and values", readable(sampling.cache))
    made.add_row("peak while sampling", readable(cycle.peak), style="bold")
    made.add_row("answer tokens/s", _sampling_speed(plan, sampling), style="bold")
    parts = {
        "sampling": (cycle.seconds[0], 1),
        "evaluating": (cycle.seconds[1], 1),
        "training": (plan.training_seconds, 0),
    }
    for what, (seconds, kind) in parts.items():
        told = "unknown: set --rows" if seconds is None else _told(plan, _time(seconds, kind))
        made.add_row(what, told)
    if all(seconds is not None for seconds, _ in parts.values()):
        every = [_time(seconds, kind) for seconds, kind in parts.values() if seconds]
        made.add_row("together", _told(plan, lambda *shares: sum(of(*shares) for of in every)), style="bold")
    return made


def _policy_table(plan: "RunPlan", policy: "PolicyPlan") -> Any:
    from rocm_ext.plan.memory import readable

    asked, sampling = policy.asked, policy.sampling
    made = table("A GRPO step, if no group has equal rewards", "", " ", right=(" ",))
    made.show_header = False
    made.add_row("answers", f"of {asked.answer:,.0f} tokens to {asked.prompts} prompts of {asked.mean:,.0f}")
    if policy.servers:
        made.add_row("servers", f"{policy.servers}, each assumed to be one more GPU of this kind")
    made.add_row("slots", f"{sampling.slots}")
    if not policy.servers:
        made.add_row("the sampler's layout of the weights", readable(sampling.layout))
        made.add_row("keys and values", readable(sampling.cache))
        made.add_row("peak while sampling", readable(policy.peak), style="bold")
    made.add_row("answer tokens/s", _sampling_speed(plan, sampling), style="bold")
    made.add_row("sampling", _told(plan, lambda *shares: policy.at(*shares).sampling_seconds))
    if policy.scoring_seconds:
        made.add_row("log-probs before the updates", _told(plan, lambda *shares: policy.at(*shares).scoring_seconds))
    updates = f"{policy.updates} updates" if policy.updates > 1 else "1 update"
    made.add_row(updates, _told(plan, lambda *shares: policy.at(*shares).updates_seconds))
    if policy.waiting:
        side, ahead = policy.waiting
        made.add_row(f"{side} wait", _duration(ahead))
    made.add_row("a step", _told(plan, lambda *shares: policy.at(*shares).step_seconds), style="bold")
    made.add_row(
        "steps per hour", _told(plan, lambda *shares: 3600 / policy.at(*shares).step_seconds, "{:,.1f}".format)
    )
    if policy.evaluations:
        unknown = policy.evaluation_seconds is None
        evaluation = _told(plan, lambda *shares: policy.at(*shares).evaluation_seconds or 0.0)
        made.add_row("an evaluation", "unknown: held-out prompts not on disk" if unknown else evaluation)
    if policy.run_seconds is not None:
        whole = f"{policy.steps} steps and {policy.evaluations} evaluations"
        made.add_row(whole, _told(plan, lambda *shares: policy.at(*shares).run_seconds or 0.0), style="bold")
    return made


def _print_verdict(out: Any, plan: "RunPlan") -> None:
    from rocm_ext.plan.memory import readable

    if not plan.fits:
        out.print(
            f"\n[red]does not fit[/] into {readable(plan.target.budget[0])}: lower tokenizer.max_seq_len, "
            "max_new_tokens or batch_size, or use a smaller model"
        )
    changes = plan.changes()
    if changes and plan.peak(plan.best) <= plan.target.budget[0]:
        gain = plan.now.step.seconds / plan.best.step.seconds
        keys = ", ".join(f"{key}: {value}" for key, value in changes.items())
        out.print(f"\nbest fit ({gain:.2f} times as fast, {readable(plan.peak(plan.best))}): {keys}")
    elif plan.fits:
        out.print("\nfits; no setting is expected to be faster")


# A figure of a plan where training and sampling run at these shares of their computed speeds.
Figure = Callable[[float, float], float]


def _told(plan: "RunPlan", of: Figure, form: Callable[[float], str] | None = None) -> str:
    """A figure in words, and behind one from a data sheet in brackets what published runs make of it."""
    form = form or _duration
    ends = _published(plan, of)
    return form(of(1, 1)) if ends is None else f"{form(of(1, 1))} ({form(ends[0])} to {form(ends[1])})"


def _published(plan: "RunPlan", of: Figure) -> list[float] | None:
    """The least and the most that a figure is where published runs are right; None without a data sheet."""
    if plan.target.figures.sheet is None:
        return None
    return sorted((of(TRAINING.low, DECODING.low), of(TRAINING.high, DECODING.high)))


def _time(seconds: float, kind: int = 0) -> Figure:
    """A time of training, or with kind 1 of sampling."""
    return lambda *shares: seconds / shares[kind]


def _sampling_speed(plan: "RunPlan", sampling: "SamplingPlan") -> str:
    return _told(plan, lambda _, share: sampling.tokens_per_second * share, "{:,.0f}".format)


def _duration(seconds: float) -> str:

    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


def _content(plan: "RunPlan") -> dict[str, Any]:
    from rocm_ext.plan.planner import dtype_name

    figures = plan.target.figures
    return {
        "machine": plan.target.name,
        "here": plan.target.here,
        "dtype": dtype_name(plan.target.dtype),
        "ranks": plan.ranks,
        "parameters": plan.parameters[0],
        "trainable_parameters": plan.parameters[1],
        "shape": plan.shape,
        "budget": plan.target.budget[0],
        "budget_reason": plan.target.budget[1],
        "fits": plan.fits,
        "figures": vars(figures),
        "published": reach.content(figures.sheet) if figures.sheet else None,
        "rows": vars(plan.rows),
        "configured": _choice_content(plan, plan.now),
        "best": _choice_content(plan, plan.best),
        "changes": plan.changes(),
        "steps": plan.steps,
        "training_seconds": plan.training_seconds,
        "training_seconds_published": plan.training_seconds and _published(plan, _time(plan.training_seconds)),
        "reference_seconds": plan.reference,
        "cycle": None if plan.cycle is None else _cycle_content(plan, plan.cycle),
        "policy": None if plan.policy is None else _policy_content(plan, plan.policy),
    }


def _sampling_content(plan: "RunPlan", sampling: "SamplingPlan") -> dict[str, Any]:
    published = _published(plan, lambda _, share: sampling.tokens_per_second * share)
    return {**vars(sampling), "tokens_per_second_published": published}


def _cycle_content(plan: "RunPlan", cycle: "CyclePlan") -> dict[str, Any]:
    return {
        "questions": vars(cycle.asked),
        "sampling": _sampling_content(plan, cycle.sampling),
        "peak": cycle.peak,
        "sampling_seconds": cycle.seconds[0],
        "evaluating_seconds": cycle.seconds[1],
    }


def _policy_content(plan: "RunPlan", policy: "PolicyPlan") -> dict[str, Any]:
    computed = ("updates_seconds", "step_seconds", "run_seconds", "waiting")
    plain = {key: value for key, value in vars(policy).items() if key not in ("asked", "sampling")}
    return {
        "questions": vars(policy.asked),
        "sampling": _sampling_content(plan, policy.sampling),
        **plain,
        **{key: getattr(policy, key) for key in computed},
        "step_seconds_published": _published(plan, lambda *shares: policy.at(*shares).step_seconds),
    }


def _choice_content(plan: "RunPlan", choice: "Choice") -> dict[str, Any]:
    memory, layers, speed = choice.memory, choice.checkpointed, choice.step.tokens_per_second
    published = _published(plan, lambda training, _: speed * training)
    parts = ("weights", "gathered", "adapter", "gradients", "optimizer")
    return {
        "tokens_per_micro_batch": choice.micro_batch,
        "checkpointed_layers": len(layers),
        "memory": {
            **{part: getattr(memory, part) for part in parts},
            "activations": memory.activations(layers),
            "activations_without_checkpointing": memory.activations(()),
            "activations_with_checkpointing": memory.activations(range(memory.layers)),
            "loss": memory.loss.working,
            "kept_for_sampling": plan.kept(choice),
            "peak": plan.peak(choice),
        },
        "step": {**vars(choice.step), "tokens_per_second": speed, "tokens_per_second_published": published},
    }
