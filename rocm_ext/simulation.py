"""What a training step costs: its parts are run on fake tensors, which have shapes and no memory.

The very code that trains is run, so a change of a layer changes the estimate with it. A layer and the loss
take a fraction of a second, however large the model.
"""

import copy
import weakref
from collections.abc import Iterable, Iterator, Sequence
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

from rocm_ext.attention import Lengths, PackedAttention
from rocm_ext.lora import adapters
from rocm_ext.loss import LinearCrossEntropyLoss

_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_: sdpa_flop_count(q, k, v),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda g, q, k, v, *_: sdpa_backward_flop_count(g, q, k, v),
}


@dataclass(frozen=True)
class Operation:
    """One kernel: its floating-point operations, and the bytes that it reads and writes."""

    flops: int
    bytes: int


class Tally(TorchDispatchMode):
    """Counts what runs under it: operations, and bytes of the tensors that are alive.

    Memory that a kernel takes for itself while it runs is not seen, nor is that of tensors made before.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self.operations: list[Operation] = []

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Do not count ``tensors``, which were there before."""
        self._sizes.update((t.untyped_storage()._cdata, 0) for t in tensors)

    def restart(self) -> None:
        """Forget operations and the peak so far; what is alive stays counted."""
        self.peak, self.operations = self.now, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs, results = (_tensors(part) for part in ((args, kwargs), out))
        known = {t.untyped_storage()._cdata for t in inputs}
        view = not func._schema.is_mutable and all(t.untyped_storage()._cdata in known for t in results)
        if not view and "empty" not in func._schema.name:
            self.operations.append(Operation(_flops(func, args, kwargs, out), sum(map(_bytes, (*inputs, *results)))))
        for tensor in results:
            self._add(tensor)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
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


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    name = func._overloadpacket.__name__.rstrip("_")  # addmm_ costs what addmm costs
    if attention := _ATTENTION.get(name):
        return int(attention(*(t.shape for t in args if isinstance(t, Tensor)))) // 2  # causal
    count: Any = flop_registry.get(getattr(torch.ops.aten, name, None))
    return int(count(*args, **kwargs, out_val=out)) if count else 0


@dataclass(frozen=True)
class LayerCosts:
    """One transformer layer, for one micro-batch.

    Attributes:
        entry: bytes of its input, all that a checkpointed layer keeps.
        kept: bytes beside its input that a layer keeps for the backward pass.
        working: bytes that its backward pass needs at its peak, beside those.
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
    """Final norm, output layer and loss of one micro-batch, forward and backward.

    Attributes:
        working: bytes at the peak, beside the hidden states that come in.
        operations: kernels.
    """

    working: int
    operations: list[Operation]


def simulate_layer(layer: nn.Module, width: int, lengths: Sequence[int], dtype: torch.dtype, fused: bool) -> LayerCosts:
    """Run a layer forward and backward.

    Args:
        layer: of a torchtune decoder, without weights; takes packed rows where its attention can.
        width: of hidden states.
        lengths: tokens of each sequence in the micro-batch.
        dtype: of weights and activations.
        fused: whether attention has a fused kernel; without one the scores are kept.
    """
    packed = isinstance(getattr(layer, "attn", None), PackedAttention)
    shape = (1, sum(lengths)) if packed else (len(lengths), max(lengths))
    with _fake(layer, fused) as (fake, tally):
        x = torch.empty(*shape, width, dtype=dtype, requires_grad=True)
        entry = tally.now
        positions = torch.zeros(shape, dtype=torch.long)
        tally.restart()
        y: Tensor = fake(x, mask=Lengths(tuple(lengths)) if packed else None, input_pos=positions)
        kept, forward = tally.now - entry - _bytes(y), tally.operations
        grad = torch.empty_like(y)
        tally.restart()
        held = tally.now - _bytes(grad)
        y.backward(grad)
    return LayerCosts(entry, kept, tally.peak - held, forward, tally.operations)


def simulate_loss(
    norm: nn.Module,
    vocabulary: int,
    loss: LinearCrossEntropyLoss,
    lengths: Sequence[int],
    targets: int,
    dtype: torch.dtype,
) -> LossCosts:
    """Run final norm, a frozen output layer and the loss, and their gradients.

    Args:
        norm: of a torchtune decoder, without weights.
        vocabulary: rows of the output layer.
        loss: from hidden states; with ``chunk_tokens`` set.
        lengths: tokens of each sequence in the micro-batch.
        targets: those of its tokens that have a label.
        dtype: of weights and activations.
    """
    (width,) = norm.get_parameter("scale").shape
    output = nn.Linear(width, vocabulary, bias=False, device="meta", dtype=dtype).requires_grad_(False)
    with _fake(nn.ModuleList([norm, output]), True) as ((fake_norm, fake_output), tally):
        x = torch.empty(1, sum(lengths), width, dtype=dtype, requires_grad=True)
        index, labels = (torch.zeros(targets, dtype=torch.long) for _ in range(2))
        held = tally.now
        tally.restart()
        loss(fake_output, fake_norm(x).flatten(0, 1)[index], labels).backward()
    return LossCosts(tally.peak - held, tally.operations)


@contextmanager
def _fake(module: nn.Module, fused: bool) -> Iterator[tuple[Any, Tally]]:
    """A copy of ``module`` on fake CPU tensors, in training, and a tally of what it does."""
    fake = copy.deepcopy(module).to("meta").train()
    # gfx906 and older: torch's math path. The CPU's fused kernel keeps what a GPU's keeps.
    backends = [SDPBackend.FLASH_ATTENTION] * fused + [SDPBackend.MATH]
    with FakeTensorMode(), sdpa_kernel(backends):
        for _, layer in adapters(fake):
            if layer._quantize_base:  # de-quantised for each product
                layer.weight = nn.Parameter(layer.weight.new_empty(layer.weight.shape), requires_grad=False)
                layer._quantize_base = False
        fake._apply(lambda t: torch.empty(t.shape, dtype=t.dtype))
        trainable = [p for p in fake.parameters() if p.requires_grad]
        for parameter in trainable:
            parameter.grad = torch.zeros_like(parameter)
        tally = Tally()
        tally.ignore([*fake.parameters(), *fake.buffers(), *(p.grad for p in trainable if p.grad is not None)])
        with tally:
            yield fake, tally
