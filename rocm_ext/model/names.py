"""Names of a native decoder's parts: torchtune's, and those of Hugging Face's files."""

import re

_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")
_TOP = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "sa_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w3": "mlp.up_proj",
    "mlp.w2": "mlp.down_proj",
}
_TOP_BACK = {theirs: ours for ours, theirs in _TOP.items()}
_IN_LAYER_BACK = {theirs: ours for ours, theirs in _IN_LAYER.items()}

# Linear layers by PEFT's names
LINEAR = {theirs.rpartition(".")[2]: ours for ours, theirs in _IN_LAYER.items() if theirs.endswith("_proj")}


def to_hf(name: str) -> str:
    """``layers.0.sa_norm.scale`` -> ``model.layers.0.input_layernorm.weight``.

    Raises:
        KeyError: no part of a native decoder has this name.
    """
    part, _, leaf = name.rpartition(".")
    leaf = "weight" if leaf == "scale" else leaf
    if match := _LAYER.fullmatch(part):
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{leaf}"
    return f"{_TOP[part]}.{leaf}"


def from_hf(name: str) -> str:
    """``model.layers.0.input_layernorm.weight`` -> ``layers.0.sa_norm.scale``.

    Raises:
        KeyError: no part of a native decoder has this name.
    """
    part, _, leaf = name.rpartition(".")
    match = _LAYER.fullmatch(part)
    ours = f"layers.{match[1]}.{_IN_LAYER_BACK[match[2]]}" if match else _TOP_BACK[part]
    return f"{ours}.{'scale' if ours.endswith('norm') else leaf}"
