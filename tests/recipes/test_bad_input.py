"""A user's mistakes end in one line with advice, before a run trains or writes anything."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from rocm_ext.recipes import lora_finetune_rocm as recipe
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.config.checks.training import check_values
from rocm_ext.machine.detect import detect
from rocm_ext.train import lifecycle
from tests.kit.lines import one_line_has
from tests.kit.tiny import TEXT, exit_code, metrics, run_config, write_model, write_rows, write_yaml

SFT = "lora_finetune_rocm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with base models, rows, and an adapter of rank 4."""
    top = tmp_path_factory.mktemp("bad")
    write_model(top / "qwen")
    write_model(top / "llama", "llama")
    write_model(top / "wider", vocab=512, hidden_size=128)
    write_model(top / "other", text=[each[::-1] for each in TEXT], num_hidden_layers=1)
    write_rows(top / "rows.jsonl", 8)
    write_yaml(
        top / "run.yaml",
        run_config(top / "qwen", top / "rows.jsonl", top / "first", max_steps_per_epoch=1),
    )
    assert call("--config", top / "run.yaml") == 0
    return top


@pytest.fixture(autouse=True)
def _sigterm_as_it_was():
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


call = partial(exit_code, recipe.main)


def checked(path: Path) -> LoRAFinetune:
    """The recipe after the part of its set-up that reads no weights."""
    made = LoRAFinetune(config.load(SFT, str(path)))
    made.check()
    made.cleanup()
    return made


@pytest.fixture
def fails(folder, tmp_path, capsys):
    """Run a config that must fail, and return the line that the user sees."""

    def fails(*overrides: str, base: Path | None = None, rows: str | None = None, **changes) -> str:
        out, source = tmp_path / "out", folder / "rows.jsonl"
        if rows is not None:
            source = tmp_path / "rows.jsonl"
            source.write_text(rows)
        cfg = run_config(base or folder / "qwen", source, out) | changes
        path = write_yaml(tmp_path / "run.yaml", cfg)
        capsys.readouterr()
        code = call(
            "--config", path, *(item.format(folder=folder, tmp=tmp_path) for item in overrides)
        )
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("\r")]
        assert code == 1
        assert sum(line.startswith("error: ") for line in lines) == 1
        assert lines[-1].startswith("error: ")
        assert not (out / "adapter").exists()
        assert not (out / "metrics.jsonl").exists()
        return lines[-1]

    return fails


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch_size=0", "batch_size is 0; expected a whole number from 1 to"),
        ("save_every_n_steps=0", "or null"),
        ("model.lora_rank=0", "model.lora_rank is 0; expected a whole number from 1 to 8192"),
        ("epochs=[1", "cannot read override 'epochs=[1'"),
        (
            f"data_seed={2**64}",
            f"data_seed is {2**64}; expected a whole number from 0 to 9223372036854775807",
        ),
        ("shuffle=maybe", "shuffle is 'maybe'; expected True or False"),
        ("loraplus_lr_ratio=0", "loraplus_lr_ratio is 0; expected a number above 0, or null"),
        ("compile=1", "compile is 1; expected False, True, max-autotune or auto"),
        ("batchsize=2", "unknown key batchsize; did you mean batch_size?"),
        ("optimizer.lrr=1", "unknown key optimizer.lrr"),
        ("dataset.column_map=[1]", "incompatible container types"),
        ("optimizer.lr=.inf", "optimizer.lr is inf; expected a number above 0"),
        ("model.lora_dropout=1.0", "model.lora_dropout is 1.0; expected a share from 0 to under 1"),
        ("profiler.enabled=True", "write profiler.enabled=False profile_steps=2,"),
        ("checkpointer.recipe_checkpoint={tmp}/none.pt", "checkpointer.recipe_checkpoint is "),
        ("~checkpointer.model_type", "checkpointer.model_type is None; expected"),
        (f"output_dir={'long' * 100}", "File name too long; choose another output_dir"),
        ('output_dir="a\\0b"', "expected a folder: embedded null byte"),
    ],
)
def test_a_value_is_refused_before_any_file_is_read(folder, tmp_path, override, message):
    with pytest.raises(UserError) as refused:
        LoRAFinetune(config.load(SFT, str(folder / "run.yaml"), [override.format(tmp=tmp_path)]))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


