"""``rocm-ext rows``: show what a config makes of its data.

Reads the data of a config of any recipe as a run does, and prints a few rows as the model gets them, with special
tokens, and what is trained in them: in colour on a terminal, in double brackets elsewhere. Then it prints lengths in
tokens, the share that is trained, how many rows are kept, cut or dropped, rows that repeat others, and validation rows
that are also trained on. Needs the model's folder without its weights, and no GPU. Exits with 1 and one line where the
data would end a run.
"""

import argparse
import platform
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from rocm_ext import config
from rocm_ext.base import registry
from rocm_ext.base.errors import UserError
from rocm_ext.base.log import setup_logging
from rocm_ext.cli._common import add_json, add_overrides, count, number, print_json
from rocm_ext.config.checks import check_config

# Numbers; the tokens of each row; what to show of a row, by its number; and a check that raises as a run would
Read = tuple[dict[str, Any], list[int], Callable[[int], dict[str, Any]], Callable[[], None]]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    option = parser.add_argument
    option("--config", required=True, metavar="NAME", help="config of any recipe: a name or a file")
    what = "show this row, counted from 0 among those that are kept; several times for several rows"
    option("--row", type=number(int, 0, 10**9), action="append", metavar="N", help=what)
    option("--show", type=count, metavar="N", help="show the first N rows (default: first, shortest and longest)")
    add_json(parser)
    add_overrides(parser)


def run(args: argparse.Namespace) -> None:
    """Read the data, and print rows and numbers."""
    import torch

    from rocm_ext.cli._rows_text import print_rows
    from rocm_ext.data.tokenizer import open_tokenizer
    from rocm_ext.distributed.ranks import Ranks
    from rocm_ext.model.build import build_model
    from rocm_ext.model.download import use_downloaded
    from rocm_ext.train.builders import check_tokenizer

    setup_logging()
    recipe = config.recipe_of(args.config, args.overrides)
    registry.check_system(recipe, platform.system())
    family, cfg = registry.extended(recipe), config.load(recipe, args.config, args.overrides)
    check_config(cfg, family)
    use_downloaded(cfg, Ranks(torch.device("cpu")))
    tokenizer = open_tokenizer(cfg)
    check_tokenizer(tokenizer, cfg)
    decoder = build_model(cfg.model, torch.bfloat16, 0, torch.device("meta"))
    read = _prompts if family in registry.SAMPLED else _rows
    content, lengths, show, check = read(cfg, family, tokenizer, decoder)
    content = {"recipe": recipe.name, **content, "shown": list(map(show, _chosen(args, lengths)))}
    (print_json if args.json else print_rows)(content)
    check()


def _chosen(args: argparse.Namespace, lengths: list[int]) -> list[int]:
    """Return the numbers of the rows to show, given the tokens of each row."""
    if args.row and max(args.row) >= len(lengths):
        raise UserError(
            f"there is no row {max(args.row)}; the rows that are kept are 0 to {len(lengths) - 1:,}", code=2
        )
    if args.row or args.show:
        return [*(args.row or ()), *range(min(args.show or 0, len(lengths)))]
    return list(dict.fromkeys([0, lengths.index(min(lengths)), lengths.index(max(lengths))]))


