"""Choose the rows of each optimiser step, and cut them into micro-batches.

``data_seed`` and the step's position determine the rows of a step. The cut affects only the speed. Rows are packed end
to end without padding, and attention keeps their sequences apart (:mod:`rocm_ext.model.attention`). Models whose
attention does not support this get padded rows, sorted by length.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from rocm_ext.base.errors import UserError
from rocm_ext.data.mixture import Mixture, mixed_order
from rocm_ext.data.render import IGNORE
from rocm_ext.data.rows import ROUTES, Rows, concatenated, labelled
from rocm_ext.data.sources import ROW_WEIGHT

_WORTH_SHARING = 16  # tokens


@dataclass
class MicroBatch:
    """A micro-batch, which one rank computes in one forward pass.

    Attributes:
        tokens: [b, s] token ids.
        positions: [b, s] position of the token in its sequence.
        lengths: numbers of tokens of the packed sequences, which fill the only row (b = 1); None if rows are padded on
            the right instead.
        shared: for each packed sequence, the number of its first tokens that it shares with the last earlier sequence
            that shares nothing. They are in the row once, and not part of its length. It is empty if nothing is
            shared.
        index: [n] indices of the predicting tokens in the flattened [b * s] hidden states. The last shared token
            predicts a label in every sequence that shares it.
        targets: [n] the labels.
        sequence: [n] number of the label's sequence, from 0 without gaps.
        sequences: number of sequences that have a label.
        real_tokens: number of tokens without padding.
        columns: the rows' columns at the labels, by name, [n] fp32.
        routes: [b, s, layers * chosen] int16, experts that sampling chose, at tokens that predict a label; where it is
            -1 the model chooses, and without ``routes`` everywhere.
    """

    tokens: Tensor
    positions: Tensor
    lengths: tuple[int, ...] | None
    index: Tensor
    targets: Tensor
    sequence: Tensor
    sequences: int
    real_tokens: int
    columns: dict[str, Tensor] = field(default_factory=dict)
    shared: tuple[int, ...] = ()
    routes: Tensor | None = None

    def _map(self, change: Callable[[Tensor], Tensor]) -> "MicroBatch":
        columns = {name: change(column) for name, column in self.columns.items()}
        changed: Any = {
            name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, columns=columns, **changed)

    def to(self, device: torch.device) -> "MicroBatch":
        """Copy the batch to ``device``."""
        return self._map(lambda t: t.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        """Copy the batch to page-locked memory; torch's DataLoader calls this if ``pin_memory`` is set."""
        return self._map(lambda t: t.pin_memory())


@dataclass(frozen=True)
class Steps:
    """The optimiser steps of a run over ``rows`` rows.

    Attributes:
        rows: number of rows in the data set.
        per_step: rows of an optimiser step, over all ranks; the last step of an epoch may have fewer.
        limit: maximum number of steps per epoch. None sets no limit.
        data_seed: together with the epoch, determines the order of rows.
        shuffle: whether to shuffle the rows; False keeps their order.
        mixture: the rows' data sets and their weights in an epoch.
    """

    rows: int
    per_step: int
    limit: int | None = None
    data_seed: int = 0
    shuffle: bool = True
    mixture: Mixture | None = None

    @property
    def per_epoch(self) -> int:
        """Number of optimiser steps per epoch."""
        steps = math.ceil(self.rows / self.per_step)
        return min(steps, self.limit) if self.limit else steps

    def order(self, epoch: int) -> list[int]:
        """Return the order of rows in an epoch; without weights it is the order of torch's ``DistributedSampler``."""
        if self.mixture is not None and self.mixture.weights:
            length = min(self.rows, self.per_epoch * self.per_step)
            return mixed_order(
                self.mixture, epoch, length, self.data_seed if self.shuffle else None
            )
        if not self.shuffle:
            return list(range(self.rows))
        return _order(self.rows, self.data_seed + epoch)

    def __getitem__(self, step: int) -> list[int]:
        """Return the indices of the rows of step ``step`` of the run, counted from 0."""
        epoch, position = divmod(step, self.per_epoch)
        start = position * self.per_step
        return self.order(epoch)[start : start + self.per_step]


