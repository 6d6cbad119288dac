"""``rocm-ext rows``: show the rows that a config makes of its data.

Reads the data of any recipe's config as a run does. Prints a few rows as the model gets them, with special tokens; the
trained part is in colour on a terminal, in double brackets elsewhere. Then it prints lengths in tokens, the trained
share, how many rows are kept, cut or dropped, rows that repeat others, and validation rows that are also trained on.
Needs the model's folder without its weights, and no GPU. Exits with 1 and one line where the data would end a run.
"""

import argparse
import platform
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from rocm_ext import config
from rocm_ext.base import registry
from rocm_ext.base.errors import UserError
from rocm_ext.base.log import setup_logging
from rocm_ext.cli._common import add_json, add_overrides, count, number, print_json
from rocm_ext.config.checks import check_config

if TYPE_CHECKING:
    from rocm_ext.data.overview import Overview

# An overview of the data, and a check that raises as a run would
Read = tuple["Overview", Callable[[], None]]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    option = parser.add_argument
    option("--config", required=True, metavar="NAME", help="config of any recipe: a name or a file")
    what = "show this row, counted from 0 among the kept rows; may be repeated"
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
    overview, check = read(cfg, family, tokenizer, decoder)
    content = overview.as_json(_chosen(args, overview.lengths))
    (print_json if args.json else print_rows)({"recipe": recipe.name, **content})
    check()


def _chosen(args: argparse.Namespace, lengths: list[int]) -> list[int]:
    """Return the numbers of the rows that the user named; empty: none."""
    if args.row and max(args.row) >= len(lengths):
        raise UserError(f"there is no row {max(args.row)}; the kept rows are 0 to {len(lengths) - 1:,}", code=2)
    return [*(args.row or ()), *range(min(args.show or 0, len(lengths)))]


def _rows(cfg: Any, family: str, tokenizer: Any, decoder: Any) -> Read:
    """Read the rows of SFT or DPO as the recipe does."""
    from rocm_ext.data import overview
    from rocm_ext.data.mixture import Mixture
    from rocm_ext.data.rows import open_dataset, origin_of
    from rocm_ext.losses import objective_of
    from rocm_ext.recipes.dpo_rocm import DPO
    from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune
    from rocm_ext.train.learner import Learner

    recipe = cast(Any, (DPO if family == registry.DPO else LoRAFinetune)(cfg))
    # stand-ins: a real runtime needs the config's device, and a real learner its model there
    recipe.runtime = SimpleNamespace(ranks=SimpleNamespace(is_main=True))
    recipe.learner = object.__new__(Learner)
    recipe.learner.tokenizer, recipe.learner.decoder = tokenizer, decoder
    recipe.learner.objective = objective_of(config.instantiate(cfg.loss, key="loss"))
    rows, validation = recipe.setup_data(tokenizer)
    components = [cfg.dataset, cfg.dataset if cfg.dataset_val is None else cfg.dataset_val]
    origins = [partial(origin_of, open_dataset(component, tokenizer, cfg.too_long)) for component in components]

    def check() -> None:
        Mixture.of(cfg.dataset, rows).check()
        for part in filter(None, (rows, validation)):
            recipe.learner.check_rows(part, recipe.columns)

    return overview.of_rows(cfg, tokenizer, rows, validation, origins), check


def _prompts(cfg: Any, family: str, tokenizer: Any, decoder: Any) -> Read:
    """Read the prompts of a recipe that samples answers as the recipe does."""
    from rocm_ext.rl.prompts import PromptSet

    prompts = PromptSet(cfg)
    if cfg.environment is not None:
        prompts.check_verifier()  # it learns the environment's tools, which every prompt shows
    prompts.render(tokenizer)
    window = decoder.max_seq_len
    return prompts.overview(tokenizer, window), lambda: prompts.check_length(window)
