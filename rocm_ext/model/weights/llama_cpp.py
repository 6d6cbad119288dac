"""llama.cpp's layouts of models in Hugging Face's format: metadata, and the tensors of each weight.

Keys, names and orders follow llama.cpp's ``convert_hf_to_gguf.py``.
"""

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rocm_ext.base.errors import UserError, explain_errors, refuse
from rocm_ext.model.families import (
    CONFIG,
    Architecture,
    Rope,
    Yarn,
    foreign_config,
    read_architecture,
    read_rope,
)  # fmt: skip
from rocm_ext.model.names import OUTPUT_WEIGHT, stored_names
from rocm_ext.model.weights.gguf_files import GgufFile, Metadata, files_in, shapes_in
from rocm_ext.model.weights.llama_cpp_models import COMMON, ROWS, ModelRow
from rocm_ext.model.weights.llama_cpp_parts import Part

_SCRIPT = "convert_hf_to_gguf.py from llama.cpp's sources"
CONVERTER = (
    f"try python {_SCRIPT}, on the model's folder, or on the DIR of --merged if there is an adapter"
)
FACTORS = "rope_freqs.weight"
STILL = 1e30  # divisor of frequencies that stay still
MOST_LAYERS = 1000
# Architectures whose weights in NVFP4 may have scales beside their blocks, one of a matrix or of each expert, as in
# ModelOpt's files; llama.cpp's others leave some out, as of build 11549
SCALED = ("llama", "qwen3", "qwen3moe", "qwen35", "qwen35moe", "gemma4")
# Kinds of RoPE that llama.cpp computes; by default all but Llama 3's, whose factors only its Llama reads. Its Gemma 3
# would apply YaRN to sliding layers; its Gemma 4 opens no file without factors.
_KINDS = {
    "LLAMA": ("default", "linear", "llama3", "yarn"),
    "GEMMA3": ("default", "linear"),
    "GEMMA4": ("proportional",),
}


@dataclass(frozen=True)
class Layout:
    """llama.cpp's layout of a model.

    Attributes:
        arch: the architecture's name in ``gguf.MODEL_ARCH``.
        layers, vocabulary: number of layers, and rows of the embeddings.
        keys: values of the metadata, by ``KEY`` in ``GGUFWriter.add_KEY``.
        parts: maps a weight's name to its parts.
        factors: divisors of RoPE's frequencies, [head_dim / 2], or None if there are none.
        merged_only: ends of the names of weights for which llama.cpp computes another LoRA.
        differs: a warning about small differences in llama.cpp's results.
    """

    arch: str
    layers: int
    vocabulary: int
    keys: Metadata
    parts: Callable[[str], list[Part]]
    factors: Tensor | None = None
    merged_only: tuple[str, ...] = ()
    differs: str = ""


def library() -> Any:
    """Return the package ``gguf``, or refuse its absence."""
    try:
        import gguf
    except ImportError as error:
        raise UserError(
            "GGUF files need the extra: pip install 'torchtune-rocm[export]'"
        ) from error
    return gguf


class GgufNames:
    """llama.cpp's names of the weights of a model with this layout.

    Raises:
        UserError: the package ``gguf`` is too old for the architecture.
    """

    def __init__(self, layout: Layout) -> None:
        gguf = library()
        try:
            kind = gguf.MODEL_ARCH[layout.arch]
        except KeyError as error:
            raise UserError(
                f"the package gguf does not know {layout.arch}; pip install -U gguf"
            ) from error
        self.arch = gguf.MODEL_ARCH_NAMES[kind]
        self._map = gguf.get_tensor_name_map(kind, layout.layers)

    def find(self, hf: str) -> str:
        """Return llama.cpp's name of a weight. Empty if it has none."""
        return self._map.get_name(hf, try_suffixes=(".weight", ".bias", ".scale")) or ""

    def name(self, hf: str) -> str:
        """Return llama.cpp's name of a weight, or refuse it."""
        llama_name = self.find(hf)
        if not llama_name:
            raise UserError(f"{hf} has no place in llama.cpp's {self.arch}; {CONVERTER}")
        return llama_name


def read_layout(folder: Path) -> Layout:
    """Return llama.cpp's layout of the model in a folder.

    Raises:
        UserError: llama.cpp or this module does not know the model, or llama.cpp computes another function.
    """
    config = foreign_config(folder, trust_remote_code=True)
    if config is None:
        return _of_native(folder, read_architecture(folder))
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        text = config
    row = ROWS.get(str(text.get("model_type")))
    if row is None or "auto_map" in config:
        named = config.get("architectures")
        name = named[0] if isinstance(named, list) and named else config.get("model_type")
        raise UserError(f"{name} is not written to GGUF files here; {CONVERTER}")
    # transformers and the table's functions raise anything
    with explain_errors(str(folder / CONFIG)):
        return _of_transformers(folder, row)