@lru_cache(maxsize=2)
def _order(rows: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(rows, generator=generator).tolist()


def count_labels(labels: np.ndarray, lengths: Sequence[int]) -> tuple[int, int]:
    """Count the labels of a row, see :func:`labelled`, and its sequences that have a label."""
    counts = _of_sequences(labels, lengths)
    return int(counts.sum()), int((counts > 0).sum())


def _of_sequences(labels: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    starts = np.cumsum([0, *lengths])[:-1]
    return np.add.reduceat(labelled(labels, lengths), starts, dtype=np.int64)


def label_counts(rows: Rows) -> list[tuple[int, int]]:
    """Return :func:`count_labels` of all rows."""
    if not len(rows):
        return []
    counts = _of_sequences(concatenated(rows.labels), list(chain(*rows.lengths)))
    starts = np.cumsum([0, *map(len, rows.lengths)])[:-1]
    labels = np.add.reduceat(counts, starts).tolist()
    sequences = np.add.reduceat(counts > 0, starts, dtype=np.int64).tolist()
    return list(zip(labels, sequences, strict=True))


def cut(lengths: Sequence[int], ranks: int, budget: int, packed: bool) -> list[list[list[int]]]:
    """Distribute the rows of one step over micro-batches.

    Args:
        lengths: numbers of tokens of the rows.
        ranks: number of ranks. All ranks get the same number of micro-batches, because FSDP2 gathers weights in
            each.
        budget: maximum number of tokens in a micro-batch, including padding. A longer row is a micro-batch alone.
        packed: whether rows are packed end to end; otherwise they are padded to the longest row of the micro-batch.

    Returns:
        ``[rank][micro-batch]`` -> indices into ``lengths``; an empty list if no row is left for a micro-batch.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    cut_rows = _cut_packed if packed else _cut_padded
    pieces = [sorted(piece) for piece in cut_rows(lengths, longest_first, ranks, budget)]
    return [pieces[rank::ranks] for rank in range(ranks)]


def _cut_padded(
    lengths: Sequence[int], longest_first: list[int], ranks: int, budget: int
) -> list[list[int]]:
    pieces: list[list[int]] = []
    room = 0  # rows that the last micro-batch still takes
    for i in longest_first:
        if not room:
            pieces.append([])
            room = max(1, budget // max(1, lengths[i]))
        pieces[-1].append(i)
        room -= 1
    while len(pieces) % ranks:
        pieces.append([])
    return pieces


def _cut_packed(
    lengths: Sequence[int], longest_first: list[int], ranks: int, budget: int
) -> list[list[int]]:
    # Longest first, a row goes to the emptiest micro-batch. Their sizes become nearly equal, so ranks do not wait.
    count = ranks * max(1, math.ceil(sum(lengths) / (budget * ranks)))
    while True:
        pieces: list[list[int]] = [[] for _ in range(count)]
        filled = [0] * count
        for i in longest_first:
            emptiest = filled.index(min(filled))
            pieces[emptiest].append(i)
            filled[emptiest] += lengths[i]
        too_full = [piece for piece, tokens in zip(pieces, filled, strict=True) if tokens > budget]
        if all(len(piece) == 1 for piece in too_full):
            return pieces
        count += ranks


class _Sequence(NamedTuple):
    tokens: np.ndarray
    labels: np.ndarray
    columns: Sequence[np.ndarray]
    shared: int = 0  # see MicroBatch.shared

    @property
    def length(self) -> int:
        """Number of tokens that this sequence adds to the micro-batch."""
        return len(self.tokens) - self.shared


def _sequences(rows: Rows, i: int, share: bool) -> list[_Sequence]:
    lengths = rows.lengths[i]
    tokens = rows.tokens[i]
    labels = rows.labels[i]
    columns = [column[i] for column in rows.columns.values()]
    shared = shared_beginnings(tokens, lengths) if share else [0] * len(lengths)
    sequences = []
    start = 0
    for length, beginning in zip(lengths, shared, strict=True):
        part = slice(start, start + length)
        values = [column[part] for column in columns]
        sequences.append(_Sequence(tokens[part], labels[part], values, beginning))
        start += length
    return sequences


def shared_beginnings(tokens: np.ndarray, lengths: Sequence[int]) -> list[int]:
    """Return ``MicroBatch.shared`` for the sequences of a row, which are ``tokens`` [s] in pieces of ``lengths``.

    A sequence keeps at least one token unshared. It shares none if it would share fewer than 16, because the copies
    would cost more than they save.
    """
    if len(lengths) == 1:
        return [0]
    shared = []
    first = tokens[:0]
    for sequence in np.split(tokens, np.cumsum(lengths)[:-1]):
        most = min(len(first), len(sequence) - 1)
        differ = np.flatnonzero(first[:most] != sequence[:most])
        common = int(differ[0]) if len(differ) else most
        shared.append(common if common >= _WORTH_SHARING else 0)
        if not shared[-1]:
            first = sequence
    return shared


def row_sizes(rows: Rows, share: bool) -> list[int]:
    """Return the rows' numbers of tokens in a micro-batch without padding; ``share`` as in :func:`collate`."""
    sizes = [sum(row) for row in rows.lengths]
    if not share:
        return sizes
    for i, lengths in enumerate(rows.lengths):
        sizes[i] -= sum(shared_beginnings(rows.tokens[i], lengths))
    return sizes


def collate(
    rows: Rows, piece: list[int], packed: bool, pad_id: int, multiple: int, share: bool = False
) -> MicroBatch:
    """Build a micro-batch.

    Args:
        rows: all rows.
        piece: indices of the micro-batch's rows; may be empty.
        packed: whether rows are packed end to end; otherwise sequences are padded.
        pad_id: token id of padding.
        multiple: divisor of the micro-batch's width s, which is padded.
        share: whether an equal beginning of a row's sequences, such as a pair's prompt, is computed once. It needs
            packed rows.
    """
    sequences = [sequence for i in piece for sequence in _sequences(rows, i, share)]
    real = sum(sequence.length for sequence in sequences)
    # no row is left for this rank; one token without a label keeps it in step with the others
    if not sequences:
        sequences = [_nothing(1, pad_id, rows)]
    sizes = [sequence.length for sequence in sequences]
    width = sum(sizes) if packed else max(sizes)
    padding = -width % multiple
    width += padding
    if packed and padding:
        sequences.append(_nothing(padding, pad_id, rows))
    grid = [sequences] if packed else [[sequence] for sequence in sequences]
    tokens = np.full((len(grid), width), pad_id, dtype=np.int64)
    positions = np.zeros_like(tokens)
    # per sequence: indices in the grid that predict a label, and indices in the sequence of the labels
    predicting = []
    predicted = []
    for b, row in enumerate(grid):
        at = first = 0
        for sequence in row:
            shared = sequence.shared
            end = at + sequence.length
            first = first if shared else at
            tokens[b, at:end] = sequence.tokens[shared:]
            positions[b, at:end] = np.arange(shared, len(sequence.tokens))
            # a token predicts the next one in its sequence
            before = np.flatnonzero(sequence.labels[1:] != IGNORE)
            start = np.where(before < shared, first, at - shared)
            predicting.append(b * width + start + before)
            predicted.append(before + 1)
            at = end
    index = np.concatenate(predicting)
    counts = [len(labels) for labels in predicted if len(labels)]

    def at_labels(parts: Iterable[np.ndarray], dtype: type) -> Tensor:
        picked = [part[at] for part, at in zip(parts, predicted, strict=True)]
        return torch.from_numpy(np.concatenate(picked).astype(dtype))

    columns = {}
    for c, name in enumerate(rows.columns):
        dtype = np.int16 if name == ROUTES else np.float32
        columns[name] = at_labels((sequence.columns[c] for sequence in sequences), dtype)
    routes = None
    chosen = columns.pop(ROUTES, None)
    if chosen is not None:
        shape = (tokens.size, chosen.shape[1])
        experts = np.full(shape, -1, dtype=np.int16)
        # a shared token gets the experts of its first sequence: of equal indices numpy keeps the last one
        experts[index[::-1]] = chosen.numpy()[::-1]
        routes = torch.from_numpy(experts).view(*tokens.shape, -1)
    return MicroBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        lengths=tuple(sequence.length for sequence in sequences) if packed else None,
        index=torch.from_numpy(index),
        targets=at_labels((sequence.labels for sequence in sequences), np.int64),
        sequence=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)),
        sequences=len(counts),
        real_tokens=real,
        columns=columns,
        shared=tuple(sequence.shared for sequence in sequences) if share else (),
        routes=routes,
    )


