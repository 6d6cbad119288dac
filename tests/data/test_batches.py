"""Micro-batches: however rows are cut, each label is computed once, from the token before it."""

import math
import multiprocessing
from collections import Counter
from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_ext.data.batches import (
    Layout,
    StepLoader,
    Steps,
    collate,
    count_labels,
    cut,
    shared_beginnings,
)
from rocm_ext.data.mixture import Mixture
from rocm_ext.data.render import IGNORE
from rocm_ext.data.rows import Rows, labelled

SEQUENCE = st.lists(st.booleans(), min_size=1, max_size=9)  # which tokens have a label
ROW = st.lists(SEQUENCE, min_size=1, max_size=4)


def numbered(drawn: list[list[list[bool]]]) -> Rows:
    """Rows whose tokens are numbered from 1 on, with half of each token's number as a column."""
    flags = [np.array([*chain(*row)]) for row in drawn]
    ends = np.cumsum([len(row) for row in flags])
    tokens = [
        np.arange(end - len(row), end, dtype=np.int32) + 1
        for row, end in zip(flags, ends, strict=True)
    ]
    labels = [np.where(row, ids, IGNORE) for row, ids in zip(flags, tokens, strict=True)]
    lengths = [tuple(map(len, row)) for row in drawn]
    return Rows(tokens, labels, lengths, {}, {"half": [ids / 2 for ids in tokens]})


def expected_labels(row: list[list[bool]], first: int) -> list[list[int]]:
    """Of each sequence of a row, whose tokens are numbered from ``first`` on, the labels that have a token before."""
    found = []
    for sequence in row:
        found.append([first + i for i, flag in enumerate(sequence) if flag and i])
        first += len(sequence)
    return found


@settings(max_examples=300, deadline=None)
@given(
    drawn=st.lists(ROW, min_size=1, max_size=8),
    packed=st.booleans(),
    ranks=st.integers(1, 3),
    budget=st.integers(1, 40),
    multiple=st.sampled_from([1, 4, 16]),
)
def test_each_label_is_computed_once(drawn, packed, ranks, budget, multiple):
    if not packed:
        drawn = [[sequence] for row in drawn for sequence in row]
    rows = numbered(drawn)
    sizes = [len(tokens) for tokens in rows.tokens]
    expected = [
        expected_labels(row, int(ids[0])) for row, ids in zip(drawn, rows.tokens, strict=True)
    ]
    for row, found in enumerate(expected):
        where = labelled(rows.labels[row], rows.lengths[row])
        assert rows.tokens[row][where].tolist() == [*chain(*found)]
        assert count_labels(rows.labels[row], rows.lengths[row]) == (
            where.sum(),
            sum(map(bool, found)),
        )

    pieces = cut(sizes, ranks, budget, packed)
    assert len(pieces) == ranks
    assert len({len(of_rank) for of_rank in pieces}) == 1
    assert sorted(chain(*chain(*pieces))) == [*range(len(rows))]
    for piece in chain(*pieces):
        of_piece = [sizes[i] for i in piece] or [1]
        width = sum(of_piece) if packed else max(of_piece)
        assert len(piece) < 2 or width * (1 if packed else len(piece)) <= budget
        batch = collate(rows, piece, packed, 0, multiple)
        assert batch.tokens.shape == (
            1 if packed else len(of_piece),
            -(-width // multiple) * multiple,
        )
        assert batch.real_tokens == sum(sizes[i] for i in piece)
        found = [labels for i in piece for labels in expected[i] if labels]
        assert batch.targets.tolist() == [*chain(*found)]
        assert batch.tokens.flatten()[batch.index].tolist() == [
            label - 1 for label in batch.targets
        ]
        assert batch.columns["half"].tolist() == [label / 2 for label in batch.targets]
        assert batch.sequence.tolist() == [n for n, labels in enumerate(found) for _ in labels]
        assert batch.sequences == len(found)


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(1, 30), st.floats(0.05, 20)), min_size=1, max_size=4),
    per_step=st.integers(1, 9),
    seed=st.integers(0, 3) | st.none(),
)
def test_weights_decide_shares_of_epochs_and_steps(parts, per_step, seed):
    sizes, weights = zip(*parts, strict=True)
    mixture, total = Mixture(tuple(map(str, sizes)), sizes, weights), sum(sizes)
    steps = Steps(total, per_step, None, seed or 0, seed is not None, mixture)
    exact = [total * weight / sum(weights) for weight in weights]
    ends, seen = np.cumsum(sizes), Counter[int]()
    for epoch in range(3):
        rows = list(chain(*(steps[epoch * steps.per_epoch + i] for i in range(steps.per_epoch))))
        assert len(rows) == total
        sets = np.searchsorted(ends, rows, side="right")
        assert np.bincount(sets, minlength=len(sizes)).tolist() == mixture.shares
        for number, share in enumerate(exact):
            assert abs(mixture.shares[number] - share) < 1
            even = np.arange(1, total + 1) * mixture.shares[number] / total
            assert np.abs(np.cumsum(sets == number) - even).max() <= 1 + len(sizes) / 2
        seen.update(rows)
    for start, end in pairwise(
        [0, *ends.tolist()]
    ):  # of a data set, no row comes again before all others have come
        counts = [seen[row] for row in range(start, end)]
        assert max(counts) - min(counts) <= 1
    short = replace(
        steps, limit=max(1, steps.per_epoch // 2)
    )  # goes through all rows, too, in more epochs
    assert [short[i] for i in range(short.per_epoch)] == [steps[i] for i in range(short.per_epoch)]
    in_order = Steps(total, per_step, mixture=replace(mixture, weights=()), data_seed=seed or 0)
    assert in_order[0] == Steps(total, per_step, data_seed=seed or 0)[0]


def test_weights_and_limits_as_large_as_numbers_go():
    assert Mixture(("a", "b"), (10, 10), (1e308, 1e308)).shares == [10, 10]
    assert Mixture(("a", "b"), (10, 10), (1e-300, 3e-300)).shares == [5, 15]
    tokens = [np.arange(3, dtype=np.int32)] * 3
    rows = Rows(tokens, tokens, [(3,)] * 3, {})
    joined, groups = rows.join_groups(["x", "y", "x"], math.inf)
    assert (joined.lengths, groups) == ([(3, 3), (3,)], ["x", "y"])


def test_a_sequence_shares_a_long_beginning_and_keeps_a_token():
    first = np.arange(20)
    for length, shared in ((20, 19), (17, 16), (16, 0)):
        assert shared_beginnings(np.concatenate([first, first[:length]]), (20, length)) == [
            0,
            shared,
        ]


def test_every_epoch_has_an_order_of_its_own():
    orders = [Steps(20, 3).order(epoch) for epoch in range(3)]
    assert all(sorted(order) == [*range(20)] for order in orders)
    assert len({*map(tuple, orders)}) == 3


def test_workers_are_forks():
    """Not what Python 3.14 takes by itself, which imports everything again."""
    loader = StepLoader(
        numbered([[[True] * 3]]), Steps(1, 1), Layout(0, 1, 8, True, 0), num_workers=1
    )
    loader.here = lambda: None  # only a fork has it
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        (update,) = loader.range(0, 1)
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert update.labels == 2
