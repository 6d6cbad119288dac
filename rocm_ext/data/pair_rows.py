"""Read pairs of answers, of which one is chosen and one is rejected, into rows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rocm_ext.base.errors import UserError
from rocm_ext.data.render import IGNORE

if TYPE_CHECKING:
    from rocm_ext.data.rows import Rows

SIDES = ("chosen", "rejected")
SIDE = "side"  # the column that tells the sides apart
_COUNTS = ("truncated", "dropped_too_long", "dropped_equal", "dropped_empty", "dropped_equal_when_cut")


def is_pair(item: Mapping[str, Any]) -> bool:
    """Whether a dataset's item is a pair, in the form of torchtune's ``PreferenceDataset``."""
    return any(f"{side}_input_ids" in item for side in SIDES)


@dataclass(frozen=True)
class LengthLimits:
    """How long a sequence may be, and what happens to a longer one.

    Attributes:
        max_seq_len, positions, too_long: see :func:`rocm_ext.data.rows.tokenize`.
        foreign: whether a dataset is not of this library; such a one may cut sequences itself.
    """

    max_seq_len: int | None
    positions: int | None
    too_long: str
    foreign: bool

    def least(self) -> int | None:
        """Return the lower limit; None without limits."""
        return min(filter(None, (self.max_seq_len, self.positions)), default=None)

    def error(self, origin: str, length: int, limit: int) -> UserError:
        """Return the error of ``too_long: error`` for a sequence of ``length`` tokens, which exceeds ``limit``."""
        of_model = limit == self.positions
        what, cure = ("the model takes", "set") if of_model else ("max_seq_len is", "raise it, or set")
        return UserError(f"{origin}: {length} tokens, but {what} {limit}; {cure} too_long to truncate or drop")


class PairReader:
    """Adds pairs to rows: a pair is a row of two sequences, the chosen one and the rejected one, and both have labels.

    The rows get the column ``side``: 1 in the chosen sequence, -1 in the rejected one. Their counts become the number
    of ``rows`` read, of kept pairs that were ``truncated``, of pairs ``dropped_too_long``, of those with equal sides
    (``dropped_equal``) or without an answer on a side (``dropped_empty``), and of those whose sides are equal as far
    as the limit reaches (``dropped_equal_when_cut``).

    Args:
        rows: the rows to fill; nothing was added yet.
        limits: the limits of each sequence.
    """

    def __init__(self, rows: "Rows", limits: LengthLimits) -> None:
        self._rows, self._limits, self._counts = rows, limits, rows.counts
        rows.counts.update(dict.fromkeys(_COUNTS, 0))
        rows.columns[SIDE] = []

    def add(self, item: Mapping[str, Any], origin: Callable[[], str]) -> None:
        """Add a pair, or count why it is dropped.

        Args:
            item: ``chosen_input_ids``, ``chosen_labels``, ``rejected_input_ids`` and ``rejected_labels``.
            origin: returns the pair's origin, for messages.

        Raises:
            UserError: a side is too long under ``error``.
            ValueError: the item is malformed, or the prompts of the sides differ.
        """
        pair = [_read_side(item, side) for side in SIDES]
        longest = max(len(tokens) for tokens, _ in pair)
        # torchtune's tokenizers cut at max_seq_len themselves
        cut = self._limits.foreign and longest == self._limits.max_seq_len
        if reason := _reason_to_drop(pair):
            self._counts["dropped_equal_when_cut" if cut and reason == "dropped_equal" else reason] += 1
            return
        _check_prompts(pair)
        limit = self._limits.least() or longest
        if longest > limit:
            if self._limits.too_long == "error":
                raise self._limits.error(origin(), longest, limit)
            if self._limits.too_long == "drop":
                self._counts["dropped_too_long"] += 1
                return
            pair, cut = [(tokens[:limit], labels[:limit]) for tokens, labels in pair], True
            if _reason_to_drop(pair):  # where a side has no label left, both are the beginning of the prompt
                self._counts["dropped_equal_when_cut"] += 1
                return
        self._counts["truncated"] += cut
        self._append(pair)

    def dropped(self) -> str:
        """Say what became of the pairs."""
        dropped = {what: count for what, count in self._counts.items() if what.startswith("dropped")}
        return ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in dropped.items())

    def _append(self, pair: list[tuple[np.ndarray, np.ndarray]]) -> None:
        lengths = tuple(len(tokens) for tokens, _ in pair)
        self._rows.tokens.append(np.concatenate([tokens for tokens, _ in pair]))
        self._rows.labels.append(np.concatenate([labels for _, labels in pair]))
        self._rows.lengths.append(lengths)
        self._rows.columns[SIDE].append(np.repeat(np.array([1, -1], dtype=np.float32), lengths))


def _read_side(item: Mapping[str, Any], side: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens [s] and labels [s] of one side of an item."""
    keys = f"{side}_input_ids", f"{side}_labels"
    if not set(keys) <= item.keys():
        raise ValueError(f"a pair needs {' and '.join(keys)}, found {list(item)}")
    tokens, labels = (np.asarray(item[key], dtype=np.int32) for key in keys)
    if tokens.ndim != 1 or tokens.shape != labels.shape:
        raise ValueError(f"{keys[0]} {tokens.shape} and {keys[1]} {labels.shape} must be flat lists of one length")
    return tokens, labels


def _reason_to_drop(pair: list[tuple[np.ndarray, np.ndarray]]) -> str | None:
    (chosen, _), (rejected, _) = pair
    if len(chosen) and np.array_equal(chosen, rejected):
        return "dropped_equal"
    return "dropped_empty" if any((labels[1:] == IGNORE).all() for _, labels in pair) else None


def _check_prompts(pair: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Check that the tokens before the first label are the same on both sides."""
    chosen, rejected = (tokens[: int(np.argmax(labels != IGNORE))] for tokens, labels in pair)
    if not np.array_equal(chosen, rejected):
        raise ValueError("the prompts of the chosen and the rejected answer differ")
