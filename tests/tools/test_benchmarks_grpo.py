"""The benchmarks of GRPO: their arithmetic, their gate, their files."""

import json
import math
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from rocm_ext import config
from rocm_ext.data.prompts import prompt_dataset
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.rl import records
from tests.kit.tiny import write_model
from tools.benchmarks import learning, overhead, pretrained, rl, sorting
from tools.benchmarks.protocol import Failed


# ---------------------------------------------------------------------------------------------------- learning
def test_every_method_draws_the_same_samples(tmp_path):
    """The configs of RAFT and GRPO do so by themselves, and GRPO's counts in steps of any size."""
    drawn = set()
    for method in {*learning.TASKS["sums"], *learning.TASKS["sorting"]}:
        chosen, job = learning.METHODS[method], learning.job(method, 1, 3, tmp_path, tmp_path)
        cfg = config.load(
            chosen.recipe, job.config, [f"{key}={value}" for key, value in job.changes.items()]
        )
        of_raft = chosen.recipe == learning.RAFT
        prompts = (
            cfg.cycles * cfg.prompts_per_cycle if of_raft else cfg.steps * cfg.prompts_per_step
        )
        drawn.add(prompts * cfg.samples_per_prompt)
    assert drawn == {3 * learning.samples_of_round(tmp_path)}


def test_curves_are_summed_up():
    curve = [(0, 0.3), (100, 0.5), (200, 0.9)]
    assert learning.samples_to(curve, 0.7) == pytest.approx(150)
    assert learning.samples_to(curve, 0.2) == 0
    assert learning.samples_to(curve, 0.95) == math.inf
    assert learning.mean_accuracy(curve) == pytest.approx(0.55)
    mean, low, high = learning.mean_interval([0.0, 1.0, 2.0])
    assert (mean, high - mean, mean - low) == pytest.approx(
        (1, 4.303 / math.sqrt(3), 4.303 / math.sqrt(3))
    )
    assert math.isnan(learning.mean_interval([0.5])[1])


def test_the_table_compares_equal_seeds():
    curves = {
        "raft": {seed: [(0, 0.3), (10, end)] for seed, end in enumerate([0.5, 0.6, 0.7])},
        "grpo": {seed: [(0, 0.3), (10, end)] for seed, end in enumerate([0.9, 0.9, 0.9])},
        "kept": {0: [(10, 0.6)]},
    }
    rows = [line.split(" | ") for line in learning.table(curves).splitlines()]
    assert rows[2][:4] == ["| RAFT", "60.0 % (35.2 to 84.8)", "50.0, 60.0, 70.0", ""]
    assert rows[3][:4] == [
        "| GRPO",
        "90.0 % (90.0 to 90.0)",
        "90.0, 90.0, 90.0",
        "+30.0 % (+5.2 to +54.8)",
    ]
    assert (rows[2][-1], rows[3][-1]) == ("10 |", "5 |")
    assert rows[4][-4:] == ["60.0", "+10.0 %", "", "10 |"]


@pytest.mark.parametrize(
    ("answer", "verdict", "reward"),
    [("It is 1233.", "CORRECT", 1), ("1323", "WRONG", 0.5), ("12", "WRONG", 0.5), ("12334", "WRONG", 0.8),
     ("1233 or 4", "WRONG", 0), ("none", "UNPARSED", 0)],
)  # fmt: skip
def test_digits_in_place_are_rewarded(answer, verdict, reward):
    row = sorting.Problem("3213").row()
    assert row["messages"][-1]["content"] == row["answer"] == "1233"
    found = sorting.Positions()(answer, row)
    assert (found.verdict, found.reward) == (verdict, pytest.approx(reward))


