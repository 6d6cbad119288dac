"""Conversations in files or on the hub -> tokens and labels.

``render_prompt`` and ``render_conversation`` are the only places where messages become tokens, so that a row
that is trained on starts with exactly what the sampler would be given, and is labelled right behind it.

Labels are torchtune's: ``labels[t]`` is the token at ``t`` itself, or -100 where it bears no loss.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from glob import glob, has_magic
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ReadInstruction, load_dataset
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch.utils.data import ConcatDataset, Dataset
from torchtune.config import instantiate
from torchtune.data import Message
from tqdm import tqdm

from rocm_ext.errors import UserError

IGNORE = -100
SCHEMAS = {  # what a row needs; alpaca's `input` is optional
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
FIELDS = ("input", *(field for fields in SCHEMAS.values() for field in fields))
NEEDS = ", ".join(f"{name} ({' + '.join(fields)})" for name, fields in SCHEMAS.items())
ROLES = {role: role for role in ("system", "user", "assistant", "ipython")}
ROLES |= {"human": "user", "gpt": "assistant", "tool": "ipython"}
LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
TOO_LONG = ("truncate", "drop", "error")


# ---- messages -> tokens


def render_prompt(tokenizer: Any, messages: Sequence[Mapping]) -> list[int]:
    """The token ids ``[s]`` to sample from: the conversation so far and the header of the assistant's turn.

    Text that looks like a special token (``<|im_end|>``) becomes that token with torchtune's Qwen tokenizers,
    as in transformers, and stays text with the Llama 3 one. ``tokenizer.max_seq_len`` is not applied.

    Args:
        tokenizer: a torchtune model tokenizer.
        messages: ``{"role", "content"}`` each, or ShareGPT's ``{"from", "value"}``.

    Raises:
        UserError: a message is malformed.
    """
    conversation = [*_to_messages(messages), Message(role="assistant", content="")]
    tokens, mask = _render(tokenizer, conversation, unmasked=[len(conversation) - 1])
    start = mask.index(False) if False in mask else len(mask)
    return tokens[: start + _header_length(tokenizer)]


def render_conversation(
    tokenizer: Any, messages: Sequence[Mapping], train_on_input: bool = False
) -> tuple[list[int], list[int]]:
    """Tokens ``[s]`` and labels ``[s]`` of a conversation; arguments as in :func:`render_prompt`.

    Every assistant turn is labelled, but for those with ``weight: 0``: its content and end-of-turn token, not
    its header, which a generation prompt contains. Turns behind the last labelled one bear no loss and are
    left out. ``train_on_input`` labels every token instead.

    Raises:
        UserError: a message is malformed, or there is no assistant turn to train on.
    """
    conversation = _to_messages(messages)
    trained = [i for i, message in enumerate(conversation) if not message.masked]
    if not trained:
        raise UserError("no assistant turn to train on")
    conversation = conversation[: trained[-1] + 1]
    if train_on_input:
        tokens, _ = _render(tokenizer, conversation, unmasked=trained)
        return tokens, list(tokens)

    tokens, labels = [], []
    header, stops = _header_length(tokenizer), getattr(tokenizer, "stop_tokens", ())
    # A run of unmasked tokens is one turn, unless assistant turns follow each other: then unmask every other.
    adjacent = any(b - a == 1 for a, b in pairwise(trained))
    for group in (trained[::2], trained[1::2]) if adjacent else (trained,):
        tokens, mask = _render(tokenizer, conversation, unmasked=group)
        labels = labels or [IGNORE] * len(tokens)
        for masked, run in groupby(range(len(mask)), key=mask.__getitem__):
            own = [] if masked else list(run)[header:]
            # What the template puts behind the end of turn ("\n") is not the model's own.
            end = max((n for n, i in enumerate(own, 1) if tokens[i] in stops), default=len(own))
            for i in own[:end]:
                labels[i] = tokens[i]
    return tokens, labels


def _render(tokenizer: Any, messages: list[Message], unmasked: list[int]) -> tuple[list[int], list[bool]]:
    """Tokens and mask as the tokenizer renders them, with only the messages of these indexes unmasked."""
    messages = [Message(m.role, m.content, masked=i not in unmasked) for i, m in enumerate(messages)]
    out = _unlimited(tokenizer)({"messages": messages})
    return out["tokens"], out["mask"]


def _header_length(tokenizer: Any) -> int:
    """How many tokens of an assistant's turn come before its content: where an empty turn and another part.

    ``inference=True`` cannot tell: torchtune's Qwen, Mistral and Gemma tokenizers ignore it and end the empty
    turn, and Phi 4's does not take it.
    """

    def turn(content: str) -> list[int]:
        tokens, mask = _render(tokenizer, [Message("user", "a"), Message("assistant", content)], unmasked=[1])
        return [token for token, masked in zip(tokens, mask, strict=True) if not masked]

    empty, other = turn(""), turn("a")
    return next((i for i, (a, b) in enumerate(zip(empty, other, strict=False)) if a != b), len(empty))


def _unlimited(tokenizer: Any) -> Any:
    """A tokenizer without ``max_seq_len``: with it, it cuts rows without a word and ends them with an EOS,
    which teaches the model to stop in mid-sentence. `too_long` decides instead, and counts."""
    if getattr(tokenizer, "max_seq_len", None) is not None:
        tokenizer = copy.copy(tokenizer)
        tokenizer.max_seq_len = None
    return tokenizer


def _to_messages(turns: Any) -> list[Message]:
    """torchtune messages, ``masked`` where there is nothing to train on."""
    if not isinstance(turns, (list, tuple)):
        raise UserError(f"a conversation must be a list of messages, found {type(turns).__name__}")
    return [_to_message(turn, f"message {number}") for number, turn in enumerate(turns)]


def _to_message(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping):
        raise UserError(f"{where} must be an object with role and content, found {type(turn).__name__}")
    role, weight = turn.get("role", turn.get("from")), turn.get("weight")
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f"{where}: unknown role {role!r}; known: {', '.join(ROLES)}")
    if turn.get("tool_calls"):
        raise UserError(f"{where}: tool_calls are not rendered; write the call in content as the model does")
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):  # OpenAI's parts
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text":
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise UserError(f"{where}: content of type {kind!r}; only text is trained here, no images")
        content = "".join(_string(part.get("text"), f"{where}: text") for part in content)
    content = _string(content, f"{where}: content")
    if ROLES[role] == "assistant" and not content.strip():
        raise UserError(f"{where}: the assistant's content is empty")
    if weight not in (None, 0, 1):
        raise UserError(f"{where}: weight must be 0 or 1, found {weight!r}")
    return Message(ROLES[role], content, masked=ROLES[role] != "assistant" or weight == 0)


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{what} must be a string, found {type(value).__name__}")
    return value


# ---- rows of a source -> messages


def sft_dataset(
    tokenizer: Any,
    *,
    source: str,
    split: str = "train",
    data_files: Any = None,
    name: str | None = None,
    column_map: Mapping[str, str] | None = None,
    schema: str = "auto",
    system_prompt: str | None = None,
    train_on_input: bool = False,
) -> "ConversationDataset":
    """Rows of conversations, as a dataset component for YAML.

    Schemas, by the columns they need:

    - messages: ``messages``, a list of ``{role, content}``
    - sharegpt: ``conversations``, a list of ``{from, value}``
    - prompt_completion: ``prompt`` and ``completion``, strings or lists of messages
    - alpaca: ``instruction``, ``output`` and perhaps ``input``. The user's turn is the instruction, a blank
      line and the input; the model's own chat template does the rest
    - text: ``text``, all of it trained, with the tokenizer's EOS at its end

    Args:
        tokenizer: a torchtune model tokenizer.
        source: a .jsonl, .json, .parquet or .csv file or a glob of them; or what ``datasets.load_dataset``
            takes: a folder, a hub name, or a loader (``json``) with ``data_files``.
        split: as in `datasets`, ``train[:10%]`` too; a file is one split, ``train``.
        data_files, name: passed on to `datasets`; ``name`` is the configuration of a hub dataset.
        column_map: our column -> yours, ``{prompt: question, completion: answer}``.
        schema: one of the above, or ``auto``: the one that fits, row by row.
        system_prompt: put in front of conversations without a system message. None is added by default,
            although Qwen 2.5's Hugging Face template adds one.
        train_on_input: label every token, not only the assistant's.

    Raises:
        UserError: nothing to read, or arguments that do not fit it. Malformed rows raise on access.
    """
    if schema not in ("auto", *SCHEMAS):
        raise UserError(f"schema {schema!r} is unknown{_nearest(schema, SCHEMAS)}; known: auto, {NEEDS}")
    column_map = dict(column_map or {})
    for ours in column_map:
        if ours not in FIELDS:
            known = f"{_nearest(ours, FIELDS)}; known: {', '.join(FIELDS)}"
            raise UserError(f"column_map maps our columns to yours, and {ours!r} is none of ours{known}")
    rows, origin = _load(source, split, data_files, name)
    columns = getattr(rows, "column_names", None) or list(dict.fromkeys(key for row in rows for key in row))
    if missing := [column for column in column_map.values() if column not in columns]:
        raise UserError(f"column_map names {missing}, but the columns of {source} are {columns}")
    return ConversationDataset(tokenizer, rows, origin, column_map, schema, system_prompt, train_on_input)


@dataclass(eq=False)
class ConversationDataset(Dataset):
    """Rows tokenised on access: ``{"tokens": list[int], "labels": list[int]}``; see :func:`sft_dataset`.

    ``origin(i)`` tells where row i is from: ``file:line`` in JSON lines, else its index, from 0.
    """

    tokenizer: Any
    rows: Sequence[Mapping]
    origin: Callable[[int], str]
    column_map: dict[str, str]
    schema: str
    system_prompt: str | None
    train_on_input: bool

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self.rows[index]
        try:
            schema, fields = self._fields(row)
            if schema == "text":
                if not _string(fields["text"], "text"):
                    raise UserError("text is empty")
                tokens = self.tokenizer.encode(fields["text"], add_bos=True, add_eos=True)
                labels = list(tokens)
            else:
                messages = self._messages(schema, fields)
                tokens, labels = render_conversation(self.tokenizer, messages, self.train_on_input)
        except (UserError, ValueError) as error:  # ValueError: text that cannot be encoded
            raise UserError(f"{self.origin(index)}: {_one_line(error)}") from error
        return {"tokens": tokens, "labels": labels}

    def _fields(self, row: Mapping) -> tuple[str, dict[str, Any]]:
        """The schema that fits a row, and the row's values by our names for its columns."""
        # Arrow fills gaps with None.
        present = {key: value for key, value in row.items() if value is not None}
        fields = {key: value for key, value in present.items() if key not in self.column_map}
        fields |= {ours: present[yours] for ours, yours in self.column_map.items() if yours in present}
        names = SCHEMAS if self.schema == "auto" else [self.schema]
        fits = [name for name in names if fields.keys() >= set(SCHEMAS[name])]
        if len(fits) > 1:  # the columns that the user named tell which
            fits = [name for name in fits if self.column_map.keys() & set(SCHEMAS[name])] or fits
        if len(fits) > 1:
            raise UserError(f"the columns {list(row)} fit {' and '.join(fits)}: set schema to one of them")
        if not fits:
            what = "any schema" if self.schema == "auto" else f"schema {self.schema}"
            raise UserError(f"the columns {list(row)} do not fit {what}; use column_map. Known: {NEEDS}")
        return fits[0], fields

    def _messages(self, schema: str, fields: dict[str, Any]) -> Any:
        def turns(column: str, role: str) -> list:
            value = fields[column]
            chat = schema == "prompt_completion" and isinstance(value, list)
            return value if chat else [{"role": role, "content": _string(value, column)}]

        if schema == "prompt_completion":
            messages = turns("prompt", "user") + turns("completion", "assistant")
        elif schema == "alpaca":
            messages = turns("instruction", "user") + turns("output", "assistant")
            if fields.get("input"):
                messages[0]["content"] += "\n\n" + _string(fields["input"], "input")
        else:
            messages = fields[SCHEMAS[schema][0]]
        if self.system_prompt is None or not isinstance(messages, list):
            return messages
        if any(isinstance(m, Mapping) and "system" in (m.get("role"), m.get("from")) for m in messages):
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]


