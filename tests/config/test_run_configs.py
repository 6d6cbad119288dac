"""The commands in the shipped run configs' heads work, and ``config.load`` merges layers and reports typos."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchtune
import yaml
from omegaconf import OmegaConf
from torchtune import _recipe_registry
from torchtune import config as torchtune_config

from rocm_ext import config, hook
from rocm_ext.base import registry
from rocm_ext.base.errors import UserError
from rocm_ext.base.nested import flatten
from rocm_ext.cli import main
from rocm_ext.config import layers
from rocm_ext.machine.profile import check_locked, load_profile
from rocm_ext.model.download import published, published_models
from rocm_ext.model.native import NativeDecoder
from tests.machine.test_device import CPU, STRIX

RECIPE = "lora_finetune_rocm"
CONFIGS = Path(__file__).parents[2] / "recipe_configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
NAMES = [name for name in NAMES if not re.search("_(raft|grpo|dpo)(_8gpu)?$", name)]
FROM_FOLDER = [name for name in NAMES if name != "cpu_pocket"]
OF_TORCHTUNE = [name for name in NAMES if "differ from torchtune's" in (CONFIGS / f"{name}.yaml").read_text()]
STOCK = Path(torchtune.__file__).parents[1] / "recipes/configs"
# Run configs show these keys even if the default would do.
EDITED = {
    "batch_size", "epochs", "max_steps_per_epoch", "recipe", "resume_from_checkpoint", "save_adapter_weights_only",
    "seed", "validation_fraction",
}  # fmt: skip
# Paths: torchtune's are under /tmp.
PATHS = {"output_dir", "path", "merges_file", "checkpoint_dir"}


def text(name: str) -> str:
    return (CONFIGS / f"{name}.yaml").read_text()


def head(name: str) -> str:
    return text(name).split("\n\n", 1)[0]


def load(name: str = "strix_halo_qwen7b", *overrides: str):
    return config.load(RECIPE, str(name), ["hardware=cpu", *overrides])


def stock_config(name: str):
    """Load torchtune's own config for the same model, which the head names."""
    named = re.search(r"differ from torchtune's (\S+)\.\n", head(name))[1]
    return OmegaConf.load(STOCK / f"{named}.yaml")


# ------------------------------------------------------------------------------------------- what is shipped
def test_every_machine_has_configs():
    machines = {OmegaConf.load(CONFIGS / f"{name}.yaml").hardware for name in NAMES}
    assert machines == {"strix_halo", "strix_halo_windows", "mi300x", "mi50", "radeon", "cpu"}
    assert len(NAMES) >= 15


@pytest.mark.parametrize("name", NAMES)
def test_runs_on_any_machine_with_hardware_cpu(name):
    cfg = load(name)
    assert (cfg.hardware, cfg.device, cfg.dtype, cfg.compile) == ("cpu", "cpu", "fp32", False)
    assert cfg.sequences_per_step == 32, "a step sees the same rows on any number of GPUs"
    assert cfg.gradient_accumulation_steps is None
    assert not Path(cfg.output_dir).is_absolute(), "/tmp is emptied at reboot"
    assert not Path(cfg.checkpointer.checkpoint_dir).is_absolute()
    assert cfg.optimizer.lr < 0.01, "1e-3 without a dot is a string in some YAML readers"


@pytest.mark.parametrize("name", NAMES)
def test_its_own_hardware_profile_takes_it(name):
    cfg = config.load(RECIPE, name)
    profile = load_profile(cfg.hardware)
    assert check_locked(profile, OmegaConf.to_container(cfg), []) == []
    assert cfg.dtype == profile.settings["dtype"]
    assert cfg.num_workers == profile.settings["num_workers"]


