"""GGUF files of models that transformers computes: llama.cpp's log-probs equal those of transformers and PEFT."""

from pathlib import Path

import pytest
import torch

from rocm_ext.model.adapters.peft_files import write_adapter
from rocm_ext.model.lora import adapter_parameters
from tests.export.test_export import export
from tests.export.test_export_gguf import PROMPT
from tests.kit import hf_models, multimodal_models
from tests.kit.llama_cpp import LlamaCpp, llama_cpp
from tests.kit.parity import our_model, their_model, transformers_own
from tests.model.test_multimodal import whole_model

pytest.importorskip("gguf")
pytest.importorskip("xllamacpp", reason="llama.cpp is not here: pip install xllamacpp")
MODELS = [(hf_models, name) for name in hf_models.GGUF] + [(multimodal_models, name) for name in multimodal_models.GGUF]
EXPERTS = {"qwen3 moe", "gpt-oss", "qwen3.5 moe", "gemma 4 moe"}
# PEFT takes shared experts' gate_proj, up_proj and down_proj for experts'
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]


def write(kind, folder: Path, name: str) -> Path:
    if kind is hf_models:
        return hf_models.write_theirs(folder, name, **hf_models.GGUF[name])
    return multimodal_models.write_multimodal(folder, name)


def write_update(folder: Path, base: Path, name: str, **targets) -> Path:
    """Write a random adapter of all layers, and of all experts."""
    lora = {"lora_rank": 3, "lora_alpha": 6}
    lora |= {"target_parameters": "all-experts"} if name in EXPERTS else {}
    lora |= {"target_modules": ATTENTION} if name == "qwen3.5 moe" else {}
    lora |= {"target_parameters": ["experts.gate_up_proj"]} if name == "gemma 4 moe" else {}
    lora |= targets
    ours = our_model(base, **lora)
    torch.manual_seed(1)
    for parameter in adapter_parameters(ours).values():
        torch.nn.init.normal_(parameter, std=0.06)
    folder.mkdir()
    write_adapter(folder, ours, "HF", str(base))
    return folder


@torch.no_grad()
def expected(kind, base: Path, adapter: Path | None = None) -> torch.Tensor:
    """Return transformers' log-probs behind each beginning of ``PROMPT``, [positions, tokens]."""
    opened = their_model if kind is hf_models else whole_model
    with transformers_own():
        return opened(base, adapter)(input_ids=torch.tensor([PROMPT])).logits[0].log_softmax(-1)


def differences(server: LlamaCpp, expected: torch.Tensor) -> torch.Tensor:
    """Return the differences of llama.cpp's log-probs of all tokens, at each position that it tells."""
    told = {at: server.logprobs(PROMPT[: at + 1]) for at in range(len(PROMPT))}
    told = {at: each for at, each in told.items() if each is not None}
    assert len(told) >= 6
    found = torch.tensor([[each[number] for number in range(expected.shape[1])] for each in told.values()])
    return (found - expected[list(told)]).abs()


@pytest.mark.parametrize(("kind", "name"), MODELS, ids=[f"{kind.__name__[10:15]} {name}" for kind, name in MODELS])
def test_model_and_adapter_have_transformers_and_pefts_log_probs(tmp_path, kind, name):
    base = write(kind, tmp_path / "base", name)
    adapter = write_update(tmp_path / "adapter", base, name)
    assert export(base, "--gguf", tmp_path / "base.gguf") == 0
    assert export(adapter, "--gguf", tmp_path / "merged.gguf", "--gguf-adapter", tmp_path / "adapter.gguf") == 0
    plain, adapted = expected(kind, base), expected(kind, base, adapter)
    assert (adapted - plain).abs().mean() > 0.1, "the adapter changes much"
    for files, theirs in (
        (["base.gguf"], plain),
        (["merged.gguf"], adapted),
        (["base.gguf", "adapter.gguf"], adapted),
    ):
        with llama_cpp(*(tmp_path / file for file in files)) as server:
            found = differences(server, theirs)
        assert found.mean() < 0.01, files
        assert found.max() < 0.1, files
