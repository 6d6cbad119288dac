"""GGUF files with blocks of every kind, for small models with random weights."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from rocm_ext.export import open_source
from rocm_ext.export.gguf_model import write_model
from rocm_ext.model.weights.llama_cpp import SCALED
from rocm_ext.model.weights.unpack import BLOCKS

# where a block's scales are, in fp16, and the second one's times the first for a mean of 0
_SCALES = {"Q2_K": (80, 82, 1.5), "Q3_K": (108,), "Q4_K": (0, 2, 7.5), "Q5_K": (0, 2, 15.5), "Q6_K": (208,),
           "Q4_1": (0, 2, -7.5), "Q5_1": (0, 2, -15.5), "TQ1_0": (52,), "TQ2_0": (64,)}  # fmt: skip
# the size of scales that gives weights of about 0.1
_SIZES = {"Q2_K": 5e-3, "Q3_K": 2e-3, "Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 5e-5, "Q8_0": 1e-3, "IQ2_XXS": 1e-3,
          "IQ2_XS": 1e-3, "IQ2_S": 1e-3, "IQ3_XXS": 1e-3, "IQ3_S": 5e-4, "IQ4_NL": 1e-3, "IQ4_XS": 5e-5,
          "TQ1_0": 0.1, "TQ2_0": 0.1, "Q1_0": 0.1, "Q2_0": 0.1}  # fmt: skip
# the package knows no Q2_0
NUMBERS = {kind: gguf.GGMLQuantizationType.__members__.get(kind, 42) for kind in BLOCKS}
gguf.GGML_QUANT_SIZES.setdefault(42, BLOCKS["Q2_0"])
_PLAIN = ("ffn_gate_inp", "ssm_conv1d", ".bias")  # llama.cpp takes these in fp32 alone


def random_blocks(kind: str, rows: int, blocks: int, rng: np.random.Generator) -> np.ndarray:
    """Return blocks of random values with scales that weights have, uint8 [rows, bytes]."""
    size = BLOCKS[kind][1]
    made = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    if kind == "MXFP4":
        made[:, :, 0] = rng.integers(120, 124, (rows, blocks))
    elif kind == "NVFP4":
        made[:, :, :4] = rng.integers(16, 24, (rows, blocks, 4))
    elif kind == "IQ1_M":  # the high halves of four numbers of 16 bits are a scale
        digits = [8, 2, rng.integers(8, 16, (rows, blocks)), 1]
        for at, digit in zip((49, 51, 53, 55), digits, strict=True):
            made[:, :, at] = made[:, :, at] & 15 | np.uint8(digit) << 4
    else:
        at, *other = _SCALES.get(kind, (0,))
        scale = _SIZES.get(kind, 1e-2) * rng.uniform(0.5, 1.5, (rows, blocks, 1))
        made[:, :, at : at + 2] = scale.astype(np.float16).view(np.uint8)
        if other:
            made[:, :, other[0] : other[0] + 2] = (
                (other[1] * scale).astype(np.float16).view(np.uint8)
            )
    return made.reshape(rows, -1)


def rewrite_gguf(
    source: Path, target: Path, keys: Mapping[str, Any], tensors: Mapping[str, np.ndarray | None]
) -> Path:
    """Copy a file of fp32 tensors with other values by key and by tensor's name; None: the tensor is left out."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key != "general.architecture" and not key.startswith("GGUF."):
            kind, *sub = field.types
            writer.add_key_value(
                key, keys.get(key, field.contents()), kind, sub[-1] if sub else None
            )
    for tensor in reader.tensors:
        data = tensors.get(tensor.name, tensor.data)
        if data is not None:
            writer.add_tensor(tensor.name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def write_gguf(
    folder: Path,
    target: Path,
    kinds: Sequence[str] = (),
    parts: int = 1,
    metadata: Mapping[str, Any] | None = None,
    experts: str = "alike",
    more: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Write the model of a folder as a GGUF file, without sides of 1, as llama.cpp's converter.

    Args:
        folder: in Hugging Face's format.
        target: the file.
        kinds: of blocks with random values that the weights get in turn; none: all weights stay, in fp32.
        parts: files; the first of two holds the layers.
        metadata: values by key that differ; None: the key is left out.
        experts: gate and up have blocks of one kind (``alike``) or of two (``apart``), or are one tensor (``joined``).
        more: further tensors; None: it is left out.

    Returns:
        The first file.
    """
    plain = target.with_suffix(".f32")
    plain.unlink(missing_ok=True)
    write_model(open_source(folder), plain, "f32")
    reader, rng = gguf.GGUFReader(plain), np.random.default_rng(0)
    names = (
        [target]
        if parts == 1
        else [target.with_name(f"{target.stem}-0000{n}-of-00002.gguf") for n in (1, 2)]
    )
    architecture = reader.fields["general.architecture"].contents()
    writers = [gguf.GGUFWriter(name, architecture) for name in names]
    values = {
        key: (field.contents(), field.types)
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.")
    }
    for key, value in (metadata or {}).items():
        like, types = values.get(key, (0, [gguf.GGUFValueType.UINT32]))
        values[key] = (
            value,
            types
            if value is None or type(value) is type(like)
            else [gguf.GGUFValueType.get_type(value)],
        )
    for key, (value, types) in values.items():
        if key != "general.architecture" and value is not None:
            sub = types[-1] if types[0] == gguf.GGUFValueType.ARRAY else None
            writers[0].add_key_value(key, value, types[0], sub)
    for number, writer in enumerate(writers if parts > 1 else ()):
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
    number, tensors = 0, {tensor.name: tensor.data.squeeze() for tensor in reader.tensors}
    tensors = {
        name: data for name, data in (tensors | dict(more or {})).items() if data is not None
    }
    for gate in (
        [name for name in tensors if "ffn_gate_exps" in name] if experts == "joined" else ()
    ):
        pair = tensors.pop(gate), tensors.pop(gate.replace("gate", "up"))
        tensors[gate.replace("gate", "gate_up")] = np.concatenate(pair, axis=1)
    for name, data in tensors.items():
        writer = writers[0 if name.startswith("blk.") else -1]
        if data.ndim > 1 and kinds and not any(part in name for part in _PLAIN):
            number -= experts == "alike" and "ffn_up_exps" in name  # it follows the gate
            kind, (*before, width) = kinds[number % len(kinds)], data.shape
            kind = "MXFP4" if width % BLOCKS[kind][0] else kind
            made = random_blocks(kind, math.prod(before), width // BLOCKS[kind][0], rng).reshape(
                *before, -1
            )
            writer.add_tensor(name, made, raw_dtype=NUMBERS[kind])
            number += 1
            stem = name.removesuffix("weight")
            # llama.cpp's embeddings have no scale; in Gemma 4's file, down's are the router's
            scaled = kind == "NVFP4" and architecture in SCALED and name != "token_embd.weight"
            if scaled and f"{stem}scale" not in tensors:
                scales = rng.uniform(0.5, 2, data.shape[0] if data.ndim == 3 else 1)
                writer.add_tensor(f"{stem}scale", scales.astype(np.float32))
                writer.add_tensor(f"{stem}input_scale", np.full_like(scales, 7, np.float32))
        else:
            writer.add_tensor(name, data)
    for writer in writers:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return names[0]
