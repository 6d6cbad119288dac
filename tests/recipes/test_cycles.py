"""Cycles that keep nothing, replayed answers, adapters, optimisers, evaluations."""

import itertools
import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from rocm_ext.recipes.raft_rocm import RAFTTrainer, main
from safetensors.torch import load_file

from rocm_ext.base.files import read_lines
from rocm_ext.rl.records import PhaseRecords, Sample
from rocm_ext.rl.selection import replay
from rocm_ext.runs.folder import RunFolder
from tests.kit.forks import RESUME, forked, forked_ranks, kill_and_resume, signal_at, succeed
from tests.kit.lines import one_line_has
from tests.kit.raft_runs import WEIGHTS, assert_equal, cycle_line, held_out, outcome, records
from tests.kit.tiny import read_records

pytest.importorskip("resource", reason="forks and POSIX signals")


def ran(make, out: Path, *overrides: str, **changes) -> Path:
    succeed(main, make(out, **changes), *overrides)
    return out


@pytest.fixture(scope="session")
def dry(make, folder):
    """A run of 4 cycles whose verifier accepts nothing after cycle 1: its folder, its settings and its messages."""
    out, end = folder / "dry", folder / "end"
    verifier = {"_component_": "tests.kit.judges.Until", "end": str(end)}
    changes = {"verifier": verifier, "prompts_per_cycle": 4, "retry_unsolved_after": 9, "epochs": 1}
    ran(make, out, "cycles=1", **changes)
    end.touch()
    messages = succeed(main, make(out, **changes), "cycles=4", RESUME)
    return out, changes, messages


def test_cycles_that_keep_nothing_are_skipped_and_end_the_run(dry):
    out, _, messages = dry
    assert one_line_has(messages, "cycle 2 is skipped", "16 WRONG", "16 below threshold", "0 kept")
    assert one_line_has(messages, "stopped", "2 cycles", "max_empty_cycles 2")
    assert (out / WEIGHTS).read_bytes() == (out / "cycle_1" / WEIGHTS).read_bytes()
    cycles = [cycle_line(out, cycle) for cycle in (1, 2, 3)]
    assert [(line["updates"] > 0, line["flat"]) for line in cycles[1:]] == [(False, 1.0)] * 2
    assert (cycles[1]["answers"], cycles[1]["kept"], cycles[1]["verdicts"]) == (
        16,
        0,
        {"WRONG": 16},
    )
    assert cycles[0]["updates"] > 0
    assert cycles[1]["sample_seconds"] > 0
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["steps"], summary["best_step"]) == (3, 1)
    assert "max_empty_cycles" in summary["stopped"]
    asked = [{r["prompt_id"] for r in records(out, n, "samples")} for n in (1, 2, 3)]
    assert len(set.union(*asked)) == 12  # each cycle asked other prompts
    assert not (out / "cycle_4").exists()


def test_resuming_an_ended_run_repeats_nothing(dry, make, tmp_path):
    out = shutil.copytree(dry[0], tmp_path / "out")
    assert one_line_has(
        succeed(main, make(out, **dry[1]), "cycles=4", RESUME), "stopped", "2 cycles"
    )
    assert_equal(out, dry[0])


@pytest.mark.wide
def test_a_run_without_right_answers_says_why(make, tmp_path):
    out = tmp_path / "out"
    # a part of the answers is right, but their rewards are too low
    changes = {
        "max_empty_cycles": 1,
        "verifier": {"_component_": "tests.kit.judges.Until", "right": 0.4},
    }
    for code, messages in forked_ranks(main, make(out, **changes)):
        assert code == 1
        assert one_line_has(messages, "no cycle was trained", "Cycle 1", "48 answers")
        assert one_line_has(messages, "48 below threshold", "0 kept", "overwrite_output_dir=True")
        assert "Traceback" not in messages
    assert not (out / "adapter").exists()
    assert not RunFolder(out).finished
    assert not list(out.rglob("*.rank*"))


def sample(prompt: str, index: int, *tokens: int) -> Sample:
    return Sample(prompt, index, 0, "stop", "", list(tokens), [0.0] * len(tokens))


