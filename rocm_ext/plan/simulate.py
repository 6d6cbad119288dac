"""Measure the costs of a training step, by part, on fake tensors.

A model's code decides what a layer gets beside hidden states, and layers may differ. So the whole model runs, and of
each kind of layer the first one is measured in its place; the others pass their input on.
"""

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from rocm_ext.base.errors import UserError
from rocm_ext.data.batches import MicroBatch
from rocm_ext.losses import Objective
from rocm_ext.model.decoder import Decoder
from rocm_ext.plan.costs import CostCounter, Kernels, LayerCosts, LossCosts, on_fake_tensors


def simulate(
    decoder: Decoder,
    objective: Objective,
    lengths: Sequence[int],
    targets: int,
    kernels: Kernels,
    shared: Sequence[int] = (),
) -> tuple[list[LayerCosts], LossCosts, int]:
    """Run a step of ``decoder`` on fake tensors.

    Args:
        decoder: model with adapters, without weights.
        objective: computes the loss from hidden states; ``chunk_tokens`` must be set.
        lengths: tokens of each sequence in the micro-batch.
        targets: number of its tokens with a label.
        kernels: of the device.
        shared: of each packed sequence, see :class:`rocm_ext.data.batches.MicroBatch`.

    Returns:
        Costs of each layer, those of all after the layers, and the bytes of what the layers share beside hidden
        states: tables of positions, and masks.
    """
    run = _Run()
    layers = list(decoder.layers)
    kinds = [_kind(layer) for layer in layers]
    last = len(layers) - 1
    try:
        for i, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
            first = kinds.index(kind) == i
            decoder.layers[i] = _Stand(layer if first else None, layer, run.measure, (kind, i == last))
        with on_fake_tensors(decoder, kernels) as (fake, tally):
            run.tally = tally
            batch = _batch(lengths, targets, objective, decoder.packs, shared)
            hidden = fake.hidden_states(batch).flatten(0, 1)[batch.index]
            objective(fake.output, hidden, batch.targets, batch.columns, batch.sequence).backward()
            loss = LossCosts(tally.peak - run.held, tally.operations)
    except DataDependentOutputException as error:
        raise UserError(f"the model's code depends on values ({error}), so its memory cannot be planned") from error
    finally:
        for i, layer in enumerate(layers):
            decoder.layers[i] = layer
    return [run.costs[kind] for kind in kinds], loss, run.shared


class _Run:
    """Measurements of one run."""

    def __init__(self) -> None:
        self.tally: Any = None
        self.costs: dict[Any, LayerCosts] = {}
        self.shared = self.held = 0
        self._beside: dict[Any, tuple[Any, ...]] = {}  # what layers return beside hidden states, by kind

    def measure(self, layer: nn.Module | None, key: Any, x: Tensor, call: Callable[[Tensor], Any]) -> Any:
        """Measure ``layer`` if there is one; return its output in shape, for the next layer."""
        kind, last = key
        tally: CostCounter = self.tally
        if not self.costs:
            self.shared = tally.now - x.nbytes
        if layer is not None:
            self.costs[kind] = self._costs(kind, x, call)
        y = x.detach().requires_grad_()
        if last:
            self.held = tally.now
            tally.restart()
        return (y, *self._beside[kind]) if kind in self._beside else y

    def _costs(self, kind: Any, x: Tensor, call: Callable[[Tensor], Any]) -> LayerCosts:
        tally: CostCounter = self.tally
        entry = x.detach().requires_grad_()
        before = tally.now
        tally.restart()
        out = call(entry)
        if isinstance(out, tuple):
            out, *beside = out
            self._beside[kind] = tuple(each.detach() if isinstance(each, Tensor) else each for each in beside)
        kept, forward = tally.now - before - out.nbytes, tally.operations
        grad = torch.empty_like(out)
        tally.restart()
        held = tally.now - grad.nbytes
        out.backward(grad)
        return LayerCosts(x.nbytes, kept, tally.peak - held, forward, tally.operations)


class _Stand(nn.Module):
    """Takes a layer's place: measures it, or passes the hidden states on."""

    def __init__(self, layer: nn.Module | None, like: nn.Module, measure: Callable[..., Any], key: Any) -> None:
        super().__init__()
        self.layer = layer
        # in functions, because a copy of a model copies neither them nor what they refer to
        self._measure, self._like = lambda *args: measure(*args), lambda: like
        self._key = key

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cut(args), _cut(kwargs)
        return self._measure(self.layer, self._key, hidden_states, lambda x: self.layer(x, *args, **kwargs))  # type: ignore

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # models ask layers which mask they need
            like = self.__dict__.get("_like")
            if like is None or name.startswith("__"):
                raise
            return getattr(like(), name)


def _cut(value: Any) -> Any:
    """Return arguments of a layer without the graphs of earlier layers, which are gone, as where layers share keys."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    if type(value) in (tuple, list):
        return type(value)(map(_cut, value))
    if isinstance(value, MutableMapping):
        value.update({key: _cut(each) for key, each in value.items()})  # layers write into it
    return value


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Return a key that layers share if their costs are equal."""
    shapes = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    modules = [layer, *layer.children()]
    settings = [getattr(m, key, None) for m in modules for key in ("attention_type", "layer_type", "sliding_window")]
    return (type(layer), shapes, *map(str, settings))


def _batch(
    lengths: Sequence[int], targets: int, objective: Objective, packs: bool, shared: Sequence[int]
) -> MicroBatch:
    shape = (1, sum(lengths)) if packs else (len(lengths), max(lengths))
    index, labels, sequence = (torch.zeros(targets, dtype=torch.long) for _ in range(3))
    return MicroBatch(
        tokens=torch.zeros(shape, dtype=torch.long),
        positions=torch.zeros(shape, dtype=torch.long),
        lengths=tuple(lengths) if packs else None,
        index=index,
        targets=labels,
        sequence=sequence,
        sequences=len(lengths),
        real_tokens=sum(lengths),
        columns={name: torch.zeros(targets) for name in objective.columns},
        shared=tuple(shared),
    )
