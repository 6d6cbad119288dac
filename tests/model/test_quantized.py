"""Base models whose weights stay quantised: those of their files, and FP8 that is made as they are loaded."""

import json
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from rocm_ext.model.lora import dense
from rocm_ext.model.quantized import Quantized, fp8_rows, stored
from tests.kit.families import write_family
from tests.kit.hf_models import write_theirs
from tests.kit.parity import TOKENS, our_model, transformers_own
from tests.kit.quantized import BLOCK, write_quantized

NAMES = {"qwen3": "fp8", "qwen3 moe": "fp8", "gpt-oss": "mxfp4"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    top = tmp_path_factory.mktemp("quantised")

    @cache
    def write(name: str, kind: str = ""):
        own = top / f"{name} own"
        if not own.is_dir():
            write_family(own, name, head_dim=16) if name == "qwen3" else write_theirs(
                own, name, moe_intermediate_size=64
            )
        kind = kind or NAMES[name]
        return write_quantized(own, top / f"{name} {kind}", kind)

    return write


def dequantised(folder, out):
    """Write the model as transformers itself dequantises it; return its folder."""
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    how = Mxfp4Config(dequantize=True)
    if method == "fp8":
        how = FineGrainedFP8Config(dequantize=True, weight_block_size=(BLOCK, BLOCK))
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_weights_and_logits_are_those_of_transformers(folder, tmp_path, name):
    ours, theirs = our_model(folder(name)).eval(), dequantised(folder(name), tmp_path)
    weights = dict(theirs.named_parameters())
    small = [key for key, p in ours.named_parameters() if isinstance(p, Quantized)]
    assert len(small) == {"qwen3": 14, "qwen3 moe": 13, "gpt-oss": 4}[name]
    for key in small:
        to_theirs = ours.renames[0](key)
        assert torch.equal(dense(ours.get_parameter(key)), weights[to_theirs]), key
    with transformers_own():
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-5)


def whole(ours):
    """Put dequantised weights in the place of quantised ones."""
    for module in ours.modules():
        for key, p in module._parameters.items():
            if isinstance(p, Quantized):
                module._parameters[key] = torch.nn.Parameter(dense(p), requires_grad=False)
    return ours


def gradients(ours):
    for parameter in ours.parameters():
        if parameter.requires_grad:
            torch.manual_seed(parameter.numel())
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    torch.manual_seed(0)
    logits = ours.train()(TOKENS)
    wanted = [p for p in ours.parameters() if p.requires_grad]
    return [logits, *torch.autograd.grad(logits.square().sum(), wanted)]


EXPERTS = {"target_parameters": "all-experts"}
LORA = [
    ("qwen3", {}),
    ("qwen3", {"target_modules": ["q_proj", "down_proj"], "use_dora": True, "lora_dropout": 0.1}),
    ("qwen3 moe", {"target_modules": ["v_proj"], **EXPERTS}),
    ("gpt-oss", {"target_modules": ["v_proj"], **EXPERTS}),
    ("gpt-oss", {"target_modules": ["q_proj"]}),
]


@pytest.mark.parametrize(("name", "lora"), LORA)
def test_logits_and_gradients_are_those_over_dequantised_weights(folder, name, lora):
    found, expected = gradients(our_model(folder(name), **lora)), gradients(whole(our_model(folder(name), **lora)))
    assert all(gradient.abs().max() > 0 for gradient in found)
    if name == "gpt-oss":  # products with a transposed weight are rounded otherwise
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    else:
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("name", "lora"), LORA)
def test_a_forward_pass_keeps_no_dequantised_weight(folder, name, lora):
    ours = our_model(folder(name), **lora)
    shapes = {shape for p in ours.parameters() if isinstance(p, Quantized) for shape in (p.shape[-2:], p.mT.shape[-2:])}
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        ours.train()(TOKENS).sum().backward()
    own = {p.data_ptr() for p in ours.parameters() if not isinstance(p, Quantized)}
    assert any(isinstance(tensor, Quantized) for tensor in kept)
    plain = [t for t in kept if not isinstance(t, Quantized) and t.untyped_storage().data_ptr() not in own]
    assert not [t.shape for t in plain if t.ndim > 1 and t.shape[-2:] in shapes]
