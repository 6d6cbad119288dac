"""How llama.cpp lays out models that are here as Hugging Face's: a table for each architecture that it computes alike.

Keys, names and orders are those of llama.cpp's ``convert_hf_to_gguf.py``.
"""

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.model.families import (
    CONFIG,
    Architecture,
    Rope,
    foreign_config,
    read_architecture,
    read_rope,
    stored_names,
)
from rocm_ext.model.gguf_files import GgufFile, files_in
from rocm_ext.model.layers import HalvesRoPE

_SCRIPT = "convert_hf_to_gguf.py, of llama.cpp's own sources"
CONVERTER = f"try python {_SCRIPT}, on the model's folder, or on the DIR of --merged if there is an adapter"
# Kinds of RoPE that llama.cpp computes, where not all but Llama 3's, whose factors its Llama alone reads. Its Gemma 3
# applies YaRN to sliding layers, too; its Gemma 4 opens no file without factors.
_FACTORS = "rope_freqs.weight"
# keys that say nothing of the function, or what others say
_OPTIONAL = {"vocab_size", "head_count_kv", "key_length", "value_length"}  # of _COMMON
_IDLE = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.value_length"}
_YARN = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow",
         "attention_factor": "rope.scaling.attn_factor"}  # fmt: skip
_KINDS = {
    "LLAMA": ("default", "linear", "llama3", "yarn"),
    "GEMMA3": ("default", "linear"),
    "GEMMA4": ("proportional",),
}


@dataclass(frozen=True)
class Part:
    """A weight, or some of its rows and columns, as a tensor of llama.cpp.

    Attributes:
        name: Hugging Face's, as the package ``gguf`` knows it.
        rows, columns: of the weight, of each expert's where it has experts. They are cut after ``change``.
        change: of the values; None: they stay.
    """

    name: str
    rows: slice | Tensor = field(default_factory=lambda: slice(None))
    columns: slice | Tensor = field(default_factory=lambda: slice(None))
    change: Callable[[Tensor], Tensor] | None = None

    def of(self, weight: Tensor) -> Tensor:
        """Return the part of a weight, [..., rows, columns] or, of a vector or biases, [..., rows]."""
        weight = weight if self.change is None else self.change(weight)
        if weight.dim() < 2 or self.name.endswith("bias"):
            return weight[..., self.rows]
        return weight[..., self.rows, :][..., self.columns]


@dataclass(frozen=True)
class Layout:
    """How llama.cpp has a model.

    Attributes:
        arch: its name in ``gguf.MODEL_ARCH``.
        layers, vocabulary: number of layers, and rows of the embeddings.
        keys: what ``GGUFWriter`` adds (``add_KEY``), with the values.
        parts: maps a weight's name to its parts.
        factors: divide RoPE's frequencies, [head_dim / 2]; None: nothing does.
        merged_only: ends of the names of weights beside which llama.cpp computes another LoRA.
        differs: what llama.cpp computes only nearly.
    """

    arch: str
    layers: int
    vocabulary: int
    keys: Mapping[str, Any]
    parts: Callable[[str], list[Part]]
    factors: Tensor | None = None
    merged_only: tuple[str, ...] = ()
    differs: str = ""


def library() -> Any:
    """Return the package ``gguf``.

    Raises:
        UserError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise UserError("GGUF files need the extra: pip install 'torchtune-rocm[export]'") from error
    return gguf


class GgufNames:
    """llama.cpp's names of a model's weights.

    Args:
        layout: of the model.

    Raises:
        UserError: the package ``gguf`` is too old for the architecture.
    """

    def __init__(self, layout: Layout) -> None:
        gguf = library()
        try:
            kind = gguf.MODEL_ARCH[layout.arch]
        except KeyError as error:
            raise UserError(f"the package gguf does not know {layout.arch}; pip install -U gguf") from error
        self.arch = gguf.MODEL_ARCH_NAMES[kind]
        self._map = gguf.get_tensor_name_map(kind, layout.layers)

    def find(self, hf: str) -> str | None:
        """Return llama.cpp's name of a weight; None: it has none."""
        return self._map.get_name(hf, try_suffixes=(".weight", ".bias", ".scale"))

    def name(self, hf: str) -> str:
        """Return llama.cpp's name of a weight.

        Raises:
            UserError: it has none.
        """
        if (llama_name := self.find(hf)) is None:
            raise UserError(f"{hf} has no place in llama.cpp's {self.arch}; {CONVERTER}")
        return llama_name