ELSEWHERE = {  # components, and what is refused where it is read
    "chat_template", "chat_template_args", "chat_template_date", "checkpointer", "dataset", "dataset_val", "hardware",
    "enable_activation_checkpointing", "engine", "eval_prompts", "loss", "lr_scheduler", "metric_logger", "model",
    "optimizer", "recipe", "tokenizer", "verifier",
}  # fmt: skip
LORA = [
    f"model.{key}"
    for key in (
        "lora_rank",
        "lora_alpha",
        "lora_dropout",
        "rank_pattern",
        "alpha_pattern",
        "use_dora",
    )
]


@pytest.mark.parametrize("key", [*sorted(config.defaults(SFT).keys() - ELSEWHERE), *LORA])
def test_every_key_of_a_run_is_checked(folder, key):
    cfg = config.load(SFT, str(folder / "run.yaml"))
    OmegaConf.update(cfg, key, [7])
    with pytest.raises(UserError, match=rf"^{key} is "):
        check_values(cfg)


@pytest.mark.wide(always=24)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("validation_fraction=0.99", "leaves nothing to train on"),
        ("early_stopping_patience=2", "set dataset_val or validation_fraction"),
        ("tokens_per_micro_batch=3", "the longest row has"),
        (
            "attention=efficient",
            "torch has no efficient kernel for float32 and head_dim 16 on this CPU",
        ),
        ("enable_activation_checkpointing=maybe", "expected False, True, a number"),
        ("enable_activation_offloading=True", "needs a GPU"),
        ("optimizer.betas=3", "optimizer: torch.optim.AdamW: "),
        ("loss._component_=torch.nn.MSELoss", "loss MSELoss is not supported here"),
        ("model._component_=torchtune.models.qwen2.qwen2", "unknown key model.lora_attn_modules"),
        ("model.lora_attn_modules=[foo]", "foo"),
        ("model.num_layers=3", "the checkpoint does not fit model: missing layers.2."),
        ("model.vocab_size=512", "[384, 64] in the checkpoint, [512, 64] in the model"),
        ("model.num_layers=0", "builds a model without layers"),
        ("checkpointer.model_type=PHI3_MINI", "PHI3_MINI has no PEFT adapter format"),
        (
            "tokenizer.path=0",
            "tokenizer.path is 0; expected a path",
        ),  # open(0) reads the terminal, and closes it
        ("tokenizer.merges_file={folder}/other/merges.txt", "of the base model"),
        ("dataset.source={tmp}/none.jsonl", "none.jsonl: no such file"),
        ("output_dir={folder}/rows.jsonl", "cannot write"),
        ("checkpointer.checkpoint_files=[none.safetensors]", "none.safetensors"),
        (
            "checkpointer.adapter_checkpoint={tmp}/none",
            "no adapter in checkpointer.adapter_checkpoint",
        ),
        ("tokenizer.path={folder}/other/vocab.json", "tokenizer: "),
        ("tokenizer.max_seq_len=2", "0 of 8 rows left"),
        ("optimizer._component_=torch.optim.LBFGS", "optimizer: torch.optim.LBFGS: "),
    ],
)
def test_one_line_for(fails, override, message):
    assert message in fails(override)


SCHEDULES = "torch.optim.lr_scheduler"


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"_component_": f"{SCHEDULES}.ReduceLROnPlateau"}, "gets neither a metric"),
        (
            {"_component_": f"{SCHEDULES}.OneCycleLR", "max_lr": [1, 2], "total_steps": 3},
            "step 4 of 8: ",
        ),
        (
            {"_component_": f"{SCHEDULES}.OneCycleLR", "max_lr": 1, "total_steps": 8},
            "as with loraplus_lr_ratio",
        ),
        (
            {"_component_": f"{SCHEDULES}.StepLR", "step_size": 2, "gamma": -1},
            "the learning rate of step 3 is -0.001",
        ),
        ({"_component_": f"{SCHEDULES}.StepLR"}, "missing a required argument: 'step_size'"),
    ],
    ids=str,
)
def test_schedule(fails, no_weights, schedule, message):
    assert message in fails(epochs=8, lr_scheduler=schedule, loraplus_lr_ratio=2)


@pytest.fixture
def no_weights(monkeypatch):
    """The run must fail before it reads the base weights, which takes minutes for a large model."""

    def read(self):
        raise AssertionError("the base weights were read")

    monkeypatch.setattr("rocm_ext.train.learner.Learner.read_weights", read)


