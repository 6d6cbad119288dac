"""A user's mistakes end in one line with advice, before a run trains or writes anything."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rocm_ext.recipes import lora_finetune_rocm as recipe
from safetensors.torch import load_file, save_file

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.machine.detect import detect
from rocm_ext.train import lifecycle
from rocm_ext.train.metrics import TrackioLogger
from tests.kit.lines import one_line_has
from tests.kit.tiny import TEXT, exit_code, metrics, run_config, write_model, write_rows, write_yaml

REMOVED = object()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with base models, rows, and an adapter of rank 4."""
    top = tmp_path_factory.mktemp("bad")
    write_model(top / "qwen")
    write_model(top / "llama", "llama")
    write_model(top / "wider", vocab=512, hidden_size=128)
    write_model(top / "other", text=[each[::-1] for each in TEXT], num_hidden_layers=1)
    write_rows(top / "rows.jsonl", 8)
    write_yaml(top / "run.yaml", run_config(top / "qwen", top / "rows.jsonl", top / "first", max_steps_per_epoch=1))
    assert call("--config", top / "run.yaml") == 0
    return top


@pytest.fixture(autouse=True)
def _sigterm_as_it_was():
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


call = partial(exit_code, recipe.main)


@pytest.fixture
def fails(folder, tmp_path, capsys):
    """Run a config that must fail, and return the line that the user sees."""

    def fails(*overrides: str, base: Path | None = None, rows: str | None = None, code: int = 1, **changes) -> str:
        out, source = tmp_path / "out", folder / "rows.jsonl"
        if rows is not None:
            source = tmp_path / "rows.jsonl"
            source.write_text(rows)
        cfg = run_config(base or folder / "qwen", source, out) | changes
        path = write_yaml(tmp_path / "run.yaml", {k: v for k, v in cfg.items() if v is not REMOVED})
        capsys.readouterr()
        found = call("--config", path, *(item.format(folder=folder, tmp=tmp_path) for item in overrides))
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("\r")]
        assert found == code
        assert sum(line.startswith("error: ") for line in lines) == 1
        assert lines[-1].startswith("error: ")
        assert not (out / "adapter").exists()
        assert not (out / "metrics.jsonl").exists()
        return lines[-1]

    return fails


