"""Write an adapter as a GGUF file, which llama.cpp adds to the base model's when it starts (``--lora FILE``)."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from rocm_ext.base.errors import UserError
from rocm_ext.export.gguf_file import Entry, library, write
from rocm_ext.export.gguf_model import GgufNames, add_general, native
from rocm_ext.export.source import Source
from rocm_ext.model.adapters.peft_files import ADAPTER_WEIGHTS, PeftConfig, updates_by_weight


def write_adapter(source: Source, out: Path) -> None:
    """Write the adapter in fp32.

    Args:
        source: the model.
        out: the file; it must not exist.

    Raises:
        UserError: there is no adapter, llama.cpp does not compute it, or the disk is full.
    """
    if source.adapter is None:
        raise UserError(f"{source.base} has no adapter")
    config = PeftConfig.read(source.adapter)
    if config.dora:
        raise UserError(f"{source.adapter} is DoRA, which llama.cpp does not compute; set --gguf, which merges it")
    names = GgufNames(native(source))
    gguf = library()
    writer = gguf.GGUFWriter(None, names.arch)
    writer.add_type(gguf.GGUFType.ADAPTER)
    add_general(writer, source)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    # llama.cpp's factor is alpha / r
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(config.scale * config.rank))
    write(out, writer, list(_entries(names, load_file(source.adapter / ADAPTER_WEIGHTS))))


def _entries(names: GgufNames, adapter: dict[str, Tensor]) -> Iterator[Entry]:
    for name, update in updates_by_weight(adapter).items():
        a, b = update[".lora_A.weight"], names.rows(name, update[".lora_B.weight"])
        for end, tensor in (("lora_a", a), ("lora_b", b)):
            yield Entry(f"{names.name(name)}.{end}", list(tensor.shape), "f32", partial(Tensor.contiguous, tensor))
