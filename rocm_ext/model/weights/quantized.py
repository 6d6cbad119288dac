"""Frozen weights in formats of 4 and 8 bits, which behave like the dequantised tensors.

A :class:`Quantized` can replace any weight. An operation that needs its values dequantises it temporarily. So does a
backward pass, because autograd saves the quantised weight.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from rocm_ext.machine import trials
from rocm_ext.model.families import StoredFormat
from rocm_ext.model.names import replace_parameter
from rocm_ext.model.weights.unpack import BLOCKS, unpack

# OCP Microscaling Formats (MX) 1.0, table 5: a sign and E2M1. The first value of a byte is in its low bits
_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_E2M1 = [*_MAGNITUDES, *(-value for value in _MAGNITUDES)]
_PAIRS = [[_E2M1[byte % 16], _E2M1[byte // 16]] for byte in range(256)]
Block = tuple[int, int]  # rows and columns
Heads = tuple[int, int, int]  # a shape [a, b, width] of columns
_WHAT = "the product in FP8"
_PIECE = 1 << 23  # bytes of ggml's blocks that are checked at a time


# blocks and their unpacked values, by dtype and the blocks' id; the entry keeps the blocks alive, and so the id
_OPEN: ContextVar[dict[Any, tuple[Tensor, Tensor]] | None] = ContextVar("_OPEN", default=None)


@contextmanager
def unpacked_once() -> Iterator[None]:
    """Context that unpacks a weight's blocks once, at their first use."""
    token = _OPEN.set({})
    try:
        yield
    finally:
        _OPEN.reset(token)


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values of all bytes, [256, 2]; cached, because a graph copies nothing from the host."""
    return torch.tensor(_PAIRS, dtype=dtype, device=device)


class Quantized(Tensor):
    """A quantised weight [..., out, in]: values of 4 or 8 bits, and one scale per block.

    Args:
        packed: FP8, [..., out, in]; or MXFP4's pairs of values as uint8, [..., out, in / 32, 16]; or ggml's blocks,
            [..., out, bytes].
        scale: [..., blocks of out, blocks of in]: floating-point numbers, or exponents of 2 as uint8, plus 127. ggml's
            blocks contain their scales: [..., out, 0], or [..., out, 1], one more per row of NVFP4.
        block: rows and columns of a block; blocks at the end may be smaller.
        dtype: dtype of the dequantised tensor.
        transposed: whether the dequantised tensor is [..., in, out].
        multiplies: whether FP8 with one scale per row is multiplied without dequantising, see :func:`scaled_product`.
        kind: kind of ggml's blocks, a key of :data:`rocm_ext.model.weights.unpack.BLOCKS`.
        heads: shape [a, b, width] of the columns in ggml's blocks; the dequantised tensor has them as [b, a, width],
            because a block may hold several heads. None if the order is the same.
    """

    packed: Tensor
    scale: Tensor
    block: Block
    transposed: bool
    multiplies: bool
    kind: str
    heads: Heads | None

    @staticmethod
    def __new__(
        cls,
        packed: Tensor,
        scale: Tensor,
        block: Block,
        dtype: torch.dtype,
        transposed: bool = False,
        multiplies: bool = False,
        kind: str = "",
        heads: Heads | None = None,
    ) -> "Quantized":
        """Make a tensor subclass without storage."""
        shape = list(packed.shape)
        if kind:
            values, size = BLOCKS[kind]
            shape[-1] = shape[-1] // size * values
        elif packed.dtype == torch.uint8:
            shape = [*packed.shape[:-2], packed.shape[-2] * 32]
        if transposed:
            shape[-2:] = shape[:-3:-1]
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)  # type: ignore
        made.packed = packed
        made.scale = scale
        made.block = block
        made.transposed = transposed
        made.multiplies = multiplies
        made.kind = kind
        made.heads = heads
        return made

    def __init__(self, *_, **__) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Quantized({list(self.shape)}, {self.kind or self.packed.dtype}, blocks of {self.block})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return inner tensors and arguments, for torch.compile."""
        return ["packed", "scale"], self._rest()

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], rest, *_) -> "Quantized":
        """Undo :meth:`__tensor_flatten__`."""
        return Quantized(parts["packed"], parts["scale"], *rest)

    def _rest(self, dtype: torch.dtype | None = None, turned: bool = False) -> tuple[Any, ...]:
        return (
            self.block,
            dtype or self.dtype,
            self.transposed != turned,
            self.multiplies,
            self.kind,
            self.heads,
        )

    @property
    def stored_bytes(self) -> int:
        """Bytes of values and scales."""
        return self.packed.nbytes + self.scale.nbytes

    def scales(self) -> Tensor:
        """Return the scales in fp32."""
        if self.scale.is_floating_point():
            return self.scale.float()
        ones = torch.ones_like(self.scale, dtype=torch.float32)
        return torch.ldexp(ones, self.scale.int() - 127)

    def finite_part(self) -> Tensor:
        """Return numbers that are all finite if the weight is: scales, or extremes of ggml's blocks."""
        if self.kind:  # an unpacked weight of experts would take gigabytes
            rows = self.packed.flatten(0, -2)
            width = rows.shape[-1]
            extremes = []
            for piece in rows.split(max(_PIECE // width, 1)):
                extremes += unpack(piece, self.kind, self.dtype).aminmax()
            return torch.cat([torch.stack(extremes), self.scale.flatten()])
        scales = self.scales()
        if self.packed.dtype != torch.float8_e4m3fn:  # MXFP4 has no NaN
            return scales
        is_nan = self.packed.view(torch.uint8) & 0x7F == 0x7F
        return torch.where(is_nan.any(), torch.nan, scales)

    def with_parts(
        self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> "Quantized":
        """Return a copy with ``change`` applied to values and scales, for a tensor of ``dtype``."""
        return Quantized(change(self.packed), change(self.scale), *self._rest(dtype))

    def get_original_weight(self) -> Tensor:
        """Dequantise, with one rounding from fp32. torchao's NF4 has a method of this name."""
        values = self._unpacked() if self.kind else self._scaled()
        return values.mT if self.transposed else values

    def _unpacked(self) -> Tensor:
        """Return the values of ggml's blocks: [..., out, in]."""
        kept = _OPEN.get()
        key = id(self.packed), self.dtype
        if kept is not None and key in kept:
            _, values = kept[key]
        else:
            values = unpack(self.packed, self.kind, self.dtype)
            if self.scale.numel():  # NVFP4's values are exact in 16 bits, so this rounds once
                values.mul_(self.scale)
            if kept is not None:
                kept[key] = self.packed, values
        if self.heads is None:
            return values
        by_head = values.unflatten(-1, self.heads)  # [..., out, a, b, width]
        return by_head.transpose(-3, -2).flatten(-3)

    def _scaled(self) -> Tensor:
        """Return the values of FP8 or MXFP4, multiplied by their scales: [..., out, in]."""
        if self.packed.dtype == torch.uint8:
            # do not cache a fake table
            table = _pairs.__wrapped__ if isinstance(self.packed, FakeTensor) else _pairs
            numbers = self.packed.flatten().int()
            pairs = table(self.dtype, self.device).index_select(0, numbers)  # [pairs, 2]
            values = pairs.view(*self.packed.shape[:-2], -1)
        else:
            values = self.packed.to(self.dtype)
        scales = self.scales()
        blocks = values  # gets a dimension for the rows of a block, and one for its columns
        for dim, size in zip((-2, -1), self.block, strict=True):
            length = values.shape[dim]
            if length == scales.shape[dim] * size:
                blocks = blocks.unflatten(dim, (-1, size))
                scales = scales.unsqueeze(scales.ndim + 1 + dim)
            else:
                scales = scales.repeat_interleave(size, dim).narrow(dim, 0, length)
        blocks.mul_(scales)
        return values

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None) -> Any:  # type: ignore
        kwargs = kwargs or {}
        if func in _KEPT:
            kept = _KEPT[func](*args, **kwargs)
            if kept is not None:
                return kept
        if func._schema.is_mutable:
            for value, argument in zip(args, func._schema.arguments, strict=False):
                written = argument.alias_info and argument.alias_info.is_write
                if written and isinstance(value, Quantized):
                    raise RuntimeError(f"{func} cannot write into a quantised weight")
        args, kwargs = tree_map_only(Quantized, Quantized.get_original_weight, (args, kwargs))
        return func(*args, **kwargs)


# ---- operations on quantised weights; they return None where a dequantised weight is needed


def _to(weight: Quantized, *, dtype=None, device=None, **others) -> Quantized | None:
    if dtype not in (None, weight.dtype):
        return None
    return weight.with_parts(lambda part: part.to(device or part.device, copy=True))


def _like(weight: Quantized, *, dtype=None, device=None, **_) -> Quantized:
    return weight.with_parts(lambda part: torch.empty_like(part, device=device), dtype)


def _swap(weight: Quantized, first: int = 0, second: int = 1) -> Quantized | None:
    last = weight.ndim - 1
    swapped = {first % weight.ndim, second % weight.ndim}
    if swapped != {last - 1, last}:
        return None
    return Quantized(weight.packed, weight.scale, *weight._rest(turned=True))


def _select(weight: Quantized, dim: int, index: int) -> Quantized | None:
    if weight.ndim != 3 or dim % 3:
        return None
    return weight.with_parts(lambda part: part[index])


def _joined(join: Callable[..., Tensor], weights: Sequence[Any], dim: int) -> Quantized | None:
    """Join weights of one format along a dimension before their columns."""
    first = weights[0]
    if not isinstance(first, Quantized) or first.transposed or dim > first.ndim - 2:
        return None
    for weight in weights:
        if not isinstance(weight, Quantized) or weight._rest() != first._rest():
            return None
    packed = join([weight.packed for weight in weights], dim)
    scale = join([weight.scale for weight in weights], dim)
    return Quantized(packed, scale, *first._rest())


def _stack(weights: Sequence[Any], dim: int = 0) -> Quantized | None:
    return None if dim else _joined(torch.stack, weights, dim)


def _cat(weights: Sequence[Any], dim: int = 0) -> Quantized | None:
    first = weights[0]
    if not isinstance(first, Quantized):
        return None
    dim %= first.ndim
    if dim == first.ndim - 2:
        rows, _ = first.block
        if any(weight.shape[dim] % rows for weight in weights):
            return None
    return _joined(torch.cat, weights, dim)


def _mm(x: Tensor, weight) -> Tensor | None:
    if isinstance(x, Quantized) or not isinstance(weight, Quantized) or not weight.multiplies:
        return None
    return scaled_product(x, weight)


def _embedding(weight, tokens: Tensor, *_, **__) -> Tensor | None:
    """Unpack only the rows of ``tokens``."""
    if not isinstance(weight, Quantized) or not weight.kind or weight.transposed:
        return None
    return weight.with_parts(lambda part: part[tokens]).get_original_weight()


def _addmm(bias: Tensor, x: Tensor, weight, *, beta: float = 1, alpha: float = 1) -> Tensor | None:
    if beta != 1 or alpha != 1:
        return None
    out = _mm(x, weight)
    return None if out is None else out.add_(bias)


_aten = torch.ops.aten
_KEPT: dict[Any, Callable[..., Tensor | None]] = {
    _aten.detach.default: lambda weight: weight.with_parts(torch.detach),
    _aten.alias.default: lambda weight: weight.with_parts(torch.detach),
    _aten.clone.default: lambda weight, **_: weight.with_parts(torch.clone),
    _aten.empty_like.default: _like,
    _aten._to_copy.default: _to,
    _aten.t.default: _swap,
    _aten.transpose.int: _swap,
    _aten.select.int: _select,
    _aten.stack.default: _stack,
    _aten.cat.default: _cat,
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.embedding.default: _embedding,
}


# ---- quantised weights from files, and from weights in 16 bits


def stored(name: str, packed: Tensor, scale: Tensor, block: Block = (0, 0)) -> Quantized:
    """Return the weight that a file stores as values and scales; raise a ValueError if their shapes do not fit.

    Args:
        name: the weight's name, for the message.
        packed: see :class:`Quantized`. MXFP4's are experts' weights, which models expect as [..., in, out].
        scale: see :class:`Quantized`; or one scale for all values, or one per row.
        block: rows and columns that share a scale by ``config.json``, or 0 if all do.
    """
    if packed.dtype == torch.uint8:
        if packed.shape[:-1] != scale.shape or packed.shape[-1] != 16:
            raise ValueError(
                f"{name} has blocks {list(packed.shape)} and scales {list(scale.shape)}"
            )
        return Quantized(packed, scale, (1, 32), torch.bfloat16, transposed=True)
    if scale.ndim < 2:
        scale = scale.reshape(-1, 1)
    *before, rows, columns = packed.shape
    for high, wide in (block, (0, 0), (1, 0)):  # one scale for all, or one per row, is unambiguous
        sides = high or rows or 1, wide or columns or 1
        if list(scale.shape) == [*before, *_counts(rows, columns, sides)]:
            return Quantized(packed, scale, sides, torch.bfloat16)
    stated = f", with weight_block_size {list(block)}" if any(block) else ""
    raise ValueError(
        f"{name} has values {list(packed.shape)} and scales {list(scale.shape)}{stated}"
    )


def _counts(rows: int, columns: int, block: Block) -> Block:
    """Return the numbers of blocks along both sides of a matrix; the last ones may be smaller."""
    high, wide = block
    return math.ceil(rows / high), math.ceil(columns / wide)


def of_blocks(
    packed: Tensor, kind: str, heads: Heads | None = None, scale: Tensor | None = None
) -> Quantized:
    """Return the weight of ggml's blocks, ``packed`` [..., out, bytes]; for arguments see :class:`Quantized`."""
    if scale is None:
        scale = packed.new_empty(*packed.shape[:-1], 0)
    values, _ = BLOCKS[kind]
    return Quantized(packed, scale, (1, values), torch.float32, kind=kind, heads=heads)


def fp8_rows(weight: Tensor, transposed: bool = False, multiplies: bool = False) -> Quantized:
    """Quantise a weight [..., out, in], or [..., in, out] if ``transposed``, to FP8.

    A row's scale maps its largest value to the format's largest. For ``multiplies`` see :class:`Quantized`.
    """
    rows = weight.mT.contiguous() if transposed else weight  # [..., out, in]
    values, scale = _by_rows(rows)
    block = 1, rows.shape[-1]
    return Quantized(values, scale, block, weight.dtype, transposed, multiplies)


def _by_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return values in the device's FP8, and one scale per row."""
    kind = torch.float8_e4m3fn
    if values.is_cuda and torch.version.hip:
        arch = torch.cuda.get_device_properties(values.device).gcnArchName
        if arch.startswith("gfx94"):  # CDNA 3; CDNA 4 has the standard's
            kind = torch.float8_e4m3fnuz
    largest = values.abs().amax(-1, keepdim=True).float()
    highest = torch.finfo(kind).max
    scale = torch.where(largest == 0, 1.0, largest / highest)  # NaN stays, for finite_part
    return (values / scale).to(kind), scale


# the format of `quantize_base: fp8`: one scale per row; routers are not quantised
FP8_ROWS = StoredFormat("fp8", (1, 0), ("gate", "router", "shared_expert_gate"))


def stand_in(weight: Tensor, kind: str, block: Block, transposed: bool = False) -> nn.Parameter:
    """Return ``weight``, a parameter on the meta device, in the format ``fp8`` or ``mxfp4``.

    ``block`` is the rows and columns of a block, 0 for all. For ``transposed`` see :class:`Quantized`.
    """
    *before, rows, columns = weight.mT.shape if transposed else weight.shape
    high, wide = block
    block = high or rows, wide or columns
    scales = _counts(rows, columns, block)
    shape = [*before, rows, columns]
    dtype = torch.float8_e4m3fn
    scale_dtype = torch.float32
    if kind == "mxfp4":
        shape = [*before, rows, scales[1], 16]
        dtype = scale_dtype = torch.uint8
    packed = torch.empty(shape, dtype=dtype, device="meta")
    scale = torch.empty(*before, *scales, dtype=scale_dtype, device="meta")
    return frozen(Quantized(packed, scale, block, weight.dtype, transposed))


def frozen(tensor: Tensor) -> nn.Parameter:
    """Return ``tensor`` as a parameter that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)


def expect_blocks(decoder, blocks: Mapping[str, Quantized]) -> Any:
    """Replace parameters of ``decoder`` by its GGUF files' ``blocks``, by Hugging Face's names; return ``decoder``.

    Both are on the meta device.
    """
    for name, parameter in list(decoder.named_parameters()):
        if name.endswith((".lora_a.weight", ".lora_b.weight")):
            continue
        stored = blocks.get(decoder.names.published(name))
        if stored is not None and stored.shape == parameter.shape:  # loading refuses others
            weight = stored.with_parts(torch.clone, parameter.dtype)
            replace_parameter(decoder, name, frozen(weight))
    return decoder


def expect(decoder, form: StoredFormat | None, quantizes: bool = False) -> Any:
    """Put a :func:`stand_in` where the files of ``decoder`` have quantised weights; return ``decoder``.

    With ``quantizes`` the files have 16 bits, and loading quantises them.
    """
    if form is None:
        return decoder
    from torchtune.modules.peft import DoRALinear, LoRALinear  # here, because it takes a second

    decoder.quantizes = quantizes
    names = {module: name for name, module in decoder.named_modules()}
    for below, module in decoder.layers.named_modules():
        if below.endswith((".lora_a", ".lora_b")):
            continue
        # transformers' mark of fused experts
        transposed = getattr(module, "is_transposed", None)
        linear = form.kind == "fp8" and isinstance(module, nn.Linear | LoRALinear | DoRALinear)
        for key, parameter in list(module.named_parameters(recurse=False)):
            fused = transposed is not None and parameter.ndim == 3
            if not fused and not (linear and key == "weight"):
                continue
            published = decoder.names.published(f"{names[module]}.{key}")
            if not form.skips(published.removesuffix(".weight")):
                made = stand_in(parameter, form.kind, form.block, bool(transposed))
                setattr(module, key, made)
    return decoder


# ---- products in FP8


def scaled_product(x: Tensor, weight: Quantized) -> Tensor | None:
    """Multiply x [n, in] with an FP8 weight; x also gets one scale per row.

    The result is None for shapes that torch does not take. Where the sum is over the weight's rows, as for the gradient
    of an input, x is first multiplied by their scales.
    """
    size = 16  # divides the weight's sides in torch._scaled_mm
    stored = weight.packed  # [rows, columns]
    fits = all(side % size == 0 for side in stored.shape)
    if x.dtype != torch.bfloat16 or not len(x) or not fits:
        return None
    scale = weight.scale.t()  # [1, rows]
    if weight.transposed:
        values = stored.t()
    else:
        x = x * scale.to(x.dtype)
        values = stored.t().contiguous().t()
        scale = scale.new_ones(1, stored.shape[1])
    rows, scales = _by_rows(x)
    return torch._scaled_mm(
        rows, values, scale_a=scales, scale_b=scale.contiguous(), out_dtype=x.dtype
    )


def scaled_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``device`` multiplies in FP8 where a model's dtype is ``dtype``."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    used = "quantize_base=fp8: products in FP8"
    instead = "quantize_base=fp8: weights are dequantised"
    return trials.works("scaled_mm", _WHAT, __name__, used, instead)


def trial(device: torch.device) -> str:
    """Compare products in FP8 with dequantised weights. Return what differs, or an empty text."""
    rng = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(device, torch.bfloat16)

    def dequantised(x: Tensor, weight: Quantized) -> Tensor:
        return x @ weight.get_original_weight()

    x = random(2048, 1024)
    grad = random(2048, 1536)
    weight: Any = fp8_rows(random(1536, 1024), multiplies=True)
    pairs: list[Any] = []
    for call in ((x, weight.t()), (grad, weight)):
        fast = partial(scaled_product, *call)
        slow = partial(dequantised, *call)
        pairs.append((fast, slow))
    # rounding x to FP8 changes a product by 2.6 %, and the weight's error is in both
    return trials.compare(_WHAT, pairs, 0.04)


if __name__ == "__main__":
    trials.main(trial)
