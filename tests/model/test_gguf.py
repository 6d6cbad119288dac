"""Models in GGUF files: read, trained over, and the adapter taken back to the same file."""

import contextlib
import json
import os
import shlex
import shutil
import struct
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rocm_ext.recipes.lora_finetune_rocm import main
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torchtune.training import set_default_dtype
from transformers import AutoModelForCausalLM

from rocm_ext.base.errors import UserError
from rocm_ext.base.log import log
from rocm_ext.cli import main as cli
from rocm_ext.model import products
from rocm_ext.model.families import read_architecture
from rocm_ext.model.gguf_folder import folder_of
from rocm_ext.model.weights.checkpointer import blocks_in
from rocm_ext.model.weights.gguf_files import GgufFile, parts_of
from rocm_ext.model.weights.quantized import Quantized
from rocm_ext.model.weights.unpack import BLOCKS, unpack
from tests.export.test_export import export
from tests.export.test_export_gguf import ODD, write_sentencepiece
from tests.kit import hf_models, multimodal_models, parity
from tests.kit.families import LLAMA3, folder_config, write_family
from tests.kit.forks import forked, several_ranks, succeed
from tests.kit.gguf import random_blocks, write_gguf
from tests.kit.grpo_runs import check_grpo_and_dpo
from tests.kit.lines import one_line_has
from tests.kit.llama_cpp import llama_cpp, unpacked
from tests.kit.parity import TOKENS, our_model
from tests.kit.plans import planned_and_measured
from tests.kit.tiny import write_yaml
from tests.model.test_quantized import gradients, whole

gguf = pytest.importorskip("gguf")
FIVE = b"\x08\0\0\0\x05\0\0\0\0\0\0\0"
KINDS = tuple(BLOCKS)
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# what transformers reads from a GGUF file: of Llama no scaling of RoPE and no biases, of Qwen3 no head_dim
READ = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "qwen3": {"head_dim": 128},
}
# widths are whole blocks of 32 values; two heads of v are in each
WIDTHS = {"moe_intermediate_size": 64, "intermediate_size": 64}
OF_TRANSFORMERS = dict.fromkeys(
    ("qwen3 moe", "gpt-oss", "gemma 3", "qwen3.5", "gemma 4 moe"), WIDTHS
) | {
    "qwen3.5 moe": {**WIDTHS, "shared_expert_intermediate_size": 32},
    "gemma 4": {**WIDTHS, "hidden_size_per_layer_input": 32},
}
EXPERTS = {
    key: {"target_parameters": "all-experts"} for key in ("qwen3 moe", "gpt-oss", "qwen3.5 moe")
} | {"gemma 4 moe": {"target_parameters": ["experts.gate_up_proj"]}}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 500.0,
}


def write_theirs(folder: Path, name: str, **shape) -> Path:
    """Write a model that transformers computes and llama.cpp, too."""
    if name not in hf_models.GGUF:
        return multimodal_models.write_multimodal(folder, name, shape=shape)
    return hf_models.write_theirs(folder, name, **hf_models.GGUF[name], **shape)


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A function that writes a model, and returns its GGUF file with blocks of all kinds."""
    top = tmp_path_factory.mktemp("gguf")

    @cache
    def write(name: str, kinds: tuple[str, ...] = KINDS, experts: str = "alike") -> Path:
        base = top / name
        if not base.is_dir():
            if name in OF_TRANSFORMERS:
                write_theirs(base, name, **OF_TRANSFORMERS[name])
            else:
                write_family(base, name, **SHAPE, **READ.get(name, {}))
        return write_gguf(
            base, top / f"{name} {'-'.join(kinds)[:60]} {experts}.gguf", kinds, experts=experts
        )

    return write


@pytest.fixture
def warnings(monkeypatch):
    """The warnings so far, whichever handlers the log has."""
    said = []
    monkeypatch.setattr(log, "warning", lambda form, *args: said.append(form % args))
    return said


# ---- values
@pytest.mark.parametrize("kind", BLOCKS)
def test_values_are_those_of_llama_cpp_for_any_bytes(kind):
    """Bit for bit, with zeros' signs; NaN and infinities, too."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not here: pip install xllamacpp")
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 256, (4000, BLOCKS[kind][1]), dtype=np.uint8)
    expected = unpacked(stored, kind)
    found = unpack(torch.from_numpy(stored), kind, torch.float32).numpy()
    assert np.isnan(expected).any() == (kind not in ("MXFP4", "NVFP4"))
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    same = found.view(np.int32) == expected.view(np.int32)
    assert (same | np.isnan(expected)).all()


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind not in ("Q1_0", "Q2_0")])
def test_values_are_those_of_the_package_gguf(kind):
    stored = random_blocks(kind, 5, 3, np.random.default_rng(0))
    expected = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])
    found = unpack(torch.from_numpy(stored), kind, torch.float32)
    assert np.array_equal(found.numpy(), expected)
    assert 0.01 < found.std() < 1
    assert torch.equal(unpack(torch.from_numpy(stored), kind, torch.bfloat16), found.bfloat16())


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "kinds"), [("llama", KINDS[:9]), ("qwen2", KINDS[9:18]), ("qwen3", ("Q6_K",))]
)
def test_logits_are_those_of_transformers(files, name, kinds):
    path = files(name, kinds)
    ours = our_model(folder_of(str(path))).eval()
    small = [p for p in ours.parameters() if isinstance(p, Quantized)]
    assert {p.kind for p in small} == {*kinds}
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=1e-4, atol=1e-4)


