"""Results equal those of stock torchtune, PEFT and transformers for every way to cut, pack or recompute a step."""

import base64
import copy
import json
import math
import re
import shutil
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from rocm_ext.recipes import dpo_rocm, lora_finetune_rocm
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune
from safetensors.torch import load_file
from torch import nn
from torchtune.models.llama3._tokenizer import SPECIAL_TOKENS
from torchtune.models.llama3_1 import llama3_1
from torchtune.models.qwen2 import qwen2
from torchtune.modules.peft import DoRALinear, LoRALinear

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.data.batches import collate, row_sizes
from rocm_ext.losses import CrossEntropy
from rocm_ext.model.adapters import peft_files
from rocm_ext.model.adapters.merge import merge
from rocm_ext.model.lora import Dora, Lora
from rocm_ext.model.native.decoder import native
from tests.kit import parity
from tests.kit.families import folder_config, id_of
from tests.kit.forks import RESUME, succeed
from tests.kit.parity import (
    STOCK_RECIPES,
    WEIGHTS,
    finetune,
    our_logits,
    pack,
    prepare,
    their_logits,
)
from tests.kit.raft_runs import trained
from tests.kit.tiny import exit_code, metrics, run_config, write_model, write_rows, write_yaml
from tests.recipes.test_resume import tree

