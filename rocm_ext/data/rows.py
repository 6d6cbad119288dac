"""Read datasets into tokenised rows in memory."""

import copy
import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from torch.utils.data import ConcatDataset, Dataset
from tqdm import tqdm

from rocm_ext.base.errors import UserError, explain_errors, one_line
from rocm_ext.base.heartbeat import beat
from rocm_ext.base.importing import COMPONENT, import_component
from rocm_ext.base.log import log, warn
from rocm_ext.base.types import Row
from rocm_ext.config.components import WEIGHT, without
from rocm_ext.data.loading import about_bad_rows
from rocm_ext.data.render import IGNORE, returned, unlimited
from rocm_ext.data.sources import ROW_WEIGHT, SourceDataset
from rocm_ext.data.tokenizer import ChatTokenizer

ROUTES = "routes"  # column with the experts of sampling, see `MicroBatch.routes`: [s, layers * chosen] int16
SIDES = ("chosen", "rejected")
_NO_WEIGHT = "dropped_weight_0"
_LEAST_WEIGHT = 1e-30  # least weight above 0; fp32 can hold it and its reciprocal
_SINGLE = "single answers"
_WITH_LABEL = "answers with a label"
_PAIRS = "pairs"
_OF_ANSWERS = ("truncated", "dropped_too_long", "dropped_without_labels")
_COUNTED = {  # what is counted besides the rows, by kind of items
    _SINGLE: _OF_ANSWERS,
    _WITH_LABEL: (*_OF_ANSWERS, "good", "bad"),
    _PAIRS: (
        "truncated",
        "dropped_too_long",
        "dropped_equal",
        "dropped_empty",
        "dropped_equal_when_cut",
    ),
}
_ALL_BAD = 100  # reading ends if so many first rows are all bad
SIDE = "side"  # column: 1 in chosen and good answers, -1 in rejected and bad ones


def open_dataset(cfg: Any, tokenizer: Any, too_long: str) -> Dataset:
    """Build a dataset from its component; a list of components becomes one dataset. A UserError if that fails.

    If ``too_long``, see :func:`tokenize`, is ``truncate``, a component gets the tokenizer as it is, so that torchtune's
    components work as in torchtune. Else it gets a tokenizer without ``max_seq_len``, because it must not cut rows.
    """
    if OmegaConf.is_list(cfg) and cfg:
        parts = []
        for part in cfg:
            component = without(part, WEIGHT) if OmegaConf.is_dict(part) else part
            parts.append(open_dataset(component, tokenizer, too_long))
        return ConcatDataset(parts)
    component = cfg.get(COMPONENT) if OmegaConf.is_dict(cfg) else None
    if component is None:
        raise UserError(
            "dataset needs a _component_, such as rocm_ext.data.sft_dataset, or a list of them"
        )
    with explain_errors(f"dataset component {component}"):  # a user's component may raise anything
        if cfg.get("packed") and isinstance(tokenizer, ChatTokenizer):
            tokenizer = copy.copy(tokenizer)
            tokenizer.cuts = True
        if too_long != "truncate" and not cfg.get("packed"):  # torchtune's packing needs the limit
            tokenizer = unlimited(tokenizer)
        arguments: Any = OmegaConf.to_container(cfg, resolve=True)
        build = import_component(arguments.pop(COMPONENT))
        return build(tokenizer, **arguments)


def origin_of(dataset: Any, index: int) -> str:
    """Return the origin of a row: the dataset's ``origin(index)``, else the dataset's class and the index."""
    if isinstance(dataset, ConcatDataset):
        start = 0
        for part, end in zip(dataset.datasets, dataset.cumulative_sizes, strict=True):
            if index < end:
                return origin_of(part, index - start)
            start = end
    if hasattr(dataset, "origin"):
        return dataset.origin(index)
    return f"{type(dataset).__name__} row {index}"


class Ragged(Sequence[np.ndarray]):
    """Arrays of different lengths in one buffer, because a million arrays in a list take too much memory.

    Args:
        joined: the arrays end to end; by default an empty buffer for int32.
        bounds: starts of the arrays, and the end of the last one.
    """

    def __init__(self, joined: np.ndarray | None = None, bounds: np.ndarray | None = None) -> None:
        self._joined: Any = array("i") if joined is None else joined
        self._bounds: Any = array("q", [0]) if bounds is None else bounds

    @property
    def joined(self) -> np.ndarray:
        """The arrays end to end; :meth:`append` fails while a view of them exists."""
        if isinstance(self._joined, np.ndarray):
            return self._joined
        return np.frombuffer(self._joined, np.int32)

    def append(self, row: np.ndarray) -> None:
        """Add an array."""
        self._joined.frombytes(row.tobytes())
        self._bounds.append(len(self._joined))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: Any) -> Any:
        index = range(len(self))[index]
        return self.joined[self._bounds[index] : self._bounds[index + 1]]


