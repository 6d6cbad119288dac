"""llama.cpp's layouts of models in Hugging Face's format: one table row per architecture that both compute alike.

Keys, names and orders follow llama.cpp's ``convert_hf_to_gguf.py``.
"""

import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rocm_ext.base.errors import UserError, explain_errors, refuse
from rocm_ext.base.types import Json
from rocm_ext.model.families import (
    CONFIG,
    MODEL_TYPES,
    Architecture,
    Rope,
    Yarn,
    foreign_config,
    read_architecture,
    read_rope,
)  # fmt: skip
from rocm_ext.model.names import OUTPUT_WEIGHT, stored_names
from rocm_ext.model.weights.gguf_files import GgufFile, Metadata, Place, files_in, shapes_in
from rocm_ext.model.weights.quantized import of_blocks

_SCRIPT = "convert_hf_to_gguf.py from llama.cpp's sources"
CONVERTER = (
    f"try python {_SCRIPT}, on the model's folder, or on the DIR of --merged if there is an adapter"
)
_FACTORS = "rope_freqs.weight"
_STILL = 1e30  # divisor of frequencies that stay still
# keys that do not change the function, or repeat other keys
_OPTIONAL = {"vocab_size", "head_count_kv", "key_length", "value_length", "final_logit_softcapping",
             "sliding_window_pattern", "rope_freq_base_swa", "rope_dimension_sections"}  # fmt: skip
_MOST_LAYERS = 1000
_LARGEST = 2**28  # the largest of the other sizes, a number of positions
# sizes that may be 0
_OR_NONE = {"shared_kv_layers", "embedding_length_per_layer_input", "feed_forward_length", "final_logit_softcapping",
            "rope_dimension_sections"}  # fmt: skip
_IDLE = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.value_length"}
_YARN = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow",
         "attention_factor": "rope.scaling.attn_factor"}  # fmt: skip
# Kinds of RoPE that llama.cpp computes; by default all but Llama 3's, whose factors only its Llama reads. Its Gemma 3
# would apply YaRN to sliding layers; its Gemma 4 opens no file without factors.
_KINDS = {
    "LLAMA": ("default", "linear", "llama3", "yarn"),
    "GEMMA3": ("default", "linear"),
    "GEMMA4": ("proportional",),
}


class Change(NamedTuple):
    """A change of a weight's values."""

    to_llama: Callable[[Tensor], Tensor]
    from_llama: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """A weight, or some of its rows, as a tensor of llama.cpp.

    Attributes:
        name: Hugging Face's name, in a form that the package ``gguf`` knows.
        rows: rows of the weight, or of every expert's weight, after ``change``.
        heads: shape [a, b, width] of the columns after ``change``, which llama.cpp orders as [b, a, width]. None if
            the order is the same.
        change: change of the weight's values. None if values stay.
    """

    name: str
    rows: slice | Tensor = field(default_factory=lambda: slice(None))
    heads: tuple[int, int, int] | None = None
    change: Change | None = None

    def of(self, weight: Tensor) -> Tensor:
        """Return the part of a weight, [..., rows, columns] or, of a vector or biases, [..., rows]."""
        if self.change is not None:
            weight = self.change.to_llama(weight)
        if self.is_vector(weight):
            return weight[..., self.rows]
        return self.columns_of(weight[..., self.rows, :])

    def columns_of(self, weight: Tensor) -> Tensor:
        """Return a weight with the columns in llama.cpp's order."""
        if self.heads is None:
            return weight
        by_head = weight.unflatten(-1, self.heads)  # [..., a, b, width]
        return by_head.transpose(-3, -2).flatten(-3)

    def is_vector(self, tensor: Tensor) -> bool:
        """Return whether a tensor with this name has no columns."""
        return tensor.dim() < 2 or self.name.endswith("bias")


