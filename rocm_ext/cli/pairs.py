"""``rocm-ext pairs``: pairs for DPO, or single answers for KTO, from the verified answers of a run.

Pairs right with wrong answers to the same training prompt, closest lengths first, and writes them as rows for dpo_rocm.
Answers that the verifier failed to judge, or that max_new_tokens cut, make no pairs. An answer is in at most one pair.
With --single an answer is a row, with a label that says whether it is right.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.base.files import replace_text
from rocm_ext.base.types import Row
from rocm_ext.cli._common import (
    add_force,
    add_trust,
    check_new_file,
    count,
    options,
    refuse_first,
    seed,
)
from rocm_ext.config.model_folder import seen_from_here
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.pairs import choose_pairs, choose_single, read_answers


def add(parser: ArgumentParser) -> None:
    option = options(parser)
    option("run_dir RUN", "output_dir of the run", Path)
    option(
        "--output -o FILE", "the file to write (default: pairs.jsonl or single.jsonl in RUN)", Path
    )
    add_force(parser)
    option("--single", "write single answers with a label instead of pairs")
    option(
        "--per-prompt N",
        "maximum pairs of a prompt, or right and wrong answers to it (default: 4)",
        count,
        4,
    )
    option("--limit N", "maximum number of rows, drawn at random", count)
    option("--last N", "use only the last N cycles or steps", count)
    option("--seed N", "seed of random choices (default: 0)", seed, 0)
    add_trust(parser)


def run(args: Namespace) -> None:
    """Write the rows and print their number.

    Raises:
        UserError: the run makes no rows, its prompts cannot be read, or the file exists.
    """
    folder = RunFolder(args.run_dir)
    name = "single.jsonl" if args.single else "pairs.jsonl"
    output = check_new_file(args.output or args.run_dir / name, args.force)
    answers, left_out = read_answers(folder, args.last)
    right = sum(answer.right for answer in answers)
    counts = f"{right:,} right and {len(answers) - right:,} wrong answers"
    for reason, number in sorted(left_out.items()):
        counts += f"; left out: {number:,} {reason}"
    choice = {"per_prompt": args.per_prompt, "limit": args.limit, "seed": args.seed}
    chosen: list[tuple[str, Row]] = []  # id of the prompt, and the other columns
    if args.single:
        what, needed = "answers", "right or wrong answer"
        for answer in choose_single(answers, **choice):
            chosen.append((answer.prompt_id, {"completion": answer.text, "label": answer.right}))
    else:
        what, needed = "pairs", "prompt with a right and a wrong answer"
        for better, worse in choose_pairs(answers, **choice):
            chosen.append((better.prompt_id, {"chosen": better.text, "rejected": worse.text}))
    for problem in folder.problems:
        print(f"warning: {problem}", file=sys.stderr)
    refuse_first((not chosen, f"{args.run_dir} has no {needed}: {counts}"), code=1)
    rows = _rows(folder, chosen, args.trust_config)
    replace_text(output, "".join(json.dumps(row) + "\n" for row in rows))
    prompts = {prompt for prompt, _ in chosen}
    print(f"{output}: {len(rows):,} {what} of {len(prompts):,} prompts, from {counts}")


def _rows(folder: RunFolder, chosen: Sequence[tuple[str, Row]], trusted: bool) -> list[Row]:
    """Return rows with the prompts that the run's config names, which may name code if it is ``trusted``.

    Raises:
        UserError: the prompts cannot be read, could run code, or have changed since the run.
    """
    component = seen_from_here(folder.config, folder.path).get("prompts")
    if not isinstance(component, dict):
        raise UserError(
            f"{folder.path}/config.yaml names no prompts, and the rows need their texts"
        )
    if not trusted:
        config.check_from_folder({"prompts": component}, folder.path / "config.yaml")
    dataset = config.instantiate(OmegaConf.create(component), key="prompts")
    prompts = {prompt.id: prompt for prompt in dataset}
    missing = {prompt_id for prompt_id, _ in chosen} - prompts.keys()
    if missing:
        raise UserError(
            f"{len(missing)} prompts of the run, such as {min(missing)}, are not in its data any more; restore the "
            "data that `prompts` in its config.yaml names"
        )
    rows: list[Row] = []
    for prompt_id, columns in chosen:
        prompt = prompts[prompt_id]
        row = {"prompt": list(prompt.messages), **columns}
        if prompt.tools:
            row["tools"] = list(prompt.tools)
        rows.append(row)
    return rows
