"""Steps that run out of memory, have values that are not finite or are compiled: one line says what to change."""

import re
from pathlib import Path

import pytest
import torch
from rocm_ext.recipes import grpo_rocm
from rocm_ext.recipes import lora_finetune_rocm as sft
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensor

from rocm_ext import cli
from rocm_ext.losses import CrossEntropy
from rocm_ext.sampling.slots import SlotBatch
from rocm_ext.train import lifecycle
from rocm_ext.train.learner import CausalLM, Learner
from tests.kit import grpo_runs, raft_runs
from tests.kit.forks import forked, forked_ranks, several_ranks, succeed
from tests.kit.tiny import run_config, write_model, write_rows, write_yaml


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """The config of a run of two steps, which each start begins anew."""
    top = tmp_path_factory.mktemp("steps")
    write_model(top / "base", num_hidden_layers=4)
    write_rows(top / "rows.jsonl", 24)
    changes = {"max_steps_per_epoch": 2, "overwrite_output_dir": True}
    return write_yaml(
        top / "run.yaml", run_config(top / "base", top / "rows.jsonl", top / "out", **changes)
    )


@pytest.fixture
def run(path):
    """``run("key=value", …)``: the exit code and the last line of a run with these overrides, in a fork."""

    def run(*overrides: str) -> tuple[int, str]:
        code, said = forked(sft.main, path, *overrides)
        assert "Traceback" not in said
        return code, said.splitlines()[-1]

    return run


# ---- memory


@pytest.fixture
def budget(monkeypatch):
    """``budget(n)``: the device has n bytes."""
    return lambda size: monkeypatch.setattr(
        lifecycle, "memory_budget", lambda *args, **kwargs: (size, "the test's")
    )


def gib(text: str) -> float:
    number, unit = re.search(r"([\d.]+) (MiB|GiB)", text).groups()
    return float(number) * (2**30 if unit == "GiB" else 2**20)


@pytest.mark.wide
def test_a_plan_above_the_budget_is_refused_early(run, budget, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "read_weights", lambda self: pytest.fail("the weights are read"))
        budget(2**20)
        code, line = run()
        assert code == 1
        assert re.match(r"error: the memory plan needs [\d.]+ MiB and has 1\.0 MiB\. ", line)
        assert line.endswith("over_budget=try starts the run regardless")
        budget(int(0.8 * gib(line)))
        code, line = run()
        assert code == 1
    ways = re.findall(r"(?:Set|or) (\w+=\w+(?: \w+=\w+)*) \(plans", line)
    assert len(ways) == 2, line
    for way in ways:
        assert run(*way.split())[0] == 0, way


@pytest.mark.wide
def test_a_plan_above_the_budget_may_be_tried(path, run, budget, capsys):
    budget(2**20)
    assert run("over_budget=try", "save_every_n_steps=1")[0] == 0
    resumed = run(
        "overwrite_output_dir=False", "resume_from_checkpoint=True", "save_every_n_steps=1"
    )
    assert resumed[0] == 0, "it has shown that it fits"
    assert run()[0] == 1
    assert "over_budget is 'perhaps'; expected refuse or try" in run("over_budget=perhaps")[1]
    code = cli.main(
        ["eval", "--config", str(path), "--data", str(path.with_name("rows.jsonl")), "--json"]
    )
    assert (code, "perplexity" in capsys.readouterr().out) == (0, True)


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total capacity of 60 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:119] DefaultCPUAllocator: can't allocate memory: you tried to"),
], ids=["a GPU", "a CPU"])  # fmt: skip
def test_out_of_memory_in_training(run, monkeypatch, error):
    def forward(self, batch):
        raise error

    monkeypatch.setattr(CausalLM, "forward", forward)
    code, line = run()
    assert code == 75  # EX_TEMPFAIL
    assert re.match(rf"error: out of memory at [\d.]+ [MG]iB: .*{str(error)[-12:]}", line)
    assert re.search(r"Planned for training: [\d.]+ MiB of [\d.]+ GiB\. Set \w+=", line)
    assert "enable_activation_checkpointing=True (plans " in line
    assert "tokens_per_micro_batch=" in line
    assert "resume_from_checkpoint=True continues" in line


@pytest.mark.wide
@several_ranks
def test_out_of_memory_on_two_ranks(path, monkeypatch):
    """Planning changes must not touch the sharded model."""

    def forward(self, batch):
        raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(CausalLM, "forward", forward)
    for code, said in forked_ranks(sft.main, path):
        assert code == 75, said
        assert "Traceback" not in said
        assert "enable_activation_checkpointing=True (plans " in said


def test_another_runtime_error_keeps_its_traceback(run, monkeypatch):
    def forward(self, batch):
        raise RuntimeError("HIP error: invalid device function")

    monkeypatch.setattr(CausalLM, "forward", forward)
    with pytest.raises(AssertionError, match="Traceback"):
        run()


