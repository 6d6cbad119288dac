"""Several data sets in one training: how many rows of an epoch each of them gives, and in which order."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from rocm_ext.base.errors import UserError
from rocm_ext.base.importing import COMPONENT
from rocm_ext.config.components import data_weights
from rocm_ext.data.rows import Rows


@dataclass(frozen=True)
class Mixture:
    """The data sets of a config's ``dataset``, and how a training mixes them.

    An epoch has as many rows as all data sets together. Without weights it has each row once. With weights, each data
    set gives a share of the rows that is proportional to its weight: it goes through its rows in one order after
    another, and each epoch continues where the one before has ended. So a small data set with a large weight repeats
    its rows, and an epoch may see only a part of a large one. The rows of a data set are spread evenly over an epoch,
    so that a step has nearly the same shares.

    Attributes:
        names: source or component of each data set.
        rows: number of training rows of each; :class:`Rows` have those of the first data set first.
        weights: weight of each; empty: the config has none.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...]
    weights: tuple[float, ...] = ()

    @classmethod
    def of(cls, dataset: Any, rows: Rows) -> "Mixture":
        """Return the mixture of a node of a config and the training rows that were read from it.

        Raises:
            UserError: the weights are wrong, or the rows do not say from which data set they come.
        """
        weights = data_weights(dataset)
        nodes = dataset if OmegaConf.is_list(dataset) else [dataset]
        if len(rows.ends) != len(nodes):
            if weights:
                raise UserError("dataset has weights, but its rows do not say from which data set they come")
            return cls(("dataset",), (len(rows),))
        names = (node.get("source") or node.get(COMPONENT) if OmegaConf.is_dict(node) else "list" for node in nodes)
        of_sets = np.diff(np.searchsorted(np.asarray(rows.numbers), rows.ends), prepend=0)
        return cls(tuple(map(str, names)), tuple(of_sets.tolist()), weights)

    def check(self) -> None:
        """Check that each data set with a weight gives rows to an epoch.

        Raises:
            UserError: one gives none.
        """
        for name, rows, given in zip(self.names, self.rows, self.shares, strict=True):
            if self.weights and not given:
                why = "its weight is too small for" if rows else "no row of it is left, but it has a weight in"
                raise UserError(f"dataset {name}: {why} an epoch of {sum(self.rows):,} rows; raise it or leave it out")

    @property
    def shares(self) -> list[int]:
        """Rows of an epoch that each data set gives, exact to a row."""
        if not self.weights:
            return list(self.rows)
        # a plan from a sample of the rows may have none of a data set
        weights = [weight if rows else 0.0 for weight, rows in zip(self.weights, self.rows, strict=True)]
        exact = [sum(self.rows) * weight / sum(weights) for weight in weights]
        shares = [math.floor(share) for share in exact]
        missing = sum(self.rows) - sum(shares)
        for i in sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])[:missing]:
            shares[i] += 1
        return shares

    def table(self, steps: Iterable[Sequence[int]] | None = None) -> list[dict[str, Any]]:
        """Describe each data set, for JSON; a single one needs no description.

        Args:
            steps: the rows of each step of a run.

        Returns:
            Of each data set ``name``, ``rows``, ``weight``, ``rows_of_epoch``, their ``share``, and ``rows_given`` to
            the run.
        """
        if len(self.rows) == 1:
            return []
        weights, total = self.weights or [None] * len(self.rows), sum(self.rows)
        parts = zip(self.names, self.rows, weights, self.shares, strict=True)
        keys = ("name", "rows", "weight", "rows_of_epoch", "share")
        found: list[dict[str, Any]] = [dict(zip(keys, (*part, part[-1] / total), strict=True)) for part in parts]
        if steps is not None:
            counts = np.zeros(len(self.rows), np.int64)
            for numbers in steps:
                counts += np.bincount(np.searchsorted(np.cumsum(self.rows), numbers, "right"), minlength=len(counts))
            found = [{**part, "rows_given": count} for part, count in zip(found, counts.tolist(), strict=True)]
        return found


def lines(table: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what :meth:`Mixture.table` says as a line for each data set."""
    return [
        f"{part['name']}: {part['rows']:,} rows, {part['share']:.1%} of an epoch"
        + (f" ({part['rows_of_epoch']:,} rows, weight {part['weight']:g})" if part["weight"] else "")
        for part in table
    ]


@lru_cache(maxsize=2)
def mixed_order(mixture: Mixture, epoch: int, length: int, seed: int | None) -> list[int]:
    """Return the rows of an epoch, under weights.

    Args:
        mixture: data sets with weights.
        epoch: number of the epoch, from 0.
        length: rows of every epoch, which may end early.
        seed: of the orders of each data set; None: its rows stay in their own order.
    """
    # row j of the n that a data set gives comes after (j + 1/2) / n of the epoch
    times = np.concatenate([(np.arange(share) + 0.5) / max(1, share) for share in mixture.shares])
    sets = np.repeat(np.arange(len(mixture.rows)), mixture.shares)[np.argsort(times, kind="stable")][:length]
    order, first = np.empty(length, np.int64), 0
    for number, rows in enumerate(mixture.rows):
        places = np.flatnonzero(sets == number)
        if len(places):
            start = epoch * len(places)  # as many rows of it came in the epochs before
            passes = range(start // rows, (start + len(places) - 1) // rows + 1)
            seeds = [None if seed is None else (seed, number, i) for i in passes]
            each = [np.arange(rows) if s is None else np.random.default_rng(s).permutation(rows) for s in seeds]
            order[places] = first + np.concatenate(each)[start % rows :][: len(places)]
        first += rows
    return order.tolist()
