"""Run torchtune's DPO recipe from a given adapter: ``… dpo_torchtune ADAPTER --config YAML``."""

import torch

from tools.benchmarks.sides.sft_torchtune import FromAdapter, load_recipe, run
from tools.benchmarks.sides.talk import StepLogger


class DPO(FromAdapter, load_recipe("lora_dpo_single_device").LoRADPORecipeSingleDevice):
    """torchtune's recipe, which also measures the gradient's norm, as the other sides do."""

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


if __name__ == "__main__":
    run(DPO)
