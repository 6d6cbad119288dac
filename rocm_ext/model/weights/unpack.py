"""Unpack the blocks of ggml's types into numbers, by transformers' functions where it has them.

In fp32, values equal those of llama.cpp's package ``gguf`` bit for bit. On a GPU, torch.compile turns a function into
one kernel that reads blocks and writes values; uncompiled, it reads and writes some 40 bytes per value.
"""

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType

import torch
from torch import Tensor

from rocm_ext.base.errors import UserError
from rocm_ext.machine import trials

# values and bytes of a block
BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84),
    "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74), "IQ2_S": (256, 82), "IQ3_XXS": (256, 98), "IQ3_S": (256, 110), "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136), "MXFP4": (32, 17), "IQ1_S": (256, 50), "IQ1_M": (256, 56), "TQ1_0": (256, 54),
    "TQ2_0": (256, 66), "NVFP4": (64, 36), "Q1_0": (128, 18), "Q2_0": (64, 18),
}  # fmt: skip
# values that are unpacked at a time: intermediate values stay in a CPU's cache (a third of the time), and are small
# compared with a GPU's memory
_PIECE = {"cpu": 1 << 18}
_LARGE_PIECE = 1 << 26
Unpack = Callable[[Tensor], Tensor]  # maps blocks [n, bytes] to values
_WHAT = "the compiled unpacking of GGUF blocks"
# twice the values of E2M1, because ggml's scales are half; its zeros have no sign
_E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)


