"""What `plan`, `report`, `compare` and `monitor` say of runs on pairs."""

import json
from pathlib import Path

import pytest
from rocm_ext.recipes.dpo_rocm import DPO

from rocm_ext import config
from rocm_ext.plan.costs import Tally
from rocm_ext.plan.planner import TrainingPlanner
from rocm_ext.plan.speeds import Figures
from rocm_ext.train.scoring import score
from tests.test_plan import measured_peak, plan
from tests.tiny import run_config, write_model, write_yaml

FREE_MEMORY = Figures("", False, {"fp32": 1e11}, 1e30)  # only operations take time


@pytest.fixture(scope="module")
def top(tmp_path_factory) -> Path:
    """A model with a wide vocabulary, and 32 pairs of long sides: prompts of about 60 tokens, answers of about 200."""
    top = tmp_path_factory.mktemp("views")
    write_model(top / "model", hidden_size=128, intermediate_size=352, num_hidden_layers=3, vocab=4096)
    sides = {"chosen": "She sold half as many clips in May. ", "rejected": "Weng earns $12 an hour. "}
    rows = [
        {"prompt": f"How many {i:02}? " * 10, **{side: text * 16 for side, text in sides.items()}} for i in range(32)
    ]
    (top / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return top


def write_config(top: Path, out: Path, lora: dict | None = None, **changes) -> Path:
    dataset = {"_component_": "rocm_ext.data.preference_dataset", "source": str(top / "pairs.jsonl")}
    cfg = run_config(top / "model", top / "pairs.jsonl", out, recipe="dpo_rocm", startup_checks=False, **changes)
    cfg |= {"dataset": dataset, "max_steps_per_epoch": 2}
    cfg["tokenizer"]["max_seq_len"] = None
    cfg["model"] |= lora or {}
    return write_yaml(out.with_suffix(".yaml"), cfg)


# ---- plan


@pytest.fixture
def _speeds(monkeypatch):
    """Neither measure this CPU nor search for better settings, which takes most of the time."""
    monkeypatch.setattr("rocm_ext.plan.speeds.measure_cpu", lambda: FREE_MEMORY)
    monkeypatch.setattr(TrainingPlanner, "fit", lambda self, budget: self.choice(self.rows.longest, [], budget))


# with dropout both sides compute the prompt
@pytest.mark.usefixtures("_speeds")
@pytest.mark.parametrize("changes", [{"enable_activation_checkpointing": True}, {"lora": {"lora_dropout": 0.1}}])
def test_planned_peak_of_pairs_is_the_measured_one(top, tmp_path, capsys, changes):
    path = write_config(top, tmp_path / "run", **changes)
    peak, recipe = measured_peak(path, DPO)
    planned = plan(capsys, "--config", path)["configured"]["memory"]["peak"]
    assert planned == recipe.learner.planned_peak
    assert planned == pytest.approx(peak, rel=0.1)


@pytest.mark.usefixtures("_speeds")
def test_a_pair_is_planned_as_two_sequences_that_share_a_prompt(top, tmp_path, capsys):
    path = write_config(top, tmp_path / "run", batch_size=8)
    recipe = DPO(config.load("dpo_rocm", str(path)))
    recipe.setup()
    batches = next(recipe.trainer.loader.range(0, 1))
    with Tally() as step:
        recipe.trainer.train_step(batches)
    with Tally() as reference:
        score(recipe.learner, recipe.trainer.rows)
    found = plan(capsys, "--config", path)
    planned = found["configured"]["step"]
    assert planned["tokens"] == pytest.approx(sum(batch.real_tokens for batch in batches), rel=0.02)
    assert planned["flops"] == pytest.approx(sum(op.flops for op in step.operations), rel=0.02)
    seconds = sum(op.flops for op in reference.operations) / 1e11
    assert found["reference_seconds"] == pytest.approx(seconds, rel=0.02)
    assert plan(capsys, "--config", path, "loss.loss=simpo")["reference_seconds"] is None
