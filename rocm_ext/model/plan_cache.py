"""Remember the results of simulations, because runs start again and again with the same model.

A simulation takes a third of a second, for some models seconds. Files in the user's cache folder serve later processes
and all ranks. A changed version, source file, shape, dtype or setting gives another key. The user's source files count
if a module in their folder is part of the model or the objective.
"""

import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from enum import Enum
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import rocm_ext
from rocm_ext.machine.bench_file import cache_folder

_MOST = 500  # files; the oldest go
_PACKAGES = ("torch", "torchtune", "torchao", "transformers")
_PLAIN = int | float | complex | str | bytes | torch.dtype | torch.device | torch.Size | Enum | None
# keys of transformers' configs: the path decides no cost, and the hash differs between processes
_LEFT_OUT = {"_name_or_path", "name_or_path", "_original_object_hash"}


def remembered(what: Sequence[Any], compute: Callable[[], Any]) -> Any:
    """Return ``compute()``, a value for JSON, or its earlier result for the same ``what``.

    ``what`` is everything that decides the result: models, objectives, sizes, settings. See :func:`fingerprint`.
    """
    folder = cache_folder()
    if folder is None:
        return compute()
    path = folder / "plans" / f"{fingerprint(what)}.json"
    with suppress(OSError, ValueError):
        return json.loads(path.read_text())
    result = compute()
    with suppress(OSError):  # a full disk, or a folder of another user
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")  # ranks write at the same time
        aside.write_text(json.dumps(result))
        aside.replace(path)
        by_age = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)
        for old in by_age[:-_MOST]:
            old.unlink(missing_ok=True)
    return result


def fingerprint(what) -> str:
    """Return a hash of values and of the code of their classes.

    Tensors count by shape and dtype, functions by name, other objects by all attributes.
    """
    words = [_versions()]
    modules: set[str] = set()
    _describe(what, words, {}, modules)
    words += map(_stamp, sorted(_sources(modules)))
    content = "\0".join(words)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _describe(value, words: list[str], seen: dict[int, tuple[int, Any]], modules: set[str]) -> None:
    """Add a description of ``value`` to ``words``, and the modules of its classes and functions to ``modules``."""
    if isinstance(value, _PLAIN):
        words.append(repr(value))
        return
    if id(value) in seen:
        words.append(f"#{seen[id(value)][0]}")
        return
    seen[id(value)] = len(seen), value  # keeps it alive, so that no other object gets its id
    is_code = isinstance(value, (type, ModuleType)) or inspect.isroutine(value)
    kind = value if is_code else type(value)
    module = getattr(kind, "__module__", None) or ""
    modules.add(module)
    words.append(f"{module}.{getattr(kind, '__qualname__', kind)}")
    if isinstance(value, Tensor):
        words.append(f"{tuple(value.shape)} {value.dtype} {value.requires_grad}")
        inner = _attributes(value, ("packed", "scale", "block"))
        parts: Iterable[Any] = inner.values()
    elif isinstance(value, Mapping):
        parts = _entries(value)
    elif isinstance(value, Set):
        parts = sorted(map(repr, value))
    elif isinstance(value, Sequence):
        parts = value
    elif isinstance(value, partial):
        parts = value.func, value.args, value.keywords
    elif is_code:
        parts = ()
    else:
        slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
        attributes = dict(getattr(value, "__dict__", {}))
        parts = _entries(attributes | _attributes(value, slots))
    for part in parts:
        # modules have a dozen empty dictionaries of hooks
        if not isinstance(part, Mapping) or part:
            _describe(part, words, seen, modules)
    words.append(")")


def _attributes(value, names: Iterable[str]) -> dict[str, Any]:
    """Return those of the attributes ``names`` that ``value`` has."""
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _entries(values: Mapping[Any, Any]) -> Iterator[Any]:
    """Yield keys and values in turn."""
    for key, value in values.items():
        if key not in _LEFT_OUT:
            yield key
            yield value


@cache
def _versions() -> str:
    """Return the versions of Python and of the packages whose code runs, and the stamps of this library's files."""
    words = [sys.version]
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            words.append(f"{package} {version(package)}")
    ours = Path(rocm_ext.__file__).parent.rglob("*.py")
    words += map(_stamp, sorted(ours))
    return " ".join(words)


def _sources(modules: set[str]) -> set[Path]:
    """Return the files of the user's ``modules``, and of loaded modules in the same folders."""
    known = sys.base_prefix, os.path.dirname(rocm_ext.__file__)
    folders = set()
    for name in modules:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            folder = os.path.dirname(file)
            is_known = any(map(Path(folder).is_relative_to, known))
            if "site-packages" not in folder and not is_known:
                folders.add(folder)
    if not folders:
        return set()
    files = set()
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        if os.path.dirname(file) in folders:
            files.add(Path(file))
    return files


def _stamp(file: Path) -> str:
    with suppress(OSError):
        stat = file.stat()
        return f"{file.name} {stat.st_size} {stat.st_mtime_ns}"
    return file.name
