"""A recipe of a user's own: a Python file beside their YAML, or in an installed package."""

import importlib.metadata
import json
import os
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import torchtune._recipe_registry as torchtune_registry
from omegaconf import OmegaConf
from rocm_ext.recipes.raft_rocm import RAFT

from rocm_ext import config, hook
from rocm_ext.base import registry
from rocm_ext.base.errors import UserError
from rocm_ext.cli import main as rocm_ext
from rocm_ext.machine.detect import detect
from rocm_ext.machine.environment import environment_for
from rocm_ext.machine.profile import load_profile
from rocm_ext.runs.folder import RunFolder
from tests.kit.forks import several_ranks
from tests.kit.lines import one_line_has
from tests.kit.tiny import run_config, write_model, write_rows, write_yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora_plus"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, Path]:
    """A model and rows."""
    folder = tmp_path_factory.mktemp("tiny")
    return write_model(folder / "base"), write_rows(folder / "rows.jsonl", 8)


@pytest.fixture
def folder(tmp_path, tiny, monkeypatch) -> Path:
    """The example's files in a folder of the user's, with a run of a tiny model, seen from another folder."""
    for name in ("lora_plus.py", "lora_plus.yaml"):
        shutil.copy(EXAMPLE / name, tmp_path)
    write_run(tmp_path, tiny)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def write_run(folder: Path, tiny: tuple[Path, Path], name: str = "my_run.yaml", **changes) -> Path:
    return write_yaml(folder / name, run_config(*tiny, folder / "out", **{"recipe": "lora_plus", **changes}))


def run_in_process(script: Path, *arguments: object, monkeypatch) -> int:
    """The exit code of a recipe's script."""
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script), run_name="__main__")
    return left.value.code


def fails(capsys, action) -> str:
    """The one line in which it says why."""
    assert action() == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def test_its_key_comes_from_the_command_line_the_run_or_its_defaults(folder, tiny):
    recipe = registry.find("lora_plus", folder)
    run = str(folder / "my_run.yaml")
    assert config.load(recipe, run).lora_plus_ratio == 16
    assert config.load(recipe, run, ["lora_plus_ratio=8"]).lora_plus_ratio == 8
    with (folder / "my_run.yaml").open("a") as file:
        file.write("lora_plus_ratio: 4\n")
    cfg = config.load("lora_plus", run)
    assert (cfg.recipe, cfg.lora_plus_ratio, cfg.batch_size) == ("lora_plus", 4, 4)
    assert set(cfg) == {*config.defaults("lora_finetune_rocm"), "lora_plus_ratio"}
    (folder / "configs").mkdir()  # a folder of its own
    assert config.load(recipe, str(write_run(folder / "configs", tiny))).lora_plus_ratio == 16
    assert config.load(recipe, "cpu_pocket").recipe == "lora_plus", "a config of the recipe that it extends"


def test_its_keys_are_checked_as_ours_are(folder, tiny):
    run = str(folder / "my_run.yaml")
    with pytest.raises(UserError, match=r"unknown key lora_plus_ration; did you mean lora_plus_ratio\?"):
        config.load("lora_plus", run, ["lora_plus_ration=8"])
    write_run(folder, tiny, lora_plus_ratoi=8)
    with pytest.raises(UserError, match=r"unknown key lora_plus_ratoi; did you mean lora_plus_ratio\?"):
        config.load("lora_plus", run)
    write_run(folder, tiny)
    defaults = folder / "lora_plus.yaml"
    defaults.write_text(defaults.read_text().replace("16", "???"))
    with pytest.raises(UserError, match="lora_plus_ratio must be set"):
        config.load("lora_plus", run)


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ("extends: lora_finetune_rocm\n", r"lora_plus.yaml says recipe: None; expected recipe: lora_plus"),
        ("recipe: lora_plus\nextends: lora_finetune\n", "lora_finetune is unknown.*did you mean lora_finetune_rocm"),
        ("recipe: lora_plus\nextends: lora_plus\n", "lora_plus extends itself"),
        ("recipe: lora_plus\ninclude: [commn]", "commn.yaml"),
        ("- recipe\n", "holds a list; expected keys"),
    ],
)  # fmt: skip
def test_defaults_that_are_none(folder, defaults, message):
    (folder / "lora_plus.yaml").write_text(defaults)
    with pytest.raises(UserError, match=message) as caught:
        config.load("lora_plus", str(folder / "my_run.yaml"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('hello')", "is no recipe; expected recipe_main"),
        ("recipe_main(NAME)(main)", "is no recipe; expected recipe_main"),
        ("recipe_main('mine')(main)", "recipe mine needs defaults=FILE.yaml"),
        ("recipe_main('mine', defaults='no.yaml')(main)", "no.yaml of recipe mine do not exist"),
        ("recipe_main('raft_rocm', defaults='lora_plus.yaml')(main)", "raft_rocm is this library's recipe"),
        ("def (", "is no recipe"),
    ],
)
def test_files_that_are_no_recipe(folder, script, message):
    (folder / "other.py").write_text(script)
    with pytest.raises(UserError, match=message):
        registry.find("other.py", folder)


