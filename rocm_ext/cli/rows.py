"""``rocm-ext rows``: show the rows that a config makes of its data.

Reads the data of any recipe's config as a run does. Prints a few rows as the model gets them, with special tokens; the
trained part is in colour on a terminal, in double brackets elsewhere. Then it prints lengths in tokens, the trained
share, how many rows are kept, cut or dropped, rows that repeat others, and validation rows that are also trained on.
Needs the model's folder without its weights, and no GPU. Exits with 1 and one line where the data would end a run.
"""

import argparse
import io
import os
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rocm_ext import config
from rocm_ext.base import registry
from rocm_ext.base.log import setup_logging
from rocm_ext.base.types import Json
from rocm_ext.cli._common import (
    add_json,
    add_overrides,
    console,
    count,
    number,
    print_json,
    printable,
    refuse_first,
    table,
)
from rocm_ext.config.checks.recipe import check_config
from rocm_ext.config.model_folder import FROM_CHECKPOINT

if TYPE_CHECKING:
    from rocm_ext.data.overview import Overview

_LONG, _ENDS = 900, 300  # characters: a longer part of a row is cut to its two ends
_BAR = 40  # characters
# An overview of the data, and a check that raises as a run would
Read = tuple["Overview", Callable[[], None]]


def add(parser: argparse.ArgumentParser) -> None:
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

    from rocm_ext.data.tokenizer import open_tokenizer
    from rocm_ext.distributed.ranks import Ranks
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
    read = _prompts if family in registry.SAMPLED else _rows
    overview, check = read(cfg, family, tokenizer, _sizes(cfg.model))
    content = overview.as_json(_chosen(args, overview.lengths))
    (print_json if args.json else _print_rows)({"recipe": recipe.name, **content})
    check()


class _Sizes(NamedTuple):
    """A model's number of embeddings, and its maximum length of a sequence in tokens."""

    vocabulary: int
    positions: int


def _sizes(model: Any) -> _Sizes:
    """Return the sizes of the model that the config's ``model`` names."""
    from rocm_ext.model.families import foreign_config, read_architecture

    if model[config.COMPONENT] == FROM_CHECKPOINT:
        folder = Path(model.checkpoint_dir)
        if foreign_config(folder, bool(model.get("trust_remote_code"))) is None:
            architecture = read_architecture(folder)
            return _Sizes(architecture.vocabulary, architecture.positions)
    import torch

    from rocm_ext.model.build import build_model

    decoder = build_model(model, torch.bfloat16, 0, torch.device("meta"))
    return _Sizes(decoder.tok_embeddings.num_embeddings, decoder.max_seq_len)


def _chosen(args: argparse.Namespace, lengths: list[int]) -> list[int]:
    """Return the numbers of the rows that the user named; empty: none."""
    last = max(args.row or [-1])
    refuse_first((last >= len(lengths), f"there is no row {last}; the kept rows are 0 to {len(lengths) - 1:,}"))
    return [*(args.row or ()), *range(min(args.show or 0, len(lengths)))]


def _rows(cfg: Any, family: str, tokenizer: Any, sizes: _Sizes) -> Read:
    """Read the rows of SFT or DPO as the recipe does."""
    from rocm_ext.data import overview
    from rocm_ext.data.mixture import Mixture
    from rocm_ext.data.rows import check_vocabulary, concatenated, open_dataset, origin_of
    from rocm_ext.data.training_rows import refuse_single_answers, training_rows
    from rocm_ext.losses import check_fit, objective_of
    from rocm_ext.losses.objective import REFERENCE

    rows, validation = training_rows(cfg, tokenizer, sizes.positions, cached=True, progress=os.isatty(2))
    coming: tuple[str, ...] = ()
    if family == registry.DPO:
        refuse_single_answers(cfg.recipe, rows, validation)
        coming = (REFERENCE,)
    components = filter(None, (cfg.dataset, cfg.dataset_val))
    origins = [partial(origin_of, open_dataset(component, tokenizer, cfg.too_long)) for component in components]

    def check() -> None:
        Mixture.of(cfg.dataset, rows).check()
        objective = objective_of(config.instantiate(cfg.loss, key="loss"))
        for part in filter(None, (rows, validation)):
            check_vocabulary(int(concatenated(part.tokens).max()), sizes.vocabulary)
            check_fit(objective, {*part.columns, *coming}, part.pairs)

    return overview.of_rows(cfg, tokenizer, rows, validation, origins), check


def _prompts(cfg: Any, family: str, tokenizer: Any, sizes: _Sizes) -> Read:
    """Read the prompts of a recipe that samples answers as the recipe does."""
    from rocm_ext.rl.prompts import PromptSet

    prompts = PromptSet(cfg)
    if cfg.environment is not None:
        prompts.check_verifier()  # it learns the environment's tools, which every prompt shows
    prompts.render(tokenizer)
    return prompts.overview(tokenizer, sizes.positions), lambda: prompts.check_length(sizes.positions)


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
            print(f"--- {words.heading(sequence)}")
            print(_text(words.shown_parts(sequence), colour))
        print()
    _print_numbers("dataset", content["dataset"])
    for line in lines(content.get("data_sets", ())):
        print(printable(line))
    print(words.ends(content))
    if "validation" in content:
        print()
        _print_numbers("validation", content["validation"])


def _text(parts: Sequence[tuple[str, bool]], colour: bool) -> str:
    """Join the parts of a sequence and mark the trained ones."""
    marked = (_marked(_shortened(text), colour) if trained else _shortened(text) for text, trained in parts)
    return "".join(marked).removesuffix("\n")


def _marked(text: str, colour: bool) -> str:
    # line by line: some terminals fill the rest of a line with its background
    return "\n".join(f"\033[30;42m{line}\033[0m" for line in text.split("\n")) if colour else f"⟦{text}⟧"


def _shortened(text: str) -> str:
    """Cut the middle of a long text, and escape control characters."""
    if len(text) > _LONG:
        return f"{_escaped(text[:_ENDS])} … {len(text) - 2 * _ENDS:,} characters … {_escaped(text[-_ENDS:])}"
    return _escaped(text)


def _escaped(text: str) -> str:
    known = (c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(known)


def _print_numbers(key: str, of: Json) -> None:
    from rocm_ext.report import rows as words

    first, *others = words.facts_of(key, of)
    print(first)
    for line in others:
        print(f"  {printable(line)}")
    columns = list(words.COLUMNS.values())
    made = table("", "tokens of a", *columns, right=tuple(columns))
    made.title = None
    for row in words.length_table(of):
        made.add_row(*row)
    console().print(made)
    if key != "dataset":
        return
    lengths = next(iter(of["tokens"].values()))
    most = max(rows for *_, rows in lengths["histogram"])
    width = len(f"{lengths['max']:,}")
    for low, high, rows in lengths["histogram"]:
        print(f"  {low:>{width},} – {high:>{width},}  {'█' * -(-_BAR * rows // most)} {rows:,}")
