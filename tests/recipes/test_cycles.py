"""Cycles that keep nothing, replayed answers, adapters, optimisers, evaluations."""

import json
import logging
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from rocm_ext.recipes.raft_rocm import main
from safetensors.torch import load_file

from rocm_ext import cli
from rocm_ext.base import log
from rocm_ext.rl.cycles import CycleTrainer
from rocm_ext.rl.records import PhaseRecords, Sample
from rocm_ext.rl.selection import replay
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.intervals import mcnemar
from rocm_ext.runs.progress import progress
from tests.kit.forks import forked, forked_ranks, succeed
from tests.kit.lines import one_line_has
from tests.kit.raft_runs import WEIGHTS, assert_equal, cycle_row, outcome, records

pytest.importorskip("resource", reason="forks and POSIX signals")
RESUME = "resume_from_checkpoint=True"


def ran(make, out: Path, *overrides: str, **changes) -> Path:
    succeed(main, make(out, **changes), *overrides)
    return out


def lines(out: Path, cycle: int, phase: str) -> list[dict]:
    found = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if (line["cycle"], line["phase"]) == (cycle, phase)]


@pytest.fixture(scope="module")
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
    rows = json.loads((out / "summary.json").read_text())["cycles"]
    assert [(row["cycle"], row.get("skipped")) for row in rows] == [(0, None), (1, None), (2, True), (3, True)]
    assert (rows[2]["samples"], rows[2]["kept"], rows[2]["verdicts"]) == (16, 0, {"WRONG": 16})
    assert rows[2]["seconds"]["sample"] > 0
    asked = [{r["prompt_id"] for r in records(out, n, "samples")} for n in (1, 2, 3)]
    assert len(set.union(*asked)) == 12  # each cycle asked other prompts
    assert not (out / "cycle_4").exists()