def _nothing(length: int, pad_id: int, rows: Rows) -> _Sequence:
    columns = []
    for column in rows.columns.values():
        shape = (length, *column[0].shape[1:])
        columns.append(np.zeros(shape, np.float32))
    return _Sequence(np.full(length, pad_id), np.full(length, IGNORE), columns)


@dataclass(frozen=True)
class Update:
    """The data of one optimiser step.

    Attributes:
        batches: this rank's micro-batches.
        labels: number of labels over all ranks, times the mean weight of the data set's labels.
        sequences: likewise of sequences with a label; GRPO also counts answers that do not train.
        rows: numbers of the rows over all ranks, for messages.
    """

    batches: list[MicroBatch]
    labels: float
    sequences: float
    rows: Sequence[int]

    def pin_memory(self) -> "Update":
        """Copy the batches to page-locked memory; torch's DataLoader calls this if ``pin_memory`` is set."""
        return replace(self, batches=[batch.pin_memory() for batch in self.batches])


@dataclass(frozen=True)
class Layout:
    """Settings that turn the rows of a step into micro-batches.

    Attributes:
        rank: number of this rank, from 0.
        ranks: number of ranks.
        tokens_per_micro_batch: ``budget`` of :func:`cut`.
        packed: see :func:`cut`.
        pad_id, multiple, share: see :func:`collate`.
    """

    rank: int
    ranks: int
    tokens_per_micro_batch: int
    packed: bool
    pad_id: int
    multiple: int = 1
    share: bool = False


