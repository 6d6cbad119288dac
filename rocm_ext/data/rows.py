"""Datasets -> tokenised rows in memory."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from torch.utils.data import ConcatDataset, Dataset
from torchtune.config import instantiate
from tqdm import tqdm

from rocm_ext.data.render import IGNORE, unlimited
from rocm_ext.data.sources import ConversationDataset
from rocm_ext.errors import UserError, nearest, one_line
from rocm_ext.log import log

TOO_LONG = ("truncate", "drop", "error")


def open_dataset(cfg: Any, tokenizer: Any, too_long: str) -> Dataset:
    """The dataset that a config node names with ``_component_``, or several joined from a list of nodes.

    Under ``truncate`` components get the tokenizer as it is, so that torchtune's see what they see in torchtune;
    under the other policies rows must arrive whole, so they get one without ``max_seq_len``.

    Raises:
        UserError: there is no such component, or it fails on its arguments.
    """
    if OmegaConf.is_list(cfg) and cfg:
        return ConcatDataset([open_dataset(node, tokenizer, too_long) for node in cfg])
    component = cfg.get("_component_") if OmegaConf.is_dict(cfg) else None
    if component is None:
        raise UserError("dataset needs a _component_, such as rocm_ext.data.sft_dataset, or a list of them")
    try:
        as_it_is = too_long == "truncate" or cfg.get("packed")  # torchtune's packing needs the limit
        return instantiate(cfg, tokenizer if as_it_is else unlimited(tokenizer))
    except UserError:
        raise
    except Exception as error:  # whatever somebody else's component raises
        raise UserError(f"dataset component {component}: {one_line(error)}") from error


def origin_of(dataset: Any, index: int) -> str:
    """Where a row is from: ``file:line`` if its dataset knows, else the dataset's class and its index."""
    if isinstance(dataset, ConcatDataset):
        start = 0
        for part, end in zip(dataset.datasets, dataset.cumulative_sizes, strict=True):
            if index < end:
                return origin_of(part, index - start)
            start = end
    return dataset.origin(index) if hasattr(dataset, "origin") else f"{type(dataset).__name__} row {index}"


@dataclass(frozen=True)
class Rows:
    """Tokenised rows; a row is one sequence or a pack of several.

    Attributes:
        tokens: ``[s]`` int32 each.
        labels: ``[s]`` int32 each: the token itself, or -100.
        lengths: of the sequences in each row; they add up to ``s``.
        counts: ``rows`` read, ``truncated`` and kept, ``dropped_too_long``, ``dropped_without_labels``.
        columns: more about each token, by name (``old_logprobs``, ``advantages``, …): ``[s]`` float32 for each row.
    """

    tokens: list[np.ndarray]
    labels: list[np.ndarray]
    lengths: list[tuple[int, ...]]
    counts: dict[str, int]
    columns: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def split(self, fraction: float, seed: int) -> tuple["Rows", "Rows"]:
        """Two disjoint parts, the second with ``fraction`` of the rows (at least one), drawn by ``seed``.

        Raises:
            UserError: if nothing would be left in the first.
        """
        second = max(1, round(len(self) * fraction))
        if second >= len(self):
            raise UserError(f"validation_fraction {fraction} of {len(self)} rows leaves nothing to train on")
        drawn = set(np.random.default_rng(seed).permutation(len(self))[:second].tolist())
        return self._part(i for i in range(len(self)) if i not in drawn), self._part(sorted(drawn))

    def _part(self, indices: Iterable[int]) -> "Rows":
        chosen = list(indices)

        def take(parts: list) -> list:
            return [parts[i] for i in chosen]

        columns = {name: take(column) for name, column in self.columns.items()}
        return Rows(take(self.tokens), take(self.labels), take(self.lengths), self.counts, columns)

    def check_vocabulary(self, size: int) -> None:
        """Refuse token ids that a model with ``size`` embeddings does not have.

        Raises:
            UserError: naming the largest id.
        """
        check_vocabulary(max(int(tokens.max()) for tokens in self.tokens), size)

    def fingerprint(self) -> str:
        """sha256 over all rows in their order."""
        digest = hashlib.sha256()
        for tokens, labels, lengths in zip(self.tokens, self.labels, self.lengths, strict=True):
            digest.update(np.array([len(lengths), *lengths], dtype="<i8").tobytes())
            digest.update(tokens.astype("<i4").tobytes() + labels.astype("<i4").tobytes())
        for _, column in sorted(self.columns.items()):
            for values in column:
                digest.update(values.astype("<f4").tobytes())
        return digest.hexdigest()


def check_vocabulary(largest: int, size: int) -> None:
    """Refuse a tokenizer that made the id ``largest`` for a model with ``size`` embeddings.

    Raises:
        UserError: naming both.
    """
    if largest >= size:
        raise UserError(
            f"the tokenizer makes token id {largest}, but the model's vocabulary ends at {size - 1}: "
            "tokenizer and model do not belong together"
        )


