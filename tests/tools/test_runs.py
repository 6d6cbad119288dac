"""Every benchmark really runs, on tiny work: sides are forks of this process, and peers the packages that are here."""

import json
import multiprocessing
import os
import runpy
import sys
from contextlib import ExitStack
from dataclasses import replace

import pytest

from tests.kit.programs import as_forks
from tools.benchmarks import __main__ as command
from tools.benchmarks import cycle, distil, grpo, protocol, rl, sampling, training, work
from tools.gpu.parts import chosen
from tools.gpu.runner import Runner

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="sides are forks here")


def run_module(arguments: list[str]) -> None:
    """Do what ``python -m MODULE …`` does."""
    sys.argv = arguments[1:]
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)


@pytest.fixture
def base(tmp_path, pocket_dir, monkeypatch):
    """A folder with the pocket model; sides are forks."""
    (tmp_path / "pocket").symlink_to(pocket_dir)
    monkeypatch.setattr(protocol, "subprocess", as_forks(run_module))
    return tmp_path


@pytest.mark.wide
@pytest.mark.parametrize(("name", "peers"), [
    ("sft", ("torchtune as shipped", "TRL + PEFT")), ("dpo", ("torchtune", "TRL + PEFT, reference first")),
    ("sampling", (sampling.ENGINE, "transformers generate", "transformers continuous batching", "torchtune generate")),
])  # fmt: skip
def test_sides_are_compared(base, monkeypatch, capsys, name, peers):
    monkeypatch.setattr(training, "GATE", 2)
    monkeypatch.setattr(sampling, "TRACE", sampling.Trace(prompts=2, samples=2, median=8, most=32))
    task = work.Task(name, "tiny", 512, "fp32", peers)
    monkeypatch.setattr(command, "SMALL_SET", (task,))
    out = base / "rows.json"
    options = ["--work", name, "--rounds", "1", "--installed", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *options])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 0, capsys.readouterr().err
    rows = json.loads(out.read_text())["rows"]
    assert {row["peer"].partition(", by ")[0] for row in rows} == set(peers)
    assert all(row["speedup"] > 0 for row in rows)
    assert all(row["loss_difference"] < 1e-5 for row in rows if name != "sampling")


@pytest.mark.wide
@pytest.mark.parametrize("drawn", [False, True])
def test_grpo_computes_the_gradients_of_trl(base, drawn):
    changes = ["prompts_per_step=4", "samples_per_prompt=2", "groups_per_update=null"]
    cfg = grpo.prepare(base, changes, drawn=drawn)
    with ExitStack() as stack:
        sides = rl.start(
            stack, base / "gate", base, "grpo", cfg, grpo.describe, rl.GATE, rl.GATE, installed=True
        )
        assert rl.check([side.ask(steps=rl.GATE) for side in sides]) < rl.TOLERANCE


@pytest.mark.wide
def test_distillation_computes_the_gradients_of_trl(base):
    small = replace(distil.POCKET, changes=[*distil.POCKET.changes, "prompts_per_step=64"])
    cfg = distil.prepare(base, small)
    with ExitStack() as stack:
        sides = rl.start(
            stack,
            base / "gate",
            base,
            "distil",
            cfg,
            distil.describe,
            rl.GATE,
            rl.GATE,
            installed=True,
        )
        assert rl.check([side.ask(steps=rl.GATE) for side in sides]) < rl.TOLERANCE


@pytest.mark.wide
def test_a_cycle_is_measured(base, monkeypatch):
    """The verifier tosses a coin, because the pocket model of the tests is hardly ever right."""
    quick = ["verifier={_component_: tests.kit.judges.Coin}", "drop_truncated=False", "max_new_tokens=8",
             "eval_prompts=null", "verify_workers=1", "seed=1"]  # fmt: skip
    side = protocol.Side
    monkeypatch.setattr(
        cycle, "Side", lambda name, python, args, log: side(name, python, [*args, *quick], log)
    )
    (row,) = cycle.measure(base, runs=1, prompts=2)
    assert 0 < row["outside"] < 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["machine", "numerics", "attention", "dtypes", "checkpointing", "four-bit", "gguf", "gguf-0.5b", "run-sft",
             "grpo-0.5b", "raft-0.5b", "distil-4b", "profile-sft-7b"]
)  # fmt: skip
def test_parts_for_gpus_run_on_a_cpu(tmp_path, monkeypatch, name):
    runner = Runner("cpu", True, tmp_path, 10)
    monkeypatch.setattr(runner, "_processes", multiprocessing.get_context("fork"))
    (part,) = [part for part in chosen([name]) if part.name == name]
    result = runner.run(part)
    assert result["status"] == "ok", result
    assert result["rows"]