def way_out(folder: Path) -> str:
    """Return options of ``rocm-ext export`` that write a folder's model for other programs."""
    files = files_in(folder)
    if files:
        return f"--gguf-adapter LORA.gguf; then llama-server -m {shlex.quote(files[0])} --lora LORA.gguf"
    try:
        read_layout(folder)
    except UserError:
        return f"--merged DIR, and to GGUF with {_SCRIPT}, if it knows the model"
    return "--gguf FILE"


NATIVE = {  # llama.cpp's Mistral is its Llama
    "LlamaForCausalLM": "LLAMA",
    "MistralForCausalLM": "LLAMA",
    "Qwen2ForCausalLM": "QWEN2",
    "Qwen3ForCausalLM": "QWEN3",
}


def _of_native(folder: Path, a: Architecture) -> Layout:
    arch = NATIVE[a.name]
    problem = ""
    if a.rope.yarn and not a.rope.yarn.rounded:
        problem = "truncate is False; llama.cpp rounds YaRN's bounds"
    elif arch == "QWEN3" and a.out_bias:
        problem = "attention_bias is True; llama.cpp computes Qwen3 only without biases"
    elif arch == "QWEN2" and a.head_dim * a.heads != a.width:
        problem = f"head_dim is {a.head_dim}; llama.cpp's Qwen2 has heads of {a.width // a.heads} dimensions here"
    if problem:
        raise UserError(f"{folder / CONFIG}: {problem}")
    _check_rope(folder, arch, a.rope.kind)
    check_betas(folder / CONFIG, a.rope.yarn)
    keys = {
        "vocab_size": a.vocabulary,
        # the sliding window bounds it, because llama.cpp's Mistral has no window
        "context_length": a.positions,
        "embedding_length": a.width,
        "block_count": a.layers,
        "feed_forward_length": a.intermediate,
        "head_count": a.heads,
        "head_count_kv": a.kv_heads,
        "key_length": a.head_dim,
        "value_length": a.head_dim,
        "layer_norm_rms_eps": a.norm_eps,
        "rope_dimension_count": a.head_dim,
        **_rope_keys(a.rope),
    }
    factors = rope_factors(a.head_dim, a.rope) if a.rope.kind == "llama3" else None

    row_heads = {"q_proj": a.heads, "k_proj": a.kv_heads}

    def parts(name: str) -> list[Part]:
        if a.tied and name == OUTPUT_WEIGHT:
            return []
        heads = row_heads.get(name.split(".")[-2])
        if arch != "LLAMA" or heads is None:
            return [Part(name)]
        # Hugging Face's files rotate the two halves of a head together; llama.cpp's Llama rotates neighbours
        rows = torch.arange(heads * a.head_dim)
        halves = rows.view(heads, 2, -1)  # [heads, 2, head_dim / 2]
        neighbours = halves.transpose(1, 2)
        return [Part(name, neighbours.flatten())]

    return Layout(arch, a.layers, a.vocabulary, keys, parts, factors)


