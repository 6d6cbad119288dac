"""A cache of tokenised rows in the user's cache folder, by everything that decides them."""

import hashlib
import json
import os
import shutil
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.files import replace_folder
from rocm_ext.base.heartbeat import beating
from rocm_ext.base.importing import COMPONENT
from rocm_ext.base.log import log, warn
from rocm_ext.base.types import Json
from rocm_ext.config.components import WEIGHT
from rocm_ext.data.loading import local_files
from rocm_ext.data.rows import Arrays, Ragged, Rows, concatenated
from rocm_ext.machine.bench_file import cache_folder

WORTH = 5.0  # seconds; rows that take less to read are not kept
MOST = 20 * 2**30  # bytes of all kept rows; the least recently used are deleted
_PATIENCE = 1800.0  # seconds that a process waits while another reads the rows
_KNOWN = ("rocm_ext.data.sft_dataset", "rocm_ext.data.preference_dataset")
_PACKAGES = (
    "torchtune",
    "tokenizers",
    "tiktoken",
    "sentencepiece",
    "jinja2",
    "datasets",
    "pandas",
    "pyarrow",
    "numpy",
)
# suffixes of files that may decide tokens
_TOKENIZERS = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_META = "rows.json"


def cached_rows(make_key: Callable[[], Any], read: Callable[[], Rows]) -> Rows:
    """Return ``read()``, or the rows it returned earlier for an equal key, and log their warnings.

    One process of a machine reads; the others wait for its rows. Damaged files are replaced.

    Args:
        make_key: returns everything that decides the rows, as JSON, or None if the rows cannot be kept.
        read: reads the rows.
    """
    key = make_key()
    root = cache_folder()
    if key is None or root is None:
        return read()
    text = json.dumps(key, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()
    folder = root / "rows" / digest[:32]
    rows = _load(folder)
    if rows is not None:
        return rows
    lock = FileLock(f"{folder}.lock", fallback_to_soft=False)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another process that tokenises the same rows")
        with suppress(Timeout, OSError), beating(), lock.acquire(timeout=_PATIENCE):
            pass
        return _load(folder) or read()
    except (OSError, NotImplementedError):
        # a folder of another user, or a file system without locks
        return read()
    try:
        rows = _load(folder)
        if rows is not None:
            return rows
        began = time.monotonic()
        rows = read()
        if time.monotonic() - began >= WORTH and make_key() == key:
            _save(folder, rows)
        return rows
    finally:
        lock.release()
        with suppress(OSError):
            Path(lock.lock_file).unlink()


def cache_key(cfg: DictConfig, dataset: Any, **policies: Any) -> Json | None:
    """Return everything that decides a data set's rows; None if rows cannot be kept.

    Files count by path, size and time. Rows of hub datasets, of folders, and of a user's components or tokenizer are
    not kept.

    Args:
        cfg: the config, for its tokenizer and chat template.
        dataset: a component of ``cfg``, or a list of components.
        policies: further arguments of :func:`rocm_ext.data.rows.tokenize` that decide rows or warnings.
    """
    components: Any = OmegaConf.to_container(dataset, resolve=True)
    if not isinstance(components, list):
        components = [components]
    tokenizer: Any = OmegaConf.to_container(cfg.tokenizer, resolve=True)
    if not _is_ours(tokenizer):
        return None
    for component in components:
        if not isinstance(component, dict) or component.get(COMPONENT) not in _KNOWN:
            return None
    chat = [cfg.chat_template, cfg.chat_template_args, str(cfg.chat_template_date)]
    code = sorted(Path(__file__).parent.glob("*.py"))
    try:
        sources: list[str] = []
        for component in components:
            component.pop(WEIGHT, None)  # it decides no row
            files = local_files(str(component.get("source")))
            if not files:
                return None
            sources += files
        return {
            "nodes": components,
            "files": [_stamp(Path(file)) for file in sources],
            "tokenizer": tokenizer,
            "chat": OmegaConf.to_container(OmegaConf.create(chat), resolve=True),
            "model": [_stamp(file) for file in _model_files(cfg, tokenizer)],
            "policies": policies,
            "code": [sys.version, *map(version, _PACKAGES), *map(_stamp, code)],
        }
    except (UserError, OSError):  # reading reports it
        return None


def _is_ours(tokenizer: Json) -> bool:
    """Return whether a tokenizer's code is torchtune's or this library's."""
    component = str(tokenizer.get(COMPONENT))
    if tokenizer.get("prompt_template") is not None:  # it may be the user's code
        return False
    return component.startswith(("torchtune.", "rocm_ext."))


def _model_files(cfg: DictConfig, tokenizer: Json) -> list[Path]:
    """Return the files of the model and of the config that may decide how text is tokenised."""
    paths = filter(_is_file, tokenizer.values())
    files = list(map(Path, paths))
    folders = {file.parent for file in files}
    checkpoint = cfg.checkpointer.get("checkpoint_dir")
    if checkpoint:
        folders.add(Path(checkpoint))
    for folder in sorted(folders):
        beside = sorted([*folder.glob("*"), *folder.glob("additional_chat_templates/*")])
        files += [path for path in beside if path.suffix in _TOKENIZERS and path.is_file()]
    template = os.path.expanduser(str(cfg.chat_template))
    if _is_file(template):
        files.append(Path(template))
    return files


def _is_file(value: Any) -> bool:
    return isinstance(value, str) and os.path.isfile(value)


def _stamp(path: Path) -> list[Any]:
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _checksum(file: Path) -> int:
    return zlib.crc32(np.memmap(file, mode="r").data)


def _load(folder: Path) -> Rows | None:
    """Return the rows in a folder, mapped into memory, and log their warnings; None if it has none."""
    if not folder.is_dir():
        return None
    try:
        rows = _mapped(folder)
    except (FileNotFoundError, EOFError, ValueError) as error:
        log.warning("%s is damaged (%s); the rows are read anew", folder, one_line(error))
        shutil.rmtree(folder, ignore_errors=True)
        return None
    except OSError as error:  # another user's
        log.warning("the tokenised rows cannot be read (%s), so the data is", one_line(error))
        return None
    with suppress(OSError):  # the folder may be another user's
        (folder / _META).touch()  # the last use
    log.info("the tokenised rows come from %s", folder)
    warn(rows.said)
    return rows


def _mapped(folder: Path) -> Rows:
    """Map the rows in a folder into memory; ValueError: a checksum is wrong."""
    checksum, text = (folder / _META).read_text().split("\n", 1)
    if zlib.crc32(text.encode()) != int(checksum):
        raise ValueError(f"checksum of {_META}")
    meta = json.loads(text)
    arrays: dict[str, np.ndarray] = {}
    for file, expected in meta["sums"].items():
        if _checksum(folder / file) != expected:
            raise ValueError(f"checksum of {file}")
        mapped = np.load(folder / file, mmap_mode="c")
        arrays[Path(file).stem] = np.asarray(mapped)
    bounds = arrays["bounds"]
    columns: dict[str, Arrays] = {}
    for name in meta["columns"]:
        columns[name] = Ragged(arrays[f"column {name}"], bounds)
    lengths = arrays["lengths"].tolist()
    ends = np.cumsum(arrays["sequences"]).tolist()
    of_rows = [tuple(lengths[start:end]) for start, end in pairwise([0, *ends])]
    rows = Rows(
        tokens=Ragged(arrays["tokens"], bounds),
        labels=Ragged(arrays["labels"], bounds),
        lengths=of_rows,
        counts=meta["counts"],
        columns=columns,
        said=meta["said"],
        numbers=arrays["numbers"],
        first=meta["first"],
        ends=meta["ends"],
    )
    rows.known[tuple(columns)] = meta["fingerprint"]
    return rows


def _save(folder: Path, rows: Rows) -> None:
    """Write rows into a folder of the cache, and delete the least recently used folders above :data:`MOST`."""
    try:
        with replace_folder(folder) as aside:
            _write(aside, rows)
        _delete_old(folder)
    except (OSError, UserError) as error:
        log.warning(
            "the tokenised rows are not kept for the next start: %s",
            one_line(error.__cause__ or error),
        )


def _write(folder: Path, rows: Rows) -> None:
    arrays = {
        "tokens": concatenated(rows.tokens),
        "labels": concatenated(rows.labels),
        "bounds": np.cumsum([0, *map(len, rows.tokens)]),
        "lengths": np.array(list(chain.from_iterable(rows.lengths))),
        "sequences": np.array(list(map(len, rows.lengths))),
        "numbers": np.array(rows.numbers),
    }
    for name, column in rows.columns.items():
        arrays[f"column {name}"] = concatenated(column)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    fingerprint = rows.fingerprint()
    rows.known[tuple(rows.columns)] = fingerprint
    meta = {
        "counts": rows.counts,
        "first": rows.first,
        "said": rows.said,
        "ends": list(rows.ends),
        "columns": list(rows.columns),
        "sums": {file.name: _checksum(file) for file in folder.iterdir()},
        "fingerprint": fingerprint,
    }
    text = json.dumps(meta)
    (folder / _META).write_text(f"{zlib.crc32(text.encode())}\n{text}")


def _delete_old(folder: Path) -> None:
    """Delete the least recently used folders beside ``folder`` until all take at most :data:`MOST` bytes."""

    def last_use(meta: Path) -> float:
        return meta.stat().st_mtime

    used = 0
    for meta in sorted(folder.parent.glob(f"*/{_META}"), key=last_use, reverse=True):
        old = meta.parent
        used += sum(file.stat().st_size for file in old.iterdir())
        if used > MOST and old != folder:
            shutil.rmtree(old, ignore_errors=True)