@pytest.mark.parametrize(
    ("key", "component"),
    [
        (
            "metric_logger",
            {"_component_": "torchtune.training.metric_logging.WandBLogger"},
        ),  # is not installed
        (
            "metric_logger",
            {
                "_component_": "torchtune.training.metric_logging.DiskLogger",
                "log_dir": "/proc/none",
            },
        ),
        ("optimizer", {"_component_": "torch.optim.SparseAdam", "lr": 1e-3}),
    ],
)
def test_before_the_weights_are_read(fails, no_weights, key, component):
    assert f"{key}: " in fails(**{key: component})


def test_no_adapter_at_all(fails):
    overrides = ["model.lora_attn_modules=[]", "model.apply_lora_to_mlp=False"]
    assert "Must pass one or more of" in fails(*overrides)  # torchtune's own words


@pytest.mark.parametrize("how", ["gone", "cut", "garbage", "empty", "no config.json"])
def test_broken_weights(fails, folder, tmp_path, how):
    base = shutil.copytree(folder / "qwen", tmp_path / "base")
    cfg, file = (
        run_config(base, folder / "rows.jsonl", tmp_path / "out"),
        base / "model.safetensors",
    )
    if how == "gone":
        file.unlink()
    elif how == "cut":
        os.truncate(file, file.stat().st_size // 2)
    elif how == "no config.json":
        (base / "config.json").unlink()
    else:
        file.write_bytes(b"garbage " * 1000 if how == "garbage" else b"")
    line = fails(checkpointer=cfg["checkpointer"])
    assert line.startswith("error: checkpointer: ")
    assert str(base) in line


@pytest.mark.parametrize(
    ("weights", "builder"), [("llama", "qwen"), ("qwen", "llama"), ("wider", "qwen")]
)
def test_weights_of_another_model(fails, folder, tmp_path, weights, builder):
    ours, theirs = (
        run_config(folder / name, folder / "rows.jsonl", tmp_path / "out")
        for name in (builder, weights)
    )
    line = fails(base=folder / builder, checkpointer=theirs["checkpointer"])
    assert "the checkpoint does not fit model: " in line
    assert "model._component_" in line
    mixed = theirs["checkpointer"] | {"model_type": ours["checkpointer"]["model_type"]}
    assert "checkpoint" in fails(base=folder / builder, checkpointer=mixed)


@pytest.mark.parametrize("how", ["cut", "not torch's"])
def test_broken_adapter(fails, folder, tmp_path, how):
    adapter = shutil.copytree(folder / "first" / "adapter", tmp_path / "adapter")
    weights = adapter / "adapter_model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    path = adapter if how == "cut" else folder / "rows.jsonl"
    assert str(path) in fails(f"checkpointer.adapter_checkpoint={path}")


ROW = json.dumps({"question": "How many?", "answer": "It is 42."})
LONG = json.dumps({"question": "How many?", "answer": "So it is. " * 300})


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        ("", [], "rows.jsonl has no rows"),
        (f"{ROW}\n{{torn", [], "rows.jsonl:2: malformed JSON"),
        (f"{ROW}\n{ROW}", ["too_long=error", "tokenizer.max_seq_len=8"], "rows.jsonl:1: "),
        (
            f"{ROW}\n{ROW}",
            ["too_long=drop", "tokenizer.max_seq_len=8"],
            "2 over max_seq_len 8 were dropped",
        ),
        (
            f"{ROW}\n{LONG}",
            ["too_long=error", "tokenizer.max_seq_len=null"],
            "rows.jsonl:2: 2115 tokens",
        ),
    ],
)
def test_rows(fails, rows, overrides, message):
    assert message in fails(*overrides, rows=rows)


@pytest.mark.parametrize(
    ("policy", "count"), [("truncate", "truncated"), ("drop", "dropped_too_long")]
)
@pytest.mark.parametrize("limit", [128, 1000, None])
def test_long_rows_are_counted(folder, tmp_path, policy, count, limit):
    """Rows beyond the model's 512 positions would be an index error in the middle of training."""
    (tmp_path / "rows.jsonl").write_text(f"{ROW}\n{LONG}\n{ROW}\n")
    cfg = run_config(folder / "qwen", tmp_path / "rows.jsonl", tmp_path / "out", too_long=policy)
    cfg["tokenizer"]["max_seq_len"] = limit
    rows = checked(write_yaml(tmp_path / "run.yaml", cfg)).rows
    assert {key: rows.counts[key] for key in ("rows", "truncated", "dropped_too_long")} == {
        "rows": 3, "truncated": 0, "dropped_too_long": 0, count: 1
    }  # fmt: skip
    assert len(rows) == (3 if policy == "truncate" else 2)
    assert max(map(len, rows.tokens)) <= min(limit or 512, 512)


