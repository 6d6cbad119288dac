"""``rocm-ext plan``: estimate a run's memory, work and time before anything is downloaded.

Plans a run of any config on the machine that its `hardware` key names, this one or another. Prints parameters, memory
by part against the machine's budget, work per step, expected speed, and the settings that fit best. Needs no weights
and no data. Exits with 1 if the config does not fit.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from rocm_ext import config
from rocm_ext.base import registry
from rocm_ext.base.errors import UserError
from rocm_ext.base.log import duration
from rocm_ext.cli._common import add_json, add_overrides, console, count, print_json, table
from rocm_ext.config.checks import check_grpo_values, check_raft_values, check_values
from rocm_ext.machine.chips import find_chip
from rocm_ext.machine.detect import detect
from rocm_ext.machine.profile import load_profile

if TYPE_CHECKING:
    from rocm_ext.plan.planner import Choice
    from rocm_ext.plan.run import RunPlan

_PARTS = ("weights", "gathered", "adapter", "gradients", "optimizer")
Rows = list[tuple[str, list[str]]]
# A figure of a plan where training and sampling run at these shares of their computed speeds
Figure = Callable[[float, float], float]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    option = parser.add_argument
    option("--config", required=True, metavar="NAME", help="config of any recipe: a name or a file")
    chip = "MI355X, W7900, RTX 4090, 'Strix Halo', gfx950 (default: the config's hardware)"
    option("--machine", metavar="NAME", help=f"plan for a machine with this chip: {chip}")
    option("--ranks", type=count, default=1, metavar="N", help="processes that share the work (default: 1)")
    rows = "training rows (of DPO: pairs), in RAFT prompts per cycle, in GRPO per step (default: counted if on disk)"
    option("--rows", type=count, metavar="N", help=rows)
    option("--row-tokens", type=count, metavar="N", help="mean tokens of a row, in RAFT and GRPO of a prompt")
    answer = "RAFT and GRPO: mean tokens of an answer (default: max_new_tokens / 2)"
    option("--answer-tokens", type=count, metavar="N", help=answer)
    option("--bench", type=Path, metavar="FILE", help="bench.json with speeds (default: this machine's, if it exists)")
    add_json(parser)
    add_overrides(parser)


def run(args: argparse.Namespace) -> int:
    """Plan the run and print the plan.

    Returns:
        Exit code: 0 if the config fits, else 1.
    """
    chip = _take_machine(args)
    recipe = config.recipe_of(args.config, args.overrides)
    family = registry.extended(recipe)
    cfg = config.load(recipe, args.config, args.overrides)
    registry.check_system(recipe, load_profile(cfg.hardware).match.get("system", ""))
    check_values(OmegaConf.create(config.trainer_config(cfg)))
    _check_sizes(args, cfg)
    from rocm_ext.plan.run import plan_run
    from rocm_ext.plan.workload import Known

    if family == registry.RAFT:
        check_raft_values(cfg)
    if family == registry.GRPO:
        from rocm_ext.rl import objective

        check_grpo_values(cfg)
        cfg.loss = objective.loss_config(cfg)
    known = Known(args.rows, args.row_tokens, args.answer_tokens)
    plan = plan_run(cfg, detect(), family=family, bench=args.bench, ranks=args.ranks, known=known, chip=chip)
    if args.json:
        print_json(_content(plan))
    else:
        _print(args.config, plan)
    return 0 if plan.fits else 1


def _take_machine(args: argparse.Namespace) -> str | None:
    """Turn ``--machine`` into ``hardware=…``; return the chip's name."""
    if args.machine is None:
        return None
    hardware = [override.partition("=")[2] for override in args.overrides if override.startswith("hardware=")]
    profile, chip = find_chip(args.machine, hardware[-1] if hardware else None)
    args.overrides = [f"hardware={profile}", *args.overrides]
    return chip


