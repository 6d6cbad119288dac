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
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.files import replace_folder
from rocm_ext.base.importing import COMPONENT
from rocm_ext.base.log import log, warn
from rocm_ext.base.supervised import beating
from rocm_ext.base.types import Json
from rocm_ext.config.components import WEIGHT
from rocm_ext.data.loading import local_files
from rocm_ext.data.rows import Arrays, Ragged, Rows, flat
from rocm_ext.machine.bench_file import cache_folder

WORTH = 5.0  # seconds; rows that take less to read are not kept
MOST = 20 * 2**30  # bytes of all kept rows; the least recently used are deleted
_PATIENCE = 1800.0  # seconds that a process waits while another reads the rows
_KNOWN = ("rocm_ext.data.sft_dataset", "rocm_ext.data.preference_dataset")
_PACKAGES = ("torchtune", "tokenizers", "tiktoken", "sentencepiece", "jinja2", "datasets", "pandas", "pyarrow", "numpy")
_TOKENIZERS = (".json", ".jinja", ".model", ".txt", ".tiktoken")  # suffixes of files that may decide tokens
_META = "rows.json"


def kept_rows(made_by: Callable[[], Any], read: Callable[[], Rows]) -> Rows:
    """Return ``read()``, or the rows it returned earlier for an equal ``made_by()``, and log their warnings.

    One process of a machine reads; the others wait for its rows. Damaged files are replaced.

    Args:
        made_by: returns everything that decides the rows, as JSON; None: the rows cannot be kept.
        read: reads the rows.
    """
    key, root = made_by(), cache_folder()
    if key is None or root is None:
        return read()
    folder = root / "rows" / hashlib.sha256(json.dumps(key, default=str).encode()).hexdigest()[:32]
    if (rows := _open(folder)) is not None:
        return rows
    lock = FileLock(f"{folder}.lock", fallback_to_soft=False)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another process that tokenises the same rows")
        with suppress(Timeout, OSError), beating(), lock.acquire(timeout=_PATIENCE):
            pass
        return _open(folder) or read()
    except (OSError, NotImplementedError):  # a folder of another user, or a file system without locks
        return read()
    try:
        if (rows := _open(folder)) is not None:
            return rows
        began = time.monotonic()
        rows = read()
        if time.monotonic() - began >= WORTH and made_by() == key:
            _keep(folder, rows)
        return rows
    finally:
        lock.release()
        with suppress(OSError):
            Path(lock.lock_file).unlink()


def what_makes(cfg: DictConfig, dataset: Any, **policies: Any) -> Json | None:
    """Return ``made_by`` of :func:`kept_rows` for a dataset of a config.

    Files count by path, size and time. Rows of hub datasets, of folders, and of a user's components or tokenizer are
    not kept.

    Args:
        cfg: the config, for its tokenizer and chat template.
        dataset: a component of ``cfg``, or a list of components.
        policies: further arguments of :func:`rocm_ext.data.rows.tokenize` that decide rows or warnings.
    """
    parts: Any = OmegaConf.to_container(dataset, resolve=True)
    parts = parts if isinstance(parts, list) else [parts]
    tokenizer: Any = OmegaConf.to_container(cfg.tokenizer, resolve=True)
    foreign = not str(tokenizer.get(COMPONENT)).startswith(("torchtune.", "rocm_ext."))
    foreign = foreign or tokenizer.get("prompt_template") is not None  # it may be the user's code
    if foreign or not all(isinstance(part, dict) and part.get(COMPONENT) in _KNOWN for part in parts):
        return None
    parts = [{key: value for key, value in part.items() if key != WEIGHT} for part in parts]  # it decides no row
    chat = [cfg.chat_template, cfg.chat_template_args, str(cfg.chat_template_date)]
    template, folder = os.path.expanduser(str(cfg.chat_template)), cfg.checkpointer.get("checkpoint_dir")
    named = [Path(value) for value in tokenizer.values() if isinstance(value, str) and os.path.isfile(value)]
    try:
        sources = [local_files(str(part.get("source"))) for part in parts]
        if not all(sources):
            return None
        files = [_stamp(Path(file)) for files in sources for file in files]
        folders = {path.parent for path in named} | ({Path(folder)} if folder else set())
        beside = (
            path
            for folder in sorted(folders)
            for path in sorted([*folder.glob("*"), *folder.glob("additional_chat_templates/*")])
            if path.suffix in _TOKENIZERS and path.is_file()
        )
        made = [*named, *beside, *[Path(template)] * os.path.isfile(template)]
        code = [_stamp(path) for path in sorted(Path(__file__).parent.glob("*.py"))]
        return {
            "nodes": parts,
            "files": files,
            "tokenizer": tokenizer,
            "chat": OmegaConf.to_container(OmegaConf.create(chat), resolve=True),
            "model": list(map(_stamp, made)),
            "policies": policies,
            "code": [sys.version, *map(version, _PACKAGES), *code],
        }
    except (UserError, OSError):  # reading reports it
        return None


