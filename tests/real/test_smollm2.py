"""SmolLM2-135M-Instruct through our commands, held against transformers and PEFT."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.kit.tiny import metrics, tune, write_yaml
from tests.real.smollm2 import WHEEL, convert, marks

pytestmark = marks()

GSM8K = Path(__file__).with_name("gsm8k.jsonl")
TRAINED, HELD_OUT = 72, 24  # rows of GSM8K
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Who wrote Romeo and Juliet?"}],
    [{"role": "user", "content": "Write a Python function that adds two numbers."}],
    [{"role": "user", "content": "Translate to German: Good morning, my friends!"}],
    [{"role": "user", "content": "Tom has 12 apples and eats 5 of them. How many are left?"}],
    [{"role": "user", "content": "Name three colours."}],
    [{"role": "user", "content": "  Was heißt „ein schöner Tag“ auf Englisch?  😀\n\n"}],
    [{"role": "user", "content": "Continue: 1, 2, 4, 8, 16,"}],
    [{"role": "user", "content": "x = 3\nwhile x  <   10:\n\tx += 2\n\nWhat is x?"}],
    [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Is water wet?"},
    ],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello, Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
    [{"role": "user", "content": "Explain in one sentence why the sky is blue. " * 12}],
]
NOUNS = Path(__file__).with_name("nouns.txt").read_text().split()


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


@pytest.fixture(scope="session")
def top(tmp_path_factory) -> Path:
    """Working folder of all commands, with the model in ``models/SmolLM2``."""
    top = tmp_path_factory.mktemp("real")
    (top / "models").mkdir()
    convert(WHEEL, top / "models" / "SmolLM2")
    lines = GSM8K.read_text().splitlines(keepends=True)
    assert len(lines) == TRAINED + HELD_OUT
    (top / "gsm8k.jsonl").write_text("".join(lines[:TRAINED]))
    (top / "gsm8k_heldout.jsonl").write_text("".join(lines[TRAINED:]))
    write_yaml(top / "sft.yaml", sft_config())
    write_yaml(top / "raft.yaml", raft_config())
    write_yaml(top / "grpo.yaml", grpo_config())
    write_yaml(top / "distil.yaml", distil_config())
    write_rows(
        top / "chats.jsonl",
        [{"id": str(i), "messages": chat, "answer": "-"} for i, chat in enumerate(CHATS)],
    )
    nouns = random.Random(0).sample(NOUNS, len(NOUNS))
    write_rows(top / "copy.jsonl", copying(nouns[:40], 40))
    write_rows(top / "copy_heldout.jsonl", copying(nouns[40:], 60))
    return top


def base_config() -> dict[str, Any]:
    return {
        "hardware": "cpu",
        "model": {
            "_component_": "rocm_ext.model.from_checkpoint",
            "checkpoint_dir": "models/SmolLM2",
            "lora_rank": 8,
            "lora_alpha": 16,
        },
        "tokenizer": {"max_seq_len": 512},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 5e-4},
        "batch_size": 4,
        "seed": 0,
    }


def sft_config() -> dict[str, Any]:
    rows = {
        "_component_": "rocm_ext.data.sft_dataset",
        "column_map": {"prompt": "question", "completion": "answer"},
    }
    return base_config() | {
        "recipe": "lora_finetune_rocm",
        "output_dir": "outputs/sft",
        "dataset": {**rows, "source": "gsm8k.jsonl"},
        "dataset_val": {**rows, "source": "gsm8k_heldout.jsonl"},
        "sequences_per_step": 12,
        "save_adapter_weights_only": False,
    }


def raft_config() -> dict[str, Any]:
    rows = {"_component_": "rocm_ext.data.prompt_dataset"}
    return base_config() | {
        "recipe": "raft_rocm",
        "output_dir": "outputs/raft",
        "prompts": {**rows, "source": "copy.jsonl"},
        "eval_prompts": None,
        "verifier": {"_component_": "rocm_ext.verifiers.ExactMatch"},
        "cycles": 1,
        "samples_per_prompt": 4,
        "max_new_tokens": 24,
        "sequences_per_step": 12,
    }


def grpo_config() -> dict[str, Any]:
    dropped = ("cycles", "sequences_per_step")
    return {key: value for key, value in raft_config().items() if key not in dropped} | {
        "recipe": "grpo_rocm",
        "output_dir": "outputs/grpo",
        "steps": 8,
        "prompts_per_step": 8,
        "samples_per_prompt": 6,
    }


def distil_config() -> dict[str, Any]:
    dropped = ("verifier", "samples_per_prompt")
    return {key: value for key, value in grpo_config().items() if key not in dropped} | {
        "recipe": "distil_rocm",
        "output_dir": "outputs/distil",
        "teacher": "models/SmolLM2",
        "teacher_adapter": "outputs/raft/adapter",
        "prompts_per_step": 16,
        "verifier": None,
    }


def copying(nouns: list[str], count: int) -> list[dict[str, Any]]:
    """Return prompts of two words, whose answer has a comma between them, as one example shows."""
    pairs = [(a, b) for a in nouns for b in nouns if a != b]
    example = [
        {"role": "user", "content": "paper glass"},
        {"role": "assistant", "content": "paper, glass"},
    ]
    return [
        {"messages": [*example, {"role": "user", "content": f"{a} {b}"}], "answer": f"{a}, {b}"}
        for a, b in random.Random(1).sample(pairs, count)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rocm_ext(top: Path, *arguments: Any, codes: tuple[int, ...] = (0,)) -> str:
    """Run ``rocm-ext ARGUMENTS`` in ``top``; return what it prints on stdout."""
    command = [str(Path(sys.executable).with_name("rocm-ext")), *map(str, arguments)]
    done = subprocess.run(command, cwd=top, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode in codes, done.stderr
    assert "warning" not in done.stderr.lower()
    return done.stdout


def run(top: Path, recipe: str, name: str) -> Path:
    """Run a recipe in ``top``; return its folder."""
    done = tune("run", recipe, "--config", f"{name}.yaml", cwd=top, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()
    return top / "outputs" / name


def our_answers(top: Path, name: str, *arguments: Any) -> list[Answer]:
    """Return the greedy answers of ``rocm-ext eval`` to ``CHATS``."""
    rocm_ext(
        top,
        "eval",
        "--config",
        "raft.yaml",
        "--data",
        "chats.jsonl",
        "--output",
        f"evals/{name}",
        *arguments,
    )
    lines = (top / "evals" / name / "samples.jsonl").read_text().splitlines()
    found = {
        int(line["prompt_id"]): Answer(line["tokens"], line["logprobs"])
        for line in map(json.loads, lines)
    }
    return [found[i] for i in range(len(CHATS))]


@torch.no_grad()
def their_answers(model: Any, folder: Path) -> list[Answer]:
    """Return transformers' greedy answers to ``CHATS``."""
    tokenizer, answers = AutoTokenizer.from_pretrained(folder), []
    for chat in CHATS:
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        row = model.generate(**prompt, max_new_tokens=24, do_sample=False)
        start = prompt["input_ids"].shape[1]
        logprobs = model(row).logits[0, start - 1 : -1].log_softmax(-1)
        tokens = row[0, start:]
        answers.append(Answer(tokens.tolist(), logprobs.gather(1, tokens[:, None])[:, 0].tolist()))
    return answers