def joined(parts: Sequence[Part], tensors: Sequence[Tensor], kind: str) -> Tensor:
    """Join parts to a weight, the reverse of :meth:`Part.of`; raise a ValueError if the shapes do not fit.

    Args:
        parts: the weight's parts.
        tensors: llama.cpp's tensors, one per part: numbers, or bytes of blocks.
        kind: kind of the blocks, a key of :data:`rocm_ext.model.weights.unpack.BLOCKS`. Empty for numbers.
    """
    first = parts[0]
    weight = tensors[0]
    is_vector = first.is_vector(weight)
    dim = -1 if is_vector else -2
    if kind and is_vector:
        raise ValueError(f"{first.name} has blocks of {kind}; expected numbers")
    if any(tensor.shape != weight.shape for tensor in tensors):
        raise ValueError(f"{first.name} and {parts[-1].name} have different shapes")
    rows = weight.shape[dim]
    if isinstance(first.rows, Tensor) and rows != len(first.rows):
        raise ValueError(f"{first.name} has {rows} rows instead of {len(first.rows)}")
    if len(parts) > 1:
        shape = list(weight.shape)
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        weight = weight.new_empty(shape)
        for part, tensor in zip(parts, tensors, strict=True):
            if is_vector:
                weight[..., part.rows] = tensor
            else:
                weight[..., part.rows, :] = tensor
    elif isinstance(first.rows, Tensor):
        back = first.rows.argsort()
        weight = weight.index_select(dim, back.to(weight.device))
    swapped = None
    if first.heads is not None:
        a, b, width = first.heads
        swapped = b, a, width
    if kind:
        weight = of_blocks(weight, kind, heads=swapped)
    elif swapped:
        weight = replace(first, heads=swapped).columns_of(weight)
    return weight if first.change is None else first.change.from_llama(weight)


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
    row = _ROWS.get(str(text.get("model_type")))
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


# ---- native families


_NATIVE = {  # llama.cpp's Mistral is its Llama
    "LlamaForCausalLM": "LLAMA",
    "MistralForCausalLM": "LLAMA",
    "Qwen2ForCausalLM": "QWEN2",
    "Qwen3ForCausalLM": "QWEN3",
}


def _of_native(folder: Path, a: Architecture) -> Layout:
    arch = _NATIVE[a.name]
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
    _check_betas(folder / CONFIG, a.rope.yarn)
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
    factors = _factors(a.head_dim, a.rope) if a.rope.kind == "llama3" else None

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


def places(folder: Path, first: GgufFile, stored: Collection[str]) -> dict[str, list[Part]]:
    """Return the parts of all weights in a model's GGUF files, with llama.cpp's names.

    ``stored`` has llama.cpp's names of the tensors in all files, of which ``first`` is the first.

    Raises:
        UserError: the files have a tensor that the model lacks, or lack a part of a weight.
    """
    layout = read_layout(folder)
    names = GgufNames(layout)
    weights = {}
    known = {_FACTORS}
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
            known.update(part.name for part in parts)
            break
    ahead = tuple(f"blk.{layout.layers + number}." for number in range(_ahead(first)))
    unknown = {*stored} - known
    others = sorted(name for name in unknown if not name.startswith(ahead))
    refuse(f"{first.path} has {name}, which no layer of this {names.arch} has" for name in others)
    return weights


def _ahead(file: GgufFile) -> int:
    """Return the number of final layers that predict further tokens and are left out."""
    if not file.architecture.startswith("qwen35"):
        return 0
    layers = file.metadata.get(f"{file.architecture}.nextn_predict_layers")
    if type(layers) is not int or layers not in range(_MOST_LAYERS + 1):
        return 0
    return layers


