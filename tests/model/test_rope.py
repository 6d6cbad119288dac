"""Position embeddings with YaRN against transformers', and the text that identifies an architecture."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from rocm_ext.model import from_checkpoint
from rocm_ext.model.download import published_models
from rocm_ext.model.families import Rope, Yarn, read_architecture
from tests.kit.families import YARN
from tests.kit.tiny import SHAPE


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
    yarn = replace(architecture, rope=Rope(1e6, "yarn", 4.0, original=32768, yarn=Yarn(32.0, 1.0, True, 1.1)))
    assert str(yarn).endswith("original=32768, yarn=Yarn(fast=32.0, slow=1.0, rounded=True, attention=1.1)))")