ROPES = [
    (
        "llama",
        {
            "rope_parameters": {
                **LLAMA3,
                "original_max_position_embeddings": 8192,
                "rope_theta": 5e5,
            }
        },
    ),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}}),
    ("qwen2", {"head_dim": 16}),
    ("qwen2 tied", {"head_dim": 16}),
    ("qwen3", {"rope_parameters": YARN}),
    ("qwen3", {"rope_parameters": YARN | {"attention_factor": 1.5}}),
]


@torch.no_grad()
@pytest.mark.parametrize(("name", "shape"), ROPES, ids=str)
def test_what_export_writes_is_the_same_model(tmp_path, name, shape):
    """Function, weights, tokenizer and template; fp32 rounds the metadata's numbers."""
    base = write_family(tmp_path / "base", name, **{"head_dim": 24} | shape)
    folder = folder_of(str(write_gguf(base, tmp_path / "base.gguf")))
    found, expected = read_architecture(folder), read_architecture(base)
    rope, wanted = found.rope, expected.rope
    assert replace(found, rope=wanted, norm_eps=0) == replace(expected, norm_eps=0)
    assert replace(rope, yarn=None) == replace(wanted, yarn=None)
    if wanted.yarn:
        assert replace(rope.yarn, attention=0) == replace(wanted.yarn, attention=0)
        assert rope.yarn.attention == pytest.approx(wanted.yarn.attention, rel=1e-6)
    torch.testing.assert_close(
        our_model(folder)(TOKENS), our_model(base)(TOKENS), rtol=1e-5, atol=1e-5
    )
    with set_default_dtype(torch.bfloat16):  # as a run builds its model
        assert blocks_in(folder) == {}
    read, own = (Tokenizer.from_file(str(each / "tokenizer.json")) for each in (folder, base))
    for text in (
        "system hello\n\n 12345 it's 3.5  \u4f60\u597d <|im_start|>user\n<tool_call> x<|im_end|>",
        "  a",
    ):
        assert read.encode(text).ids == own.encode(text).ids
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert template == (base / "chat_template.jinja").read_text()


def test_heads_that_llama_cpp_does_not_open_are_refused(tmp_path):
    base = write_family(tmp_path / "base", "qwen2", head_dim=24)
    with pytest.raises(
        UserError, match=r"head_dim is 24; llama\.cpp's Qwen2 has heads of 16 dimensions here"
    ):
        write_gguf(base, tmp_path / "x.gguf")


@torch.no_grad()
@pytest.mark.wide(always=2)
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_exports_of_transformers_models_are_the_same_model(tmp_path, name):
    base = write_theirs(tmp_path / "base", name)
    folder = folder_of(str(write_gguf(base, tmp_path / "base.gguf")))
    torch.testing.assert_close(
        our_model(folder)(TOKENS), our_model(base)(TOKENS), rtol=1e-5, atol=1e-5
    )