def _check_sizes(args: argparse.Namespace, cfg: Any) -> None:
    """Refuse sizes that the run could not have."""
    limits = {"answer_tokens": cfg.get("max_new_tokens"), "row_tokens": cfg.tokenizer.get("max_seq_len")}
    if args.answer_tokens and not limits["answer_tokens"]:
        raise UserError(f"--answer-tokens is for RAFT and GRPO; {args.config} samples no answers", code=2)
    for name, most in limits.items():
        if isinstance(most, int) and (getattr(args, name) or 0) > most:
            key = "max_new_tokens" if name == "answer_tokens" else "tokenizer.max_seq_len"
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)} is above {key}={most}; raise it, too")


# ---- as text


def _print(name: str, plan: "RunPlan") -> None:
    from rich.markup import escape

    from rocm_ext.plan.memory import readable
    from rocm_ext.plan.planner import dtype_name

    out, figures = console(), plan.target.figures
    total, trainable = plan.parameters
    out.print(f"[bold]{escape(name)}[/] on {escape(plan.target.name)}")
    dtype = dtype_name(plan.target.dtype)
    out.print(f"{total / 1e6:,.1f} million parameters, {trainable / 1e6:,.1f} million of them trained, {dtype}")
    if plan.shape:
        out.print(escape(plan.shape))
    rows = f"rows of {plan.rows.mean:,.0f} tokens, at most {plan.rows.longest:,} ({escape(plan.rows.source)})"
    out.print(f"{plan.ranks} rank(s); {rows}\n")
    choices = {"as configured": plan.now} | ({} if plan.best == plan.now else {"best fit": plan.best})
    columns = list(choices)
    _print_table(out, "Memory per rank while training", columns, _memory_rows(plan, list(choices.values())))
    out.print(f"budget {readable(plan.target.budget[0])}: {escape(plan.target.budget[1])}\n")
    _print_table(out, "An optimiser step per rank", columns, _step_rows(plan, list(choices.values())))
    out.print(f"speeds: {escape(figures.source)}")
    if figures.published:
        reached = " and ".join(f"{low} to {high} in {what}" for what, (low, high) in figures.published.items())
        out.print(
            f"[yellow]computed, not measured. Published runs reach {reached} of such figures: hence the ranges[/]"
        )
    if not figures.measured:
        out.print("[yellow]To measure: `rocm-ext bench` on that machine[/]")
    out.print()
    if plan.cycle or plan.policy:
        title = "A RAFT cycle" if plan.cycle else "A GRPO step, if no group has equal rewards"
        _print_table(
            out, title, [" "], _sampling_rows(plan) + (_cycle_rows(plan) if plan.cycle else _policy_rows(plan))
        )
    _print_verdict(out, plan)


def _print_table(out: Any, title: str, columns: list[str], rows: Rows) -> None:
    made = table(title, "", *columns, right=tuple(columns))
    made.show_header = columns != [" "]
    for name, values in rows:
        made.add_row(name, *values, style="bold" if name in ("peak", "tokens/s", "a step", "together") else "")
    out.print(made)


def _memory_rows(plan: "RunPlan", choices: Sequence["Choice"]) -> Rows:
    from rocm_ext.plan.memory import readable

    used = [part for part in _PARTS if any(getattr(choice.memory, part) for choice in choices)]
    rows: Rows = [(part, [readable(getattr(choice.memory, part)) for choice in choices]) for part in used]
    rows.append(("activations", [readable(choice.memory.activations(choice.checkpointed)) for choice in choices]))
    rows.append(("  none checkpointed", [readable(choice.memory.activations(())) for choice in choices]))
    every = [choice.memory.activations(range(choice.memory.layers)) for choice in choices]
    rows.append(("  all checkpointed", list(map(readable, every))))
    rows.append(("logits and loss", [readable(choice.memory.loss.working) for choice in choices]))
    if any(plan.kept(choice) for choice in choices):
        rows.append(("kept for sampling", [readable(plan.kept(choice)) for choice in choices]))
    return [*rows, ("peak", [readable(plan.peak(choice)) for choice in choices])]


