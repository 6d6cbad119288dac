"""What the probes of one child process share: config, machine, device and model."""

from functools import cached_property

import torch
from omegaconf import OmegaConf
from torchtune.modules import TransformerDecoder

from rocm_ext import config
from rocm_ext.bench.sweep import Spec
from rocm_ext.machine import numerics
from rocm_ext.machine.budget import open_device
from rocm_ext.machine.detect import detect
from rocm_ext.machine.profile import load_profile
from rocm_ext.model.attention import choose_attention
from rocm_ext.model.build import build_model
from rocm_ext.model.download import use_shape


class Skipped(Exception):
    """Raised by a probe that cannot measure this here; it says why."""


class Bench:
    """The config, machine, device and model that a child measures.

    Args:
        spec: what the user asked for.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.machine = detect()
        recipe = config.recipe_of(spec.config, spec.overrides)
        self.cfg = OmegaConf.create(config.trainer_config(config.load(recipe, spec.config, spec.overrides)))
        use_shape(self.cfg)
        self.profile = load_profile(self.cfg.hardware)
        self.device = open_device(self.profile, self.machine, 0, self._fraction(), self.cfg.device)
        self.dtype, _ = numerics.pick_dtype(self.cfg.dtype, self.machine)

    def _fraction(self) -> float | None:
        """The cap that keeps the process within its budget where a probe underestimates its memory."""
        if self.cfg.device == "cpu" or self.machine.unified:  # open_device caps unified memory itself
            return None
        return min(1.0, self.spec.budget / self.machine.total_memory)

    @cached_property
    def shape(self) -> TransformerDecoder:
        """The config's model without weights."""
        decoder = build_model(self.cfg.model, self.dtype, 0, torch.device("meta"))
        choose_attention(decoder, self.cfg.attention)
        return decoder

    def require(self, needed: int) -> None:
        """Check that ``needed`` bytes are within the budget.

        Raises:
            Skipped: where they are not.
        """
        if needed > self.spec.budget:
            raise Skipped(f"needs {needed / 2**30:.1f} GiB, the budget is {self.spec.budget / 2**30:.1f} GiB")
