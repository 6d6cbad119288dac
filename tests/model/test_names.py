"""Names of weights translate both ways, and are torchtune's and PEFT's own."""

from types import SimpleNamespace

import pytest

from rocm_ext.base.errors import UserError
from rocm_ext.model.names import (
    NativeNames,
    TorchtuneNames,
    our_part,
    peft_part,
    split_peft,
    stored_names,
)

ATTENTION = SimpleNamespace(num_heads=4, num_kv_heads=2, head_dim=8)


def test_every_weight_of_a_native_decoder_has_one_name():
    names = NativeNames()
    weights = [name for name in stored_names(12) if name.endswith(".weight")]
    ours = [names.ours(name) for name in weights]
    assert len({*ours}) == len(weights) == 12 * 11 + 3
    assert [names.published(name) for name in ours] == weights


def test_native_names_are_those_of_torchtunes_converters():
    native, torchtune = NativeNames(), TorchtuneNames("QWEN2", ATTENTION)
    known = [
        name for name in stored_names(2) if "_norm" not in name
    ]  # torchtune's Qwen2 has no norms of heads
    weights = [name for name in known if name.endswith(".weight") and name != "lm_head.weight"]
    assert len(weights) == 2 * 9 + 2
    for name in weights:
        assert torchtune.ours(name) == native.ours(name)
        assert torchtune.published(native.ours(name)) == name


def test_names_of_other_models_are_unknown():
    for name in (
        "model.layers.0.mlp.experts.0.w1.weight",
        "transformer.h.0.attn.weight",
        "model.layers.x.weight",
    ):
        with pytest.raises(KeyError):
            NativeNames().ours(name)


def test_parts_of_an_adapter_translate_both_ways():
    ours = (
        "q_proj.lora_a.weight",
        "q_proj.lora_b.weight",
        "q_proj.magnitude",
        "tok_embeddings.token_rows.weight",
    )
    for name in ours:
        module, part = split_peft("base_model.model.x" + peft_part(name))
        assert module == "base_model.model.x"
        assert name.endswith(our_part(part))
    with pytest.raises(UserError, match=r"x\.lora_C\.weight is neither LoRA nor DoRA"):
        split_peft("x.lora_C.weight")
