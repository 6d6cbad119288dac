"""An overview of a config's data: lengths, repetitions, and texts with the trained parts.

``rocm-ext rows`` prints it, and a run writes it for the report.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from rocm_ext.data.loading import Origin
from rocm_ext.data.mixture import Mixture
from rocm_ext.data.render import TemplateRenderer
from rocm_ext.data.rows import SIDE, SIDES, Rows, key, labelled
from rocm_ext.data.sources import ROW_WEIGHT

_BARS = 10  # the most bars of equal width in a histogram
_TAIL = 16  # a longest row above this many medians makes bars double in width


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
    text: str  # special tokens included
    # start and end of trained parts, in characters; one across an edge is in the later part
    trained: list[list[int]]


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
        if not rows:
            shortest = self.lengths.index(min(self.lengths))
            longest = self.lengths.index(max(self.lengths))
            rows = (0, shortest, longest)
        return self.content | {"shown": [self.show(row) for row in dict.fromkeys(rows)]}


def write(path: Path, make: Callable[[], Overview]) -> None:
    """Write an overview for the report; an error, such as a user's tokenizer that cannot decode, ends no run."""
    try:
        text = json.dumps(make().as_json())
    except Exception as error:
        log.warning("the report will not show the data: %s", one_line(error))
        text = "{}"
    replace_text(path, text)


def of_rows(
    cfg: DictConfig,
    tokenizer: Any,
    parts: Mapping[str, Rows],
    origins: Mapping[str, Origin] | None = None,
    ranks: int = 1,
) -> Overview:
    """Describe the rows of SFT or DPO, for a training by ``ranks`` processes.

    Args:
        cfg: the config.
        tokenizer: its tokenizer.
        parts: training and validation rows by their key, from :func:`rocm_ext.data.training_rows.validation_sets`.
        origins: functions from an item's number to its origin, by the key of the data set; without them the origin is
            the number.
        ranks: number of processes.
    """
    origins = origins or {"dataset": "row {}".format}
    rows = parts["dataset"]
    origin = _origin_in(rows, origins["dataset"])
    steps = Steps(len(rows), rows_per_step(cfg, ranks), cfg.max_steps_per_epoch)
    tokens = lengths(rows)
    content = {
        "dataset": _described(rows, tokens, origin),
        "steps_per_epoch": steps.per_epoch,
        "rows_per_step": steps.per_step,
        "ranks": ranks,
        "data_sets": Mixture.of(cfg.dataset, rows).table(),
    }
    for name, validation in parts.items():
        if name == "dataset":
            continue
        held_origin = _origin_in(validation, origins.get(name, origins["dataset"]))
        held_out = _described(validation, lengths(validation), held_origin)
        repeated = shared(keys(validation), keys(rows))
        held_out |= equal("trained_on", repeated, held_origin, origin)
        repeated = shared(prompt_keys(validation), prompt_keys(rows))
        held_out |= equal("prompt_trained_on", repeated, held_origin, origin)
        if cfg.dataset_val is None:  # a part of the rows that `dataset` counts
            held_out["counts"] = {}
            held_out["first"] = {}
        content[name.replace("dataset_val", "validation")] = held_out

    def show(row: int) -> Json:
        shown = {"row": row, "origin": origin(row)}
        if ROW_WEIGHT in rows.columns:
            shown["weight"] = float(rows.columns[ROW_WEIGHT][row][0])
        shown["sequences"] = sequences(rows, row, tokenizer)
        return shown

    main_lengths, *_ = tokens.values()
    return Overview(content, main_lengths, show)


def _origin_in(rows: Rows, origin: Origin) -> Origin:
    """Return the function from a row's index in ``rows`` to its origin; ``origin`` takes its number in the dataset."""
    return lambda row: origin(int(rows.numbers[row]))


def _described(rows: Rows, tokens: Mapping[str, list[int]], origin: Origin) -> Json:
    """Describe the rows of a data set; ``tokens`` are their :func:`lengths`."""
    trained = sum(sum(tokens.get(name, ())) for name in ("trained", *SIDES))
    content = {
        "rows": rows.counts["rows"],
        "counts": rows.counts,
        "first": rows.first,
        **numbers(tokens, keys(rows), origin),
        "trained_share": trained / sum(map(len, rows.tokens)),
    }
    weights = rows.weights()
    if weights:
        content["weights"] = weights
    return content


