"""LoRA on fused experts equals PEFT's ``target_parameters``; merged models are laid out as the base model's files."""

import json
from pathlib import Path

import peft
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, WeightConverter

from rocm_ext.base.errors import UserError
from rocm_ext.config.chosen_model import find_target
from rocm_ext.config.model_folder import FROM_CHECKPOINT
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.model.adapters import peft_layers
from rocm_ext.model.adapters.peft_files import PeftConfig, read_adapter, write_adapter
from rocm_ext.model.build import build_model, load_weights, read_weights
from rocm_ext.model.hf import grouped_product
from tests.kit import parity
from tests.kit.families import folder_config
from tests.kit.forks import several_ranks
from tests.kit.hf_models import CARE, write_common, write_theirs, write_wider
from tests.kit.parity import TOKENS, finetune, our_logits, our_model, prepare, their_logits
from tests.kit.plans import planned_and_measured

pytestmark = pytest.mark.usefixtures("any_torchao")
BOTH = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
MOE = [
    "qwen3 moe",
    "mixtral",
    "gpt-oss",
    "deepseek 3",
    "granite moe",
    "qwen3 next",
    "granite hybrid",
]
# of one of both weights, and of a linear layer
PATTERNS = {
    "rank_pattern": {"experts.down_proj": 2, "o_proj": 6},
    "alpha_pattern": {r".*\.1\..*\.gate_up_proj": 20},
}
OLD, NEW = "0.18.1", "0.19.1"  # versions of PEFT with other layouts


def some(*fast: str):
    """Every model with experts; all but ``fast`` are wide."""
    return [pytest.param(name, marks=[] if name in fast else [pytest.mark.wide]) for name in MOE]


def with_update(decoder):
    """Give every adapter of ``decoder`` an update that changes the model's answers."""
    generator = torch.Generator().manual_seed(1)
    for module in decoder.modules():
        if hasattr(module, "lora_b"):
            torch.nn.init.normal_(module.lora_b.weight, std=0.1, generator=generator)
    return decoder


def shapes(folder: Path) -> dict:
    """Return the shapes of a folder's tensors by file and name."""
    return {
        file.name: {name: tensor.shape for name, tensor in load_file(file).items()}
        for file in folder.glob("*.safetensors")
    }


# ---- the same function
@pytest.mark.parametrize("name", some("qwen3 moe"))
def test_ten_steps_equal_peft(folder_of, rows, tmp_path, name):
    """Packed rows here, single rows there."""
    cfg = folder_config(folder_of(name), rows, tmp_path / "run", {**BOTH, **PATTERNS})
    first, found, expected = parity.ten_steps(cfg, folder_of(name), tmp_path)
    experts = [key for key in found if ".experts." in key]
    assert len(experts) >= 4
    assert all((found[key] - first[key]).abs().max() > 1e-3 for key in experts)
    for key, tensor in found.items():
        # Adam divides a gradient near zero by its size, so there rounding shows: one element in 1,024 for Granite
        apart = (tensor - expected[key]).abs()
        assert (apart > 1e-5).float().mean() < 2e-3, key
        assert apart.max() < 1e-4, key


def test_cpus_compute_experts_without_grouped_mm(folder_of, monkeypatch):
    """It ends the process in some ROCm wheels (TheRock#5284), so nothing could report it."""

    class Crash(BaseException):
        pass

    def crash(*args, **kwargs):
        raise Crash

    monkeypatch.setattr(torch, "_grouped_mm", crash)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", crash, raising=False)
    monkeypatch.setattr(grouped_product, "_grouped_mm", crash)
    folder = folder_of("qwen3 moe")
    with pytest.raises(Crash):
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)(TOKENS)
    for dtype in (torch.float32, torch.bfloat16):
        ours = with_update(our_model(folder, lora_rank=3, **BOTH)).to(dtype)
        ours(TOKENS).float().sum().backward()


