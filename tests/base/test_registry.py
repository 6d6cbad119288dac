"""`tune` finds this library's recipes and configs, and other programs are unaffected."""

import builtins
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torchtune._recipe_registry as torchtune_registry
from torchtune._cli.tune import main as tune_command

from rocm_ext import cli, hook
from rocm_ext.base import packages, registry

SHIPPED = Path(__file__).parents[2] / "recipe_configs"
TITLES = tuple(registry.TITLES)
CONFIGS = sorted(path.stem for path in SHIPPED.glob("*.yaml"))


@pytest.fixture
def as_tune(monkeypatch):
    """Make this process look like ``tune run lora_finetune_rocm``, with a copy of the registry."""
    monkeypatch.setattr(
        sys, "argv", ["/usr/bin/tune", "run", "lora_finetune_rocm", "--config", "x"]
    )
    recipes = list(torchtune_registry._ALL_RECIPES)
    monkeypatch.setattr(torchtune_registry, "_ALL_RECIPES", recipes)
    monkeypatch.setattr(
        "rocm_ext.config.startup.begin", lambda tune: None
    )  # this process stays as it is
    registry.recipes.cache_clear()
    yield recipes
    registry.recipes.cache_clear()


@pytest.fixture
def installed(monkeypatch):
    real = importlib.metadata.version

    def install(**versions):
        def version(name):
            if versions.get(name, "") is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions.get(name) or real(name)

        monkeypatch.setattr(importlib.metadata, "version", version)

    return install


def test_tune_ls(as_tune, monkeypatch, capsys, tmp_path):
    """It shows torchtune's configs, then ours with machine, model and memory, and ends before torchtune is imported."""
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tune", "ls"])
    with pytest.raises(SystemExit) as left:
        hook.register()
    assert not left.value.code
    theirs, _, ours = capsys.readouterr().out.partition("RECIPE ")
    lines = {
        line.split()[1]: " ".join(line.split())
        for line in ours.splitlines()
        if line.startswith(TITLES)
    }
    assert sorted(lines) == CONFIGS
    assert not [line for line in lines.values() if " - " in line or line.endswith(" -")], (
        "each says all of it"
    )
    assert lines["strix_halo_qwen7b"].endswith(" strix_halo Qwen2.5-7B-Instruct 17 to 40 GiB")
    assert lines["mi300x_qwen72b"].endswith(" 8 x mi300x Qwen2.5-72B-Instruct 147 GiB")
    assert lines["cpu_pocket_raft"].endswith(" cpu pocket under 1 GiB")
    assert "lora_finetune_single_device" in theirs
    monkeypatch.setattr(sys, "argv", ["/usr/bin/tune", "ls", "raft", "mi300x"])
    with pytest.raises(SystemExit):
        hook.register()
    heading, *few = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert heading.startswith("RECIPE ")
    assert [line.split()[1] for line in few] == [
        name for name in CONFIGS if name.startswith("mi300x") and "raft" in name
    ]
    # configs that say little, as those of other people's packages
    (tmp_path / "mine.py").write_text('recipe_main("mine", defaults="mine.yaml")\n')
    (tmp_path / "mine.yaml").write_text("recipe: mine\n")
    (tmp_path / "run.yaml").write_text("recipe: mine\nmodel: some.builder\n")
    assert registry.listing([registry.read_recipe(tmp_path / "mine.py")])[1].split() == [
        "mine",
        "run",
        "-",
        "-",
        "-",
    ]


@pytest.fixture
def tune_here(as_tune, monkeypatch):
    """``tune_here(*arguments)``: run `tune ARGUMENTS` in this process; returns what it exits with."""

    def tune_here(*arguments):
        monkeypatch.setattr(sys, "argv", ["tune", *map(str, arguments)])
        try:
            hook.register()
            tune_command()
        except SystemExit as leaving:
            return leaving.code
        return None

    return tune_here


@pytest.mark.parametrize(
    ("name", "file"), [("cpu_pocket", "cpu_pocket.yaml"), ("raft_rocm", "../recipes/raft_rocm.py")]
)
@pytest.mark.parametrize("into", ["mine", "."])
def test_tune_cp_keeps_a_file_that_exists(tune_here, tmp_path, monkeypatch, name, file, into):
    monkeypatch.chdir(tmp_path)
    source = SHIPPED / file
    copy = tmp_path / (source.name if into == "." else f"mine{source.suffix}")
    assert tune_here("cp", name, into) is None
    assert copy.read_text() == source.read_text()
    copy.write_text("edited")
    assert tune_here("cp", name, into).startswith(f"error: {copy.name} exists")
    assert tune_here("cp", "-n", name, into) is None
    assert copy.read_text() == "edited"
    assert tune_here("cp", name, into, "--force") is None
    assert copy.read_text() == source.read_text()


