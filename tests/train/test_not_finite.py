"""A loss or a gradient that is not finite: the error names the part of the model that it comes from, and the cure."""

import pytest
import torch
from rocm_ext.recipes import lora_finetune_rocm as sft
from torch._subclasses.fake_tensor import FakeTensor

from rocm_ext.losses import CrossEntropy
from rocm_ext.model import attention
from rocm_ext.train.learner import Learner
from tests.kit.forks import forked, forked_ranks, several_ranks
from tests.kit.tiny import run_config, write_model, write_rows, write_yaml


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    top = tmp_path_factory.mktemp("not_finite")
    write_model(top / "base")
    write_rows(top / "rows.jsonl", 24)
    cfg = run_config(top / "base", top / "rows.jsonl", top / "out", overwrite_output_dir=True)
    return write_yaml(top / "run.yaml", cfg)


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
@pytest.mark.parametrize(
    ("name", "hook", "found", "cure"),
    [
        ("layers.1.attn", spoilt, "those of layers.1.attn (", "Its inputs are finite: set attention=math"),
        ("layers.1.mlp.w2", spoilt, "those of layers.1.mlp.w2 (", "look at these rows, or set dtype=fp32"),
        ("layers.0.mlp", spoilt_gradient, "All activations are finite, so it is the backward pass", "dtype=fp32"),
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_spoilt_layer_is_named(path, monkeypatch, name, hook, found, cure, checkpointing):
    plant(monkeypatch, name, hook)
    code, said = forked(sft.main, path, f"enable_activation_checkpointing={checkpointing}")
    line = said.splitlines()[-1]
    assert code == 1
    assert line.startswith("error: step 1: loss ")
    assert found in line
    assert cure in line
    assert "Rows of this step: " in line


@pytest.mark.wide
def test_a_kernel_of_attention_is_named_by_what_calls_it(path, monkeypatch):
    sound = attention.sdpa
    monkeypatch.setattr(attention, "sdpa", lambda *args, **kwargs: sound(*args, **kwargs) * torch.nan)
    for kernel, cure in (("auto", "attention=math, or attention=eager"), ("math", "dtype=fp32")):
        line = forked(sft.main, path, f"attention={kernel}")[1].splitlines()[-1]
        assert "those of layers.0.attn (" in line
        assert f"Its inputs are finite: set {cure}" in line


def test_the_loss_is_named(path, monkeypatch):
    compute = CrossEntropy.__call__
    monkeypatch.setattr(CrossEntropy, "__call__", lambda *args, **kwargs: compute(*args, **kwargs) * torch.nan)
    line = forked(sft.main, path)[1].splitlines()[-1]
    assert "All hidden states are finite, so it is the loss CrossEntropy" in line


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_that_is_finite_the_second_time(path, monkeypatch, tmp_path, compiled):
    compute, times = CrossEntropy.__call__, []

    def once(*args, **kwargs):
        value = compute(*args, **kwargs)
        if isinstance(value, FakeTensor):  # of the memory plan
            return value
        times.append(1)
        return value * (torch.nan if len(times) == 1 else 1)

    monkeypatch.setattr(CrossEntropy, "__call__", once)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: None)
    line = forked(sft.main, path, f"compile={compiled}")[1].splitlines()[-1]
    assert ("Computed again, uncompiled, the values are finite" if compiled else "Computed again, the values") in line
    assert ("Set compile=False. " if compiled else "look at these rows") in line


@pytest.mark.wide
@several_ranks
def test_all_ranks_name_the_same_layer(path, monkeypatch):
    plant(monkeypatch, "layers.1.mlp", spoilt)
    for code, said in forked_ranks(sft.main, path):
        assert code == 1
        assert "those of layers.1.mlp (" in said.splitlines()[-1]
