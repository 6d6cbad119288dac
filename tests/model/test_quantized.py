"""Base models whose weights stay quantised: those of their files, and FP8 that is made as they are loaded."""

import json
import shutil
from functools import cache

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from rocm_ext.base.errors import UserError
from rocm_ext.model import build
from rocm_ext.model.build import build_model
from rocm_ext.model.lora import _LoraFunction, adapters, dense
from rocm_ext.model.weights import quantized
from rocm_ext.model.weights.checkpointer import StoredWeights, weight_files
from rocm_ext.model.weights.quantized import Quantized, fp8_rows, stored
from rocm_ext.sampling import Sampling
from tests.kit import parity
from tests.kit.families import folder_config, write_family
from tests.kit.forks import several_ranks
from tests.kit.grpo_runs import check_grpo_and_dpo
from tests.kit.hf_models import write_theirs
from tests.kit.parity import CPU, TOKENS, finetune, our_logits, our_model, their_logits
from tests.kit.plans import planned_and_measured
from tests.kit.quantized import BLOCK, write_quantized
from tests.kit.tiny import metrics
from tests.sampling.test_transformers_engine import ask, engine, prompts, sampled, trained

NAMES = {"qwen3": "fp8", "qwen3 moe": "fp8", "gpt-oss": "mxfp4"}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    top = tmp_path_factory.mktemp("quantised")

    @cache
    def write(name: str, kind: str = ""):
        own = top / f"{name} own"
        if not own.is_dir():
            if name == "qwen3":
                write_family(own, name, head_dim=16)
            else:
                write_theirs(own, name, moe_intermediate_size=64)
        kind = kind or NAMES[name]
        return write_quantized(own, top / f"{name} {kind}", kind)

    return write


