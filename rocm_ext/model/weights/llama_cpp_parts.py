"""A weight of a model as llama.cpp's tensors: its parts, their order and their values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from rocm_ext.model.weights.quantized import of_blocks


class Change(NamedTuple):
    """A change of a weight's values."""

    to_llama: Callable[[Tensor], Tensor]
    from_llama: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Part:
    """A weight, or some of its rows, as a tensor of llama.cpp.

    Attributes:
        name: Hugging Face's name, in a form that the package ``gguf`` knows.
        rows: rows of the weight, or of every expert's weight, after ``change``.
        heads: shape [a, b, width] of the columns after ``change``, which llama.cpp orders as [b, a, width]. None if
            the order is the same.
        change: change of the weight's values. None if values stay.
    """

    name: str
    rows: slice | Tensor = field(default_factory=lambda: slice(None))
    heads: tuple[int, int, int] | None = None
    change: Change | None = None

    def of(self, weight: Tensor) -> Tensor:
        """Return the part of a weight, [..., rows, columns] or, of a vector or biases, [..., rows]."""
        if self.change is not None:
            weight = self.change.to_llama(weight)
        if self.is_vector(weight):
            return weight[..., self.rows]
        return self.columns_of(weight[..., self.rows, :])

    def columns_of(self, weight: Tensor) -> Tensor:
        """Return a weight with the columns in llama.cpp's order."""
        if self.heads is None:
            return weight
        by_head = weight.unflatten(-1, self.heads)  # [..., a, b, width]
        return by_head.transpose(-3, -2).flatten(-3)

    def is_vector(self, tensor: Tensor) -> bool:
        """Return whether a tensor with this name has no columns."""
        return tensor.dim() < 2 or self.name.endswith("bias")


def joined(
    parts: Sequence[Part], tensors: Sequence[Tensor], kind: str, scales: Sequence[Tensor] = ()
) -> Tensor:
    """Join parts to a weight, the reverse of :meth:`Part.of`; raise a ValueError if the shapes do not fit.

    Args:
        parts: the weight's parts.
        tensors: llama.cpp's tensors, one per part: numbers, or bytes of blocks.
        kind: kind of the blocks, a key of :data:`rocm_ext.model.weights.unpack.BLOCKS`. Empty for numbers.
        scales: of the blocks' rows, [..., rows, 1] per part.
    """
    first = parts[0]
    weight = tensors[0]
    is_vector = first.is_vector(weight)
    dim = -1 if is_vector else -2
    if kind and is_vector:
        raise ValueError(f"{first.name} has blocks of {kind}; expected numbers")
    if any(tensor.shape != weight.shape for tensor in tensors):
        raise ValueError(f"{first.name} and {parts[-1].name} have different shapes")
    if isinstance(first.rows, Tensor):
        rows = weight.shape[dim]
        if rows != len(first.rows):
            raise ValueError(f"{first.name} has {rows} rows instead of {len(first.rows)}")
    if len(parts) > 1:
        shape = list(weight.shape)
        shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
        weight = weight.new_empty(shape)
        for part, tensor in zip(parts, tensors, strict=True):
            if is_vector:
                weight[..., part.rows] = tensor
            else:
                weight[..., part.rows, :] = tensor
    elif isinstance(first.rows, Tensor):
        back = first.rows.argsort()
        weight = weight.index_select(dim, back.to(weight.device))
    swapped = None
    if first.heads is not None:
        a, b, width = first.heads
        swapped = b, a, width
    if kind:
        scale = None
        if scales:
            plain = [replace(part, heads=None, change=None) for part in parts]
            scale = joined(plain, scales, "")
        weight = of_blocks(weight, kind, swapped, scale)
    elif swapped:
        weight = replace(first, heads=swapped).columns_of(weight)
    return weight if first.change is None else first.change.from_llama(weight)
