"""torchtune's LoRA recipe from a given adapter: ``python -m tests.benchmarks.sft_stock ADAPTER --config YAML``."""

import sys

import torch
from torchtune.config import parse

from tests.benchmarks.sft import load_stock_recipe

stock = load_stock_recipe()


class FromAdapter(stock.LoRAFinetuneRecipeSingleDevice):
    """The stock recipe, which itself loads an adapter only when it resumes."""

    def _setup_model(self, *args, **kwargs):
        kwargs["lora_weights_state_dict"] = torch.load(ADAPTER)
        return super()._setup_model(*args, **kwargs)

    def save_checkpoint(self, *args, **kwargs):
        """Not part of what is measured."""


@parse
def main(cfg):
    recipe = FromAdapter(cfg=cfg)
    recipe.setup(cfg=cfg)
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    ADAPTER = sys.argv.pop(1)
    main()
