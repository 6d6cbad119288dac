"""What `plan`, `report`, `compare` and `monitor` say of runs on pairs."""

import json
import re
import warnings
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from rocm_ext.recipes.dpo_rocm import DPO

from rocm_ext import config
from rocm_ext.cli import main
from rocm_ext.cli.monitor import run_text
from rocm_ext.plan.costs import CostCounter
from rocm_ext.plan.planner import TrainingPlanner
from rocm_ext.plan.speeds import Figures
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.progress import progress
from rocm_ext.train.scoring import score
from tests.kit.plans import measured_peak, plan
from tests.kit.run_folders import sft, step_lines
from tests.kit.tiny import run_config, write_model, write_yaml

FREE_MEMORY = Figures("", False, {"fp32": 1e11}, 1e30)  # only operations take time


@pytest.fixture(scope="module")
def top(tmp_path_factory) -> Path:
    """A model with a wide vocabulary, and 32 pairs of long sides: prompts of about 60 tokens, answers of about 200."""
    top = tmp_path_factory.mktemp("views")
    write_model(
        top / "model", hidden_size=128, intermediate_size=352, num_hidden_layers=3, vocab=4096
    )
    sides = {
        "chosen": "She sold half as many clips in May. ",
        "rejected": "Weng earns $12 an hour. ",
    }
    rows = [
        {"prompt": f"How many {i:02}? " * 10, **{side: text * 16 for side, text in sides.items()}}
        for i in range(32)
    ]
    (top / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    single = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": i % 2}
        for i, row in enumerate(rows)
    ]
    (top / "single.jsonl").write_text("".join(json.dumps(row) + "\n" for row in single))
    return top


def write_config(top: Path, out: Path, lora: dict | None = None, **changes) -> Path:
    dataset = {
        "_component_": "rocm_ext.data.preference_dataset",
        "source": str(top / "pairs.jsonl"),
    }
    cfg = run_config(
        top / "model", top / "pairs.jsonl", out, recipe="dpo_rocm", startup_checks=False, **changes
    )
    cfg |= {"dataset": dataset, "max_steps_per_epoch": 2}
    cfg["tokenizer"]["max_seq_len"] = None
    cfg["model"] |= lora or {}
    return write_yaml(out.with_suffix(".yaml"), cfg)


@pytest.fixture
def _speeds(monkeypatch):
    """Neither measure this CPU nor search for better settings, which takes most of the time."""
    monkeypatch.setattr("rocm_ext.plan.speeds.measure_cpu", lambda: FREE_MEMORY)
    monkeypatch.setattr(
        TrainingPlanner, "fit", lambda self, budget: self.choice(self.rows.longest, [], budget)
    )


# with dropout both sides compute the prompt
@pytest.mark.wide
@pytest.mark.usefixtures("_speeds")
@pytest.mark.parametrize("changes", [
    {"enable_activation_checkpointing": True}, pytest.param({"lora": {"lora_dropout": 0.1}}, marks=pytest.mark.wide),
])  # fmt: skip
def test_planned_peak_of_pairs_is_the_measured_one(top, tmp_path, capsys, changes):
    path = write_config(top, tmp_path / "run", **changes)
    peak, recipe = measured_peak(path, DPO)
    planned = plan(capsys, "--config", path)["configured"]["memory"]["peak"]
    assert planned == recipe.learner.planned_peak
    assert planned == pytest.approx(peak, rel=0.1)


@pytest.mark.wide
@pytest.mark.usefixtures("_speeds")
def test_a_pair_is_planned_as_two_sequences_that_share_a_prompt(top, tmp_path, capsys):
    path = write_config(top, tmp_path / "run", batch_size=8)
    recipe = DPO(config.load("dpo_rocm", str(path)))
    recipe.setup()
    update = next(recipe.trainer.loader.range(0, 1))
    with CostCounter() as step:
        recipe.trainer.train_step(update)
    with CostCounter() as reference:
        score(recipe.learner, recipe.trainer.rows)
    found = plan(capsys, "--config", path)
    planned = found["configured"]["step"]
    assert planned["tokens"] == pytest.approx(
        sum(batch.real_tokens for batch in update.batches), rel=0.02
    )
    assert planned["flops"] == pytest.approx(sum(op.flops for op in step.operations), rel=0.02)
    seconds = sum(op.flops for op in reference.operations) / 1e11
    assert found["reference_seconds"] == pytest.approx(seconds, rel=0.02)
    assert plan(capsys, "--config", path, "loss.loss=simpo")["reference_seconds"] is None


