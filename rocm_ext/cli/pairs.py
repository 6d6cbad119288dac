"""``rocm-ext pairs``: pairs for DPO from the verified answers of a run.

Pairs right answers with wrong ones of the same training prompt, those of the closest lengths first, and writes them as
rows for dpo_rocm. Answers that the verifier failed to judge, or that max_new_tokens cut, make no pairs. An answer is in
at most one pair.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.base.files import replace_text
from rocm_ext.cli._common import add_force, add_trust, check_new_file, count, seed
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.pairs import Answer, choose_pairs, read_answers


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    option = parser.add_argument
    option("run_dir", type=Path, metavar="OUTPUT_DIR", help="output_dir of the run")
    option("--output", "-o", type=Path, metavar="FILE", help="the file to write (default: pairs.jsonl in OUTPUT_DIR)")
    add_force(parser)
    option("--per-prompt", type=count, default=4, metavar="N", help="maximum pairs of a prompt (default: 4)")
    option("--limit", type=count, metavar="N", help="maximum number of pairs, drawn at random")
    option("--last", type=count, metavar="N", help="use only the last N cycles or steps")
    option("--seed", type=seed, default=0, metavar="N", help="seed of random choices (default: 0)")
    add_trust(parser)


def run(args: argparse.Namespace) -> None:
    """Write the pairs and print how many there are.

    Raises:
        UserError: the run has no pairs, its prompts cannot be read, or the file exists.
    """
    folder = RunFolder(args.run_dir)
    output = check_new_file(args.output or args.run_dir / "pairs.jsonl", args.force)
    answers, left_out = read_answers(folder, args.last)
    pairs = choose_pairs(answers, per_prompt=args.per_prompt, limit=args.limit, seed=args.seed)
    for problem in folder.problems:
        print(f"warning: {problem}", file=sys.stderr)
    if not pairs:
        raise UserError(f"{args.run_dir} has no prompt with a right and a wrong answer: {_counts(answers, left_out)}")
    rows = _rows(folder, pairs, args.trust_config)
    replace_text(output, "".join(json.dumps(row) + "\n" for row in rows))
    prompts = len({right.prompt_id for right, _ in pairs})
    print(f"{output}: {len(rows):,} pairs of {prompts:,} prompts, from {_counts(answers, left_out)}")


def _counts(answers: Sequence[Answer], left_out: Any) -> str:
    right = sum(answer.right for answer in answers)
    counts = f"{right:,} right and {len(answers) - right:,} wrong answers"
    return counts + "".join(f"; left out: {number:,} {what}" for what, number in sorted(left_out.items()))


def _rows(folder: RunFolder, pairs: Sequence[tuple[Answer, Answer]], trusted: bool) -> list[dict[str, Any]]:
    """Return the rows of pairs, with their prompts from the run's own config.

    Raises:
        UserError: the prompts cannot be read, could run code, or are not those of the run any more.
    """
    component = folder.setting("prompts")
    if not isinstance(component, dict):
        raise UserError(f"{folder.path}/config.yaml names no prompts, whose texts the pairs need")
    if not trusted:
        config.check_from_folder({"prompts": component}, folder.path / "config.yaml")
    known = {prompt.id: prompt for prompt in config.instantiate(OmegaConf.create(component), key="prompts")}
    if missing := {right.prompt_id for right, _ in pairs} - known.keys():
        raise UserError(
            f"{len(missing)} prompts of the run, such as {min(missing)}, are not in its data any more; restore the "
            "data that `prompts` in its config.yaml names"
        )
    rows = []
    for right, wrong in pairs:
        prompt = known[right.prompt_id]
        row: dict[str, Any] = {"prompt": list(prompt.messages), "chosen": right.text, "rejected": wrong.text}
        rows.append(row | ({"tools": list(prompt.tools)} if prompt.tools else {}))
    return rows
