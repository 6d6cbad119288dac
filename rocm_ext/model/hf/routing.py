"""Replay routers' choices from sampling in the forward passes of an update (R3, arXiv:2510.11370).

Sampler and trainer round differently, so a router that is undecided between two experts may choose another one in
training. Other weights than in sampling would then compute the token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.return_types import topk


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers' fused experts by name, in the model's order."""
    return {name: part for name, part in model.named_modules() if hasattr(part, "is_transposed")}


class Replay:
    """Replaces the choices of a model's routers; it wraps the modules with router and experts.

    The model's code still computes the weights of the chosen experts.

    Args:
        model: the model, whose modules are changed.
        chosen: experts per token and layer.

    Attributes:
        layers: number of layers with experts.
        counts: number of choices per layer.
    """

    def __init__(self, model: nn.Module, chosen: int) -> None:
        self.chosen = chosen
        self._given: Tensor | None = None
        self._differs: list[Tensor] | None = None
        blocks = [model.get_submodule(name.rpartition(".")[0]) for name in experts_of(model)]
        self.layers = len(blocks)
        self.counts = [0] * self.layers
        for layer, (block, experts) in enumerate(zip(blocks, experts_of(model).values(), strict=True)):
            run = partial(self._run, layer, len(experts.down_proj), block.forward)  # type: ignore[arg-type]
            block.forward = run  # type: ignore[method-assign]

    def begin(self, routes: Tensor | None) -> None:
        """Begin a forward pass, whose backward pass may compute layers again.

        ``routes`` [..., layers * chosen] are the tokens' experts by number; if negative or None, routers choose.
        """
        self._given = None if routes is None else routes.reshape(-1, self.layers, self.chosen)
        self._differs = []

    def differing(self) -> tuple[Tensor, Tensor] | None:
        """Return where the given choices differ from the routers', and where choices are given; None: nowhere.

        Both are [t, layers, chosen] booleans for the pass since :meth:`begin`. Layers that are computed again do not
        count.
        """
        differs, self._differs = self._differs, None
        return (torch.stack(differs, 1), self._given >= 0) if self._given is not None and differs else None

    def _run(self, layer: int, experts: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._given is None:
            return forward(*args, **kwargs)
        with _Chooses(experts, self.chosen, partial(self._choose, layer)):
            return forward(*args, **kwargs)

    def _choose(self, layer: int, routers: Tensor) -> Tensor:
        """Return the tokens' experts, [t, chosen], from the given ones and the router's choice."""
        self.counts[layer] += 1
        assert self._given is not None
        given = self._given[:, layer].to(routers)
        if self._differs is not None:
            self._differs.append((given[..., None] != routers[:, None]).all(-1) & (given >= 0))
        return torch.where(given < 0, routers, given)


class _Chooses(TorchFunctionMode):
    """Replaces the result of a router's ``topk`` over [t, experts]."""

    def __init__(self, experts: int, chosen: int, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._experts, self._chosen, self._choose = experts, chosen, choose

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return out
        values = args[0] if args else kwargs["input"]
        if values.ndim != 2 or values.shape[1] != self._experts or out.indices.shape[1] != self._chosen:
            return out
        index = self._choose(out.indices)
        return topk((values.gather(1, index), index))