@pytest.mark.parametrize(
    ("wanted", "asked"), [("lora_plus", "raft_rocm"), ("raft_rocm", "lora_plus"), ("lora_plus", "lora_finetune_rocm")]
)
def test_a_config_of_another_recipe_is_refused(folder, tiny, wanted, asked):
    run = write_run(folder, tiny, name="run.yaml") if wanted == "lora_plus" else "cpu_pocket_raft"
    start = "lora_plus.py" if wanted == "lora_plus" else wanted
    with pytest.raises(UserError, match=f"is for recipe {wanted}, this is {asked}; start it with `tune run {start} --"):
        config.load(registry.find(asked, folder), str(run))


def test_a_recipe_that_extends_none_of_ours(folder, capsys):
    (folder / "lora_plus.yaml").write_text("recipe: lora_plus\nlora_plus_ratio: 16\n")
    own = write_yaml(folder / "own.yaml", {"recipe": "lora_plus"})
    with pytest.raises(UserError, match=r"lora_plus.yaml: the defaults lack the key hardware"):
        config.requested_hardware(str(own))
    with pytest.raises(UserError, match=r"lora_plus.yaml: the defaults lack the key hardware"):
        config.load("lora_plus", str(own))
    with (folder / "lora_plus.yaml").open("a") as file:
        file.write("hardware: auto\n")
    assert config.load("lora_plus", str(own)).lora_plus_ratio == 16
    for command in ("plan", "bench"):
        line = fails(capsys, lambda command=command: rocm_ext([command, "--config", str(own)]))
        assert one_line_has(line, "lora_plus", "extends neither", "lora_finetune_rocm", "raft_rocm")


@pytest.mark.wide
def test_bench_reads_a_config_that_names_a_file(folder, tiny):
    from rocm_ext.bench.probes import Bench
    from rocm_ext.bench.sweep import Spec

    (folder / "configs").mkdir()
    run = write_run(folder, tiny, name="configs/run.yaml", recipe="../lora_plus.py")
    bench = Bench(Spec(str(run), ("hardware=cpu", "lora_plus_ratio=2"), 2**30, seconds=0.1))
    assert bench.cfg.lora_plus_ratio == 2


def test_a_trainer_inside_raft_sees_its_keys():
    cfg = config.load("raft_rocm", "cpu_pocket_raft", ["hardware=cpu"])
    cfg.lora_plus_ratio = 8  # as the defaults of a recipe that extends raft_rocm would add it
    training = RAFT(cfg).training_config()
    assert training.lora_plus_ratio == 8
    assert (training.recipe, training.dataset) == ("lora_finetune_rocm", None)
    assert (training.eval_prompts, training.verifier) == (None, None)
    assert not {"cycles", "prompts"} & set(training)


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("stated", ["lora_plus", "lora_plus.py", "nothing"])
def test_plan_finds_its_defaults_beside_the_config(folder, tiny, stated, capsys, as_configured, cpu_of_known_speed):
    run = str(write_run(folder, tiny, recipe=None if stated == "nothing" else stated))
    override = ["recipe=lora_plus.py"] if stated == "nothing" else []
    assert rocm_ext(["plan", "--config", run, "--json", "lora_plus_ratio=2", *override]) == 0
    assert json.loads(capsys.readouterr().out)["rollout"] is None
    line = fails(capsys, lambda: rocm_ext(["plan", "--config", run, "lora_plus_rati=2", *override]))
    assert "did you mean lora_plus_ratio" in line
    write_run(folder, tiny, recipe="lora_pluss")
    line = fails(capsys, lambda: rocm_ext(["plan", "--config", run]))
    assert one_line_has(line, "recipe lora_pluss is unknown", str(folder))


