"""The scripts in examples/python run, and reach the scores of the recipes that they write out."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rocm_ext import training

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
PAIRS = [{"prompt": "What is 1 + 2?", "chosen": "3", "rejected": "4"}] * 3
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def script(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_grpo(pocket_dir, capsys):
    script("grpo").main(str(pocket_dir), steps=1, prompts=24, passes=2)
    assert capsys.readouterr().out.count("% right") == 2
    assert Path("demo", "python_grpo", "adapter", WEIGHTS).is_file()


def test_dpo(pocket_dir, capsys):
    with training.open("cpu_pocket", f"pocket={pocket_dir}") as model:
        model.export("demo/raft/adapter")
    Path("demo", "raft", "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    script("dpo").main(str(pocket_dir), epochs=4, pairs_per_step=2)
    assert "8 steps; accuracy of the last: 100%" in capsys.readouterr().out


def test_distillation(pocket_dir, capsys):
    with training.open("cpu_pocket", f"pocket={pocket_dir}") as model:
        model.forward_backward(PAIRS_AS_ROWS)
        model.optim_step(lr=1e-2)
        model.export("teacher")
    script("distillation").main(str(pocket_dir), teacher="teacher", steps=2, prompts=8)
    assert capsys.readouterr().out.count("divergence") == 2


PAIRS_AS_ROWS = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS]


# ---- the scores, on the pocket model of `make demo`


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A folder in which the pocket model, SFT, RAFT and its pairs are made."""
    folder = tmp_path_factory.mktemp("demo")
    call(folder, "rocm-ext", "pocket", "demo/pocket")
    call(folder, "tune", "run", "lora_finetune_rocm", "--config", "cpu_pocket")
    call(folder, "tune", "run", "raft_rocm", "--config", "cpu_pocket_raft", "cycles=1")
    call(folder, "rocm-ext", "pairs", "demo/raft")
    return folder


def call(folder, program, *arguments):
    """Run a program of this environment, without the tests' limit of one thread; return what it prints."""
    path = Path(sys.executable).with_name(program)
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [str(path), *arguments]
    ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def interval(folder, adapter):
    """The 95 % interval of an adapter's share of right answers."""
    scores = call(folder, "rocm-ext", "eval", "cpu_pocket_raft", "--adapter", adapter, "--json")
    return json.loads(scores)["interval"]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "recipe"), [
    ("grpo", "grpo"), ("dpo", "dpo"), ("distillation", "distil"),
])  # fmt: skip
def test_a_script_scores_as_its_recipe(demo, name, recipe):
    call(demo, "tune", "run", f"{recipe}_rocm", "--config", f"cpu_pocket_{recipe}")
    call(demo, "python", str(EXAMPLES / f"{name}.py"))
    low, high = interval(demo, f"demo/{recipe}/adapter")
    ours = interval(demo, f"demo/python_{recipe}/adapter")
    assert ours[0] <= high
    assert ours[1] >= low
