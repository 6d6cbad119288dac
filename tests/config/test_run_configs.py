"""The shipped run configs, of every recipe: they are valid anywhere, and the commands in their heads work."""

import re
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from rocm_ext.recipes.dpo_rocm import DPO
from rocm_ext.recipes.raft_rocm import RAFT
from torchtune import config as torchtune_config

from rocm_ext import config, verifiers
from rocm_ext.base import registry
from rocm_ext.config.checks.rollouts import check_sampled_values
from rocm_ext.config.keys import kinds
from rocm_ext.losses import Preference, objective_of
from rocm_ext.machine.profile import check_locked, load_profile
from rocm_ext.model.download import published, published_models
from rocm_ext.model.native.decoder import NativeDecoder
from tests.kit.plans import as_configured, plan
from tools.run_configs.__main__ import written

RECIPE = registry.SFT
CONFIGS = Path(__file__).parents[2] / "recipe_configs"
ALL = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
RECIPES = {
    name: re.search(r"^recipe: (\w+)", (CONFIGS / f"{name}.yaml").read_text(), re.M)[1]
    for name in ALL
}
NAMES = [name for name in ALL if RECIPES[name] == RECIPE]
FROM_FOLDER = [name for name in NAMES if name != "cpu_pocket"]


def text(name: str) -> str:
    return (CONFIGS / f"{name}.yaml").read_text()


def head(name: str) -> str:
    return text(name).split("\n\n", 1)[0]


def load(name: str, *overrides: str) -> DictConfig:
    return config.load(RECIPES[name], name, ["hardware=cpu", *overrides])


@pytest.mark.parametrize("name", ALL)
def test_a_head_names_the_files_with_the_other_keys(name):
    (named,) = re.findall(
        r"^# All other keys, in recipe_configs/defaults: (.*)[.]$", text(name), re.M
    )
    keys = set()
    for file in named.split(", "):
        keys |= OmegaConf.load(CONFIGS / "defaults" / file).keys() - {"include", "extends"}
    assert keys == config.defaults(RECIPES[name]).keys()


@pytest.mark.parametrize("recipe", registry.TITLES)
def test_a_default_is_one_of_the_values_that_its_key_takes(recipe):
    defaults = config.defaults(recipe)
    taken = {key: kind for key, kind in kinds(recipe).items() if defaults[key] != "???"}
    assert len(taken) > 30
    assert [
        key
        for key, kind in taken.items()
        if not kind.fits(OmegaConf.create({"x": defaults[key]}).x)
    ] == []


def test_every_machine_has_configs():
    machines = {OmegaConf.load(CONFIGS / f"{name}.yaml").hardware for name in NAMES}
    assert machines == {"strix_halo", "strix_halo_windows", "mi300x", "mi50", "radeon", "cpu"}
    assert {name for name in ALL if name.startswith("cpu_")} == {
        "cpu_pocket", "cpu_pocket_raft", "cpu_pocket_grpo", "cpu_pocket_dpo", "cpu_pocket_tools", "cpu_pocket_distil"
    }  # fmt: skip


def test_the_files_are_those_of_the_table():
    """If not, edit tools/run_configs or rocm_ext/config/keys.yaml, and run `make configs`."""
    files = written()
    assert [name for name in files if text(name) != files[name]] == []
    defaults = {f"defaults/{path.stem}" for path in (CONFIGS / "defaults").glob("*.yaml")}
    assert {*ALL, *defaults} == {*files, *(name for name in ALL if name.startswith("cpu_"))}