def test_a_run_keeps_every_key_of_the_optimizer_and_its_folder_tells_the_recipe(folder, tiny, monkeypatch, capsys):
    optimizer = {"_component_": "torch.optim.AdamW", "lr": 1e-3, "weight_decay": 0.3, "betas": [0.8, 0.9],
                 "fused": True}  # fmt: skip
    start = ["--config", write_run(folder, tiny, optimizer=optimizer)]
    made, real = [], torch.optim.AdamW.__init__

    def noted(self, *args, **options):
        real(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(torch.optim.AdamW, "__init__", noted)
    assert run_in_process(folder / "lora_plus.py", *start, "lora_plus_ratio=8", monkeypatch=monkeypatch) == 0
    slow, fast = made[-1].param_groups  # the plan makes one, too
    assert (slow["lr"], fast["lr"]) == (1e-3, 8e-3)
    for group in (slow, fast):
        assert (group["weight_decay"], list(group["betas"]), group["fused"]) == (0.3, [0.8, 0.9], True)
    assert len(slow["params"]) == len(fast["params"]) > 0

    out = folder / "out"
    saved = OmegaConf.load(out / "config.yaml")
    assert (saved.recipe, saved.lora_plus_ratio) == ("lora_plus", 8)
    run = RunFolder(out)
    assert (run.recipe, run.family) == ("lora_plus", "lora_finetune_rocm")
    assert rocm_ext(["report", str(out), "--output", str(folder / "report.html")]) == 0
    assert "<dd>lora_plus</dd>" in (folder / "report.html").read_text()
    # the saved config of a run is a config, where the recipe's file is at hand
    monkeypatch.chdir(folder)
    assert config.load("lora_plus", str(out / "config.yaml")) == saved
    # and the run goes on only as what it was begun as
    start.append("resume_from_checkpoint=True")
    line = fails(capsys, lambda: run_in_process(folder / "lora_plus.py", *start, monkeypatch=monkeypatch))
    assert "lora_plus_ratio: was 8, is 16" in line


@pytest.mark.wide
def test_compare_takes_recipes_of_one_family_and_names_the_difference(folder, tiny, monkeypatch, capsys):
    from rocm_ext.recipes import lora_finetune_rocm

    plain = write_yaml(folder / "plain.yaml", run_config(*tiny, folder / "plain"))
    script = Path(lora_finetune_rocm.__file__)
    assert run_in_process(script, "--config", plain, monkeypatch=monkeypatch) == 0
    run = folder / "my_run.yaml"
    assert run_in_process(folder / "lora_plus.py", "--config", run, monkeypatch=monkeypatch) == 0
    rocm_ext(["compare", str(folder / "plain"), str(folder / "out"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["recipe"] == ["lora_finetune_rocm", "lora_plus"]


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """An installed package that announces the example as its recipe, with a config."""
    home = tmp_path / "site" / "their_package"
    home.mkdir(parents=True)
    (home / "__init__.py").touch()
    for name in ("lora_plus.py", "lora_plus.yaml", "my_run.yaml"):
        shutil.copy(EXAMPLE / name, home)
    (home / "my_run.yaml").rename(home / "pocket_plus.yaml")
    entries = [
        EntryPoint("lora_plus", "their_package.lora_plus", registry.GROUP),
        EntryPoint("broken", "no_such_package.recipe", registry.GROUP),
        EntryPoint("lora_plus", "their_package.second", registry.GROUP),
    ]
    shutil.copy(home / "lora_plus.py", home / "second.py")
    monkeypatch.syspath_prepend(tmp_path / "site")
    real = importlib.metadata.entry_points
    ours = {"group": registry.GROUP}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **kw: entries if kw == ours else real(**kw))
    registry.recipes.cache_clear()
    yield home
    registry.recipes.cache_clear()


def test_a_package_registers_recipes_and_configs(package, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tune", "cp"])
    monkeypatch.setattr(torchtune_registry, "_ALL_RECIPES", [])
    monkeypatch.setattr("rocm_ext.config.startup.begin", lambda tune: None)  # this process stays as it is
    hook.register()
    *ours, theirs = torchtune_registry._ALL_RECIPES
    assert [recipe.name for recipe in ours] == list(registry.TITLES)
    assert (theirs.name, theirs.file_path) == ("lora_plus", str(package / "lora_plus.py"))
    (packed,) = theirs.configs
    assert (packed.name, packed.file_path) == ("pocket_plus", str(package / "pocket_plus.yaml"))
    assert "their_package.lora_plus" not in sys.modules
    broken, second = capsys.readouterr().err.splitlines()
    assert "entry point broken = no_such_package.recipe is left out: " in broken
    assert "second is left out: recipe lora_plus is already in " in second
    cfg = config.load(config.recipe_of("pocket_plus"), "pocket_plus")
    assert (cfg.recipe, cfg.lora_plus_ratio) == ("lora_plus", 8)
    assert capsys.readouterr().err == "", "once is enough"


def test_files_beside_a_packaged_recipe_that_are_no_configs(package):
    (package / "list.yaml").write_text("- recipe\n")
    (package / "torn.yaml").write_text("recipe: [lora_plus\n")
    (package / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (package / "folder.yaml").mkdir()
    assert [path.name for path in registry.recipes()["lora_plus"].configs] == ["pocket_plus.yaml"]


# one write, which lines of other ranks cannot split
MARK = "import os\nos.write(1, f\"top {os.getpid()} {os.environ.get('GOMP_SPINCOUNT')}\\n\".encode())\n"


def bare() -> dict[str, str]:
    """An environment without the CPU profile's variables."""
    ours = environment_for(load_profile("cpu"), detect(), {})
    return {name: value for name, value in os.environ.items() if name not in ours and name != registry.DECIDED}


@pytest.mark.wide  # test_startup.py has it without a process
@pytest.mark.parametrize("how", ["one process", pytest.param("two ranks", marks=several_ranks)])
def test_tune_run_sets_the_environment_before_the_script_begins_and_runs_it_once(folder, how):
    script = folder / "lora_plus.py"
    script.write_text(MARK + script.read_text())
    ranks = ["--nproc_per_node", "2"] if how == "two ranks" else []
    command = [str(Path(sys.executable).with_name("tune")), "run", *ranks, "lora_plus.py", "--config", "my_run.yaml"]
    environ = {**bare(), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, "lora_plus_ratio=8"], cwd=folder, env=environ, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:  # fmt: skip
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    tops = [line.split() for line in out.splitlines() if line.startswith("top")]
    assert len(tops) == (2 if ranks else 1), "the script runs once in each process"
    assert {spin for _, _, spin in tops} == {"20000"}
    if not ranks:
        assert int(tops[0][1]) == process.pid, "exec keeps the process"
    assert "environment: GOMP_SPINCOUNT=20000 " in err
    assert "torchao" not in out + err
    assert OmegaConf.load(folder / "out" / "config.yaml").lora_plus_ratio == 8


@pytest.mark.wide
def test_a_script_that_is_started_without_tune_is_told_what_comes_late(folder):
    script = folder / "lora_plus.py"
    script.write_text(MARK + script.read_text())
    command = [sys.executable, str(script), "--config", "my_run.yaml"]
    run = subprocess.run(command, cwd=folder, env={**bare(), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("top") == 1
    assert "or: export GOMP_SPINCOUNT=20000" in run.stderr


@pytest.mark.wide
def test_eval_has_the_environment_before_torch_is_imported(tmp_path):
    command = [str(Path(sys.executable).with_name("rocm-ext")), "eval", "--config", "cpu_pocket_raft"]
    run = subprocess.run(command, cwd=tmp_path, env=bare(), capture_output=True, text=True)
    assert run.returncode == 1
    assert "environment: GOMP_SPINCOUNT=20000 " in run.stderr
    assert "torch was imported before" not in run.stderr
    assert "torchao" not in run.stderr
