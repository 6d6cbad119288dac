"""The models of transformers that llama.cpp computes alike: one row of a table per architecture.

Keys, names and orders follow llama.cpp's ``convert_hf_to_gguf.py``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from rocm_ext.base.errors import UserError
from rocm_ext.base.types import Json
from rocm_ext.model.weights.gguf_files import Metadata
from rocm_ext.model.weights.llama_cpp_parts import Change, Part

Of = str | Callable[[Any], Any]  # a key of the config, or what is computed from it


@dataclass(frozen=True)
class ModelRow:
    """An architecture of the table.

    Attributes:
        arch: the architecture's name in ``gguf.MODEL_ARCH``.
        parts: maps a weight's name and the config to the weight's parts.
        keys: keys of the metadata, in addition to :data:`COMMON`.
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


COMMON: dict[str, Of] = {
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


ROWS = {  # rows of the table by the model_type of the text part
    "qwen3_moe": ModelRow(
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
    "gemma3_text": ModelRow(
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
    "gpt_oss": ModelRow(
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
    "qwen3_5_text": ModelRow("QWEN35", _qwen3_5, _DELTA, _QWEN3_5, _back_to_qwen3_5),
    "qwen3_5_moe_text": ModelRow(
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
    "gemma4_text": ModelRow(
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
