"""Norms and rotations of the native decoders: the functions of torch, torchtune and transformers."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torchtune.models.qwen2._positional_embeddings import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import RMSNorm
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from rocm_ext.model import from_checkpoint
from rocm_ext.model.download import published_models
from rocm_ext.model.families import Rope, Yarn, read_architecture
from rocm_ext.model.native.layers import HalvesRoPE, use_fused_norms
from tests.kit.families import YARN
from tests.kit.tiny import SHAPE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7, 24), (2, 5, 3, 16)])
def test_a_frozen_norm_is_torchs(dtype, shape):
    parts = torch.nn.ModuleList([RMSNorm(shape[-1], eps=1e-6)])
    use_fused_norms(parts)
    norm = parts[0].requires_grad_(False)
    torch.nn.init.uniform_(norm.scale, 0.5, 1.5, generator=torch.Generator().manual_seed(1))
    x, grad = 3 * values(*shape, dtype=dtype), values(*shape, dtype=dtype, seed=2)
    found = norm(x.requires_grad_())
    assert torch.equal(found, F.rms_norm(x, shape[-1:], norm.scale.to(dtype), 1e-6))
    exact = x.detach().double().requires_grad_()
    F.rms_norm(exact, shape[-1:], norm.scale.to(dtype).double(), 1e-6).backward(grad.double())
    found.backward(grad)
    # the gradient is computed in fp32 and rounded once
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_a_trained_norm_gets_its_gradient():
    norm = torch.nn.ModuleList([RMSNorm(16)])
    use_fused_norms(norm)
    norm[0](values(3, 16).requires_grad_()).sum().backward()
    assert norm[0].scale.grad.abs().min() > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", [None, [[0, 1, 2, 0, 1]]])
def test_a_rotation_is_torchtunes_bit_for_bit(dtype, positions):
    ours, theirs = HalvesRoPE(16, 32, Rope(1e3)), Qwen2RotaryPositionalEmbeddings(16, 32, 1e3)
    where = positions and torch.tensor(positions)
    results = []
    for rope in (ours, theirs):
        x = values(1, 5, 3, 16, dtype=dtype).requires_grad_()
        out = rope(x, input_pos=where)
        out.backward(values(1, 5, 3, 16, dtype=dtype, seed=3))
        results.append((out, x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---- YaRN, and the text that identifies an architecture
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"factor": 1.0},
        {"beta_fast": 8, "beta_slow": 2, "truncate": False},
        {"mscale": 0.7, "mscale_all_dim": 1.0},
        {"attention_factor": 1.3, "rope_theta": 1e6},
        {"original_max_position_embeddings": None},
    ],
    ids=str,
)
def test_yarn(tmp_path, more):
    """Frequencies and the factor of cosines and sines are transformers', beyond the original positions, too."""
    parameters = {key: value for key, value in {**YARN, **more}.items() if value is not None}
    shape = {**SHAPE, "vocab_size": 64, "head_dim": 24}
    content = {"architectures": ["Qwen3ForCausalLM"], **shape, "rope_parameters": parameters}
    (tmp_path / "config.json").write_text(json.dumps(content))
    theirs = Qwen3RotaryEmbedding(Qwen3Config(**shape, rope_parameters=dict(parameters)))
    ours = from_checkpoint(str(tmp_path)).layers[0].attn.pos_embeddings
    torch.testing.assert_close(ours.theta, theirs.inv_freq, rtol=1e-6, atol=0)
    length = parameters["factor"] * parameters.get("original_max_position_embeddings", 512)
    assert len(ours.cache) == max(512, length)
    cos, sin = theirs(torch.empty(1, 1), torch.arange(len(ours.cache))[None])
    torch.testing.assert_close(ours.cache, torch.cat([cos[0], sin[0]], dim=-1), rtol=0, atol=2e-4)


FINGERPRINT = (
    "Architecture(name='LlamaForCausalLM', vocabulary=128256, layers=28, width=3072, intermediate=8192, heads=24, "
    "kv_heads=8, head_dim=128, positions=131072, window=None, norm_eps=1e-05, tied=True, qkv_bias=False, "
    "out_bias=False, head_norms=False, attention_dropout=0.0, rope=Rope(base=500000.0, kind='llama3', factor=32.0, "
    "low=1.0, high=4.0, original=8192, yarn=None))"
)


def test_the_text_in_a_run_s_fingerprint():
    """This text is part of the fingerprint of a run's base model, so a run of today resumes tomorrow."""
    architecture = read_architecture(published_models()["meta-llama/Llama-3.2-3B-Instruct"])
    assert str(architecture) == FINGERPRINT
    yarn = replace(
        architecture, rope=Rope(1e6, "yarn", 4.0, original=32768, yarn=Yarn(32.0, 1.0, True, 1.1))
    )
    assert str(yarn).endswith(
        "original=32768, yarn=Yarn(fast=32.0, slow=1.0, rounded=True, attention=1.1)))"
    )
