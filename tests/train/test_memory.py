"""A run that does not fit into memory ends in one line that says what to change, and the changes help."""

import re
from pathlib import Path

import pytest
import torch
from rocm_ext.recipes import grpo_rocm
from rocm_ext.recipes import lora_finetune_rocm as sft

from rocm_ext import cli
from rocm_ext.model.build import CausalLM
from rocm_ext.sampling.slots import SlotBatch
from rocm_ext.train import lifecycle
from rocm_ext.train.learner import Learner
from tests.kit import grpo_runs, raft_runs
from tests.kit.forks import forked, forked_ranks, several_ranks
from tests.kit.tiny import run_config, write_model, write_rows, write_yaml


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    top = tmp_path_factory.mktemp("memory")
    write_model(top / "base")
    write_rows(top / "rows.jsonl", 24)
    return top


@pytest.fixture
def run(folder, tmp_path):
    """``run(key=value, …)``: the exit code and the last line of a run with these overrides, in a fork."""
    cfg = run_config(folder / "base", folder / "rows.jsonl", tmp_path / "out", max_steps_per_epoch=2)
    path = write_yaml(tmp_path / "run.yaml", cfg)

    def run(*overrides: str) -> tuple[int, str]:
        code, said = forked(sft.main, path, *overrides)
        assert "Traceback" not in said
        return code, said.splitlines()[-1]

    run.path = path
    return run


@pytest.fixture
def budget(monkeypatch):
    """``budget(n)``: the device has n bytes."""
    return lambda size: monkeypatch.setattr(lifecycle, "memory_budget", lambda *args, **kwargs: (size, "the test's"))


def gib(text: str) -> float:
    number, unit = re.search(r"([\d.]+) (MiB|GiB)", text).groups()
    return float(number) * (2**30 if unit == "GiB" else 2**20)


@pytest.mark.wide
def test_a_plan_above_the_budget_is_refused_before_the_weights_are_read(run, budget, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "read_weights", lambda self: pytest.fail("the weights are read"))
        budget(2**20)
        code, line = run()
        assert code == 1
        assert re.match(r"error: the memory plan needs [\d.]+ MiB and has 1\.0 MiB\. Set ", line)
        assert line.endswith("over_budget=try starts the run regardless")
        budget(int(0.8 * gib(line)))
        code, line = run()
        assert code == 1
    ways = re.findall(r"(?:Set|or) (\w+=\w+(?: \w+=\w+)*) \(plans", line)
    assert len(ways) == 2, line
    for way in ways:
        assert run(*way.split(), "overwrite_output_dir=True")[0] == 0, way


@pytest.mark.wide
def test_a_plan_above_the_budget_may_be_tried_and_an_evaluation_is_not_refused(run, folder, budget, capsys):
    budget(2**20)
    assert run("over_budget=try", "save_every_n_steps=1")[0] == 0
    assert run("resume_from_checkpoint=True", "save_every_n_steps=1")[0] == 0  # it has shown that it fits
    assert run("overwrite_output_dir=True")[0] == 1
    assert "over_budget is 'perhaps'; expected refuse or try" in run("over_budget=perhaps")[1]
    code = cli.main(["eval", "--config", str(run.path), "--data", str(folder / "rows.jsonl"), "--json"])
    assert (code, "perplexity" in capsys.readouterr().out) == (0, True)


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of 60 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
    ids=["a GPU", "a CPU"],
)
def test_out_of_memory_in_training(run, monkeypatch, error):
    def forward(self, batch):
        raise error

    monkeypatch.setattr(CausalLM, "forward", forward)
    code, line = run()
    assert code == 75  # EX_TEMPFAIL
    assert re.match(rf"error: out of memory at [\d.]+ [MG]iB: .*{str(error)[-12:]}", line)
    assert re.search(r"Planned for training: [\d.]+ MiB of [\d.]+ GiB\. Set \w+=", line)
    assert "enable_activation_checkpointing=True (plans " in line
    assert "tokens_per_micro_batch=" in line
    assert "resume_from_checkpoint=True continues" in line


@pytest.mark.wide
@several_ranks
def test_out_of_memory_on_two_ranks(run, monkeypatch):
    """Planning changes must not touch the sharded model."""

    def forward(self, batch):
        raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(CausalLM, "forward", forward)
    for code, said in forked_ranks(sft.main, run.path):
        assert code == 75, said
        assert "Traceback" not in said
        assert "enable_activation_checkpointing=True (plans " in said


def test_another_runtime_error_keeps_its_traceback(run, monkeypatch):
    def forward(self, batch):
        raise RuntimeError("HIP error: invalid device function")

    monkeypatch.setattr(CausalLM, "forward", forward)
    with pytest.raises(AssertionError, match="Traceback"):
        run()


def test_out_of_memory_in_sampling(tmp_path, monkeypatch):
    def step(self):
        raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 1.00 GiB.")

    world = raft_runs.write_world(tmp_path / "world")
    monkeypatch.setattr(SlotBatch, "step", step)
    code, said = forked(grpo_rocm.main, grpo_runs.write_run(world, tmp_path / "out"), "engine.slots=64")
    line = said.splitlines()[-1]
    assert code == 75, said
    assert "Set engine.slots=32 or max_new_tokens=6. resume_from_checkpoint=True continues" in line
