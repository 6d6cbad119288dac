"""``rocm-ext rows``: show the rows that a config makes of its data.

Reads the data of any recipe's config as a run does. Prints a few rows as the model gets them, with special tokens; the
trained part is in colour on a terminal, in double brackets elsewhere. Then it prints lengths in tokens, the trained
share, how many rows are kept, cut or dropped, rows that repeat others, and validation rows that are also trained on.
Needs the model's folder without its weights, and no GPU. Exits with 1 and one line where the data would end a run.
"""

import io
import math
import os
import platform
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocm_ext import config
from rocm_ext.base import registry
from rocm_ext.base.log import setup_logging
from rocm_ext.base.types import Json
from rocm_ext.cli._common import (
    add_config,
    add_json,
    add_overrides,
    console,
    count,
    number,
    options,
    print_json,
    printable,
    refuse_first,
    table,
)
from rocm_ext.config.checks.rollouts import check_config
from rocm_ext.config.chosen_model import sampling_config
from rocm_ext.config.components import names_prompts
from rocm_ext.config.model_folder import FROM_CHECKPOINT

if TYPE_CHECKING:
    from rocm_ext.data.overview import Overview

_LONG, _ENDS = 900, 300  # characters: a longer part of a row is cut to its two ends
_BAR = 40  # characters
# An overview of the data, and a check that raises as a run would
Read = tuple["Overview", Callable[[], None]]


def add(parser: ArgumentParser) -> None:
    option = options(parser)
    add_config(parser)
    row = number(int, 0, 10**9)
    option(
        "--row N",
        "show this row, counted from 0 among the kept rows; may be repeated",
        row,
        action="append",
    )
    option("--set NAME", "show dataset_val.NAME or eval_prompts.NAME instead of the training data")
    option("--show N", "show the first N rows (default: first, shortest and longest)", count)
    add_json(parser)
    add_overrides(parser)


def run(args: Namespace) -> None:
    """Read the data, and print rows and numbers."""
    import torch

    from rocm_ext.data.tokenizer import open_tokenizer
    from rocm_ext.distributed.ranks import Ranks
    from rocm_ext.model.download import use_downloaded
    from rocm_ext.train.builders import check_tokenizer

    setup_logging()
    recipe = config.recipe_of(args.config, args.overrides)
    registry.check_system(recipe, platform.system())
    family = registry.extended(recipe)
    cfg = config.load(recipe, args.config, args.overrides)
    check_config(cfg, family)
    use_downloaded(cfg, Ranks(torch.device("cpu")))
    tokenizer = open_tokenizer(cfg)
    check_tokenizer(tokenizer, cfg)
    vocabulary, positions = _sizes(cfg.model)
    if family not in registry.SAMPLED and names_prompts(cfg, args.set):
        cfg = sampling_config(cfg)
        family = registry.RAFT
    if family in registry.SAMPLED:
        overview, check = _prompts(cfg, tokenizer, positions, args.set)
    else:
        overview, check = _rows(cfg, family, tokenizer, vocabulary, positions, args.set)
    last = max(args.row or [-1])
    kept = len(overview.lengths)
    refuse_first((last >= kept, f"there is no row {last}; the kept rows are 0 to {kept - 1:,}"))
    first_rows = range(min(args.show or 0, kept))
    chosen = [*(args.row or ()), *first_rows]
    content = {"recipe": recipe.name, **overview.as_json(chosen)}
    if args.json:
        print_json(content)
    else:
        _print_rows(content)
    check()


def _sizes(model: Any) -> tuple[int, int]:
    """Return the model's number of embeddings, and its maximum length of a sequence in tokens."""
    from rocm_ext.model.families import foreign_config, read_architecture

    if model[config.COMPONENT] == FROM_CHECKPOINT:
        folder = Path(model.checkpoint_dir)
        if foreign_config(folder, bool(model.get("trust_remote_code"))) is None:
            architecture = read_architecture(folder)
            return architecture.vocabulary, architecture.positions
    import torch

    from rocm_ext.model.build import build_model

    decoder = build_model(model, torch.bfloat16, 0, torch.device("meta"))
    return decoder.tok_embeddings.num_embeddings, decoder.max_seq_len


