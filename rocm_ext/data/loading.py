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

LOADERS = {
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".ndjson": "json",
}
SAVED = ("dataset_dict.json", "state.json")  # what save_to_disk writes into a folder
# keys of calls and schemas, see rocm_ext.data.dialects
_NULLABLE = ("arguments", "default", "const")
_SHOWN_REASONS, _SHOWN_ORIGINS = 10, 5  # the most that a message about bad rows has

Origin = Callable[[int], str]  # a row's number -> its origin


def open_source(
    source: str,
    split: str,
    data_files: Any,
    name: str | None,
    column_map: Mapping[str, str] | None,
    fields: Collection[str] | None = None,
) -> tuple[Any, Origin, dict[str, str]]:
    """Read the rows of a source; the arguments are those of :func:`rocm_ext.data.sft_dataset`.

    ``fields`` are the names of our columns; without them, any name may be mapped.

    Returns:
        The rows; a function from a row's index to its origin: ``file:line`` in JSON lines, else the index, from 0; and
        the column map.

    Raises:
        UserError: the source does not exist, cannot be read or lacks a mapped column, or the split has no rows.
    """
    if column_map is None:
        column_map = {}
    if not isinstance(column_map, Mapping) or not _has_texts(column_map):
        raise UserError(
            f"column_map is {column_map!r}; expected our column -> yours, {{prompt: question}}"
        )
    for ours in column_map:
        if fields is not None and ours not in fields:
            raise UserError(
                f"column_map maps our columns to yours; {ours!r} is not one of ours{nearest(ours, fields)}"
            )
    rows, origin = _load_rows(source, split, data_files, name)
    columns = _columns(rows, column_map.values())
    missing = [column for column in column_map.values() if column not in columns]
    if missing:
        raise UserError(f"column_map names {missing}, but the columns of {source} are {columns}")
    return rows, origin, dict(column_map)


def _has_texts(column_map: Mapping[Any, Any]) -> bool:
    names = [*column_map, *column_map.values()]
    return all(isinstance(name, str) for name in names)


def _columns(rows: Any, wanted: Collection[str]) -> list[str]:
    """Return the names of columns; of JSON rows, those of the first rows, until they have the ``wanted`` ones."""
    named = getattr(rows, "column_names", None)
    if named:
        return list(named)
    columns: Json = {}
    for index in range(len(rows)):
        if columns.keys() >= set(wanted):
            break
        with suppress(ValueError):
            columns |= row_at(rows, index)
    return list(columns)


def _load_rows(source: str, split: str, data_files: Any, name: str | None) -> tuple[Any, Origin]:
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
    rows: Any
    if kinds == {"json"}:
        # `datasets` gives every row the keys of all rows, refuses columns whose type varies, and does not report
        # which line is malformed. So this module reads JSON itself.
        rows, origins = _read_json(files, split)
        origin: Origin = origins.__getitem__
    else:
        hint = ""
        if not (files or folder.is_dir() or source in LOADERS.values()):
            hint = (
                ". No file or folder has this name; if it is a hub dataset and this machine is offline, "
                f"run `hf download --repo-type dataset {source} --local-dir DIR` and set source: DIR"
            )
        with explain_errors(f"{source}: cannot load split {split!r}", hint):
            if saved:
                rows = _saved(folder, split)
            elif files:
                (kind_of_files,) = kinds
                rows = _load_files(str(kind_of_files), files, split)
            else:
                path = str(folder) if folder.is_dir() else source
                rows = _load(path, name, data_files, split)
        origin = partial("{}[{}] row {}".format, source, split)
    if len(rows) == 0:
        raise UserError(f"{source} has no rows in split {split!r}")
    return rows, origin


def _suffix(file: str | Path) -> str:
    return Path(str(file).removesuffix(".gz")).suffix


def _open(file: str) -> Any:
    """Open a text file, perhaps a compressed one, to read it."""
    opener = gzip.open if file.endswith(".gz") else open
    return opener(file, "rt", encoding="utf-8-sig")


def _load_files(kind: str, files: list[str], split: str) -> Any:
    """Read files with `datasets`; cells of a table are text."""
    from datasets import load_dataset

    options = _table(files[0]) if kind == "csv" else {}
    return load_dataset(kind, data_files=files, split=split, **options)


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


def _load(path: str, name: str | None, files: Any, split: str) -> Any:
    """Read a folder, or a dataset of the hub, with `datasets`; if it is CSV, read it again with text cells."""
    from datasets import load_dataset

    rows = load_dataset(path, name, data_files=files, split=split)
    if rows.info.builder_name != "csv":
        return rows
    return load_dataset(path, name, data_files=files, split=split, **_text_cells(rows.column_names))


