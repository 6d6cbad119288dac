"""What a new user meets first: a typo, the wrong recipe, no model yet, a config to check, a short run."""

import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torchtune._recipe_registry as torchtune_registry
from nbclient import NotebookClient
from rocm_ext.recipes import lora_finetune_rocm, raft_rocm

from rocm_ext import cli, config, hook
from rocm_ext.base import registry
from rocm_ext.base.errors import UserError
from tests.kit.lines import one_line_has
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


@pytest.fixture
def tune_run(monkeypatch):
    """``tune_run(*arguments)``: what ends `tune run ARGUMENTS` while it imports torch; None: nothing does."""
    monkeypatch.setattr(torchtune_registry, "_ALL_RECIPES", list(torchtune_registry._ALL_RECIPES))
    monkeypatch.setattr(
        "rocm_ext.config.startup.begin", lambda tune: None
    )  # this process stays as it is

    def tune_run(*arguments: str) -> str | None:
        monkeypatch.setattr(sys, "argv", ["/bin/tune", "run", *arguments])
        try:
            hook.register()
        except SystemExit as leaving:
            return leaving.code
        return None

    return tune_run


@pytest.mark.parametrize(
    "options", [(), ("--nproc_per_node", "2"), ("--nnodes=1", "--nproc_per_node=2")]
)
def test_a_misspelt_recipe_is_one_line(tune_run, options):
    message = tune_run(*options, "lora_finetune_rcom", "--config", "cpu_pocket", "epochs=1")
    assert message.startswith("error: there is no recipe lora_finetune_rcom")
    assert message.endswith("did you mean lora_finetune_rocm?")
    assert "\n" not in message
    theirs = tune_run(
        *options, "full_finetune_singel_device", "--config", "llama3/8B_full_single_device"
    )
    assert theirs.endswith("did you mean full_finetune_single_device?")
    assert "there is no recipe mine/recipe.py, " in tune_run(
        *options, "mine/recipe.py", "--config", "my.yaml"
    )


def test_recipes_that_exist_are_left_to_tune(tune_run, tmp_path, monkeypatch):
    assert tune_run("lora_finetune_single_device", "--config", LORA) is None
    assert tune_run("raft_rocm", "--config", "cpu_pocket_raft") is None
    assert tune_run("torchtune.models", "--config", "x") is None, "a module"
    assert tune_run("--help") is None
    assert tune_run() is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "recipe.py").write_text("print('hello')")
    assert tune_run("mine/recipe.py", "--config", "my.yaml") is None
    assert tune_run("mine/recpie.py", "--config", "my.yaml") is None, (
        "Python itself says which file is missing"
    )


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


def test_a_config_without_recipe_goes_by_what_it_sets(tmp_path, folder):
    """Without a loss or a key of another recipe's, the recipe that is started runs it."""
    for overrides, recipe in (([], registry.DPO), (["recipe=lora_finetune_rocm"], registry.SFT),
                              (["loss=rocm_ext.losses.CrossEntropy"], registry.SFT)):  # fmt: skip
        assert config.recipe_of(PREFERENCES, overrides).name == recipe
    cfg = run_config(folder / "base", folder / "prompts.jsonl", tmp_path / "out")
    own = write_yaml(tmp_path / "own.yaml", cfg)
    assert config.load(registry.DPO, str(own)).recipe == registry.DPO
    assert config.load(registry.SFT, str(own)).recipe == registry.SFT
    with pytest.raises(UserError, match=r"unknown key dataset: .* lora_finetune_rocm and dpo_rocm"):
        config.load(registry.RAFT, "cpu_pocket_raft", ["dataset=x"])
    with pytest.raises(UserError, match=r"unknown key datset; did you mean dataset\?"):
        config.load(registry.SFT, str(own), ["datset=x"])


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


ON_WINDOWS = """
import platform, sys, psutil, torch, torchtune, rocm_ext.data.prompts, rocm_ext.config.startup
platform.system = lambda: "Windows"
sys.platform = "win32"
sys.modules["resource"] = sys.modules["fcntl"] = None
sys.argv = sys.orig_argv = {argv}
{then}
"""


@pytest.mark.wide
@pytest.mark.parametrize("argv", [["tune", "run", "raft_rocm"], ["recipe"], ["verify"]])
def test_on_windows_verifying_recipes_end_with_one_line(argv, tmp_path):
    arguments, then = ["--config", "cpu_pocket_raft"], "from rocm_ext import hook; hook.register()"
    if argv == ["recipe"]:
        argv = [str(registry.find("raft_rocm").file)]
    if argv == ["verify"]:
        arguments = ["--verifier", "MathAnswer", "--data", "rows.jsonl"]
        then = f"from rocm_ext.cli import main; sys.exit(main({[*argv, *arguments]}))"
    code = ON_WINDOWS.format(argv=[*argv, *arguments], then=then)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    *_, line = done.stderr.splitlines()
    assert "Traceback" not in done.stderr
    assert (done.returncode, line[:7]) == (1, "error: ")
    assert one_line_has(line, "Windows does not have", "WSL2")


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


@pytest.mark.parametrize(("override", "message"), [
    ("dataset.source=/none/rows.jsonl", "/none/rows.jsonl"),
    ("hardware=mi300x", "hardware=mi300x is for"),
    ("device=cuda", "device"),
    ("loss._component_=torchtune.rlhf.loss.DPOLoss", "needs the columns"),
    ("lr_scheduler._component_=torch.optim.lr_scheduler.ReduceLROnPlateau", "lr_scheduler: "),
    ("checkpointer.checkpoint_dir=/none/Qwen3-8B", "tune download Qwen/Qwen3-8B --output-dir /none/Qwen3-8B"),
])  # fmt: skip
def test_validate_refuses_what_the_recipe_refuses(
    validate, folder, tmp_path, capsys, override, message
):
    path = write_yaml(
        tmp_path / "run.yaml",
        run_config(folder / "base", folder / "prompts.jsonl", tmp_path / "out"),
    )
    said = validate(lora_finetune_rocm.main, path, override)
    assert exit_code(lora_finetune_rocm.main, "--config", path, override) == said[0] == 1
    assert capsys.readouterr().err.splitlines()[-1] == said[1]
    assert message in said[1]


@pytest.mark.wide
def test_a_run_that_changes_nothing_says_so(folder, tmp_path, messages, caplog):
    """The first step of a warm-up has the learning rate 0. torchtune's lines on seeds and profilers do not appear."""
    caplog.set_level(logging.DEBUG)
    warm_up = {
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "num_warmup_steps": 9,
    }
    for steps, unchanged in ((1, True), (2, False)):
        cfg = run_config(
            folder / "base",
            folder / "prompts.jsonl",
            tmp_path / str(steps),
            max_steps_per_epoch=steps,
        )
        cfg |= {"lr_scheduler": warm_up, "profiler": {"enabled": False}}
        messages.clear()
        assert (
            exit_code(lora_finetune_rocm.main, "--config", write_yaml(tmp_path / "run.yaml", cfg))
            == 0
        )
        assert any("lower num_warmup_steps" in line for line in messages)
        found = any("optimiser step changed nothing, bit for bit" in line for line in messages)
        assert found == unchanged
    theirs = [record for record in caplog.records if record.name.startswith("torchtune")]
    assert not theirs


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
    assert (tmp_path / "demo" / "raft" / "adapter" / "adapter_model.safetensors").is_file()
    assert "<html" in (tmp_path / "demo" / "report.html").read_text()
