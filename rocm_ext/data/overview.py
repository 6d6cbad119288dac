"""Describe rows: their lengths, repetitions, and texts with the trained parts."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from os.path import commonprefix
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from omegaconf import DictConfig

from rocm_ext.base.errors import one_line
from rocm_ext.base.files import replace_text
from rocm_ext.base.log import log
from rocm_ext.base.types import Json
from rocm_ext.data.batches import Steps, label_counts, rows_per_step
from rocm_ext.data.encoder import TextEncoder, to_text
from rocm_ext.data.mixture import Mixture
from rocm_ext.data.render import TemplateRenderer
from rocm_ext.data.rows import SIDE, SIDES, Rows, key, labelled
from rocm_ext.data.sources import ROW_WEIGHT

_BARS = 10  # of a histogram with bars of equal width
_TAIL = 16  # a longest row above this many medians makes bars double in width

Origin = Callable[[int], str]  # a row's number -> its origin


class Spread(TypedDict):
    """Numbers of tokens, in JSON; ``histogram`` has bars ``[least length, greatest length, count]``."""

    min: int
    median: int
    p95: int
    max: int
    mean: float
    total: int
    histogram: list[list[int]]


class TokenText(TypedDict, total=False):
    """A sequence of tokens, in JSON; only preferences have a ``side``."""

    side: str
    tokens: int
    trained_tokens: int
    text: str  # with special tokens
    trained: list[list[int]]  # start and end of trained parts, in characters; one across an edge is in the later part


@dataclass(frozen=True)
class Overview:
    """A description of a config's data.

    Attributes:
        content: numbers, for JSON.
        lengths: numbers of tokens of the training rows or prompts.
        show: describes a training row or prompt, for JSON, by its number.
    """

    content: Json
    lengths: list[int]
    show: Callable[[int], Json]

    def as_json(self, rows: Iterable[int] = ()) -> Json:
        """Return the content, and under ``shown`` these rows; by default the first, the shortest and the longest."""
        ends = [0, *(self.lengths.index(end(self.lengths)) for end in (min, max))]
        return self.content | {"shown": [self.show(row) for row in dict.fromkeys(rows or ends)]}


def write(path: Path, make: Callable[[], Overview]) -> None:
    """Write an overview for the report; an error, such as a user's tokenizer that cannot decode, ends no run."""
    try:
        text = json.dumps(make().as_json())
    except Exception as error:
        log.warning("the report will not show the data: %s", one_line(error))
        text = "{}"
    replace_text(path, text)


def of_rows(
    cfg: DictConfig, tokenizer: Any, rows: Rows, validation: Rows | None, origins: Sequence[Origin] = (), ranks: int = 1
) -> Overview:
    """Describe the rows of SFT or DPO, for a training by ``ranks`` processes.

    ``origins`` are functions from an item's number to its origin, for ``dataset`` and, if it is set, ``dataset_val``;
    without them the origin is the number.
    """

    def of_row(part: Rows, origin: Origin) -> Origin:
        return lambda row: origin(int(part.numbers[row]))

    def described(part: Rows, origin: Origin) -> tuple[Json, dict[str, list[int]]]:
        tokens = lengths(part)
        trained = sum(sum(values) for name, values in tokens.items() if name in ("trained", "chosen", "rejected"))
        content: Json = {"rows": part.counts["rows"], "counts": part.counts, "first": part.first}
        content |= numbers(tokens, keys(part), origin) | {"trained_share": trained / sum(map(len, part.tokens))}
        return content | ({"weights": weights} if (weights := part.weights()) else {}), tokens

    origins = origins or ["row {}".format]
    origin = of_row(rows, origins[0])
    content, tokens = described(rows, origin)
    steps = Steps(len(rows), rows_per_step(cfg, ranks), cfg.max_steps_per_epoch)
    result = {"dataset": content, "steps_per_epoch": steps.per_epoch, "rows_per_step": steps.per_step, "ranks": ranks}
    result["data_sets"] = Mixture.of(cfg.dataset, rows).table()
    if validation is not None:
        held_origin = of_row(validation, origins[-1])
        held_out, _ = described(validation, held_origin)
        for name, hashes in (("trained_on", keys), ("prompt_trained_on", prompt_keys)):
            held_out |= equal(name, shared(hashes(validation), hashes(rows)), held_origin, origin)
        if cfg.dataset_val is None:  # a part of the rows that `dataset` counts
            held_out |= {"counts": {}, "first": {}}
        result["validation"] = held_out

    def show(row: int) -> Json:
        weight = {"weight": float(rows.columns[ROW_WEIGHT][row][0])} if ROW_WEIGHT in rows.columns else {}
        return {"row": row, "origin": origin(row), **weight, "sequences": sequences(rows, row, tokenizer)}

    return Overview(result, next(iter(tokens.values())), show)


