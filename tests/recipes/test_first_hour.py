"""What a new user meets first: a typo, the wrong recipe, no model yet, a config to check, a short run."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from rocm_ext.recipes import lora_finetune_rocm, raft_rocm

from rocm_ext import cli, config
from rocm_ext.base import registry
from rocm_ext.base.errors import UserError
from tests.kit.raft_runs import loaded, write_run
from tests.kit.tiny import exit_code, run_config, write_yaml

LORA = "llama3_1/8B_lora_single_device"  # torchtune's own configs, which name no recipe
PREFERENCES = "llama3_1/8B_lora_dpo_single_device"
CONFIG = {
    registry.SFT: "strix_halo_qwen7b",
    registry.RAFT: "strix_halo_qwen7b_raft",
    registry.GRPO: "strix_halo_qwen3_4b_grpo",
    registry.DPO: "strix_halo_qwen3_4b_dpo",
}


@pytest.mark.parametrize("recipe", CONFIG)
def test_a_config_of_another_recipe_names_its_command(recipe):
    theirs = [
        (LORA, registry.SFT),
        (PREFERENCES, registry.DPO),
    ]  # torchtune's configs name no recipe
    for name, its in [*((name, its) for its, name in CONFIG.items()), *theirs]:
        if recipe == its:
            assert config.load(recipe, name, ["hardware=cpu"]).recipe == recipe
            continue
        with pytest.raises(UserError, match=rf"start it with `tune run {its} --config {name}`$"):
            config.load(recipe, name, ["hardware=cpu"])


@pytest.mark.parametrize(("name", "overrides", "command"), [
    ("cpu_pocket", [], "rocm-ext pocket demo/pocket"),
    ("strix_halo_llama3_2_1b", ["model.checkpoint_dir=/disk/Llama-3.2-1B-Instruct"],
     "tune download meta-llama/Llama-3.2-1B-Instruct --output-dir /disk/Llama-3.2-1B-Instruct"),
    ("strix_halo_qwen7b", ["model.checkpoint_dir=models/Qwen3-8B"],
     "tune download Qwen/Qwen3-8B --output-dir models/Qwen3-8B"),
    ("strix_halo_qwen7b", ["model.checkpoint_dir=models/mine"], "OWNER/mine --output-dir models/mine"),
    (LORA, ["checkpointer.checkpoint_dir=/none/Meta-Llama-3.1-8B-Instruct"],
     "tune download meta-llama/Meta-Llama-3.1-8B-Instruct --output-dir /none/Meta-Llama-3.1-8B-Instruct"),
])  # fmt: skip
def test_a_missing_model_names_its_download(name, overrides, command, capsys):
    code = exit_code(lora_finetune_rocm.main, "--config", name, "hardware=cpu", *overrides)
    *_, last = capsys.readouterr().err.splitlines()
    assert code == 1
    assert last.startswith("error: the model's folder ")
    assert last.endswith(command)


JUDGES = """
from rocm_ext.verifiers import Result, Verdict, Verifier

class Bool(Verifier):
    def __call__(self, completion, row):
        return True

class Group(Verifier):
    def judge_group(self, completions, row):
        return [Result(Verdict.CORRECT, 1.0)]

class Half(Verifier):
    def __call__(self, completion, row):
        open("calls", "a").write("x")
        if row["prompt"].endswith(" 0?"):
            raise ValueError("not this row")
        return Result(Verdict.CORRECT, 1.0)

def make():
    return plain

def plain(completion):
    return Result(Verdict.CORRECT, 1.0)

def signature(completions, threshold):
    return [1.0]
