"""Run torchtune's DPO recipe from a given adapter: ``… dpo_torchtune ADAPTER --config YAML``."""

import sys

import torch
import torchtune.training.precision
from torchtune.config import parse

from tools.benchmarks.sides.sft_torchtune import load_recipe
from tools.benchmarks.sides.talk import StepLogger


class FromAdapter(load_recipe("lora_dpo_single_device").LoRADPORecipeSingleDevice):
    """torchtune's recipe, starting from ``ADAPTER``; it also measures the gradient's norm, as the other sides do."""

    def _setup_model(self, *args, **kwargs):
        kwargs["lora_weights_state_dict"] = torch.load(ADAPTER)
        return super()._setup_model(*args, **kwargs)

    def _setup_optimizer(self, *args, **kwargs):
        optimizer = super()._setup_optimizer(*args, **kwargs)
        optimizer.register_step_pre_hook(lambda *_: self._metric_logger.measure(self.adapter_params.values()))
        return optimizer


class Logger(StepLogger):
    """A metric logger that runs steps on order, and reports losses and gradient norms."""

    def __init__(self) -> None:
        super().__init__(("loss", "grad_norm"))
        self._norm = 0.0

    def measure(self, parameters) -> None:
        """Remember the norm of the gradient."""
        self._norm = torch.nn.utils.get_total_norm([p.grad for p in parameters]).item()

    def log_dict(self, payload, step: int) -> None:
        super().log_dict({**payload, "grad_norm": self._norm}, step)


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