def config_of(files: Sequence[GgufFile]) -> Json:
    """Return the content of ``config.json`` for the GGUF files of a model, the reverse of :func:`read_layout`.

    Raises:
        UserError: the metadata has an unknown architecture or an unknown key.
        Exception: a key is missing or a value has another type; the caller explains it.
    """
    file = files[0]
    arch = file.architecture

    def check(fits: bool, problem: str) -> None:
        if not fits:
            raise UserError(f"{file.path}: {arch}.{problem}")

    places: dict[str, Place] = {}
    for part in files:
        places |= part.places
    kind, row = _family_of(file)
    embeddings = places.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise UserError(f"{file.path} lacks token_embd.weight, the embeddings")
    name = MODEL_TYPES.get(kind) or _class_of(kind, file)
    config: Json = {"architectures": [name], "model_type": kind}
    asked = dict(_COMMON)
    optional = set(_OPTIONAL)  # see check_config
    if row is not None:
        for key, value in row.only.items():
            if not callable(value):
                config[key] = value
        asked |= row.keys
        optional.update(asked if "expert_count" in row.keys else row.keys)
    keys = _keys(file)
    values = Metadata()
    for key, theirs in asked.items():
        stored = _stored_key(arch, key)
        value = keys.pop(stored, None)
        if value is None and key in optional:
            continue
        problem = _problem_of(key, value)
        check(not problem, f"{stored} is {value!r}; {problem}")
        values[key] = value
        if isinstance(theirs, str):
            same = config.setdefault(theirs, value) == value
            check(same, f"{stored} is {value}, but {theirs} {config[theirs]}")
    width = values.get("key_length", config["hidden_size"] // config["num_attention_heads"])
    config["head_dim"] = width
    config["vocab_size"] = embeddings.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in places
    if row is None:
        biased_qkv = arch == "llama" and "blk.0.attn_q.bias" in places
        config["attention_bias"] = biased_qkv or "blk.0.attn_output.bias" in places
    proportional = row is not None and row.arch == "GEMMA4"
    config["rope_parameters"] = _rope_of(files, keys, config, proportional)
    turned = keys.pop("rope.dimension_count", width)
    if turned != width:
        partial = arch.startswith("qwen35") and turned in range(2, width, 2)
        check(partial, f"rope.dimension_count is {turned}; expected head_dim, {width}")
        config["rope_parameters"]["partial_rotary_factor"] = turned / width
    most = values.get("expert_count", _LARGEST)
    check(
        values.get("expert_used_count", 0) <= most,
        f"expert_used_count is more than expert_count, {most}",
    )
    if row is not None:
        config |= row.back(values, config)
    others = sorted(keys.keys() - _IDLE)
    refuse(
        f"{file.path}: {arch}.{key} is {keys[key]!r}, which is not computed here" for key in others
    )
    return config


def _family_of(file: GgufFile) -> tuple[str, "_Row | None"]:
    """Return the model_type of a file's architecture, and its row of the table unless it is a native family."""
    for kind, row in _ROWS.items():
        if _named(row.arch) == file.architecture:
            return kind, row
    for kind, name in MODEL_TYPES.items():
        if _named(_NATIVE[name]) == file.architecture:
            return kind, None
    known = {_named(arch) for arch in _NATIVE.values()}
    known |= {_named(row.arch) for row in _ROWS.values()}
    raise UserError(
        f"{file.path} is llama.cpp's {file.architecture}; {', '.join(sorted(known))} are read from GGUF files"
    )


def _class_of(kind: str, file: GgufFile) -> str:
    """Return transformers' name of the class of a model_type."""
    with suppress(ImportError, KeyError):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    raise UserError(
        f"{file.path} needs a transformers that knows {kind}: pip install 'torchtune-rocm[transformers]'"
    )


def _problem_of(key: str, value) -> str:
    """Say what is wrong with a value of the metadata. An empty text means nothing."""
    values = value if isinstance(value, list) else [value]
    kinds = {type(value) for value in values}
    if key == "sliding_window_pattern":
        return "" if kinds <= {bool} else "expected booleans"
    if not kinds <= {int, float}:
        return "expected a number"
    most = _MOST_LAYERS if key == "block_count" else _LARGEST
    least = 1e-12 if float in kinds else 1
    if key in _OR_NONE:
        least = 0
    fits = all(least <= value <= most for value in values)
    return "" if fits else f"expected {least} to {most}"


def check_config(folder: Path, file: GgufFile) -> None:
    """Check that a folder's ``config.json`` gives the metadata of ``file``, from which it was made."""
    arch = file.architecture
    stored = _keys(file)
    layout = read_layout(folder)
    asked = {*_COMMON}
    for row in _ROWS.values():
        if row.arch == layout.arch:
            asked |= row.keys.keys()
    asked -= _OPTIONAL
    needed = {_stored_key(arch, key) for key in layout.keys.keys() & asked}
    for key, value in _stored(arch, layout.keys).items():
        if key not in stored:
            if key in needed:
                raise UserError(f"{file.path} lacks {arch}.{key}")
        elif not _equal(stored[key], value):
            raise UserError(
                f"{file.path}: {arch}.{key} is {stored[key]}, but {value} is computed here"
            )


def _equal(stored, value) -> bool:
    """Return whether two values of the metadata agree; a single number stands for a list of its copies."""
    if isinstance(stored, list) or isinstance(value, list):
        ours = value if isinstance(value, list) else [value]
        theirs = stored if isinstance(stored, list) else [stored]
        if len(ours) == 1:
            ours = ours * len(theirs)
        if len(theirs) == 1:
            theirs = theirs * len(ours)
        return len(ours) == len(theirs) and all(map(_equal, theirs, ours))
    if isinstance(value, float):
        return math.isclose(stored, value, rel_tol=1e-5)
    return stored == value


def _named(arch: str) -> str:
    return arch.lower().replace("_", "-")


def _keys(file: GgufFile) -> Metadata:
    """Return the architecture's metadata, without layers that predict further tokens."""
    prefix = f"{file.architecture}."
    keys = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    ahead = _ahead(file)
    if ahead:
        del keys["nextn_predict_layers"]
        keys["block_count"] -= ahead
    pattern = "attention.sliding_window_pattern"
    period = keys.get(pattern)
    layers = keys.get("block_count", 0)
    if type(period) is int and layers in range(_MOST_LAYERS):
        every = max(period, 1)
        keys[pattern] = [layer % every > 0 for layer in range(1, layers + 1)]
    return keys


def add_keys(writer, keys: Metadata) -> None:
    """Add the keys of a :class:`Layout` to a ``GGUFWriter``."""
    for key, value in keys.items():
        if key == "rope_scaling_type":
            value = library().RopeScalingType(value)
        add = getattr(writer, f"add_{key}")
        add(value)


def _stored(arch: str, keys: Metadata) -> Metadata:
    """Return keys and values as stored in the metadata."""
    writer = library().GGUFWriter(None, arch)
    add_keys(writer, keys)
    entries = writer.kv_data[0].items()
    return {key.removeprefix(f"{arch}."): entry.value for key, entry in entries}


def _stored_key(arch: str, key: str) -> str:
    return list(_stored(arch, {key: [1]}))[-1]


def _rope_of(files: Sequence[GgufFile], keys: Metadata, config: Json, proportional: bool) -> Json:
    """Return RoPE's parameters, and remove its keys from ``keys``; ``proportional``: only first dimensions rotate."""

    path = files[0].path

    def taken(key: str, usual=None) -> Any:
        value = keys.pop(key, usual)
        problem = _problem_of(key, value)
        if problem:
            raise UserError(f"{path}: {key} is {value!r}; {problem}")
        return value

    rope = {"rope_type": "default", "rope_theta": taken("rope.freq_base", 10_000.0)}
    kind = keys.pop("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise UserError(f"{path}: rope.scaling.type is {kind!r}; expected none, linear or yarn")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": taken("rope.scaling.factor")}
    if kind == "yarn":
        trained = keys.pop(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        )
        rope["original_max_position_embeddings"] = trained
        for key, stored in _YARN.items():
            if stored in keys:
                rope[key] = keys.pop(stored)
        if "attention_factor" in rope:
            usual = 0.1 * math.log(rope["factor"]) + 1.0  # llama.cpp multiplies by it
            rope["attention_factor"] *= usual
        _check_betas(path, read_rope({"rope_parameters": rope}, 1).yarn)
    holders = [file for file in files if _FACTORS in file.places]
    if not holders:
        return rope
    holder = holders[0]
    place = holder.places[_FACTORS]
    width = config["head_dim"]
    fits = kind == "none" and not place.kind and place.shape == (width // 2,)
    factors = holder.numbers(_FACTORS) if fits else torch.ones(1)
    if proportional:
        family = "Gemma 4"
        turned = int((factors < _STILL).sum())
        factor = float(factors[0])
        rope |= {
            "rope_type": "proportional",
            "factor": factor,
            "partial_rotary_factor": 2 * turned / width,
        }
        same = torch.equal(factors, _first_dimensions(width, turned, factor))
    else:
        family = "Llama 3"
        rope |= {
            "rope_type": "llama3",
            "factor": round(float(factors.max()), 3),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        computed = _factors(width, read_rope({"rope_parameters": rope}, 1))
        same = torch.allclose(computed, factors, 1e-4)
    if not fits or not same:
        raise UserError(
            f"{path}: {_FACTORS} are not {family}'s; put the model's config.json beside the file"
        )
    return rope


def _factors(width: int, rope: Rope) -> Tensor:
    """Return the divisors of RoPE's frequencies."""
    return Rope(rope.base).frequencies(width) / rope.frequencies(width)


def _first_dimensions(width: int, turned: int, factor: float) -> Tensor:
    """Return divisors with which only the first ``turned`` frequencies rotate."""
    return torch.where(torch.arange(width // 2) < turned, factor, _STILL)


def _check_rope(folder: Path, arch: str, kind: str) -> None:
    known = _KINDS.get(arch, ("default", "linear", "yarn"))
    if kind not in known:
        raise UserError(
            f"{folder / CONFIG}: rope_type is {kind!r}; for {arch}, llama.cpp computes only {', '.join(known)}"
        )


def _check_betas(file: Path, yarn: Yarn | None) -> None:
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


# ---- architectures that transformers computes, with all keys in its config objects


Of = str | Callable[[Any], Any]  # a key of the config, or what is computed from it


@dataclass(frozen=True)
class _Row:
    """An architecture of the table.

    Attributes:
        arch: the architecture's name in ``gguf.MODEL_ARCH``.
        parts: maps a weight's name and the config to the weight's parts.
        keys: keys of the metadata, in addition to :data:`_COMMON`.
        only: keys of the config, with the only values that llama.cpp computes.
        back: returns further entries of the config from the metadata's values and the config so far.
        merged_only: see :class:`Layout`.
    """

    arch: str
    parts: Callable[[str, Any], list[Part]]
    keys: Mapping[str, Of]
    only: Mapping[str, Any]
    back: Callable[[Metadata, Json], Json]
    merged_only: tuple[str, ...] = ()


def _of_transformers(folder: Path, row: _Row) -> Layout:
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
    for key, source in {**_COMMON, **row.keys}.items():
        value = source(config) if callable(source) else getattr(config, source, None)
        if value is not None:  # without an MLP, no size of it
            keys[key] = value
    factors = None
    if rope["rope_type"] == "proportional":  # the first dimensions rotate, the others stay
        rope["rope_type"] = "default"
        width = keys["key_length"]
        factor = rope.get("factor", 1.0)
        factors = _first_dimensions(width, int(width * part) // 2, factor)
        part = 1.0
    read = read_rope({"rope_parameters": rope}, config.max_position_embeddings)
    _check_betas(folder / CONFIG, read.yarn)
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


_PLUS_ONE = Change(lambda weight: weight.float() + 1, lambda stored: stored.float() - 1)
_DECAY = Change(lambda weight: -weight.float().exp(), lambda stored: (-stored.float()).log())
_FLAT = Change(lambda weight: weight.squeeze(1), lambda stored: stored.unsqueeze(1))
_TRANSPOSED = Change(lambda weight: weight.mT, lambda stored: stored.mT)


def _experts(name: str, config) -> list[Part]:
    """Return the parts of a weight; fused experts are [experts, gate and up, in] or [experts, out, in]."""
    stem, fused, _ = name.partition("gate_up_proj")
    if fused:
        half = config.moe_intermediate_size
        gate = Part(f"{stem}gate_proj.weight", slice(half))
        up = Part(f"{stem}up_proj.weight", slice(half, None))
        return [gate, up]
    if name.endswith("experts.down_proj"):
        name += ".weight"
    return [Part(name)]


def _gemma_3(name: str, _) -> list[Part]:
    return [Part(name, change=_PLUS_ONE if name.endswith("norm.weight") else None)]


def _gpt_oss(name: str, _) -> list[Part]:
    """Experts are [experts, in, out], and the outputs of gate and up alternate."""
    if name.endswith("sinks"):
        return [Part(f"{name}.weight")]
    stem, experts, layer = name.partition(".experts.")
    if not experts:
        return [Part(name)]
    end = "weight"
    change: Change | None = _TRANSPOSED
    if layer.endswith("_bias"):
        end = "bias"
        change = None
    if layer.startswith("down_proj"):
        parts = {"down": slice(None)}
    else:
        parts = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    return [
        Part(f"{stem}.experts.{part}_proj.{end}", rows, change=change)
        for part, rows in parts.items()
    ]


def _qwen3_5(name: str, config) -> list[Part]:
    """Hugging Face orders v's heads by k's heads; llama.cpp has the first v head of every k head first, and so on."""
    stem, delta, layer = name.partition(".linear_attn.")
    if not delta:
        parts = _experts(name, config)
        if name.endswith("norm.weight"):
            return [replace(parts[0], change=_PLUS_ONE)]
        return parts
    heads = config.linear_num_value_heads
    keys = config.linear_num_key_heads
    by_head = torch.arange(heads).view(keys, -1).T.flatten()
    width = config.linear_value_head_dim
    begins = by_head[:, None] * width
    values = (begins + torch.arange(width)).flatten()
    before = 2 * keys * config.linear_key_head_dim  # rows of q and k
    mixed = torch.cat([torch.arange(before), before + values])
    of_delta = {
        "A_log": Part(name, by_head, change=_DECAY),
        "dt_bias": Part(f"{stem}{delta}dt_proj.bias", by_head),
        "conv1d.weight": Part(name, mixed, change=_FLAT),
        "in_proj_qkv.weight": Part(name, mixed),
        "in_proj_z.weight": Part(name, values),
        "in_proj_a.weight": Part(name, by_head),
        "in_proj_b.weight": Part(name, by_head),
        "out_proj.weight": Part(name, heads=(keys, heads // keys, width)),
    }
    return [of_delta.get(layer, Part(name))]


_GEMMA_4 = {  # ends of names, and what gguf knows for them
    "router.scale": "router.proj.scale",
    "router.per_expert_scale": "experts.down_proj.scale",
    "layer_scalar": "layer_scalar.weight",
    "experts.gate_up_proj": "experts.gate_up_proj.weight",
    "experts.down_proj": "experts.down_proj.weight",
}


def _gemma_4(name: str, _) -> list[Part]:
    for end, known in _GEMMA_4.items():
        if name.endswith(end):
            return [Part(name.removesuffix(end) + known)]
    return [Part(name)]


def _head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


_COMMON: dict[str, Of] = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "key_length": _head_dim,
    "value_length": _head_dim,
    "layer_norm_rms_eps": "rms_norm_eps",
}
_EXPERTS: dict[str, Of] = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


def _local_base(config) -> float:
    rope = config.rope_parameters["sliding_attention"]
    if rope["rope_type"] != "default":
        raise UserError(
            f"RoPE of sliding layers is {rope['rope_type']!r}; llama.cpp computes only 'default'"
        )
    return rope["rope_theta"]


def _table(config) -> int:
    """Return the rows that llama.cpp expects in the layers' embeddings, if there are any."""
    if config.hidden_size_per_layer_input:
        return config.vocab_size
    return config.vocab_size_per_layer_input


def _mlps(config) -> list[int]:
    size = config.intermediate_size
    wide = 2 * size if config.use_double_wide_mlp else size
    return [wide if mode == "reuse" else size for mode in config.kv_sharing_modes]


_WINDOW: dict[str, Of] = {
    "sliding_window": "sliding_window",
    "sliding_window_pattern": lambda c: [kind == "sliding_attention" for kind in c.layer_types],
}


def _interval(config) -> int:
    return config.layer_types.index("full_attention") + 1


_DELTA: dict[str, Of] = {
    "ssm_conv_kernel": "linear_conv_kernel_dim",
    "ssm_state_size": "linear_key_head_dim",
    "ssm_group_count": "linear_num_key_heads",
    "ssm_time_step_rank": "linear_num_value_heads",
    "ssm_inner_size": lambda c: c.linear_num_value_heads * c.linear_value_head_dim,
    "full_attention_interval": _interval,
    # sections for positions in images; in text all sections have the same positions
    "rope_dimension_sections": lambda c: [*c.rope_parameters.get("mrope_section", [11, 11, 10]), 0],
}


def _kinds(layers: int, every: int, others: str) -> list[str]:
    """Return the kinds of layers if every n-th has full attention."""
    return ["full_attention" if layer % every == 0 else others for layer in range(1, layers + 1)]


_SILU = {"hidden_act": "silu", "attention_bias": False}
_QWEN3_5 = {
    **_SILU,
    "layer_types": lambda c: _kinds(c.num_hidden_layers, _interval(c), "linear_attention"),
    "linear_value_head_dim": lambda c: c.linear_key_head_dim,
}
_GELU = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}


def _back_to_windows(every: int, values: Metadata, config: Json) -> Json:
    """Return the kinds of layers; where the file does not say it, every n-th layer has full attention."""
    pattern = values.get("sliding_window_pattern")
    if pattern:
        kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    else:
        kinds = _kinds(config["num_hidden_layers"], every, "sliding_attention")
    return {"layer_types": kinds}


def _back_to_gemma(values: Metadata, config: Json, base: float) -> Json:
    """Return the entries that Gemma 3 and 4 have; ``base`` is RoPE's in sliding layers."""
    sliding = {"rope_type": "default", "rope_theta": base}
    ropes = {"full_attention": config["rope_parameters"], "sliding_attention": sliding}
    return _back_to_windows(6, values, config) | {"rope_parameters": ropes}


def _back_to_gemma_3(values: Metadata, config: Json) -> Json:
    base = values.get("rope_freq_base_swa", 10_000.0)
    return _back_to_gemma(values, config, base) | {
        "query_pre_attn_scalar": _gemma_3_scale(SimpleNamespace(**config)),
        "final_logit_softcapping": config.get("final_logit_softcapping") or None,
    }


def _back_to_qwen3_5(values: Metadata, config: Json) -> Json:
    rope = dict(config["rope_parameters"])
    if sections := values.get("rope_dimension_sections"):
        rope["mrope_section"] = sections[:3]
    every = values["full_attention_interval"]
    return {
        "rope_parameters": rope,
        "linear_value_head_dim": values["ssm_inner_size"] // config["linear_num_value_heads"],
        "layer_types": _kinds(config["num_hidden_layers"], every, "linear_attention"),
    }


def _back_to_gemma_4(values: Metadata, config: Json) -> Json:
    widths = values["feed_forward_length"]
    if not isinstance(widths, list):
        widths = [widths]
    layers = _back_to_gemma(values, config, values["rope_freq_base_swa"])
    heads = values["head_count_kv"]
    if not isinstance(heads, list):
        heads = [heads] * len(layers["layer_types"])
    by_kind = dict(zip(layers["layer_types"], heads, strict=True))
    few = by_kind.get("full_attention", heads[0])
    many = by_kind.get("sliding_attention", heads[0])
    return layers | {
        "head_dim": values["key_length_swa"],
        "global_head_dim": values["key_length"],
        "num_key_value_heads": many,
        "num_global_key_value_heads": few,
        # all published models agree with this; loading refuses others
        "attention_k_eq_v": few != many,
        "intermediate_size": min(widths),
        "use_double_wide_mlp": min(widths) < max(widths),
        "vocab_size_per_layer_input": config["vocab_size"],
        "enable_moe_block": "num_experts" in config,
        "final_logit_softcapping": values.get("final_logit_softcapping", 30.0) or None,
    }


def _gemma_3_scale(config) -> float:
    """Return llama.cpp's scale of attention; it recognises the 27B model by its layers."""
    if config.num_hidden_layers == 62:
        return config.hidden_size // config.num_attention_heads
    return config.head_dim


_ROWS = {  # rows of the table by the model_type of the text part
    "qwen3_moe": _Row(
        "QWEN3MOE",
        _experts,
        _EXPERTS,
        {
            **_SILU,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "use_sliding_window": False,
        },
        lambda values, config: {},
    ),
    "gemma3_text": _Row(
        "GEMMA3",
        _gemma_3,
        {
            **_WINDOW,
            "rope_freq_base_swa": _local_base,
            "final_logit_softcapping": "final_logit_softcapping",
        },
        {**_GELU, "attn_logit_softcapping": None, "query_pre_attn_scalar": _gemma_3_scale},
        _back_to_gemma_3,
    ),
    "gpt_oss": _Row(
        "GPT_OSS",
        _gpt_oss,
        {
            **_WINDOW,
            **_EXPERTS,
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
        },
        {
            "attention_bias": True,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
        },
        partial(_back_to_windows, 2),
    ),
    "qwen3_5_text": _Row("QWEN35", _qwen3_5, _DELTA, _QWEN3_5, _back_to_qwen3_5),
    "qwen3_5_moe_text": _Row(
        "QWEN35MOE",
        _qwen3_5,
        {
            **_DELTA,
            **_EXPERTS,
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        _QWEN3_5,
        _back_to_qwen3_5,
    ),
    "gemma4_text": _Row(
        "GEMMA4",
        _gemma_4,
        {
            **_WINDOW,
            **_EXPERTS,
            "expert_used_count": "top_k_experts",
            "rope_freq_base_swa": _local_base,
            # llama.cpp takes 30 where the key is missing, and 0 for no cap
            "final_logit_softcapping": lambda c: c.final_logit_softcapping or 0.0,
            "shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "head_count_kv": lambda c: [
                c.per_layer_config[layer].num_key_value_heads
                for layer in range(c.num_hidden_layers)
            ],
            **dict.fromkeys(
                ("key_length", "value_length"),
                lambda c: c.per_layer_config["full_attention"].head_dim,
            ),
            **dict.fromkeys(
                ("key_length_swa", "value_length_swa", "rope_dimension_count_swa"),
                lambda c: c.per_layer_config["sliding_attention"].head_dim,
            ),
            "feed_forward_length": _mlps,
        },
        {**_GELU, "vocab_size_per_layer_input": _table},
        _back_to_gemma_4,
        merged_only=("experts.down_proj",),  # the router's scale of an expert leaves out its LoRA
    ),
}