def test_the_third_task_holds_out_sums_that_nothing_shows(tmp_path, monkeypatch):
    model = write_model(tmp_path / "model", "llama")
    monkeypatch.setattr(pretrained, "evaluate", lambda *_: (1, 400))
    assert pretrained.make(model, None) == {"task": "pretrained", "correct": 1, "total": 400}
    rows = [
        json.loads(line)
        for name in ("heldout", "train")
        for line in (model / f"{name}.jsonl").open()
    ]
    sums = [[int(number) for number in re.findall(r"\d+", row["prompt"])] for row in rows]
    assert all(a + b == c and d + e == f for a, b, c, d, e, f, _, _ in sums)
    assert all(
        sum(numbers[-2:]) == int(row["answer"]) for numbers, row in zip(sums, rows, strict=True)
    )
    asked = {frozenset(numbers[-2:]) for numbers in sums}
    assert len(asked) == len(rows) == 3400
    assert not asked & {frozenset(numbers[i : i + 2]) for numbers in sums for i in (0, 3)}
    assert learning.samples_of_round(model) == 2048
    first = prompt_dataset(source=f"{model}/train.jsonl")[0]
    (tmp_path / "raft" / "cycle_1").mkdir(parents=True)
    line = {"prompt_id": first.id, "text": f" {first.row['answer']}"}
    (tmp_path / "raft" / "cycle_1" / "kept.jsonl").write_text(json.dumps(line) + "\n")
    [row] = pretrained.kept(tmp_path / "raft", model)
    assert row == {"prompt": rows[400]["prompt"], "completion": f" {rows[400]['answer']}\n"}


# ------------------------------------------------------------------------------------------------------- costs
def test_the_share_of_a_step_outside_of_its_work():
    timed = {"step": 1, "seconds": 10.0, "sample_seconds": 6.0, "train_seconds": 3.5}
    lines = [{"step": 0, "eval": {}, "seconds": 9.0}, timed]
    assert overhead.shares(lines) == pytest.approx([0.05])
    assert overhead.growth([1.0] * 10 + [2.0] * 80 + [3.0] * 10) == 3


@pytest.mark.parametrize("keep", ["all", 2])
def test_synthetic_steps_leave_the_records_of_a_run(tmp_path, keep):
    cfg = config.load("grpo_rocm", "cpu_pocket_grpo", [])
    cfg.update(
        {"steps": 20, "eval_every_n_steps": 10, "prompts_per_step": 4, "samples_per_prompt": 2}
    )
    cfg.keep_samples = keep
    synthetic = overhead.Synthetic(tmp_path, cfg, prompts=50)
    assert all(synthetic.step(number) > 0 for number in range(1, 21))
    synthetic.records.close()
    verdicts = (tmp_path / "verdicts.jsonl").read_text().splitlines()
    assert len(verdicts) == 20 * 8 + 2 * 50
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 22


def test_removing_old_samples_costs_the_same_however_many_evaluations_there_are(
    tmp_path, monkeypatch
):
    read, original = [], records.rewrite_lines

    def rewrite(path: Path, keep) -> None:
        read.append(path.read_text().count("\n"))
        original(path, keep)

    monkeypatch.setattr(records, "rewrite_lines", rewrite)
    run = records.Records.open(tmp_path, Ranks(torch.device("cpu")), 0, -1)
    for step in range(1, 101):
        for phase, count in (("sample", 2), ("eval", 10)):
            samples, *_ = run.phase(step, phase)
            for index in range(count):
                samples.append({"prompt_id": "a", "sample": index})
        run.keep_samples_from(step)
    assert sum(read) <= 4 * 100 * 12
    run.keep_samples_from(101, at_once=True)
    run.close()
    assert (tmp_path / "samples.jsonl").read_text().count("\n") == 100 * 10


# --------------------------------------------------------------------------------------------------------- TRL
@pytest.mark.parametrize(("found", "passes"), [(1.00001, True), (1.001, False), (math.nan, False)])
def test_gradients_that_differ_close_the_gate(found, passes):
    answers = [{"steps": [(1.0, 1.0), (1.0, 1.0)]}, {"steps": [(1.0, 1.0), (1.0, found)]}]
    with nullcontext() if passes else pytest.raises(Failed, match="gradient norms differ"):
        assert rl.check(answers) == pytest.approx(1e-5, rel=1e-3)


# --------------------------------------------------------------------------------------------------- whole runs