@pytest.mark.parametrize("name", NAMES)
def test_torchtune_finds_it_valid(name):
    torchtune_config.validate(OmegaConf.load(CONFIGS / f"{name}.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_the_head_says_how_to_run_it(name):
    lines = [line[1:].strip() for line in head(name).splitlines()]
    assert all(line.startswith("#") for line in head(name).splitlines())
    cfg = load(name)
    runs = [re.fullmatch(r"tune run (--nproc_per_node 8 )?lora_finetune_rocm --config (\S+)(.*)", x) for x in lines]
    runs = [match for match in runs if match]
    assert runs
    for match in runs:
        assert match[2] == name
        load(name, *match[3].split())  # the overrides that the head shows
    assert any(match[1] for match in runs) == name.endswith(("qwen32b", "qwen72b", "mi300x_qwen3_32b"))
    if name == "cpu_pocket":
        assert f"rocm-ext pocket {cfg.checkpointer.checkpoint_dir}" in lines
        return
    (download,) = [line for line in lines if line.startswith("tune download ")]
    repo, folder = re.match(r"tune download (\S+) --output-dir (\S+)", download).groups()
    assert folder == cfg.checkpointer.checkpoint_dir
    assert Path(folder).name == Path(repo).name
    assert Path(cfg.tokenizer.path).is_relative_to(folder)
    moved = load(name, "model.checkpoint_dir=/elsewhere")
    assert moved.checkpointer.checkpoint_dir == "/elsewhere"
    assert Path(moved.tokenizer.path).is_relative_to("/elsewhere"), "one key moves the model"
    assert "rocm_ext.data.sft_dataset" in text(name), "how to use one's own rows"
    assert re.search(r"# Memory: .*\d+ GiB", head(name))
    assert name in str(cfg.output_dir)


def planned(capsys, name: str, *arguments: str) -> list[float]:
    """GiB that `rocm-ext plan` computes as configured, for a training step and, if the run samples, for sampling."""
    main(["plan", "--config", name, *arguments, "--json"])
    plan = json.loads(capsys.readouterr().out)
    sampling = plan["rollout"] or {}
    return [x / 2**30 for x in (plan["configured"]["memory"]["peak"], sampling.get("peak")) if x]


def peak(capsys, name: str, *arguments: str) -> float:
    return planned(capsys, name, *arguments)[0]


FAST = ("mi50_qwen1_5b",)
SAMPLING = sorted({path.stem for path in CONFIGS.glob("*.yaml")} - set(NAMES))
SAMPLING = [name for name in SAMPLING if not re.search("_dpo$|^cpu_", name)]
FAST_SAMPLING = ("strix_halo_qwen7b_raft",)


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in FROM_FOLDER if name not in FAST)]
)
def test_the_head_s_memory_is_what_plan_prints(name, capsys):
    said = re.search(r"# Memory: (.*)", head(name))[1]
    expected = [peak(capsys, name, *(["--ranks", "8"] if " per GPU" in said else []))]
    if "on one" in said:
        expected.append(peak(capsys, name))
    if "down to" in said:
        expected.append(peak(capsys, name, "enable_activation_checkpointing=True"))
    assert [int(number) for number in re.findall(r"(\d+) GiB", said)] == [pytest.approx(x, abs=0.6) for x in expected]


@pytest.mark.parametrize(
    "name", [*FAST_SAMPLING, *(pytest.param(x, marks=pytest.mark.slow) for x in SAMPLING if x not in FAST_SAMPLING)]
)
def test_the_head_s_memory_is_what_plan_prints_of_sampling_runs(name, capsys):
    said = re.search(r"# Memory: (.*)", head(name))[1]
    ranks = re.search(r"--nproc_per_node (\d)", head(name))
    both = planned(capsys, name, *(["--ranks", ranks[1]] if ranks else []))
    expected = [max(both), *(both if "while sampling" in said else [])]
    if "down to" in said:
        expected.append(max(planned(capsys, name, "enable_activation_checkpointing=True")))
    assert [int(number) for number in re.findall(r"(\d+) GiB", said)] == [pytest.approx(x, abs=0.6) for x in expected]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cpu_pocket"])
