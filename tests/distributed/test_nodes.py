"""Runs on several ranks and machines: equal to one rank's, refused where machines differ, ended where one is lost.

The fast tests run each machine in a fork, with what torchrun would put into its environment. The wide ones run torchrun
in network namespaces.
"""

import json
import os
import shutil
import subprocess
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rocm_ext.recipes import grpo_rocm, lora_finetune_rocm
from safetensors.torch import load_file

from rocm_ext.base.errors import UserError
from rocm_ext.distributed import ranks
from rocm_ext.train import machines as nodes
from tests.kit import forks, grpo_runs, machines, raft_runs
from tests.kit.parity import finetune
from tests.kit.tiny import metrics, run_config, write_model, write_rows, write_yaml
from tests.recipes.test_resume import assert_one_line, at, outcome, pause

pytestmark = forks.several_ranks
SFT = lora_finetune_rocm.main


@pytest.fixture(scope="module")
def top(tmp_path_factory) -> Path:
    """A folder with a model and rows for 3 steps of an epoch, prompts, and pairs."""
    folder = tmp_path_factory.mktemp("nodes")
    raft_runs.write_world(folder)
    write_rows(folder / "rows.jsonl", 24)
    return folder


@pytest.fixture
def make(top, tmp_path):
    """``make(out, …)`` writes the YAML of an SFT run of 3 steps."""

    def make(out: Path | str = tmp_path / "out", **changes) -> Path:
        options = {"save_every_n_steps": 1, **changes}
        cfg = run_config(top / "base", top / "rows.jsonl", Path(out), **options)
        return write_yaml(tmp_path / f"{len(os.listdir(tmp_path))}.yaml", cfg)

    return make


@pytest.fixture(scope="module")
def alone(top) -> Path:
    """The output folder of the same run in one process."""
    cfg = run_config(top / "base", top / "rows.jsonl", top / "alone", save_every_n_steps=1)
    forks.succeed(SFT, write_yaml(top / "alone.yaml", cfg))
    return top / "alone"


def assert_same_curves(out: Path, expected: Path, loss: float = 1e-6) -> None:
    for key, tolerance in (("loss", loss), ("grad_norm", 10 * loss), ("lr", 0), ("tokens", 0)):
        assert metrics(out, key) == pytest.approx(metrics(expected, key), rel=tolerance, abs=0)


def assert_error(messages: str, *facts: str) -> None:
    """The last line of a rank is an error with these facts."""
    assert_one_line(messages.replace("[rank 0] ", "").replace("[rank 1] ", ""), *facts)


def run_machines(main, *each: tuple) -> list[tuple[int, str]]:
    """Run a recipe's ``main`` on several machines with a rank each.

    Args:
        main: of the recipe.
        each: for each machine the config, overrides, and a function to call before; None: the machine does not start.

    Returns:
        Exit code and messages of each machine that starts.
    """
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
              "WORLD_SIZE": str(len(each)), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # fmt: skip
    started = []
    for number, run in enumerate(each):
        if run is not None:
            path, overrides, before = run
            place = {**common, "RANK": str(number), "GROUP_RANK": str(number)}
            started.append(forks.start(main, path, overrides, partial(_prepare, place, before)))
    return [forks.wait(*each) for each in started]


def _prepare(place, before) -> None:
    os.environ.update(place)
    if before is not None:
        before()


def test_two_machines_equal_one(make, alone, tmp_path):
    out = tmp_path / "out"
    path = make(hardware_log_seconds=0.1)
    out.mkdir()
    (out / "hardware.machine1.jsonl").write_text("of an earlier run\n")
    for code, messages in run_machines(SFT, (path, (), None), (path, (), None)):
        assert code == 0, messages
    assert_same_curves(out, alone)
    names = [
        "adapter",
        "checkpoints",
        "config.yaml",
        "hardware.jsonl",
        "hardware.machine1.jsonl",
        "metrics.jsonl",
    ]
    assert sorted(os.listdir(out)) == [*names, "rows.json", "summary.json"]
    assert "earlier" not in (out / "hardware.machine1.jsonl").read_text()
    assert sorted(os.listdir(alone)) == sorted({*os.listdir(out)} - {"hardware.machine1.jsonl"})


def other_versions() -> None:
    nodes.version = lambda package: "9.9" if package == "torch" else "1.0"