@pytest.mark.wide(always=16)
@pytest.mark.parametrize("name", ALL)
def test_it_runs_on_its_own_machine_and_with_hardware_cpu_on_any(name):
    cfg = load(name)
    assert (cfg.hardware, cfg.device, cfg.dtype, cfg.compile) == ("cpu", "cpu", "fp32", False)
    if "sequences_per_step" in cfg:
        assert cfg.sequences_per_step == (64 if name == "cpu_pocket_raft" else 32)
        assert cfg.gradient_accumulation_steps is None
    assert not Path(cfg.output_dir).is_absolute(), "/tmp is emptied at reboot"
    assert not Path(cfg.checkpointer.checkpoint_dir).is_absolute()
    assert cfg.optimizer.lr < 0.01, "1e-3 without a dot is a string in some YAML readers"
    if cfg.recipe in ("raft_rocm", "grpo_rocm"):
        assert cfg.eval_prompts is not None
        verifier = verifiers.build(OmegaConf.to_container(cfg.verifier or cfg.environment.verifier))
        usual = "ExactMatch" if name == "cpu_pocket_tools" else "MathAnswer"
        assert type(verifier).__name__ == ("PythonTests" if "coder" in name else usual)
    check_values(cfg)
    torchtune_config.validate(OmegaConf.load(CONFIGS / f"{name}.yaml"))  # as `tune` does
    own = config.load(RECIPES[name], name)
    profile = load_profile(own.hardware)
    assert check_locked(profile, OmegaConf.to_container(own), []) == []
    assert [own[key] for key in ("dtype", "num_workers")] == [
        profile.settings[key] for key in ("dtype", "num_workers")
    ]


def check_values(cfg: DictConfig) -> None:
    """Let the recipe check its values; nothing is read or built for that."""
    if cfg.recipe == "grpo_rocm":
        check_sampled_values(cfg, "grpo_rocm")
    elif cfg.recipe == "raft_rocm":
        assert RAFT(cfg).sampling.temperature == 1.0
    elif cfg.recipe == "dpo_rocm":
        DPO(cfg)
        assert isinstance(objective_of(config.instantiate(cfg.loss, key="loss")), Preference)


@pytest.mark.wide(always=16)
@pytest.mark.parametrize("name", ALL)
def test_the_head_says_how_to_run_it(name):
    lines = [line[1:].strip() for line in head(name).splitlines()]
    assert all(line.startswith("#") for line in head(name).splitlines())
    start = rf"(HIP_VISIBLE_DEVICES=\S+ )?tune run (?:--nproc_per_node (\d) )?{RECIPES[name]} --config (\S+)(.*)"
    runs = [match for line in lines if (match := re.fullmatch(start, line))]
    assert runs
    for match in runs:
        assert match[3] == name
        check_values(load(name, *match[4].split()))  # with the overrides that the head shows
    of_several = name.endswith(("qwen32b", "qwen72b", "mi300x_qwen3_32b", "8gpu"))
    assert {match[2] for match in runs if match[2]} == (
        {"7" if runs[0][1] else "8"} if of_several else set()
    )
    cfg = load(name)
    if name.startswith("cpu_pocket"):
        assert f"rocm-ext pocket {cfg.model.checkpoint_dir}" in " ".join(lines)
        mine = load(name, "model.checkpoint_dir=models/mine")
        assert (mine.checkpointer.checkpoint_dir, mine.tokenizer.path) == (
            "models/mine",
            "models/mine/tokenizer.json",
        )
        return
    download, *_ = [
        line for line in lines if line.startswith("tune download ")
    ]  # a teacher's comes second
    repo, folder = re.match(r"tune download (\S+) --output-dir (\S+)", download).groups()
    assert folder == cfg.checkpointer.checkpoint_dir
    assert Path(folder).name == Path(repo).name
    assert Path(cfg.tokenizer.path).is_relative_to(folder)
    moved = load(name, "model.checkpoint_dir=/elsewhere")
    assert moved.checkpointer.checkpoint_dir == "/elsewhere"
    assert Path(moved.tokenizer.path).is_relative_to("/elsewhere"), "one key moves the model"


@pytest.mark.wide(always=2)
@pytest.mark.parametrize("recipe", registry.TITLES)
def test_every_key_of_a_recipe_is_read(recipe):
    """Code must read every key of the defaults."""
    folder = CONFIGS.parent
    files = [*folder.glob("rocm_ext/**/*.py"), *folder.glob("recipes/*.py")]
    checks = (
        CONFIGS.parent / "rocm_ext" / "config" / "checks"
    )  # they name keys without reading them
    source = "\n".join(path.read_text() for path in files if path.parent != checks)
    for key in config.defaults(recipe):
        assert re.search(rf"cfg\.{key}\b|[\"']{key}[\"']", source), key


