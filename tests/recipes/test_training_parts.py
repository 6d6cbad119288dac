"""Metric loggers get everything, and optimisers of other libraries work."""

import shutil
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from omegaconf import OmegaConf
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.kit import parity
from tests.kit.tiny import metrics, run_config

LOGGERS = "torchtune.training.metric_logging"


def finetune(folder: Path, out: Path, **changes) -> LoRAFinetune:
    cfg = run_config(folder / "base", folder / "prompts.jsonl", out, epochs=3)
    cfg["model"] |= changes.pop("model", {})
    return parity.finetune(cfg | changes)


# Validations fall on steps 1 to 6, and only step 4 is logged.
VALIDATED = {"validation_fraction": 0.2, "run_val_every_n_steps": 1, "log_every_n_steps": 4}


def test_tensorboard_shows_every_validation_and_the_config(folder, tmp_path):
    logger = {
        "_component_": f"{LOGGERS}.TensorBoardLogger",
        "log_dir": str(tmp_path / "board"),
        "organize_logs": False,
    }
    finetune(folder, tmp_path / "out", metric_logger=logger, **VALIDATED)
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    found = {event.step: event.tensor_proto.float_val[0] for event in board.Tensors("val_loss")}
    assert found == pytest.approx(dict(enumerate(metrics(tmp_path / "out", "val_loss"), start=1)))
    assert len(found) == 6
    assert [event.step for event in board.Tensors("loss")] == [4]
    (event,) = board.Tensors("config/text_summary")
    assert "lora_rank: 4" in event.tensor_proto.string_val[0].decode()
    assert OmegaConf.load(tmp_path / "out" / "torchtune_config.yaml").model.lora_rank == 4


def test_8_bit_optimiser_of_torchao_steps_and_resumes(folder, tmp_path, monkeypatch):
    """Its learning rate is a tensor. It compiles each step, which takes a minute and is not what is tested here."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    options = {
        "optimizer": {"_component_": "torchao.optim.AdamW8bit", "lr": 1e-2},
        "lr_scheduler": {"_component_": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.5},
        "model": {"lora_rank": 64},  # it leaves tensors of fewer than 4,096 numbers in fp32
        "loraplus_lr_ratio": 4,
        "save_every_n_steps": 1,
        "keep_last_n_checkpoints": 9,
    }
    recipe = finetune(folder, tmp_path / "whole", **options)
    states = [value for each in recipe.trainer.optimizer.state.values() for value in each.values()]
    assert any(type(value).__name__ == "OptimState8bit" for value in states)
    slow, fast = (float(group["lr"]) for group in recipe.trainer.optimizer.param_groups)
    assert fast == pytest.approx(4 * slow)
    assert metrics(tmp_path / "whole", "lr") == pytest.approx([1e-2 * 0.5**i for i in range(6)])
    losses = metrics(tmp_path / "whole")
    assert sum(losses[4:]) < 0.97 * sum(losses[:2])

    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for step in (4, 5, 6):
        shutil.rmtree(tmp_path / "part" / "checkpoints" / f"step_{step:08d}")
    finetune(folder, tmp_path / "part", resume_from_checkpoint=True, **options)
    assert metrics(tmp_path / "part") == losses
    name = Path("adapter") / "adapter_model.safetensors"
    assert (tmp_path / "part" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_weights_and_biases_gets_validations_and_the_config(folder, tmp_path, monkeypatch):
    """A resumed run of theirs has a config that differs in resume_from_checkpoint, which they refuse by default."""
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    finetune(
        folder,
        tmp_path / "out",
        metric_logger={"_component_": f"{LOGGERS}.WandBLogger"},
        **VALIDATED,
    )
    logged = [call.args[0] for call in wandb.log.call_args_list]
    assert [line["global_step"] for line in logged if "val_loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["global_step"] for line in logged if "loss" in line] == [4]
    update = wandb.config.update.call_args
    assert (update.args[0]["model"]["lora_rank"], update.kwargs) == (4, {"allow_val_change": True})
    assert wandb.finish.called
