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
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune
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


def test_its_keys_are_checked_as_ours_are(folder, tiny):
    run = str(folder / "my_run.yaml")
    with pytest.raises(
        UserError, match=r"unknown key layer_lr_decays; did you mean layer_lr_decay\?"
    ):
        config.load("layer_decay", run, ["layer_lr_decays=0.8"])
    trainer = runpy.run_path(str(folder / "layer_decay.py"))["LayerDecayTrainer"]
    with pytest.raises(
        UserError, match="LayerDecayTrainer makes its own optimiser; set loraplus_lr_ratio=null"
    ):
        LoRAFinetune(
            config.load("layer_decay", run, ["loraplus_lr_ratio=4"]), trainer=trainer
        ).check()
    write_run(folder, tiny, layer_lr_deacy=0.8)
    with pytest.raises(
        UserError, match=r"unknown key layer_lr_deacy; did you mean layer_lr_decay\?"
    ):
        config.load("layer_decay", run)
    write_run(folder, tiny)
    defaults = folder / "layer_decay.yaml"
    defaults.write_text(defaults.read_text().replace("0.9", "???"))
    with pytest.raises(UserError, match="layer_lr_decay must be set"):
        config.load("layer_decay", run)


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ("extends: lora_finetune_rocm\n", r"layer_decay.yaml says recipe: None; expected recipe: layer_decay"),
        ("recipe: layer_decay\nextends: lora_finetune\n", "lora_finetune is unknown.*did you mean lora_finetune_rocm"),
        ("recipe: layer_decay\nextends: layer_decay\n", "layer_decay extends itself"),
        ("recipe: layer_decay\ninclude: [commn]", "commn.yaml"),
        ("- recipe\n", "holds a list; expected keys"),
    ],
)  # fmt: skip
def test_defaults_that_are_none(folder, defaults, message):
    (folder / "layer_decay.yaml").write_text(defaults)
    with pytest.raises(UserError, match=message) as caught:
        config.load("layer_decay", str(folder / "my_run.yaml"))
    assert "\n" not in str(caught.value)


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


@pytest.mark.wide
def test_bench_reads_a_config_that_names_a_file(folder, tiny):
    from rocm_ext.bench.probes import Bench
    from rocm_ext.bench.sweep import Spec

    (folder / "configs").mkdir()
    run = write_run(folder, tiny, name="configs/run.yaml", recipe="../layer_decay.py")
    bench = Bench(Spec(str(run), ("hardware=cpu", "layer_lr_decay=0.7"), 2**30, seconds=0.1))
    assert bench.cfg.layer_lr_decay == 0.7


def test_a_trainer_inside_raft_sees_its_keys():
    cfg = config.load("raft_rocm", "cpu_pocket_raft", ["hardware=cpu"])
    cfg.layer_lr_decay = 0.8  # as the defaults of a recipe that extends raft_rocm would add it
    training = RAFT(cfg).training_config()
    assert training.layer_lr_decay == 0.8
    assert (training.recipe, training.dataset) == ("lora_finetune_rocm", None)
    assert (training.eval_prompts, training.verifier) == (None, None)
    assert not {"cycles", "prompts"} & set(training)


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("stated", ["layer_decay", "layer_decay.py", "nothing"])
def test_plan_finds_its_defaults_beside_the_config(
    folder, tiny, stated, capsys, as_configured, cpu_of_known_speed
):
    run = str(write_run(folder, tiny, recipe=None if stated == "nothing" else stated))
    override = ["recipe=layer_decay.py"] if stated == "nothing" else []
    assert rocm_ext(["plan", "--config", run, "--json", "layer_lr_decay=0.7", *override]) == 0
    assert json.loads(capsys.readouterr().out)["rollout"] is None
    line = fails(
        capsys, lambda: rocm_ext(["plan", "--config", run, "layer_lr_deca=0.7", *override])
    )
    assert "did you mean layer_lr_decay" in line
    write_run(folder, tiny, recipe="layer_decays")
    line = fails(capsys, lambda: rocm_ext(["plan", "--config", run]))
    assert one_line_has(line, "recipe layer_decays is unknown", str(folder))


