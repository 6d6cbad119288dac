"""Run torchtune's LoRA recipe from a given adapter: ``… sft_torchtune ADAPTER --config YAML``."""

import importlib.util
import sys
from pathlib import Path

import torch
import torchtune.training.precision
from torchtune.config import parse


def load_recipe(name: str):
    """Load torchtune's recipe module from its file, because its ``recipes`` package refuses imports."""
    root = Path(importlib.util.find_spec("torchtune").origin).parents[1]
    path = root / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location("torchtune_lora", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FromAdapter:
    """Lets a recipe of torchtune's start from the file ``adapter``; the original loads one only when it resumes."""

    adapter = ""

    def _setup_model(self, *args, **kwargs):
        kwargs["lora_weights_state_dict"] = torch.load(self.adapter)
        return super()._setup_model(*args, **kwargs)


def run(kind) -> None:
    """Run the recipe ``kind``, a :class:`FromAdapter`, as torchtune's ``recipe_main`` does."""
    # On a CPU torchtune refuses bf16, because NCCL is missing.
    torchtune.training.precision.verify_bf16_support = lambda: True
    kind.adapter = sys.argv.pop(1)

    def main(cfg):
        recipe = kind(cfg=cfg)
        recipe.setup(cfg=cfg)
        recipe.train()
        recipe.cleanup()

    parse(main)()


if __name__ == "__main__":
    stock = load_recipe("lora_finetune_single_device").LoRAFinetuneRecipeSingleDevice
    run(type("SFT", (FromAdapter, stock), {}))
