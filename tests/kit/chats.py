"""Messages and labels of tests of data, and datasets that are not ours."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch

from rocm_ext.data.render import IGNORE


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def labelled_text(labels: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text of each run of labels."""
    return [
        decode([*run]) for trained, run in groupby(labels, lambda label: label != IGNORE) if trained
    ]


class Foreign(torch.utils.data.Dataset):
    """A foreign dataset of items, or of exceptions to raise."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.items[index], Exception):
            raise self.items[index]
        return self.items[index]
