"""Layer-wise learning-rate decay: layers near the input learn slower than those near the output (arXiv:2003.10555).

tune run layer_decay.py --config my_run.yaml layer_lr_decay=0.8
"""

from omegaconf import DictConfig
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune
from torch.optim import Optimizer

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.train.lifecycle import run
from rocm_ext.train.trainer import Trainer


class LayerDecayTrainer(Trainer):
    """Trains each layer with ``layer_lr_decay`` times the learning rate of the next one."""

    def setup_optimizer(self) -> Optimizer:
        """The config's optimiser, with all its arguments, over one group of parameters for each layer."""
        decay = self.cfg.layer_lr_decay
        if not isinstance(decay, int | float) or not 0 < decay <= 1:
            raise UserError(f"layer_lr_decay is {decay!r}; expected a number above 0, at most 1")
        adapter, layers = self.learner.adapter.values(), self.learner.decoder.layers
        distance = {
            p: len(layers) - 1 - i for i, layer in enumerate(layers) for p in layer.parameters()
        }  # to the last
        groups = [
            {"params": [p for p in adapter if distance.get(p, 0) == n]} for n in range(len(layers))
        ]
        optimizer = config.instantiate(self.cfg.optimizer, groups, key="optimizer")
        for n, group in enumerate(optimizer.param_groups):
            group["lr"] = group["lr"] * decay**n
        return optimizer


@config.recipe_main("layer_decay", defaults="layer_decay.yaml")
def main(cfg: DictConfig) -> None:
    """Fine-tuning with layer-wise decay: `tune run layer_decay.py --config NAME [key=value ...]`."""
    run(LoRAFinetune(cfg, trainer=LayerDecayTrainer))


if __name__ == "__main__":
    main()
