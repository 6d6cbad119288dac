"""SmolLM2-135M-Instruct as GGUF files in llama.cpp, held against transformers."""

import json
import math
from pathlib import Path

import peft
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from rocm_ext import cli
from tests.kit.llama_cpp import LlamaCpp, llama_cpp
from tests.real.smollm2 import WHEEL, convert, marks

pytestmark = marks()
pytest.importorskip("xllamacpp", reason="llama.cpp is not here: pip install xllamacpp")

END = 2  # <|im_end|>
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Is water wet?"},
    ],
    [
        {"role": "user", "content": "My name is Ada.\n\n  x = 1234"},
        {"role": "assistant", "content": "Hello, Ada!"},
        {"role": "user", "content": "Was heißt „ein schöner Tag“?  😀"},
    ],
]
ROW = json.loads(Path(__file__).with_name("gsm8k.jsonl").read_text().splitlines()[-1])


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return convert(WHEEL, tmp_path_factory.mktemp("export") / "SmolLM2")


def export(*arguments: object) -> None:
    assert cli.main(["export", *map(str, arguments)]) == 0


def prompts(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        for chat in CHATS
    ]


@torch.no_grad()
def answers(model: torch.nn.Module, folder: Path) -> list[list[int]]:
    """Return transformers' greedy answers to ``CHATS``."""
    found = []
    for prompt in prompts(folder):
        row = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        found.append(row[0, len(prompt) :].tolist())
    return found


def check(server: LlamaCpp, folder: Path, model: torch.nn.Module) -> None:
    """Check tokens, prompts and greedy answers against transformers'."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = answers(model, folder)
    for chat, prompt, answer in zip(CHATS, prompts(folder), expected, strict=True):
        assert server.tokens(server.rendered(chat), special=True) == prompt
        text = "\n".join(each["content"] for each in chat)
        assert server.tokens(text) == tokenizer.encode(text, add_special_tokens=False).ids
        said = answer[: answer.index(END)] if END in answer else answer
        assert server.greedy(prompt, len(said))[0] == said
        stopped = server.ask(
            "/completion", {"prompt": prompt, "n_predict": 24, "temperature": 0, "top_k": 1}
        )
        assert stopped["stop_type"] == ("eos" if END in answer else "limit")


def load(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def perplexity(server: LlamaCpp, tokens: list[int], start: int) -> float:
    """Return llama.cpp's perplexity of ``tokens[start:]``."""
    total = 0.0
    for at in range(start, len(tokens)):
        body = {
            "prompt": tokens[:at],
            "n_predict": 1,
            "n_probs": 49152,
            "temperature": 0,
            "cache_prompt": True,
        }
        (told,) = server.ask("/completion", body)["completion_probabilities"]
        total -= next(each["logprob"] for each in told["top_logprobs"] if each["id"] == tokens[at])
    return math.exp(total / (len(tokens) - start))


def test_f16_answers_as_transformers_and_q8_0_costs_little(base, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(base)
    start = len(tokenizer(ROW["question"])["input_ids"])
    tokens = tokenizer(f"{ROW['question']} {ROW['answer']}")["input_ids"][: start + 40]
    model, measured = load(base), {}
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    theirs = math.exp(-logprobs[range(start - 1, len(tokens) - 1), tokens[start:]].mean())
    for kind in ("f16", "q8_0"):
        export(base, "--gguf", tmp_path / f"{kind}.gguf", "--type", kind)
        with llama_cpp(tmp_path / f"{kind}.gguf") as server:
            measured[kind] = perplexity(server, tokens, start)
            if kind == "f16":
                check(server, base, model)
    print("perplexity", theirs, measured)
    assert measured["f16"] == pytest.approx(theirs, rel=0.002)
    assert measured["q8_0"] == pytest.approx(theirs, rel=0.02)


def test_the_adapter_over_the_base_answers_as_the_merged_model(base, tmp_path):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(load(base), config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.eval()
    export(base, "--gguf", tmp_path / "base.gguf")
    export(tmp_path / "adapter", "--base-model", base, "--gguf", tmp_path / "merged.gguf")
    export(tmp_path / "adapter", "--base-model", base, "--gguf-adapter", tmp_path / "adapter.gguf")
    assert answers(adapted, base) != answers(load(base), base)
    with llama_cpp(tmp_path / "merged.gguf") as server:
        check(server, base, adapted)
    with llama_cpp(tmp_path / "base.gguf", tmp_path / "adapter.gguf") as server:
        check(server, base, adapted)
