"""Measure the costs of a training step by running it on fake tensors, which have shapes but no memory.

This runs the code that trains, so the estimate follows every change of a layer. A model's code decides which inputs a
layer gets besides hidden states, and layers may differ. So the complete model runs; the first layer of every kind is
measured, and the others pass their input on. It takes a fraction of a second for models of any size.
"""

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tag, Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from rocm_ext.base.errors import UserError
from rocm_ext.base.types import Json
from rocm_ext.data.batches import MicroBatch
from rocm_ext.losses import Objective
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.hf.grouped_product import ALIKE
from rocm_ext.model.lora import ExpertLora, adapters
from rocm_ext.model.native.layers import HAS_KERNEL, FusedRMSNorm
from rocm_ext.model.plan_cache import remembered
from rocm_ext.model.sampler import MIN_ROWS, one_step
from rocm_ext.model.weights.quantized import Quantized, unpacked_once

# bytes per value, measured on a CPU; a GPU compiles one kernel of all operations
_BYTES_TO_UNPACK = 40
_ATTENTION: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_: sdpa_flop_count(q, k, v),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda g, q, k, v, *_: (
        sdpa_backward_flop_count(g, q, k, v)
    ),
}
# operations, besides views and pointwise ones, whose inputs decide the shapes, strides and device of the results
_PLAIN = frozenset(
    """
    mm bmm addmm sum mean cat clone _to_copy _unsafe_view select_backward slice_backward gather _softmax
    _softmax_backward_data _log_softmax
    """.split()  # noqa: SIM905
)


class Operation(NamedTuple):
    """One kernel.

    Attributes:
        flops: floating-point operations of matrix products. 0 for other kernels, which memory bounds.
        bytes: bytes read and written.
        attention: whether it is a fused attention kernel.
    """

    flops: int
    bytes: int
    attention: bool = False


