"""Training rows of sampled answers."""

from collections.abc import Mapping, Sequence

import numpy as np

from rocm_ext.data.render import IGNORE
from rocm_ext.data.rows import Rows
from rocm_ext.rollouts.samples import Sample


def to_rows(
    samples: Sequence[Sample],
    prompts: Mapping[str, Sequence[int]],
    columns: Mapping[str, Sequence[Sequence[float] | np.ndarray]] | None = None,
) -> Rows:
    """Convert samples to training rows: the tokens of prompt and answer as sampled, with labels on the answer only.

    Args:
        samples: samples to train on.
        prompts: token ids of each prompt, by id.
        columns: further columns by name: for each sample a value per token of its answer.
    """
    rows = Rows([], [], [], {"rows": len(samples)}, {name: [] for name in columns or {}})
    for sample in samples:
        prompt = prompts[sample.prompt_id]
        tokens = np.array([*prompt, *sample.tokens], dtype=np.int32)
        labels = tokens.copy()
        labels[: len(prompt)] = IGNORE
        rows.tokens.append(tokens)
        rows.labels.append(labels)
        rows.lengths.append((len(tokens),))
    for name, values in (columns or {}).items():
        add_column(rows, name, values)
    return rows


def add_column(rows: Rows, name: str, values: Sequence[Sequence[float] | np.ndarray]) -> None:
    """Add a column to rows of sampled answers.

    Args:
        rows: rows of :func:`to_rows`.
        name: the column's name.
        values: for each row a value per token of its answer.
    """
    rows.columns[name] = []
    for tokens, answer in zip(rows.tokens, values, strict=True):
        column = np.zeros(len(tokens), dtype=np.float32)
        column[len(tokens) - len(answer) :] = answer
        rows.columns[name].append(column)
