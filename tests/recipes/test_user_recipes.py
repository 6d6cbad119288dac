"""A recipe of a user's own: a Python file beside their YAML, or in an installed package."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
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
from tests.kit.forks import several_ranks
from tests.kit.lines import one_line_has
from tests.kit.tiny import run_config, write_model, write_rows, write_yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "layer_decay"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, Path]:
    """A model and rows."""
    folder = tmp_path_factory.mktemp("tiny")
    return write_model(folder / "base"), write_rows(folder / "rows.jsonl", 8)


@pytest.fixture
def folder(tmp_path, tiny, monkeypatch) -> Path:
    """The example's files in a folder of the user's, with a run of a tiny model, seen from another folder."""
    for name in ("layer_decay.py", "layer_decay.yaml"):
        shutil.copy(EXAMPLE / name, tmp_path)
    write_run(tmp_path, tiny)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def write_run(folder: Path, tiny: tuple[Path, Path], name: str = "my_run.yaml", **changes) -> Path:
    return write_yaml(
        folder / name, run_config(*tiny, folder / "out", **{"recipe": "layer_decay", **changes})
    )


def fails(capsys, action) -> str:
    """The one line in which it says why."""
    assert action() == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def test_where_its_key_comes_from(folder, tiny):
    recipe = registry.find("layer_decay", folder)
    run = str(folder / "my_run.yaml")
    assert config.load(recipe, run).layer_lr_decay == 0.9
    assert config.load(recipe, run, ["layer_lr_decay=0.8"]).layer_lr_decay == 0.8
    with (folder / "my_run.yaml").open("a") as file:
        file.write("layer_lr_decay: 0.5\n")
    cfg = config.load("layer_decay", run)
    assert (cfg.recipe, cfg.layer_lr_decay, cfg.batch_size) == ("layer_decay", 0.5, 4)
    assert set(cfg) == {*config.defaults("lora_finetune_rocm"), "layer_lr_decay"}
    (folder / "configs").mkdir()  # a folder of its own
    assert config.load(recipe, str(write_run(folder / "configs", tiny))).layer_lr_decay == 0.9
    assert config.load(recipe, "cpu_pocket").recipe == "layer_decay", (
        "a config of the recipe that it extends"
    )


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('hello')", "is no recipe; expected recipe_main"),
        ("recipe_main(NAME)(main)", "is no recipe; expected recipe_main"),
        ("recipe_main('mine')(main)", "recipe mine needs defaults=FILE.yaml"),
        ("recipe_main('mine', defaults='no.yaml')(main)", "no.yaml of recipe mine do not exist"),
        (
            "recipe_main('raft_rocm', defaults='layer_decay.yaml')(main)",
            "raft_rocm is this library's recipe",
        ),
        ("def (", "is no recipe"),
    ],
)
def test_files_that_are_no_recipe(folder, script, message):
    (folder / "other.py").write_text(script)
    with pytest.raises(UserError, match=message):
        registry.find("other.py", folder)


@pytest.mark.parametrize(
    ("wanted", "asked"),
    [
        ("layer_decay", "raft_rocm"),
        ("raft_rocm", "layer_decay"),
        ("layer_decay", "lora_finetune_rocm"),
    ],
)
def test_a_config_of_another_recipe_is_refused(folder, tiny, wanted, asked):
    run = write_run(folder, tiny, name="run.yaml") if wanted == "layer_decay" else "cpu_pocket_raft"
    start = "layer_decay.py" if wanted == "layer_decay" else wanted
    with pytest.raises(
        UserError,
        match=f"is for recipe {wanted}, this is {asked}; start it with `tune run {start} --",
    ):
        config.load(registry.find(asked, folder), str(run))


def test_a_recipe_that_extends_none_of_ours(folder, monkeypatch, capsys):
    monkeypatch.setenv("ROCM_EXT_BENCH", str(folder / "bench.json"))
    (folder / "layer_decay.yaml").write_text("recipe: layer_decay\nlayer_lr_decay: 0.9\n")
    own = write_yaml(folder / "own.yaml", {"recipe": "layer_decay"})
    with pytest.raises(UserError, match=r"layer_decay.yaml: the defaults lack the key hardware"):
        config.requested_hardware(str(own))
    with pytest.raises(UserError, match=r"layer_decay.yaml: the defaults lack the key hardware"):
        config.load("layer_decay", str(own))
    with (folder / "layer_decay.yaml").open("a") as file:
        file.write("hardware: auto\n")
    assert config.load("layer_decay", str(own)).layer_lr_decay == 0.9
    for command in ("plan", "bench"):
        line = fails(capsys, lambda command=command: rocm_ext([command, "--config", str(own)]))
        assert one_line_has(
            line, "layer_decay", "extends neither", "lora_finetune_rocm", "raft_rocm"
        )


def test_a_trainer_inside_raft_sees_its_keys():
    cfg = config.load("raft_rocm", "cpu_pocket_raft", ["hardware=cpu"])
    cfg.layer_lr_decay = 0.8  # as the defaults of a recipe that extends raft_rocm would add it
    training = RAFT(cfg).training_config()
    assert training.layer_lr_decay == 0.8
    assert (training.recipe, training.dataset) == ("lora_finetune_rocm", None)
    assert (training.eval_prompts, training.verifier) == (None, None)
    assert not {"cycles", "prompts"} & set(training)


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """An installed package that announces the example as its recipe, with a config."""
    home = tmp_path / "site" / "their_package"
    home.mkdir(parents=True)
    (home / "__init__.py").touch()
    for name in ("layer_decay.py", "layer_decay.yaml", "my_run.yaml"):
        shutil.copy(EXAMPLE / name, home)
    (home / "my_run.yaml").rename(home / "pocket_decay.yaml")
    entries = [
        EntryPoint("layer_decay", "their_package.layer_decay", registry.GROUP),
        EntryPoint("broken", "no_such_package.recipe", registry.GROUP),
        EntryPoint("layer_decay", "their_package.second", registry.GROUP),
    ]
    shutil.copy(home / "layer_decay.py", home / "second.py")
    monkeypatch.syspath_prepend(tmp_path / "site")
    real = importlib.metadata.entry_points
    ours = {"group": registry.GROUP}
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda **kw: entries if kw == ours else real(**kw)
    )
    registry.recipes.cache_clear()
    yield home
    registry.recipes.cache_clear()


def test_a_package_registers_recipes_and_configs(package, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tune", "download"])
    monkeypatch.setattr(torchtune_registry, "_ALL_RECIPES", [])
    monkeypatch.setattr(
        "rocm_ext.config.startup.begin", lambda tune: None
    )  # this process stays as it is
    hook.register()
    *ours, theirs = torchtune_registry._ALL_RECIPES
    assert [recipe.name for recipe in ours] == list(registry.TITLES)
    assert (theirs.name, theirs.file_path) == ("layer_decay", str(package / "layer_decay.py"))
    (packed,) = theirs.configs
    assert (packed.name, packed.file_path) == ("pocket_decay", str(package / "pocket_decay.yaml"))
    assert "their_package.layer_decay" not in sys.modules
    broken, second = capsys.readouterr().err.splitlines()
    assert "entry point broken = no_such_package.recipe is left out: " in broken
    assert "second is left out: recipe layer_decay is already in " in second
    cfg = config.load(config.recipe_of("pocket_decay"), "pocket_decay")
    assert (cfg.recipe, cfg.layer_lr_decay) == ("layer_decay", 0.8)
    assert capsys.readouterr().err == "", "once is enough"


# one write, which lines of other ranks cannot split
MARK = "import os\nos.write(1, f\"top {os.getpid()} {os.environ.get('GOMP_SPINCOUNT')}\\n\".encode())\n"


def bare() -> dict[str, str]:
    """An environment without the CPU profile's variables."""
    ours = environment_for(load_profile("cpu"), detect(), {})
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ours and name != registry.DECIDED
    }


