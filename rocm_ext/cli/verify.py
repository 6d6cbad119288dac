"""``rocm-ext verify``: check a verifier on right answers.

Runs a data set's right answers through a verifier. Each must score 1.0. Prints the verdicts, the mean reward and the
first answers that fail. Exits with 1 if any answer fails.
"""

from argparse import ArgumentParser, Namespace

import psutil
import yaml
from omegaconf import OmegaConf

from rocm_ext.base.errors import refuse
from rocm_ext.cli._common import add_format, add_json, count, options, print_json, refuse_first
from rocm_ext.config.components import component_faults
from rocm_ext.verifiers import Verdict
from rocm_ext.verifiers.selfcheck import self_check


def add(parser: ArgumentParser) -> None:
    option = options(parser)
    option("--verifier NAME", "MathAnswer, PythonTests, …, or my_module.MyVerifier", required=True)
    rows = "rows of prompts as RAFT and GRPO take them: JSONL, JSON, Parquet, CSV or a hub name"
    option("--data FILE", rows, required=True)
    add_format(parser)
    option("--name NAME", "configuration of a hub data set (openai/gsm8k: main)")
    option("--split SPLIT", "split of a hub data set (default: train)", default="train")
    option(
        "--gold FIELD",
        "column of the right answer (default: the first of solution, completion, answer)",
    )
    option("--workers N", "worker processes (default: physical cores)", count)
    option("--limit N", "read only the first N rows", count)
    add_json(parser)
    option("arguments key=value", "the verifier's arguments, such as timeout=5", nargs="*")


def run(args: Namespace) -> None:
    """Verify the right answers and print the verdicts.

    Raises:
        UserError: an answer fails, or an argument is invalid.
    """
    from rocm_ext.data.prompts import prompt_dataset

    path = args.verifier if "." in args.verifier else f"rocm_ext.verifiers.{args.verifier}"
    verifier = {"_component_": path}
    for item in args.arguments:
        key, equals, value = item.partition("=")
        refuse_first((not equals, f"invalid argument {item!r}; expected key=value"))
        verifier[key] = yaml.safe_load(value)
    refuse(component_faults(OmegaConf.create({"verifier": verifier}), {}))
    prompts = prompt_dataset(source=args.data, format=args.format, name=args.name, split=args.split)
    rows = [(prompt.origin, prompt.row) for prompt in prompts]
    workers = args.workers or psutil.cpu_count(logical=False) or 1
    summary = self_check(verifier, rows, args.gold, workers, args.limit)
    counted = sorted(summary.verdicts.items())
    verdicts = {verdict.value: count for verdict, count in counted}
    if args.json:
        failures = []
        for origin, result in summary.failures:
            failures.append(
                {"origin": origin, "verdict": result.verdict.value, "detail": result.detail}
            )
        content = {"rows": summary.rows, "verdicts": verdicts, "mean_reward": summary.mean_reward}
        print_json({**content, "failures": failures})
    else:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        mean = "none" if summary.mean_reward is None else f"{summary.mean_reward:.4f}"
        print(f"{summary.rows} right answers: {counts}; mean reward {mean}")
        for origin, result in summary.failures:
            print(f"{origin}: {result.verdict.value} {result.detail}")
    wrong = summary.rows - summary.verdicts[Verdict.CORRECT]
    refuse_first((wrong, f"{wrong} of {summary.rows} right answers failed verification"), code=1)
