"""Read conversations from files or the hub, and recognise their schema."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from datasets import ReadInstruction, load_dataset
from torch.utils.data import Dataset

from rocm_ext.data.render import render_conversation, string
from rocm_ext.errors import UserError, nearest, one_line

SCHEMAS = {  # the columns that a row needs; alpaca's `input` is optional
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
FIELDS = ("input", *(field for fields in SCHEMAS.values() for field in fields))
NEEDS = ", ".join(f"{name} ({' + '.join(fields)})" for name, fields in SCHEMAS.items())
LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


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
    """Open a dataset of conversations; a component for YAML.

    Schemas and the columns they need:

    - messages: ``messages``, a list of ``{role, content}``
    - sharegpt: ``conversations``, a list of ``{from, value}``
    - prompt_completion: ``prompt`` and ``completion``, strings or lists of messages
    - alpaca: ``instruction``, ``output`` and optionally ``input``. The user's turn is the instruction, a blank
      line and the input. The model's chat template formats it
    - text: ``text``. Every token is labelled, and the tokenizer's EOS ends the row

    Args:
        tokenizer: a torchtune model tokenizer.
        source: a .jsonl, .json, .parquet or .csv file or a glob of them; or any path that
            ``datasets.load_dataset`` takes: a folder, a hub name, or a loader (``json``) with ``data_files``.
        split: as in `datasets`, including ``train[:10%]``; a file has one split, ``train``.
        data_files, name: passed on to `datasets`; ``name`` is the configuration of a hub dataset.
        column_map: our column -> yours, ``{prompt: question, completion: answer}``.
        schema: one of the above, or ``auto``, which chooses the matching schema row by row.
        system_prompt: added to conversations without a system message. None adds nothing, although
            Qwen 2.5's Hugging Face template adds a default one.
        train_on_input: label every token instead of only the assistant's.

    Returns:
        A dataset that tokenises rows on access. A malformed row raises a ``UserError`` on access.

    Raises:
        UserError: the source cannot be read, or an argument does not match it.
    """
    if schema not in ("auto", *SCHEMAS):
        raise UserError(f"schema {schema!r} is unknown{nearest(schema, ['auto', *SCHEMAS])}; schemas: {NEEDS}")
    column_map = dict(column_map or {})
    for ours in column_map:
        if ours not in FIELDS:
            raise UserError(f"column_map maps our columns to yours; {ours!r} is not one of ours{nearest(ours, FIELDS)}")
    rows, origin = load_rows(source, split, data_files, name)
    columns = getattr(rows, "column_names", None) or list(dict.fromkeys(key for row in rows for key in row))
    if missing := [column for column in column_map.values() if column not in columns]:
        raise UserError(f"column_map names {missing}, but the columns of {source} are {columns}")
    return ConversationDataset(tokenizer, rows, origin, column_map, schema, system_prompt, train_on_input)


@dataclass(eq=False)
class ConversationDataset(Dataset):
    """Conversations that are tokenised on access: ``{"tokens": list[int], "labels": list[int]}``.

    Attributes:
        rows: the raw rows.
        origin: ``origin(i)`` names the source of row i: ``file:line`` in JSON lines, else its index, from 0.
        tokenizer, column_map, schema, system_prompt, train_on_input: see :func:`sft_dataset`.
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
                if not string(fields["text"], "text"):
                    raise UserError("text is empty")
                tokens = self.tokenizer.encode(fields["text"], add_bos=True, add_eos=True)
                labels = list(tokens)
            else:
                messages = self._messages(schema, fields)
                tokens, labels = render_conversation(self.tokenizer, messages, self.train_on_input)
        except (UserError, ValueError) as error:  # ValueError: the tokenizer cannot encode the text
            raise UserError(f"{self.origin(index)}: {one_line(error)}") from error
        return {"tokens": tokens, "labels": labels}

    def _fields(self, row: Mapping) -> tuple[str, dict[str, Any]]:
        """Return the schema that matches a row, and the row's values under our column names.

        Raises:
            UserError: no schema matches, or several.
        """
        # Arrow fills gaps with None.
        present = {key: value for key, value in row.items() if value is not None}
        fields = {key: value for key, value in present.items() if key not in self.column_map}
        fields |= {ours: present[yours] for ours, yours in self.column_map.items() if yours in present}
        names = SCHEMAS if self.schema == "auto" else [self.schema]
        fits = [name for name in names if fields.keys() >= set(SCHEMAS[name])]
        if len(fits) > 1:  # prefer the schema whose columns the user mapped
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
            return value if chat else [{"role": role, "content": string(value, column)}]

        if schema == "prompt_completion":
            messages = turns("prompt", "user") + turns("completion", "assistant")
        elif schema == "alpaca":
            messages = turns("instruction", "user") + turns("output", "assistant")
            if fields.get("input"):
                messages[0]["content"] += "\n\n" + string(fields["input"], "input")
        else:
            messages = fields[SCHEMAS[schema][0]]
        if self.system_prompt is None or not isinstance(messages, list):
            return messages
        if any(isinstance(m, Mapping) and "system" in (m.get("role"), m.get("from")) for m in messages):
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]


