"""GRPO end to end: its files, its recovery from kills, and the same results on any number of ranks."""

import json
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from rocm_ext.recipes.grpo_rocm import GRPO, main
from safetensors.torch import load_file

from rocm_ext.base.errors import UserError
from rocm_ext.rl.records import PhaseRecords
from rocm_ext.rl.trainer import PolicyTrainer
from rocm_ext.train.learner import Learner
from tests.kit import forks
from tests.kit.forks import RESUME, forked, kill_and_resume, several_ranks, signal_at
from tests.kit.grpo_runs import assert_equal, lines, outcome, write_run
from tests.kit.raft_runs import WEIGHTS, kill_at_record, loaded

wide = partial(pytest.param, marks=pytest.mark.wide)
resource = pytest.importorskip("resource", reason="forks, POSIX signals and limits")
succeed, load = partial(forks.succeed, main), partial(loaded, GRPO)


@pytest.fixture(scope="session")
def make(folder):
    """Write the YAML of a run: 4 steps of 4 prompts with 4 answers each."""
    return partial(write_run, folder)


@pytest.fixture(scope="session")
def reference(make, folder) -> Path:
    """An undisturbed run."""
    out = folder / "grpo_reference"
    succeed(make(out))
    return out


def test_every_step_is_in_the_records(reference):
    samples, verdicts, metrics = (
        lines(reference / f"{name}.jsonl") for name in ("samples", "verdicts", "metrics")
    )
    steps, evaluations = (
        [m for m in metrics if "eval" not in m],
        [m for m in metrics if "eval" in m],
    )
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["step"] for line in evaluations] == [0, 2, 4]
    for step in steps:
        mine = [v for v in verdicts if v["step"] == step["step"] and v["phase"] == "sample"]
        assert len(mine) == step["answers"] == 16
        assert step["reward"] == sum(v["reward"] for v in mine) / 16
        assert step["right"] == sum(v["verdict"] == "CORRECT" for v in mine) / 16
        groups: dict[str, set[float]] = {}
        for verdict in mine:
            groups.setdefault(verdict["prompt_id"], set()).add(verdict["reward"])
        assert step["flat"] == sum(len(rewards) == 1 for rewards in groups.values()) / 4
        assert step["updates"] == 1
        assert abs(step["mismatch_mean"]) < 1e-4  # one model in fp32 on both sides
    keys = [(s["step"], s["phase"], s["prompt_id"], s["sample"]) for s in samples]
    assert len(keys) == len(set(keys)) == 4 * 16 + 3 * 6
    assert (
        len({v["prompt_id"] for v in verdicts if v["phase"] == "sample" and v["step"] <= 3}) == 12
    ), "in turn"
    summary = json.loads((reference / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["samples"] == 64
    assert (reference / WEIGHTS).exists()
    assert not (reference / "policy").exists()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "count"), [("samples", 3), wide("verdicts", 20), wide("samples", 60)]
)
def test_killed_while_sampling_and_verifying(make, reference, tmp_path, name, count):
    kill_and_resume(main, make(tmp_path / "out"), kill_at_record(f"{name}.jsonl", count))
    assert_equal(tmp_path / "out", reference)


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(
    "method", ["train_on", "finish_step", "finish_evaluation", "save_checkpoint"]
)
@pytest.mark.parametrize("before", [True, False])
def test_killed_between_the_parts_of_a_step(make, reference, tmp_path, method, before):
    kill = signal_at(PolicyTrainer, method, lambda self, *_: self.step >= 2, before=before)
    kill_and_resume(main, make(tmp_path / "out"), kill)
    assert_equal(tmp_path / "out", reference)


@pytest.mark.wide
@pytest.mark.parametrize("phase", ["sample", wide("eval")])
def test_ctrl_c_saves(make, reference, tmp_path, phase):
    def third(self, record):
        return self._scope[:2] == (3 if phase == "sample" else 2, phase) and len(self.records) == 3

    prepare = signal_at(PhaseRecords, "append", third, signal.SIGINT)
    out = tmp_path / "out"
    code, messages = forked(main, make(out, save_every_n_steps=100), prepare=prepare)
    assert code == 130, messages
    assert "all saved; continue with resume_from_checkpoint=True" in messages
    assert (out / "checkpoints" / "step_00000002").exists()
    succeed(make(out, save_every_n_steps=100), RESUME)
    assert_equal(out, reference)