def _step_rows(plan: "RunPlan", choices: Sequence["Choice"]) -> Rows:
    steps = [choice.step for choice in choices]

    def times(factor: float = 1.0) -> list[str]:
        return [_told(plan, _training_time(factor * step.seconds)) for step in steps]

    rows: Rows = [
        ("tokens", [f"{step.tokens:,.0f}" for step in steps]),
        ("micro-batches of at most", [f"{c.step.micro_batches} x {c.micro_batch:,}" for c in choices]),
        ("layers checkpointed", [f"{len(c.checkpointed)} of {c.memory.layers}" for c in choices]),
        ("work", [f"{step.flops / 1e12:,.1f} TFLOP" for step in steps]),
        ("read and written", [f"{step.bytes / 1e9:,.0f} GB" for step in steps]),
        ("time", times()),
        ("tokens/s", [_speed(plan, step.tokens_per_second, 0) for step in steps]),
    ]
    if plan.steps is None:
        per_rank = 1e4 * plan.rows.mean / plan.ranks
        seconds = [_training_time(per_rank / step.tokens_per_second) for step in steps]
        rows.append(("per 10,000 rows", [_told(plan, each) for each in seconds]))
    elif not plan.policy:  # its own table says more
        rows.append((f"{'training in a cycle' if plan.cycle else 'all epochs'}, {plan.steps} steps", times(plan.steps)))
    if plan.reference is not None:
        before = [plan.reference * step.forward_seconds / plan.now.step.forward_seconds for step in steps]
        rows.append(("before, the reference's log-probs", [_told(plan, _training_time(each)) for each in before]))
    return rows


def _sampling_rows(plan: "RunPlan") -> Rows:
    """What a RAFT cycle and a GRPO step have in common."""
    from rocm_ext.plan.memory import readable

    part: Any = plan.cycle or plan.policy
    asked, sampling, servers = part.asked, part.sampling, plan.policy.servers if plan.policy else 0
    prompts = f"{asked.prompts} prompts" if asked.prompts else "prompts"
    rows: Rows = [("answers", [f"of {asked.answer:,.0f} tokens to {prompts} of {asked.mean:,.0f}"])]
    if servers:
        rows.append(("servers", [f"{servers}, each assumed to be one more GPU of this kind"]))
    rows.append(("slots", [f"{sampling.slots}"]))
    if not servers:
        rows.append(("the sampler's layout of the weights", [readable(sampling.layout)]))
        rows.append(("keys and values", [readable(sampling.cache)]))
        rows.append(("peak while sampling", [readable(part.peak)]))
    return [*rows, ("answer tokens/s", [_speed(plan, sampling.tokens_per_second, 1)])]


def _cycle_rows(plan: "RunPlan") -> Rows:
    assert plan.cycle is not None
    sampling, evaluating = plan.cycle.seconds
    training = plan.training_seconds
    parts: dict[str, tuple[float | None, Figure]] = {
        "sampling": (sampling, lambda _, share: (sampling or 0.0) / share),
        "evaluating": (evaluating, lambda _, share: (evaluating or 0.0) / share),
        "training": (training, _training_time(training or 0.0)),
    }
    rows: Rows = [
        (what, ["unknown: set --rows" if seconds is None else _told(plan, of)]) for what, (seconds, of) in parts.items()
    ]
    if all(seconds is not None for seconds, _ in parts.values()):
        rows.append(("together", [_told(plan, lambda *shares: sum(of(*shares) for _, of in parts.values()))]))
    return rows


def _policy_rows(plan: "RunPlan") -> Rows:
    policy = plan.policy
    assert policy is not None
    updates = f"{policy.updates} updates" if policy.updates > 1 else "1 update"
    rows: Rows = [("sampling", [_told(plan, lambda *shares: policy.at(*shares).sampling_seconds)])]
    if policy.scoring_seconds:
        scoring = _told(plan, lambda *shares: policy.at(*shares).scoring_seconds)
        rows.append(("log-probs before the updates", [scoring]))
    rows.append((updates, [_told(plan, lambda *shares: policy.at(*shares).updates_seconds)]))
    if policy.waiting:
        side, ahead = policy.waiting
        rows.append((f"{side} wait", [_duration(ahead)]))
    rows.append(("a step", [_told(plan, lambda *shares: policy.at(*shares).step_seconds)]))
    if policy.evaluations:
        unknown = policy.evaluation_seconds is None
        evaluation = _told(plan, lambda *shares: policy.at(*shares).evaluation_seconds or 0.0)
        rows.append(("an evaluation", ["unknown: held-out prompts not on disk" if unknown else evaluation]))
    if policy.run_seconds is not None:
        whole = f"{policy.steps} steps and {policy.evaluations} evaluations"
        rows.append((whole, [_told(plan, lambda *shares: policy.at(*shares).run_seconds or 0.0)]))
    return rows