class CostCounter(TorchDispatchMode):
    """Counts operations and the bytes of live tensors while it is active.

    It does not see a kernel's workspace. Tensors that existed before count once an operation returns them;
    :meth:`ignore` excludes them. Tensors on the meta device have no bytes; fake tensors represent some.

    Args:
        to_unpack: further bytes per value of ggml's blocks.

    Attributes:
        now: bytes of live tensors.
        peak: maximum of ``now`` since the last :meth:`restart`.
        operations: kernels since the last :meth:`restart`.
    """

    def __init__(self, to_unpack: int = 0) -> None:
        super().__init__()
        self._to_unpack = to_unpack
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self.operations: list[Operation] = []

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Exclude ``tensors``, which existed before, from the count."""
        self._sizes.update((t.untyped_storage()._cdata, 0) for t in tensors)

    def restart(self) -> None:
        """Clear the operations and set the peak to the bytes that are live now."""
        self.peak, self.operations = self.now, []

    def once(self, parts: Sequence[Any]) -> Iterator[Any]:
        """Yield the first of equal ``parts``, which leave no tensors behind; its kernels count for all of them."""
        before = len(self.operations)
        yield from parts[:1]
        self.operations += self.operations[before:] * (len(parts) - 1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device  # autograd asks for it more often than it computes
        if Quantized in types:
            return NotImplemented  # its dequantisation comes here in turn
        inputs = _tensors((args, kwargs))
        out = _computed(func, inputs, args, kwargs)
        results = _tensors(out)
        known = {t.untyped_storage()._cdata for t in inputs}
        view = not func._schema.is_mutable and all(
            t.untyped_storage()._cdata in known for t in results
        )
        if not view and "empty" not in func._schema.name:
            moved = sum(map(_bytes, (*inputs, *results)))
            if func is torch.ops.rocm_ext.unpack.default:
                moved += self._to_unpack * results[0].numel()
            flops = _flops(func, args, kwargs, out)
            self.operations.append(Operation(flops, moved, _name(func) in _ATTENTION))
        for tensor in results:
            self._add(tensor)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or (type(tensor) is not FakeTensor and tensor.is_meta):
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def _computed(func: Any, inputs: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
    """Return what an operation returns for fake tensors.

    Most operations of a step, such as views and products, only turn shapes into shapes. torch computes them for fake
    tensors in Python, several times slower than for the tensors on the meta device that they represent.
    """
    plain = func.is_view or _name(func) in _PLAIN or Tag.pointwise in func.tags
    if "device" in kwargs:
        plain = False
    # reading ``device`` would be an operation
    devices = {getattr(t, "fake_device", None) for t in inputs if plain}
    if len(devices) == 1 and None not in devices:
        mode: Any = inputs[0].fake_mode  # type: ignore[attr-defined]

        def on_its_device(result: Any) -> Any:
            return FakeTensor(mode, result, *devices) if type(result) is Tensor else result

        with suppress(NotImplementedError):  # an operation without a kernel for the meta device
            with in_kernel_invocation_manager(mode):
                out = func(*args, **kwargs)
            if isinstance(out, tuple | list):
                return list(map(on_its_device, out))
            return on_its_device(out)
    return func(*args, **kwargs)


def _tensors(part: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _name(func: Any) -> str:
    return func._overloadpacket.__name__.rstrip("_")  # addmm_ costs the same as addmm


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    name = _name(func)
    attention = _ATTENTION.get(name)
    if attention:
        shapes = [t.shape for t in args if isinstance(t, Tensor)]
        return int(attention(*shapes)) // 2  # causal
    if name == "_linear_pointwise":  # oneDNN's
        return 2 * args[0].numel() * out.shape[-1]
    count: Any = flop_registry.get(getattr(torch.ops.aten, name, None))
    return int(count(*args, **kwargs, out_val=out)) if count else 0


class LayerCosts(NamedTuple):
    """Costs of one transformer layer for one micro-batch.

    Attributes:
        entry: bytes of the input; a checkpointed layer keeps nothing else.
        kept: further bytes that an ordinary layer keeps for the backward pass.
        working: further bytes that the backward pass needs at its peak.
        forward: kernels of the forward pass.
        backward: kernels of the backward pass.
    """

    entry: int
    kept: int
    working: int
    forward: list[Operation]
    backward: list[Operation]


class LossCosts(NamedTuple):
    """Costs of the final norm, output layer and loss for one micro-batch, forward and backward.

    Attributes:
        working: bytes at the peak, in addition to the incoming hidden states.
        operations: kernels.
    """

    working: int
    operations: list[Operation]


@dataclass(frozen=True)
class Kernels:
    """Operations that the target device runs as one fused kernel.

    Attributes:
        attention: fused attention. Without it, a layer keeps the attention scores.
        norm: RMSNorm. Without it, the norm is several operations.
        together: attention of short sequences is one call, as on CPUs.
    """

    attention: bool
    norm: bool
    together: bool = False

    @classmethod
    def on(cls, device: torch.device, bf16: bool, attention: str) -> "Kernels":
        """Return this torch's fused kernels on ``device``.

        Args:
            device: the target.
            bf16: whether the device has bf16; GPUs without it (gfx906 and older) have no fused attention.
            attention: kernel in the config; see :func:`rocm_ext.model.attention.sdpa`.
        """
        cuda = device.type == "cuda"
        fused = attention in ("flash", "efficient")
        if attention == "auto":
            fused = bf16 or not cuda
        return cls(attention=fused, norm=cuda and HAS_KERNEL, together=not cuda)


class _KernelNorm(FusedRMSNorm):
    """torch's RMSNorm as on a GPU: one kernel. On CPUs it is several operations."""

    def forward(self, x: Tensor) -> Tensor:
        return _OneKernel.apply(x)


class _OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return ctx.saved_tensors[0] + grad


@contextmanager
def on_fake_tensors(module: nn.Module, kernels: Kernels) -> Iterator[tuple[Any, CostCounter]]:
    """Yield a copy of ``module`` on fake CPU tensors, in training mode, and an active tally."""
    fake = copy.deepcopy(module)
    _set_kernels(fake, kernels)
    blocks: list[tuple[nn.Module, str, Any]] = []  # quantised weights, with their modules and names
    for part in fake.modules():
        for name, weight in part._parameters.items():
            if isinstance(weight, Quantized):
                blocks.append((part, name, weight))
                part._parameters[name] = None
    fake = fake.to("meta").train()
    backends = [SDPBackend.MATH]  # gfx906 uses torch's math path
    if kernels.attention:  # the CPU's fused kernel keeps the same tensors as a GPU's
        backends.insert(0, SDPBackend.FLASH_ATTENTION)
    with FakeTensorMode(), sdpa_kernel(backends):
        fake._apply(_empty_like)
        for part, name, weight in blocks:
            part._parameters[name] = nn.Parameter(
                weight.with_parts(_empty_like), requires_grad=False
            )
        tally = CostCounter(_BYTES_TO_UNPACK if kernels.together else 0)
        tally.ignore(fake.buffers())
        for parameter in fake.parameters():
            stored = [getattr(parameter, part, parameter) for part in ("packed", "scale")]
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
                stored.append(parameter.grad)
            tally.ignore(stored)
        token = ALIKE.set(tally.once)
        try:
            with tally:
                yield fake, tally
        finally:
            ALIKE.reset(token)


