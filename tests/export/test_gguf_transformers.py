"""GGUF files of models that transformers computes: llama.cpp's log-probs equal those of transformers and PEFT."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from rocm_ext.export import open_source
from rocm_ext.model.adapters.peft_files import write_adapter
from rocm_ext.model.lora import adapter_parameters
from tests.export.test_export import export
from tests.export.test_export_gguf import ODD, PROMPT, TEXT, write_sentencepiece
from tests.kit import hf_models, multimodal_models
from tests.kit.lines import one_line_has
from tests.kit.llama_cpp import LlamaCpp, llama_cpp
from tests.kit.parity import our_model, their_model, transformers_own
from tests.kit.quantized import write_quantized
from tests.kit.tiny import TEXT as WORDS
from tests.model.test_multimodal import whole_model

gguf = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp", reason="llama.cpp is not here: pip install xllamacpp")
MODELS = [(hf_models, name) for name in hf_models.GGUF] + [
    (multimodal_models, name) for name in multimodal_models.GGUF
]
EXPERTS = {"qwen3 moe", "gpt-oss", "qwen3.5 moe", "gemma 4 moe"}


def write(kind, folder: Path, name: str) -> Path:
    if kind is hf_models:
        return hf_models.write_theirs(folder, name, **hf_models.GGUF[name])
    return multimodal_models.write_multimodal(folder, name)


def write_update(folder: Path, base: Path, name: str, **targets) -> Path:
    """Write a random adapter of all layers, and of all experts."""
    lora = {
        "lora_rank": 3,
        "lora_alpha": 6,
        "rank_pattern": {r".*\.0\..*": 2},
        "alpha_pattern": {r".*\.1\..*": 3},
    }
    lora |= {"target_parameters": "all-experts"} if name in EXPERTS else {}
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
    found = torch.tensor(
        [[each[number] for number in range(expected.shape[1])] for each in told.values()]
    )
    return (found - expected[list(told)]).abs()


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(
    ("kind", "name"), MODELS, ids=[f"{kind.__name__[10:15]} {name}" for kind, name in MODELS]
)
def test_model_and_adapter_have_transformers_and_pefts_log_probs(tmp_path, kind, name):
    base = write(kind, tmp_path / "base", name)
    adapter = write_update(tmp_path / "adapter", base, name)
    f32 = ("--type", "f32")
    assert export(base, "--gguf", tmp_path / "base.gguf", *f32) == 0
    assert (
        export(
            adapter,
            "--gguf",
            tmp_path / "merged.gguf",
            "--gguf-adapter",
            tmp_path / "adapter.gguf",
            *f32,
        )
        == 0
    )
    plain, adapted = expected(kind, base), expected(kind, base, adapter)
    assert (adapted - plain).abs().mean() > 0.1, "the adapter changes much"
    for files, theirs in (
        (["base.gguf"], plain),
        (["merged.gguf"], adapted),
        (["base.gguf", "adapter.gguf"], adapted),
    ):
        with llama_cpp(*(tmp_path / file for file in files)) as server:
            found = differences(server, theirs)
        # llama.cpp reads Gemma's GELU from a table in f16
        assert found.max() < (0.01 if "gemma" in name else 1e-4), files


@torch.no_grad()
@pytest.mark.parametrize(("name", "stored"), [("gpt-oss", "mxfp4"), ("qwen3 moe", "fp8")])
def test_quantised_checkpoints(tmp_path, name, stored):
    base = write_quantized(
        write(hf_models, tmp_path / "base", name), tmp_path / "quantised", stored
    )
    assert export(base, "--gguf", tmp_path / "base.gguf") == 0
    ours = our_model(base).eval()(torch.tensor([PROMPT]))[0].log_softmax(-1)
    with llama_cpp(tmp_path / "base.gguf") as server:
        assert differences(server, ours).mean() < 0.01


@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
def test_smaller_types_are_close(tmp_path, kind):
    base, out = write(hf_models, tmp_path / "base", "gpt-oss"), tmp_path / "base.gguf"
    assert export(base, "--gguf", out, "--type", kind) == 0
    with llama_cpp(out) as server:
        found = differences(server, expected(hf_models, base))
    assert 0.001 < found.mean() < 0.02
    types = {each.name: each.tensor_type.name for each in gguf.GGUFReader(out).tensors}
    assert types["blk.0.ffn_gate_exps.weight"] == types["token_embd.weight"] == kind.upper()
    exact = (
        "ffn_gate_inp.weight",
        "ffn_gate_exps.bias",
        "attn_sinks.weight",
        "attn_norm.weight",
        "attn_q.bias",
    )
    assert {types[f"blk.0.{name}"] for name in exact} == {"F32"}


@pytest.mark.parametrize(
    ("kind", "name"), [(hf_models, "gemma 3"), (multimodal_models, "gemma 4")], ids=["3", "4"]
)
def test_gemmas_tokenizer(tmp_path, kind, name):
    base, out = write(kind, tmp_path / "base", name), tmp_path / "base.gguf"
    tokenizer = write_sentencepiece(base, gemma=True)
    assert export(base, "--gguf", out) == 0
    with llama_cpp(out) as server:
        server.assert_reads_like(tokenizer, open_source(base), [*ODD, "a<end_of_turn>\nb"])
    modelfile = out.with_suffix(".Modelfile").read_text()
    assert '{{ if eq .Role "user" }}<start_of_turn>user\n{{ .Content }}<end_of_turn>\n' in modelfile
    assert 'PARAMETER stop "<end_of_turn>"\n' in modelfile


LOWER, UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLITS = {
    "gpt-4o": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen35": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@pytest.mark.parametrize(("name", "split"), [("gpt-oss", "gpt-4o"), ("qwen3.5", "qwen35")])
def test_words_are_split_as_published(tmp_path, name, split):
    base, out = write(hf_models, tmp_path / "base", name), tmp_path / "base.gguf"
    path = base / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = SPLITS[split]
    path.write_text(json.dumps(content))
    assert export(base, "--gguf", out) == 0
    tokenizer = Tokenizer.from_file(str(path))
    with llama_cpp(out) as server:
        for text in [
            *WORDS,
            TEXT,
            "HelloWorld it'S 1234567 a\u0301e\u0301 x = y//\n\n  z",
            "\u0939\u093f\u0928",
        ]:
            assert server.tokens(text) == tokenizer.encode(text).ids, text


def test_what_llama_cpp_computes_otherwise_is_refused(tmp_path, capsys):
    base, out = write(multimodal_models, tmp_path / "base", "gemma 4 moe"), tmp_path / "x.gguf"
    adapter = write_update(
        tmp_path / "adapter", base, "gemma 4 moe", target_parameters="all-experts"
    )
    assert export(adapter, "--gguf-adapter", out) == 1
    assert one_line_has(capsys.readouterr().err, "experts.down_proj", "set --gguf")
    dense = hf_models.write_theirs(tmp_path / "dense", "qwen3 moe")
    assert export(dense, "--gguf", out) == 1
    assert one_line_has(
        capsys.readouterr().err, "mlp_only_layers is [0]", "llama.cpp computes only []"
    )
    assert not out.exists()
