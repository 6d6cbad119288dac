"""A GRPO step of a model with random weights, by phase."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rocm_ext.base.files import read_lines
from tests.kit.tiny import TEXT, write_yaml
from tools.gpu.here import Here, Row, speed
from tools.gpu.runs import run_recipe
from tools.gpu.sides import model_of, shape_of


def grpo_step(here: Here, size: str) -> Iterator[Row]:
    """Seconds of a GRPO step: sampling and updates. A coin judges the answers."""
    prompts, samples, tokens, steps = (4, 2, 8, 2) if here.tiny else (32, 8, 256, 3)
    model = model_of(here, size)
    base, _ = here.world(
        f"grpo-{shape_of(here, size)}", lambda folder: _write_prompts(folder, prompts * steps)
    )
    out = base / "out"
    changes = [f"output_dir={out}", "overwrite_output_dir=True", f"steps={steps}", f"prompts_per_step={prompts}",
               f"samples_per_prompt={samples}", f"max_new_tokens={tokens}"]  # fmt: skip
    run_recipe("grpo_rocm", write_yaml(base / "grpo.yaml", _config(here, base, model)), *changes)
    lines = read_lines(out / "metrics.jsonl")
    done = [line for line in lines if "sample_seconds" in line][
        1:
    ]  # the first compiles and captures graphs
    sampled, trained = (
        median(line[key] for line in done) for key in ("sample_seconds", "train_seconds")
    )
    count, shape = prompts * samples, shape_of(here, size)
    yield speed(f"GRPO step of {shape}, {prompts} x {samples} answers of up to {tokens} tokens", sampled + trained, "s",
                f"sampling {sampled:.2f} s, updates {trained:.2f} s, {count / (sampled + trained):.0f} answers/s",
                seconds=sampled + trained)  # fmt: skip


def _write_prompts(folder: Path, count: int) -> None:
    rows = [{"prompt": f"{TEXT[i % len(TEXT)]} {i}?", "answer": str(i)} for i in range(count)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _config(here: Here, base: Path, model: Path) -> dict[str, Any]:
    return {
        "recipe": "grpo_rocm", "hardware": "auto" if here.gpu else "cpu", "seed": 0, "dtype": "auto",
        "chat_template": "none",
        "model": {"_component_": "rocm_ext.model.from_checkpoint", "checkpoint_dir": str(model), "lora_rank": 16,
                  "lora_alpha": 32},
        "tokenizer": {"max_seq_len": 1024},
        "prompts": {"_component_": "rocm_ext.data.prompt_dataset", "source": str(base / "prompts.jsonl")},
        "verifier": {"_component_": "tests.kit.judges.Coin"}, "verify_workers": 1, "truncated": "keep",
        "eval_every_n_steps": 100, "save_every_n_steps": 100, "batch_size": 8,
        "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "lr": 1e-5},
    }  # fmt: skip