@pytest.mark.parametrize("name", ["qwen3 moe", "gpt-oss"])
def test_gradients_are_those_of_autograd(folder_of, name):
    """The products' backward pass equals autograd's through whole updates, also where an expert has no tokens."""
    ours = with_update(our_model(folder_of(name), lora_rank=3, **BOTH))
    experts = next(module for module in ours.modules() if hasattr(module, "is_transposed"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 64, generator=generator, requires_grad=True)
    chosen = torch.tensor([[0, 2], [2, 0], [0, 3], [3, 2], [2, 3], [0, 2]])
    weights = torch.rand(6, 2, generator=generator, requires_grad=True)
    loras = [experts.gate_up_proj_lora, experts.down_proj_lora]
    wanted = [x, weights, *(p for lora in loras for p in lora.parameters())]
    seen = torch.randn(6, 64, generator=generator)
    found = torch.autograd.grad((experts(x, chosen, weights) * seen).sum(), wanted)

    def updated(key: str) -> torch.Tensor:
        lora, base = experts.get_submodule(f"{key}_lora"), experts.get_parameter(key)
        a = lora.lora_a.weight.view(4, 3, -1)
        b = lora.lora_b.weight.view(-1, 3, 4)
        return base + lora.scale * torch.einsum(
            "ore,eri->eio" if lora.transposed else "ore,eri->eoi", b, a
        )

    eager = {"dtype": torch.float32, "experts_implementation": "eager"}
    alone = AutoModelForCausalLM.from_pretrained(folder_of(name), **eager).eval()
    theirs = next(module for module in alone.modules() if hasattr(module, "is_transposed"))
    both = {"gate_up_proj": updated("gate_up_proj"), "down_proj": updated("down_proj")}
    out = torch.func.functional_call(theirs, both, (x, chosen, weights))
    expected = torch.autograd.grad((out * seen).sum(), wanted)
    for gradient, want in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-5)
    assert not loras[0].lora_a.weight.grad_fn
    assert (found[2].view(4, 3, -1)[1] == 0).all(), "expert 1 has no tokens"


@torch.no_grad()
def test_routers_are_as_precise_as_transformers(folder_of):
    """In bf16, the router's parameters and buffers have transformers' dtypes; the logits are as near to fp32's."""
    node = OmegaConf.create(
        {"_component_": FROM_CHECKPOINT, "checkpoint_dir": str(folder_of("deepseek 3"))}
    )
    ours = build_model(node, torch.bfloat16, 0, torch.device("cpu"))
    reader = {
        "_component_": "rocm_ext.model.HFCheckpointer",
        "checkpoint_dir": node.checkpoint_dir,
        "model_type": "HF",
    }
    load_weights(ours, read_weights(OmegaConf.create(reader)), Ranks(torch.device("cpu")))
    theirs = AutoModelForCausalLM.from_pretrained(
        folder_of("deepseek 3"), dtype=torch.bfloat16
    ).eval()
    name = "model.layers.1.mlp.gate"
    for key, tensor in theirs.get_submodule(name).state_dict().items():
        found = ours.get_submodule(name).state_dict()[key]
        assert found.dtype == tensor.dtype, key
        assert torch.equal(found, tensor), key
    exact = their_logits(folder_of("deepseek 3"))
    near = (theirs(TOKENS).logits - exact).abs().mean()
    assert (ours.eval()(TOKENS) - exact).abs().mean() < 2 * near < 0.1


# ---- files
@pytest.mark.parametrize("name", some("qwen3 moe"))
def test_exports_give_our_logits_and_the_adapter_comes_back(folder_of, rows, tmp_path, name):
    parity.check_exports(folder_of(name), rows, tmp_path, {**BOTH, **PATTERNS})
    settings = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert {*BOTH["target_parameters"]} <= {*settings["target_parameters"]}
    assert shapes(tmp_path / "run" / "merged") == shapes(folder_of(name))


LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
LATENT |= {"num_key_value_heads": 4}
ALSO_DENSE = {  # models with dense or shared layers beside experts, and values of their configs
    "glm4_moe": {},
    "afmoe": {"num_dense_layers": 1},
    "deepseek_v2": {**LATENT, "head_dim": 8},
    "dots1": {},
    "ernie4_5_moe": {},
    "glm4_moe_lite": {**LATENT, "mlp_layer_types": ["dense", "sparse"]},
    "lfm2_moe": CARE["lfm2_moe"],
    "qwen2_moe": {},
    "qwen3_5_moe_text": CARE["qwen3_5_moe_text"],
}