def load_rows(source: str, split: str, data_files: Any, name: str | None) -> tuple[Any, Callable[[int], str]]:
    """Read the rows of a source.

    Args:
        source, split, data_files, name: as for :func:`sft_dataset`.

    Returns:
        The rows, and a function that names the origin of row i: ``file:line`` in JSON lines, else its index,
        from 0.

    Raises:
        UserError: the source does not exist or cannot be read, or the split has no rows.
    """
    files = _local_files(source)
    kinds = {LOADERS.get(Path(file).suffix) for file in files}
    if len(kinds) > 1 or None in kinds:
        raise UserError(f"{source}: expected {', '.join(LOADERS)} files, all of one kind")
    if files and (data_files is not None or name is not None):
        raise UserError(f"source {source} is a file: data_files and name do not apply to it")
    if kinds == {"json"}:
        # `datasets` gives every row the keys of all rows, refuses columns whose type varies, and does not report
        # which line is malformed. So this module reads JSON itself.
        rows, origins = _read_json(files, split)

        def origin(index: int) -> str:
            return origins[index]

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
            raise UserError(f"{source}: cannot load split {split!r}: {one_line(error)}{hint}") from error

        def origin(index: int) -> str:
            return f"{source}[{split}] row {index}"

    if len(rows) == 0:
        raise UserError(f"{source} has no rows in split {split!r}")
    return rows, origin


def _local_files(source: str) -> list[str]:
    """Return the files that a path or a glob names; [] for a folder, a hub name or a loader's name.

    Raises:
        UserError: ``source`` looks like a path, but nothing exists there.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return [str(path)]
    files = sorted(glob(str(path), recursive=True)) if has_magic(source) else []
    path_like = path.suffix in LOADERS or has_magic(source) or source[:1] in "./~" or source.count("/") > 1
    if path_like and not files and not path.is_dir():
        raise UserError(f"{source}: no such file or folder (looked in {Path.cwd()})")
    return files


def _read_json(files: list[str], split: str) -> tuple[list[dict], list[str]]:
    """Read a split's rows and their origins from JSON lines or from a .json file with one list.

    Raises:
        UserError: a file cannot be read, a row is malformed, or ``split`` is invalid.
    """
    rows: list[tuple[Any, str]] = []
    for file in files:
        origin = file
        try:
            text = Path(file).read_text(encoding="utf-8-sig")
            if Path(file).suffix == ".json" and text.lstrip().startswith("["):
                rows += [(row, f"{file} row {index}") for index, row in enumerate(json.loads(text))]
                continue
            for number, line in enumerate(text.split("\n"), 1):  # splitlines also splits at U+2028
                origin = f"{file}:{number}"
                if line.strip():
                    rows.append((json.loads(line), origin))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: cannot read it as UTF-8 text: {one_line(error)}") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{origin}: malformed JSON: {error}") from error
    for row, origin in rows:
        if not isinstance(row, dict):
            raise UserError(f"{origin}: a row must be a JSON object, found {type(row).__name__}")
    try:  # train[:100] and train[10%:] have the same meaning as in `datasets`
        parts = ReadInstruction.from_spec(split).to_absolute({"train": len(rows)})
    except (ValueError, AssertionError) as error:
        raise UserError(f"split {split!r}: {one_line(error)}; a file has one split, train") from error
    rows = [pair for part in parts for pair in rows[part.from_ : part.to]]
    return [row for row, _ in rows], [origin for _, origin in rows]