Arrays = list[np.ndarray] | Ragged


def concatenated(arrays: Arrays) -> np.ndarray:
    """Return arrays end to end."""
    return arrays.joined if isinstance(arrays, Ragged) else np.concatenate(arrays)


def key(tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] = ()) -> bytes:
    """Return a hash of tokens ``[s]`` and of the lengths of the sequences in them."""
    digest = hashlib.blake2b(np.asarray(lengths, np.int64).tobytes(), digest_size=16)
    digest.update(np.asarray(tokens, np.int32).tobytes())
    return digest.digest()


def _positions(keys: Iterable[Any]) -> dict[Any, list[int]]:
    """Return the indices of equal keys, by key, in the order in which the keys first appear."""
    positions: dict[Any, list[int]] = {}
    for index, name in enumerate(keys):
        positions.setdefault(name, []).append(index)
    return positions


@dataclass(frozen=True)
class Rows:
    """Tokenised rows; a row is one sequence or a pack of several.

    Attributes:
        tokens: token ids by row, ``[s]`` int32.
        labels: labels by row, ``[s]`` int32: the token, or -100 for no loss.
        lengths: lengths of the sequences by row; they add up to ``s``.
        counts: what happened to the items of a data set, from :func:`tokenize`: the number of ``rows`` read, of rows
            ``truncated`` and dropped, by reason, and of ``good`` and ``bad`` answers.
        columns: further values per token, by name (``old_logprobs``, ``advantages``, …): by row, ``[s]`` float32.
        said: warnings from reading the rows.
        numbers: numbers of the rows in their dataset, from 0, for :func:`origin_of`; empty without a dataset.
        first: origin of the first counted row, by name of the count; not for ``rows``.
        ends: number of the last row plus 1, by data set.
        known: :meth:`fingerprint` by the names of the columns, if it was stored with the rows.
        trained_share: share of the sampled answers that the rows are, see :class:`rocm_ext.rl.selection.Selected`.
        beside: other rows for the same training, see :func:`rocm_ext.train.scoring.set_baseline`.
    """

    tokens: Arrays
    labels: Arrays
    lengths: list[tuple[int, ...]]
    counts: dict[str, int]
    columns: dict[str, Arrays] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    numbers: Sequence[int] | np.ndarray = field(default_factory=lambda: array("q"))
    first: dict[str, str] = field(default_factory=dict)
    ends: Sequence[int] = ()
    trained_share: float = 1.0
    known: dict[tuple[str, ...], str] = field(default_factory=dict, init=False)
    beside: dict[str, "Rows"] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def pairs(self) -> bool:
        """Whether rows are pairs of a chosen and a rejected answer."""
        return SIDE in self.columns and len(self.lengths[0]) == len(SIDES)

    def split(self, fraction: float, seed: int) -> tuple["Rows", "Rows"]:
        """Split the rows at random into training and validation rows. Equal rows and pairs of one prompt stay together.

        Args:
            fraction: share of validation rows. They are as many groups of rows that stay together as fit into it,
                but at least one; raises a UserError if nothing would be left to train on.
            seed: seed of the random choice.
        """
        second = max(1, round(len(self) * fraction))
        if second >= len(self):
            raise UserError(
                f"validation_fraction {fraction} of {len(self)} rows leaves nothing to train on"
            )
        keys = self._prompts() if SIDE in self.columns else list(map(key, self.tokens))
        equal = _positions(keys)
        together = [equal[text] for text in keys]
        order = np.random.default_rng(seed).permutation(len(self)).tolist()
        drawn: set[int] = set()
        for row in order:
            if row not in drawn and len(drawn) + len(together[row]) <= second:
                drawn.update(together[row])
        if not drawn:  # all are larger: take a smallest one
            smallest = min(order, key=lambda row: len(together[row]))
            drawn.update(together[smallest])
        if len(drawn) == len(self):
            what = "rows are equal, and such"
            if SIDE in self.columns:
                answers = "pairs" if self.pairs else "answers"
                what = f"{answers} have one prompt, and {answers} of one prompt"
            raise UserError(
                f"validation_fraction {fraction}: all {len(self)} {what} stay together; set dataset_val"
            )
        rest = [row for row in range(len(self)) if row not in drawn]
        return self.part(rest), self.part(sorted(drawn))

    def _starts(self) -> list[int]:
        """Return the index of each row's first label."""
        return list(map(_first_label, self.labels))

    def _prompts(self) -> list[bytes]:
        """Return hashes of the prompts: the tokens before a row's first label."""
        prompts = []
        for tokens, start in zip(self.tokens, self._starts(), strict=True):
            prompts.append(key(tokens[:start]))
        return prompts

    def mismatched(self) -> "Rows":
        """Return the prompts with answers to other prompts; the rows must be single answers.

        Every answer is used once. A prompt of more than half of the rows also gets answers to itself. New rows are cut
        to the length of the longest old one.
        """
        by_prompt = _positions(self._prompts())
        # rows of one prompt are neighbours
        order = [row for rows in by_prompt.values() for row in rows]
        # the answer lies past all of a prompt's rows, so by as many as any prompt has
        shift = max(map(len, by_prompt.values())) % len(self) or 1
        answer_of = {row: order[at - shift] for at, row in enumerate(order)}
        starts = self._starts()
        most = max(map(len, self.tokens))

        def joined(arrays: Arrays) -> Arrays:
            rows = []
            for row, start in enumerate(starts):
                other = answer_of[row]
                prompt = arrays[row][:start]
                answer = arrays[other][starts[other] :]
                rows.append(np.concatenate([prompt, answer])[:most])
            return rows

        tokens = joined(self.tokens)
        labels = joined(self.labels)
        lengths: list[tuple[int, ...]] = [(len(row),) for row in tokens]
        return Rows(tokens, labels, lengths, {"rows": len(self)})

    def part(self, indices: Iterable[int]) -> "Rows":
        """Return the rows with these indices."""
        chosen = list(indices)

        def take(values: Any) -> list:
            return [values[i] for i in chosen]

        part = replace(
            self,
            tokens=take(self.tokens),
            labels=take(self.labels),
            lengths=take(self.lengths),
            columns={name: take(column) for name, column in self.columns.items()},
            said=[],
            numbers=take(self.numbers) if len(self.numbers) else [],
        )
        for name, rows in self.beside.items():
            part.beside[name] = rows.part(chosen)
        return part

    def join_groups(self, groups: Sequence[str], most: float) -> tuple["Rows", list[str]]:
        """Join the rows of a group, such as a prompt's answers, so that a micro-batch computes their beginning once.

        Args:
            groups: group by row.
            most: maximum number of tokens of a joined row; a larger group becomes several rows.

        Returns:
            The joined rows, in the order in which groups first appear, and the group by joined row.
        """
        parts: list[list[int]] = []  # indices of the rows that a joined row consists of
        of_part = []
        for group, rows in _positions(groups).items():
            tokens = 0
            for i in rows:
                tokens += len(self.tokens[i])
                if i == rows[0] or tokens > most:
                    tokens = len(self.tokens[i])
                    parts.append([])
                    of_part.append(group)
                parts[-1].append(i)

        def join(arrays: Arrays) -> Arrays:
            return [np.concatenate([arrays[i] for i in part]) for part in parts]

        lengths = []
        for part in parts:
            sequences = chain.from_iterable(self.lengths[i] for i in part)
            lengths.append(tuple(sequences))
        columns = {name: join(column) for name, column in self.columns.items()}
        joined = Rows(
            join(self.tokens),
            join(self.labels),
            lengths,
            self.counts,
            columns,
            trained_share=self.trained_share,
        )
        return joined, of_part

    def add_labels_column(self, name: str, values: Sequence[np.ndarray | Sequence[float]]) -> None:
        """Add a column with values at labels, see :func:`labelled`, and 0 elsewhere.

        ``values`` are by row: [n], or [n, …] for :data:`ROUTES`.
        """
        self.columns[name] = []
        dtype = np.int16 if name == ROUTES else np.float32
        for labels, lengths, row in zip(self.labels, self.lengths, values, strict=True):
            shape = (len(labels), *np.shape(row)[1:])
            column = np.zeros(shape, dtype)
            column[labelled(labels, lengths)] = row
            self.columns[name].append(column)

    def weights(self) -> tuple[float, float] | None:
        """Return the least and the greatest weight of a row; None if all are 1."""
        if ROW_WEIGHT not in self.columns:
            return None
        weights = [float(values[0]) for values in self.columns[ROW_WEIGHT]]
        return min(weights), max(weights)

    def fingerprint(self) -> str:
        """Return a SHA-256 of the rows in their order, in hex."""
        known = self.known.get(tuple(self.columns))
        if known is not None:
            return known
        digest = hashlib.sha256()
        for tokens, labels, lengths in zip(self.tokens, self.labels, self.lengths, strict=True):
            counts = [len(lengths), *lengths]
            digest.update(np.array(counts, "<i8").tobytes())
            digest.update(tokens.astype("<i4").tobytes())
            digest.update(labels.astype("<i4").tobytes())
        for _, column in sorted(self.columns.items()):
            for values in column:
                digest.update(values.astype("<f4").tobytes())
        return digest.hexdigest()


