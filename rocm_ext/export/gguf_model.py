"""Write a model of a native family, or an adapter alone, as a GGUF file for llama.cpp.

The keys, names and orders of rows are those of llama.cpp's ``convert_hf_to_gguf.py``.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rocm_ext.base.errors import UserError
from rocm_ext.export.gguf_file import Entry, library, write
from rocm_ext.export.source import Source
from rocm_ext.export.vocabulary import CONVERTER, add_vocabulary
from rocm_ext.model.adapters.merge import MergedWeights, base_tensors
from rocm_ext.model.adapters.peft_files import ADAPTER_WEIGHTS, PeftConfig, updates_by_weight
from rocm_ext.model.families import Architecture, Rope, foreign_config, read_architecture
from rocm_ext.model.layers import HalvesRoPE

# llama.cpp's Mistral is its Llama
_ARCHITECTURES = {
    "LlamaForCausalLM": "LLAMA",
    "MistralForCausalLM": "LLAMA",
    "Qwen2ForCausalLM": "QWEN2",
    "Qwen3ForCausalLM": "QWEN3",
}
_TABLES = ("rotary_emb.inv_freq", ".position_ids")
_BLOCK = 32  # values of a q8_0 block


class GgufNames:
    """llama.cpp's names and order of rows for a model's weights.

    Args:
        architecture: the model's architecture.
    """

    def __init__(self, architecture: Architecture) -> None:
        gguf = library()
        self._of = architecture
        self.kind = gguf.MODEL_ARCH[_ARCHITECTURES[architecture.name]]
        self.arch = gguf.MODEL_ARCH_NAMES[self.kind]
        self._map = gguf.get_tensor_name_map(self.kind, architecture.layers)

    def name(self, hf: str) -> str:
        """Return llama.cpp's name of a weight.

        Raises:
            UserError: it has none.
        """
        llama_name = self._map.get_name(hf, try_suffixes=(".weight", ".bias"))
        if llama_name is None:
            raise UserError(f"{hf} has no place in llama.cpp's {self.arch}; {CONVERTER}")
        return llama_name

    def rows(self, hf: str, tensor: Tensor) -> Tensor:
        """Return a weight, a bias or an adapter's B with its rows in llama.cpp's order.

        In Hugging Face's files, the two halves of a head rotate together; llama.cpp's Llama rotates neighbours.
        """
        layer = hf.rpartition(".")[0].rpartition(".")[2]
        if self.arch != "llama" or layer not in ("q_proj", "k_proj"):
            return tensor
        heads = self._of.heads if layer == "q_proj" else self._of.kv_heads
        halves = tensor.reshape(heads, 2, self._of.head_dim // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)


def native(source: Source) -> Architecture:
    """Return the architecture of a model that this module can write.

    Raises:
        UserError: the family has no native decoder, or llama.cpp computes another function.
    """
    if (foreign := foreign_config(source.base, trust_remote_code=True)) is not None:
        name = (foreign.get("architectures") or [foreign.get("model_type")])[0]
        raise UserError(f"{name} is not written to GGUF files here; {CONVERTER}")
    architecture = read_architecture(source.base)
    if architecture.rope.yarn and not architecture.rope.yarn.rounded:
        raise UserError(f"{source.base}: YaRN with truncate=False is unknown to llama.cpp")
    return architecture


def write_model(source: Source, out: Path, kind: str) -> None:
    """Write the model, merged with its adapter, as one file.

    Values are rounded once, from the merged weights in fp32. Norms and biases are fp32.

    Args:
        source: the model.
        out: the file; it must not exist.
        kind: one of :data:`rocm_ext.export.gguf_file.TYPES`.

    Raises:
        UserError: the family or its tokenizer cannot be written, or the disk is full.
    """
    architecture = native(source)
    names = GgufNames(architecture)
    _, _, state = base_tensors(source.cfg.checkpointer)
    merged = None
    if source.adapter is not None:
        merged = MergedWeights(source.decoder(), state, source.adapter)
        merged.check(source.base)
    entries = list(_entries(architecture, names, state, merged, kind))
    gguf = library()
    writer = gguf.GGUFWriter(None, names.arch)
    writer.add_type(gguf.GGUFType.MODEL)
    add_general(writer, source)
    _add_shape(writer, architecture)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_vocabulary(writer, source, architecture.vocabulary)
    write(out, writer, entries)


def add_general(writer: Any, source: Source) -> None:
    """Add names: the run's, and the base model's."""
    name = source.name.rpartition("/")[2]
    writer.add_name(name if source.run is None else f"{name} {source.run.name}")
    if "/" in source.name and not source.name.startswith("/"):
        organization, base = source.name.split("/", 1)
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, base)
        writer.add_base_model_organization(0, organization)
        writer.add_base_model_repo_url(0, f"https://huggingface.co/{source.name}")


def _add_shape(writer: Any, a: Architecture) -> None:
    writer.add_vocab_size(a.vocabulary)
    writer.add_context_length(a.positions)  # at most the sliding window, which llama.cpp's Mistral has not
    writer.add_embedding_length(a.width)
    writer.add_block_count(a.layers)
    writer.add_feed_forward_length(a.intermediate)
    writer.add_head_count(a.heads)
    writer.add_head_count_kv(a.kv_heads)
    writer.add_key_length(a.head_dim)
    writer.add_value_length(a.head_dim)
    writer.add_layer_norm_rms_eps(a.norm_eps)
    writer.add_rope_dimension_count(a.head_dim)
    writer.add_rope_freq_base(a.rope.base)
    scaling = library().RopeScalingType
    if a.rope.kind == "linear":
        writer.add_rope_scaling_type(scaling.LINEAR)
        writer.add_rope_scaling_factor(a.rope.factor)
    if a.rope.yarn:
        yarn, usual = a.rope.yarn, 0.1 * float(torch.tensor(a.rope.factor).log()) + 1.0
        writer.add_rope_scaling_type(scaling.YARN)
        writer.add_rope_scaling_factor(a.rope.factor)
        writer.add_rope_scaling_orig_ctx_len(int(a.rope.original))
        writer.add_rope_scaling_yarn_beta_fast(yarn.fast)
        writer.add_rope_scaling_yarn_beta_slow(yarn.slow)
        writer.add_rope_scaling_attn_factors(yarn.attention / usual)  # llama.cpp multiplies by the usual one


def _entries(
    a: Architecture, names: GgufNames, state: Mapping[str, Tensor], merged: MergedWeights | None, kind: str
) -> Iterator[Entry]:
    """Yield the tensors of the file."""
    if a.rope.kind == "llama3":
        factors = HalvesRoPE(a.head_dim, 1, Rope(a.rope.base)).theta / HalvesRoPE(a.head_dim, 1, a.rope).theta
        yield Entry("rope_freqs.weight", list(factors.shape), "f32", lambda: factors)
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}.get(kind, torch.float32)

    def read(name: str) -> Tensor:
        return names.rows(name, state[name] if merged is None else merged.weight(name, dtype))

    for name, tensor in state.items():
        if name.endswith(_TABLES) or (a.tied and name == "lm_head.weight"):
            continue
        small = tensor.dim() < 2
        fits = kind != "q8_0" or tensor.shape[-1] % _BLOCK == 0
        yield Entry(
            names.name(name),
            list(tensor.shape),
            "f32" if small else kind if fits else "f16",
            partial(read, name),
        )


# ---- an adapter, which llama.cpp adds to the base model's file when it starts (``--lora FILE``)


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
    write(out, writer, list(_of_adapter(names, load_file(source.adapter / ADAPTER_WEIGHTS))))


def _of_adapter(names: GgufNames, adapter: dict[str, Tensor]) -> Iterator[Entry]:
    for name, update in updates_by_weight(adapter).items():
        a, b = update[".lora_A.weight"], names.rows(name, update[".lora_B.weight"])
        for end, tensor in (("lora_a", a), ("lora_b", b)):
            yield Entry(f"{names.name(name)}.{end}", list(tensor.shape), "f32", partial(Tensor.contiguous, tensor))