def _load(source: str, split: str, data_files: Any, name: str | None) -> tuple[Any, Callable[[int], str]]:
    """The rows of a source and what tells the origin of row i."""
    files = _local_files(source)
    kinds = {LOADERS.get(Path(file).suffix) for file in files}
    if len(kinds) > 1 or None in kinds:
        raise UserError(f"{source}: only {', '.join(LOADERS)} files are read, one kind at a time")
    if files and (data_files is not None or name is not None):
        raise UserError(f"source {source} is a file: data_files and name do not apply to it")
    if kinds == {"json"}:
        # Not through `datasets`: it gives every row the keys of all rows, refuses columns whose type varies,
        # and does not say which line is malformed.
        rows, origins = _read_json(files, split)
        origin = origins.__getitem__
    else:
        folder = Path(source).expanduser()
        args = (kinds.pop(), None) if files else (str(folder) if folder.is_dir() else source, name)
        try:
            rows = load_dataset(*args, data_files=files or data_files, split=split)
        except Exception as error:  # hub, network, file system and builder errors share no base class
            hint = ""
            if not files and not folder.is_dir() and source not in LOADERS.values():
                hint = (
                    ". No file or folder has this name; if it is a hub dataset and this machine is offline, "
                    f"run `hf download --repo-type dataset {source} --local-dir DIR` and set source: DIR"
                )
            raise UserError(f"{source}: cannot load split {split!r}: {_one_line(error)}{hint}") from error
        origin = lambda index: f"{source}[{split}] row {index}"  # noqa: E731
    if len(rows) == 0:
        raise UserError(f"{source} has no rows in split {split!r}")
    return rows, origin