@pytest.mark.wide(always=2)
@pytest.mark.parametrize(("what", "parts"), [
    ("config", ("batch_size (4 and 2)", "epochs (1 and 3)", "same config and overrides")),
    ("versions", ("torch (", " and 9.9)", "install the same versions")),
    ("model", ("the model's config.json", "copy base from one machine")),
    ("data", ("differ in dataset.", "the same data")),
    ("folder", ("is not shared", "does not see what", "Mount one folder under this path")),
])  # fmt: skip
def test_machines_that_differ_are_refused(make, top, tmp_path, monkeypatch, what, parts):
    here, there = tmp_path / "here", tmp_path / "there"
    for place, count, seed in (
        (here, 24, 0),
        (there, 23 if what == "data" else 24, 7 if what == "model" else 0),
    ):
        place.mkdir()
        write_rows(place / "rows.jsonl", count)
        shutil.copytree(top / "base", place / "base")
        if seed:
            (place / "base" / "config.json").write_text(
                (place / "base" / "config.json").read_text() + "\n"
            )
    out = "out" if what == "folder" else str(tmp_path / "out")
    path = make(out)
    path.write_text(
        path.read_text().replace(f"{top}/base", "base").replace(f"{top}/rows.jsonl", "rows.jsonl")
    )
    monkeypatch.setattr(nodes, "_PATIENCE", 0.5)
    overrides = ("batch_size=2", "epochs=3") if what == "config" else ()
    before = other_versions if what == "versions" else partial(os.chdir, there)
    monkeypatch.chdir(here)
    found = run_machines(SFT, (path, (), None), (path, overrides, before))
    monkeypatch.undo()
    for code, messages in found:
        assert code == 1
        assert_error(messages, *parts)
    assert not (tmp_path / "out" / "config.yaml").exists()
    assert not list(tmp_path.rglob(".machine*"))


def remember_names(out: Path, what: str) -> None:
    """Have this process remember which files exist in ``out``, as an NFS client does until it lists the folder."""
    known: dict[Path, bool] = {}
    exists, listdir = Path.exists, os.listdir

    def remembered(path: Path, **options: bool) -> bool:
        if path.parent != out or not path.name.startswith(".machine"):
            return exists(path, **options)
        if path not in known:
            found = exists(path, **options)
            if found == (
                what == "created"
            ):  # a client may remember those that exist, or those that do not
                return found
            known[path] = found
        return known[path]

    def asks_the_server(folder: Path) -> list[str]:
        known.clear()
        return listdir(folder)

    Path.exists = remembered  # type: ignore[method-assign]
    nodes.listdir = asks_the_server


@pytest.mark.parametrize("what", ["created", "removed"])
def test_a_folder_that_is_shared_with_delay_is_refused(make, tmp_path, what):
    path = make()
    before = partial(remember_names, tmp_path / "out", what)
    for code, messages in run_machines(SFT, (path, (), None), (path, (), before)):
        assert code == 1
        assert_error(
            messages.splitlines()[-1], f"which files others have {what}", "lookupcache=none"
        )


def test_a_machine_that_does_not_come_is_named(make, monkeypatch):
    monkeypatch.setattr(ranks, "_MEET", 0.5)
    ((code, messages),) = run_machines(SFT, (make(), (), None), None)
    assert code == 1
    assert_error(messages, "no sign of rank 1")


def test_a_rank_waits_for_the_others_no_longer_than_its_timeout(tmp_path):
    def wait():
        here = ranks.Ranks.from_env(torch.device("cpu"), timeout=1.0)
        if here.is_main:
            here.barrier()
        time.sleep(5)

    (main, messages), _ = forks.forked_ranks(wait, tmp_path)
    assert main == 1
    assert "Timed out" in messages


def test_the_ranks_of_other_machines_end_with_a_rank(make):
    """One machine says its error, the other one torch's."""

    def fail():
        def gather(*_):
            raise UserError("this machine is on fire")

        ranks.Ranks.gather = gather

    path = make()
    (code, messages), (other_code, other_messages) = run_machines(
        SFT, (path, (), None), (path, (), fail)
    )
    assert (code, other_code) == (1, 1)
    assert_error(other_messages, "this machine is on fire")
    assert "onnection" in messages


