"""``compile: True``: layers are compiled once, and the adapter is that of plain layers."""

import pytest
import torch
from rocm_ext.recipes import lora_finetune_rocm as sft
from safetensors.torch import load_file

from tests.kit.forks import forked, succeed
from tests.kit.tiny import run_config, write_model, write_rows, write_yaml


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    top = tmp_path_factory.mktemp("compiled")
    write_model(top / "base", num_hidden_layers=4)
    write_rows(top / "rows.jsonl", 24)
    return write_yaml(top / "run.yaml", run_config(top / "base", top / "rows.jsonl", top / "out"))


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
        with torch._dynamo.config.patch(error_on_recompile=True):  # monkeypatch would leave the key missing
            succeed(sft.main, path, *changes)
        found[compiled] = load_file(tmp_path / str(compiled) / "adapter" / "adapter_model.safetensors")
    assert found[True].keys() == found[False].keys()
    for name, plain in found[False].items():
        apart = (found[True][name] - plain).norm() / plain.norm()
        assert apart < 0.1, f"{name}: {apart:.2f}"


def test_layers_without_gradients_end_the_run(path, monkeypatch, tmp_path):
    def compile_layer(layer, **options):  # as torch 2.11 did: what the layer adds has no gradient
        forward = layer.forward
        layer.forward = lambda x, **kwargs: x + (forward(x, **kwargs) - x).detach()

    monkeypatch.setattr(torch.nn.Module, "compile", compile_layer)
    code, said = forked(sft.main, path, "compile=True", f"output_dir={tmp_path / 'out'}")
    assert code == 1
    assert "3 of 4 layers get no gradient" in said.splitlines()[-1]
    assert "compile: False" in said.splitlines()[-1]
