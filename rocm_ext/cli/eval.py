"""`rocm-ext eval`: measure an adapter on held-out prompts."""

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from rocm_ext.cli._options import add_format, add_overrides
from rocm_ext.errors import UserError


def add(commands) -> None:
    """Add the command's parser to argparse's subparsers."""
    parser = commands.add_parser(
        "eval",
        help="measure how often a model's answers are right, with or without an adapter",
        description="Sample answers to the eval_prompts of a config of RAFT or GRPO, verify them with its verifier, "
        "and print pass@1 of greedy answers (and pass@k with eval_samples=N) with 95 %% Wilson intervals.",
    )
    option = parser.add_argument
    option(
        "--config",
        required=True,
        metavar="NAME",
        help="config of RAFT or GRPO, with model, engine, eval_prompts and verifier",
    )
    option("--adapter", type=Path, metavar="DIR", help="PEFT folder (default: the model that the config starts from)")
    option("--data", metavar="FILE", help="rows to use instead of the config's eval_prompts: a file or a hub name")
    add_format(option)
    option(
        "--output",
        type=Path,
        metavar="DIR",
        help="keep the answers, verdicts and scores in this new folder; rocm-ext compare compares two of them",
    )
    option("--json", action="store_true", help="print one JSON object instead of text")
    add_overrides(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measure the adapter and print its scores."""
    from rocm_ext import config, registry
    from rocm_ext.config import startup
    from rocm_ext.log import setup_logging
    from rocm_ext.runs.scores import Score

    recipe = config.recipe_of(args.config, args.overrides)
    if registry.family(recipe) not in (registry.RAFT, registry.GRPO):
        raise UserError(
            f"config {args.config} is for {recipe.name}; eval needs a config of {registry.RAFT} or {registry.GRPO}, or "
            "of a recipe that extends one of them"
        )
    for line in startup.prepare(args.config, args.overrides):  # may restart this program
        print(line, file=sys.stderr)
    from rocm_ext.rollouts.evaluate import evaluate_adapter

    cfg = config.load(recipe, args.config, [*args.overrides, "output_dir=eval"])
    setup_logging()
    if args.data:
        cfg.eval_prompts = {config.COMPONENT: "rocm_ext.data.prompt_dataset", "source": args.data}
        if args.format:
            cfg.eval_prompts.format = args.format
    with TemporaryDirectory() as unkept:
        cfg.output_dir = cfg.checkpointer.output_dir = str(args.output or unkept)
        scores = evaluate_adapter(cfg, args.adapter)
    if args.json:
        print(json.dumps(scores))
        return
    print(f"pass@1 {Score(scores['correct'], scores['prompts'])}")
    for k, at in scores["pass_at_k"].items():
        low, high = at["interval"]
        print(f"pass@{k} of {scores['samples_per_prompt']}: {at['pass']:.1%}, 95 % interval {low:.1%} - {high:.1%}")