def dpo(
    folder: Path, speed: float = 1000.0, factor: float = 1.0, steps: int = 60, **settings
) -> Path:
    """Write the folder of a run of 60 steps, with a validation every 20, whose margin grows from 0 to 2."""
    margins = factor * np.linspace(0, 2, steps)
    lines = step_lines(np.log1p(np.exp(-margins)), speed)

    def measured(margin: float, prefix: str = "") -> dict[str, float]:
        values = {"reward_chosen": margin / 4, "reward_rejected": -margin * 3 / 4, "margin": margin,
                  "accuracy": 0.5 + margin / 5, "logprobs_chosen": -40 + margin, "logprobs_rejected": -40 - 7 * margin,
                  "kl": margin / 100}  # fmt: skip
        return {prefix + name: float(value) for name, value in values.items()}

    lines = [{**line, **measured(margin)} for line, margin in zip(lines, margins, strict=True)]
    sft(folder, [], lines=lines, speed=speed, **{"recipe": "dpo_rocm", **settings})
    with (folder / "metrics.jsonl").open("a") as file:
        for step in (20, 40, 60):
            own = {"step": step, "epoch": 1, "val_loss": 0.7 - step / 200, "val_tokens": 900}
            file.write(json.dumps(own | measured(margins[step - 1] / 2, "val_")) + "\n")
    return folder


def test_a_report_draws_what_pairs_measure(tmp_path):
    runs = [
        dpo(tmp_path / "run"),
        dpo(tmp_path / "other", factor=0.5, recipe="my_pairs"),
    ]  # which extends dpo_rocm
    assert (RunFolder(runs[1]).recipe, RunFolder(runs[1]).family) == ("my_pairs", "dpo_rocm")
    assert {"margin 2.000", "accuracy 90.0 %", "validation margin 1.000"} <= {
        *run_text(progress(runs[0])).split(", ")
    }
    for shown in (runs[:1], runs):
        assert main(["report", *map(str, shown), "--output", str(tmp_path / "report.html")]) == 0
        html = (tmp_path / "report.html").read_text()
        drawn = re.findall(r"<figcaption><b>(.*?)</b>", html)
        assert {"Margin", "Validation: rewards", "KL divergence", "Validation loss"} <= {*drawn}
        assert "nats per token: loss" not in html, "the loss of pairs has no unit"
    text = " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())
    for fact in ("Recipe DPO", "Steps 60, epoch 1", "Margin 0.08475 → 1.915, means of 6 steps", "Validation margin",
                 "Accuracy 51.69 → 88.31, means of 6 steps (%)", "Best validation loss 0.4 at step 60"):  # fmt: skip
        assert fact in text, fact
    assert all(f"{name} goes from" in html for name in ("run, training", "other, validation")), (
        "runs are told apart"
    )


def test_compare_decides_by_loss(tmp_path, capsys):
    a = dpo(tmp_path / "a", loss={"beta": 0.1, "chunk_tokens": 8})
    assert (
        main(
            [
                "compare",
                str(a),
                str(dpo(tmp_path / "b", speed=1800, loss={"beta": 0.1, "chunk_tokens": 16})),
            ]
        )
        == 0
    )
    assert "validation loss at step 60" in capsys.readouterr().out
    other = dpo(tmp_path / "other", speed=1800, factor=0.5, loss={"beta": 0.05})
    assert main(["compare", str(a), str(other), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert "the runs have different losses (loss.beta" in found["text"]
    assert not [name for name in found["measured"] if "validation" in name]
    worse = dpo(tmp_path / "worse", speed=1800, factor=0.5, loss={"beta": 0.1, "chunk_tokens": 8})
    assert main(["compare", str(a), str(worse)]) == 1
    assert main(["compare", str(a), str(sft(tmp_path / "sft", [1.0] * 60))]) == 2
    (other / "config.yaml").unlink()  # a copied folder may lack it
    assert RunFolder(other).recipe == "dpo_rocm"
    (worse / "metrics.jsonl").write_text("")
    capsys.readouterr()
    with warnings.catch_warnings(action="error"):
        assert main(["compare", str(a), str(worse), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["difference"]["value"] is None
