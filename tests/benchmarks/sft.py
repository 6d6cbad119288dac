"""LoRA SFT against torchtune's own recipe, on the same steps: time, loss and memory.

    python -m tests.benchmarks.sft --data gsm8k_train.jsonl --vocab 32768 152064

Each run is a process of its own; sides alternate A B B A …; only the ratio of step times counts, over
the steps after the first two. Both sides see the same rows in each step, start from the same adapter
and use the same AdamW; the losses of all steps must agree to 1e-5 relative before a time is believed.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.tiny import run_config, write_model, write_rows, write_yaml

WARM_UP = 2
# What changes on the stock side: its config as shipped (qwen2_5/0.5B_lora_single_device), and better flags.
STOCK = {
    "as shipped": {"batch_size": 2, "gradient_accumulation_steps": 16},
    "batch 8": {"batch_size": 8, "gradient_accumulation_steps": 4},
    "batch 2, compiled": {"batch_size": 2, "gradient_accumulation_steps": 16, "compile": True},
    "batch 8, compiled": {"batch_size": 8, "gradient_accumulation_steps": 4, "compile": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="JSONL with question and answer; default: generated rows")
    parser.add_argument("--vocab", type=int, nargs="+", default=[32768])
    parser.add_argument("--stock", nargs="+", choices=STOCK, default=["as shipped"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--ours", nargs="*", default=[], help="overrides for our side, e.g. compile=True")
    parser.add_argument("--json", type=Path, help="write the table here too")
    args = parser.parse_args()
    table = []
    with tempfile.TemporaryDirectory() as folder:
        for vocab in args.vocab:
            base = Path(folder) / str(vocab)
            prepare(base, vocab, args)
            for flags in args.stock:
                table.append({"vocab": vocab, "stock": flags, **compare(base, flags, args)})
                print(row(table[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(table, indent=2) + "\n")


def prepare(base: Path, vocab: int, args: argparse.Namespace) -> None:
    """A random model of Qwen2.5 shape, its rows, and one initial adapter for both sides."""
    import torch
    from omegaconf import OmegaConf

    from rocm_ext import export, model

    base.mkdir()
    rows = args.data or write_rows(base / "rows.jsonl", 2000)
    rows = json_rows(rows, base / "dataset.json")
    text = [json.loads(line)["answer"] for line in rows.with_suffix(".jsonl").read_text().splitlines()]
    write_model(
        base / "model", text=text, tokens=min(vocab - 64, 32000), vocab=vocab, tie_word_embeddings=True,
        hidden_size=args.width, intermediate_size=args.width * 11 // 4, num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64, num_key_value_heads=args.width // 64 // 3 or 1,
        max_position_embeddings=2048,
    )  # fmt: skip
    cfg = run_config(base / "model", rows, base)["model"]
    decoder = model.build(OmegaConf.create({**cfg, **LORA}), torch.float32, 7, torch.device("cpu"))
    torch.save(export.adapter_state(decoder), base / "adapter.pt")


LORA = {"lora_attn_modules": ["q_proj", "v_proj", "output_proj"], "lora_rank": 8, "lora_alpha": 16}  # as shipped


def json_rows(source: Path, target: Path) -> Path:
    """The same rows as .json, which torchtune's instruct_dataset reads, and as .jsonl."""
    lines = source.read_text().splitlines()
    target.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
    target.write_text(json.dumps([json.loads(line) for line in lines]))
    return target


def compare(base: Path, flags: str, args: argparse.Namespace) -> dict:
    """Median and range of stock time over our time, with the largest loss difference."""
    runs: dict[str, list[list[dict]]] = {"stock": [], "ours": []}
    for repeat in range(args.repeats):
        for side in ("stock", "ours") if repeat % 2 == 0 else ("ours", "stock"):
            runs[side].append(run(side, base, flags, args))
    ratios = [seconds(a) / seconds(b) for a, b in zip(runs["stock"], runs["ours"], strict=True)]
    differences = [
        abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(runs["stock"][0], runs["ours"][0], strict=True)
    ]
    peaks = {side: max(line["peak_memory"] for lines in all_ for line in lines) for side, all_ in runs.items()}
    return {
        "speedup": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "loss_difference": max(differences),
        "seconds_per_step": statistics.median(seconds(lines) for lines in runs["ours"]),
        "peak_memory": peaks,
    }


def seconds(lines: list[dict]) -> float:
    """Median seconds of a step after the warm-up."""
    times = [line["time"] for line in lines]
    return statistics.median(b - a for a, b in zip(times[WARM_UP - 1 :], times[WARM_UP:], strict=False))


def run(side: str, base: Path, flags: str, args: argparse.Namespace) -> list[dict]:
    """One process; its steps as :class:`StepClock` saw them."""
    out = base / f"out_{side}"
    config = run_config(base / "model", base / "dataset.json", out)
    config["model"].update(LORA)
    config["dataset"] = {
        "_component_": "torchtune.datasets.instruct_dataset", "source": "json",
        "data_files": str(base / "dataset.json"), "split": "train",
        "column_map": {"input": "question", "output": "answer"},
    }  # fmt: skip
    config["tokenizer"]["max_seq_len"] = None
    config |= {
        "metric_logger": {"_component_": "tests.benchmarks.clock.StepClock", "path": str(base / f"{side}.jsonl")},
        "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "weight_decay": 0.01, "lr": 3e-4},
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup", "num_warmup_steps": 2,
        },
        "max_steps_per_epoch": args.steps, "epochs": 1, "shuffle": True, "dtype": "fp32",
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
    }  # fmt: skip
    if side == "stock":
        config.pop("hardware")
        config.pop("sequences_per_step")
        config |= {
            "device": "cpu", "resume_from_checkpoint": False, "enable_activation_checkpointing": False,
            "compile": False, "log_every_n_steps": 1, "save_adapter_weights_only": True, **STOCK[flags],
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.benchmarks.sft_stock", str(base / "adapter.pt")]
    else:
        config |= {"sequences_per_step": 32, "batch_size": 8, "overwrite_output_dir": True}
        config["checkpointer"]["adapter_checkpoint"] = str(base / "adapter.pt")
        command = [sys.executable, "-m", "rocm_ext.recipes.lora_finetune_rocm"]
    path = write_yaml(base / f"{side}.yaml", config)
    command += ["--config", str(path), *(args.ours if side == "ours" else [])]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in (base / f"{side}.jsonl").read_text().splitlines()]


def row(result: dict) -> str:
    low, high = result["range"]
    peak = result["peak_memory"]
    return (
        f"vocabulary {result['vocab']:>7,}  stock {result['stock']:<18} ours is {result['speedup']:.2f}x as fast "
        f"({low:.2f}–{high:.2f})  loss within {result['loss_difference']:.0e}  "
        f"peak memory {peak['ours'] / 2**30:.2f} GiB against {peak['stock'] / 2**30:.2f}"
    )


def load_stock_recipe():
    """torchtune's recipe module; its ``recipes`` package cannot be imported, only its files."""
    root = Path(importlib.util.find_spec("torchtune").origin).parents[1]  # type: ignore[union-attr,arg-type]
    path = root / "recipes" / "lora_finetune_single_device.py"
    spec = importlib.util.spec_from_file_location("stock_lora", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


if __name__ == "__main__":
    main()
