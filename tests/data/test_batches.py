"""Micro-batches: however rows are cut, each label is computed once, from the token before it."""

import multiprocessing
from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_ext.data.batches import Layout, StepLoader, Steps, collate, count_labels, cut
from rocm_ext.data.render import IGNORE
from rocm_ext.data.rows import Rows, labelled

SEQUENCE = st.lists(st.booleans(), min_size=1, max_size=9)  # which tokens have a label
ROW = st.lists(SEQUENCE, min_size=1, max_size=4)


def numbered(drawn: list[list[list[bool]]]) -> Rows:
    """Rows whose tokens are numbered from 1 on, with half of each token's number as a column."""
    flags = [np.array([*chain(*row)]) for row in drawn]
    ends = np.cumsum([len(row) for row in flags])
    tokens = [np.arange(end - len(row), end, dtype=np.int32) + 1 for row, end in zip(flags, ends, strict=True)]
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
    expected = [expected_labels(row, int(ids[0])) for row, ids in zip(drawn, rows.tokens, strict=True)]
    for row, found in enumerate(expected):
        where = labelled(rows.labels[row], rows.lengths[row])
        assert rows.tokens[row][where].tolist() == [*chain(*found)]
        assert count_labels(rows.labels[row], rows.lengths[row]) == (where.sum(), sum(map(bool, found)))

    pieces = cut(sizes, ranks, budget, packed)
    assert len(pieces) == ranks
    assert len({len(of_rank) for of_rank in pieces}) == 1
    assert sorted(chain(*chain(*pieces))) == [*range(len(rows))]
    for piece in chain(*pieces):
        of_piece = [sizes[i] for i in piece] or [1]
        width = sum(of_piece) if packed else max(of_piece)
        assert len(piece) < 2 or width * (1 if packed else len(piece)) <= budget
        batch = collate(rows, piece, packed, 0, multiple)
        assert batch.tokens.shape == (1 if packed else len(of_piece), -(-width // multiple) * multiple)
        assert batch.real_tokens == sum(sizes[i] for i in piece)
        found = [labels for i in piece for labels in expected[i] if labels]
        assert batch.targets.tolist() == [*chain(*found)]
        assert batch.tokens.flatten()[batch.index].tolist() == [label - 1 for label in batch.targets]
        assert batch.columns["half"].tolist() == [label / 2 for label in batch.targets]
        assert batch.sequence.tolist() == [n for n, labels in enumerate(found) for _ in labels]
        assert batch.sequences == len(found)


def test_workers_are_forks():
    """Not what Python 3.14 takes by itself, which imports everything again."""
    loader = StepLoader(numbered([[[True] * 3]]), Steps(1, 1), Layout(0, 1, 8, True, 0), num_workers=1)
    loader.here = lambda: None  # only a fork has it
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        (update,) = loader.range(0, 1)
    finally:
        multiprocessing.set_start_method(before, force=True)
    assert update.labels == 2
