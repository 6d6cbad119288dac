"""Write GGUF files one tensor at a time; the file appears once it is complete."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from errno import ENOSPC
from os import strerror
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import flush, replace_file
from rocm_ext.base.log import Progress
from rocm_ext.model.weights.llama_cpp import library

TYPES = ("f16", "bf16", "q8_0", "f32")
_FLUSH = 2**28  # bytes of a file that the system may cache while it is written
_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Entry:
    """A tensor of a GGUF file.

    Attributes:
        name: llama.cpp's name.
        shape: torch's shape.
        kind: one of :data:`TYPES`.
        read: returns the values.
    """

    name: str
    shape: Sequence[int]
    kind: str
    read: Callable[[], Tensor]


def write(path: Path, writer: Any, entries: Sequence[Entry]) -> None:
    """Write the ``entries``, read once in this order, after the metadata that the ``gguf.GGUFWriter`` already has.

    Raises:
        UserError: ``path`` exists, a value is out of the type's range, or the disk is full.
    """
    if path.exists():
        raise UserError(f"{path} exists; choose another name")
    gguf = library()
    for entry in entries:
        kind = gguf.GGMLQuantizationType[entry.kind.upper()]
        row = gguf.quant_shape_to_byte_shape(entry.shape, kind)
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), int(np.prod(row)), raw_dtype=kind)
    progress = Progress(len(entries), 0, enabled=True, unit="tensor", brief=True)
    with replace_file(path) as aside:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            writer.write_header_to_file(aside)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            waiting = 0  # bytes since the last flush
            for entry in entries:
                values = _stored(entry, gguf)
                _append(writer, values)
                waiting += values.nbytes
                del values  # before the next is read
                if waiting > _FLUSH:
                    writer.flush()
                    flush(aside)
                    waiting = 0
                progress.update(entry.name)
        finally:
            writer.close()
            progress.close()


def _append(writer: Any, values: np.ndarray) -> None:
    try:
        writer.write_tensor_data(values)
    except OSError as error:
        if error.errno is None:  # numpy's error for a short write
            raise OSError(ENOSPC, strerror(ENOSPC)) from error
        raise


def _stored(entry: Entry, gguf: Any) -> np.ndarray:
    """Return a tensor's bytes."""
    tensor = entry.read().detach().contiguous()
    if entry.kind == "bf16":
        return tensor.to(torch.bfloat16).view(torch.uint8).numpy()
    if entry.kind == "f16":
        half = tensor.to(torch.float16)
        if half.isinf().any():
            raise UserError(f"{entry.name} has values above {_LARGEST:,.0f}, the largest of f16; set --type bf16")
        return half.numpy()
    values = tensor.float().numpy()
    return values if entry.kind == "f32" else gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
