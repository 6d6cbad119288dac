"""Several data sets in one training: their shares of an epoch, and the order of rows."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypedDict

import numpy as np
from omegaconf import OmegaConf

from rocm_ext.base.errors import UserError
from rocm_ext.base.importing import COMPONENT
from rocm_ext.config.components import data_weights
from rocm_ext.data.rows import Rows


class DataShare(TypedDict, total=False):
    """A data set's part of a training, for JSON."""

    name: str  # source or component
    rows: int  # training rows
    weight: float | None  # None: the config has no weights
    rows_of_epoch: int
    share: float  # of an epoch's rows
    rows_given: int  # rows in the run's steps; missing if these are not known


@dataclass(frozen=True)
class Mixture:
    """The data sets of a config's ``dataset`` and their weights.

    An epoch has as many rows as all data sets together. Without weights it has every row once. With weights, a data
    set's share of the epoch is proportional to its weight. A data set goes through its rows in one order after
    another, and an epoch continues where the last one ended. So a small data set with a large weight repeats its rows,
    and an epoch may see only a part of a large data set. The rows of a data set are spread evenly over an epoch, so
    that a step has nearly the same shares.

    Attributes:
        names: source or component, by data set.
        rows: number of training rows, by data set; :class:`Rows` has them in this order.
        weights: weight, by data set; empty: the config has none.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    weights: tuple[float, ...] = ()

    @classmethod
    def of(cls, dataset: Any, rows: Rows) -> "Mixture":
        """Return the mixture of a config's ``dataset``, given its training rows; UserError: the weights are wrong."""
        weights = data_weights(dataset)
        parts = dataset if OmegaConf.is_list(dataset) else [dataset]
        if len(rows.ends) != len(parts):
            if weights:
                raise UserError("dataset has weights, but its rows do not say from which data set they come")
            return cls(("dataset",), (len(rows),))
        names = (part.get("source") or part.get(COMPONENT) if OmegaConf.is_dict(part) else "list" for part in parts)
        of_sets = np.diff(np.searchsorted(np.asarray(rows.numbers), rows.ends), prepend=0)
        return cls(tuple(map(str, names)), tuple(of_sets.tolist()), weights)

    def check(self) -> None:
        """Raise a UserError if a data set has a weight but no row in an epoch."""
        for name, rows, given in zip(self.names, self.rows, self.shares, strict=True):
            if self.weights and not given:
                why = "its weight is too small for" if rows else "no row of it is left, but it has a weight in"
                raise UserError(f"dataset {name}: {why} an epoch of {sum(self.rows):,} rows; raise it or leave it out")

    @property
    def shares(self) -> list[int]:
        """Number of rows in an epoch, by data set, exact to a row."""
        if not self.weights:
            return list(self.rows)
        # a plan from a sample of the rows may have none of a data set
        # scaled without rounding, because products of rows and weights near 1e308 are infinite
        _, exponent = math.frexp(max(self.weights))
        weights = [
            math.ldexp(weight, -exponent) if rows else 0.0 for weight, rows in zip(self.weights, self.rows, strict=True)
        ]
        exact = [sum(self.rows) * weight / sum(weights) for weight in weights]
        shares = [math.floor(share) for share in exact]
        missing = sum(self.rows) - sum(shares)
        for i in sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])[:missing]:
            shares[i] += 1
        return shares

    def table(self, steps: Iterable[Sequence[int]] | None = None) -> list[DataShare]:
        """Describe the data sets; [] for a single one. ``steps`` are the rows of each step of a run."""
        if len(self.rows) == 1:
            return []
        parts = zip(self.names, self.rows, self.weights or [None] * len(self.rows), self.shares, strict=True)
        table: list[DataShare] = [
            {"name": name, "rows": rows, "weight": weight, "rows_of_epoch": share, "share": share / sum(self.rows)}
            for name, rows, weight, share in parts
        ]
        if steps is not None:
            counts = np.zeros(len(self.rows), np.int64)
            for numbers in steps:
                counts += np.bincount(np.searchsorted(np.cumsum(self.rows), numbers, "right"), minlength=len(counts))
            table = [{**part, "rows_given": count} for part, count in zip(table, counts.tolist(), strict=True)]
        return table


def lines(table: Iterable[DataShare]) -> list[str]:
    """Return :meth:`Mixture.table` as lines of text."""
    return [
        f"{part['name']}: {part['rows']:,} rows, {part['share']:.1%} of an epoch"
        + (f" ({part['rows_of_epoch']:,} rows, weight {part['weight']:g})" if part["weight"] else "")
        for part in table
    ]


@lru_cache(maxsize=2)
def mixed_order(mixture: Mixture, epoch: int, length: int, seed: int | None) -> list[int]:
    """Return the ``length`` rows of an epoch under weights; ``seed`` None: rows stay in the order of the data."""
    # row j of the n that a data set gives comes after (j + 1/2) / n of the epoch
    times = np.concatenate([(np.arange(share) + 0.5) / max(1, share) for share in mixture.shares])
    sets = np.repeat(np.arange(len(mixture.rows)), mixture.shares)[np.argsort(times, kind="stable")][:length]
    order, first = np.empty(length, np.int64), 0
    for number, rows in enumerate(mixture.rows):
        positions = np.flatnonzero(sets == number)
        if len(positions):
            start = epoch * len(positions)  # rows of this data set in earlier epochs
            passes = range(start // rows, (start + len(positions) - 1) // rows + 1)
            seeds = [None if seed is None else (seed, number, i) for i in passes]
            orders = [np.arange(rows) if s is None else np.random.default_rng(s).permutation(rows) for s in seeds]
            order[positions] = first + np.concatenate(orders)[start % rows :][: len(positions)]
        first += rows
    return order.tolist()