# One operation, because the tables of some kinds are tensors, which torch.compile and plans must not look into
@torch.library.custom_op("rocm_ext::unpack", mutates_args=())
def unpack(packed: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Return the values of complete blocks, [..., bytes] uint8 -> [..., values], rounded once from fp32.

    ``kind`` is a key of :data:`BLOCKS`.
    """
    shape = _shape(packed, kind)
    if not packed.numel():
        return packed.new_empty(shape, dtype=dtype)
    values, size = BLOCKS[kind]
    blocks = packed.reshape(-1, size)
    kernel = _kernel(kind, dtype) if packed.is_cuda else None
    function = kernel or _function(kind)
    count = _PIECE.get(packed.device.type, _LARGE_PIECE) // values
    if kernel and len(blocks) <= count:
        return kernel(blocks).view(shape)
    out = torch.empty(len(blocks), values, dtype=dtype, device=packed.device)
    for begin in range(0, len(blocks), count):
        piece = slice(begin, begin + count)
        out[piece] = function(blocks[piece]).view(-1, values)
    return out.view(shape)


@unpack.register_fake
def _(packed: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(_shape(packed, kind), dtype=dtype)


def _shape(packed: Tensor, kind: str) -> tuple[int, ...]:
    values, size = BLOCKS[kind]
    *rows, nbytes = packed.shape
    return *rows, nbytes // size * values


@cache
def _kernel(kind: str, dtype: torch.dtype) -> Unpack | None:
    """Return a compiled function, or None if compiling does not work on this machine."""
    instead = "GGUF: blocks are unpacked step by step"
    works = trials.works("unpack", _WHAT, __name__, "GGUF: compiled unpacking", instead)
    return compiled(kind, dtype) if works else None


def compiled(kind: str, dtype: torch.dtype) -> Unpack:
    """Return a compiled function that unpacks blocks of a kind: [n, bytes] to [n, values] of ``dtype``."""
    function = _function(kind)
    values, _ = BLOCKS[kind]

    def unpacked(blocks: Tensor) -> Tensor:
        return function(blocks).reshape(-1, values).to(dtype)

    # torch.compile keeps eight graphs per code object: every kind and dtype gets a new one
    code = unpacked.__code__.replace(co_name=f"unpacked_{kind}_{dtype}")
    renamed = FunctionType(code, unpacked.__globals__, None, None, unpacked.__closure__)
    return torch.no_grad()(torch.compile(renamed, dynamic=True))


def trial(device: torch.device) -> str:
    """Compare compiled functions with the uncompiled ones. Return what differs, or an empty text."""
    rng = torch.Generator().manual_seed(0)
    pairs: list[tuple[trials.Call, trials.Call]] = []
    for kind, (_, size) in BLOCKS.items():
        # bytes below 120 make no infinite scales
        blocks = torch.randint(0, 120, (4096, size), generator=rng, dtype=torch.uint8)
        blocks = blocks.to(device)
        fast = partial(compiled(kind, torch.bfloat16), blocks)
        slow = partial(_plain, kind, blocks)
        pairs.append((fast, slow))
    failure = trials.compare(_WHAT, pairs, 1e-3)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if not failure and graphs < len(BLOCKS):
        failure = f"{_WHAT} has {graphs} graphs for {len(BLOCKS)} kinds"
    return failure


def _plain(kind: str, blocks: Tensor) -> Tensor:
    values, _ = BLOCKS[kind]
    return _function(kind)(blocks).reshape(-1, values).bfloat16()


def _function(kind: str) -> Unpack:
    """Return the function that unpacks blocks of a kind: one of this module, or transformers'."""
    if kind in _OURS:
        return _OURS[kind]
    try:
        from transformers.integrations.gguf import dequant
    except ImportError as error:
        raise UserError(
            f"a GGUF file's {kind} is unpacked by transformers from 5.24 on: pip install 'torchtune-rocm[transformers]'"
        ) from error
    number = next(number for number, name in dequant.GGML_NAME.items() if name == kind)
    return lambda blocks: dequant.dequantize(blocks, number)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The number in fp16 at byte ``at`` of each block: [n, 1]."""
    two_bytes = blocks[:, at : at + 2]
    return two_bytes.view(torch.float16).float()


def _fields(packed: Tensor, bits: int, width: int = 1) -> Tensor:
    """Numbers of ``bits`` bits: the lowest ones of ``width`` bytes, then the next ones: [n, bytes] -> [n, numbers]."""
    places = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    groups = packed.unflatten(1, (-1, 1, width))
    numbers = groups >> places[:, None] & (1 << bits) - 1  # [n, groups, 8 / bits, width]
    return numbers.flatten(1)


def _five_bits(low: Tensor, fifth: Tensor) -> Tensor:
    return _fields(low, 4, 16) | _fields(fifth, 1) << 4


def _q5_0(blocks: Tensor) -> Tensor:
    values = _five_bits(blocks[:, 6:], blocks[:, 2:6])
    return _half(blocks, 0) * (values.to(torch.int8) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    values = _five_bits(blocks[:, 8:], blocks[:, 4:8])
    return _half(blocks, 0) * values + _half(blocks, 2)


def _e2m1(numbers: Tensor) -> Tensor:
    levels = torch.tensor(_E2M1, device=numbers.device)
    return levels[numbers.int()]


def _mxfp4(blocks: Tensor) -> Tensor:
    exponents = blocks[:, :1].int() - 128
    half_scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    return half_scales * _e2m1(_fields(blocks[:, 1:], 4, 16))


def _nvfp4(blocks: Tensor) -> Tensor:
    scales = blocks[:, :4].int()  # E4M3 without a sign
    exponents = scales >> 3 & 15
    fractions = (scales & 7).float()
    significands = torch.where(exponents > 0, fractions + 8, fractions)
    half_scales = torch.ldexp(significands, exponents.clamp(min=1) - 11)
    half_scales = half_scales.masked_fill(scales == 127, 0.0)  # ggml has no NaN
    values = _e2m1(_fields(blocks[:, 4:], 4, 8))
    return half_scales[:, :, None] * values.view(-1, 4, 16)


def _q1_0(blocks: Tensor) -> Tensor:
    signs = _fields(blocks[:, 2:], 1).to(torch.int8) * 2 - 1
    return _half(blocks, 0) * signs


def _q2_0(blocks: Tensor) -> Tensor:
    numbers = _fields(blocks[:, 2:], 2).to(torch.int8)
    return _half(blocks, 0) * (numbers - 1)


def _tq2_0(blocks: Tensor) -> Tensor:
    numbers = _fields(blocks[:, :64], 2, 32).to(torch.int8)
    return _half(blocks, 64) * (numbers - 1)


def _trits(packed: Tensor, count: int) -> Tensor:
    """The first ``count`` digits of each byte, a fraction in base 3: [n, bytes] -> [n, count * bytes]."""
    powers = torch.tensor([1, 3, 9, 27, 81], device=packed.device)
    powers = powers[:count, None]
    rests = packed[:, None].int() * powers & 255  # [n, count, bytes]
    return (rests * 3 >> 8).flatten(1)


def _tq1_0(blocks: Tensor) -> Tensor:
    # three groups of bytes, each with its digits in turn
    first = _trits(blocks[:, :32], 5)
    second = _trits(blocks[:, 32:48], 5)
    last = _trits(blocks[:, 48:52], 4)
    numbers = torch.cat([first, second, last], dim=1)
    return _half(blocks, 52) * (numbers - 1)


_OURS: dict[str, Unpack] = {
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}


if __name__ == "__main__":
    trials.main(trial)