def test_the_rows_it_shows_can_be_switched_in(name, tmp_path):
    example = re.search(r"# (dataset:)\n#   (_component_: \S+)\n#   (source: \S+)  # \{", text(name))
    keys = yaml.safe_load("\n  ".join(example.groups()))
    own = OmegaConf.load(CONFIGS / f"{name}.yaml")
    own.dataset = keys["dataset"]
    OmegaConf.save(own, tmp_path / "own.yaml")
    assert load(tmp_path / "own.yaml").dataset == keys["dataset"], "nothing of the lower layer's stays"


@pytest.mark.parametrize("name", OF_TORCHTUNE)
def test_departures_from_torchtune_say_so(name):
    stock, ours = stock_config(name), OmegaConf.load(CONFIGS / f"{name}.yaml")
    for part in ("optimizer", "lr_scheduler", "metric_logger"):
        assert ours[part]._component_ == stock[part]._component_
    assert ("# torchtune: without k_proj" in text(name)) == ("k_proj" not in stock.model.lora_attn_modules)
    theirs = flatten(OmegaConf.to_container(stock))
    lines = {line.split(":")[0].strip(): line for line in text(name).splitlines() if ":" in line and line[0] != "#"}
    for path, value in flatten(OmegaConf.to_container(ours)).items():
        key = path.split(".")[-1]
        said = re.search(r"# torchtune: ([\w.-]+?)(?=[;,. ]|$)", lines.get(key, ""))
        if key in PATHS or path not in theirs or key == "_component_":
            continue
        if value == theirs[path]:
            assert said is None, f"{key} does not depart"
        else:
            assert said, f"{name}: {key} is {value}, torchtune's {theirs[path]}"
            number = yaml.safe_load(said[1])
            assert (float(number) if isinstance(theirs[path], float) else number) == theirs[path], (key, said[1])
    dataset = stock.dataset._component_.rpartition(".")[2]
    assert ours.dataset._component_ == stock.dataset._component_ or f"# torchtune: {dataset}," in text(name)


@pytest.mark.parametrize("name", OF_TORCHTUNE)
def test_the_download_line_is_torchtune_s(name):
    stock_name = re.search(r"differ from torchtune's (\S+)\.\n", head(name))[1]
    theirs, ours = (
        re.search(r"tune download .*", x)[0] for x in ((STOCK / f"{stock_name}.yaml").read_text(), head(name))
    )
    # two of torchtune's rely on the default folder, which is /tmp; its Llama needs a file of original/
    theirs, ours = (line.split(" --output-dir")[0] for line in (theirs, ours))
    assert ours.replace("Qwen2.5-Coder-7B", "Qwen2.5-7B") == theirs


@pytest.mark.parametrize("name", NAMES)
def test_no_line_repeats_a_default(name):
    run = OmegaConf.load(CONFIGS / f"{name}.yaml")
    below = OmegaConf.create(config.defaults(RECIPE))
    below.update(load_profile(run.hardware).settings)
    repeated = {key for key in run if key in below and not OmegaConf.is_missing(below, key) and run[key] == below[key]}
    assert repeated <= EDITED


def test_the_pocket_model_is_small():
    with torch.device("meta"):
        model = config.instantiate(load("cpu_pocket").model, key="model")
    assert sum(p.numel() for n, p in model.named_parameters() if "lora_" not in n) == pytest.approx(1e6, rel=0.1)


OLDER = {"qwen2_5_coder_": "coder", "qwen2_5_": "qwen", "llama_3_1_": "llama", "llama_3_2_": "llama3_2_"}
OLDER |= {"gemma_3_": "gemma3_"}


def name_of(repo: str) -> str:
    """Return a model's name in the names of run configs."""
    own = re.sub("^Meta-|-(Instruct|it)$", "", repo.partition("/")[2])
    short = re.sub(r"[.-]", "_", own.lower())
    family = next((start for start in OLDER if short.startswith(start)), "")
    return OLDER.get(family, "") + short.removeprefix(family)


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
    adapted = {n.split(".lora_")[0].rpartition(".")[2] for n, _ in model.named_parameters() if "lora_" in n}
    moe = repo.endswith("A3B")
    by_transformers = "transformers computes this model" in head(name)
    assert by_transformers != isinstance(model, NativeDecoder)
    others = {"output_proj", "w1", "w2", "w3"}
    if by_transformers:
        others = {"o_proj"} if moe else {"o_proj", "gate_proj", "up_proj", "down_proj"}
    assert adapted == {"q_proj", "k_proj", "v_proj", *others}


def test_the_configs_share_the_settings_of_lora():
    nodes = [OmegaConf.to_container(load(name).model) for name in FROM_FOLDER]
    assert len({str({k: v for k, v in node.items() if k != "checkpoint_dir"}) for node in nodes}) == 1


def test_tune_knows_them(monkeypatch):
    monkeypatch.setattr(_recipe_registry, "_ALL_RECIPES", [])
    hook._add_recipes(registry.recipes())
    recipe = next(r for r in _recipe_registry.get_all_recipes() if r.name == RECIPE)
    assert [c.name for c in recipe.configs] == NAMES
    for entry in recipe.configs:
        assert (STOCK / entry.file_path).read_text() == text(entry.name), "tune joins its own folder and ours"


# ------------------------------------------------------------------------------------------------ config.load
COMPONENTS = """
model: {_component_: torchtune.models.qwen2_5.lora_qwen2_5_0_5b, lora_attn_modules: [q_proj]}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: m, output_dir: "${output_dir}"}
tokenizer: {_component_: torchtune.models.qwen2_5.qwen2_5_tokenizer, path: m/vocab.json, merges_file: m/merges.txt}
dataset: {_component_: rocm_ext.data.sft_dataset, source: rows.jsonl}
optimizer: {_component_: torch.optim.AdamW, lr: 1e-3}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """``run(yaml, *overrides)`` loads a small run config with these lines, as on Strix Halo."""
    monkeypatch.setattr(layers, "detect", lambda: STRIX)
    monkeypatch.chdir(tmp_path)

    def load_lines(lines: str = "", *overrides: str, base: str = COMPONENTS + "output_dir: out\n"):
        (tmp_path / "run.yaml").write_text(base + lines)
        return config.load(RECIPE, "run.yaml", list(overrides))

    return load_lines


def test_layers(run):
    cfg = run()
    assert cfg.hardware == "strix_halo", "auto is resolved"
    assert (cfg.dtype, cfg.device) == ("bf16", "cuda"), "the profile over the defaults"
    assert cfg.epochs == 1
    assert cfg.loss._component_.endswith("CrossEntropy")
    assert run("dtype: fp16\nepochs: 3").dtype == "fp16", "the run over the profile"
    assert run("dtype: fp16\nepochs: 3", "epochs=5", "dtype=fp32").epochs == 5, "the command line over all"
    assert run("hardware: mi300x").compile is True
    assert run("hardware: mi300x\ncompile: False").compile is False


def test_a_component_replaces_the_lower_one_whole(run):
    cfg = run("loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}", "optimizer.lr=5e-4")
    assert cfg.loss == {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
    assert cfg.optimizer == {"_component_": "torch.optim.AdamW", "lr": 5e-4}, "single arguments by dots"
    assert run("", "optimizer=torch.optim.SGD").optimizer == {"_component_": "torch.optim.SGD", "lr": 1e-3}


def test_hardware_on_the_command_line_lifts_its_profile(run):
    lines = "hardware: strix_halo\ndtype: fp16\ncompile: True\nepochs: 3"
    cfg = run(lines, "hardware=cpu")
    assert (cfg.hardware, cfg.device, cfg.dtype, cfg.compile, cfg.epochs) == ("cpu", "cpu", "fp32", False, 3)
    assert run(lines, "hardware=cpu", "dtype=bf16").dtype == "bf16"
    assert run(lines).dtype == "fp16"
    assert run(lines, "hardware=auto").dtype == "bf16"


def test_auto_on_a_machine_without_a_gpu(run, monkeypatch):
    monkeypatch.setattr(layers, "detect", lambda: CPU)
    assert run().hardware == "cpu"
    monkeypatch.setattr(layers, "detect", lambda: replace(STRIX, arch="gfx1150"))
    with pytest.raises(UserError, match=r"gfx1150.*hardware=strix_halo"):
        run()


@pytest.mark.parametrize(
    ("lines", "overrides", "message"),
    [
        ("batchsize: 4", [], "unknown key batchsize; did you mean batch_size"),
        ("wandb: 4", [], r"unknown key wandb; the nearest of \d+ known names are (\w+, ){4}\w+$"),
        ("3: 4", [], "unknown key 3"),
        ("", ["batchsize=4"], "unknown key batchsize; did you mean batch_size"),
        ("", ["=4"], "unknown key"),
        ("", ["~epohcs"], "~epohcs: config run.yaml has no such key"),
        ("", ["model.lora_rnak=4"], "unknown key model.lora_rnak for .*; did you mean lora_rank"),
        ("", ["dataset.sorce=4"], "unknown key dataset.sorce for .*; did you mean source"),
        ("", ["device.index=4"], "unknown key device.index: device is 'cuda'"),
        (
            "loss: {_component_: rocm_ext.losses.CrossEntropy, chunks: 4}",
            [],
            "unknown key loss.chunks",
        ),
        ("dataset_val: [{_component_: rocm_ext.data.sft_dataset, sorce: a}]", [], "dataset_val.sorce"),
        ("hardware: strix_hallo", [], "hardware=strix_hallo is unknown.*did you mean strix_halo"),
        ("", ["hardware=mi300"], "hardware=mi300 is unknown.*did you mean mi300x"),
    ],
)
def test_unknown_keys(run, lines, overrides, message):
    with pytest.raises(UserError, match=message):
        run(lines, *overrides)


@pytest.mark.parametrize(
    ("component", "message"),
    [
        ("no_such_module.model", "there is no module 'no_such_module'"),
        (
            "torchtune.models.qwen2_5.lora_qwen2_5_8b",
            "models.qwen2_5 has no 'lora_qwen2_5_8b'; did you mean lora_qwen2_5_",
        ),
        ("torchtune.models.qwen2_5", "is a module; expected a function or class"),
        ("broken.model", "cannot be imported: .*no_such_dependency"),
        ("''", "cannot be imported: "),
        ("7", "7 cannot be imported: "),
    ],
)
def test_components_that_cannot_be_imported(run, tmp_path, component, message):
    (tmp_path / "broken.py").write_text("import no_such_dependency\n")
    with pytest.raises(UserError, match=rf"(?s)^model\._component_ .*{message}"):
        run("", f"model={component}" if component not in ("''", "7") else f"model._component_={component}")


@pytest.mark.parametrize("value", ["torchtune.models.qwen2_5.lora_qwen2_5_0_5b", "{lora_rank: 8}", "7", "[a]"])
def test_a_component_key_without_component(run, value):
    base = (COMPONENTS + "output_dir: out\n").replace("model: {", "profiler: {")
    with pytest.raises(UserError, match=r"model .*_component_ and its arguments"):
        run(f"model: {value}\n", base=base)


def test_missing_keys(run):
    everything = "checkpointer, dataset, model, optimizer, output_dir, tokenizer"
    with pytest.raises(UserError, match=f"config run.yaml: {everything} must be set"):
        run(base="")
    with pytest.raises(UserError, match=r"^config run.yaml: output_dir must be set"):
        run(base=COMPONENTS)  # the checkpointer's key refers to it
    with pytest.raises(UserError, match="output_dir must be set"):
        run("", "output_dir=null")
    with pytest.raises(UserError, match="model must be set"):
        run("", "model=null")
    with pytest.raises(UserError, match=r"optimizer\.lr must be set"):
        run(base=COMPONENTS.replace("lr: 1e-3", "lr: '???'") + "output_dir: out\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [1", "run.yaml is no valid YAML"),
        ("a:\n\tb: 1", "run.yaml is no valid YAML.*line 2"),
        ("epochs: 1\nepochs: 2", "duplicate key epochs"),
        ("- 1\n- 2", "holds a ListConfig; expected keys"),
        ("output_dir: ${", "config run.yaml: "),
        (COMPONENTS + "output_dir: ${nope}/x", "config run.yaml: Interpolation key 'nope' not found"),
    ],
)
def test_files_that_are_no_config(run, content, message):
    with pytest.raises(UserError, match=message) as caught:
        run(base=content)
    assert "\n" not in str(caught.value)


def test_bytes_and_folders_are_no_config(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"epochs: \xff\xfe")
    with pytest.raises(UserError, match=r"cannot read config .*run\.yaml"):
        load(tmp_path / "run.yaml")
    with pytest.raises(UserError, match="neither a file nor one of this library's"):
        load(tmp_path)


def test_names(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for typo in ("strix_halo_qwen7", "strixhalo_qwen7b", "strix_halo_qwen7b.yaml"):
        with pytest.raises(UserError, match=r"did you mean strix_halo_qwen7b\?"):
            load(typo)
    with pytest.raises(UserError, match=r"known names are (\w+, ){4}\w+$"):
        load("foo/bar")
    (tmp_path / "strix_halo_qwen7b").write_text("epochs: 2")
    with pytest.raises(UserError, match="must be set"):  # a file in the current folder takes precedence
        load("strix_halo_qwen7b")


def test_one_of_two_keys_counts_the_rows_of_a_step(run):
    def rows(lines: str, *overrides: str):
        cfg = run(lines, *overrides)
        return cfg.gradient_accumulation_steps, cfg.sequences_per_step

    assert rows("") == (None, None)
    assert rows("sequences_per_step: 32") == (None, 32)
    assert rows("sequences_per_step: 32", "gradient_accumulation_steps=4") == (4, None), "the higher layer's"
    assert rows("gradient_accumulation_steps: 4", "sequences_per_step=32") == (None, 32)
    assert rows("sequences_per_step: 32", "gradient_accumulation_steps=null") == (None, 32)
    assert rows("sequences_per_step: 32", "sequences_per_step=null", "gradient_accumulation_steps=4") == (4, None)
    assert rows("sequences_per_step: 32\ngradient_accumulation_steps: 4") == (4, 32), "the recipe refuses both"


def test_variables_are_keys_that_others_refer_to(run):
    lines = "data: rows\nsource: x\n"
    base = COMPONENTS.replace("rows.jsonl", "'${data}/${source}.jsonl'") + "output_dir: out\n"
    assert run(lines, base=base).dataset.source == "rows/x.jsonl"
    cfg = run(lines, "data=/else", base=base)
    assert cfg.dataset.source == "/else/x.jsonl"
    recorded = OmegaConf.to_yaml(cfg, resolve=True)  # as a run does, whose config.yaml can be started again
    assert run("", base=recorded) == cfg
    with pytest.raises(UserError, match="unknown key output_di; did you mean output_dir"):
        run("output_di: out", base=COMPONENTS)  # a prefix of the key in ${output_dir}
    with pytest.raises(UserError, match="unknown key data"):
        run(lines)


def test_a_tilde_is_the_home_folder(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    lines = "model: {_component_: rocm_ext.model.from_checkpoint, checkpoint_dir: ~/models/Qwen3-8B}\n"
    lines += (
        "metric_logger: {_component_: torchtune.training.metric_logging.DiskLogger, log_dir: '${output_dir}/logs'}\n"
    )
    base = "\n".join(x for x in COMPONENTS.splitlines() if not x.startswith(("model", "checkpointer", "tokenizer")))
    cfg = run(lines, "checkpointer.adapter_checkpoint=~/a", base=f"{base}\noutput_dir: ~/out\n")
    assert (cfg.output_dir, cfg.metric_logger.log_dir) == (f"{tmp_path}/out", f"{tmp_path}/out/logs")
    assert cfg.model.checkpoint_dir == cfg.checkpointer.checkpoint_dir == f"{tmp_path}/models/Qwen3-8B"
    assert cfg.tokenizer.path == f"{tmp_path}/models/Qwen3-8B/tokenizer.json"
    assert cfg.checkpointer.adapter_checkpoint == f"{tmp_path}/a"


@pytest.mark.parametrize("null", ["null", "None", "~", ""])
def test_components_can_be_switched_off_on_the_command_line(run, null):
    lines = "lr_scheduler: {_component_: torchtune.training.get_cosine_schedule_with_warmup, num_warmup_steps: 1}"
    assert run(lines).lr_scheduler.num_warmup_steps == 1
    assert run(lines, f"lr_scheduler={null}").lr_scheduler is None


def test_a_removed_key_is_the_default_again(run):
    lines = "epochs: 3\nlr_scheduler: {_component_: torchtune.training.get_cosine_schedule_with_warmup}\n"
    cfg = run(lines, "~epochs", "~lr_scheduler", "~optimizer.lr")
    assert (cfg.epochs, cfg.lr_scheduler) == (1, None)
    assert "lr" not in cfg.optimizer
    with pytest.raises(UserError, match="model must be set"):
        run("", "~model")


def test_lists_of_components(run):
    one = {"_component_": "rocm_ext.data.sft_dataset", "source": "a.jsonl"}
    assert run("", "dataset=[{_component_: rocm_ext.data.sft_dataset, source: a.jsonl}]").dataset == [one]


@pytest.mark.parametrize("override", ["num_workers=4", "pin_memory=True"])
def test_hardware_locks_hold_against_every_layer(run, override):
    key, value = override.split("=")
    profile = load_profile("strix_halo")
    for cfg in (run("", override), run(f"{key}: {value}")):
        with pytest.raises(UserError, match=f"{override} on strix_halo.*To insist: hardware_overrides: .{key}"):
            check_locked(profile, OmegaConf.to_container(cfg), list(cfg.hardware_overrides))
    cfg = run("", override, f"hardware_overrides=[{key}]")
    (line,) = check_locked(profile, OmegaConf.to_container(cfg), list(cfg.hardware_overrides))
    assert line.startswith(override)


def test_the_command_line(capsys):
    assert config.command_line(["--config", "a", "b=1", "~c"]) == ("a", ["b=1", "~c"])
    assert config.command_line(["b=x=y", "--config=a.yaml"]) == ("a.yaml", ["b=x=y"])
    for argv, message in [
        ([], "--config is missing; `tune ls`"),
        (["b=1"], "--config is missing"),
        (["--config"], "--config"),
        (["--config", "a", "--batch_size", "4"], "unknown option --batch_size"),
        (["--config", "cpu_pocket", "batch_size"], "cannot read override 'batch_size'; expected key=value"),
    ]:
        with pytest.raises(UserError, match=re.escape(message)) as caught:
            config.load("lora_finetune_rocm", *config.command_line(argv))
        assert caught.value.code == 2
    with pytest.raises(SystemExit) as left:
        config.command_line(["--help"], "What it does.")
    assert left.value.code == 0
    assert "What it does." in capsys.readouterr().out


def test_exit_codes(monkeypatch, capsys):
    def fail():
        raise UserError("so it is", code=2)

    def stop():
        raise KeyboardInterrupt

    monkeypatch.delenv("RANK", raising=False)
    assert [config.guarded(action) for action in (list, fail, stop)] == [0, 2, 130]
    monkeypatch.setenv("RANK", "3")
    assert config.guarded(fail) == 2
    assert capsys.readouterr().err.splitlines() == ["error: so it is", "interrupted", "[rank 3] error: so it is"]


def test_instantiate_names_the_key():
    node = OmegaConf.create({"_component_": "torch.optim.AdamW", "lr": 1e-3, "momentum": 0.9})
    with pytest.raises(UserError, match=r"^optimizer: torch.optim.AdamW: .*momentum"):
        config.instantiate(node, [torch.nn.Parameter(torch.ones(1))], key="optimizer")


def test_difference():
    old = {"a": 1, "b": {"c": 2, "d": 3}, "free": {"x": 1}}
    new = {"a": 1, "b": {"c": 4}, "free": {"x": 2}, "e": 5}
    changes = config.difference(old, new, frozenset(["free"]))
    assert changes == ["b.c: was 2, is 4", "b.d: was 3, is None", "e: was None, is 5"]
