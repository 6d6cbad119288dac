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


def wide_tokenizer(**arguments: Any) -> Any:
    """Build Qwen2.5's tokenizer for a model with more ids than the tokenizer has; the others decode to nothing."""
    from torchtune.models.qwen2_5 import qwen2_5_tokenizer

    tokenizer = qwen2_5_tokenizer(**arguments)
    known, decode = set(tokenizer.decoder) | set(tokenizer.special_tokens.values()), tokenizer.decode
    tokenizer.decode = lambda tokens, **options: decode([each for each in tokens if each in known], **options)
    return tokenizer