def _set_kernels(fake: nn.Module, kernels: Kernels) -> None:
    """Have a model's modules call the operations that the target's ``kernels`` compute."""
    for _, layer in adapters(fake):
        # every product dequantises the weight
        if not isinstance(layer, ExpertLora) and layer._quantize_base:
            weight = torch.empty(layer.weight.shape, dtype=layer.weight.dtype, device="meta")
            layer.weight = nn.Parameter(weight, requires_grad=False)
            layer._quantize_base = False
    for part in fake.modules():
        if kernels.norm and type(part) is FusedRMSNorm:
            part.__class__ = _KernelNorm
        # a property would set the kernels of the real layers
        kernel = inspect.getattr_static(part, "kernel", None)
        # a CPU has no efficient kernel
        if kernel == "efficient" or (kernel == "flash" and not kernels.together):
            part.kernel = "fused"  # type: ignore[assignment]
        elif kernel == "auto" and not kernels.together:
            part.kernel = "apart"  # type: ignore[assignment]


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def launches_of(
    decoder: Decoder, merge: bool | None, device: torch.device, kernels: Kernels
) -> int:
    """Return the number of kernels in a decoding step; arguments as in :class:`rocm_ext.plan.planner.SamplingPlanner`.

    The number of answers changes it only if experts are computed one by one.
    """

    def count() -> int:
        step = CostCounter()
        with torch.no_grad(), on_fake_tensors(decoder, kernels) as (fake, _):
            ALIKE.set(step.once)
            one_step(fake.eval().sampler(merge, device), MIN_ROWS, step)
        return len(step.operations)

    return remembered([count.__qualname__, decoder, merge, device, kernels], count)


# ---- a step, by part


def simulate(
    decoder: Decoder,
    objective: Objective,
    lengths: Sequence[int],
    targets: int,
    kernels: Kernels,
    shared: Sequence[int] = (),
) -> tuple[list[LayerCosts], LossCosts, int]:
    """Run a step of ``decoder`` on fake tensors, or recall the costs of an equal step.

    Args: see :func:`rocm_ext.plan.memory.plan_memory`; the objective's ``chunk_tokens`` must be set.

    Returns:
        Costs of the layers, costs of everything after them, and bytes of the tables of positions and the masks, which
        the layers share.
    """
    run = _Run()
    layers = list(decoder.layers)
    kinds = [_kind(layer) for layer in layers]
    firsts = [kinds.index(kind) for kind in kinds]  # the index of the first layer of the same kind

    def step() -> Json:
        with on_fake_tensors(decoder, kernels) as (fake, tally):
            run.tally = tally
            batch = _batch(lengths, targets, objective, decoder.packs, shared)
            hidden = fake.hidden_states(batch).flatten(0, 1)[batch.index]
            with unpacked_once():
                objective(
                    fake.output, hidden, batch.targets, batch.columns, batch.sequence
                ).backward()
            loss = LossCosts(tally.peak - run.after_layers, tally.operations)
        return {"layers": run.costs, "loss": loss, "beside": run.shared}

    try:
        for i, layer in enumerate(layers):
            last = i == len(layers) - 1
            decoder.layers[i] = _Stand(run, layer, first=firsts[i], index=i, last=last)
        stored = remembered([decoder, objective, lengths, targets, kernels, shared], step)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UserError(
            f"the model's code depends on values ({error}), so its memory cannot be planned: it is not supported"
        ) from error
    finally:
        for i, layer in enumerate(layers):
            decoder.layers[i] = layer
    costs = {}
    for first, layer_costs in stored["layers"].items():
        entry, kept, working, *passes = layer_costs
        forward, backward = map(_operations, passes)
        costs[int(first)] = LayerCosts(entry, kept, working, forward, backward)
    working, operations = stored["loss"]
    loss = LossCosts(working, _operations(operations))
    return [costs[first] for first in firsts], loss, stored["beside"]


