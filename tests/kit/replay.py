"""CUDA graphs on a CPU: a step's operations are recorded, and computed again on the very same tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rocm_ext.model.weights.quantized import Quantized


def _tensors(part: Any) -> list[Tensor]:
    """Those with memory of their own; quantised weights, which nothing writes to, have none."""
    return [
        leaf
        for leaf in tree_leaves(part)
        if isinstance(leaf, Tensor) and not isinstance(leaf, Quantized)
    ]


class Recorded(TorchDispatchMode):
    """Stands in for ``torch.cuda.CUDAGraph``. Values that the host reads are recorded as they were, as in a graph."""

    replays = 0

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def pool(self) -> None:
        """Return nothing: there is no pool."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        if func._schema.is_mutable:
            for tensor in inputs:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._before:
                    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                    self._before[storage._cdata] = whole, whole.clone()
        out = func(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        fresh = [tensor for tensor in _tensors(out) if tensor.untyped_storage()._cdata not in known]
        if fresh or func._schema.is_mutable:
            self._calls.append((func, args, kwargs, fresh))
        return out

    def end(self) -> None:
        """Undo what was computed: a capture computes nothing."""
        for whole, before in self._before.values():
            whole.copy_(before)

    def replay(self) -> None:
        """Compute the recorded operations again, into the recorded tensors."""
        type(self).replays += 1
        for func, args, kwargs, fresh in self._calls:
            for mine, new in zip(fresh, _tensors(func(*args, **kwargs)), strict=False):
                mine.copy_(new)


@contextmanager
def capture(graph: Recorded, pool: None) -> Iterator[None]:
    """Stand in for ``torch.cuda.graph``."""
    with graph:
        yield
    graph.end()