def test_replayed_answers_are_the_newest_of_each_prompt():
    earlier = [
        [sample("a", 0, 1), sample("a", 1, 2), sample("b", 0, 3)],
        [sample("a", 0, 4), sample("b", 0, 3), sample("c", 0, 5)],
        [sample("a", 0, 1), sample("d", 0, 6)],
    ]

    def replayed(cycles=3, **changes):
        rules = {"deduplicate": True, "per_prompt": 3, **changes}
        found = replay([sample("a", 7, 2)], earlier[3 - cycles :], **rules)
        return [(each.prompt_id, *each.tokens) for each in found]

    newest, middle = [("a", 1), ("d", 6)], [("a", 4), ("b", 3), ("c", 5)]
    assert replayed() == newest + middle  # "a" is full then, and "b" is a duplicate
    assert replayed(per_prompt=None) == newest + middle
    assert replayed(per_prompt=2) == [*newest, ("b", 3), ("c", 5)]
    assert replayed(per_prompt=None, deduplicate=False) == newest + middle + [
        ("a", 1),
        ("a", 2),
        ("b", 3),
    ]
    assert replayed(1) == newest
    assert replayed(0) == []


# the first checkpoint of cycle 2, when it is written; the checkpoint at the end of cycle 1, before it is written
KILL_IN_TRAINING = signal_at(
    RAFTTrainer, "save_checkpoint", lambda self: self.step == 1 and 0 < self.done < self.total_steps
)
KILL_AT_ITS_END = signal_at(
    RAFTTrainer, "save_checkpoint", lambda self: self.step == 1 and not self.done, before=True
)


def trained_rows(out: Path, cycle: int) -> int:
    (epoch,) = {line["epoch"] for line in read_lines(out / f"cycle_{cycle}" / "metrics.jsonl")}
    assert epoch == 1
    return sum(line["sequences"] for line in read_lines(out / f"cycle_{cycle}" / "metrics.jsonl"))


FROM_BASE = {"start_from": "base", "max_per_prompt": None, "epochs": 1, "prompts_per_cycle": 6}


def test_base_trains_on_all_cycles(make, tmp_path):
    out = ran(
        make, tmp_path / "out", lr_decay=1e-6, lr_floor=1e-9, loraplus_lr_ratio=4, **FROM_BASE
    )
    kept = [cycle_line(out, cycle)["kept"] for cycle in (1, 2)]
    assert trained_rows(out, 1) == kept[0]
    assert trained_rows(out, 2) == sum(kept)  # of other prompts, so none is a duplicate
    first, second = (load_file(out / f"cycle_{cycle}" / WEIGHTS) for cycle in (1, 2))
    moved = [
        [state[name].abs().max() for name in state if "lora_B" in name] for state in (first, second)
    ]
    assert min(moved[0]) > 1e-4 > max(moved[1]), (
        "cycle 2, which learns nothing, begins where cycle 1 did"
    )


@pytest.mark.wide
def test_killed_in_training_on_all_cycles(make, tmp_path):
    out, killed = ran(make, tmp_path / "out", **FROM_BASE), tmp_path / "killed"
    kill_and_resume(main, make(killed, **FROM_BASE), KILL_IN_TRAINING)
    assert_equal(killed, out)


def moments(out: Path) -> dict:
    *_, last = sorted((out / "checkpoints").glob("step_*"))
    return torch.load(last / "state.pt", weights_only=True)["optimizer"]["state"][0]


def test_the_optimiser_goes_on_or_begins_anew(reference, make, tmp_path):
    out = ran(make, tmp_path / "out", optimizer_state="cycle")
    assert (out / "cycle_1" / WEIGHTS).read_bytes() == (
        reference / "cycle_1" / WEIGHTS
    ).read_bytes()
    assert (out / "cycle_2" / WEIGHTS).read_bytes() != (
        reference / "cycle_2" / WEIGHTS
    ).read_bytes()
    assert moments(out)["step"] == cycle_line(out, 2)["updates"]
    assert moments(reference)["step"] == sum(
        cycle_line(reference, cycle)["updates"] for cycle in (1, 2)
    )


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("prepare", [KILL_AT_ITS_END, KILL_IN_TRAINING])
def test_killed_in_training(reference, make, tmp_path, prepare):
    out = tmp_path / "out"
    kill_and_resume(main, make(out), prepare)
    assert_equal(out, reference)
    assert moments(out)["step"] == moments(reference)["step"]


def trainer(**attributes) -> RAFTTrainer:
    made = object.__new__(RAFTTrainer)
    vars(made).update(attributes)
    return made