def test_out_of_memory_in_sampling(tmp_path, monkeypatch):
    def step(self):
        raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 1.00 GiB.")

    world = raft_runs.write_world(tmp_path / "world")
    monkeypatch.setattr(SlotBatch, "step", step)
    code, said = forked(
        grpo_rocm.main, grpo_runs.write_run(world, tmp_path / "out"), "engine.slots=64"
    )
    line = said.splitlines()[-1]
    assert code == 75, said
    assert "Set engine.slots=32 or max_new_tokens=6. resume_from_checkpoint=True continues" in line


# ---- values that are not finite


def plant(monkeypatch, name: str, hook) -> None:
    """Let a module's output pass through ``hook``, from the model's set-up on."""
    build = Learner.setup_model

    def setup_model(self):
        decoder = build(self)
        decoder.get_submodule(name).register_forward_hook(lambda module, args, output: hook(output))
        return decoder

    monkeypatch.setattr(Learner, "setup_model", setup_model)


def spoilt(output: torch.Tensor) -> torch.Tensor:
    return output.index_fill(-1, torch.tensor([3]), torch.nan)


def spoilt_gradient(output: torch.Tensor) -> torch.Tensor:
    output.register_hook(lambda gradient: gradient * torch.nan)
    return output


@pytest.mark.wide(always=2)
@pytest.mark.parametrize(("name", "hook", "found", "cure"), [
    ("layers.1.attn", spoilt, "those of layers.1.attn (", "Its inputs are finite: set attention=math"),
    ("layers.1.mlp.w2", spoilt, "those of layers.1.mlp.w2 (", "look at these rows, or set dtype=fp32"),
    ("layers.0.mlp", spoilt_gradient, "All activations are finite, so it is the backward pass", "dtype=fp32"),
])  # fmt: skip
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_spoilt_layer_is_named(run, monkeypatch, name, hook, found, cure, checkpointing):
    plant(monkeypatch, name, hook)
    code, line = run(f"enable_activation_checkpointing={checkpointing}")
    assert code == 1
    assert line.startswith("error: step 1: loss ")
    assert found in line
    assert cure in line
    assert "Rows of this step: " in line


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_that_is_finite_the_second_time(run, monkeypatch, compiled):
    compute, times = CrossEntropy.__call__, []

    def once(*args, **kwargs):
        value = compute(*args, **kwargs)
        if isinstance(value, FakeTensor):  # of the memory plan
            return value
        times.append(1)
        return value * (torch.nan if len(times) == 1 else 1)

    monkeypatch.setattr(CrossEntropy, "__call__", once)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: None)
    line = run(f"compile={compiled}")[1]
    assert (
        "Computed again, uncompiled, the values are finite"
        if compiled
        else "Computed again, the values"
    ) in line
    assert ("Set compile=False. " if compiled else "look at these rows") in line


@pytest.mark.wide
@several_ranks
def test_all_ranks_name_the_same_layer(path, monkeypatch):
    plant(monkeypatch, "layers.1.mlp", spoilt)
    for code, said in forked_ranks(sft.main, path):
        assert code == 1
        assert "those of layers.1.mlp (" in said.splitlines()[-1]


# ---- compiled layers


@pytest.mark.wide  # compilers take 20 seconds
def test_layers_are_compiled_once_and_learn_as_plain_ones(path, monkeypatch, tmp_path):
    compiles = torch.nn.Module.compile

    def compile_layer(layer, **options):
        return compiles(layer, **options, backend="aot_eager")  # Inductor takes a minute

    monkeypatch.setattr(torch.nn.Module, "compile", compile_layer)
    torch._dynamo.reset()  # forks inherit what other tests have compiled
    found = {}
    for compiled in (False, True):
        changes = [f"compile={compiled}", "dtype=bf16", f"output_dir={tmp_path / str(compiled)}"]
        with torch._dynamo.config.patch(
            error_on_recompile=True
        ):  # monkeypatch would leave the key missing
            succeed(sft.main, path, *changes)
        found[compiled] = load_file(
            tmp_path / str(compiled) / "adapter" / "adapter_model.safetensors"
        )
    assert found[True].keys() == found[False].keys()
    for name, plain in found[False].items():
        apart = (found[True][name] - plain).norm() / plain.norm()
        assert apart < 0.1, f"{name}: {apart:.2f}"


def test_layers_without_gradients_end_the_run(run, monkeypatch):
    def compile_layer(layer, **options):  # as torch 2.11 did: what the layer adds has no gradient
        forward = layer.forward
        layer.forward = lambda x, **kwargs: x + (forward(x, **kwargs) - x).detach()

    monkeypatch.setattr(torch.nn.Module, "compile", compile_layer)
    code, line = run("compile=True")
    assert code == 1
    assert "3 of 4 layers get no gradient" in line
    assert "compile: False" in line