def planned(capsys, name: str, *arguments: str) -> list[float]:
    """GiB that `rocm-ext plan` computes for a training step and, if the run samples, for sampling."""
    found = plan(capsys, "--config", name, *arguments)
    if RECIPES[name] == "dpo_rocm":
        assert found["rows"]["longest"] == 4096, (
            "without the data on disk a row has two sides of full length"
        )
    sampling = found["rollout"] or {}
    return [x / 2**30 for x in (found["configured"]["memory"]["peak"], sampling.get("peak")) if x]


FAST = ("mi50_qwen1_5b", "strix_halo_qwen7b_raft", "mi300x_qwen3_8b_dpo")


@pytest.mark.wide(always=1)
@as_configured
@pytest.mark.parametrize(
    "name", [*FAST, *(name for name in ALL if not name.startswith("cpu_") and name not in FAST)]
)
def test_the_head_s_memory_is_what_plan_prints(name, capsys):
    said = re.search(r"# Memory: (.*)", head(name))[1]
    ranks = re.search(r"--nproc_per_node (\d)", head(name))
    both = planned(capsys, name, *(["--ranks", ranks[1]] if ranks else []))
    expected = [max(both), *(both if "while sampling" in said else [])]
    if "on one" in said:
        expected += planned(capsys, name)
    if "down to" in said:
        expected.append(max(planned(capsys, name, "enable_activation_checkpointing=True")))
    assert [int(number) for number in re.findall(r"(\d+) GiB", said)] == [
        pytest.approx(x, abs=0.6) for x in expected
    ]


OLDER = {
    "qwen2_5_coder_": "coder",
    "qwen2_5_": "qwen",
    "llama_3_1_": "llama",
    "llama_3_2_": "llama3_2_",
}
OLDER |= {"llama_3_3_": "llama3_3_", "gemma_3_": "gemma3_", "gemma_4_": "gemma4_"}
# layers with LoRA where transformers computes the model, beside q_proj, k_proj and v_proj
MLP = {"o_proj", "gate_proj", "up_proj", "down_proj"}
DELTA = {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"}
ADAPTED = {
    "Qwen3-30B-A3B": {"o_proj"}, "gpt-oss": {"o_proj"}, "Qwen3.": MLP | DELTA, "gemma-3": MLP,
    "gemma-4-E": MLP | {"per_layer_input_gate", "per_layer_projection"},
}  # fmt: skip


def name_of(repo: str) -> str:
    """Return a model's name in the names of run configs."""
    own = re.sub("^Meta-|-(Instruct|it)(?=-FP8|$)|-dynamic$", "", repo.partition("/")[2])
    short = re.sub(r"[.-]", "_", own.lower())
    family = next((start for start in OLDER if short.startswith(start)), "")
    return OLDER.get(family, "") + short.removeprefix(family)


@pytest.mark.wide(always=8)
@pytest.mark.parametrize("name", FROM_FOLDER)
def test_the_model_is_the_one_that_the_name_and_the_download_say(name):
    node = load(name).model
    repo = re.search(r"tune download (\S+)", head(name))[1]
    assert repo in text(name).split("\nmodel:")[1].split("\n\n")[0], "the comment on the hub's name"
    assert published(node.checkpoint_dir)[0] == repo, "so it can be planned without a download"
    assert name.endswith("_" + name_of(repo))
    node.checkpoint_dir = str(published_models()[repo])
    with torch.device("meta"):
        model = config.instantiate(node, key="model")
    adapted = {
        n.split(".lora_")[0].rpartition(".")[2] for n, _ in model.named_parameters() if "lora_" in n
    }
    by_transformers = "transformers computes this model" in head(name)
    assert by_transformers != isinstance(model, NativeDecoder)
    others = {"output_proj", "w1", "w2", "w3"}
    if by_transformers:
        (others,) = [
            layers for start, layers in ADAPTED.items() if repo.partition("/")[2].startswith(start)
        ]
    assert adapted == {"q_proj", "k_proj", "v_proj", *others}