class StepLoader(Dataset):
    """Loads updates with this rank's micro-batches.

    Args:
        rows: the tokenised data set.
        steps: indices of the rows by update.
        layout: settings of the micro-batches.
        num_workers: number of the DataLoader's processes; 0 loads in this process.
        pin_memory: whether to copy batches to page-locked memory.
        count_shared: whether the budget counts a shared token once per sequence that shares it, as attention does.
    """

    def __init__(
        self,
        rows: Rows,
        steps: Steps | Sequence[Sequence[int]],
        layout: Layout,
        num_workers: int = 0,
        pin_memory: bool = False,
        count_shared: bool = False,
    ) -> None:
        self._rows = rows
        self._steps = steps
        self._layout = layout
        self._num_workers = num_workers
        self._pin_memory = pin_memory
        self._sizes = row_sizes(rows, layout.share and not count_shared)
        self._counts: list[tuple[float, float]] = [*label_counts(rows)]
        if ROW_WEIGHT in rows.columns:
            weights = np.array([row[0] for row in rows.columns[ROW_WEIGHT]], np.float64)
            counts = np.array(self._counts, np.float64)  # [rows, 2]: labels and sequences
            means = weights @ counts / counts.sum(axis=0)  # weights per label and per sequence
            self._counts = list(map(tuple, (counts * means).tolist()))

    def __getitem__(self, step: int) -> Update:
        indices = self._steps[step]
        layout = self._layout
        sizes = [self._sizes[i] for i in indices]
        of_ranks = cut(sizes, layout.ranks, layout.tokens_per_micro_batch, layout.packed)
        batches = []
        for piece in of_ranks[layout.rank]:
            rows = [indices[i] for i in piece]
            batches.append(
                collate(
                    self._rows, rows, layout.packed, layout.pad_id, layout.multiple, layout.share
                )
            )
        labels, sequences = zip(*(self._counts[i] for i in indices), strict=True)
        return Update(batches, sum(labels), sum(sequences), indices)

    def range(self, start: int, end: int) -> Iterator[Update]:
        """Yield the updates from ``start`` up to, but not including, ``end``."""
        forks = self._num_workers and sys.platform == "linux"
        return iter(
            DataLoader(
                self,
                batch_size=None,
                sampler=range(start, end),
                num_workers=self._num_workers,
                # Python 3.14's default, a fork server, imports everything again: 18 s per worker on a slow core
                multiprocessing_context="fork" if forks else None,
                pin_memory=self._pin_memory,
                # A DataLoader draws from the global generator whenever it starts. With its own generator a resumed run
                # stays equal to an undisturbed one.
                generator=torch.Generator(),
            )
        )


def rows_per_step(cfg: DictConfig, ranks: int) -> int:
    """Return the number of rows per optimiser step of a config, over all ``ranks``."""
    return cfg.sequences_per_step or cfg.batch_size * (cfg.gradient_accumulation_steps or 1) * ranks


def width_multiple(compiled: bool, device: torch.device, dtype: torch.dtype) -> int:
    """Return ``multiple`` of :func:`collate`; 1: no padding.

    Padding limits the number of shapes. A compiled graph needs new kernels for a new shape, and so do oneDNN's 16-bit
    matrix products on a CPU, whose kernels take time to build and about 1 MB. Measured with 11 M parameters on a CPU:
    1.25 x the speed of a step in bf16, no difference beyond noise in fp32.
    """
    if compiled:
        return 128
    return 64 if device.type == "cpu" and dtype.itemsize == 2 else 1


def micro_batch_budget(cfg: DictConfig, longest: int) -> int:
    """Return a config's budget of a micro-batch in tokens; UserError: the ``longest`` row exceeds it.

    If ``tokens_per_micro_batch`` is null, the budget is ``batch_size`` longest rows.
    """
    requested = cfg.tokens_per_micro_batch
    if requested is None:
        return cfg.batch_size * longest
    if requested < longest:
        raise UserError(
            f"tokens_per_micro_batch is {requested}, but the longest row has {longest} tokens; "
            f"set it to at least {longest} or lower tokenizer.max_seq_len"
        )
    return requested