def spread(values: Iterable[int]) -> Spread:
    """Describe lengths in tokens; there must be at least one."""
    lengths = np.sort(np.fromiter(values, np.int64))
    low, high = int(lengths[0]), int(lengths[-1])
    median, p95 = (int(value) for value in np.percentile(lengths, [50, 95], method="inverted_cdf"))
    width = (high - low) // _BARS + 1
    if high > _TAIL * max(1, median):
        starts = [low, *(start for start in (2**k for k in range(1, 63)) if low < start <= high)]
    else:
        starts = list(range(low, high + 1, width))
    bars = [[start, end - 1] for start, end in pairwise([*starts, max(high + 1, starts[-1] + 1)])]
    counts = np.diff(np.searchsorted(lengths, [*starts, high + 1])).tolist()
    return {
        "min": low,
        "median": median,
        "p95": p95,
        "max": high,
        "mean": float(lengths.mean()),
        "total": int(lengths.sum()),
        "histogram": [[*bar, count] for bar, count in zip(bars, counts, strict=True)],
    }


def numbers(lengths: Mapping[str, list[int]], hashes: Sequence[bytes], origin: Origin) -> Json:
    """Describe rows or prompts.

    Args:
        lengths: numbers of tokens of the rows, by kind of length.
        hashes: hashes of the rows; equal rows have equal hashes.
        origin: returns the origin of a row.

    Returns:
        The number of rows ``kept`` and of rows ``repeated``, the origins ``first_repeated`` of the first repetition and
        the earlier row, and :func:`spread` by kind of length as ``tokens``.
    """
    first: dict[bytes, int] = {}
    repeated = [(i, first[key]) for i, key in enumerate(hashes) if first.setdefault(key, i) != i]
    tokens = {name: spread(values) for name, values in lengths.items()}
    return {"kept": len(hashes), **equal("repeated", repeated, origin, origin), "tokens": tokens}


def equal(name: str, pairs: Sequence[tuple[int, int]], origin: Origin, other: Origin) -> Json:
    """Return the number of pairs of equal rows as ``name``, and the origins of the first pair."""
    return {name: len(pairs), f"first_{name}": [(origin(i), other(j)) for i, j in pairs[:1]]}


def lengths(rows: Rows) -> dict[str, list[int]]:
    """Return the rows' numbers of tokens, by kind.

    Returns:
        For single answers ``row`` and ``trained``, the predicted tokens. For pairs ``longer side``, which length limits
        apply to, ``shared prompt``, and ``chosen`` and ``rejected``, the trained tokens of a side.
    """
    if not rows.pairs:
        return {"row": list(map(len, rows.tokens)), "trained": [labels for labels, _ in label_counts(rows)]}
    chosen = [int(labelled(labels, row)[: row[0]].sum()) for labels, row in zip(rows.labels, rows.lengths, strict=True)]
    rejected = [labels - first for (labels, _), first in zip(label_counts(rows), chosen, strict=True)]
    prompt = list(map(_asked, rows.labels, rows.lengths))
    sides = dict(zip(SIDES, (chosen, rejected), strict=True))
    return {"longer side": list(map(max, rows.lengths)), "shared prompt": prompt, **sides}


