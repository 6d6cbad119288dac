"""The commands in the shipped DPO configs' heads work, and the configs train the same models as their SFT siblings."""

import json
import re

import pytest
from omegaconf import OmegaConf
from rocm_ext.recipes.dpo_rocm import DPO
from torchtune import config as torchtune_config

from rocm_ext import config
from rocm_ext.cli import main
from rocm_ext.losses import Preference, objective_of
from rocm_ext.machine.profile import check_locked, load_profile
from tests.config.test_run_configs import CONFIGS, head
from tests.plan.test_plan import _without_search, as_configured  # noqa: F401

NAMES = sorted(path.stem for path in CONFIGS.glob("*_dpo.yaml"))


def load(name: str, *overrides: str):
    return config.load("dpo_rocm", name, list(overrides))


def test_every_machine_has_configs():
    assert NAMES == ["cpu_pocket_dpo", "mi300x_qwen3_8b_dpo", "strix_halo_qwen3_4b_dpo", "strix_halo_qwen3_8b_dpo"]
    assert all(config.recipe_of(name).name == "dpo_rocm" for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_valid_on_its_machine_and_on_any(name):
    torchtune_config.validate(OmegaConf.load(CONFIGS / f"{name}.yaml"))
    own = load(name)
    assert check_locked(load_profile(own.hardware), OmegaConf.to_container(own), []) == []
    DPO(load(name, "hardware=cpu"))
    assert isinstance(objective_of(config.instantiate(own.loss, key="loss")), Preference)


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_its_siblings_model(name):
    sibling = OmegaConf.load(CONFIGS / f"{name.removesuffix('_dpo')}.yaml")
    ours = OmegaConf.load(CONFIGS / f"{name}.yaml")
    assert ours.model == sibling.model
    assert ours.hardware == sibling.hardware


@pytest.mark.parametrize("name", NAMES)
def test_the_head_says_how_to_run_it(name):
    lines = [line[1:].strip() for line in head(name).splitlines()]
    runs = [match for line in lines if (match := re.fullmatch(r"tune run dpo_rocm --config (\S+)(.*)", line))]
    assert runs
    for match in runs:
        assert match[1] == name
        load(name, "hardware=cpu", *match[2].split())
    if name != "cpu_pocket_dpo":
        (download,) = [line for line in lines if line.startswith("tune download ")]
        assert download.endswith(load(name).checkpointer.checkpoint_dir)


LARGE = [name for name in NAMES if name != "cpu_pocket_dpo"]


@as_configured
@pytest.mark.parametrize("name", [LARGE[0], *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE[1:])])
def test_a_plan_counts_both_sides(capsys, name):
    """Without the data on disk a row has two sides of full length, and the head's memory is the planned one."""
    assert main(["plan", "--config", name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"]["longest"] == 4096
    planned = found["configured"]["memory"]["peak"] / 2**30
    (said,) = re.findall(r"# Memory: about (\d+) GiB", head(name))
    assert planned == pytest.approx(int(said), abs=1)