pytestmark = pytest.mark.usefixtures("any_torchao")
also = partial(pytest.param, marks=pytest.mark.wide)  # what other cases hold together
CHUNKED_LOSS = {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
TORCH_LOSS = {"_component_": "torch.nn.CrossEntropyLoss"}
OUR_LOSS = {"_component_": "rocm_ext.losses.CrossEntropy"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of base models by name, and ``rows`` with 48 rows."""
    top = tmp_path_factory.mktemp("parity")
    sharp = {
        "initializer_range": 0.1
    }  # with the usual 0.02 attention is flat and hides errors in q and k
    tied = {**sharp, "tie_word_embeddings": True}
    return {
        "qwen2": write_model(top / "qwen2", **sharp),
        "qwen2 tied": write_model(top / "qwen2_tied", **tied),
        "llama": write_model(top / "llama", "llama", shards=3, **sharp),
        "llama tied": write_model(top / "llama_tied", "llama", **tied),
        "llama bf16": write_model(
            top / "llama_bf16", "llama", shards=2, dtype=torch.bfloat16, **sharp
        ),
        "rows": write_rows(top / "rows.jsonl", 48),
    }


def adapter(recipe: LoRAFinetune) -> dict[str, torch.Tensor]:
    return peft_files.adapter_state(recipe.learner.decoder)


def llama3_tokenizer(folder: Path) -> dict:
    """Return the config of a Llama 3 tokenizer of single bytes."""
    lines = [f"{base64.b64encode(bytes([byte])).decode()} {byte}" for byte in range(256)]
    (folder / "tokenizer.model").write_text("\n".join(lines))
    added = [{"content": token, "id": 256 + i} for i, token in enumerate(SPECIAL_TOKENS)]
    (folder / "special.json").write_text(json.dumps({"added_tokens": added}))
    return {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": str(folder / "tokenizer.model"),
            "special_tokens_path": str(folder / "special.json"), "max_seq_len": 256}  # fmt: skip


def without_tokenizer(base: Path, copy: Path) -> Path:
    """Copy a base model without the tokenizer it came with, since another is used."""
    return shutil.copytree(base, copy, ignore=shutil.ignore_patterns("tokenizer.json"))


def instruct_dataset(rows: Path, **more) -> dict:
    """Return the config of a torchtune dataset of ``rows``."""
    return {"_component_": "torchtune.datasets.instruct_dataset", "source": "json", "data_files": str(rows),
            "split": "train", "column_map": {"input": "question", "output": "answer"}, **more}  # fmt: skip


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(("base", "lora", "loss"), [
    ("qwen2", {"lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": False}, CHUNKED_LOSS),
    ("qwen2", {"apply_lora_to_output": True}, OUR_LOSS),
    ("llama", {"lora_attn_modules": ["k_proj", "output_proj"]}, TORCH_LOSS),
    ("llama", {"use_dora": True, "apply_lora_to_output": True}, CHUNKED_LOSS),
    ("qwen2 tied", {}, OUR_LOSS),
])  # fmt: skip
def test_every_step_equals_stock_torchtune(folders, tmp_path, base, lora, loss):
    schedule = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
    cfg = run_config(
        folders[base], folders["rows"], tmp_path / "run", dataset=instruct_dataset(folders["rows"]), loss=loss,
        batch_size=2, gradient_accumulation_steps=4, epochs=2, max_steps_per_epoch=None, clip_grad_norm=1.0,
        shuffle=True, dtype="fp32", device="cpu", compile=False, resume_from_checkpoint=False,
        lr_scheduler={"_component_": schedule, "num_warmup_steps": 3},
        metric_logger={"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": str(tmp_path)},
    )  # fmt: skip
    del cfg["sequences_per_step"]
    cfg["model"] |= lora
    if base == "llama":
        cfg["tokenizer"] = llama3_tokenizer(tmp_path)
        cfg["checkpointer"]["checkpoint_dir"] = str(
            without_tokenizer(folders["llama"], tmp_path / "base")
        )
    else:  # with a limit, torchtune's Qwen tokenizers mask the last label of every row, also of short ones
        cfg["tokenizer"]["max_seq_len"] = None
    stock_cfg = {**cfg, "loss": TORCH_LOSS if loss is OUR_LOSS else loss}
    del stock_cfg["hardware"]
    stock, stock_adapter = parity.run_stock("lora_finetune", stock_cfg, tmp_path / "initial.pt")

    cfg["checkpointer"]["adapter_checkpoint"] = str(tmp_path / "initial.pt")
    ours = finetune(cfg)

    assert len(stock) == 12
    assert metrics(ours.trainer.folder.path) == pytest.approx(
        [step["loss"] for step in stock], rel=1e-5
    )
    assert metrics(ours.trainer.folder.path, "grad_norm") == pytest.approx(
        [s["grad_norm"] for s in stock], rel=1e-4
    )
    # torchtune steps the schedule before it logs the learning rate, so it logs the rate of the next step
    assert metrics(ours.trainer.folder.path, "lr")[1:] == pytest.approx(
        [step["lr"] for step in stock[:-1]]
    )
    torch.testing.assert_close(adapter(ours), stock_adapter, rtol=1e-4, atol=1e-6)


@pytest.mark.wide
def test_packs_of_torchtune_hold_the_same_sequences_as_rows(folders, tmp_path):
    """A step over all packs is a step over all rows. torchtune itself packs on CUDA only."""
    losses = {}
    for packed in (True, False):
        cfg = run_config(folders["llama"], folders["rows"], tmp_path / str(packed), epochs=4)
        cfg |= {
            "dataset": instruct_dataset(folders["rows"], packed=packed),
            "sequences_per_step": 48,
        }
        cfg["tokenizer"] = llama3_tokenizer(tmp_path)
        cfg["checkpointer"]["checkpoint_dir"] = str(
            without_tokenizer(folders["llama"], tmp_path / f"base{packed}")
        )
        recipe = finetune(cfg)
        losses[packed] = metrics(recipe.trainer.folder.path)
        assert max(map(len, recipe.trainer.rows.lengths)) > 1 or not packed
    assert len(losses[True]) == 4
    assert losses[True] == pytest.approx(losses[False], rel=1e-6)


@pytest.mark.wide(always=3)
@pytest.mark.parametrize(("name", "base"), [
    ("qwen2_5/0.5B_lora_single_device", "qwen2 tied"),
    ("llama3_1/8B_lora_dpo_single_device", "llama"),
    ("llama3_2/1B_lora_single_device", "llama tied"),
    ("llama2/7B_lora_dpo_single_device", "llama"),
])  # fmt: skip
def test_stock_config_runs_on_local_files(folders, tmp_path, name, base):
    """The config is stock torchtune's; only the command line sets the local model and the rows."""
    rows = tmp_path / "data" / "rl" / "train.jsonl"  # where Stack Exchange's pairs are
    rows.parent.mkdir(parents=True)
    tiny, more = (
        run_config(folders[base], rows, tmp_path / "run"),
        {"epochs": 4, "dataset.data_files": rows},
    )
    if "dpo" in name:
        content = [
            {"question": f"{i}?", "response_j": f"It is {i}.", "response_k": f"No {i * i}"}
            for i in range(16)
        ]
        files = json.dumps(tiny["checkpointer"]["checkpoint_files"])
        more = {
            "checkpointer.checkpoint_files": files,
            "checkpointer.model_type": "LLAMA3",
            "epochs": 3,
        }
        del tiny["tokenizer"]["max_seq_len"]
    else:
        examples = [json.loads(line) for line in folders["rows"].read_text().splitlines()[:32]]
        content = [
            {"instruction": row["question"], "input": "", "output": row["answer"]}
            for row in examples
        ]
    if base == "llama tied":  # this builder ties the embeddings
        tiny["model"] |= {
            "_component_": "torchtune.models.llama3_2.lora_llama3_2",
            "scale_factor": 8,
        }
    rows.write_text("\n".join(map(json.dumps, content)))
    overrides = parity.local_overrides(
        tiny, **{"dataset.source": tmp_path if "dpo" in name else "json"}, **more
    )
    recipe = dpo_rocm if "dpo" in name else lora_finetune_rocm
    assert (
        exit_code(recipe.main, "--config", STOCK_RECIPES / "configs" / f"{name}.yaml", *overrides)
        == 0
    )
    first, *_, last = metrics(tmp_path / "run")
    assert last < first
    if "dpo" in name:
        assert first == pytest.approx(math.log(2), rel=1e-5), (
            "before the first update both sides' scores are 0"
        )
    assert (tmp_path / "run" / WEIGHTS).is_file()
    assert list((tmp_path / "run" / "logs").iterdir())


@pytest.fixture(scope="module")
def reference(folders, tmp_path_factory):
    """A run with one micro-batch per step."""
    return finetune(invariant_config(folders, tmp_path_factory.mktemp("reference") / "run"))


def invariant_config(folders, out: Path, **changes) -> dict:
    cfg = run_config(
        folders["qwen2"], folders["rows"], out, tokens_per_micro_batch=100_000, **changes
    )
    cfg["checkpointer"]["adapter_checkpoint"] = str(given_adapter(folders))
    return cfg


def given_adapter(folders) -> Path:
    """An adapter with random weights; a fresh one has B = 0, so A has no gradient."""
    path = folders["rows"].with_name("start.pt")
    if path.exists():
        return path
    cfg = run_config(folders["qwen2"], folders["rows"], path.with_suffix(""))
    state = adapter(prepare(cfg))
    generator = torch.Generator().manual_seed(3)
    torch.save({k: torch.randn(v.shape, generator=generator) * 0.1 for k, v in state.items()}, path)
    return path


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("changes", [
    {"tokens_per_micro_batch": None, "batch_size": 3, "loss": {**OUR_LOSS, "chunk_tokens": 7}},
    {"tokens_per_micro_batch": None, "batch_size": 1},
    {"tokens_per_micro_batch": 90},
    {"attention": "math"},
    {"attention": "eager"},
    {"compile": True},
    {"compile": "max-autotune"},
], ids=str)  # fmt: skip
def test_micro_batches_and_chunks_change_no_loss(folders, tmp_path, reference, changes):
    other = finetune(invariant_config(folders, tmp_path / "run") | changes)
    expected = metrics(reference.trainer.folder.path)
    assert len(expected) == 6
    assert metrics(other.trainer.folder.path) == pytest.approx(expected, rel=1e-6)
    norms = [metrics(recipe.trainer.folder.path, "grad_norm") for recipe in (other, reference)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    torch.testing.assert_close(adapter(other), adapter(reference), rtol=1e-3, atol=1e-5)


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(
    "changes",
    [
        {"enable_activation_checkpointing": True},
        {"enable_activation_checkpointing": 2},
        {"num_workers": 2},
    ],
    ids=str,
)
def test_checkpointing_and_workers_change_no_bit(folders, tmp_path, reference, changes):
    other = finetune(invariant_config(folders, tmp_path / "run") | changes)
    assert metrics(other.trainer.folder.path) == metrics(reference.trainer.folder.path)
    assert metrics(other.trainer.folder.path, "grad_norm") == metrics(
        reference.trainer.folder.path, "grad_norm"
    )
    torch.testing.assert_close(adapter(other), adapter(reference), rtol=0, atol=0)


def decoder_pair(family: str, max_seq_len: int = 12):
    """Return torchtune's own decoder with random weights, and a copy with packed attention.

    Packs may be longer than ``max_seq_len``, because positions restart with each sequence.
    """
    shape = {"vocab_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32,
             "intermediate_dim": 48, "max_seq_len": max_seq_len}  # fmt: skip
    torch.manual_seed(0)
    plain = (qwen2 if family == "qwen2" else llama3_1)(**shape)
    packed = native(copy.deepcopy(plain))
    assert packed.packs
    return plain, packed


lengths_strategy = st.lists(st.integers(1, 12), min_size=1, max_size=5)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lengths=lengths_strategy, seed=st.integers(0, 99), multiple=st.sampled_from([1, 8]))
def test_a_pack_equals_its_sequences_alone(family, lengths, seed, multiple):
    plain, packed = decoder_pair(family)
    sequences = parity.random_sequences(lengths, seed)
    batch = pack(sequences, multiple)
    logits = packed.output(packed.hidden_states(batch))[0, : sum(lengths)]
    alone = torch.cat([plain(s[None])[0] for s in sequences])
    assert_same_gradients(packed, logits, plain, alone, seed)


def assert_same_gradients(packed, found, plain, expected, seed: int) -> None:
    """Compare two models' values, and the gradients of a random weighted sum of them."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(seed))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, ours), theirs in zip(packed.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_shared_beginnings_equal_sequences_alone(family):
    """Values and gradients of every label; a label that two sequences share counts for both."""
    plain, packed = decoder_pair(family, max_seq_len=64)
    rows = parity.rows_that_begin_alike()
    batch = collate(rows, [0, 1, 2], packed=True, pad_id=0, multiple=8, share=True)
    assert batch.shared == (0, 20, 0, 0, 0, 16, 0, 16, 0)
    assert batch.tokens.numel() % 8 == 0
    assert (
        batch.real_tokens
        == sum(map(sum, rows.lengths)) - sum(batch.shared)
        == sum(row_sizes(rows, True))
    )
    found = packed.output(packed.hidden_states(batch)[0][batch.index]).log_softmax(-1)
    found = found.gather(-1, batch.targets[:, None])[:, 0]
    alone = []
    for ids, lengths in zip(rows.tokens, rows.lengths, strict=True):
        for each in torch.from_numpy(ids).long().split(lengths):
            alone.append(plain(each[None])[0, :-1].log_softmax(-1).gather(-1, each[1:, None])[:, 0])
    assert_same_gradients(packed, found, plain, torch.cat(alone), 0)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 7, 8, None])
def test_loss_equals_cross_entropy_of_all_logits(lora, chunk):
    torch.manual_seed(0)
    head = Lora(6, 11, rank=2, alpha=4.0) if lora else nn.Linear(6, 11, bias=False)
    if lora:
        nn.init.normal_(head.lora_b.weight)
        head.weight.requires_grad_(False)
    rows = []
    head.register_forward_hook(lambda module, args, out: rows.append(out.shape[0]))
    hidden, targets = torch.randn(8, 6, requires_grad=True), torch.randint(11, (8,))
    inputs = [hidden, *(p for p in head.parameters() if p.requires_grad)]

    objective, rest = CrossEntropy(chunk_tokens=chunk), ({}, torch.zeros_like(targets))
    loss = objective(head, hidden, targets, *rest)
    found = torch.autograd.grad(3 * loss, inputs)
    assert max(rows) <= (chunk or 8)
    assert sum(rows) == 8
    with torch.no_grad():
        assert objective(head, hidden, targets, *rest) == pytest.approx(loss.item(), rel=1e-6)

    full = F.cross_entropy(head(hidden), targets, reduction="sum")
    torch.testing.assert_close(loss, full)
    torch.testing.assert_close(found, torch.autograd.grad(3 * full, inputs), rtol=1e-5, atol=1e-5)


def layer(kind, bias: bool, dropout: float = 0.0):
    """A layer whose adapter has random weights, unlike a fresh one."""
    torch.manual_seed(0)
    made = kind(6, 5, rank=3, alpha=5.0, dropout=dropout, use_bias=bias)
    nn.init.normal_(made.lora_b.weight)
    if isinstance(made, DoRALinear):
        nn.init.uniform_(made.magnitude, 0.5, 1.5)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name in made.adapter_params())
    return made


def outputs_and_gradients(module, adapter_parameters) -> list[torch.Tensor]:
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(2)  # dropout
    out = module(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *adapter_parameters])]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_lora_equals_torchtune(bias, dropout):
    layers = [layer(kind, bias, dropout) for kind in (Lora, LoRALinear)]
    found, expected = (
        outputs_and_gradients(m, [m.get_parameter(n) for n in m.adapter_params()]) for m in layers
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [Lora, Dora])
def test_lora_and_dora_equal_peft(kind, bias):
    ours = layer(kind, bias)
    linear = nn.Linear(6, 5, bias=bias)
    linear.load_state_dict(
        {name: p for name, p in ours.state_dict().items() if name in ("weight", "bias")}
    )
    options = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["proj"], use_dora=kind is Dora)
    theirs = peft.get_peft_model(nn.ModuleDict({"proj": linear}), options).base_model.model["proj"]
    parameters = [theirs.lora_A["default"].weight, theirs.lora_B["default"].weight]
    if kind is Dora:
        parameters.append(theirs.lora_magnitude_vector["default"].weight)
    own = [ours.get_parameter(name) for name in ours.adapter_params()]
    with torch.no_grad():
        for copied, original in zip(parameters, own, strict=True):
            copied.copy_(original)
    found, expected = outputs_and_gradients(ours, own), outputs_and_gradients(theirs, parameters)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Lora, Dora])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_fp32_adapters_over_a_bf16_base(kind, dropout):
    exact, mixed = layer(kind, True, dropout), layer(kind, True, dropout)
    for base in ("weight", "bias"):
        rounded = mixed.get_parameter(base).data.bfloat16()
        mixed.get_parameter(base).data = rounded
        exact.get_parameter(base).data = rounded.float()
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
    outputs, gradients = [], []
    for module, data in ((exact, x.float()), (mixed, x)):
        torch.manual_seed(2)
        out = module(data)
        parameters = [module.get_parameter(name) for name in module.adapter_params()]
        outputs.append(out)
        gradients.append(torch.autograd.grad(out.float().square().sum(), parameters))
    assert outputs[1].dtype == torch.bfloat16
    assert (outputs[1].float() - outputs[0]).norm() < 0.02 * outputs[0].norm()
    for found, expected in zip(gradients[1], gradients[0], strict=True):
        assert found.dtype == torch.float32
        assert (found - expected).norm() < 0.02 * expected.norm()


def export_config(folders, base: str, out: Path, lora: dict) -> dict:
    """A short run at a high rate, so that the adapter matters."""
    cfg = run_config(
        folders[base], folders["rows"], out, max_steps_per_epoch=3, save_adapter_weights_only=False
    )
    cfg["optimizer"]["lr"] = 2e-2
    cfg["model"] |= lora
    if base == "llama tied":
        cfg["model"] |= {
            "_component_": "torchtune.models.llama3_2.lora_llama3_2",
            "scale_factor": 8,
        }
    return cfg


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(("base", "lora"), [
    ("qwen2", {}),
    also("qwen2", {"use_dora": True, "apply_lora_to_output": True}),
    also("qwen2 tied", {"lora_attn_modules": ["k_proj"], "apply_lora_to_mlp": False}),
    also("llama", {"apply_lora_to_output": True}),
    ("llama", {"use_dora": True, "lora_rank": 3, "lora_alpha": 7}),
    also("llama tied", {}),
], ids=str)  # fmt: skip
def test_exports_give_our_logits_and_the_adapter_comes_back(folders, tmp_path, base, lora):
    cfg = export_config(folders, base, tmp_path / "run", lora)
    parity.check_exports(folders[base], folders["rows"], tmp_path, cfg=cfg)


def test_merged_model_is_laid_out_like_its_base(folders, tmp_path):
    """The files have the same tensors and dtypes, and tensors without an adapter are unchanged."""
    base, merged = folders["llama bf16"], tmp_path / "run" / "merged"
    lora = {"lora_attn_modules": ["q_proj"], "apply_lora_to_mlp": False}
    ours = finetune(export_config(folders, "llama bf16", tmp_path / "run", lora))
    shards = sorted(path.name for path in base.glob("*.safetensors"))
    assert len(shards) > 1
    assert sorted(path.name for path in merged.glob("*.safetensors")) == shards
    indices = [
        json.loads((top / "model.safetensors.index.json").read_text()) for top in (base, merged)
    ]
    assert indices[0]["weight_map"] == indices[1]["weight_map"]
    for shard in shards:
        before, after = load_file(base / shard), load_file(merged / shard)
        assert before.keys() == after.keys()
        for name, tensor in after.items():
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor, before[name]) != ("q_proj" in name)
    expected = our_logits(ours)
    assert (their_logits(merged) - expected).norm() < 0.02 * expected.norm()


def test_small_changes_survive_in_a_merged_model(folders, tmp_path):
    """Changes below half a step of bf16 are lost one by one, but not in the mean; files repeat bit for bit."""
    base, merged = folders["llama bf16"], tmp_path / "run" / "merged"
    cfg = export_config(folders, "llama bf16", tmp_path / "run", {})
    ours = finetune(cfg | {"optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-5}})
    updates = peft_files.updates_by_weight(load_file(tmp_path / "run" / WEIGHTS))
    found = changed = total = 0.0
    for shard in base.glob("*.safetensors"):
        before, after = load_file(shard), load_file(merged / shard.name)
        for name in before.keys() & updates.keys():
            update = updates[name][".lora_B.weight"] @ updates[name][".lora_A.weight"]
            found += torch.sum((after[name].float() - before[name].float()) * update).item()
            total += update.square().sum().item() * 2  # alpha / rank
            changed += (
                ((before[name].float() + 2 * update).bfloat16() != before[name])
                .float()
                .mean()
                .item()
            )
    assert changed / len(updates) < 0.2, (
        "the nearest values of most weights are those of the base model"
    )
    assert found / total == pytest.approx(1, abs=0.1)
    state = {shard.name: shard.read_bytes() for shard in merged.glob("*.safetensors")}
    checkpointer = OmegaConf.create(cfg).checkpointer
    merge(checkpointer, tmp_path / "run" / "adapter", tmp_path / "again", ours.learner.decoder)
    assert state == {
        shard.name: shard.read_bytes() for shard in (tmp_path / "again").glob("*.safetensors")
    }


# ---- torchtune's builder, checkpointer and tokenizer train what ``from_checkpoint`` trains

# as Qwen2.5's, with a default system message, which torchtune's own prompts lack
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(params=["qwen2", "llama"])
def configs(request, tmp_path) -> tuple[Path, Path]:
    """Two configs of one run: in torchtune's terms, and from the folder."""
    model = write_model(tmp_path / "model", request.param)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    ends = [id_of(model, "<|im_end|>"), id_of(model, "<|endoftext|>")]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    rows = write_rows(tmp_path / "rows.jsonl", 24)
    more = {"save_every_n_steps": 2}
    theirs = run_config(model, rows, tmp_path / "theirs", **more)
    ours = folder_config(model, rows, tmp_path / "ours", **more)
    return write_yaml(tmp_path / "theirs.yaml", theirs), write_yaml(tmp_path / "ours.yaml", ours)


def results(path: Path) -> tuple[list, list[float], dict]:
    """Run a config; return its rows, losses and the exported adapter."""
    recipe, out = trained(LoRAFinetune, path), path.with_suffix("")
    rows = [
        [*recipe.trainer.rows.tokens],
        [*recipe.trainer.rows.labels],
        recipe.learner.tokenizer.end_of_text,
    ]
    return rows, metrics(out), load_file(out / "adapter" / "adapter_model.safetensors")


@pytest.mark.wide(always=1)
def test_configs_of_torchtune_and_of_the_folder_train_the_same(configs):
    (rows, losses, theirs), (our_rows, our_losses, ours) = map(results, configs)
    assert str(rows) == str(our_rows), "the same prompts, labels and end of text"
    assert our_losses == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("configs", ["qwen2"], indirect=True)
def test_a_run_in_torchtunes_terms_resumes_with_its_config(configs, tmp_path):
    theirs, ours = configs
    out = tmp_path / "theirs"
    succeed(lora_finetune_rocm.main, theirs)
    before = tree(out)
    cfg = config.load("lora_finetune_rocm", str(ours), [f"output_dir={out}", RESUME])
    message = r"belongs to another run: .*model\._component_: was torchtune\S+, is rocm_ext.model.from_checkpoint"
    with pytest.raises(
        UserError, match=rf"{message}.*{re.escape(str(out / 'config.yaml'))}"
    ) as caught:
        LoRAFinetune(cfg).setup()
    assert "\n" not in str(caught.value)
    assert tree(out) == before
    succeed(lora_finetune_rocm.main, out / "config.yaml", RESUME, "epochs=2")
    assert len(metrics(out)) == 6