@pytest.mark.wide
@several_ranks
def test_two_ranks_equal_one(make, reference, tmp_path):
    out = tmp_path / "out"
    forks.succeed_on_ranks(main, make(out))
    mine, theirs = outcome(out), outcome(reference)
    assert mine["samples"] != []
    assert len(mine["samples"]) == len(theirs["samples"])
    first = [line for line in mine["samples"] if '"step": 1,' in line]
    assert first == [line for line in theirs["samples"] if '"step": 1,' in line]
    for ours, other in zip(
        lines(out / "metrics.jsonl"), lines(reference / "metrics.jsonl"), strict=True
    ):
        assert ours.get("reward") == pytest.approx(other.get("reward"), abs=1e-6)
        assert ours.get("loss") == pytest.approx(other.get("loss"), abs=1e-4)


def test_another_run_is_refused(make, reference):
    for overrides, message in (
        ([RESUME, "prompts_per_step=3"], "belongs to another run: prompts_per_step: was 4, is 3"),
        ([], "holds an earlier run"),
    ):
        with pytest.raises(UserError, match=message):
            load(make(reference), *overrides).setup()


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("changes", [
    {"updates_per_step": 2, "groups_per_update": 2, "kl_coef": 0.1, "loss": "grpo", "temperature": 0.7},
    {"updates_per_step": 2, "groups_per_update": 2, "old_logprobs": "trainer"},
    {"updates_per_step": 2, "old_logprobs": "sampler", "mismatch": "none"},
    {"loss": "dr_grpo", "mismatch": "none"},
    {"loss": "rloo", "kl_coef": 0.1},
    {"loss": "gspo", "updates_per_step": 2, "entropy_coef": 0.01},
    {"loss": "cispo", "groups_per_update": 2, "scale": "batch"},
    {"loss": "reinforce", "mismatch": "mask", "mismatch_level": "sequence"},
], ids=str)  # fmt: skip
def test_every_loss_trains_and_resumes(make, tmp_path, changes):
    whole, out = tmp_path / "whole", tmp_path / "out"
    changes = {"steps": 2, "eval_prompts": None, "save_every_n_steps": 1, **changes}
    succeed(make(whole, **changes))
    succeed(make(out, **changes), "steps=1")
    succeed(make(out, **changes), RESUME)
    assert_equal(out, whole)
    assert (
        OmegaConf.load(whole / "config.yaml").center is None
    )  # so that another loss brings its own
    for line in lines(whole / "metrics.jsonl"):
        assert line["updates"] == changes.get("updates_per_step", 1) * max(
            1, line["trained_groups"] // changes.get("groups_per_update", 4)
        )
        assert line["grad_norm"] > 0
        assert abs(line["mismatch_mean"]) < 1e-4
        if changes.get("loss") == "dr_grpo":
            assert line["loss"] == pytest.approx(dr_grpo(whole, line["step"]), abs=1e-6)


def dr_grpo(out: Path, step: int) -> float:
    """Compute the loss of an update by the paper's formula, from the records: a mean over all sampled answers."""
    samples, verdicts = ([v for v in lines(out / f"{name}.jsonl") if v["step"] == step]
                         for name in ("samples", "verdicts"))  # fmt: skip
    tokens = {(v["prompt_id"], v["sample"]): v["tokens"] for v in samples}
    rewards = {(v["prompt_id"], v["sample"]): v["reward"] for v in verdicts}
    assert len(set(rewards.values())) > 1
    total = 0.0
    for (prompt, i), reward in rewards.items():
        group = [value for (other, _), value in rewards.items() if other == prompt]
        total -= (reward - sum(group) / len(group)) * len(tokens[prompt, i])
    return total / OmegaConf.load(out / "config.yaml").max_new_tokens / len(rewards)


