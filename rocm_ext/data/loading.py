"""Rows from files, folders and the hub. Does not import torch."""

import json
from collections.abc import Callable
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from datasets import ReadInstruction, load_dataset

from rocm_ext.errors import UserError, one_line

LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def load_rows(source: str, split: str, data_files: Any, name: str | None) -> tuple[Any, Callable[[int], str]]:
    """The rows of a source and what tells the origin of row i: ``file:line`` in JSON lines, else its index, from 0.

    Args:
        source, split, data_files, name: as for :func:`rocm_ext.data.sft_dataset`.

    Raises:
        UserError: there is no such source, it cannot be read, or the split has no rows.
    """
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
            raise UserError(f"{file}: cannot be read as UTF-8 text: {one_line(error)}") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{origin}: malformed JSON: {error}") from error
    for row, origin in rows:
        if not isinstance(row, dict):
            raise UserError(f"{origin}: a row must be a JSON object, found {type(row).__name__}")
    try:  # train[:100], train[10%:] mean what they mean in `datasets`
        parts = ReadInstruction.from_spec(split).to_absolute({"train": len(rows)})
    except (ValueError, AssertionError) as error:
        raise UserError(f"split {split!r}: {one_line(error)}; a file is one split, train") from error
    rows = [pair for part in parts for pair in rows[part.from_ : part.to]]
    return [row for row, _ in rows], [origin for _, origin in rows]
