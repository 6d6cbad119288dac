"""The commands in the shipped RAFT configs' heads work, and the configs train the same models as their SFT siblings."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from rocm_ext.recipes.raft_rocm import RAFT
from torchtune import config as torchtune_config

from rocm_ext import config, verifiers
from rocm_ext.machine.profile import check_locked, load_profile
from tests.config.test_run_configs import CONFIGS, head, text

NAMES = sorted(path.stem for path in CONFIGS.glob("*raft*.yaml"))
SIBLINGS = {"mi300x_qwen7b_raft_8gpu": "mi300x_qwen7b"}


def load(name: str, *overrides: str):
    return config.load("raft_rocm", name, ["hardware=cpu", *overrides])


def test_every_machine_has_configs():
    sizes = ["qwen0_5b", "qwen1_5b", "qwen3b", "qwen7b", "coder7b"]
    names = [f"strix_halo_{size}_raft" for size in sizes]
    names += [f"strix_halo_qwen3_{size}_raft" for size in ("1_7b", "4b", "8b")]
    names += [
        "mi300x_qwen3_4b_raft",
        "mi300x_qwen7b_raft",
        "mi300x_qwen7b_raft_8gpu",
        "mi50_qwen0_5b_raft",
        "cpu_pocket_raft",
    ]
    assert sorted(names) == NAMES
    assert all(config.recipe_of(name).name == "raft_rocm" for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_runs_on_any_machine_with_hardware_cpu(name):
    cfg = load(name)
    assert (cfg.hardware, cfg.device, cfg.dtype) == ("cpu", "cpu", "fp32")
    assert cfg.sequences_per_step == 32
    assert not Path(cfg.output_dir).is_absolute()
    raft = RAFT(cfg)
    assert raft.sampling.temperature == 1.0
    assert cfg.eval_prompts is not None
    verifier = verifiers.build(OmegaConf.to_container(cfg.verifier))
    assert type(verifier).__name__ == ("PythonTests" if "coder" in name else "MathAnswer")


@pytest.mark.parametrize("name", NAMES)
def test_its_own_hardware_profile_takes_it(name):
    cfg = config.load("raft_rocm", name)
    profile = load_profile(cfg.hardware)
    assert check_locked(profile, OmegaConf.to_container(cfg), []) == []
    assert cfg.dtype == profile.settings["dtype"]


@pytest.mark.parametrize("name", NAMES)
def test_torchtune_finds_it_valid(name):
    torchtune_config.validate(OmegaConf.load(CONFIGS / f"{name}.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_its_siblings_model(name):
    sibling = OmegaConf.load(CONFIGS / f"{SIBLINGS.get(name, name.removesuffix('_raft'))}.yaml")
    ours = OmegaConf.load(CONFIGS / f"{name}.yaml")
    assert ours.model == sibling.model
    assert ours.hardware == sibling.hardware
    for key in ("checkpoint_dir", "checkpoint_files", "model_type") if "checkpointer" in sibling else ():
        assert ours.checkpointer[key] == sibling.checkpointer[key]


@pytest.mark.parametrize("name", NAMES)
def test_the_head_says_how_to_run_it(name):
    lines = [line[1:].strip() for line in head(name).splitlines()]
    runs = [re.fullmatch(r"tune run (--nproc_per_node 8 )?raft_rocm --config (\S+)(.*)", line) for line in lines]
    runs = [match for match in runs if match]
    assert runs
    for match in runs:
        assert match[2] == name
        assert bool(match[1]) == name.endswith("8gpu")
        load(name, *match[3].split())
    if name == "cpu_pocket_raft":
        return
    (download,) = [line for line in lines if line.startswith("tune download ")]
    assert download.endswith(load(name).checkpointer.checkpoint_dir)
    assert ("bubblewrap" in head(name)) == ("PythonTests" in text(name))


def test_every_key_of_the_recipe_is_read():
    """Code must read every key of the defaults."""
    folder = CONFIGS.parent
    files = [*folder.glob("rocm_ext/**/*.py"), *folder.glob("recipes/*.py")]
    lists = ("values.py", "checkpoint.py")  # these name keys without reading them
    source = "\n".join(path.read_text() for path in files if path.name not in lists)
    for key in config.defaults("raft_rocm"):
        assert re.search(rf"cfg\.{key}\b|[\"']{key}[\"']", source), key


def test_a_trainer_inside_raft_sees_the_keys_of_a_recipe_of_ones_own():
    cfg = load("cpu_pocket_raft")
    cfg.lora_plus_ratio = 8  # as the defaults of a recipe that extends raft_rocm would add it
    training = RAFT(cfg).training_config()
    assert training.lora_plus_ratio == 8
    assert (training.recipe, training.dataset) == ("lora_finetune_rocm", None)
    assert not {"cycles", "verifier", "prompts"} & set(training)