@torch.no_grad()
def test_other_layouts_of_the_same_model(files, tmp_path, warnings):
    """Gate and up in one tensor, or in two kinds of blocks; a layer that predicts a further token."""
    base = files("qwen3.5 moe").with_name("qwen3.5 moe")
    expected = our_model(base)(TOKENS)
    joined = write_gguf(base, tmp_path / "joined.gguf", experts="joined")
    torch.testing.assert_close(
        our_model(folder_of(str(joined)))(TOKENS), expected, rtol=1e-5, atol=1e-5
    )
    ahead = {"qwen35moe.block_count": 3, "qwen35moe.nextn_predict_layers": 1}
    norm = {"blk.2.nextn.enorm.weight": np.ones(64, np.float32)}
    further = write_gguf(base, tmp_path / "further.gguf", metadata=ahead, more=norm)
    torch.testing.assert_close(
        our_model(folder_of(str(further)))(TOKENS), expected, rtol=1e-5, atol=1e-5
    )
    assert one_line_has("\n".join(warnings), "further.gguf: 1 layer(s) for MTP", "not trained")
    apart = our_model(folder_of(str(files("qwen3.5 moe", ("Q8_0", "Q4_0"), "apart"))))
    assert {name: type(p.data) for name, p in apart.named_parameters()}[
        "model.layers.0.mlp.experts.gate_up_proj"
    ] == (torch.Tensor)
    assert apart(TOKENS).isfinite().all()


def test_scales_of_nvfp4_that_llama_cpp_leaves_out(files, tmp_path, warnings):
    blocks_in(folder_of(str(files("qwen3", ("NVFP4",)))))
    assert one_line_has("\n".join(warnings), "aborts", "6 weights in NVFP4", "target_modules")
    base = files("qwen2", ("NVFP4",)).with_name("qwen2")
    scale = {"blk.0.ffn_up.scale": np.ones(1, np.float32)}
    path = write_gguf(base, tmp_path / "x.gguf", ("NVFP4",), more=scale)
    with pytest.raises(UserError, match=r"has blk\.0\.ffn_up\.scale, which no layer of this qwen2"):
        our_model(folder_of(str(path)))


# ---- training
DORA = {"target_modules": ["q_proj"], "use_dora": True, "lora_dropout": 0.1}


@pytest.mark.wide(always=4)
@pytest.mark.parametrize(
    ("name", "lora"),
    [("qwen3", {}), ("qwen3", DORA), *((name, EXPERTS.get(name, {})) for name in OF_TRANSFORMERS)],
    ids=str,
)
def test_gradients_are_those_over_unpacked_weights(files, name, lora, monkeypatch):
    """Bit for bit, with the same kernels: a CPU multiplies large plain weights with others."""
    monkeypatch.setattr(products, "_available", False)
    kinds = KINDS[::-1] if lora else KINDS
    if name in OF_TRANSFORMERS:
        kinds = ("Q8_0", "NVFP4", "MXFP4", "Q5_0")
    folder = folder_of(str(files(name, kinds)))
    ours = our_model(folder, **lora)
    small = ("bias", "conv1d.weight", "gate.weight", "router.weight", "router.proj.weight")
    tables = {name: p for name, p in ours.named_parameters() if p.ndim > 1 and ".lora_" not in name}
    assert [
        name
        for name, p in tables.items()
        if not isinstance(p, Quantized) and not name.endswith(small)
    ] == []
    found, expected = gradients(ours), gradients(whole(our_model(folder, **lora)))
    assert all(gradient.abs().max() > 0 for gradient in found)
    assert all(map(torch.equal, found, expected))


@pytest.mark.wide
@pytest.mark.parametrize(("name", "kind"), [("qwen2", "Q4_K"), ("qwen3.5 moe", "Q8_0")])
def test_a_killed_run_is_resumed_and_names_the_way_to_llama_cpp(files, rows, tmp_path, name, kind):
    path = files(name, (kind,))
    cfg = parity.whole_run(path, rows, tmp_path / "whole")
    write_yaml(tmp_path / "whole.yaml", cfg)
    parity.check_resumes(cfg, "killed")
    said = succeed(main, tmp_path / "killed" / "config.yaml", "resume_from_checkpoint=True")
    assert f"llama-server -m {shlex.quote(str(path.resolve()))} --lora" in said
    for config in (
        tmp_path / "whole.yaml",
        tmp_path / "whole" / "config.yaml",
    ):  # which names the folder in the cache
        code, said = forked(
            main, config, "save_adapter_weights_only=False", f"output_dir={tmp_path / 'merging'}"
        )
        assert code == 1
        assert one_line_has(said, "save_adapter_weights_only: True", str(path))