"""


@pytest.fixture
def judges(folder, tmp_path, monkeypatch):
    """``judges(verifier)``: the set-up of a run with the verifiers above, as far as it needs no weights."""
    (tmp_path / "judges.py").write_text(JUDGES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "judges", raising=False)

    def judges(verifier: dict) -> None:
        path = write_run(folder, tmp_path / "out", verifier=verifier)
        loaded(raft_rocm.RAFT, path).check()

    return judges


@pytest.mark.parametrize(("verifier", "found"), [
    ({"_component_": "judges.Bool"}, "verifier judges.Bool fails on a trial answer: Bool returned bool, not a "),
    ({"_component_": "judges.Group"}, "verifier judges.Group fails on a trial answer: ValueError: Group.judge_"),
    ({"_component_": "judges.make"}, "verifier judges.make fails on a trial answer: TypeError: plain() takes 1 "),
    ({"_component_": "rocm_ext.verifiers.RewardFunction", "function": "judges.signature"}, "field 'threshold'"),
    ({"_component_": "rocm_ext.verifiers.Command", "command": ["false"]}, "false ended with 1"),
    ({"_component_": "rocm_ext.verifiers.All", "verifiers": [{"_component_": "judges.Bool"}]}, "returned bool"),
])  # fmt: skip
def test_a_verifier_that_cannot_judge_ends_the_set_up(judges, tmp_path, verifier, found):
    with pytest.raises(UserError) as refused:
        judges(verifier)
    assert found in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists(), "nothing was sampled"


def test_a_row_s_fault_is_not_the_verifier_s(judges, tmp_path):
    """The first row's answer fails and another row's does not; the trial ends with the first verdict."""
    judges({"_component_": "judges.Half"})
    assert (tmp_path / "calls").read_text() == "xx"


@pytest.fixture
def validate(capsys):
    """``validate(main, *arguments)``: exit code and last line of what `rocm-ext validate` starts."""

    def validate(main, *arguments) -> tuple[int, str]:
        code = exit_code(main, "--config", *arguments, "validate_only=True")
        return code, (capsys.readouterr().err.splitlines() or [""])[-1]

    return validate


def test_validate_starts_the_config_s_recipe(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr("rocm_ext.machine.environment.replace_process", started.append)
    monkeypatch.setattr(
        "rocm_ext.machine.environment.preset", lambda profile: started.append(profile.name)
    )
    tune = [sys.executable, "-m", "torchtune._cli.tune", "run"]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(Path(__file__).parents[2] / "examples/layer_decay", "mine")
    options = ["--config", "mine/my_run.yaml", "epochs=2"]
    cli.main(["validate", *options])
    assert started.pop() == [*tune, "mine/layer_decay.py", *options, "validate_only=True"]
    cli.main(["validate", "--config", "cpu_pocket_raft", "epochs=2"])
    script = str(registry.find(registry.RAFT).file)
    options = ["--config", "cpu_pocket_raft", "epochs=2", "validate_only=True"]
    assert started == ["cpu", [sys.executable, script, *options]]
    started.clear()
    cli.main(["validate", "--ranks", "2", "--config", LORA])
    ranks = ["--nproc_per_node", "2"]
    assert started.pop() == [
        *tune,
        *ranks,
        "lora_finetune_rocm",
        "--config",
        LORA,
        "validate_only=True",
    ]
    assert cli.main(["validate", "--config", "cpu_poket"]) == 1
    assert not started


def test_validate_needs_no_weights_and_leaves_nothing(validate, folder, tmp_path, messages):
    shutil.copytree(
        folder / "base", tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
    )
    logger = {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": str(tmp_path / "log"),
    }
    cfg = run_config(
        tmp_path / "model", folder / "prompts.jsonl", tmp_path / "out", metric_logger=logger
    )
    assert validate(lora_finetune_rocm.main, write_yaml(tmp_path / "run.yaml", cfg))[0] == 0
    assert messages[-1] == "valid: all checks that need no weights have passed"
    raft = write_run(folder, tmp_path / "raft")
    assert validate(raft_rocm.main, raft)[0] == 0
    assert not (tmp_path / "raft").exists()
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "log").exists()


@pytest.mark.nightly
def test_the_notebook_runs(tmp_path, monkeypatch):
    """Each cell in an empty folder, with a pocket model that is trained less; a command that fails ends it."""
    path = Path(__file__).parents[2] / "examples" / "first_run" / "first_run.ipynb"
    notebook = nbformat.read(path, as_version=4)
    (make,) = (cell for cell in notebook.cells if "rocm-ext pocket" in cell.source)
    make.source += " --accuracy 0.1"
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    ]
    first, last = map(
        float, re.search(r"([\d.]+) at first, ([\d.]+) at last", "".join(printed)).groups()
    )
    assert last < first
    for run in ("python", "raft"):
        assert (tmp_path / "demo" / run / "adapter" / "adapter_model.safetensors").is_file()
    assert "application/vnd.plotly.v1+json" in json.dumps(
        notebook
    )  # the curve of the loop in Python
    assert "<html" in (tmp_path / "demo" / "report.html").read_text()
