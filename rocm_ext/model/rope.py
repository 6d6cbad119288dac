"""Rotary position embeddings that rotate halves, as Hugging Face's models do, with their scalings."""

import math

import torch
from torch import Tensor
from torchtune.models.qwen2._positional_embeddings import Qwen2RotaryPositionalEmbeddings

from rocm_ext.model.families import Rope


class HalvesRoPE(Qwen2RotaryPositionalEmbeddings):
    """torchtune's position embeddings of Qwen2 with linear or Llama 3 scaling of the frequencies.

    Args:
        dim: of a head.
        max_seq_len: positions.
        rope: base and scaling.
    """

    def __init__(self, dim: int, max_seq_len: int, rope: Rope) -> None:
        # plain attributes: layers with equal ones share a table
        self.kind, self.factor = rope.kind, rope.factor
        self.low, self.high, self.original = rope.low, rope.high, rope.original
        super().__init__(dim, max_seq_len, rope.base)

    def rope_init(self) -> None:
        """Compute the frequencies and the tables of cosines and sines."""
        exponents = torch.arange(0, self.dim, 2).float() / self.dim
        self.register_buffer("theta", self._scaled(1.0 / self.base**exponents), persistent=False)
        self.build_rope_cache(self.max_seq_len)

    def _scaled(self, theta: Tensor) -> Tensor:
        if self.kind == "default":
            return theta
        if self.kind == "linear":
            return theta / self.factor
        # Llama 3.1: low frequencies are divided, high ones stay, those between are interpolated
        wavelength = 2 * math.pi / theta
        share = (self.original / wavelength - self.low) / (self.high - self.low)
        between = (1 - share) * theta / self.factor + share * theta
        scaled = torch.where(wavelength > self.original / self.low, theta / self.factor, between)
        return torch.where(wavelength < self.original / self.high, theta, scaled)