def _first_label(labels: np.ndarray) -> int:
    return int(np.argmax(labels != IGNORE))


def labelled(labels: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Return [s] booleans: whether a row has a label that a token of the same sequence predicts.

    ``labels`` [s] are ``IGNORE`` where masked; ``lengths`` of the row's sequences add up to s.
    """
    mask = labels != IGNORE
    starts = [0, *accumulate(lengths)][:-1]
    mask[starts] = False  # no token predicts the first token of a sequence
    return mask


def check_vocabulary(largest: int, size: int) -> None:
    """Raise a UserError if token id ``largest`` exceeds a model with ``size`` embeddings."""
    if largest >= size:
        raise UserError(
            f"the tokenizer produces token id {largest}, but the model's vocabulary ends at {size - 1}: "
            "use the tokenizer of this model"
        )


def tokenize(
    dataset: Any,
    *,
    max_seq_len: int | None,
    too_long: str,
    progress: bool,
    positions: int | None = None,
    every: int = 1,
    name: str = "dataset",
    bad_rows: str = "error",
    warns: bool = True,
) -> Rows:
    """Read the rows of a map-style dataset into memory.

    Rows of weight 0 and rows without a label, perhaps after truncation, are dropped and counted. If a weight is not 1,
    rows get the column ``weight``, constant in a row.

    Args:
        dataset: dataset in torchtune's form, with items of ``tokens`` and ``labels``. ``PackedDataset`` and
            ``PreferenceDataset`` work as well. An item may have a ``weight``.
        max_seq_len: maximum length of a row in tokens, or None without a limit.
        too_long: policy for longer rows: ``truncate`` (cut at the end), ``drop`` or ``error``.
        progress: whether to show a progress bar.
        positions: the model's maximum length of a sequence in tokens, if it is known. It limits rows as
            ``max_seq_len`` does.
        every: 1 reads all rows, 2 every second one, and so on.
        name: key of the dataset in the config, for messages.
        bad_rows: policy for malformed rows: ``error``, which names all of them, or ``drop``.
        warns: whether to log the warnings about the rows, which are in ``said``, too.

    Raises:
        UserError: under the policy ``error`` a row is malformed or too long; or no rows are left.
    """
    if not hasattr(dataset, "__len__"):
        raise UserError(
            f"{type(dataset).__name__} has no length; only map-style datasets can be trained on"
        )
    parts = getattr(dataset, "datasets", [dataset])
    ours = [part for part in parts if isinstance(part, SourceDataset)]
    limits = _LengthLimits(max_seq_len, positions, too_long, foreign=len(ours) < len(parts))
    chosen = range(0, len(dataset), every)
    reader = _Reader(dataset, len(chosen), limits)
    bar = tqdm(chosen, desc="tokenize", unit="row", disable=not progress)
    for index, item in zip(bar, _items(dataset, chosen), strict=True):
        beat()
        reader.add(index, item)
    rows = reader.rows
    bad = reader.bad
    if bad and bad_rows == "error":
        raise UserError(
            about_bad_rows(
                bad, len(chosen), "correct what is bad, or set bad_rows=drop to leave it out"
            )
        )
    if bad:
        rows.counts["bad_rows"] = len(bad)
        rows.first["bad_rows"] = bad[0].partition(": ")[0]
        rows.said.append(f"{name}: {about_bad_rows(bad, len(chosen), 'left out (bad_rows: drop)')}")
    for part in ours:
        rows.said.extend(part.warnings())
    missing = [side for side in ("good", "bad") if rows.counts.get(side) == 0]
    if missing and len(rows):
        rows.said.append(
            f"{name}: none of {len(rows):,} answers is {missing[0]}; add some, which the loss needs"
        )
    if warns:
        warn(rows.said)
    if not len(rows):
        raise UserError(f"{name}: 0 of {len(chosen)} rows left{reader.dropped()}")
    reader.add_weights()
    if limits.foreign and max_seq_len and all(labels[-1] == IGNORE for labels in rows.labels):
        log.warning(
            "the last token of every row is masked, so the model will not learn to stop: torchtune's tokenizers mask "
            "the stop token under max_seq_len. Use rocm_ext.data.sft_dataset or set max_seq_len to null"
        )
    return rows


def _items(dataset: Any, indices: Sequence[int]) -> Iterator[Any]:
    """Yield a dataset's items, or its exceptions; datasets of this library tokenise many rows at once."""
    if isinstance(dataset, SourceDataset):
        yield from dataset.items(indices)
    elif isinstance(dataset, ConcatDataset):
        start = 0
        for part, end in zip(dataset.datasets, dataset.cumulative_sizes, strict=True):
            yield from _items(part, [index - start for index in indices if start <= index < end])
            start = end
    else:
        for index in indices:
            try:
                yield dataset[index]
            except Exception as error:  # a user's dataset may raise anything
                yield error


class WrongRow(UserError):
    """A row's error that ends the run under every policy of ``bad_rows``."""


class _Reader:
    """Adds items of a dataset to ``rows``, and keeps messages about ``bad`` ones, see :func:`tokenize`.

    All items have one kind: single answers, answers with a label, or pairs.
    """

    def __init__(self, dataset: Any, count: int, limits: "_LengthLimits") -> None:
        ends = list(getattr(dataset, "cumulative_sizes", [len(dataset)]))
        self._numbers = array("q")
        self._weights = array("f")
        self._counts = {"rows": count}
        self.rows = Rows(Ragged(), Ragged(), [], self._counts, numbers=self._numbers, ends=ends)
        self.bad: list[str] = []
        self._dataset = dataset
        self._limits = limits
        self._kind = ""

    def add(self, index: int, item: Any) -> None:
        """Add item ``index``, or the exception in its stead; UserError: it ends the run, or many first ones are bad."""
        try:
            self._add(index, returned(item))
        except WrongRow as error:
            raise WrongRow(f"{origin_of(self._dataset, index)}: {error}") from error
        except UserError as error:  # its message names the row already
            self.bad.append(str(error))
        except Exception as error:
            self.bad.append(f"{origin_of(self._dataset, index)}: {one_line(error)}")
        first = min(_ALL_BAD, self._counts["rows"])
        if not self._kind and len(self.bad) == first:
            cure = "none of these first rows is good: do the dataset's keys fit them?"
            raise UserError(about_bad_rows(self.bad, len(self.bad), cure))

    def _add(self, index: int, item: Row) -> None:
        self._check_kind(item)
        before = dict(self._counts)
        weight = _weight(item)
        if not weight:
            self._count(_NO_WEIGHT)
        elif self._kind == _PAIRS:
            self._add_pair(item)
        else:
            self._add_answer(item)
        if len(self.rows) > len(self._numbers):
            self._numbers.append(index)
            self._weights.append(weight)
        for what, count in self._counts.items():
            if count != before.get(what, 0):
                self.rows.first.setdefault(what, origin_of(self._dataset, index))

    def _check_kind(self, item: Row) -> None:
        """Raise a WrongRow if earlier items are of another kind."""
        kind = _SINGLE
        # as in torchtune's PreferenceDataset
        if any(f"{side}_input_ids" in item for side in SIDES):
            kind = _PAIRS
        elif SIDE in item:
            kind = _WITH_LABEL
        if not self._kind:
            self._kind = kind
            self._counts.update(dict.fromkeys(_COUNTED[kind], 0))
        if kind != self._kind:
            mixed = " and ".join(sorted((self._kind, kind)))
            raise WrongRow(f"{mixed} in one dataset; train on them in separate runs")

    def _count(self, what: str) -> None:
        self._counts[what] = self._counts.get(what, 0) + 1

    def _add_row(
        self, tokens: np.ndarray, labels: np.ndarray, lengths: tuple[int, ...], cut: bool
    ) -> None:
        self._counts["truncated"] += cut
        self.rows.tokens.append(tokens)
        self.rows.labels.append(labels)
        self.rows.lengths.append(lengths)

    def _add_side(self, values: np.ndarray) -> None:
        """Add the values ``[s]`` of the last row to the column :data:`SIDE`."""
        column: Any = self.rows.columns.setdefault(SIDE, [])
        column.append(values)

    def _add_answer(self, item: Row) -> None:
        """Add an item of ``tokens``, ``labels``, for packs ``seq_lens``, and perhaps ``side``.

        Raises:
            UserError: a sequence is too long under ``error``, or too long for the model in a pack.
            ValueError: the item is malformed.
        """
        side = float(item.get(SIDE, 0))
        tokens, labels, lengths = _read_item(item)
        max_seq_len = self._limits.max_seq_len
        positions = self._limits.positions
        limit = len(tokens) if max_seq_len is None else max_seq_len
        if positions is not None and max(lengths, default=0) > positions:
            if len(lengths) > 1:
                raise WrongRow(
                    f"a packed sequence has {max(lengths)} tokens, but the model takes {positions}; lower "
                    "tokenizer.max_seq_len"
                )
            limit = min(limit, positions)
        cut = len(tokens) > limit
        if cut:
            if self._limits.drops(len(tokens), limit):
                self._count("dropped_too_long")
                return
            tokens = tokens[:limit]
            labels = labels[:limit]
            ends = np.minimum(np.cumsum(lengths), limit)
            left = np.diff(ends, prepend=0).tolist()
            lengths = tuple(filter(None, left))
        if not len(labels) or not labelled(labels, lengths).any():
            self._count("dropped_without_labels")
            return
        # torchtune's components truncate rows, and then mask the last token
        already = self._limits.foreign and len(tokens) == max_seq_len and labels[-1] == IGNORE
        self._add_row(tokens, labels, lengths, cut or bool(already))
        if self._kind == _WITH_LABEL:
            self._count("good" if side > 0 else "bad")
            self._add_side(np.full(len(tokens), side, np.float32))

    def _add_pair(self, item: Row) -> None:
        """Add a row of a chosen and a rejected sequence, both with labels.

        Kept pairs may be ``truncated``; dropped are those with equal sides, also if they are equal up to the limit, and
        those with a side without an answer.

        Raises:
            UserError: a sequence is too long under ``error``.
            ValueError: the item is malformed, or the prompts of the sides differ.
        """
        pair = [_tokens_and_labels(item, f"{side}_input_ids", f"{side}_labels") for side in SIDES]
        longest = max(len(tokens) for tokens, _ in pair)
        # torchtune's tokenizers cut at max_seq_len
        cut = self._limits.foreign and longest == self._limits.max_seq_len
        reason = _reason_to_drop(pair)
        if reason is not None:
            equal_when_cut = cut and reason == "dropped_equal"
            self._count("dropped_equal_when_cut" if equal_when_cut else reason)
            return
        prompt, other_prompt = [tokens[: _first_label(labels)] for tokens, labels in pair]
        if not np.array_equal(prompt, other_prompt):
            raise ValueError("the prompts of the chosen and the rejected answer differ")
        limit = self._limits.least() or longest
        if longest > limit:
            if self._limits.drops(longest, limit):
                self._count("dropped_too_long")
                return
            cut = True
            pair = [(tokens[:limit], labels[:limit]) for tokens, labels in pair]
            # if a side has no label left, both sides are the beginning of the prompt
            if _reason_to_drop(pair):
                self._count("dropped_equal_when_cut")
                return
        (chosen, chosen_labels), (rejected, rejected_labels) = pair
        tokens = np.concatenate([chosen, rejected])
        labels = np.concatenate([chosen_labels, rejected_labels])
        self._add_row(tokens, labels, (len(chosen), len(rejected)), cut)
        side = np.ones(len(tokens), np.float32)
        side[len(chosen) :] = -1
        self._add_side(side)

    def add_weights(self) -> None:
        """Add the column of weights, views of one number per row, unless all weights are 1."""
        if all(weight == 1 for weight in self._weights):
            return
        column: list[np.ndarray] = []
        for row, weight in enumerate(self._weights):
            length = len(self.rows.tokens[row])
            column.append(np.broadcast_to(np.float32(weight), length))
        self.rows.columns[ROW_WEIGHT] = column

    def dropped(self) -> str:
        """Return the end of a message that no rows are left: why they were dropped."""
        reasons = []
        if self._kind == _PAIRS:
            for what, count in self._counts.items():
                if what.startswith("dropped") and what != _NO_WEIGHT:
                    reasons.append(f"{count} {what.replace('_', ' ')}")
            reasons[-1] += f" ({self._limits})"
        elif self._kind:
            too_long = self._counts["dropped_too_long"]
            reasons.append(f"{too_long} over {self._limits} were dropped")
            unlabelled = self._counts["dropped_without_labels"]
            reasons.append(f"{unlabelled} had nothing to train on within that length")
        if _NO_WEIGHT in self._counts:
            reasons.append(f"{self._counts[_NO_WEIGHT]} have weight 0")
        return f": {', '.join(reasons)}" if reasons else ""


@dataclass(frozen=True)
class _LengthLimits:
    """The limits of a sequence's length and the policy for longer ones.

    Attributes:
        max_seq_len, positions, too_long: see :func:`tokenize`.
        foreign: whether a dataset is not this library's; it may then cut sequences.
    """

    max_seq_len: int | None
    positions: int | None
    too_long: str
    foreign: bool

    def least(self) -> int | None:
        """Return the lower limit; None without limits."""
        return min(filter(None, (self.max_seq_len, self.positions)), default=None)

    def __str__(self) -> str:
        limit = self.least()
        if limit is None:
            return "no limit"
        if limit == self.positions:
            return f"the model's window of {limit} tokens"
        return f"max_seq_len {limit}"

    def drops(self, length: int, limit: int) -> bool:
        """Return whether a sequence of ``length`` tokens, above ``limit``, is dropped rather than cut.

        Raises a WrongRow if ``too_long`` is ``error``.
        """
        if self.too_long == "error":
            problem = f"max_seq_len is {limit}; raise it, or set"
            if limit == self.positions:
                problem = f"the model takes {limit}; set"
            raise WrongRow(f"{length} tokens, but {problem} too_long to truncate or drop")
        return self.too_long == "drop"


def _weight(item: Row) -> float:
    """Return the weight of an item; by default 1. A cell of a table is text."""
    value = item.get(ROW_WEIGHT, 1.0)
    with suppress(TypeError, ValueError):
        weight = math.nan if isinstance(value, bool) else float(value)
        if weight == 0 or _LEAST_WEIGHT < weight < 1 / _LEAST_WEIGHT:
            return weight
    raise ValueError(f"weight is {value!r}; expected a number of at least 0")


def _reason_to_drop(pair: list[tuple[np.ndarray, np.ndarray]]) -> str | None:
    (chosen, _), (rejected, _) = pair
    if len(chosen) and np.array_equal(chosen, rejected):
        return "dropped_equal"
    if any((labels[1:] == IGNORE).all() for _, labels in pair):
        return "dropped_empty"
    return None


def _read_item(item: Row) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Return the tokens ``[s]``, the labels ``[s]`` and the lengths of the sequences in an item."""
    if item.get("encoder_input") is not None:
        raise ValueError("it has images (encoder_input); only text models are supported")
    tokens, labels = _tokens_and_labels(item, "tokens", "labels")
    if item.get("seq_lens") is None:
        return tokens, labels, (len(tokens),)
    lengths = tuple(int(n) for n in item["seq_lens"] if n)
    if sum(lengths) != len(tokens):
        raise ValueError(f"seq_lens add up to {sum(lengths)}, but there are {len(tokens)} tokens")
    # PackedDataset counts its padding as a last sequence. Attention keeps sequences apart, so a last sequence without
    # labels can go.
    end = len(tokens) - lengths[-1] if lengths else 0
    if (labels[end:] == IGNORE).all():
        return tokens[:end], labels[:end], lengths[:-1]
    return tokens, labels, lengths


def _tokens_and_labels(item: Row, *keys: str) -> tuple[np.ndarray, np.ndarray]:
    if not item.keys() >= set(keys):
        raise ValueError(f"an item needs {' and '.join(keys)}, found {list(item)}")
    tokens, labels = (np.asarray(item[key], np.int32) for key in keys)
    if tokens.ndim != 1 or tokens.shape != labels.shape:
        raise ValueError(
            f"{keys[0]} {tokens.shape} and {keys[1]} {labels.shape} must be flat lists of one length"
        )
    return tokens, labels
