"""Names of weights: a decoder's own, Hugging Face's and PEFT's.

Hugging Face's names, as in a model's published files, are the common spelling:

- A native decoder is made of torchtune's modules; the tables here have both names of each part.
- A decoder of transformers has Hugging Face's names. Where files differ from them, transformers' own table of
  conversions translates, in :mod:`rocm_ext.model.hf.checkpoint`.
- torchtune's converters know the names of decoders that its builders make, and their order of rows.
- An adapter's tensors have PEFT's prefix, Hugging Face's name of a module, and the name of a part.
- llama.cpp's names are in the package ``gguf``, which takes Hugging Face's. One weight may be several of llama.cpp's
  tensors in another order, so :mod:`rocm_ext.model.weights.llama_cpp` has these layouts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from rocm_ext.base.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

# These are PEFT's names of the first and the last layer.
EMBEDDINGS = "embed_tokens"
OUTPUT = "lm_head"
EMBEDDINGS_WEIGHT = "model.embed_tokens.weight"
OUTPUT_WEIGHT = "lm_head.weight"

# ---- PEFT: PREFIX, a module's name, and a part

PREFIX = "base_model.model."
LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"
MAGNITUDE = ".lora_magnitude_vector"
ROWS = ".token_adapter.trainable_tokens_delta"  # rows, and not differences, in spite of the name
TOKEN_ROWS = "token_rows"  # a decoder's module with trained rows
_PARTS = {
    ".lora_a.weight": LORA_A,
    ".lora_b.weight": LORA_B,
    ".magnitude": MAGNITUDE,
    f".{TOKEN_ROWS}.weight": ROWS,
}
_OUR_PARTS = {theirs: ours for ours, theirs in _PARTS.items()}


def peft_part(name: str) -> str:
    """Return PEFT's name of an adapter's part from a decoder's ``name`` of its tensor."""
    ours = next(part for part in _PARTS if name.endswith(part))
    return _PARTS[ours]


def our_part(part: str) -> str:
    """Return a decoder's name of an adapter's part from PEFT's."""
    return _OUR_PARTS[part]


def split_peft(name: str) -> tuple[str, str]:
    """Return the module's name and the part from PEFT's ``name`` of a tensor; the module keeps a prefix.

    Raises:
        UserError: the tensor is no part of an adapter that this library computes.
    """
    for part in _OUR_PARTS:
        if name.endswith(part):
            return name.removesuffix(part), part
    raise UserError(f"adapter weight {name} is neither LoRA nor DoRA")


def last_part(name: str) -> str:
    """Return what follows the last dot of ``name``: PEFT's short name of a module."""
    return name.rpartition(".")[2]


def last_parts(name: str, count: int) -> str:
    """Return the last ``count`` parts of ``name``, with the dots between them."""
    return ".".join(name.split(".")[-count:])


def replace_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put ``parameter`` in the place of the parameter ``name`` of ``model``."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, parameter)


# ---- Hugging Face


class Names:
    """Translates between a decoder's names and Hugging Face's; here both are the same, as in transformers' models."""

    def published(self, name: str) -> str:
        """Return Hugging Face's name of the decoder's weight ``name``; raise a KeyError if it is unknown."""
        return name

    def ours(self, published: str) -> str:
        """Return the decoder's name of the weight ``published``; raise a KeyError if it is unknown."""
        return published

    def published_rows(self, name: str, tensor: Tensor) -> Tensor:
        """Return ``tensor``, which has the output rows of the decoder's weight ``name``, in Hugging Face's order."""
        return tensor

    def our_rows(self, published: str, tensor: Tensor) -> Tensor:
        """Return ``tensor``, which has the output rows of the weight ``published``, in the decoder's order."""
        return tensor


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
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.+)")

# Linear layers of a native decoder have these names in PEFT.
LINEAR = [last_part(theirs) for theirs in _IN_LAYER.values() if theirs.endswith("_proj")]


class NativeNames(Names):
    """Names of a native decoder. Its rows have Hugging Face's order."""

    def published(self, name: str) -> str:
        """``layers.0.sa_norm.scale`` -> ``model.layers.0.input_layernorm.weight``."""
        module, _, leaf = name.rpartition(".")
        if leaf == "scale":
            leaf = "weight"
        if layer := _LAYER.fullmatch(module):
            return f"model.layers.{layer[1]}.{_IN_LAYER[layer[2]]}.{leaf}"
        return f"{_TOP[module]}.{leaf}"

    def ours(self, published: str) -> str:
        """``model.layers.0.input_layernorm.weight`` -> ``layers.0.sa_norm.scale``."""
        module, _, leaf = published.rpartition(".")
        if layer := _LAYER.fullmatch(module):
            name = f"layers.{layer[1]}.{_IN_LAYER_BACK[layer[2]]}"
        else:
            name = _TOP_BACK[module]
        return f"{name}.{'scale' if name.endswith('norm') else leaf}"


def stored_names(layers: int) -> list[str]:
    """Return Hugging Face's names of all weights and biases that a native decoder may have."""
    modules = list(_TOP.values())
    for layer in range(layers):
        modules += [f"model.layers.{layer}.{part}" for part in _IN_LAYER.values()]
    return [f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias")]


class TorchtuneNames(Names):
    """Names and order of rows by torchtune's converters, for a decoder of torchtune's builders.

    Most families store the rows of q and k as rotary pairs in torchtune and as halves in Hugging Face's format, so
    torchtune's converters reorder these rows. Qwen2 uses halves. torchtune's PEFT export wrongly reorders Qwen2's
    adapters; these converters do not.

    Args:
        model_type: torchtune's ModelType name.
        attention: a layer's attention, whose heads the converters need.
    """

    def __init__(self, model_type: str, attention) -> None:
        from torchtune.models import convert_weights  # here, because it takes a second
        from torchtune.models.gemma2._convert_weights import gemma2_hf_to_tune, gemma2_tune_to_hf
        from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune, qwen2_tune_to_hf

        self._to_files = convert_weights.tune_to_hf
        self._from_files = convert_weights.hf_to_tune
        if model_type == "QWEN2":
            self._to_files = qwen2_tune_to_hf
            self._from_files = qwen2_hf_to_tune
        elif model_type == "GEMMA2":
            self._to_files = gemma2_tune_to_hf
            self._from_files = gemma2_hf_to_tune
        self._heads = {
            "num_heads": attention.num_heads,
            "num_kv_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
        }

    def published(self, name: str) -> str:
        published, _ = self._converted(self._to_files, name, self._example(name))
        return published

    def ours(self, published: str) -> str:
        name, _ = self._converted(self._from_files, published, self._example(published))
        return name

    def published_rows(self, name: str, tensor: Tensor) -> Tensor:
        _, rows = self._converted(self._to_files, name, tensor)
        return rows

    def our_rows(self, published: str, tensor: Tensor) -> Tensor:
        _, rows = self._converted(self._from_files, published, tensor)
        return rows

    def _example(self, name: str) -> Tensor:
        """Return a tensor with the rows that a converter expects of the weight ``name``."""
        import torch

        heads = self._heads["num_kv_heads"] if "k_proj" in name else self._heads["num_heads"]
        return torch.empty(heads * self._heads["head_dim"], 1)

    def _converted(
        self, convert: Callable[..., dict[str, Tensor]], name: str, tensor: Tensor
    ) -> tuple[str, Tensor]:
        matrix = tensor.reshape(len(tensor), -1)
        converted = convert({name: matrix}, dim=matrix.shape[1], **self._heads)
        ((new_name, rows),) = converted.items()
        return new_name, rows.reshape(tensor.shape)