@torch.no_grad()
@pytest.mark.wide(always=2)
@pytest.mark.parametrize("kind", ALSO_DENSE)
def test_peft_opens_dense_and_shared_layers_beside_experts(tmp_path, kind):
    """PEFT takes gate_proj, up_proj and down_proj in target_modules for experts' here."""
    base = write_common(tmp_path / "base", kind, **ALSO_DENSE[kind])
    sizes = {"lora_rank": 3, "rank_pattern": {r".*\.1\..*": 2}, "alpha_pattern": {r".*\.0\..*": 50}}
    ours = with_update(our_model(base, lora_dropout=0.1, **sizes)).eval()
    expected = ours(TOKENS)
    (adapter := tmp_path / "adapter").mkdir()
    write_adapter(adapter, ours, "HF", str(base))
    assert (their_logits(base) - expected).abs().max() > 0.1
    torch.testing.assert_close(their_logits(base, adapter), expected, rtol=0, atol=1e-4)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert {name.partition(".")[0] for name in settings["target_parameters"]} & {"down_proj", "w2"}
    # with the adapter's own settings, as `chat MODEL --adapter` does
    own = {
        key: settings[key]
        for key in ("target_modules", "target_parameters", "rank_pattern", "alpha_pattern")
    }
    own |= {"lora_rank": settings["r"], "lora_alpha": settings["lora_alpha"]}
    again = our_model(base, **own).eval()
    again.load_state_dict(read_adapter(adapter, again, "HF"), strict=False)
    torch.testing.assert_close(again(TOKENS), expected, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize(
    ("targets", "modules"), [(BOTH["target_parameters"], []), (["experts.down_proj"], ["o_proj"])]
)
@pytest.mark.parametrize("name", some("qwen3 moe", "gpt-oss"))
def test_an_adapter_of_pefts_opens_here(folder_of, tmp_path, name, targets, modules):
    theirs = AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32)
    sizes = {
        "r": 3,
        "lora_alpha": 6,
        "rank_pattern": {"experts.down_proj": 2},
        "alpha_pattern": {"down_proj": 4},
    }
    config = peft.LoraConfig(**sizes, target_modules=modules, target_parameters=targets)
    torch.manual_seed(0)
    theirs = peft.get_peft_model(theirs, config)
    for key, parameter in theirs.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(tmp_path)
    chosen = find_target(str(folder_of(name)), tmp_path).content[
        "model"
    ]  # as chat and eval open it
    lora = {
        key: value for key, value in chosen.items() if key not in ("_component_", "checkpoint_dir")
    }
    ours = our_model(folder_of(name), **lora)
    ours.load_state_dict(read_adapter(tmp_path, ours, "HF"), strict=False)
    expected = theirs.eval()(TOKENS).logits
    assert (their_logits(folder_of(name)) - expected).abs().max() > 0.1
    torch.testing.assert_close(ours.eval()(TOKENS), expected, rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("square", [False, True])
def test_both_layouts_of_pefts_are_written_and_read(folder_of, tmp_path, monkeypatch, square):
    shape = (
        {"moe_intermediate_size": 32} if square else {}
    )  # then gate_up_proj is [64, 64], as is its transpose
    base = write_theirs(tmp_path / "base", "qwen3 moe", **shape)
    ours = with_update(our_model(base, lora_rank=3, **BOTH))
    expected = ours(TOKENS)
    written = {}
    for version in (OLD, NEW):
        monkeypatch.setattr(peft_layers, "version", lambda _, v=version: v)
        folder = tmp_path / version
        folder.mkdir()
        write_adapter(folder, ours, "HF", str(base))
        assert PeftConfig.read(folder).version == version
        again = our_model(base, lora_rank=3, **BOTH)
        again.load_state_dict(read_adapter(folder, again, "HF"), strict=False)
        torch.testing.assert_close(again(TOKENS), expected, rtol=0, atol=0)
        written[version] = load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight"
    sizes = (64, 64) if square else (96, 64)  # rows and columns of gate_up_proj
    assert [list(written[version][name].shape) for version in (OLD, NEW)] == [
        [12, sizes[0]],
        [12, sizes[1]],
    ]


def test_linears_stored_in_pieces_and_together_are_merged(rows, tmp_path, monkeypatch):
    """A family whose files hold q, k and v in one tensor, and a layer of the MLP in two."""
    together = WeightConverter(
        "attn.qkv.weight", [f"self_attn.{part}_proj.weight" for part in "qkv"], [Chunk(0)]
    )
    pieces = WeightConverter(
        ["mlp.a.weight", "mlp.b.weight"], "mlp.gate_proj.weight", [Concatenate(0)]
    )
    conversion_mapping.get_checkpoint_conversion_mapping("olmo2")  # fills the cache
    monkeypatch.setitem(
        conversion_mapping._checkpoint_conversion_mapping_cache, "olmo2", [together, pieces]
    )
    base = write_theirs(tmp_path / "base", "olmo 2", shards=2, num_key_value_heads=4)
    lora = {"target_modules": ["q_proj", "gate_proj", "o_proj"]}
    cfg = folder_config(base, rows, tmp_path / "run", lora, max_steps_per_epoch=2)
    cfg |= {
        "save_adapter_weights_only": False,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-2},
    }
    expected = our_logits(finetune(cfg))
    whole = tmp_path / "run" / "merged"
    assert shapes(whole) == shapes(base)
    names = {name for file in shapes(base).values() for name in file}
    assert names >= {"model.layers.0.attn.qkv.weight", "model.layers.1.mlp.b.weight"}
    assert (their_logits(base) - expected).abs().max() > 0.1
    torch.testing.assert_close(their_logits(whole), expected, rtol=0, atol=1e-4)


