"""torchtune's LoRA recipe from a given adapter: ``… sft_torchtune ADAPTER --config YAML``."""

import importlib.util
import sys
from pathlib import Path

import torch
import torchtune.training.precision
from torchtune.config import parse


def load_recipe():
    """torchtune's recipe module; its ``recipes`` package cannot be imported, only its files."""
    root = Path(importlib.util.find_spec("torchtune").origin).parents[1]
    path = root / "recipes" / "lora_finetune_single_device.py"
    spec = importlib.util.spec_from_file_location("torchtune_lora", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FromAdapter(load_recipe().LoRAFinetuneRecipeSingleDevice):
    """The recipe itself loads an adapter only when it resumes."""

    def _setup_model(self, *args, **kwargs):
        kwargs["lora_weights_state_dict"] = torch.load(ADAPTER)
        return super()._setup_model(*args, **kwargs)


@parse
def main(cfg):
    """Its own ``recipe_main``."""
    recipe = FromAdapter(cfg=cfg)
    recipe.setup(cfg=cfg)
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    # on a CPU it refuses bf16, for want of NCCL
    torchtune.training.precision.verify_bf16_support = lambda: True
    ADAPTER = sys.argv.pop(1)
    main()
