"""Small models with random weights of architectures that transformers alone computes."""

from copy import deepcopy
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.kit.families import CHATML, id_of
from tests.kit.tiny import SHAPE, SPECIAL, TEXT, write_tokenizer

ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3}}
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
GATED_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
}
PARTLY = {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.25}

# name -> model_type, whether rows are packed, values of its config
MODELS: dict[str, tuple[str, bool, dict]] = {
    "qwen3 moe": ("qwen3_moe", True, {**EXPERTS, "head_dim": 16, "mlp_only_layers": [0], **ROPE}),
    "qwen3.5": (
        "qwen3_5_text",
        True,
        {**GATED_DELTA, "rope_parameters": {**PARTLY, "mrope_section": [1, 1, 0]}},
    ),
    "qwen3 next": (
        "qwen3_next",
        True,
        {
            **GATED_DELTA,
            **EXPERTS,
            "shared_expert_intermediate_size": 32,
            "rope_parameters": PARTLY,
        },
    ),
    "gemma 2": (
        "gemma2",
        True,
        {**BOTH, "head_dim": 16, "sliding_window": 6, "final_logit_softcapping": 2.0, **ROPE},
    ),
    "gemma 3": (
        "gemma3_text",
        True,
        {
            **BOTH,
            "head_dim": 16,
            "sliding_window": 6,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
            },
        },
    ),
    "ministral": ("ministral", True, {**BOTH, "sliding_window": 6, "head_dim": 24, **ROPE}),
    "mixtral": (
        "mixtral",
        True,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6, **ROPE},
    ),
    "phi 3": ("phi3", True, {"sliding_window": 6, "original_max_position_embeddings": 512, **ROPE}),
    "olmo 2": ("olmo2", True, ROPE),
    "olmo 3": ("olmo3", True, {**BOTH, "sliding_window": 6, **ROPE}),
    "glm 4": (
        "glm4",
        True,
        {"head_dim": 16, "rope_parameters": {**PARTLY, "partial_rotary_factor": 0.5}},
    ),
    "gpt-oss": (
        "gpt_oss",
        True,
        {
            **BOTH,
            "sliding_window": 6,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            **ROPE,
        },
    ),
    "smollm 3": ("smollm3", True, {"no_rope_layers": [1, 0], **ROPE}),
    "granite": (
        "granite",
        True,
        {
            "logits_scaling": 2.0,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        }
        | ROPE
        | {"tie_word_embeddings": True},
    ),
    "granite moe": (
        "granitemoe",
        True,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 2.0, **ROPE},
    ),
    "granite hybrid": (
        "granitemoehybrid",
        True,
        {
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
    "deepseek 3": (
        "deepseek_v3",
        True,
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 48,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            **ROPE,
        },
    ),
    "cohere 2": ("cohere2", True, {**BOTH, "sliding_window": 6, "logit_scale": 0.5, **ROPE}),
    "lfm 2": ("lfm2", True, {"layer_types": ["conv", "full_attention"], **ROPE}),
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e3,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Those that llama.cpp answers like transformers, with what differs from MODELS
GGUF: dict[str, dict] = {
    "qwen3 moe": {"mlp_only_layers": []},
    "gemma 3": {  # as in the models of 4B and more
        "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e3},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
        },
    },
    "gpt-oss": {"rope_parameters": YARN},
    "qwen3.5": {},
}

# More architectures, in this shape
COMMON = {
    "vocab_size": 320,
    **{
        key: value
        for key, value in SHAPE.items()
        if key not in ("tie_word_embeddings", "rms_norm_eps")
    },
    "head_dim": 16,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 6,
}
MORE = """
    apertus arcee cohere dots1 ernie4_5 ernie4_5_moe exaone4 gemma glm glm4_moe granitemoeshared helium
    hunyuan_v1_dense hunyuan_v1_moe minimax_m2 ministral3 nemotron olmo olmoe phi phimoe qwen2_moe
    seed_oss stablelm starcoder2
""".split()  # noqa: SIM905


def write_common(folder: Path, kind: str, **values) -> Path:
    """Write random weights of the ``model_type`` ``kind`` in the shape :data:`COMMON`, but for ``values``."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **deepcopy({**COMMON, **values}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


# Architectures whose code needs care: values of their configs
MAMBA = {"mamba_d_state": 16, "mamba_d_head": 16}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e3,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}
CARE = {
    "bamba": {
        **MAMBA,
        "mamba_n_heads": 8,
        "attn_layer_indices": [1],
    },  # a layer returns more than hidden states
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_n_groups": 1},
    "gemma4_text": {  # two layers share the keys and values of the first two
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
    },
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "layers_block_type": ["mamba", "attention"],
    },
    "olmo_hybrid": {**GATED_DELTA, "linear_num_value_heads": 2},
    "kimi_linear": {
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "layer_types": GATED_DELTA["layer_types"],
    },
    "qwen3_5_moe_text": GATED_DELTA,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "gptj": {"n_head": 4, "n_layer": 2, "rotary_dim": 16},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },  # reads dt_proj's weight
    # changes outputs in place; scales q by the place in the row, not by the position
    "llama4_text": {"floor_scale": 4, "attention_chunk_size": 6, "no_rope_layers": [1, 0]},
    "phi3": {"rope_parameters": {**LONG, "original_max_position_embeddings": 10}},
}

PADDED = {"gemma4_text", "jamba", "llama4_text"}  # of these, whose rows are not packed


def write_theirs(folder: Path, name: str, shards: int = 1, text: list[str] = TEXT, **shape) -> Path:
    """Write the random model ``name`` of :data:`MODELS` with tokenizer and chat template."""
    folder.mkdir(parents=True)
    size = -(-write_tokenizer(folder, text) // 64) * 64
    torch.manual_seed(0)
    kind, _, own = MODELS[name]
    ends = {
        "eos_token_id": id_of(folder, SPECIAL[2]),
        "pad_token_id": id_of(folder, SPECIAL[0]),
        "bos_token_id": None,
    }
    wide = {"initializer_range": 0.1, "use_cache": False, **ends}
    values = deepcopy(
        {"vocab_size": size, **SHAPE, **wide, **own, **shape}
    )  # transformers changes some in place
    config = AutoConfig.for_model(kind, **values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for key, parameter in model.named_parameters():
        if key.endswith((".bias", "_bias", "sinks")):
            nn.init.normal_(parameter, std=0.1)
        elif "norm" in key:
            nn.init.uniform_(parameter, 0.5, 1.5)
    for key, buffer in model.named_buffers():
        if key.endswith("correction_bias"):
            nn.init.normal_(buffer, std=0.1)
    total = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=total // shards + 1 if shards > 1 else "50GB")
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def write_wider(folder: Path, name: str, **shape) -> Path:
    """Write the model ``name`` with four layers, wide enough that activations are the most of a step's memory."""
    per_layer = ("layer_types", "no_rope_layers", "mamba_n_heads")
    twice = {key: value * 2 for key, value in MODELS[name][2].items() if key in per_layer}
    wide = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
    return write_theirs(folder, name, **wide, **twice, **shape)
