"""GGUF files of `rocm-ext export` in llama.cpp itself: the same tokens, probabilities and prompts as here."""

import json
import resource
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import (
    AddedToken,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoModelForCausalLM

from rocm_ext.data.render import render_prompt
from rocm_ext.export import open_source
from rocm_ext.sampling import Request, Sampling
from rocm_ext.sampling.server.openai import OpenAIEngine
from tests.export.test_export import MISTRAL, bases, export, trained  # noqa: F401 - fixtures
from tests.kit.families import MODELS
from tests.kit.lines import one_line_has
from tests.kit.llama_cpp import LlamaCpp, llama_cpp
from tests.kit.tiny import TEXT as WORDS

gguf = pytest.importorskip("gguf")
pytest.importorskip("xllamacpp", reason="llama.cpp is not here: pip install xllamacpp")
WEIGHTS = "adapter_model.safetensors"
PROMPT = [5, 17, 99, 3, 250, 42, 8, 8, 120, 61, 33, 7]
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{{ message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TURNS = ["<start_of_turn>", "<end_of_turn>"]
TEXT = "system hello\n\n 12345 it's 3.5  \u4f60\u597d <|im_start|>user\n<tool_call> x<|im_end|>"


def their_logprobs(folder: Path, tokens: list[int], adapter: Path | None = None) -> torch.Tensor:
    """Return transformers' log-probs of each next token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens])).logits[0].log_softmax(-1)


def check_answers(
    server: LlamaCpp, folder: Path, adapter: Path | None = None, within: float = 1e-4
) -> list[int]:
    """Check llama.cpp's greedy tokens and log-probs against transformers'; return the tokens."""
    tokens, told = server.greedy(PROMPT, 16)
    expected = their_logprobs(folder, PROMPT + tokens, adapter)[len(PROMPT) - 1 : -1]
    drawn = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (expected.max(-1).values - drawn).max() < within, (
        "each token is the most probable one, up to rounding"
    )
    assert len(told) >= 4
    at = 0
    for number, logprob in told:
        at = tokens.index(number, at)
        assert logprob == pytest.approx(drawn[at].item(), abs=within)
        at += 1
    return tokens


@pytest.mark.parametrize("name", MODELS)
def test_greedy_answers_equal_transformers(bases, tmp_path, name):  # noqa: F811
    base, out = bases(name), tmp_path / "base.gguf"
    assert export(base, "--gguf", out, "--type", "f32") == 0
    with llama_cpp(out) as server:
        check_answers(server, base)
        assert (
            server.tokens(TEXT)
            == Tokenizer.from_file(str(base / "tokenizer.json")).encode(TEXT).ids
        )
        said = (("user", "Hi  there"), ("assistant", "a\n"), ("user", "b"))
        chat = [{"role": role, "content": text} for role, text in said]
        assert server.tokens(server.rendered(chat), special=True) == render_prompt(
            open_source(base).tokenizer, chat
        )


def with_rows(trained: Path, top: Path) -> Path:  # noqa: F811
    """Return an adapter like the one of ``trained``, with rows of every seventh token."""
    folder = shutil.copytree(trained / "adapter", top / "rows")
    config, state = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / WEIGHTS),
    )
    ids = list(range(5, 300, 7))
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    state[name] = 0.3 * torch.randn(len(ids), 64, generator=torch.Generator().manual_seed(0))
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(
        json.dumps(config | {"trainable_token_indices": ids})
    )
    return folder


def test_merged_file_and_adapter_answer_as_the_trained_model(bases, trained, tmp_path):  # noqa: F811
    base = bases("llama")
    f32 = ("--type", "f32")
    rows = with_rows(trained, tmp_path)
    assert export(rows, "--base-model", base, "--gguf", tmp_path / "rows.gguf", *f32) == 0
    with llama_cpp(tmp_path / "rows.gguf") as server:
        check_answers(server, base, rows)
    assert (
        export(
            trained,
            "--gguf",
            tmp_path / "merged.gguf",
            "--gguf-adapter",
            tmp_path / "adapter.gguf",
            *f32,
        )
        == 0
    )
    assert export(base, "--gguf", tmp_path / "base.gguf", *f32) == 0
    most: list[list[float]] = []  # log-probs of the most probable token behind each beginning
    for files in (["merged.gguf"], ["base.gguf", "adapter.gguf"], ["base.gguf"]):
        with llama_cpp(*(tmp_path / file for file in files)) as server:
            if files != ["base.gguf"]:
                check_answers(server, base, trained / "adapter")
            answers = [server.greedy(PROMPT[:count], 1)[1] for count in range(1, 13)]
            most.append([told[0][1] if told else 0.0 for told in answers])
    merged, adapted, plain = map(torch.tensor, most)
    assert ((merged - adapted).abs() < 1e-4).sum() >= 10, "others may be ties"
    assert ((merged - plain).abs() > 0.05).sum() >= 6


def test_a_full_disk_leaves_nothing(bases, tmp_path, capsys):  # noqa: F811
    before, base = resource.getrlimit(resource.RLIMIT_FSIZE), bases("qwen2")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        assert export(base, "--gguf", tmp_path / "base.gguf") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"no space left to write {tmp_path / 'base.gguf'}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_llama_cpp_does_not_compute_is_refused(bases, trained, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "x.gguf"

    def fails(*arguments: object) -> str:
        assert export(*arguments) in (1, 2)
        assert not out.exists()
        return capsys.readouterr().err

    def changed(base: Path, name: str, change) -> Path:
        """A copy in whose JSON file ``name`` ``change`` replaces values."""
        base = shutil.copytree(base, tmp_path / f"copy_{len(list(tmp_path.iterdir()))}")
        content = json.loads((base / name).read_text())
        change(content)
        (base / name).write_text(json.dumps(content))
        return base

    other = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    said = fails(changed(bases("qwen2"), "config.json", lambda c: c.update(other)), "--gguf", out)
    assert one_line_has(said, "Gemma2ForCausalLM", "convert_hf_to_gguf.py", "on the model's folder")
    biased = changed(bases("qwen3"), "config.json", lambda c: c.update(attention_bias=True))
    assert one_line_has(fails(biased, "--gguf", out), "attention_bias is True", "Qwen3")
    pattern = {"Regex": "a+"}
    split = changed(bases("qwen2"), "tokenizer.json",
                    lambda c: c["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(pattern))  # fmt: skip
    assert one_line_has(fails(split, "--gguf", out), "pre_tokenizer", "Split and ByteLevel")
    adapter = changed(trained / "adapter", "adapter_config.json", lambda c: c.update(use_dora=True))
    state = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in state if "lora_B" in name]:
        state[name.replace("lora_B.weight", "lora_magnitude_vector")] = torch.ones(len(state[name]))
    save_file(state, adapter / "adapter_model.safetensors")
    said = fails(adapter, "--base-model", bases("llama"), "--gguf-adapter", out)
    assert "is DoRA, which llama.cpp does not compute" in said
    assert "set --gguf, which merges it" in fails(
        with_rows(trained, tmp_path), "--base-model", bases("llama"), "--gguf-adapter", out
    )
    assert "qwen2 has no adapter" in fails(bases("qwen2"), "--gguf-adapter", out)
    (tmp_path / "there.gguf").write_text("mine")
    assert "there.gguf exists; name another file" in fails(
        bases("qwen2"), "--gguf", tmp_path / "there.gguf"
    )


def test_the_modelfile_names_file_template_and_stops(bases, trained, tmp_path):  # noqa: F811
    assert (
        export(trained, "--gguf", tmp_path / "m.gguf", "--gguf-adapter", tmp_path / "a.gguf") == 0
    )
    lines = (tmp_path / "m.Modelfile").read_text()
    assert "\nFROM ./m.gguf\n" in lines
    assert '\nTEMPLATE """{{ if .System }}<|im_start|>system\n{{ .System }}' in lines
    assert lines.endswith('PARAMETER stop "<|im_end|>"\n')
    assert f"\nFROM {bases('llama')}\nADAPTER ./a.gguf\n" in (tmp_path / "a.Modelfile").read_text()


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_the_openai_engine_uses_the_adapter_of_the_start(
    bases,  # noqa: F811
    trained,  # noqa: F811
    tmp_path,
    endpoint,
):
    base, source = bases("llama"), open_source(trained)
    assert export(base, "--gguf", tmp_path / "base.gguf") == 0
    assert export(trained, "--gguf-adapter", tmp_path / "adapter.gguf") == 0
    chats = [
        ({"role": "user", "content": text},)
        for text in ("Hi", "How many?", "It is 72.", "in May", "a", "clips")
    ]
    prompts = [tuple(render_prompt(source.tokenizer, chat)) for chat in chats]
    requests = [
        Request(f"p{i}", 0, 1, *each) for i, each in enumerate(zip(prompts, chats, strict=True))
    ]
    with llama_cpp(tmp_path / "base.gguf", tmp_path / "adapter.gguf") as server:
        engine = OpenAIEngine(source.tokenizer, urls=[server.url], endpoint=endpoint, concurrency=2)
        with engine.session(None) as session:
            found = list(session.generate(requests, Sampling(max_new_tokens=6, temperature=0.0)))
    assert len(found) == len(requests)
    exact = [
        each for each in found if each.logprobs
    ]  # the others have characters of several tokens
    assert len(exact) >= 2
    for each in exact:
        prompt = list(each.request.tokens)
        expected = their_logprobs(base, prompt + each.tokens, trained / "adapter")[
            len(prompt) - 1 : -1
        ]
        drawn = expected.gather(1, torch.tensor(each.tokens)[:, None])[:, 0]
        assert (expected.max(-1).values - drawn).max() < 0.02, (
            "each token is the most probable one, up to rounding"
        )
        assert each.logprobs == pytest.approx(drawn.tolist(), abs=0.02)


def write_sentencepiece(folder: Path, gemma: bool = False) -> Tokenizer:
    """Replace a model's tokenizer by one that was converted from SentencePiece, as Mistral 7B's, or Gemma's."""
    spaces = normalizers.Replace(" ", "\u2581")
    spaces = spaces if gemma else normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
    learnt = Tokenizer(models.BPE())
    learnt.normalizer = spaces
    learnt.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=110, show_progress=False))
    content = json.loads(learnt.to_str())["model"]
    ends = ["<unk>", "<bos>", "<eos>"] if gemma else ["<unk>", "<s>", "</s>"]
    pieces = [*ends, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(content["vocab"], key=content["vocab"].__getitem__)
    pieces += ["\u2581\u2581", *TURNS] if gemma else []
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [
        tuple(each.split(" ")) if isinstance(each, str) else tuple(each)
        for each in content["merges"]
    ]
    merges += [("\u2581", "\u2581")] if gemma else []
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = spaces
    if gemma:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.add_tokens([AddedToken("\u2581\u2581", normalized=False)])
    tokenizer.add_special_tokens([*ends, *(TURNS if gemma else [])])
    begin, end = ends[1:]
    tokenizer.post_processor = processors.TemplateProcessing(
        f"{begin} $A", f"{begin} $A $B", [(begin, 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": begin, "eos_token": end})
    )
    (folder / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": 2}')
    (folder / "chat_template.jinja").write_text(GEMMA if gemma else MISTRAL)
    return tokenizer


ODD = [
    *WORDS,
    "48/2 = 24",
    "  two  spaces ",
    "  three   spaces ",
    "\u4f60\u597d\n\n\u0001",
    "unseen w\u00f6rds Z",
]


def test_a_tokenizer_from_sentencepiece(bases, tmp_path):  # noqa: F811
    base, out = shutil.copytree(bases("mistral"), tmp_path / "base"), tmp_path / "base.gguf"
    tokenizer = write_sentencepiece(base)
    assert export(base, "--gguf", out) == 0
    with llama_cpp(out) as server:
        server.assert_reads_like(tokenizer, open_source(base), ODD)
    modelfile = out.with_suffix(".Modelfile").read_text()
    assert 'TEMPLATE """{{ range .Messages }}{{ if eq .Role "user" }}[INST] ' in modelfile