def spread(values: Iterable[int]) -> Spread:
    """Describe lengths in tokens; there must be at least one."""
    lengths = np.sort(np.fromiter(values, np.int64))
    low, high = int(lengths[0]), int(lengths[-1])
    median, p95 = np.percentile(lengths, [50, 95], method="inverted_cdf").tolist()
    if high > _TAIL * max(1, median):
        doubling = (2**k for k in range(1, 63))
        starts = [low, *(start for start in doubling if low < start <= high)]
    else:
        starts = list(range(low, high + 1, (high - low) // _BARS + 1))
    edges = [*starts, high + 1]
    counts = np.diff(np.searchsorted(lengths, edges)).tolist()
    histogram = []
    for (start, end), count in zip(pairwise(edges), counts, strict=True):
        histogram.append([start, end - 1, count])
    return {
        "min": low,
        "median": int(median),
        "p95": int(p95),
        "max": high,
        "mean": float(lengths.mean()),
        "total": int(lengths.sum()),
        "histogram": histogram,
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
    repeated = []
    for i, hashed in enumerate(hashes):
        earlier = first.setdefault(hashed, i)
        if earlier != i:
            repeated.append((i, earlier))
    return {
        "kept": len(hashes),
        **equal("repeated", repeated, origin, origin),
        "tokens": {name: spread(values) for name, values in lengths.items()},
    }


def equal(name: str, pairs: Sequence[tuple[int, int]], origin: Origin, other: Origin) -> Json:
    """Return the number of pairs of equal rows as ``name``, and the origins of the first pair."""
    origins = [(origin(i), other(j)) for i, j in pairs[:1]]
    return {name: len(pairs), f"first_{name}": origins}


def lengths(rows: Rows) -> dict[str, list[int]]:
    """Return the rows' numbers of tokens, by kind.

    Returns:
        For single answers ``row`` and ``trained``, the predicted tokens. For pairs ``longer side``, which length limits
        apply to, ``shared prompt``, and ``chosen`` and ``rejected``, the trained tokens of a side.
    """
    trained = [labels for labels, _ in label_counts(rows)]
    if not rows.pairs:
        return {"row": list(map(len, rows.tokens)), "trained": trained}
    prompts = []
    chosen = []
    for labels, of_sides in zip(rows.labels, rows.lengths, strict=True):
        mask = labelled(labels, of_sides)
        prompts.append(int(np.argmax(mask)))
        chosen.append(int(mask[: of_sides[0]].sum()))
    return {
        "longer side": list(map(max, rows.lengths)),
        "shared prompt": prompts,
        "chosen": chosen,
        "rejected": np.subtract(trained, chosen).tolist(),
    }


def keys(rows: Rows) -> list[bytes]:
    """Return hashes of the rows; rows with equal tokens have equal hashes."""
    return list(map(key, rows.tokens, rows.lengths))


def prompt_keys(rows: Rows) -> list[bytes | None]:
    """Return hashes of the tokens before a row's first trained token; None for packs, and for rows without them."""
    hashes = []
    for tokens, labels, row in zip(rows.tokens, rows.labels, rows.lengths, strict=True):
        pack = len(row) > 1 and SIDE not in rows.columns
        count = int(np.argmax(labelled(labels, row)))
        hashes.append(None if pack or count < 2 else key(tokens[:count]))
    return hashes


def shared(hashes: Iterable[bytes | None], others: Iterable[bytes | None]) -> list[tuple[int, int]]:
    """Return the index of every hash that is among ``others``, with the index of the first equal one there."""
    first: dict[bytes | None, int] = {}
    for i, other in enumerate(others):
        first.setdefault(other, i)
    first.pop(None, None)
    return [(i, first[hashed]) for i, hashed in enumerate(hashes) if hashed in first]


def sequences(rows: Rows, number: int, tokenizer: Any) -> list[TokenText]:
    """Describe the sequences of a row, see :func:`sequence`; preferences also have a ``side``."""
    lengths = rows.lengths[number]
    ends = np.cumsum(lengths)[:-1]
    mask = labelled(rows.labels[number], lengths)
    tokens = np.split(rows.tokens[number], ends)
    trained = np.split(mask, ends)
    described = []
    for part, of_part in zip(tokens, trained, strict=True):
        described.append(sequence(tokenizer, part.tolist(), of_part))
    if SIDE not in rows.columns:
        return described
    sides: Sequence[str] = SIDES
    if not rows.pairs:
        sides = ["good" if rows.columns[SIDE][number][0] > 0 else "bad"]
    return [{"side": side, **part} for side, part in zip(sides, described, strict=True)]


def sequence(tokenizer: Any, tokens: Sequence[int], trained: np.ndarray) -> TokenText:
    """Describe a sequence of ``tokens`` [s]: its text, and the parts that are ``trained`` [s], booleans."""
    decode = _decoder(tokenizer)
    text = decode(tokens)
    edges = np.flatnonzero(np.diff(trained, prepend=False, append=False)).tolist()
    bounds = [0, *edges, len(tokens)]
    parts = [decode(tokens[start:end]) for start, end in pairwise(bounds)]
    if "".join(parts) == text:
        cuts = list(accumulate(map(len, parts[:-1])))
    else:  # the decoder changes a text's beginning, or a character lies across an edge
        beginnings = [decode(tokens[:edge]) for edge in edges]
        cuts = [len(commonprefix([beginning, text])) for beginning in beginnings]  # noqa: RUF071 - of characters
    return {
        "tokens": len(tokens),
        "trained_tokens": int(trained.sum()),
        "text": text,
        "trained": [cuts[i : i + 2] for i in range(0, len(cuts), 2)],
    }


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes tokens, including special ones."""
    renderer = getattr(tokenizer, "renderer", None)
    encoder = getattr(tokenizer, "encoder", None)
    if isinstance(renderer, TemplateRenderer):
        return renderer.text
    if isinstance(encoder, TextEncoder):
        return partial(encoder.decode, special=True)
    names = {getattr(tokenizer, f"{what}_id", None): f"<{what}>" for what in ("bos", "eos")}
    names |= {number: name for name, number in getattr(tokenizer, "special_tokens", {}).items()}

    def decode(tokens: Sequence[int]) -> str:
        text = ""
        for name, run in groupby(tokens, names.get):
            same = list(run)
            text += name * len(same) if name else to_text(tokenizer, same)
        return text

    return decode
