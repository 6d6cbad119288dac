"""Rewards: what RAFT trains on, reward functions, judges, and verifiers' own time."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from rocm_ext.recipes.raft_rocm import main

from rocm_ext.raft.rollouts import read_records
from tests.forks import forked
from tests.raft_runs import assert_equal, cycle_row, write_run, write_world

pytest.importorskip("resource", reason="forks and POSIX signals")
HERE = "rocm_ext.verifiers."
RESUME = "resume_from_checkpoint=True"


# ---- what RAFT trains on


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Write the YAML of a run whose verifier gives wrong answers the reward 0.5."""
    folder = write_world(tmp_path_factory.mktemp("rewards"))
    graded = {"verifier": {"_component_": "tests.judges.Graded"}, "eval_prompts": None}
    return partial(write_run, folder, **graded, max_new_tokens=8, samples_per_prompt=2, epochs=1)


@pytest.fixture(scope="module")
def rewarded(make, tmp_path_factory):
    """A run that keeps wrong answers with enough reward."""
    return ran(make, tmp_path_factory.mktemp("rewarded") / "run", "keep=rewarded")


def ran(make, out: Path, *overrides: str) -> Path:
    code, messages = forked(main, make(out), *overrides)
    assert code == 0, messages
    return out


def kept_verdicts(out: Path, cycle: int = 1) -> set[str]:
    verdicts = {
        (r["prompt_id"], r["sample"]): r["verdict"] for r in read_records(out / f"cycle_{cycle}/verdicts.jsonl")
    }
    return {verdicts[r["prompt_id"], r["sample"]] for r in read_records(out / f"cycle_{cycle}/kept.jsonl")}


def test_wrong_answers_are_not_trained_on_however_well_rewarded(make, rewarded, tmp_path):
    out = ran(make, tmp_path / "run")
    assert kept_verdicts(out) == {"CORRECT"}
    row = cycle_row(out, 1)
    assert row["filter"] == {"not_correct": row["verdicts"]["WRONG"], "kept": row["verdicts"]["CORRECT"]}
    assert row["pass_rate"] == row["verdicts"]["CORRECT"] / row["samples"]
    assert kept_verdicts(rewarded) == {"CORRECT", "WRONG"}
    assert cycle_row(rewarded, 1)["pass_rate"] == 1


def test_a_resumed_run_keeps_by_the_rule_that_it_began_with(make, rewarded, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(rewarded, out)
    shutil.rmtree(out / "cycle_2")
    record = json.loads((out / "run.json").read_text())
    del record["config"]["keep"]  # a run of an earlier version
    (out / "run.json").write_text(json.dumps(record))
    for cycles in (2, 3):  # and again
        ran(make, out, RESUME, f"cycles={cycles}")
    assert kept_verdicts(out, 2) == kept_verdicts(out, 3) == {"CORRECT", "WRONG"}
    shutil.rmtree(out / "cycle_3")
    ran(make, out, RESUME, "cycles=2")
    assert_equal(out, rewarded)
    ran(make, out, RESUME, "cycles=3", "keep=correct")
    assert kept_verdicts(out, 2) == {"CORRECT", "WRONG"}
    assert kept_verdicts(out, 3) == {"CORRECT"}
