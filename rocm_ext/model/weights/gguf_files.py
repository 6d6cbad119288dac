"""Read the header of GGUF files: metadata, and places of tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rocm_ext.base.errors import UserError, explain_errors, refuse
from rocm_ext.base.files import json_object
from rocm_ext.base.types import Json
from rocm_ext.model.weights.unpack import BLOCKS

SUFFIX = ".gguf"
Metadata = dict[str, Any]  # numbers, texts and lists by key
# files in a folder that names GGUF files: their paths, and the shapes of transformers' weights by name
LINKS = "gguf.json"
SHAPES = "shapes.json"
AGAIN = "download the file again"
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # ggml's types of numbers
# ggml's types with blocks
_TYPES = {2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K",
          14: "Q6_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S",
          23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
          42: "Q2_0"}  # fmt: skip
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_TEXT = 8
_LIST = 9
_MOST = 2**26  # bytes of a text, entries of a list, tensors, sides: far more than any model has
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class Place:
    """Position and format of a tensor in a file.

    Attributes:
        shape: torch's shape of the values.
        kind: kind of blocks, a key of :data:`rocm_ext.model.weights.unpack.BLOCKS`. Empty for numbers of ``dtype``.
        dtype: dtype of numbers.
        begin: offset of the first byte in the file.
    """

    shape: tuple[int, ...]
    kind: str
    dtype: torch.dtype
    begin: int

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the numbers, or of the blocks' bytes."""
        if not self.kind:
            return self.shape
        values, size = BLOCKS[self.kind]
        *rows, columns = self.shape
        return *rows, columns // values * size

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        size = 1 if self.kind else self.dtype.itemsize
        return math.prod(self.stored_shape) * size


class GgufFile:
    """A GGUF file's header.

    Attributes:
        metadata: values by key.
        places: the tensors' places, by llama.cpp's names.

    Raises:
        UserError: the file cannot be read, is damaged, or has tensors of an unknown type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with explain_errors(f"cannot read {path}"):
            self._size = path.stat().st_size
            with path.open("rb") as self._file:
                self.metadata, self.places = self._read()
        ends = [place.begin + place.nbytes for place in self.places.values()]
        end = max(ends, default=0)
        if end > self._size:
            raise UserError(f"{path} has {self._size:,} bytes instead of {end:,}; {AGAIN}")

    def numbers(self, name: str) -> Tensor:
        """Return the numbers of a tensor without blocks."""
        at = self.places[name]
        with self.path.open("rb") as file:
            file.seek(at.begin)
            content = bytearray(file.read(at.nbytes))
        numbers = torch.frombuffer(content, dtype=at.dtype)
        return numbers.reshape(at.shape).float()

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.metadata.get("general.architecture"))

    def _read(self) -> tuple[Metadata, dict[str, Place]]:
        if self._file.read(4) != b"GGUF":
            raise UserError(f"{self.path} is no GGUF file")
        version, tensors, keys = self._fields("<IQQ")
        if version in (2 << 24, 3 << 24):
            raise UserError(
                f"{self.path} is big-endian; gguf-convert-endian of the package gguf writes a little-endian file"
            )
        if version not in (2, 3):
            raise UserError(f"{self.path} is of GGUF's version {version}; expected 2 or 3")
        self._expect(max(tensors, keys) <= _MOST)
        metadata = {}
        for _ in range(keys):
            key = self._text()
            metadata[key] = self._value(*self._fields("<I"))
        entries = {}
        for _ in range(tensors):
            name = self._text()
            (count,) = self._fields("<I")
            self._expect(count <= 4 and name.isprintable() and name not in entries)
            shape = self._fields(f"<{count}Q")[::-1]
            self._expect(all(side <= _MOST for side in shape))
            entries[name] = shape, *self._fields("<IQ")
        step = metadata.get("general.alignment", 32)
        self._expect(type(step) is int and 1 <= step <= _MOST)
        begin = self._file.tell()
        begin += -begin % step
        places = {}
        expected = begin  # tensors follow each other, as llama.cpp demands
        for name, (shape, kind, at) in entries.items():
            place = self._place(name, shape, kind, begin + at)
            if place.begin != expected:
                raise UserError(
                    f"{self.path}: {name} begins at byte {place.begin:,} instead of {expected:,}; the file is damaged, "
                    f"or a fork of llama.cpp has written other blocks; {AGAIN}"
                )
            places[name] = place
            expected += place.nbytes
            expected += -expected % step
        return metadata, places

    def _place(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> Place:
        if kind in _PLAIN:
            return Place(shape, "", _PLAIN[kind], begin)
        if kind not in _TYPES:
            expected = ", ".join(_TYPES.values())
            raise UserError(
                f"{self.path}: {name} is of ggml's type {kind}; expected F32, F16, BF16, {expected}"
            )
        blocks = _TYPES[kind]
        values, _ = BLOCKS[blocks]
        self._expect(bool(shape) and shape[-1] % values == 0)
        return Place(shape, blocks, torch.float32, begin)

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._fields(_SCALARS[kind])[0]
        if kind == _TEXT:
            return self._text()
        self._expect(kind == _LIST)
        of, count = self._fields("<IQ")
        self._expect((of in _SCALARS or of == _TEXT) and count <= _MOST)
        if of in _SCALARS:
            return list(self._fields(f"<{count}{_SCALARS[of][1]}"))
        return [self._text() for _ in range(count)]

    def _text(self) -> str:
        (size,) = self._fields("<Q")
        self._expect(size <= _MOST)
        return self._bytes(size).decode("utf-8", "replace")

    def _fields(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))

    def _bytes(self, size: int) -> bytes:
        self._expect(size <= self._size)
        content = self._file.read(size)
        self._expect(len(content) == size)
        return content

    def _expect(self, fits: bool) -> None:
        if not fits:
            raise UserError(f"{self.path} is damaged in its header; {AGAIN}")


def parts_of(path: Path) -> list[Path]:
    """Return all files of a model, in order: the file, or all parts of a split model."""
    match = _PART.fullmatch(path.name)
    if match is None or match[3] == "00000":
        return [path]
    count = int(match[3])
    files = [
        path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf")
        for number in range(1, count + 1)
    ]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(
            f"{path.parent} lacks {len(missing)} of {count} parts of the model, first {missing[0]}"
        )
    return files


def _content_of(path: Path) -> Json:
    if not path.is_file():
        return {}
    return json_object(path.read_bytes()) or {}


def links_in(folder: Path) -> Json:
    """Return the content of :data:`LINKS`: ``files``, and ``made``: whether ``config.json`` was made from metadata."""
    return _content_of(folder / LINKS)


def shapes_in(folder: Path) -> Json:
    """Return the shapes in a folder's :data:`SHAPES`, by name. Empty without such a file."""
    return _content_of(folder / SHAPES)


def files_in(folder: Path) -> list[str]:
    """Return the paths of the GGUF files that a folder names. Empty if it names none."""
    files = links_in(folder).get("files") or []
    gone = (file for file in files if not Path(file).is_file())
    refuse(f"{file} is gone; it holds the model's weights" for file in gone)
    return files


def refuse_merging(folder: Path, instead: str) -> None:
    """Refuse to merge an adapter into GGUF files of a folder; the message advises ``instead``."""
    files = files_in(folder)
    if files:
        raise UserError(
            f"an adapter merged into the blocks of {files[0]} would be rounded away; {instead}"
        )
