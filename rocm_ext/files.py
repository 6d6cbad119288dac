"""Files and folders that are whole or absent: written aside, flushed to disk, renamed into place."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from rocm_ext.errors import UserError

_FULL = (
    "no space left to write {}: the disk, a quota or a size limit is full. "
    "What was there before is untouched; free some space and go on with resume_from_checkpoint=True"
)


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """A new folder to write into, which becomes ``path`` at the end, or vanishes on an exception.

    An earlier ``path`` is there until then, whole.
    """
    aside = path.with_name(f".{path.name}.tmp")
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(aside, ignore_errors=True)  # left by a kill
    try:
        with disk_errors(path):
            aside.mkdir(parents=True)
            yield aside
            for file in aside.rglob("*"):
                if file.is_file():
                    _sync(file)
            shutil.rmtree(old, ignore_errors=True)
            if path.exists():
                path.rename(old)
            aside.rename(path)
            _sync(path.parent)
            shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def remove_folder(path: Path) -> None:
    """Remove ``path``, in one rename as far as anybody who looks for it can tell."""
    aside = path.with_name(f".{path.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, which has its old content until the new one is whole."""
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with disk_errors(path):
            aside.write_text(text)
            _sync(aside)
            aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or read-only disk under ``path`` into one line for the user."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(_FULL.format(path)) from error
        raise UserError(f"cannot write {path}: {error.strerror or error}; choose another output_dir") from error
    except (RuntimeError, SafetensorError) as error:  # torch.save and safetensors wrap the system's error
        signs = ("No space left", "File too large", "unexpected pos", "file write failed")
        if any(sign in str(error) for sign in signs):
            raise UserError(_FULL.format(path)) from error
        raise


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)  # there, fsync wants to write
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