@pytest.mark.wide
@several_ranks
def test_two_ranks_equal_one(files, rows, tmp_path):
    parity.check_two_ranks(files("qwen3"), rows, tmp_path)


@pytest.mark.wide
def test_grpo_and_dpo(files, tmp_path):
    check_grpo_and_dpo(files("llama", ("Q6_K", "Q8_0")), tmp_path)


@pytest.mark.wide(always=1)
@pytest.mark.usefixtures("cpu_of_known_speed")
@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3", "Q4_K"), ("qwen3", "IQ2_XXS"), ("gpt-oss", "MXFP4")]
)
def test_planned_peak_is_the_measured_one(files, tmp_path, name, kind):
    planned, peak = planned_and_measured(files(name, (kind,)), tmp_path / "run")
    assert planned == pytest.approx(peak, rel=0.1)


# ---- the way back
LORA = EXPERTS | {"qwen3": {"target_modules": ["q_proj", "v_proj", "o_proj"]}}
SERVED = [("qwen2", (), 1e-4), ("qwen2", ("Q8_0",), 0.1), ("qwen2", ("Q4_K",), 0.1)]
SERVED += [("qwen2", KINDS[18:], 0.1), ("qwen3", ("NVFP4",), 0.1), ("qwen3 moe", ("NVFP4",), 0.1)]
SERVED += [(name, ("Q8_0", "Q5_0"), 0.1) for name in OF_TRANSFORMERS]