DORA = {"use_dora": True, "apply_lora_to_output": True}


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(("family", "lora", "changes"), [
    ("qwen2", {}, {"tokens_per_micro_batch": 100}),
    ("llama", DORA, {"enable_activation_checkpointing": True, "clip_grad_norm": 0.5}),
])  # fmt: skip
def test_two_ranks_equal_one(tmp_path, family, lora, changes):
    base = write_model(tmp_path / "base", family, initializer_range=0.1)
    rows = write_rows(
        tmp_path / "rows.jsonl", 17
    )  # the third step of an epoch has one row for two ranks
    cfg = run_config(base, rows, tmp_path / "one", epochs=2, **changes)
    cfg["model"] |= lora
    cfg["dataset_val"] = cfg["dataset"]
    losses = "val_loss"
    if lora:
        cfg["dataset_val"] = {"other": cfg["dataset"], "same": cfg["dataset"]}
        losses = "val_loss/same"
        second = write_rows(tmp_path / "second.jsonl", 4, start=13)
        second.write_text(second.read_text().replace("{", '{"weight": 0.25, ', 2))
        one = {**cfg["dataset"], "split": "train[:13]", "weight": 1}
        cfg["dataset"] = [one, {**cfg["dataset"], "source": str(second), "weight": 2.5}]
    finetune(cfg)

    forks.succeed_on_ranks(
        SFT, write_yaml(tmp_path / "two.yaml", {**cfg, "output_dir": str(tmp_path / "two")})
    )
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["ranks"] == 2
    for key, tolerance in [
        ("loss", 1e-6),
        (losses, 1e-6),
        ("grad_norm", 1e-5),
        ("lr", 0),
        ("tokens", 0),
    ]:
        found, expected = (metrics(tmp_path / name, key) for name in ("two", "one"))
        counts = {"val_loss": 2, "val_loss/same": 3}  # also before the first step
        assert len(expected) == counts.get(key, 6)
        assert found == pytest.approx(expected, rel=tolerance, abs=0)
    found, expected = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
        for name in ("two", "one")
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def sft_run(top: Path, out: Path) -> Path:
    return write_yaml(out.with_suffix(".yaml"), run_config(top / "base", top / "rows.jsonl", out))


RECIPES = {  # DPO trains as SFT does, and RAFT has the loop of GRPO
    "lora_finetune_rocm": (SFT, sft_run, outcome),
    "grpo_rocm": (grpo_rocm.main, grpo_runs.write_run, grpo_runs.outcome),
}


@pytest.mark.wide
@pytest.mark.parametrize("recipe", RECIPES)
def test_torchrun_on_two_machines_equals_one(top, tmp_path, recipe):
    main, write, read = RECIPES[recipe]
    one, two = tmp_path / "one" / "out", tmp_path / "two" / "out"
    for out in (one, two):
        out.parent.mkdir()
    forks.succeed_on_ranks(main, write(top, one))
    path = write(top, two)
    with machines.two_machines() as pair:
        started = [machine.tune(recipe, path) for machine in pair]
        for process in started:
            errors = process.communicate(timeout=240)[1]
            assert process.returncode == 0, errors
    assert read(two) == read(one)


@pytest.mark.wide
@pytest.mark.parametrize("what", ["the first ends", "the second ends"])
@pytest.mark.parametrize("count", [1, 2], ids=["one rank each", "two ranks each"])
def test_torchrun_loses_a_machine(make, tmp_path, what, count):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert forks.forked(SFT, make(whole, epochs=4))[0] == 0
    with machines.two_machines() as pair:
        path = make(metric_logger=at(3, pause, tmp_path / "go"), epochs=4)
        started = [machine.tune("lora_finetune_rocm", path, ranks=count) for machine in pair]
        wait_for(tmp_path / "go.waiting", started)
        lost = started.pop(0 if what == "the first ends" else 1)
        lost.kill()
        lost.communicate(timeout=60)
        (tmp_path / "go").touch()
        (left,) = started
        errors = left.communicate(timeout=120)[1]
        assert left.returncode == 1, errors
        assert "onnection" in errors
    messages = forks.succeed(SFT, make(epochs=4, resume_from_checkpoint=True))
    assert "resumed from" in messages
    assert_same_curves(out, whole, loss=1e-5)


def wait_for(path: Path, processes: list[subprocess.Popen]) -> None:
    """Wait for a file, as long as the processes run."""
    while not path.exists():
        for process in processes:
            assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
