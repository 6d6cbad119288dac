"""Models that transformers computes: their training equals transformers' with PEFT, packed or padded."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM

from rocm_ext.base.errors import UserError
from rocm_ext.data.batches import collate
from rocm_ext.losses import CrossEntropy
from rocm_ext.model.lora import adapter_parameters
from rocm_ext.plan.costs import Kernels
from rocm_ext.plan.memory import plan_memory
from tests.kit import parity
from tests.kit.families import folder_config, write_family
from tests.kit.forks import several_ranks
from tests.kit.grpo_runs import check_grpo_and_dpo
from tests.kit.hf_models import CARE, MODELS, MORE, PADDED, write_common, write_theirs, write_wider
from tests.kit.parity import (
    CPU,
    TOKENS,
    our_model,
    pack,
    prepare,
    random_sequences,
    their_logits,
)
from tests.kit.plans import planned_and_measured

pytestmark = pytest.mark.usefixtures("any_torchao")


def some(*fast: str, but: tuple[str, ...] = ()):
    """Every model's name; all but ``fast`` are wide."""
    marks = {False: [pytest.mark.wide], True: []}
    return [pytest.param(name, marks=marks[name in fast]) for name in MODELS if name not in but]


# ---- the same function
def check_logits(folder: Path) -> bool:
    """Compare logits with transformers' eager attention and experts, packed rows with each sequence alone."""
    ours = our_model(folder).eval()
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager).eval()

    def theirs(tokens: torch.Tensor) -> torch.Tensor:
        with parity.transformers_own():
            return model(tokens, use_cache=False).logits

    def check(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(
            found, expected, rtol=1e-5, atol=1e-5 * max(1.0, float(expected.std()))
        )

    check(ours(TOKENS), theirs(TOKENS))
    if ours.packs:
        lengths = [9, 1, 12, 4]  # longer and shorter than windows of 6
        sequences = random_sequences(lengths, 3)
        found = ours.output(ours.hidden_states(pack(sequences, 8))[0])[: sum(lengths)]
        check(found, torch.cat([theirs(s[None])[0] for s in sequences]))
    if ours.shares:
        rows = parity.rows_that_begin_alike()
        batch = collate(rows, [0, 1, 2], packed=True, pad_id=0, multiple=8, share=True)
        found = ours.output(ours.hidden_states(batch)[0][batch.index])
        tokens = [
            s
            for ids, each in zip(rows.tokens, rows.lengths, strict=True)
            for s in torch.tensor(ids).split(each)
        ]
        check(found, torch.cat([theirs(s[None])[0, :-1] for s in tokens]))
    return ours.packs


@pytest.mark.wide(always=6)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_equal_transformers_own(folder_of, name):
    assert check_logits(folder_of(name)) == MODELS[name][1]


@pytest.mark.wide
@pytest.mark.parametrize("kind", MORE)
@torch.no_grad()
def test_logits_of_more_architectures(tmp_path, kind):
    assert check_logits(write_common(tmp_path / kind, kind))


@pytest.mark.wide(always=2)
@pytest.mark.parametrize("kind", CARE)
def test_architectures_that_need_care(tmp_path, kind):
    """They compute transformers' logits, their steps can be planned, and each adapter gets a gradient."""
    folder = write_common(tmp_path / kind, kind, **CARE[kind])
    with torch.no_grad():
        assert check_logits(folder) == (kind not in PADDED)
    ours = our_model(folder).train()
    figures = {
        "optimizer": OmegaConf.create({"_component_": "torch.optim.AdamW"}),
        "kernels": Kernels(True, True),
    }
    plan = plan_memory(ours, CrossEntropy(), [9, 4], CPU, targets=12, **figures)
    assert all(layer.kept > 0 for layer in plan.layer_costs)
    for layer in range(len(ours.layers)):
        ours.layers[layer] = checkpoint_wrapper(ours.layers[layer])
    ours(TOKENS).sum().backward()
    missing = [name for name, p in adapter_parameters(ours).items() if p.grad is None]
    assert not missing


@pytest.mark.parametrize("kind", ["falcon_h1", "jamba"])
def test_weights_that_the_model_reads_itself_have_no_adapter(tmp_path, kind):
    target = {"falcon_h1": "out_proj", "jamba": "dt_proj"}[kind]
    folder = write_common(tmp_path / kind, kind, **CARE[kind])
    with pytest.raises(
        UserError,
        match=rf"target_modules has '{target}', but the model reads the weight of .* past",
    ):
        our_model(folder, target_modules=[target])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("rembert", "RemBertForCausalLM attends to later tokens"),
        (
            "roformer",
            "one weight in two places, roformer.embeddings.word_embeddings.weight and cls",
        ),
    ],
)
def test_models_of_another_build_are_refused(tmp_path, kind, message):
    with pytest.raises(UserError, match=message):
        our_model(write_common(tmp_path / kind, kind))


