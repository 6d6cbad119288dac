"""Read rows from files, folders and the hub, without importing torch.

`datasets` and pandas take half a second, which JSON lines do not need, so functions import them where they use them.
"""

import gzip
import json
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from rocm_ext.base.errors import UserError, explain_errors, nearest, one_line
from rocm_ext.base.types import Json
from rocm_ext.data.dialects import expect, parsed

LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".ndjson": "json"}
SAVED = ("dataset_dict.json", "state.json")  # what save_to_disk writes into a folder


def open_source(
    source: str,
    split: str,
    data_files: Any,
    name: str | None,
    column_map: Mapping[str, str] | None,
    fields: Collection[str] | None = None,
) -> tuple[Any, Callable[[int], str], dict[str, str]]:
    """Read the rows of a source; the arguments are those of :func:`rocm_ext.data.sft_dataset`.

    ``fields`` are the names of our columns; None: any name.

    Returns:
        The rows; a function from a row's index to its origin: ``file:line`` in JSON lines, else the index, from 0; and
        the column map.

    Raises:
        UserError: the source does not exist, cannot be read or lacks a mapped column, or the split has no rows.
    """
    column_map = {} if column_map is None else column_map
    if not isinstance(column_map, Mapping) or not all(isinstance(x, str) for pair in column_map.items() for x in pair):
        raise UserError(f"column_map is {column_map!r}; expected our column -> yours, {{prompt: question}}")
    for ours in column_map:
        if fields is not None and ours not in fields:
            raise UserError(f"column_map maps our columns to yours; {ours!r} is not one of ours{nearest(ours, fields)}")
    rows, origin = _load_rows(source, split, data_files, name)
    named = getattr(rows, "column_names", None)
    columns, unread = dict.fromkeys(named or ()), iter(() if named else range(len(rows)))
    while not columns.keys() >= set(column_map.values()) and (index := next(unread, None)) is not None:
        with suppress(ValueError):
            columns |= dict.fromkeys(row_at(rows, index))
    if missing := [column for column in column_map.values() if column not in columns]:
        raise UserError(f"column_map names {missing}, but the columns of {source} are {list(columns)}")
    return rows, origin, dict(column_map)


def _load_rows(source: str, split: str, data_files: Any, name: str | None) -> tuple[Any, Callable[[int], str]]:
    files = local_files(source)
    kinds = {LOADERS.get(_suffix(file)) for file in files}
    if len(kinds) > 1 or None in kinds:
        raise UserError(
            f"{source}: expected {', '.join(LOADERS)} files, all of one kind, JSON and CSV also as .gz; write plain "
            'text as JSON lines, {"text": "…"}, one for each document'
        )
    folder = Path(source).expanduser()
    saved = any(os.path.isfile(folder / file) for file in SAVED)  # False where it may not be read
    if (files or saved) and (data_files is not None or name is not None):
        kind = "file" if files else "saved dataset"
        raise UserError(f"source {source} is a {kind}: data_files and name do not apply to it")
    if kinds == {"json"}:
        # `datasets` gives every row the keys of all rows, refuses columns whose type varies, and does not report
        # which line is malformed. So this module reads JSON itself.
        rows, origins = _read_json(files, split)
        origin: Callable[[int], str] = origins.__getitem__
    else:
        args = (*kinds, None) if files else (str(folder) if folder.is_dir() else source, name)
        hint = (
            ". No file or folder has this name; if it is a hub dataset and this machine is offline, "
            f"run `hf download --repo-type dataset {source} --local-dir DIR` and set source: DIR"
        )
        named = files or folder.is_dir() or source in LOADERS.values()
        with explain_errors(f"{source}: cannot load split {split!r}", "" if named else hint):
            if saved:
                rows = _saved(folder, split)
            elif "csv" in kinds:
                from datasets import load_dataset

                rows = load_dataset("csv", data_files=files, split=split, **_table(files[0]))
            else:
                rows = _load(args, files or data_files, split)
        origin = partial("{}[{}] row {}".format, source, split)
    if len(rows) == 0:
        raise UserError(f"{source} has no rows in split {split!r}")
    return rows, origin


def _suffix(file: str | Path) -> str:
    return Path(str(file).removesuffix(".gz")).suffix


def _open(file: str) -> Any:
    """Open a text file, perhaps a compressed one, to read it."""
    return (gzip.open if file.endswith(".gz") else open)(file, "rt", encoding="utf-8-sig")


def _table(file: str) -> dict[str, Any]:
    """Return options for `datasets` to read a table: its separator, and all cells as text."""
    from pandas import read_csv

    with _open(file) as lines:
        header = lines.readline()
        sep = "\t" if _suffix(file) == ".tsv" else max(",;\t", key=header.count)
        lines.seek(0)
        columns = read_csv(lines, sep=sep, nrows=0).columns
    return {"sep": sep, **_text_cells(columns)}