def _print_verdict(out: Any, plan: "RunPlan") -> None:
    from rocm_ext.plan.memory import readable

    budget, changes = plan.target.budget[0], plan.changes()
    if not plan.fits:
        how = "lower tokenizer.max_seq_len, max_new_tokens or batch_size, or use a smaller model or more ranks"
        out.print(f"\n[red]does not fit[/] into {readable(budget)}: {how}")
    if changes and plan.peak(plan.best) <= budget:
        gain = plan.now.step.seconds / plan.best.step.seconds
        keys = ", ".join(f"{key}: {value}" for key, value in changes.items())
        out.print(f"\nbest fit ({gain:.2f} times as fast, {readable(plan.peak(plan.best))}): {keys}")
    elif plan.fits:
        out.print("\nfits; no setting is expected to be faster")


def _told(plan: "RunPlan", of: Figure, form: Callable[[float], str] | None = None) -> str:
    """A figure in words; one from a data sheet as the range that published runs make of it."""
    published = plan.target.figures.published
    shares = zip(*published.values(), strict=True) if published else [(1.0, 1.0)]
    return " to ".join(dict.fromkeys(map(form or _duration, sorted(of(*each) for each in shares))))


def _training_time(seconds: float) -> Figure:
    return lambda share, _: seconds / share


def _speed(plan: "RunPlan", speed: float, kind: int) -> str:
    """Tokens per second of training (kind 0) or sampling (1)."""
    return _told(plan, lambda *shares: speed * shares[kind], "{:,.0f}".format)


def _duration(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 10 else duration(seconds)


# ---- as JSON


def _content(plan: "RunPlan") -> dict[str, Any]:
    """The plan as JSON; its speeds and times are computed, and ``published`` has what runs reach of them."""
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
        "published": figures.published,
        "rows": vars(plan.rows),
        "configured": _choice_content(plan, plan.now),
        "best": _choice_content(plan, plan.best),
        "changes": plan.changes(),
        "steps": plan.steps,
        "training_seconds": plan.training_seconds,
        "reference_seconds": plan.reference,
        "cycle": plan.cycle
        and {
            "questions": vars(plan.cycle.asked),
            "sampling": vars(plan.cycle.sampling),
            "peak": plan.cycle.peak,
            "sampling_seconds": plan.cycle.seconds[0],
            "evaluating_seconds": plan.cycle.seconds[1],
        },
        "policy": plan.policy
        and {
            **{key: value for key, value in vars(plan.policy).items() if key != "asked"},
            "questions": vars(plan.policy.asked),
            "sampling": vars(plan.policy.sampling),
            **{key: getattr(plan.policy, key) for key in ("step_seconds", "run_seconds", "waiting")},
        },
    }


def _choice_content(plan: "RunPlan", choice: "Choice") -> dict[str, Any]:
    memory, layers = choice.memory, choice.checkpointed
    return {
        "tokens_per_micro_batch": choice.micro_batch,
        "checkpointed_layers": len(layers),
        "memory": {
            **{part: getattr(memory, part) for part in _PARTS},
            "activations": memory.activations(layers),
            "activations_without_checkpointing": memory.activations(()),
            "activations_with_checkpointing": memory.activations(range(memory.layers)),
            "loss": memory.loss.working,
            "kept_for_sampling": plan.kept(choice),
            "peak": plan.peak(choice),
        },
        "step": {**vars(choice.step), "tokens_per_second": choice.step.tokens_per_second},
    }