@pytest.mark.wide(always=30)
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch_size=0", "batch_size is 0; expected a whole number from 1 to"),
        ("batch_size=2.5", "batch_size is 2.5; expected a whole number"),
        ("batch_size=abc", "batch_size is 'abc'; expected a whole number"),
        ("batch_size=True", "batch_size is True"),
        ("epochs=0", "epochs is 0"),
        ("gradient_accumulation_steps=-1", "gradient_accumulation_steps is -1"),
        ("save_every_n_steps=0", "or null"),
        ("num_workers=-1", "num_workers is -1; expected a whole number from 0 to"),
        ("cpu_threads=100000", "cpu_threads is 100000; expected a whole number from 1 to 1024, or auto"),
        ("model.lora_rank=100000", "model.lora_rank is 100000; expected a whole number from 1 to 8192"),
        ("epochs=1000000000000", "epochs is 1000000000000; expected a whole number from 1 to 1000000000"),
        ("seed=abc", "seed is 'abc'"),
        ("seed=5000000000", "seed is 5000000000; expected a whole number from 0 to 4294967295"),
        ("data_seed=null", "data_seed is None"),
        ("shuffle=maybe", "shuffle is 'maybe'; expected True or False"),
        ("validation_fraction=1.5", "validation_fraction is 1.5; expected a share"),
        ("validation_fraction=0.99", "leaves nothing to train on"),
        ("clip_grad_norm=0", "clip_grad_norm is 0"),
        ("memory_fraction=2", "memory_fraction is 2"),
        ("early_stopping_patience=2", "set dataset_val or validation_fraction"),
        ("tokens_per_micro_batch=3", "the longest row has"),
        ("dtype=fp8", "dtype"),
        ("attention=fast", "attention is 'fast'; expected auto, flash, efficient, math or eager"),
        ("attention=efficient", "torch has no efficient kernel for float32 and head_dim 16 on this CPU"),
        ("compile=1", "compile is 1; expected False, True or max-autotune"),
        ("compile=reduce-overhead", "compile is 'reduce-overhead'; expected False, True or max-autotune"),
        ("hardware=strix_hallo", "did you mean strix_halo?"),
        ("enable_activation_checkpointing=maybe", "expected False, True, a number"),
        ("enable_activation_offloading=True", "needs a GPU"),
        ("too_long=cut", "too_long is 'cut'; expected truncate, drop or error"),
        ("batchsize=2", "unknown key batchsize; did you mean batch_size?"),
        ("optimizer.lrr=1", "unknown key optimizer.lrr"),
        ("model.lora_rnk=1", "did you mean lora_rank?"),
        ("optimizer.lr=abc", "optimizer.lr is 'abc'; expected a number"),
        ("optimizer.betas=3", "optimizer: torch.optim.AdamW: "),
        ("optimizer._component_=torch.optim.AdamWW", "optimizer._component_ 'torch.optim.AdamWW' cannot be imported"),
        ("lr_scheduler._component_=torchtune.training.lr_schedulers.linear", "lr_scheduler._component_"),
        ("loss._component_=torch.nn.MSELoss", "loss MSELoss is not supported here"),
        ("model._component_=torch.nn.Linear", "unknown key model.lora_attn_modules"),
        ("model._component_=torchtune.models.qwen2.qwen2", "unknown key model.lora_attn_modules"),
        ("model.lora_attn_modules=[foo]", "foo"),
        ("model.num_layers=3", "the checkpoint does not fit model: missing layers.2."),
        ("model.num_layers=1", "unexpected layers.1."),
        ("model.embed_dim=128", "in the checkpoint"),
        ("model.vocab_size=512", "[384, 64] in the checkpoint, [512, 64] in the model"),
        ("model.lora_rank=0", "lora_rank"),
        ("model.num_heads=3", "model"),
        ("checkpointer.checkpoint_dir={tmp}/none", "none"),
        ("checkpointer.checkpoint_files=[none.safetensors]", "none.safetensors"),
        ("checkpointer.model_type=QWEN9", "QWEN9"),
        ("checkpointer.model_type=PHI3_MINI", "PHI3_MINI has no PEFT adapter format"),
        ("checkpointer.adapter_checkpoint={tmp}/none", "no adapter in checkpointer.adapter_checkpoint"),
        ("tokenizer.path={tmp}/none.json", "none.json"),
        ("tokenizer.merges_file={tmp}/none.txt", "none.txt"),
        ("tokenizer.max_seq_len=abc", "tokenizer.max_seq_len is 'abc'"),
        ("tokenizer.max_seq_len=2", "0 of 8 rows left"),
        ("dataset.source={tmp}/none.jsonl", "none.jsonl: no such file"),
        ("dataset.column_map.prompt=nope", "nope"),
        ("dataset.splitt=train", "did you mean split?"),
        ("dataset._component_=rocm_ext.data.sft_datasets", "cannot be imported"),
        ("metric_logger._component_=torchtune.training.metric_logging.NoLogger", "metric_logger._component_"),
        ("output_dir={folder}/rows.jsonl", "cannot write"),
        ("output_dir=/proc/none", "cannot write /proc/none"),
        ("output_dir=''", "output_dir is ''; expected a folder"),
        ("output_dir=[a]", "output_dir is ['a']; expected a folder"),
        (f"output_dir={'long' * 100}", "File name too long; choose another output_dir"),
        ('output_dir="a\\0b"', "expected a folder: embedded null byte"),
        ("data_seed=-1", "data_seed is -1; expected a whole number from 0 to 9223372036854775807"),
        (f"data_seed={2**64}", f"data_seed is {2**64}; expected a whole number from 0 to"),
        ("use_rslora=perhaps", "use_rslora is 'perhaps'; expected True, False or null"),
        ("model.lora_alpha=foo", "model.lora_alpha is 'foo'; expected a number"),
        ("model.lora_alpha=0", "model.lora_alpha is 0; expected a number above 0"),
        ("model.lora_alpha=-8", "model.lora_alpha is -8"),
        ("model.lora_alpha=.inf", "model.lora_alpha is inf"),
        ("model.lora_dropout=1.0", "model.lora_dropout is 1.0; expected a share from 0 to under 1"),
        ("model.lora_dropout=-0.1", "model.lora_dropout is -0.1"),
        ("model.lora_dropout=abc", "model.lora_dropout is 'abc'"),
        ("model.norm_eps=abc", "model.norm_eps is 'abc'; expected a number"),
        ("model.intermediate_dim=0", "cannot compute a step with these arguments: RuntimeError"),
        ("model.use_dora=maybe", "model.use_dora is 'maybe'; expected True or False"),
        ("dataset.column_map=[1]", "incompatible container types"),
        ("model.num_layers=0", "builds a model without layers"),
        ("loss.chunk_tokens=1.5", "loss.chunk_tokens is 1.5; expected a whole number"),
        ("profiler=yes", "profiler is True; expected null, or torchtune's arguments"),
        ("profiler.enabled=maybe", "profiler.enabled is 'maybe'; expected True or False"),
        ("profiler.enabled=True", "write profiler.enabled=False profile_steps=2,"),
        ("profile_steps=some", "profile_steps is 'some'; expected a whole number from 0 to 100, or null"),
        ("profile_steps=101", "profile_steps is 101; expected a whole number from 0 to 100, or null"),
        ("profile_steps=-1", "profile_steps is -1"),
        ("profile_steps=True", "profile_steps is True"),
        ("checkpointer.recipe_checkpoint={tmp}/none.pt", "checkpointer.recipe_checkpoint is "),
        ("checkpointer.adapter_checkpoint=5", "checkpointer.adapter_checkpoint is 5; expected a path"),
        ("tokenizer.path=0", "tokenizer.path is 0; expected a path"),  # open(0) reads the terminal, and closes it
        ("tokenizer.merges_file=3", "tokenizer.merges_file is 3; expected a path"),
        ("~checkpointer.model_type", "checkpointer.model_type is None; expected"),
        ("checkpointer.checkpoint_dir=null", "checkpointer.checkpoint_dir"),
        ("tokenizer.merges_file={folder}/other/merges.txt", "of the base model"),
        ("tokenizer.path={folder}/other/vocab.json", "tokenizer: "),
        ("optimizer.lr=.inf", "optimizer.lr is inf; expected a number above 0"),
        ("optimizer.lr=.nan", "optimizer"),
        ("optimizer.lr=-1", "optimizer"),
        ("optimizer.lr=0", "optimizer.lr is 0; expected a number above 0"),
        ("optimizer._component_=torch.optim.LBFGS", "optimizer: torch.optim.LBFGS: "),
        ("optimizer._component_=torch.optim.SparseAdam", "optimizer: torch.optim.SparseAdam: "),
    ],
)
def test_one_line_for(fails, override, message):
    assert message in fails(override)


