"""Files and folders that are complete or absent, and JSON lines.

A new version is written under a temporary name, flushed to disk and renamed.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from rocm_ext.base.errors import UserError
from rocm_ext.base.types import Json

_FULL = (
    "no space left to write {}: the disk is full, or a quota or size limit is reached. "
    "Earlier files are untouched; free some space and try again (a run continues with resume_from_checkpoint=True)"
)


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder that becomes ``path`` at the end; an exception removes it.

    Until then an earlier ``path`` stays unchanged. The files get the umask's mode, because safetensors writes files for
    the owner only, and a copy has the mode of its source.

    Raises:
        UserError: the disk is full or read-only.
    """
    aside = path.with_name(f".{path.name}.tmp")
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(aside, ignore_errors=True)  # a killed process may have left this folder
    try:
        with disk_errors(path):
            _restore(path, old)
            aside.mkdir(parents=True)
            yield aside
            mode = aside.stat().st_mode & 0o666
            for file in aside.rglob("*"):
                if file.is_file():
                    file.chmod(mode)
                flush(file)
            flush(aside)
            shutil.rmtree(old, ignore_errors=True)
            if path.exists():
                path.rename(old)
            aside.rename(path)
            flush(path.parent)
            shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        with suppress(OSError):  # the first error says more
            _restore(path, old)
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _restore(path: Path, old: Path) -> None:
    """Undo the first of the two renames that replace a folder, if the second is missing."""
    if old.exists() and not path.exists():
        old.rename(path)


def remove_folder(path: Path) -> None:
    """Remove a folder; other processes see all of it or nothing."""
    aside = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as :func:`replace_bytes` does."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` as :func:`replace_file` does."""
    with replace_file(path) as aside:
        aside.write_bytes(content)


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield the path of a new file that becomes ``path`` at the end; an exception removes it.

    Until then an earlier ``path`` keeps its content. A missing folder is created.

    Raises:
        UserError: the disk is full or read-only.
    """
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield aside
            flush(aside)
            aside.replace(path)
            flush(path.parent)
    except BaseException:
        with suppress(OSError):  # the first error says more
            aside.unlink()
        raise


def rewrite_lines(path: Path, keep: Callable[[Json], bool]) -> None:
    """Rewrite a file of JSON lines without the lines that ``keep`` rejects; the old file stays until the new one is
    complete.

    Raises:
        UserError: the disk is full or read-only, or a line is damaged.
    """
    with replace_file(path) as aside, aside.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in read_lines(path) if keep(line))


def append_line(path: Path, values: Json) -> None:
    """Append an object to a file of JSON lines; a UserError if the disk is full or read-only."""
    with disk_errors(path), path.open("a") as file:
        file.write(json.dumps(values) + "\n")


def read_lines(
    path: Path, keys: Sequence[str] = (), problems: list[str] | None = None
) -> Iterator[Json]:
    """The objects in a file of JSON lines; none if the file does not exist.

    The reader skips an incomplete last line: a process is writing it, or was killed meanwhile.

    Args:
        path: the file.
        keys: keys that every object must have.
        problems: list that collects problems, while damaged lines are skipped; without it problems are errors.

    Raises:
        UserError: ``problems`` is None and the file cannot be read, or a line is damaged.
    """
    damaged = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                value = json_object(line)
                if value is not None and all(key in value for key in keys):
                    yield value
                elif line.endswith(b"\n") and not line.isspace():
                    damaged += 1
                    if problems is None:
                        having = f" with {' and '.join(keys)}" if keys else ""
                        raise UserError(
                            f"{path}:{number} is damaged; expected a JSON object{having}. Delete that line and go on "
                            "with resume_from_checkpoint=True"
                        )
    except FileNotFoundError:
        return
    except OSError as error:
        if problems is None:
            raise _unreadable(path, error) from error
        problems.append(f"{path} cannot be read: {error.strerror or error}")
    if damaged and problems is not None:
        lines = (
            "1 line that is not a JSON object"
            if damaged == 1
            else f"{damaged} lines that are not JSON objects"
        )
        problems.append(f"{path}: skipped {lines}")


def read_json(path: Path) -> Json | None:
    """Read a record of a run, a file with one JSON object; None if it does not exist.

    Raises:
        UserError: the file cannot be read, or is damaged.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    if (value := json_object(content)) is None:
        raise UserError(
            f"{path} is damaged; expected a JSON object. Restore it, or delete it to have its work redone"
        )
    return value


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot read {path}: {error.strerror or error}. Nothing was changed; check the disk"
    )


def json_object(content: bytes) -> Json | None:
    """The JSON object in ``content``; None if it is anything else."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    return value if isinstance(value, dict) else None


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or read-only disk under ``path`` into one line for the user."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        message = (
            f"cannot write {path}: {error.strerror or error}; choose another folder or output_dir"
        )
        raise UserError(_FULL.format(path) if full else message) from error
    except (RuntimeError, SafetensorError) as error:
        # torch.save and safetensors wrap the system's error
        signs = ("No space left", "File too large", "unexpected pos", "file write failed")
        if any(sign in str(error) for sign in signs):
            raise UserError(_FULL.format(path)) from error
        raise


def flush(path: Path) -> None:
    """Flush a file or folder to the disk, and drop a file's pages from the system's cache.

    On unified memory, the cached pages of a merged model would take its size from the GPU.
    """
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder
    # fsync needs write access on Windows
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise") and path.is_file():  # neither on Windows nor on macOS
            with suppress(OSError):  # advice: the file is on the disk
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        # a file system that cannot flush folders
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)