@pytest.mark.wide
def test_sampled_log_probs_are_those_before_the_update(make, tmp_path):
    """Rounding turns Adam's smallest steps around, so that values agree to percents."""
    changes = {"steps": 1, "eval_prompts": None, "updates_per_step": 2, "temperature": 0.7}
    found = {}
    for name in ("auto", "trainer"):
        succeed(make(tmp_path / name, old_logprobs=name, **changes))
        (found[name],) = lines(tmp_path / name / "metrics.jsonl")
    assert found["auto"]["mismatch_max"] == 0 < found["trainer"]["mismatch_max"] < 1e-4
    for key in ("loss", "grad_norm", "ratio_mean", "ratio_max"):
        assert found["auto"][key] == pytest.approx(found["trainer"][key], rel=0.02, abs=1e-4), key


def test_refill_samples_until_the_step_is_full(make, tmp_path):
    out = tmp_path / "out"
    coin = {"_component_": "tests.kit.judges.Coin", "share": 0.1}
    succeed(make(out, steps=2, refill=True, verifier=coin, eval_prompts=None, prompts_per_step=3))
    steps = lines(out / "metrics.jsonl")
    assert any(step["groups"] > 3 for step in steps)
    for step in steps:
        assert step["trained_groups"] <= 3
        assert step["answers"] == 4 * step["groups"]
    samples = lines(out / "samples.jsonl")
    assert len({(s["step"], s["prompt_id"], s["sample"]) for s in samples}) == len(samples)


@pytest.mark.wide
def test_equal_rewards_end_the_run_with_a_reason(make, tmp_path):
    changes = {
        "verifier": {"_component_": "tests.kit.judges.Coin", "share": 0.0},
        "eval_prompts": None,
    }
    assert "all rewards are 0" in forks.refused(
        main, make(tmp_path / "out", max_flat_steps=2, **changes)
    )
    messages = succeed(make(tmp_path / "short", steps=1, max_flat_steps=2, **changes))
    assert "no step had an update" in messages, "fewer steps than max_flat_steps"


def test_old_samples_are_removed(make, tmp_path):
    out = tmp_path / "out"
    succeed(make(out, keep_samples=1, save_every_n_steps=1))
    kept = lines(out / "samples.jsonl")
    assert {line["step"] for line in kept if line["phase"] == "sample"} == {4}
    assert len([line for line in kept if line["phase"] == "eval"]) == 3 * 6
    assert len(lines(out / "verdicts.jsonl")) == 4 * 16 + 3 * 6


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(
    "changes",
    [{"groups_per_update": 2, "old_logprobs": "trainer"}, wide({"loss": "gspo", "kl_coef": 0.1})],
    ids=str,
)
def test_shared_prompts_change_nothing(make, tmp_path, monkeypatch, changes):
    """Answers to one prompt are computed with their prompt once; values and weights are those of each answer alone.

    Attention keeps the prompt for each answer, and the memory plan knows of no shared ones.
    """
    changes = {"steps": 2, "eval_prompts": None, "tokens_per_micro_batch": 330, **changes}
    train_step = PolicyTrainer.train_step

    def checked(self, update):
        assert all(sum(batch.lengths) + sum(batch.shared) <= 330 for batch in update.batches)
        return train_step(self, update)

    monkeypatch.setattr(PolicyTrainer, "train_step", checked)
    succeed(make(tmp_path / "shared", **changes))
    monkeypatch.setattr(Learner, "shares", False)
    succeed(make(tmp_path / "alone", **changes))
    shared, alone = (lines(tmp_path / name / "metrics.jsonl") for name in ("shared", "alone"))
    assert len(shared) == len(alone) == 2
    for ours, theirs in zip(shared, alone, strict=True):
        assert 0 < ours["tokens"] < 0.9 * theirs["tokens"]
        for key in ("loss", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=2e-4, abs=1e-6), key
    weights = [load_file(tmp_path / name / WEIGHTS) for name in ("shared", "alone")]
    torch.testing.assert_close(*weights, rtol=1e-3, atol=2e-5)