SCHEDULES = "torch.optim.lr_scheduler"


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"_component_": f"{SCHEDULES}.ReduceLROnPlateau"}, "gets neither a metric"),
        ({"_component_": f"{SCHEDULES}.OneCycleLR", "max_lr": 1, "total_steps": 3}, "step 4 of 8: "),
        ({"_component_": f"{SCHEDULES}.StepLR", "step_size": 2, "gamma": -1}, "the learning rate of step 3 is -0.001"),
        ({"_component_": f"{SCHEDULES}.ExponentialLR", "gamma": float("inf")}, "the learning rate of step 2 is inf"),
        (
            {"_component_": f"{SCHEDULES}.StepLR", "step_size": "two"},
            "lr_scheduler.step_size is 'two'; expected a number",
        ),
        ({"_component_": f"{SCHEDULES}.StepLR"}, "missing a required argument: 'step_size'"),
    ],
    ids=str,
)
def test_schedule(fails, no_weights, schedule, message):
    assert message in fails(epochs=8, lr_scheduler=schedule)


@pytest.fixture
def no_weights(monkeypatch):
    """The run must fail before it reads the base weights, which takes minutes for a large model."""

    def read(self):
        raise AssertionError("the base weights were read")

    monkeypatch.setattr("rocm_ext.train.learner.Learner.read_weights", read)


@pytest.mark.parametrize(
    "override",
    [
        "metric_logger._component_=torchtune.training.metric_logging.WandBLogger",  # is not installed
        "metric_logger={_component_: torchtune.training.metric_logging.DiskLogger, log_dir: /proc/none}",
        "lr_scheduler={_component_: torch.optim.lr_scheduler.LinearLR, start_factor: 2}",
        "optimizer._component_=torch.optim.SparseAdam",
    ],
)
def test_before_the_weights_are_read(fails, no_weights, override):
    key, _, value = override.partition("=")
    if value.startswith("{"):
        assert f"{key}: " in fails(**{key: yaml.safe_load(value)})
    else:
        assert f"{key.split('.')[0]}: " in fails(override)


