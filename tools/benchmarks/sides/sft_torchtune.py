"""Run torchtune's LoRA recipe from a given adapter: ``… sft_torchtune ADAPTER --config YAML``."""

import importlib.util
import sys
from pathlib import Path

import torch
import torchtune.training.precision
from torchtune.config import parse


def load_recipe(name: str = "lora_finetune_single_device"):
    """Load torchtune's recipe module from its file, because its ``recipes`` package refuses imports."""
    root = Path(importlib.util.find_spec("torchtune").origin).parents[1]
    path = root / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location("torchtune_lora", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FromAdapter(load_recipe().LoRAFinetuneRecipeSingleDevice):
    """torchtune's recipe, starting from ``ADAPTER``; the original loads an adapter only when it resumes."""

    def _setup_model(self, *args, **kwargs):
        kwargs["lora_weights_state_dict"] = torch.load(ADAPTER)
        return super()._setup_model(*args, **kwargs)


@parse
def main(cfg):
    """Do the same as torchtune's ``recipe_main``."""
    recipe = FromAdapter(cfg=cfg)
    recipe.setup(cfg=cfg)
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    # On a CPU torchtune refuses bf16, because NCCL is missing.
    torchtune.training.precision.verify_bf16_support = lambda: True
    ADAPTER = sys.argv.pop(1)
    main()
