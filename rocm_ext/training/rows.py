"""Rows for training in Python: dialects of data.md, token ids with columns, and sampled answers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rocm_ext.base.errors import UserError
from rocm_ext.base.types import Json, Row
from rocm_ext.data.dialects import KTO, PAIRED
from rocm_ext.data.preferences import PreferenceDataset
from rocm_ext.data.render import IGNORE
from rocm_ext.data.rows import Rows, tokenize
from rocm_ext.data.sources import ROW_WEIGHT, ConversationDataset, SourceDataset

Data = Rows | Iterable[Row]


@dataclass(frozen=True)
class Answer:
    """A sampled answer.

    Attributes:
        prompt: token ids of the rendered prompt.
        tokens: sampled ids, with the stop token if one ended the answer.
        logprobs: log-probs of ``tokens`` at the temperature of sampling.
        text: the decoded ``tokens`` without the stop token.
        finish_reason: ``stop`` or ``length``.
    """

    prompt: tuple[int, ...]
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str

    def row(self, **columns: float | Sequence[float]) -> Row:
        """Return a row that trains on the answer, with the column ``old_logprobs`` of sampling.

        ``columns`` are further columns by name, such as ``advantages``: one number for all tokens of the answer, or a
        number for each.
        """
        masked = len(self.prompt)
        row: Json = {
            "tokens": [*self.prompt, *self.tokens],
            "labels": [IGNORE] * masked + self.tokens,
            "old_logprobs": [0.0] * masked + self.logprobs,
        }
        for name, values in columns.items():
            row[name] = values
            if not isinstance(values, int | float):
                row[name] = [0.0] * masked + list(values)
        return row


def to_rows(data: Data, tokenizer: Any, positions: int) -> Rows:
    """Tokenise rows for a model.

    Args:
        data: rows in a dialect of :func:`rocm_ext.data.sft_dataset` or :func:`rocm_ext.data.preference_dataset`; or
            rows of token ids: ``tokens`` and ``labels``, both [s], with -100 for no loss, and columns by name, a number
            or [s]; or :class:`rocm_ext.data.rows.Rows`, which stay as they are.
        tokenizer: the model's.
        positions: the model's maximum length of a sequence in tokens.

    Raises:
        UserError: there is no row, or one is malformed or too long; the message names it.
    """
    if isinstance(data, Rows):
        return data
    if isinstance(data, Mapping | str):
        raise UserError(f"rows are a list of mappings, found {type(data).__name__}")
    rows = list(data)
    if not rows:
        raise UserError("no rows to train on")
    of_tokens = ["tokens" in row for row in rows if isinstance(row, Mapping)]
    if all(of_tokens) and len(of_tokens) == len(rows):
        return _of_tokens(rows, positions)
    dataset = _dataset(rows, tokenizer)
    return tokenize(
        dataset,
        max_seq_len=None,
        positions=positions,
        too_long="error",
        progress=False,
        name="rows",
        warns=False,
    )


def _dataset(rows: list[Row], tokenizer: Any) -> SourceDataset:
    """Return the data set of rows in a dialect; the first row says whether they are preferences."""
    given: dict[str, Any] = {
        "tokenizer": tokenizer,
        "rows": rows,
        "origin": lambda index: f"row {index}",
        "column_map": {},
        "system_prompt": None,
        "source": "the rows",
    }
    first = rows[0] if isinstance(rows[0], Mapping) else {}
    if first.keys() & {*PAIRED, *KTO}:
        return PreferenceDataset(**given)
    return ConversationDataset(**given, schema="auto", last_turn=False, train_on_input=False)


def _of_tokens(data: list[Row], positions: int) -> Rows:
    """Return rows of token ids with their columns; all rows have the same ones."""
    names = [name for name in data[0] if name not in ("tokens", "labels")]
    rows = Rows([], [], [], {"rows": len(data)}, {name: [] for name in names})
    for index, row in enumerate(data):
        try:
            _add(rows, row, positions)
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"row {index}: {error}") from error
    return rows


def _add(rows: Rows, row: Row, positions: int) -> None:
    expected = {"tokens", "labels", *rows.columns}
    if row.keys() != expected:
        raise ValueError(f"it has {', '.join(row)}; expected {', '.join(sorted(expected))}")
    tokens = np.asarray(row["tokens"])
    labels = np.asarray(row["labels"])
    for name, values in (("tokens", tokens), ("labels", labels)):
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise ValueError(f"{name} must be a flat list of token ids")
    if len(tokens) != len(labels):
        raise ValueError(f"{len(tokens)} tokens and {len(labels)} labels; expected as many")
    if len(tokens) and tokens.min() < 0:
        raise ValueError(f"token id {tokens.min()} is below 0")
    if len(tokens) > positions:
        raise ValueError(f"{len(tokens)} tokens; the model takes {positions}")
    if not (labels[1:] != IGNORE).any():
        raise ValueError("no token behind the first has a label")
    rows.tokens.append(tokens.astype(np.int32))
    rows.labels.append(labels.astype(np.int32))
    rows.lengths.append((len(tokens),))
    for name, column in rows.columns.items():
        values = np.asarray(row[name], np.float32)
        if values.ndim and values.shape != tokens.shape:
            raise ValueError(f"{name} has {list(values.shape)} numbers for {len(tokens)} tokens")
        if not np.isfinite(values).all():
            raise ValueError(f"{name} has a value that is not finite")
        if name == ROW_WEIGHT and not (values.ndim == 0 and values > 0):
            raise ValueError(f"{name} must be one number above 0")
        column.append(np.broadcast_to(values, tokens.shape))