def test_warm_up_longer_than_the_run(folder, tmp_path, messages):
    schedule = {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"}
    for warmup, warned in [(2, False), (3, True)]:
        cfg = run_config(folder / "qwen", folder / "rows.jsonl", tmp_path / str(warmup), epochs=3)
        cfg["lr_scheduler"] = schedule | {"num_warmup_steps": warmup}
        assert call("--config", write_yaml(tmp_path / "run.yaml", cfg)) == 0
        assert any("num_warmup_steps is 3 and the run has 3 steps" in line for line in messages) == warned


def test_no_adapter_at_all(fails):
    overrides = ["model.lora_attn_modules=[]", "model.apply_lora_to_mlp=False"]
    assert "Must pass one or more of" in fails(*overrides)  # torchtune's own words


def test_keys_that_exclude_each_other(fails):
    assert "keep one of them" in fails(sequences_per_step=8, gradient_accumulation_steps=2)
    validation = {"_component_": "rocm_ext.data.sft_dataset", "source": "x.jsonl"}
    assert "keep one of them" in fails(dataset_val=validation, validation_fraction=0.1)


def test_unknown_key_in_a_yaml(fails):
    assert "unknown key learning_rate" in fails(learning_rate=1)
    assert "unknown key optimizer.rate" in fails(optimizer={"_component_": "torch.optim.AdamW", "rate": 1})


def test_missing_model(fails):
    assert "model must be set" in fails(model=REMOVED)


@pytest.mark.parametrize(
    ("argv", "message", "code"),
    [
        ([], "--config is missing", 2),
        (["--config", "cpu_poket"], "did you mean cpu_pocket?", 1),
        (["--config", "cpu_pocket", "--fast"], "unknown option --fast", 2),
        (["--config", "cpu_pocket", "epochs"], "cannot read override 'epochs'", 2),
        (["--config", "cpu_pocket", "epochs=[1"], "cannot read override 'epochs=[1'", 1),
        (["--config", "cpu_pocket", "~epoch"], "did you mean epochs?", 1),
    ],
)
def test_command_line(capsys, argv, message, code):
    assert call(*argv) == code
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_yaml_syntax(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("epochs: [1, 2\nmodel: }\n")
    assert call("--config", path) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: config {path} is no valid YAML: ")
    assert "line 2" in error


# ---- weights


@pytest.mark.parametrize("how", ["gone", "cut", "garbage", "empty"])
def test_broken_weights(fails, folder, tmp_path, how):
    base = shutil.copytree(folder / "qwen", tmp_path / "base")
    file = base / "model.safetensors"
    if how == "cut":
        os.truncate(file, file.stat().st_size // 2)
    else:
        file.write_bytes(b"garbage " * 1000 if how == "garbage" else b"")
    cfg = run_config(base, folder / "rows.jsonl", tmp_path / "out")
    if how == "gone":
        file.unlink()
    line = fails(base=base, checkpointer=cfg["checkpointer"])
    assert line.startswith("error: checkpointer: ")
    assert str(base) in line


@pytest.mark.parametrize(("weights", "builder"), [("llama", "qwen"), ("qwen", "llama"), ("wider", "qwen")])
def test_weights_of_another_model(fails, folder, tmp_path, weights, builder):
    ours, theirs = (run_config(folder / name, folder / "rows.jsonl", tmp_path / "out") for name in (builder, weights))
    line = fails(base=folder / builder, checkpointer=theirs["checkpointer"])
    assert "the checkpoint does not fit model: " in line
    assert "model._component_" in line
    mixed = theirs["checkpointer"] | {"model_type": ours["checkpointer"]["model_type"]}
    assert "checkpoint" in fails(base=folder / builder, checkpointer=mixed)


def test_config_json_missing(fails, folder, tmp_path):
    base = shutil.copytree(folder / "qwen", tmp_path / "base")
    cfg = run_config(base, folder / "rows.jsonl", tmp_path / "out")
    (base / "config.json").unlink()
    assert "config.json" in fails(checkpointer=cfg["checkpointer"])


@pytest.mark.parametrize("how", ["other rank", "cut", "other layers", "not torch's"])
def test_adapter_that_does_not_fit(fails, folder, tmp_path, how):
    adapter = shutil.copytree(folder / "first" / "adapter", tmp_path / "adapter")
    weights = adapter / "adapter_model.safetensors"
    overrides, message = [f"checkpointer.adapter_checkpoint={adapter}"], f"adapter in {adapter}"
    if how == "other rank":
        overrides, message = [*overrides, "model.lora_rank=8"], "has r=4; the config has model.lora_rank=8"
    elif how == "cut":
        os.truncate(weights, weights.stat().st_size // 2)
    elif how == "other layers":
        save_file({k: v for k, v in load_file(weights).items() if ".0." not in k}, weights)
        message = "does not fit model: missing layers.0."
    else:
        overrides, message = [f"checkpointer.adapter_checkpoint={folder / 'rows.jsonl'}"], "rows.jsonl"
    assert message in fails(*overrides)


# ---- data


ROW = json.dumps({"question": "How many?", "answer": "It is 42."})
LONG = json.dumps({"question": "How many?", "answer": "So it is. " * 300})


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        ("", [], "rows.jsonl has no rows"),
        (f"{ROW}\n{{torn", [], "rows.jsonl:2: malformed JSON"),
        (f"{ROW}\n[1]", [], "rows.jsonl:2: a row must be a JSON object"),
        (f'{ROW}\n{{"question": "a"}}', [], "rows.jsonl:2: "),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            ["dataset.column_map=null"],
            "rows.jsonl:1: no assistant turn to train on",
        ),
        (f"{ROW}\n{ROW}", ["too_long=error", "tokenizer.max_seq_len=8"], "rows.jsonl:1: "),
        (f"{ROW}\n{ROW}", ["too_long=drop", "tokenizer.max_seq_len=8"], "2 over max_seq_len 8 were dropped"),
        (
            f"{ROW}\n{LONG}",
            ["too_long=error", "tokenizer.max_seq_len=null"],
            "rows.jsonl:2: 2115 tokens, but the model takes 512; set too_long to truncate or drop",
        ),
    ],
)
def test_rows(fails, rows, overrides, message):
    assert message in fails(*overrides, rows=rows)


def test_long_rows_are_counted(folder, tmp_path):
    long = json.dumps({"question": "How many?", "answer": "So it is. " * 200})
    (tmp_path / "rows.jsonl").write_text(f"{ROW}\n{long}\n{ROW}\n")
    for policy, count in [("truncate", "truncated"), ("drop", "dropped_too_long")]:
        out = tmp_path / policy
        cfg = run_config(folder / "qwen", tmp_path / "rows.jsonl", out, too_long=policy)
        assert call("--config", write_yaml(tmp_path / "run.yaml", cfg)) == 0
        counts = json.loads((out / "summary.json").read_text())["rows"]
        assert counts["rows"] == 3
        assert {key: counts[key] for key in ("truncated", "dropped_too_long")} == {
            "truncated": 0,
            "dropped_too_long": 0,
            count: 1,
        }


@pytest.mark.parametrize(("policy", "count"), [("truncate", "truncated"), ("drop", "dropped_too_long")])
@pytest.mark.parametrize("limit", [None, 1000])
def test_rows_longer_than_the_models_positions(folder, tmp_path, policy, count, limit):
    """Unchecked, this is an index error in the middle of training."""
    (tmp_path / "rows.jsonl").write_text(f"{ROW}\n{LONG}\n")
    cfg = run_config(folder / "qwen", tmp_path / "rows.jsonl", tmp_path / "out", too_long=policy)
    cfg["tokenizer"]["max_seq_len"] = limit
    assert call("--config", write_yaml(tmp_path / "run.yaml", cfg)) == 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["rows"][count] == 1


def test_tokenizer_of_a_larger_vocabulary(fails, folder, tmp_path):
    """Unchecked, this is an index error on a CPU, and on a GPU an assertion that kills the process."""
    base = write_model(tmp_path / "small", vocab=300)
    assert "but the model's vocabulary ends at 299" in fails(base=base)


def test_fewer_rows_than_a_step(folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROW)
    cfg = run_config(folder / "qwen", tmp_path / "rows.jsonl", tmp_path / "out", epochs=2)
    assert call("--config", write_yaml(tmp_path / "run.yaml", cfg)) == 0
    assert len(metrics(tmp_path / "out")) == 2


# ---- machine


def test_more_ranks_than_gpus(fails, monkeypatch):
    machine = replace(detect(), backend="cuda", torch_build="cuda", arch="sm_90", name="H200", gpu_count=1, bf16=True)
    monkeypatch.setattr(lifecycle, "detect", lambda: machine)
    monkeypatch.setattr(lifecycle, "local_world_size", lambda: 4)
    monkeypatch.setattr("rocm_ext.config.main.apply_environment", lambda profile, machine: [])
    line = fails(hardware="cuda")
    assert "4 processes need 4 GPUs" in line
    assert "Use --nproc_per_node 1" in line


def test_contradictory_allocator_variables(fails, monkeypatch):
    monkeypatch.setenv("PYTORCH_HIP_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    assert "configure the same allocator and differ" in fails(hardware="strix_halo")


# ---- training


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_values_in_the_base_weights(fails, folder, tmp_path, value):
    base = shutil.copytree(folder / "qwen", tmp_path / "base")
    state = load_file(base / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(state, base / "model.safetensors", metadata={"format": "pt"})
    line = fails(base=base)
    assert one_line_has(line, "layers.1.mlp.w3.weight", "not finite")


def test_adapter_that_the_last_step_spoils(folder, tmp_path, capsys):
    """No loss sees the values of the last step, so nothing else would notice."""
    cfg = run_config(folder / "qwen", folder / "rows.jsonl", tmp_path / "out", max_steps_per_epoch=1)
    cfg["optimizer"] |= {"lr": 1e30, "weight_decay": 1e30}
    assert call("--config", write_yaml(tmp_path / "run.yaml", cfg)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: layers.0.")
    assert error.endswith("not finite after step 1, so nothing was saved; lower the learning rate")
    assert not (tmp_path / "out" / "adapter").exists()


def test_loss_that_is_not_finite(folder, tmp_path, capsys):
    out = tmp_path / "out"
    cfg = run_config(folder / "qwen", folder / "rows.jsonl", out, epochs=4, save_every_n_steps=1)
    cfg["optimizer"]["lr"] = 1e30
    assert call("--config", write_yaml(tmp_path / "run.yaml", cfg)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    done = metrics(out, "step")
    assert error.startswith(f"error: step {done[-1] + 1}: loss ")
    assert "Rows of this step: " in error
    assert f"The last good checkpoint is {out}/checkpoints/step_{done[-1]:08d}" in error
    assert torch.load(out / "checkpoints" / f"step_{done[-1]:08d}" / "state.pt")["step"] == done[-1]
    assert not (out / "adapter").exists()


@pytest.mark.parametrize("logger", ["DiskLogger", "TensorBoardLogger"])
def test_metric_loggers(folder, tmp_path, logger):
    cfg = run_config(folder / "qwen", folder / "rows.jsonl", tmp_path / "out")
    cfg["metric_logger"] = {
        "_component_": f"torchtune.training.metric_logging.{logger}",
        "log_dir": str(tmp_path / "logs"),
    }
    assert call("--config", write_yaml(tmp_path / "run.yaml", cfg)) == 0
    assert any(p.stat().st_size for p in (tmp_path / "logs").rglob("*") if p.is_file())


@pytest.mark.wide
def test_trackio(folder, tmp_path, monkeypatch, capfd):
    pytest.importorskip("trackio", reason="trackio is not installed")
    cfg = run_config(folder / "qwen", folder / "rows.jsonl", tmp_path / "out")
    cfg["metric_logger"] = {"_component_": "rocm_ext.train.metrics.TrackioLogger", "project": "p", "name": "r"}
    path = write_yaml(tmp_path / "run.yaml", cfg)
    program = "import sys; from rocm_ext.recipes.lora_finetune_rocm import main; sys.argv[1:] = ['--config', " \
        f"{str(path)!r}]; sys.exit(main())"  # fmt: skip
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    assert subprocess.run([sys.executable, "-c", program], env=environment).returncode == 0
    read = "from trackio.sqlite_storage import SQLiteStorage as S; import json; " \
        "print(json.dumps([S.get_logs('p', 'r'), S.get_run_config('p', 'r')], default=str))"  # fmt: skip
    said = subprocess.run([sys.executable, "-c", read], env=environment, capture_output=True, text=True, check=True)
    logs, shown = json.loads(said.stdout.splitlines()[-1])
    written = metrics(tmp_path / "out", "loss")
    assert [line["loss"] for line in logs if "loss" in line] == pytest.approx(written)
    assert shown["optimizer"]["lr"] == cfg["optimizer"]["lr"]


def test_trackio_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match=r"pip install 'torchtune-rocm\[trackio\]'"):
        TrackioLogger("p")


# ---- any value anywhere

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
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=ANY)
def test_any_value_anywhere_ends_in_one_line(folder, tmp_path, capsys, data, value):
    """Reading the base weights ends the run here, so that each example ends in an error, of whatever kind."""
    stop = UserError("the base weights were read")
    cfg = config.defaults("lora_finetune_rocm") | run_config(folder / "qwen", folder / "rows.jsonl", tmp_path / "out")
    # a text would be a folder in the working directory, or a data set on the hub; validate_only may end well
    free = [key for key in keys_of(cfg) if key not in (("output_dir",), ("dataset", "source"), ("validate_only",))]
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