def _rows(
    cfg: Any, family: str, tokenizer: Any, vocabulary: int, positions: int, name: str | None
) -> Read:
    """Read the rows of SFT or DPO as the recipe does, or those of the validation data set ``name``."""
    from rocm_ext.config.components import chosen_set, data_sets
    from rocm_ext.data import overview
    from rocm_ext.data.mixture import Mixture
    from rocm_ext.data.rows import check_vocabulary, concatenated, open_dataset, origin_of
    from rocm_ext.data.training_rows import refuse_single_answers, training_rows, validation_sets
    from rocm_ext.losses import check_fit, objective_of
    from rocm_ext.losses.objective import REFERENCE

    if name is not None:
        cfg.dataset = chosen_set(cfg, name)
        cfg.dataset_val = cfg.early_stopping_patience = None
    rows, validation = training_rows(cfg, tokenizer, positions, cached=True, progress=os.isatty(2))
    coming: tuple[str, ...] = ()
    if family == registry.DPO:
        refuse_single_answers(cfg.recipe, rows, validation)
        coming = (REFERENCE,)
    components = {"dataset": cfg.dataset, **data_sets("dataset_val", cfg.dataset_val)}
    origins = {}
    for key, component in components.items():
        if component:
            dataset = open_dataset(component, tokenizer, cfg.too_long)
            origins[key] = partial(origin_of, dataset)
    parts = {"dataset": rows, **validation_sets(validation)}

    def check() -> None:
        Mixture.of(cfg.dataset, rows).check()
        objective = objective_of(config.instantiate(cfg.loss, key="loss"))
        for part in parts.values():
            check_vocabulary(int(concatenated(part.tokens).max()), vocabulary)
            check_fit(objective, {*part.columns, *coming}, part.pairs)

    return overview.of_rows(cfg, tokenizer, parts, origins), check


def _prompts(cfg: Any, tokenizer: Any, positions: int, name: str | None) -> Read:
    """Read the prompts of a recipe that samples answers as the recipe does, or those of the held-out set ``name``."""
    from rocm_ext.rl.prompts import PromptSet

    if name is not None:
        config.components.choose_prompts(cfg, name)
        cfg.prompts = cfg.eval_prompts
        cfg.eval_prompts = cfg.stop_after_no_gain = None
    prompts = PromptSet(cfg)
    if cfg.environment is not None:
        prompts.check_verifier()  # it learns the environment's tools, which every prompt shows
    prompts.render(tokenizer)
    return prompts.overview(tokenizer, positions), lambda: prompts.check_length(positions)


def _print_rows(content: Json) -> None:
    """Print shown rows, and below them the numbers."""
    from rocm_ext.data.mixture import lines
    from rocm_ext.report import rows as words  # here, because --help must be quick

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack characters of rows
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for row in content["shown"]:
        print(printable(words.title(row)))
        for sequence in row["sequences"]:
            parts = [
                _marked(text, trained, colour) for text, trained in words.shown_parts(sequence)
            ]
            print(f"--- {words.heading(sequence)}")
            print("".join(parts).removesuffix("\n"))
        print()
    _print_numbers("dataset", content["dataset"])
    _print_histogram(content["dataset"])
    for line in lines(content.get("data_sets", ())):
        print(printable(line))
    print(words.ends(content))
    for key in words.validations(content):
        print()
        _print_numbers(key, content[key])


def _marked(text: str, trained: bool, colour: bool) -> str:
    """Cut the middle of a long part of a sequence, escape control characters, and mark a trained part."""
    if len(text) > _LONG:
        text = f"{text[:_ENDS]} … {len(text) - 2 * _ENDS:,} characters … {text[-_ENDS:]}"
    text = "".join(map(_escaped, text))
    if not trained:
        return text
    if not colour:
        return f"⟦{text}⟧"
    # Line by line, because some terminals fill the rest of a line with its background.
    return "\n".join(f"\033[30;42m{line}\033[0m" for line in text.split("\n"))


def _escaped(character: str) -> str:
    if character == "\n" or character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


def _print_numbers(key: str, numbers: Json) -> None:
    """Print the facts of a data set, and a table of lengths in tokens."""
    from rocm_ext.report import rows as words

    first, *others = words.facts_of(key, numbers)
    print(first)
    for line in others:
        print(f"  {printable(line)}")
    columns = list(words.COLUMNS.values())
    lengths = table("", "tokens of a", *columns, right=tuple(columns))
    lengths.title = None
    for row in words.length_table(numbers):
        lengths.add_row(*row)
    console().print(lengths)


def _print_histogram(numbers: Json) -> None:
    """Print a bar of rows for each range of lengths."""
    lengths = next(iter(numbers["tokens"].values()))
    most = max(rows for _, _, rows in lengths["histogram"])
    width = len(f"{lengths['max']:,}")
    for low, high, rows in lengths["histogram"]:
        bar = "█" * math.ceil(_BAR * rows / most)
        print(f"  {low:>{width},} – {high:>{width},}  {bar} {rows:,}")
