"""Measure the costs of a training step by running its parts on fake tensors, which have shapes but no memory.

This runs the code that trains, so the estimate follows every change of a layer. A layer and the loss take a
fraction of a second for models of any size.
"""

import copy
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from rocm_ext.model.lora import ExpertLora, adapters
from rocm_ext.model.norm import HAS_KERNEL, FusedRMSNorm

_ATTENTION: dict[str, Any] = {
    "_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_: sdpa_flop_count(q, k, v),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda g, q, k, v, *_: sdpa_backward_flop_count(g, q, k, v),
}


@dataclass(frozen=True)
class Operation:
    """One kernel.

    Attributes:
        flops: floating-point operations of matrix products; 0: another kernel, bound by memory.
        bytes: read and written.
        attention: whether it is a fused attention kernel.
    """

    flops: int
    bytes: int
    attention: bool = False


class CostCounter(TorchDispatchMode):
    """Counts operations and the bytes of live tensors while it is active.

    It does not see a kernel's own workspace. Tensors that existed before count once an operation returns
    them; :meth:`ignore` excludes them. Tensors on the meta device have no bytes; fake ones stand for some.

    Attributes:
        now: bytes of live tensors.
        peak: maximum of ``now`` since the last :meth:`restart`.
        operations: kernels since the last :meth:`restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self.operations: list[Operation] = []

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Exclude ``tensors``, which existed before, from the count."""
        self._sizes.update((t.untyped_storage()._cdata, 0) for t in tensors)

    def restart(self) -> None:
        """Clear the operations and set the peak to the bytes that are live now."""
        self.peak, self.operations = self.now, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs, results = (_tensors(part) for part in ((args, kwargs), out))
        known = {t.untyped_storage()._cdata for t in inputs}
        view = not func._schema.is_mutable and all(t.untyped_storage()._cdata in known for t in results)
        if not view and "empty" not in func._schema.name:
            moved = sum(map(_bytes, (*inputs, *results)))
            self.operations.append(Operation(_flops(func, args, kwargs, out), moved, _name(func) in _ATTENTION))
        for tensor in results:
            self._add(tensor)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or tensor.device.type == "meta":
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def _tensors(part: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _name(func: Any) -> str:
    return func._overloadpacket.__name__.rstrip("_")  # addmm_ costs the same as addmm


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    name = _name(func)
    if attention := _ATTENTION.get(name):
        return int(attention(*(t.shape for t in args if isinstance(t, Tensor)))) // 2  # causal
    count: Any = flop_registry.get(getattr(torch.ops.aten, name, None))
    return int(count(*args, **kwargs, out_val=out)) if count else 0


@dataclass(frozen=True)
class LayerCosts:
    """Costs of one transformer layer for one micro-batch.

    Attributes:
        entry: bytes of its input; a checkpointed layer keeps nothing else.
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


@dataclass(frozen=True)
class LossCosts:
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
        attention: False: the layer keeps the attention scores.
        norm: False: RMSNorm is several operations.
    """

    attention: bool
    norm: bool

    @classmethod
    def on(cls, device: torch.device, bf16: bool, attention: str) -> "Kernels":
        """Return this torch's fused kernels on ``device``.

        Args:
            device: the target.
            bf16: whether it has bf16; GPUs without it (gfx906 and older) have no fused attention.
            attention: the kernel that the config names; see :func:`rocm_ext.model.sdpa.sdpa`.
        """
        cuda = device.type == "cuda"
        fused = bf16 or not cuda if attention == "auto" else attention in ("flash", "efficient")
        return cls(attention=fused, norm=cuda and HAS_KERNEL)


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
    for _, layer in adapters(fake):
        if not isinstance(layer, ExpertLora) and layer._quantize_base:  # each product dequantises the weight
            shape, dtype = layer.weight.shape, layer.weight.dtype
            layer.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
            layer._quantize_base = False
    for norm in fake.modules():
        if kernels.norm and type(norm) is FusedRMSNorm:
            norm.__class__ = _KernelNorm
    fake = fake.to("meta").train()
    for part in fake.modules():
        if vars(part).get("kernel") in ("flash", "efficient"):  # a CPU has no efficient kernel
            part.kernel = "fused"  # type: ignore[assignment]
    # gfx906 uses torch's math path. The CPU's fused kernel keeps the same tensors as a GPU's.
    backends = [SDPBackend.FLASH_ATTENTION] * kernels.attention + [SDPBackend.MATH]
    with FakeTensorMode(), sdpa_kernel(backends):
        fake._apply(lambda t: torch.empty(t.shape, dtype=t.dtype))
        trainable = [p for p in fake.parameters() if p.requires_grad]
        for parameter in trainable:
            parameter.grad = torch.zeros_like(parameter)
        tally = CostCounter()
        tally.ignore([*fake.parameters(), *fake.buffers(), *(p.grad for p in trainable if p.grad is not None)])
        with tally:
            yield fake, tally