def test_tune_cp_and_ls_name_what_does_not_exist(tune_here):
    assert tune_here("cp", "cpu_pockt", "x.yaml") == (
        "error: there is no recipe or config cpu_pockt; did you mean cpu_pocket?"
    )
    assert (
        tune_here("ls", "no", "such")
        == "error: no recipe or config has no and such; `tune ls` lists all"
    )


def test_tune_leaves_what_is_torchtune_s_to_it(tune_here, tmp_path, capsys):
    for _ in range(2):  # it overwrites what exists
        assert tune_here("cp", "llama3/8B_lora_single_device", tmp_path / "theirs.yaml") is None
    capsys.readouterr()
    assert tune_here("validate", tmp_path / "theirs.yaml") is None
    assert capsys.readouterr().out == "Config is well-formed!\n"


@pytest.mark.parametrize(("name", "overrides", "code"), [
    ("cpu_pocket", ["lr_scheduler.num_warmup_steps=3"], 0), ("strix_halo_qwen7b", [], 0),
    ("strix_halo_qwen7b", ["num_workers=3"], 1),
    ("cpu_pocket_dpo", ["bach_size=2"], 1), ("cpu_pocket_raft", ["cycles=many"], 1),
    ("cpu_pocket_grpo", ["optimizer.lrr=1"], 1), ("cpu_pocket_tools", ["batch_size=0"], 1),
])  # fmt: skip
def test_tune_validate_knows_our_keys(tune_here, monkeypatch, name, overrides, code):
    started = []
    replaced = "rocm_ext.machine.environment.replace_process"
    monkeypatch.setattr(replaced, lambda command: sys.exit(started.append(command)))
    for config_at in ([], ["--config"]):
        tune_here("validate", *config_at, name, *overrides)
        tune_here("validate", *config_at, SHIPPED / f"{name}.yaml", *overrides)
        by_name, (python, dash_m, module, *arguments) = started[-2:]
        assert (python, dash_m, module) == (sys.executable, "-m", "rocm_ext.cli")
        assert by_name[5:] == ["--config", name, *overrides]
    assert cli.main(arguments) == code


def test_other_programs_load_next_to_nothing():
    program = "import sys, torch; print(*(m for m in sys.modules if m.split('.')[0] in ('rocm_ext', 'torchtune')))"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    base = {
        f"rocm_ext.base{name}" for name in ("", ".deferred", ".errors", ".packages", ".registry")
    }
    ours = {"rocm_ext", "rocm_ext.hook", *base}
    assert set(run.stdout.split()) == ours


def test_register_adds_recipes_and_configs(as_tune):
    hook.register()
    added = as_tune[-len(registry.TITLES) :]
    assert [recipe.name for recipe in added] == list(registry.TITLES)
    _, raft, grpo, *_ = added
    for recipe, ends in (
        (raft, ("_raft", "_raft_8gpu")),
        (grpo, ("_grpo", "_grpo_8gpu", "_tools")),
    ):
        assert sorted(c.name for c in recipe.configs) == [
            name for name in CONFIGS if name.endswith(ends)
        ]
    assert sorted(c.name for recipe in added for c in recipe.configs) == CONFIGS
    assert all(recipe.supports_distributed for recipe in added)
    assert all(
        Path(each.file_path).is_file() for recipe in added for each in (recipe, *recipe.configs)
    )


def test_register_leaves_other_programs_alone(as_tune, monkeypatch):
    before = len(as_tune)
    monkeypatch.setattr(sys, "argv", ["train.py", "tune"])
    hook.register()
    assert len(as_tune) == before
    monkeypatch.setenv(registry.DECIDED, "")  # a program below a run
    monkeypatch.setattr(
        "rocm_ext.config.startup.begin", lambda tune: pytest.fail("it imports what it must not")
    )
    hook.register()


@pytest.mark.parametrize(
    "broken", ["no torchtune", "another registry", "no configs", "no argv", "no device"]
)
def test_register_never_raises(as_tune, monkeypatch, capsys, broken):
    before, says = len(as_tune), "torchtune-rocm: its recipes are not registered: "
    if broken == "no torchtune":
        real = builtins.__import__

        def refuse(name, *args, **kwargs):
            if name.startswith("torchtune"):
                raise ImportError(f"No module named {name}")
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", refuse)
    elif broken == "another registry":
        monkeypatch.delattr(torchtune_registry, "_ALL_RECIPES")
    elif broken == "no configs":
        monkeypatch.setattr(registry, "_folder", lambda name: Path("/nowhere"))
    elif broken == "no argv":
        monkeypatch.setattr(sys, "argv", [None])
    else:

        def begin(tune):
            raise RuntimeError("no such device")

        monkeypatch.setattr("rocm_ext.config.startup.begin", begin)
        says = "torchtune-rocm: the environment of this run is not prepared: no such device\n"
    hook.register()
    assert capsys.readouterr().err.startswith(says)
    assert (len(as_tune) == before) == (broken != "no device")