@pytest.mark.wide(always=2)
@pytest.mark.parametrize(("name", "kinds", "within"), SERVED, ids=str)
def test_llama_cpp_adds_the_adapter_to_the_same_file(
    files, rows, tmp_path, capsys, name, kinds, within
):
    """Over blocks llama.cpp rounds activations to 8 bits."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not here: pip install xllamacpp")
    path, run = files(name, kinds), tmp_path / "run"
    optimizer = {"_component_": "torch.optim.AdamW", "lr": 2e-2}
    lora = LORA.get(name)
    ours = parity.finetune(
        folder_config(path, rows, run, lora, max_steps_per_epoch=3, optimizer=optimizer)
    )
    adapter = tmp_path / "lora.gguf"
    assert export(run, "--gguf-adapter", adapter) == 0
    shutil.rmtree(folder_of(str(path)))  # as who clears the cache
    assert export(run, "--gguf-adapter", tmp_path / "again.gguf") == 0
    assert (tmp_path / "again.gguf").read_bytes() == adapter.read_bytes()
    assert f"FROM {path.resolve()}" in adapter.with_suffix(".Modelfile").read_text()
    prompt = TOKENS[0, :12].tolist()
    ours.learner.model.eval()
    with torch.no_grad():
        expected = ours.learner.decoder(torch.tensor([prompt]))[0].log_softmax(-1)
    far = []
    for beside in ([adapter], []):
        with llama_cpp(path, *beside) as server:
            told = [server.logprobs(prompt[: at + 1]) for at in range(12)]
        # None: the most probable token ends within a character
        best = [
            (at, token)
            for at, each in enumerate(told)
            if each
            for token in sorted(each, key=each.get)[-20:]
        ]
        assert len(best) >= 80
        far.append(fmean(abs(told[at][token] - expected[at, token].item()) for at, token in best))
    assert far[0] < within < 0.2 < far[1]
    for way in ("--merged", "--gguf"):
        assert export(run, way, tmp_path / "x.gguf") == 1
        assert one_line_has(
            capsys.readouterr().err, str(path.resolve()), "--gguf-adapter", "--base-model"
        )


def test_layers_for_mtp_are_named(rows, tmp_path, warnings):
    base = write_theirs(tmp_path / "base", "qwen3.5")
    ahead = {"mtp.fc.weight": torch.randn(8, 16), "mtp.norm.weight": torch.ones(8)}
    file = base / "model.safetensors"
    save_file(load_file(file) | ahead, file, metadata={"format": "pt"})
    run = tmp_path / "run"
    parity.finetune(folder_config(base, rows, run, max_steps_per_epoch=1))
    assert one_line_has(
        "\n".join(warnings), "2 tensors of layers for MTP, first mtp.fc.weight", "not trained"
    )
    assert export(run, "--merged", tmp_path / "merged") == 0
    assert one_line_has("\n".join(warnings), "2 tensors", "unchanged", "accepts is unknown")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.equal(merged[name], tensor) for name, tensor in ahead.items())
    assert export(run, "--gguf", tmp_path / "x.gguf") == 0
    assert one_line_has("\n".join(warnings), "2 tensors", "x.gguf", "decodes without them")
    found = GgufFile(tmp_path / "x.gguf")
    assert not [key for key in (*found.metadata, *found.places) if "nextn" in key]
    save_file({name: t for name, t in load_file(file).items() if name not in ahead}, file)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    assert export(run, "--merged", tmp_path / "without") == 0
    assert one_line_has("\n".join(warnings), "mtp_num_hidden_layers is 0 instead of 1")
    assert (
        json.loads((tmp_path / "without" / "config.json").read_text())["mtp_num_hidden_layers"] == 0
    )


# ---- bad input
def changed(path: Path, target: Path, change) -> Path:
    content = bytearray(path.read_bytes())
    target.write_bytes(change(content))
    return target


def test_a_file_that_ends_early(files, tmp_path):
    path = files("qwen2", ("Q4_K",))
    size = path.stat().st_size
    for end in (0, 3, 20, 100, 5000, size // 2, size - 1):
        with pytest.raises(UserError, match=r"download the file again|is no GGUF file"):
            GgufFile(changed(path, tmp_path / "cut.gguf", lambda content, end=end: content[:end]))


@given(st.data())
def test_damage_of_a_header_is_an_error_of_the_user_or_none(files, data):
    path = files("llama", ("Q4_K",))
    content = bytearray(path.read_bytes())
    header = min(place.begin for place in GgufFile(path).places.values())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.one_of(st.integers(0, 2000), st.integers(header - 2000, header - 1)))
        content[at] = data.draw(st.integers(0, 255))
    damaged = path.with_name("damaged.gguf")
    damaged.write_bytes(content)
    with contextlib.suppress(UserError):
        folder = folder_of(str(damaged))
        blocks_in(folder)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [  # a text of 5 letters has the type 8, and its length before it
        (b"qwen2.rope.freq_base", b"qwen2.rope.freq_bass", "qwen2.rope.freq_bass"),
        (
            b"general.architecture" + FIVE + b"qwen2",
            b"general.architecture" + FIVE + b"mamba",
            "mamba",
        ),
        (b"qwen2.embedding_length", b"qwen2.embedding_lengtt", "embedding_length"),
        (b".pre" + FIVE + b"qwen2", b".pre" + FIVE + b"qwen9", r"rules qwen9, .* tokenizer\.json"),
    ],
)
def test_what_is_not_known_is_named(files, tmp_path, before, after, named):
    path = files("qwen2", ("Q4_K",))
    assert before in path.read_bytes()
    with pytest.raises(UserError, match=named):
        folder_of(
            str(
                changed(
                    path, tmp_path / "other.gguf", lambda content: content.replace(before, after)
                )
            )
        )


def test_what_is_no_little_endian_file_of_known_types_is_named(files, tmp_path):
    path, kind = files("qwen2", ("Q4_K",)), struct.pack("<I", 12)
    big = changed(
        path, tmp_path / "big.gguf", lambda content: content[:4] + content[4:8][::-1] + content[8:]
    )
    with pytest.raises(UserError, match=r"big\.gguf is big-endian; gguf-convert-endian"):
        folder_of(str(big))
    name = b"blk.0.attn_q.weight" + struct.pack("<I2Q", 2, 64, 64)
    content = path.read_bytes()
    at = content.index(name[:19]) + len(name)
    assert content[at : at + 4] == kind
    for number, named in (
        (99, r"blk\.0\.attn_q\.weight is of ggml's type 99; expected F32"),
        (42, r"begins at byte [\d,]+ instead of [\d,]+; .*a fork of llama\.cpp"),
    ):
        other = changed(
            path,
            tmp_path / f"{number}.gguf",
            lambda content, number=number: (
                content[:at] + struct.pack("<I", number) + content[at + 4 :]
            ),
        )
        with pytest.raises(UserError, match=named):
            folder_of(str(other))
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(UserError, match=r"pipe\.gguf is a pipe, socket or device"):
        folder_of(str(tmp_path / "pipe.gguf"))


@torch.no_grad()
def test_parts_of_a_split_model(tmp_path):
    """The factors of RoPE may be in the second. A link's name counts, as in the hub's cache."""
    base = write_family(tmp_path / "base", "llama", **{"head_dim": 24} | ROPES[0][1])
    path = write_gguf(base, tmp_path / "m.gguf", parts=2)
    links = tmp_path / "links"
    links.mkdir()
    for number, file in enumerate(parts_of(path)):
        (links / file.name).symlink_to(file.rename(tmp_path / str(number)))
    found = our_model(folder_of(str(links)))
    torch.testing.assert_close(found(TOKENS), our_model(base)(TOKENS), rtol=1e-5, atol=1e-5)
    second = links / path.name.replace("00001-of", "00002-of")
    with pytest.raises(UserError, match="is part 1 of 2 of a split model"):
        folder_of(str(shutil.copy(second, tmp_path / "renamed.gguf")))
    second.unlink()
    with pytest.raises(
        UserError, match=r"lacks 1 of 2 parts of the model, first m-00002-of-00002\.gguf"
    ):
        folder_of(str(links / path.name))


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(
    "pre",
    [
        "llama-bpe",
        "llama3",
        "tekken",
        "qwen2",
        "gpt-4o",
        "qwen35",
        "smollm",
        "gpt-2",
        "falcon3",
        "pixtral",
    ],
)
def test_text_is_split_as_in_llama_cpp(tmp_path, pre):
    """Also where the file does not say whether texts begin with BOS, and where a word is a token."""
    pytest.importorskip("xllamacpp", reason="llama.cpp is not here: pip install xllamacpp")
    base = write_family(tmp_path / "base", "qwen2")
    whole = json.loads((base / "tokenizer.json").read_text())
    vocabulary = whole["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.get) + [
        each["content"] for each in whole["added_tokens"]
    ]
    unused = next(at for at, token in enumerate(tokens) if len(token) > 4 and token.isalpha())
    tokens[unused] = "zebra"  # no merges lead to it
    tokens += [
        f"[PAD{number}]" for number in range(len(tokens), read_architecture(base).vocabulary)
    ]
    changes = {"pre": pre, "add_bos_token": None, "bos_token_id": 377, "tokens": tokens}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    path = write_gguf(base, tmp_path / "m.gguf", metadata=metadata)
    read = Tokenizer.from_file(str(folder_of(str(path)) / "tokenizer.json"))
    with llama_cpp(path) as server:
        for text in (
            "zebra zebra",
            "system hello\n\n 12345 it's 3.5  \u4f60\u597d <|im_start|>user\n x<|im_end|>",
            "  a",
        ):
            assert read.encode(text).ids == server.tokens(text, special=True)
            assert read.encode(text, add_special_tokens=False).ids == server.tokens(text)


@pytest.mark.parametrize("name", ["mistral", "gemma 3", "gemma 4"])
def test_a_tokenizer_from_sentencepiece(tmp_path, name):
    write = write_family if name == "mistral" else write_theirs
    base = write(tmp_path / "base", name)
    theirs = write_sentencepiece(base, gemma=name != "mistral")
    ours = Tokenizer.from_file(
        str(folder_of(str(write_gguf(base, tmp_path / "x.gguf"))) / "tokenizer.json")
    )
    for text in [*ODD, "a<end_of_turn>\nb", "<start_of_turn>user\n  a   b"]:
        assert ours.encode(text).ids == theirs.encode(text).ids, text
    assert ours.decode(ours.encode(ODD[0]).ids) == ODD[0]


def test_chat_answers_from_a_file(files, capsys):
    path = files("qwen2", ("Q8_0",))
    assert cli(["chat", str(path), "-p", "hi", "--max-new-tokens", "3", "hardware=cpu"]) == 0
    assert "3 tokens" in capsys.readouterr().err


TENSORS = [
    ({"blk.1.ffn_up_exps.weight": None}, r"x\.gguf lacks blk\.1\.ffn_up_exps\.weight"),
    (
        {"blk.1.attn_norm.weight": None},
        r"missing model\.layers\.1\.input_layernorm\.weight\. Download .*x\.gguf again",
    ),
    ({"blk.2.attn_norm.weight": np.ones(64)}, r"has blk\.2\.attn_norm\.weight, which no layer"),
    (
        {"blk.0.ffn_up_exps.weight": np.ones((1, 64, 64))},
        "ffn_up_exps.weight have different shapes",
    ),
    ({"blk.0.ssm_a": np.ones(5)}, "ssm_a has 5 rows instead of 4"),
    ({"blk.0.attn_norm.weight": np.ones(65)}, r"input_layernorm\.weight is \[65\]"),
]


@pytest.mark.parametrize(("more", "named"), TENSORS, ids=[str(named)[-30:] for _, named in TENSORS])
def test_a_tensor_that_does_not_fit_is_named(files, tmp_path, more, named):
    base = files("qwen3.5 moe").with_name("qwen3.5 moe")
    more = {name: data if data is None else data.astype(np.float32) for name, data in more.items()}
    path = write_gguf(base, tmp_path / "x.gguf", more=more)
    with pytest.raises(UserError, match=named):
        our_model(folder_of(str(path)))


KEYS = [
    ("qwen2", "block_count", 1, r"has blk\.1\.[a-z_.]*, which no layer"),
    ("qwen3 moe", "block_count", 2**32 - 1, "block_count is 4294967295; expected 1 to 1000"),
    ("qwen3 moe", "nextn_predict_layers", 1, "nextn_predict_layers is 1, which is not computed"),
    ("qwen3 moe", "rope.dimension_count", 8, "expected head_dim, 16"),
    ("qwen3 moe", "expert_used_count", 5, "more than expert_count, 4"),
    ("qwen3 moe", "expert_count", None, "lacks qwen3moe.expert_count"),
    ("qwen3 moe", "expert_count", 8, r"gate_up_proj is \[4, 128, 64\]"),
    ("qwen3.5 moe", "rope.dimension_count", 5, "expected head_dim, 16"),
    ("qwen3.5 moe", "full_attention_interval", 0, "full_attention_interval is 0; expected 1"),
    (
        "qwen3.5 moe",
        "ssm.inner_size",
        63,
        "linear_value_head_dim is 15; llama.cpp computes only 16",
    ),
    ("qwen3.5 moe", "ssm.group_count", 4, "rows instead of|is .* in the checkpoint"),
    ("qwen3.5 moe", "nextn_predict_layers", 2, "block_count is 0; expected 1"),
    ("gemma 3", "attention.layer_norm_rms_epsilon", -1.0, "epsilon is -1.0; expected"),
    ("gpt-oss", "attention.head_count_kv", 0, "head_count_kv is 0; expected 1"),
    ("gpt-oss", "expert_feed_forward_length", "x", "length is 'x'; expected a number"),
    ("gpt-oss", "attention.sliding_window_pattern", [True], r"x\.gguf: .*layer_types"),
]


@pytest.mark.wide(always=5)
@pytest.mark.parametrize(
    ("name", "key", "value", "named"), KEYS, ids=[f"{name} {key} {v}" for name, key, v, _ in KEYS]
)
def test_metadata_that_says_something_else_is_refused(files, tmp_path, name, key, value, named):
    base = files(name, ("Q8_0",)).with_name(name)
    arch = GgufFile(files(name, ("Q8_0",))).architecture
    with pytest.raises(UserError, match=named):
        our_model(
            folder_of(str(write_gguf(base, tmp_path / "x.gguf", metadata={f"{arch}.{key}": value})))
        )


@torch.no_grad()
def test_a_period_of_windows_is_what_it_is_in_llama_cpp(files, tmp_path):
    base = files("gemma 3").with_name("gemma 3")
    period = write_gguf(
        base, tmp_path / "x.gguf", metadata={"gemma3.attention.sliding_window_pattern": 2}
    )
    torch.testing.assert_close(
        our_model(folder_of(str(period)))(TOKENS), our_model(base)(TOKENS), rtol=1e-5, atol=1e-5
    )
