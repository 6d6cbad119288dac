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