def read_layout(folder: Path) -> Layout:
    """Return llama.cpp's layout of the model in a folder.

    Raises:
        UserError: llama.cpp, or this module, has none, or llama.cpp computes another function.
    """
    if (config := foreign_config(folder, trust_remote_code=True)) is None:
        return _of_native(folder, read_architecture(folder))
    text = part if isinstance(part := config.get("text_config"), Mapping) else config
    row = _ROWS.get(str(text.get("model_type")))
    if row is None or "auto_map" in config:
        named = config.get("architectures")
        name = named[0] if isinstance(named, list) and named else config.get("model_type")
        raise UserError(f"{name} is not written to GGUF files here; {CONVERTER}")
    try:
        return _of_transformers(folder, row)
    except UserError:
        raise
    except Exception as error:  # values that transformers, or the table, cannot read; their errors are of any type
        raise UserError(f"{folder / CONFIG}: {one_line(error)}") from error


def way_out(folder: Path) -> str:
    """Return the options of ``rocm-ext export`` that take the model in a folder to other programs."""
    if files := files_in(folder):
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
_READ = "llama, qwen2 and qwen3"
_MODEL_TYPE = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


def _of_native(folder: Path, a: Architecture) -> Layout:
    if a.rope.yarn and not a.rope.yarn.rounded:
        raise UserError(f"{folder}: YaRN with truncate=False is unknown to llama.cpp")
    arch = _NATIVE[a.name]
    if arch == "QWEN3" and a.out_bias:
        raise UserError(f"{folder / CONFIG}: attention_bias is True; llama.cpp computes Qwen3 without biases alone")
    _check_rope(folder, arch, a.rope.kind)
    keys = {
        "vocab_size": a.vocabulary,
        "context_length": a.positions,  # at most the sliding window, which llama.cpp's Mistral has not
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
    factors = None
    if a.rope.kind == "llama3":
        factors = _factors(a.head_dim, a.rope)

    def parts(name: str) -> list[Part]:
        if a.tied and name == "lm_head.weight":
            return []
        layer = name.rpartition(".")[0].rpartition(".")[2]
        if arch != "LLAMA" or layer not in ("q_proj", "k_proj"):
            return [Part(name)]
        # in Hugging Face's files, the two halves of a head rotate together; llama.cpp's Llama rotates neighbours
        heads = a.heads if layer == "q_proj" else a.kv_heads
        rows = torch.arange(heads * a.head_dim).view(heads, 2, a.head_dim // 2)
        return [Part(name, rows.transpose(1, 2).flatten())]

    return Layout(arch, a.layers, a.vocabulary, keys, parts, factors)


def places(folder: Path, file: GgufFile) -> dict[str, Part]:
    """Return the weights that a GGUF file holds: by Hugging Face's names, llama.cpp's and the order of rows.

    Args:
        folder: with the model's ``config.json``.
        file: one of its files.

    Raises:
        UserError: the file has a tensor that the model has not.
    """
    if foreign_config(folder) is not None:
        raise UserError(f"{file.path} is llama.cpp's {file.architecture}; {_READ} are read from GGUF files")
    architecture = read_architecture(folder)
    layout = _of_native(folder, architecture)
    names = GgufNames(layout)
    found = {}
    for name in stored_names(architecture.layers):
        for part in layout.parts(name):
            if (own := names.find(part.name)) in file.places:
                found[name] = replace(part, name=own)
    others = file.places.keys() - {part.name for part in found.values()} - {_FACTORS}
    if others:
        raise UserError(f"{file.path} has {min(others)}, which no layer of {architecture.name} has")
    return found


def config_of(files: Sequence[GgufFile]) -> dict[str, Any]:
    """Return the content of ``config.json`` for GGUF files: what :func:`read_layout` makes keys of, the other way.

    Args:
        files: all files of a model.

    Raises:
        UserError: the metadata is of another architecture, lacks a key, or has one that is not known.
    """
    try:
        return _config_of(files)
    except UserError:
        raise
    except Exception as error:  # values of any type, where numbers are expected
        raise UserError(f"{files[0].path} has metadata that cannot be read: {one_line(error)}") from error


def _config_of(files: Sequence[GgufFile]) -> dict[str, Any]:
    file, arch = files[0], files[0].architecture
    places = {name: place for each in files for name, place in each.places.items()}
    name = next((name for name, known in _NATIVE.items() if known.lower() == arch), None)
    if name is None:
        raise UserError(f"{file.path} is llama.cpp's {arch}; {_READ} are read from GGUF files")
    keys = {key.removeprefix(f"{arch}."): value for key, value in file.metadata.items() if key.startswith(f"{arch}.")}
    config: dict[str, Any] = {"architectures": [name], "model_type": _MODEL_TYPE[name]}
    writer = library().GGUFWriter(None, arch)
    for key, theirs in _COMMON.items():
        getattr(writer, f"add_{key}")(1)
        stored = list(writer.kv_data[0])[-1].removeprefix(f"{arch}.")
        ours = theirs if isinstance(theirs, str) else "head_dim"
        value = keys.pop(stored, None)
        if value is None and key in _OPTIONAL:
            continue
        if type(value) not in (int, float):
            raise UserError(f"{file.path}: {arch}.{stored} is {value!r}; expected a number")
        if config.setdefault(ours, value) != value:
            raise UserError(f"{file.path}: {arch}.{stored} is {value}, but {ours} {config[ours]}")
    if len(getattr(places.get("token_embd.weight"), "shape", ())) != 2:
        raise UserError(f"{file.path} lacks token_embd.weight, the embeddings")
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config["vocab_size"] = places["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in places
    config["attention_bias"] = "blk.0.attn_output.bias" in places or (arch == "llama" and "blk.0.attn_q.bias" in places)
    if (turned := keys.pop("rope.dimension_count", config["head_dim"])) != config["head_dim"]:
        raise UserError(
            f"{file.path}: {arch}.rope.dimension_count is {turned}; expected head_dim, {config['head_dim']}"
        )
    config["rope_parameters"] = _rope_of(files, keys, config)
    if others := sorted(keys.keys() - _IDLE):
        raise UserError(f"{file.path}: {arch}.{others[0]} is {keys[others[0]]!r}, which is not computed here")
    return config


def _rope_of(files: Sequence[GgufFile], keys: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Take RoPE's keys out of ``keys``."""
    path = files[0].path
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": keys.pop("rope.freq_base", 10_000.0)}
    kind = keys.pop("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise UserError(f"{path}: rope.scaling.type is {kind!r}; expected none, linear or yarn")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": keys.pop("rope.scaling.factor", None)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = keys.pop("rope.scaling.original_context_length", None)
        rope |= {key: keys.pop(of) for key, of in _YARN.items() if of in keys}
        if "attention_factor" in rope:
            rope["attention_factor"] *= 0.1 * math.log(rope["factor"]) + 1.0  # llama.cpp multiplies by this one
    holder = next((file for file in files if _FACTORS in file.places), None)
    if holder is None:
        return rope
    base, width, place = rope["rope_theta"], config["head_dim"], holder.places[_FACTORS]
    fits = kind == "none" and not place.kind and place.shape == (width // 2,)
    factors = holder.numbers(_FACTORS) if fits else torch.ones(1)
    scaled = {"rope_type": "llama3", "rope_theta": base, "factor": round(float(factors.max()), 3)}
    scaled |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if not fits or not torch.allclose(_factors(width, read_rope({"rope_parameters": scaled}, 1)), factors, 1e-4):
        raise UserError(f"{path}: {_FACTORS} are not Llama 3's; put the model's config.json beside the file")
    return scaled


def _factors(width: int, rope: Rope) -> Tensor:
    """What divides RoPE's frequencies."""
    return HalvesRoPE(width, 1, Rope(rope.base)).theta / HalvesRoPE(width, 1, rope).theta


def _check_rope(folder: Path, arch: str, kind: str) -> None:
    known = _KINDS.get(arch, ("default", "linear", "yarn"))
    if kind not in known:
        raise UserError(
            f"{folder / CONFIG}: rope_type is {kind!r}; llama.cpp computes {', '.join(known)} of {arch} alone"
        )


def _rope_keys(rope: Rope) -> dict[str, Any]:
    keys: dict[str, Any] = {"rope_freq_base": rope.base}
    if rope.kind in ("linear", "yarn"):
        keys |= {"rope_scaling_type": rope.kind, "rope_scaling_factor": rope.factor}
    if rope.yarn:
        usual = 0.1 * float(torch.tensor(rope.factor).log()) + 1.0
        keys |= {
            "rope_scaling_orig_ctx_len": int(rope.original),
            "rope_scaling_yarn_beta_fast": rope.yarn.fast,
            "rope_scaling_yarn_beta_slow": rope.yarn.slow,
            "rope_scaling_attn_factors": rope.yarn.attention / usual,  # llama.cpp multiplies by the usual one
        }
    return keys


# ---- architectures that transformers computes, whose config objects have every key


Of = str | Callable[[Any], Any]  # a key of the config, or what is computed from it


@dataclass(frozen=True)
class _Row:
    """An architecture of the table.

    Attributes:
        arch: its name in ``gguf.MODEL_ARCH``.
        parts: maps a weight's name and the config to the weight's parts.
        keys: what ``GGUFWriter`` adds, beside :data:`_COMMON`.
        only: keys of the config with the values that llama.cpp computes alone.
        merged_only: see :class:`Layout`.
    """

    arch: str
    parts: Callable[[str, Any], list[Part]]
    keys: Mapping[str, Of]
    only: Mapping[str, Any]
    merged_only: tuple[str, ...] = ()


def _of_transformers(folder: Path, row: _Row) -> Layout:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder).get_text_config()
    for key, alone in row.only.items():
        alone = alone(config) if callable(alone) else alone
        if (value := getattr(config, key, alone)) != alone:
            raise UserError(f"{folder / CONFIG}: {key} is {value!r}; llama.cpp computes {alone!r} alone")
    rope = dict(config.rope_parameters)
    rope = rope.get("full_attention", rope)
    _check_rope(folder, row.arch, rope["rope_type"])
    part = rope.pop("partial_rotary_factor", 1.0)
    found = {
        key: of(config) if callable(of) else getattr(config, of, None) for key, of in {**_COMMON, **row.keys}.items()
    }
    keys = {key: value for key, value in found.items() if value is not None}  # models of experts alone have no MLP's
    factors = None
    if rope["rope_type"] == "proportional":  # the first dimensions rotate, the others stay
        rope["rope_type"], width = "default", keys["key_length"]
        factor = rope.get("factor", 1.0)
        factors = torch.where(torch.arange(width // 2) < int(width * part) // 2, factor, 1e30)
        part = 1.0
    read = read_rope({"rope_parameters": rope}, config.max_position_embeddings)
    keys |= {"rope_dimension_count": int(keys["key_length"] * part), **_rope_keys(read)}
    differs = "llama.cpp rounds the bounds of YaRN, and this model does not: its answers differ a little there"
    differs = differs if read.yarn and not read.yarn.rounded else ""

    def parts(name: str) -> list[Part]:
        return row.parts(name.replace("language_model.", ""), config)

    return Layout(row.arch, config.num_hidden_layers, config.vocab_size, keys, parts, factors, row.merged_only, differs)


def _experts(name: str, config: Any) -> list[Part]:
    """The parts of a weight that may be of all experts: [experts, gate and up, in] or [experts, out, in]."""
    stem, fused, _ = name.partition("gate_up_proj")
    if fused:
        half = config.moe_intermediate_size
        return [Part(f"{stem}gate_proj.weight", slice(half)), Part(f"{stem}up_proj.weight", slice(half, None))]
    return [Part(f"{name}.weight" if name.endswith("experts.down_proj") else name)]


def _gemma_3(name: str, _: Any) -> list[Part]:
    return [Part(name, change=_plus_one if name.endswith("norm.weight") else None)]


def _plus_one(weight: Tensor) -> Tensor:
    return weight.float() + 1


def _gpt_oss(name: str, _: Any) -> list[Part]:
    """Experts are [experts, in, out], and the outputs of gate and up alternate."""
    if name.endswith("sinks"):
        return [Part(f"{name}.weight")]
    stem, experts, layer = name.partition(".experts.")
    if not experts:
        return [Part(name)]
    end, change = ("bias", None) if layer.endswith("_bias") else ("weight", partial(Tensor.transpose, dim0=1, dim1=2))
    if layer.startswith("down_proj"):
        return [Part(f"{stem}.experts.down_proj.{end}", change=change)]
    halves = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    return [Part(f"{stem}.experts.{half}_proj.{end}", rows, change=change) for half, rows in halves.items()]


def _qwen3_5(name: str, config: Any) -> list[Part]:
    """Heads of v lie by heads of k in Hugging Face's files; in llama.cpp, the first heads of v of each k come first."""
    stem, delta, layer = name.partition(".linear_attn.")
    if not delta:
        parts = _experts(name, config)
        return [replace(parts[0], change=_plus_one)] if name.endswith("norm.weight") else parts
    heads, keys = config.linear_num_value_heads, config.linear_num_key_heads
    by_head = torch.arange(heads).view(keys, -1).T.flatten()
    width, before = config.linear_value_head_dim, 2 * keys * config.linear_key_head_dim  # q and k
    values = (by_head[:, None] * width + torch.arange(width)).flatten()
    mixed = torch.cat([torch.arange(before), before + values])
    return [
        {
            "A_log": Part(name, by_head, change=lambda weight: -weight.float().exp()),
            "dt_bias": Part(f"{stem}{delta}dt_proj.bias", by_head),
            "conv1d.weight": Part(name, mixed, change=partial(torch.squeeze, dim=1)),
            "in_proj_qkv.weight": Part(name, mixed),
            "in_proj_z.weight": Part(name, values),
            "in_proj_a.weight": Part(name, by_head),
            "in_proj_b.weight": Part(name, by_head),
            "out_proj.weight": Part(name, columns=values),
        }.get(layer, Part(name))
    ]


def _gemma_4(name: str, _: Any) -> list[Part]:
    if name.endswith("router.scale"):
        return [Part(name.replace("router.scale", "router.proj.scale"))]
    if name.endswith("router.per_expert_scale"):
        return [Part(name.replace("router.per_expert_scale", "experts.down_proj.scale"))]
    return [
        Part(f"{name}.weight" if name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj")) else name)
    ]


def _head_dim(config: Any) -> int:
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


def _local_base(config: Any) -> float:
    rope = config.rope_parameters["sliding_attention"]
    if rope["rope_type"] != "default":
        raise UserError(f"RoPE of sliding layers is {rope['rope_type']!r}; llama.cpp computes 'default' alone")
    return rope["rope_theta"]


def _width_of(kind: str) -> Of:
    return lambda config: config.per_layer_config[kind].head_dim


def _table(config: Any) -> int:
    """The rows that llama.cpp knows of the embeddings of layers, if there are any."""
    return config.vocab_size if config.hidden_size_per_layer_input else config.vocab_size_per_layer_input


def _mlps(config: Any) -> list[int]:
    twice = config.use_double_wide_mlp
    return [config.intermediate_size * (2 if twice and mode == "reuse" else 1) for mode in config.kv_sharing_modes]


_WINDOW: dict[str, Of] = {
    "sliding_window": "sliding_window",
    "sliding_window_pattern": lambda c: [kind == "sliding_attention" for kind in c.layer_types],
}
_DELTA: dict[str, Of] = {
    "ssm_conv_kernel": "linear_conv_kernel_dim",
    "ssm_state_size": "linear_key_head_dim",
    "ssm_group_count": "linear_num_key_heads",
    "ssm_time_step_rank": "linear_num_value_heads",
    "ssm_inner_size": lambda c: c.linear_num_value_heads * c.linear_value_head_dim,
    "full_attention_interval": lambda c: c.layer_types.index("full_attention") + 1,
    # of positions in images; those of text are the same in all sections
    "rope_dimension_sections": lambda c: [*c.rope_parameters.get("mrope_section", [11, 11, 10]), 0],
}


def _every(config: Any) -> list[str]:
    """The kinds of layers if each n-th has full attention."""
    interval = config.layer_types.index("full_attention") + 1
    kinds = ["linear_attention"] * (interval - 1) + ["full_attention"]
    return [kinds[layer % interval] for layer in range(config.num_hidden_layers)]


_SILU = {"hidden_act": "silu", "attention_bias": False}
_QWEN3_5 = {**_SILU, "layer_types": _every, "linear_value_head_dim": lambda c: c.linear_key_head_dim}
_GELU = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}


def _gemma_3_scale(config: Any) -> float:
    """llama.cpp's scale of attention; it knows the 27B model by its layers."""
    return config.hidden_size // config.num_attention_heads if config.num_hidden_layers == 62 else config.head_dim


_ROWS = {  # by the model_type of the text part
    "qwen3_moe": _Row(
        "QWEN3MOE",
        _experts,
        _EXPERTS,
        {**_SILU, "mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True, "use_sliding_window": False},
    ),
    "gemma3_text": _Row(
        "GEMMA3",
        _gemma_3,
        {**_WINDOW, "rope_freq_base_swa": _local_base, "final_logit_softcapping": "final_logit_softcapping"},
        {**_GELU, "attn_logit_softcapping": None, "query_pre_attn_scalar": _gemma_3_scale},
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
        {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "tie_word_embeddings": False},
    ),
    "qwen3_5_text": _Row("QWEN35", _qwen3_5, _DELTA, _QWEN3_5),
    "qwen3_5_moe_text": _Row(
        "QWEN35MOE",
        _qwen3_5,
        {**_DELTA, **_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        _QWEN3_5,
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
                c.per_layer_config[layer].num_key_value_heads for layer in range(c.num_hidden_layers)
            ],
            "key_length": _width_of("full_attention"),
            "value_length": _width_of("full_attention"),
            "key_length_swa": _width_of("sliding_attention"),
            "value_length_swa": _width_of("sliding_attention"),
            "rope_dimension_count_swa": _width_of("sliding_attention"),
            "feed_forward_length": _mlps,
        },
        {**_GELU, "vocab_size_per_layer_input": _table},
        ("experts.down_proj",),  # the router's scale of an expert leaves out its LoRA
    ),
}