def _text_cells(columns: Iterable[str]) -> dict[str, Any]:
    """Return options for text cells; without them pandas reads NA as a gap and 007 as 7."""
    from datasets import Features, Value

    features = Features(dict.fromkeys(columns, Value("string")))
    return {"features": features, "na_values": [""], "keep_default_na": False}


def _load(args: Any, files: Any, split: str) -> Any:
    """Read rows with `datasets`; if they are CSV, read them again with text cells."""
    from datasets import load_dataset

    rows = load_dataset(*args, data_files=files, split=split)
    if rows.info.builder_name != "csv":
        return rows
    return load_dataset(*args, data_files=files, split=split, **_text_cells(rows.column_names))


def _saved(folder: Path, split: str) -> Any:
    """Read what ``save_to_disk`` wrote: a set of splits, or rows that are the split ``train``."""
    from datasets import concatenate_datasets, load_from_disk

    saved = load_from_disk(str(folder))
    splits = saved if isinstance(saved, dict) else {"train": saved}
    parts = _parts(split, {name: len(rows) for name, rows in splits.items()})
    return concatenate_datasets([splits[part.splitname].select(range(part.from_, part.to)) for part in parts])


def _parts(split: str, sizes: dict[str, int]) -> Any:
    """Return the parts of a split; ``train[:100]`` and ``train[10%:]`` have the same meaning as in `datasets`."""
    from datasets import ReadInstruction

    try:
        return ReadInstruction.from_spec(split).to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        raise UserError(f"split {split!r}: {one_line(error)}; the splits are {', '.join(sizes)}") from error


def row_at(rows: Any, index: int) -> Json:
    """Return a row of :func:`open_source`; ValueError: it is no JSON object.

    Arrow gives every object the keys of all objects and fills the gaps with None. This removes them, except in calls
    and schemas, see :mod:`rocm_ext.data.dialects`. JSON rows stay as they are.
    """
    if not isinstance(rows, list):
        return _without_nulls(rows[index])
    row = rows[index]
    row = parsed(row.decode(), "malformed JSON") if isinstance(row, bytes) else row
    return expect(row, dict, "a row must be a JSON object")


def about_bad_rows(bad: Sequence[str], count: int, cure: str) -> str:
    """Return a message about the bad ones of ``count`` rows, whose messages are ``ORIGIN: REASON``: up to ten
    reasons with their first rows, and ``cure``."""
    rows: dict[str, list[str]] = {}
    for message in bad:
        origin, _, reason = message.partition(": ")
        rows.setdefault(reason, []).append(origin)
    shown = " | ".join(
        f"{', '.join(those[:5])}{f' and {len(those) - 5:,} more' if len(those) > 5 else ''}: {reason}"
        for reason, those in list(rows.items())[:10]
    ) + (" | …" if len(rows) > 10 else "")
    return f"{shown}; {cure}" if len(bad) == 1 else f"{len(bad):,} of {count:,} rows are bad: {shown}; {cure}"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        kept = ("arguments", "default", "const")
        return {k: v if k in kept else _without_nulls(v) for k, v in value.items() if v is not None or k in kept}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def local_files(source: str) -> list[str]:
    """Return the files that a path or a glob names; [] for a folder, a hub name or a loader's name.

    Raises a UserError if ``source`` looks like a path, but nothing exists there.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return [str(path)]
    files = sorted(glob(str(path), recursive=True)) if has_magic(source) else []
    path_like = _suffix(path) in LOADERS or has_magic(source) or source[:1] in "./~" or source.count("/") > 1
    if path_like and not files and not path.is_dir():
        raise UserError(f"{source}: no such file or folder (looked in {Path.cwd()})")
    return files


def _read_json(files: list[str], split: str) -> tuple[list[dict], list[str]]:
    """Read a split's rows and their origins from JSON lines, which :func:`row_at` parses, or from .json files."""
    rows: list[Any] = []
    origins: list[str] = []
    for file in files:
        origin = file
        try:
            with _open(file) as opened:
                text = opened.read()
            if _suffix(file) == ".json" and (listed := _listed(text)) is not None:
                rows += listed
                origins += [f"{file} row {index}" for index in range(len(listed))]
                continue
            for number, line in enumerate(text.split("\n"), 1):  # splitlines also splits at U+2028
                origin = f"{file}:{number}"
                if line.strip():
                    rows.append(line.encode())
                    origins.append(origin)
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise UserError(f"{file}: cannot read it as UTF-8 text: {one_line(error)}") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{origin}: malformed JSON: {error}") from error
    if split == "train":
        return rows, origins
    parts = [slice(part.from_, part.to) for part in _parts(split, {"train": len(rows)})]
    return [row for part in parts for row in rows[part]], [origin for part in parts for origin in origins[part]]


def _listed(text: str) -> list[Any] | None:
    """Return the rows of a .json file: its list, also under ``data``, or its only object; None: its lines."""
    if text.lstrip().startswith("["):
        return list(json.loads(text))
    try:
        content = json.loads(text)
    except ValueError:
        return None
    data = content.get("data") if isinstance(content, dict) else None
    return data if isinstance(data, list) else [content] if "\n" in text.strip() else None