def _stamp(path: Path) -> list[Any]:
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _sum(file: Path) -> int:
    return zlib.crc32(np.memmap(file, mode="r").data)


def _open(folder: Path) -> Rows | None:
    """Return the rows in a folder, mapped into memory, and log their warnings; None: it has none."""
    try:
        if not folder.is_dir():
            return None
        number, text = (folder / _META).read_text().split("\n", 1)
        meta = json.loads(text)
        sums = {file: (_sum(folder / file), expected) for file, expected in meta["sums"].items()}
        sums[_META] = zlib.crc32(text.encode()), int(number)
        if wrong := [file for file, (actual, expected) in sums.items() if actual != expected]:
            raise ValueError(f"checksum of {wrong[0]}")
        arrays = {Path(file).stem: np.asarray(np.load(folder / file, mmap_mode="c")) for file in meta["sums"]}
        lengths, ends = arrays["lengths"].tolist(), np.cumsum(arrays["sequences"]).tolist()
        per_row = [tuple(lengths[start:end]) for start, end in pairwise([0, *ends])]
        bounds = arrays["bounds"]
        columns: dict[str, Arrays] = {name: Ragged(arrays[f"column {name}"], bounds) for name in meta["columns"]}
        tokens, labels = (Ragged(arrays[name], bounds) for name in ("tokens", "labels"))
        facts = meta["counts"], columns, meta["said"], arrays["numbers"], meta["first"], meta["ends"]
        rows = Rows(tokens, labels, per_row, *facts)
        rows.known[tuple(columns)] = meta["fingerprint"]
    except (FileNotFoundError, EOFError, ValueError) as error:
        log.warning("%s is damaged (%s); the rows are read anew", folder, one_line(error))
        shutil.rmtree(folder, ignore_errors=True)
        return None
    except OSError as error:  # another user's
        log.warning("the tokenised rows cannot be read (%s), so the data is", one_line(error))
        return None
    with suppress(OSError):  # of another user
        (folder / _META).touch()  # the last use
    log.info("the tokenised rows come from %s", folder)
    warn(rows.said)
    return rows


def _keep(folder: Path, rows: Rows) -> None:
    arrays = {
        "tokens": flat(rows.tokens),
        "labels": flat(rows.labels),
        "bounds": np.cumsum([0, *map(len, rows.tokens)]),
        "lengths": np.array([n for row in rows.lengths for n in row]),
        "sequences": np.array([len(row) for row in rows.lengths]),
        "numbers": np.array(rows.numbers),
        **{f"column {name}": flat(column) for name, column in rows.columns.items()},
    }
    try:
        with replace_folder(folder) as aside:
            for name, array in arrays.items():
                np.save(aside / f"{name}.npy", array)
            sums = {file.name: _sum(file) for file in aside.iterdir()}
            facts = {"counts": rows.counts, "first": rows.first, "said": rows.said, "ends": list(rows.ends)}
            meta = {**facts, "sums": sums, "columns": list(rows.columns)}
            rows.known[tuple(rows.columns)] = rows.fingerprint()
            text = json.dumps({**meta, "fingerprint": rows.fingerprint()})
            (aside / _META).write_text(f"{zlib.crc32(text.encode())}\n{text}")
        used = 0
        for old in sorted(folder.parent.glob(f"*/{_META}"), key=lambda path: path.stat().st_mtime, reverse=True):
            used += sum(file.stat().st_size for file in old.parent.iterdir())
            if used > MOST and old.parent != folder:
                shutil.rmtree(old.parent, ignore_errors=True)
    except (OSError, UserError) as error:
        log.warning("the tokenised rows are not kept for the next start: %s", one_line(error.__cause__ or error))
