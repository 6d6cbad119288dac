"""What TRL's trainers share here: the work that the harness wrote, the model, and the settings."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GPU = torch.cuda.is_available()
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def read_work() -> tuple[dict[str, Any], Path, list[dict[str, Any]]]:
    """Return the work that the command line names, its folder, and the rows in it."""
    path = Path(sys.argv[1])
    rows = [json.loads(line) for line in (path.parent / "rows.jsonl").read_text().splitlines()]
    return json.loads(path.read_text()), path.parent, rows


def open_model(work: dict[str, Any], folder: Path) -> tuple[Any, Any]:
    """Open the tokenizer and the base model."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.pad_token = "<|endoftext|>"
    attention = work["attention"] if GPU else "sdpa"
    return tokenizer, AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=DTYPES[work["dtype"]], attn_implementation=attention
    )


def settings(work: dict[str, Any], folder: Path, rows_per_step: int) -> dict[str, Any]:
    """Return the settings of both trainers."""
    batch = work["batch_size"]
    return {
        "output_dir": str(folder / "trl"), "max_steps": work["steps"], "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": rows_per_step // batch, "train_sampling_strategy": "sequential",
        "learning_rate": work["lr"], "lr_scheduler_type": "constant", "optim": "adamw_torch_fused",
        "weight_decay": 0.01, "bf16": work["dtype"] == "bf16", "fp16": False, "gradient_checkpointing": False,
        "max_length": None, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "use_cpu": not GPU,
    }  # fmt: skip
