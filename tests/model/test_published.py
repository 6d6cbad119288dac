"""Plans of models that are not on this machine, from the shapes that this library ships."""

import json

import pytest
import torch
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune
from torchtune.models import llama3_1, llama3_2, llama3_3, qwen2_5
from torchtune.models.qwen2 import qwen2

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.bench.probes import Bench
from rocm_ext.bench.sweep import Spec
from rocm_ext.cli import main
from rocm_ext.model import from_checkpoint
from rocm_ext.model.download import published_models
from rocm_ext.model.weights.llama_cpp import read_layout
from rocm_ext.pocket import SHAPE
from tests.kit.lines import one_line_has
from tests.kit.plans import as_configured, plan

MODELS = published_models()
# millions of parameters that the model cards and torchtune's builders state, embeddings counted once
PARAMETERS = {
    "Qwen/Qwen3-0.6B": 596, "Qwen/Qwen3-1.7B": 1721, "Qwen/Qwen3-4B": 4022, "Qwen/Qwen3-4B-Instruct-2507": 4022,
    "Qwen/Qwen3-8B": 8191, "Qwen/Qwen3-14B": 14768, "Qwen/Qwen3-32B": 32762, "Qwen/Qwen3-30B-A3B": 30532,
    "google/gemma-3-4b-it": 3880,  # of the text part: 671 in embeddings, 3,209 in layers (arXiv:2503.19786)
    "meta-llama/Llama-3.2-1B-Instruct": 1236, "meta-llama/Llama-3.2-3B-Instruct": 3213,
}  # fmt: skip
# billions in the text parts that llama.cpp states (llama-bench, of their GGUF files)
BILLIONS = {
    "Qwen/Qwen3.5-4B": 4.21, "Qwen/Qwen3.5-9B": 8.95, "Qwen/Qwen3.8-27B": 26.90, "Qwen/Qwen3.6-35B-A3B": 34.66,
    "openai/gpt-oss-120b": 116.83,  # as the model card says
    "google/gemma-4-E4B-it": 7.52 - 0.06,  # without the keys and values that 18 layers take from others
}  # fmt: skip
QWENS = {"0.5B": "0_5b", "1.5B": "1_5b_instruct", "3B": "3b", "7B": "7b_instruct", "14B": "14b_instruct",
         "32B": "32b_instruct", "72B": "72b_instruct"}  # fmt: skip
BUILDERS = {
    "demo/pocket": lambda: qwen2(**SHAPE),
    **{
        f"Qwen/Qwen2.5-{size}-Instruct": getattr(qwen2_5, f"qwen2_5_{name}")
        for size, name in QWENS.items()
    },
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": qwen2_5.qwen2_5_1_5b_instruct,
    "Qwen/Qwen2.5-Coder-7B-Instruct": qwen2_5.qwen2_5_7b_instruct,
    "meta-llama/Meta-Llama-3.1-8B-Instruct": llama3_1.llama3_1_8b,
    "meta-llama/Llama-3.2-1B-Instruct": llama3_2.llama3_2_1b,
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": llama3_3.llama3_3_70b,
    "meta-llama/Llama-3.2-3B-Instruct": llama3_2.llama3_2_3b,
}


@pytest.mark.parametrize("name", MODELS)
def test_each_has_a_layout_of_llama_cpp(name):
    layout = read_layout(MODELS[name])
    config = json.loads((MODELS[name] / "config.json").read_text())
    text = config.get("text_config", config)
    assert layout.keys["block_count"] == layout.layers == text["num_hidden_layers"]
    assert layout.keys["embedding_length"] == text["hidden_size"]
    assert None not in layout.keys.values()


@pytest.fixture(autouse=True)
def _bare_machine(tmp_path, monkeypatch, cpu_of_known_speed):
    """A machine without models in the current folder or the hub's cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.mark.wide(always=6)
@pytest.mark.parametrize("name", MODELS)
def test_a_shape_has_the_parameters_of_the_published_model(name):
    with torch.device("meta"):
        built = from_checkpoint(str(MODELS[name]))
        theirs = BUILDERS[name]() if name in BUILDERS else None
    found = sum(p.numel() for key, p in built.named_parameters() if "lora_" not in key)
    if theirs is not None:
        assert found == sum(p.numel() for p in theirs.parameters())
        heads = [
            (each.layers[0].attn.num_heads, each.layers[0].attn.num_kv_heads)
            for each in (built, theirs)
        ]
        assert heads[0] == heads[1]
    if name in PARAMETERS:
        assert found / 1e6 == pytest.approx(PARAMETERS[name], abs=1)
    if name in BILLIONS:
        assert found / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)
    assert theirs is not None or name in {**PARAMETERS, **BILLIONS}


def test_a_folder_s_name_means_one_model():
    names = [name.rpartition("/")[2] for name in MODELS]
    assert len(set(names)) == len(names)


@as_configured
def test_a_plan_without_any_file(capsys):
    found = plan(capsys, "--config", "strix_halo_qwen3_0_6b")
    assert found["shape"].endswith(
        "of Qwen/Qwen3-0.6B, because models/Qwen3-0.6B is not on this machine"
    )
    assert (found["parameters"] - found["trainable_parameters"]) / 1e6 == pytest.approx(596, abs=1)
    assert (
        main(["plan", "--config", "strix_halo_qwen3_0_6b", "model.checkpoint_dir=Qwen/Qwen3-0.6B"])
        == 0
    )
    said = capsys.readouterr().out
    assert "because Qwen/Qwen3-0.6B is not on this machine" in said
    assert f"{found['parameters'] / 1e6:,.1f} million parameters" in said


@pytest.mark.parametrize("name", ["models/Qwen9-8B", "somebody/Qwen3-0.6B"])
def test_models_that_are_not_published_need_their_config(name, capsys):
    assert main(["plan", "--config", "strix_halo_qwen3_0_6b", f"model.checkpoint_dir={name}"]) == 1
    assert one_line_has(capsys.readouterr().err, "config.json", "download")


def test_nothing_is_trained_from_a_shape():
    cfg = config.load("lora_finetune_rocm", "strix_halo_qwen3_0_6b", ["hardware=cpu"])
    with pytest.raises(
        UserError, match=r"tune download Qwen/Qwen3-0.6B --output-dir models/Qwen3-0.6B"
    ):
        LoRAFinetune(cfg).setup()


def test_bench_measures_a_published_shape():
    bench = Bench(Spec("strix_halo_qwen3_0_6b", ("hardware=cpu",), 2**30, seconds=0.01))
    assert len(bench.shape.layers) == 28