def tokenize(dataset: Any, *, max_seq_len: int | None, too_long: str, progress: bool) -> Rows:
    """Every row of a torchtune-like map-style dataset, in memory. Rows without a label that the loss can use,
    also those that lost it to the cut, are dropped and counted.

    Args:
        dataset: its items have ``tokens`` and ``labels``; torchtune's ``PackedDataset`` too.
        max_seq_len: the longest row allowed; None for any.
        too_long: ``truncate`` (cut at the end), ``drop`` or ``error``.
        progress: show a bar.

    Raises:
        UserError: an unknown policy, a row that cannot be tokenised or is too long under ``error``, or no
            rows left.
    """
    if too_long not in TOO_LONG:
        raise UserError(f"too_long {too_long!r} is unknown{nearest(too_long, TOO_LONG)}")
    if not hasattr(dataset, "__len__"):
        raise UserError(f"{type(dataset).__name__} has no length; only map-style datasets can be trained on")
    counts = {"rows": len(dataset), "truncated": 0, "dropped_too_long": 0, "dropped_without_labels": 0}
    rows = Rows([], [], [], counts)
    foreign = not all(isinstance(part, ConversationDataset) for part in getattr(dataset, "datasets", [dataset]))
    for index in tqdm(range(len(dataset)), desc="tokenize", unit="row", disable=not progress):
        try:
            tokens, labels, lengths = _read_item(dataset[index])
        except UserError:  # has named its row
            raise
        except Exception as error:  # whatever somebody else's dataset raises
            raise UserError(f"{origin_of(dataset, index)}: {one_line(error)}") from error
        limit = len(tokens) if max_seq_len is None else max_seq_len
        cut = len(tokens) > limit
        if cut and too_long == "error":
            found = f"{origin_of(dataset, index)}: {len(tokens)} tokens, but max_seq_len is {limit}"
            raise UserError(f"{found}; raise it, or set too_long to truncate or drop")
        if cut and too_long == "drop":
            counts["dropped_too_long"] += 1
            continue
        if cut:
            tokens, labels = tokens[:limit], labels[:limit]
            lengths = tuple(int(n) for n in np.diff(np.minimum(np.cumsum(lengths), limit), prepend=0) if n)
        used = labels != IGNORE
        used[np.cumsum((0, *lengths[:-1]))[: len(used)]] = False  # nothing predicts a sequence's first token
        if not used.any():
            counts["dropped_without_labels"] += 1
            continue
        # torchtune's components cut by themselves, and mask the last token when they do
        counts["truncated"] += cut or bool(foreign and len(tokens) == max_seq_len and labels[-1] == IGNORE)
        rows.tokens.append(tokens)
        rows.labels.append(labels)
        rows.lengths.append(lengths)
    if not rows.tokens:
        raise UserError(
            f"0 of {counts['rows']} rows left: {counts['dropped_too_long']} over max_seq_len {max_seq_len} "
            f"were dropped, {counts['dropped_without_labels']} had nothing to train on within it"
        )
    if foreign and max_seq_len and all(labels[-1] == IGNORE for labels in rows.labels):
        log.warning(
            "the last token of every row is masked: torchtune's tokenizers do so to the stop token under max_seq_len, "
            "and the model will not learn to stop. rocm_ext.data.sft_dataset labels it; so does max_seq_len: null"
        )
    return rows


def _read_item(item: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """tokens ``[s]``, labels ``[s]`` and the lengths of the sequences in a dataset's item."""
    if item.get("encoder_input") is not None:
        raise ValueError("it has images (encoder_input); only text models are trained here")
    if not {"tokens", "labels"} <= item.keys():
        raise ValueError(f"an item needs tokens and labels, found {list(item)}")
    tokens, labels = (np.asarray(item[key], dtype=np.int32) for key in ("tokens", "labels"))
    if tokens.ndim != 1 or tokens.shape != labels.shape:
        raise ValueError(f"tokens {tokens.shape} and labels {labels.shape} must be flat and of one length")
    if item.get("seq_lens") is None:
        return tokens, labels, (len(tokens),)
    lengths = tuple(int(n) for n in item["seq_lens"] if n)
    if sum(lengths) != len(tokens):
        raise ValueError(f"seq_lens add up to {sum(lengths)}, but there are {len(tokens)} tokens")
    # PackedDataset counts its padding as one last sequence. Sequences do not see each other, so a last one
    # without labels can go, whatever is in it.
    end = len(tokens) - lengths[-1] if lengths else 0
    if (labels[end:] == IGNORE).all():
        tokens, labels, lengths = tokens[:end], labels[:end], lengths[:-1]
    return tokens, labels, lengths
