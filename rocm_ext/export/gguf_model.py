"""Write a model, or only an adapter, as a GGUF file; :mod:`rocm_ext.model.weights.llama_cpp` has the layouts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from errno import ENOSPC
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import flush, replace_file
from rocm_ext.base.log import Progress, log
from rocm_ext.export.source import UNMERGED, Source
from rocm_ext.export.vocabulary import add_vocabulary
from rocm_ext.model.adapters.merge import MergedWeights, base_tensors, check_base
from rocm_ext.model.lora import dense, expert_factors
from rocm_ext.model.names import LORA_A, LORA_B
from rocm_ext.model.weights.checkpointer import TABLES, on_meta, say_ahead
from rocm_ext.model.weights.gguf_files import refuse_merging
from rocm_ext.model.weights.llama_cpp import GgufNames, Layout, add_keys, library, read_layout
from rocm_ext.model.weights.llama_cpp_parts import Part

TYPES = ("f16", "bf16", "q8_0", "f32")
# llama.cpp takes these, and all tensors but weights, only in fp32
_ALWAYS_F32 = ("ffn_gate_inp", "ssm_conv1d")
_BLOCK = 32  # values of a q8_0 block
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


def write_model(source: Source, out: Path, kind: str) -> None:
    """Write the model, merged with its adapter, as the new file ``out`` of a ``kind`` in :data:`TYPES`.

    Values are rounded once, from the merged weights in fp32. A base model's quantised weights first become bf16. Norms
    and biases are fp32.

    Raises:
        UserError: the family or its tokenizer cannot be written, or the disk is full.
    """
    refuse_merging(source.base, UNMERGED)
    layout = read_layout(source.base)
    if layout.differs:
        log.warning("%s", layout.differs)
    names = GgufNames(layout)
    _, _, state = base_tensors(source.cfg.checkpointer)
    decoder = source.decoder()
    stored = decoder.converted(state)
    shapes = on_meta(stored)
    say_ahead(stored, f"are not in {out}; llama.cpp decodes without them")
    check_base(decoder, shapes, source.base)

    def read(name: str) -> Tensor:
        return dense(stored[name])

    if source.adapter is not None:
        merged = MergedWeights(decoder, state, source.adapter)
        merged.check(source.base)
        dtype = {"f16": torch.float16, "bf16": torch.bfloat16}.get(kind, torch.float32)
        read = partial(merged.weight, dtype=dtype)
    empty = {}
    for name, weight in shapes.items():
        if not name.endswith(TABLES):
            empty[name] = torch.empty(weight.shape, device="meta")
    entries = list(_entries(layout, names, empty, read, kind))
    gguf = library()
    writer = _writer(source, names, gguf.GGUFType.MODEL)
    add_keys(writer, layout.keys)
    share = "ALL" if kind == "f32" else "MOSTLY"
    writer.add_file_type(gguf.LlamaFileType[f"{share}_{kind.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_vocabulary(writer, source, layout)
    _write(out, writer, entries)


def _writer(source: Source, names: GgufNames, kind: str) -> Any:
    """Return a ``gguf.GGUFWriter`` of a kind of file, with the names of the run and of the base model."""
    writer = library().GGUFWriter(None, names.arch)
    writer.add_type(kind)
    name = source.name.rpartition("/")[2]
    writer.add_name(name if source.run is None else f"{name} {source.run.name}")
    if "/" in source.name and not source.name.startswith("/"):
        organization, base = source.name.split("/", 1)
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, base)
        writer.add_base_model_organization(0, organization)
        writer.add_base_model_repo_url(0, f"https://huggingface.co/{source.name}")
    return writer


def _entries(
    layout: Layout,
    names: GgufNames,
    shapes: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    kind: str,
) -> Iterator[Entry]:
    """Yield the tensors of the file."""
    factors = layout.factors
    if factors is not None:
        yield Entry("rope_freqs.weight", list(factors.shape), "f32", lambda: factors)
    held: dict[str, Tensor] = {}  # the last weight, because a weight's parts are adjacent

    def values(name: str, part: Part) -> Tensor:
        if name not in held:
            held.clear()  # a weight may have gigabytes, so the old one goes before the next is read
            held[name] = read(name)
        return part.of(held[name])

    for name, stored in shapes.items():
        for part in layout.parts(name):
            theirs = names.name(part.name)
            shape = list(part.of(stored).shape)
            is_weight = len(shape) >= 2 and theirs.endswith(".weight")
            stored_as = kind
            if not is_weight or any(piece in theirs for piece in _ALWAYS_F32):
                stored_as = "f32"
            elif kind == "q8_0" and shape[-1] % _BLOCK:
                stored_as = "f16"
            yield Entry(theirs, shape, stored_as, partial(values, name, part))


# ---- an adapter, which llama.cpp adds to the base model at its start (``--lora FILE``)


def write_adapter(source: Source, out: Path) -> None:
    """Write the adapter in fp32, as the new file ``out``.

    Raises:
        UserError: there is no adapter, llama.cpp does not compute it, or the disk is full.
    """
    if source.adapter is None:
        raise UserError(f"{source.base} has no adapter")
    layout = read_layout(source.base)
    names = GgufNames(layout)
    decoder = source.decoder()
    _, _, state = base_tensors(source.cfg.checkpointer)
    merged = MergedWeights(decoder, state, source.adapter)
    merged.check(source.base)
    config = merged.config
    if config.dora:
        raise UserError(
            f"{source.adapter} is DoRA, which llama.cpp does not compute; set --gguf, which merges it"
        )
    if merged.rows:
        raise UserError(
            f"{source.adapter} has rows of new tokens, which llama.cpp's adapters cannot have; set --gguf, which "
            "merges it"
        )
    gguf = library()
    writer = _writer(source, names, gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    # A [..., r, in] and B [..., out, r] by the names of the weights; experts have a first dimension
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for name, update in merged.linear.items():
        factors[name] = update[LORA_A], update[LORA_B]
    for name, (a, b, layer) in merged.experts.items():
        factors[name] = expert_factors(a, b, layer.experts)
    # llama.cpp's factor is alpha / r, with the file's alpha and the weight's r
    alphas = {}
    for name, (a, _) in factors.items():
        rank = a.shape[-2]
        alphas[name] = config.scale(name.removesuffix(".weight")) * rank
    alpha = next(iter(alphas.values())) or 1.0
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(alpha))
    for name, (a, b) in factors.items():
        if alphas[name] != alpha:
            factors[name] = a, b * (alphas[name] / alpha)
    _write(out, writer, list(_of_adapter(layout, names, factors)))


def _of_adapter(
    layout: Layout, names: GgufNames, updates: Mapping[str, tuple[Tensor, Tensor]]
) -> Iterator[Entry]:
    for name, (a, b) in updates.items():
        if name.endswith(layout.merged_only):
            raise UserError(
                f"llama.cpp computes the LoRA of {name} in another way; set --gguf, which merges it"
            )
        for part in layout.parts(name):
            theirs = names.name(part.name)
            tensors = {"lora_a": part.columns_of(a), "lora_b": b[..., part.rows, :]}
            for end, tensor in tensors.items():
                yield Entry(
                    f"{theirs}.{end}", list(tensor.shape), "f32", partial(Tensor.contiguous, tensor)
                )


# ---- the file, which appears once it is complete


def _write(path: Path, writer: Any, entries: Sequence[Entry]) -> None:
    """Write the ``entries``, read once in this order, after the metadata that the ``gguf.GGUFWriter`` already has.

    Raises:
        UserError: ``path`` exists, a value is out of the type's range, or the disk is full.
    """
    if path.exists():
        raise UserError(f"{path} exists; choose another name")
    gguf = library()
    for entry in entries:
        kind = gguf.GGMLQuantizationType[entry.kind.upper()]
        shape_in_bytes = gguf.quant_shape_to_byte_shape(entry.shape, kind)
        size = int(np.prod(shape_in_bytes))
        dtype = np.dtype(np.float32)
        writer.add_tensor_info(entry.name, entry.shape, dtype, size, raw_dtype=kind)
    progress = Progress(len(entries), 0, enabled=True, unit="tensor", brief=True)
    with replace_file(path) as aside:
        try:
            writer.write_header_to_file(aside)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            waiting = 0  # bytes since the last flush
            for entry in entries:
                values = _stored(entry, gguf)
                try:
                    writer.write_tensor_data(values)
                except OSError as error:
                    error.errno = error.errno or ENOSPC  # numpy's error for a short write has none
                    raise
                waiting += values.nbytes
                del values  # frees them before the next is read
                if waiting > _FLUSH:
                    writer.flush()
                    flush(aside)
                    waiting = 0
                progress.update(entry.name)
        finally:
            writer.close()
            progress.close()


def _stored(entry: Entry, gguf: Any) -> np.ndarray:
    """Return a tensor's bytes."""
    tensor = entry.read().detach().contiguous()
    if entry.kind == "bf16":
        return tensor.to(torch.bfloat16).view(torch.uint8).numpy()
    if entry.kind == "f16":
        half = tensor.to(torch.float16)
        if half.isinf().any():
            raise UserError(
                f"{entry.name} has values above {_LARGEST:,.0f}, the largest of f16; set --type bf16"
            )
        return half.numpy()
    values = tensor.float().numpy()
    if entry.kind == "f32":
        return values
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
