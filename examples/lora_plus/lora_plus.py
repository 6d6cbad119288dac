"""LoRA+: the B matrices of an adapter learn faster than the A matrices (arXiv:2402.12354).

tune run lora_plus.py --config my_run.yaml lora_plus_ratio=8
"""

from omegaconf import DictConfig
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune
from torch.optim import Optimizer

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.train.lifecycle import run
from rocm_ext.train.trainer import Trainer


class LoRAPlusTrainer(Trainer):
    """Trains B with ``lora_plus_ratio`` times the learning rate of A."""

    def setup_optimizer(self) -> Optimizer:
        """The config's optimiser, with all its arguments, over two groups of parameters."""
        ratio = self.cfg.lora_plus_ratio
        if not isinstance(ratio, int | float) or not ratio > 0:
            raise UserError(f"lora_plus_ratio is {ratio!r}; expected a number above 0")
        b = [parameter for name, parameter in self.learner.adapter.items() if "lora_b" in name]
        rest = [parameter for name, parameter in self.learner.adapter.items() if "lora_b" not in name]
        groups = [{"params": rest}, {"params": b}]
        optimizer = config.instantiate(self.cfg.optimizer, groups, key="optimizer")
        optimizer.param_groups[1]["lr"] *= ratio
        return optimizer


@config.recipe_main("lora_plus", defaults="lora_plus.yaml")
def main(cfg: DictConfig) -> None:
    """LoRA+ fine-tuning: `tune run lora_plus.py --config NAME [key=value ...]`."""
    run(LoRAFinetune(cfg, trainer=LoRAPlusTrainer))


if __name__ == "__main__":
    main()
