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
    weight: float | None  # None if the config has no weights
    rows_of_epoch: int
    share: float  # part of an epoch's rows
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
        weights: weight, by data set; empty if the config has none.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    weights: tuple[float, ...] = ()

    @classmethod
    def of(cls, dataset: Any, rows: Rows) -> "Mixture":
        """Return the mixture of a config's ``dataset``, given its training rows; UserError: the weights are wrong."""
        weights = data_weights(dataset)
        components = dataset if OmegaConf.is_list(dataset) else [dataset]
        if len(rows.ends) != len(components):
            if weights:
                raise UserError(
                    "dataset has weights, but its rows do not say from which data set they come"
                )
            return cls(("dataset",), (len(rows),))
        names = tuple(map(_name_of, components))
        ends = np.searchsorted(np.asarray(rows.numbers), rows.ends)
        counts = np.diff(ends, prepend=0).tolist()
        return cls(names, tuple(counts), weights)

    def check(self) -> None:
        """Raise a UserError if a data set has a weight but no row in an epoch."""
        if not self.weights:
            return
        for name, rows, share in zip(self.names, self.rows, self.shares, strict=True):
            if not share:
                why = "no row of it is left, but it has a weight in"
                if rows:
                    why = "its weight is too small for"
                raise UserError(
                    f"dataset {name}: {why} an epoch of {sum(self.rows):,} rows; raise it or leave it out"
                )

    @property
    def shares(self) -> list[int]:
        """Number of rows in an epoch, by data set, exact to a row."""
        if not self.weights:
            return list(self.rows)
        # scaled without rounding, because products of rows and weights near 1e308 are infinite
        _, exponent = math.frexp(max(self.weights))
        weights = [math.ldexp(weight, -exponent) for weight in self.weights]
        for i, rows in enumerate(self.rows):
            if not rows:  # a plan from a sample of the rows may have none of a data set
                weights[i] = 0.0
        total = sum(self.rows)
        exact = [total * weight / sum(weights) for weight in weights]
        shares = list(map(math.floor, exact))
        missing = total - sum(shares)
        largest_remainders = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
        for i in largest_remainders[:missing]:
            shares[i] += 1
        return shares

    def table(self, steps: Iterable[Sequence[int]] | None = None) -> list[DataShare]:
        """Describe the data sets; [] for a single one. ``steps`` are the rows of each step of a run."""
        if len(self.rows) == 1:
            return []
        shares = self.shares
        table: list[DataShare] = []
        for i, name in enumerate(self.names):
            part: DataShare = {
                "name": name,
                "rows": self.rows[i],
                "weight": self.weights[i] if self.weights else None,
                "rows_of_epoch": shares[i],
                "share": shares[i] / sum(self.rows),
            }
            table.append(part)
        if steps is not None:
            for part, count in zip(table, self._count_rows(steps), strict=True):
                part["rows_given"] = count
        return table

    def _count_rows(self, steps: Iterable[Sequence[int]]) -> list[int]:
        """Return the number of rows in all steps, by data set."""
        ends = np.cumsum(self.rows)
        counts = np.zeros(len(ends), np.int64)
        for rows in steps:
            sets = np.searchsorted(ends, rows, "right")
            counts += np.bincount(sets, minlength=len(ends))
        return counts.tolist()


def _name_of(component: Any) -> str:
    """Return the source of a data set, else its component."""
    if not OmegaConf.is_dict(component):
        return "list"
    return str(component.get("source") or component.get(COMPONENT))


def lines(table: Iterable[DataShare]) -> list[str]:
    """Return :meth:`Mixture.table` as lines of text."""
    lines = []
    for part in table:
        line = f"{part['name']}: {part['rows']:,} rows, {part['share']:.1%} of an epoch"
        if part["weight"]:
            line += f" ({part['rows_of_epoch']:,} rows, weight {part['weight']:g})"
        lines.append(line)
    return lines


@lru_cache(maxsize=2)
def mixed_order(mixture: Mixture, epoch: int, length: int, seed: int | None) -> list[int]:
    """Return the ``length`` rows of an epoch under weights; without a ``seed``, rows stay in the order of the data."""
    shares = mixture.shares
    # row j of the n that a data set gives comes after (j + 1/2) / n of the epoch
    times = [(np.arange(share) + 0.5) / max(1, share) for share in shares]
    by_time = np.argsort(np.concatenate(times), kind="stable")
    # [length] number of each row's data set
    sets = np.repeat(np.arange(len(shares)), shares)[by_time][:length]
    order = np.empty(length, np.int64)
    first = 0  # number of the data set's first row
    for number, rows in enumerate(mixture.rows):
        positions = np.flatnonzero(sets == number)
        count = len(positions)
        if count:
            order[positions] = first + _passes(rows, epoch * count, count, seed, number)
        first += rows
    return order.tolist()


def _passes(rows: int, start: int, count: int, seed: int | None, number: int) -> np.ndarray:
    """Return ``count`` rows of data set ``number`` from the ``start``-th on; it goes through its rows in passes."""
    first_pass = start // rows
    last_pass = (start + count - 1) // rows
    orders = []
    for pass_ in range(first_pass, last_pass + 1):
        order = np.arange(rows)
        if seed is not None:
            order = np.random.default_rng((seed, number, pass_)).permutation(rows)
        orders.append(order)
    return np.concatenate(orders)[start % rows :][:count]