@pytest.mark.wide  # test_startup.py has it without a process
@pytest.mark.parametrize("how", ["one process", pytest.param("two ranks", marks=several_ranks)])
def test_tune_run_sets_the_environment_and_runs_a_script_once(folder, how):
    script = folder / "layer_decay.py"
    script.write_text(MARK + script.read_text())
    ranks = ["--nproc_per_node", "2"] if how == "two ranks" else []
    command = [
        str(Path(sys.executable).with_name("tune")),
        "run",
        *ranks,
        "layer_decay.py",
        "--config",
        "my_run.yaml",
    ]
    environ = {**bare(), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, "layer_lr_decay=0.8"], cwd=folder, env=environ, text=True,
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
    assert OmegaConf.load(folder / "out" / "config.yaml").layer_lr_decay == 0.8


@pytest.mark.wide
def test_eval_has_the_environment_before_torch_is_imported(tmp_path):
    command = [
        str(Path(sys.executable).with_name("rocm-ext")),
        "eval",
        "--config",
        "cpu_pocket_raft",
    ]
    run = subprocess.run(command, cwd=tmp_path, env=bare(), capture_output=True, text=True)
    assert run.returncode == 1
    assert "environment: GOMP_SPINCOUNT=20000 " in run.stderr
    assert "torch was imported before" not in run.stderr
    assert "torchao" not in run.stderr