@pytest.fixture(scope="session")
def wide(tmp_path_factory):
    """A model in 16 bits whose matrices NF4 takes."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 32}
    return write_family(tmp_path_factory.mktemp("wide") / "base", "qwen3", **shape)


def dequantised(folder):
    """The model as transformers itself dequantises it."""
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    how = Mxfp4Config(dequantize=True)
    if method == "fp8":
        how = FineGrainedFP8Config(dequantize=True, weight_block_size=(BLOCK, BLOCK))
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=how, dtype=torch.float32
    )
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_weights_and_logits_are_those_of_transformers(folder, name):
    ours, theirs = our_model(folder(name)).eval(), dequantised(folder(name))
    weights = dict(theirs.named_parameters())
    small = [key for key, p in ours.named_parameters() if isinstance(p, Quantized)]
    assert len(small) == {"qwen3": 14, "qwen3 moe": 13, "gpt-oss": 4}[name]
    for key in small:
        assert torch.equal(dense(ours.get_parameter(key)), weights[ours.names.published(key)]), key
    with parity.transformers_own():
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-5)


def whole(ours):
    """Put dequantised weights in the place of quantised ones."""
    for module in ours.modules():
        for key, p in module._parameters.items():
            if isinstance(p, Quantized):
                module._parameters[key] = torch.nn.Parameter(dense(p), requires_grad=False)
    return ours


def gradients(ours):
    for parameter in ours.parameters():
        if parameter.requires_grad:
            torch.manual_seed(parameter.numel())
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    torch.manual_seed(0)
    logits = ours.train()(TOKENS)
    wanted = [p for p in ours.parameters() if p.requires_grad]
    return [logits, *torch.autograd.grad(logits.square().sum(), wanted)]


EXPERTS = {"target_parameters": "all-experts"}
LORA = [
    ("qwen3", {}),
    ("qwen3", {"target_modules": ["q_proj", "down_proj"], "use_dora": True, "lora_dropout": 0.1}),
    ("qwen3 moe", {"target_modules": ["v_proj"], **EXPERTS}),
    ("gpt-oss", {"target_modules": ["v_proj"], **EXPERTS}),
    ("gpt-oss", {"target_modules": ["q_proj"]}),
]


@pytest.mark.parametrize(("name", "lora"), LORA)
def test_logits_and_gradients_are_those_over_dequantised_weights(folder, name, lora):
    found, expected = (
        gradients(our_model(folder(name), **lora)),
        gradients(whole(our_model(folder(name), **lora))),
    )
    assert all(gradient.abs().max() > 0 for gradient in found)
    if name == "gpt-oss":  # products with a transposed weight are rounded otherwise
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    else:
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("name", "lora"), LORA)
def test_a_forward_pass_keeps_no_dequantised_weight(folder, name, lora):
    ours = our_model(folder(name), **lora)
    shapes = {
        shape
        for p in ours.parameters()
        if isinstance(p, Quantized)
        for shape in (p.shape[-2:], p.mT.shape[-2:])
    }
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ours.train()(TOKENS).sum().backward()
    own = {p.data_ptr() for p in ours.parameters() if not isinstance(p, Quantized)}
    assert any(isinstance(tensor, Quantized) for tensor in kept)
    plain = [
        t
        for t in kept
        if not isinstance(t, Quantized) and t.untyped_storage().data_ptr() not in own
    ]
    assert not [t.shape for t in plain if t.ndim > 1 and t.shape[-2:] in shapes]


# ---- whole runs
@pytest.mark.wide
@several_ranks
@pytest.mark.parametrize(
    ("name", "lora"), [("qwen3", {}), ("qwen3 moe", EXPERTS), ("gpt-oss", {})], ids=str
)
def test_two_ranks_equal_one(folder, rows, tmp_path, name, lora):
    parity.check_two_ranks(folder(name), rows, tmp_path, lora)


@pytest.mark.wide
@several_ranks
@pytest.mark.parametrize("value", [True, "fp8"])
def test_two_ranks_equal_one_with_weights_quantised_here(wide, rows, tmp_path, value):
    parity.check_two_ranks(wide, rows, tmp_path, {"quantize_base": value})


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("name", NAMES)
def test_a_merged_model_has_16_bits(folder, rows, tmp_path, name):
    lora = EXPERTS if name != "qwen3" else {}
    cfg = folder_config(folder(name), rows, tmp_path / "run", lora, max_steps_per_epoch=2)
    cfg |= {
        "save_adapter_weights_only": False,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-2},
    }
    ours = finetune(cfg)
    expected = our_logits(ours)
    out = tmp_path / "run" / "merged"
    assert not json.loads((out / "config.json").read_text()).keys() & {"quantization_config"}
    stored = StoredWeights(out, weight_files(out)).on_meta()
    assert not any(isinstance(tensor, Quantized) for tensor in stored.values())
    near = (their_logits(out) - expected).norm() / expected.norm()
    far = (dequantised(folder(name)).eval()(TOKENS).logits - expected).norm() / expected.norm()
    assert near < 0.02 < 0.1 < far


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_are_those_of_the_dequantised_model(folder, name):
    asked = ask(prompts(3, 9, 5), 1)
    lora = {"target_modules": ["q_proj", "v_proj"]}
    found, expected = (
        sampled(engine(decoder), asked, Sampling(12, temperature=0.0))
        for decoder in (trained(folder(name), **lora), whole(trained(folder(name), **lora)))
    )
    assert {key: c.tokens for key, c in found.items()} == {
        key: c.tokens for key, c in expected.items()
    }


@pytest.mark.wide
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_grpo_and_dpo(folder, tmp_path, name):
    check_grpo_and_dpo(folder(name), tmp_path)


@pytest.mark.wide(always=1)
@pytest.mark.usefixtures("cpu_of_known_speed")
@pytest.mark.parametrize("name", NAMES)
def test_planned_peak_is_the_measured_one(folder, tmp_path, name):
    planned, peak = planned_and_measured(folder(name), tmp_path / "run")
    assert planned == pytest.approx(peak, rel=0.1)


# ---- formats
@pytest.mark.parametrize(
    "block", [(24, 96), (48, 48), (96, 96), (96, 24), (100, 100), (7, 1)], ids=str
)
@pytest.mark.parametrize("shape", [(96, 192), (192, 144)], ids=str)
def test_the_config_says_how_large_blocks_are(tmp_path, shape, block):
    """Also where they do not divide the weight, as kv_a_proj_with_mqa of DeepSeek-V3: 576 rows in blocks of 128."""
    settings = {"quant_method": "fp8", "weight_block_size": block}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    counts = [-(-size // side) for size, side in zip(shape, block, strict=True)]
    packed, scale = torch.randn(shape).to(torch.float8_e4m3fn), torch.rand(counts)
    save_file({"w.weight": packed, "w.weight_scale_inv": scale}, tmp_path / "model.safetensors")
    spread = scale.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[
        :, : shape[1]
    ]
    found = StoredWeights(tmp_path, ["model.safetensors"])["w.weight"].with_parts(
        torch.clone, torch.float32
    )
    assert torch.equal(dense(found), packed.float() * spread)


@pytest.mark.parametrize(
    "settings", [{"weight_block_size": [24, 96]}, {"weight_block_size": None}, {}], ids=str
)
def test_blocks_that_the_config_does_not_say_are_refused(tmp_path, settings):
    content = {"quantization_config": {"quant_method": "fp8", **settings}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    tensors = {
        "w.weight": torch.zeros(96, 96).to(torch.float8_e4m3fn),
        "w.weight_scale_inv": torch.ones(2, 2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    state = StoredWeights(tmp_path, ["model.safetensors"])
    for read in (state.on_meta, lambda: state["w.weight"]):
        with pytest.raises(UserError, match=r"w\.weight has values \[96, 96\]") as error:
            read()
        stated = settings.get("weight_block_size") or "weight_block_size" not in settings
        assert ("weight_block_size" in str(error.value)) == bool(stated)


@pytest.mark.parametrize("shape", [(), (1,), (6, 1), (6,)], ids=str)
def test_scales_of_a_tensor_and_of_rows(shape):
    packed, scale = torch.randn(6, 8).to(torch.float8_e4m3fn), torch.rand(shape)
    found = stored("w", packed, scale).with_parts(torch.clone, torch.float32)
    assert torch.equal(dense(found), packed.float() * scale.reshape(-1, 1))


def test_scales_that_do_not_fit():
    with pytest.raises(ValueError, match=r"w has values \[6, 8\] and scales \[4, 1\]"):
        stored("w", torch.zeros(6, 8).to(torch.float8_e4m3fn), torch.ones(4, 1))
    with pytest.raises(ValueError, match=r"w has blocks \[6, 2, 16\] and scales \[6, 3\]"):
        stored("w", torch.zeros(6, 2, 16, dtype=torch.uint8), torch.zeros(6, 3, dtype=torch.uint8))


@torch.no_grad()
def test_experts_stay_quantised_where_blocks_are_whole():
    block = (32, 32)
    values, scales = (
        [torch.randn(rows, 64) for rows in (64, 96)],
        [torch.rand(rows // 32, 2) for rows in (64, 96)],
    )
    parts = [
        stored("w", v.to(torch.float8_e4m3fn), s, block)
        for v, s in zip(values, scales, strict=True)
    ]
    stacked = [torch.stack([part, part]) for part in parts]
    joined = torch.cat(stacked, dim=1)
    assert isinstance(joined, Quantized)
    assert torch.equal(dense(joined), torch.cat(list(map(dense, stacked)), 1))
    ragged = [
        stored("w", torch.randn(48, 64).to(torch.float8_e4m3fn), torch.rand(2, 2), block)
        for _ in range(2)
    ]
    assert torch.equal(torch.cat(ragged), torch.cat(list(map(dense, ragged))))
    assert not isinstance(torch.cat(ragged), Quantized)


def test_a_quantised_weight_is_not_written_into():
    assert torch.equal(dense(fp8_rows(torch.zeros(2, 4))), torch.zeros(2, 4))
    with pytest.raises(RuntimeError, match="cannot write into a quantised weight"):
        fp8_rows(torch.ones(2, 2)).zero_()


# ---- FP8 that is made here
@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_fp8_made_here(folder, name):
    """Weights are off by 1/16 at most, as E4M3's three bits allow; zeros stay."""
    own = folder(name).with_name(f"{name} own")
    exact, small = our_model(own), our_model(own, quantize_base="fp8")
    found = {key: p for key, p in small.named_parameters() if isinstance(p, Quantized)}
    assert len(found) == {"qwen3": 14, "qwen3 moe": 13, "gpt-oss": 12}[name]
    for key, weight in found.items():
        want = exact.get_parameter(key)
        near = want.abs() / 16 + want.abs().max() / 448 * 2**-9
        assert ((dense(weight) - want).abs() <= near).all(), key
    logits = exact.eval()(TOKENS)
    assert 1e-4 < (small.eval()(TOKENS) - logits).norm() / logits.norm() < 0.1