def test_a_model_whose_memory_cannot_be_planned_is_refused(folder_of, rows, tmp_path):
    """Its experts' code asks for shapes that depend on values."""
    heads = {
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 8,
        "num_key_value_heads": 4,
    }
    sizes = {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 48,
    }
    sizes |= {"vocab_size": 512, "num_layers": 2, "zero_expert_num": 2, "moe_topk": 2}
    base = write_common(tmp_path / "base", "longcat_flash", **heads, **sizes)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(folder_of("olmo 2") / name, base)
    with pytest.raises(UserError, match=r"depends on values \(aten\.nonzero.* not supported"):
        prepare(folder_config(base, rows, tmp_path / "run"))


OWN = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
    _can_set_attn_implementation_cached_value = True
"""


@torch.no_grad()
def test_code_of_the_folder_runs_if_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    base = write_family(tmp_path / "base", "llama")
    expected = their_logits(base)
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    own = edited(
        base, tmp_path / "own", architectures=["OwnForCausalLM"], model_type="own", auto_map=auto
    )
    (own / "own.py").write_text(OWN)
    with pytest.raises(
        UserError, match=r"OwnForCausalLM brings its own code.*trust_remote_code=True"
    ):
        our_model(own)
    native = edited(own, tmp_path / "native", architectures=["LlamaForCausalLM"])
    with pytest.raises(UserError, match=r"LlamaForCausalLM, .* OwnForCausalLM"):
        our_model(native, trust_remote_code=True)
    ours = our_model(own, trust_remote_code=True)
    assert not ours.packs
    torch.testing.assert_close(ours.eval()(TOKENS), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_padding_changes_nothing(folder_of):
    """Rows of a hybrid model, padded on the right, give each sequence's own hidden states."""
    ours = our_model(folder_of("qwen3.5")).eval()
    sequences = random_sequences([9, 1, 12, 4], 3)
    rows = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    found = ours(rows)
    for row, sequence in zip(found, sequences, strict=True):
        torch.testing.assert_close(
            row[: len(sequence)], ours(sequence[None])[0], rtol=1e-5, atol=1e-5
        )


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("gemma 3", {"trainable_tokens": ["<|im_end|>", 17]}),
        (
            "qwen3 moe",
            {
                "target_modules": ["q_proj", "self_attn.o_proj", "lm_head"],
                "rank_pattern": {"lm_head": 2},
                "alpha_pattern": {r"layers\.1\..*": 3},
            },
        ),
        pytest.param("granite", {"trainable_tokens": ["<|im_end|>", 17]}, marks=pytest.mark.wide),
        pytest.param("phi 3", {"trainable_tokens": ["<|im_end|>", 17]}, marks=pytest.mark.wide),
        pytest.param(
            "gpt-oss", {"trainable_tokens": {"lm_head": ["<|im_end|>", 17]}}, marks=pytest.mark.wide
        ),
        ("qwen3.5", {}),
        *(
            pytest.param(name, {}, marks=pytest.mark.wide)
            for name in MODELS
            if name not in ("gemma 3", "qwen3.5")
        ),
        pytest.param("olmo 2", {"use_dora": True}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_ten_steps_equal_peft(folder_of, rows, tmp_path, name, lora):
    cfg = folder_config(folder_of(name), rows, tmp_path / "run", lora)
    first, found, expected = parity.ten_steps(cfg, folder_of(name), tmp_path)
    assert sum(
        (tensor - first[key]).abs().max() > 1e-3 for key, tensor in found.items()
    ) > 0.9 * len(found)
    for key, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[key], rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
        )


# ---- files and whole runs
@pytest.mark.parametrize("name", some("qwen3 moe"))
def test_exports_give_our_logits_and_the_adapter_comes_back(folder_of, rows, tmp_path, name):
    expected = parity.check_exports(folder_of(name), rows, tmp_path, {"trainable_tokens": [17, 99]})
    torch.testing.assert_close(
        our_model(tmp_path / "run" / "merged").eval()(TOKENS), expected, rtol=0, atol=1e-4
    )