def their_model(folder: Path, adapter: Path | None = None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return (model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)).eval()


def assert_same(found: list[Answer], expected: list[Answer]) -> None:
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


@torch.no_grad()
def their_loss(model: Any, folder: Path, rows: Path) -> float:
    """Return the mean NLL of all tokens of the answers in ``rows``, end of turn included."""
    tokenizer, total, count = AutoTokenizer.from_pretrained(folder), 0.0, 0
    for row in map(json.loads, rows.read_text().splitlines()):
        chat = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        start = len(tokenizer(prompt)["input_ids"])
        tokens = torch.tensor(tokenizer(f"{prompt}{row['answer']}<|im_end|>")["input_ids"])
        logits = model(tokens[None]).logits[0, start - 1 : -1]
        total += F.cross_entropy(logits, tokens[start:], reduction="sum").item()
        count += len(tokens) - start
    return total / count


@pytest.fixture(scope="session")
def sft(top) -> Path:
    return run(top, "lora_finetune_rocm", "sft")


def test_greedy_answers_equal_transformers(top):
    folder = top / "models" / "SmolLM2"
    found = our_answers(top, "base")
    assert_same(found, their_answers(their_model(folder), folder))
    assert (
        AutoTokenizer.from_pretrained(folder).decode(found[0].tokens)
        == "The capital of France is Paris.<|im_end|>"
    )


