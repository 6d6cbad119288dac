"""The rows and pairs of a training benchmark: token ids in the order in which every side trains on them."""

import json
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

IGNORE = -100


class TokenRows(Dataset):
    """A dataset component for torchtune's recipes and ours: ``{"tokens", "labels"}`` from a JSONL file."""

    def __init__(self, tokenizer: Any, path: str) -> None:
        self._rows = [json.loads(line) for line in Path(path).read_text().splitlines()]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return self._rows[index]


class PackedRows(TokenRows):
    """The rows as torchtune packs them, a step at a time, so that every side trains on the same rows a step.

    Args:
        tokenizer: unused.
        path: file of the rows.
        rows: rows of a step.
        packs: packs of a step; if fewer would do, the rows are dealt out evenly.
        packed: for torchtune's recipe, which reads it.
    """

    def __init__(self, tokenizer: Any, path: str, rows: int, packs: int, packed: bool) -> None:
        super().__init__(tokenizer, path)
        steps = [self._rows[start : start + rows] for start in range(0, len(self._rows), rows)]
        length = next(
            each
            for each in range(64, 1 << 20, 64)
            if all(fits(step, each, packs) for step in steps)
        )
        self._rows = []
        for step in steps:
            made = packed_by_torchtune(step, length)
            if len(made) < packs:
                parts = [step[start::packs] for start in range(packs)]
                made = [pack for part in parts for pack in packed_by_torchtune(part, length)]
            if len(made) != packs:
                raise ValueError(
                    f"a step's rows fill {len(made)} packs of {length} tokens, not {packs}"
                )
            self._rows += made


class TokenPairs(TokenRows):
    """A dataset component like torchtune's ``PreferenceDataset``, from a JSONL file of token ids.

    A row has ``prompt``, ``chosen`` and ``rejected``; the prompt has no labels.
    """

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row, item = self._rows[index], {}
        for side in ("chosen", "rejected"):
            item[f"{side}_input_ids"] = row["prompt"] + row[side]
            item[f"{side}_labels"] = [IGNORE] * len(row["prompt"]) + row[side]
        return item


def fits(rows: list[dict[str, list[int]]], length: int, packs: int) -> bool:
    """Whether rows, put one after the other, fill at most ``packs`` packs of ``length`` tokens."""
    free, left = 0, packs
    for row in rows:
        count = len(row["tokens"])
        if count > free:
            free, left = length, left - 1
        free -= count
        if free < 0 or left < 0:
            return False
    return True


def packed_by_torchtune(rows: list[dict[str, list[int]]], length: int) -> list[dict[str, Any]]:
    """Return the packs that torchtune's ``PackedDataset`` makes of rows."""
    from torchtune.datasets import PackedDataset

    packed = PackedDataset(rows, max_seq_len=length)
    return [packed[index] for index in range(len(packed))]
