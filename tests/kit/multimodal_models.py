"""Small multimodal models with random weights, as their hub folders are."""

from copy import deepcopy
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForMultimodalLM

from tests.kit.families import CHATML, id_of
from tests.kit.hf_models import EXPERTS, ROPE
from tests.kit.hf_models import MODELS as TEXT_MODELS
from tests.kit.tiny import SHAPE, SPECIAL, write_tokenizer

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
EYE = {**TOWER, "image_size": 28, "patch_size": 14}
QWEN_EYE = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64, "patch_size": 14,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "embed_dim": 32, "fullatt_block_indexes": [0],
}  # fmt: skip
MROPE = {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3, "mrope_section": [4, 2, 2]},
}
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA_4 = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 6, "tie_word_embeddings": True}
GEMMA_EYE = {**TOWER, "model_type": "gemma4_vision", "head_dim": 16, "num_key_value_heads": 2}

# name -> model_type, model_type of the text part, whether its rows are packed, values of the text and the other part
MODELS: dict[str, tuple[str, str, bool, dict, dict]] = {
    "gemma 3": (
        "gemma3",
        "gemma3_text",
        True,
        TEXT_MODELS["gemma 3"][2],
        {**EYE, "vision_use_head": False},
    ),
    "mistral 3": (
        "mistral3",
        "mistral",
        True,
        {"head_dim": 24, "sliding_window": 6, **ROPE},
        {**EYE, "head_dim": 16},
    ),
    "qwen3.5": ("qwen3_5", "qwen3_5_text", True, TEXT_MODELS["qwen3.5"][2], QWEN_EYE),
    "ministral 3": ("mistral3", "ministral3", True, {"head_dim": 16}, {**EYE, "head_dim": 16}),
    "qwen3.5 moe": (
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        True,
        {
            **TEXT_MODELS["qwen3.5"][2],
            **EXPERTS,
            "shared_expert_intermediate_size": 32,
            "intermediate_size": None,
        },
        QWEN_EYE,
    ),
    "qwen3-vl": ("qwen3_vl", "qwen3_vl_text", False, MROPE, QWEN_EYE),
    "qwen2.5-vl": ("qwen2_5_vl", "qwen2_5_vl_text", False, MROPE, QWEN_EYE),
    "gemma 4": (
        "gemma4",
        "gemma4_text",
        False,
        {
            **GEMMA_4,
            "num_hidden_layers": 4,
            "layer_types": BOTH["layer_types"] * 2,
            "num_kv_shared_layers": 2,
        }
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 384},
        GEMMA_EYE,
    ),
    "gemma 4 moe": (
        "gemma4",
        "gemma4_text",
        False,
        {
            **GEMMA_4,
            **BOTH,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        }
        | {
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        }
        | {"use_bidirectional_attention": "vision"},
        GEMMA_EYE,
    ),
    "llava": ("llava", "llama", True, ROPE, EYE),
    "llava next": ("llava_next", "mistral", True, ROPE, EYE),
    "internvl": ("internvl", "qwen2", True, ROPE, EYE),
    "idefics 3": ("idefics3", "llama", True, ROPE, EYE),
    "lighton ocr": (
        "lighton_ocr",
        "qwen3",
        True,
        {"head_dim": 16, **ROPE},
        {**EYE, "head_dim": 16},
    ),
    "lfm 2 vl": (
        "lfm2_vl",
        "lfm2",
        True,
        {"layer_types": ["conv", "full_attention"], **ROPE},
        {**EYE, "num_patches": 4},
    ),
    "voxtral": ("voxtral", "llama", True, {"head_dim": 16, **ROPE}, {**TOWER, "head_dim": 16}),
    "qwen2 audio": (
        "qwen2_audio",
        "qwen2",
        True,
        ROPE,
        {"d_model": 32, "encoder_layers": 1, "encoder_ffn_dim": 64, "encoder_attention_heads": 2},
    ),
}
GGUF = (
    "gemma 3",
    "qwen3.5",
    "qwen3.5 moe",
    "gemma 4",
    "gemma 4 moe",
)  # that llama.cpp answers like transformers
AUDIO = ("voxtral", "qwen2 audio")


def write_multimodal(
    folder: Path, name: str, shards: int = 1, shape: dict | None = None, **changes
) -> Path:
    """Write the random model ``name`` of :data:`MODELS` with tokenizer and chat template; ``shape`` is of its text."""
    folder.mkdir(parents=True)
    size = -(-write_tokenizer(folder) // 64) * 64
    torch.manual_seed(0)
    kind, text_kind, _, text, other = MODELS[name]
    ends = {
        "eos_token_id": id_of(folder, SPECIAL[2]),
        "pad_token_id": id_of(folder, SPECIAL[0]),
        "bos_token_id": None,
    }
    wide = {"initializer_range": 0.1, **ends}
    part = "audio_config" if name in AUDIO else "vision_config"
    default = getattr(AutoConfig.for_model(kind), part)
    values = {
        "text_config": {"model_type": text_kind, "vocab_size": size, **SHAPE, **wide, **text, **(shape or {})},
        part: {"model_type": default and default.model_type, **other},
        **dict.fromkeys(("image_token_index", "image_token_id", "audio_token_index", "audio_token_id"), size - 1),
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        **ends,
        **changes,
    }  # fmt: skip
    model = AutoModelForMultimodalLM.from_config(
        AutoConfig.for_model(kind, **deepcopy(values)), dtype=torch.float32
    )
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.1)
        elif "norm" in key:
            nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            nn.init.normal_(parameter, std=0.1)
    total = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=total // shards + 1 if shards > 1 else "50GB")
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder
