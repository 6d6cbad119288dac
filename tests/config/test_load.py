"""``config.load`` merges defaults, profile, run and command line, and reports mistakes in one line."""

import re

import pytest
from omegaconf import OmegaConf

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.base.registry import GRPO, SFT
from rocm_ext.config import layers
from tests.machine.test_device import CPU, STRIX

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
        return config.load(SFT, "run.yaml", list(overrides))

    return load_lines


def test_a_component_replaces_the_lower_one_whole(run):
    cfg = run(
        "loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}", "optimizer.lr=5e-4"
    )
    assert cfg.loss == {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
    assert cfg.optimizer == {"_component_": "torch.optim.AdamW", "lr": 5e-4}, (
        "single arguments by dots"
    )
    assert run("", "optimizer=torch.optim.SGD").optimizer == {
        "_component_": "torch.optim.SGD",
        "lr": 1e-3,
    }
    one = {"_component_": "rocm_ext.data.sft_dataset", "source": "a.jsonl"}
    assert run(
        "", "dataset=[{_component_: rocm_ext.data.sft_dataset, source: a.jsonl}]"
    ).dataset == [one]


def test_a_component_keeps_arguments_of_a_lower_layer(run, tmp_path):
    """``optimizer`` names fewer arguments than the recipe's default of the same component does (review A6)."""
    lines = {
        "output_dir": str(tmp_path),
        "verifier": {"_component_": "rocm_ext.verifiers.ExactMatch"},
    }

    def load(*overrides, **keys):
        return config.load(GRPO, "own", overrides, {**lines, **keys})

    default = load()
    adamw = {"_component_": "torch.optim.AdamW", "lr": 5e-5}
    for own in (adamw, {"lr": 5e-5}):
        assert load(optimizer=own).optimizer == {**default.optimizer, "lr": 5e-5}
    assert load(optimizer={**adamw, "betas": [0.8, 0.9]}).optimizer.betas == [0.8, 0.9]
    assert load(optimizer={"_component_": "torch.optim.SGD", "lr": 1}).optimizer == {
        "_component_": "torch.optim.SGD",
        "lr": 1,
    }
    assert load(lr_scheduler={"total_iters": 5}).lr_scheduler == {
        **default.lr_scheduler,
        "total_iters": 5,
    }
    assert load(lr_scheduler=None).lr_scheduler is None
    again = load(**OmegaConf.to_container(load(optimizer=adamw)))
    assert again == load(optimizer=adamw), "a recorded config is the same config"
    base = COMPONENTS.replace("_component_: torch.optim.AdamW, ", "") + "output_dir: out\n"
    assert run("", base=base) == run(), (
        "SFT's default has a component, too, and leaves its lr to the run"
    )


def test_a_pattern_replaces_the_runs(run):
    """The cure for an adapter of other patterns is such an override."""
    base = "model: {_component_: rocm_ext.model.from_checkpoint, checkpoint_dir: m, rank_pattern: {down_proj: 8}}\n"
    base += "dataset: {_component_: rocm_ext.data.sft_dataset, source: a}\noptimizer: {lr: 1e-3}\n"
    base += "output_dir: out\nhardware: cpu\n"
    assert run("", 'model.rank_pattern={"q_proj": 4}', base=base).model.rank_pattern == {
        "q_proj": 4
    }
    assert run("", "model.rank_pattern.q_proj=4", base=base).model.rank_pattern == {
        "down_proj": 8,
        "q_proj": 4,
    }
    assert run("", "model.rank_pattern=null", base=base).model.rank_pattern is None


def test_layers(run, monkeypatch):
    lines = "hardware: strix_halo\ndtype: fp16\ncompile: True\nepochs: 3"
    cfg = run(lines, "hardware=cpu")
    assert (cfg.hardware, cfg.device, cfg.dtype, cfg.compile, cfg.epochs) == (
        "cpu",
        "cpu",
        "fp32",
        False,
        3,
    )
    assert run(lines, "hardware=cpu", "dtype=bf16").dtype == "bf16"
    assert run(lines).dtype == "fp16"
    assert run(lines, "hardware=auto").dtype == "bf16"
    cfg = run()
    assert cfg.hardware == "strix_halo", "auto is resolved"
    assert (cfg.dtype, cfg.device) == ("bf16", "cuda"), "the profile over the defaults"
    assert cfg.epochs == 1
    assert cfg.loss._component_.endswith("CrossEntropy")
    assert run("dtype: fp16\nepochs: 3").dtype == "fp16", "the run over the profile"
    assert run("dtype: fp16\nepochs: 3", "epochs=5", "dtype=fp32").epochs == 5, (
        "the command line over all"
    )
    assert run("hardware: mi300x").compile is True
    assert run("hardware: mi300x\ncompile: False").compile is False
    monkeypatch.setattr(layers, "detect", lambda: CPU)
    assert run().hardware == "cpu"


@pytest.mark.parametrize(("lines", "overrides", "message"), [
    ("batchsize: 4", [], "unknown key batchsize; did you mean batch_size"),
    ("", ["lora_attn_modules=[]"], r"did you mean model.lora_attn_modules\?$"),
    ("", ["loss.beta=1"], r"unknown key loss.beta for .*CrossEntropy; known: "),
    ("", ["model.load_in_4bit=True"], r"model.load_in_4bit for .*; did you mean model.quantize_base\?$"),
    ("", ["output_dir=a", "path=b"], r"did you mean tokenizer.path\?$"),
    ("", ["~epohcs"], "~epohcs: config run.yaml has no such key"),
    ("", ["dataset.sorce=4"], "unknown key dataset.sorce for .*; did you mean source"),
    ("", ["device.index=4"], "unknown key device.index: device is 'cuda'"),
    ("loss: {_component_: rocm_ext.losses.CrossEntropy, chunks: 4}", [], "unknown key loss.chunks"),
    ("", ["dataset.weight=4"], "unknown key dataset.weight .*; it is for a list of data sets to train on"),
    ("", ["hardware=mi300"], "hardware=mi300 is unknown.*did you mean mi300x"),
])  # fmt: skip
def test_unknown_keys(run, lines, overrides, message):
    with pytest.raises(UserError, match=message):
        run(lines, *overrides)


@pytest.mark.parametrize(("component", "message"), [
    ("no_such_module.model", "there is no module 'no_such_module'"),
    ("torchtune.models.qwen2_5.lora_qwen2_5_8b", "models.qwen2_5 has no 'lora_qwen2_5_8b'; did you mean lora_qwen2_5_"),
    ("torchtune.models.qwen2_5", "is a module; expected a function or class"),
    ("broken.model", "cannot be imported: .*no_such_dependency"), ("''", "cannot be imported: "),
    ("7", "7 cannot be imported: "),
])  # fmt: skip
def test_components_that_cannot_be_imported(run, tmp_path, component, message):
    (tmp_path / "broken.py").write_text("import no_such_dependency\n")
    with pytest.raises(UserError, match=rf"(?s)^model\._component_ .*{message}"):
        run(
            "",
            f"model={component}"
            if component not in ("''", "7")
            else f"model._component_={component}",
        )


def test_missing_keys(run):
    for base, overrides, message in (
        (
            "",
            (),
            "config run.yaml: checkpointer, dataset, model, optimizer.lr, output_dir, tokenizer must be set",
        ),
        (
            COMPONENTS,
            (),
            "^config run.yaml: output_dir must be set",
        ),  # the checkpointer's key refers to it
        (COMPONENTS + "output_dir: out\n", ("output_dir=null",), "output_dir must be set"),
        (COMPONENTS + "output_dir: out\n", ("model=null",), "model must be set"),
        (COMPONENTS + "output_dir: out\n", ("optimizer=null",), "optimizer must be set"),
        (
            COMPONENTS.replace(", lr: 1e-3", "") + "output_dir: out\n",
            (),
            r"optimizer\.lr must be set",
        ),
        (
            COMPONENTS.replace("lr: 1e-3", "lr: '???'") + "output_dir: out\n",
            (),
            r"optimizer\.lr must be set",
        ),
    ):
        with pytest.raises(UserError, match=message):
            run("", *overrides, base=base)


@pytest.mark.parametrize(("content", "message"), [
    ("a: [1", "run.yaml is no valid YAML"), ("a:\n\tb: 1", "run.yaml is no valid YAML.*line 2"),
    ("epochs: 1\nepochs: 2", "duplicate key epochs"), ("- 1\n- 2", "holds a ListConfig; expected keys"),
    ("output_dir: ${", "config run.yaml: "),
    (COMPONENTS + "output_dir: ${nope}/x", "config run.yaml: Interpolation key 'nope' not found"),
])  # fmt: skip
def test_files_that_are_no_config(run, content, message):
    with pytest.raises(UserError, match=message) as caught:
        run(base=content)
    assert "\n" not in str(caught.value)


def test_names_that_are_no_config(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for typo in ("strix_halo_qwen7", "strixhalo_qwen7b", "strix_halo_qwen7b.yaml"):
        with pytest.raises(UserError, match=r"did you mean strix_halo_qwen7b\?"):
            config.load(SFT, typo, [])
    with pytest.raises(UserError, match=r"`tune ls` lists these$"):
        config.load(SFT, "foo/bar", [])
    (tmp_path / "strix_halo_qwen7b").write_text("epochs: 2")
    with pytest.raises(
        UserError, match="must be set"
    ):  # a file in the current folder takes precedence
        config.load(SFT, "strix_halo_qwen7b", [])
    (tmp_path / "run.yaml").write_bytes(b"epochs: \xff\xfe")
    for path, message in (
        (tmp_path / "run.yaml", r"cannot read config .*run\.yaml"),
        (tmp_path, "neither a file nor"),
    ):
        with pytest.raises(UserError, match=message):
            config.load(SFT, str(path), [])


def test_one_of_two_keys_counts_the_rows_of_a_step(run):
    def rows(lines: str, *overrides: str):
        cfg = run(lines, *overrides)
        return cfg.gradient_accumulation_steps, cfg.sequences_per_step

    assert rows("") == (None, None)
    assert rows("sequences_per_step: 32") == (None, 32)
    assert rows("sequences_per_step: 32", "gradient_accumulation_steps=4") == (4, None), (
        "the higher layer's"
    )
    assert rows("gradient_accumulation_steps: 4", "sequences_per_step=32") == (None, 32)
    assert rows("sequences_per_step: 32", "gradient_accumulation_steps=null") == (None, 32)
    assert rows(
        "sequences_per_step: 32", "sequences_per_step=null", "gradient_accumulation_steps=4"
    ) == (4, None)
    assert rows("sequences_per_step: 32\ngradient_accumulation_steps: 4") == (4, 32), (
        "the recipe refuses both"
    )


def test_variables_are_keys_that_others_refer_to(run):
    lines = "data: rows\nsource: x\n"
    base = COMPONENTS.replace("rows.jsonl", "'${data}/${source}.jsonl'") + "output_dir: out\n"
    assert run(lines, base=base).dataset.source == "rows/x.jsonl"
    cfg = run(lines, "data=/else", base=base)
    assert cfg.dataset.source == "/else/x.jsonl"
    recorded = OmegaConf.to_yaml(
        cfg, resolve=True
    )  # as a run does, whose config.yaml can be started again
    assert run("", base=recorded) == cfg
    with pytest.raises(UserError, match="unknown key output_di; did you mean output_dir"):
        run("output_di: out", base=COMPONENTS)  # a prefix of the key in ${output_dir}
    with pytest.raises(UserError, match="unknown key data"):
        run(lines)


def test_a_tilde_is_the_home_folder(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    lines = (
        "model: {_component_: rocm_ext.model.from_checkpoint, checkpoint_dir: ~/models/Qwen3-8B}\n"
    )
    lines += (
        "metric_logger: {_component_: torchtune.training.metric_logging.DiskLogger, "
        "log_dir: '${output_dir}/logs'}\n"
    )
    base = "\n".join(
        x
        for x in COMPONENTS.splitlines()
        if not x.startswith(("model", "checkpointer", "tokenizer"))
    )
    cfg = run(lines, "checkpointer.adapter_checkpoint=~/a", base=f"{base}\noutput_dir: ~/out\n")
    assert (cfg.output_dir, cfg.metric_logger.log_dir) == (
        f"{tmp_path}/out",
        f"{tmp_path}/out/logs",
    )
    assert (
        cfg.model.checkpoint_dir == cfg.checkpointer.checkpoint_dir == f"{tmp_path}/models/Qwen3-8B"
    )
    assert cfg.tokenizer.path == f"{tmp_path}/models/Qwen3-8B/tokenizer.json"
    assert cfg.checkpointer.adapter_checkpoint == f"{tmp_path}/a"


def test_a_removed_key_is_the_default_again(run):
    lines = "epochs: 3\nlr_scheduler: {_component_: torchtune.training.get_cosine_schedule_with_warmup}\n"
    cfg = run(lines, "~epochs", "~lr_scheduler", "~optimizer.lr")
    assert (cfg.epochs, cfg.lr_scheduler) == (1, None)
    assert "lr" not in cfg.optimizer
    with pytest.raises(UserError, match="model must be set"):
        run("", "~model")


def test_the_command_line(capsys):
    assert config.command_line(["--config", "a", "b=1", "~c"]) == ("a", ["b=1", "~c"])
    assert config.command_line(["b=x=y", "--config=a.yaml"]) == ("a.yaml", ["b=x=y"])
    for argv, message in [
        ([], "--config is missing; `tune ls`"),
        (["b=1"], "--config is missing"),
        (["--config"], "--config"),
        (["--config", "a", "--batch_size", "4"], "unknown option --batch_size"),
        (
            ["--config", "cpu_pocket", "batch_size"],
            "cannot read override 'batch_size'; expected key=value",
        ),
    ]:
        with pytest.raises(UserError, match=re.escape(message)) as caught:
            config.load(SFT, *config.command_line(argv))
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
    assert capsys.readouterr().err.splitlines() == [
        "error: so it is",
        "interrupted",
        "[rank 3] error: so it is",
    ]