def _saved(folder: Path, split: str) -> Any:
    """Read what ``save_to_disk`` wrote: a set of splits, or rows that are the split ``train``."""
    from datasets import concatenate_datasets, load_from_disk

    saved = load_from_disk(str(folder))
    splits = saved if isinstance(saved, dict) else {"train": saved}
    sizes = {name: len(rows) for name, rows in splits.items()}
    parts = []
    for part in _parts(split, sizes):
        rows = splits[part.splitname]
        parts.append(rows.select(range(part.from_, part.to)))
    return concatenate_datasets(parts)


def _parts(split: str, sizes: dict[str, int]) -> Any:
    """Return the parts of a split; ``train[:100]`` and ``train[10%:]`` have the same meaning as in `datasets`."""
    from datasets import ReadInstruction

    try:
        return ReadInstruction.from_spec(split).to_absolute(sizes)
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"split {split!r}: {one_line(error)}; the splits are {', '.join(sizes)}"
        ) from error


def row_at(rows: Any, index: int) -> Json:
    """Return a row of :func:`open_source`; ValueError: it is no JSON object.

    Arrow gives every object the keys of all objects and fills the gaps with None. This removes them, except in calls
    and schemas, see :mod:`rocm_ext.data.dialects`. JSON rows stay as they are.
    """
    row = rows[index]
    if not isinstance(rows, list):
        return _without_nulls(row)
    if isinstance(row, bytes):
        row = parsed(row.decode(), "malformed JSON")
    return expect(row, dict, "a row must be a JSON object")


def about_bad_rows(bad: Sequence[str], count: int, cure: str) -> str:
    """Return a message about the bad ones of ``count`` rows, and ``cure``.

    ``bad`` are messages ``ORIGIN: REASON``. The result has up to ten reasons with their first rows.
    """
    by_reason: dict[str, list[str]] = {}
    for message in bad:
        origin, _, reason = message.partition(": ")
        by_reason.setdefault(reason, []).append(origin)
    parts = []
    for reason, origins in by_reason.items():
        shown = ", ".join(origins[:_SHOWN_ORIGINS])
        more = len(origins) - _SHOWN_ORIGINS
        if more > 0:
            shown += f" and {more:,} more"
        parts.append(f"{shown}: {reason}")
    if len(parts) > _SHOWN_REASONS:
        parts[_SHOWN_REASONS:] = ["…"]
    shown = " | ".join(parts)
    if len(bad) == 1:
        return f"{shown}; {cure}"
    return f"{len(bad):,} of {count:,} rows are bad: {shown}; {cure}"


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, part in value.items():
        if key in _NULLABLE:
            kept[key] = part
        elif part is not None:
            kept[key] = _without_nulls(part)
    return kept


def local_files(source: str) -> list[str]:
    """Return the files that a path or a glob names; [] for a folder, a hub name or a loader's name.

    Raises a UserError if ``source`` looks like a path, but nothing exists there.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return [str(path)]
    magic = has_magic(source)
    files = sorted(glob(str(path), recursive=True)) if magic else []
    path_like = source[:1] in "./~" or source.count("/") > 1 or _suffix(path) in LOADERS
    if (magic or path_like) and not files and not path.is_dir():
        raise UserError(f"{source}: no such file or folder (looked in {Path.cwd()})")
    return files


def _read_json(files: list[str], split: str) -> tuple[list[Any], list[str]]:
    """Read a split's rows and their origins from JSON lines, which :func:`row_at` parses, or from .json files."""
    rows = []
    origins = []
    for file in files:
        origin = file
        try:
            with _open(file) as opened:
                text = opened.read()
            listed = _listed(text) if _suffix(file) == ".json" else None
            if listed is not None:
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
    chosen: list[int] = []
    for part in _parts(split, {"train": len(rows)}):
        chosen += range(part.from_, part.to)
    return [rows[i] for i in chosen], [origins[i] for i in chosen]


def _listed(text: str) -> list[Any] | None:
    """Return the rows of a .json file: its list, also under ``data``, or its only object.

    A file with a row in each line, or a malformed one, gives None.
    """
    if text.lstrip().startswith("["):
        return list(json.loads(text))
    try:
        content = json.loads(text)
    except ValueError:
        return None
    if isinstance(content, dict) and isinstance(content.get("data"), list):
        return content["data"]
    return [content] if "\n" in text.strip() else None
