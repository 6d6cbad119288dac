"""Steps of GRPO, RAFT and distillation of models with random weights, by phase, and a profile of SFT's steps."""

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from rocm_ext.base.files import read_lines
from rocm_ext.machine import trace
from tests.kit.tiny import TEXT, write_yaml
from tools.benchmarks import sft
from tools.benchmarks.training import OURS
from tools.benchmarks.work import Task
from tools.gpu.here import Here, Row, speed
from tools.gpu.runs import run_recipe
from tools.gpu.sides import VOCAB, arguments, model_of, shape_of, training_world

STEPS = 3  # the first one compiles and captures graphs
NAMES = {"grpo_rocm": "GRPO step", "raft_rocm": "RAFT cycle", "distil_rocm": "distillation step"}
RECORDED = 2  # steps
LONGEST = 8  # kernels that are named


def step(here: Here, recipe: str, size: str, teacher: str | None = None) -> Iterator[Row]:
    """Seconds of a step or cycle: sampling and updates. A coin judges the answers of GRPO and RAFT."""
    prompts, samples, tokens = (4, 2, 8) if here.tiny else (32, 8, 256)
    name = shape_of(here, size)
    base, _ = here.world(f"{recipe}-{name}", lambda folder: _write_prompts(folder, prompts * STEPS))
    cfg = _config(here, recipe, base, prompts, samples, tokens)
    cfg["model"]["checkpoint_dir"] = str(model_of(here, size))
    if teacher is not None:
        cfg["teacher"] = str(model_of(here, teacher))
        samples = 1
    run_recipe(recipe, write_yaml(base / "run.yaml", cfg))
    lines = read_lines(base / "out" / "metrics.jsonl")
    done = [line for line in lines if line.get("train_seconds")][1:]
    sampled = median(line["sample_seconds"] for line in done)
    trained = median(line["train_seconds"] for line in done)
    total = sampled + trained
    what = f"{NAMES[recipe]} of {name}, {prompts} x {samples} answers of up to {tokens} tokens"
    if teacher is not None:
        what += f", teacher {shape_of(here, teacher)}"
    note = f"sampling {sampled:.2f} s, updates {trained:.2f} s, {prompts * samples / total:.0f} answers/s"
    yield speed(what, total, "s", note, seconds=total)


def _write_prompts(folder: Path, count: int) -> None:
    rows = [{"prompt": f"{TEXT[i % len(TEXT)]} {i}?", "answer": str(i)} for i in range(count)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _config(
    here: Here, recipe: str, base: Path, prompts: int, samples: int, tokens: int
) -> dict[str, Any]:
    coin = {"verifier": {"_component_": "tests.kit.judges.Coin"}, "samples_per_prompt": samples}
    of_recipe: dict[str, dict[str, Any]] = {
        "grpo_rocm": {**coin, "truncated": "keep", "steps": STEPS, "prompts_per_step": prompts,
                      "eval_every_n_steps": 100, "save_every_n_steps": 100},
        "raft_rocm": {**coin, "drop_truncated": False, "cycles": STEPS, "prompts_per_cycle": prompts},
        "distil_rocm": {"verifier": None, "steps": STEPS, "prompts_per_step": prompts,
                        "eval_every_n_steps": 100, "save_every_n_steps": 100},
    }  # fmt: skip
    return {
        "recipe": recipe, "hardware": "auto" if here.gpu else "cpu", "seed": 0, "dtype": "auto",
        "output_dir": str(base / "out"), "overwrite_output_dir": True, "chat_template": "none",
        "model": {"_component_": "rocm_ext.model.from_checkpoint", "lora_rank": 16, "lora_alpha": 32},
        "tokenizer": {"max_seq_len": 1024}, "max_new_tokens": tokens, "verify_workers": 1, "batch_size": 8,
        "prompts": {"_component_": "rocm_ext.data.prompt_dataset", "source": str(base / "prompts.jsonl")},
        "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "lr": 1e-5},
        **of_recipe[recipe],
    }  # fmt: skip


def profile(here: Here, size: str, rows: int) -> Iterator[Row]:
    """Record steps of LoRA SFT with ``rows`` rows in a micro-batch, and say what their time goes to."""
    base, _ = training_world(here, "sft", size)
    shape = shape_of(here, size)
    task = Task("sft", shape, VOCAB[shape], "fp32" if here.tiny else "bf16", ())
    recorded = [f"profile_steps={RECORDED}", f"batch_size={rows}"]
    steps = trace.WARM_UP[trace.TRAINING] + RECORDED
    with sft.WORK.start(base, OURS, task, steps, arguments(here, *recorded)) as side:
        side.ask(steps=steps)
    path = base / "out" / OURS / trace.FOLDER / f"{trace.TRAINING}.rank0.trace.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    total, busy = trace.seconds(events, trace.TRAINING)
    taken: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "kernel":
            taken[event["name"]] += event["dur"] / 1e6
    share = f"{busy / total:.0%} of it in kernels of the GPU" if busy else "on a CPU"
    yield speed(f"recorded steps of LoRA SFT of {shape}, {rows} rows at once", total, "s", share)
    for name, seconds in taken.most_common(LONGEST):
        yield speed(f"in {name[:80]}", seconds / total, "of the time")