def test_what_cannot_be_merged_is_refused_at_the_start(folder_of, rows, tmp_path, monkeypatch):
    def none(_):
        raise NotImplementedError("no way back")

    cfg = folder_config(
        folder_of("qwen3 moe"), rows, tmp_path / "run", BOTH, save_adapter_weights_only=False
    )
    monkeypatch.setattr(MergeModulelist, "reverse_op", property(none))
    with pytest.raises(
        UserError, match=r"cannot be taken apart.*no way back.*set save_adapter_weights_only=True"
    ):
        prepare(cfg)
    prepare(cfg | {"model": {**cfg["model"], "target_parameters": None}})


# ---- whole runs
@pytest.mark.wide  # other models are fast, in test_nodes
@several_ranks
@pytest.mark.parametrize("name", some("qwen3 moe"))
def test_two_ranks_equal_one(folder_of, rows, tmp_path, name):
    parity.check_two_ranks(folder_of(name), rows, tmp_path, BOTH)


@pytest.mark.usefixtures("cpu_of_known_speed")
@pytest.mark.parametrize(
    "changes", [{}, {"enable_activation_checkpointing": True, "dtype": "bf16"}], ids=str
)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.wide) for name in MOE])
def test_planned_peak_is_the_measured_one(tmp_path, name, changes):
    planned, peak = planned_and_measured(
        write_wider(tmp_path / "base", name), tmp_path / "run", BOTH, **changes
    )
    assert planned == pytest.approx(peak, rel=0.1)


# ---- bad input


@pytest.mark.parametrize(
    ("name", "lora", "message"),
    [
        (
            "qwen3 moe",
            {"target_parameters": ["experts.gate_proj"]},
            "'experts.gate_proj', which is no parameter; did",
        ),
        (
            "qwen3 moe",
            {"target_parameters": ["mlp.gate.weight"]},
            r"layers.1.mlp.gate.weight of Qwen3MoeTopKRouter is",
        ),
        ("qwen3 moe", {**BOTH, "use_dora": True}, "not with DoRA"),
        (
            "qwen3 moe",
            {"use_dora": True},
            "gate_proj, up_proj of this model for its experts'.*use_dora=False",
        ),
        ("qwen3 moe", {**BOTH, "lora_dropout": 0.1}, r"set lora_dropout=0\.0"),
    ],
    ids=str,
)
def test_mistakes_in_targets(folder_of, rows, tmp_path, name, lora, message):
    with pytest.raises(UserError, match=message):
        prepare(folder_config(folder_of(name), rows, tmp_path / "run", lora))


def test_experts_past_transformers_interface_are_refused(tmp_path):
    with pytest.raises(UserError, match="Llama4TextExperts is no fused weight"):
        our_model(write_common(tmp_path / "base", "llama4_text"), **BOTH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config, state: config.update(target_parameters=["experts.down_proj"]),
         r"Set model.target_parameters=\['experts.down_proj'\]"),
        (lambda config, state: state.pop(next(k for k in state if "base_layer.lora_B" in k)), "missing model.layers.1"),
        (lambda config, state: state.update({k: t[:, :-1] for k, t in state.items() if "base_layer.lora_A" in k}),
         "base_layer.lora_A.weight is"),
    ],
)  # fmt: skip
def test_damaged_adapters(folder_of, tmp_path, change, message):
    ours = our_model(folder_of("qwen3 moe"), **BOTH)
    write_adapter(tmp_path, ours, "HF", "base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    state = load_file(tmp_path / "adapter_model.safetensors")
    change(config, state)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {key: tensor.contiguous() for key, tensor in state.items()},
        tmp_path / "adapter_model.safetensors",
    )
    with pytest.raises(UserError, match=message):
        read_adapter(tmp_path, ours, "HF")