def keys(rows: Rows) -> list[bytes]:
    """Return hashes of the rows; rows with equal tokens have equal hashes."""
    return [key(tokens, row) for tokens, row in zip(rows.tokens, rows.lengths, strict=True)]


def prompt_keys(rows: Rows) -> list[bytes | None]:
    """Return hashes of the tokens before a row's first trained token; None: there are none, or the row is a pack."""
    packs = [len(row) > 1 and SIDE not in rows.columns for row in rows.lengths]
    asked = map(_asked, rows.labels, rows.lengths)
    parts = zip(rows.tokens, asked, packs, strict=True)
    return [None if pack or count < 2 else key(tokens[:count]) for tokens, count, pack in parts]


def shared(hashes: Iterable[bytes | None], others: Iterable[bytes | None]) -> list[tuple[int, int]]:
    """Return the index of every hash that is among ``others``, with the index of the first equal one there."""
    first: dict[bytes | None, int] = {}
    for i, other in enumerate(others):
        first.setdefault(other, i)
    return [(i, first[key]) for i, key in enumerate(hashes) if key is not None and key in first]


def sequences(rows: Rows, number: int, tokenizer: Any) -> list[TokenText]:
    """Describe the sequences of a row, see :func:`sequence`; preferences also have a ``side``."""
    ends = list(accumulate(rows.lengths[number]))[:-1]
    mask = labelled(rows.labels[number], rows.lengths[number])
    parts = zip(np.split(rows.tokens[number], ends), np.split(mask, ends), strict=True)
    described = [sequence(tokenizer, tokens.tolist(), trained) for tokens, trained in parts]
    if SIDE in rows.columns:
        alone = "good" if rows.columns[SIDE][number][0] > 0 else "bad"
        sides = SIDES if rows.pairs else (alone,)
        described = [{"side": side, **part} for side, part in zip(sides, described, strict=True)]
    return described


def sequence(tokenizer: Any, tokens: Sequence[int], trained: np.ndarray) -> TokenText:
    """Describe a sequence of ``tokens`` [s]: its text, and the parts that are ``trained`` [s], booleans."""
    decode, edges = _decoder(tokenizer), np.flatnonzero(np.diff(trained, prepend=False, append=False)).tolist()
    text = decode(tokens)
    parts = [decode(tokens[start:end]) for start, end in pairwise([0, *edges, len(tokens)])]
    if "".join(parts) == text:
        cuts = list(accumulate(map(len, parts)))[:-1]
    else:  # the decoder changes a text's beginning, or a character lies across an edge
        cuts = [len(commonprefix([decode(tokens[:edge]), text])) for edge in edges]  # noqa: RUF071 - of characters
    spans = [list(pair) for pair in zip(cuts[::2], cuts[1::2], strict=True)]
    return {"tokens": len(tokens), "trained_tokens": int(trained.sum()), "text": text, "trained": spans}


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes tokens, including special ones."""
    renderer, encoder = getattr(tokenizer, "renderer", None), getattr(tokenizer, "encoder", None)
    if isinstance(renderer, TemplateRenderer):
        return renderer.text
    if isinstance(encoder, TextEncoder):
        return lambda tokens: encoder.decode(tokens, special=True)
    names = {getattr(tokenizer, f"{what}_id", None): f"<{what}>" for what in ("bos", "eos")}
    names |= {number: name for name, number in getattr(tokenizer, "special_tokens", {}).items()}

    def decode(tokens: Sequence[int]) -> str:
        runs = ((name, list(run)) for name, run in groupby(tokens, names.get))
        return "".join(name * len(run) if name else to_text(tokenizer, run) for name, run in runs)

    return decode


def _asked(labels: np.ndarray, lengths: Sequence[int]) -> int:
    """Return the number of tokens before the first trained one."""
    return int(np.argmax(labelled(labels, lengths)))
