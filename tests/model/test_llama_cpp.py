"""llama.cpp's layouts of configs: keys, and what is refused."""

import json
from pathlib import Path

import pytest

from rocm_ext.base.errors import UserError
from rocm_ext.model.weights.llama_cpp import read_layout, way_out
from tests.kit import hf_models, multimodal_models
from tests.kit.families import LLAMA3
from tests.kit.tiny import SHAPE

LOCAL = {"rope_type": "default", "rope_theta": 1e2}
NATIVE = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}


def write_config(folder: Path, name: str, **changes) -> Path:
    if name in NATIVE:
        config = {"architectures": [NATIVE[name]], "model_type": name, **SHAPE}
    else:
        kind, _, own = hf_models.MODELS[name]
        config = {"model_type": kind, **SHAPE, **own, **hf_models.GGUF.get(name, {})}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 320, **config, **changes}))
    return folder


@pytest.mark.parametrize("name", ["qwen3 moe", "gpt-oss", "qwen2"])
def test_llama_3s_rope_is_llamas_alone(tmp_path, name):
    """llama.cpp opens no file with factors that the architecture's graph does not read."""
    assert (
        read_layout(write_config(tmp_path / "llama", "llama", rope_parameters=LLAMA3)).factors.max()
        == 8
    )
    base = write_config(tmp_path / "base", name, rope_parameters=LLAMA3)
    with pytest.raises(
        UserError,
        match=r"rope_type is 'llama3'; for .*, llama.cpp computes only default, linear, yarn",
    ):
        read_layout(base)
    assert way_out(base).startswith("--merged DIR")


@pytest.mark.parametrize("scaled", [hf_models.YARN, LLAMA3], ids=["yarn", "llama3"])
def test_gemma_3s_rope_is_default_or_linear(tmp_path, scaled):
    rope = {"full_attention": scaled, "sliding_attention": LOCAL}
    with pytest.raises(UserError, match=r"for GEMMA3, llama.cpp computes only default, linear"):
        read_layout(write_config(tmp_path / "base", "gemma 3", rope_parameters=rope))


def test_the_width_of_heads_may_follow_from_the_models(tmp_path):
    base = write_config(tmp_path / "base", "qwen3 moe")
    path = base / "config.json"
    config = json.loads(path.read_text())
    del config["head_dim"]
    path.write_text(json.dumps(config))
    keys = read_layout(base).keys
    assert (keys["key_length"], keys["value_length"], keys["rope_dimension_count"]) == (16, 16, 16)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3.5", {"layer_types": ["linear_attention"] * 2}),
        ("qwen3 moe", {"hidden_size": "abc"}),
        ("qwen3 moe", {"num_hidden_layers": None}),
        ("qwen3 moe", {"rope_parameters": "x"}),
        ("gemma 2", {"architectures": {"x": 1}, "text_config": "x"}),
    ],
)
def test_configs_that_nothing_can_read_are_one_line(tmp_path, name, changes):
    base = write_config(tmp_path / "base", name, **changes)
    with pytest.raises(UserError, match=r"^[^\n]+$"):
        read_layout(base)
    assert way_out(base).startswith("--merged DIR")


def test_gemma_4s_factors(tmp_path):
    *_, text, _ = multimodal_models.MODELS["gemma 4"]
    rope = {
        "rope_type": "proportional",
        "rope_theta": 1e3,
        "partial_rotary_factor": 0.25,
        "factor": 2.0,
    }
    config = {"model_type": "gemma4_text", "vocab_size": 384, **SHAPE, **text}
    config["rope_parameters"] = {"full_attention": rope, "sliding_attention": LOCAL}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layout = read_layout(tmp_path)
    rotated = layout.keys["key_length"] // 8
    assert layout.factors[:rotated].tolist() == [2.0] * rotated
    assert (layout.factors[rotated:] > 1e20).all()
    config["rope_parameters"]["full_attention"] = LOCAL
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"for GEMMA4, llama.cpp computes only proportional"):
        read_layout(tmp_path)
