"""Linear layers as the sampler's matrices: joined, with their adapters merged or beside them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rocm_ext.model.adapters.peft_files import merged_layer
from rocm_ext.model.lora import Dora, Lora, dense, factors

Order = Callable[[Tensor], Tensor]  # changes the order of rows


# On CPUs, matrix products with fewer or more rows use other kernels, which round differently (measured with MKL on
# several threads). Without these bounds a sample would depend on the number of samples in its batch.
MIN_ROWS, MAX_ROWS = 16, 96


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.is_cuda or len(x) <= MAX_ROWS:
        return F.linear(x, weight, bias)
    parts = x.tensor_split(-(-len(x) // MAX_ROWS))  # nearly equal lengths, so every part has at least MIN_ROWS
    return torch.cat([F.linear(part, weight, bias) for part in parts])


@dataclass(frozen=True)
class Matrix:
    """A linear layer with an optional adapter: ``(x Wᵀ + x Aᵀ Bᵀ) * scale + bias``.

    ``a``, ``b`` and ``scale`` are None without an adapter, or when the adapter is merged into W.

    Attributes:
        weight: W, [out, in].
        bias: [out].
        a, b: [r, in] and [out, r]; b includes the adapter's scale.
        scale: [out], DoRA's magnitude over its norm.
    """

    weight: Tensor
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    scale: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[n, in] -> [n, out]."""
        if self.a is None or self.b is None:
            return _linear(x, self.weight, self.bias)
        out = _linear(x, self.weight) + _linear(_linear(x, self.a), self.b)
        if self.scale is not None:
            out *= self.scale
        return out if self.bias is None else out + self.bias

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> "Matrix":
        """Return a copy with ``change`` applied to the output rows of every part."""
        parts = {key: change(value) for key, value in vars(self).items() if value is not None and key != "a"}
        return replace(self, **parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(tensor.nbytes for tensor in tensors_of(self))


@dataclass(frozen=True)
class AdaptedLayer:
    """An adapted layer and its place in a matrix.

    Attributes:
        layer: the layer under training.
        order: changes the order of its rows.
        rows: of the matrix that come from it.
        columns: of the matrix's B that come from it, which are the rows of A.
    """

    layer: Lora | Dora
    order: Order
    rows: slice
    columns: slice


def tensors_of(part: "Matrix | Tensor | None") -> list[Tensor]:
    """List the tensors of a matrix; a norm is its own only tensor."""
    if part is None or isinstance(part, Tensor):
        return [] if part is None else [part]
    return [value for value in vars(part).values() if value is not None]


def as_it_is(rows: Tensor) -> Tensor:
    """Keep the order of rows."""
    return rows


def joined(parts: Sequence[tuple[Any, Order]], merge: bool) -> tuple[Matrix, list[AdaptedLayer]]:
    """Join the rows of linear layers into one matrix.

    Args:
        parts: the layers, with or without adapters, and the order of the rows of each.
        merge: add the adapters' updates to the weights.

    Returns:
        The matrix, and its adapted layers.
    """
    made, sources = [], []
    row = column = 0
    for linear, order in parts:
        matrix = _matrix(linear, merge).map_rows(order)
        rows, rank = len(matrix.weight), 0
        if isinstance(linear, Lora | Dora):
            rank = len(linear.lora_a.weight)
            sources.append(AdaptedLayer(linear, order, slice(row, row + rows), slice(column, column + rank)))
        made.append(matrix)
        row, column = row + rows, column + rank
    return made[0] if len(made) == 1 else _fuse(made), sources


def _matrix(linear: Any, merge: bool) -> Matrix:
    weight, bias = dense(linear.weight.detach()), linear.bias
    bias = None if bias is None else dense(bias.detach())
    if not isinstance(linear, Lora | Dora):
        return Matrix(weight, bias)
    if merge:
        return Matrix(merged_layer(linear, weight), bias)
    a, b, scale = (value if value is None else value.to(weight.dtype, copy=True) for value in factors(linear))
    return Matrix(weight, bias, a, b, scale)


def _fuse(parts: list[Matrix]) -> Matrix:
    """Join the rows of all ``parts`` into one matrix; stack the adapters' A and put their B on a block diagonal."""

    def joined(values: list[Tensor | None], default: Callable[[Matrix], Tensor]) -> Tensor | None:
        if all(value is None for value in values):
            return None
        return torch.cat([default(p) if v is None else v for p, v in zip(parts, values, strict=True)])

    b = [p.weight.new_zeros(len(p.weight), 0) if p.b is None else p.b for p in parts]
    return Matrix(
        torch.cat([p.weight for p in parts]),
        joined([p.bias for p in parts], lambda p: p.weight.new_zeros(len(p.weight))),
        a := joined([p.a for p in parts], lambda p: p.weight.new_zeros(0, p.weight.shape[1])),
        None if a is None else torch.block_diag(*b),
        joined([p.scale for p in parts], lambda p: p.weight.new_ones(len(p.weight))),
    )


def refresh(matrix: Matrix, sources: Sequence[AdaptedLayer]) -> None:
    """Copy the present values of adapters into a matrix, in place.

    Args:
        matrix: of :func:`joined`.
        sources: its adapted layers.
    """
    for source in sources:
        layer, order, rows, columns = source.layer, source.order, source.rows, source.columns
        if matrix.a is None or matrix.b is None:
            matrix.weight[rows] = order(merged_layer(layer, dense(layer.weight.detach())))
            continue
        a, b, scale = factors(layer)
        matrix.a[columns] = a
        matrix.b[rows, columns] = order(b)
        if scale is not None and matrix.scale is not None:
            matrix.scale[rows] = order(scale)