def test_fewer_rows_than_a_step(folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROW)
    cfg = run_config(folder / "qwen", tmp_path / "rows.jsonl", tmp_path / "out", epochs=2)
    assert call("--config", write_yaml(tmp_path / "run.yaml", cfg)) == 0
    assert len(metrics(tmp_path / "out")) == 2
    counts = {"rows": 1, "truncated": 0, "dropped_too_long": 0, "dropped_without_labels": 0}
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["rows"] == counts


def test_more_ranks_than_gpus(fails, monkeypatch):
    machine = replace(
        detect(),
        backend="cuda",
        torch_build="cuda",
        arch="sm_90",
        name="H200",
        gpu_count=1,
        bf16=True,
    )
    monkeypatch.setattr(lifecycle, "detect", lambda: machine)
    monkeypatch.setattr(lifecycle, "local_world_size", lambda: 4)
    monkeypatch.setattr("rocm_ext.config.main.apply_environment", lambda profile, machine: [])
    line = fails(hardware="cuda")
    assert "4 processes need 4 GPUs" in line
    assert "Use --nproc_per_node 1" in line


def test_adapter_that_the_last_step_spoils(folder, tmp_path, capsys):
    """No loss sees the values of the last step, so nothing else would notice."""
    cfg = run_config(
        folder / "qwen", folder / "rows.jsonl", tmp_path / "out", max_steps_per_epoch=1
    )
    cfg["optimizer"] |= {"lr": 1e30, "weight_decay": 1e30}
    assert call("--config", write_yaml(tmp_path / "run.yaml", cfg)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert one_line_has(error, "error: layers.0.", "not finite after step 1, so nothing was saved")
    assert not (tmp_path / "out" / "adapter").exists()


def test_loss_that_is_not_finite(folder, tmp_path, capsys):
    out = tmp_path / "out"
    cfg = run_config(folder / "qwen", folder / "rows.jsonl", out, epochs=4, save_every_n_steps=1)
    cfg["optimizer"]["lr"] = 1e30
    assert call("--config", write_yaml(tmp_path / "run.yaml", cfg)) == 1
    error, done = capsys.readouterr().err.splitlines()[-1], metrics(out, "step")[-1]
    checkpoint = out / "checkpoints" / f"step_{done:08d}"
    assert error.startswith(f"error: step {done + 1}: loss ")
    assert one_line_has(error, "Rows of this step: ", f"The last good checkpoint is {checkpoint}")
    assert torch.load(checkpoint / "state.pt")["step"] == done
    assert not (out / "adapter").exists()


ANY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(width=16),
    st.text("a1./ {}$\0", max_size=4),
    st.lists(st.integers(0, 2), max_size=2),
    st.dictionaries(st.sampled_from(["a", "_component_"]), st.integers(0, 2), max_size=1),
)


def keys_of(cfg: dict, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in cfg.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from keys_of(value, (*prefix, key))


@pytest.mark.wide
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), value=ANY)
def test_any_value_anywhere_ends_in_one_line(folder, tmp_path, capsys, data, value):
    """Reading the base weights ends the run here, so that each example ends in an error, of whatever kind."""
    stop = UserError("the base weights were read")
    cfg = config.defaults(SFT) | run_config(
        folder / "qwen", folder / "rows.jsonl", tmp_path / "out"
    )
    # a text would be a folder in the working directory, or a data set on the hub; validate_only may end well
    free = [
        key
        for key in keys_of(cfg)
        if key not in (("output_dir",), ("dataset", "source"), ("validate_only",))
    ]
    *parents, last = data.draw(st.sampled_from(free))
    node = cfg
    for key in parents:
        node = node[key]
    node[last] = value
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rocm_ext.train.learner.Learner.read_weights", lambda self: raising(stop))
        assert call("--config", write_yaml(tmp_path / "run.yaml", cfg)) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert len(lines[0]) > len("error: ")


def raising(error: Exception):
    raise error
