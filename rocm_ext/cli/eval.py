"""`rocm-ext eval`: measure an adapter on held-out prompts."""

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rocm_ext.cli._options import add_format, add_overrides


def add(commands) -> None:
    """Add the command's parser to argparse's subparsers."""
    parser = commands.add_parser(
        "eval",
        help="measure how often a model's answers are right, with or without an adapter",
        description="Sample answers to a RAFT config's eval_prompts, verify them with its verifier, and print "
        "pass@1 of greedy answers (and pass@k with eval_samples=N) with 95 %% Wilson intervals.",
    )
    option = parser.add_argument
    option(
        "--config",
        required=True,
        metavar="NAME",
        help="RAFT config with model, engine, eval_prompts and verifier",
    )
    option("--adapter", type=Path, metavar="DIR", help="PEFT folder (default: the model that the config starts from)")
    option("--data", metavar="FILE", help="rows to use instead of the config's eval_prompts: a file or a hub name")
    add_format(option)
    option("--json", action="store_true", help="print one JSON object instead of text")
    add_overrides(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measure the adapter and print its scores."""
    from rocm_ext import config
    from rocm_ext.hardware.environment import ensure_environment
    from rocm_ext.hardware.machine import detect
    from rocm_ext.hardware.profile import load_profile
    from rocm_ext.log import setup_logging
    from rocm_ext.recipes.raft_rocm import evaluate_adapter
    from rocm_ext.runs.scores import Score

    cfg = config.load("raft_rocm", args.config, [*args.overrides, "output_dir=eval"])
    setup_logging()
    for line in ensure_environment(load_profile(cfg.hardware), detect()):
        print(line, file=sys.stderr)
    if args.data:
        cfg.eval_prompts = {config.COMPONENT: "rocm_ext.data.prompt_dataset", "source": args.data}
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