def test_the_best_adapter_stays_beside_the_last_ones(tmp_path):
    made = trainer(cfg=OmegaConf.create({"keep_last_n_adapters": 1}), folder=SimpleNamespace(path=tmp_path),
                   trained=[1, 2, 4], best={"step": 1})  # fmt: skip
    for cycle in made.trained:
        made.adapter_folder(cycle).mkdir(parents=True)
    made._remove_adapters()
    assert [cycle for cycle in made.trained if made.adapter_folder(cycle).exists()] == [1, 4]


@pytest.mark.wide
def test_some_cycles_are_evaluated_and_rates_decay(make, tmp_path):
    changes = {"cycles": 5, "epochs": 1, "eval_every_n_cycles": 2, "keep_last_n_adapters": 1, "prompts_per_cycle": 3,
               "lr_decay": 0.5, "lr_floor": 2e-3}  # fmt: skip
    out = ran(make, tmp_path / "out", **changes)
    rates = [
        max(line["lr"] for line in read_lines(out / f"cycle_{cycle}/metrics.jsonl"))
        for cycle in (1, 2, 3)
    ]
    assert rates == pytest.approx([5e-3, 2.5e-3, 2e-3])
    scores = {cycle: of["correct"] for cycle, of in held_out(out).items()}
    assert list(scores) == [0, 2, 4, 5]
    del scores[0]
    chosen = max(scores, key=lambda cycle: scores[cycle])  # the first of equals
    assert {cycle for cycle in range(6) if (out / f"cycle_{cycle}" / "adapter").exists()} == {
        chosen,
        5,
    }
    assert (out / WEIGHTS).read_bytes() == (out / f"cycle_{chosen}" / WEIGHTS).read_bytes()
    before = outcome(out)
    ran(make, out, RESUME, **changes)
    assert outcome(out) == before


@pytest.mark.wide
@pytest.mark.parametrize(
    "stop", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.wide)]
)
def test_a_stopped_phase_goes_on_with_its_answers(make, tmp_path, stop):
    calls = itertools.count(1)
    prepare = signal_at(PhaseRecords, "append", lambda *_: next(calls) == 50, stop)
    out, changes = tmp_path / "out", {"cycles": 1, "eval_prompts": None, "epochs": 1}
    code, messages = forked(main, make(out, **changes), prepare=prepare)
    assert code == (130 if stop == signal.SIGINT else -signal.SIGKILL)
    assert stop == signal.SIGKILL or one_line_has(
        messages, "stopped in cycle 1", "all saved", RESUME
    )
    before = records(out, 1, "samples")
    ran(make, out, RESUME, **changes)
    samples = records(out, 1, "samples")
    assert samples[: len(before)] == before
    assert cycle_line(out, 1)["sampled_tokens"] == sum(len(r["tokens"]) for r in samples)


def kept_verdicts(out: Path, cycle: int = 1) -> set[str]:
    verdicts = {
        (r["prompt_id"], r["sample"]): r["verdict"] for r in records(out, cycle, "verdicts")
    }
    return {
        verdicts[r["prompt_id"], r["sample"]]
        for r in read_records(out / f"cycle_{cycle}/kept.jsonl")
    }


@pytest.mark.wide
def test_wrong_answers_are_trained_on_only_where_rewards_decide(make, tmp_path):
    """Wrong answers have the reward 0.5. A resumed run keeps its rule."""
    graded = {"verifier": {"_component_": "tests.kit.judges.Graded"}, "eval_prompts": None, "epochs": 1,
              "max_new_tokens": 8, "samples_per_prompt": 2}  # fmt: skip
    out = ran(make, tmp_path / "correct", **graded)
    assert kept_verdicts(out) == {"CORRECT"}
    line = cycle_line(out, 1)
    assert line["filter"] == {
        "not_correct": line["verdicts"]["WRONG"],
        "kept": line["verdicts"]["CORRECT"],
    }
    assert line["pass_rate"] == line["verdicts"]["CORRECT"] / line["answers"]
    out = ran(make, tmp_path / "rewarded", "keep=rewarded", **graded)
    assert cycle_line(out, 1)["pass_rate"] == 1
    ran(make, out, RESUME, "cycles=3", "keep=rewarded", **graded)
    assert [kept_verdicts(out, cycle) for cycle in (1, 2, 3)] == [{"CORRECT", "WRONG"}] * 3