def test_finetuning_lowers_both_losses(top, sft):
    folder, rows = top / "models" / "SmolLM2", top / "gsm8k_heldout.jsonl"
    losses = metrics(sft)
    assert sum(losses[-2:]) / 2 < losses[0] - 0.15
    validated = metrics(sft, "val_loss")[-1]
    assert validated < their_loss(their_model(folder), folder, rows) - 0.15
    assert validated == pytest.approx(
        their_loss(their_model(folder, sft / "adapter"), folder, rows), abs=1e-4
    )
    # `merged` is in bf16, as its base is; rounding to the nearest value costs 0.035
    assert validated == pytest.approx(
        their_loss(their_model(sft / "merged"), sft / "merged", rows), abs=0.005
    )


def test_the_plan_is_of_this_run(top, sft):
    plan = json.loads(rocm_ext(top, "plan", "--config", "sft.yaml", "--json"))
    assert plan["rows"]["count"] == TRAINED
    assert (
        plan["configured"]["memory"]["peak"]
        == json.loads((sft / "summary.json").read_text())["planned_memory"]
    )


def test_adapter_and_merged_model_answer_as_elsewhere(top, sft):
    folder = top / "models" / "SmolLM2"
    tuned = our_answers(top, "tuned", "--adapter", sft / "adapter")
    assert_same(tuned, their_answers(their_model(folder, sft / "adapter"), folder))
    merged = our_answers(top, "merged", f"model.checkpoint_dir={sft / 'merged'}")
    assert_same(merged, their_answers(their_model(sft / "merged"), sft / "merged"))


@pytest.fixture(scope="session")
def before(top) -> dict[str, Any]:
    """Scores of the model as it is, on the task that RAFT and GRPO train."""
    return evaluated(top, "before")


def evaluated(top: Path, name: str, *arguments: Any) -> dict[str, Any]:
    held_out = ["--data", "copy_heldout.jsonl", "--json", "--output", f"evals/{name}"]
    return json.loads(rocm_ext(top, "eval", "--config", "raft.yaml", *held_out, *arguments))


@pytest.mark.parametrize("name", ["raft", "grpo", "distil"])
def test_verified_answers_and_a_teacher_raise_the_score(top, before, name):
    """The teacher is the model that RAFT tuned, in the run before."""
    adapter = run(top, f"{name}_rocm", name) / "adapter"
    after = evaluated(top, f"after_{name}", "--adapter", adapter)
    assert 0.2 < before["correct"] / before["prompts"] < 0.7
    compared = json.loads(
        rocm_ext(top, "compare", "evals/before", f"evals/after_{name}", "--json", codes=(0, 1, 3))
    )
    gain = compared["difference"]
    print(name, before["correct"], after["correct"], gain)
    assert gain["value"] == pytest.approx((after["correct"] - before["correct"]) / after["prompts"])
    assert gain["low"] > 0.1, "the interval of the gain is far from 0"
    folder = top / "models" / "SmolLM2"
    tuned = our_answers(top, f"tuned_by_{name}", "--adapter", adapter)
    assert_same(tuned, their_answers(their_model(folder, adapter), folder))