@pytest.mark.wide
@pytest.mark.parametrize("name", some("gpt-oss"))
def test_killed_and_resumed(folder_of, rows, tmp_path, name):
    cfg = parity.whole_run(
        folder_of(name), rows, tmp_path / "whole", {"trainable_tokens": [17, "<|im_end|>"]}
    )
    parity.check_resumes(cfg, "killed")


@pytest.mark.wide
@several_ranks
@pytest.mark.parametrize("name", some("gemma 3"))
def test_two_ranks_equal_one(folder_of, rows, tmp_path, name):
    parity.check_two_ranks(
        folder_of(name), rows, tmp_path, {"trainable_tokens": ["<|im_end|>", 17]}
    )


@pytest.mark.wide
@pytest.mark.usefixtures("cpu_of_known_speed")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.wide),
        {"enable_activation_checkpointing": True, "dtype": "bf16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", some("qwen3 moe"))
def test_planned_peak_is_the_measured_one(tmp_path, name, changes):
    planned, peak = planned_and_measured(
        write_wider(tmp_path / "base", name), tmp_path / "run", **changes
    )
    assert planned == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("name", some())
def test_grpo_and_dpo(folder_of, tmp_path, name):
    check_grpo_and_dpo(folder_of(name), tmp_path, trainable_tokens=list(range(100, 200)))


# ---- bad input
def test_checkpointed_layers_are_not_compiled(folder_of, rows, tmp_path, caplog):
    changes = {"compile": True, "enable_activation_checkpointing": True}
    prepare(folder_config(folder_of("olmo 2"), rows, tmp_path / "run", **changes))
    assert "compile: torch does not compile the 2 checkpointed layers" in caplog.text


def test_without_the_extra_an_error_names_it(folder_of, rows, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rocm_ext.model.hf.decoder", None)
    with pytest.raises(
        UserError, match=r"Olmo2ForCausalLM has no decoder.*pip install 'torchtune-rocm\[trans"
    ):
        prepare(folder_config(folder_of("olmo 2"), rows, tmp_path / "run"))


def edited(base: Path, folder: Path, **changes) -> Path:
    shutil.copytree(base, folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "lora", "message"),
    [
        (
            {"architectures": ["NeverHeardOfForCausalLM"], "model_type": "never"},
            {},
            "cannot build this model.*never",
        ),
        (
            {"auto_map": {"AutoModelForCausalLM": "code.Model"}},
            {},
            "own code.*trust_remote_code=True",
        ),
        ({"hidden_size": 65}, {}, "."),
        ({"use_bidirectional_attention": True}, {}, "Gemma3ForCausalLM attends to later tokens"),
        ({}, {"target_modules": ["q_prj"]}, "'q_prj', which is no layer; did you mean q_proj"),
        (
            {},
            {"quantize_base": True},
            r"0\.self_attn\.q_proj \[64, 64\] cannot be stored in 4 bits.*leave it out",
        ),
        ({}, {"target_modules": []}, "target_modules is empty"),
        ({}, {"target_modules": ["input_layernorm", "self_attn"]}, "no linear layer"),
    ],
    ids=str,
)
def test_mistakes_end_a_run_before_the_weights(folder_of, rows, tmp_path, changes, lora, message):
    base = edited(folder_of("gemma 3"), tmp_path / "base", **changes)
    for file in base.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UserError, match=message):
        prepare(folder_config(base, rows, tmp_path / "run", lora))


@pytest.mark.parametrize(
    ("drop", "add", "message"),
    [
        (
            "model.layers.0.self_attn.q_proj.weight",
            [],
            "missing model.layers.0.self_attn.q_proj.weight",
        ),
        (
            "lm_head.weight",
            ["lm_head.weight", "model.x.extra.weight"],
            "unexpected model.x.extra.weight",
        ),
        ("model.layers.1.mlp.experts.3.up_proj.weight", [], "experts"),
    ],
)
def test_weights_that_do_not_fit(tmp_path, drop, add, message):
    base = write_theirs(tmp_path / "base", "qwen3 moe")
    state = load_file(base / "model.safetensors")
    dropped = state.pop(drop)
    state |= {name: dropped.clone() for name in add}
    save_file(state, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=message):
        our_model(base)
