"""Small models with random weights of every native family, written by transformers, and configs for them."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.kit.tiny import SHAPE, SPECIAL, TEXT, base_config, write_tokenizer

CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # so that some frequencies of this small head are low
    "rope_theta": 500.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500.0,
}
MODELS = {
    "llama": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama biased": (
        "llama",
        {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
            "attention_bias": True,
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3 tied": (
        "qwen3",
        {
            "rope_parameters": YARN,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
        },
    ),
    "mistral": ("mistral", {"head_dim": 24, "sliding_window": 256}),
}
PATTERNS = {  # sizes of some layers, by ends of names and regular expressions; of k, q and v each another
    "rank_pattern": {"k_proj": 2, r"layers\.1\.(self_attn|mlp)\..*_proj": 6},
    "alpha_pattern": {r"^model\.layers\.0\..*\.q_proj": 3.5, "down_proj": 20},
}
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def on_demand(top: Path, write: Callable[..., Path], sharded: str) -> Callable[[str], Path]:
    """Return a function from a model's name to its folder in ``top``, which ``write`` writes at the first call.

    The weights of the model ``sharded`` are in two files.
    """

    @functools.cache
    def folder(name: str) -> Path:
        return write(top / name.replace(" ", "_"), name, shards=1 + (name == sharded))

    return folder


def write_family(folder: Path, name: str, shards: int = 1, text: list[str] = TEXT, **shape) -> Path:
    """Write the random model ``name`` of :data:`MODELS` with tokenizer and chat template.

    Weights are large enough that attention matters; biases and norms differ from their usual first values.
    """
    folder.mkdir(parents=True)
    size = -(-write_tokenizer(folder, text) // 64) * 64
    torch.manual_seed(0)
    family, own = MODELS[name]
    config_class, model_class = CLASSES[family]
    rope = (
        {}
        if "rope_parameters" in own
        else {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    )
    ends = {
        "eos_token_id": id_of(folder, "<|im_end|>"),
        "pad_token_id": id_of(folder, "<|endoftext|>"),
    }
    wide = {"initializer_range": 0.1, "bos_token_id": None, **ends}
    model = model_class(
        config_class(**{"vocab_size": size, **SHAPE, **rope, **wide, **own, **shape})
    )
    for key, parameter in model.named_parameters():
        if key.endswith(".bias"):
            nn.init.normal_(parameter, std=0.1)
        elif "norm" in key:
            nn.init.uniform_(parameter, 0.5, 1.5)
    total = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=total // shards + 1 if shards > 1 else "50GB")
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def id_of(folder: Path, token: str) -> int:
    """Return the id of an added token."""
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert {token["content"] for token in added} == set(SPECIAL)
    return next(each["id"] for each in added if each["content"] == token)


def folder_config(model: Path, rows: Path, out: Path, lora: dict | None = None, **changes) -> dict:
    """Return a run config for a model of :func:`write_family`, as a user would write it."""
    component = "rocm_ext.model.from_checkpoint"
    node = {
        "_component_": component,
        "checkpoint_dir": str(model),
        "lora_rank": 4,
        "lora_alpha": 8,
        **(lora or {}),
    }
    return {**base_config(rows, out), "model": node, **changes}
