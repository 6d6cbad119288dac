"""What `rocm-ext plan` says of a config, and what its first steps then take."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune

from rocm_ext import config
from rocm_ext.cli import main
from rocm_ext.plan.costs import CostCounter
from tests.kit.families import folder_config
from tests.kit.tiny import write_yaml

as_configured = pytest.mark.usefixtures("as_configured")


def plan(capsys: pytest.CaptureFixture, *arguments: str | Path, code: int = 0) -> dict[str, Any]:
    """Return what ``rocm-ext plan --json`` prints; it must end with ``code``."""
    assert main(["plan", "--json", *map(str, arguments)]) == code
    return json.loads(capsys.readouterr().out)


def measured_peak(path: Path, made: Callable[..., Any] = LoRAFinetune) -> tuple[int, Any]:
    """Run two real steps; return the peak bytes of tensors, including the model, and the recipe."""
    recipe = made(config.load(config.recipe_of(str(path)), str(path)))
    recipe.setup()
    recipe.trainer.write_outputs = recipe.trainer.save_checkpoint = lambda: None
    decoder = recipe.learner.decoder
    there = list({id(t): t for t in (*decoder.parameters(), *decoder.buffers())}.values())
    tally = CostCounter()
    tally.ignore(there)
    with tally:
        recipe.train()
    recipe.cleanup()
    return sum(t.nbytes for t in there) + tally.peak, recipe


def planned_and_measured(base: Path, out: Path, lora: dict | None = None, **changes: Any) -> tuple[int, int]:
    """Return the peaks that a run on long rows plans and has, in bytes; files are written beside its folder ``out``."""
    rows = out.with_name("long.jsonl")
    answer = "She sold half as many clips in May. "
    rows.write_text("".join(json.dumps({"question": "?", "answer": answer * (20 + i % 3)}) + "\n" for i in range(64)))
    changes = {"max_steps_per_epoch": 2, "startup_checks": False, "tokenizer": {"max_seq_len": 256}, **changes}
    peak, recipe = measured_peak(write_yaml(out.with_suffix(".yaml"), folder_config(base, rows, out, lora, **changes)))
    return recipe.learner.planned_peak, peak
