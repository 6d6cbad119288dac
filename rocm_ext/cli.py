"""``rocm-ext``: the tools around the recipes, one subcommand each."""

import argparse
import json
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rocm_ext.errors import UserError

# Subcommands import what they need when they run: torch takes seconds, and --help must not.


def main(argv: list[str] | None = None) -> int:
    """Run ``rocm-ext`` with these arguments; returns the exit code."""
    parser = _parser()
    args, more = parser.parse_known_args(argv)
    for name in ("overrides", "arguments"):  # argparse takes those in one run only, before or after the options
        if hasattr(args, name) and all("=" in item and item[0] != "-" for item in more):
            getattr(args, name).extend(more)
            more = []
    if more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    try:
        args.run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rocm-ext",
        description="Tools around the torchtune-rocm recipes. The recipes themselves run with `tune run`.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_pocket, _add_eval, _add_verify):
        add(commands)
    return parser


def _add_pocket(commands) -> None:
    parser = commands.add_parser(
        "pocket",
        help="make a small model and its data to try the recipes with, offline, on any machine",
        description="Make a Qwen2.5 model of a million parameters in Hugging Face's format, trained on the "
        "spot on two-digit additions and subtractions until it is right about a third of the time, with "
        "train.jsonl and heldout.jsonl beside it. Takes a minute or two on two CPU cores.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="where to; an earlier pocket model is kept")
    parser.add_argument("--seed", type=int, default=0, help="of problems and weights")
    parser.add_argument(
        "--accuracy", type=float, default=0.33, help="stop training at this share of right held-out answers"
    )
    parser.add_argument("--force", action="store_true", help="replace an earlier pocket model")
    parser.set_defaults(run=_pocket)


def _pocket(args: argparse.Namespace) -> None:
    import logging

    from rocm_ext.pocket import make
    from rocm_ext.scores import Score

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    card, is_new = make(args.dir, args.seed, args.accuracy, args.force)
    score = Score(card["correct"], card["total"])
    print(
        f"{args.dir}: {'' if is_new else 'exists already (--force remakes it), '}held-out {score} "
        f"after {card['steps']} steps, {card['parameters']:,} parameters"
    )


def _add_eval(commands) -> None:
    parser = commands.add_parser(
        "eval",
        help="measure how often a model's answers are right, with any adapter or none",
        description="Sample answers to a RAFT config's eval_prompts, verify them with its verifier, and print "
        "pass@1 of greedy answers (and pass@k with eval_samples=N) with 95 %% Wilson intervals.",
    )
    add = parser.add_argument
    add("--config", required=True, metavar="NAME", help="a RAFT config: model, engine, eval_prompts, verifier")
    add("--adapter", type=Path, metavar="DIR", help="PEFT folder; without it: the model as the config starts it")
    add("--data", metavar="FILE", help="other rows than the config's eval_prompts: a file or a hub name")
    _add_format(add)
    add("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the config, as in `tune run`")
    parser.set_defaults(run=_eval)


def _add_format(add) -> None:
    add("--format", metavar="NAME", help="gsm8k, mbpp or humaneval: ready mappings of their columns")


def _add_verify(commands) -> None:
    parser = commands.add_parser(
        "verify",
        help="run the right answers of a data set through a verifier, which must find them right",
        description="A verifier proves itself: right answers must score 1.0. Shows the verdicts, the mean reward "
        "and the first answers that were not found right; ends with 1 if there are any.",
    )
    add = parser.add_argument
    add("--verifier", required=True, metavar="NAME", help="MathAnswer, PythonTests, …, or my_module.MyVerifier")
    add("--data", required=True, metavar="FILE", help="rows as RAFT reads them: JSONL, JSON, Parquet, CSV, a hub name")
    _add_format(add)
    add("--name", help="configuration of a hub data set (openai/gsm8k: main)")
    add("--split", default="train", help="of a hub data set (train)")
    add("--gold", metavar="FIELD", help="the right answer (default: the first of solution, completion, answer)")
    add("--workers", type=_count, metavar="N", help="processes (default: physical cores)")
    add("--limit", type=_count, metavar="N", help="the first N rows only")
    add("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("arguments", nargs="*", metavar="key=value", help="the verifier's arguments, such as timeout=5")
    parser.set_defaults(run=_verify)


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def _verify(args: argparse.Namespace) -> None:
    import psutil
    import yaml

    from rocm_ext.prompts import prompt_dataset
    from rocm_ext.verifiers import Verdict
    from rocm_ext.verifiers.selfcheck import self_check

    path = args.verifier if "." in args.verifier else f"rocm_ext.verifiers.{args.verifier}"
    node = {"_component_": path}
    for item in args.arguments:
        key, equals, value = item.partition("=")
        if not equals:
            raise UserError(f"cannot read argument {item!r}; expected key=value", code=2)
        node[key] = yaml.safe_load(value)
    prompts = prompt_dataset(source=args.data, format=args.format, name=args.name, split=args.split)
    rows = [(prompt.origin, prompt.row) for prompt in prompts]
    workers = args.workers or psutil.cpu_count(logical=False) or 1
    summary = self_check(node, rows, args.gold, workers, args.limit)
    verdicts = {verdict.value: count for verdict, count in sorted(summary.verdicts.items())}
    failures = [{"origin": origin, "verdict": r.verdict.value, "detail": r.detail} for origin, r in summary.failures]
    if args.json:
        content = {"rows": summary.rows, "verdicts": verdicts, "mean_reward": summary.mean_reward}
        print(json.dumps({**content, "failures": failures}))
    else:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        mean = "none" if summary.mean_reward is None else f"{summary.mean_reward:.4f}"
        print(f"{summary.rows} right answers: {counts}; mean reward {mean}")
        for failure in failures:
            print("{origin}: {verdict} {detail}".format(**failure))
    if wrong := summary.rows - summary.verdicts[Verdict.CORRECT]:
        raise UserError(f"{wrong} of {summary.rows} right answers were not found right")


def _eval(args: argparse.Namespace) -> None:
    from rocm_ext import config, device
    from rocm_ext.machine import detect
    from rocm_ext.monitor import setup_logging
    from rocm_ext.recipes.raft_rocm import evaluate_adapter
    from rocm_ext.scores import Score

    if strange := [item for item in args.overrides if "=" not in item]:
        raise UserError(f"cannot read override {strange[0]!r}; expected key=value", code=2)
    cfg = config.load("raft_rocm", args.config, [*args.overrides, "output_dir=eval"])
    setup_logging()
    for line in device.start(device.load_profile(cfg.hardware), detect()):
        print(line, file=sys.stderr)
    if args.data:
        cfg.eval_prompts = {config.COMPONENT: "rocm_ext.prompts.prompt_dataset", "source": args.data}
        if args.format:
            cfg.eval_prompts.format = args.format
    with TemporaryDirectory() as out:
        cfg.output_dir = cfg.checkpointer.output_dir = out
        scores = evaluate_adapter(cfg, args.adapter)
    if args.json:
        print(json.dumps(scores))
        return
    print(f"pass@1 {Score(scores['correct'], scores['prompts'])}")
    for k, at in scores["pass_at_k"].items():
        low, high = at["interval"]
        print(f"pass@{k} of {scores['samples_per_prompt']}: {at['pass']:.1%}, 95 % interval {low:.1%} - {high:.1%}")


if __name__ == "__main__":
    sys.exit(main())