def test_fp8_trains_like_the_whole_model(wide, rows, tmp_path):
    runs = [
        folder_config(wide, rows, tmp_path / str(v), {"quantize_base": v}) for v in (False, "fp8")
    ]
    steps = {
        "max_steps_per_epoch": 10,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-2},
    }
    for cfg in runs:
        finetune(cfg | steps)
    whole_losses, losses = (metrics(tmp_path / name) for name in ("False", "fp8"))
    assert losses == pytest.approx(whole_losses, rel=0.02)
    assert losses[-1] < losses[0] - 0.5


@torch.no_grad()
def test_rows_of_compressed_tensors(folder, caplog):
    """As the 70B of strix_halo_llama3_3_70b_fp8 has them; a pattern names layers that are not quantised."""
    base = folder("qwen3", "rows")
    ours = our_model(base)
    small = {key: p for key, p in ours.named_parameters() if isinstance(p, Quantized)}
    assert len(small) == 12
    assert not any("k_proj" in key for key in small)
    assert "take more memory than planned" not in caplog.text
    stored_ = load_file(base / "model.safetensors")
    for key, weight in small.items():
        file = ours.names.published(key)
        assert torch.equal(dense(weight), stored_[file].float() * stored_[f"{file}_scale"].float())
    assert ours.eval()(TOKENS).isfinite().all()


