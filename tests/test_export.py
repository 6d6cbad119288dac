"""`rocm-ext export`: merged models, files as other programs read them, and their modes."""

import json
import logging
import os
import shutil
from pathlib import Path

import peft
import pytest
import torch
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune
from transformers import AutoModelForCausalLM

from rocm_ext import cli, config
from rocm_ext.data.template import TEMPLATE
from rocm_ext.train.run import run
from tests.families import CHATML, folder_config, id_of, on_demand, write_family
from tests.tiny import write_rows, write_yaml

TOKENS = torch.tensor([[5, 17, 99, 3, 250, 42, 8, 8, 120, 61, 33, 7]])


def finetune(top: Path, base: Path, **changes) -> Path:
    """Run SFT on a few rows, as a user would; return the run's folder."""
    out, rows = top / "run", write_rows(top / "rows.jsonl", 16)
    cfg = folder_config(base, rows, out, **{"epochs": 1, **changes})
    cfg["optimizer"]["lr"] = 0.02
    run(LoRAFinetune(config.load("lora_finetune_rocm", str(write_yaml(top / "run.yaml", cfg)))))
    return out


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    return on_demand(tmp_path_factory.mktemp("bases"), write_family, sharded="qwen3")


@pytest.fixture(scope="session")
def trained(tmp_path_factory, bases):
    """A run, whose base model is ``bases("llama")``, and whose files nobody but their owner and group may write."""
    before = os.umask(0o027)
    try:
        return finetune(tmp_path_factory.mktemp("trained"), bases("llama"), save_adapter_weights_only=False)
    finally:
        os.umask(before)


def export(*arguments: object) -> int:
    return cli.main(["export", *map(str, arguments)])


def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def test_a_runs_files_have_the_modes_of_the_umask(trained):
    files = [path for path in trained.rglob("*") if path.is_file()]
    assert {path.relative_to(trained).parts[0] for path in files} >= {"adapter", "checkpoints", "merged"}
    written = [path for path in files if path.suffix in (".safetensors", ".json", ".jsonl", ".yaml", ".pt")]
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in written} == dict.fromkeys(
        (path.name for path in written), "0o640"
    )


def test_the_end_of_a_run_tells_what_to_do_next(tmp_path, bases, messages):
    top = tmp_path / "a b"
    top.mkdir()
    logging.getLogger("rocm_ext").setLevel(logging.INFO)  # a recipe's `main` does
    out = finetune(top, bases("llama"), max_steps_per_epoch=1)
    assert messages[-1] == f"try it: rocm-ext chat '{out}'; take it elsewhere: rocm-ext export '{out}' --gguf FILE"


def test_the_merged_model_is_pefts(trained, bases, tmp_path, capsys):
    assert export(trained, "--merged", tmp_path / "merged") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'merged'}\n"
    found, theirs = logits(tmp_path / "merged"), logits(bases("llama"), trained / "adapter")
    torch.testing.assert_close(found, theirs, atol=2e-4, rtol=1e-4)
    assert (theirs - logits(bases("llama"))).abs().max() > 0.1, "the adapter changes something"
    assert (tmp_path / "merged" / TEMPLATE).read_text() == CHATML
    # an adapter's folder and its base model are enough; a checkpoint's adapter belongs to its run
    adapter = shutil.copytree(trained / "adapter", tmp_path / "adapter")
    assert export(adapter, "--base", bases("llama"), "--merged", tmp_path / "other") == 0
    assert (tmp_path / "other" / "model.safetensors").read_bytes() == (
        tmp_path / "merged" / "model.safetensors"
    ).read_bytes()


def test_the_merged_model_stops_where_the_template_ends_a_turn(bases, tmp_path):
    base = shutil.copytree(bases("qwen2"), tmp_path / "base")
    text, turn = id_of(base, "<|endoftext|>"), id_of(base, "<|im_end|>")
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": text, "top_p": 0.9}))
    out = finetune(tmp_path, base, max_steps_per_epoch=1)
    assert export(out, "--merged", tmp_path / "merged") == 0
    written = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert written == {"eos_token_id": [text, turn], "top_p": 0.9}


def test_what_cannot_be_exported(trained, bases, tmp_path, capsys):
    def fails(*arguments: object) -> str:
        assert export(*arguments) in (1, 2)
        return capsys.readouterr().err

    assert "nothing to write; set --merged DIR" in fails(trained)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    assert "full exists; choose a new folder" in fails(trained, "--merged", tmp_path / "full")
    assert "no_such is not a folder" in fails(tmp_path / "no_such", "--merged", tmp_path / "x")
    assert "full holds no run" in fails(tmp_path / "full", "--merged", tmp_path / "x")
    assert "has no adapter to merge" in fails(bases("llama"), "--merged", tmp_path / "x")
    lone = shutil.copytree(trained, tmp_path / "lone", ignore=shutil.ignore_patterns("adapter"))
    assert "has no adapter yet" in fails(lone, "--merged", tmp_path / "x")
    assert "no base model in nowhere" in fails(trained, "--base", "nowhere", "--merged", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "lone"]