def _rows(cfg: Any, family: str, tokenizer: Any, decoder: Any) -> Read:
    """Read the rows of SFT or DPO as the recipe does."""
    from rocm_ext.data.batches import Steps, rows_per_step
    from rocm_ext.data.mixture import Mixture
    from rocm_ext.data.overview import equal, keys, lengths, numbers, prompt_keys, sequences, shared
    from rocm_ext.data.rows import Rows, open_dataset, origin_of
    from rocm_ext.losses import objective_of
    from rocm_ext.recipes.dpo_rocm import DPO
    from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune
    from rocm_ext.train.learner import Learner

    recipe = cast(Any, (DPO if family == registry.DPO else LoRAFinetune)(cfg))
    # what reading data needs of them: a whole runtime needs the config's device, and a learner its model there
    recipe.runtime = SimpleNamespace(ranks=SimpleNamespace(is_main=True))
    recipe.learner = object.__new__(Learner)
    recipe.learner.tokenizer, recipe.learner.decoder = tokenizer, decoder
    recipe.learner.objective = objective_of(config.instantiate(cfg.loss, key="loss"))
    rows, validation = recipe.setup_data(tokenizer)

    def described(rows: Rows, dataset: Any) -> tuple[dict[str, Any], dict[str, list[int]], Callable[[int], str]]:
        found = lengths(rows)
        trained = sum(sum(values) for name, values in found.items() if name in ("trained", "chosen", "rejected"))

        def origin(row: int) -> str:
            return origin_of(dataset, int(rows.numbers[row]))

        content = {"rows": rows.counts["rows"], "counts": rows.counts, "first": rows.first}
        share = {"trained_share": trained / sum(map(len, rows.tokens))}
        return content | numbers(found, keys(rows), origin) | share, found, origin

    dataset = open_dataset(cfg.dataset, tokenizer, cfg.too_long)
    content, found, origin = described(rows, dataset)
    mixture = Mixture.of(cfg.dataset, rows)
    steps = Steps(len(rows), rows_per_step(cfg, 1), cfg.max_steps_per_epoch)
    result = {"dataset": content, "steps_per_epoch": steps.per_epoch, "rows_per_step": steps.per_step}
    result["data_sets"] = mixture.table()
    if validation is not None:
        if cfg.dataset_val is not None:
            dataset = open_dataset(cfg.dataset_val, tokenizer, cfg.too_long)
        held_out, _, held_origin = described(validation, dataset)
        for name, hashes in (("trained_on", keys), ("prompt_trained_on", prompt_keys)):
            held_out |= equal(name, shared(hashes(validation), hashes(rows)), held_origin, origin)
        if cfg.dataset_val is None:  # a part of the rows that `dataset` counts
            held_out |= {"counts": {}, "first": {}}
        result["validation"] = held_out

    def show(row: int) -> dict[str, Any]:
        weight = {"weight": float(rows.columns["weight"][row][0])} if "weight" in rows.columns else {}
        return {"row": row, "origin": origin(row), **weight, "sequences": sequences(rows, row, tokenizer)}

    def check() -> None:
        mixture.check()
        for part in filter(None, (rows, validation)):
            recipe.learner.check_rows(part, recipe.columns)

    return result, next(iter(found.values())), show, check


def _prompts(cfg: Any, family: str, tokenizer: Any, decoder: Any) -> Read:
    """Read the prompts of RAFT or GRPO as the recipe does."""
    import numpy as np

    from rocm_ext.data.overview import equal, numbers, sequence, shared
    from rocm_ext.data.prompts import Prompt
    from rocm_ext.data.rows import key
    from rocm_ext.plan.workload import longest_answer
    from rocm_ext.rl.prompts import PromptSet

    prompts = PromptSet(cfg)
    if cfg.environment is not None:
        prompts.check_verifier()  # it learns the environment's tools, which every prompt shows
    prompts.render(tokenizer)
    answer = longest_answer(cfg)

    def described(part: list[Prompt]) -> tuple[dict[str, Any], list[int], list[bytes]]:
        rendered = [prompts.tokens[prompt.id] for prompt in part]
        tokens, hashes = list(map(len, rendered)), list(map(key, rendered))
        ends_run = [p.origin for p, n in zip(part, tokens, strict=True) if n + answer > decoder.max_seq_len]
        reasons = getattr(part, "dropped", {}) | ({"too_long_for_the_model": ends_run} if ends_run else {})
        counts = {"rows": getattr(part, "read", len(part)), **{what: len(those) for what, those in reasons.items()}}
        content = {"rows": counts["rows"], "counts": counts, "first": {what: r[0] for what, r in reasons.items()}}
        return content | numbers({"prompt": tokens}, hashes, lambda i: part[i].origin), tokens, hashes

    content, tokens, hashes = described(prompts.training)
    result = {"dataset": content, "longest_answer": answer, "window": decoder.max_seq_len}
    if prompts.held_out:
        held_out, _, others = described(prompts.held_out)
        pairs = shared(others, hashes)
        at = (lambda i: prompts.held_out[i].origin), (lambda i: prompts.training[i].origin)
        result["validation"] = held_out | equal("trained_on", pairs, *at)

    def show(row: int) -> dict[str, Any]:
        prompt = prompts.training[row]
        shown = sequence(tokenizer, prompts.tokens[prompt.id], np.zeros(tokens[row], bool))
        return {"row": row, "origin": prompt.origin, "sequences": [shown]}

    return result, tokens, show, lambda: prompts.check_length(decoder.max_seq_len)