def _of_transformers(folder: Path, row: ModelRow) -> Layout:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).get_text_config()
    for key, computed in row.only.items():
        only = computed(config) if callable(computed) else computed
        value = getattr(config, key, only)
        if value != only:
            raise UserError(
                f"{folder / CONFIG}: {key} is {value!r}; llama.cpp computes only {only!r}"
            )
    rope = dict(config.rope_parameters)
    rope = rope.get("full_attention", rope)
    _check_rope(folder, row.arch, rope["rope_type"])
    part = rope.pop("partial_rotary_factor", 1.0)
    keys = {}
    for key, source in {**COMMON, **row.keys}.items():
        value = source(config) if callable(source) else getattr(config, source, None)
        if value is not None:  # without an MLP, no size of it
            keys[key] = value
    factors = None
    if rope["rope_type"] == "proportional":  # the first dimensions rotate, the others stay
        rope["rope_type"] = "default"
        width = keys["key_length"]
        factor = rope.get("factor", 1.0)
        factors = first_dimensions(width, int(width * part) // 2, factor)
        part = 1.0
    read = read_rope({"rope_parameters": rope}, config.max_position_embeddings)
    check_betas(folder / CONFIG, read.yarn)
    keys |= {"rope_dimension_count": int(keys["key_length"] * part), **_rope_keys(read)}
    differs = ""
    if read.yarn and not read.yarn.rounded:
        differs = "llama.cpp rounds the bounds of YaRN, and this model does not: its answers differ a little there"

    def parts(name: str) -> list[Part]:
        return row.parts(name.replace("language_model.", ""), config)

    return Layout(
        row.arch,
        config.num_hidden_layers,
        config.vocab_size,
        keys,
        parts,
        factors,
        row.merged_only,
        differs,
    )


def parts_by_weight(
    folder: Path, first: GgufFile, stored: Mapping[str, str]
) -> dict[str, list[Part]]:
    """Return the parts of all weights in a model's GGUF files, with llama.cpp's names.

    ``stored`` has the kinds of blocks in all files by llama.cpp's names of the tensors; ``first`` is the first file.

    Raises:
        UserError: the files have a tensor that the model lacks, or lack a part of a weight.
    """
    layout = read_layout(folder)
    names = GgufNames(layout)
    weights = {}
    known = {FACTORS}
    for name in shapes_in(folder) or stored_names(layout.layers):
        ways = [layout.parts(name)]
        if name.endswith("gate_up_proj"):
            ways.append([Part(f"{name}.weight")])
        for way in ways:
            parts = [replace(part, name=names.find(part.name)) for part in way]
            missing = [part.name for part in parts if part.name not in stored]
            if len(missing) == len(parts):
                continue
            refuse(f"{first.path} lacks {part}" for part in missing)
            weights[name] = parts
            for part in parts:
                known.add(part.name)
                if stored[part.name] == "NVFP4" and names.arch in SCALED:
                    # activations are not rounded here, so their scale is unused
                    known |= {scale_of(part.name), scale_of(part.name, "input_scale")}
            break
    ahead = tuple(f"blk.{layout.layers + number}." for number in range(layers_ahead(first)))
    unknown = {*stored} - known
    others = sorted(name for name in unknown if not name.startswith(ahead))
    refuse(f"{first.path} has {name}, which no layer of this {names.arch} has" for name in others)
    return weights


def scale_of(name: str, kind: str = "scale") -> str:
    """Return llama.cpp's name of the scale of a weight ``name``."""
    return name.removesuffix("weight") + kind


def layers_ahead(file: GgufFile) -> int:
    """Return the number of final layers that predict further tokens and are left out."""
    if not file.architecture.startswith("qwen35"):
        return 0
    layers = file.metadata.get(f"{file.architecture}.nextn_predict_layers")
    if type(layers) is not int or layers not in range(MOST_LAYERS + 1):
        return 0
    return layers


def add_keys(writer, keys: Metadata) -> None:
    """Add the keys of a :class:`Layout` to a ``GGUFWriter``."""
    for key, value in keys.items():
        if key == "rope_scaling_type":
            value = library().RopeScalingType(value)
        add = getattr(writer, f"add_{key}")
        add(value)


def rope_factors(width: int, rope: Rope) -> Tensor:
    """Return the divisors of RoPE's frequencies."""
    return Rope(rope.base).frequencies(width) / rope.frequencies(width)


def first_dimensions(width: int, turned: int, factor: float) -> Tensor:
    """Return divisors with which only the first ``turned`` frequencies rotate."""
    return torch.where(torch.arange(width // 2) < turned, factor, STILL)


def _check_rope(folder: Path, arch: str, kind: str) -> None:
    known = _KINDS.get(arch, ("default", "linear", "yarn"))
    if kind not in known:
        raise UserError(
            f"{folder / CONFIG}: rope_type is {kind!r}; for {arch}, llama.cpp computes only {', '.join(known)}"
        )


def check_betas(file: Path, yarn: Yarn | None) -> None:
    """Refuse bounds of YaRN that llama.cpp would not compute: for these architectures it ignores their keys."""
    if yarn is not None and (yarn.fast, yarn.slow) != (32.0, 1.0):
        raise UserError(
            f"{file}: YaRN's beta_fast is {yarn.fast:g} and its beta_slow {yarn.slow:g}; llama.cpp computes 32 and 1 "
            "whatever a file says; use the model's folder and another program than llama.cpp"
        )


def _rope_keys(rope: Rope) -> Metadata:
    keys: Metadata = {"rope_freq_base": rope.base}
    if rope.kind in ("linear", "yarn"):
        keys |= {"rope_scaling_type": rope.kind, "rope_scaling_factor": rope.factor}
    if rope.yarn:
        usual = 0.1 * math.log(rope.factor) + 1.0  # llama.cpp multiplies by it
        keys |= {
            "rope_scaling_orig_ctx_len": int(rope.original),
            "rope_scaling_yarn_beta_fast": rope.yarn.fast,
            "rope_scaling_yarn_beta_slow": rope.yarn.slow,
            "rope_scaling_attn_factors": rope.yarn.attention / usual,
        }
    return keys