def test_tools_understand_skipped_cycles(dry, reference, tmp_path, capsys):
    out, _, messages = dry
    assert re.search(r"\n +2 +16 +0\.0% +0 +- +- +skipped ", messages)
    run = RunFolder(out)
    assert [cycle.state for cycle in run.cycles] == ["complete", "complete", "skipped", "skipped"]
    assert run.finished
    assert progress(out).items() >= {"cycle": 3, "phase": "skipped", "finished": True}.items()
    page = tmp_path / "page.html"
    assert cli.main(["report", str(out), "--output", str(page)]) == 0
    assert "1, 2 skipped" in page.read_text()
    capsys.readouterr()
    cli.main(["compare", str(reference), str(out), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["measured"]["cycles"] == [2, 1]
    assert not [note for note in found["notes"] if "has not finished" in note]


def test_resuming_an_ended_run_repeats_nothing(dry, make, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(dry[0], out)
    messages = succeed(main, make(out, **dry[1]), "cycles=4", RESUME)
    assert "stopped: no answer was kept in 2 cycles in a row" in messages
    assert_equal(out, dry[0])


@pytest.mark.wide
def test_a_run_without_right_answers_says_why(make, tmp_path):
    out = tmp_path / "out"
    # a part of the answers is right, but their rewards are too low
    changes = {"max_empty_cycles": 1, "verifier": {"_component_": "tests.kit.judges.Until", "right": 0.4}}
    for code, messages in forked_ranks(main, make(out, **changes)):
        assert code == 1
        assert one_line_has(messages, "no cycle was trained", "Cycle 1", "48 answers")
        assert one_line_has(messages, "48 below threshold", "0 kept", "overwrite_output_dir=True")
        assert "Traceback" not in messages
    assert not (out / "adapter").exists()
    assert RunFolder(out).cycles[-1].state == "skipped"
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
    assert replayed(per_prompt=None, deduplicate=False) == newest + middle + [("a", 1), ("a", 2), ("b", 3)]
    assert replayed(1) == newest
    assert replayed(0) == []


def kill_in_training() -> None:
    """Patch the trainer so that the first checkpoint of cycle 2 kills the process when it is written."""
    original = CycleTrainer.save_checkpoint

    def save_checkpoint(self):
        original(self)
        if self.step == 1 and self.done:
            assert self.done < self.total_steps
            os.kill(os.getpid(), signal.SIGKILL)

    CycleTrainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]


def trained_rows(out: Path, cycle: int) -> int:
    return json.loads((out / f"cycle_{cycle}" / "summary.json").read_text())["rows"]["rows"]


FROM_BASE = {"start_from": "base", "max_per_prompt": None, "epochs": 1, "prompts_per_cycle": 6}


def test_base_trains_on_all_cycles(make, tmp_path):
    out = ran(make, tmp_path / "out", lr_decay=1e-6, lr_floor=1e-9, loraplus_lr_ratio=4, **FROM_BASE)
    kept = [cycle_row(out, cycle)["kept"] for cycle in (1, 2)]
    assert trained_rows(out, 1) == kept[0]
    assert trained_rows(out, 2) == sum(kept)  # of other prompts, so none is a duplicate
    first, second = (load_file(out / f"cycle_{cycle}" / WEIGHTS) for cycle in (1, 2))
    moved = [[state[name].abs().max() for name in state if "lora_B" in name] for state in (first, second)]
    assert min(moved[0]) > 1e-4 > max(moved[1]), "cycle 2, which learns nothing, begins where cycle 1 did"


@pytest.mark.wide
def test_killed_in_training_on_all_cycles(make, tmp_path):
    out, killed = ran(make, tmp_path / "out", **FROM_BASE), tmp_path / "killed"
    assert forked(main, make(killed, **FROM_BASE), prepare=kill_in_training)[0] == -signal.SIGKILL
    assert not (killed / "cycle_2" / "adapter").exists()
    ran(make, killed, RESUME, **FROM_BASE)
    assert_equal(killed, out)


def moments(out: Path) -> dict:
    *_, last = sorted((out / "checkpoints").glob("step_*"))
    return torch.load(last / "state.pt", weights_only=True)["optimizer"]["state"][0]


def test_the_optimiser_goes_on_or_begins_anew(reference, make, tmp_path):
    out = ran(make, tmp_path / "out", optimizer_state="cycle")
    assert (out / "cycle_1" / WEIGHTS).read_bytes() == (reference / "cycle_1" / WEIGHTS).read_bytes()
    assert (out / "cycle_2" / WEIGHTS).read_bytes() != (reference / "cycle_2" / WEIGHTS).read_bytes()
    assert moments(out)["step"] == cycle_row(out, 2)["steps"]
    assert moments(reference)["step"] == sum(cycle_row(reference, cycle)["steps"] for cycle in (1, 2))


def kill_at_the_end_of_training() -> None:
    """Patch the trainer so that the checkpoint at the end of cycle 1 kills the process before it is written."""
    original = CycleTrainer.save_checkpoint

    def save_checkpoint(self):
        if self.step == 1 and not self.done:
            os.kill(os.getpid(), signal.SIGKILL)
        original(self)

    CycleTrainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("prepare", [kill_at_the_end_of_training, kill_in_training])
def test_killed_in_training(reference, make, tmp_path, prepare):
    out = tmp_path / "out"
    assert forked(main, make(out), prepare=prepare)[0] == -signal.SIGKILL
    ran(make, out, RESUME)
    assert_equal(out, reference)
    for cycle in (1, 2):
        assert [line["steps"] for line in lines(out, cycle, "train")] == [cycle_row(out, cycle)["steps"]]
    assert moments(out)["step"] == moments(reference)["step"]


@pytest.mark.wide
def test_some_cycles_are_evaluated_and_some_adapters_stay(make, tmp_path):
    out = ran(
        make, tmp_path / "out", cycles=5, epochs=1, eval_every_n_cycles=2, keep_last_n_adapters=1, prompts_per_cycle=3,
    )  # fmt: skip
    assert [cycle for cycle in range(6) if (out / f"cycle_{cycle}" / "eval.json").exists()] == [0, 2, 4, 5]
    rows = json.loads((out / "summary.json").read_text())["cycles"]
    scores = {row["cycle"]: row["held_out"]["correct"] for row in rows if "held_out" in row and row["cycle"]}
    assert list(scores) == [2, 4, 5]
    chosen = max(scores, key=lambda cycle: (scores[cycle], cycle))
    assert {cycle for cycle in range(6) if (out / f"cycle_{cycle}" / "adapter").exists()} == {chosen, 5}
    assert (out / WEIGHTS).read_bytes() == (out / f"cycle_{chosen}" / WEIGHTS).read_bytes()
    before = outcome(out)
    ran(make, out, RESUME, cycles=5, epochs=1, eval_every_n_cycles=2, keep_last_n_adapters=1, prompts_per_cycle=3)
    assert outcome(out) == before


def test_the_choice_is_printed_with_its_test(reference, make, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(reference, out)
    messages = succeed(main, make(out), RESUME)
    right = [{r["prompt_id"] for r in records(out, n, "verdicts", "eval") if r["reward"]} for n in range(3)]
    chosen = 2 if len(right[2]) >= len(right[1]) else 1
    gained, lost = len(right[chosen] - right[0]), len(right[0] - right[chosen])
    p = mcnemar(lost, gained)
    assert (
        f"cycle {chosen} against the initial model: {gained} of 6 held-out prompts gained, {lost} lost; "
        f"by chance with p = {p:.2g} (McNemar), {min(1, 2 * p):.2g} as the best of 2 evaluations (Bonferroni)"
    ) in messages


@pytest.mark.parametrize("stop", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.wide)])
def test_a_stopped_phase_goes_on_with_its_answers(make, tmp_path, stop):
    def prepare() -> None:
        original, done = PhaseRecords.append, []

        def append(self, record):
            original(self, record)
            done.append(record)
            if len(done) == 50:
                os.kill(os.getpid(), stop)

        PhaseRecords.append = append  # type: ignore[method-assign]

    out, changes = tmp_path / "out", {"cycles": 1, "eval_prompts": None, "epochs": 1}
    code, messages = forked(main, make(out, **changes), prepare=prepare)
    assert code == (130 if stop == signal.SIGINT else -signal.SIGKILL)
    assert stop == signal.SIGKILL or one_line_has(messages, "stopped in cycle 1", "all saved", RESUME)
    before = records(out, 1, "samples")
    ran(make, out, RESUME, **changes)
    (line,) = lines(out, 1, "sample")
    samples = records(out, 1, "samples")
    assert samples[: len(before)] == before
    assert line["tokens"] == sum(len(r["tokens"]) for r in samples)
    assert cycle_row(out, 1)["seconds"]["sample"] == line["seconds"]


def test_progress_prints_an_estimate(monkeypatch, messages):
    now = [0.0]
    monkeypatch.setattr(log.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(log.sys.stderr, "isatty", lambda: False, raising=False)
    shown = log.Progress(10, 0, True, "cycle 1 sample")
    monkeypatch.setattr(log.log, "level", logging.INFO)
    log.log.manager._clear_cache()  # which levels are enabled
    for seconds in (4, 40, 80):
        now[0] = seconds
        shown.update("x")
    assert messages == [
        "cycle 1 sample 1/10  x", "cycle 1 sample 2/10  x  2m40s left", "cycle 1 sample 3/10  x  3m07s left",
    ]  # fmt: skip
