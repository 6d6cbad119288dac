"""Models from a folder in Hugging Face's format equal transformers' and PEFT's in every native family."""

import json
import shutil
import warnings
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune, main
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rocm_ext import config
from rocm_ext.data.tokenizer import open_tokenizer
from rocm_ext.errors import UserError
from rocm_ext.generation import Request, Sampling
from rocm_ext.generation.decoder import merged
from rocm_ext.generation.local import LocalSession
from rocm_ext.model import adapter_files
from rocm_ext.model.attention import use_packed_attention
from rocm_ext.model.build import Weights, build_model, hidden_states, load_weights, read_weights
from rocm_ext.ranks import Ranks
from tests.families import MODELS, folder_config, write_family
from tests.test_parity import any_torchao, pack, random_sequences  # noqa: F401 - a fixture for every test here
from tests.tiny import run_config, write_rows, write_yaml

CPU = torch.device("cpu")
TOKENS = torch.tensor([[5, 17, 99, 3, 250, 42, 8, 8, 120, 61, 33, 7]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of base models by name, and ``rows`` with 80 rows."""
    top = tmp_path_factory.mktemp("families")
    found = {name: write_family(top / name.replace(" ", "_"), name, shards=1 + (name == "qwen3")) for name in MODELS}
    return {**found, "rows": write_rows(top / "rows.jsonl", 80)}


def load(cfg: dict, out: Path):
    out.parent.mkdir(parents=True, exist_ok=True)
    return config.load("lora_finetune_rocm", str(write_yaml(out.with_suffix(".yaml"), cfg)))


def prepare(cfg: dict) -> LoRAFinetune:
    recipe = LoRAFinetune(load(cfg, Path(cfg["output_dir"])))
    recipe.setup()
    return recipe


def finetune(cfg: dict) -> LoRAFinetune:
    recipe = prepare(cfg)
    recipe.train()
    recipe.cleanup()
    return recipe


def our_model(folder: Path, **lora):
    """Build and load our decoder, with fresh adapters."""
    node = OmegaConf.create({"_component_": "rocm_ext.model.from_checkpoint", "checkpoint_dir": str(folder), **lora})
    decoder = build_model(node, torch.float32, 0, CPU)
    checkpointer = {"_component_": "rocm_ext.model.HFCheckpointer", "checkpoint_dir": str(folder), "model_type": "HF"}
    load_weights(decoder, read_weights(OmegaConf.create(checkpointer)), Ranks(CPU))
    return decoder


def their_model(folder: Path, adapter: Path | None = None, trainable: bool = False):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns about weights it did not use
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        if adapter is not None:
            theirs = peft.PeftModel.from_pretrained(theirs, adapter, is_trainable=trainable)
    return theirs.eval()


# ---- the same function


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_equal_transformers(folders, name):
    ours, theirs = our_model(folders[name]), their_model(folders[name])
    found, expected = ours(TOKENS), theirs(TOKENS).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
    pairs = {"tok_embeddings.weight": "model.embed_tokens.weight"}
    for norm, their_norm in (("sa_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
        pairs[f"layers.0.{norm}.scale"] = f"model.layers.0.{their_norm}.weight"
    if "qwen3" in name:
        pairs["layers.0.attn.q_norm.scale"] = "model.layers.0.self_attn.q_norm.weight"
        pairs["layers.0.attn.k_norm.scale"] = "model.layers.0.self_attn.k_norm.weight"
    parameters = [ours.get_parameter(own).requires_grad_() for own in pairs]
    gradients = torch.autograd.grad((ours(TOKENS) * weights).sum(), parameters)
    wanted = torch.autograd.grad((expected * weights).sum(), [theirs.get_parameter(p) for p in pairs.values()])
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_a_pack_equals_its_sequences_alone(folders, name):
    plain, packed = our_model(folders[name]), our_model(folders[name])
    assert use_packed_attention(packed)
    lengths = [7, 1, 12, 4]
    sequences = random_sequences(lengths, 3)
    found = packed.output(hidden_states(packed, pack(sequences, 8)))[0, : sum(lengths)]
    torch.testing.assert_close(found, torch.cat([plain(s[None])[0] for s in sequences]), rtol=1e-5, atol=1e-5)


def test_padded_rows_mask_as_told(folders):
    """Padding on the left, which a mask hides, changes nothing."""
    decoder = our_model(folders["qwen3"])
    sequence = random_sequences([6], 1)[0]
    row = torch.cat([torch.zeros(3, dtype=torch.long), sequence])[None]
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    visible[3:, :3] = False
    positions = torch.tensor([[0, 1, 2, *range(6)]])
    found = decoder(row, mask=visible[None], input_pos=positions)[0, 3:]
    torch.testing.assert_close(found, decoder(sequence[None])[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2", "qwen2 tied"])
def test_equals_torchtunes_builder(folders, tmp_path, name):
    cfg = run_config(folders[name], folders["rows"], tmp_path / "run")
    cfg["model"] |= {"lora_rank": 4, "lora_alpha": 8, "rope_base": 1e4}
    loaded = load(cfg, tmp_path / "run")
    theirs = build_model(loaded.model, torch.float32, 0, CPU)
    load_weights(theirs, read_weights(loaded.checkpointer), Ranks(CPU))
    ours = our_model(folders[name], lora_rank=4, lora_alpha=8)
    assert adapter_files.fingerprint(adapter_files.adapter_state(ours)) == adapter_files.fingerprint(
        adapter_files.adapter_state(theirs)
    )
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS), rtol=0, atol=0)


# ---- training


def their_training(folder: Path, adapter: Path, rows, steps: int, lr: float) -> dict[str, torch.Tensor]:
    """Train ``adapter`` with PEFT on steps of 8 rows, one row at a time; return its weights."""
    theirs = their_model(folder, adapter, trainable=True).train()
    trainable = [p for p in theirs.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=lr)
    for step in range(steps):
        chunk = range(8 * step, 8 * step + 8)
        count = sum(int((torch.from_numpy(rows.labels[i][1:]) >= 0).sum()) for i in chunk)
        for i in chunk:
            tokens, labels = (torch.from_numpy(part[i]).long() for part in (rows.tokens, rows.labels))
            logits = theirs(tokens[None]).logits[0, :-1]
            (F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum") / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return peft.get_peft_model_state_dict(theirs, save_embedding_layers=False)


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("qwen3", {}),
        ("llama", {"target_modules": ["q_proj", "o_proj", "down_proj"]}),
        ("qwen2", {"use_dora": True}),
        ("mistral", {"target_modules": ["k_proj", "lm_head"]}),
        pytest.param("llama biased", {}, marks=pytest.mark.slow),
        pytest.param("qwen2 tied", {}, marks=pytest.mark.slow),
        pytest.param("qwen3 tied", {"use_dora": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ten_steps_equal_peft(folders, tmp_path, name, lora):
    cfg = folder_config(folders[name], folders["rows"], tmp_path / "run", lora, shuffle=False, max_steps_per_epoch=10)
    recipe = prepare(cfg)
    start = tmp_path / "start"
    start.mkdir()
    recipe.learner.write_adapter(start)
    rows = recipe.trainer.rows
    recipe.train()
    recipe.cleanup()
    expected = their_training(folders[name], start, rows, 10, lr=1e-3)
    found = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    moved = load_file(start / "adapter_model.safetensors")
    for key, tensor in found.items():
        assert (tensor - moved[key]).abs().max() > 1e-3, key
        torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}")
