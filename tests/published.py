"""``config.json`` of published models, so that their configs can be planned without a download.

The values are those of the files at huggingface.co/Qwen and huggingface.co/meta-llama that decide a model's shape.
"""

import json
from pathlib import Path
from typing import Any


def _qwen3(width: int, wide: int, layers: int, heads: int, tied: bool, **more: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": wide,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
        **more,
    }


def _llama(width: int, layers: int, heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-4B-Instruct-2507": _qwen3(
        2560, 9728, 36, 32, tied=True, max_position_embeddings=262144, rope_theta=5000000
    ),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, tied=False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, tied=False),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, tied=False),
    "meta-llama/Llama-3.2-1B-Instruct": _llama(2048, 16, 32, 64),
    "meta-llama/Llama-3.2-3B-Instruct": _llama(3072, 28, 24, 128),
}
# millions of parameters that the model cards state, embeddings counted once
PARAMETERS = {"0.6B": 596, "1.7B": 1721, "4B": 4022, "8B": 8191, "14B": 14768, "32B": 32762}
PARAMETERS |= {"1B-Instruct": 1236, "3B-Instruct": 3213, "4B-Instruct-2507": 4022}


def write_published(models: Path) -> None:
    """Write each model's ``config.json`` into a folder of its name in ``models``."""
    for name, content in CONFIGS.items():
        folder = models / name.rpartition("/")[2]
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(content))