def _local_files(source: str) -> list[str]:
    """The files that a path or a glob names; none for a folder, a hub name or a loader's name."""
    path = Path(source).expanduser()
    if path.is_file():
        return [str(path)]
    files = sorted(glob(str(path), recursive=True)) if has_magic(source) else []
    path_like = path.suffix in LOADERS or has_magic(source) or source[:1] in "./~" or source.count("/") > 1
    if path_like and not files and not path.is_dir():
        raise UserError(f"{source}: no such file or folder (looked in {Path.cwd()})")
    return files


def _read_json(files: list[str], split: str) -> tuple[list[dict], list[str]]:
    """The rows of a split and their origins, from JSON lines or a .json that holds one list."""
    rows: list[tuple[Any, str]] = []
    for file in files:
        origin = file
        try:
            text = Path(file).read_text(encoding="utf-8-sig")
            if Path(file).suffix == ".json" and text.lstrip().startswith("["):
                rows += [(row, f"{file} row {index}") for index, row in enumerate(json.loads(text))]
                continue
            for number, line in enumerate(text.split("\n"), 1):  # splitlines would split at U+2028 too
                origin = f"{file}:{number}"
                if line.strip():
                    rows.append((json.loads(line), origin))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: cannot be read as UTF-8 text: {_one_line(error)}") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{origin}: malformed JSON: {error}") from error
    for row, origin in rows:
        if not isinstance(row, dict):
            raise UserError(f"{origin}: a row must be a JSON object, found {type(row).__name__}")
    try:  # train[:100], train[10%:] mean what they mean in `datasets`
        parts = ReadInstruction.from_spec(split).to_absolute({"train": len(rows)})
    except (ValueError, AssertionError) as error:
        raise UserError(f"split {split!r}: {_one_line(error)}; a file is one split, train") from error
    rows = [pair for part in parts for pair in rows[part.from_ : part.to]]
    return [row for row, _ in rows], [origin for _, origin in rows]


def _nearest(name: str, options: Collection[str]) -> str:
    close = get_close_matches(name, list(options), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if type(error) in (UserError, ValueError) else f"{type(error).__name__}: {text}"


# ---- datasets -> rows in memory


def open_dataset(cfg: DictConfig | ListConfig, tokenizer: Any) -> Dataset:
    """The dataset that a config node names with ``_component_``, or several joined from a list of nodes.

    Raises:
        UserError: there is no such component, or it fails on its arguments.
    """
    if OmegaConf.is_list(cfg) and cfg:
        return ConcatDataset([open_dataset(node, tokenizer) for node in cfg])
    component = cfg.get("_component_") if OmegaConf.is_dict(cfg) else None
    if component is None:
        raise UserError("dataset needs a _component_, such as rocm_ext.data.sft_dataset, or a list of them")
    try:
        # torchtune's packing needs the limit; anything else is cut in `tokenize`, where it is counted.
        return instantiate(cfg, tokenizer if cfg.get("packed") else _unlimited(tokenizer))
    except UserError:
        raise
    except Exception as error:  # whatever somebody else's component raises
        raise UserError(f"dataset component {component}: {_one_line(error)}") from error


def origin_of(dataset: Dataset, index: int) -> str:
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
    """

    tokens: list[np.ndarray]
    labels: list[np.ndarray]
    lengths: list[tuple[int, ...]]
    counts: dict[str, int]

    def __len__(self) -> int:
        return len(self.tokens)

    def fingerprint(self) -> str:
        """sha256 over all rows in their order."""
        digest = hashlib.sha256()
        for tokens, labels, lengths in zip(self.tokens, self.labels, self.lengths, strict=True):
            digest.update(np.array([len(lengths), *lengths], dtype="<i8").tobytes())
            digest.update(tokens.astype("<i4").tobytes() + labels.astype("<i4").tobytes())
        return digest.hexdigest()


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
        known = f"{_nearest(too_long, TOO_LONG)}; known: {', '.join(TOO_LONG)}"
        raise UserError(f"too_long {too_long!r} is unknown{known}")
    if not hasattr(dataset, "__len__"):
        raise UserError(f"{type(dataset).__name__} has no length; only map-style datasets can be trained on")
    counts = {"rows": len(dataset), "truncated": 0, "dropped_too_long": 0, "dropped_without_labels": 0}
    rows = Rows([], [], [], counts)
    for index in tqdm(range(len(dataset)), desc="tokenize", unit="row", disable=not progress):
        try:
            tokens, labels, lengths = _read_item(dataset[index])
        except UserError:  # has named its row
            raise
        except Exception as error:  # whatever somebody else's dataset raises
            raise UserError(f"{origin_of(dataset, index)}: {_one_line(error)}") from error
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
        counts["truncated"] += cut
        rows.tokens.append(tokens)
        rows.labels.append(labels)
        rows.lengths.append(lengths)
    if not rows.tokens:
        raise UserError(
            f"0 of {counts['rows']} rows left: {counts['dropped_too_long']} over max_seq_len {max_seq_len} "
            f"were dropped, {counts['dropped_without_labels']} had nothing to train on within it"
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
