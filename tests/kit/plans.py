"""What `rocm-ext plan` says of a config, and what its first steps then take."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune
from torch import nn

from rocm_ext import config
from rocm_ext.cli import main
from rocm_ext.model.build import build_model
from rocm_ext.model.sampler import sampler_of
from rocm_ext.plan.costs import CostCounter
from rocm_ext.plan.planner import SamplingPlanner
from rocm_ext.plan.speeds import Figures
from rocm_ext.plan.workload import Questions
from rocm_ext.sampling import Sampling
from rocm_ext.sampling.local import LocalSession
from tests.kit.families import folder_config
from tests.kit.samples import Words, ask, prompts
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


def planned_and_measured(
    base: Path, out: Path, lora: dict | None = None, **changes: Any
) -> tuple[int, int]:
    """Return the peaks that a run on long rows plans and has, in bytes; files are written beside its folder ``out``."""
    rows = out.with_name("long.jsonl")
    answer = "She sold half as many clips in May. "
    rows.write_text(
        "".join(
            json.dumps({"question": "?", "answer": answer * (20 + i % 3)}) + "\n" for i in range(64)
        )
    )
    changes = {
        "max_steps_per_epoch": 2,
        "startup_checks": False,
        "tokenizer": {"max_seq_len": 256},
        **changes,
    }
    peak, recipe = measured_peak(
        write_yaml(out.with_suffix(".yaml"), folder_config(base, rows, out, lora, **changes))
    )
    return recipe.learner.planned_peak, peak


def planned_and_measured_sampling(
    node: dict, decoder: nn.Module, slots: int, prompt: int
) -> tuple[int, int]:
    """Return the peaks that sampling in ``slots`` slots plans and has: 40 tokens to each prompt of ``prompt`` tokens.

    ``node`` is the config's ``model``, of which ``decoder`` was made.
    """
    tally = CostCounter()
    tally.ignore([*decoder.parameters(), *decoder.buffers()])
    with tally, sampler_of(decoder) as made:
        session = LocalSession(made, Words([]), lambda: 2**40, slots, graphs=False)
        list(session.generate(ask(prompts(*[prompt] * slots)), Sampling(40)))
    engine = {"_component_": "rocm_ext.sampling.LocalEngine", "slots": slots}
    cfg = OmegaConf.merge(config.defaults("raft_rocm"), {"max_new_tokens": 40, "engine": engine})
    empty = build_model(
        OmegaConf.create(node), next(decoder.parameters()).dtype, 0, torch.device("meta")
    )
    asked = Questions(slots, 0, prompt, prompt, 40, "test")
    figures = Figures("", True, {"fp32": 1e12, "bf16": 1e12}, 1e10)
    planner = SamplingPlanner(cfg, empty, torch.device("cpu"), asked, ranks=1, figures=figures)
    return planner.plan(2**40).peak, tally.peak
