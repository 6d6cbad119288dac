"""Norms and rotations of the native decoders: the same function as torch's and torchtune's, in fewer operations."""

import pytest
import torch
import torch.nn.functional as F
from torchtune.models.qwen2._positional_embeddings import Qwen2RotaryPositionalEmbeddings
from torchtune.modules import RMSNorm

from rocm_ext.model.families import Rope
from rocm_ext.model.layers import HalvesRoPE, use_fused_norms

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