def test_a_run_keeps_every_key_of_the_optimizer_and_its_folder_tells_the_recipe(
    folder, tiny, monkeypatch, capsys
):
    optimizer = {"_component_": "torch.optim.AdamW", "lr": 1e-3, "weight_decay": 0.3, "betas": [0.8, 0.9],
                 "fused": True}  # fmt: skip
    start = ["--config", write_run(folder, tiny, optimizer=optimizer)]
    made, real = [], torch.optim.AdamW.__init__

    def noted(self, *args, **options):
        real(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(torch.optim.AdamW, "__init__", noted)
    assert (
        run_in_process(
            folder / "layer_decay.py", *start, "layer_lr_decay=0.8", monkeypatch=monkeypatch
        )
        == 0
    )
    last, first = made[-1].param_groups  # the plan makes one, too
    assert (last["lr"], first["lr"]) == (1e-3, 0.8e-3)
    for group in (last, first):
        assert (group["weight_decay"], list(group["betas"]), group["fused"]) == (
            0.3,
            [0.8, 0.9],
            True,
        )
    assert len(last["params"]) == len(first["params"]) > 0

    out = folder / "out"
    saved = OmegaConf.load(out / "config.yaml")
    assert (saved.recipe, saved.layer_lr_decay) == ("layer_decay", 0.8)
    run = RunFolder(out)
    assert (run.recipe, run.family) == ("layer_decay", "lora_finetune_rocm")
    assert rocm_ext(["report", str(out), "--output", str(folder / "report.html")]) == 0
    assert "<dd>layer_decay</dd>" in (folder / "report.html").read_text()
    # the saved config of a run is a config, where the recipe's file is at hand
    monkeypatch.chdir(folder)
    assert config.load("layer_decay", str(out / "config.yaml")) == saved
    # and the run goes on only as what it was begun as
    start.append("resume_from_checkpoint=True")
    line = fails(
        capsys, lambda: run_in_process(folder / "layer_decay.py", *start, monkeypatch=monkeypatch)
    )
    assert "layer_lr_decay: was 0.8, is 0.9" in line


@pytest.mark.wide
def test_compare_takes_recipes_of_one_family_and_names_the_difference(
    folder, tiny, monkeypatch, capsys
):
    from rocm_ext.recipes import lora_finetune_rocm

    plain = write_yaml(folder / "plain.yaml", run_config(*tiny, folder / "plain"))
    script = Path(lora_finetune_rocm.__file__)
    assert run_in_process(script, "--config", plain, monkeypatch=monkeypatch) == 0
    run = folder / "my_run.yaml"
    assert run_in_process(folder / "layer_decay.py", "--config", run, monkeypatch=monkeypatch) == 0
    rocm_ext(["compare", str(folder / "plain"), str(folder / "out"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["recipe"] == ["lora_finetune_rocm", "layer_decay"]


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


def test_files_beside_a_packaged_recipe_that_are_no_configs(package):
    (package / "list.yaml").write_text("- recipe\n")
    (package / "torn.yaml").write_text("recipe: [layer_decay\n")
    (package / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (package / "folder.yaml").mkdir()
    assert [path.name for path in registry.recipes()["layer_decay"].configs] == [
        "pocket_decay.yaml"
    ]


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
def test_tune_run_sets_the_environment_before_the_script_begins_and_runs_it_once(folder, how):
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
def test_a_script_that_is_started_without_tune_is_told_what_comes_late(folder):
    script = folder / "layer_decay.py"
    script.write_text(MARK + script.read_text())
    command = [sys.executable, str(script), "--config", "my_run.yaml"]
    run = subprocess.run(
        command, cwd=folder, env={**bare(), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("top") == 1
    assert "or: export GOMP_SPINCOUNT=20000" in run.stderr


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
