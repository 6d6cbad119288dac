"""Frequencies of rotary position embeddings, with linear, Llama 3 or YaRN scaling."""

import math

import torch
from torch import Tensor

from rocm_ext.model.families import Rope, Yarn


def frequencies(dim: int, rope: Rope) -> Tensor:
    """Return the angles by which a position rotates the pairs of a head's ``dim`` dimensions: [dim / 2] fp32."""
    theta = 1.0 / rope.base ** (torch.arange(0, dim, 2).float() / dim)
    if rope.kind == "default":
        return theta
    if rope.kind == "linear":
        return theta / rope.factor
    if rope.yarn is not None:
        return _interpolated(dim, theta, rope, rope.yarn)
    # Llama 3.1: low frequencies are divided, high ones stay, those between are interpolated
    wavelength = 2 * math.pi / theta
    share = (rope.original / wavelength - rope.low) / (rope.high - rope.low)
    between = (1 - share) * theta / rope.factor + share * theta
    scaled = torch.where(wavelength > rope.original / rope.low, theta / rope.factor, between)
    return torch.where(wavelength < rope.original / rope.high, theta, scaled)


def _interpolated(dim: int, theta: Tensor, rope: Rope, yarn: Yarn) -> Tensor:
    """Return YaRN's frequencies: unchanged in the first dimensions, divided in the last, interpolated between."""

    def dimension(rotations: float) -> float:
        """Return the dimension that makes so many rotations over the original positions."""
        return dim * math.log(rope.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.base))

    first, end = dimension(yarn.fast), dimension(yarn.slow)
    if yarn.rounded:
        first, end = math.floor(first), math.ceil(end)
    # dim - 1 counts the head's dimensions, although there are half as many frequencies; transformers does the same
    first, end = max(first, 0), min(end, dim - 1)
    end += 0.001 * (first == end)
    share = ((torch.arange(len(theta), dtype=torch.float32) - first) / (end - first)).clamp(0, 1)
    return theta / rope.factor * share + theta * (1 - share)
