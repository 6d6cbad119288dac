"""Two ranks give the same results as one."""

import json
import os
import sys

import pytest
import torch
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune, main
from safetensors.torch import load_file

from rocm_ext import config
from rocm_ext.distributed.ranks import Ranks
from tests.kit.forks import forked_ranks, several_ranks, succeed_on_ranks
from tests.kit.tiny import metrics, run_config, tune, write_model, write_rows, write_yaml

DORA = {"use_dora": True, "apply_lora_to_output": True}


@several_ranks
@pytest.mark.parametrize(
    ("family", "start", "lora", "changes"),
    [
        ("qwen2", "forks", {}, {"tokens_per_micro_batch": 100}),
        pytest.param("qwen2", "torchrun", {}, {"tokens_per_micro_batch": 100}, marks=pytest.mark.wide),
        ("llama", "forks", DORA, {"enable_activation_checkpointing": True, "clip_grad_norm": 0.5}),
    ],
)
def test_two_ranks_equal_one(tmp_path, family, start, lora, changes):
    base = write_model(tmp_path / "base", family, initializer_range=0.1)
    rows = write_rows(tmp_path / "rows.jsonl", 17)  # the third step of an epoch has one row for two ranks
    cfg = run_config(base, rows, tmp_path / "one", epochs=2, **changes)
    cfg["model"] |= lora
    cfg["dataset_val"] = cfg["dataset"]
    if lora:
        second = write_rows(tmp_path / "second.jsonl", 4, start=13)
        second.write_text(second.read_text().replace("{", '{"weight": 0.25, ', 2))
        one = {**cfg["dataset"], "split": "train[:13]", "weight": 1}
        cfg["dataset"] = [one, {**cfg["dataset"], "source": str(second), "weight": 2.5}]
    one = LoRAFinetune(config.load("lora_finetune_rocm", str(write_yaml(tmp_path / "one.yaml", cfg))))
    one.setup()
    one.train()
    one.cleanup()

    path = write_yaml(tmp_path / "two.yaml", {**cfg, "output_dir": str(tmp_path / "two")})
    if start == "torchrun":
        run = tune("run", "--nnodes", "1", "--nproc_per_node", "2", "lora_finetune_rocm", "--config", path)
        assert run.returncode == 0, run.stderr
    else:
        succeed_on_ranks(main, path)

    assert json.loads((tmp_path / "two" / "summary.json").read_text())["ranks"] == 2
    for key, tolerance in [("loss", 1e-6), ("val_loss", 1e-6), ("grad_norm", 1e-5), ("lr", 0), ("tokens", 0)]:
        found, expected = (metrics(tmp_path / name, key) for name in ("two", "one"))
        assert len(expected) == (2 if key == "val_loss" else 6)
        assert found == pytest.approx(expected, rel=tolerance, abs=0)
    found, expected = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("two", "one"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@several_ranks
@pytest.mark.skipif(sys.platform != "linux", reason="names of interfaces")
def test_ranks_of_one_machine_talk_over_its_loopback(tmp_path):
    """gloo would listen at the address of the machine's own name, often one of a network."""

    def where():
        ranks = Ranks.from_env(torch.device("cpu"))
        print(os.environ["GLOO_SOCKET_IFNAME"])
        ranks.close()
        sys.exit(0)

    for code, messages in forked_ranks(where, tmp_path):
        assert (code, messages.splitlines()[-1]) == (0, "lo"), messages
