"""Small runs of GRPO for tests, in the worlds of :mod:`tests.kit.raft_runs`."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from rocm_ext.recipes.dpo_rocm import DPO
from rocm_ext.recipes.grpo_rocm import GRPO

from rocm_ext import config
from tests.kit.families import folder_config
from tests.kit.parity import finetune
from tests.kit.raft_runs import WEIGHTS, sampling_config, write_world
from tests.kit.tiny import metrics, write_yaml

FIT = (
    "shuffle",
    "data_seed",
    "sequences_per_step",
    "gradient_accumulation_steps",
    "max_steps_per_epoch",
    "epochs",
)
TIMING = (
    "seconds", "tokens_per_second", "peak_memory", "sample_seconds", "wait_seconds", "hidden_seconds", "train_seconds",
)  # fmt: skip


def write_run(folder: Path, out: Path, base: str = "base", **changes) -> Path:
    """Write the YAML of a run: 4 steps of 4 prompts with 4 answers each.

    Args:
        folder: from :func:`tests.kit.raft_runs.write_world`.
        out: output folder of the run; the YAML lies beside it.
        base: folder of the model.
        changes: other values.
    """
    cfg = {
        **{
            key: value
            for key, value in sampling_config(folder, out, base).items()
            if key not in (*FIT, "loss")
        },
        "recipe": "grpo_rocm",
        "steps": 4,
        "prompts_per_step": 4,
        "truncated": "keep",
        "eval_every_n_steps": 2,
        "lr_scheduler": None,
        **changes,
    }
    out.parent.mkdir(exist_ok=True, parents=True)
    return write_yaml(out.with_suffix(f".{len(changes)}.yaml"), cfg)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcome(out: Path) -> dict:
    """Return everything that must be equal in all runs: records, the adapter, training curves and scores."""
    found: dict = {"adapter": (out / WEIGHTS).read_bytes()}
    for name in ("samples", "verdicts", "metrics"):
        records = [
            {k: v for k, v in line.items() if k not in TIMING}
            for line in lines(out / f"{name}.jsonl")
        ]
        found[name] = sorted(map(json.dumps, records))
    return found


def assert_equal(out: Path, reference: Path) -> None:
    found, expected = outcome(out), outcome(reference)
    for name in expected:
        assert found[name] == expected[name], name


def check_grpo_and_dpo(folder: Path, tmp_path: Path, **lora: Any) -> None:
    """Check that sampled log-probs are those of training, and that the loss of pairs falls from ln 2.

    Args:
        folder: of a model.
        tmp_path: where the runs write.
        lora: further arguments of its builder.
    """
    write_world(tmp_path)
    ours = folder_config(folder, tmp_path / "prompts.jsonl", tmp_path / "grpo", lora)
    path = write_run(tmp_path, tmp_path / "grpo", steps=2, model=ours["model"])
    cfg = yaml.safe_load(path.read_text())
    own = {key: value for key, value in cfg.items() if key not in ("checkpointer", "tokenizer")}
    recipe = GRPO(config.load("grpo_rocm", str(write_yaml(path, own))))
    recipe.setup()
    recipe.train()
    recipe.cleanup()
    assert len(metrics(tmp_path / "grpo", "updates")) == 2
    assert min(metrics(tmp_path / "grpo", "grad_norm")) > 0
    assert max(metrics(tmp_path / "grpo", "mismatch_max")) < 1e-4

    said = [
        {"role": "assistant", "content": text}
        for text in ("It is 42. So.", "She sold clips in May.")
    ]
    asked = [{"role": "user", "content": f"{i}?"} for i in range(24)]
    pairs = [{"chosen": [each, said[0]], "rejected": [each, said[1]]} for each in asked]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    cfg = {**ours, "output_dir": str(tmp_path / "dpo"), "recipe": "dpo_rocm"}
    cfg["dataset"] = {
        "_component_": "rocm_ext.data.preference_dataset",
        "source": str(tmp_path / "pairs.jsonl"),
    }
    finetune(cfg, recipe=DPO)
    losses = metrics(tmp_path / "dpo")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert losses[-1] < losses[0] - 0.01