# ---- bad input
def test_files_that_config_json_describes_wrongly(folder, tmp_path, caplog):
    base = shutil.copytree(folder("qwen3").with_name("qwen3 own"), tmp_path / "base")
    shutil.copy(folder("qwen3") / "config.json", base)
    with caplog.at_level("WARNING"):
        our_model(base)
    assert (
        "14 weights, such as layers.0.attn.q_proj.weight, take more memory than planned"
        in caplog.text
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_block_size": [128]},
        {"weight_block_size": ["a", 1]},
        {"modules_to_not_convert": "lm_head"},
        {"modules_to_not_convert": ["re:*gate"]},
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"g": 3},
        },
    ],
    ids=str,
)
def test_a_format_that_cannot_be_read(folder, tmp_path, changes):
    base = shutil.copytree(folder("qwen3"), tmp_path / "base")
    content = json.loads((base / "config.json").read_text())
    content["quantization_config"] |= changes
    (base / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"config\.json: quantization_config cannot be read: .+"):
        our_model(base)


def set_nan(state: dict[str, torch.Tensor]) -> None:
    """Of a plain weight, a weight in FP8 or a scale."""
    name = next(
        (name for name in state if "_scale" in name), "model.layers.0.self_attn.q_proj.weight"
    )
    value = 255 if state[name].dtype == torch.uint8 else torch.nan
    state[name].view(-1)[3] = value


def set_fp8_nan(state: dict[str, torch.Tensor]) -> None:
    state["model.layers.0.self_attn.q_proj.weight"].view(torch.uint8)[3, 5] = 0xFF


@pytest.mark.parametrize(
    ("name", "change", "lora", "named"),
    [
        ("wide", set_nan, {"quantize_base": "fp8"}, "q_proj.weight"),
        ("wide", set_nan, {"quantize_base": "nf4"}, "q_proj.weight"),
        ("qwen3", set_fp8_nan, {}, "q_proj.weight"),
        ("qwen3", set_nan, {}, "w2.weight"),
        ("gpt-oss", set_nan, {}, "experts.down_proj"),
    ],
)
def test_damaged_weights_are_not_hidden(wide, folder, tmp_path, name, change, lora, named):
    broken = shutil.copytree(wide if name == "wide" else folder(name), tmp_path / "broken")
    state = load_file(broken / "model.safetensors")
    change(state)
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=rf"\.{named} have values that are not finite; the files are damaged"
    ):
        our_model(broken, **lora)


def test_weights_that_are_quantised_already(folder):
    with pytest.raises(
        UserError, match=r"quantize_base is fp8, but the weights in .* are quantised \(mxfp4\)"
    ):
        our_model(folder("gpt-oss"), quantize_base="fp8")