@pytest.mark.parametrize("versions", [
    {"torchtune": "0.7.0"}, {"torchao": "0.12.0"}, {"torchao": "0.19.1+rocm7"}, {"torchao": None},
])  # fmt: skip
def test_wrong_pins_end_our_programs_alone(as_tune, installed, monkeypatch, versions):
    installed(**versions)
    ((name, version),) = versions.items()
    for program in ("/usr/bin/tune run lora_finetune_rocm", "/usr/bin/rocm-ext plan"):
        monkeypatch.setattr(sys, "argv", program.split())
        with pytest.raises(SystemExit) as leaving:
            hook.register()
        message = str(leaving.value)
        assert "\n" not in message
        assert "needs torchtune==0.6.1 and torchao>=0.13,<0.19" in message
        assert f"{name} {version or 'none'}" in message
        assert "pip install" in message
    monkeypatch.setattr(
        sys, "argv", ["tune", "run", "full_finetune_single_device", "--config", "llama3_2/1B_full"]
    )
    hook.register()


def test_right_pins_are_those_of_the_package(installed):
    requires = {
        tuple(sorted(line.split(",")))
        for line in importlib.metadata.requires("torchtune-rocm") or []
    }
    low, below = packages.TORCHAO_PIN
    assert (f"torchtune=={packages.TORCHTUNE_PIN}",) in requires
    assert {(f"<{below}", f"torchao>={low}"), (f">={low}", f"torchao<{below}")} & requires
    older = {"torch": "2.9.1+rocm6.3", "torchao": "0.17.0"}
    for versions in (
        {},
        {"torchtune": "0.6.1+cpu"},
        {"torchao": "0.13.0"},
        {"torchao": "0.18.9"},
        older,
    ):
        installed(**versions)
        assert packages.wrong_pins() is None
    installed(**older | {"torchao": "0.18.0"})  # older torch needs older torchao
    assert (
        "needs torchtune==0.6.1 and torchao>=0.13,<0.18 with torch 2.9.1+rocm6.3; found"
        in packages.wrong_pins()
    )


TORCHTUNE = """
import torchao
hasattr(torchao.dtypes, "x"), hasattr(torchao.quantization, "x")  # now neither waits
before = {*dir(torchao.dtypes), *dir(torchao.quantization)}
from torchtune.training import quantization
from torchao.dtypes.nf4tensor import NF4Tensor
print(NF4Tensor, *sorted({*dir(torchao.dtypes), *dir(torchao.quantization)} - before - {"nf4tensor", "quantize_"}))
print(torchao.quantization.int4_weight_only("called"))
"""
QUANTISER = """
from torchao.dtypes import TensorCoreTiledLayout
from torchao.quantization import int4_weight_only, int8_dynamic_activation_int4_weight
"""


@pytest.mark.parametrize("how", ["bridge", "defer"])
@pytest.mark.parametrize(("version", "added"), [("0.15", 0), ("0.17", 2), ("0.18", 3)])
def test_torchtune_imports_what_torchao_has_moved(tmp_path, version, added, how):
    """With packages laid out as both are; torchao is as it was until torchtune asks for more."""
    names = ["TensorCoreTiledLayout", "int4_weight_only", "int8_dynamic_activation_int4_weight"]
    files = {
        "torchao/__init__.py": "from . import dtypes, quantization",
        "torchao/dtypes/__init__.py": f"{names[0]} = str" if added < 3 else "",
        "torchao/quantization/__init__.py": f"{names[1]} = {names[2]} = str" if not added else "",
        "torchao/dtypes/nf4tensor.py" if added < 3 else "torchao/quantization/quantize_/workflows/nf4/nf4_tensor.py":
            "NF4Tensor = 'NF4'",
        "torchtune/__init__.py": TORCHTUNE,
        "torchtune/training/__init__.py": "",
        "torchtune/training/quantization.py": QUANTISER,
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    program = f"from rocm_ext.base import deferred; deferred.{how}(); import torchtune; torchtune.training"
    command = [sys.executable, "-c", program]
    run = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    said = run.stdout.splitlines()
    assert said[0].split() == ["NF4", *names[3 - added :]]
    if added:
        assert run.stderr.splitlines()[-1].endswith(
            f'{names[1]}, which is gone: pip install "torchao<0.16"'
        )
    else:
        assert said[1] == "called"
