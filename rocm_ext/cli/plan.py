"""`rocm-ext plan`: estimate a run's memory, work and time before anything is downloaded."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_ext.cli._options import add_overrides, count
from rocm_ext.errors import UserError

if TYPE_CHECKING:
    from rocm_ext.plan.planner import Choice
    from rocm_ext.plan.run import RunPlan


def add(commands) -> None:
    """Add the command's parser to argparse's subparsers."""
    parser = commands.add_parser(
        "plan",
        help="estimate a run's memory, work and time before anything is downloaded",
        description="Plan a run of any config on the machine that its `hardware` key names, this one or another. "
        "Prints parameters, memory by part against the machine's budget, work per step, expected speed, and the "
        "settings that fit best. Needs no weights and no data. Exits with 1 if the config does not fit.",
    )
    option = parser.add_argument
    option("--config", required=True, metavar="NAME", help="config of any recipe: a name or a file")
    option("--ranks", type=count, default=1, metavar="N", help="processes that share the work (default: 1)")
    option(
        "--rows", type=count, metavar="N", help="training rows, in RAFT prompts per cycle (default: counted if on disk)"
    )
    option("--row-tokens", type=count, metavar="N", help="mean tokens of a row, in RAFT of a prompt")
    option(
        "--answer-tokens", type=count, metavar="N", help="RAFT: mean tokens of an answer (default: max_new_tokens / 2)"
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
    from omegaconf import OmegaConf

    from rocm_ext import config, registry
    from rocm_ext.config.checks import check_raft_values, check_values
    from rocm_ext.hardware.machine import detect
    from rocm_ext.plan.run import plan_run
    from rocm_ext.plan.workload import Known

    recipe = config.recipe_of(args.config, args.overrides)
    samples = registry.extended(recipe) == registry.RAFT
    cfg = config.load(recipe, args.config, args.overrides)
    check_values(OmegaConf.create(config.trainer_config(cfg)))
    if samples:
        check_raft_values(cfg)
    known = Known(args.rows, args.row_tokens, args.answer_tokens)
    plan = plan_run(cfg, detect(), samples=samples, bench=args.bench, ranks=args.ranks, known=known)
    if args.fit:
        _print_fit(plan)
    elif args.json:
        print(json.dumps(_content(plan), indent=2))
    else:
        _print(args.config, plan)
    return 0 if plan.fits else 1


def _print_fit(plan: "RunPlan") -> None:
    changes = plan.changes()
    if plan.best.peak > plan.budget[0]:
        raise UserError("nothing fits: use a smaller model, shorter rows or more ranks")
    if not changes:
        print("# the plan finds no better settings than the config's")
    for key, value in changes.items():
        print(f"{key}: {value}")


def _print(name: str, plan: "RunPlan") -> None:
    from rich.markup import escape

    from rocm_ext.cli._tables import console
    from rocm_ext.plan.memory import readable

    out = console()
    total, trainable = plan.parameters
    out.print(f"[bold]{escape(name)}[/] on {escape(plan.machine)}")
    out.print(f"{total / 1e6:,.1f} million parameters, {trainable / 1e6:,.1f} million of them trained, {plan.dtype}")
    if plan.shape:
        out.print(escape(plan.shape))
    out.print(f"{plan.ranks} rank(s); rows of {plan.rows.mean:,.0f} tokens, at most {plan.rows.longest:,} "
              f"({escape(plan.rows.source)})\n")  # fmt: skip
    out.print(_memory_table(plan))
    out.print(f"budget {readable(plan.budget[0])}: {escape(plan.budget[1])}\n")
    out.print(_step_table(plan))
    out.print(f"speeds: {escape(plan.figures.source)}")
    if not plan.figures.measured:
        out.print("[yellow]computed, not measured: run `rocm-ext bench` on that machine to measure them[/]")
    out.print()
    if plan.cycle:
        out.print(_cycle_table(plan))
    _print_verdict(out, plan)


def _choices(plan: "RunPlan") -> list[tuple[str, "Choice"]]:
    same = plan.best == plan.now
    return [("as configured", plan.now)] if same else [("as configured", plan.now), ("best fit", plan.best)]


def _memory_table(plan: "RunPlan") -> Any:
    from rocm_ext.cli._tables import table
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
    row("peak", [readable(choice.peak) for _, choice in choices], "bold")
    return made


def _step_table(plan: "RunPlan") -> Any:
    from rocm_ext.cli._tables import table

    choices = _choices(plan)
    titles = [title for title, _ in choices]
    made = table("An optimiser step per rank", "", *titles, right=tuple(titles))
    steps = [choice.step for _, choice in choices]
    made.add_row("tokens", *[f"{step.tokens:,.0f}" for step in steps])
    made.add_row("micro-batches of at most", *[f"{c.step.micro_batches} x {c.micro_batch:,}" for _, c in choices])
    made.add_row("layers checkpointed", *[f"{len(c.checkpointed)} of {c.memory.layers}" for _, c in choices])
    made.add_row("work", *[f"{step.flops / 1e12:,.1f} TFLOP" for step in steps])
    made.add_row("read and written", *[f"{step.bytes / 1e9:,.0f} GB" for step in steps])
    made.add_row("time", *[_duration(step.seconds) for step in steps])
    made.add_row("tokens/s", *[f"{step.tokens_per_second:,.0f}" for step in steps], style="bold")
    if plan.steps is None:
        made.add_row(
            "per 10,000 rows", *[_duration(1e4 * plan.rows.mean / plan.ranks / s.tokens_per_second) for s in steps]
        )
    else:
        what = "training in a cycle" if plan.cycle else "all epochs"
        made.add_row(f"{what}, {plan.steps} steps", *[_duration(plan.steps * step.seconds) for step in steps])
    return made


def _cycle_table(plan: "RunPlan") -> Any:
    from rocm_ext.cli._tables import table
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
    made.add_row("answer tokens/s", f"{sampling.tokens_per_second:,.0f}", style="bold")
    known = {"sampling": cycle.seconds[0], "evaluating": cycle.seconds[1], "training": plan.training_seconds}
    for what, seconds in known.items():
        made.add_row(what, "unknown: set --rows" if seconds is None else _duration(seconds))
    if all(seconds is not None for seconds in known.values()):
        made.add_row("together", _duration(sum(filter(None, known.values()))), style="bold")
    return made


def _print_verdict(out: Any, plan: "RunPlan") -> None:
    from rocm_ext.plan.memory import readable

    if not plan.fits:
        out.print(f"\n[red]does not fit[/] into {readable(plan.budget[0])}: lower tokenizer.max_seq_len, "
                  "max_new_tokens or batch_size, or use a smaller model")  # fmt: skip
    changes = plan.changes()
    if changes and plan.best.peak <= plan.budget[0]:
        gain = plan.now.step.seconds / plan.best.step.seconds
        keys = ", ".join(f"{key}: {value}" for key, value in changes.items())
        out.print(f"\nbest fit ({gain:.2f} times as fast, {readable(plan.best.peak)}): {keys}")
    elif plan.fits:
        out.print("\nfits; no setting is expected to be faster")


def _duration(seconds: float) -> str:
    from rocm_ext.log import duration

    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


def _content(plan: "RunPlan") -> dict[str, Any]:
    figures = plan.figures
    return {
        "machine": plan.machine,
        "here": plan.here,
        "dtype": plan.dtype,
        "ranks": plan.ranks,
        "parameters": plan.parameters[0],
        "trainable_parameters": plan.parameters[1],
        "shape": plan.shape,
        "budget": plan.budget[0],
        "budget_reason": plan.budget[1],
        "fits": plan.fits,
        "figures": vars(figures),
        "rows": vars(plan.rows),
        "configured": _choice_content(plan.now),
        "best": _choice_content(plan.best),
        "changes": plan.changes(),
        "steps": plan.steps,
        "training_seconds": plan.training_seconds,
        "cycle": None if plan.cycle is None else {
            "questions": vars(plan.cycle.asked),
            "sampling": vars(plan.cycle.sampling),
            "peak": plan.cycle.peak,
            "sampling_seconds": plan.cycle.seconds[0],
            "evaluating_seconds": plan.cycle.seconds[1],
        },
    }  # fmt: skip


def _choice_content(choice: "Choice") -> dict[str, Any]:
    memory, layers = choice.memory, choice.checkpointed
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
            "peak": choice.peak,
        },
        "step": {**vars(choice.step), "tokens_per_second": choice.step.tokens_per_second},
    }