def _operations(stored: Iterable[Sequence[Any]]) -> list[Operation]:
    """Return operations from JSON, which has lists."""
    return [Operation(*values) for values in stored]


class _Run:
    """Measurements of one run.

    Attributes:
        tally: the active counter.
        costs: costs of the layers by the index of a kind's first layer.
        shared: bytes of the tensors that the layers share.
        after_layers: bytes that are live after the last layer.
    """

    tally: CostCounter

    def __init__(self) -> None:
        self.costs: dict[int, LayerCosts] = {}
        self.shared = 0
        self.after_layers = 0
        self._further: dict[int, tuple[Any, ...]] = {}  # further outputs of layers

    def measure(self, stand: "_Stand", x: Tensor, call: Callable[[Tensor], Any]) -> Any:
        """Measure the layer of ``stand`` if it has one; return an output of the right shape for the next layer."""
        if not self.costs:
            self.shared = self.tally.now - x.nbytes
        if stand.layer is not None:
            self.costs[stand.first] = self._costs(stand.first, x, call)
        y = x.detach().requires_grad_()
        if stand.last:
            self.after_layers = self.tally.now
            self.tally.restart()
        further = self._further.get(stand.first)
        return y if further is None else (y, *further)

    def _costs(self, first: int, x: Tensor, call: Callable[[Tensor], Any]) -> LayerCosts:
        tally = self.tally
        entry = x.detach().requires_grad_()
        before = tally.now
        tally.restart()
        out = call(entry)
        if isinstance(out, tuple):
            out, *further = out
            self._further[first] = tuple(map(_detached, further))
        kept = tally.now - before - out.nbytes
        forward = tally.operations
        grad = torch.empty_like(out)
        tally.restart()
        before_backward = tally.now - grad.nbytes
        out.backward(grad)
        working = tally.peak - before_backward
        return LayerCosts(x.nbytes, kept, working, forward, tally.operations)


class _Stand(nn.Module):
    """Replaces a layer: measures it, or passes the hidden states on.

    Attributes:
        layer: the layer, if it is the first of its kind.
        first: index of the first layer of the kind.
        last: whether this is the last layer.
    """

    def __init__(self, run: _Run, layer: nn.Module, *, first: int, index: int, last: bool) -> None:
        super().__init__()
        self.layer = layer if first == index else None
        self.first = first
        self.last = last
        # functions, because a copy of a model copies neither functions nor their variables
        self._measure = lambda *args: run.measure(*args)
        self._replaced = lambda: layer

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cut(args), _cut(kwargs)
        return self._measure(self, hidden_states, lambda x: self.layer(x, *args, **kwargs))  # type: ignore

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # models ask layers for the kind of their mask
            replaced = self.__dict__.get("_replaced")
            if replaced is None or name.startswith("__"):
                raise
            return getattr(replaced(), name)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _cut(value: Any) -> Any:
    """Detach arguments of a layer: if layers share keys, these have the freed graphs of earlier layers."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    if type(value) in (tuple, list):
        return type(value)(map(_cut, value))
    if isinstance(value, MutableMapping):
        value.update({key: _cut(part) for key, part in value.items()})  # layers write into it
    return value


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Return a key; layers with equal keys have equal costs."""
    key: list[Any] = [type(layer)]
    for name, p in layer.named_parameters():
        key.append((name, tuple(p.shape), p.dtype, p.requires_grad))
    for module in [layer, *layer.children()]:
        # the range of attention, and whether later layers take this layer's keys
        for setting in ("attention_type", "layer_type", "sliding_window", "store_full_length_kv"):
            key.append(str(getattr(module, setting, None)))
    return tuple(key)


def _batch(
    lengths: Sequence[int], targets: int, objective: Objective, packs: bool, shared: Sequence[int]
) -> MicroBatch:
    shape = (len(lengths), max(lengths))
    if packs:
        shape = (1, sum(lengths))
    return MicroBatch(
        tokens=torch.zeros(shape, dtype=torch.long),
        positions=torch.zeros(shape, dtype=torch.long),
        lengths=tuple(lengths) if packs else None,
        index=torch.zeros(targets, dtype=torch.long),
        targets=torch.zeros(targets, dtype=torch.long),
        sequence=torch.zeros(targets, dtype=torch.long),
        sequences=len(lengths),
        real_tokens=sum(lengths),
        columns={name: torch.zeros(targets) for name in objective.columns},
        shared=tuple(shared),
    )
