"""Run torchtune's LoRA recipe from a given adapter: ``… train_torchtune sft|dpo ADAPTER --config YAML``."""

import importlib.util
import sys
from pathlib import Path

import torch
import torchtune.training.precision
from torchtune.config import parse

from tools.benchmarks.sides.talk import StepLogger

RECIPES = {
    "sft": ("lora_finetune_single_device", "LoRAFinetuneRecipeSingleDevice"),
    "dpo": ("lora_dpo_single_device", "LoRADPORecipeSingleDevice"),
}


def load_recipe(name: str, kind: str):
    """Load torchtune's recipe class from its file, because its ``recipes`` package refuses imports."""
    root = Path(importlib.util.find_spec("torchtune").origin).parents[1]
    spec = importlib.util.spec_from_file_location("torchtune_lora", root / "recipes" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kind)


class DPOLogger(StepLogger):
    """A metric logger that runs steps on order, and reports losses and gradient norms."""

    def __init__(self) -> None:
        super().__init__(("loss", "grad_norm"))
        self._norm = 0.0

    def measure(self, parameters) -> None:
        """Remember the norm of the gradient."""
        self._norm = torch.nn.utils.get_total_norm([p.grad for p in parameters]).item()

    def log_dict(self, payload, step: int) -> None:
        super().log_dict({**payload, "grad_norm": self._norm}, step)


def main() -> None:
    """Run the recipe as torchtune's ``recipe_main`` does; torchtune loads an adapter only when it resumes."""
    work, adapter = sys.argv.pop(1), sys.argv.pop(1)
    # On a CPU torchtune refuses bf16, because NCCL is missing.
    torchtune.training.precision.verify_bf16_support = lambda: True

    class FromAdapter(load_recipe(*RECIPES[work])):
        def _setup_model(self, *args, **kwargs):
            kwargs["lora_weights_state_dict"] = torch.load(adapter)
            return super()._setup_model(*args, **kwargs)

        def _setup_optimizer(self, *args, **kwargs):
            optimizer = super()._setup_optimizer(*args, **kwargs)
            if work == "dpo":
                optimizer.register_step_pre_hook(
                    lambda *_: self._metric_logger.measure(self.adapter_params.values())
                )
            return optimizer

    def train(cfg):
        recipe = FromAdapter(cfg=cfg)
        recipe.setup(cfg=cfg)
        recipe.train()
        recipe.cleanup()

    parse(train)()


if __name__ == "__main__":
    main()