def test_fp8_is_not_for_torchtunes_builders():
    node = {"_component_": "torchtune.models.qwen2.lora_qwen2", "quantize_base": "fp8", "lora_attn_modules": ["q_proj"],
            "vocab_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 128, "lora_rank": 4,
            "intermediate_dim": 128, "max_seq_len": 16, "lora_alpha": 8}  # fmt: skip
    with pytest.raises(
        UserError, match=r"quantize_base=fp8 is for rocm_ext\.model\.from_checkpoint"
    ):
        build_model(OmegaConf.create(node), torch.float32, 0, torch.device("cpu"))


# ---- other libraries
@torch.no_grad()
def test_nf4_is_as_near_as_bitsandbytes(wide):
    """Both quantise the scales of blocks of 64 values, in different ways: they differ by less than they err."""
    functional = pytest.importorskip("bitsandbytes.functional")
    exact, ours = (our_model(wide, quantize_base=value) for value in (False, "nf4"))
    for name, layer in adapters(ours):
        want = exact.get_submodule(name).weight
        theirs = functional.dequantize_4bit(
            *functional.quantize_4bit(want, quant_type="nf4", compress_statistics=True)
        )
        far, near = (dense(layer.weight) - want).norm(), (dense(layer.weight) - theirs).norm()
        assert far == pytest.approx(float((theirs - want).norm()), rel=0.02)
        assert near < 0.4 * far


@pytest.mark.wide  # imports the compiler
def test_compiled_layers_compute_the_same(folder):
    expected, ours = gradients(our_model(folder("qwen3"))), our_model(folder("qwen3"))
    for layer in ours.layers:
        layer.compile(backend="aot_eager", dynamic=True)
    torch.testing.assert_close(gradients(ours), expected, rtol=1e-4, atol=1e-4)


# ---- products in FP8
def multiply(rows: int, bias: bool) -> list[list[torch.Tensor]]:
    """Output and gradients of a layer with LoRA, with products in FP8, over dequantised weights, and in fp32."""
    rng = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    weight, x, seen = some(96, 64), some(rows, 64), some(rows, 96)
    a, b, bias_ = (
        some(4, 64).requires_grad_(),
        (0.1 * some(96, 4)).requires_grad_(),
        some(96) if bias else None,
    )
    found = []
    for dtype, multiplies in (
        (torch.bfloat16, True),
        (torch.bfloat16, False),
        (torch.float32, None),
    ):
        w = (
            weight.to(dtype)
            if multiplies is None
            else fp8_rows(weight.to(dtype), multiplies=multiplies)
        )
        x_ = x.to(dtype).requires_grad_()
        out = _LoraFunction.apply(x_, w, None if bias_ is None else bias_.to(dtype), a, b, 2.0)
        found.append([out.detach(), *torch.autograd.grad(out, [x_, a, b], seen.to(dtype))])
    return found


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 40])
def test_products_in_fp8(rows, bias):
    """They add the rounding of activations and of gradients to that of the weight: 2.6 % each."""
    for scaled, dequantised, exact in zip(*multiply(rows, bias), strict=True):
        norm = exact.norm()
        assert (dequantised.float() - exact).norm() < 0.05 * norm
        assert (scaled.float() - exact).norm() < 0.06 * norm
    scaled, dequantised, _ = multiply(rows, bias)
    assert not torch.equal(scaled[0], dequantised[0])
    assert not torch.equal(scaled[1], dequantised[1])


def test_a_model_multiplies_in_fp8_where_the_trial_says_so(wide, monkeypatch):
    monkeypatch.setattr(build, "scaled_products", lambda device, dtype: True)
    ours = our_model(wide, quantize_base="fp8")
    weights = [module.weight for _, module in adapters(ours)]
    assert all(weight.multiplies for weight in weights)
    assert weights[0].clone().detach().multiplies
    assert not quantized.scaled_products(torch.device("cpu"), torch.bfloat16)


@pytest.mark.wide
def test_the_trial_finds_wrong_products_in_fp8(monkeypatch):
    said = quantized.trial(CPU)
    assert not said or said.endswith("times as fast")
    right = torch._scaled_mm

    def without_scales(rows, values, scale_a, scale_b, out_dtype):
        return right(
            rows, values, scale_a=scale_a, scale_b=torch.ones_like(scale_b), out_dtype=out_dtype
        )

    monkeypatch.setattr(torch, "_scaled_mm", without_scales)
    assert "is wrong by" in quantized.trial(CPU)
